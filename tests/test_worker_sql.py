"""Routines in the database, run by a worker: on its sessions, with its limits, and heard while they run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from shiftwork import App
from shiftwork.events import JobEnded, JobLost, JobReleased, JobStopped, WorkerStarted
from shiftwork.worker.run import Run, Stop
from shiftwork.worker.sql import hearing
from shiftwork.worker.transactions import Transactions
from tests import pooler
from tests.harness import Protocol
from tests.test_sql_tasks import SPOILT, WORLD, register, spoil
from tests.workshop import Latch, Workshop

MORE = """
create procedure stats.dawdle(payload jsonb) language plpgsql as $$
begin
  insert into stats.units values (1);
  raise notice 'settling down';
  perform shiftwork.report_progress(0.25, 'a quarter');
  perform pg_sleep(600);
end $$;
create procedure stats.step(payload jsonb, inout info jsonb) language plpgsql as $$
begin
  insert into stats.units values (1);
  commit;
  insert into stats.units values (2);
  if payload ? 'fail' then
    raise exception 'half way' using errcode = 'U0001';
  end if;
  info := payload;
end $$;
"""
DAWDLING = (
    "select pid from pg_stat_activity where datname = current_database() and state = 'active' "
    "and query like '%%run_job%%' and wait_event = 'PgSleep' and pid <> pg_backend_pid()"
)


@pytest.fixture
def stats(protocol: Protocol) -> Protocol:
    protocol.connection.execute((WORLD + MORE).encode())
    return protocol


@pytest.fixture
def app(dsn: str) -> Iterator[App]:
    with App(dsn) as app:

        @app.task
        async def greet() -> str:
            return "hello"

        yield app


async def test_a_worker_runs_what_the_registry_has_beside_its_own_tasks(stats: Protocol, app: App) -> None:
    # spec: ST-6, ST-15, D-17
    register(stats, "derive", "stats.derive_units(jsonb)", queue="analytics", before="stats.note()")
    register(stats, "count", "stats.count_units(jsonb, jsonb)", queue="counting")
    register(stats, "break", "stats.break(jsonb)", retry={"max_attempts": 1}, before="stats.bad_hook()")
    async with Workshop(app) as shop:
        derive = stats.enqueue("derive", {"ids": [1, 2]})
        await shop.ended(derive)
        count, broken = stats.enqueue("count", {"a": 1}), stats.enqueue("break")
        greeting = await app.tasks["greet"].aenqueue()
        await shop.ended(count, broken, greeting)
        assert set(shop.seen(WorkerStarted)[0].queues) == {"default", "analytics", "counting"}
        [ended] = shop.seen(JobEnded, job=broken)
        assert (ended.state, (ended.error or {})["code"]) == ("failed", "U0001")
    assert stats.job(count)["result"] == {"units": 2, "asked": {"a": 1}}
    assert stats.job(broken)["error"]["hint"] == "wind it less"
    lines = stats.rows("select level, message from {}.logs where job = %s", broken)
    assert lines == [{"level": "warning", "message": "stats.bad_hook() failed: the hook is bent (P0001)"}]
    assert [row["what"] for row in stats.rows("select what from stats.said")] == ["before"]


async def dawdling(shop: Workshop, stats: Protocol) -> int:
    """A job whose routine sits in a statement of ten minutes."""
    job = stats.enqueue("dawdle")
    await shop.found(lambda: shop.rows(DAWDLING))
    return job


async def test_what_a_routine_says_is_heard_while_it_runs_and_cancelling_ends_its_statement(
    stats: Protocol, app: App
) -> None:
    # spec: SG-18
    register(stats, "dawdle", "stats.dawdle(jsonb)")
    async with Workshop(app) as shop:
        job = await dawdling(shop, stats)
        await shop.found(lambda: shop.rows("select 1 from shiftwork.progress where fraction = 0.25"))
        await shop.found(lambda: shop.rows("select 1 from shiftwork.logs where message = 'settling down'"))
        assert stats.state(job) == "running"
        stats.cancel(job, reason="not wanted")
        await shop.ended(job, state="cancelled")
        assert await shop.rows(DAWDLING) == []
    assert stats.rows("select * from stats.units") == []
    assert stats.job(job)["error"]["message"] == "not wanted"


STATEMENT = "select pg_sleep(600)"
SITTING = (
    "select pid from pg_stat_activity where datname = current_database() and state = 'active' "
    "and wait_event = 'PgSleep' and application_name like 'shiftwork %%'"
)


@pytest.fixture
def sitting(stats: Protocol, app: App) -> None:
    """Tasks of all kinds that sit in a statement of ten minutes."""
    stats.connection.execute(
        "create procedure stats.commit_and_sit(payload jsonb) language plpgsql as "
        "$$ begin commit; perform pg_sleep(600); end $$"
    )
    register(stats, "sql", "stats.dawdle(jsonb)")
    register(stats, "sql_that_commits", "stats.commit_and_sit(jsonb)", commits=True)

    @app.task(transaction=True)
    async def awaiting(tx: psycopg.AsyncConnection[Any]) -> None:
        await tx.execute(STATEMENT)

    @app.task(transaction=True)
    def blocking(tx: psycopg.Connection[Any]) -> None:
        tx.execute(STATEMENT)


@pytest.mark.usefixtures("sitting")
@pytest.mark.parametrize("task", ["sql", "sql_that_commits", "awaiting", "blocking"])
async def test_cancelling_frees_the_server_from_a_statement_of_ten_minutes(
    stats: Protocol, app: App, task: str
) -> None:
    # spec: SG-18, QU-19
    # Where notifications arrive, no heartbeat has to tell of it.
    lease = timedelta(seconds=3) if pooler.MODE == "poll" else timedelta(minutes=10)
    async with Workshop(app, lease=lease) as shop:
        job = stats.enqueue(task)
        await shop.found(lambda: shop.rows(SITTING))
        began = time.monotonic()
        stats.cancel(job, reason="not wanted")

        async def is_free() -> bool:
            return not await shop.rows(SITTING)

        await shop.found(is_free)
        assert time.monotonic() - began < 10  # a second, where nothing else keeps the machine busy
        await shop.ended(job, state="cancelled")
        assert stats.job(job)["error"]["message"] == "not wanted"
        assert stats.job(job)["attempt"] == 1


@pytest.mark.usefixtures("sitting")
async def test_a_blocking_handler_that_is_cancelled_before_its_session_is_open_does_not_begin(
    stats: Protocol, app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    latch = Latch()
    async with Workshop(app) as shop:
        await shop.asleep()
        transactions = shop.worker._transactions
        opens = transactions.open_blocking

        def open_late(run: Any) -> Any:
            latch.hold_blocking()
            return opens(run)

        monkeypatch.setattr(transactions, "open_blocking", open_late)
        job = stats.enqueue("blocking")
        await latch.reached()
        stats.cancel(job)
        await shop.event(JobStopped, job=job)
        latch.release()
        await shop.ended(job, state="cancelled")


@pytest.mark.usefixtures("sitting")
async def test_a_blocking_handler_that_waits_for_the_server_has_only_so_much_time_too(
    stats: Protocol, app: App
) -> None:
    # spec: SG-19
    async with Workshop(app, timeout=timedelta(seconds=0.5)) as shop:
        job = stats.enqueue("blocking", max_attempts=1)
        await shop.ended(job)
        assert (stats.state(job), stats.job(job)["error"]["code"]) == ("failed", "TASK_TIMEOUT")


@pytest.mark.usefixtures("sitting")
async def test_a_blocking_handler_that_waits_for_the_server_is_given_back_by_a_worker_that_stops(
    stats: Protocol, app: App
) -> None:
    async with Workshop(app, grace=timedelta(0)) as shop:
        job = stats.enqueue("blocking")
        await shop.found(lambda: shop.rows(SITTING))
        shop.worker.stop()
        await shop.event(JobReleased, job=job)
    assert shop.clean
    assert (stats.live(job)["state"], stats.live(job)["failures"]) == ("ready", 0)


async def test_a_routine_has_only_so_much_time(stats: Protocol, app: App) -> None:
    # spec: SG-19
    policy = {"max_attempts": 1}
    register(stats, "dawdle", "stats.dawdle(jsonb)", timeout=timedelta(seconds=0.5), retry=policy)
    async with Workshop(app) as shop:
        job = stats.enqueue("dawdle")
        await shop.ended(job)
        assert await shop.rows(DAWDLING) == []
    row = stats.job(job)
    assert (row["state"], row["error"]["code"]) == ("failed", "TASK_TIMEOUT")


async def test_a_worker_that_stops_gives_its_routine_back(stats: Protocol, app: App) -> None:
    register(stats, "dawdle", "stats.dawdle(jsonb)")
    async with Workshop(app, grace=timedelta(0)) as shop:
        job = await dawdling(shop, stats)
        shop.worker.stop()
        await shop.event(JobReleased, job=job)
    row = stats.live(job)
    assert (row["state"], row["failures"], row["resets"]) == ("ready", 0, 0)
    assert stats.rows("select * from stats.units") == []


async def test_a_session_that_is_cut_off_costs_the_job_a_reset_and_no_failure(
    stats: Protocol, app: App
) -> None:
    # fault: F7
    register(stats, "dawdle", "stats.dawdle(jsonb)")
    async with Workshop(app) as shop:
        job = await dawdling(shop, stats)
        stats.connection.execute(
            "create or replace procedure stats.dawdle(payload jsonb) language plpgsql as "
            "$$ begin insert into stats.units values (7); end $$"
        )
        await shop.rows(f"select pg_terminate_backend(pid) from ({DAWDLING}) as one")
        await shop.ended(job, state="completed")
    assert stats.rows("select id from stats.units") == [{"id": 7}]
    assert (stats.job(job)["resets"], stats.job(job)["failures"]) == (1, 0)


async def test_a_routine_that_ends_every_session_in_which_it_runs_has_failed_in_the_end(
    stats: Protocol, app: App
) -> None:
    # fault: F30
    stats.connection.execute(
        "create procedure stats.leave(payload jsonb) language plpgsql as "
        "$$ begin perform pg_terminate_backend(pg_backend_pid()); perform pg_sleep(600); end $$"
    )
    register(stats, "leave", "stats.leave(jsonb)")
    async with Workshop(app) as shop:
        job = stats.enqueue("leave")
        await shop.ended(job, state="failed")
    told = stats.job(job)
    assert (told["error"]["code"], told["resets"], told["failures"]) == ("WORKER_CRASHED", 3, 0)
    assert "its session was lost" in told["error"]["message"]


@SPOILT
async def test_a_job_whose_end_cannot_be_written_fails_as_it_does_without_a_worker(
    stats: Protocol, app: App, body: str, code: str
) -> None:
    # fault: F29
    async with Workshop(app) as shop:
        bad = spoil(stats, body)
        await shop.ended(bad, state="failed")
    told = stats.job(bad)
    assert (told["error"]["code"], told["failures"]) == (code, 2)
    assert stats.rows("select * from stats.lonely") == []


async def test_one_that_commits_by_itself_runs_at_the_top_of_a_session(stats: Protocol, app: App) -> None:
    # spec: D-1
    register(stats, "step", "stats.step(jsonb, jsonb)", commits=True, retry={"max_attempts": 1})
    async with Workshop(app) as shop:
        done = stats.enqueue("step", {"a": "100%"})
        await shop.ended(done)
        broken = stats.enqueue("step", {"fail": True})
        await shop.ended(broken)
    assert (stats.state(done), stats.job(done)["result"]) == ("completed", {"a": "100%"})
    error: dict[str, Any] = stats.job(broken)["error"]
    assert (stats.state(broken), error["code"]) == ("failed", "U0001")
    assert "half way" in error["message"]
    assert [row["id"] for row in stats.rows("select id from stats.units order by id")] == [1, 1, 2]


async def test_one_that_commits_tells_how_far_it_is_and_leaves_nothing_of_its_session_to_others(
    stats: Protocol, app: App
) -> None:
    stats.connection.execute(
        """
        create procedure stats.settle_in(payload jsonb) language plpgsql as $$
        begin
          set search_path = stats;
          perform shiftwork.report_progress(0.5, 'half');
          commit;
          if payload ? 'fail' then
            raise exception 'no';
          end if;
          perform pg_advisory_xact_lock(42);
        end $$;
        create function stats.look_around(payload jsonb) returns jsonb language sql as $$
          select jsonb_build_array(current_setting('search_path'), current_setting('shiftwork.job', true))
        $$;
        """
    )
    register(stats, "settle_in", "stats.settle_in(jsonb)", commits=True, retry={"max_attempts": 1})
    register(stats, "look", "stats.look_around(jsonb)", commits=True)
    stats.rows("select pg_advisory_lock(42)")
    usual = stats.value("show search_path")
    async with Workshop(app, transactions=1) as shop:
        job = stats.enqueue("settle_in")
        await shop.found(lambda: shop.rows("select 1 from shiftwork.progress where message = 'half'"))
        assert stats.state(job) == "running"
        stats.rows("select pg_advisory_unlock_all()")
        looks = []
        for former in (job, stats.enqueue("settle_in", {"fail": True})):
            await shop.ended(former)
            looks.append(stats.enqueue("look"))
            await shop.ended(looks[-1])
    assert [stats.job(one)["result"] for one in looks] == [[usual, f"{one} 1 t commits"] for one in looks]


async def test_one_that_commits_may_have_any_name(stats: Protocol, app: App) -> None:
    stats.connection.execute(
        'create procedure stats."odd $1 %s"(payload jsonb) language plpgsql as $$ begin commit; end $$'
    )
    register(stats, "odd", 'stats."odd $1 %s"(jsonb)', commits=True)
    async with Workshop(app) as shop:
        await shop.ended(stats.enqueue("odd"), state="completed")


async def test_there_is_no_python_around_a_routine(stats: Protocol, app: App) -> None:
    seen = []

    @app.middleware
    async def note(context: Any, call: Any) -> Any:
        seen.append(context.job.task)
        return await call()

    register(stats, "shrug", "stats.shrug(jsonb)")
    async with Workshop(app) as shop:
        await shop.ended(stats.enqueue("shrug"), await app.tasks["greet"].aenqueue())
    assert seen == ["greet"]


async def test_routines_that_analyze_one_table_wait_for_each_other_as_the_page_warns(
    stats: Protocol, app: App
) -> None:
    # spec: A-27
    stats.connection.execute(
        "create procedure stats.analyze_units(payload jsonb) language plpgsql as "
        "$$ begin analyze stats.units; perform pg_advisory_xact_lock_shared(42); end $$"
    )
    register(stats, "analyze", "stats.analyze_units(jsonb)")
    stats.rows("select pg_advisory_lock(42)")
    waits = "select 1 from pg_locks where mode = 'ShareUpdateExclusiveLock' and relation = 'stats.units'::regclass"
    async with Workshop(app) as shop:
        jobs = [stats.enqueue("analyze") for _ in range(2)]
        await shop.found(lambda: shop.rows(f"{waits} and not granted"))
        assert len(await shop.rows(f"{waits} and granted")) == 1
        stats.rows("select pg_advisory_unlock_all()")
        await shop.ended(*jobs, state="completed")


async def test_a_worker_sleeps_until_the_next_routine_is_due_and_an_earlier_one_is_not_late(
    stats: Protocol, app: App
) -> None:
    # spec: ST-20
    register(stats, "double", "stats.double(jsonb)")
    later = stats.enqueue("double", {"n": 1}, delay=3600)
    async with Workshop(app) as shop:
        await shop.asleep()  # the next poll is ten minutes away
        soon, sooner = (stats.enqueue("double", {"n": 1}, delay=delay) for delay in (1.5, 0.2))
        await shop.ended(sooner, soon)
        assert [event.job for event in shop.seen(JobEnded)] == [sooner, soon]
    assert stats.state(later) == "scheduled"


async def test_a_task_of_its_own_goes_before_one_of_the_registry(stats: Protocol, app: App) -> None:
    register(stats, "greet", "stats.break(jsonb)")
    async with Workshop(app) as shop:
        job = await app.tasks["greet"].aenqueue()
        await shop.ended(job)
    assert stats.job(job.id)["result"] == "hello"


async def test_no_more_routines_run_at_once_than_there_are_sessions(stats: Protocol, app: App) -> None:
    stats.connection.execute(
        "create procedure stats.meet(payload jsonb) language plpgsql as "
        "$$ begin perform pg_advisory_xact_lock_shared(42); end $$"
    )
    register(stats, "meet", "stats.meet(jsonb)")
    stats.rows("select pg_advisory_lock(42)")
    waiting = (
        "select 1 from pg_locks where locktype = 'advisory' and objid = 42 and not granted"
        " and database = (select oid from pg_database where datname = current_database())"
    )
    async with Workshop(app, concurrency=8, transactions=2) as shop:
        jobs = [stats.enqueue("meet") for _ in range(5)]

        async def two_wait() -> bool:
            return len(await shop.rows(waiting)) == 2

        await shop.found(two_wait)
        assert len(await shop.rows("select 1 from shiftwork.jobs where state = 'running'")) == 2
        stats.rows("select pg_advisory_unlock_all()")
        await shop.ended(*jobs)


def test_nothing_that_a_routine_says_can_break_the_worker() -> None:
    heard: list[object] = []
    hear = hearing(lambda *line: heard.append(line), lambda *far: heard.append(far))

    class Said:
        severity_nonlocalized = "WARNING"
        sqlstate = "01000"
        message_primary: str | None = None

    said: Any = Said()
    hear(said)
    said.sqlstate, said.message_primary = "SW010", '{"fraction": 7, "message": null}'
    hear(said)
    said.message_primary = "not json"
    hear(said)
    assert heard == [("warning", ""), (1.0, None), ("warning", "not json")]


@pytest.mark.parametrize("stop", [Stop.LAPSED, Stop.SHUTDOWN, Stop.CANCELLED, Stop.TIMEOUT, Stop.LOST])
async def test_one_that_is_told_to_stop_after_it_was_committed_has_ended_well(
    stats: Protocol, app: App, stop: Stop, monkeypatch: pytest.MonkeyPatch
) -> None:
    # spec: D-16
    register(stats, "derive", "stats.derive_units(jsonb)")
    committed, carry_out = asyncio.Event(), Transactions.run_job

    async def run_job(self: Transactions, run: Run, connection: Any) -> Any:
        await carry_out(self, run, connection)
        committed.set()
        await asyncio.Event().wait()  # its answer is on the way

    monkeypatch.setattr(Transactions, "run_job", run_job)
    async with Workshop(app) as shop:
        job = stats.enqueue("derive")
        await committed.wait()
        shop.worker.tell(shop.worker.holding[job], stop, "the test says so")
        ended = await shop.event(JobEnded, job=job)
        assert (ended.state, stats.state(job)) == ("completed", "completed")
        assert shop.seen(JobLost) == []
