"""A worker over a table that somebody already has."""

from __future__ import annotations

import asyncio
import contextlib
import select
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any
from unittest.mock import ANY
from uuid import UUID

import msgspec
import psycopg
import pydantic
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

import shiftwork
from shiftwork import Retry, TableStore, operations
from shiftwork.database import Plan, executing, run
from shiftwork.errors import ConfigurationError, FenceLost, InvalidArgument, NotInstalled
from shiftwork.events import ClaimHookFailed, JobEnded, JobLost, JobRefused, JobStopped, LeaseRenewed, Reaped
from shiftwork.stores import wording
from shiftwork.stores.fitting import installation
from shiftwork.stores.table import Table
from tests.test_conformance import TABLE
from tests.workshop import Latch, Workshop

Connection = psycopg.Connection[dict[str, Any]]
QUICK = Retry(max_attempts=3, delay=timedelta(milliseconds=1), factor=1, jitter=0)


@pytest.fixture
def table(connection: Connection) -> Connection:
    """A table of jobs, as Sourcegraph has it."""
    connection.execute(TABLE.encode())
    return connection


def insert(connection: Connection, many: int = 1, **values: object) -> list[int]:
    """What producers do."""
    given = {"repository_id": 1, **values}
    names, places = ", ".join(given), ", ".join(["%s"] * len(given))
    text = f"insert into example_jobs ({names}) select {places} from generate_series(1, {many}) returning id"
    return [row["id"] for row in connection.execute(text.encode(), list(given.values()))]


def row(connection: Connection, job: int) -> dict[str, Any]:
    [found] = connection.execute("select * from example_jobs where id = %s", (job,))
    return found


def made(store: TableStore, connection: Connection) -> tuple[Table, Callable[[Plan[Any]], Any]]:
    """The statements of a store, and a way to carry plans out."""
    statements = store.store(store.settings)

    def perform(plan: Plan[Any]) -> Any:
        return run(plan, executing(connection, "shiftwork", lent=False))

    perform(operations.require(statements))
    return statements, perform


@dataclass
class ExampleJob:
    id: int
    state: str
    attempt_began: datetime
    name: str
    price: Decimal
    prices: list[Decimal]
    born: date
    key: UUID
    blob: bytes
    took: timedelta
    words: dict[str, Any]
    nothing: str | None


class ExampleStruct(msgspec.Struct):
    id: int
    name: str
    price: Decimal
    blob: bytes
    words: dict[str, Any]


class ExampleModel(pydantic.BaseModel):
    id: int
    name: str
    price: Decimal
    born: date
    key: UUID
    took: timedelta


RICH = """
alter table example_jobs add price numeric default 1234567890.12345678901234567890, add prices numeric[] default '{0.1,2}',
  add born date default '2026-03-01', add key uuid default '7c9b8a52-2d0c-4a2e-9a3c-0f1d2e3f4a5b', add blob bytea default '\\x00ff',
  add took interval default '-90 seconds', add words jsonb default '{"a": [1, null]}', add nothing text, add archived boolean;
create table repositories (id int primary key, name text);
insert into repositories values (1, 'one'), (2, 'two');
create view example_jobs_with_name as
  select job.*, repository.name from example_jobs as job join repositories as repository on repository.id = job.repository_id
"""


# spec: SG-7, SG-8, SG-9, SG-10, SG-11, SG-12
@pytest.mark.parametrize("record", [ExampleJob, ExampleStruct, ExampleModel, dict])
async def test_a_handler_is_given_each_row_as_a_record_in_order_with_what_the_view_adds_and_the_claim_changed(
    table: Connection, dsn: str, record: type
) -> None:
    table.execute(RICH.encode())
    [last] = insert(table, repository_id=2)
    [first] = insert(table, repository_id=1, failure_message="of before", execution_logs="{}")
    insert(table, repository_id=1, archived=True)
    store = TableStore(
        "public.example_jobs",
        view="example_jobs_with_name",
        record=record if record is not dict else None,
        columns={"started_at": "started_at"},
        order_by="repository_id, id",
        where="archived is not true",
        dsn=dsn,
    )
    if record is ExampleJob:
        table.execute("alter table example_jobs rename started_at to attempt_began")
        table.execute("drop view example_jobs_with_name")
        table.execute(RICH[RICH.index("create view") :].encode())
        store = TableStore(
            "example_jobs",
            view="example_jobs_with_name",
            record=ExampleJob,
            columns={"started_at": "attempt_began"},
            order_by="job.repository_id, job.id",
            where="archived is not true",
            dsn=dsn,
        )
    seen: list[Any] = []

    async def handle(it: Any) -> None:
        seen.append(it)

    handle.__annotations__["it"] = record
    store.handler(handle)
    assert await store.arun_worker(stop_when_idle=True, concurrency=1)

    got = [
        dict(one) if isinstance(one, dict) else {name: getattr(one, name) for name in _fields(one)}
        for one in seen
    ]
    assert [one["id"] for one in got] == [first, last]
    assert [one["name"] for one in got] == ["one", "two"]
    assert row(table, first)["state"] == row(table, last)["state"] == "completed"
    assert row(table, first)["failure_message"] is row(table, first)["execution_logs"] is None
    if record is dict:
        assert got[0]["state"] == "processing"
        return
    assert got[0]["price"] == Decimal("1234567890.12345678901234567890")
    if record is not ExampleModel:
        assert (got[0]["blob"], got[0]["words"]) == (b"\x00\xff", {"a": [1, None]})
    if record is not ExampleStruct:
        assert (got[0]["born"], got[0]["took"]) == (date(2026, 3, 1), timedelta(seconds=-90))
        assert got[0]["key"] == UUID("7c9b8a52-2d0c-4a2e-9a3c-0f1d2e3f4a5b")
    if record is ExampleJob:
        assert got[0]["prices"] == [Decimal("0.1"), Decimal(2)]
        assert (got[0]["state"], got[0]["nothing"]) == ("processing", None)
        assert got[0]["attempt_began"] == row(table, first)["attempt_began"]


@dataclass
class NamedJob:
    id: int
    state: str
    num_failures: int
    repository_id: int
    repository_name: str


# spec: SG-7, SG-9, SG-10, SG-22
async def test_the_state_may_have_another_name_in_the_table_and_in_its_view(
    table: Connection, dsn: str
) -> None:
    table.execute(
        """alter table example_jobs rename state to status;
           alter table example_jobs add archived boolean not null default false;
           create table repositories (id int primary key, name text);
           insert into repositories values (1, 'one'), (2, 'two');
           create view example_jobs_with_repository_name as select job.*, repository.name as repository_name
             from example_jobs as job join repositories as repository on repository.id = job.repository_id"""
    )
    [last], [flaky], [_] = insert(table, repository_id=2), insert(table), insert(table, archived=True)
    store = TableStore(
        "example_jobs",
        view="example_jobs_with_repository_name",
        record=NamedJob,
        columns={"state": "status"},
        order_by="repository_id, id",
        where="NOT archived",
        retry=Retry(max_attempts=3, delay=timedelta(seconds=10)),
        lease=timedelta(seconds=5),
        max_resets=5,
        dsn=dsn,
    )
    installing(store, table)
    seen = []

    @store.handler(transaction=True)
    async def handle(record: NamedJob, tx: psycopg.AsyncConnection[Any]) -> None:
        seen.append(record)
        if record.id == flaky:
            raise ValueError("not yet")

    await store.arun_worker(stop_when_idle=True, concurrency=1)
    assert seen == [NamedJob(flaky, "processing", 0, 1, "one"), NamedJob(last, "processing", 0, 2, "two")]
    assert store.count_by_state("completed", "errored", "queued") == {
        "completed": 1,
        "errored": 1,
        "queued": 1,
    }
    again = row(table, flaky)
    assert timedelta(seconds=8) <= again["process_after"] - again["finished_at"] <= timedelta(seconds=12)
    store.close()


def _fields(record: Any) -> list[str]:
    return [*getattr(type(record), "__annotations__", {})]


# spec: SG-13, SG-14, D-1
async def test_a_claim_commits_first_and_a_failed_attempt_leaves_nothing_in_the_database(
    table: Connection, dsn: str
) -> None:
    table.execute("create table effects (job int)")
    good, bad = insert(table, 2)
    store = TableStore("example_jobs", dsn=dsn, retry=Retry.never())
    seen = []

    @store.handler(transaction=True)
    async def handle(record: dict[str, Any], tx: psycopg.AsyncConnection[Any]) -> None:
        seen.append(row(table, record["id"])["state"])
        await tx.execute("insert into effects values (%s)", (record["id"],))
        if record["id"] == bad:
            raise ValueError("no")

    await store.arun_worker(stop_when_idle=True)
    assert seen == ["processing", "processing"]
    assert [one["job"] for one in table.execute("select job from effects")] == [good]
    assert (row(table, good)["state"], row(table, bad)["state"]) == ("completed", "failed")
    assert row(table, bad)["failure_message"] == "ValueError: no"


async def test_who_changes_a_row_by_hand_keeps_its_transaction_from_committing(
    table: Connection, dsn: str
) -> None:
    table.execute("create table effects (job int)")
    [job] = insert(table)
    store = TableStore("example_jobs", dsn=dsn)
    latch = Latch()

    @store.handler(transaction=True)
    async def handle(record: dict[str, Any], tx: psycopg.AsyncConnection[Any]) -> None:
        await tx.execute("insert into effects values (1)")
        await latch.hold()

    async with Workshop(store) as shop:
        await latch.reached()
        table.execute("update example_jobs set state = 'completed' where id = %s", (job,))
        latch.release()
        await shop.event(JobLost)
    assert table.execute("select * from effects").fetchall() == []


# spec: SG-18, SG-21, SG-23
@pytest.mark.parametrize("plain", [False, True])
async def test_cancelling_frees_the_server_from_a_long_statement_of_a_transactional_handler(
    table: Connection, dsn: str, plain: bool
) -> None:
    [job] = insert(table)
    store = TableStore("example_jobs", dsn=dsn)
    installing(store, table)

    async def handle(record: dict[str, Any], tx: psycopg.AsyncConnection[Any]) -> None:
        await tx.execute("select pg_sleep(600)")

    def handle_blocking(record: dict[str, Any], tx: psycopg.Connection[Any]) -> None:
        tx.execute("select pg_sleep(600)")

    store.handler(transaction=True)(handle_blocking if plain else handle)
    async with Workshop(store) as shop:
        await shop.found(lambda: _sleeping(shop))
        await shop.until(
            lambda: shop.worker._listener.proven or not shop.worker.settings.notify, "the listener"
        )
        table.execute("update example_jobs set cancel = true where id = %s", (job,))
        await shop.ended(job, state="cancelled")
        assert not await _sleeping(shop)
    found = row(table, job)
    assert (found["state"], found["num_failures"], found["cancel"]) == ("canceled", 0, True)
    assert found["finished_at"] is not None


async def _sleeping(shop: Workshop) -> list[Any]:
    return await shop.rows(
        "select pid from pg_stat_activity where query = 'select pg_sleep(600)' and state = 'active' and datname = current_database()"
    )


def installing(store: TableStore, connection: Connection) -> None:
    statements = store.store(store.settings)
    statements.learn(run(_asked(statements), executing(connection, "", lent=False)))
    for one in installation(statements):
        connection.execute(one.encode())


def _asked(statements: Table) -> Plan[Any]:
    return (yield statements.installed())


# spec: SG-25, D-15
def test_a_worker_that_was_stopped_in_its_transaction_has_its_sessions_ended_and_loses_the_row(
    table: Connection, dsn: str, server: str
) -> None:
    # fault: F4
    insert(table, 2)
    store = TableStore("example_jobs", dsn=dsn, lease=timedelta(seconds=1))
    statements, perform = made(store, table)
    frozen, other = (perform(operations.register(statements)) for _ in range(2))
    [mine] = perform(operations.claim(statements, frozen, {"example_jobs": None}, 1)).taken
    [theirs] = perform(operations.claim(statements, other, {"example_jobs": None}, 1)).taken
    named = make_conninfo(dsn, application_name=statements.session(frozen))
    bystander = make_conninfo(dsn, application_name=statements.session(other))
    foreign = make_conninfo(server, application_name=statements.session(frozen))
    with (
        psycopg.connect(named) as stopped,
        psycopg.connect(bystander) as alive,
        psycopg.connect(foreign) as elsewhere,
    ):
        elsewhere.execute("select 1")
        opened = statements.fence(mine[0], mine[5])
        stopped.execute(opened.text.encode(), opened.params)
        alive.execute("select 1")
        stale = (
            "update example_jobs set last_heartbeat_at = last_heartbeat_at - interval '1 hour' where id = %s"
        )
        table.execute(stale, (mine[0],))
        table.execute(
            "update example_jobs set last_heartbeat_at = now() + interval '1 hour' where id = %s",
            (theirs[0],),
        )
        until_ended(stopped, store)
        alive.execute("select 1")
        elsewhere.execute("select 1")
        [(job, (answer, silent))] = store.reset().items()
        assert (job, answer) == (mine[0], "ready")
        assert silent > timedelta(minutes=59)
        with contextlib.suppress(psycopg.Error):
            stopped.close()
    assert row(table, mine[0])["num_resets"] == 1
    assert row(table, mine[0])["started_at"] is None
    assert row(table, theirs[0])["state"] == "processing"
    store.close()


def until_ended(session: psycopg.Connection[Any], store: TableStore) -> None:
    """Reset, and nothing can be, until a session that has been silent for a lease is ended."""
    patience = time.monotonic() + 30
    while session.fileno() not in select.select([session.fileno()], [], [], 0.1)[0]:
        assert time.monotonic() < patience, "it is there still"
        assert store.reset() == {}
    with pytest.raises(psycopg.OperationalError):
        session.execute("select 1")


async def test_a_handler_may_change_its_own_row_and_go_on_for_longer_than_the_lease(
    table: Connection, dsn: str
) -> None:
    # spec: SG-14
    [job] = insert(table)
    store = TableStore("example_jobs", dsn=dsn, lease=timedelta(seconds=1))
    latch = Latch()

    @store.handler(transaction=True)
    async def handle(record: dict[str, Any], tx: psycopg.AsyncConnection[Any]) -> None:
        await tx.execute("update example_jobs set repository_id = 7 where id = %s", (record["id"],))
        await latch.hold()

    async with Workshop(store) as shop:
        await latch.reached()
        await shop.event(LeaseRenewed, times=len(shop.seen(LeaseRenewed)) + 6)
        assert row(table, job)["last_heartbeat_at"] < datetime.now(UTC) - timedelta(seconds=1)
        assert store.reset() == {}
        latch.release()
        await shop.ended(job, state="completed")
    assert (row(table, job)["repository_id"], row(table, job)["num_resets"], latch.arrived) == (7, 0, 1)
    store.close()


async def test_a_handler_that_has_changed_its_own_row_is_told_that_it_cannot_add_to_its_logs(
    table: Connection, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wording, "LOCKED_LONG", "100ms")
    [job] = insert(table)
    store = TableStore("example_jobs", dsn=dsn, retry=Retry.never())

    @store.handler(transaction=True)
    async def handle(
        record: dict[str, Any], context: shiftwork.Context, tx: psycopg.AsyncConnection[Any]
    ) -> None:
        await tx.execute("update example_jobs set repository_id = 7 where id = %s", (job,))
        await store.aadd_log(context, "clone")

    await store.arun_worker(stop_when_idle=True)
    assert (
        "a handler that changes its own row in its transaction does that last"
        in row(table, job)["failure_message"]
    )
    store.close()


def test_a_worker_that_is_heard_of_keeps_its_sessions_though_somebody_has_locked_one_of_its_rows(
    table: Connection, dsn: str
) -> None:
    insert(table, 2)
    store = TableStore("example_jobs", dsn=dsn, lease=timedelta(seconds=1))
    statements, perform = made(store, table)
    worker = perform(operations.register(statements))
    locked, other = perform(operations.claim(statements, worker, {"example_jobs": None}, 2)).taken
    stale = "update example_jobs set last_heartbeat_at = last_heartbeat_at - interval '2 hours' where id = %s"
    table.execute(stale, (locked[0],))
    table.execute(
        "update example_jobs set last_heartbeat_at = now() + interval '1 hour' where id = %s", (other[0],)
    )
    named = make_conninfo(dsn, application_name=statements.session(worker))
    with psycopg.connect(dsn) as person, psycopg.connect(named) as handler:
        person.execute("update example_jobs set state = state where id = %s", (locked[0],))
        handler.execute("select 1")
        assert store.reset() == {}
        handler.execute("select 1")
        table.execute(stale, (other[0],))  # now nothing is heard of it at all
        assert store.reset() == {other[0]: ("ready", ANY)}
        until_ended(handler, store)
        with contextlib.suppress(psycopg.Error):
            handler.close()
    store.close()


# spec: SG-6, SG-21, SG-22
async def test_failures_are_counted_in_all_and_what_others_errored_is_due_after_the_same_wait(
    table: Connection, dsn: str
) -> None:
    [ours] = insert(table)
    hour = timedelta(hours=1)
    [theirs] = insert(table, state="errored", num_failures=2, finished_at=datetime.now(UTC) - hour)
    [later] = insert(table, state="errored", finished_at=datetime.now(UTC) + hour)
    store = TableStore("example_jobs", dsn=dsn, retry=QUICK)

    @store.handler
    async def handle(record: dict[str, Any]) -> None:
        raise ValueError("no")

    async with Workshop(store) as shop:
        await shop.ended(ours, theirs, state="failed")
    assert (row(table, ours)["state"], row(table, ours)["num_failures"]) == ("failed", 3)
    assert len(shop.seen(JobEnded, job=ours)) == 3
    assert len(shop.seen(JobEnded, job=theirs)) == 1
    assert row(table, later)["state"] == "errored"

    never = TableStore("example_jobs", dsn=dsn, retry=Retry.never())
    table.execute("update example_jobs set finished_at = now() - interval '1 day' where id = %s", (later,))
    statements, perform = made(never, table)
    assert perform(operations.claim(statements, 1, {"example_jobs": None}, 10)).taken == []


# spec: SG-24
async def test_a_handler_may_put_its_row_back_which_then_looks_as_if_it_were_new(
    table: Connection, dsn: str
) -> None:
    [job] = insert(table, queued_at=datetime(2020, 1, 1, tzinfo=UTC))
    store = TableStore("example_jobs", dsn=dsn)

    @store.handler
    async def handle(record: dict[str, Any]) -> None:
        table.execute("update example_jobs set cancel = true where id = %s", (job,))
        raise shiftwork.Snooze(timedelta(hours=1))

    async with Workshop(store) as shop:
        await shop.ended(job, state="scheduled")
    found = row(table, job)
    assert (found["state"], found["cancel"], found["started_at"], found["num_failures"]) == (
        "queued",
        False,
        None,
        0,
    )
    assert found["queued_at"] > datetime.now(UTC) - timedelta(minutes=5)
    assert found["process_after"] > datetime.now(UTC) + timedelta(minutes=50)


async def test_a_row_that_is_cancelled_before_it_is_claimed_never_begins(table: Connection, dsn: str) -> None:
    asked, other = insert(table, 2)
    table.execute("update example_jobs set cancel = true where id = %s", (asked,))
    store = TableStore("example_jobs", dsn=dsn)
    seen = []

    @store.handler
    async def handle(record: dict[str, Any]) -> None:
        seen.append(record["id"])

    await store.arun_worker(stop_when_idle=True)
    assert (seen, row(table, asked)["state"]) == ([other], "canceled")


SMALL = {
    "attempt": "id bigint primary key, state text, attempt int default 0, last_heartbeat_at timestamptz",
    "seed": "id bigint primary key, state text, started_at timestamptz",
}


@pytest.mark.parametrize("kind", SMALL)
async def test_a_table_needs_few_columns(connection: Connection, dsn: str, kind: str) -> None:
    connection.execute(
        f"create table small ({SMALL[kind]}); insert into small select i, 'queued' from generate_series(1, 5) i".encode()
    )
    store = TableStore("small", dsn=dsn, retry=Retry.never())
    seen = []

    @store.handler(transaction=True)
    async def handle(record: dict[str, Any], tx: psycopg.AsyncConnection[Any]) -> None:
        seen.append(record["id"])
        if record["id"] == 3:
            raise ValueError

    await store.arun_worker(stop_when_idle=True, concurrency=1)
    assert seen == [1, 2, 3, 4, 5]
    assert store.count_by_state("completed", "failed") == {"completed": 4, "failed": 1}
    store.close()


def test_a_fence_that_is_a_time_differs_even_if_the_clock_was_set_back(table: Connection, dsn: str) -> None:
    # fault: F23
    [job] = insert(table)
    store = TableStore("example_jobs", dsn=dsn)
    statements, perform = made(store, table)
    worker = perform(operations.register(statements))
    ahead = datetime.now(UTC) + timedelta(days=1)
    table.execute("update example_jobs set last_heartbeat_at = %s where id = %s", (ahead, job))
    claims = []
    for _ in range(3):
        [taken] = perform(operations.claim(statements, worker, {"example_jobs": None}, 1)).taken
        claims.append(taken[5])
        perform(operations.release(statements, worker, [(taken[0], taken[5])]))
    assert claims == sorted(set(claims))
    assert claims[0] > ahead.timestamp() * 1_000_000


@pytest.mark.parametrize(
    ("columns", "options", "complaint"),
    [
        (
            "id int primary key, state text, last_heartbeat_at timestamptz",
            {},
            "nothing that tells one claim of a job from the next",
        ),
        ("id int primary key, state text, attempt int", {}, "has no column last_heartbeat_at"),
        (
            "id int primary key, state text, attempt int, last_heartbeat_at timestamptz, worker_hostname varchar(20)",
            {},
            "too short for the name of a host",
        ),
        (
            "id int primary key, status text, attempt int, last_heartbeat_at timestamptz",
            {},
            "has no column state",
        ),
        (
            "id text primary key, state text, attempt int, last_heartbeat_at timestamptz",
            {},
            "id is text, and has to be bigint or",
        ),
        (
            "id int primary key, state text, attempt int, last_heartbeat_at timestamp",
            {},
            "a time without its zone",
        ),
        (
            "id int primary key, state text, started_at timestamptz(3), last_heartbeat_at timestamptz",
            {},
            "too coarse",
        ),
        (
            "id int primary key, state text, attempt int, last_heartbeat_at timestamptz",
            {"retry": QUICK},
            "has no column num_failures",
        ),
        (
            "id int primary key, state text, attempt int, last_heartbeat_at timestamptz",
            {"record": ExampleJob},
            "a field 'price'",
        ),
        (
            "id int primary key, state text, attempt int, last_heartbeat_at timestamptz",
            {"where": "nope"},
            'column "nope" does not exist',
        ),
        (
            "id int primary key, state text, attempt int, last_heartbeat_at timestamptz",
            {"order_by": "id,"},
            "syntax error",
        ),
        (
            "id int primary key, state text, attempt int, last_heartbeat_at timestamptz",
            {"view": "missing"},
            "there is no view missing",
        ),
    ],
)
async def test_a_table_that_cannot_be_worked_is_refused_before_any_job_runs(
    connection: Connection, dsn: str, columns: str, options: dict[str, Any], complaint: str
) -> None:
    connection.execute(f"create table example_jobs ({columns})".encode())
    store = TableStore("example_jobs", dsn=dsn, **{"retry": Retry.never(), **options})

    async def handle(record: Any) -> None: ...

    handle.__annotations__["record"] = options.get("record", dict)
    store.handler(handle)
    with pytest.raises(ConfigurationError, match=complaint):
        await store.arun_worker(stop_when_idle=True)
    store.close()


async def test_a_table_that_is_not_there_is_told_so_and_can_be_waited_for(
    connection: Connection, dsn: str
) -> None:
    store = TableStore("example_jobs", dsn=dsn)

    @store.handler
    async def handle(record: dict[str, Any]) -> None: ...

    with pytest.raises(NotInstalled, match="there is no table example_jobs"):
        await store.arun_worker()


async def test_a_column_that_is_dropped_under_a_worker_is_done_without(table: Connection, dsn: str) -> None:
    latch = Latch()
    store = TableStore("example_jobs", dsn=dsn, lease=timedelta(seconds=3))

    @store.handler
    async def handle(record: dict[str, Any]) -> None:
        await latch.hold()

    async with Workshop(store, concurrency=1, poll=timedelta(milliseconds=100)) as shop:
        [held] = insert(table)
        await latch.reached()
        table.execute("alter table example_jobs drop column cancel, drop column num_resets")
        shop.events.clear()
        await shop.event(LeaseRenewed)  # though it has no room to claim
        latch.release()
        await shop.ended(held, *insert(table, 2))
    assert [row(table, job)["state"] for job in (1, 2, 3)] == ["completed"] * 3
    store.close()


async def test_names_are_quoted_wherever_they_stand(connection: Connection, dsn: str) -> None:
    connection.execute(
        b'create schema "My %s"; create table "My %s"."Odd ""Jobs" ('
        b'"the id" serial primary key, "status" text default \'queued\', "try" int default 0, "seen at" timestamptz, "a%b" int default 7,'
        b' "host" text);'
        b'insert into "My %s"."Odd ""Jobs" ("a%b") values (8), (9)'
    )
    columns = {
        "id": "the id",
        "state": "status",
        "attempt": "try",
        "last_heartbeat_at": "seen at",
        "worker_hostname": "host",
    }
    store = TableStore(
        '"My %s"."Odd ""Jobs"',
        columns=columns,
        order_by='"a%b" % 100 desc',
        where='"a%b" % 2 < 2',
        retry=Retry.never(),
        name="odd",
        dsn=dsn,
    )
    seen = []

    @store.handler(transaction=True)
    async def handle(record: dict[str, Any], tx: psycopg.AsyncConnection[Any]) -> None:
        seen.append(record["a%b"])

    await store.arun_worker(stop_when_idle=True, concurrency=1)
    assert seen == [9, 8]
    assert store.count_by_state("completed") == {"completed": 2}
    store.close()


# spec: SG-34
async def test_steps_are_kept_with_the_row_and_who_was_superseded_writes_none(
    table: Connection, dsn: str
) -> None:
    [job] = insert(table)
    store = TableStore("example_jobs", dsn=dsn)
    refused = []

    @store.handler(transaction=True)
    async def handle(
        record: dict[str, Any], context: shiftwork.Context, tx: psycopg.AsyncConnection[Any]
    ) -> None:
        place = await store.aadd_log(context, "clone", ["git", "clone"])
        assert place == 0
        await store.achange_log(context, place, exit_code=0, out="done", duration=timedelta(seconds=2))
        assert store.add_log(context, "build") == 1
        context.log.info("built")
        table.execute(
            "update example_jobs set state = 'failed', worker_hostname = 'another' where id = %s", (job,)
        )
        for write in (store.aadd_log(context, "late"), store.achange_log(context, 0, out="late")):
            try:
                await write
            except FenceLost as error:
                refused.append(str(error))
        table.execute(
            "update example_jobs set state = 'processing', worker_hostname = %s where id = %s",
            (f"{store._table().host}:{context.job.worker}", job),
        )

    await store.arun_worker(stop_when_idle=True)
    entries = row(table, job)["execution_logs"]
    assert [one["key"] for one in entries] == ["clone", "build", "log.info"]
    assert (entries[0]["exitCode"], entries[0]["out"], entries[0]["durationMs"]) == (0, "done", 2000)
    assert entries[0]["command"] == ["git", "clone"]
    started = [datetime.fromisoformat(one["startTime"]) for one in entries]
    began = row(table, job)["started_at"]
    assert began <= started[0] <= started[1] <= row(table, job)["finished_at"], "by the database's clock"
    assert entries[2]["out"] == "built"
    assert len(refused) == 2
    assert f"of job {job} does not hold it any more" in refused[0]
    store.close()


# spec: SG-35
async def test_rows_can_be_counted_found_and_dated(table: Connection, dsn: str) -> None:
    store = TableStore("example_jobs", dsn=dsn, retry=Retry(max_attempts=3, delay=timedelta(minutes=30)))
    assert await store.aoldest_age() is None
    now, hour = datetime.now(UTC), timedelta(hours=1)
    insert(table, 2, queued_at=now - 2 * hour)
    insert(table, queued_at=now - 9 * hour, process_after=now + hour)
    insert(table, queued_at=now - 9 * hour, process_after=now - hour)
    insert(table, state="errored", queued_at=now - 9 * hour, finished_at=now - 5 * hour)
    insert(table, state="completed", queued_at=now - 9 * hour)
    counted = {"queued": 4, "processing": 0, "errored": 1, "failed": 0, "completed": 1, "canceled": 0}
    assert store.count_by_state() == await store.acount_by_state() == counted
    assert store.count_by_state("queued") == {"queued": 4}
    assert store.exists("errored", "failed")
    assert not await store.aexists("failed", "canceled")
    oldest = store.oldest_age()
    assert oldest is not None
    assert timedelta(hours=4.4) < oldest < timedelta(hours=4.6)
    with pytest.raises(InvalidArgument, match="'done' is no state"):
        store.exists("done")
    store.close()


# spec: SG-2, SG-4
async def test_a_budget_passes_by_rows_that_are_too_large_and_a_condition_is_sql(
    table: Connection, dsn: str
) -> None:
    table.execute("alter table example_jobs add size int")
    [large] = insert(table, size=11)
    small = insert(table, 2, size=4)
    store = TableStore("example_jobs", dsn=dsn)
    seen, wrong = [], [True]

    @store.before_claim
    def within_budget(claim: shiftwork.Round) -> None:
        if wrong:
            wrong.clear()
            claim.require("size <= 10")  # type: ignore[arg-type]
        claim.require(sql.SQL("job.size <= {} or job.size is null").format(10))
        claim.require(sql.SQL("job.size % 2 = 0"))

    @store.handler
    async def handle(record: dict[str, Any]) -> None:
        seen.append(record["id"])

    async with Workshop(store) as shop:
        await shop.event(ClaimHookFailed)
        await shop.ended(*small)
    assert sorted(seen) == small
    assert row(table, large)["state"] == "queued"


# spec: SG-25, SG-26
async def test_workers_put_back_what_another_left_and_say_so(table: Connection, dsn: str) -> None:
    # fault: F1
    [job] = insert(
        table,
        state="processing",
        worker_hostname="gone:17",
        last_heartbeat_at=datetime(2020, 1, 1, tzinfo=UTC),
    )
    [worn] = insert(table, state="processing", started_at=datetime(2020, 1, 1, tzinfo=UTC), num_resets=2)
    store = TableStore(
        "example_jobs", dsn=dsn, lease=timedelta(seconds=1), max_resets=2, died="it died too often"
    )

    @store.handler
    async def handle(record: dict[str, Any]) -> None: ...

    async with Workshop(store) as shop:
        reaped = await shop.event(Reaped)
        await shop.ended(job)
    assert reaped.jobs == {job: "ready", worn: "failed"}
    assert (row(table, job)["num_resets"], row(table, job)["state"]) == (1, "completed")
    assert (row(table, worn)["failure_message"], row(table, worn)["state"]) == ("it died too often", "failed")


# spec: SG-16, SG-17
async def test_rows_of_a_transactional_handler_are_renewed_while_it_holds_them_and_a_lost_one_is_told(
    table: Connection, dsn: str
) -> None:
    held, taken = insert(table, 2)
    store = TableStore("example_jobs", dsn=dsn, lease=timedelta(seconds=1))
    latch = Latch()

    @store.handler(transaction=True)
    async def handle(record: dict[str, Any], tx: psycopg.AsyncConnection[Any]) -> None:
        await latch.hold()

    async with Workshop(store) as shop:
        await latch.reached(2)
        first = row(table, held)["last_heartbeat_at"]
        table.execute("update example_jobs set state = 'completed' where id = %s", (taken,))

        async def renewed() -> bool:
            return bool(row(table, held)["last_heartbeat_at"] > first)

        await shop.found(renewed)
        await shop.event(JobStopped, job=taken, why="lost")
        latch.release()
        await shop.ended(held)


async def test_what_is_inserted_wakes_a_worker_that_polls_rarely_once_the_triggers_are_there(
    table: Connection, dsn: str
) -> None:
    store = TableStore("example_jobs", dsn=dsn)
    installing(store, table)
    installing(store, table)

    @store.handler
    async def handle(record: dict[str, Any]) -> None: ...

    async with Workshop(store) as shop:
        await shop.asleep()
        await shop.ended(*insert(table, 3))


async def test_a_worker_that_polls_rarely_hears_of_what_waits_anew_and_sleeps_until_it_is_due(
    table: Connection, dsn: str
) -> None:
    # spec: SG-22
    retry = Retry(max_attempts=2, delay=timedelta(milliseconds=100))
    store = TableStore("example_jobs", dsn=dsn, retry=retry, lease=timedelta(hours=1))
    installing(store, table)

    @store.handler(transaction=True)
    async def handle(record: dict[str, Any], tx: psycopg.AsyncConnection[Any]) -> None:
        if record["num_failures"] == 0:
            raise ValueError("not yet")

    async with Workshop(store) as shop:
        await shop.asleep()
        await shop.ended(*insert(table), state="completed")
        [left] = insert(table, state="processing", last_heartbeat_at=datetime(2020, 1, 1, tzinfo=UTC))
        [later] = insert(table, process_after=datetime.now(UTC) + timedelta(days=1))
        await shop.asleep()
        assert store.reset().keys() == {left}
        await shop.ended(left, state="completed")
        await shop.asleep()
        table.execute("update example_jobs set process_after = now() where id = %s", (later,))
        await shop.ended(later, state="completed")
    store.close()


def test_no_trigger_is_made_for_a_column_that_there_is_not_to_be(table: Connection, dsn: str) -> None:
    table.execute("alter table example_jobs drop cancel, drop process_after")
    store = TableStore("example_jobs", dsn=dsn, columns={"cancel": None, "process_after": None})
    installing(store, table)
    statements, _ = made(store, table)
    assert statements.notifies


@pytest.mark.parametrize("name", ["odd%jobs", "Aufträge", "it's"])
def test_a_trigger_on_a_table_of_any_name_is_known_and_notifies_where_it_is_heard(
    connection: Connection, dsn: str, name: str
) -> None:
    connection.execute(TABLE.replace("example_jobs", f'"{name}"').encode())
    store = TableStore(f'"{name}"', dsn=dsn)
    installing(store, connection)
    statements, _ = made(store, connection)
    assert statements.notifies
    connection.execute(sql.SQL("listen {}").format(sql.Identifier(statements.channels[0])))
    connection.execute(sql.SQL("insert into {} (repository_id) values (1)").format(sql.Identifier(name)))
    assert list(connection.notifies(timeout=5, stop_after=1))


@pytest.mark.parametrize(
    ("order", "indexed"),
    [
        ("job.repository_id desc nulls last, id", "repository_id DESC NULLS LAST, id"),
        ("repository_id, name, id", "repository_id"),
        ("repository_id + 1, random()", "id"),
    ],
)
def test_the_index_for_claims_has_what_can_be_indexed_of_the_order(
    table: Connection, dsn: str, order: str, indexed: str
) -> None:
    table.execute(RICH.encode())
    installing(TableStore("example_jobs", view="example_jobs_with_name", order_by=order, dsn=dsn), table)
    [made] = table.execute("select indexdef from pg_indexes where indexname = 'example_jobs_claim'")
    assert f"({indexed}) WHERE" in made["indexdef"]


def test_a_store_has_one_handler_that_takes_its_record() -> None:
    store = TableStore("example_jobs", record=ExampleStruct, dsn="host=nowhere")

    @store.handler
    async def handle(record: ExampleStruct) -> None: ...

    with pytest.raises(ConfigurationError, match="have a handler already"):
        store.handler(handle)
    for wrong in (lambda: None, lambda one, two: None, lambda record: None):
        other = TableStore("example_jobs", record=ExampleStruct, dsn="host=nowhere")
        other.handler(wrong)
        with pytest.raises(ConfigurationError, match="the handler of example_jobs"):
            other.store(other.settings)
    with pytest.raises(ConfigurationError, match="is no name of a table"):
        TableStore("a.b.c", dsn="host=nowhere")
    with pytest.raises(ConfigurationError, match="nobody handles the rows"):
        asyncio.run(TableStore("example_jobs", dsn="host=nowhere").arun_worker())


async def test_nothing_is_enqueued_with_a_row(table: Connection, dsn: str) -> None:
    [job] = insert(table)
    store, app = TableStore("example_jobs", dsn=dsn, retry=Retry.never()), shiftwork.App(dsn)

    @app.task
    async def other() -> None: ...

    @store.handler
    async def handle(record: dict[str, Any], context: shiftwork.Context) -> None:
        context.enqueue(other.job())

    await store.arun_worker(stop_when_idle=True)
    assert "with which nothing can be enqueued" in row(table, job)["failure_message"]


# spec: SG-12, SG-16, SG-25
async def test_a_row_that_a_trigger_will_not_have_changed_keeps_nobody_else(
    table: Connection, dsn: str
) -> None:
    # fault: F29
    table.execute(
        """create function refuse() returns trigger language plpgsql as $$ begin raise 'not this one' using errcode = '55000'; end $$;
           create trigger refuse before update on example_jobs for each row when (old.repository_id = 13)
             execute function refuse()"""
    )
    old: dict[str, Any] = {"state": "processing", "last_heartbeat_at": datetime(2020, 1, 1, tzinfo=UTC)}
    [stuck] = insert(table, repository_id=13, **old)
    [lost] = insert(table, **old)
    [hostile] = insert(table, repository_id=13)
    fine = insert(table, 3)
    [turned] = insert(table, repository_id=7)
    store = TableStore("example_jobs", dsn=dsn, lease=timedelta(seconds=1))
    latch = Latch()

    @store.handler
    async def handle(record: dict[str, Any]) -> None:
        if record["id"] == turned:
            await latch.hold()

    async with Workshop(store, concurrency=20) as shop:
        await shop.ended(*fine, lost)
        assert shop.seen(JobRefused, job=hostile)
        assert (await shop.event(Reaped)).jobs[stuck] == "refused"
        await latch.reached()
        table.execute(
            "update example_jobs set repository_id = 13 where id = %s", (turned,)
        )  # it cannot be renewed any more
        more = insert(table, 2)
        await shop.ended(*more)
        await shop.event(LeaseRenewed, times=len(shop.seen(LeaseRenewed)) + 3)
        assert not shop.seen(JobStopped)
        table.execute("drop trigger refuse on example_jobs")
        latch.release()
        await shop.ended(turned)
    assert (row(table, hostile)["state"], row(table, stuck)["state"]) == ("queued", "processing")
