"""`shiftwork queues`, `tasks` and `purge`: what may be claimed, and how long finished jobs are kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

import click

from shiftwork import operations
from shiftwork.cli.asking import database_options, duration, json_option, opened, place
from shiftwork.cli.printing import at, print_answer, print_json, print_table, shortened
from shiftwork.cli.steering import CODES, add_limit, named, steer
from shiftwork.job import State, moment
from shiftwork.printable import clean
from shiftwork.settings import UNLIMITED, Settings

LIVE = tuple(state.value for state in State if not state.is_final)
ENDINGS = tuple(state.value for state in State if state.is_final)


@click.group(epilog=CODES)
def queues() -> None:
    """List, pause, resume and limit queues; say how long finished jobs are kept."""


@click.group(epilog=CODES)
def tasks() -> None:
    """List, pause, resume and limit tasks."""


@queues.command("list")
@database_options
@json_option
def list_queues(settings: Settings, as_json: bool) -> None:
    """List queues: what is in them, whether they are paused, and how long they keep what is finished."""
    with opened(settings) as app:
        found = [_with_moment(row) for row in app.client.perform(operations.list_queues(app.client.store))]
    if as_json:
        print_json(found)
        return
    rows = [
        (
            shortened(row["name"]),
            *_live(row),
            row["max_running"],
            _kept({ending: row[ending] for ending in ENDINGS}),
            _pause(row),
        )
        for row in found
    ]
    print_table(("queue", *LIVE, "limit", "keeps", "paused"), rows, numbers=(*LIVE, "limit"))


@tasks.command("list")
@database_options
@json_option
def list_tasks(settings: Settings, as_json: bool) -> None:
    """List tasks: those that are registered in the database, and those that have jobs."""
    with opened(settings) as app:
        found = [_with_moment(row) for row in app.client.perform(operations.list_tasks(app.client.store))]
    if as_json:
        print_json(found)
        return
    if not found:
        click.echo(f"No tasks in {place(settings)}.")
        return
    rows = [
        (
            shortened(row["name"]),
            row["queue"],
            row["priority"],
            row["max_attempts"],
            *_live(row),
            row["max_running"],
            _pause(row),
        )
        for row in found
    ]
    columns = ("task", "queue", "priority", "attempts", *LIVE, "limit", "paused")
    print_table(columns, rows, numbers=("priority", "attempts", *LIVE, "limit"))


def _with_moment(row: Mapping[str, Any]) -> dict[str, Any]:
    return {**row, "until": moment(row["until"])}


def _live(row: Mapping[str, Any]) -> list[object]:
    return [row["jobs"].get(state, "") for state in LIVE]


def _kept(kept: Mapping[str, int | None]) -> str:
    said = {ending: kept[ending] for ending in ENDINGS if kept[ending] is not None}
    return ", ".join(
        f"{ending} {'forever' if days == UNLIMITED else f'{days}d'}" for ending, days in said.items()
    )


def _pause(row: Mapping[str, Any]) -> str:
    if not row["paused"]:
        return ""
    until: datetime | None = row["until"]
    said = f"until {at(until)}" if until else "until resumed"
    return f"{said}: {shortened(row['reason'])}" if row["reason"] else said


for group, kind in ((queues, "queue"), (tasks, "task")):
    steer(group, kind, named)
    add_limit(group, kind)


def days(text: str) -> int:
    """Whole days, as 30d, or `forever`."""
    if text == "forever":
        return UNLIMITED
    lasting = duration(text)
    if lasting % timedelta(days=1):
        raise click.BadParameter(f"{text!r} is not a number of whole days; write it like 30d, or forever")
    return lasting.days


def _keeping(command: Callable[..., Any]) -> Callable[..., Any]:
    for ending in reversed(ENDINGS):
        command = click.option(f"--{ending}", type=days, help=f"Keep {ending} jobs so long: 30d, forever.")(
            command
        )
    return command


@queues.command()
@database_options
@click.argument("name")
@_keeping
@json_option
def retain(settings: Settings, name: str, as_json: bool, **kept: int | None) -> None:
    """Say how long finished jobs of a queue are kept; `*` is for all queues that say nothing else.

    What is not given stays as it was. It holds for jobs that finish from now on.
    """
    if all(value is None for value in kept.values()):
        raise click.UsageError(f"Say what to keep: {', '.join(f'--{ending}' for ending in ENDINGS)}.")
    with opened(settings) as app:
        days = {State(ending): value for ending, value in kept.items() if value is not None}
        app.client.perform(operations.retain(app.client.store, named("queue", name), days))
    print_answer(f"queue {clean(name)} keeps {_kept(kept)}.", {"queue": name, **kept}, as_json=as_json)


@click.command()
@database_options
@click.option("--archive", is_flag=True, help="Keep the old days as tables archive_<day>, out of the way.")
@json_option
def purge(settings: Settings, archive: bool, as_json: bool) -> None:
    """Forget finished jobs that need not be kept any longer (see `shiftwork queues retain`).

    Whole days are dropped at once. What is in use at this moment stays for the next time.
    """
    partitions = jobs = 0
    with opened(settings) as app:
        while True:
            days, gone, more = app.client.perform(operations.purge(app.client.store, archive=archive))
            partitions, jobs = partitions + days, jobs + gone
            if not more:
                break
    if as_json:
        print_json({"partitions": partitions, "jobs": jobs})
    else:
        dropped = f"{partitions} day{'s' * (partitions != 1)}"
        click.echo(f"{jobs:,} job{'s' * (jobs != 1)} forgotten; {dropped} of history dropped.")
