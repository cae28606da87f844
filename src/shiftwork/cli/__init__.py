"""The `shiftwork` command. Sub-commands are imported when they are asked for, so `--help` stays quick."""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import sys
from typing import Any

import click

COMMANDS = {
    "check": ("shiftwork.cli.check:check", "See whether an app, its settings and its database are in order."),
    "db": ("shiftwork.cli.db:db", "The PostgreSQL server that comes with shiftwork."),
    "demo": ("shiftwork.demo:demo", "See two workers run a few thousand jobs, and one of them die."),
    "drain": (
        "shiftwork.cli.steering:drain",
        "Pause everything, a queue or a task, and wait until nothing runs.",
    ),
    "duties": ("shiftwork.cli.workers:duties", "List what some worker does for all."),
    "gateway": ("shiftwork.cli.gateway:gateway", "Let workers without a way to the database work over HTTP."),
    "jobs": ("shiftwork.cli.jobs:jobs", "List, show, enqueue, cancel, revive and count jobs."),
    "limit": ("shiftwork.cli.steering:limit", "Say how many jobs may run at once in the whole cluster."),
    "migrate": ("shiftwork.cli.migrate:migrate", "Install the schema in a database, or bring it up to date."),
    "purge": ("shiftwork.cli.queues:purge", "Forget finished jobs that need not be kept any longer."),
    "reap": ("shiftwork.cli.workers:reap", "Take jobs back from workers that fell silent."),
    "resume": ("shiftwork.cli.steering:resume", "End a pause, of everything, a queue, a task or a worker."),
    "queues": (
        "shiftwork.cli.queues:queues",
        "List, pause, resume and limit queues; say how long jobs are kept.",
    ),
    "sql": ("shiftwork.cli.sql:sql", "Write functions in SQL that enqueue jobs."),
    "table": ("shiftwork.cli.table:table", "Fit a table of your own for workers: install, check, reset."),
    "tasks": ("shiftwork.cli.queues:tasks", "List, pause, resume and limit tasks."),
    "worker": ("shiftwork.cli.worker:worker", "Run jobs, until told to stop."),
    "workers": (
        "shiftwork.cli.workers:workers",
        "List workers, what they run and cost; pause and resume them.",
    ),
}
"""Where each command is, and what it does in a line: the list of commands imports none of them."""

CODES = "Exit codes: 0 done, 1 failed, 2 wrong usage, 3 nothing failed, but what was asked for is not so."


class LazyGroup(click.Group):
    """A group whose commands are imported only when one of them is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, name = COMMANDS[cmd_name][0].split(":")
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command)  # noqa: S101
        return command

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401
        try:
            return super().invoke(ctx)
        except OSError as error:
            if error.errno == errno.EPIPE:  # the reader has gone: click ends silently
                raise
            sys.stdout = None  # what it still holds could not be written either
            raise click.ClickException(f"the operating system refused: {error}") from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in self.list_commands(ctx)])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]}, epilog=CODES)
@click.version_option(package_name="shiftwork", message="shiftwork %(version)s")
def main() -> None:
    """Background work for Python on PostgreSQL.

    Commands that need a database take it from --dsn, else from DATABASE_URL, else they use the embedded
    server, which is started if need be.
    """
    for stream in (
        sys.stdout,
        sys.stderr,
    ):  # a terminal that knows few letters gets \u2026 instead of an error
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(io.UnsupportedOperation):
                stream.reconfigure(errors="backslashreplace")
