"""`shiftwork migrate`: the tables and verbs, put into a database."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from shiftwork.cli.asking import database_options, json_option, place
from shiftwork.cli.printing import print_json
from shiftwork.printable import clean
from shiftwork.settings import Settings

if TYPE_CHECKING:
    import psycopg

    from shiftwork.migrate import Pending

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
@json_option
def migrate(settings: Settings, mode: str | None, roles: bool, as_json: bool) -> None:
    """Install the schema in a database, or bring it up to date.

    Safe to run again, from several places at once, and after one was killed: it goes on with what is missing.
    Waits for no lock on a table longer than 5 seconds.
    """
    from shiftwork import migrate as installing  # noqa: PLC0415  -- --help needs none of it

    if mode == "sql":
        if as_json:
            raise click.UsageError("--sql is a script for psql, and not JSON.")
        click.echo(installing.script(settings.schema, with_roles=roles))
        return
    with connected(settings) as (connection, where):
        if mode is None:
            steps = installing.migrate(connection, settings.schema, with_roles=roles)
            installed = installing.PROTOCOL
        else:
            pending = installing.pending(connection, settings.schema)
            steps, installed = _missing(pending), pending.installed
            if roles and mode == "plan":
                steps.append("grant the roles")
    if as_json:
        print_json({"steps": steps, "installed": installed, "protocol": installing.PROTOCOL})
    else:
        for line in steps:
            click.echo(f"• {clean(line)}")
        if mode is None or not steps:
            ending = "Up to date" if steps else "Nothing to do"
            newer = ", of a newer shiftwork" if installed > installing.PROTOCOL else ""
            click.echo(f"{ending}: {where} has protocol {installed}{newer}.")
    if mode == "check" and steps:
        raise click.ClickException(f"{where} lacks the above. Run: shiftwork migrate")


def _missing(pending: Pending) -> list[str]:
    """What would be done."""
    steps = [f"apply {step.name}" for step in pending.migrations]
    if pending.functions:
        steps.append(f"{'re-create' if pending.installed else 'create'} the functions")
    return steps


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
