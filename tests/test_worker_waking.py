"""How a worker learns that there is something to do. Polling is set to ten minutes, unless a test says otherwise."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import psycopg
import pytest

from shiftwork import App, Retry, State, operations
from shiftwork.events import JobBegan, ListenerDeaf, ListenerProven
from tests.harness import Protocol
from tests.workshop import Latch, Workshop


@pytest.fixture
def app(dsn: str) -> App:
    app = App(dsn)

    @app.task
    async def work() -> int:
        return 1

    return app


async def test_whoever_sleeps_is_woken_however_a_job_comes_into_being(app: App, protocol: Protocol) -> None:
    # spec: D-5, HO-3, HO-11, QU-3, SH-11
    async with app, Workshop(app) as shop:
        for enqueue in (
            lambda: app.find("work").enqueue().id,
            lambda: protocol.enqueue("work"),
            lambda: protocol.value("insert into {}.jobs (task) values ('work') returning id"),
            lambda: protocol.enqueue_many([{"task": "work"}, {"task": "work", "queue": "unserved"}])[0]["id"],
        ):
            await shop.asleep()
            job = await asyncio.to_thread(enqueue)
            await shop.ended(job, state="completed")


async def test_under_steady_work_nobody_notifies_and_who_sleeps_all_the_same_hears_of_it(
    app: App, protocol: Protocol
) -> None:
    # spec: D-5, D-6
    @app.task(queue="other")
    async def rare() -> int:
        return 2

    def declared() -> bool:
        return bool(protocol.value("select {}.is_declared('shiftwork.asleep_until')"))

    async with app, Workshop(app, queues=["default"]) as busy, Workshop(app, queues=["other"]) as idle:
        await busy.asleep()
        await idle.asleep()
        looks = idle.points["claiming"]
        while idle.points["claiming"] == looks:  # until it was told to look, which nothing in its queue does
            await asyncio.to_thread(protocol.enqueue_many, [{"task": "work"}] * 100)
        await idle.asleep()
        assert declared(), "who sleeps has said so anew"
        await idle.ended(rare.enqueue(), state="completed")

    async with Workshop(app) as busy:
        await busy.asleep()
        assert declared()
        while declared():
            await asyncio.to_thread(protocol.enqueue_many, [{"task": "work"}] * 100)


async def test_what_was_being_inserted_when_the_worker_fell_asleep_is_found_when_it_commits(
    app: App, dsn: str
) -> None:
    # spec: D-5, QU-3
    async with app, Workshop(app) as shop:
        gate = shop.gate("claiming")
        await gate.reached()  # nobody has ever slept: nobody is notified
        async with await psycopg.AsyncConnection.connect(dsn) as other:
            cursor = await other.execute("insert into shiftwork.jobs (task) values ('work') returning id")
            [job] = await cursor.fetchone() or [0]
            gate.open()
            await shop.asleep(inserting=True)
            assert not shop.seen(JobBegan)
            await other.commit()
            await shop.ended(job, state="completed")


async def test_what_was_being_inserted_between_the_last_look_and_sleep_is_found(app: App, dsn: str) -> None:
    # spec: D-5, QU-3
    async with app, Workshop(app) as shop:
        declared = shop.gate("declared")
        await declared.reached()  # it has looked, and has said that it sleeps
        async with await psycopg.AsyncConnection.connect(dsn) as other:
            cursor = await other.execute("insert into shiftwork.jobs (task) values ('work') returning id")
            [job] = await cursor.fetchone() or [0]
            declared.open()
            await shop.asleep(inserting=True)
            await other.commit()
            await shop.ended(job, state="completed")


async def test_an_insert_that_is_rolled_back_wakes_nobody_and_leaves_nothing(app: App, dsn: str) -> None:
    # spec: D-5, SH-6
    async with app, Workshop(app) as shop:
        await shop.asleep()
        looks = shop.points["claiming"]
        async with await psycopg.AsyncConnection.connect(dsn) as other:
            cursor = await other.execute("insert into shiftwork.jobs (task) values ('work') returning id")
            [gone] = await cursor.fetchone() or [0]
            await other.rollback()
            # Notifications come in the order of commits: if there had been one, it would have come before this one.
            await other.execute("select pg_notify('shiftwork_cancel', '1')")
            await other.commit()
        await shop.rows("select 1")
        assert shop.points["claiming"] == looks
        job = await app.find("work").aenqueue()
        await shop.ended(job)
        assert [event.job for event in shop.seen(JobBegan)] == [job.id]
        assert await shop.value("select count(*) from shiftwork.all_jobs where id = %s", gone) == 0


async def test_a_listener_that_is_cut_off_listens_again_and_looks_for_what_it_missed(app: App) -> None:
    # spec: D-5, SH-11
    # fault: F8
    async with app, Workshop(app) as shop:
        await shop.asleep()
        cut = (
            "select count(pg_terminate_backend(pid)) from pg_stat_activity"
            " where datname = current_database() and application_name = %s and query like %s"
        )
        assert await shop.value(cut, f"shiftwork {shop.worker.id}", "%pg_notify($1%") == 1
        await shop.event(ListenerDeaf)
        job = await app.find("work").aenqueue()  # nobody hears it
        await shop.event(ListenerProven, 2)
        await shop.ended(job, state="completed")
        await shop.asleep()
        job = await app.find("work").aenqueue()
        await shop.ended(job, state="completed")


@pytest.mark.parametrize("notify", [True, False])
async def test_without_notifications_work_is_found_by_polling(app: App, notify: bool) -> None:
    # spec: SH-12, D-5, HO-11
    # fault: F34
    async with app, Workshop(app, poll=timedelta(milliseconds=100), notify=notify) as shop:
        await shop.rows(
            "create or replace function shiftwork.wake(queues text[]) returns void language sql as 'select'"
        )
        await shop.asleep()
        job = await app.find("work").aenqueue()
        await shop.ended(job, state="completed")
        assert bool(shop.seen(ListenerProven)) is notify


async def test_a_delayed_job_runs_when_it_is_due(app: App) -> None:
    # spec: QU-3, QU-24
    work = app.find("work")
    early = await work.using(delay=timedelta(milliseconds=200)).aenqueue()
    async with app, Workshop(app) as shop:
        await shop.asleep()
        late = await work.using(delay=timedelta(milliseconds=300)).aenqueue()
        await shop.ended(early, late)
        for job in (early, late):
            found = await job.ainfo()
            assert found.run_at is not None
            assert found.started_at is not None
            assert found.run_at <= found.started_at


async def test_a_retry_runs_when_it_is_due(app: App) -> None:
    # spec: HO-29, QU-3
    times: list[int] = []

    @app.task(retry=Retry(delays=timedelta(milliseconds=100), factor=1))
    async def twice() -> None:
        times.append(1)
        if len(times) < 3:
            raise ValueError("again")

    async with app, Workshop(app) as shop:
        await shop.asleep()
        job = await twice.aenqueue()
        await shop.ended(job, state="completed")
        assert (await job.ainfo()).failures == 2


async def test_a_job_that_is_run_now_or_revived_wakes_the_worker(app: App) -> None:
    # spec: QU-24
    work = app.find("work")
    async with app, Workshop(app) as shop:
        job = await work.using(delay=timedelta(days=1)).aenqueue()
        await shop.asleep()
        await app.arun_now([job.id])
        await shop.ended(job, state="completed")
        await shop.asleep()
        await app.arevive([job.id])
        await shop.until(lambda: len(shop.seen(JobBegan, job=job)) == 2, "the second life")


async def test_whoever_waits_for_a_result_is_told(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    # spec: HO-11, HO-33
    monkeypatch.setattr(operations, "FIRST_LOOK", 600.0)
    app.settings = app.settings.changed(result_poll=timedelta(minutes=10))
    latch = Latch()

    @app.task
    async def slow() -> str:
        await latch.hold()
        return "at last"

    @app.task(retry=Retry.never())
    async def bad() -> None:
        await latch.hold()
        raise ValueError("oh")

    async with app, Workshop(app) as shop:
        good, wrong = await slow.aenqueue(), await bad.aenqueue()
        await latch.reached(2)
        waiting = [asyncio.create_task(job.aresult(timeout=600)) for job in (good, wrong)]
        awaited = "select coalesce(pg_sequence_last_value('shiftwork.awaited_until'), 0)"
        while await shop.value(awaited) == 0:
            await asyncio.sleep(0)
        latch.release()
        async with asyncio.timeout(30):
            assert await waiting[0] == "at last"
            with pytest.raises(Exception, match="oh"):
                await waiting[1]
        assert (await wrong.ainfo()).state is State.FAILED
