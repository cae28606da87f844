"""A connection of the worker's own, which is made anew whenever it was lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import psycopg
from psycopg import AsyncConnection

from shiftwork.database import Plan, aconnect, aexecuting, arun
from shiftwork.errors import DatabaseUnavailable, EmbeddedError
from shiftwork.settings import Settings

T = TypeVar("T")


class Patience:
    """How long to wait before something is tried again: twice as long each time, and not the same for everybody."""

    def __init__(self, first: float, most: float) -> None:
        self._first = first
        self._most = most
        self._next = first

    def __call__(self) -> float:
        """Seconds until the next try."""
        pause, self._next = self._next, min(2 * self._next, self._most)
        return pause * random.uniform(0.75, 1.25)  # noqa: S311

    def reset(self) -> None:
        """It has worked: the next failure is a first one."""
        self._next = self._first


class Line:
    """Carries out plans, one at a time, for one part of a worker."""

    def __init__(
        self,
        settings: Settings,
        name: Callable[[], str],
        revive: Callable[[], None] | None = None,
    ) -> None:
        self._settings = settings
        self._name = name
        self._revive = revive
        self._connection: AsyncConnection[Any] | None = None

    async def perform(self, plan: Plan[T], *, within: float | None = None) -> T:
        """Carry out a plan; after an outage the next one begins on a new connection."""
        if within is None:
            return await self._perform(plan)
        performing = asyncio.ensure_future(self._perform(plan))
        try:
            await asyncio.wait([performing], timeout=within)
        finally:
            if not performing.done():
                self.drop()  # half open: nobody will answer any more
                performing.cancel()
                await asyncio.wait([performing], timeout=1)
        if not performing.done() or performing.cancelled():
            raise DatabaseUnavailable(f"no answer within {within:.1f} s", maybe_committed=True)
        return performing.result()

    async def _perform(self, plan: Plan[T]) -> T:
        connection = await self._open()
        try:
            return await arun(plan, aexecuting(connection, self._settings.schema, lent=False))
        except (DatabaseUnavailable, asyncio.CancelledError):
            self.drop()
            raise
        finally:
            if connection.closed:
                self._connection = None

    async def _open(self) -> AsyncConnection[Any]:
        if self._connection is None:
            try:
                self._connection = await aconnect(self._settings, name=self._name())
            except DatabaseUnavailable:
                if self._revive is None:
                    raise
                try:
                    await asyncio.to_thread(self._revive)
                except EmbeddedError as error:  # an outage as any other: it is tried again
                    raise DatabaseUnavailable(str(error), maybe_committed=False) from None
                self._connection = await aconnect(self._settings, name=self._name())
        return self._connection

    def drop(self) -> None:
        """Hang up, without waiting for anything: the other side may not answer."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.pgconn.finish()

    async def close(self) -> None:
        """Hang up politely."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(psycopg.Error):
                await connection.close()
