"""One attempt of a job in the hands of this worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from datetime import timedelta
from enum import StrEnum
from typing import Any, Protocol

import msgspec

from shiftwork.codec import Signature
from shiftwork.job import NewJob, Taken
from shiftwork.retry import Retry


class Stop(StrEnum):
    """Why an attempt is to end before its handler has."""

    CANCELLED = "cancelled"  # somebody asked for it
    TIMEOUT = "timeout"  # it ran longer than its task may
    LOST = "lost"  # the job is not ours any more
    LAPSED = "lapsed"  # our lease may end before it can be renewed
    SHUTDOWN = "shutdown"  # the worker stops


class NotNow(Exception):  # noqa: N818
    """Nothing came of an attempt, and nothing is left of it: the job is given back."""


class Task(Protocol):
    """What a worker needs to know of a task."""

    @property
    def name(self) -> str: ...
    @property
    def function(self) -> Callable[..., Any]: ...
    @property
    def signature(self) -> Signature: ...
    @property
    def is_async(self) -> bool: ...
    @property
    def transaction(self) -> bool: ...
    @property
    def executor(self) -> str: ...
    @property
    def retry(self) -> Retry | None: ...
    @property
    def timeout(self) -> timedelta | None: ...
    @property
    def concurrency(self) -> int | None: ...
    @property
    def coder(self) -> Callable[[BaseException], str]: ...
    @property
    def entry(self) -> Mapping[str, Any]: ...
    @property
    def queue(self) -> str | None: ...
    @property
    def context_parameters(self) -> tuple[str, ...]: ...
    @property
    def connection_parameter(self) -> str | None: ...
    @property
    def batch(self) -> int | None: ...
    @property
    def batch_parameter(self) -> str | None: ...


class Run(msgspec.Struct, eq=False):
    """A job as it was claimed, and how far its attempt has come; the first fields are those of `Taken`."""

    id: int
    name: str
    queue: str
    priority: int
    payload: str | None
    attempt: int
    failures: int
    resets: int
    max_attempts: int
    run_at: int
    created_at: int
    expires_at: int | None
    unique_key: str | None
    tags: list[str] | None

    worker: int = 0
    claimed_at: int = 0
    task: Any = None
    """The task, None if this program does not have it."""

    slot: asyncio.Task[None] | None = None
    """Where its handler runs, from its beginning to its end."""

    waited: float = 0.0
    """Seconds from its claim to its beginning, if it was fetched ahead."""

    began: float = 0.0
    took: float = 0.0
    stop: Stop | None = None
    why: str = ""
    heard: bool = False
    """Whether it was told to stop."""

    in_thread: bool = False
    """Whether a thread runs code of it, which may be so even after nobody waits for that any more."""

    process: Any = None
    """The process that runs its code, if that is not this one."""

    interruption: Any = None
    """Ends the statement that its thread waits for, if it is transactional."""

    crashed: str = ""
    """How that process ended, or the session in which a routine ran, if it did so before its time."""

    concluding: bool = False
    """Whether its outcome is being written: too late to be stopped."""

    ended: bool = False
    """Whether its handler has ended; the outcome may still have to be written."""

    concluded: bool = False
    """Whether the handler had its outcome written in a transaction of its own."""

    done: Any = None
    """The outcome, if it is written already."""

    unsure: Any = None
    """The outcome whose commit had no answer."""

    context: Any = None
    jobs: list[NewJob[Any]] | None = None
    """To be enqueued with its completion."""

    @property
    def taken(self) -> Taken:
        """The row that the claim gave."""
        return (
            self.id, self.name, self.queue, self.priority, self.payload, self.attempt, self.failures, self.resets,
            self.max_attempts, self.run_at, self.created_at, self.expires_at, self.unique_key, self.tags,
        )  # fmt: skip

    @property
    def runs_apart(self) -> bool:
        """Whether its code runs in a process of its own."""
        return self.task is not None and self.task.executor == "process"

    @property
    def in_database(self) -> bool:
        """Whether its code is a routine in the database."""
        return self.task is not None and self.task.executor == "sql"

    @property
    def label(self) -> str:
        """How it is called where people read of it."""
        return f"job {self.id} ({self.name}, attempt {self.attempt})"


current: ContextVar[Run] = ContextVar("shiftwork_run")
"""The attempt that this code is part of, for log lines."""
