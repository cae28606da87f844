"""Which database a command means, and how its errors are told."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from shiftwork.cli.printing import clean_lines
from shiftwork.errors import (
    ConfigurationError,
    DatabaseError,
    DatabaseUnavailable,
    InvalidArgument,
    ShiftworkError,
    UnknownJob,
)
from shiftwork.settings import Settings, check_schema, mask, parse_duration

if TYPE_CHECKING:
    from shiftwork.app import App

NOT_SO = 3  # nothing failed, but what was asked for is not so: as `shiftwork db` has it


class Refused(click.ClickException):
    """What was given on the command line cannot be meant."""

    exit_code = 2


class NotSo(click.ClickException):
    """Nothing failed, but what was asked for is not there."""

    exit_code = NOT_SO


HINTS = (
    # The server says these in its own language; who does not speak English loses the hint, not the message.
    ("does not exist", "Create the database first (createdb), or correct its name in the DSN."),
    ("Connection refused", "Start the server, or correct host and port in the DSN."),
    ("No such file or directory", "Start the server, or correct the host in the DSN."),
    ("resolve host", "Correct the host in the DSN."),
    ("timeout", "Is the host right, and does a firewall let you through?"),
    ("authentication failed", "Correct user and password in the DSN."),
    ("no password supplied", "Give the password in the DSN, in PGPASSWORD or in ~/.pgpass."),
    ("too many", "Try again when others have let go of their connections."),
)


@contextlib.contextmanager
def told(schema: str = "shiftwork") -> Iterator[None]:
    """Errors are told in their own words, with what to do, and without a traceback."""
    try:
        yield
    except ShiftworkError as error:
        raise _said(error) from error
    except Exception as error:
        import psycopg  # noqa: PLC0415  -- whoever raised its errors has imported it

        from shiftwork.database import translate  # noqa: PLC0415

        if not isinstance(error, psycopg.Error):
            raise
        raise _said(translate(error, schema, commits=False, alive=error.sqlstate is not None)) from None


def _said(error: ShiftworkError) -> click.ClickException:
    match error:
        case InvalidArgument():
            return Refused(clean_lines(error))
        case UnknownJob():
            return NotSo(clean_lines(error))
        case DatabaseUnavailable():
            said = " ".join(str(error).split())
            advice = next((hint for sign, hint in HINTS if sign in said), "")
            return click.ClickException(clean_lines(f"{said}\n{advice}".strip()))
        case DatabaseError():
            advice = ADVICE.get(error.sqlstate or "", "")
            return click.ClickException(clean_lines(f"{error}\n{advice}".strip()))
        case _:
            return click.ClickException(clean_lines(error))


ADVICE = {
    "42501": "Use a DSN of a role that may.",
    "55P03": "Somebody holds a lock that this needs, such as a long transaction. "
    "The step that failed changed nothing; run it again when they are done.",
    "40P01": "Run it again.",
    "42710": "Remove what is in the way, or use another schema.",
    "42P07": "The schema holds a table of that name that is not ours; use another schema (--schema).",
    "25006": "This is a standby or is set to read only; connect to the primary.",
}


def _schema(_: click.Context, __: click.Parameter, name: str | None) -> str | None:
    try:
        return None if name is None else check_schema(name)
    except ConfigurationError as error:
        raise click.BadParameter(str(error)) from None


def database_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--dsn and --schema; the command gets what they and the environment say, as `settings`."""

    def ask(dsn: str | None, schema: str | None, **rest: Any) -> Any:  # noqa: ANN401
        with told(schema or "shiftwork"):
            return command(settings=Settings.read(dsn=dsn, schema=schema), **rest)

    ask.__name__, ask.__doc__ = command.__name__, command.__doc__
    ask.__click_params__ = getattr(command, "__click_params__", [])  # type: ignore[attr-defined]
    schema = click.option(
        "--schema", metavar="NAME", callback=_schema, help="The schema, if it is not `shiftwork`."
    )
    dsn = click.option(
        "--dsn", metavar="URL", help="The database; else DATABASE_URL, else the embedded server."
    )
    return dsn(schema(ask))


@contextlib.contextmanager
def opened(settings: Settings) -> Iterator[App]:
    """The database of a command, as an app without tasks."""
    from shiftwork.app import App  # noqa: PLC0415  -- --help needs none of it

    with App(settings=settings) as app:
        yield app


def place(settings: Settings) -> str:
    """Which database this is, as it may be shown."""
    where = mask(settings.dsn) if settings.dsn else "the embedded server"
    return f"schema {settings.schema} of {where}"


def duration(text: str) -> timedelta:
    """A duration on the command line, such as 500ms, 2s, 5m, 1h."""
    try:
        return parse_duration(text)
    except ConfigurationError as error:
        raise click.BadParameter(str(error)) from None


json_option = click.option("--json", "as_json", is_flag=True, help="For programs: one JSON document.")
