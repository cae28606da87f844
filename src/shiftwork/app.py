"""What a program knows of its background work: the tasks, and where the database is."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

import psycopg

from shiftwork import operations
from shiftwork.client import Handle
from shiftwork.codec import encode_result
from shiftwork.context import Context
from shiftwork.database import commits_each, connect, translate
from shiftwork.errors import ConfigurationError, InvalidArgument, UnknownTask
from shiftwork.job import Action, Answer, Job, NewJob, Scope, State, check_name, sending
from shiftwork.printable import QUEUE_BYTES, shown
from shiftwork.program import Program
from shiftwork.retry import Retry
from shiftwork.settings import UNLIMITED, Settings
from shiftwork.stores import protocol
from shiftwork.stores.store import Store
from shiftwork.task import (
    MOST_RUNNING,
    AsyncTask,
    AsyncTaskWith,
    BatchTask,
    Executor,
    OnLost,
    Options,
    PlainTask,
    PlainTaskWith,
    SqlTask,
    Task,
)
from shiftwork.worker.batches import Batch

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

Answers = dict[int, str]

log = logging.getLogger("shiftwork")


Awaited = Coroutine[Any, Any, R]
Tx = psycopg.Connection[Any]
AsyncTx = psycopg.AsyncConnection[Any]


class Unlike:
    """What no worker hands in: a first parameter that would take it takes anything, so nothing can be told from it."""


class Declare(Protocol):
    """What `@app.task(…)` is: it turns a function into a task.

    What the worker hands in, and a caller therefore need not give, is known to type checkers only if it comes first.
    """

    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[Concatenate[Unlike, P], Awaited[R]], /
    ) -> AsyncTask[..., R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[Unlike, P], R], /) -> PlainTask[..., R]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[Concatenate[Batch[T], P], Awaited[None]], /
    ) -> BatchTask[Concatenate[Batch[T], P], T, None, None]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[Concatenate[Batch[T], P], Awaited[list[R]]], /
    ) -> BatchTask[Concatenate[Batch[T], P], T, R, list[R]]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[Concatenate[Context, AsyncTx, P], Awaited[R]], /
    ) -> AsyncTaskWith[Concatenate[Context, AsyncTx, P], P, R]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[Concatenate[AsyncTx, Context, P], Awaited[R]], /
    ) -> AsyncTaskWith[Concatenate[AsyncTx, Context, P], P, R]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[Concatenate[Context, P], Awaited[R]], /
    ) -> AsyncTaskWith[Concatenate[Context, P], P, R]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[Concatenate[AsyncTx, P], Awaited[R]], /
    ) -> AsyncTaskWith[Concatenate[AsyncTx, P], P, R]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[Context, Tx, P], R], /
    ) -> PlainTaskWith[Concatenate[Context, Tx, P], P, R]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[Tx, Context, P], R], /
    ) -> PlainTaskWith[Concatenate[Tx, Context, P], P, R]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[Context, P], R], /
    ) -> PlainTaskWith[Concatenate[Context, P], P, R]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[Tx, P], R], /
    ) -> PlainTaskWith[Concatenate[Tx, P], P, R]: ...
    @overload
    def __call__(self, function: Callable[P, Awaited[R]], /) -> AsyncTask[P, R]: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, function: Callable[P, R], /) -> PlainTask[P, R]: ...


class App(Program):
    """Your tasks and the database they are enqueued in.

    app = shiftwork.App()  # DATABASE_URL, or the embedded Postgres

    @app.task(queue="mail")
    async def send_email(to: str, subject: str) -> str: ...

    `queues` declares which there are, and as a mapping how many of each may run at once in the whole cluster;
    `max_running` says how many over all.
    """

    def __init__(
        self,
        dsn: str | None = None,
        *,
        schema: str | None = None,
        listen_dsn: str | None = None,
        max_connections: int | None = None,
        max_payload: int | None = None,
        settings: Settings | None = None,
        queues: Sequence[str] | Mapping[str, int | None] | None = None,
        max_running: int | None = None,
        codes: Mapping[type[BaseException], str] | None = None,
        default_code: str | None = None,
    ) -> None:
        given: dict[str, Any] = {
            "dsn": dsn,
            "schema": schema,
            "listen_dsn": listen_dsn,
            "max_connections": max_connections,
            "max_payload": max_payload,
        }
        if settings is not None and any(value is not None for value in given.values()):
            raise ConfigurationError("give either settings or single ones, not both")
        super().__init__(settings or Settings.read(**given), codes=codes, default_code=default_code)
        self.queues = None if queues is None else _declared(queues)
        self._queue_limits = queues if isinstance(queues, Mapping) else {}
        self._max_running = max_running
        _limits(max_running, self._queue_limits, ())
        self._sql_tasks: dict[str, SqlTask] = {}

    def __repr__(self) -> str:
        many = len(self._tasks) + len(self._sql_tasks)
        return f"<App with {many} tasks in schema {self.settings.schema}>"

    @property
    def sql_tasks(self) -> Mapping[str, SqlTask]:
        """The tasks whose code is in the database, by name."""
        return MappingProxyType(self._sql_tasks)

    @overload
    def task(  # type: ignore[overload-overlap]
        self, function: Callable[Concatenate[Unlike, P], Awaited[R]], /
    ) -> AsyncTask[..., R]: ...
    @overload
    def task(self, function: Callable[Concatenate[Unlike, P], R], /) -> PlainTask[..., R]: ...
    @overload
    def task(  # type: ignore[overload-overlap]
        self, function: Callable[[Batch[T]], Awaited[None]], /
    ) -> BatchTask[[Batch[T]], T, None, None]: ...
    @overload
    def task(  # type: ignore[overload-overlap]
        self, function: Callable[[Batch[T]], Awaited[list[R]]], /
    ) -> BatchTask[[Batch[T]], T, R, list[R]]: ...
    @overload
    def task(  # type: ignore[overload-overlap]
        self, function: Callable[Concatenate[Context, P], Awaited[R]], /
    ) -> AsyncTaskWith[Concatenate[Context, P], P, R]: ...
    @overload
    def task(
        self, function: Callable[Concatenate[Context, P], R], /
    ) -> PlainTaskWith[Concatenate[Context, P], P, R]: ...
    @overload
    def task(self, function: Callable[P, Awaited[R]], /) -> AsyncTask[P, R]: ...  # type: ignore[overload-overlap]
    @overload
    def task(self, function: Callable[P, R], /) -> PlainTask[P, R]: ...
    @overload
    def task(
        self,
        /,
        *,
        name: str | None = None,
        queue: str | None = None,
        priority: int | None = None,
        retry: Retry | None = None,
        timeout: timedelta | None = None,
        expires_in: timedelta | None = None,
        scope: Scope | None = None,
        action: Action | None = None,
        window: timedelta | None = None,
        merge: str | Mapping[str, str] | None = None,
        tags: Sequence[str] | None = None,
        keep: timedelta | int | None = None,
        transaction: bool = False,
        executor: Executor | None = None,
        concurrency: int | None = None,
        batch: int | None = None,
        max_running: int | None = None,
        on_lost: OnLost = "requeue",
        max_resets: int | None = None,
        codes: Mapping[type[BaseException], str] | None = None,
        default_code: str | None = None,
    ) -> Declare: ...
    def task(
        self,
        function: Callable[..., Any] | None = None,
        /,
        *,
        name: str | None = None,
        queue: str | None = None,
        priority: int | None = None,
        retry: Retry | None = None,
        timeout: timedelta | None = None,
        expires_in: timedelta | None = None,
        scope: Scope | None = None,
        action: Action | None = None,
        window: timedelta | None = None,
        merge: str | Mapping[str, str] | None = None,
        tags: Sequence[str] | None = None,
        keep: timedelta | int | None = None,
        transaction: bool = False,
        executor: Executor | None = None,
        concurrency: int | None = None,
        batch: int | None = None,
        max_running: int | None = None,
        on_lost: OnLost = "requeue",
        max_resets: int | None = None,
        codes: Mapping[type[BaseException], str] | None = None,
        default_code: str | None = None,
    ) -> Any:
        """Declare a function as a task; it is known by `name`, or else by the name of the function."""
        running = Options(
            retry=retry,
            timeout=timeout,
            transaction=transaction,
            executor=executor,
            concurrency=concurrency,
            batch=batch,
            max_running=max_running,
            on_lost=on_lost,
            max_resets=max_resets,
            codes=codes or {},
            default_code=default_code,
        )
        attempts = None if retry is None else retry.max_attempts or UNLIMITED
        options = sending(
            queue=queue,
            priority=priority,
            max_attempts=attempts,
            expires_in=expires_in,
            scope=scope,
            action=action,
            window=window,
            merge=merge,
            tags=tags,
            keep=keep,
        )

        def declare(function: Callable[..., Any]) -> Task[Any, Any]:
            called = self._new_name(name or str(getattr(function, "__name__", "")), queue)
            kind = AsyncTask if inspect.iscoroutinefunction(function) else PlainTask
            task: Task[Any, Any] = kind(self, function, name=called, options=options, running=running)
            _check_merge_arguments(task, merge)
            self._tasks[called] = task
            return task

        return declare if function is None else declare(function)

    def sql_task(
        self,
        name: str,
        *,
        handler: str,
        queue: str | None = None,
        priority: int | None = None,
        retry: Retry | None = None,
        timeout: timedelta | None = None,
        before: str | None = None,
        after: str | None = None,
        commits: bool = False,
        description: str | None = None,
        expires_in: timedelta | None = None,
        scope: Scope | None = None,
        action: Action | None = None,
        window: timedelta | None = None,
        merge: str | Mapping[str, str] | None = None,
        tags: Sequence[str] | None = None,
        keep: timedelta | int | None = None,
        max_running: int | None = None,
        on_lost: OnLost = "requeue",
        max_resets: int | None = None,
    ) -> SqlTask:
        """Declare a task whose code is a routine in the database; a worker enters it in the registry when it starts.

        derive_units = app.sql_task("derive_units", handler="stats.derive_units(jsonb)", queue="analytics")
        derive_units.enqueue(ids=[1, 2])
        """
        task = SqlTask(
            self,
            name=self._new_name(name, queue),
            options=sending(
                queue=queue,
                priority=priority,
                max_attempts=None if retry is None else retry.max_attempts or UNLIMITED,
                expires_in=expires_in,
                scope=scope,
                action=action,
                window=window,
                merge=merge,
                tags=tags,
                keep=keep,
            ),
            running=Options(
                retry=retry, timeout=timeout, max_running=max_running, on_lost=on_lost, max_resets=max_resets
            ),
            handler=handler,
            before=before,
            after=after,
            commits=commits,
            description=description,
        )
        self._sql_tasks[name] = task
        return task

    def _new_name(self, name: str, queue: str | None) -> str:
        """The name of a task to be declared, which goes to that queue, if both can be."""
        check_name("the name of a task", name)
        if name in self._tasks or name in self._sql_tasks:
            known = self._tasks.get(name)
            where = f" ({known.function.__module__})" if known else ""
            raise ConfigurationError(
                f"there is a task {name!r} already{where}; give one of them another name: @app.task(name=…)"
            )
        try:
            self.check_queue(queue or "default")
        except InvalidArgument as error:
            raise ConfigurationError(f"task {name!r}: {error}") from None
        return name

    def enqueue_many(
        self, jobs: Iterable[NewJob[R]], *, connection: object = None, atomic: bool = True
    ) -> list[Handle[R]]:
        """Enqueue any number of jobs, sent in chunks as they are read.

        All or none of them: it is one transaction, or yours if you lend a connection that is in one. With
        `atomic=False` each chunk commits by itself, unless it is in yours.
        """
        client, names = self.client, list[str]()
        atomic = atomic and operations.importing.unsent is None  # what is not sent needs no transaction
        apart = not atomic and commits_each(connection)
        plan = operations.enqueue(client.store, _noting(jobs, names), apart=apart)
        sent = client.perform(plan, connection, atomic=atomic)
        return [self._handle(name, it.id, it.outcome) for name, it in zip(names, sent, strict=True)]

    async def aenqueue_many(
        self, jobs: Iterable[NewJob[R]], *, connection: object = None, atomic: bool = True
    ) -> list[Handle[R]]:
        """Enqueue any number of jobs, sent in chunks as they are read; see `enqueue_many`."""
        client, names = await self.aclient(), list[str]()
        atomic = atomic and operations.importing.unsent is None  # what is not sent needs no transaction
        apart = not atomic and commits_each(connection)
        plan = operations.enqueue(client.store, _noting(jobs, names), apart=apart)
        sent = await client.aperform(plan, connection, atomic=atomic)
        return [self._handle(name, it.id, it.outcome) for name, it in zip(names, sent, strict=True)]

    def job(self, id: int) -> Handle[Any]:  # noqa: A002
        """A handle on a job of which the id is known."""
        return Handle(self.client, id, _as_stored)

    def jobs(
        self,
        *,
        task: str | None = None,
        queue: str | None = None,
        state: State | Collection[State] | None = None,
        before: int | None = None,
        limit: int = 50,
        offset: int = 0,
    ) -> list[Job]:
        """Jobs that match, newest first; `before` an id, to go on where an earlier page ended."""
        return self.client.perform(
            operations.list_jobs(
                self.client.store,
                task=task,
                queue=queue,
                states=_states(state),
                before=before,
                limit=limit,
                offset=offset,
            )
        )

    async def ajobs(
        self,
        *,
        task: str | None = None,
        queue: str | None = None,
        state: State | Collection[State] | None = None,
        before: int | None = None,
        limit: int = 50,
        offset: int = 0,
    ) -> list[Job]:
        """Jobs that match, newest first; `before` an id, to go on where an earlier page ended."""
        client = await self.aclient()
        return await client.aperform(
            operations.list_jobs(
                client.store,
                task=task,
                queue=queue,
                states=_states(state),
                before=before,
                limit=limit,
                offset=offset,
            )
        )

    def counts(self, *, task: str | None = None, queue: str | None = None) -> dict[State, int]:
        """How many jobs there are in each state."""
        return self.client.perform(operations.count_jobs(self.client.store, task=task, queue=queue))

    async def acounts(self, *, task: str | None = None, queue: str | None = None) -> dict[State, int]:
        """How many jobs there are in each state."""
        client = await self.aclient()
        return await client.aperform(operations.count_jobs(client.store, task=task, queue=queue))

    def cancel(self, ids: Sequence[int], reason: str | None = None, *, connection: object = None) -> Answers:
        """Cancel jobs; each is cancelled, signalled (it runs), finished, unknown or busy."""
        return self.client.perform(operations.cancel(self.client.store, ids, reason), connection)

    async def acancel(
        self, ids: Sequence[int], reason: str | None = None, *, connection: object = None
    ) -> Answers:
        """Cancel jobs; each is cancelled, signalled (it runs), finished, unknown or busy."""
        client = await self.aclient()
        return await client.aperform(operations.cancel(client.store, ids, reason), connection)

    def complete(self, id: int, result: object = None, *, connection: object = None) -> str:  # noqa: A002
        """Complete a job from outside, with a result; it is completed, finished, unknown or busy.

        One that is running is taken from its worker, whose handler is told.
        """
        plan = operations.complete(self.client.store, id, encode_result(result))
        return self.client.perform(plan, connection)

    async def acomplete(self, id: int, result: object = None, *, connection: object = None) -> str:  # noqa: A002
        """Complete a job from outside, with a result; see `complete`."""
        client = await self.aclient()
        return await client.aperform(operations.complete(client.store, id, encode_result(result)), connection)

    def revive(self, ids: Sequence[int], *, connection: object = None) -> Answers:
        """Give finished jobs another life; each is revived, live, unknown or busy."""
        return self.client.perform(operations.revive(self.client.store, ids), connection)

    async def arevive(self, ids: Sequence[int], *, connection: object = None) -> Answers:
        """Give finished jobs another life; each is revived, live, unknown or busy."""
        client = await self.aclient()
        return await client.aperform(operations.revive(client.store, ids), connection)

    def run_now(self, ids: Sequence[int], *, strict: bool = False, connection: object = None) -> Answers:
        """Make jobs due at once; each is moved, ready, refused, finished, unknown or busy.

        With `strict` all of them or none: InvalidArgument tells which cannot.
        """
        return self.client.perform(operations.run_now(self.client.store, ids, strict=strict), connection)

    async def arun_now(
        self, ids: Sequence[int], *, strict: bool = False, connection: object = None
    ) -> Answers:
        """Make jobs due at once; see `run_now`."""
        client = await self.aclient()
        return await client.aperform(operations.run_now(client.store, ids, strict=strict), connection)

    def find(self, name: str) -> Task[Any, Any]:
        """The task of that name."""
        try:
            return self._tasks[name]
        except KeyError:
            known = ", ".join(sorted(self._tasks)) or "none"
            raise UnknownTask(f"no task is called {shown(name)}; declared are: {known}") from None

    def migrate(self) -> None:
        """Install the schema, or bring it up to date."""
        _install(self.client.settings)  # with no dsn, this starts the embedded server

    def store(self, settings: Settings) -> Store:
        """The schema in which the jobs are."""
        return protocol.Protocol(settings.schema)

    def prepare(self, settings: Settings) -> None:
        """Install the schema in the database of an embedded server."""
        _install(settings)

    def limits(self) -> Mapping[str, Any]:
        """How many may run at once in the whole cluster."""
        return _limits(
            self._max_running, self._queue_limits, [*self._tasks.values(), *self._sql_tasks.values()]
        )

    def routines(self) -> Sequence[operations.Routine]:
        """What is entered in the registry by a worker, before all else."""
        return [task.routine for task in self._sql_tasks.values()]

    def chosen(self, settings: Mapping[str, Any]) -> Settings:
        """What a worker is set to; it serves no queue that the app has not declared."""
        chosen = super().chosen(settings)
        for queue in (*chosen.queues, *chosen.queue_concurrency, *chosen.queue_budgets):
            self.check_queue(queue)
        return chosen

    def _handle(self, name: str, id: int, outcome: Answer) -> Handle[Any]:  # noqa: A002
        task = self._tasks.get(name)
        return Handle(self.client, id, task.signature.read_result if task else _as_stored, outcome)


def _install(settings: Settings) -> None:
    from shiftwork.migrate import migrate  # noqa: PLC0415  -- only whoever migrates needs the files

    with connect(settings) as connection:
        try:
            migrate(connection, settings.schema)
        except psycopg.Error as error:
            alive = not connection.closed
            raise translate(error, settings.schema, commits=True, alive=alive) from None


def _declared(queues: Sequence[str] | Mapping[str, int | None]) -> tuple[str, ...]:
    if isinstance(queues, str) or not queues:
        raise ConfigurationError(
            f"queues is {shown(queues)}; it must be a list of names, such as ('mail', 'default')"
        )
    return tuple(check_name("the name of a queue", queue, QUEUE_BYTES) for queue in queues)


def _limits(
    over_all: int | None, queues: Mapping[str, int | None], tasks: Iterable[Task[Any, Any] | SqlTask]
) -> dict[str, Any]:
    """How many may run at once in the cluster, as the workers of this program declare it."""
    of_queues = {name: most for name, most in queues.items() if most is not None}
    of_tasks = {task.name: task.max_running for task in tasks if task.max_running is not None}
    for name, most in (("max_running", over_all), *of_queues.items()):
        if most is not None and not (isinstance(most, int) and 1 <= most <= MOST_RUNNING):
            raise ConfigurationError(
                f"{name}: {shown(most)} at once; it must be a whole number from 1 to {MOST_RUNNING:,}"
            )
    said = {"all": over_all, "queues": of_queues, "tasks": of_tasks}
    return {name: limits for name, limits in said.items() if limits}


def _as_stored(result: object) -> object:
    return result


def _noting(jobs: Iterable[NewJob[R]], names: list[str]) -> Iterator[NewJob[R]]:
    for job in jobs:
        yield job
        names.append(job.task)


def _states(state: State | Collection[State] | None) -> Collection[State] | None:
    if state is None:
        return None
    try:
        return [State(one) for one in ([state] if isinstance(state, str) else state)]
    except ValueError as error:
        raise InvalidArgument(f"{error}; there are: {', '.join(State)}", argument="state") from None


def _check_merge_arguments(task: Task[Any, Any], merge: str | Mapping[str, str] | None) -> None:
    if merge is None or isinstance(merge, str):
        return
    for argument in merge:
        if not task.signature.takes(argument):
            raise ConfigurationError(f"task {task.name!r} has no argument {argument!r} to merge")
