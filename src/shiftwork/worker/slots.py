"""Fixed slots: coroutines that live as long as the worker, each with one job at a time.

A task for each job would cost more than all the rest of its way through the worker. So a slot takes job after job. One
whose handler never waits, it simply finishes and goes on; only when a handler does wait is another slot woken for what
is left. After a few milliseconds of that it lets everybody else have a turn.

A handler must not find what the one before it left behind, so each runs in a context (of context variables) of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import time
import types
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Generator, Sequence
from contextvars import Context, copy_context
from typing import Any, Self, TypeAlias, cast

from shiftwork.outcome import Returned
from shiftwork.worker.run import Run, Stop, current

Steps: TypeAlias = "types.GeneratorType[Any, Any, None]"
TURN = 0.005
"""Seconds for which a slot goes on without letting others have a turn."""


class Slots:
    """So many jobs at once, and not one more."""

    def __init__(
        self,
        many: int,
        begin: Callable[[Run], Coroutine[Any, Any, None] | None],
        freed: Callable[[Sequence[Run]], None],
    ) -> None:
        """`begin` begins an attempt and gives what is left to await of it, None if it has ended by then."""
        self.many = many
        self.busy: set[Run] = set()
        self.ready: deque[Run] = deque()
        self._begin = begin
        self._freed = freed
        self.closing = False
        self._idle: deque[asyncio.Future[None]] = deque()
        self._slots: list[asyncio.Task[None]] = []
        self._turn = 0.0

    @property
    def free(self) -> int:
        """How many jobs can begin now."""
        return self.many - len(self.busy) - len(self.ready)

    def put(self, runs: Sequence[Run]) -> None:
        """Slots take them."""
        self.ready.extend(runs)
        if len(self.ready) == len(runs):  # else somebody is at it
            self.wake()

    def wake(self) -> None:
        """Somebody has to wait: let another slot take what is ready."""
        if not self.ready:
            return
        while self._idle:
            idle = self._idle.popleft()
            if not idle.done():
                idle.set_result(None)
                return
        if len(self._slots) < self.many:
            self._slots.append(asyncio.create_task(self._slot()))

    async def _slot(self) -> None:
        me = asyncio.current_task()
        assert me is not None  # noqa: S101
        busy = self.busy
        loop = asyncio.get_running_loop()
        while True:
            while self.ready:
                if (waiting := self._begin_some(me)) is not None:
                    run, rest = waiting
                    run.slot = me
                    busy.add(run)
                    try:
                        await rest
                    finally:
                        busy.discard(run)
                        run.slot = None
                        self._freed((run,))
                    if self.closing:
                        return
                if me.cancelling():
                    await _forget_cancelling(me)
                if time.perf_counter() - self._turn > TURN:
                    await asyncio.sleep(0)
                    self._turn = time.perf_counter()
            idle = loop.create_future()
            self._idle.append(idle)
            try:
                await idle
            except asyncio.CancelledError:
                if self.closing:
                    raise
                await _forget_cancelling(me)
            self._turn = time.perf_counter()

    def _begin_some(self, me: asyncio.Task[None]) -> tuple[Run, Coroutine[Any, Any, None]] | None:
        """Begin jobs until one waits, which is given back with what is left of it, or until others have to have a turn."""
        ready, begin, clock, until = self.ready, self._begin, time.perf_counter, self._turn + TURN
        ended: list[Run] = []
        try:
            while ready:
                run = ready.popleft()
                if (rest := begin(run)) is not None:
                    return run, rest
                ended.append(run)
                if clock() > until or me.cancelling():
                    break
        finally:
            if ended:
                self._freed(ended)
        return None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.closing = True
        await end_all(self._slots)


async def end_all(tasks: Collection[asyncio.Task[None]]) -> None:
    """Cancel what still runs; what does not heed that would keep the event loop from being closed."""
    for task in tasks:
        task.cancel()
    if tasks:
        _, stubborn = await asyncio.wait(tasks, timeout=1)
        for task in stubborn:
            with contextlib.suppress(Exception):
                task.get_coro().close()
            task.add_done_callback(_have_looked)
            task.cancel()


def _have_looked(task: asyncio.Task[None]) -> None:
    """Nobody else will, and it would be told of as an error that nobody saw."""
    if not task.cancelled():
        task.exception()


async def _forget_cancelling(slot: asyncio.Task[None]) -> None:
    """Whoever cancelled a slot meant the job that ran in it; the next one must not be hit."""
    while slot.cancelling():
        slot.uncancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(0)  # what was asked for and not yet delivered


def isolation(run: Run) -> Context:
    """A context (of context variables) for the handler of a job alone."""
    before = current.set(run)  # here, since to enter the other one for it takes longer than all of this
    context = copy_context()
    current.reset(before)
    return context


def first_steps() -> Steps:
    """Takes the first step of each coroutine that is sent to it, and gives `Returned` if that was its only one; else it yields from it.

    A coroutine that is sent to by hand says by an exception that it has returned, which takes longer than all of a short
    one; when it is awaited it need not. One that waits keeps what awaits it, and one that raises ends it: then the next
    needs another.
    """
    steps = cast("Steps", _steps())
    steps.send(None)
    return steps


@types.coroutine
def _steps() -> Any:  # noqa: ANN401
    coroutine = yield
    while True:
        coroutine = yield Returned((yield from coroutine))


def rest_of(
    coroutine: Coroutine[Any, Any, Any] | Steps, pending: object, step: Callable[..., Any]
) -> Generator[Any, Any, Any]:
    """What is left of a coroutine whose first step was taken by hand, and waits for this."""
    while not _has_returned(coroutine):
        try:
            try:
                answer = yield pending
            except GeneratorExit:
                step(coroutine.close)
                raise
            except BaseException as error:  # noqa: BLE001  -- whatever is thrown in is its own to deal with
                pending = step(coroutine.throw, error)
            else:
                pending = step(coroutine.send, answer)
        except StopIteration as end:
            return end.value
    return cast("Returned", pending).value


def _has_returned(coroutine: Coroutine[Any, Any, Any] | Steps) -> bool:
    """Whether what took its first step is free for another: else it yields from it. What is yielded says nothing, it is the handler's."""
    return isinstance(coroutine, types.GeneratorType) and coroutine.gi_yieldfrom is None


class Waiting:
    """A coroutine that waits after its first step; whoever awaits this goes on with it, each step taken by `step`."""

    __slots__ = ("_coroutine", "_pending", "_step")

    def __init__(
        self, coroutine: Coroutine[Any, Any, Any] | Steps, pending: object, step: Callable[..., Any]
    ) -> None:
        self._coroutine = coroutine
        self._pending = pending
        self._step = step

    def __await__(self) -> Generator[Any, Any, Any]:
        """All steps but the first."""
        return rest_of(self._coroutine, self._pending, self._step)


def directly(step: Callable[..., Any], *given: object) -> Any:  # noqa: ANN401
    """A step as it is."""
    return step(*given)


class Deadlines:
    """One timer for all attempts that may not run for ever."""

    def __init__(self, stop: Callable[[Run, Stop, str], None]) -> None:
        self._stop = stop
        self._heap: list[tuple[float, int, Run]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._most = 1024

    def add(self, run: Run, seconds: float) -> None:
        """Stop this attempt after so many seconds, unless it has ended by then."""
        loop = asyncio.get_running_loop()
        when = loop.time() + seconds
        heapq.heappush(self._heap, (when, id(run), run))
        if len(self._heap) > self._most:
            self._heap = [one for one in self._heap if not one[2].ended]
            heapq.heapify(self._heap)
            self._most = max(1024, 2 * len(self._heap))
        if self._heap[0][2] is run:
            self._set(loop)

    def _set(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._heap and self._heap[0][2].ended:
            heapq.heappop(self._heap)
        if self._heap:
            self._timer = loop.call_at(self._heap[0][0], self._ring, loop)

    def _ring(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        while self._heap and self._heap[0][0] <= now:
            _, _, run = heapq.heappop(self._heap)
            if not run.ended:
                self._stop(run, Stop.TIMEOUT, "")
        self._set(loop)
