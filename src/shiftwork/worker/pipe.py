"""What a worker and a process of its own say to each other: a length in four bytes, then a message as JSON.

Nothing is pickled. The process is told of a job as the claim gave it, and tells how it ended as settle takes it; so
what crosses is what is stored anyway.
"""

from __future__ import annotations

import os
import select
import struct
import threading
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import msgspec

from shiftwork.job import NewJob, State, Taken
from shiftwork.settings import Settings

HEADER = struct.Struct(">I")
LARGEST = 1 << 30
"""Bytes in a message; more than PostgreSQL would store."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Something that is said."""


# To the process.


class Begin(Message, frozen=True):
    """Who it is, and where it finds its tasks."""

    where: str
    """module:name of the app."""

    path: list[str]
    """Where modules are looked for."""

    settings: Settings
    withheld: bool
    """Whether it is not told where the database is."""

    tells: bool
    """Whether it writes log lines as the worker does."""

    worker: int
    """The worker's process; it ends with that."""


class Call(Message, frozen=True):
    """Run this job."""

    taken: Taken
    worker: int
    claimed_at: int
    waited: float
    timeout: timedelta | None


class Halt(Message, frozen=True):
    """What runs is to end now."""

    reason: str
    why: str


# From the process.


class Ready(Message, frozen=True):
    """It has imported the app, which has these tasks."""

    tasks: list[str]


class Unready(Message, frozen=True):
    """It could not."""

    why: str


class Said(Message, frozen=True):
    """A line for the log of a job."""

    job: int
    level: str
    message: str


class Progressed(Message, frozen=True):
    """How far a job is."""

    job: int
    fraction: float | None
    message: str | None


class Concluded(Message, frozen=True):
    """The handler of a job had its outcome written in a transaction of its own."""

    job: int


class Ended(Message, frozen=True):
    """What becomes of a job, as far as its code can say."""

    job: int
    interrupted: bool
    state: State
    counts: bool
    result: msgspec.Raw
    error: dict[str, str] | None
    delay: timedelta | None
    at: datetime | None
    jobs: list[NewJob[Any]]


ToProcess = Begin | Call | Halt
FromProcess = Ready | Unready | Said | Progressed | Concluded | Ended

_encode = msgspec.json.Encoder().encode
_to_process: Callable[[bytes | bytearray], ToProcess] = msgspec.json.Decoder(ToProcess).decode
_from_process: Callable[[bytes | bytearray], FromProcess] = msgspec.json.Decoder(FromProcess).decode


class Broken(Exception):  # noqa: N818
    """What came is no message."""


def framed(message: Message) -> bytes:
    """A message, ready to be sent."""
    body = _encode(message)
    return HEADER.pack(len(body)) + body


class Unframing:
    """Messages out of pieces, as they come."""

    def __init__(self) -> None:
        self._left: bytes | bytearray = b""

    def add(self, piece: bytes) -> None:
        """Some more has come."""
        if not self._left:
            self._left = piece
            return
        if isinstance(self._left, bytes):
            self._left = bytearray(self._left)  # which can grow without being copied each time
        self._left += piece

    def take(self) -> bytes | bytearray | None:
        """The body of the next message, None if it is not complete."""
        left = self._left
        if len(left) < HEADER.size:
            return None
        (size,) = HEADER.unpack_from(left)
        if size > LARGEST:
            raise Broken(f"a message of {size:,} bytes was announced")
        end = HEADER.size + size
        if len(left) < end:
            return None
        self._left = left[end:]
        return left[HEADER.size : end]


def heard(body: bytes | bytearray) -> FromProcess:
    """What a process said."""
    try:
        return _from_process(body)
    except msgspec.MsgspecError as error:
        raise Broken(f"what was said cannot be read: {error}") from None


class Line:
    """The process's ends of the pipes, at which one thread listens at a time, and any may speak."""

    def __init__(self, source: int, sink: int) -> None:
        self._source, self._sink = source, sink
        self._news = select.poll()
        self._news.register(source, select.POLLIN)
        self._pieces = Unframing()
        self._ahead: bytes | bytearray | None = None
        self._speaking = threading.Lock()

    def fileno(self) -> int:
        """So that it can be waited for."""
        return self._source

    def has_news(self) -> bool:
        """Whether there is something to listen to right now."""
        if self._ahead is None:
            self._ahead = self._pieces.take()
        return self._ahead is not None or bool(self._news.poll(0))

    def listen(self) -> ToProcess | None:
        """The next message; None if the worker has hung up."""
        body, self._ahead = self._ahead or self._pieces.take(), None
        while body is None:
            piece = os.read(self._source, 1 << 16)
            if not piece:
                return None
            self._pieces.add(piece)
            body = self._pieces.take()
        return _to_process(body)

    def say(self, message: Message) -> None:
        """Send a message; waits while the worker is busy."""
        told = framed(message)
        with self._speaking:
            while told:
                told = told[os.write(self._sink, told) :]
