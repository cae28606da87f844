"""Being woken. A notification is only ever a hint: what it says is looked for in the database, and so is what it never said.

The listener believes in its connection only while it hears itself: it notifies a channel of its own, and if that does not
come back (a pooler in between, a server that forgot us) it counts as deaf, the poll becomes shorter, and it connects anew. A former
primary would let it hear itself for ever: it leaves that one when jobs are claimed from another.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import aclosing
from typing import Any, Self

import psycopg
from psycopg import AsyncConnection, sql

from shiftwork.database import aconnect, cut
from shiftwork.errors import ShiftworkError
from shiftwork.settings import Settings
from shiftwork.stores.store import Store
from shiftwork.worker.line import Patience

PROVE_EVERY = 60.0
PROVE_WITHIN = 5.0
CALL_AGAIN = (0.2, 5.0)


class Wake:
    """One thing to wait for: a notification, a freed slot, news of the lease, or the end."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def __call__(self) -> None:
        """Wake the worker."""
        self._event.set()

    async def wait(self, seconds: float | None) -> bool:
        """Wait to be woken, so long at most; says whether it was."""
        if not self._event.is_set() and (seconds is None or seconds > 0):
            try:
                async with asyncio.timeout(seconds):
                    await self._event.wait()
            except TimeoutError:
                return False
        woken = self._event.is_set()
        self._event.clear()
        return woken


class Listener:
    """Hears that there is work, and that a job of ours is to be looked at."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        name: Callable[[], str],
        *,
        work: Callable[[str], None],
        look: Callable[[int], None],
        heard: Callable[[bool, ShiftworkError | None], None],
    ) -> None:
        self.proven = self.left_behind = self._over = False
        self._said: bool | None = None
        self._settings = settings
        self._channels = store.channels
        self._name = name
        self._work = work
        self._look = look
        self._heard = heard
        self._task: asyncio.Task[None] | None = None
        self._connection: AsyncConnection[Any] | None = None

    async def __aenter__(self) -> Self:
        if self._settings.notify:
            self._task = asyncio.create_task(self._listen())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._over = True  # for of a line that fails meanwhile it hears instead of being cancelled
        if self._connection is not None:
            cut(self._connection)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def follow(self) -> None:
        """Jobs are claimed again: if it still listens to a server that took no writes any more, it calls anew."""
        if self.left_behind and self._connection is not None:
            cut(self._connection)
        self.left_behind = False

    async def _listen(self) -> None:
        patience = Patience(*CALL_AGAIN)
        while not self._over:
            try:
                await self._call()
                self._work("")  # whatever was said before was missed
                await self._hear()
            except Exception as error:  # noqa: BLE001  -- whatever it is, it is called again
                if self.proven:
                    patience.reset()
                self._believe(False, error if isinstance(error, ShiftworkError) else None)
            finally:
                self._hang_up()
            await asyncio.sleep(patience())

    async def _call(self) -> None:
        self._connection = await aconnect(self._settings, self._settings.listen_dsn, name=self._name())
        for channel in (*self._channels, self._own):
            await self._connection.execute(sql.SQL("listen {}").format(sql.Identifier(channel)))

    @property
    def _own(self) -> str:
        return self._name().replace(" ", "_")

    async def _hear(self) -> None:
        connection = self._connection
        assert connection is not None  # noqa: S101
        own = self._own
        while True:
            await self._ping(connection, own)
            proof = False
            async with aclosing(connection.notifies(timeout=PROVE_WITHIN)) as notes:
                async for note in notes:
                    if proof := self._take(note, own):
                        break
            if not proof:
                self._believe(False, None)
                return
            self._believe(True, None)
            async for note in connection.notifies(timeout=PROVE_EVERY * random.uniform(0.8, 1.0)):  # noqa: S311
                self._take(note, own)

    async def _ping(self, connection: AsyncConnection[Any], own: str) -> None:
        """Have ourselves notified; on a line that is half open the answer does not come.

        Not by the session that a pooler may have put in between: it would tell us what nobody else's session does.
        """
        deadline = asyncio.get_running_loop().call_later(PROVE_WITHIN, cut, connection)
        try:
            cursor = await connection.execute(
                "select pg_notify(%s, '') where pg_backend_pid() = %s", (own, connection.info.backend_pid)
            )
            if cursor.rowcount:
                return
        finally:
            deadline.cancel()
        async with await aconnect(self._settings, self._settings.listen_dsn, name=self._name()) as other:
            await other.execute("select pg_notify(%s, '')", (own,))

    def _take(self, note: psycopg.Notify, own: str) -> bool:
        if note.channel == own:
            return True
        if note.channel == self._channels[0]:
            self._work(note.payload)
        elif note.payload.isdecimal() and len(note.payload) < 20:
            self._look(int(note.payload))
        return False

    def _believe(self, proven: bool, error: ShiftworkError | None) -> None:
        if proven is not self._said:
            self._heard(proven, error)
        self.proven = self._said = proven

    def _hang_up(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.pgconn.finish()
