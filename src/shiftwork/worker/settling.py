"""Writing how attempts ended, in batches, by one task on a connection of its own.

What gathers during a write goes into the next one. An outcome stays here until the database has answered for it: settled;
already, because an answer was lost on the wire; lost, and then it is dropped; busy, and then it is tried again.
While the database is away everything is kept. A batch that fails as a whole is halved until the one that cannot be
written stands alone; that one is written as failed, with the reason, and so stops nobody else.

Jobs to be given back, and what handlers report of their progress, take the same way: a report is written before
the outcome of its job.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from itertools import islice
from operator import itemgetter
from typing import Self, TypeVar

import msgspec

from shiftwork import operations
from shiftwork.errors import DatabaseError, DatabaseUnavailable, ShiftworkError
from shiftwork.job import State
from shiftwork.outcome import Outcome
from shiftwork.stores.store import Store
from shiftwork.worker.line import Line, Patience, will_pass
from shiftwork.worker.run import Run

MOST_ROWS = 1_000
MOST_BYTES = 4 << 20
BUSY = 0.02
PASSING = 0.5
REFUSED = 10.0
PATIENCE = (0.1, 5.0)
"""How long to wait after the first failure, and at most."""

REPORT_EVERY = 0.5
MOST_LINES = 10_000
"""Lines that may wait to be written, while the database is away."""

LAST = 0.5
"""Seconds for what is under way at the very end."""

WRITTEN = frozenset({"settled", "already"})
"""What the database says of outcomes that it has."""

T = TypeVar("T")
Told = tuple[Run, Outcome, bytes]


class Settling:
    """The outcomes that wait to be written."""

    def __init__(
        self,
        store: Store,
        line: Line,
        *,
        answered: Callable[[Run, Outcome | None, str], None],
        settled: Callable[[Sequence[tuple[Run, Outcome]]], None],
        trouble: Callable[[str, ShiftworkError | None], None],
        more: Callable[[], bool],
        wrote: Callable[[int, float], None],
        at: Callable[[str], Awaitable[None] | None] | None = None,
    ) -> None:
        self._store = store
        self._line = line
        self._answered = answered
        self._settled = settled
        self._trouble = trouble
        self._more = more
        self._wrote = wrote
        self._at = at
        self._outcomes: deque[Told] = deque()
        self._returns: deque[Run] = deque()
        self._lines: deque[tuple[Run, float, str, str]] = deque(maxlen=MOST_LINES)
        self._progress: dict[Run, tuple[float | None, str | None]] = {}
        self._reporting: asyncio.TimerHandle | None = None
        self._unreportable = False
        self._something = asyncio.Event()
        self._closing = False
        self._writing = 0
        self._later = 0
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """How many jobs still have to be written about."""
        return len(self._outcomes) + len(self._returns) + self._writing + self._later

    def put(self, run: Run, outcome: Outcome) -> None:
        """Write this outcome."""
        self._outcomes.append((run, outcome, operations.encode_outcome(outcome)))
        if len(self._outcomes) == 1:  # else it is known
            self._something.set()

    def give_back(self, run: Run, *, after: float = 0.0) -> None:
        """Release this job."""
        if after:
            self._give_back_later(after, run)
            return
        self._returns.append(run)
        self._something.set()

    def log(self, run: Run, level: str, message: str) -> None:
        """Keep a line that a handler logged; may be called from any thread."""
        self._lines.append((run, self._loop.time(), level, message))
        self._report_soon()

    def progress(self, run: Run, fraction: float | None, message: str | None) -> None:
        """Keep how far a handler has come; the last word counts. May be called from any thread."""
        self._progress[run] = (fraction, message)
        self._report_soon()

    def _report_soon(self) -> None:
        if self._reporting is None:
            self._loop.call_soon_threadsafe(self._set_timer)

    def _set_timer(self) -> None:
        if self._reporting is None:
            self._reporting = self._loop.call_later(REPORT_EVERY, self._something.set)

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._work())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closing = True
        self._something.set()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=LAST)
            if not self._task.done():
                self._line.drop()  # nobody answers
                self._task.cancel()
                await asyncio.wait([self._task], timeout=LAST)
        self._line.drop()

    async def drain(self, seconds: float) -> bool:
        """Wait until all is written, so long at most; says whether it is."""
        deadline = self._loop.time() + seconds
        while self.waiting and self._loop.time() < deadline:  # noqa: ASYNC110  -- at the very end only
            await asyncio.sleep(0.005)
        return not self.waiting

    async def _work(self) -> None:
        patience = Patience(*PATIENCE)
        while True:
            await self._something.wait()
            while self._more() and len(self._outcomes) < MOST_ROWS // 2:  # noqa: ASYNC110
                await asyncio.sleep(0)  # more will have ended in a moment
            self._something.clear()
            try:
                await self._report()
                while self._outcomes or self._returns:
                    await self._give_back()
                    await self._settle()
                    await self._report()
            except Exception as raised:  # noqa: BLE001  -- whatever it is, what waits has to be written
                error = raised if isinstance(raised, ShiftworkError) else DatabaseError(repr(raised))
                self._trouble("settling", error)
                if self._closing:
                    return
                await asyncio.sleep(patience())
                self._something.set()
            else:
                self._trouble("settling", None)
                patience.reset()
                if self._closing:
                    return  # what was put off has had its time

    async def _settle(self) -> None:
        batch = _fitting(list(islice(self._outcomes, MOST_ROWS)))
        for _ in batch:
            self._outcomes.popleft()
        parts = _by_worker(batch, [told[0].worker for told in batch])
        await self._in_parts(parts, self._outcomes, self._write, self._unwritable)

    async def _in_parts(
        self,
        parts: deque[list[T]],
        waiting: deque[T],
        write: Callable[[list[T]], Awaitable[None]],
        alone: Callable[[T, ShiftworkError], None],
    ) -> None:
        """Write each part, halved until what cannot be written stands alone; what an outage leaves waits again."""
        many = sum(map(len, parts))
        self._writing += many
        try:
            while parts:
                part = parts.popleft()
                try:
                    await write(part)
                except DatabaseUnavailable:
                    parts.appendleft(part)
                    raise
                except ShiftworkError as error:
                    if len(part) == 1:
                        alone(part[0], error)
                    else:
                        middle = len(part) // 2
                        parts.extendleft((part[middle:], part[:middle]))
        finally:
            waiting.extendleft(one for part in reversed(parts) for one in reversed(part))
            self._writing -= many

    def _unwritable(self, told: Told, error: ShiftworkError) -> None:
        if will_pass(error):
            self._put_off(PASSING, [told])
        else:
            self._refused(told, str(error))

    async def _write(self, batch: list[Told]) -> None:
        """Outcomes of one worker: its fence is part of theirs."""
        if self._at and (held := self._at("settling")) is not None:
            await held
        began = time.perf_counter()
        settled = await self._line.perform(
            operations.settle_encoded(self._store, batch[0][0].worker, list(map(_encoded, batch)), brief=True)
        )
        self._wrote(len(batch), time.perf_counter() - began)
        if self._at and (held := self._at("settled")) is not None:
            await held
        if settled.completed:
            self._settled([(run, outcome) for run, outcome, _ in batch])
            return
        busy: list[Told] = []
        ended: list[tuple[Run, Outcome]] = []
        answers = settled.answers
        elsewhere = {
            job: state for state in (State.FAILED, State.CANCELLED) for job in settled.states.get(state, ())
        }
        for told in batch:
            run, outcome, _ = told
            answer = answers.get(run.id, "lost")
            if answer in WRITTEN:
                if elsewhere and outcome.state is State.SCHEDULED and run.id in elsewhere:
                    # It would have come too late, or was to be cancelled.
                    outcome = msgspec.structs.replace(outcome, state=elsewhere[run.id], delay=None)
                ended.append((run, outcome))
            elif answer == "busy":
                busy.append(told)
            elif answer == "refused":
                self._refused(told, settled.problems.get(run.id, "the database refused it"))
            elif run.unsure is not None and run.unsure is not outcome:
                self.put(run, run.unsure)  # it may have ended well before it could be stopped
            else:
                self._answered(run, outcome, answer)
        if ended:
            self._settled(ended)
        if busy:
            self._put_off(BUSY, busy)

    def _refused(self, told: Told, why: str) -> None:
        """Written as failed if it was not that already; else tried again, rarely."""
        run, outcome, _ = told
        self._answered(run, outcome, "refused")
        code = (outcome.error or {}).get("code")
        if code == "OUTCOME_REFUSED":
            self._put_off(REFUSED, [told])
            return
        message = f"its outcome ({outcome.state}) could not be written: {why}"
        error = {"code": "OUTCOME_REFUSED", "message": message}
        self.put(run, Outcome(run, State.FAILED, error=error, counts=True))

    def _put_off(self, seconds: float, told: Sequence[Told]) -> None:
        self._later += len(told)
        self._loop.call_later(seconds, self._again, told)

    def _again(self, told: Sequence[Told]) -> None:
        self._later -= len(told)
        self._outcomes.extend(told)
        self._something.set()

    async def _give_back(self) -> None:
        runs = [self._returns.popleft() for _ in range(min(len(self._returns), MOST_ROWS))]
        parts = _by_worker(runs, [run.worker for run in runs])
        await self._in_parts(parts, self._returns, self._release, self._unreleased)

    def _unreleased(self, run: Run, error: ShiftworkError) -> None:
        if not will_pass(error):
            self._answered(run, None, "refused")
        self._give_back_later(PASSING if will_pass(error) else REFUSED, run)

    async def _release(self, runs: list[Run]) -> None:
        held = [(run.id, run.attempt) for run in runs]
        crashed = {run.id: run.crashed for run in runs if run.crashed}
        answers = await self._line.perform(operations.release(self._store, runs[0].worker, held, crashed))
        for run in runs:
            if (answer := answers.get(run.id, "lost")) == "busy":
                self._give_back_later(BUSY, run)
            elif answer == "lost" and run.unsure is not None:
                self.put(run, run.unsure)  # it was committed, or is another's: the answer to this will tell
            elif answer == "failed":
                error = {"code": "WORKER_CRASHED", "message": run.crashed}
                self._answered(run, Outcome(run, State.FAILED, error=error), "settled")
            else:
                self._answered(run, None, answer)

    def _give_back_later(self, seconds: float, run: Run) -> None:
        self._later += 1
        self._loop.call_later(seconds, self._give_back_again, run)

    def _give_back_again(self, run: Run) -> None:
        self._later -= 1
        self.give_back(run)

    async def _report(self) -> None:
        """Write what handlers have said. Outcomes do not wait for that: what the database will not have now is kept for a
        little later, and what it will never have is dropped.
        """
        if self._unreportable and not self._closing:
            return
        if self._reporting is not None:
            self._reporting.cancel()
            self._reporting = None
        while self._lines or self._progress:
            lines = [self._lines.popleft() for _ in range(min(len(self._lines), MOST_ROWS))]
            progress = [self._progress.popitem() for _ in range(min(len(self._progress), MOST_ROWS))]
            workers = {line[0].worker for line in lines} | {run.worker for run, _ in progress}
            for worker in tuple(workers):
                now = self._loop.time()
                plan = operations.report(
                    self._store,
                    worker,
                    [
                        (run.id, run.attempt, max(now - at, 0), level, message)
                        for run, at, level, message in lines
                        if run.worker == worker
                    ],
                    [(run.id, run.attempt, *said) for run, said in progress if run.worker == worker],
                )
                try:
                    await self._line.perform(plan)
                except ShiftworkError as error:
                    if will_pass(error):
                        self._lines.extendleft(line for line in reversed(lines) if line[0].worker in workers)
                        left = {run: said for run, said in progress if run.worker in workers}
                        self._progress = left | self._progress
                    if isinstance(error, DatabaseUnavailable):
                        raise
                    self._trouble("reporting", error)
                    if will_pass(error):
                        self._unreportable = True
                        self._reporting = self._loop.call_later(PASSING, self._report_again)
                        return
                else:
                    self._trouble("reporting", None)
                workers.discard(worker)

    def _report_again(self) -> None:
        self._unreportable = False
        self._something.set()


def _fitting(told: list[Told]) -> list[Told]:
    """As many of the first as can be written at once."""
    if len({run.id for run, _, _ in told}) == len(told) and sum(map(len, map(_encoded, told))) < MOST_BYTES:
        return told
    jobs: set[int] = set()
    size = 0
    for place, (run, _, encoded) in enumerate(told):
        if run.id in jobs or size >= MOST_BYTES:
            return told[:place]  # another attempt of the same job, after an outage: answers go by the job
        jobs.add(run.id)
        size += len(encoded)
    return told


def _by_worker(batch: list[T], workers: Sequence[int]) -> deque[list[T]]:
    """A part for each worker that we have been: after a lease was lost there are two."""
    if len(set(workers)) == 1:
        return deque([batch])
    parts: dict[int, list[T]] = {}
    for one, worker in zip(batch, workers, strict=True):
        parts.setdefault(worker, []).append(one)
    return deque(parts.values())


_encoded = itemgetter(2)
