"""`shiftwork queues`, `tasks` and `purge`: what may be claimed, and how long finished jobs are kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from shiftwork.cli.asking import NOT_SO, database_options, duration, json_option, opened, place
from shiftwork.cli.printing import at, clean, print_json, print_table, shortened
from shiftwork.settings import UNLIMITED, Settings

if TYPE_CHECKING:
    from shiftwork.app import App

CODES = "Exit codes: 0 done, 1 failed, 2 wrong usage, 3 not so: it was not paused (resume)."
LIVE = ("blocked", "scheduled", "ready", "running", "waiting")
ENDINGS = ("completed", "failed", "cancelled", "expired")

# Everything that has a name of its kind: jobs that are not finished, what the registry says, and pauses.
KNOWN = """
with live as (
  select <kind> as name, jsonb_object_agg(state, number) as jobs
    from (select <kind>, state, count(*) as number from shiftwork.jobs group by <kind>, state) as counted
   group by <kind>
), paused as (
  select name, extract(epoch from until)::text as until, reason from shiftwork.pauses
   where kind = '<kind>' and (until is null or until > shiftwork.clock())
)
select name, coalesce(live.jobs, '{}') as jobs, <said>,
       paused.name is not null as paused, paused.until, paused.reason
  from live full join shiftwork.<kind>s as known using (name) full join paused using (name)
 order by name
"""
QUEUES = KNOWN.replace("<kind>", "queue").replace(
    "<said>", ", ".join(f"known.keep_{ending} as {ending}" for ending in ENDINGS)
)
TASKS = KNOWN.replace("<kind>", "task").replace(
    "<said>",
    "known.queue, known.priority, known.max_attempts, known.description",
)
PAUSE_QUEUE = "select shiftwork.pause(queue => %s, lasting => make_interval(secs => %s), reason => %s)"
PAUSE_TASK = "select shiftwork.pause(task => %s, lasting => make_interval(secs => %s), reason => %s)"
RESUME_QUEUE = "select shiftwork.resume(queue => %s) as resumed"
RESUME_TASK = "select shiftwork.resume(task => %s) as resumed"
RETAIN = "select shiftwork.retain(%s, completed => %s, failed => %s, cancelled => %s, expired => %s)"
PURGE = "select partitions, jobs from shiftwork.purge(%s)"


def ask(app: App, text: str, *params: object) -> Sequence[Mapping[str, Any]]:
    """Put one statement to the database, written for the schema `shiftwork`."""
    from shiftwork.database import Plan, Rows, Statement  # noqa: PLC0415

    def plan() -> Plan[Rows]:
        return (yield Statement(text.replace("shiftwork.", f'"{app.client.settings.schema}".'), params))

    return app.client.perform(plan())


@click.group(epilog=CODES)
def queues() -> None:
    """List, pause and resume queues; say how long finished jobs are kept."""


@click.group(epilog=CODES)
def tasks() -> None:
    """List, pause and resume tasks."""


@queues.command("list")
@database_options
@json_option
def list_queues(settings: Settings, as_json: bool) -> None:
    """List queues: what is in them, whether they are paused, and how long they keep what is finished."""
    with opened(settings) as app:
        found = [_with_moment(row) for row in ask(app, QUEUES)]
    if as_json:
        print_json(found)
        return
    rows = [
        (shortened(row["name"]), *_live(row), _kept({ending: row[ending] for ending in ENDINGS}), _pause(row))
        for row in found
    ]
    print_table(("queue", *LIVE, "keeps", "paused"), rows, numbers=LIVE)


@tasks.command("list")
@database_options
@json_option
def list_tasks(settings: Settings, as_json: bool) -> None:
    """List tasks: those that are registered in the database, and those that have jobs."""
    with opened(settings) as app:
        found = [_with_moment(row) for row in ask(app, TASKS)]
    if as_json:
        print_json(found)
        return
    if not found:
        click.echo(f"No tasks in {place(settings)}.")
        return
    rows = [
        (shortened(row["name"]), row["queue"], row["priority"], row["max_attempts"], *_live(row), _pause(row))
        for row in found
    ]
    columns = ("task", "queue", "priority", "attempts", *LIVE, "paused")
    print_table(columns, rows, numbers=("priority", "attempts", *LIVE))


def _with_moment(row: Mapping[str, Any]) -> dict[str, Any]:
    from shiftwork.job import moment  # noqa: PLC0415

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


def _steering(group: click.Group, kind: str, pausing: str, resuming: str) -> None:
    """Both `pause` and `resume`, for queues or for tasks."""

    @group.command(help=f"Pause a {kind}: nobody claims from it; what runs goes on.")
    @database_options
    @click.argument("name")
    @click.option("--for", "lasting", type=duration, help="Resume by itself after so long: 10m, 1h.")
    @click.option("--reason", help="Why; it is shown in the list.")
    def pause(settings: Settings, name: str, lasting: timedelta | None, reason: str | None) -> None:
        with opened(settings) as app:
            ask(app, pausing, _named(kind, name), lasting.total_seconds() if lasting else None, reason)
        click.echo(
            f"{kind} {clean(name)} is paused{'' if lasting else f', until `shiftwork {kind}s resume`'}."
        )

    @group.command(help=f"End the pause of a {kind}.", epilog=CODES)
    @database_options
    @click.argument("name")
    @click.pass_context
    def resume(context: click.Context, settings: Settings, name: str) -> None:
        with opened(settings) as app:
            [row] = ask(app, resuming, _named(kind, name))
        click.echo(f"{kind} {clean(name)} {'goes on' if row['resumed'] else 'was not paused'}.")
        context.exit(0 if row["resumed"] else NOT_SO)


def _named(kind: str, name: str) -> str:
    from shiftwork.job import check_name  # noqa: PLC0415

    return check_name(f"the name of a {kind}", name)


_steering(queues, "queue", PAUSE_QUEUE, RESUME_QUEUE)
_steering(tasks, "task", PAUSE_TASK, RESUME_TASK)


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
def retain(settings: Settings, name: str, **kept: int | None) -> None:
    """Say how long finished jobs of a queue are kept; `*` is for all queues that say nothing else.

    What is not given stays as it was. It holds for jobs that finish from now on.
    """
    if all(value is None for value in kept.values()):
        raise click.UsageError(f"Say what to keep: {', '.join(f'--{ending}' for ending in ENDINGS)}.")
    with opened(settings) as app:
        ask(app, RETAIN, _named("queue", name), *(kept[ending] for ending in ENDINGS))
    click.echo(f"queue {clean(name)} keeps {_kept(kept)}.")


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
            [row] = ask(app, PURGE, archive)
            partitions, jobs = partitions + row["partitions"], jobs + row["jobs"]
            if not row["jobs"]:
                break
    if as_json:
        print_json({"partitions": partitions, "jobs": jobs})
    else:
        dropped = f"{partitions} day{'s' * (partitions != 1)}"
        click.echo(f"{jobs:,} job{'s' * (jobs != 1)} forgotten; {dropped} of history dropped.")
