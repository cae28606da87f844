"""A worker in the test's own event loop: what it publishes can be waited for, and it can be held at its named points.

    async with Workshop(app, concurrency=2) as shop:
        gate = shop.gate("claimed")
        job = await greet.aenqueue("Ada")
        await gate.reached()
        gate.open()
        await shop.ended(job)

Nobody sleeps: whoever waits is woken by what happens, and after a minute fails with what was seen until then. At the end
the worker is stopped, and must have let go of every job.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import timedelta
from types import TracebackType
from typing import Any, Self, TypeVar

import psycopg
from psycopg.rows import dict_row

from shiftwork import App
from shiftwork.events import Event, JobEnded, ListenerProven
from shiftwork.job import Job
from shiftwork.program import Program
from shiftwork.worker import Worker
from tests import pooler

PATIENCE = float(os.environ.get("SHIFTWORK_TEST_PATIENCE", "60"))
LOOP = {"registry", "claiming", "claimed", "declared", "asleep", "stopping"}
"""The points of the main loop; the others are passed by slots and by the settler."""

E = TypeVar("E", bound=Event)
T = TypeVar("T")
Row = dict[str, Any]


class Gate:
    """A point of the worker at which everybody has to wait until it is opened."""

    def __init__(self, shop: Workshop, point: str) -> None:
        self._shop = shop
        self.point = point
        self.waiting = 0
        self.visits = 0
        self._opened = asyncio.Event()

    async def reached(self, times: int = 1) -> None:
        """Wait until somebody has come here, so many times."""
        await self._shop.until(lambda: self.visits >= times, f"{self.point} is reached")

    @property
    def is_open(self) -> bool:
        """Whether everybody may pass."""
        return self._opened.is_set()

    def open(self) -> None:
        """Let everybody pass, from now on."""
        self._opened.set()

    def shut(self) -> None:
        """Hold whoever comes next."""
        self._opened.clear()

    async def pass_through(self) -> None:
        self.waiting += 1
        self._shop.stir()
        try:
            await self._opened.wait()
        finally:
            self.waiting -= 1


class Latch:
    """A place in a handler: it says that it is there, and waits to be let go. For async and for plain functions."""

    def __init__(self) -> None:
        self.arrived = 0
        self.inside = 0
        self.most = 0
        """The most that were here at once."""

        self._guard = threading.Lock()
        self._go = threading.Event()
        self._ago = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._stirred: set[asyncio.Event] = set()

    async def hold(self) -> None:
        """Stay here, in an async function."""
        self._enter()
        try:
            await self._ago.wait()
        finally:
            self._leave()

    def hold_blocking(self) -> None:
        """Stay here, in a thread."""
        self._enter()
        try:
            assert self._go.wait(PATIENCE), "nobody let it go"
        finally:
            self._leave()

    async def reached(self, times: int = 1) -> None:
        """Wait until so many have come."""
        await until(lambda: self.arrived >= times, self._stirred, lambda: f"{self.arrived} of {times} came")

    def release(self) -> None:
        """Let everybody go, from now on."""
        self._go.set()
        self._ago.set()

    def _enter(self) -> None:
        with self._guard:
            self.arrived += 1
            self.inside += 1
            self.most = max(self.most, self.inside)
        self._loop.call_soon_threadsafe(self._stir)

    def _leave(self) -> None:
        with self._guard:
            self.inside -= 1

    def _stir(self) -> None:
        for event in self._stirred:
            event.set()


class Workshop:
    """A worker that runs beside the test."""

    def __init__(self, app: Program, **settings: Any) -> None:
        """Polling is set to ten minutes, unless told otherwise: what is found is found because somebody said so."""
        self.app: Any = app
        self.worker: Worker
        self.events: list[Event] = []
        self.points: Counter[str] = Counter()
        self.clean: bool | None = None
        """What the worker's run said, once it is over."""

        self._settings: dict[str, Any] = {"poll": timedelta(minutes=10), **settings}
        self._gates: dict[str, Gate] = {}
        self._last_point = ""
        self._hears = False
        self._flying: set[str] = set()
        self._stirred: set[asyncio.Event] = set()
        self._running: asyncio.Task[bool]

    async def __aenter__(self) -> Self:
        settings = self.app.settings
        lease = self._settings.get("lease", settings.lease)
        listen = self._settings.get("listen_dsn", settings.listen_dsn)
        found = pooler.settings(settings.dsn or "", lease, listen)
        self.worker = await self.app.worker(**self._settings | found)
        self.worker._subscribers.append(self._see)
        self.worker._at = self._reached
        self.worker._sleep._say = self._declared(self.worker._sleep._say)
        self.worker._wake._event = _Alarm(self._wakes)
        self._running = asyncio.create_task(self.worker.run())
        self._running.add_done_callback(lambda _: self.stir())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for gate in self._gates.values():
            gate.open()
        self.worker.stop("the test is over", now=error is not None)
        try:
            await self.stopped()
        except BaseException:
            if error is None:
                raise
            self._running.cancel()
            return
        if error is None and isinstance(self.app, App):
            left = await self.rows(
                "select id, task, attempt from shiftwork.jobs where state = 'running' and worker = %s",
                self.worker.id,
            )
            assert not left, f"held by a worker that has stopped: {left}"

    # Waiting.

    async def until(self, condition: Callable[[], T], what: str = "it") -> T:
        """Wait for a condition, looked at whenever something happens."""
        what = f"{what} did not come about"

        def looked() -> T:
            found = condition()
            if not found and self._running.done():
                raise AssertionError(f"{what}; {self._seen()}")
            return found

        return await until(looked, self._stirred, lambda: f"{what}; {self._seen()}")

    async def event(self, kind: type[E], times: int = 1, **fields: object) -> E:
        """Wait for an event that has these fields, for so many of them if told; the last of these is given."""

        def found() -> list[E]:
            return self.seen(kind, **fields)[times - 1 :]

        [event, *_] = await self.until(found, f"{kind.__name__}{fields or ''}, {times} of it")
        return event

    async def ended(self, *jobs: Any, state: str | None = None) -> None:
        """Wait until an outcome of each of these jobs has been written, in this state if told."""

        def all_ended() -> bool:
            found = {event.job for event in self.seen(JobEnded) if state in (None, event.state)}
            return found >= {_id(job) for job in jobs}

        await self.until(all_ended, f"the end of {[_id(job) for job in jobs[:20]]}")

    async def stopped(self) -> bool:
        """Wait until the worker's run is over; gives what it said."""
        await until(self._running.done, self._stirred, lambda: f"it did not stop; {self._seen(ended=True)}")
        self.clean = self._running.result()
        return self.clean

    def seen(self, kind: type[E], **fields: object) -> list[E]:
        """What was published of this kind, with these fields."""
        return [
            event
            for event in self.events
            if isinstance(event, kind)
            and all(getattr(event, name) == _id(value) for name, value in fields.items())
        ]

    def gate(self, point: str) -> Gate:
        """Hold the worker when it comes to this point: registry, claiming, claimed, began, ended, settling, settled, declared,
        asleep, stopping.
        """
        if point not in self._gates:
            self._gates[point] = Gate(self, point)
        gate = self._gates[point]
        gate.shut()
        return gate

    async def asleep(self, *, inserting: bool = False) -> None:
        """Wait until the worker sleeps, is known to hear, and has nothing left that would wake it.

        It looks again when those are done who were inserting as it fell asleep, and who may be a duty of its own; the test
        itself may be `inserting`.
        """
        await self.until(lambda: self._is_asleep(inserting), "the sleep of the worker")

    def _is_asleep(self, inserting: bool) -> bool:
        if self._last_point != "asleep" or self.worker._wake._event.is_set():
            return False
        return self._hears and (inserting or not self._flying)

    def stir(self) -> None:
        """Something happened: whoever waits looks again."""
        for event in self._stirred:
            event.set()

    # The database.

    async def found(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask the database again and again until it has an answer, for what nobody publishes."""
        async with asyncio.timeout(PATIENCE):
            while not (answer := await ask()):
                await asyncio.sleep(0.01)
        return answer

    async def job(self, job: Any) -> Job:
        """A job as it is now."""
        found: Job = await self.app.job(_id(job)).ainfo()
        return found

    async def rows(self, text: str, *params: object) -> list[Row]:
        """Ask the database."""
        async with await psycopg.AsyncConnection.connect(
            self.app.settings.dsn or "", autocommit=True
        ) as connection:
            cursor = connection.cursor(row_factory=dict_row)
            await cursor.execute(text.encode(), params or None)
            return await cursor.fetchall() if cursor.description else []

    async def value(self, text: str, *params: object) -> Any:
        """Ask the database for one value."""
        [row] = await self.rows(text, *params)
        [value] = row.values()
        return value

    # What the worker tells.

    def _see(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, ListenerProven):
            self.worker._wake()  # or it would look again when the short poll is over with which it fell asleep
        self.stir()

    def _declared(
        self, say: Callable[[float], Awaitable[set[str]]]
    ) -> Callable[[float], Awaitable[set[str]]]:
        async def said(seconds: float) -> set[str]:
            found, again = await say(seconds), self._last_point == "asleep"
            if again and self._flying and not self._flying & found:
                self._wakes()
            self._flying = self._flying & found if again else found
            return found

        return said

    def _wakes(self) -> None:
        """It sleeps no more, and may be on its way to the next point for a while."""
        self._last_point = "awake"

    def _reached(self, point: str) -> Awaitable[None] | None:
        self.points[point] += 1
        if point in LOOP:
            self._last_point = point
        if point == "asleep":
            self._hears = self.worker._listener.proven or not self.worker.settings.notify
        if gate := self._gates.get(point):
            gate.visits += 1
        self.stir()
        return None if gate is None or gate.is_open else gate.pass_through()

    def _seen(self, *, ended: bool = False) -> str:
        if self._running.done() and not ended:
            error = None if self._running.cancelled() else self._running.exception()
            return f"the worker is not running any more ({error!r}); seen last: {self.events[-20:]}"
        return f"points {dict(self.points)}; seen last: {self.events[-20:]}"


class _Alarm(asyncio.Event):
    """What wakes the worker; says when that is heeded."""

    def __init__(self, heeded: Callable[[], None]) -> None:
        super().__init__()
        self._heeded = heeded

    def clear(self) -> None:
        if self.is_set():
            self._heeded()
        super().clear()


async def until(condition: Callable[[], T], stirred: set[asyncio.Event], seen: Callable[[], str]) -> T:
    """Wait for a condition, looked at whenever something stirs; after a minute fail with what was seen."""
    event = asyncio.Event()
    stirred.add(event)
    try:
        async with asyncio.timeout(PATIENCE):
            while not (found := condition()):
                await event.wait()
                event.clear()
    except TimeoutError:
        raise AssertionError(seen()) from None
    finally:
        stirred.discard(event)
    return found


def _id(job: Any) -> Any:
    return getattr(job, "id", job)
