"""`shiftwork table`: what a table of somebody's own needs to be worked, and putting back what was lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

import click

from shiftwork.cli.asking import Refused, duration, json_option, told
from shiftwork.cli.printing import clean_lines, json_line, print_json
from shiftwork.errors import ConfigurationError, DatabaseError, DatabaseUnavailable
from shiftwork.printable import clean
from shiftwork.settings import format_duration

if TYPE_CHECKING:
    from shiftwork.database import Execute, Rows
    from shiftwork.stores.fitting import Problem
    from shiftwork.stores.table import Table
    from shiftwork.tables import TableStore


@click.group()
def table() -> None:
    """Fit a table of your own for workers.

    STORE is module:name, or path/to/file.py:name, of a shiftwork.TableStore.
    """


@table.command()
@click.argument("where", metavar="STORE")
@click.option("--apply", "applied", is_flag=True, help="Do it, in one transaction; else it is only printed.")
@click.option("--dsn", metavar="URL", help="The database, if it is not what the store says.")
def install(where: str, applied: bool, dsn: str | None) -> None:
    """Print what STORE needs in the database: the columns that are missing, indexes and triggers. All of it can be run again.

    Example: shiftwork table install app:store | psql
    """
    from shiftwork.database import connect, executing  # noqa: PLC0415  -- --help needs none of it
    from shiftwork.stores.fitting import installation  # noqa: PLC0415

    store = _found(where, dsn)
    with told(), store, connect(store.client.settings) as connection:
        made, rows = _looked_at(store, executing(connection, "", lent=False))
        if not any(row["what"] == "table" for row in rows):
            raise click.ClickException(f"there is no table {made.layout.table}; create it first")
        statements = installation(made)
        for statement in statements:
            click.echo(clean_lines(statement))
        if applied:
            with connection.transaction():
                for statement in statements:
                    connection.execute(statement.encode())
            click.echo(f"-- {len(statements)} statements applied", err=True)


@table.command()
@click.argument("where", metavar="STORE")
@click.option("--dsn", metavar="URL", help="The database, if it is not what the store says.")
@json_option
@click.pass_context
def check(context: click.Context, /, where: str, dsn: str | None, as_json: bool) -> None:
    """See whether a worker can work the table of STORE: all that does not fit, each with a code and a cure.

    It ends with 1 if a worker would refuse to begin. Nothing is changed.
    """
    from shiftwork.database import connect, executing  # noqa: PLC0415  -- --help needs none of it
    from shiftwork.stores.fitting import KINDS  # noqa: PLC0415

    store = _found(where, dsn)
    with told(), store, connect(store.client.settings) as connection:
        found = list(problems(store, executing(connection, "", lent=False)))
    failed = any(one.is_error for one in found)
    if as_json:
        members = [
            {
                "code": one.code,
                "severity": KINDS[one.code][0],
                "message": one.message,
                "cure": KINDS[one.code][1],
            }
            for one in found
        ]
        print_json({"ok": not failed, "problems": members})
    else:
        for one in found:
            severity, cure = KINDS[one.code]
            click.echo(clean_lines(f"{one.code} {severity}: {one.message}").replace("\n", "\n    "))
            click.echo(f"    → {cure}")
        click.echo("a worker cannot work it" if failed else "a worker can work it")
    context.exit(1 if failed else 0)


@table.command()
@click.argument("where", metavar="STORE")
@click.option("--every", type=duration, help="Go on until interrupted, and look so often: 30s.")
@click.option("--dsn", metavar="URL", help="The database, if it is not what the store says.")
@json_option
def reset(where: str, every: timedelta | None, dsn: str | None, as_json: bool) -> None:
    """Put back rows whose worker fell silent: they run again, or have failed if that happened too often.

    Workers do this for each other. As a process of its own (--every) it goes on while there is no worker, and waits for a
    database that is away.
    """
    store, pause = _found(where, dsn), threading.Event()
    with told(), store:
        while True:
            try:
                answers = store.reset()
            except DatabaseUnavailable as error:
                if every is None:
                    raise
                answers = {}
                click.echo(clean(f"the database is away, and it is tried again: {error}"), err=True)
            for job, (answer, age) in answers.items():
                silent = format_duration(timedelta(seconds=round(age.total_seconds())))
                if as_json:
                    click.echo(json_line({"job": job, "answer": answer, "silent": age.total_seconds()}))
                elif answer == "refused":
                    click.echo(
                        f"job {job} cannot be put back: a trigger or constraint of the table refuses it"
                    )
                else:
                    click.echo(f"job {job} is {answer}; its worker had been silent for {silent}")
            if every is None:
                break
            pause.wait(every.total_seconds())
    if not as_json:
        many = sum(answer != "refused" for answer, _ in answers.values())
        click.echo(f"{many} job{'s' * (many != 1)} put back.")


def problems(store: TableStore, execute: Execute) -> Iterator[Problem]:
    """What does not fit: columns first, then whether what is claimed can be asked at all, and how."""
    from shiftwork.stores import fitting  # noqa: PLC0415

    try:
        made, rows = _looked_at(store, execute)
    except ConfigurationError as error:  # the handler and the record do not fit each other
        yield fitting.Problem("SW-506", str(error))
        return
    found = fitting.problems(made, rows)
    yield from found
    if any(one.is_error for one in found):
        return
    [trial] = made.accept(rows)
    try:
        execute(trial)
    except DatabaseUnavailable:
        raise
    except DatabaseError as error:
        yield fitting.Problem("SW-507", f"what is claimed cannot be asked: {error}")
        return
    if not fitting.is_indexed(made, rows):
        yield fitting.Problem("SW-512", f"no index of {made.layout.table} has what waits in its order")


def _looked_at(store: TableStore, execute: Execute) -> tuple[Table, Rows]:
    made = store.store(store.settings)
    rows = execute(made.installed())
    made.learn(rows)
    return made, rows


def _found(where: str, dsn: str | None) -> TableStore:
    from shiftwork.cli.finding import NotFound, find  # noqa: PLC0415  -- --help needs none of it
    from shiftwork.tables import TableStore  # noqa: PLC0415

    try:
        store = find(where, TableStore)
    except NotFound as error:
        raise (Refused if error.mistyped else click.ClickException)(clean_lines(error)) from None
    with told():
        store.close()
        if dsn is not None:
            store.settings = store.settings.changed(dsn=dsn)
    return store
