"""The front for everything that is asked of the database: plans go in, answers come out, in both worlds."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from psycopg import AsyncConnection, Connection

from shiftwork import operations
from shiftwork.convoy import Convoy
from shiftwork.database import (
    APool,
    Plan,
    Pool,
    acommitting,
    aconnect,
    alend,
    arun,
    commits_each,
    committing,
    connect,
    lend,
    run,
)
from shiftwork.errors import JobCancelled, JobEnded, JobExpired, JobFailed
from shiftwork.job import Answer, Job, Line, NewJob, Progress, Sent, State
from shiftwork.notifications import AEar, Ear
from shiftwork.settings import Settings
from shiftwork.stores.protocol import Protocol

T = TypeVar("T")
R = TypeVar("R")


class Client:
    """Carries out plans on connections of its own or on one that is lent."""

    def __init__(self, settings: Settings, revive: Callable[[], None] | None = None) -> None:
        self.settings = settings
        self.revive = revive
        self.store = Protocol(settings.schema)
        self._pool = Pool(settings, revive)
        self._apool = APool(settings, revive)
        self._ears: dict[int, Ear] = {}
        self._aears: WeakKeyDictionary[asyncio.AbstractEventLoop, AEar] = WeakKeyDictionary()
        self._convoys: dict[asyncio.AbstractEventLoop, Convoy] = {}

    def perform(self, plan: Plan[T], connection: object = None, *, atomic: bool = False) -> T:
        """Carry out a plan; `atomic` makes its statements one transaction, unless they are in the caller's."""
        schema = self.settings.schema
        if atomic and isinstance(connection, Connection) and commits_each(connection):
            with committing(connection, schema, lent=True):
                return run(plan, lend(connection, schema))
        if connection is not None:
            return run(plan, lend(connection, schema))
        if not atomic:
            return run(plan, self._pool.execute)
        with self._pool.connection() as own, committing(own, schema):
            return run(plan, own.execute_ours)

    async def aperform(self, plan: Plan[T], connection: object = None, *, atomic: bool = False) -> T:
        """Carry out a plan; `atomic` makes its statements one transaction, unless they are in the caller's."""
        schema = self.settings.schema
        if atomic and isinstance(connection, AsyncConnection) and commits_each(connection):
            async with acommitting(connection, schema, lent=True):
                return await arun(plan, alend(connection, schema))
        if connection is not None:
            return await arun(plan, alend(connection, schema))
        if not atomic:
            return await arun(plan, self._apool.execute)
        async with self._apool.connection() as own, acommitting(own, schema):
            return await arun(plan, own.execute_ours)

    async def asend(self, job: NewJob[Any], connection: object = None) -> Sent:
        """Enqueue one job; on a connection of our own, together with what others send at the same time."""
        if connection is not None or job.unique_key is not None or operations.importing.unsent is not None:
            return await self._asend_alone(job, connection)
        loop = asyncio.get_running_loop()
        if (convoy := self._convoys.get(loop)) is None:
            for other in list(self._convoys):
                if other.is_closed():
                    self._convoys.pop(other, None)
            convoy = self._convoys[loop] = self._convoy(loop)
        return await convoy.send(job)

    async def _asend_alone(self, job: NewJob[Any], connection: object = None) -> Sent:
        execute = self._apool.execute if connection is None else alend(connection, self.settings.schema)
        return await arun(operations.enqueue_one(self.store, job), execute)

    def _convoy(self, loop: asyncio.AbstractEventLoop) -> Convoy:
        async def together(jobs: Sequence[bytes], within: float) -> Sequence[Sent]:
            return await self.aperform(operations.enqueue_together(self.store, jobs, within))

        return Convoy(loop, alone=self._asend_alone, encode=operations.encode_job, together=together)

    def await_end(self, job: int, timeout: float | timedelta) -> Job:
        """The job once it has ended."""
        settings, process = self.settings, os.getpid()
        if process not in self._ears:  # a forked child has ears of its own
            ear = Ear(lambda: connect(settings, settings.listen_dsn), settings.done_channel)
            self._ears.setdefault(process, ear)
        with self._ears[process].waiting_for(str(job)) as wait:
            return run(self._end(job, timeout), self._pool.execute, lambda step: wait(step.seconds))

    async def aawait_end(self, job: int, timeout: float | timedelta) -> Job:  # noqa: ASYNC109
        """The job once it has ended."""
        settings, loop = self.settings, asyncio.get_running_loop()
        if loop not in self._aears:
            self._aears[loop] = AEar(lambda: aconnect(settings, settings.listen_dsn), settings.done_channel)
        async with self._aears[loop].waiting_for(str(job)) as wait:
            return await arun(self._end(job, timeout), self._apool.execute, lambda step: wait(step.seconds))

    def close(self) -> None:
        """Close all connections: what is idle now, and the rest when it comes back."""
        self._pool.close()
        self._apool.close()

    def _end(self, job: int, timeout: float | timedelta) -> Plan[Job]:
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
        return operations.await_end(self.store, job, seconds, self.settings.result_poll.total_seconds())


class Handle(Generic[R]):
    """A job that was enqueued: ask how it is, wait for its result, cancel it.

    handle = send_email.enqueue("ada@example.org", subject="hi")
    handle.result(timeout=30)
    """

    __slots__ = ("_client", "_read", "id", "outcome")

    def __init__(
        self,
        client: Client,
        id: int,  # noqa: A002
        read: Callable[[Any], R],
        outcome: Answer | None = None,
    ) -> None:
        self._client = client
        self._read = read
        self.id = id
        self.outcome = outcome
        """What enqueue did: created a job, found an existing one, replaced it, or merged into it.

        Or left it unsent, with 0 as its id: this process is a worker, and was still importing the app.
        """

    def __repr__(self) -> str:
        return f"<Handle of job {self.id}{f', {self.outcome}' if self.outcome else ''}>"

    def status(self) -> State:
        """Where the job is in its life."""
        return self._client.perform(operations.get(self._client.store, self.id)).state

    async def astatus(self) -> State:
        """Where the job is in its life."""
        return (await self._client.aperform(operations.get(self._client.store, self.id))).state

    def info(self) -> Job:
        """All that is known of the job, with the attempts that did not succeed."""
        return self._client.perform(operations.inspect(self._client.store, self.id))

    async def ainfo(self) -> Job:
        """All that is known of the job, with the attempts that did not succeed."""
        return await self._client.aperform(operations.inspect(self._client.store, self.id))

    def result(self, timeout: float | timedelta) -> R:
        """What the task returned, waiting so long for it; raises JobFailed and the like, or ResultTimeout."""
        return self._of(self._client.await_end(self.id, timeout))

    async def aresult(self, timeout: float | timedelta) -> R:  # noqa: ASYNC109
        """What the task returned, waiting so long for it; raises JobFailed and the like, or ResultTimeout."""
        return self._of(await self._client.aawait_end(self.id, timeout))

    def cancel(self, reason: str | None = None) -> str:
        """Cancel the job: cancelled, signalled (it runs; its handler is told), finished, unknown or busy."""
        answers = self._client.perform(operations.cancel(self._client.store, [self.id], reason))
        return answers.get(self.id, "unknown")

    async def acancel(self, reason: str | None = None) -> str:
        """Cancel the job: cancelled, signalled (it runs; its handler is told), finished, unknown or busy."""
        answers = await self._client.aperform(operations.cancel(self._client.store, [self.id], reason))
        return answers.get(self.id, "unknown")

    def progress(self) -> Progress | None:
        """How far its last attempt is: fraction, message and when it was said; None if it has said nothing."""
        return self._client.perform(operations.progress(self._client.store, self.id))

    async def aprogress(self) -> Progress | None:
        """How far its last attempt is: fraction, message and when it was said; None if it has said nothing."""
        return await self._client.aperform(operations.progress(self._client.store, self.id))

    def logs(self, *, after: int = 0, limit: int = 10_000, last: bool = False) -> list[Line]:
        """What its handler logged, in order: the first lines behind the one with the id `after`, or the last."""
        plan = operations.logs(self._client.store, self.id, after=after, limit=limit, last=last)
        return self._client.perform(plan)

    async def alogs(self, *, after: int = 0, limit: int = 10_000, last: bool = False) -> list[Line]:
        """What its handler logged, in order: the first lines behind the one with the id `after`, or the last."""
        plan = operations.logs(self._client.store, self.id, after=after, limit=limit, last=last)
        return await self._client.aperform(plan)

    def _of(self, job: Job) -> R:
        if job.state is State.COMPLETED:
            return self._read(job.result)
        raise _ended(job)


def _ended(job: Job) -> JobEnded:
    error: Mapping[str, Any] = job.error or {}
    told = ": ".join(str(error[part]) for part in ("code", "message") if error.get(part))
    why = f" ({told})" if told else ""
    kind, what = {
        State.FAILED: (JobFailed, f"failed{why}"),
        State.CANCELLED: (JobCancelled, f"was cancelled{why}"),
        State.EXPIRED: (JobExpired, "expired: nobody started it in time"),
    }[job.state]
    return kind(f"job {job.id} ({job.task}) {what}", job=job.id, error=job.error)
