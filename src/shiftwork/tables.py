"""A worker over a table that you already have: producers insert, a handler is given each row, and the row says how it went."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from decimal import Decimal
from typing import Any, TypeVar, get_args, get_origin, overload

import msgspec

from shiftwork import operations
from shiftwork.codec import plain_type
from shiftwork.context import Context
from shiftwork.database import Plan
from shiftwork.errors import ConfigurationError, InvalidArgument
from shiftwork.job import check_name
from shiftwork.printable import QUEUE_BYTES
from shiftwork.program import Program
from shiftwork.retry import Retry
from shiftwork.settings import UNLIMITED, Settings
from shiftwork.stores.layout import DIED, STATES, Layout, relation
from shiftwork.stores.table import Table
from shiftwork.task import AsyncTask, Executor, Options, PlainTask, Task
from shiftwork.worker import Worker

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

RESET = 1_000
"""Rows that are put back with one statement."""


class TableStore(Program):
    """A table of yours whose rows are jobs.

    store = shiftwork.TableStore("example_jobs", record=ExampleJob, order_by="repository_id, id")

    @store.handler(transaction=True)
    async def handle(record: ExampleJob, tx: psycopg.AsyncConnection) -> None: ...

    shiftwork.Worker(store, concurrency=4).run()

    `where` and `order_by` are SQL over the columns of `job`, and are put into statements as they are: never let them come from others.
    """

    def __init__(
        self,
        table: str,
        *,
        view: str | None = None,
        record: type | None = None,
        columns: Mapping[str, str | None] | None = None,
        order_by: str | None = None,
        where: str | None = None,
        retry: Retry | None = None,
        lease: timedelta | None = None,
        heartbeat: timedelta | None = None,
        max_resets: int = 2,
        died: str = DIED,
        name: str | None = None,
        dsn: str | None = None,
        settings: Settings | None = None,
    ) -> None:
        if settings is not None and dsn is not None:
            raise ConfigurationError("give either settings or single ones, not both")
        read = settings or Settings.read(dsn=dsn)
        super().__init__(read.changed(lease=lease, heartbeat=heartbeat))
        if not 0 <= max_resets <= UNLIMITED:
            raise ConfigurationError(f"max_resets is {max_resets!r}; it must be a whole number from 0")
        relation(table)
        self.name = check_name(
            "the name of a store", name or table.rpartition(".")[2].strip('"'), QUEUE_BYTES
        )
        self.record = record
        self._layout = Layout(
            name=self.name,
            table=table,
            view=view,
            columns=dict(columns or {}),
            order_by=order_by,
            where=where,
            retry=retry or Retry(),
            max_resets=max_resets,
            died=died,
        )
        self._asked: Table | None = None

    def __repr__(self) -> str:
        return f"<TableStore {self.name}>"

    @overload
    def handler(self, function: F, /) -> F: ...
    @overload
    def handler(
        self,
        /,
        *,
        transaction: bool = False,
        executor: Executor | None = None,
        batch: int | None = None,
        timeout: timedelta | None = None,
        codes: Mapping[type[BaseException], str] | None = None,
        default_code: str | None = None,
    ) -> Callable[[F], F]: ...
    def handler(
        self,
        function: Callable[..., Any] | None = None,
        /,
        *,
        transaction: bool = False,
        executor: Executor | None = None,
        batch: int | None = None,
        timeout: timedelta | None = None,
        codes: Mapping[type[BaseException], str] | None = None,
        default_code: str | None = None,
    ) -> Any:
        """Declare what is done with a row; it is given the record, or several as a `Batch`, and, if it asks, its context and its transaction."""
        running = Options(
            retry=self._layout.retry,
            timeout=timeout,
            transaction=transaction,
            executor=executor,
            batch=batch,
            codes=codes or {},
            default_code=default_code,
        )

        def declare(function: Callable[..., Any]) -> Callable[..., Any]:
            if self._tasks:
                raise ConfigurationError(f"the rows of {self._layout.table} have a handler already")
            kind = AsyncTask if inspect.iscoroutinefunction(function) else PlainTask
            self._tasks[self.name] = kind(
                self, function, name=self.name, options={"queue": self.name}, running=running
            )
            return function

        return declare if function is None else declare(function)

    # What a worker needs.

    def store(self, settings: Settings) -> Table:
        """The table, for a worker with these settings."""
        task = next(iter(self._tasks.values()), None)
        argument, record = ("record", self.record) if task is None else self._argument(task)
        return Table(
            dataclasses.replace(
                self._layout,
                lease=settings.lease,
                argument=argument,
                fields=fields_of(record),
                transactional=task is not None and task.transaction,
            )
        )

    def chosen(self, settings: Mapping[str, Any]) -> Settings:
        """What a worker is set to; it serves this table and nothing else."""
        return dataclasses.replace(super().chosen(settings), queues={self.name: None})

    async def worker(self, **settings: Any) -> Worker:  # noqa: ANN401
        """A worker for this table, not running yet; `settings` overrule those of the store."""
        if not self._tasks:
            raise ConfigurationError(
                f"nobody handles the rows of {self._layout.table}; declare it with @store.handler"
            )
        return await super().worker(**settings)

    def _argument(self, task: Task[Any, Any]) -> tuple[str, Any]:
        """The parameter that takes the record, and what it is."""
        taken = task.signature.arguments
        if len(taken) != 1:
            raise ConfigurationError(
                f"the handler of {self._layout.table} is given a record, and beside it its context and its transaction; it takes "
                f"{', '.join(taken) or 'nothing'}"
            )
        [(name, hint)] = taken.items()
        if self.record is not None and hint is not self.record:
            raise ConfigurationError(
                f"the handler of {self._layout.table} takes {name} as {inspect.formatannotation(hint)}, and the records of the store are "
                f"{self.record.__name__}; annotate it so"
            )
        return name, hint

    # What can be asked.

    def count_by_state(self, *states: str) -> dict[str, int]:
        """How many rows there are in these states, or in each; it reads all of them: to know whether there are any, ask `exists`."""
        return self._ask(lambda table: _counts(table, _states(states)))

    async def acount_by_state(self, *states: str) -> dict[str, int]:
        """How many rows there are in these states, or in each; see `count_by_state`."""
        return await self._aask(lambda table: _counts(table, _states(states)))

    def exists(self, *states: str) -> bool:
        """Whether there is a row in one of these states."""
        return self._ask(lambda table: _exists(table, _states(states)))

    async def aexists(self, *states: str) -> bool:
        """Whether there is a row in one of these states."""
        return await self._aask(lambda table: _exists(table, _states(states)))

    def oldest_age(self) -> timedelta | None:
        """For how long the row that has waited longest could have been claimed; None if nothing waits."""
        return self._ask(_oldest)

    async def aoldest_age(self) -> timedelta | None:
        """For how long the row that has waited longest could have been claimed; None if nothing waits."""
        return await self._aask(_oldest)

    def reset(self) -> dict[int, tuple[str, timedelta]]:
        """Put back rows whose worker fell silent: each is ready, failed or cancelled now, and how long it had been silent.

        One that a trigger or constraint of the table's will not have changed is `refused`, and has been silent for a lease at least.
        """
        return self._ask(_reset)

    async def areset(self) -> dict[int, tuple[str, timedelta]]:
        """Put back rows whose worker fell silent; see `reset`."""
        return await self._aask(_reset)

    def add_log(self, context: Context, key: str, command: Sequence[str] = (), **more: Any) -> int:  # noqa: ANN401
        """Begin an entry of the row's execution logs; gives its place, for `change_log`. Raises FenceLost if the row is another's.

        place = store.add_log(context, "clone", ["git", "clone", url])
        store.change_log(context, place, exit_code=0, out=output, duration=took)
        """
        entry = {"key": key, "command": list(command), "out": "", **_entry(more)}
        return self._ask(lambda table: _add_log(table, context, entry))

    async def aadd_log(self, context: Context, key: str, command: Sequence[str] = (), **more: Any) -> int:  # noqa: ANN401
        """Begin an entry of the row's execution logs; see `add_log`."""
        entry = {"key": key, "command": list(command), "out": "", **_entry(more)}
        return await self._aask(lambda table: _add_log(table, context, entry))

    def change_log(self, context: Context, place: int, **more: Any) -> None:  # noqa: ANN401
        """Say more of an entry: exit_code, out, duration. Raises FenceLost if the row is another's by now."""
        self._ask(lambda table: _change_log(table, context, place, _entry(more)))

    async def achange_log(self, context: Context, place: int, **more: Any) -> None:  # noqa: ANN401
        """Say more of an entry; see `change_log`."""
        await self._aask(lambda table: _change_log(table, context, place, _entry(more)))

    def _ask(self, make: Callable[[Table], Plan[T]]) -> T:
        client = self.client
        return client.perform(_known(self._table(), make))

    async def _aask(self, make: Callable[[Table], Plan[T]]) -> T:
        client = await self.aclient()
        return await client.aperform(_known(self._table(), make))

    def _table(self) -> Table:
        """The table, whose columns need to be looked at once."""
        if self._asked is None or self._asked.layout.lease != self.settings.lease:
            self._asked = self.store(self.settings)
        return self._asked


def _known(table: Table, make: Callable[[Table], Plan[T]]) -> Plan[T]:
    yield from operations.meet(table)
    return (yield from make(table))


def _counts(table: Table, states: Sequence[str]) -> Plan[dict[str, int]]:
    rows = yield table.counts(states)
    found = {row["state"]: row["number"] for row in rows}
    return {state: found.get(state, 0) for state in states}


def _exists(table: Table, states: Sequence[str]) -> Plan[bool]:
    rows = yield table.exists(states)
    return bool(rows[0]["there"])


def _oldest(table: Table) -> Plan[timedelta | None]:
    [row] = yield table.measure_queues([table.layout.name])
    return timedelta(seconds=row["oldest"]) if row["ready"] else None


def _reset(table: Table) -> Plan[dict[int, tuple[str, timedelta]]]:
    found: dict[int, tuple[str, timedelta]] = {}
    while True:
        rows, refused = yield from operations.reap_rows(table, 0, RESET, thorough=True)
        found.update({row["id"]: (row["answer"], timedelta(seconds=row["age"])) for row in rows})
        found.update(dict.fromkeys(refused, ("refused", table.layout.lease)))
        if len(rows) + len(refused) < RESET:
            return found


def _add_log(table: Table, context: Context, entry: Mapping[str, object]) -> Plan[int]:
    job = context.job
    return operations.add_log(table, job.worker or 0, (job.id, job.attempt), entry)


def _change_log(table: Table, context: Context, place: int, entry: Mapping[str, object]) -> Plan[bool]:
    job = context.job
    return operations.change_log(table, job.worker or 0, (job.id, job.attempt), place, entry)


def _states(states: Sequence[str]) -> Sequence[str]:
    if strange := [state for state in states if state not in STATES]:
        raise InvalidArgument(
            f"{strange[0]!r} is no state of a row; there are: {', '.join(STATES)}", argument="states"
        )
    return states or STATES


def _entry(said: Mapping[str, Any]) -> dict[str, object]:
    """What is said of a step, as it is stored."""
    names = {"exit_code": "exitCode", "out": "out", "duration": "durationMs", "command": "command"}
    if strange := [name for name in said if name not in names]:
        raise InvalidArgument(
            f"{strange[0]!r} is nothing that a log has; there are: {', '.join(names)}", argument=strange[0]
        )
    entry = {names[name]: value for name, value in said.items()}
    if isinstance(took := entry.get("durationMs"), timedelta):
        entry["durationMs"] = round(took.total_seconds() * 1000)
    return entry


def fields_of(record: Any) -> dict[str, str] | None:  # noqa: ANN401
    """What a record has, each with how it crosses from the database; None if it takes whatever there is."""
    kind = plain_type(record)
    if record is None or kind in (Any, object, dict, Mapping):
        return None
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return {one.encode_name: _crossing(one.type) for one in msgspec.structs.fields(kind)}
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return {one.name: _crossing(hints[one.name]) for one in dataclasses.fields(kind) if one.init}
    if isinstance(models := getattr(kind, "model_fields", None), Mapping):
        return {one.alias or name: _crossing(one.annotation) for name, one in models.items()}
    raise ConfigurationError(
        f"a record is a dataclass, a msgspec.Struct, a pydantic model or a dict, and not {inspect.formatannotation(record)}"
    )


def _crossing(hint: Any) -> str:  # noqa: ANN401
    kind = plain_type(hint)
    if kind in (list, tuple, set, frozenset) or get_origin(hint) in (list, tuple, set, frozenset):
        return "texts" if any(plain_type(one) is Decimal for one in get_args(hint)) else "plain"
    if not isinstance(kind, type):
        return "plain"
    if issubclass(kind, Decimal):
        return "text"
    if issubclass(kind, timedelta):
        return "duration"
    return "bytes" if issubclass(kind, bytes | bytearray) else "plain"
