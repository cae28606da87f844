"""What can be asked of the system, each as a plan: written once, run by blocking and by awaiting callers."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Iterable, Iterator, Sequence

import msgspec

from shiftwork.database import Plan, Wait
from shiftwork.errors import DatabaseUnavailable, ResultTimeout, UnknownJob
from shiftwork.job import Attempt, Job, NewJob, Sent, State
from shiftwork.stores.protocol import Protocol

CHUNK_ROWS = 1_000
CHUNK_BYTES = 4 << 20
FIRST_LOOK = 1.0

_encoder = msgspec.json.Encoder()


def enqueue(store: Protocol, jobs: Iterable[NewJob[object]]) -> Plan[list[Sent]]:
    """Enqueue jobs, in statements of a bounded size; the answers come in the order of the jobs."""
    sent: list[Sent] = []
    for document, number in _documents(jobs):
        rows = yield store.enqueue(document)
        answers: list[Sent | None] = [None] * number
        for row in rows:
            answers[row["ordinal"] - 1] = Sent(row["id"], row["outcome"])
        sent.extend(answer for answer in answers if answer is not None)
    return sent


def _documents(jobs: Iterable[NewJob[object]]) -> Iterator[tuple[str, int]]:
    """JSON arrays of jobs, each bounded in rows and in bytes, made while they are read."""
    parts: list[bytes] = []
    size = 0
    for part in map(_encoder.encode, jobs):
        if parts and (len(parts) == CHUNK_ROWS or size + len(part) > CHUNK_BYTES):
            yield f"[{b','.join(parts).decode()}]", len(parts)
            parts, size = [], 0
        parts.append(part)
        size += len(part) + 1
    if parts:
        yield f"[{b','.join(parts).decode()}]", len(parts)


def get(store: Protocol, job: int) -> Plan[Job]:
    """One job as it is now."""
    rows = yield store.get([job])
    for row in rows:
        return Job.from_row(row)
    raise UnknownJob(
        f"there is no job {job}: it never was, its enqueue was rolled back, or it has been pruned"
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
    """Cancel jobs: cancelled, signalled, finished, unknown or busy, for each."""
    rows = yield store.cancel(jobs, reason, actor)
    return {row["id"]: row["answer"] for row in rows}


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
