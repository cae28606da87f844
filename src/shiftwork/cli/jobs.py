"""`shiftwork jobs`: look at jobs, enqueue them by hand, and steer them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import click

from shiftwork.cli.asking import NOT_SO, Refused, database_options, duration, json_option, opened, place
from shiftwork.cli.printing import at, document, json_line, print_fields, print_json, print_table, shortened
from shiftwork.errors import InvalidArgument
from shiftwork.printable import clean
from shiftwork.settings import UNLIMITED, Settings

if TYPE_CHECKING:
    from shiftwork.job import Attempt, Job, Line, Progress

CODES = (
    "Exit codes: 0 done, 1 failed, 2 wrong usage, 3 not so: there is no such job, or it could not be moved."
)
STATES = (
    *("blocked", "scheduled", "ready", "running", "waiting"),
    *("completed", "failed", "cancelled", "expired"),
)
ID = click.IntRange(1, 2**63 - 1)
LAST_LINES = 10
FOLLOWING = 1.0


@click.group(epilog=CODES)
def jobs() -> None:
    """List, show, enqueue, cancel, complete, revive and count jobs."""


def matching_options(command: Callable[..., Any]) -> Callable[..., Any]:
    task = click.option("--task", metavar="NAME", help="Only jobs of this task.")
    queue = click.option("--queue", metavar="NAME", help="Only jobs of this queue.")
    return task(queue(command))


@jobs.command("list")
@database_options
@matching_options
@click.option("--state", "states", type=click.Choice(STATES), multiple=True, help="Only these; repeatable.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True)
@click.option("--before", type=ID, metavar="ID", help="Only jobs older than this one, for the next page.")
@json_option
def list_(
    *,
    settings: Settings,
    task: str | None,
    queue: str | None,
    states: tuple[str, ...],
    limit: int,
    before: int | None,
    as_json: bool,
) -> None:
    """List jobs, the newest first."""
    from shiftwork.job import State  # noqa: PLC0415

    with opened(settings) as app:
        wanted = [State(state) for state in states] or None
        found = app.jobs(task=task, queue=queue, state=wanted, before=before, limit=limit)
    if as_json:
        print_json([_fields(job) for job in found])
        return
    if not found:
        click.echo(f"No such jobs in {place(settings)}.")
        return
    rows = [
        (
            *(job.id, shortened(job.task), shortened(job.queue), job.state.value, _tries(job)),
            *(at(job.created_at), at(job.finished_at or job.run_at), shortened(_cause(job.error))),
        )
        for job in found
    ]
    columns = ("id", "task", "queue", "state", "attempt", "created", "due or ended", "error")
    print_table(columns, rows, numbers=("id", "attempt"))
    if len(found) == limit:
        click.echo(f"More may follow: --before {found[-1].id}", err=True)


@jobs.command(epilog=CODES)
@database_options
@click.argument("id", type=ID)
@json_option
def show(settings: Settings, id: int, as_json: bool) -> None:  # noqa: A002
    """Show all that is known of a job, with the attempts that did not succeed and the last lines it logged."""
    with opened(settings) as app:
        handle = app.job(id)
        job, progress, lines = handle.info(), handle.progress(), handle.logs(limit=LAST_LINES, last=True)
    if as_json:
        attempts = [_plainly(attempt) for attempt in job.attempts]
        said = {"progress": progress and progress._asdict(), "logs": [line._asdict() for line in lines]}
        print_json({**_fields(job), "attempts": attempts, **said})
        return
    print_fields(
        {
            "job": job.id,
            "task": job.task,
            "queue": job.queue,
            "priority": job.priority,
            "state": job.state.value,
            "arguments": "" if "payload" in job.faults else document(job.payload),
            "result": document(job.result) if job.result is not None else "",
            "attempt": _tries(job),
            "failures": job.failures,
            "lost workers": job.resets or "",
            "unique key": job.unique_key,
            "tags": ", ".join(job.tags),
            "worker": job.worker,
            "parent": job.parent,
            "created": at(job.created_at),
            "due": at(job.run_at),
            "expires": at(job.expires_at),
            "claimed": at(job.claimed_at),
            "started": at(job.started_at),
            "finished": at(job.finished_at),
            "progress": _progress(progress),
            "unreadable": ", ".join(job.faults),
            "error": _cause(job.error),
            "traceback": _traceback(job.error),
        }
    )
    if job.attempts:
        click.echo()
        rows = [
            (one.attempt, one.outcome, at(one.ended_at), one.worker, shortened(_cause(one.error), 100))
            for one in job.attempts
        ]
        print_table(("attempt", "outcome", "ended", "worker", "error"), rows, numbers=("attempt", "worker"))
    if lines:
        click.echo()
        for line in lines:
            click.echo(_line(line))
        if len(lines) == LAST_LINES:
            click.echo(f"All of it: shiftwork jobs logs {id}", err=True)


@jobs.command(epilog=CODES)
@database_options
@click.argument("id", type=ID)
@click.option("--follow", is_flag=True, help="Go on until the job has ended.")
@click.option("--json", "as_json", is_flag=True, help="Each line as a JSON document.")
def logs(settings: Settings, id: int, follow: bool, as_json: bool) -> None:  # noqa: A002
    """Show what the handler of a job has logged."""
    import time  # noqa: PLC0415

    with opened(settings) as app:
        handle, after = app.job(id), 0
        while True:
            ended = handle.status().is_final  # asked first: what it logged at its end is still to be read
            while lines := handle.logs(after=after, limit=1000):
                for line in lines:
                    click.echo(json_line(line._asdict()) if as_json else _line(line))
                after = lines[-1].id
            if ended or not follow:
                return
            time.sleep(FOLLOWING)


@jobs.command()
@database_options
@matching_options
@json_option
def counts(settings: Settings, task: str | None, queue: str | None, as_json: bool) -> None:
    """Say how many jobs there are in each state."""
    with opened(settings) as app:
        found = app.counts(task=task, queue=queue)
    if as_json:
        print_json({state.value: number for state, number in found.items()})
        return
    rows = [(state.value, f"{number:,}") for state, number in found.items()]
    print_table(("state", "jobs"), [*rows, ("all", f"{sum(found.values()):,}")], numbers=("jobs",))


def _payload(_: click.Context, __: click.Parameter, given: str) -> str:
    from shiftwork.codec import check_storable  # noqa: PLC0415

    if given == "-" and sys.stdin is None:
        raise click.BadParameter("there is no standard input to read the arguments from")
    try:
        text = sys.stdin.read() if given == "-" else given
        payload = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f"the arguments are not JSON: {clean(error)}") from None
    if not isinstance(payload, dict):
        raise click.BadParameter("the arguments must be a JSON object: {name: value, …}")
    try:
        check_storable(payload)
    except InvalidArgument as error:
        raise click.BadParameter(clean(error)) from None
    return text


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


@jobs.command()
@database_options
@click.argument("task")
@click.argument("arguments", metavar="[JSON]", default="{}", callback=_payload)
@click.option("--queue", metavar="NAME", help="Where it waits.")
@click.option("--priority", type=int, help="How urgent it is there: lower is sooner.")
@click.option("--delay", type=duration, help="Not before so long: 500ms, 2s, 5m, 1h.")
@click.option("--expires-in", type=duration, help="Expires if nobody has started it by then.")
@click.option("--max-attempts", type=int, help="Attempts in all.")
@click.option("--unique", metavar="KEY", help="One job for one key.")
@click.option(
    "--scope", type=click.Choice(["pending", "unfinished", "window"]), help="How long the key is taken."
)
@click.option(
    "--window", type=duration, help="With --scope window: for so long, whatever becomes of the job."
)
@click.option(
    "--action",
    type=click.Choice(["return", "replace", "merge", "refuse"]),
    help="What is done when the key is taken.",
)
@click.option("--tag", "tags", metavar="NAME", multiple=True, help="To find it by; repeatable.")
@json_option
def enqueue(settings: Settings, task: str, arguments: str, as_json: bool, **options: Any) -> None:  # noqa: ANN401
    """Enqueue a job of TASK, with its arguments as a JSON object (`-` reads it from standard input).

    Example: shiftwork jobs enqueue send_email '{"to": "ada@example.org", "subject": "hi"}' --delay 5m
    """
    import msgspec  # noqa: PLC0415

    from shiftwork import operations  # noqa: PLC0415
    from shiftwork.job import NewJob, about_a_key, check_name, sending  # noqa: PLC0415

    tags = options.pop("tags") or None
    try:
        payload = msgspec.Raw(arguments.strip().encode())
    except UnicodeEncodeError:
        raise Refused("the arguments are not UTF-8") from None
    chosen = sending(**options, tags=tags)
    if options["unique"] is None and (said := about_a_key(chosen)):
        raise Refused(
            f"--{said} is about jobs that have the same key; give one with --unique, or leave it out"
        )
    job: NewJob[object] = NewJob(task=check_name("the name of a task", task), payload=payload, **chosen)
    with opened(settings) as app:
        sent = app.client.perform(operations.enqueue_one(app.client.store, job))
    if as_json:
        print_json({"id": sent.id, "outcome": sent.outcome})
    else:
        click.echo(f"job {sent.id} {sent.outcome}")


ids_argument = click.argument("ids", metavar="ID…", type=ID, nargs=-1, required=True)


@jobs.command(epilog=CODES)
@database_options
@ids_argument
@click.option("--reason", help="Why; it is kept with the job and told to its handler.")
@json_option
@click.pass_context
def cancel(
    context: click.Context, settings: Settings, ids: tuple[int, ...], reason: str | None, as_json: bool
) -> None:
    """Cancel jobs. One that is running is signalled, and its handler is told."""
    with opened(settings) as app:
        answers = app.cancel(ids, reason)
    _answer(context, answers, as_json, {"cancelled", "signalled"})


def _result(_: click.Context, __: click.Parameter, given: str | None) -> object:
    try:
        return None if given is None else json.loads(given, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f"the result is not JSON: {clean(error)}") from None


@jobs.command(epilog=CODES)
@database_options
@click.argument("id", type=ID)
@click.option("--result", metavar="JSON", callback=_result, help="What it is to have given.")
@json_option
@click.pass_context
def complete(context: click.Context, settings: Settings, id: int, result: object, as_json: bool) -> None:  # noqa: A002
    """Complete a job: what it was to do has been done otherwise. One that is running is taken from its worker."""
    with opened(settings) as app:
        answers = {id: app.complete(id, result)}
    _answer(context, answers, as_json, {"completed"})


@jobs.command(epilog=CODES)
@database_options
@ids_argument
@json_option
@click.pass_context
def revive(context: click.Context, settings: Settings, ids: tuple[int, ...], as_json: bool) -> None:
    """Give finished jobs another life, under the same ids."""
    with opened(settings) as app:
        answers = app.revive(ids)
    _answer(context, answers, as_json, {"revived"})


@jobs.command("run-now", epilog=CODES)
@database_options
@ids_argument
@click.option("--strict", is_flag=True, help="All of them or none.")
@json_option
@click.pass_context
def run_now(
    context: click.Context, settings: Settings, ids: tuple[int, ...], strict: bool, as_json: bool
) -> None:
    """Make scheduled jobs due at once."""
    with opened(settings) as app:
        answers = app.run_now(ids, strict=strict)
    _answer(context, answers, as_json, {"moved", "ready"})


_MEANING = {
    "signalled": "signalled: it is running, and its handler will be told",
    "finished": "finished already",
    "unknown": "unknown: there is no such job",
    "busy": "busy: somebody else is just moving it; try again",
    "refused": "refused: in its state this cannot be",
    "live": "live: it is not finished",
    "moved": "due now",
    "ready": "ready already",
}


def _answer(context: click.Context, answers: Mapping[int, str], as_json: bool, good: Collection[str]) -> None:
    if as_json:
        print_json([{"id": id, "answer": answer} for id, answer in answers.items()])  # noqa: A001
    else:
        for id, answer in answers.items():  # noqa: A001
            click.echo(f"job {id} {_MEANING.get(answer, answer)}")
    context.exit(0 if all(answer in good for answer in answers.values()) else NOT_SO)


# A job in words and as JSON.


def _fields(job: Job) -> dict[str, Any]:
    fields = _plainly(job)
    del fields["attempts"]
    return fields


def _plainly(record: Job | Attempt) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__slots__}


def _tries(job: Job) -> str:
    return f"{job.attempt}/{'∞' if job.max_attempts == UNLIMITED else job.max_attempts}"


def _progress(progress: Progress | None) -> str:
    if progress is None:
        return ""
    share = "" if progress.fraction is None else f"{progress.fraction:.0%}"
    return " ".join(part for part in (share, progress.message, f"({at(progress.at)})") if part)


def _line(line: Line) -> str:
    return f"{at(line.at)} {clean(line.level):<8} {clean(line.message)}"


def _cause(error: Mapping[str, Any] | None) -> str:
    known = error or {}
    return ": ".join(str(known[part]) for part in ("code", "message") if known.get(part))


def _traceback(error: Mapping[str, Any] | None) -> str:
    return str((error or {}).get("traceback") or "").rstrip()
