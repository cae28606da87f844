"""What a handler can know and say while it runs."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from datetime import datetime, timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, overload

import msgspec
from psycopg import AsyncConnection, Connection

from shiftwork.codec import safe_text
from shiftwork.errors import Interrupted, InvalidArgument
from shiftwork.job import Job, NewJob

if TYPE_CHECKING:
    from shiftwork.worker.run import Run


class Workplace(Protocol):
    """What a context needs of the worker."""

    @property
    def enqueues(self) -> bool: ...
    def log(self, run: Run, level: str, message: str) -> None: ...
    def progress(self, run: Run, fraction: float | None, message: str | None) -> None: ...
    def fence(self, run: Run, connection: object) -> Any: ...  # noqa: ANN401
    def finish(self, run: Run, connection: object, result: object) -> Any: ...  # noqa: ANN401
    def finishing(self, run: Run, result: object) -> Finishing: ...


class Finishing(
    AbstractAsyncContextManager[AsyncConnection[Any]], AbstractContextManager[Connection[Any]], Protocol
):
    """A transaction in which a job ends: `async with` in an async handler, `with` in a plain one."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


class Context:
    """The job that a handler works on, and what it can say about it.

    async def work(context: shiftwork.Context, n: int) -> None:
        context.progress(0.5, "half")
        context.log.info("…")
    """

    __slots__ = ("_job", "_log", "_place", "_run", "_timeout", "tx")

    def __init__(self, run: Run, place: Workplace, timeout: timedelta | None) -> None:
        self._run = run
        self._place = place
        self._timeout = timeout
        self._job: Job | None = None
        self._log: logging.LoggerAdapter[logging.Logger] | None = None
        self.tx: Any = None
        """The transaction of a transactional task."""

    def __repr__(self) -> str:
        return f"<Context of {self._run.label}>"

    @property
    def job(self) -> Job:
        """The job, as it was claimed."""
        if self._job is None:
            run = self._run
            job = Job.from_claim(run.taken, run.worker, run.claimed_at)
            if run.waited and job.started_at is not None:
                job = dataclasses.replace(job, started_at=job.started_at + timedelta(seconds=run.waited))
            self._job = job
        return self._job

    @property
    def attempt(self) -> int:
        """The number of this attempt; it is also the fence."""
        return self._run.attempt

    @property
    def deadline(self) -> datetime | None:
        """When this attempt will be stopped, by the database's clock; None if never."""
        began = self.job.started_at
        return None if self._timeout is None or began is None else began + self._timeout

    @property
    def cancelled(self) -> str | None:
        """Why this attempt is to end now: cancelled, timeout, lost, lapsed or shutdown; None while it may go on."""
        return self._run.stop

    def check(self) -> None:
        """Raise Interrupted if this attempt is to end now; a plain function should call it now and then."""
        run = self._run
        if run.stop is not None and not run.ended:
            if run.slot is not None and run.task.is_async:
                raise asyncio.CancelledError(run.stop.value)
            raise Interrupted(run.stop.value, run.why)

    @property
    def log(self) -> logging.LoggerAdapter[logging.Logger]:
        """A logger whose lines are also kept with the job, where they can be read while it runs."""
        self.check()
        if self._log is None:
            self._log = _JobLog(self._run, self._place)
        return self._log

    def progress(self, fraction: float | None = None, message: str | None = None) -> None:
        """How far it is, from 0 to 1, and in words; others can read it while the job runs."""
        self.check()
        if fraction is not None and not 0 <= fraction <= 1:
            raise InvalidArgument(f"progress is {fraction!r}; it goes from 0 to 1", argument="fraction")
        self._place.progress(self._run, fraction, None if message is None else safe_text(message, 1000))

    def enqueue(self, *jobs: NewJob[Any]) -> None:
        """Enqueue jobs together with the completion of this one: all of it, or nothing."""
        self.check()
        if not self._place.enqueues:
            raise InvalidArgument(
                f"{self._run.label} is a row of a table, with which nothing can be enqueued; in a transactional handler write "
                "task.using(connection=tx).enqueue(…)"
            )
        if self._run.done is not None:
            raise InvalidArgument(
                f"{self._run.label} has ended; what it enqueues has to be known before that"
            )
        for job in jobs:
            if not isinstance(job, NewJob):
                raise InvalidArgument(f"{job!r} is no job to enqueue; make one with task.job(…)")
        if self._run.jobs is None:
            self._run.jobs = []
        self._run.jobs.extend(jobs)

    def spawn(self, *jobs: NewJob[Any]) -> None:
        """Enqueue jobs when this handler returns, and wait for them: this one is completed when all of them are.

        Until then it is `waiting`, and takes up no room. If one of them does not complete, this one fails.
        """
        others = len(self._run.jobs or ())
        self.enqueue(*jobs)
        assert self._run.jobs is not None  # noqa: S101
        self._run.jobs[others:] = [msgspec.structs.replace(job, child=True) for job in jobs]

    @overload
    def fence(self, connection: AsyncConnection[Any]) -> Awaitable[None]: ...
    @overload
    def fence(self, connection: Connection[Any]) -> None: ...
    def fence(self, connection: Any) -> Any:
        """Go on in this transaction only if the job is still ours; until it ends, nobody can take the job away."""
        self.check()
        return self._place.fence(self._run, connection)

    @overload
    def finish(self, connection: AsyncConnection[Any], result: object = None) -> Awaitable[None]: ...
    @overload
    def finish(self, connection: Connection[Any], result: object = None) -> None: ...
    def finish(self, connection: Any, result: object = None) -> Any:
        """End the job as completed in your own transaction: it commits with it, or not at all."""
        self.check()
        return self._place.finish(self._run, connection, result)

    def finishing(self, result: object = None) -> Finishing:
        """A transaction of its own in which the job ends: what is done in the block commits with it."""
        self.check()
        return self._place.finishing(self._run, result)


class _JobLog(logging.LoggerAdapter[logging.Logger]):
    """Logs as everybody does, and keeps the line with the job."""

    def __init__(self, run: Run, place: Workplace) -> None:
        super().__init__(logging.getLogger("shiftwork.job"), {})
        self._run = run
        self._place = place

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:  # noqa: ANN401
        if level >= logging.DEBUG:
            text = safe_text(_written(msg, args), 10_000)
            self._place.log(self._run, logging.getLevelName(level).lower(), text)
        if self.isEnabledFor(level):
            kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
            super().log(level, msg, *args, **kwargs)


def _written(message: object, args: tuple[object, ...]) -> str:
    try:
        text = str(message)
        if len(args) == 1 and isinstance(args[0], Mapping) and args[0]:
            return text % args[0]
        return text % args if args else text
    except Exception:  # noqa: BLE001  -- as in logging: a bad line is no reason to fail a job
        return f"{message!r} {args!r}"


__all__ = ["Context"]
