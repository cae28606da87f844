"""What a worker needs of a store: the verbs, each as a statement, without I/O and without decisions.

There are two of them, the schema of ours (`protocol`) and a table that somebody already has (`table`). Both answer in the same
shapes, which `shiftwork.operations` reads, and both pass the same tests: `shiftwork.testing.store_conformance`. Whoever writes a third
one passes them too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from shiftwork.database import Rows, Statement

FORGET = "reset all; set application_name = %s"
"""What a session was told meanwhile is forgotten, but not whose it is: a pooler takes the name that it has then for its client's."""

Held = Sequence[tuple[int, int]]
"""What a worker holds: ids and attempts."""

LOCKED = 500
"""Milliseconds for which several jobs wait for the row of one that somebody has locked."""


def opening(fences: Sequence[Statement]) -> Statement:
    """A transaction that begins with these fences, and in which what a handler does can be taken back without them.

    Several jobs do not wait long for one of them: the others need not wait with it.
    """
    locking = [fence.text for fence in fences]
    if len(fences) > 1:
        locking = [f"set local lock_timeout = {LOCKED}", *locking, "set local lock_timeout to default"]
    text = "; ".join(("begin isolation level read committed", *locking, "savepoint shiftwork_handler"))
    return Statement(text, tuple(value for fence in fences for value in fence.params))


class Apart(Protocol):
    """For a verb that was refused because of one job among many: they are asked for one by one, and that one is left out."""

    def suspects(self, verb: str, request: Mapping[str, object]) -> Statement:
        """The jobs that it would be about: `id`."""
        ...

    def alone(self, verb: str, request: Mapping[str, object], job: int) -> Statement:
        """The same verb, for one of them."""
        ...

    def shun(self, job: int) -> None:
        """Leave a job out for a while: the database refuses to have it changed."""
        ...


class Store(Protocol):
    """Where jobs are kept, for a worker."""

    @property
    def apart(self) -> Apart | None:
        """How to go on without a job that cannot be written; None if the verbs do so by themselves."""
        ...

    @property
    def schema(self) -> str:
        """The schema of ours that it needs; empty if it needs none."""
        ...

    @property
    def in_turn(self) -> bool:
        """Whether a claim gives jobs in the order in which they are to run; else they are sorted by priority and time."""
        ...

    @property
    def notifies(self) -> bool:
        """Whether workers are told of new jobs; else they look for them more often."""
        ...

    @property
    def enqueues(self) -> bool:
        """Whether jobs can be enqueued together with an outcome."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether statements can be written; else what is `installed` has to be accepted first."""
        ...

    @property
    def channels(self) -> tuple[str, str]:
        """Where it is said that there is work, and that a job is to be looked at."""
        ...

    def session(self, worker: int | str) -> str:
        """What the sessions of a worker are called: who takes its jobs finds them by that."""
        ...

    # Before anything else.

    def installed(self) -> Statement:
        """What there is in the database of what is needed."""
        ...

    def accept(self, rows: Rows) -> Sequence[Statement]:
        """Refuse what cannot be worked with; gives statements that must not fail either."""
        ...

    def declare_tasks(self, tasks: Sequence[Mapping[str, object]]) -> Statement:
        """Enter tasks in the registry: `written`, how many were news."""
        ...

    def declare_limits(self, limits: Mapping[str, object]) -> Statement:
        """The limits that a program has: `written`, how many were news."""
        ...

    def sql_tasks(self) -> Statement:
        """Tasks whose code is a routine in the database: `name, handler, queue, retry, timeout, commits`."""
        ...

    def register(self, details: Mapping[str, object]) -> Statement:
        """A process makes itself known: `worker`, its id, which nobody has had before."""
        ...

    def leave(self, worker: int) -> Statement:
        """A worker's lease ends now: `left`, whether it had one."""
        ...

    # Holding.

    def claim(self, request: Mapping[str, object]) -> Statement:
        """Jobs for a worker, as `job.Taken` has them, and last a report, which has id 0 and stands where payloads do."""
        ...

    def await_claims(self, worker: int) -> Statement | None:
        """Wait until no claim of this worker is under way, if a heartbeat does not do so by itself."""
        ...

    def start(self, worker: int, held: Held) -> Statement:
        """The code of prefetched jobs is about to begin: `id, answer` (started, expired, cancelled, lost or busy)."""
        ...

    def heartbeat(self, request: Mapping[str, object]) -> Statement:
        """Renew a lease, and compare what is held: `answer`, a document."""
        ...

    def report(self, request: Mapping[str, object]) -> Statement:
        """What handlers say while they run: `answer`, a document."""
        ...

    def add_log(self, worker: int, job: int, attempt: int, entry: Mapping[str, object]) -> Statement:
        """Append an entry to the log of a job, or fail if it is not held: `place`, or no row if there is no room."""
        ...

    def change_log(
        self, worker: int, job: int, attempt: int, place: int, entry: Mapping[str, object]
    ) -> Statement:
        """Change what is given of an entry, or fail if its job is not held: `place`, or no row if there is no such entry."""
        ...

    def reap(self, reaper: int, most: int, *, thorough: bool) -> Statement:
        """Take jobs back from workers whose lease has lapsed: `id, attempt, worker, answer` (ready, failed or cancelled)."""
        ...

    # Letting go.

    def settle(self, worker: int, outcomes: Sequence[bytes], *, brief: bool = False) -> Statement:
        """How attempts ended, each outcome as JSON: `answer, state, problem, ids`, a row for those with the same answer.

        With `brief`, `[null]` may stand for the ids if all are completed.
        """
        ...

    def release(self, worker: int, held: Held, crashed: Mapping[int, str]) -> Statement:
        """Give jobs back: `id, answer` (released, cancelled, lost or busy; failed, of those that crashed too often)."""
        ...

    # Transactions.

    def open_transaction(self, held: Held) -> Statement:
        """Begin the transaction of jobs, which nobody can take away until its end; they are locked in the order given."""
        ...

    def undo_in_transaction(self) -> Statement:
        """Take back what the handler of a job did in its transaction."""
        ...

    def close_transaction(self, worker: int, outcome: bytes, *, undo: bool) -> Statement:
        """Write how the job ended, and commit, with what its handler did or without; the state it led to."""
        ...

    def conclude(self, worker: int, outcome: bytes) -> Statement:
        """Write how a job ended, or fail, in the caller's transaction."""
        ...

    def fence(self, job: int, attempt: int) -> Statement:
        """Fail unless this attempt holds its job, which it then keeps until the transaction ends."""
        ...

    # Waiting and looking.

    def sleep(self, seconds: float) -> Statement:
        """Let inserts notify for so long: `virtual_transaction`, those that were inserting already."""
        ...

    def rouse(self) -> Statement:
        """Let inserts not notify any more, unless somebody says anew that it sleeps."""
        ...

    def measure_queues(self, queues: Sequence[str]) -> Statement:
        """How much waits in these queues, and for how long: `queue, ready, oldest`."""
        ...
