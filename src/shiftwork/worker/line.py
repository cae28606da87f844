"""A connection of the worker's own, which is made anew whenever it was lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from psycopg import AsyncConnection

from shiftwork.database import Plan, Rows, Statement, aconnect, aexecuting, arun, cut
from shiftwork.errors import DatabaseError, DatabaseUnavailable, EmbeddedError, ShiftworkError
from shiftwork.settings import Settings

T = TypeVar("T")

LAST = 1.0
"""Seconds in which the server has to hear that nobody waits for it any more."""


class Patience:
    """How long to wait before something is tried again: twice as long each time, and not the same for everybody."""

    def __init__(self, first: float, most: float) -> None:
        self._first = first
        self._most = most
        self._next = first
        self.tries = 0
        """How often it was tried again since it last worked."""

    def __call__(self) -> float:
        """Seconds until the next try."""
        self.tries += 1
        pause, self._next = self._next, min(2 * self._next, self._most)
        return min(pause * random.uniform(0.75, 1.25), self._most)  # noqa: S311

    def reset(self) -> None:
        """It has worked: the next failure is a first one."""
        self._next = self._first
        self.tries = 0


class Line:
    """Carries out plans, one at a time, for one part of a worker."""

    def __init__(
        self,
        settings: Settings,
        name: Callable[[], str],
        revive: Callable[[], None] | None = None,
        *,
        answer: float | None = None,
        dsn: str | None = None,
    ) -> None:
        """`answer`: seconds in which each statement has to be answered; None is what the settings say.

        `dsn`: another way to the database, which is tried first.
        """
        self._settings = settings
        self._dsn = dsn
        self._answer = settings.answer_within.total_seconds() if answer is None else answer
        self._name = name
        self._revive = revive
        self._connection: AsyncConnection[Any] | None = None
        self._awaited: AsyncConnection[Any] | None = None
        """The one on which somebody waits for an answer."""

    async def perform(self, plan: Plan[T], *, within: float | None = None) -> T:
        """Carry out a plan; after an outage the next one begins on a new connection.

        A line on which a statement has no answer is half open, and given up. `within` so many seconds all of the plan has to
        be done, if that is said.
        """
        if within is None:
            return await self._perform(plan)
        performing = asyncio.ensure_future(self._perform(plan))
        try:
            await asyncio.wait([performing], timeout=within)
        finally:
            if not performing.done():
                self.drop()  # nobody will answer any more
                performing.cancel()
                await asyncio.wait([performing], timeout=1)
        if not performing.done() or performing.cancelled():
            raise _no_answer(within, maybe_committed=True)
        return performing.result()

    async def _perform(self, plan: Plan[T]) -> T:
        connection = await self._open()
        execute, loop = self._execute, asyncio.get_running_loop()

        async def answered(statement: Statement) -> Rows:
            deadline = loop.call_later(self._answer, cut, connection)
            try:
                return await execute(statement)
            except DatabaseUnavailable as error:
                if loop.time() < deadline.when():
                    raise
                raise _no_answer(self._answer, error.maybe_committed) from None
            finally:
                deadline.cancel()

        self._awaited, keep = connection, True
        try:
            return await arun(plan, answered)
        except asyncio.CancelledError:
            keep = False
            raise
        except DatabaseError as error:
            keep = not will_pass(error)  # lost, or what this session was told when it began is the reason
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise asyncio.CancelledError from error  # which psycopg forgets when the line fails meanwhile
            raise
        finally:
            if self._awaited is connection:
                self._awaited = None
            if self._connection is not connection:  # dropped meanwhile
                connection.pgconn.finish()
            elif not keep or connection.closed:
                self.drop()

    async def _open(self) -> AsyncConnection[Any]:
        if self._connection is None:
            connection = await self._connect()
            self._connection = connection
            self._execute = aexecuting(connection, self._settings.schema, lent=False)
        return self._connection

    async def _connect(self) -> AsyncConnection[Any]:
        if self._dsn is not None:
            with suppress(DatabaseUnavailable):
                return await aconnect(self._settings, self._dsn, name=self._name())
        try:
            return await aconnect(self._settings, name=self._name())
        except DatabaseUnavailable:
            if self._revive is None:
                raise
        try:
            await asyncio.to_thread(self._revive)
        except EmbeddedError as error:  # an outage as any other: it is tried again
            raise DatabaseUnavailable(str(error), maybe_committed=False) from None
        return await aconnect(self._settings, name=self._name())

    async def abandon(self, task: asyncio.Task[Any]) -> None:
        """End a task that speaks here: what the server does for it is cancelled, if that can be told; then we hang up."""
        task.cancel()
        await asyncio.wait([task], timeout=LAST)
        self.drop()
        task.cancel()
        await asyncio.wait([task])

    def drop(self) -> None:
        """Hang up, without waiting for anything: the other side may not answer.

        Who still waits here finds the line dead. To free its descriptor under him would let the next who gets it be heard no more,
        for he stops watching it when he is told.
        """
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if connection is self._awaited:
            cut(connection)
        else:
            connection.pgconn.finish()


def will_pass(error: ShiftworkError) -> bool:
    """Whether the same may go well another time: an outage, a deadlock, a lock or a statement that took too long."""
    passing = ("25", "40", "55", "57")
    return isinstance(error, DatabaseUnavailable) or (getattr(error, "sqlstate", None) or "")[:2] in passing


def _no_answer(seconds: float, maybe_committed: bool) -> DatabaseUnavailable:
    return DatabaseUnavailable(f"no answer within {seconds:.1f} s", maybe_committed=maybe_committed)
