"""`shiftwork db`: the PostgreSQL server that comes with shiftwork."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import click

from shiftwork import embedded
from shiftwork.errors import EmbeddedError

NOT_SO = 3  # nothing failed, but it does not run, or others use it
CODES = (
    "Exit codes: 0 done, 1 failed, 2 wrong usage, 3 not running (status) or in use by others (stop, reset)."
)


class InUse(click.ClickException):
    exit_code = NOT_SO


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Errors are told in their own words, without a traceback."""
    try:
        yield
    except embedded.InUseError as error:
        raise InUse(str(error)) from error
    except EmbeddedError as error:
        raise click.ClickException(str(error)) from error


def _named(_: click.Context, __: click.Parameter, path: str | None) -> Path | None:
    if path == "":
        raise click.BadParameter(
            "it names no directory; `.` would be this one, and without --data it is the default one"
        )
    return None if path is None else Path(path)


def data_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--data",
        type=click.Path(),
        callback=_named,
        help="The server's data directory, if not the default one (see `shiftwork db status`).",
    )(command)


now_option = click.option("--now", is_flag=True, help="Even if other processes use it.")


@click.group(epilog=CODES)
def db() -> None:
    """The PostgreSQL server that comes with shiftwork.

    It starts by itself when a program needs it, and ends with the last one that does; `start` keeps it
    running.
    """


@db.command()
@data_option
def start(data: Path | None) -> None:
    """Start the server and keep it running until `stop`."""
    with told(), embedded.start(data) as server:
        server.stay()
        click.echo(f"PostgreSQL {server.version} runs, data in {server.data}")
        click.echo(server.url)


@db.command(epilog=CODES)
@data_option
@now_option
def stop(data: Path | None, now: bool) -> None:
    """Stop the server, unless others use it: then it ends with the last of them."""
    with told():
        click.echo("Stopped." if embedded.stop(data, now=now) else "It was not running.")


@db.command(epilog=CODES)
@data_option
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.pass_context
def status(context: click.Context, data: Path | None, as_json: bool) -> None:
    """Say whether the server runs, where its data is, and who uses it; start nothing."""
    with told():
        found = embedded.status(data)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(found), default=str, indent=2))
    else:
        for name, value in describe(found):
            click.echo(f"{name:<10}{value}")
    context.exit(0 if found.running else NOT_SO)


def describe(found: embedded.Status) -> Iterator[tuple[str, str]]:
    yield "server", f"running, process {found.server}" if found.running else "not running"
    if found.version:
        yield "version", f"PostgreSQL {found.version}"
    yield "data", f"{found.data} ({found.size / 1_000_000:.0f} MB)"
    if found.running:
        yield "url", str(found.url)
        yield "programs", str(found.bin_dir)
        yield "log", str(found.log)
        yield "up for", str(timedelta(seconds=round(found.uptime or 0)))
        yield "users", "unknown" if found.users is None else ", ".join(map(str, found.users)) or "none"
        yield "ends", "at `shiftwork db stop`" if found.stays else "with its last user"
        if not found.fsync:
            yield "fsync", "off: a crash of the machine loses data"


@db.command()
@data_option
def url(data: Path | None) -> None:
    """Print the server's URL; it is started if need be and keeps running until `stop`."""
    with told(), embedded.start(data) as server:
        server.stay()
        click.echo(server.url)


@db.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@data_option
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def psql(data: Path | None, arguments: tuple[str, ...]) -> None:
    """Open psql on the server, which is started if need be; ARGUMENTS go to psql."""
    with told():
        server = embedded.start(data)
        program = shutil.which("psql", path=str(server.bin_dir)) or shutil.which("psql")
        if not program:
            raise EmbeddedError(f"There is no psql in {server.bin_dir} nor on the PATH. Install one.")
        server.hand_over()
        os.execv(program, [program, server.url, *arguments])  # noqa: S606


@db.command(epilog=CODES)
@data_option
@now_option
@click.option("--yes", is_flag=True, help="Do not ask.")
def reset(data: Path | None, now: bool, yes: bool) -> None:
    """Stop the server and delete its data, all of it, after asking."""
    with told():
        place = embedded.status(data).data
        if not yes and embedded.is_there(data):
            click.confirm(f"Delete everything in the embedded server's data directory {place}?", abort=True)
        click.echo(f"Deleted {place}." if embedded.reset(data, now=now) else f"There was nothing in {place}.")
