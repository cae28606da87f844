"""Hearing that jobs have ended, for all waiters of a process on one connection.

There is no thread or task in the background. Whoever waits and finds nobody listening listens for all,
and tells the others what was heard; when that one leaves, the next takes over. A notification is only
ever a hint: whoever is told looks at the job itself. When the line is lost every waiter is told, so that
each looks again, and until it can be had back they look once a second. The connection is closed when the
last waiter has gone.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import psycopg
from psycopg import AsyncConnection, Connection, sql

from shiftwork.errors import ShiftworkError

WITHOUT_EARS = 1.0


Happening = TypeVar("Happening", threading.Event, asyncio.Event)


@dataclass(eq=False, slots=True)
class _Waiter(Generic[Happening]):
    """Somebody who waits for one job."""

    payload: str
    stirred: Happening  # set when told, or asked to take over
    told: bool = False


def _tell(waiters: Iterable[_Waiter[Any]], heard: set[str] | None) -> None:
    """Pass on what was heard; None: something may have been missed, so everybody looks."""
    for waiter in waiters:
        waiter.told = waiter.told or heard is None or waiter.payload in heard
        waiter.stirred.set()


class Ear:
    """Listens for blocking waiters."""

    def __init__(self, connect: Callable[[], Connection[Any]], channel: str) -> None:
        self._connect = connect
        self._channel = channel
        self._waiters: set[_Waiter[threading.Event]] = set()
        self._connection: Connection[Any] | None = None
        self._listening = threading.Lock()
        self._guard = threading.Lock()

    @contextmanager
    def waiting_for(self, payload: str) -> Iterator[Callable[[float], None]]:
        """Within the block, call the result to wait so many seconds or until the payload is announced."""
        waiter = _Waiter(payload, threading.Event())
        with self._guard:
            self._waiters.add(waiter)
        try:
            yield lambda seconds: self._wait(waiter, seconds)
        finally:
            with self._guard:
                self._waiters.discard(waiter)
                last = not self._waiters
            if last and self._listening.acquire(blocking=False):
                self._hang_up()
                self._listening.release()

    def _wait(self, waiter: _Waiter[threading.Event], seconds: float) -> None:
        until = time.monotonic() + seconds
        while not waiter.told:
            left = until - time.monotonic()
            if left <= 0 and self._connection is not None:
                return
            waiter.stirred.clear()
            if self._listening.acquire(blocking=False):
                heard: set[str] | None = None
                try:
                    heard = self._listen(max(left, 0))
                finally:
                    self._listening.release()
                    with self._guard:
                        _tell(self._waiters, heard)
            else:
                waiter.stirred.wait(max(left, 0.1))
        waiter.told = False

    def _listen(self, seconds: float) -> set[str] | None:
        try:
            if self._connection is None:
                self._connection = self._call()
                return None  # whatever was said before is lost
            return {note.payload for note in self._connection.notifies(timeout=seconds, stop_after=1)}
        except (psycopg.Error, ShiftworkError, OSError):
            self._hang_up()
            time.sleep(min(seconds, WITHOUT_EARS))
            return None
        except BaseException:
            self._hang_up()
            raise

    def _call(self) -> Connection[Any]:
        connection = self._connect()
        try:
            connection.execute(sql.SQL("listen {}").format(sql.Identifier(self._channel)))
        except BaseException:
            connection.close()
            raise
        return connection

    def _hang_up(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


class AEar:
    """Listens for awaiting waiters of one event loop."""

    def __init__(self, connect: Callable[[], Awaitable[AsyncConnection[Any]]], channel: str) -> None:
        self._connect = connect
        self._channel = channel
        self._waiters: set[_Waiter[asyncio.Event]] = set()
        self._connection: AsyncConnection[Any] | None = None
        self._listening = False

    @asynccontextmanager
    async def waiting_for(self, payload: str) -> AsyncIterator[Callable[[float], Awaitable[None]]]:
        """Within the block, await the result to wait so many seconds or until the payload is announced."""
        waiter = _Waiter(payload, asyncio.Event())
        self._waiters.add(waiter)
        try:
            yield lambda seconds: self._wait(waiter, seconds)
        finally:
            self._waiters.discard(waiter)
            if not self._waiters and not self._listening:
                await self._hang_up()

    async def _wait(self, waiter: _Waiter[asyncio.Event], seconds: float) -> None:
        until = time.monotonic() + seconds
        while not waiter.told:
            left = until - time.monotonic()
            if left <= 0 and self._connection is not None:
                return
            waiter.stirred.clear()
            if not self._listening:
                self._listening = True
                heard: set[str] | None = None
                try:
                    heard = await self._listen(max(left, 0))
                finally:
                    self._listening = False
                    _tell(self._waiters, heard)
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout(max(left, 0.1)):
                        await waiter.stirred.wait()
        waiter.told = False

    async def _listen(self, seconds: float) -> set[str] | None:
        try:
            if self._connection is None:
                self._connection = await self._call()
                return None  # whatever was said before is lost
            notes = self._connection.notifies(timeout=seconds, stop_after=1)
            return {note.payload async for note in notes}
        except (psycopg.Error, ShiftworkError, OSError):
            await self._hang_up()
            await asyncio.sleep(min(seconds, WITHOUT_EARS))
            return None
        except BaseException:
            await self._hang_up()
            raise

    async def _call(self) -> AsyncConnection[Any]:
        connection = await self._connect()
        try:
            await connection.execute(sql.SQL("listen {}").format(sql.Identifier(self._channel)))
        except BaseException:
            await connection.close()
            raise
        return connection

    async def _hang_up(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()
