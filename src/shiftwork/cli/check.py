"""`shiftwork check`: what is wrong with an app, its settings and its database, all of it at once and with a cure.

It goes by phases, and a phase that finds errors is the last one: what comes after could not be trusted. Within a phase
everything is told. Every kind of problem has a code that never changes its meaning.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import click

from shiftwork.cli.asking import json_option
from shiftwork.cli.printing import clean_lines, print_json
from shiftwork.errors import ConfigurationError, DatabaseError, NotInstalled, ShiftworkError
from shiftwork.settings import Settings, strangers, wrong

if TYPE_CHECKING:
    from psycopg import Connection

    from shiftwork.app import App

HEARING = 5.0
"""Seconds in which a notification has to arrive."""

APART = 2.0
"""Seconds by which the clocks of this machine and of the database may differ."""

OLD = 300.0
"""Seconds after which an open transaction is worth a word."""

FULL = 0.5
OLDEST_SERVER = 150_000
LOCAL = ("", "localhost", "127.0.0.1", "::1")
CHECKED = ("require", "verify-ca", "verify-full")

KINDS: dict[str, tuple[str, str]] = {
    "SW-101": ("error", "Correct it where it is set; the message says where that is and what it may be."),
    "SW-102": ("warning", "Correct its name, or remove it; `shiftwork worker --help` lists all settings."),
    "SW-103": (
        "warning",
        "Add sslmode=verify-full to the DSN, and sslrootcert if the server has a CA of its own.",
    ),
    "SW-104": ("warning", "pip install 'shiftwork[prometheus]'; without it there are /live and /ready only."),
    "SW-201": (
        "error",
        "Write it like app:app or path/to/app.py:app, and start where your program is. A TableStore is for `shiftwork table check`.",
    ),
    "SW-202": ("error", "Mend your program; the message ends with what it raised, and where."),
    "SW-203": ("warning", "Enqueue and ask in functions, not while the module is imported."),
    "SW-301": (
        "error",
        "Declare tasks with @app.task or app.sql_task, or have the module of the app import those that do.",
    ),
    "SW-302": (
        "warning",
        "Add the queue to `queues`, or let another worker serve it; else these jobs wait for ever.",
    ),
    "SW-303": ("error", "Correct the name, or remove the limit."),
    "SW-304": ("error", "Make the app a global variable of a module that can be imported."),
    "SW-305": (
        "error",
        "Name exceptions by their class or code; what ends a job for good cannot be retried.",
    ),
    "SW-306": ("error", "Import what the annotation names, where the function is defined."),
    "SW-401": ("error", "Start the server, or correct the DSN; `shiftwork migrate` tells more."),
    "SW-402": ("error", "Use PostgreSQL 15 or newer."),
    "SW-403": (
        "error",
        "Connect to the primary: a standby, or a server that is set to read only, runs no jobs.",
    ),
    "SW-404": ("error", "Run: shiftwork migrate"),
    "SW-405": (
        "error",
        "Grant the role shiftwork_worker (see docs/roles.md), or use the DSN of one that has it.",
    ),
    "SW-406": ("error", "Create the routine, or correct what app.sql_task names: schema.name(jsonb)."),
    "SW-411": (
        "warning",
        "Set listen_dsn to the server itself or to a pool in session mode; else work is found by polling, every 5 s.",
    ),
    "SW-412": ("warning", "Let listen_dsn lead past whatever is in between; else work is found by polling."),
    "SW-421": ("warning", "Set both clocks. Jobs go by the database's; only log lines are off."),
    "SW-422": (
        "warning",
        "End the session that listens and does not read, often one inside an old transaction.",
    ),
    "SW-423": (
        "warning",
        "End it: nothing that was deleted since can be cleaned up, for all tables of the server.",
    ),
    "SW-424": ("warning", "Raise max_connections, or use fewer workers, or a pooler."),
    "SW-425": ("warning", "See what it says; `shiftwork duties` shows them all. Is a worker running?"),
    "SW-426": ("warning", "If that is not meant to be: shiftwork queues resume, or tasks resume."),
}
"""What can be wrong: how grave that is, and what to do."""


@dataclass(frozen=True)
class Problem:
    """Something that is not as it should be."""

    code: str
    message: str

    @property
    def severity(self) -> str:
        """An error, or a warning."""
        return KINDS[self.code][0]

    @property
    def cure(self) -> str:
        """What to do about it."""
        return KINDS[self.code][1]


Problems = Iterator[Problem]


@click.command(
    epilog="Exit codes: 0 nothing is wrong, or only what is worth a warning; 1 something is; 2 wrong usage."
)
@click.argument("where", metavar="APP")
@click.option("--live", is_flag=True, help="Look at the database as well.")
@click.option("--dsn", metavar="URL", help="The database, if it is not what the app says.")
@click.option("--schema", metavar="NAME", help="The schema, if it is not what the app says.")
@click.option("--listen-dsn", metavar="URL", help="Where to LISTEN, if it is not what the app says.")
@json_option
@click.pass_context
def check(context: click.Context, /, where: str, live: bool, as_json: bool, **given: str | None) -> None:
    """See whether APP is fit to be run: its settings, its import, its tasks and, with --live, its database.

    APP is module:name, or path/to/file.py:name. Everything that a phase finds is told at once, each with a code and a cure
    (docs/check.md lists them all). For deployments: it ends with 1 if a worker could not work.

    Example: shiftwork check shop/jobs.py --live
    """
    found = phases(where, {name: value for name, value in given.items() if value is not None}, live=live)
    problems = [problem for _, members in found for problem in members]
    failed = any(problem.severity == "error" for problem in problems)
    if as_json:
        print_json(
            {
                "ok": not failed,
                "phases": [name for name, _ in found],
                "problems": [
                    {
                        "phase": name,
                        "code": one.code,
                        "severity": one.severity,
                        "message": one.message,
                        "cure": one.cure,
                    }
                    for name, members in found
                    for one in members
                ],
            }
        )
    else:
        _print(found)
    context.exit(1 if failed else 0)


def _print(found: Sequence[tuple[str, Sequence[Problem]]]) -> None:
    for name, members in found:
        click.echo(f"{name}: {'ok' if not members else _many(len(members))}")
        for one in members:
            click.echo(clean_lines(f"  {one.code} {one.severity}: {one.message}").replace("\n", "\n    "))
            click.echo(f"    → {one.cure}")


def _many(number: int) -> str:
    return f"{number} problem{'s' * (number != 1)}"


def phases(where: str, given: dict[str, Any], *, live: bool) -> list[tuple[str, list[Problem]]]:
    """What each phase found, up to the first that found an error."""
    apps: list[App] = []
    steps: dict[str, Callable[[], Problems]] = {
        "configuration": lambda: configuration(given),
        "imports": lambda: imports(where, given, apps),
        "registry": lambda: registry(apps[0]),
    }
    if live:
        steps["database"] = lambda: database(apps[0])
    found = []
    try:
        for name, step in steps.items():
            found.append((name, list(step())))
            if any(problem.severity == "error" for problem in found[-1][1]):
                break
    finally:
        for app in apps:
            app.close()
    return found


# What is set.


def configuration(given: dict[str, Any]) -> Problems:
    """Every setting is one that can be."""
    mistakes = wrong(os.environ)
    for mistake in mistakes:
        yield Problem("SW-101", mistake)
    for stranger in strangers(os.environ):
        yield Problem("SW-102", stranger)
    if mistakes:
        return
    try:
        settings = Settings.read(**given)
    except ConfigurationError as error:
        yield Problem("SW-101", str(error))
        return
    for name in ("dsn", "listen_dsn"):
        yield from _transport(name, getattr(settings, name))
    if settings.metrics_port and find_spec("prometheus_client") is None:
        yield Problem(
            "SW-104", f"metrics_port is {settings.metrics_port}, and what metrics need is not installed"
        )


def _transport(name: str, dsn: str | None) -> Problems:
    from psycopg import Error  # noqa: PLC0415  -- --help needs none of it
    from psycopg.conninfo import conninfo_to_dict  # noqa: PLC0415

    if dsn is None:
        return
    try:
        parts = conninfo_to_dict(dsn)
    except (Error, UnicodeError):
        yield Problem("SW-101", f"{name} is not a connection string")
        return
    hosts = str(parts.get("host") or parts.get("hostaddr") or os.environ.get("PGHOST", "")).split(",")
    remote = [host for host in hosts if host not in LOCAL and not host.startswith(("/", "@"))]
    mode = parts.get("sslmode") or os.environ.get("PGSSLMODE") or "prefer"
    if remote and mode != "verify-full":
        what = (
            "is encrypted, but the server does not have to prove who it is"
            if mode in CHECKED
            else "may not be encrypted"
        )
        yield Problem("SW-103", f"the way to {', '.join(remote)} ({name}, sslmode {mode}) {what}")


# What is imported.


def imports(where: str, given: dict[str, Any], apps: list[App]) -> Problems:
    """The app is there, and its module can be imported."""
    from shiftwork.cli.finding import NotFound, find_app  # noqa: PLC0415

    try:
        app = find_app(where)
    except NotFound as error:
        yield Problem("SW-201" if error.mistyped else "SW-202", str(error))
        return
    if app._client is not None:  # noqa: SLF001
        yield Problem("SW-203", "the app asks the database while it is imported")
        app.close()
    try:
        app.settings = app.settings.changed(**given)
    except ConfigurationError as error:
        yield Problem("SW-101", str(error))
        return
    apps.append(app)


# What is declared.


def registry(app: App) -> Problems:
    """The tasks can be run, by a worker with these settings."""
    from shiftwork.worker.processes import beginning  # noqa: PLC0415

    settings, tasks = app.settings, app._tasks  # noqa: SLF001
    every = {**tasks, **app.sql_tasks}
    if not every:
        yield Problem("SW-301", "there are no tasks to run")
    named = {"default", *(task.queue for task in every.values() if task.queue)}
    served = set(settings.queues) or named
    yield from (
        Problem("SW-302", f"task {name!r} sends to {task.queue or 'default'!r}, which is not served")
        for name, task in every.items()
        if (task.queue or "default") not in served
    )
    for task in tasks.values():
        yield from _policy(task)
        try:
            _ = task.context_parameters, task.connection_parameter
        except ConfigurationError as error:
            yield Problem("SW-306", str(error))
    for setting in ("queue_concurrency", "queue_budgets"):
        for queue in getattr(settings, setting):
            if queue not in served:
                yield Problem("SW-303", f"{setting} limits {queue!r}, which is not served")
    for name in settings.task_concurrency:
        if name not in every:
            yield Problem("SW-303", f"task_concurrency limits {name!r}, and there is no such task")
    if app.queues is not None:
        for queue in (*settings.queues, *settings.queue_concurrency, *settings.queue_budgets):
            if queue not in app.queues:
                yield Problem("SW-303", f"the app declares its queues, and {queue!r} is not among them")
    try:
        beginning(app, settings, tasks, tells=False)
    except ConfigurationError as error:
        yield Problem("SW-304", str(error))


def _policy(task: Any) -> Problems:  # noqa: ANN401
    from shiftwork.errors import Poison  # noqa: PLC0415

    retry = task.retry
    if retry is None or retry.on is None or (callable(retry.on) and not isinstance(retry.on, type)):
        return
    for reason in retry.on if isinstance(retry.on, tuple) else (retry.on,):
        if isinstance(reason, type) and issubclass(reason, Poison):
            yield Problem(
                "SW-305", f"task {task.name!r} retries on {reason.__name__}, which ends a job for good"
            )
        elif not isinstance(reason, str) and not (
            isinstance(reason, type) and issubclass(reason, BaseException)
        ):
            yield Problem(
                "SW-305", f"task {task.name!r} retries on {reason!r}, which is no exception and no code"
            )


# What is there.


def database(app: App) -> Problems:
    """The database can be reached, is ours to use, and is well."""
    from shiftwork.database import connect, translate  # noqa: PLC0415

    try:
        if app.settings.dsn is None:
            _ = app.client  # starts the embedded server
        with connect(app.settings) as first, connect(app.settings) as second:
            yield from _server(first, app.settings)
            yield from _installed(first, app)
            yield from _routines(first, app)
            yield from _pooler(first, second, app.settings)
            yield from _listener(first, app.settings)
            yield from _well(first, app)
    except ShiftworkError as error:
        yield Problem("SW-401", " ".join(str(error).split()))
    except Exception as error:
        import psycopg  # noqa: PLC0415

        if not isinstance(error, psycopg.Error):
            raise
        alive = error.sqlstate is not None
        yield Problem("SW-401", str(translate(error, app.settings.schema, commits=False, alive=alive)))


def _row(connection: Connection[Any], text: str, *params: object) -> Any:  # noqa: ANN401
    return connection.execute(text.encode(), params or None).fetchone()


def _server(connection: Connection[Any], settings: Settings) -> Problems:
    version = connection.info.server_version
    if version < OLDEST_SERVER:
        yield Problem("SW-402", f"the server is PostgreSQL {version // 10000}")
    standby, read_only = _row(
        connection, "select pg_is_in_recovery(), current_setting('transaction_read_only')::boolean"
    )
    if standby or read_only:
        yield Problem("SW-403", "the server is a standby" if standby else "the server is set to read only")
    before = time.time()
    [there] = _row(connection, "select extract(epoch from clock_timestamp())::float")
    here = (before + time.time()) / 2
    if abs(there - here) > APART + time.time() - before:
        which = "ahead of" if there > here else "behind"
        yield Problem("SW-421", f"the database's clock is {abs(there - here):.1f} s {which} this machine's")
    needed = settings.connections(transactional=True) + 1
    [free] = _row(
        connection,
        "select current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int"
        " - count(*)::int from pg_stat_activity where backend_type = 'client backend'",
    )
    if free < needed:
        yield Problem("SW-424", f"{max(free, 0)} connections are free, and a worker may need {needed}")


VERBS = ("take(jsonb)", "settle(jsonb)", "heartbeat(jsonb)", "register_worker(jsonb)", "enqueue_many(jsonb)")


def _installed(connection: Connection[Any], app: App) -> Problems:
    from shiftwork import operations  # noqa: PLC0415
    from shiftwork.database import executing, run  # noqa: PLC0415
    from shiftwork.stores.protocol import Protocol  # noqa: PLC0415

    schema = app.settings.schema
    try:
        run(operations.require(Protocol(schema)), executing(connection, schema, lent=False))
    except NotInstalled as error:
        yield Problem("SW-404", str(error))
        return
    except DatabaseError as error:
        yield Problem("SW-405", str(error))
        return
    for verb in VERBS:
        [may] = _row(connection, "select has_function_privilege(%s, 'execute')", f'"{schema}".{verb}')
        if not may:
            yield Problem(
                "SW-405", f"the role {connection.info.user!r} may not call {schema}.{verb.partition('(')[0]}"
            )


def _routines(connection: Connection[Any], app: App) -> Problems:
    from psycopg import Error, sql  # noqa: PLC0415

    asked = sql.SQL("select {}.routine_call(%s, %s)").format(sql.Identifier(app.settings.schema))
    for name, task in app.sql_tasks.items():
        named = task.routine
        for routine, is_hook in ((named.handler, False), (named.before, True), (named.after, True)):
            try:
                if routine is not None:
                    connection.execute(asked, (routine, is_hook))
            except Error as error:
                if error.sqlstate == "SW001":
                    yield Problem("SW-406", f"task {name!r}: {error.diag.message_primary}")


def is_pooled(first: Connection[Any], second: Connection[Any]) -> bool:
    """Whether what looks like one session is many: while another one is in a transaction, ours is elsewhere."""
    [before] = _row(first, "select pg_backend_pid()")
    with second.transaction():
        _row(second, "select pg_backend_pid()")
        [now] = _row(first, "select pg_backend_pid()")
    return bool(before != now)


def _pooler(first: Connection[Any], second: Connection[Any], settings: Settings) -> Problems:
    if is_pooled(first, second) and settings.notify and settings.listen_dsn is None:
        yield Problem(
            "SW-411", "a pooler in transaction mode is in between, and nobody can LISTEN through it"
        )


def _listener(connection: Connection[Any], settings: Settings) -> Problems:
    from psycopg import sql  # noqa: PLC0415

    from shiftwork.database import connect  # noqa: PLC0415

    if not settings.notify:
        return
    channel = f"{settings.schema}_check_{secrets.token_hex(4)}"
    with connect(settings, settings.listen_dsn) as listener:
        listener.execute(sql.SQL("listen {}").format(sql.Identifier(channel)))
        connection.execute("select pg_notify(%s, '')", (channel,))
        if not any(True for _ in listener.notifies(timeout=HEARING, stop_after=1)):
            which = "listen_dsn" if settings.listen_dsn else "dsn"
            yield Problem("SW-412", f"a notification did not arrive within {HEARING:g} s ({which})")


def _well(connection: Connection[Any], app: App) -> Problems:
    [usage] = _row(connection, "select pg_notification_queue_usage()")
    if usage > FULL:
        yield Problem("SW-422", f"the server's queue of notifications is {usage:.0%} full")
    for pid, seconds, name, state in connection.execute(
        "select pid, extract(epoch from clock_timestamp() - xact_start)::float, application_name, state"
        " from pg_stat_activity where xact_start < clock_timestamp() - make_interval(secs => %s)"
        " and backend_type = 'client backend' order by xact_start limit 10",
        (OLD,),
    ):
        who = f"{name!r}, {state or 'not ours to see'}"
        yield Problem("SW-423", f"the transaction of pid {pid} ({who}) has been open for {seconds:,.0f} s")
    schema = app.settings.schema
    for duty, error, late in connection.execute(
        f'select name, error, extract(epoch from "{schema}".clock() - due_at)::float from "{schema}".duties'.encode()  # noqa: S608
    ):
        if error:
            yield Problem("SW-425", f"the duty {duty} failed: {error}")
        elif late > 2 * OLD:
            yield Problem("SW-425", f"the duty {duty} has been due for {late:,.0f} s, and nobody does it")
    for kind, name, until in connection.execute(
        f'select kind, name, until::text from "{schema}".pauses'  # noqa: S608
        f' where until is null or until > "{schema}".clock() order by kind, name limit 100'.encode()
    ):
        what = "everything" if kind == "all" else f"{kind} {name}"
        yield Problem("SW-426", f"{what} is paused, {f'until {until}' if until else 'until it is resumed'}")
