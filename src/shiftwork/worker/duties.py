"""Duties: what one worker does for all.

A worker asks for nothing: its heartbeats, which it sends anyway, say which duties it would take, and come back with those
that are due and were in nobody's hands. They are then its own, in the database, for as long as it has its lease; the next
heartbeat says how they went. When it dies, a heartbeat of another takes them; and should an answer have been lost, its
own next one gives it the same again. Two may be at the same duty for a while after a lease has lapsed. Each of them can
stand that, so nobody has to be sure.

They are done on a connection of their own, which is there only meanwhile: what takes long delays nobody's jobs.

A duty that fails is due again within a minute, for everybody. Whoever has failed at it three times in a row, for a
reason that will not pass by itself, does not try it again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from shiftwork import events, operations
from shiftwork.codec import safe_text
from shiftwork.database import Plan
from shiftwork.errors import DatabaseUnavailable, ShiftworkError
from shiftwork.events import Event
from shiftwork.outcome import MAX_MESSAGE
from shiftwork.stores.protocol import Protocol
from shiftwork.stores.store import Store
from shiftwork.worker.line import Line, will_pass

TURNS = 100
"""How often a duty that is done in parts goes on at once; what is then left waits for the next time."""

STRIKES = 3
"""Failures in a row after which this process leaves a duty to others."""

Publish = Callable[[Event], None]
Duty = Callable[[Any, int, Publish], Plan[int]]
"""Says how much it did; gets the store, who does it, and where to tell of what happens."""


def expire(store: Protocol, _: int, __: Publish) -> Plan[int]:
    """End jobs that nobody started in time."""
    return (yield from _in_parts(lambda: operations.expire(store), 1000))


def reap(store: Protocol, worker: int, publish: Publish) -> Plan[int]:
    """Find jobs whose worker has no row, or one that was given up; of other losses a heartbeat tells."""

    def part() -> Plan[int]:
        answers = yield from operations.reap(store, worker, thorough=True)
        if answers:
            publish(events.Reaped(answers))
        return len(answers)

    return (yield from _in_parts(part, 1000))


def extend_history(store: Protocol, _: int, __: Publish) -> Plan[int]:
    """Keep partitions of history ahead of time."""
    return (yield from operations.extend_history(store))


def purge(store: Protocol, __: int, ___: Publish) -> Plan[int]:
    """Forget finished jobs that need not be kept any longer."""
    total = 0
    for _ in range(TURNS):
        _, jobs, more = yield from operations.purge(store)
        total += jobs
        if not more:
            break
    return total


def forget_workers(store: Protocol, _: int, __: Publish) -> Plan[int]:
    """Forget workers that are gone, and what workers said of themselves."""
    return (yield from _in_parts(lambda: operations.forget_workers(store), 5000))


DUTIES: Mapping[str, Duty] = {
    "expire": expire,
    "reap": reap,
    "extend_history": extend_history,
    "purge": purge,
    "forget_workers": forget_workers,
}
"""By the names that they have in the table `duties`, which says how often each is done."""


def _in_parts(part: Callable[[], Plan[int]], full: int) -> Plan[int]:
    """Again and again, as long as each part was a full one; every part commits by itself."""
    total = 0
    for _ in range(TURNS):
        did = yield from part()
        total += did
        if did < full:
            break
    return total


class Duties:
    """Does what heartbeats bring."""

    def __init__(
        self,
        store: Store,
        line: Line,
        *,
        worker: Callable[[], int],
        publish: Publish,
        trouble: Callable[[ShiftworkError | None], None],
        duties: Mapping[str, Duty] = DUTIES,
    ) -> None:
        self._store = store
        self._line = line
        self._worker = worker
        self._publish = publish
        self._trouble = trouble
        self._duties = duties
        self._strikes = dict.fromkeys(duties, 0)
        self._taken: dict[str, None] = {}
        """What is at hand, in its order, from its being taken until a heartbeat has said how it went."""

        self._done: dict[str, Mapping[str, object]] = {}
        self._told = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._task: asyncio.Task[None] | None = None

    def wish(self) -> Mapping[str, Any]:
        """What the next heartbeat says: which duties we would take, and how those went that we have done."""
        wanted = [
            name for name, strikes in self._strikes.items() if strikes < STRIKES and name not in self._taken
        ]
        return {"duties": wanted, "done": list(self._done.values())}

    def tell(self, taken: Sequence[str], reported: Sequence[str]) -> None:
        """A heartbeat has brought these, and has said how those went."""
        for name in reported:
            self._done.pop(name, None)
            self._taken.pop(name, None)
        self._taken |= dict.fromkeys(name for name in taken if name in self._duties)
        self._idle.clear()
        self._told.set()

    async def finished(self) -> bool:
        """Wait until all that was brought is done; says whether there is something to tell of it."""
        await self._idle.wait()
        return bool(self._done)

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._live())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            await self._line.abandon(self._task)

    async def _live(self) -> None:
        while True:
            await self._told.wait()
            self._told.clear()
            waiting = [name for name in self._taken if name not in self._done]
            if waiting:
                await self._do_all(waiting)
            if not self._told.is_set():
                self._idle.set()

    async def _do_all(self, names: Sequence[str]) -> None:
        try:
            for name in names:
                self._done[name] = await self._do(name)
        except DatabaseUnavailable as error:
            for name in names:
                if name not in self._done:
                    del self._taken[name]  # still ours in the database: the next heartbeat brings it again
            self._trouble(error)
        else:
            self._trouble(None)
        finally:
            self._line.drop()

    async def _do(self, name: str) -> Mapping[str, object]:
        """Do it, and say how it went."""
        began, worker = time.perf_counter(), self._worker()
        try:
            did = await self._line.perform(self._duties[name](self._store, worker, self._publish))
        except DatabaseUnavailable:
            self._strikes[name] = 0
            raise
        except Exception as error:  # noqa: BLE001  -- one duty that cannot be done keeps nobody from the others
            self._strikes[name] = 0 if _passes(error) else self._strikes[name] + 1
            aside = self._strikes[name] >= STRIKES
            self._publish(events.DutyFailed(name, str(error), aside))
            seconds = time.perf_counter() - began
            return {"duty": name, "seconds": seconds, "error": safe_text(str(error), MAX_MESSAGE)}
        seconds = time.perf_counter() - began
        self._strikes[name] = 0
        self._publish(events.DutyDone(name, did, seconds))
        return {"duty": name, "did": did, "seconds": seconds}


def _passes(error: Exception) -> bool:
    return isinstance(error, ShiftworkError) and will_pass(error)
