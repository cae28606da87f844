"""Being the only one: a session lock of PostgreSQL, on a connection that does nothing else.

Who has the lock is known to the server alone, and it ends with the session: nobody has to find out that its holder died. The key
is made from schema, name and the number of the process, so a supervisor with four processes holds four of them, and wherever else
the same command is started, never more than four are at work. The holder writes into its session's name who it is and since
when, for whoever is refused.

The lock says who may claim; it does not say who holds a job. That is decided by leases and fences as ever, so the moment in which a holder
has lost its session and does not know it yet is no danger to any job. It is short all the same: the connection is watched, and asked every
third of a lease. Who has lost it claims nothing until it has it back.

A pooler that hands sessions around would give the lock to whoever comes next. Where one stands in between, we ask in turns over this
connection and a second one who answers: if ours is ever answered by another session, or the second by ours, we refuse to go on, before
anything is locked. It takes several turns, since others use the pooler as well, and may have borrowed just that session.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psycopg
from psycopg import AsyncConnection

from shiftwork.database import aconnect, cut, translate
from shiftwork.errors import ConfigurationError, DatabaseUnavailable
from shiftwork.settings import Settings
from shiftwork.worker.supervised import process

SECOND_OPINION = 3.0
"""Seconds for a second connection, which a pooler of one session would never give."""

TURNS = 10
"""How often both are asked; the more sessions a pooler has idle, the longer it may take until one comes twice."""

# A lock of a bigint is shown in two halves.
_HELD = """
select activity.pid = pg_backend_pid() as ours, activity.application_name as who
  from pg_locks as lock join pg_stat_activity as activity on activity.pid = lock.pid
 where lock.locktype = 'advisory' and lock.objsubid = 1 and lock.granted
   and lock.database = (select oid from pg_database where datname = current_database())
   and lock.classid = %s and lock.objid = %s
"""

_SIGN = """
select set_config('application_name', left(format('singleton %%s %%s@%%s',
         to_char(clock_timestamp() at time zone 'utc', 'YYYY-MM-DD"T"HH24:MI:SS"Z"'), %s::int, %s::text), 63), false)
"""


class Singleton:
    """The right to be at work under a name, held by one process at a time; without a name, everybody has it."""

    def __init__(self, settings: Settings, lost: Callable[[str], None]) -> None:
        self.held = settings.singleton is None
        self.waits = False
        """Whether it was said that somebody else is the one."""

        self._settings = settings
        self._lost = lost
        self._key = _key(settings.schema, settings.singleton or "", process() or 0)
        self._connection: AsyncConnection[Any] | None = None
        self._watching: asyncio.Task[None] | None = None

    async def take(self) -> str | None:
        """Try to be the one; gives who is, if somebody else is."""
        if self.held:
            return None
        try:
            connection = self._connection = self._connection or await self._call()
            [(got,)] = await _ask(connection, "select pg_try_advisory_lock(%s)", self._key)
            if not got:
                found = await _ask(connection, _HELD, *_halves(self._key))
                return next((_signed(who) for _, who in found), "somebody who has just left")
            await _ask(connection, _SIGN, os.getpid(), socket.gethostname())
        except (psycopg.Error, OSError) as error:
            self._hang_up()
            if not isinstance(error, psycopg.Error):
                raise DatabaseUnavailable(str(error), maybe_committed=False) from None
            raise translate(error, self._settings.schema, commits=False, alive=False) from None
        self.held, self.waits = True, False
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch(connection))
        return None

    async def close(self) -> None:
        """Let go."""
        if self._connection is not None:
            cut(self._connection)
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        self._hang_up()

    async def _watch(self, connection: AsyncConnection[Any]) -> None:
        every = self._settings.renew_every.total_seconds()
        why = "its lock is not there any more"
        try:
            while True:
                async for _ in connection.notifies(timeout=every):  # which ends at once if the line does
                    pass
                async with asyncio.timeout(every):
                    found = await _ask(connection, _HELD, *_halves(self._key))
                if not any(ours for ours, _ in found):
                    break
        except (psycopg.Error, OSError) as error:  # a timeout is one of the latter
            why = str(error).strip() or "no answer"
        self._hang_up()
        self.held = False
        self._lost(why)

    async def _call(self) -> AsyncConnection[Any]:
        settings = self._settings
        name = f"{settings.schema} singleton"
        connection = await aconnect(settings, settings.listen_dsn, name=name)
        try:
            if await _answering(connection) != connection.info.backend_pid:  # somebody answers for the server
                await self._refuse_to_share(connection, name)
        except BaseException:
            connection.pgconn.finish()
            raise
        return connection

    async def _refuse_to_share(self, connection: AsyncConnection[Any], name: str) -> None:
        shared = False
        with suppress(TimeoutError, DatabaseUnavailable):
            async with (
                asyncio.timeout(SECOND_OPINION),
                await aconnect(self._settings, self._settings.listen_dsn, name=name) as second,
            ):
                ours = await _answering(connection)
                for _ in range(TURNS):
                    if await _answering(second) == ours or await _answering(connection) != ours:
                        shared = True
                        break
        if shared:
            raise ConfigurationError(
                "a singleton needs a session of its own, and this connection leads through a pooler that hands sessions "
                "around; give one that leads to the server itself, as listen_dsn (--listen-dsn)"
            )

    def _hang_up(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.pgconn.finish()


async def _ask(connection: AsyncConnection[Any], text: str, *params: object) -> list[Any]:
    cursor = await connection.execute(text.encode(), params)
    return await cursor.fetchall()


async def _answering(connection: AsyncConnection[Any]) -> int:
    """The session of the server that answers here."""
    [(pid,)] = await _ask(connection, "select pg_backend_pid()")
    return int(pid)


def _key(schema: str, name: str, number: int) -> int:
    written = f"{schema}\0{name}\0{number}".encode()
    return int.from_bytes(hashlib.blake2b(written, digest_size=8).digest(), signed=True)


def _halves(key: int) -> tuple[int, int]:
    return key >> 32 & 0xFFFFFFFF, key & 0xFFFFFFFF


def _signed(application_name: str) -> str:
    """Who signed the lock, for people."""
    match application_name.split(" "):
        case ["singleton", since, where]:
            pid, _, host = where.partition("@")
            return f"process {pid} on {host}, since {since}"
    return "a session that has just begun"
