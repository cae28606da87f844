"""`shiftwork migrate`: the tables and verbs, put into a database."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from shiftwork.cli.asking import database_options, place
from shiftwork.printable import clean
from shiftwork.settings import Settings

if TYPE_CHECKING:
    import psycopg

CODES = (
    "Exit codes: 0 done, or nothing to do; 1 failed, or (with --check) something is missing; 2 wrong usage."
)


@click.command(epilog=CODES)
@database_options
@click.option("--plan", "mode", flag_value="plan", help="Say what would be done, and do nothing.")
@click.option(
    "--sql", "mode", flag_value="sql", help="Print all of it as a script for psql; needs no database."
)
@click.option("--check", "mode", flag_value="check", help="Exit with 1 if anything is missing; do nothing.")
@click.option("--roles", is_flag=True, help="Make the roles owner, producer, worker, operator, viewer, too.")
def migrate(settings: Settings, mode: str | None, roles: bool) -> None:
    """Install the schema in a database, or bring it up to date.

    Safe to run again, from several places at once, and after one was killed: it goes on with what is missing.
    Waits for no lock on a table longer than 5 seconds.
    """
    from shiftwork import migrate as installing  # noqa: PLC0415  -- --help needs none of it

    if mode == "sql":
        click.echo(installing.script(settings.schema, with_roles=roles))
        return
    with connected(settings) as (connection, where):
        if mode is None:
            done = installing.migrate(connection, settings.schema, with_roles=roles)
            for line in done:
                click.echo(f"• {clean(line)}")
            ending = "Up to date" if done else "Nothing to do"
            click.echo(f"{ending}: {where} has protocol {installing.PROTOCOL}.")
            return
        pending = installing.pending(connection, settings.schema)
        missing = [f"apply {step.name}" for step in pending.migrations]
        if pending.functions:
            missing.append(f"{'re-create' if pending.installed else 'create'} the functions")
        if roles and mode == "plan":
            missing.append("grant the roles")
        for line in missing:
            click.echo(f"• {line}")
        if not missing and pending.installed > installing.PROTOCOL:
            click.echo(f"Nothing to do: {where} has protocol {pending.installed}, of a newer shiftwork.")
        elif not missing:
            click.echo(f"Nothing to do: {where} has protocol {installing.PROTOCOL}.")
        elif mode == "check":
            raise click.ClickException(f"{where} lacks the above. Run: shiftwork migrate")


@contextlib.contextmanager
def connected(settings: Settings) -> Iterator[tuple[psycopg.Connection[Any], str]]:
    """A connection to migrate on, and which database that is."""
    from shiftwork import embedded  # noqa: PLC0415
    from shiftwork.database import connect  # noqa: PLC0415

    with contextlib.ExitStack() as stack:
        where = place(settings)
        if settings.dsn is None:
            server = stack.enter_context(embedded.start())
            settings = dataclasses.replace(settings, dsn=server.url)
        yield stack.enter_context(connect(settings)), where
