from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from types import SimpleNamespace
from typing import Any, LiteralString
from uuid import UUID

import msgspec
import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo
from psycopg.rows import namedtuple_row

import shiftwork
import shiftwork.embedded
from shiftwork import App, Handle, Retry, Settings, State, database, operations
from shiftwork.errors import (
    ConfigurationError,
    DatabaseError,
    DatabaseUnavailable,
    DuplicateDiffers,
    InvalidArgument,
    JobCancelled,
    JobExpired,
    JobFailed,
    NotAllowed,
    NotInstalled,
    PayloadTooLarge,
    ResultTimeout,
    SchemaTooNew,
    SchemaTooOld,
    UnknownJob,
    UnknownTask,
)
from tests.harness import Protocol

Connection = psycopg.Connection[Any]
SOON = 30.0


@dataclass
class Receipt:
    number: UUID
    lines: list[str]


def declare(app: App) -> SimpleNamespace:
    """The tasks of these tests."""

    @app.task(queue="mail", retry=Retry(max_attempts=3))
    def greet(name: str, greeting: str = "hello") -> str:
        return f"{greeting}, {name}"

    @app.task
    async def buy(number: UUID, lines: list[str]) -> Receipt:
        return Receipt(number, lines)

    return SimpleNamespace(greet=greet, buy=buy)


@pytest.fixture
def app(dsn: str) -> Iterator[App]:
    with App(dsn) as app:
        yield app


@pytest.fixture
async def aapp(dsn: str) -> AsyncIterator[App]:
    async with App(dsn) as app:
        yield app


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that somebody else brings about."""
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.005)


def backends(connection: Connection, matching: LiteralString) -> int:
    [row] = connection.execute(
        "select count(*) as number from pg_stat_activity where datname = current_database()"
        " and pid <> pg_backend_pid() and " + matching
    ).fetchall()
    return int(row["number"])


def terminate(connection: Connection, matching: LiteralString = "true") -> int:
    rows = connection.execute(
        "select pg_terminate_backend(pid, 10000) from pg_stat_activity where datname = current_database()"
        " and pid <> pg_backend_pid() and application_name = 'shiftwork client' and " + matching
    ).fetchall()
    return len(rows)


# Enqueueing


def test_a_job_is_enqueued_and_can_be_asked_about(app: App, protocol: Protocol) -> None:
    # spec: SH-5
    task = declare(app).greet
    handle = task.enqueue("Ada", greeting="hi")
    assert handle.outcome == "created"
    assert handle.status() is State.READY
    job = handle.info()
    assert (job.task, job.queue, job.payload) == ("greet", "mail", {"name": "Ada", "greeting": "hi"})
    assert (job.max_attempts, job.attempts, job.faults) == (3, (), ())
    assert job.created_at is not None
    assert job.created_at.tzinfo is UTC
    assert protocol.job(handle.id)["payload"] == {"name": "Ada", "greeting": "hi"}


async def test_the_same_from_an_event_loop(aapp: App) -> None:
    # spec: SH-5
    number = UUID(int=7)
    handle = await declare(aapp).buy.aenqueue(number, ["tea"])
    assert await handle.astatus() is State.READY
    job = await handle.ainfo()
    assert (job.queue, job.payload) == ("default", {"number": str(number), "lines": ["tea"]})


def test_calling_a_task_runs_it_here_and_now(app: App, protocol: Protocol) -> None:
    # spec: HO-44
    tasks = declare(app)
    assert tasks.greet("Ada") == "hello, Ada"
    assert asyncio.run(tasks.buy(UUID(int=1), [])) == Receipt(UUID(int=1), [])
    assert protocol.rows("select * from shiftwork.all_jobs") == []


def test_how_a_job_is_sent_can_be_changed_for_one_call(app: App) -> None:
    # spec: SH-5, QU-24
    task = declare(app).greet
    at = datetime(2100, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
    job = task.using(
        priority=-5,
        run_at=at,
        expires_at=at + timedelta(days=1),
        queue="slow",
        max_attempts=9,
        tags=["a", "b"],
    )
    sent = job.enqueue("Ada").info()
    assert (sent.priority, sent.run_at, sent.queue, sent.max_attempts) == (-5, at, "slow", 9)
    assert (sent.expires_at, sent.tags, sent.state) == (at + timedelta(days=1), ("a", "b"), State.SCHEDULED)
    later = task.using(delay=timedelta(hours=1), expires_in=timedelta(hours=2)).enqueue("Ada").info()
    assert later.run_at - later.created_at == timedelta(hours=1)
    assert later.expires_at - later.created_at == timedelta(hours=2)
    assert task.enqueue("Ada").info().queue == "mail"


def test_a_time_that_has_passed_counts_as_now(app: App) -> None:
    # spec: QU-24
    task = declare(app).greet
    first = task.enqueue("Ada").info()
    second = task.using(run_at=datetime(2000, 1, 1, tzinfo=UTC)).enqueue("Ada").info()
    third = task.using(delay=timedelta(hours=-1)).enqueue("Ada").info()
    assert second.state is third.state is State.READY
    assert first.run_at <= second.run_at <= third.run_at


def test_a_time_without_a_zone_is_refused(app: App) -> None:
    with pytest.raises(InvalidArgument, match="run_at has no time zone"):
        declare(app).greet.using(run_at=datetime(2030, 1, 1))  # noqa: DTZ001


def test_history_is_kept_by_whole_days(app: App) -> None:
    task = declare(app).greet
    with pytest.raises(InvalidArgument, match="whole days"):
        task.using(keep=timedelta(hours=5))
    assert task.using(keep=timedelta(days=2)).job("Ada").keep == 2


def test_wrong_arguments_never_reach_the_database(app: App, protocol: Protocol) -> None:
    # spec: HO-32
    task = declare(app).greet
    for wrong in ({"name": 5}, {}, {"name": "Ada", "volume": 11}, {"name": "a\0"}):
        with pytest.raises(InvalidArgument, match="greet"):
            task.enqueue(**wrong)
    with pytest.raises(PayloadTooLarge):
        task.enqueue("x" * (1 << 20))
    assert protocol.rows("select * from shiftwork.all_jobs") == []


def test_the_database_has_its_own_limit_on_the_size(dsn: str) -> None:
    with App(dsn, max_payload=10 << 20) as generous, pytest.raises(PayloadTooLarge, match="1048576"):
        declare(generous).greet.enqueue("x" * (2 << 20))


def test_two_tasks_of_one_name_are_refused(app: App) -> None:
    declare(app)
    with pytest.raises(ConfigurationError, match="'greet' already"):
        declare(app)
    assert set(app.tasks) == {"greet", "buy"}
    with pytest.raises(UnknownTask, match="greet"):
        app.find("gret")


# In the caller's transaction


def test_a_job_comes_into_being_with_the_callers_commit(app: App, dsn: str, protocol: Protocol) -> None:
    # spec: SH-5, D-19, QU-20
    task = declare(app).greet
    with psycopg.connect(dsn) as own:
        handle = task.using(connection=own).enqueue("Ada")
        assert protocol.rows("select * from shiftwork.all_jobs") == []
        own.commit()
        assert handle.status() is State.READY


def test_a_rollback_takes_the_job_with_it(app: App, dsn: str, protocol: Protocol) -> None:
    # spec: SH-5, QU-20
    task = declare(app).greet
    with psycopg.connect(dsn) as own:
        handle = task.using(connection=own).enqueue("Ada")
        handles = app.enqueue_many([task.job("Ada"), task.job("Bob")], connection=own)
        own.rollback()
        assert len(handles) == 2
    with pytest.raises(UnknownJob):
        handle.status()
    assert protocol.rows("select * from shiftwork.all_jobs") == []


def test_a_savepoint_that_is_rolled_back_takes_only_its_own_job(app: App, dsn: str) -> None:
    # spec: QU-20
    task = declare(app).greet
    with psycopg.connect(dsn) as own:
        kept = task.using(connection=own).enqueue("Ada")
        with own.transaction() as savepoint:
            gone = task.using(connection=own).enqueue("Bob")
            raise psycopg.Rollback(savepoint)
    assert kept.status() is State.READY
    with pytest.raises(UnknownJob):
        gone.status()


async def test_the_same_with_an_async_connection(aapp: App, dsn: str) -> None:
    # spec: SH-5, D-19, QU-20
    task = declare(aapp).buy
    async with await psycopg.AsyncConnection.connect(dsn) as own:
        gone = await task.using(connection=own).aenqueue(UUID(int=1), [])
        await own.rollback()
        kept = await task.using(connection=own).aenqueue(UUID(int=1), [])
        await aapp.aenqueue_many([task.job(UUID(int=2), [])], connection=own)
        with pytest.raises(UnknownJob):
            await kept.astatus()
        await own.commit()
    assert await kept.astatus() is State.READY
    with pytest.raises(UnknownJob):
        await gone.astatus()
    assert (await aapp.acounts())[State.READY] == 2


def test_a_lent_connection_keeps_its_own_ways(app: App, dsn: str) -> None:
    task = declare(app).greet
    with psycopg.connect(dsn, row_factory=namedtuple_row, cursor_factory=psycopg.ClientCursor) as own:
        task.using(connection=own).enqueue("it's 100% %s \\ fine")
        assert own.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS
        row: Any = own.execute("select 1 as one").fetchone()
        assert row.one == 1
        assert not own.autocommit


def test_an_error_on_a_lent_connection_leaves_its_transaction_to_its_owner(app: App, dsn: str) -> None:
    task = declare(app).greet
    with psycopg.connect(dsn) as own:
        keyed = task.using(connection=own, unique="k", action="refuse")
        keyed.enqueue("Ada")
        with pytest.raises(DuplicateDiffers), own.transaction():
            keyed.enqueue("Bob")
        assert own.execute("select 1").fetchone() == (1,)


def test_a_connection_of_the_wrong_world_is_refused_with_the_right_one(app: App, dsn: str) -> None:
    task = declare(app).greet
    with psycopg.connect(dsn) as own, pytest.raises(ConfigurationError, match="use enqueue"):
        asyncio.run(task.using(connection=own).aenqueue("Ada"))

    async def other() -> None:
        async with await psycopg.AsyncConnection.connect(dsn) as own:
            with pytest.raises(ConfigurationError, match="aenqueue"):
                task.using(connection=own).enqueue("Ada")

    asyncio.run(other())
    with pytest.raises(ConfigurationError, match=r"builtins\.str"):
        task.using(connection="postgresql://").enqueue("Ada")


def test_the_callers_own_retries_see_the_drivers_errors(app: App, dsn: str, connection: Connection) -> None:
    task = declare(app).greet
    with psycopg.connect(dsn) as own:
        own.execute("set local lock_timeout = '1ms'")
        with connection.transaction():
            connection.execute("lock table shiftwork.jobs in exclusive mode")
            with pytest.raises(psycopg.errors.LockNotAvailable):
                task.using(connection=own).enqueue("Ada")


def test_a_text_that_ends_early_for_the_server_is_refused_and_not_cut_off(app: App) -> None:
    cut_off = msgspec.structs.replace(declare(app).greet.job("Ada"), queue="ma\0il")
    with pytest.raises(InvalidArgument, match="NUL"):
        app.client.perform(operations.enqueue_one(app.client.store, cut_off))
    assert app.jobs() == []


class Urgency(int, Enum):
    HIGH = -5


async def test_a_priority_may_be_a_member_of_an_enum_of_numbers(aapp: App) -> None:
    @aapp.task(priority=Urgency.HIGH)
    def greet() -> None: ...

    sent = [*await aapp.aenqueue_many([greet.job()]), await greet.aenqueue()]
    assert [(await handle.ainfo()).priority for handle in sent] == [-5, -5]


async def test_what_is_sent_is_what_is_stored_whatever_encoding_the_dsn_asks_for(
    dsn: str, protocol: Protocol
) -> None:
    async with App(make_conninfo(dsn, client_encoding="latin1")) as app:
        greet = declare(app).greet
        sent = [await greet.aenqueue("Zoë ☃"), await asyncio.to_thread(greet.enqueue, "Zoë ☃")]
        assert [(await handle.ainfo()).payload for handle in sent] == [{"name": "Zoë ☃"}] * 2
    assert protocol.value("select count(*) from {}.jobs where payload ->> 'name' = 'Zoë ☃'") == 2


@pytest.mark.parametrize(
    "options", [{}, {"delay": timedelta(hours=1)}, {"unique": "k"}, {"unique": "k", "scope": "window"}]
)
def test_a_job_that_a_trigger_keeps_out_is_told_of_as_that(
    app: App, connection: Connection, options: dict[str, Any]
) -> None:
    connection.execute(
        """create function rule() returns trigger language plpgsql as $$ begin return null; end $$;
           create trigger rule before insert on shiftwork.jobs for each row execute function rule()"""
    )
    with pytest.raises(DatabaseError, match="a job of task 'greet' was kept out of the queue by a trigger"):
        declare(app).greet.using(**options).enqueue("Ada")


def test_another_driver_can_make_itself_known(
    app: App, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Foreign:
        """A connection of a driver that we know nothing of, but that it takes no text for a number."""

        def fetch(self, text: str, values: tuple[Any, ...]) -> list[dict[str, Any]]:
            assert [type(value) for value in values] == [str, str, str, int, int]
            return connection.execute(text.encode(), values).fetchall()

    def lender(lent: object, schema: str) -> database.Execute | None:
        if not isinstance(lent, Foreign):
            return None
        return lambda statement: lent.fetch(statement.text, statement.params)

    monkeypatch.setattr(database, "LENDERS", [lender])
    handle = declare(app).greet.using(connection=Foreign(), priority=7).enqueue("Ada")
    assert (handle.info().payload, handle.info().priority) == ({"name": "Ada"}, 7)


# Many


def test_a_hundred_thousand_jobs_go_in_with_one_call(app: App, protocol: Protocol) -> None:
    task = declare(app).greet
    handles = app.enqueue_many(task.job(f"n{n}") for n in range(100_000))
    assert len(handles) == 100_000
    [row] = protocol.rows("select count(*) as number, count(distinct payload) as names from shiftwork.jobs")
    assert (row["number"], row["names"]) == (100_000, 100_000)
    for n in (0, 999, 1_000, 99_999):
        assert handles[n].info().payload == {"name": f"n{n}"}


def test_many_jobs_go_in_together_or_not_at_all(app: App, protocol: Protocol) -> None:
    task = declare(app).greet

    def failing() -> Iterator[Any]:
        yield from (task.job("Ada") for _ in range(6_000))
        raise RuntimeError("out of names")

    with pytest.raises(RuntimeError, match="out of names"):
        app.enqueue_many(failing())
    assert protocol.rows("select * from shiftwork.all_jobs") == []
    with pytest.raises(RuntimeError, match="out of names"):
        app.enqueue_many(failing(), atomic=False)
    assert app.counts()[State.READY] == 5_000


def test_a_line_cut_between_chunks_is_told_with_what_was_committed(
    app: App, server: str, connection: Connection
) -> None:
    # spec: HO-32
    task = declare(app).greet
    name = sql.Identifier(connection.info.dbname)

    def cut() -> Iterator[Any]:
        yield from (task.job("Ada") for _ in range(2_100))
        with psycopg.connect(server, autocommit=True) as admin:
            admin.execute(sql.SQL("alter database {} allow_connections false").format(name))
        terminate(connection)

    with pytest.raises(DatabaseUnavailable, match=r"first 2,000 jobs were committed") as lost:
        app.enqueue_many(cut(), atomic=False)
    assert lost.value.maybe_committed is True
    [row] = connection.execute("select count(*) as number from shiftwork.jobs").fetchall()
    assert row["number"] == 2_000


def test_many_jobs_on_a_lent_connection_in_autocommit_go_in_together_or_not_at_all(
    app: App, dsn: str, connection: Connection
) -> None:
    task = declare(app).greet

    def cut(own: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> Iterator[Any]:
        yield from (task.job("Ada") for _ in range(2_100))
        connection.execute("select pg_terminate_backend(%s, 10000)", [own.info.backend_pid])

    def lost(told: pytest.ExceptionInfo[DatabaseUnavailable]) -> bool:
        return app.counts()[State.READY] == 0 and not told.value.maybe_committed

    with psycopg.connect(dsn, autocommit=True) as own:
        with pytest.raises(DatabaseUnavailable, match="nothing was committed") as told:
            app.enqueue_many(cut(own), connection=own)
        assert lost(told)

    async def awaiting() -> None:
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as own:
            with pytest.raises(DatabaseUnavailable, match="nothing was committed") as told:
                await app.aenqueue_many(cut(own), connection=own)
            assert lost(told)

    asyncio.run(awaiting())
    with (
        psycopg.connect(dsn, autocommit=True) as own,
        pytest.raises(DatabaseUnavailable, match=r"first 2,000 jobs were committed"),
    ):
        app.enqueue_many(cut(own), connection=own, atomic=False)
    assert app.counts()[State.READY] == 2_000


def test_what_is_no_job_or_cannot_be_written_is_refused_before_it_is_sent(app: App) -> None:
    handle: Any = declare(app).greet.enqueue("Ada")
    with pytest.raises(InvalidArgument, match=r"task\.job"):
        app.enqueue_many([handle])
    for broken in (
        shiftwork.NewJob[Any](task="a\ud800", payload=msgspec.Raw(b"{}")),
        shiftwork.NewJob[Any](task="a", payload=object()),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidArgument, match="cannot be sent"):
            app.enqueue_many([broken])


async def test_many_jobs_from_an_event_loop(aapp: App) -> None:
    tasks = declare(aapp)
    handles = await aapp.aenqueue_many([tasks.greet.job("Ada"), tasks.buy.job(UUID(int=1), ["tea"])])
    assert [(await handle.ainfo()).task for handle in handles] == ["greet", "buy"]


def test_the_longest_names_are_those_that_the_database_takes(app: App, protocol: Protocol) -> None:
    queue, name, tag = "ä" * 50, "t" * 200, "g" * 200

    @app.task(name=name, queue=queue, tags=[tag])
    def send() -> None: ...

    found = send.enqueue().info()
    assert (found.task, found.queue, found.tags) == (name, queue, (tag,))
    with pytest.raises(psycopg.errors.CheckViolation):
        protocol.enqueue(name, queue=f"{queue}x")
    with pytest.raises(psycopg.errors.CheckViolation):
        protocol.enqueue(f"{name}x")


# Unique keys


def test_the_answer_says_what_became_of_a_twin(app: App) -> None:
    # spec: QU-23, D-20, A-7
    task = declare(app).greet
    keyed = task.using(unique="welcome:42")
    first = keyed.enqueue("Ada")
    again = keyed.enqueue("Bob")
    assert (first.outcome, again.outcome, again.id) == ("created", "existing", first.id)
    assert first.info().payload == {"name": "Ada"}
    assert first.info().unique_key == "welcome:42"
    replaced = keyed.using(action="replace").enqueue("Bob")
    assert (replaced.outcome, replaced.id) == ("replaced", first.id)
    assert first.info().payload == {"name": "Bob"}
    assert task.using(unique="welcome:43").enqueue("Bob").outcome == "created"


def test_sending_the_same_again_is_safe_and_sending_something_else_is_refused(
    app: App, protocol: Protocol
) -> None:
    # spec: HO-45, A-7, HO-32
    task = declare(app).greet.using(unique="order 7", window=timedelta(hours=24), action="refuse")
    first = task.enqueue("Ada")
    assert (task.enqueue("Ada").id, task.enqueue("Ada").outcome) == (first.id, "existing")
    with pytest.raises(DuplicateDiffers, match="order 7"):
        task.enqueue("Bob")
    worker = protocol.register()
    protocol.complete(worker, protocol.claim(worker, "mail").jobs)
    assert (task.enqueue("Ada").id, first.status()) == (first.id, State.COMPLETED)
    with pytest.raises(DuplicateDiffers):
        task.enqueue("Bob")


def test_twins_within_one_batch_become_one_job(app: App) -> None:
    # spec: QU-23
    task = declare(app).greet
    jobs = [task.using(unique=key).job(key) for key in ("a", "b", "a", "a")]
    handles = app.enqueue_many(jobs)
    assert [handle.outcome for handle in handles] == ["created", "created", "existing", "existing"]
    assert handles[0].id == handles[2].id == handles[3].id
    assert app.counts()[State.READY] == 2


def test_arguments_of_twins_are_merged_as_the_task_declares(app: App) -> None:
    # spec: D-20
    @app.task(merge={"ids": "union", "days": "range:daterange", "urgency": "min", "note": "replace"})
    def derive(ids: list[int], days: str, urgency: int = 5, note: str = "") -> None: ...

    keyed = derive.using(unique="derive")
    first = keyed.enqueue([1, 2], "[2026-01-01,2026-01-05)", 3, "one")
    second = keyed.enqueue([2, 3], "[2026-01-03,2026-02-01)", 4, "two")
    assert (second.outcome, second.id) == ("merged", first.id)
    assert first.info().payload == {
        "ids": [1, 2, 3],
        "days": "[2026-01-01,2026-02-01)",
        "urgency": 3,
        "note": "two",
    }
    with pytest.raises(ConfigurationError, match="no argument 'idz'"):
        app.task(name="other", merge={"idz": "union"})(derive.function)


# Asking and acting


def test_jobs_are_listed_newest_first_and_counted_by_state(app: App, protocol: Protocol) -> None:
    # spec: SH-32
    tasks = declare(app)
    worker = protocol.register()
    done = tasks.greet.enqueue("Ada")
    protocol.complete(worker, protocol.claim(worker, "mail").jobs, "hello")
    ready = [tasks.greet.enqueue("Bob").id for _ in range(3)]
    other = tasks.buy.using(delay=timedelta(hours=1)).enqueue(UUID(int=1), [])
    assert [job.id for job in app.jobs()] == [other.id, *reversed(ready), done.id]
    assert [job.id for job in app.jobs(task="greet", limit=2)] == [ready[2], ready[1]]
    assert [job.id for job in app.jobs(task="greet", before=ready[1])] == [ready[0], done.id]
    assert [job.id for job in app.jobs(task="greet", limit=2, offset=2)] == [ready[0], done.id]
    assert [job.id for job in app.jobs(state=State.COMPLETED)] == [done.id]
    assert [job.id for job in app.jobs(queue="default", state=[State.SCHEDULED, State.FAILED])] == [other.id]
    by_its_name: Any = "completed"
    assert [job.id for job in app.jobs(state=by_its_name)] == [done.id]
    with pytest.raises(InvalidArgument, match="'complete' is not a valid State; there are: blocked"):
        app.jobs(state=["complete"])  # type: ignore[list-item]
    counts = app.counts()
    assert {state: number for state, number in counts.items() if number} == {
        State.READY: 3,
        State.SCHEDULED: 1,
        State.COMPLETED: 1,
    }
    assert set(counts) == set(State)
    assert app.counts(task="buy")[State.SCHEDULED] == 1


async def test_jobs_are_listed_and_acted_on_from_an_event_loop(aapp: App) -> None:
    # spec: SH-32, QU-24
    task = declare(aapp).greet
    handle = await task.using(delay=timedelta(hours=1)).aenqueue("Ada")
    assert await aapp.arun_now([handle.id, 999]) == {handle.id: "moved", 999: "unknown"}
    assert await handle.astatus() is State.READY
    assert await handle.acancel("enough") == "cancelled"
    assert await aapp.arevive([handle.id]) == {handle.id: "revived"}
    assert await aapp.acancel([handle.id]) == {handle.id: "cancelled"}
    assert [job.id for job in await aapp.ajobs(state=State.CANCELLED)] == [handle.id]


def test_jobs_are_cancelled_revived_and_run_now(app: App) -> None:
    # spec: QU-24
    task = declare(app).greet
    handle = task.using(delay=timedelta(hours=1)).enqueue("Ada")
    assert app.run_now([handle.id]) == {handle.id: "moved"}
    assert handle.cancel("not wanted") == "cancelled"
    assert handle.cancel() == "finished"
    assert handle.status() is State.CANCELLED
    assert app.revive([handle.id]) == {handle.id: "revived"}
    assert app.cancel([handle.id, 999]) == {handle.id: "cancelled", 999: "unknown"}
    assert app.job(999).cancel() == "unknown"


def test_jobs_run_now_all_together_or_none_of_them(app: App) -> None:
    # spec: QU-24
    task = declare(app).greet
    later = [task.using(delay=timedelta(hours=1)).enqueue("Ada") for _ in range(2)]
    gone = task.enqueue("Bob")
    gone.cancel()
    ids = [handle.id for handle in later]
    with pytest.raises(InvalidArgument, match=f"job {gone.id} is cancelled"):
        app.run_now([*ids, gone.id], strict=True)
    assert [handle.status() for handle in later] == [State.SCHEDULED] * 2
    assert app.run_now(ids, strict=True) == dict.fromkeys(ids, "moved")


def test_a_handle_tells_of_the_attempts_that_failed(app: App, protocol: Protocol) -> None:
    # spec: HO-31, SH-15, D-28
    handle = declare(app).greet.enqueue("Ada")
    worker = protocol.register()
    [claimed] = protocol.claim(worker, "mail").jobs
    error = {"code": "NO_ROUTE", "type": "builtins.OSError", "message": "no route"}
    protocol.settle(
        worker, {"id": handle.id, "attempt": 1, "state": "scheduled", "delay": 60, "error": error}
    )
    job = handle.info()
    assert (job.state, job.failures, job.error) == (State.SCHEDULED, 1, error)
    [attempt] = job.attempts
    assert (attempt.attempt, attempt.outcome, attempt.will_retry) == (1, "failed", True)
    assert (attempt.code, attempt.error, attempt.worker) == ("NO_ROUTE", error, worker)
    assert attempt.claimed_at is not None
    assert claimed["id"] == handle.id


def test_rows_that_others_wrote_are_listed_whatever_they_hold(app: App, connection: Connection) -> None:
    connection.execute(
        """insert into shiftwork.jobs (task, payload, tags) values
             ('a', '{"n": 1e20000}', '{}'), ('b', '{"n": 1}', '{}'),
             ('d', jsonb_build_object('deep', (repeat('[', 3000) || repeat(']', 3000))::jsonb), '{}')"""
    )
    listed = {job.task: job for job in app.jobs()}
    assert str(listed["a"].payload["n"]) == "1" + "0" * 20_000
    assert set(listed) == {"a", "b", "d"}


# Results


def finish(protocol: Protocol, **outcome: Any) -> None:
    worker = protocol.register()
    for job in protocol.claim(worker, "mail", "default").jobs:
        protocol.settle(worker, {"id": job["id"], "attempt": job["attempt"], **outcome})


def completed(result: Any) -> dict[str, Any]:
    return {"state": "completed", "result": result}


def is_listening(connection: Connection) -> bool:
    """Whether somebody waits for results, having declared it."""
    return bool(
        backends(connection, "query ilike 'listen%'")
        and connection.execute("select shiftwork.is_declared('shiftwork.awaited_until') as it").fetchall()[0][
            "it"
        ]
    )


def test_a_result_comes_back_as_the_type_that_the_task_names(app: App, protocol: Protocol) -> None:
    # spec: D-28
    handle = declare(app).buy.enqueue(UUID(int=7), ["tea"])
    finish(protocol, **completed({"number": str(UUID(int=7)), "lines": ["tea"]}))
    assert handle.result(timeout=timedelta(seconds=1)) == Receipt(UUID(int=7), ["tea"])
    assert app.job(handle.id).result(timeout=0) == {"number": str(UUID(int=7)), "lines": ["tea"]}


@pytest.mark.parametrize(
    ("outcome", "error", "said"),
    [
        ({"state": "failed", "error": {"code": "X", "message": "went wrong"}}, JobFailed, "X: went wrong"),
        ({"state": "cancelled", "error": {"code": "C", "message": "not wanted"}}, JobCancelled, "not wanted"),
    ],
)
def test_a_job_that_ended_otherwise_is_an_error_that_tells_why(
    app: App, protocol: Protocol, outcome: dict[str, Any], error: type[shiftwork.JobEnded], said: str
) -> None:
    handle = declare(app).greet.enqueue("Ada")
    finish(protocol, **outcome)
    with pytest.raises(error, match=said) as ended:
        handle.result(timeout=1)
    assert ended.value.job == handle.id
    assert ended.value.error == outcome["error"]


def test_a_job_that_nobody_started_in_time_is_told_as_expired(app: App, protocol: Protocol) -> None:
    handle = declare(app).greet.using(expires_in=timedelta(minutes=1)).enqueue("Ada")
    protocol.shift_clock(timedelta(minutes=2))
    assert protocol.expire() == 1
    with pytest.raises(JobExpired, match="greet"):
        handle.result(timeout=1)


def test_waiting_is_over_when_its_time_is(app: App) -> None:
    # spec: QU-26
    handle = declare(app).greet.enqueue("Ada")
    with pytest.raises(ResultTimeout, match="ready"):
        handle.result(timeout=0.05)
    with pytest.raises(TimeoutError):
        handle.result(timeout=0)
    with pytest.raises(UnknownJob):
        app.job(999_999).result(timeout=5)


@pytest.fixture
def only_notifications(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks by himself: what is not announced is not seen."""
    monkeypatch.setattr(operations, "FIRST_LOOK", 600.0)


def patient(dsn: str) -> Settings:
    return Settings(dsn=dsn, result_poll=timedelta(hours=1))


@pytest.mark.usefixtures("only_notifications")
def test_a_waiter_is_told_when_its_job_ends(dsn: str, protocol: Protocol, connection: Connection) -> None:
    # spec: QU-26
    with App(settings=patient(dsn)) as app, ThreadPoolExecutor() as threads:
        task = declare(app).greet
        handles = [task.enqueue(name) for name in ("Ada", "Bob", "Cyd")]
        results = [threads.submit(handle.result, SOON) for handle in handles]
        until(lambda: is_listening(connection))
        finish(protocol, **completed("hello"))
        assert [result.result() for result in results] == ["hello"] * 3
        until(lambda: backends(connection, "query ilike 'listen%'") == 0)


@pytest.mark.usefixtures("only_notifications")
async def test_many_waiters_of_an_event_loop_share_one_connection(
    dsn: str, protocol: Protocol, connection: Connection
) -> None:
    # spec: QU-26
    async with App(settings=patient(dsn)) as app:
        task = declare(app).greet
        handles = await app.aenqueue_many([task.job(str(n)) for n in range(30)])
        waiting = [asyncio.create_task(handle.aresult(SOON)) for handle in handles]
        gone = waiting.pop(0)  # the first to wait is the one that listens for all
        await asyncio.to_thread(until, lambda: is_listening(connection))
        assert backends(connection, "query ilike 'listen%'") == 1
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        worker = protocol.register()
        protocol.complete(worker, protocol.claim(worker, "mail", want=15).jobs, "one")
        protocol.complete(worker, protocol.claim(worker, "mail", want=15).jobs, "two")
        assert sorted(await asyncio.gather(*waiting)) == ["one"] * 14 + ["two"] * 15
    until(lambda: backends(connection, "query ilike 'listen%'") == 0)


@pytest.mark.usefixtures("only_notifications")
def test_a_waiter_whose_line_is_cut_calls_again(dsn: str, protocol: Protocol, connection: Connection) -> None:
    # spec: QU-26
    with App(settings=patient(dsn)) as app, ThreadPoolExecutor() as threads:
        handle = declare(app).greet.enqueue("Ada")
        result = threads.submit(handle.result, SOON)
        until(lambda: is_listening(connection))
        assert terminate(connection, "query ilike 'listen%'") == 1
        until(lambda: is_listening(connection))
        finish(protocol, **completed("hello"))
        assert result.result() == "hello"


@pytest.mark.parametrize("deaf", [False, True])
async def test_without_notifications_a_waiter_looks_by_itself(
    dsn: str, protocol: Protocol, deaf: bool
) -> None:
    # spec: QU-26
    protocol.rows(
        "create or replace function shiftwork.announce(ids bigint[]) returns void language sql as 'select'"
    )
    nowhere = make_conninfo(dsn, dbname="no_such_database") if deaf else None
    settings = Settings(dsn=dsn, listen_dsn=nowhere, result_poll=timedelta(milliseconds=20))
    async with App(settings=settings) as app:
        handle = await declare(app).greet.aenqueue("Ada")
        waiting = asyncio.create_task(handle.aresult(SOON))
        await asyncio.to_thread(
            until, lambda: protocol.value("select shiftwork.is_declared('shiftwork.awaited_until')")
        )
        finish(protocol, **completed("hello"))
        assert await waiting == "hello"


# A database that is away


def test_a_database_that_cannot_be_reached_is_told_at_once(dsn: str) -> None:
    # spec: HO-32
    nowhere = make_conninfo(dsn, host="127.0.0.1", port=1, password="s3cret")
    with App(nowhere) as app:
        task = declare(app).greet
        with pytest.raises(DatabaseUnavailable, match="nothing was committed") as away:
            task.enqueue("Ada")
        with pytest.raises(DatabaseUnavailable) as also:
            asyncio.run(task.aenqueue("Ada"))
    for error in (away.value, also.value):
        assert error.maybe_committed is False
        assert "s3cret" not in str(error)


@contextmanager
def nobody_gets_in(connection: Connection) -> Iterator[None]:
    """Enqueues stop in the middle of their statement."""
    with connection.transaction():
        connection.execute("lock table shiftwork.jobs in exclusive mode")
        yield


def is_stuck(connection: Connection) -> bool:
    return backends(connection, "wait_event_type = 'Lock' and query like '%%enqueue%%'") > 0


def test_a_line_cut_in_the_middle_leaves_open_whether_it_was_committed(
    app: App, dsn: str, connection: Connection
) -> None:
    # spec: HO-32
    # fault: F11
    task = declare(app).greet
    with (
        ThreadPoolExecutor() as threads,
        psycopg.connect(dsn, autocommit=True) as locker,
        nobody_gets_in(locker),
    ):
        alone = threads.submit(task.enqueue, "Ada")
        until(lambda: is_stuck(connection))
        terminate(connection)
        with pytest.raises(DatabaseUnavailable, match="may have been committed") as lost:
            alone.result()
        assert lost.value.maybe_committed is True

        together = threads.submit(app.enqueue_many, [task.job("Ada")])
        until(lambda: is_stuck(connection))
        terminate(connection)
        with pytest.raises(DatabaseUnavailable, match="nothing was committed") as lost:
            together.result()
        assert lost.value.maybe_committed is False


async def test_the_same_when_awaiting(aapp: App, dsn: str, connection: Connection) -> None:
    # spec: HO-32
    task = declare(aapp).greet
    with psycopg.connect(dsn, autocommit=True) as locker, nobody_gets_in(locker):
        for sending, maybe in (
            (lambda: task.aenqueue("Ada"), True),
            (lambda: aapp.aenqueue_many([task.job("Ada")]), False),
        ):
            stuck = asyncio.create_task(sending())
            await asyncio.to_thread(until, lambda: is_stuck(connection))
            await asyncio.to_thread(terminate, connection)
            with pytest.raises(DatabaseUnavailable) as lost:
                await stuck
            assert lost.value.maybe_committed is maybe


async def test_a_caller_that_gives_up_leaves_nothing_behind(dsn: str, connection: Connection) -> None:
    async with App(dsn, max_connections=1) as app:
        task = declare(app).greet
        with psycopg.connect(dsn, autocommit=True) as locker, nobody_gets_in(locker):
            for _ in range(3):
                stuck = asyncio.create_task(task.aenqueue("Ada"))
                await asyncio.to_thread(until, lambda: is_stuck(connection))
                stuck.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await stuck
            stuck = asyncio.create_task(task.aenqueue("Cy"))
            await asyncio.to_thread(until, lambda: is_stuck(connection))
            stuck.cancel()
            await asyncio.sleep(0)
            stuck.cancel()  # and again, while the statement is being cancelled: it may be carried out then
            with pytest.raises(asyncio.CancelledError):
                await stuck
        assert (await task.aenqueue("Bob")).outcome == "created"
        assert {job.payload["name"] for job in await app.ajobs()} in ({"Bob"}, {"Bob", "Cy"})
        until(lambda: backends(connection, "application_name = 'shiftwork client'") == 1)


def test_a_commit_that_is_not_answered_may_have_happened(app: App, connection: Connection) -> None:
    # spec: HO-32
    # fault: F11
    task = declare(app).greet
    connection.execute(
        """create function cut() returns trigger language plpgsql as
           $$ begin perform pg_terminate_backend(pg_backend_pid()); perform pg_sleep(10); return null; end $$;
           create constraint trigger cut after insert on shiftwork.jobs deferrable initially deferred
             for each row execute function cut()"""
    )
    with pytest.raises(DatabaseUnavailable) as lost:
        app.enqueue_many([task.job("Ada")])
    assert lost.value.maybe_committed is True


def test_connections_that_died_are_replaced(app: App, connection: Connection) -> None:
    task = declare(app).greet
    barrier = threading.Barrier(4)

    def jobs() -> Iterator[Any]:
        yield task.job("Ada")
        barrier.wait(SOON)  # all four hold a connection now

    with ThreadPoolExecutor(4) as threads:
        for _ in range(2):
            sent = [threads.submit(app.enqueue_many, jobs()) for _ in range(4)]
            assert [len(one.result()) for one in sent] == [1] * 4
            until(lambda: backends(connection, "application_name = 'shiftwork client'") == 4)
            assert terminate(connection) == 4
            assert task.enqueue("Ada").outcome == "created"
            assert terminate(connection) == 1


async def test_async_connections_that_died_are_replaced(aapp: App, connection: Connection) -> None:
    task = declare(aapp).greet
    for _ in range(3):
        await asyncio.gather(*(task.aenqueue("Ada") for _ in range(5)))
        assert await asyncio.to_thread(terminate, connection) >= 1
    assert (await aapp.acounts())[State.READY] == 15


def test_connections_are_kept_and_never_more_than_allowed(dsn: str, connection: Connection) -> None:
    with App(dsn, max_connections=3) as app:
        task = declare(app).greet
        with ThreadPoolExecutor(12) as threads:
            list(threads.map(task.enqueue, [str(n) for n in range(100)]))
        assert 1 <= backends(connection, "application_name = 'shiftwork client'") <= 3
        assert app.counts()[State.READY] == 100
    until(lambda: backends(connection, "application_name = 'shiftwork client'") == 0)


def test_waiting_for_a_free_connection_ends_with_a_clear_error(dsn: str) -> None:
    settings = Settings(dsn=dsn, max_connections=1, connect_timeout=timedelta(milliseconds=50))
    with App(settings=settings) as app:
        task = declare(app).greet

        def jobs() -> Iterator[Any]:
            yield task.job("Ada")
            with pytest.raises(DatabaseUnavailable, match="max_connections"):
                task.enqueue("Bob")

        assert len(app.enqueue_many(jobs())) == 1


async def test_a_place_for_a_connection_is_not_lost_with_one_that_could_not_be_made(
    dsn: str, connection: Connection
) -> None:
    async with App(dsn, max_connections=1) as app:
        [row] = connection.execute("select current_database() as name").fetchall()
        barring = sql.SQL("alter database {} allow_connections {}")
        with psycopg.connect(make_conninfo(dsn, dbname="postgres"), autocommit=True) as other:
            other.execute(barring.format(sql.Identifier(row["name"]), sql.SQL("false")))
            for _ in range(3):
                with pytest.raises(DatabaseUnavailable, match="not currently accepting"):
                    await app.acounts()
            other.execute(barring.format(sql.Identifier(row["name"]), sql.SQL("true")))
        assert (await app.acounts())[State.READY] == 0


async def test_awaiting_a_free_connection_ends_with_a_clear_error(dsn: str) -> None:
    settings = Settings(dsn=dsn, max_connections=1, connect_timeout=timedelta(milliseconds=50))
    async with App(settings=settings) as app:
        pool = app.client._apool
        async with pool.connection():
            with pytest.raises(DatabaseUnavailable, match="max_connections"):
                await app.acounts()
        assert (await app.acounts())[State.READY] == 0


async def test_whoever_waits_for_a_connection_gets_it_in_turn_and_none_is_lost_with_him(dsn: str) -> None:
    async with App(dsn, max_connections=1) as app:
        pool, got = app.client._apool, list[int]()

        async def take(number: int) -> None:
            async with pool.connection():
                got.append(number)
                await asyncio.sleep(0)  # others may come meanwhile

        async with pool.connection():
            waiting = [asyncio.create_task(take(number)) for number in range(6)]
            await asyncio.sleep(0)
            waiting[2].cancel()  # while it waits
        waiting[0].cancel()  # the connection is its own by now, and it does not know yet
        waiting.append(asyncio.create_task(take(6)))  # and one who has not waited
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert [isinstance(one, asyncio.CancelledError) for one in ended] == [n in (0, 2) for n in range(7)]
        assert got == [1, 3, 4, 5, 6]
        async with asyncio.timeout(SOON), pool.connection():
            left = pool._lend(pool._shelf())
            left.send(None)
            left.close()  # nobody's task: it is not even cancelled
            late = asyncio.create_task(take(7))
            await asyncio.sleep(0)
            assert got[-1] == 6, "there is only one"
        await late


def test_the_connections_of_a_closed_event_loop_are_closed_when_the_next_one_comes(
    dsn: str, connection: Connection
) -> None:
    with App(dsn, max_connections=2) as app:
        task = declare(app).greet

        async def crowd() -> None:
            await asyncio.gather(*(task.aenqueue("Ada") for _ in range(5)))  # more than there are connections

        for _ in range(3):
            asyncio.run(crowd())
            until(lambda: backends(connection, "application_name = 'shiftwork client'") <= 2)


def test_an_app_serves_one_event_loop_after_another(dsn: str) -> None:
    app = App(dsn)
    task = declare(app).greet

    async def once() -> Handle[str]:
        handle: Handle[str] = await task.aenqueue("Ada")
        app.close()
        return handle

    assert len({asyncio.run(once()).id for _ in range(3)}) == 3


def test_a_forked_child_does_not_use_its_parents_connection(dsn: str) -> None:
    # fault: F33
    script = """
import os, sys
from shiftwork import App
app = App(sys.argv[1])
@app.task
def greet(name: str) -> None: ...
greet.enqueue("parent")
child = os.fork()
greet.enqueue("both")
if child:
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert sorted(job.payload["name"] for job in app.jobs()) == ["both", "both", "parent"]
app.close()
"""
    subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", script, dsn], check=True, timeout=60
    )


def test_a_child_that_is_forked_while_its_parent_uses_a_connection_leaves_it_alone(dsn: str) -> None:
    # fault: F33
    script = """
import os, sys
from shiftwork.database import Pool, Statement
from shiftwork.settings import Settings
pool = Pool(Settings(dsn=sys.argv[1]))
[me] = pool.execute(Statement("select pg_backend_pid() as session"))
with pool.connection() as own:
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        assert status == 0
    else:
        pool.execute(Statement("select 1 as one"))
for _ in range(3):
    [now] = pool.execute(Statement("select pg_backend_pid() as session"))
    assert (now == me) == bool(child), (now, me, child)
pool.close()
"""
    subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", script, dsn], check=True, timeout=60
    )


def test_a_lent_connection_that_is_closed_is_told_of_as_any_that_is_lost(app: App, dsn: str) -> None:
    own = psycopg.connect(dsn)
    own.close()
    with pytest.raises(DatabaseUnavailable, match="nothing was committed"):
        declare(app).greet.using(connection=own).enqueue("Ada")


# Installing and finding the database


def test_a_schema_that_is_not_there_says_what_to_run(empty_dsn: str) -> None:
    with App(empty_dsn) as app:
        task = declare(app).greet
        with pytest.raises(NotInstalled, match="shiftwork migrate"):
            task.enqueue("Ada")
        with pytest.raises(NotInstalled, match="shiftwork migrate"):
            app.jobs()
        app.migrate()
        assert task.enqueue("Ada").outcome == "created"


def test_a_schema_that_lacks_a_verb_says_what_to_run(app: App, connection: Connection) -> None:
    connection.execute("drop function shiftwork.enqueue_many(jsonb)")
    with pytest.raises(SchemaTooOld, match="shiftwork migrate"):
        declare(app).greet.using(unique="ada").enqueue("Ada")


def test_two_schemas_live_in_one_database(dsn: str) -> None:
    with App(dsn) as one, App(dsn, schema="other_jobs") as other:
        other.migrate()
        mine = declare(one).greet.enqueue("Ada")
        declare(other).greet.enqueue("Bob")
        declare_again = other.find("greet").enqueue("Cyd")
        assert (one.counts()[State.READY], other.counts()[State.READY]) == (1, 2)
        assert mine.info().payload == {"name": "Ada"}
        assert declare_again.info().payload == {"name": "Cyd"}


def test_a_role_that_may_not_is_told_so(app: App, dsn: str, connection: Connection) -> None:
    role = sql.Identifier(f"stranger_{connection.info.dbname[-12:]}")
    connection.execute(sql.SQL("create role {}").format(role))
    try:
        with psycopg.connect(dsn, autocommit=True) as own:
            own.execute(sql.SQL("set role {}").format(role))
            with pytest.raises(NotAllowed, match="permission denied"):
                declare(app).greet.using(connection=own).enqueue("Ada")
    finally:
        connection.execute(sql.SQL("drop role {}").format(role))


@pytest.mark.parametrize(
    "dsn", ["postgresql://ada:p@s3cret@127.0.0.1:1/db", "postgresql://ada:p/s3cret@h/db"]
)
def test_a_password_that_was_not_encoded_is_not_told_as_a_host(dsn: str) -> None:
    with App(dsn) as app:
        with pytest.raises(DatabaseUnavailable, match="cannot connect") as blocking:
            app.counts()
        with pytest.raises(DatabaseUnavailable, match="cannot connect") as awaited:
            asyncio.run(app.acounts())
    for error in (blocking.value, awaited.value):
        assert "s3cret" not in "".join(traceback.format_exception(error))


async def test_what_was_refused_is_not_quoted_in_the_traceback(aapp: App, connection: Connection) -> None:
    task = declare(aapp).greet
    connection.execute("alter table shiftwork.jobs add check (queue <> 'mail')")
    name = "".join(["s3", "cret"])
    with pytest.raises(DatabaseError) as awaited:
        await task.aenqueue(name)
    with pytest.raises(DatabaseError) as blocking:
        task.enqueue(name)
    for error in (awaited.value, blocking.value):
        assert "s3cret" not in "".join(traceback.format_exception(error))


def test_a_lent_connection_may_be_in_a_pipeline(app: App, dsn: str) -> None:
    task = declare(app).greet
    with psycopg.connect(dsn) as own, own.pipeline():
        own.execute("select 1")
        handle = task.using(connection=own).enqueue("Ada")
    assert handle.status() is State.READY


def test_other_refusals_are_told_in_the_words_of_the_database(app: App, connection: Connection) -> None:
    connection.execute("alter table shiftwork.jobs add check (queue <> 'mail')")
    with pytest.raises(DatabaseError, match="check constraint") as refused:
        declare(app).greet.enqueue("Ada")
    assert refused.value.sqlstate == "23514"
    assert not isinstance(refused.value, DatabaseUnavailable)


def test_without_a_database_the_embedded_one_is_used_and_made_ready(
    empty_dsn: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    closed = []
    server = SimpleNamespace(url=empty_dsn, data="/some/where", close=lambda: closed.append(True))
    monkeypatch.setattr("shiftwork.embedded.start", lambda: server)
    monkeypatch.delenv("DATABASE_URL", raising=False)
    monkeypatch.delenv("SHIFTWORK_DSN", raising=False)
    with caplog.at_level(logging.INFO, "shiftwork"), App() as app:
        assert declare(app).greet.enqueue("Ada").outcome == "created"
    assert "embedded PostgreSQL, data in /some/where" in caplog.text
    assert closed == [True]


@pytest.fixture
def embedded_app(empty_dsn: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[App]:
    """An app without a dsn, whose embedded server is really the one of these tests; counts its holds."""
    monkeypatch.delenv("DATABASE_URL", raising=False)
    monkeypatch.delenv("SHIFTWORK_DSN", raising=False)
    held: list[int] = []

    def start() -> SimpleNamespace:
        held.append(len(held))
        return SimpleNamespace(url=empty_dsn, data="/some/where", close=held.pop)

    monkeypatch.setattr("shiftwork.embedded.start", start)
    with App() as app:
        yield app
    assert held == []


def test_an_embedded_database_that_cannot_be_made_ready_is_refused_every_time(
    embedded_app: App, empty_dsn: str
) -> None:
    task = declare(embedded_app).greet
    with psycopg.connect(empty_dsn, autocommit=True) as own:
        embedded_app.migrate()
        embedded_app.close()
        own.execute(
            """update shiftwork.settings set value = value || '{"version": 99}' where name = 'protocol'"""
        )
        for _ in range(2):
            with pytest.raises(SchemaTooNew):
                task.enqueue("Ada")
        own.execute("drop schema shiftwork cascade")
    assert task.enqueue("Ada").outcome == "created"


def test_a_lock_that_migrating_waits_for_in_vain_is_told_as_an_error_of_ours(
    embedded_app: App, empty_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shiftwork.migrate.PATIENCE", "1ms")
    task = declare(embedded_app).greet
    with psycopg.connect(empty_dsn) as own:
        own.execute("select pg_advisory_lock(hashtextextended('shiftwork migrate', 0))")
        for migrating in (embedded_app.migrate, lambda: task.enqueue("Ada"), App(empty_dsn).migrate):
            with pytest.raises(DatabaseError, match="lock timeout") as refused:
                migrating()
            assert refused.value.sqlstate == "55P03"
    assert task.enqueue("Ada").outcome == "created"


async def test_the_event_loop_goes_on_while_the_embedded_server_starts(
    embedded_app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, starting, go_on = shiftwork.embedded.start, asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def slow() -> Any:
        loop.call_soon_threadsafe(starting.set)
        assert go_on.wait(SOON), "the event loop stands still"
        return start()

    monkeypatch.setattr("shiftwork.embedded.start", slow)
    first, second = (
        asyncio.create_task(declare(embedded_app).greet.aenqueue("Ada")),
        asyncio.create_task(embedded_app.acounts()),
    )
    await starting.wait()
    go_on.set()
    assert (await first).outcome == "created"
    assert set(await second) == set(State)


def test_the_log_says_which_database_without_its_password(dsn: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "shiftwork"), App(make_conninfo(dsn, password="s3cret")) as app:
        app.counts()
    assert "using the database at" in caplog.text
    assert "s3cret" not in caplog.text


@pytest.mark.parametrize("dsn", ["nonsense", "postgresql://a b/db", "host=x colour=blue password=s3cret"])
def test_what_is_no_connection_string_is_refused_as_such(dsn: str) -> None:
    with App(dsn) as app, pytest.raises(ConfigurationError) as refused:
        app.counts()
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize("dsn", ["host=a..b password=s3cret", "host=\udcff password=s3cret"])
def test_a_host_that_cannot_be_one_is_refused_as_such(dsn: str) -> None:
    with App(dsn) as app:
        with pytest.raises(ConfigurationError) as refused:
            app.counts()
        with pytest.raises(ConfigurationError) as also:
            asyncio.run(app.acounts())
    for error in (refused.value, also.value):
        assert not isinstance(error, DatabaseUnavailable)
        assert "s3cret" not in str(error)


@pytest.mark.parametrize("text", ["a\0b", "a\udcff"])
def test_what_cannot_be_sent_is_not_taken_for_a_database_that_is_away(app: App, text: str) -> None:
    # spec: HO-32
    handle = declare(app).greet.enqueue("Ada")
    for asking in (
        lambda: app.jobs(task=text),
        lambda: app.counts(queue=text),
        lambda: handle.cancel(text),
        lambda: app.cancel([handle.id, text]),  # type: ignore[list-item]
        lambda: asyncio.run(app.acancel([handle.id], text)),
    ):
        with pytest.raises(InvalidArgument, match="cannot be sent"):
            asking()
    assert handle.status() is State.READY


def test_settings_are_given_in_one_way_only(dsn: str) -> None:
    with pytest.raises(ConfigurationError, match="not both"):
        App(dsn, settings=Settings())


def test_importing_the_package_is_light_and_all_names_are_there() -> None:
    script = "import sys, shiftwork; assert not {'psycopg', 'msgspec', 'asyncio'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    for name in shiftwork.__all__:
        assert getattr(shiftwork, name).__name__ == name
    assert set(shiftwork.__all__) <= set(dir(shiftwork))
    with pytest.raises(AttributeError):
        _ = shiftwork.nonsense
