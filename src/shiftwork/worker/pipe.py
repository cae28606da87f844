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
BEFORE = HEADER.size
"""Bytes before a message."""

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


class Completed(Message, frozen=True):
    """The code of a job returned this, and there is no more to say: as most end."""

    job: int
    result: msgspec.Raw


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
FromProcess = Ready | Unready | Said | Progressed | Concluded | Completed | Ended

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
        self.left: bytes | bytearray = b""
        """What has come and was not taken."""

    def take(self, piece: bytes = b"") -> bytes | bytearray | None:
        """The body of the next message, None if it is not complete; `piece` is what has come since."""
        left = self.left
        if not left:
            left = piece
        elif piece:
            if isinstance(left, bytes):
                left = bytearray(left)  # which can grow without being copied each time
            left += piece
        there = len(left)
        if there >= BEFORE:
            (size,) = HEADER.unpack_from(left)
            if size == there - BEFORE:  # as most come
                self.left = b""
                return left[BEFORE:]
            if size > LARGEST:
                self.left = left
                raise Broken(f"a message of {size:,} bytes was announced")
            if size < there - BEFORE:
                end = BEFORE + size
                self.left = left[end:]
                return left[BEFORE:end]
        self.left = left
        return None


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
        self._speaking = threading.Lock()

    def fileno(self) -> int:
        """So that it can be waited for."""
        return self._source

    def has_news(self) -> bool:
        """Whether there is something to listen to right now."""
        return bool(self._pieces.left or self._news.poll(0))

    def listen(self) -> ToProcess | None:
        """The next message; None if the worker has hung up."""
        pieces = self._pieces
        body = pieces.take() if pieces.left else None
        while body is None:
            piece = os.read(self._source, 1 << 16)
            if not piece:
                return None
            body = pieces.take(piece)
        return _to_process(body)

    def say(self, message: Message) -> None:
        """Send a message; waits while the worker is busy."""
        told = framed(message)
        with self._speaking:
            while (sent := os.write(self._sink, told)) < len(told):
                told = told[sent:]
