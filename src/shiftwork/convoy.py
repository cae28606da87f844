"""Single jobs that callers of one process enqueue at the same time go together.

A job that is enqueued while few others are on their way goes at once, alone. When as many statements are under way as
may be, whoever comes waits until one of them has returned, and all who have come by then go in one statement: one
round trip and one commit for all of them, on one connection. Nobody waits for others to come, and everybody hears of
his own job, once it is committed.

What the database refuses together goes again, each job alone, so that an error is told to him whom it concerns. When
a line is lost while jobs were under way nobody knows what became of them, and each of their senders is told so.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar

from shiftwork.errors import DatabaseUnavailable, ShiftworkError
from shiftwork.job import NewJob, Sent

MOST_UNDER_WAY = 2
"""Statements at once: the server works on one while another is on its way."""

MOST_TOGETHER = 1_000
BYTES_TOGETHER = 1 << 20
PATIENCE = 1.0
"""Seconds after which nobody waits any more: those under way may wait for something that the caller holds."""

Happening = TypeVar("Happening", threading.Event, asyncio.Event)


class _Sender(Generic[Happening]):
    """Somebody whose job waits to go with others."""

    __slots__ = ("answer", "error", "job", "load", "stirred", "task", "waits")

    def __init__(self, job: NewJob[Any], stirred: Happening, task: asyncio.Task[Any] | None = None) -> None:
        self.job = job
        self.stirred: Happening = stirred
        self.task = task  # in which it waits, if in one
        self.waits = True  # until it is part of a load
        self.load: list[_Sender[Happening]] = []  # what it has to send, its own job first
        self.answer: Sent | None = None
        self.error: DatabaseUnavailable | None = None


class _Waiting(Generic[Happening]):
    """Who waits, and how many statements are under way."""

    def __init__(self) -> None:
        self.under_way = 0
        self.senders: list[_Sender[Happening]] = []

    def goes_at_once(self) -> bool:
        """Whether there is room for one more statement, which is then taken."""
        if self.under_way >= MOST_UNDER_WAY:
            return False
        self.under_way += 1
        return True

    def next_load(self) -> list[_Sender[Happening]]:
        """A statement has returned: who goes next, if anybody waits; else there is room again."""
        load: list[_Sender[Happening]] = []
        size = 0
        for sender in self.senders[:]:
            if sender.task is not None and sender.task.cancelling():
                self.leaves(sender)  # as all do when their event loop is about to end
        for sender in self.senders[:MOST_TOGETHER]:
            size += len(sender.job.payload)
            if load and size > BYTES_TOGETHER:
                break
            sender.waits = False
            load.append(sender)
        del self.senders[: len(load)]
        if not load:
            self.under_way -= 1
        return load

    def leaves(self, sender: _Sender[Happening]) -> bool:
        """Whether somebody still waits, who then does so no more."""
        if sender.waits:
            sender.waits = False
            self.senders.remove(sender)
            return True
        return False


def _answered(load: Sequence[_Sender[Any]], answers: Sequence[Sent]) -> None:
    for sender, answer in zip(load, answers, strict=True):
        sender.answer = answer


def _lost(load: Sequence[_Sender[Any]], error: BaseException) -> None:
    """Nobody knows what became of them. Each gets an error of its own, since each is raised elsewhere."""
    for sender in load:
        if isinstance(error, DatabaseUnavailable):
            sender.error = DatabaseUnavailable(
                str(error), maybe_committed=error.maybe_committed, sqlstate=error.sqlstate
            )
        else:
            sender.error = DatabaseUnavailable(
                "whoever sent this job together with others was interrupted (it may have been committed)",
                maybe_committed=True,
            )


class Convoy:
    """For blocking callers."""

    def __init__(self, enqueue: Callable[[Sequence[NewJob[Any]]], list[Sent]]) -> None:
        self._enqueue = enqueue
        self._renew()

    def _renew(self) -> None:
        self._process = os.getpid()
        self._guard = threading.Lock()
        self._waiting: _Waiting[threading.Event] = _Waiting()

    def send(self, job: NewJob[Any]) -> Sent:
        """Enqueue a job, alone or together with others."""
        if self._process != os.getpid():
            self._renew()  # forked: who waits and sends there does not do so here
        sender: _Sender[threading.Event] | None = None
        with self._guard:
            if not self._waiting.goes_at_once():
                sender = _Sender(job, threading.Event())
                self._waiting.senders.append(sender)
        if sender is None:
            try:
                return self._alone(job)
            finally:
                self._let_next_go()
        try:
            if not sender.stirred.wait(PATIENCE):
                with self._guard:
                    alone = self._waiting.leaves(sender)
                if not alone:
                    sender.stirred.wait()
            if sender.load:
                self._send(sender)
        except BaseException:  # as when somebody presses ^C
            self._leave(sender)
            raise
        if sender.error is not None:
            raise sender.error
        return sender.answer or self._alone(job)

    def _alone(self, job: NewJob[Any]) -> Sent:
        [sent] = self._enqueue([job])
        return sent

    def _send(self, me: _Sender[threading.Event]) -> None:
        load = me.load
        try:
            _answered(load, self._enqueue([sender.job for sender in load]))
        except DatabaseUnavailable as error:
            _lost(load, error)
        except ShiftworkError:
            pass  # each goes alone
        except BaseException as error:
            _lost(load, error)
            raise
        finally:
            me.load = []
            for sender in load:
                sender.stirred.set()
            self._let_next_go()

    def _let_next_go(self) -> None:
        with self._guard:
            if load := self._waiting.next_load():
                load[0].load = load
        if load:
            load[0].stirred.set()

    def _leave(self, sender: _Sender[threading.Event]) -> None:
        """Somebody gives up before his job was sent; what he was to send is left to the next."""
        with self._guard:
            if self._waiting.leaves(sender) or not sender.load:
                return
            for other in sender.load[1:]:
                other.waits = True
            self._waiting.senders[:0] = sender.load[1:]
        self._let_next_go()


class AConvoy:
    """For callers in one event loop."""

    def __init__(self, enqueue: Callable[[Sequence[NewJob[Any]]], Awaitable[list[Sent]]]) -> None:
        self._enqueue = enqueue
        self._waiting: _Waiting[asyncio.Event] = _Waiting()
        self._sending: set[asyncio.Task[None]] = set()

    async def send(self, job: NewJob[Any]) -> Sent:
        """Enqueue a job, alone or together with others."""
        if self._waiting.goes_at_once():
            try:
                return await self._alone(job)
            finally:
                self._let_next_go()
        sender = _Sender(job, asyncio.Event(), asyncio.current_task())
        self._waiting.senders.append(sender)
        too_long = asyncio.get_running_loop().call_later(PATIENCE, self._lose_patience, sender)
        try:
            await sender.stirred.wait()
        except BaseException:
            self._waiting.leaves(sender)  # else it is on its way
            raise
        finally:
            too_long.cancel()
        if sender.error is not None:
            raise sender.error
        return sender.answer or await self._alone(job)

    async def _alone(self, job: NewJob[Any]) -> Sent:
        [sent] = await self._enqueue([job])
        return sent

    async def _send(self, load: Sequence[_Sender[asyncio.Event]]) -> None:
        try:
            _answered(load, await self._enqueue([sender.job for sender in load]))
        except DatabaseUnavailable as error:
            _lost(load, error)
        except ShiftworkError:
            pass  # each goes alone
        except BaseException as error:
            _lost(load, error)
            raise
        finally:
            for sender in load:
                sender.stirred.set()
            self._let_next_go()

    def _lose_patience(self, sender: _Sender[asyncio.Event]) -> None:
        if self._waiting.leaves(sender):
            sender.stirred.set()

    def _let_next_go(self) -> None:
        if load := self._waiting.next_load():
            # A task of its own, so that no caller who is cancelled takes others with him.
            task = asyncio.get_running_loop().create_task(self._send(load))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)
