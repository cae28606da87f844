"""A task is a function that can also be enqueued."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Generic, ParamSpec, TypeVar, cast

from shiftwork import operations
from shiftwork.client import Client, Handle
from shiftwork.codec import Signature
from shiftwork.job import Action, NewJob, Scope, sending
from shiftwork.retry import Retry
from shiftwork.settings import Settings

P = ParamSpec("P")
R = TypeVar("R")


class Surroundings:
    """What a task needs to know of its app."""

    settings: Settings

    @property
    def client(self) -> Client:
        """The way to the database, opened when first needed."""
        raise NotImplementedError


class Task(Generic[P, R]):
    """Something that can be done now, by calling it, or later, by enqueueing it.

    send_email.enqueue("ada@example.org", subject="hi")
    send_email.using(delay=timedelta(minutes=5)).enqueue("ada@example.org", subject="hi")
    send_email("ada@example.org", subject="hi")     # here and now: no queue, no retry, no record
    """

    def __init__(
        self,
        app: Surroundings,
        function: Callable[P, Any],
        *,
        name: str,
        retry: Retry | None,
        timeout: timedelta | None,
        options: Mapping[str, Any],
    ) -> None:
        functools.update_wrapper(cast("Any", self), function)
        self.name = name
        self.function = function
        self.retry = retry
        self.timeout = timeout
        self.signature = Signature(name, function)
        self._usual = Sending[P, R](app, self, options)

    def __repr__(self) -> str:
        return f"<Task {self.name}>"

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Handle[R]:
        """Enqueue a job with these arguments."""
        return self._usual.enqueue(*args, **kwargs)

    async def aenqueue(self, *args: P.args, **kwargs: P.kwargs) -> Handle[R]:
        """Enqueue a job with these arguments."""
        return await self._usual.aenqueue(*args, **kwargs)

    def job(self, *args: P.args, **kwargs: P.kwargs) -> NewJob[R]:
        """A job with these arguments, for `app.enqueue_many`."""
        return self._usual.job(*args, **kwargs)

    def using(
        self,
        *,
        queue: str | None = None,
        priority: int | None = None,
        delay: timedelta | None = None,
        run_at: datetime | None = None,
        expires_in: timedelta | None = None,
        expires_at: datetime | None = None,
        max_attempts: int | None = None,
        unique: str | None = None,
        scope: Scope | None = None,
        action: Action | None = None,
        window: timedelta | None = None,
        merge: str | Mapping[str, str] | None = None,
        tags: Sequence[str] | None = None,
        keep: timedelta | int | None = None,
        connection: object = None,
    ) -> Sending[P, R]:
        """The same task, sent otherwise: later, sooner, once only, or in the transaction of `connection`."""
        chosen = sending(
            queue=queue,
            priority=priority,
            delay=delay,
            run_at=run_at,
            expires_in=expires_in,
            expires_at=expires_at,
            max_attempts=max_attempts,
            unique=unique,
            scope=scope,
            action=action,
            window=window,
            merge=merge,
            tags=tags,
            keep=keep,
        )
        return self._usual.changed(chosen, connection)


class PlainTask(Task[P, R]):
    """A task whose function blocks."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = self.function(*args, **kwargs)
        return result


class AsyncTask(Task[P, R]):
    """A task whose function is awaited."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        result: Coroutine[Any, Any, R] = self.function(*args, **kwargs)
        return result


@dataclass(frozen=True, slots=True)
class Sending(Generic[P, R]):
    """A task, and how its jobs are to be sent."""

    app: Surroundings
    task: Task[P, R]
    options: Mapping[str, Any] = field(default_factory=dict)
    connection: object = None

    def changed(self, options: Mapping[str, Any], connection: object) -> Sending[P, R]:
        """The same, with other options over these."""
        return Sending(self.app, self.task, {**self.options, **options}, connection)

    def job(self, *args: P.args, **kwargs: P.kwargs) -> NewJob[R]:
        """A job with these arguments, for `app.enqueue_many`."""
        payload = self.task.signature.encode(args, kwargs, self.app.settings.max_payload)
        return NewJob(task=self.task.name, payload=payload, **self.options)

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Handle[R]:
        """Enqueue a job with these arguments."""
        job, client = self.job(*args, **kwargs), self.app.client
        [sent] = client.perform(operations.enqueue(client.store, [job]), self.connection)
        return Handle(client, sent.id, self.task.signature.read_result, sent.outcome)

    async def aenqueue(self, *args: P.args, **kwargs: P.kwargs) -> Handle[R]:
        """Enqueue a job with these arguments."""
        job, client = self.job(*args, **kwargs), self.app.client
        [sent] = await client.aperform(operations.enqueue(client.store, [job]), self.connection)
        return Handle(client, sent.id, self.task.signature.read_result, sent.outcome)
