"""`shiftwork worker`: the process that runs jobs.

Whatever can be set has a flag, which is made from the setting itself: its words, its range and its default are written
once, in `shiftwork.settings`.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from shiftwork.cli.asking import Refused, told
from shiftwork.cli.printing import clean_lines
from shiftwork.errors import ConfigurationError, DatabaseUnavailable, NotInstalled
from shiftwork.settings import KNOWN, Setting, Settings, format_duration

if TYPE_CHECKING:
    from datetime import timedelta

    from shiftwork.program import Program
    from shiftwork.worker.signals import Early

CODES = (
    "Exit codes: 0 stopped, and every job is ended or given back; 1 failed, told twice to stop, or jobs had to be left behind; "
    "2 wrong usage; 4 its processes died again and again. TERM, INT and HUP stop it, a second one at once; with several processes, "
    "HUP replaces them one by one."
)

SECTIONS: Mapping[str, Mapping[str, str]] = {
    "What it takes, and how much at once": {
        "queues": "NAMES",
        "concurrency": "N",
        "queue_concurrency": "NAMES",
        "task_concurrency": "NAMES",
        "queue_budgets": "NAMES",
        "prefetch": "N",
        "transactions": "N",
        "process_slots": "N",
        "unknown_tasks": "leave|fail",
        "preset": "NAME",
    },
    "How many there are": {
        "processes": "N",
        "max_crashes": "N",
        "singleton": "NAME",
        "standby": "",
        "reload": "",
    },
    "How it holds, waits and ends": {
        "lease": "TIME",
        "heartbeat": "TIME",
        "poll": "TIME",
        "reconnect": "TIME",
        "reconnect_most": "TIME",
        "reconnect_tries": "N",
        "notify": "",
        "timeout": "TIME",
        "grace": "TIME",
        "wait": "",
        "stop_when_idle": "",
        "max_jobs": "N",
        "max_time": "TIME",
    },
    "What its processes may": {
        "process_jobs": "N",
        "process_memory": "MIB",
        "process_environment": "NAMES",
        "process_core_dumps": "",
    },
    "What is seen of it": {
        "name": "NAME",
        "metrics_port": "PORT",
        "metrics_host": "ADDRESS",
        "log_level": "LEVEL",
        "log_format": "text|json",
    },
    "The database": {
        "dsn": "URL",
        "schema": "NAME",
        "listen_dsn": "URL",
        "connect_timeout": "TIME",
        "migrate": "",
    },
    "For jobs that enqueue and ask": {
        "max_connections": "N",
        "max_payload": "BYTES",
        "result_poll": "TIME",
    },
}
"""Where each option stands in the help, and what its value is called there."""

PRESETS = ("shithub", "sourcegraph", "horsies", "queuert", "statbus")
"""What `shiftwork.presets` has; named here since --help imports little."""

LAST = 0.5
"""Seconds for threads to end at the very end."""

PATIENCE = (0.5, 30.0)
"""How long to wait for a database that is away, at first and at most, in seconds."""

log = logging.getLogger("shiftwork.worker")


class Sectioned(click.Command):
    """A command whose options are listed by what they are about."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = {option.name: option for option in self.get_params(ctx) if isinstance(option, click.Option)}
        named = {title: [options.pop(name) for name in names] for title, names in SECTIONS.items()}
        for title, members in {**named, "Else": list(options.values())}.items():
            with formatter.section(title):
                formatter.write_dl([shown for one in members if (shown := one.get_help_record(ctx))])


def setting_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """One option for every setting; the command gets those that were given, as `given`."""

    def gather(**values: Any) -> Any:  # noqa: ANN401
        given = {name: value for name in KNOWN if (value := values.pop(name)) is not NOT_GIVEN}
        return command(given=given, **values)

    gather.__name__, gather.__doc__ = command.__name__, command.__doc__
    gather.__click_params__ = getattr(command, "__click_params__", [])  # type: ignore[attr-defined]
    values = {name: value for names in SECTIONS.values() for name, value in names.items()}
    for known in KNOWN.values():
        option = click.option(
            known.flag,
            known.name,
            metavar=values.get(known.name, "VALUE") or None,
            is_flag=isinstance(known.default, bool),
            default=None,
            callback=_reading(known),
            help=_help(known),
        )
        option(gather)
    return gather


NOT_GIVEN: Any = object()


def _reading(known: Setting) -> Callable[[click.Context, click.Parameter, Any], Any]:
    def read(_: click.Context, option: click.Parameter, written: Any) -> Any:  # noqa: ANN401
        if written is None:
            return NOT_GIVEN
        try:
            return known.read(written, f"from {option.opts[0]}")
        except ConfigurationError as error:
            raise Refused(clean_lines(error)) from None

    return read


def _help(known: Setting) -> str:
    does = known.does.replace("`", "")
    if isinstance(known.default, bool):
        return f"{does} [{'yes' if known.default else 'no'}]"
    allowed = known.allowed.removesuffix(", or none")
    for kind in ("a whole number from ", "a duration from "):  # its place in the list says that already
        allowed = allowed.removeprefix(kind)
    return f"{does} [{_default(known.default)}; {allowed}]"


def _default(value: str | float | timedelta | Mapping[str, Any] | None) -> str:
    if value is None or isinstance(value, Mapping):
        return "none"
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int | float) else format_duration(value)


@click.command(cls=Sectioned, epilog=CODES)
@click.argument("where", metavar="APP")
@setting_options
@click.option("--migrate", is_flag=True, help="first install the schema, or bring it up to date")
@click.option("--reload", is_flag=True, help="start again whenever a Python file changes; for development")
@click.option(
    "--preset", metavar="NAME", help=f"settings of a system that you know [none; {', '.join(PRESETS)}]"
)
def worker(where: str, given: Mapping[str, Any], migrate: bool, reload: bool, preset: str | None) -> None:
    """Run the jobs of APP until told to stop.

    APP is module:name, or path/to/file.py:name; the name can be left out if there is only one App.

    Every option is also a variable of the environment (--max-jobs: SHIFTWORK_MAX_JOBS) and a key of
    [tool.shiftwork] in pyproject.toml (max_jobs = 100). The option counts most, then the variable, then the file.
    A time is written 500ms, 2s, 5m, 1h or 1h30m. In brackets stand the default and what else it may be.

    Example: shiftwork worker shop/jobs.py --queues mail,default --concurrency 20
    """
    from shiftwork import logs  # noqa: PLC0415  -- --help needs none of it
    from shiftwork.worker import supervised  # noqa: PLC0415

    given = {**_preset(preset), **given}
    try:
        settings = Settings.read(**{name: value for name, value in given.items() if value is not None})
    except ConfigurationError as error:  # in the environment or the file; better told before anything is done
        raise Refused(clean_lines(error)) from None
    logs.set_up(settings.log_level, settings.log_format)
    rehearsing = supervised.REHEARSAL in os.environ
    if not rehearsing and supervised.join() is None and (reload or settings.processes > 1):
        sys.exit(_supervise(settings, where, reload=reload))
    app = find(where)
    with told():
        app.close()  # whatever it opened while it was imported
        app.settings = dataclasses.replace(app.settings, **given)
    if rehearsing:
        sys.exit(0)
    leave(serve(app, migrate=migrate))


def _preset(name: str | None) -> Mapping[str, Any]:
    if name is None:
        return {}
    if name not in PRESETS:
        raise Refused(f"there is no preset {clean_lines(name)!r}; there are: {', '.join(PRESETS)}")
    from shiftwork import presets  # noqa: PLC0415

    preset: presets.Preset = getattr(presets, name)
    return preset.settings


def _supervise(settings: Settings, where: str, *, reload: bool) -> int:
    """Run this command in processes of their own; gives the exit code."""
    from shiftwork import logs  # noqa: PLC0415  -- --help needs none of it
    from shiftwork.supervisor import supervise  # noqa: PLC0415

    place, _, _ = where.partition(":")
    beside = Path(place).resolve().parent if place.endswith(".py") or os.sep in place else Path.cwd()
    folders = {Path.cwd(), beside}
    watched = [folder for folder in folders if not folders & set(folder.parents)] if reload else []
    return supervise(settings, watched=watched, tell=logs.Telling(logging.getLogger("shiftwork.supervisor")))


def leave(well: bool) -> NoReturn:
    """End the process, past threads that handlers have started and that will not end."""
    deadline = time.monotonic() + LAST
    others = [one for one in threading.enumerate() if one is not threading.main_thread() and not one.daemon]
    for thread in others:
        thread.join(max(deadline - time.monotonic(), 0))
    if stubborn := sum(thread.is_alive() for thread in others):
        log.warning(
            "%d threads that handlers started have not ended; the process ends without them", stubborn
        )
        logging.shutdown()
        sys.stdout.flush()
        os._exit(1)
    sys.exit(0 if well else 1)


def find(where: str) -> Program:
    """The app, or the table, at `module:name` or `path/to/file.py:name`."""
    from shiftwork.cli import finding  # noqa: PLC0415  -- --help needs none of it
    from shiftwork.program import Program  # noqa: PLC0415

    try:
        return finding.find(where, Program)
    except finding.NotFound as error:
        raise (Refused if error.mistyped else click.ClickException)(clean_lines(error)) from None


def serve(app: Program, *, migrate: bool) -> bool:
    """Run a worker of this app, and say whether all went well."""
    from shiftwork import logs  # noqa: PLC0415
    from shiftwork.worker.signals import Early  # noqa: PLC0415

    settings = app.settings
    logs.set_up(settings.log_level, settings.log_format)
    early = Early()
    try:
        with told(settings.schema), app:
            if migrate and settings.dsn is not None:  # the embedded server migrates by itself
                _migrate(app, early)
            try:
                return app.run_worker()
            except NotInstalled as error:
                raise click.ClickException(f"{error}, or start the worker with --migrate") from None
    except click.ClickException as error:
        if settings.log_format == "text":
            raise
        log.critical(error.message)  # whoever reads JSON gets nothing else
        return False


def _migrate(app: Program, early: Early) -> None:
    """Install the schema, as soon as there is a database."""
    pause, waited = PATIENCE[0], False
    while early.heard is None:
        try:
            app.migrate()
        except DatabaseUnavailable as error:
            if not waited:
                log.error("migrating waits for the database, and goes on by itself: %s", error)  # noqa: TRY400
            waited = True
        else:
            log.info("the schema %s is up to date", app.settings.schema)
            return
        time.sleep(pause)
        pause = min(2 * pause, PATIENCE[1])
