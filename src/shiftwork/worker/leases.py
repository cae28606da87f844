"""Holding on to jobs: one lease for all of them, renewed from a thread of its own.

The database is the judge of who holds a job. Three things follow. The worker renews its lease every third of it, on a
thread, an event loop and a connection that nothing else uses, so neither a handler that blocks nor a pool that is empty
can make it look dead. It compares, with every beat, what it holds with what the database thinks: what was lost or is to
be cancelled comes back with the answer, and rows that it does not know of (a claim's answer was lost on the wire) are
given back there. And it does not trust its luck: when it could not renew for three quarters of the lease it tells its
handlers to stop, while it still holds their jobs; the time is counted from before the last renewal was sent, by a clock
that goes on while the machine is suspended.

When a part fails: a beat that gets no answer is given up when the handlers have to be told, its connection dropped, and
the next tried on a new one. A beat that comes too late finds the worker given up; then everything it held is lost, and it
registers anew. A claim that got no answer may have taken jobs: nothing is claimed until a beat has found them. The thread
itself is watched from the event loop of the worker: if it has ended, or does not turn, nobody would notice that the lease
ends; so the worker does, while it still holds its jobs.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from typing import Any

from shiftwork import operations
from shiftwork.errors import DatabaseError, ShiftworkError
from shiftwork.operations import Pulse
from shiftwork.settings import Settings
from shiftwork.stores.store import Store
from shiftwork.worker.line import Line
from shiftwork.worker.run import Run, Stop

TOO_LATE = 0.75
"""The part of a lease after which handlers are told, if it could not be renewed."""

AGAIN = 0.1
"""The part of a lease after which a beat that failed is tried again."""

STUCK = (0.5, 5.0)
"""The part of a lease after which a thread that does not turn is given up, with a beat before it in time; and seconds, at least."""

WATCH = 1.0
"""Seconds between two looks at whether the thread turns, at most."""

LAST = 0.5
"""Seconds for a beat that is under way at the very end."""

Held = dict[int, Run]


def through_suspend() -> float:
    """Seconds of a clock that does not stop while the machine sleeps."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def ping(loop: asyncio.AbstractEventLoop) -> threading.Event:
    """Set by an event loop as soon as it turns, whatever thread it has."""
    turned = threading.Event()
    with contextlib.suppress(RuntimeError):  # it has ended
        loop.call_soon_threadsafe(turned.set)
    return turned


class Leases:
    """Renews the lease of a worker; what it learns is passed on to the event loop of the worker."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        holding: Held,
        *,
        pulse: Callable[[Pulse, Held], None],
        lapse: Callable[[], None],
        silence: Callable[[ShiftworkError | None], None],
        broken: Callable[[str], None],
        says: Callable[[], Mapping[str, Any]],
        revive: Callable[[], None] | None = None,
    ) -> None:
        self.worker = 0
        self.answered = 0
        """The last claim that had an answer."""

        self._settings = settings
        self._store = store
        self._holding = holding
        self._pulse = pulse
        self._lapse = lapse
        self._silence = silence
        self._broken = broken
        self._says = says
        # Behind a pooler whose sessions are all lent, a worker would look dead: where there is a way past it, that is taken.
        self._line = Line(settings, lambda: store.session(self.worker), revive, dsn=settings.listen_dsn)
        self.lapsed = False
        """Whether it is too late to trust in the lease."""

        self.took = 0.0
        """Seconds that the last beat took."""

        self._error = ""
        self._seen = 0
        self._renewed = 0.0
        self._silent = False
        self._asked: list[Future[bool]] = []
        self._home: asyncio.AbstractEventLoop
        self._loop: asyncio.AbstractEventLoop | None = None
        self._nudged: asyncio.Event | None = None
        self._closing = False
        self._thread: threading.Thread | None = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def seconds(self) -> float:
        """How long the lease is."""
        return self._settings.lease.total_seconds()

    def begin(self, worker: int, sent: float) -> None:
        """Hold the lease of a worker that was registered when the clock showed `sent`."""
        self._home = asyncio.get_running_loop()
        self.worker, self._renewed, self._seen, self.lapsed = worker, sent, 0, False
        if self._thread is None:
            self._thread = threading.Thread(target=self._live, name="shiftwork-lease", daemon=True)
            self._thread.start()
            self._watching = asyncio.create_task(self._watch())
        else:
            self.nudge()

    def nudge(self) -> None:
        """Beat now: there may be news."""
        if self._loop is not None and self._nudged is not None:
            with contextlib.suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self._nudged.set)

    def ping(self) -> threading.Event:
        """Set by the thread as soon as it turns; at once if it has not begun."""
        if self._loop is not None:
            return ping(self._loop)
        turned = threading.Event()
        turned.set()
        return turned

    async def reconcile(self) -> bool:
        """Find what a claim without an answer has taken; says whether that could be done."""
        if self._thread is None or not self._thread.is_alive():
            return False
        future: Future[bool] = Future()
        self._asked.append(future)
        self.nudge()
        return await asyncio.wrap_future(future)

    async def close(self) -> None:
        """Stop renewing."""
        self._closing = True
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        if self._thread is not None:
            self.nudge()
            await asyncio.to_thread(self._thread.join, LAST)
            if self._thread.is_alive() and self._loop is not None:
                with contextlib.suppress(RuntimeError):  # it has just ended
                    self._loop.call_soon_threadsafe(self._line.drop)  # nobody answers
                await asyncio.to_thread(self._thread.join, LAST)

    async def _watch(self) -> None:
        """See from outside that the thread turns: what it does not do any more, nobody else would."""
        every, (part, least) = min(self.seconds * AGAIN, WATCH), STUCK
        turned, looks, why = self.ping(), 0, ""
        while not why:
            await asyncio.sleep(every)
            looks += 1  # and not the clock, which goes on while all of the process is stopped
            if self._thread is None or not self._thread.is_alive():
                why = self._error or "it has ended"
            elif turned.is_set():
                turned, looks = self.ping(), 0
            elif looks * every >= max(self.seconds * part, least):
                why = f"it has not turned for {looks * every:.1f} s"
        self.lapsed = True
        self._broken(why)

    def _live(self) -> None:
        try:
            asyncio.run(self._keep())
        except BaseException as error:  # noqa: BLE001  -- told by who watches
            self._error = f"{type(error).__name__}: {error}"
        finally:
            _answer(self._asked, False)

    async def _keep(self) -> None:
        self._loop, self._nudged = asyncio.get_running_loop(), asyncio.Event()
        beat = self._settings.renew_every.total_seconds()
        pause = beat
        while not self._closing:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._nudged.wait(), max(pause, 0))
            if self._closing:
                break
            self._nudged.clear()
            sent = through_suspend()
            pause = beat if await self._beat(sent) else self.seconds * AGAIN
            if not self.lapsed:
                late = self._renewed + self.seconds * TOO_LATE - through_suspend()
                if late <= 0:
                    self.lapsed = True
                    for run in self._holding.copy().values():
                        if run.stop is None and not (run.ended or run.concluding):
                            run.stop = Stop.LAPSED  # seen by threads even if the event loop is blocked
                            if (process := run.process) is not None:
                                process.kill(run)
                    self._tell(self._lapse)
                pause = min(pause, max(late, 0))
            pause -= 0 if self._silent else through_suspend() - sent
        self._line.drop()

    async def _beat(self, sent: float) -> bool:
        asked = [self._asked.pop() for _ in range(len(self._asked))]  # whoever asks later waits for the next
        answered, worker = (
            self.answered,
            self.worker,
        )  # before what is held: a job that comes in between is no stray
        held = self._holding.copy()
        plan = operations.heartbeat(
            self._store,
            worker,
            [(run.id, run.attempt) for run in held.values()],
            lease=self.seconds,
            answered=answered,
            since=self._seen,
            reconcile=bool(asked),
            **self._says(),
        )
        # Until the handlers have to be told; once they were, as long as it takes to be back.
        late = self._renewed + self.seconds * TOO_LATE - sent
        patience = self.seconds if self.lapsed else max(late, self.seconds * AGAIN)
        try:
            pulse = await self._line.perform(plan, within=patience)
        except Exception as raised:  # noqa: BLE001  -- whatever it is, this thread has to go on
            error = raised if isinstance(raised, ShiftworkError) else DatabaseError(repr(raised))
            self._silent = True
            self._tell(self._silence, error)
            _answer(asked, False)
            return False
        if self._silent:
            self._silent = False
            self._tell(self._silence, None)
        if worker == self.worker:
            self._renewed, self._seen, self.lapsed = sent, answered, False
            self.took = through_suspend() - sent
            self._tell(self._pulse, pulse, held)
        _answer(asked, True)
        return True

    def _tell(self, call: Callable[..., Any], *args: object) -> None:
        try:
            self._home.call_soon_threadsafe(call, *args)
        except RuntimeError:  # the worker's loop is closed
            self._closing = True


def _answer(asked: list[Future[bool]], found: bool) -> None:
    for future in asked:
        with contextlib.suppress(InvalidStateError):  # whoever asked does not wait any more
            future.set_result(found)
