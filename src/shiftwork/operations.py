"""What can be asked of the system, each as a plan: written once, run by blocking and by awaiting callers."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from datetime import timedelta
from operator import itemgetter
from typing import Any, Self, TypeVar

import msgspec

from shiftwork.codec import safe_text
from shiftwork.cursor import Cursor
from shiftwork.database import Plan, Rows, Statement, Wait
from shiftwork.errors import (
    ConfigurationError,
    DatabaseError,
    DatabaseUnavailable,
    InvalidArgument,
    PayloadTooLarge,
    ResultTimeout,
    ShiftworkError,
    UnknownJob,
)
from shiftwork.job import POSTGRES_EPOCH, Attempt, Job, Line, NewJob, Progress, Sent, State, Taken, moment
from shiftwork.outcome import MAX_MESSAGE, Outcome
from shiftwork.printable import shown
from shiftwork.stores.protocol import Protocol
from shiftwork.stores.store import Apart, Held, Store

CHUNK_ROWS = 1_000
CHUNK_BYTES = 4 << 20
FIRST_LOOK = 1.0

_encoder = msgspec.json.Encoder()
_UNSAID = (None,) * 7
KEPT_OUT = "SW005"

Answers = TypeVar("Answers", bound=Sized)


class Importing:
    """While an app is imported to be run, what it enqueues at the top of a module is not sent.

    A worker is started again and again, in several processes, and each time the job would be enqueued once more.
    """

    def __init__(self) -> None:
        self.unsent: Counter[str] | None = None
        """How many jobs were not sent, by task; None where all are."""

    @contextmanager
    def __call__(self) -> Iterator[Counter[str]]:
        """Within the block nothing is sent, by anybody in this process."""
        self.unsent = Counter()
        try:
            yield self.unsent
        finally:
            self.unsent = None


importing = Importing()


def enqueue(store: Protocol, jobs: Iterable[NewJob[object]], *, apart: bool = False) -> Plan[list[Sent]]:
    """Enqueue jobs, in statements of a bounded size; the answers come in the order of the jobs.

    `apart`: each statement commits itself, so that what was sent before a line is lost has come to stay.
    """
    if importing.unsent is not None:
        tasks = [job.task for job in jobs]
        importing.unsent.update(tasks)
        return [Sent(0, "unsent") for _ in tasks]

    sent: list[Sent] = []
    for document, number in _documents(jobs):
        try:
            rows = yield store.enqueue(document)
        except ShiftworkError as error:
            if apart and sent:
                error.args = (f"the first {len(sent):,} jobs were committed; then: {error}",)
                if isinstance(error, DatabaseUnavailable):
                    error.maybe_committed = True
            raise
        answers: list[Sent | None] = [None] * number
        for row in rows:
            answers[row["ordinal"] - 1] = Sent(row["id"], row["outcome"])
        sent.extend(answer for answer in answers if answer is not None)
    return sent


def enqueue_one(store: Protocol, job: NewJob[object]) -> Plan[Sent]:
    """Enqueue one job; without a document around it, if nothing is said of it that would not fit."""
    unusual = (job.delay, job.run_at, job.expires_in, job.expires_at, job.unique_key, job.tags, job.keep)
    if importing.unsent is not None or unusual != _UNSAID:
        try:
            [sent] = yield from enqueue(store, [job])
        except DatabaseError as error:
            if error.sqlstate != KEPT_OUT:
                raise
            raise _kept_out(job) from None
        return sent
    rows = yield store.enqueue_one(job)
    made = rows[0]["value"]
    if made is None:
        raise _kept_out(job)
    return Sent(int(made), "created")


def _kept_out(job: NewJob[object]) -> DatabaseError:
    return DatabaseError(
        f"a job of task {job.task!r} was kept out of the queue by a trigger", sqlstate=KEPT_OUT
    )


def enqueue_together(store: Protocol, jobs: Sequence[bytes], within: float) -> Plan[list[Sent]]:
    """Enqueue encoded jobs in one statement, all of them or none, which waits for a lock no longer than so many seconds."""
    rows = yield store.enqueue(_array(jobs), within)
    answers = sorted((row["ordinal"], row["id"], row["outcome"]) for row in rows)
    return [Sent(made, outcome) for _, made, outcome in answers]


def _documents(jobs: Iterable[NewJob[object]]) -> Iterator[tuple[str, int]]:
    """JSON arrays of jobs, each bounded in rows and in bytes, made while they are read."""
    parts: list[bytes] = []
    size = 0
    for part in map(encode_job, jobs):
        if parts and (len(parts) == CHUNK_ROWS or size + len(part) > CHUNK_BYTES):
            yield _array(parts), len(parts)
            parts, size = [], 0
        parts.append(part)
        size += len(part) + 1
    if parts:
        yield _array(parts), len(parts)


def _array(parts: Sequence[bytes]) -> str:
    return f"[{b','.join(parts).decode()}]"


def encode_job(job: NewJob[object]) -> bytes:
    """A job as `shiftwork.enqueue_many` takes it."""
    if not isinstance(job, NewJob):
        raise InvalidArgument(f"{shown(job)} is no job to enqueue; make one with task.job(…)")
    try:
        return _encoder.encode(job)
    except (UnicodeEncodeError, TypeError) as error:
        raise InvalidArgument(f"a job of task {job.task!r} cannot be sent: {error}", task=job.task) from None


def get(store: Protocol, job: int) -> Plan[Job]:
    """One job as it is now."""
    rows = yield store.get([job])
    for row in rows:
        return Job.from_row(row)
    raise _unknown(job)


def _unknown(job: int) -> UnknownJob:
    return UnknownJob(
        f"there is no job {job}: it never was, its enqueue was rolled back, or it has been purged"
    )


def inspect(store: Protocol, job: int) -> Plan[Job]:
    """One job with the attempts that did not succeed."""
    found = yield from get(store, job)
    rows = yield store.attempts([job])
    return dataclasses.replace(found, attempts=tuple(Attempt.from_row(row) for row in rows))


def list_jobs(
    store: Protocol,
    *,
    task: str | None = None,
    queue: str | None = None,
    states: Collection[State] | None = None,
    before: int | None = None,
    limit: int = 50,
    offset: int = 0,
) -> Plan[list[Job]]:
    """Jobs that match, newest first; `before` goes on where an earlier page ended."""
    rows = yield store.list(
        task=task,
        queue=queue,
        states=states,
        before=before,
        limit=min(max(limit, 0), 10_000),
        offset=max(offset, 0),
    )
    return [Job.from_row(row) for row in rows]


def count_jobs(
    store: Protocol,
    *,
    task: str | None = None,
    queue: str | None = None,
    states: Collection[State] | None = None,
) -> Plan[dict[State, int]]:
    """How many jobs match, for every state."""
    rows = yield store.counts(task, queue, states)
    found = {row["state"]: row["number"] for row in rows}
    return {state: found.get(state.value, 0) for state in State}


def cancel(
    store: Protocol, jobs: Sequence[int], reason: str | None = None, actor: str | None = None
) -> Plan[dict[int, str]]:
    """Cancel jobs: cancelled, signalled, finished or unknown, for each."""
    rows = yield store.cancel(jobs, reason, actor)
    return {row["id"]: row["answer"] for row in rows}


def complete(store: Protocol, job: int, result: bytes | None = None, actor: str | None = None) -> Plan[str]:
    """Complete a job from outside, with a result as JSON: completed, finished, unknown or busy."""
    rows = yield store.complete(job, None if result is None else result.decode(), actor)
    return str(rows[0]["answer"])


def progress(store: Protocol, job: int) -> Plan[Progress | None]:
    """How far the last attempt of a job is, if it has said so."""
    rows = yield store.progress(job)
    if not rows:
        raise _unknown(job)
    [row] = rows
    return None if row["at"] is None else Progress(row["fraction"], row["message"], moment(row["at"]))


def logs(
    store: Protocol, job: int, *, after: int = 0, limit: int = 10_000, last: bool = False
) -> Plan[list[Line]]:
    """Lines that a job has logged, in their order: the first behind a line's id, or the last ones."""
    rows = yield store.logs(job, after, min(max(limit, 0), 100_000), last=last)
    found = [Line(row["id"], row["attempt"], moment(row["at"]), row["level"], row["message"]) for row in rows]
    return found[::-1] if last else found


def revive(store: Protocol, jobs: Sequence[int], actor: str | None = None) -> Plan[dict[int, str]]:
    """Give finished jobs another life: revived, live, unknown or busy, for each."""
    rows = yield store.revive(jobs, actor)
    return {row["id"]: row["answer"] for row in rows}


def run_now(
    store: Protocol, jobs: Sequence[int], actor: str | None = None, *, strict: bool = False
) -> Plan[dict[int, str]]:
    """Make jobs due at once: moved, ready, refused, finished, unknown or busy; strict: all or none."""
    rows = yield store.run_now(jobs, actor, strict=strict)
    return {row["id"]: row["answer"] for row in rows}


# What workers ask.


@dataclasses.dataclass(frozen=True, slots=True)
class Claimed:
    """What a claim gave: jobs in the order in which they are to run, and its report."""

    worker: int
    taken: list[Taken]
    started: int
    """How many of them, from the first, have begun; the others are fetched ahead."""

    number: int
    """The claim's number; 0 if the worker is not alive any more, in the eyes of the database."""

    at: int
    """When, by the database's clock, as `Taken` has its times."""

    more: bool
    """Whether there may be more to claim at once."""

    next_due_in: float | None
    """Seconds until the next job falls due, if nothing was left to take; 0 if what we need is locked."""

    full: bool = False
    """Whether a limit has as many as it allows."""

    paused: bool = False
    """Whether this worker is paused, or everything is."""

    resumed: Sequence[tuple[str, str, str]] = ()
    """Pauses whose time was over: kind, name and reason."""

    refused: Sequence[int] = ()
    """Jobs that the database would not let us have: somebody's trigger or constraint says no."""

    skipped: bool = False
    """Whether it was not even asked for."""

    unanswered: Sequence[int] = ()
    """Jobs that were passed by since a condition cannot be answered for them."""

    barred: bool = False
    """Whether somebody pauses or limits something in a transaction that has not ended: until then nobody claims."""

    @classmethod
    def nothing(cls, worker: int, number: int, seconds: float) -> Self:
        """No claim was made; the next is due in so many seconds."""
        return cls(worker, [], 0, number, 0, more=False, next_due_in=seconds, skipped=True)

    @property
    def jobs(self) -> list[Job]:
        """What was taken, as jobs."""
        return [
            Job.from_claim(one, self.worker, self.at, started=place < self.started)
            for place, one in enumerate(self.taken)
        ]


@dataclasses.dataclass(frozen=True, slots=True)
class Pulse:
    """What a heartbeat told a worker about the jobs it holds."""

    alive: bool
    lost: list[int]
    cancel: dict[int, str | None]
    """Jobs to be cancelled, with the reason."""

    strays: list[int]
    """Jobs that were its own without its knowing; they have been released."""

    why: dict[int, str]
    """Why each lost job is lost: taken (it lives on without this worker), ended, or missing."""

    reap: bool
    """Whether another worker's lease has lapsed, and somebody has to reap."""

    duties: list[str] = dataclasses.field(default_factory=list)
    """What is to be done for all, and is this worker's to do from now on."""

    notifications: float = 0.0
    """How full the server's queue of notifications is, from 0 to 1."""

    reported: Sequence[str] = ()
    """Duties of which this heartbeat has said how they went."""


def require(store: Store) -> Plan[None]:
    """Refuse a database that this store cannot work with."""
    rows = yield store.installed()
    for trial in store.accept(rows):
        try:
            yield trial
        except DatabaseUnavailable:
            raise
        except DatabaseError as error:
            raise ConfigurationError(f"what is claimed cannot be asked: {error}") from None


def meet(store: Store) -> Plan[None]:
    """Look at what there is, if a store has not seen it yet."""
    if not store.is_ready:
        rows = yield store.installed()
        store.accept(rows)


def sleep(store: Store, seconds: float) -> Plan[set[str]]:
    """Ask to be notified of what is inserted from now on; says which transactions were inserting already."""
    rows = yield store.sleep(seconds)
    return {row["virtual_transaction"] for row in rows}


def rouse(store: Store) -> Plan[None]:
    """There is so much to do that nobody need be told of what is inserted; whoever sleeps all the same says so anew."""
    yield store.rouse()


def register(store: Store, **details: object) -> Plan[int]:
    """Become a worker: name, host, pid, queues, lease in seconds, details. Its id is new at every start."""
    rows = yield store.register(details)
    return int(rows[0]["worker"])


def leave(store: Store, worker: int) -> Plan[bool]:
    """Let the lease go."""
    rows = yield store.leave(worker)
    return bool(rows[0]["left"])


def claim(
    store: Store,
    worker: int,
    queues: Mapping[str, int | None],
    want: int,
    *,
    cursor: Cursor | None = None,
    start: int | None = None,
    tasks: Collection[str] | None = None,
    but: Collection[str] = (),
    conditions: Sequence[str] = (),
    most: Mapping[str, int] | None = None,
) -> Plan[Claimed]:
    """Claim jobs from queues in their order, each up to so many; the first `start` of them begin at once.

    `conditions` on jobs are SQL, and `most` says how many of a task.
    """
    cursor = Cursor() if cursor is None else cursor
    began = time.monotonic()
    request = {"worker": worker, "want": want, **cursor.wish(queues, began)}
    if start is not None:
        request["start"] = start
    if tasks is not None:
        request["tasks"] = sorted(tasks)
    if but:
        request["but"] = sorted(but)
    if conditions:
        request["conditions"] = conditions
    if most:
        request["most"] = most
    refused: list[int] = []
    try:
        *taken, last = yield store.claim(request)
    except DatabaseError as error:
        if not _is_about_a_row(error) or (store.apart is not None and conditions):
            raise
        if conditions:
            *taken, last = yield store.claim({**request, "careful": True})
        elif store.apart is None:
            raise
        else:
            rows = yield from _one_by_one(store.apart, "claim", request, refused)
            taken = [row for row in rows if row[0]]
            [*more, last] = yield store.claim({**request, "want": want - len(taken)})  # without those
            taken += more
    report = msgspec.json.decode(last[4])
    if not store.in_turn:
        taken.sort(key=_turn)
        farthest = {(row[2], row[3]): row for row in taken}  # of each queue and priority
        cursor.learn(report, map(_place, farthest.values()), began, time.monotonic())
    if len(queues) > 1:
        turns = {queue: turn for turn, queue in enumerate(queues)}
        taken.sort(key=lambda row: turns[row[2]])
    return Claimed(
        worker,
        taken,
        len(taken) if start is None else min(start, len(taken)),
        report.get("claim", 0),
        report.get("at", 0) - POSTGRES_EPOCH,
        report["more"],
        report.get("next_due_in"),
        report.get("full", False),
        report.get("paused", False),
        [(one["kind"], one["name"], one.get("reason", "")) for one in report.get("ended", ())],
        refused,
        unanswered=report.get("unanswered", ()),
        barred=report.get("barred", False),
    )


def _is_about_a_row(error: DatabaseError) -> bool:
    """Whether a trigger, constraint or policy of somebody's may have refused one of many, with whichever code."""
    state = error.sqlstate or "08"
    moment = state[:2] in {"08", "25", "40", "42", "53", "54", "57", "58", "XX"} or state == "55P03"
    return not isinstance(error, DatabaseUnavailable) and (not moment or state == "42501")


def _one_by_one(
    apart: Apart, verb: str, request: Mapping[str, object], refused: list[int]
) -> Plan[list[Any]]:
    """All that can be done of a verb; what cannot is left out from now on."""
    done: list[Any] = []
    for suspect in (yield apart.suspects(verb, request)):
        try:
            done += yield apart.alone(verb, request, suspect["id"])
        except DatabaseUnavailable:
            raise
        except DatabaseError:
            apart.shun(suspect["id"])
            refused.append(suspect["id"])
    return done


def _place(row: Taken) -> tuple[str, int, int, int]:
    """Queue, priority, due time as a cursor has it, id."""
    return row[2], row[3], row[9] + POSTGRES_EPOCH, row[0]


_turn = itemgetter(3, 9, 0)


def start(store: Store, worker: int, held: Held) -> Plan[dict[int, str]]:
    """Begin prefetched jobs: started, expired, cancelled, lost or busy, for each."""
    rows = yield store.start(worker, held)
    return {row["id"]: row["answer"] for row in rows}


@dataclasses.dataclass(frozen=True, slots=True)
class Settled:
    """What became of a batch of outcomes."""

    answers: dict[int, str]
    """Settled, already, lost, busy or refused, for each."""

    states: dict[State, list[int]]
    """Where those that were settled are now; not always where their outcome said."""

    problems: dict[int, str]
    """Why those that were refused cannot be written."""

    completed: bool = False
    """Whether nothing of this is said of each, since all are completed."""


def settle(store: Store, worker: int, outcomes: Sequence[Outcome]) -> Plan[dict[int, str]]:
    """Write how attempts ended: settled, already, lost, busy or refused, for each."""
    settled = yield from settle_encoded(store, worker, [encode_outcome(outcome) for outcome in outcomes])
    return settled.answers


def settle_encoded(
    store: Store, worker: int, outcomes: Sequence[bytes], *, brief: bool = False
) -> Plan[Settled]:
    """Write how attempts ended, for outcomes that are encoded already, and so can be sent again as they are.

    With `brief`, it may be said of all together that they are completed.
    """
    rows = yield store.settle(worker, outcomes, brief=brief)
    if brief and [(row["answer"], row["ids"]) for row in rows] == [("settled", "[null]")]:
        return Settled({}, {}, {}, completed=True)
    settled = Settled({}, {}, {})
    for row in rows:
        ids = [job for job in msgspec.json.decode(row["ids"], type=list[int | None]) if job is not None]
        settled.answers.update(dict.fromkeys(ids, str(row["answer"])))
        if row["state"] is not None:
            settled.states[State(row["state"])] = ids
        if row["problem"] is not None:
            settled.problems.update(dict.fromkeys(ids, str(row["problem"])))
    return settled


class _Told(msgspec.Struct, omit_defaults=True, gc=False):
    """An outcome as `shiftwork.settle` takes it."""

    id: int
    attempt: int
    state: str
    failure: bool
    result: msgspec.Raw | None = None
    error: dict[str, str] | None = None
    delay: float | None = None
    run_at: str | None = None
    jobs: Sequence[NewJob[object]] | None = None


DONE = State.COMPLETED
"""To look it up in its enum for each job would cost as much as what is done with it."""

_COMPLETED = b'{"id":%d,"attempt":%d,"state":"completed","failure":false,"result":%b}'


def encode_outcome(outcome: Outcome, jobs: Sequence[NewJob[object]] = ()) -> bytes:
    """An outcome for `settle_encoded`; `jobs` are enqueued with it, if it completes."""
    if outcome.state is DONE and outcome.result is not None and not (jobs or outcome.jobs):
        return _COMPLETED % (outcome.job.id, outcome.job.attempt, outcome.result)  # as most do
    return _encoder.encode(
        _Told(
            outcome.job.id,
            outcome.job.attempt,
            outcome.state,
            outcome.counts,
            None if outcome.result is None else msgspec.Raw(outcome.result),
            outcome.error,
            None if outcome.delay is None else outcome.delay.total_seconds(),
            None if outcome.at is None else outcome.at.isoformat(),
            jobs or outcome.jobs or None,
        )
    )


def release(
    store: Store, worker: int, held: Held, crashed: Mapping[int, str] | None = None
) -> Plan[dict[int, str]]:
    """Give jobs back: released, cancelled, lost or busy, for each; or failed, of those that crashed, once too often."""
    rows = yield store.release(worker, held, crashed or {})
    return {row["id"]: row["answer"] for row in rows}


def heartbeat(
    store: Store,
    worker: int,
    held: Held,
    *,
    lease: float = 30,
    answered: int = 0,
    since: int = 0,
    reconcile: bool = False,
    state: Mapping[str, object] | None = None,
    duties: Collection[str] = (),
    done: Collection[Mapping[str, object]] = (),
) -> Plan[Pulse]:
    """Renew a lease and learn what became of the jobs held.

    `state` is what the worker says of itself; `duties` are those that it would take now, `done` those that it has done.
    """
    if reconcile and (waiting := store.await_claims(worker)) is not None:
        yield waiting
    request: Mapping[str, object] = {
        "worker": worker,
        "lease": lease,
        "held": held,
        "answered": answered,
        "since": since,
        "reconcile": reconcile,
        "state": state,
        "duties": tuple(duties),
        "done": tuple(done),
    }
    try:
        rows = yield store.heartbeat(request)
    except DatabaseError as error:
        if not _is_about_a_row(error) or store.apart is None:
            raise
        yield from _one_by_one(store.apart, "heartbeat", request, [])
        rows = yield store.heartbeat(request)  # without what cannot be renewed
    answer = msgspec.json.decode(rows[0]["answer"])
    asked = {one["id"]: one["reason"] for one in answer["cancel"]}
    why = {int(job): reason for job, reason in answer["why"].items()}
    return Pulse(
        answer["alive"],
        answer["lost"],
        asked,
        answer["strays"],
        why,
        answer["reap"],
        answer.get("duties", []),
        answer.get("notifications", 0.0),
        [str(one["duty"]) for one in done],
    )


def report(
    store: Store,
    worker: int,
    lines: Sequence[tuple[int, int, float | None, str, str]] = (),
    progress: Sequence[tuple[int, int, float | None, str | None]] = (),
) -> Plan[Held]:
    """Write what handlers said: lines (job, attempt, seconds ago, level, message) and progress (job, attempt,
    fraction, message). Says which jobs and attempts this worker does not hold, and nothing was written of.
    """
    told = {
        "worker": worker,
        "lines": [
            (job, attempt, ago, safe_text(level, 20), safe_text(message, MAX_MESSAGE))
            for job, attempt, ago, level, message in lines
        ],
        "progress": [
            (job, attempt, fraction, None if message is None else safe_text(message, MAX_MESSAGE))
            for job, attempt, fraction, message in progress
        ],
    }
    rows = yield store.report(told)
    return [(job, attempt) for job, attempt in msgspec.json.decode(rows[0]["answer"])["lost"]]


def add_log(store: Store, worker: int, held: tuple[int, int], entry: Mapping[str, object]) -> Plan[int]:
    """Begin an entry of a job's log (`key`, `out`, …); gives its place, for `change_log`. Raises FenceLost if the job is another's."""
    job, attempt = held
    rows = yield from _unless_locked(store.add_log(worker, job, attempt, entry), job)
    if not rows:
        raise PayloadTooLarge(f"the log of attempt {attempt} of job {job} is full", argument="entry")
    return int(rows[0]["place"])


def change_log(
    store: Store, worker: int, held: tuple[int, int], place: int, entry: Mapping[str, object]
) -> Plan[bool]:
    """Say more of an entry; says whether there is one. Raises FenceLost if the job is another's by now."""
    rows = yield from _unless_locked(store.change_log(worker, *held, place, entry), held[0])
    return bool(rows)


def _unless_locked(statement: Statement, job: int) -> Plan[Rows]:
    """Most likely it is the handler itself who has locked the row, and would wait for itself for ever."""
    try:
        return (yield statement)
    except DatabaseError as error:
        if error.sqlstate != "55P03":
            raise
        raise DatabaseError(
            f"somebody has locked the row of job {job}, and nothing can be added to its logs; a handler that changes its own row in its "
            "transaction does that last",
            sqlstate=error.sqlstate,
        ) from None


def declare_tasks(store: Store, tasks: Sequence[Mapping[str, object]]) -> Plan[int]:
    """Enter tasks in the registry: documents as `shiftwork.declare_tasks` takes them; says how many were news."""
    if not tasks:
        return 0
    rows = yield store.declare_tasks(tasks)
    return int(rows[0]["written"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Routine:
    """A task whose code is a routine in the database, as `shiftwork.register_task` takes it; lengths are seconds."""

    task: str
    handler: str
    queue: str | None = None
    priority: int | None = None
    retry: Mapping[str, object] | None = None
    timeout: float | None = None
    before: str | None = None
    after: str | None = None
    commits: bool = False
    description: str | None = None
    unique_scope: str | None = None
    unique_action: str | None = None
    unique_window: float | None = None
    merge: str | Mapping[str, str] | None = None
    max_resets: int | None = None
    on_lost: str = "requeue"


def register_task(store: Protocol, routine: Routine) -> Plan[bool]:
    """Enter a task whose code is a routine in the database; says whether that was news."""
    said = dataclasses.asdict(routine)
    for name in ("retry", "merge"):
        said[name] = None if said[name] is None else _encoder.encode(said[name]).decode()
    rows = yield store.register_task(*said.values())
    return bool(rows[0]["news"])


def sql_tasks(store: Store) -> Plan[Rows]:
    """Tasks of the registry whose code is a routine in the database."""
    return (yield store.sql_tasks())


def declare_limits(store: Store, limits: Mapping[str, object]) -> Plan[int]:
    """Limits that a program has, as `shiftwork.declare_limits` takes them; says how many were news."""
    if not limits:
        return 0
    rows = yield store.declare_limits(limits)
    return int(rows[0]["written"])


def reap(store: Store, reaper: int = 0, most: int = 1000, *, thorough: bool = False) -> Plan[dict[int, str]]:
    """Take jobs back from workers whose lease has lapsed: ready, failed or cancelled, for each; or refused, if that cannot be written."""
    rows, refused = yield from reap_rows(store, reaper, most, thorough=thorough)
    return {row["id"]: row["answer"] for row in rows} | dict.fromkeys(refused, "refused")


def reap_rows(store: Store, reaper: int, most: int, *, thorough: bool) -> Plan[tuple[Rows, list[int]]]:
    """As `reap`, with all that a store says of each; and what was refused."""
    refused: list[int] = []
    try:
        rows = yield store.reap(reaper, most, thorough=thorough)
    except DatabaseError as error:
        if not _is_about_a_row(error) or store.apart is None:
            raise
        rows = yield from _one_by_one(store.apart, "reap", {"worker": reaper}, refused)
    return rows, refused


def promote(store: Protocol, most: int = 1000) -> Plan[int]:
    """Let jobs whose time has come be claimed; a claim does so by itself."""
    rows = yield store.promote(most)
    return int(rows[0]["promoted"])


def expire(store: Protocol, most: int = 1000) -> Plan[int]:
    """End jobs that nobody started in time; says how many."""
    rows = yield store.expire(most)
    return int(rows[0]["expired"])


def forget_workers(store: Protocol) -> Plan[int]:
    """Forget workers that are gone, and what workers said of themselves; says how many rows went."""
    rows = yield store.forget_workers()
    return int(rows[0]["forgotten"])


def recorded(store: Protocol, duty: str, host: str, plan: Plan[Answers]) -> Plan[Answers]:
    """Do by hand what else is a duty of workers, and have it remembered like one; of a database that is away it knows no end."""
    rows = yield store.begin_run(duty, host)
    began, told = time.perf_counter(), {"run": rows[0]["run"]}
    try:
        answers = yield from plan
    except DatabaseUnavailable:
        raise
    except DatabaseError as error:
        failed = {"seconds": time.perf_counter() - began, "error": safe_text(str(error), MAX_MESSAGE)}
        yield store.end_run(told | failed)
        raise
    yield store.end_run(told | {"seconds": time.perf_counter() - began, "did": len(answers)})
    return answers


def fence(store: Store, job: int, attempt: int) -> Plan[None]:
    """Raise FenceLost unless this attempt holds its job, which it then keeps until the transaction ends."""
    yield from meet(store)
    yield store.fence(job, attempt)


def conclude(store: Store, worker: int, outcome: Outcome) -> Plan[None]:
    """Write how an attempt ended, or raise FenceLost, in the transaction that is open."""
    yield from meet(store)
    yield store.conclude(worker, encode_outcome(outcome))


# What people steer with.


def pause(
    store: Protocol,
    *,
    queue: str | None = None,
    task: str | None = None,
    worker: int | None = None,
    everything: bool = False,
    lasting: timedelta | None = None,
    reason: str | None = None,
) -> Plan[bool]:
    """Let nobody claim from a queue, jobs of a task or anything, or a worker nothing: for a time or until resumed.

    Says whether that holds for all claims: one that has been under way for too long may take something yet.
    """
    seconds = None if lasting is None else lasting.total_seconds()
    rows = yield store.pause(queue, task, worker, seconds, reason, everything=everything)
    return bool(rows[0]["alone"])


@dataclasses.dataclass(frozen=True)
class Paused:
    """A pause, as it is seen at one moment."""

    since: str | None
    """When it began, as the database writes it; None if there is none, or its time is over."""

    gone: bool
    """Whether it is one of a worker that is gone, and claims nothing in any case."""

    claims: frozenset[str]
    """Transactions that are claiming, whatever they claim."""


def find_pause(
    store: Protocol, *, queue: str | None = None, task: str | None = None, worker: int | None = None
) -> Plan[Paused]:
    """The pause of a queue, a task, a worker or, if none is named, of everything."""
    [row] = yield store.paused(queue, task, worker)
    return Paused(row["since"], row["gone"], frozenset(row["claims"]))


def resume(
    store: Protocol,
    *,
    queue: str | None = None,
    task: str | None = None,
    worker: int | None = None,
    everything: bool = False,
) -> Plan[bool]:
    """End a pause; says whether there was one."""
    rows = yield store.resume(queue, task, worker, everything=everything)
    return bool(rows[0]["resumed"])


def limit(
    store: Protocol, most: int | None, *, queue: str | None = None, task: str | None = None
) -> Plan[bool]:
    """Let so many jobs run at once, in the whole cluster: of a queue, of a task or over all; None lifts the limit."""
    rows = yield store.limit(most, queue, task)
    return bool(rows[0]["changed"])


def retain(store: Protocol, queue: str, days: Mapping[State, int]) -> Plan[None]:
    """How many days a queue keeps what ended so; what is not named stays as it was."""
    yield store.retain(queue, [days.get(state) for state in State if state.is_final])


def purge(store: Protocol, *, archive: bool = False) -> Plan[tuple[int, int, bool]]:
    """Forget a part of what may be forgotten; says how many partitions and jobs went, and whether there may be more."""
    rows = yield store.purge(archive=archive)
    return rows[0]["partitions"], rows[0]["jobs"], rows[0]["more"]


def extend_history(store: Protocol) -> Plan[int]:
    """Make the history partitions of the coming days; says how many."""
    rows = yield store.extend_history()
    return int(rows[0]["made"])


def list_queues(store: Protocol) -> Plan[Rows]:
    """Queues: what is in them, how long they keep what, and whether they are paused."""
    return (yield store.queues())


def list_running(
    store: Protocol,
    *,
    queue: str | None = None,
    task: str | None = None,
    worker: int | None = None,
    limit: int = 20,
) -> Plan[Rows]:
    """What runs, the oldest first; each row says how many there are."""
    return (yield store.running(queue, task, worker, limit))


def list_limits(store: Protocol) -> Plan[Rows]:
    """Limits: how many jobs may run at once in the whole cluster, and how many do."""
    return (yield store.limits())


def list_tasks(store: Protocol) -> Plan[Rows]:
    """Tasks: what is registered, their jobs, and whether they are paused."""
    return (yield store.tasks())


def measure_queues(store: Store, queues: Sequence[str]) -> Plan[Rows]:
    """What waits in these queues: `ready`, counted up to 10,000, and for how many seconds the `oldest` has been due."""
    return (yield store.measure_queues(queues))


def list_workers(store: Protocol, worker: int | None = None, *, gone: bool = False) -> Plan[Rows]:
    """Workers: what they serve, hold and said of themselves last."""
    return (yield store.workers(worker, gone=gone))


def list_duties(store: Protocol) -> Plan[Rows]:
    """What is done for all: when next, by whom, how it went, and on which hosts it began and ended last."""
    return (yield store.duties())


def list_runs(store: Protocol, duty: str, *, limit: int = 20) -> Plan[tuple[Rows, Rows]]:
    """The last runs of a duty, and figures of the days on which it was done."""
    runs = yield store.runs(duty, limit)
    return runs, (yield store.run_days(duty, limit))


# What waiters ask.


def await_end(store: Protocol, job: int, timeout: float, poll: float) -> Plan[Job]:
    """The job once it has ended.

    First look, then begin to listen, then ask for announcements, then look again: from there on an end cannot
    pass unheard. The poll stands behind it, for announcements that are lost or never sent.
    """
    until, pause = time.monotonic() + timeout, min(FIRST_LOOK, poll)
    found = yield from get(store, job)
    if not found.state.is_final and timeout > 0:
        yield Wait(job, 0)
    while not found.state.is_final:
        left = until - time.monotonic()
        if left <= 0:
            raise ResultTimeout(f"job {job} is {found.state} after {timeout:g} s; it may still end")
        try:
            yield store.await_results(2 * poll)
            found = yield from get(store, job)
        except DatabaseUnavailable:
            yield Wait(job, min(1, left))  # away; it may come back in time
        else:
            if not found.state.is_final:
                yield Wait(job, min(pause, left))
                pause = min(
                    2 * pause, poll
                )  # an end that was just being written when we asked is not announced
    return found
