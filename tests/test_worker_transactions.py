"""Transactional tasks: what a handler does to the database and how its job ended are one commit, or nothing is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from shiftwork import App, ConfigurationError, Context, Poison, Retry, State
from shiftwork.database import Statement
from shiftwork.events import JobBegan, JobEnded, JobLost, JobReleased
from shiftwork.worker import transactions
from shiftwork.worker.resting import Pace
from shiftwork.worker.transactions import Transactions, Unsure
from tests.workshop import Latch, Workshop

AT_ONCE = Retry(delays=timedelta(), jitter=0)
Tx = psycopg.Connection[Any]
AsyncTx = psycopg.AsyncConnection[Any]


@pytest.fixture
def app(dsn: str) -> App:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("create table effects (effect text)")
    return App(dsn)


async def effects(shop: Workshop) -> list[str]:
    return [row["effect"] for row in await shop.rows("select effect from effects order by effect")]


def declare(app: App, *, plain: bool, act: Callable[[Context, Callable[[str], Any]], Any]) -> Any:
    """A task that acts with a way to have an effect, as an async or as a plain function."""

    @app.task(transaction=True, retry=AT_ONCE)
    def plain_work(context: Context, tx: Tx) -> Any:
        def effect(text: str) -> None:
            tx.execute("insert into effects values (%s)", (text,))

        return act(context, effect)

    @app.task(transaction=True, retry=AT_ONCE)
    async def async_work(context: Context, tx: AsyncTx) -> Any:
        waiting: list[str] = []
        try:
            return act(context, waiting.append)
        finally:
            for text in waiting:
                await tx.execute("insert into effects values (%s)", (text,))

    return plain_work if plain else async_work


both = pytest.mark.parametrize("plain", [False, True], ids=["async", "plain"])


@both
async def test_effects_outcome_and_what_it_enqueued_are_one_commit(app: App, plain: bool) -> None:
    # spec: QU-18, D-1
    @app.task(queue="unserved")
    async def follow_up() -> None: ...

    def act(context: Context, effect: Callable[[str], Any]) -> str:
        effect("done")
        context.enqueue(follow_up.job())
        return "well"

    work = declare(app, plain=plain, act=act)
    latch = Latch()

    @app.middleware
    async def slow(context: Context, call: Callable[[], Awaitable[Any]]) -> Any:
        result = await call()
        await latch.hold()
        return result

    async with app, Workshop(app, queues="default") as shop:
        job = await work.aenqueue()
        await latch.reached()
        counted = "select count(*) from shiftwork.jobs where task = 'follow_up'"
        assert await effects(shop) == []
        assert await shop.value(counted) == 0
        assert (await job.ainfo()).state is State.RUNNING
        # The row is locked under the fence: nobody takes it away.
        free = "select count(*) from (select from shiftwork.jobs for update skip locked) as free"
        assert await shop.value(free) == 0
        latch.release()
        await shop.ended(job, state="completed")
        assert await effects(shop) == ["done"]
        assert await shop.value(counted) == 1
        found = await job.ainfo()
        assert (found.state, found.attempt, found.result) == (State.COMPLETED, 1, "well")


@both
async def test_an_exception_undoes_the_effects_and_is_recorded(app: App, plain: bool) -> None:
    # spec: QU-18, QU-19, D-1, SH-15
    @app.task(queue="unserved")
    async def follow_up() -> None: ...

    def act(context: Context, effect: Callable[[str], Any]) -> None:
        effect(f"attempt {context.attempt}")
        context.enqueue(follow_up.job())
        if context.attempt == 1:
            raise ValueError("not yet")

    work = declare(app, plain=plain, act=act)
    async with app, Workshop(app, queues="default") as shop:
        job = await work.aenqueue()
        await shop.ended(job, state="completed")
        assert await effects(shop) == ["attempt 2"]
        assert await shop.value("select count(*) from shiftwork.jobs where task = 'follow_up'") == 1
        found = await job.ainfo()
        assert (found.attempt, found.failures) == (2, 1)
        assert [attempt.code for attempt in found.attempts] == ["ValueError"]


@both
async def test_a_statement_that_fails_does_not_stop_the_record_of_the_failure(app: App, plain: bool) -> None:
    # spec: QU-19
    @app.task(transaction=True)
    def plain_work(tx: Tx) -> None:
        tx.execute("insert into effects values ('before')")
        tx.execute("select 1 / 0")

    @app.task(transaction=True)
    async def async_work(tx: AsyncTx) -> None:
        await tx.execute("insert into effects values ('before')")
        await tx.execute("select 1 / 0")

    work = plain_work if plain else async_work

    @app.task(transaction=True)
    async def careless(tx: AsyncTx) -> str:
        try:
            await tx.execute("select 1 / 0")
        except psycopg.Error:
            return "as if nothing had happened"
        return "never"

    async with app, Workshop(app, concurrency=1) as shop:
        job, other = await work.aenqueue(), await careless.aenqueue()
        await shop.ended(job, other)
        found = await job.ainfo()
        assert (found.state, found.failures) == (State.SCHEDULED, 1)
        assert found.error is not None
        assert found.error["code"] == "DivisionByZero"
        assert (await other.ainfo()).failures == 1, "a transaction that is broken is not committed"
        assert await effects(shop) == []


@both
async def test_a_part_of_it_may_be_undone_alone(app: App, plain: bool) -> None:
    # spec: QU-19
    @app.task(transaction=True)
    def plain_work(tx: Tx) -> None:
        tx.execute("insert into effects values ('kept')")
        with tx.transaction(force_rollback=True):
            tx.execute("insert into effects values ('undone')")

    @app.task(transaction=True)
    async def async_work(tx: AsyncTx) -> None:
        await tx.execute("insert into effects values ('kept')")
        async with tx.transaction(force_rollback=True):
            await tx.execute("insert into effects values ('undone')")

    work = plain_work if plain else async_work

    async with app, Workshop(app) as shop:
        job = await work.aenqueue()
        await shop.ended(job, state="completed")
        assert await effects(shop) == ["kept"]


@both
async def test_a_handler_may_not_end_the_transaction_itself(app: App, plain: bool) -> None:
    # spec: QU-18, D-1
    ways = ["commit()", "rollback()", "commit", "rollback", "commit; begin"]

    @app.task(transaction=True, retry=Retry.never())
    def plain_work(tx: Tx, way: str) -> None:
        tx.execute("insert into effects values (%s)", (way,))
        if way.endswith("()"):
            getattr(tx, way[:-2])()
        else:
            tx.execute(way.encode())

    @app.task(transaction=True, retry=Retry.never())
    async def async_work(tx: AsyncTx, way: str) -> None:
        await tx.execute("insert into effects values (%s)", (way,))
        if way.endswith("()"):
            await getattr(tx, way[:-2])()
        else:
            await tx.execute(way.encode())

    work = plain_work if plain else async_work

    @app.task(transaction=True)
    async def good(tx: AsyncTx) -> str:
        return "well"

    async with app, Workshop(app) as shop:
        jobs = {way: await work.aenqueue(way) for way in ways}
        await shop.ended(*jobs.values())
        codes = {}
        for way, job in jobs.items():
            found = await job.ainfo()
            assert (found.state, found.failures) == (State.FAILED, 1), way
            assert found.error is not None
            codes[way] = found.error["code"]
        assert [codes[way] for way in ways[:4]] == ["TRANSACTION_ENDED"] * 4
        assert await effects(shop) == ["commit", "commit; begin"], "what was committed behind our back"
        last = await good.aenqueue()
        await shop.ended(last, state="completed")


@both
async def test_a_session_that_is_lost_midway_undoes_everything_and_the_job_runs_again(
    app: App, plain: bool
) -> None:
    # spec: QU-18, D-1
    lose = "select pg_terminate_backend(pg_backend_pid())"

    @app.task(transaction=True, retry=AT_ONCE)
    def plain_work(context: Context, tx: Tx) -> None:
        tx.execute("insert into effects values ('once')")
        if context.attempt == 1:
            tx.execute(lose)

    @app.task(transaction=True, retry=AT_ONCE)
    async def async_work(context: Context, tx: AsyncTx) -> None:
        await tx.execute("insert into effects values ('once')")
        if context.attempt == 1:
            await tx.execute(lose)

    work = plain_work if plain else async_work

    async with app, Workshop(app) as shop:
        job = await work.aenqueue()
        await shop.ended(job, state="completed")
        assert await effects(shop) == ["once"]
        assert (await job.ainfo()).failures == 1


@both
@pytest.mark.parametrize("arrived", [False, True], ids=["commit lost", "answer lost"])
async def test_a_commit_of_which_nobody_knows_has_no_effect_twice(
    app: App, plain: bool, arrived: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # spec: QU-18, D-1, D-16
    kind = "_execute_blocking" if plain else "_execute"
    real = getattr(Transactions, kind)
    lost: list[Statement] = []

    def cut(connection: Any) -> None:
        lost.append(connection)
        connection.pgconn.finish()
        raise Unsure("the line was cut")

    async def execute(
        self: Transactions, connection: Any, statement: Statement, *, commits: bool = False
    ) -> None:
        doomed = commits and not lost
        if not doomed or arrived:
            await real(self, connection, statement, commits=commits)
        if doomed:
            cut(connection)

    def execute_blocking(
        self: Transactions, connection: Any, statement: Statement, *, commits: bool = False
    ) -> None:
        doomed = commits and not lost
        if not doomed or arrived:
            real(self, connection, statement, commits=commits)
        if doomed:
            cut(connection)

    monkeypatch.setattr(Transactions, kind, execute_blocking if plain else execute)

    def act(context: Context, effect: Callable[[str], Any]) -> int:
        effect("once")
        return context.attempt

    work = declare(app, plain=plain, act=act)
    async with app, Workshop(app) as shop:
        job = await work.aenqueue()
        await shop.until(lambda: not shop.worker.holding and shop.seen(JobBegan), "it is let go")
        if not arrived:
            await shop.event(JobReleased, job=job)
        await shop.ended(job, state="completed")
        assert not shop.seen(JobLost), "what is told is what happened"
        assert len(lost) == 1
        assert await effects(shop) == ["once"]
        found = await job.ainfo()
        assert (found.state, found.failures, found.attempts) == (State.COMPLETED, 0, ())
        assert found.result == (1 if arrived else 2)


async def test_what_a_constraint_refuses_at_the_end_is_a_failure(app: App, dsn: str) -> None:
    # spec: QU-19, D-1
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("create table lonely (n int unique deferrable initially deferred)")

    @app.task(transaction=True, retry=Retry.never())
    async def work(tx: AsyncTx) -> None:
        await tx.execute("insert into lonely values (1), (1)")

    async with app, Workshop(app) as shop:
        job = await work.aenqueue()
        await shop.ended(job, state="failed")
        found = await job.ainfo()
        assert found.error is not None
        assert "duplicate key" in found.error["message"]
        assert await shop.value("select count(*) from lonely") == 0


async def test_a_transactional_handler_can_be_cancelled_in_the_middle_of_a_statement(app: App) -> None:
    # spec: SG-18, QU-19
    @app.task(transaction=True)
    async def work(tx: AsyncTx) -> None:
        await tx.execute("insert into effects values ('never')")
        await tx.execute("select pg_sleep(60)")

    sleeping = (
        "select count(*) from pg_stat_activity where datname = current_database() and wait_event = 'PgSleep'"
    )
    async with app, Workshop(app, lease=timedelta(minutes=5)) as shop:
        await shop.asleep()
        job = await work.aenqueue()
        await shop.found(lambda: shop.value(sleeping))
        assert await job.acancel("enough") == "signalled"
        await shop.ended(job, state="cancelled")
        assert await effects(shop) == []
        found = await job.ainfo()
        assert (found.state, found.failures) == (State.CANCELLED, 0)


async def test_a_transactional_handler_that_takes_too_long_is_undone_and_tried_again(app: App) -> None:
    # spec: SH-23, SG-19, QU-19
    @app.task(transaction=True, timeout=timedelta(milliseconds=50), retry=AT_ONCE)
    async def work(context: Context, tx: AsyncTx) -> None:
        await tx.execute("insert into effects values (%s)", (f"attempt {context.attempt}",))
        if context.attempt == 1:
            await asyncio.Event().wait()

    async with app, Workshop(app) as shop:
        job = await work.aenqueue()
        await shop.ended(job, state="completed")
        found = await job.ainfo()  # on a busy machine the second may take too long as well
        assert await effects(shop) == [f"attempt {found.attempt}"]
        assert [attempt.code for attempt in found.attempts] == ["TASK_TIMEOUT"] * (found.attempt - 1)
        assert found.attempt > 1


async def test_a_transactional_job_that_was_taken_away_before_it_began_has_no_effect(app: App) -> None:
    # spec: QU-18, D-1, D-16
    @app.task(transaction=True)
    async def work(context: Context, tx: AsyncTx) -> int:
        await tx.execute("insert into effects values (%s)", (str(context.attempt),))
        return context.attempt

    async with app, Workshop(app) as shop:
        gate = shop.gate("began")
        job = await work.aenqueue()
        await gate.reached()
        await shop.rows("update shiftwork.jobs set attempt = attempt + 1")  # as if another had it now
        gate.open()
        await shop.event(JobLost, job=job)
        assert await effects(shop) == []
        assert not shop.seen(JobEnded)
        assert (await job.ainfo()).state is State.RUNNING
        await shop.rows("delete from shiftwork.jobs")


async def test_jobs_enqueued_on_the_transaction_itself_live_and_die_with_it(app: App) -> None:
    # spec: QU-18, QU-20
    @app.task(queue="unserved")
    async def follow_up() -> None: ...

    @app.task(transaction=True)
    async def work(tx: AsyncTx, fail: bool) -> int:
        handle = await follow_up.using(connection=tx).aenqueue()
        if fail:
            raise Poison("no")
        return handle.id

    async with app, Workshop(app, queues="default") as shop:
        bad, good = await work.aenqueue(fail=True), await work.aenqueue(fail=False)
        await shop.ended(bad, good)
        rows = await shop.rows("select id from shiftwork.jobs")
        assert [row["id"] for row in rows] == [await good.aresult(timeout=30)]


@both
async def test_a_transactional_task_ends_with_its_own_transaction_only(app: App, plain: bool) -> None:
    # spec: QU-18
    refused: list[str] = []

    def act(context: Context, _: Callable[[str], Any]) -> None:
        for way in (lambda: context.finish(context.tx), context.finishing):
            with pytest.raises(ConfigurationError) as raised:
                way()
            refused.append(str(raised.value))

    work = declare(app, plain=plain, act=act)
    async with app, Workshop(app) as shop:
        job = await work.aenqueue()
        await shop.ended(job, state="completed")
        assert len(refused) == 2


async def test_sessions_are_used_again_and_one_that_was_lost_meanwhile_troubles_nobody(app: App) -> None:
    # spec: SH-10, D-2
    @app.task(transaction=True, retry=Retry.never())
    async def work(tx: AsyncTx) -> int:
        return tx.info.backend_pid

    @app.task(transaction=True, retry=Retry.never())
    def plain(tx: Tx) -> int:
        return tx.info.backend_pid

    sessions = (
        "select count(*) from pg_stat_activity where datname = current_database() and application_name = %s"
    )
    async with app, Workshop(app, transactions=1) as shop:
        await shop.asleep()
        for task in (work, plain, work):

            async def once(task: Any = task) -> int:
                job = await task.aenqueue()
                await shop.ended(job, state="completed")
                return int(await job.aresult(timeout=30))

            first = await once()
            assert await once() == first
            await shop.value("select pg_terminate_backend(%s)", first)
            assert await once() != first
        await shop.worker._leases.reconcile()
        # To claim, for the lease, to listen, and one for transactions; nothing had to be settled apart from them.
        assert await shop.value(sessions, f"shiftwork {shop.worker.id}") == 4


async def test_a_retry_may_begin_before_the_answer_to_the_former_commit_has_come(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    # spec: D-9, SG-33
    latch, real = Latch(), Transactions.close_with

    async def slow(self: Transactions, run: Any, connection: Any, outcome: Any) -> Any:
        written = await real(self, run, connection, outcome)
        if run.attempt == 1:
            await latch.hold()
        return written

    monkeypatch.setattr(Transactions, "close_with", slow)

    @app.task(transaction=True, retry=AT_ONCE)
    async def work(context: Context, tx: AsyncTx) -> int:
        if context.attempt == 1:
            raise ValueError("again")
        return context.attempt

    async with app, Workshop(app) as shop:
        job = await work.aenqueue()
        await shop.ended(job, state="completed")
        latch.release()
        await shop.ended(job, state="scheduled")
        assert await job.aresult(timeout=30) == 2
        assert not shop.seen(JobReleased)
        assert not shop.worker.holding


async def test_a_handler_may_speak_another_encoding(app: App) -> None:
    @app.task(transaction=True)
    async def work(tx: AsyncTx) -> str:
        await tx.execute("set client_encoding to 'latin1'")
        return "café 'au' \\lait"

    async with app, Workshop(app) as shop:
        jobs = [await work.aenqueue() for _ in range(2)]
        await shop.ended(*jobs, state="completed")
        assert [await job.aresult(timeout=30) for job in jobs] == ["café 'au' \\lait"] * 2


async def test_what_ends_fast_is_claimed_beforehand_and_given_back_if_it_has_to_wait_after_all(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    latch = Latch()

    @app.task(transaction=True)
    async def work(tx: AsyncTx, number: int) -> None:
        if number < 0:
            await latch.hold()

    monkeypatch.setattr(transactions, "LONGEST", 0.05)
    async with app, Workshop(app, transactions=1) as shop:
        [limit] = shop.worker._lanes.all[0].limits
        assert limit.left == 1
        monkeypatch.setattr(Pace, "lately", 1_000.0)
        first, second = await app.aenqueue_many([work.job(-1), work.job(2)])
        await shop.event(JobReleased, job=second.id)
        assert not shop.seen(JobEnded)
        monkeypatch.setattr(Pace, "lately", 0.0)
        await latch.reached()
        latch.release()
        await shop.ended(first, second, state="completed")
        assert not (await second.ainfo()).attempts
