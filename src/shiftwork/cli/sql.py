"""`shiftwork sql`: what makes work with jobs from SQL as comfortable as from Python."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

import click

from shiftwork.cli.asking import database_options, opened
from shiftwork.errors import InvalidArgument
from shiftwork.job import check_merge, check_name
from shiftwork.settings import Settings

ARGUMENT = re.compile(r"(?P<name>[^\s?]+)(?P<optional>\?)?\s+(?P<kind>\S.*)", re.DOTALL)
WORD = r'(?:[a-z_]\w*|"[^"]+")'
KIND = re.compile(
    rf"{WORD}(?:\.{WORD})?(?: [a-z]\w*)*(?:\(\d+(?:, ?-?\d+)?\))?(?: [a-z]\w*)*(?:\[\d*\])*", re.IGNORECASE
)
BODY = "\n  select sent.id from <call> as sent\n"


@dataclass(frozen=True)
class Argument:
    """One argument of a function, which goes into the payload under its name."""

    name: str
    kind: str
    optional: bool

    @classmethod
    def read(cls, text: str) -> Argument:
        """From `name type`, or `name? type`."""
        found = ARGUMENT.fullmatch(text.strip())
        if found is None or not KIND.fullmatch(found["kind"].strip()):
            raise InvalidArgument(f"{text!r} is no argument; write it like 'ids int[]' or 'since? date'")
        return cls(found["name"], found["kind"].strip(), found["optional"] is not None)


@click.group()
def sql() -> None:
    """Functions in SQL around jobs."""


@sql.command("enqueue-function")
@database_options
@click.argument("task")
@click.argument("arguments", nargs=-1)
@click.option("--function", "called", metavar="NAME", help="Its name, as in stats.enqueue_derive_units.")
@click.option(
    "--merge",
    "merges",
    metavar="ARGUMENT=OPERATOR",
    multiple=True,
    help="Merge it into a job that still waits: ids=union, or one operator for all.",
)
@click.option(
    "--key",
    "keys",
    metavar="ARGUMENT",
    multiple=True,
    help="One waiting job for each value of it; what comes meanwhile is merged, or else dropped.",
)
@click.option("--apply", is_flag=True, help="Make it in the database, instead of printing it.")
def enqueue_function(
    settings: Settings,
    *,
    task: str,
    arguments: Sequence[str],
    called: str | None,
    merges: Sequence[str],
    keys: Sequence[str],
    apply: bool,
) -> None:
    """Write a function that enqueues jobs of TASK, with arguments that have a type.

    Each of ARGUMENTS is a name and a type; with a question mark after the name it may be left out. Without any, the function
    takes the payload as it is.

    Example: shiftwork sql enqueue-function derive_units 'ids int[]' 'since? date' --merge ids=union --merge since=min
    """
    read = [Argument.read(one) for one in arguments]
    text = written(settings.schema, task, read, called=called, merges=merges, keys=keys)
    if not apply:
        click.echo(text, nl=False)
        return
    from shiftwork.database import connect  # noqa: PLC0415  -- printing needs none of it

    with opened(settings) as app, connect(app.client.settings) as connection:
        connection.execute(text.encode())
    click.echo(f"{_called(task, called)} is made.")


def written(
    schema: str,
    task: str,
    arguments: Sequence[Argument],
    *,
    called: str | None,
    merges: Sequence[str],
    keys: Sequence[str],
) -> str:
    """The function, as SQL."""
    check_name("the name of a task", task)
    names = [one.name for one in arguments]
    merge = _merging(merges)
    for name in (*keys, *(merge if isinstance(merge, dict) else ())):
        if name not in names:
            raise InvalidArgument(f"there is no argument {name!r}; there are: {', '.join(names) or 'none'}")
    if len(set(names)) < len(names):
        raise InvalidArgument("two arguments have the same name")
    if arguments != sorted(arguments, key=lambda one: one.optional):
        raise InvalidArgument("arguments that may be left out come last")
    options = []
    if keys:
        values = ", ".join(f"${names.index(key) + 1}" for key in keys)
        options.append(f"unique_key => jsonb_build_array({quoted(task)}, {values})::text")
    elif merge is not None:
        options.append(f"unique_key => {quoted(task)}")
    if merge is not None:
        options.append(f"unique_action => 'merge', merge => {quoted(json.dumps(merge))}")
    given = "".join(f",\n    {option}" for option in options)
    call = f"{named(schema)}.enqueue({quoted(task)}, {_payload(arguments)}{given})"
    body = BODY.replace("<call>", call)
    mark = "$$"
    while mark in body:
        mark = f"{mark[:-1]}x$"
    taken = [f"{named(one.name)} {one.kind}{' default null' * one.optional}" for one in arguments]
    return (
        f"create or replace function {_called(task, called)}({', '.join(taken or ['payload jsonb'])}) returns bigint\n"
        f"language sql as {mark}{body}{mark};\n"
    )


def _merging(merges: Sequence[str]) -> str | dict[str, str] | None:
    if not merges:
        return None
    if len(merges) == 1 and "=" not in merges[0]:
        return check_merge(merges[0])
    pairs = [one.partition("=") for one in merges]
    return check_merge({name: operator for name, _, operator in pairs})


def _payload(arguments: Sequence[Argument]) -> str:
    """The payload, made of the arguments; what may be left out, and is, is not in it."""
    if not arguments:
        return "$1"
    pairs = [(f"{quoted(one.name)}, ${place}", place, one) for place, one in enumerate(arguments, 1)]
    always = ", ".join(pair for pair, _, one in pairs if not one.optional)
    sometimes = "".join(
        f"\n    || case when ${place} is null then '{{}}' else jsonb_build_object({pair}) end"
        for pair, place, one in pairs
        if one.optional
    )
    return f"jsonb_build_object({always}){sometimes}"


def _called(task: str, called: str | None) -> str:
    name = called or "enqueue_" + re.sub(r"\W+", "_", task)
    return ".".join(named(part) for part in name.split(".", 1))


def named(name: str) -> str:
    """A name in SQL; one that PostgreSQL would cut short is refused."""
    from psycopg.sql import Identifier  # noqa: PLC0415  -- --help needs none of it

    if not 0 < len(name.encode()) <= 63 or "\0" in name:
        raise InvalidArgument(f"{name!r} cannot be a name in PostgreSQL: 1 to 63 bytes")
    return Identifier(name).as_string(None)


def quoted(text: str) -> str:
    """A text in SQL."""
    from psycopg.sql import Literal  # noqa: PLC0415

    return Literal(text).as_string(None)
