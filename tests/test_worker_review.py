"""What a worker must withstand: handlers that misbehave, limits that are full, and things that come at a bad moment."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from shiftwork import App, Context, Retry, State, cursor
from shiftwork.events import JobEnded
from shiftwork.worker.resting import Pace
from tests.workshop import Latch, Workshop

AT_ONCE = Retry(delays=timedelta(), jitter=0)
LATER = Retry(delays=timedelta(hours=1), jitter=0)
Tx = psycopg.Connection[Any]
AsyncTx = psycopg.AsyncConnection[Any]


@pytest.fixture
def app(dsn: str) -> App:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("create table effects (effect text)")
    return App(dsn)


class Brisk(Pace):
    @property
    def is_brisk(self) -> bool:
        return True


async def effects(shop: Workshop) -> list[str]:
    return [row["effect"] for row in await shop.rows("select effect from effects order by effect")]


@pytest.mark.parametrize("waits", [False, True])
async def test_a_handler_that_cancels_the_task_it_runs_in_harms_only_its_own_job(
    app: App, waits: bool
) -> None:
    # spec: SH-18
    @app.task(retry=LATER)
    async def cancels() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        if waits:
            await asyncio.sleep(0)

    @app.task
    async def good() -> int:
        await asyncio.sleep(0)
        return 1

    async with app, Workshop(app, concurrency=1) as shop:
        bad = await cancels.aenqueue()
        await shop.ended(bad)
        assert (await bad.ainfo()).state is (State.SCHEDULED if waits else State.COMPLETED)
        jobs = [await good.aenqueue() for _ in range(3)]
        await shop.ended(*jobs, state="completed")
        assert not shop.worker.holding


async def test_a_backlog_that_is_not_for_this_worker_does_not_keep_it_awake(app: App) -> None:
    # spec: SH-23
    latch = Latch()

    @app.task(concurrency=1)
    async def one_at_a_time() -> None:
        await latch.hold()

    @app.task
    async def other() -> None: ...

    async with app:
        await app.aenqueue_many(one_at_a_time.job() for _ in range(2500))
        async with Workshop(app, grace=timedelta()) as shop:
            await latch.reached()
            await shop.asleep()
            job = await other.aenqueue()
            await shop.ended(job)


async def test_a_worker_that_stops_when_idle_has_looked_everywhere(
    app: App, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cursor, "LOOK_EVERY", 30.0)  # else it may look by chance
    late = await psycopg.AsyncConnection.connect(dsn)

    @app.task
    async def early() -> None: ...

    @app.task
    async def work() -> None:
        await late.commit()

    async with app:
        before = await early.using(connection=late).aenqueue()
        after = await work.aenqueue()
        async with Workshop(app, stop_when_idle=True) as shop:
            shop.worker._pace = Brisk()  # too brisk to go to sleep
            await shop.stopped()
            assert (await after.ainfo()).state is State.COMPLETED
            assert (await before.ainfo()).state is State.COMPLETED
    await late.close()


async def test_a_function_that_nobody_waits_for_any_more_changes_nothing(app: App) -> None:
    go, done = threading.Event(), threading.Event()
    first = threading.Event()

    @app.task(transaction=True, retry=LATER)
    def work(tx: Tx) -> None:
        tx.execute("insert into effects values ('first')")
        first.set()
        go.wait(20)
        try:
            tx.execute("insert into effects values ('second')")
        finally:
            done.set()

    @app.task(transaction=True)
    def other(tx: Tx) -> None:
        tx.execute("insert into effects values ('other')")

    @app.middleware
    async def hasty(context: Context, call: Callable[[], Awaitable[Any]]) -> Any:
        async with asyncio.timeout(0.3):
            return await call()

    async with app, Workshop(app, transactions=1) as shop:
        job = await work.aenqueue()
        await shop.ended(job)
        assert (await job.ainfo()).state is State.SCHEDULED
        go.set()
        await asyncio.to_thread(done.wait, 20)
        assert await effects(shop) == []
        after = await other.aenqueue()
        await shop.ended(after)
        assert await effects(shop) == ["other"]


async def test_the_wrong_way_to_finish_is_refused(app: App) -> None:
    @app.task(retry=LATER)
    async def work(context: Context) -> None:
        with context.finishing():
            pass

    async with app, Workshop(app) as shop:
        job = await work.aenqueue()
        await shop.ended(job)
        error = (await job.ainfo()).error
        assert error is not None
        assert "async with" in error["message"]


async def test_a_savepoint_of_any_name_may_be_set(app: App) -> None:
    @app.task(transaction=True, retry=LATER)
    async def work(tx: AsyncTx) -> None:
        await tx.execute("insert into effects values ('first')")
        await tx.execute("savepoint handler")
        raise ValueError

    async with app, Workshop(app) as shop:
        job = await work.aenqueue()
        await shop.ended(job)
        assert await effects(shop) == []


async def test_a_session_comes_to_the_next_job_as_it_came_to_the_first(app: App) -> None:
    @app.task(transaction=True)
    async def changes(tx: AsyncTx) -> None:
        tx.row_factory = dict_row

    @app.task(transaction=True)
    async def reads(tx: AsyncTx) -> list[int]:
        return list(await (await tx.execute("select 1, 2")).fetchone() or ())

    async with app, Workshop(app, transactions=1) as shop:
        before = await changes.aenqueue()
        await shop.ended(before)
        job = await reads.aenqueue()
        await shop.ended(job)
        assert (await job.ainfo()).result == [1, 2]


async def test_what_is_told_of_a_job_is_what_became_of_it(app: App) -> None:
    @app.task(retry=LATER)
    async def fails() -> None:
        raise ValueError

    async with app, Workshop(app) as shop:
        job = await fails.using(expires_in=timedelta(minutes=1)).aenqueue()
        ended = await shop.event(JobEnded, job=job)
        assert (await job.ainfo()).state is State.FAILED
        assert ended.state == "failed"


async def test_a_handler_that_will_not_be_cancelled_does_not_keep_its_slot_alive(app: App) -> None:
    # spec: HO-39
    latch = Latch()

    @app.task
    async def stubborn() -> None:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await latch.hold()

    async with app, Workshop(app, grace=timedelta()) as shop:
        job = await stubborn.aenqueue()
        await latch.reached()
        shop.worker.stop("enough", now=True)
        assert not await shop.stopped()
        [slot] = shop.worker._slots._slots
        await asyncio.wait([slot], timeout=20)
        assert slot.done()
        assert (await job.ainfo()).state is State.READY


async def test_a_job_that_was_locked_when_it_fell_due_is_looked_for_again(app: App, dsn: str) -> None:
    # spec: SH-23
    @app.task
    async def work() -> None: ...

    async with app, await psycopg.AsyncConnection.connect(dsn) as other:
        job = await work.using(delay=timedelta(milliseconds=1)).aenqueue()
        await other.execute("select from shiftwork.jobs where id = %s for update", (job.id,))
        async with Workshop(app) as shop:
            await shop.asleep()
            await other.rollback()
            await shop.ended(job)


@pytest.mark.parametrize("blocking", [False, True])
async def test_what_is_told_of_a_transactional_job_is_what_the_database_made_of_it(
    app: App, blocking: bool
) -> None:
    @app.task(transaction=True, retry=LATER)
    async def waiting(tx: AsyncTx) -> None:
        raise ValueError("not now")

    @app.task(transaction=True, retry=LATER)
    def in_a_thread(tx: Tx) -> None:
        raise ValueError("not now")

    work = in_a_thread if blocking else waiting
    async with app, Workshop(app) as shop:
        late = await work.using(expires_in=timedelta(minutes=1)).aenqueue()
        event = await shop.event(JobEnded, job=late)
        assert (event.state, event.delay) == ("failed", None)  # its next attempt would begin too late
        again = await work.aenqueue()
        event = await shop.event(JobEnded, job=again)
        assert (event.state, event.delay) == ("scheduled", 3600)
