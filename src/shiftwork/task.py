"""A task is a function that can also be enqueued."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Mapping, Sequence
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

    async def aclient(self) -> Client:
        """The same for an awaiting caller."""
        raise NotImplementedError


class Sending(Generic[P, R]):
    """A task, and how its jobs are to be sent."""

    def __init__(
        self, app: Surroundings, signature: Signature, options: Mapping[str, Any], connection: object = None
    ) -> None:
        self.signature = signature
        self._app = app
        self._options = options
        self._connection = connection

    @property
    def name(self) -> str:
        """What the task is called, in the database too."""
        return self.signature.task

    def job(self, *args: P.args, **kwargs: P.kwargs) -> NewJob[R]:
        """A job with these arguments, for `app.enqueue_many`."""
        payload = self.signature.encode(args, kwargs, self._app.settings.max_payload)
        return NewJob(task=self.name, payload=payload, **self._options)

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Handle[R]:
        """Enqueue a job with these arguments."""
        job, client = self.job(*args, **kwargs), self._app.client
        [sent] = client.perform(operations.enqueue(client.store, [job]), self._connection)
        return Handle(client, sent.id, self.signature.read_result, sent.outcome)

    async def aenqueue(self, *args: P.args, **kwargs: P.kwargs) -> Handle[R]:
        """Enqueue a job with these arguments."""
        job, client = self.job(*args, **kwargs), await self._app.aclient()
        [sent] = await client.aperform(operations.enqueue(client.store, [job]), self._connection)
        return Handle(client, sent.id, self.signature.read_result, sent.outcome)

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
        lent = self._connection if connection is None else connection
        overruled = {_RIVALS[name] for name in chosen if name in _RIVALS}
        kept = {name: value for name, value in self._options.items() if name not in overruled}
        return Sending(self._app, self.signature, kept | chosen, lent)


_RIVALS = {"delay": "run_at", "run_at": "delay", "expires_in": "expires_at", "expires_at": "expires_in"}


class Task(Sending[P, R]):
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
        super().__init__(app, Signature(name, function), options)
        functools.update_wrapper(cast("Any", self), function)
        self.function = function
        self.retry = retry
        self.timeout = timeout

    def __repr__(self) -> str:
        return f"<Task {self.name}>"


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
