"""Single jobs that coroutines of one event loop enqueue at the same time go together.

A job that is enqueued while few others are on their way goes at once, alone. When as many statements are under way as
may be, whoever comes waits until one of them is back, and all who have come by then go in one statement: one round
trip and one commit for all of them, on one connection. Nobody waits for others to come, and everybody hears of his own
job, once it is committed.

What the database refuses together goes in halves, and what is refused alone is refused to him whose job it is. When a
line is lost while jobs were under way nobody knows what became of them, and each of their senders is told so: only
what is known not to be there is ever sent again.

Jobs that go together could wait for a lock that one of their senders holds, who waits for them. So they do not wait
for any lock longer than a moment, and then go alone; and those who wait for statements that do not come back go
without them after as long.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from typing import Any

from shiftwork.errors import DatabaseUnavailable, ShiftworkError
from shiftwork.job import NewJob, Sent

MOST_UNDER_WAY = 2
"""Statements at once: the server works on one while another is on its way."""

MOST_TOGETHER = 1_000
BYTES_TOGETHER = 1 << 20
PATIENCE = 1.0
"""Seconds for which those who wait do so for others, and those who go together for a lock."""

LOCKED = "55P03"


class _Sender:
    """Somebody whose job waits to go with others."""

    __slots__ = ("answer", "job")

    def __init__(self, job: bytes, loop: asyncio.AbstractEventLoop) -> None:
        self.job = job
        self.answer: asyncio.Future[Sent | None] = loop.create_future()
        """What was sent, None if it is to go alone; cancelled with him who waits for it."""

    def tell(self, answer: Sent | None) -> None:
        """Say what came of it, if somebody still wants to know."""
        if not self.answer.done():
            self.answer.set_result(answer)


class Convoy:
    """All who enqueue single jobs in one event loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        alone: Callable[[NewJob[Any]], Awaitable[Sent]],
        encode: Callable[[NewJob[Any]], bytes],
        together: Callable[[Sequence[bytes], float], Awaitable[Sequence[Sent]]],
    ) -> None:
        """`together` sends encoded jobs in one statement, which waits so many seconds at most for a lock."""
        self._loop = loop
        self._alone = alone
        self._encode = encode
        self._together = together
        self._under_way = 0
        self._waiting: deque[_Sender] = deque()
        self._impatient: asyncio.TimerHandle | None = None
        self._sending: set[asyncio.Task[None]] = set()

    async def send(self, job: NewJob[Any]) -> Sent:
        """Enqueue a job, alone or together with others."""
        if self._under_way < MOST_UNDER_WAY:
            self._under_way += 1
            try:
                return await self._alone(job)
            finally:
                self._one_is_back()
        sender = _Sender(self._encode(job), self._loop)
        self._waiting.append(sender)
        self._watch()
        return await sender.answer or await self._alone(job)

    def _watch(self) -> None:
        """See to it that nobody waits too long; the first in line has waited for longest."""
        if self._impatient is None and self._waiting:
            self._impatient = self._loop.call_later(PATIENCE, self._lose_patience)

    def _lose_patience(self) -> None:
        self._impatient = None
        self._under_way += 1  # those under way may never come back
        self._one_is_back()

    def _one_is_back(self) -> None:
        """There is room for one more statement: whoever waits goes."""
        if not self._waiting:
            self._under_way -= 1
            return
        load: list[_Sender] = []
        size = 0
        while self._waiting and len(load) < MOST_TOGETHER:
            sender = self._waiting[0]
            size += len(sender.job)
            if load and size > BYTES_TOGETHER:
                break
            self._waiting.popleft()
            if not sender.answer.done():
                load.append(sender)
        if self._impatient is not None:
            self._impatient.cancel()
            self._impatient = None
        self._watch()
        if not load:
            self._under_way -= 1
            return
        # A task of its own, so that no caller who is cancelled takes others with him.
        task = self._loop.create_task(self._send(load), context=Context())
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _send(self, load: Sequence[_Sender]) -> None:
        try:
            await self._carry(load)
        except asyncio.CancelledError:
            self._under_way -= 1  # and nobody goes any more: the loop ends
            for sender in load:
                sender.answer.cancel()
            raise
        except Exception as error:  # noqa: BLE001  -- a fault of ours, which must not leave anybody waiting
            _lost(load, DatabaseUnavailable(f"{type(error).__name__}: {error}", maybe_committed=True))
        self._one_is_back()

    async def _carry(self, load: Sequence[_Sender]) -> None:
        try:
            sent = await self._together([sender.job for sender in load], PATIENCE)
        except ShiftworkError as error:
            if isinstance(error, DatabaseUnavailable) and error.maybe_committed:
                _lost(load, error)
                return
            locked = getattr(error, "sqlstate", None) == LOCKED
            each_alone = len(load) == 1 or locked or isinstance(error, DatabaseUnavailable)
        else:
            for sender, answer in zip(load, sent, strict=True):
                sender.tell(answer)
            return
        if each_alone:
            for sender in load:
                sender.tell(None)
        else:
            half = len(load) // 2
            await self._carry(load[:half])
            await self._carry(load[half:])


def _lost(load: Sequence[_Sender], error: DatabaseUnavailable) -> None:
    """Nobody knows what became of them. Each gets an error of its own, since each raises it elsewhere."""
    for sender in load:
        if not sender.answer.done():
            sender.answer.set_exception(
                DatabaseUnavailable(str(error), maybe_committed=True, sqlstate=error.sqlstate)
            )
