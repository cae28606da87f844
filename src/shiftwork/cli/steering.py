"""`pause`, `resume` and `limit`, for queues, tasks, workers and everything; and `shiftwork drain`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from shiftwork import operations
from shiftwork.cli.asking import NOT_SO, Refused, database_options, duration, json_option, opened, place
from shiftwork.cli.printing import at, print_answer, print_json, print_table, shortened
from shiftwork.job import check_name, moment
from shiftwork.printable import QUEUE_BYTES, TASK_BYTES, clean
from shiftwork.settings import Settings
from shiftwork.task import MOST_RUNNING

if TYPE_CHECKING:
    from shiftwork.app import App

CODES = "Exit codes: 0 done, 1 failed, 2 wrong usage, 3 not so: it was not paused (resume)."
DRAINED = (
    "Exit codes: 0 nothing runs any more, and nothing will begin, 1 failed, 2 wrong usage,"
    " 3 something still runs or is just being claimed, or the pause was over first."
)
LOOK_EVERY = (0.05, 1.0)
"""Seconds between two looks at what still runs, at first and at most."""

SHOWN = 20
"""Jobs that are named of those that still run."""


def named(kind: str, name: str) -> str:
    """The name of a queue or a task, checked."""
    return check_name(f"the name of a {kind}", name, QUEUE_BYTES if kind == "queue" else TASK_BYTES)


def numbered(_: str, name: str) -> int:
    """The id of a worker."""
    if not name.isdecimal() or len(name) > 18:
        raise Refused(f"A worker has a number, not {clean(name)!r}; see `shiftwork workers`.")
    return int(name)


def steer(group: click.Group, kind: str, read: Callable[[str, str], object]) -> None:
    """Both `pause` and `resume`, for queues, tasks or workers."""
    nothing = "it claims nothing" if kind == "worker" else "nobody claims from it"

    @group.command(help=f"Pause a {kind}: {nothing}; what runs goes on.")
    @database_options
    @click.argument("name")
    @_lasting
    @json_option
    def pause(
        settings: Settings, name: str, lasting: timedelta | None, reason: str | None, as_json: bool
    ) -> None:
        meant: dict[str, Any] = {kind: read(kind, name)}
        with opened(settings) as app:
            app.client.perform(operations.pause(app.client.store, **meant, lasting=lasting, reason=reason))
        said = f"{kind} {clean(name)} is paused{'' if lasting else f', until `shiftwork {kind}s resume`'}."
        print_answer(said, {**meant, "paused": True}, as_json=as_json)

    @group.command(help=f"End the pause of a {kind}.", epilog=CODES)
    @database_options
    @click.argument("name")
    @json_option
    @click.pass_context
    def resume(context: click.Context, settings: Settings, name: str, as_json: bool) -> None:
        meant: dict[str, Any] = {kind: read(kind, name)}
        with opened(settings) as app:
            resumed = app.client.perform(operations.resume(app.client.store, **meant))
        said = f"{kind} {clean(name)} {'goes on' if resumed else 'was not paused'}."
        print_answer(said, {**meant, "resumed": resumed}, as_json=as_json)
        context.exit(0 if resumed else NOT_SO)


def _lasting(command: Callable[..., Any]) -> Callable[..., Any]:
    reason = click.option("--reason", help="Why; it is shown in the list.")
    lasting = click.option("--for", "lasting", type=duration, help="Resume by itself after so long: 10m, 1h.")
    return lasting(reason(command))


def number_or_none(text: str) -> int | None:
    """How many, or `none`."""
    if text == "none":
        return None
    if not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= MOST_RUNNING:
        raise click.BadParameter(f"{clean(text)!r} is neither a number from 1 to {MOST_RUNNING} nor `none`")
    return int(text)


def add_limit(group: click.Group, kind: str) -> None:
    """`limit`, for queues or tasks."""

    @group.command(
        "limit",
        help=f"Let at most so many jobs of a {kind} run at once, in the whole cluster; `none` for no limit.",
    )
    @database_options
    @click.argument("name")
    @click.argument("most", type=number_or_none)
    @json_option
    def limit_one(settings: Settings, name: str, most: int | None, as_json: bool) -> None:
        _limit(settings, most, f"{kind} {clean(name)}", {kind: named(kind, name)}, as_json=as_json)


@click.command()
@database_options
@click.argument("most", required=False)
@json_option
def limit(settings: Settings, most: str | None, as_json: bool) -> None:
    """Let at most so many jobs run at once, in the whole cluster; `none` for no limit. Without a number, list all limits.

    For one queue or task: `shiftwork queues limit`, `shiftwork tasks limit`. What runs already counts; where more is
    running than may, nothing is claimed until enough has ended.
    """
    if most is not None:
        _limit(settings, number_or_none(most), "the cluster", {}, as_json=as_json)
        return
    with opened(settings) as app:
        found = app.client.perform(operations.list_limits(app.client.store))
    if as_json:
        print_json(found)
    elif not found:
        click.echo(f"No limits in {place(settings)}.")
    else:
        rows = [(row["kind"], shortened(row["name"]), row["max_running"], row["running"]) for row in found]
        print_table(("of", "name", "limit", "running"), rows, numbers=("limit", "running"))


def _limit(
    settings: Settings, most: int | None, what: str, meant: Mapping[str, str], *, as_json: bool
) -> None:
    with opened(settings) as app:
        app.client.perform(operations.limit(app.client.store, most, **meant))
    said = f"{what} has no limit." if most is None else f"{what} runs at most {most} at once."
    print_answer(said, {**meant, "max_running": most}, as_json=as_json)


def _meant(command: Callable[..., Any]) -> Callable[..., Any]:
    """--queue, --task or --worker; none of them is everything."""

    def ask(queue: str | None, task: str | None, worker: str | None, **rest: Any) -> Any:  # noqa: ANN401
        given = {"queue": queue, "task": task, "worker": worker}
        chosen = {kind: name for kind, name in given.items() if name is not None}
        if len(chosen) > 1:
            raise click.UsageError(
                "Give one of --queue, --task and --worker, or none of them for everything."
            )
        meant: dict[str, Any] = {
            kind: (numbered if kind == "worker" else named)(kind, name) for kind, name in chosen.items()
        }
        what = next((f"{kind} {clean(name)}" for kind, name in chosen.items()), "everything")
        return command(meant=meant or {"everything": True}, what=what, **rest)

    ask.__name__, ask.__doc__ = command.__name__, command.__doc__
    ask.__click_params__ = getattr(command, "__click_params__", [])  # type: ignore[attr-defined]
    for kind in ("worker", "task", "queue"):
        ask = click.option(
            f"--{kind}", metavar="ID" if kind == "worker" else "NAME", help=f"Only this {kind}."
        )(ask)
    return ask


@click.command(epilog=DRAINED)
@database_options
@_meant
@click.option("--wait", is_flag=True, help="Wait until nothing of it runs.")
@click.option("--timeout", type=duration, help="Wait so long at most: 5m.")
@_lasting
@json_option
@click.pass_context
def drain(
    context: click.Context,
    *,
    settings: Settings,
    meant: Mapping[str, Any],
    what: str,
    wait: bool,
    timeout: timedelta | None,
    lasting: timedelta | None,
    reason: str | None,
    as_json: bool,
) -> None:
    """Pause everything, or one queue, task or worker, and wait until nothing of it runs: before a migration, for example.

    It stays paused until `shiftwork resume`, with the same option. Jobs that are enqueued meanwhile wait.
    """
    if timeout is not None and not wait:
        raise click.UsageError("--timeout is for --wait.")
    with opened(settings) as app:
        began = time.monotonic()
        over = began + lasting.total_seconds() if lasting else math.inf  # then more of it is claimed
        until = min(over, began + timeout.total_seconds()) if timeout else over
        store = app.client.store
        alone = app.client.perform(
            operations.pause(store, **meant, lasting=lasting, reason=reason or "drain")
        )
        chosen = {kind: value for kind, value in meant.items() if kind != "everything"}
        first = app.client.perform(operations.find_pause(store, **chosen))
        # Who began to claim before the pause may not have seen it.
        claims = frozenset[str]() if alone else first.claims
        pause, most = LOOK_EVERY
        while True:
            # In this order: what was claimed meanwhile is seen to run, and a pause that stands has stood all the while.
            running = _running(app, chosen)
            last = app.client.perform(operations.find_pause(store, **chosen))
            resumed = not last.gone and (last.since is None or last.since != first.since)
            if not (running or claims) or resumed or not wait or time.monotonic() >= until:
                break
            time.sleep(max(0, min(pause, until - time.monotonic())))
            pause = min(2 * pause, most)
            claims &= last.claims
        late = time.monotonic() >= over
    many = running[0]["many"] if running else 0
    drained = not (many or claims or resumed or late)
    if as_json:
        print_json({"drained": drained, "running": many, "jobs": running})
    else:
        option = "".join(f" --{kind} {name}" for kind, name in chosen.items())
        rest = f"{many} job{'s' * (many != 1)} still running" if many else "nothing of it runs"
        if claims:
            rest += ", and a claim is under way that may take something yet"
        if resumed or late:
            why = "it took longer than --for" if late else "somebody has resumed it"
            click.echo(f"{what} is not paused any more in {place(settings)}, {rest}: {why}.")
        else:
            click.echo(
                f"{what} is paused in {place(settings)}, {rest}; end that with `shiftwork resume{clean(option)}`."
            )
        if running:
            rows = [
                (
                    job["id"],
                    shortened(job["task"]),
                    job["queue"],
                    job["worker"],
                    at(job["started_at"]) or "not begun",
                )
                for job in running
            ]
            print_table(("job", "task", "queue", "worker", "since"), rows, numbers=("job", "worker"))
    context.exit(0 if drained else NOT_SO)


def _running(app: App, chosen: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = app.client.perform(operations.list_running(app.client.store, **chosen, limit=SHOWN))
    return [{**row, "started_at": moment(row["started_at"])} for row in rows]


@click.command(epilog=CODES)
@database_options
@_meant
@json_option
@click.pass_context
def resume(
    context: click.Context, *, settings: Settings, meant: Mapping[str, Any], what: str, as_json: bool
) -> None:
    """End the pause of everything, as `shiftwork drain` made it, or of one queue, task or worker."""
    with opened(settings) as app:
        resumed = app.client.perform(operations.resume(app.client.store, **meant))
    said = f"{what} {'goes on' if resumed else 'was not paused'}."
    print_answer(said, {**meant, "resumed": resumed}, as_json=as_json)
    context.exit(0 if resumed else NOT_SO)
