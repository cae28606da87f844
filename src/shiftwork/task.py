"""A task is a function that can also be enqueued."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Generic, Literal, ParamSpec, TypeVar, cast

import psycopg

from shiftwork import operations
from shiftwork.client import Client, Handle
from shiftwork.codec import Signature, safe_text
from shiftwork.codes import Codes, check_codes
from shiftwork.context import Context
from shiftwork.errors import ConfigurationError, InvalidArgument
from shiftwork.job import Action, NewJob, Scope, about_a_key, sending, without_a_key
from shiftwork.printable import shown
from shiftwork.retry import Retry
from shiftwork.settings import LONGEST, UNLIMITED, Rule, Settings, choice, length, maybe, switch, whole
from shiftwork.worker.batches import Batch

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
T = TypeVar("T")
V = TypeVar("V")

MOST_AT_ONCE = 1_000
USUALLY_AT_ONCE = 100
"""How many jobs a handler is given that takes several, at most, and unless it says otherwise."""

OnLost = Literal["requeue", "fail"]
Executor = Literal["loop", "thread", "process"]
MOST_RUNNING = 10_000
"""The largest limit on what runs at once in the cluster."""


class Surroundings:
    """What a task needs to know of its app."""

    settings: Settings
    queues: tuple[str, ...] | None = None
    """The queues that there are, if the app has declared them."""

    codes: Mapping[type[BaseException], str]
    default_code: str | None

    def check_queue(self, queue: str) -> None:
        """Refuse a queue that the app has not declared."""
        if self.queues is not None and queue not in self.queues:
            raise InvalidArgument(
                f"{shown(queue)} is not one of the queues of this app: {', '.join(self.queues)}",
                argument="queue",
            )

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
        self,
        app: Surroundings,
        signature: Signature,
        options: Mapping[str, Any],
        connection: object = None,
        *,
        keyless: str | None = None,
    ) -> None:
        """`keyless` is what `using` said of a unique key, while there is none."""
        self.signature = signature
        self._app = app
        self._options = options
        self._connection = connection
        self._keyless = keyless

    @property
    def name(self) -> str:
        """What the task is called, in the database too."""
        return self.signature.task

    @property
    def queue(self) -> str | None:
        """Where its jobs go, unless they are sent elsewhere; None is `default`."""
        queue: str | None = self._options.get("queue")
        return queue

    def job(self, *args: P.args, **kwargs: P.kwargs) -> NewJob[R]:
        """A job with these arguments, for `app.enqueue_many`."""
        if self._keyless is not None:
            raise without_a_key(self.name, self._keyless)
        payload = self.signature.encode(args, kwargs, self._app.settings.max_payload)
        return NewJob(task=self.signature.task, payload=payload, **self._options)

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Handle[R]:
        """Enqueue a job with these arguments."""
        job, client = self.job(*args, **kwargs), self._app.client
        sent = client.perform(operations.enqueue_one(client.store, job), self._connection)
        return Handle(client, sent.id, self.signature.read_result, sent.outcome)

    async def aenqueue(self, *args: P.args, **kwargs: P.kwargs) -> Handle[R]:
        """Enqueue a job with these arguments."""
        job, client = self.job(*args, **kwargs), await self._app.aclient()
        sent = await client.asend(job, self._connection)
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
        if queue is not None:
            self._app.check_queue(queue)
        lent = self._connection if connection is None else connection
        overruled = {_RIVALS[name] for name in chosen if name in _RIVALS}
        kept = {name: value for name, value in self._options.items() if name not in overruled}
        options = kept | chosen
        # A task may declare these for the jobs that will have a key, and a key may still come with another `using`.
        keyless = None if "unique_key" in options else about_a_key(chosen) or self._keyless
        return Sending(self._app, self.signature, options, lent, keyless=keyless)


_RIVALS = {"delay": "run_at", "run_at": "delay", "expires_in": "expires_at", "expires_at": "expires_in"}


@dataclass(frozen=True, kw_only=True)
class Options:
    """How the jobs of a task are run."""

    retry: Retry | None = None
    timeout: timedelta | None = None
    transaction: bool = False
    executor: Executor | None = None
    concurrency: int | None = None
    batch: int | None = None
    max_running: int | None = None
    on_lost: OnLost = "requeue"
    max_resets: int | None = None
    codes: Mapping[type[BaseException], str] = field(default_factory=dict)
    default_code: str | None = None

    def read(self, task: str) -> Options:
        """The same, with what was written as text (`"2s"`) as what it means; what cannot be is refused, with what it may be."""
        meant: dict[str, Any] = {}
        for name, (allowed, take) in _RULES.items():
            value = getattr(self, name)
            try:
                meant[name] = take(value)
            except (ValueError, TypeError, OverflowError):
                raise ConfigurationError(
                    f"task {task!r}: {name} is {shown(value)}; it must be {allowed}"
                ) from None
        check_codes(f"task {task!r}", self.codes, self.default_code)
        return replace(self, **meant)


_RULES: Mapping[str, Rule] = {
    "timeout": maybe(length(timedelta(milliseconds=1), LONGEST)),
    "transaction": switch(),
    "executor": maybe(choice("loop", "thread", "process")),
    "concurrency": maybe(whole(1, 10_000)),
    "batch": maybe(whole(1, MOST_AT_ONCE)),
    "max_running": maybe(whole(1, MOST_RUNNING)),
    "on_lost": choice("requeue", "fail"),
    "max_resets": maybe(whole(0, UNLIMITED)),
}
TX = "tx"
"""The parameter that takes the connection of a transactional task, if no annotation says so."""

_CONNECTIONS = (psycopg.Connection, psycopg.AsyncConnection)


class Task(Sending[P, R]):
    """Something that can be done now, by calling it, or later, by enqueueing it.

    send_email.enqueue("ada@example.org", subject="hi")
    send_email.using(delay=timedelta(minutes=5)).enqueue("ada@example.org", subject="hi")
    send_email("ada@example.org", subject="hi")     # here and now: no queue, no retry, no record
    """

    is_async = False

    def __init__(
        self,
        app: Surroundings,
        function: Callable[..., Any],
        *,
        name: str,
        options: Mapping[str, Any],
        running: Options,
    ) -> None:
        running = running.read(name)
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise ConfigurationError(
                f"task {name!r} is a generator, which ends before it begins; return a list"
            )
        named = frozenset({TX} if running.transaction else ())
        signature = Signature(name, function, frozenset({Context, *_CONNECTIONS}), named, Batch)
        super().__init__(app, signature, options)
        functools.update_wrapper(cast("Any", self), function)
        self.function = function
        self.retry = running.retry
        self.timeout = running.timeout
        self.transaction = running.transaction
        self.executor: Executor = running.executor or ("loop" if self.is_async else "thread")
        self._check_executor()
        self.concurrency = running.concurrency
        self._at_once = running.batch
        self.max_running = running.max_running
        self.on_lost: OnLost = running.on_lost
        self.max_resets = running.max_resets
        self.codes = dict(running.codes)
        self.default_code = running.default_code
        self.coder = Codes(task=self.codes, app=app.codes, default=self.default_code or app.default_code)
        try:
            _ = self.connection_parameter, self.batch
        except ConfigurationError as error:
            if not isinstance(error.__cause__, NameError):
                raise  # else an annotation names something that may be defined further down: look again at first use

    def __repr__(self) -> str:
        return f"<Task {self.name}>"

    def _check_executor(self) -> None:
        """Refuse what cannot run there."""
        why = None
        if self.executor == "process" and self.transaction:
            why = (
                "it is transactional, and the job's transaction is on a connection of the worker, which another process "
                "cannot use; leave one of them out, or end the job in a transaction of your own with context.finish(connection)"
            )
        elif self.executor == "loop" and not self.is_async:
            why = "a plain function would hold up the event loop; write async def, or leave it out"
        elif self.executor == "thread" and self.is_async:
            why = "an async function runs in an event loop; write def, or leave it out"
        if why is not None:
            raise ConfigurationError(f"task {self.name!r}: executor is {self.executor!r}, but {why}")

    @property
    def entry(self) -> dict[str, Any]:
        """What the registry says of it: the values that an enqueue leaves out, and what becomes of a lost job."""
        kept = ("queue", "priority", "max_attempts", "unique_scope", "unique_action", "unique_window")
        described = (self.function.__doc__ or "").strip().partition("\n")[0]
        return {
            "name": self.name,
            **{name: self._options.get(name) for name in kept},
            "retry": None if self.retry is None else self.retry.as_json(),
            "max_resets": self.max_resets,
            "on_lost": self.on_lost,
            "description": safe_text(described, 1000) or None,
        }

    @property
    def context_parameters(self) -> tuple[str, ...]:
        """The parameters that take the context of the attempt."""
        return self._contexts

    @property
    def connection_parameter(self) -> str | None:
        """The parameter that takes the connection of a transactional task."""
        return self._taker

    @property
    def batch(self) -> int | None:
        """How many jobs it is given at once, at most; None if it takes them one by one."""
        return self._batch

    @property
    def batch_parameter(self) -> str | None:
        """The parameter that takes them."""
        return self.signature.batched

    @functools.cached_property
    def _batch(self) -> int | None:
        if self.batch_parameter is None:
            if self._at_once is not None:
                raise ConfigurationError(
                    f"task {self.name!r}: batch is {self._at_once}, and no parameter takes several jobs; write documents: shiftwork.Batch[…]"
                )
            return None
        why = None
        if self.executor != "loop":
            why = "only an async function can be; write async def"
        elif self.context_parameters:
            why = f"each of them has a context of its own, so {', '.join(self.context_parameters)} cannot be given one; write job.context"
        elif self.concurrency and (self._at_once or 1) > self.concurrency:
            why = f"no more than {self.concurrency} of them may run at once (concurrency), and batch is {self._at_once}"
        if why is not None:
            raise ConfigurationError(f"task {self.name!r} is given several jobs at once, and {why}")
        return self._at_once or min(USUALLY_AT_ONCE, self.concurrency or USUALLY_AT_ONCE)

    @functools.cached_property
    def _contexts(self) -> tuple[str, ...]:
        return tuple(name for name in self.signature.injected if name != self._taker)

    @functools.cached_property
    def _taker(self) -> str | None:
        wanted = psycopg.AsyncConnection if self.is_async else psycopg.Connection
        found = {
            name: kind
            for name, kind in self.signature.injected.items()
            if not (isinstance(kind, type) and issubclass(kind, Context))
        }
        writes = f"write {TX}: psycopg.{wanted.__name__}"
        if not self.transaction:
            if found:
                raise ConfigurationError(
                    f"task {self.name!r}: {', '.join(found)} takes a connection, which only a transactional task is "
                    "given; write @app.task(transaction=True)"
                )
            return None
        if len(found) != 1:
            many = f"{' and '.join(found)} take it" if found else "no parameter takes it"
            raise ConfigurationError(
                f"task {self.name!r} is given its transaction once, and {many}; {writes}"
            )
        [(name, kind)] = found.items()
        if kind not in (Any, object) and not (isinstance(kind, type) and issubclass(wanted, kind)):
            kinds = "an async function" if self.is_async else "a plain function"
            raise ConfigurationError(
                f"task {self.name!r}: {name} is annotated {getattr(kind, '__name__', kind)}, and {kinds} is given a "
                f"psycopg.{wanted.__name__}; {writes}"
            )
        return name


class SqlTask(Sending[..., Any]):
    """A task whose code is a routine in the database; what it is enqueued with is its payload.

    derive_units = app.sql_task("derive_units", handler="stats.derive_units(jsonb)", queue="analytics")
    derive_units.enqueue(ids=[1, 2])
    """

    def __init__(
        self,
        app: Surroundings,
        *,
        name: str,
        options: Mapping[str, Any],
        running: Options,
        handler: str,
        before: str | None = None,
        after: str | None = None,
        commits: bool = False,
        description: str | None = None,
    ) -> None:
        running = running.read(name)
        retry = running.retry
        if retry is not None and retry.on is not None and not _are_codes(retry.on):
            raise ConfigurationError(
                f"task {name!r}: what a routine fails with has a code, and so retry takes on=('40001', …) and nothing else"
            )
        super().__init__(app, Signature(name, _any_payload), options)
        self.max_running = running.max_running
        kept = ("queue", "priority", "unique_scope", "unique_action", "unique_window", "merge")
        self.routine = operations.Routine(
            task=name,
            handler=handler,
            retry=None if retry is None else retry.as_json(),
            timeout=None if running.timeout is None else running.timeout.total_seconds(),
            before=before,
            after=after,
            commits=commits,
            description=None if description is None else safe_text(description, 1000),
            max_resets=running.max_resets,
            on_lost=running.on_lost,
            **{name: options.get(name) for name in kept},
        )

    def __repr__(self) -> str:
        return f"<SqlTask {self.name}>"


def _any_payload(**payload: object) -> Any:  # noqa: ANN401
    """What a routine takes, as far as Python knows."""


def _are_codes(on: object) -> bool:
    return isinstance(on, str) or (isinstance(on, tuple) and all(isinstance(one, str) for one in on))


class PlainTask(Task[P, R]):
    """A task whose function blocks."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = self.function(*args, **kwargs)
        return result


class AsyncTask(Task[P, R]):
    """A task whose function is awaited."""

    is_async = True

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        result: Coroutine[Any, Any, R] = self.function(*args, **kwargs)
        return result


class PlainTaskWith(PlainTask[P, R], Generic[Q, P, R]):
    """A plain task to which the worker hands something: who calls it hands it in, who enqueues it does not."""

    def __call__(self, *args: Q.args, **kwargs: Q.kwargs) -> R:  # type: ignore[override]
        result: R = self.function(*args, **kwargs)
        return result


class AsyncTaskWith(AsyncTask[P, R], Generic[Q, P, R]):
    """An awaited task to which the worker hands something: who calls it hands it in, who enqueues it does not."""

    def __call__(self, *args: Q.args, **kwargs: Q.kwargs) -> Coroutine[Any, Any, R]:  # type: ignore[override]
        result: Coroutine[Any, Any, R] = self.function(*args, **kwargs)
        return result


class BatchTask(AsyncTask[[T], R], Generic[Q, T, R, V]):
    """A task that is given several jobs at once: who calls it hands in a batch, who enqueues it one argument after the other."""

    def __call__(self, *args: Q.args, **kwargs: Q.kwargs) -> Coroutine[Any, Any, V]:  # type: ignore[override]
        result: Coroutine[Any, Any, V] = self.function(*args, **kwargs)
        return result
