"""`shiftwork workers`, `duties` and `reap`: who works, what is done for all, and taking jobs back from the dead."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

import click

from shiftwork import operations
from shiftwork.cli.asking import NotSo, database_options, duration, json_option, opened, place
from shiftwork.cli.printing import at, document, json_line, print_fields, print_json, print_table, shortened
from shiftwork.cli.steering import numbered, steer
from shiftwork.errors import DatabaseUnavailable
from shiftwork.job import moment
from shiftwork.printable import clean
from shiftwork.settings import Settings, format_duration

TIMES = (
    "started_at",
    "seen_at",
    "lease_until",
    "gone_at",
    "paused_until",
    "due_at",
    "taken_at",
    "began_at",
    "ended_at",
)
SHOWN = 3
"""Jobs of a worker that are shown in the list; `show` has more."""


class Listing(click.Group):
    """A group that lists when it is told nothing else."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            args = ["list", *args]
        return super().parse_args(ctx, args)


@click.group(cls=Listing)
def workers() -> None:
    """List workers: which are alive, what they run, and what they cost; pause and resume them."""


@workers.command("list")
@database_options
@click.option("--all", "gone", is_flag=True, help="Also those that are gone, as far as they are remembered.")
@json_option
def list_workers(settings: Settings, gone: bool, as_json: bool) -> None:
    """List workers, with what they said of themselves last.

    A worker is alive as long as it renews its lease; one that has lapsed is given up by the others, and its jobs run
    again.
    """
    with opened(settings) as app:
        found = [
            _told(row) for row in app.client.perform(operations.list_workers(app.client.store, gone=gone))
        ]
    if as_json:
        print_json(found)
        return
    if not found:
        click.echo(f"No workers in {place(settings)}.")
        return
    columns = (
        "worker",
        "name",
        "state",
        "queues",
        "running",
        "jobs",
        "memory",
        "cpu",
        "runs",
        "since",
        "seen",
    )
    rows = [
        (
            one["id"],
            f"{one['name']}@{one['host']}:{one['pid']}",
            _state(one),
            shortened(", ".join(one["queues"]), 40),
            f"{len(one['holding'])}/{one['details'].get('concurrency', '?')}",
            one["jobs"],
            _size(one["memory"]),
            "" if one["cpu"] is None else f"{one['cpu']:.0f} s",
            shortened(_runs(one["holding"]), 50),
            at(one["started_at"]),
            at(one["seen_at"]),
        )
        for one in found
    ]
    print_table(columns, rows, numbers=("worker", "running", "jobs", "memory", "cpu"))


@workers.command()
@database_options
@click.argument("worker", type=click.IntRange(1, 2**63 - 1))
@json_option
def show(settings: Settings, worker: int, as_json: bool) -> None:
    """Show all of one worker: how it was set, what it holds, what it said of itself last."""
    with opened(settings) as app:
        plan = operations.list_workers(app.client.store, worker, gone=True)
        found = [_told(row) for row in app.client.perform(plan)]
    if not found:
        raise NotSo(f"There is no worker {worker} in {place(settings)}; it may be forgotten already.")
    [one] = found
    if as_json:
        print_json(one)
        return
    holding = one.pop("holding")
    details = one.pop("details")
    said = {name: at(value) if isinstance(value, datetime) else value for name, value in one.items()}
    said |= {"queues": ", ".join(one["queues"]), "memory": _size(one["memory"]), **details}
    print_fields(
        {
            name: document(value) if isinstance(value, Mapping | list) else value
            for name, value in said.items()
        }
    )
    if holding:
        click.echo()
        columns = ("job", "task", "queue", "attempt", "since")
        print_table(columns, [tuple(job.values()) for job in _listed(holding)], numbers=("job", "attempt"))


steer(workers, "worker", numbered)


def _told(row: Mapping[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = {name: moment(value) if name in TIMES else value for name, value in row.items()}
    for one in (*told.get("holding", ()), *told.get("hosts", ())):
        one |= {name: moment(str(one[name])) for name in TIMES if one.get(name) is not None}
    return told


def _state(worker: Mapping[str, Any]) -> str:
    until = worker["paused_until"]
    return (
        f"{worker['state']} until {at(until)}" if until and worker["state"] == "paused" else worker["state"]
    )


def _runs(holding: list[Mapping[str, Any]]) -> str:
    shown = ", ".join(f"{job['id']} {job['task']}" for job in holding[:SHOWN])
    return f"{shown}, …" if len(holding) > SHOWN else shown


def _listed(holding: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {**job, "task": shortened(job["task"]), "started_at": at(job["started_at"]) or "not begun"}
        for job in holding
    ]


def _size(number: int | None) -> str:
    return "" if number is None else f"{number / (1 << 20):,.0f} MiB"


@click.group(cls=Listing)
def duties() -> None:
    """List what some worker does for all: how often, when next, by whom, and how it went."""


@duties.command("list")
@database_options
@json_option
def list_duties(settings: Settings, as_json: bool) -> None:
    """List what some worker does for all: how often, when next, by whom, how it went the last time, and where it was done.

    A run is lost if whoever was at it has died.
    """
    with opened(settings) as app:
        found = [_told(row) for row in app.client.perform(operations.list_duties(app.client.store))]
    if as_json:
        print_json(found)
        return
    rows = [
        (
            one["name"],
            format_duration(timedelta(seconds=one["every"])),
            at(one["due_at"]),
            one["worker"],
            at(one["ended_at"]),
            one["did"],
            _seconds(one["seconds"]),
            shortened(one["error"] or ""),
        )
        for one in found
    ]
    columns = ("duty", "every", "due", "worker", "last", "did", "took", "error")
    print_table(columns, rows, numbers=("every", "worker", "did", "took"))
    places = [
        (one["name"], shortened(host["host"]), at(host["began_at"]), at(host["ended_at"]), host["state"])
        for one in found
        for host in one["hosts"]
    ]
    if places:
        click.echo()
        print_table(("duty", "host", "last start", "last stop", "state"), places)


@duties.command("show")
@database_options
@click.argument("duty")
@click.option(
    "--limit", type=click.IntRange(1, 10_000), default=20, show_default=True, help="How many of each."
)
@json_option
def show_duty(settings: Settings, duty: str, limit: int, as_json: bool) -> None:
    """Show the last runs of one duty, of which a hundred are kept for each host, and figures of the last days."""
    with opened(settings) as app:
        every = [_told(row) for row in app.client.perform(operations.list_duties(app.client.store))]
        runs, days = app.client.perform(operations.list_runs(app.client.store, duty, limit=limit))
    found = [one for one in every if one["name"] == duty]
    if not found:
        raise NotSo(f"There is no duty {duty!r}; there are: {', '.join(one['name'] for one in every)}.")
    one = {**found[0], "runs": [_told(run) for run in runs], "days": days}
    if as_json:
        print_json(one)
        return
    rows = [
        (
            at(run["began_at"]),
            at(run["ended_at"]),
            shortened(run["host"]),
            run["worker"],
            run["state"],
            run["did"],
            _seconds(run["seconds"]),
            shortened(run["error"] or ""),
        )
        for run in one["runs"]
    ]
    columns = ("began", "ended", "host", "worker", "state", "did", "took", "error")
    print_table(columns, rows, numbers=("worker", "did", "took"))
    if days:
        click.echo()
        rows = [
            (
                day["day"],
                shortened(day["host"]),
                day["runs"],
                day["errors"],
                day["did"],
                *(_seconds(day[name]) for name in ("shortest", "mean", "longest")),
            )
            for day in days
        ]
        columns = ("day", "host", "runs", "errors", "did", "shortest", "mean", "longest")
        print_table(columns, rows, numbers=columns[2:])


def _seconds(took: float | None) -> str:
    return "" if took is None else f"{took:.2f} s"


@click.command()
@database_options
@click.option("--every", type=duration, help="Go on until interrupted, and look so often: 30s.")
@click.option("--thorough", is_flag=True, help="Also find jobs whose worker is not known at all.")
@json_option
def reap(settings: Settings, every: timedelta | None, thorough: bool, as_json: bool) -> None:
    """Take jobs back from workers that fell silent: they run again, or have failed if that happened too often.

    Workers do this for each other. As a process of its own (--every) it goes on while there is no worker, and waits for a
    database that is away. With --json it writes a document for each job, one a line.
    """
    pause, host = threading.Event(), socket.gethostname()
    with opened(settings) as app:
        while True:
            try:
                plan = operations.reap(app.client.store, thorough=thorough)
                answers = app.client.perform(operations.recorded(app.client.store, "reap", host, plan))
            except DatabaseUnavailable as error:
                if every is None:
                    raise
                answers = {}
                click.echo(clean(f"the database is away, and it is tried again: {error}"), err=True)
            for job, answer in answers.items():
                click.echo(json_line({"job": job, "answer": answer}) if as_json else f"job {job} is {answer}")
            if every is None:
                break
            pause.wait(every.total_seconds())
    if not as_json:
        click.echo(f"{len(answers)} job{'s' * (len(answers) != 1)} taken back.")
