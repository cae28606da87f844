"""Ending, on the server, the statement that a thread waits for: the thread itself cannot be stopped."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import psycopg
from psycopg import Connection

from shiftwork.outcome import Raised, Returned

PATIENCE = 5.0
"""Seconds in which the server has to hear of it."""

CANCELLED = "57014"


class Interruption:
    """Cancels what a connection waits for, once it is asked to."""

    def __init__(self, connection: Connection[Any]) -> None:
        self._connection = connection
        self._sending: asyncio.Task[None] | None = None

    def send(self) -> None:
        """Let the server cancel the statement, if there is one."""
        self._sending = asyncio.create_task(asyncio.to_thread(self._send))

    async def caused(self, ending: Returned | Raised) -> bool:
        """Whether a handler ended so because of it. From here on nothing more can come of it."""
        if self._sending is None:
            return False
        await asyncio.wait([self._sending])  # else it might hit a statement that comes later
        return isinstance(ending, Raised) and getattr(ending.error, "sqlstate", None) == CANCELLED

    def _send(self) -> None:
        with suppress(psycopg.Error, OSError):
            self._connection.cancel_safe(timeout=PATIENCE)
