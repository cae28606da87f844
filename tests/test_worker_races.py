"""The moments at which two parties meet over one job, each forced: the worker is held at a named point, or a row is."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from shiftwork import App, Context
from shiftwork.errors import DatabaseError, DatabaseUnavailable
from shiftwork.events import (
    JobBegan,
    JobEnded,
    JobLost,
    JobRefused,
    JobReleased,
    JobStopped,
    LeaseLost,
    Reaped,
    WorkerStopped,
)
from shiftwork.worker.line import Line
from tests.concurrency import elsewhere
from tests.harness import Protocol
from tests.workshop import Latch, Workshop

LONG = timedelta(seconds=60)


async def test_a_worker_that_lives_keeps_what_it_has_yet_to_write(dsn: str, protocol: Protocol) -> None:
    # spec: HO-24
    app = App(dsn)

    @app.task
    async def quick() -> str:
        return "kept"

    async with app, Workshop(app, lease=LONG) as shop:
        gate = shop.gate("settling")
        job = await quick.aenqueue()
        await gate.reached()
        assert protocol.reap(thorough=True) == {}
        assert protocol.claim(protocol.register()).jobs == []
        gate.open()
        await shop.ended(job, state="completed")
        assert await job.aresult(timeout=30) == "kept"
        assert not shop.seen(JobLost)


@pytest.mark.parametrize("point", ["ended", "settling"])
async def test_what_is_written_too_late_is_refused(dsn: str, protocol: Protocol, point: str) -> None:
    # spec: HO-10, HO-40, D-16, QU-9
    # fault: F4
    app = App(dsn)

    @app.task
    async def quick() -> str:
        return "late"

    async with app, Workshop(app, lease=LONG) as shop:
        gate = shop.gate(point)
        job = await quick.aenqueue()
        await gate.reached()

        protocol.lapse(shop.worker.id)
        assert protocol.reap() == {job.id: "ready"}
        other = protocol.register(lease=60)
        [taken] = protocol.claim(other).jobs
        assert taken["attempt"] == 2
        gate.open()
        lost = await shop.event(JobLost, job=job, attempt=1)
        assert lost.task == "quick"
        assert (protocol.live(job.id)["worker"], protocol.live(job.id)["state"]) == (other, "running")

        protocol.complete(other, [taken], result="in time")
        assert await job.aresult(timeout=30) == "in time"
        assert not shop.seen(JobEnded)


@pytest.mark.parametrize("outcome", ["returns", "raises"])
async def test_a_handler_that_goes_on_after_its_job_was_taken_changes_nothing(
    dsn: str, protocol: Protocol, outcome: str
) -> None:
    # spec: D-16, HO-40, QU-9, SG-17
    app = App(dsn)
    latch = Latch()
    told: list[str | None] = []

    @app.task
    def hold(context: Context) -> str:
        latch.hold_blocking()
        told.append(context.cancelled)
        if outcome == "raises":
            raise RuntimeError("too late")
        return "late"

    async with app, Workshop(app, lease=LONG) as shop:
        job = await hold.aenqueue()
        await latch.reached()
        other = protocol.register(lease=60)
        protocol.lapse(shop.worker.id)
        with protocol.connection.transaction():  # taken over before anybody hears of it
            protocol.reap()
            [taken] = protocol.claim(other).jobs
        await shop.event(JobStopped, job=job, why="lost")
        latch.release()
        await shop.event(JobLost, job=job, attempt=1)
        assert told == ["lost"]
        assert protocol.live(job.id)["failures"] == 0
        assert protocol.complete(other, [taken], result="in time") == {job.id: "settled"}
    found = protocol.job(job.id)
    assert (found["result"], found["attempt"], found["resets"], found["failures"]) == ("in time", 2, 1, 0)


async def test_a_transactional_handler_whose_job_is_taken_can_commit_nothing(
    dsn: str, protocol: Protocol
) -> None:
    # spec: D-1, D-16, QU-18
    app = App(dsn)
    protocol.connection.execute("create table effects (attempt int)")
    latch = Latch()
    errors: list[BaseException] = []

    @app.task(transaction=True)
    async def transfer(tx: psycopg.AsyncConnection[Any], context: Context) -> None:
        await tx.execute("insert into effects values (%s)", (context.attempt,))
        try:
            await asyncio.shield(latch.hold())
        except asyncio.CancelledError:  # it does not listen
            await latch.hold()
        try:
            await tx.execute("insert into effects values (%s)", (context.attempt,))
        except psycopg.Error as error:
            errors.append(error)
            raise

    async with app, Workshop(app, lease=LONG) as shop:
        job = await transfer.aenqueue()
        await latch.reached()
        assert protocol.reap() == {}
        protocol.lapse(shop.worker.id)
        assert protocol.reap() == {job.id: "ready"}  # its session is ended
        other = protocol.register(lease=60)
        [taken] = protocol.claim(other).jobs
        latch.release()
        await shop.event(JobLost, job=job, attempt=1)
        assert len(errors) == 1
        assert protocol.complete(other, [taken]) == {job.id: "settled"}
    assert protocol.rows("select * from effects") == []


async def test_a_lapsed_lease_alone_does_not_undo_a_transaction(dsn: str, protocol: Protocol) -> None:
    # spec: D-1, QU-7
    app = App(dsn)
    protocol.connection.execute("create table effects (attempt int)")
    latch = Latch()

    @app.task(transaction=True)
    async def transfer(tx: psycopg.AsyncConnection[Any], context: Context) -> None:
        await tx.execute("insert into effects values (%s)", (context.attempt,))
        await latch.hold()

    async with app, Workshop(app, lease=LONG) as shop:
        job = await transfer.aenqueue()
        await latch.reached()
        protocol.lapse(shop.worker.id)  # and nobody reaps
        latch.release()
        await shop.ended(job, state="completed")
    assert protocol.rows("select * from effects") == [{"attempt": 1}]


# The reaper meets the heartbeat.


async def test_a_heartbeat_that_waits_for_the_reaper_learns_that_it_came_too_late(
    dsn: str, protocol: Protocol
) -> None:
    # spec: QU-8, HO-22, SH-21
    app = App(dsn)
    latch = Latch()

    @app.task
    async def hold() -> None:
        await latch.hold()

    async with app, Workshop(app, lease=timedelta(seconds=1.5)) as shop:
        job = await hold.aenqueue()
        await latch.reached()
        former = shop.worker.id
        with elsewhere(dsn) as watcher:
            with protocol.connection.transaction():
                protocol.lapse(former)
                assert protocol.reap() == {job.id: "ready"}
                while await asyncio.to_thread(blocked, watcher, former) is None:
                    pass  # its next beat comes by itself
            await shop.event(LeaseLost, worker=former)
        assert (await shop.event(JobLost, job=job, attempt=1)).why == "taken"
        latch.release()
        await shop.ended(job, state="completed")
    assert protocol.job(job.id)["attempt"] == 2


def blocked(watcher: Protocol, worker: int) -> int | None:
    """The session of this worker that waits for somebody."""
    found = watcher.rows(
        "select pid from pg_stat_activity where datname = current_database() and application_name = %s"
        " and cardinality(pg_blocking_pids(pid)) > 0",
        f"shiftwork {worker}",
    )
    return found[0]["pid"] if found else None


async def test_a_reaper_that_meets_a_heartbeat_takes_nothing(dsn: str, protocol: Protocol) -> None:
    # spec: QU-8, HO-22
    app = App(dsn)
    latch = Latch()

    @app.task
    async def hold() -> None:
        await latch.hold()

    async with app, Workshop(app, lease=LONG) as shop:
        job = await hold.aenqueue()
        await latch.reached()
        worker = shop.worker.id
        protocol.lapse(worker)
        with elsewhere(dsn) as beating:
            with beating.connection.transaction():
                assert beating.heartbeat(worker, [[job.id, 1]])["alive"]
                assert protocol.reap(thorough=True) == {}  # seen as lapsed, but its row is being renewed
            assert protocol.reap(thorough=True) == {}
        latch.release()
        await shop.ended(job, state="completed")
        assert not shop.seen(JobLost)


async def test_a_worker_never_reaps_itself(dsn: str, protocol: Protocol) -> None:
    # spec: QU-8
    app = App(dsn)
    latch = Latch()

    @app.task
    async def hold() -> None:
        await latch.hold()

    async with app, Workshop(app, lease=LONG) as shop:
        job = await hold.aenqueue()
        await latch.reached()
        await shop.asleep()
        other = protocol.register()
        theirs = protocol.enqueue("elsewhere")
        protocol.claim(other)
        protocol.rows("update {}.workers set lease_until = 'epoch'")  # both have lapsed
        await shop.worker._reap()
        assert protocol.reap(reaper=shop.worker.id, thorough=True) == {}
        assert protocol.state(theirs) == "ready"
        assert protocol.live(job.id)["worker"] == shop.worker.id
        latch.release()
        await shop.ended(job, state="completed")
        assert not shop.seen(JobLost)
    assert protocol.job(job.id)["attempt"] == 1


async def test_what_was_fetched_ahead_and_lost_is_not_begun(dsn: str, protocol: Protocol) -> None:
    # spec: HO-8, SG-15, D-2
    app = App(dsn)
    latch = Latch()
    ran: list[tuple[int, int]] = []

    @app.task
    async def hold(context: Context, n: int) -> None:
        ran.append((n, context.attempt))
        if n == 0:
            await latch.hold()

    async with app, Workshop(app, concurrency=1, prefetch=2, lease=LONG) as shop:
        first, second, third = await app.aenqueue_many([hold.job(n) for n in range(3)])
        await latch.reached()
        await shop.until(lambda: len(shop.worker._backlog) == 2)
        protocol.rows("update {}.jobs set attempt = 2, worker = null, state = 'ready', claim = null,"
                      " claimed_at = null where id = %s", second.id)  # fmt: skip
        protocol.lapse(shop.worker.id)
        assert protocol.reap() == {first.id: "ready", third.id: "ready"}
        await shop.event(JobLost, job=third, attempt=1)
        latch.release()
        await shop.ended(first, second, third, state="completed")
    found = {job["id"]: job for job in protocol.rows("select * from {}.history")}
    # Only the one whose code had begun has lost anything.
    assert [found[job.id]["resets"] for job in (first, second, third)] == [1, 0, 0]
    assert [found[job.id]["failures"] for job in (first, second, third)] == [0, 0, 0]
    assert sorted(ran) == [(0, 1), (0, 2), (1, 3), (2, 2)]


# Stopping meets everything else.


async def test_stopping_while_a_claim_is_answered_gives_back_what_it_took(
    dsn: str, protocol: Protocol
) -> None:
    # spec: SH-24, HO-25, QU-14, D-25
    app = App(dsn)
    ran: list[int] = []

    @app.task
    async def quick() -> None:
        ran.append(1)

    async with app, Workshop(app, lease=LONG) as shop:
        await shop.asleep()
        gate = shop.gate("claimed")
        jobs = await app.aenqueue_many([quick.job() for _ in range(3)])
        await gate.reached()
        assert protocol.value("select count(*) from {}.jobs where state = 'running'") == 3
        shop.worker.stop()
        gate.open()
        assert await shop.stopped()
        assert {event.job for event in shop.seen(JobReleased)} == {job.id for job in jobs}
        assert ran == []
    for job in jobs:
        found = protocol.live(job.id)
        assert (found["state"], found["failures"], found["resets"]) == ("ready", 0, 0)


@pytest.mark.parametrize("point", ["settling", "settled"])
async def test_stopping_while_an_outcome_is_written_does_not_cut_it_off(dsn: str, point: str) -> None:
    # spec: SH-24, HO-25, SG-30
    app = App(dsn)

    @app.task
    async def quick() -> str:
        return "written"

    async with app, Workshop(app, lease=LONG, grace=timedelta(seconds=30)) as shop:
        gate = shop.gate(point)
        job = await quick.aenqueue()
        await gate.reached()
        stopping = shop.gate("stopping")
        shop.worker.stop()
        await stopping.reached()
        stopping.open()
        gate.open()
        assert await shop.stopped()
        assert await job.aresult(timeout=30) == "written"
        assert shop.seen(WorkerStopped)[0].abandoned == 0


async def test_a_job_that_ends_while_it_is_told_to_stop_has_ended(dsn: str, protocol: Protocol) -> None:
    # spec: SH-24, D-25
    app = App(dsn)
    latch = Latch()

    @app.task
    async def hold() -> str:
        try:
            await latch.hold()
        except asyncio.CancelledError:
            return "in the last moment"
        return "let go"

    async with app, Workshop(app, lease=LONG, grace=timedelta()) as shop:
        job = await hold.aenqueue()
        await latch.reached()
        shop.worker.stop()
        assert await shop.stopped()
        assert await job.aresult(timeout=30) == "in the last moment"
    assert protocol.job(job.id)["failures"] == 0


async def test_a_worker_holds_its_lease_until_its_last_handler_has_ended(
    dsn: str, protocol: Protocol
) -> None:
    # spec: SG-30, D-25
    app = App(dsn)
    latch = Latch()

    @app.task
    async def hold() -> None:
        await latch.hold()

    async with app, Workshop(app, lease=timedelta(seconds=0.5), grace=LONG) as shop:
        job = await hold.aenqueue()
        await latch.reached()
        shop.worker.stop()
        await shop.until(lambda: shop.points["stopping"])
        until = protocol.value("select lease_until from {}.workers")
        while protocol.value("select lease_until < %s from {}.workers", until + timedelta(seconds=1)):
            await asyncio.sleep(0)  # two leases later
        assert protocol.reap(thorough=True) == {}
        latch.release()
        assert await shop.stopped()
        assert shop.seen(JobEnded, job=job)
    assert protocol.value("select lease_until <= clock_timestamp() from {}.workers")


# What the database says to an outcome.


async def test_an_outcome_of_a_locked_job_waits_for_the_lock_and_keeps_nobody_else(
    dsn: str, protocol: Protocol
) -> None:
    # spec: HO-10, SG-16
    app = App(dsn)
    latch = Latch()

    @app.task
    async def hold(n: int) -> int:
        await latch.hold()
        return n

    async with app, Workshop(app, lease=LONG) as shop:
        jobs = await app.aenqueue_many([hold.job(n) for n in range(3)])
        await latch.reached(3)
        with elsewhere(dsn) as holder, holder.connection.transaction():
            holder.rows("select from {}.jobs where id = %s for update", jobs[1].id)
            latch.release()
            await shop.ended(jobs[0], jobs[2], state="completed")
            tries = shop.points["settled"]
            await shop.until(lambda: shop.points["settled"] > tries + 1)  # busy, and busy again
            assert not shop.seen(JobEnded, job=jobs[1])
        await shop.ended(jobs[1], state="completed")
        assert await jobs[1].aresult(timeout=30) == 1


REFUSING = """
create function public.refuse() returns trigger language plpgsql as $$
begin
  if %s then
    raise exception using errcode = '%s', message = 'not this one';
  end if;
  return new;
end $$;
create trigger refuse before insert or update on shiftwork.%s for each row execute function public.refuse();
"""


async def together(app: App, shop: Workshop, latch: Latch, jobs: list[Any]) -> None:
    """Let all of these handlers end in one batch."""
    await latch.reached(len(jobs))
    gate = shop.gate("settling")
    latch.release()
    await shop.until(lambda: shop.points["ended"] >= len(jobs))
    gate.open()


async def test_an_outcome_that_cannot_be_written_fails_its_job_and_nobody_elses(
    dsn: str, protocol: Protocol
) -> None:
    # spec: HO-10, HO-12
    # fault: F29
    app = App(dsn)
    latch = Latch()

    @app.task
    async def hold(n: int) -> int:
        await latch.hold()
        return n

    async with app, Workshop(app, lease=LONG) as shop:
        jobs = await app.aenqueue_many([hold.job(n) for n in range(7)])
        protocol.connection.execute(
            (REFUSING % (f"new.id = {jobs[3].id} and new.state = 'completed'", "23514", "history")).encode()
        )
        await together(app, shop, latch, jobs)
        await shop.ended(*jobs)
        assert [event.job for event in shop.seen(JobRefused)] == [jobs[3].id]
    states = {row["id"]: row["state"] for row in protocol.rows("select id, state from {}.history")}
    assert states == {job.id: "failed" if job is jobs[3] else "completed" for job in jobs}
    error = protocol.job(jobs[3].id)["error"]
    assert error["code"] == "OUTCOME_REFUSED"
    assert "completed" in error["message"]
    assert "not this one" in error["message"]


async def test_a_refusal_that_will_pass_is_not_held_against_a_job(dsn: str, protocol: Protocol) -> None:
    # spec: HO-10
    # fault: F39
    app = App(dsn)
    latch = Latch()

    @app.task
    async def hold(n: int) -> int:
        await latch.hold()
        return n

    async with app, Workshop(app, lease=LONG) as shop:
        jobs = await app.aenqueue_many([hold.job(n) for n in range(5)])
        protocol.connection.execute("create sequence public.deadlocks")
        protocol.connection.execute(
            (
                REFUSING % (f"new.id = {jobs[2].id} and nextval('public.deadlocks') <= 5", "40P01", "history")
            ).encode()
        )
        await together(app, shop, latch, jobs)
        await shop.ended(*jobs, state="completed")
        assert not shop.seen(JobRefused)
    assert protocol.value("select last_value from public.deadlocks") == 6
    assert protocol.value("select count(*) from {}.history where failures > 0") == 0


async def test_a_line_that_breaks_in_the_middle_of_a_batch_loses_nothing_of_it(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # spec: HO-10, QU-15
    app = App(dsn)
    latch = Latch()
    perform = Line.perform
    batches: list[int] = []

    @app.task
    async def hold(n: int) -> int:
        await latch.hold()
        return n

    async def failing(line: Line, plan: Any, **within: Any) -> Any:
        if plan.gi_code.co_name == "settle_encoded":
            batches.append(len(plan.gi_frame.f_locals["outcomes"]))
            if len(batches) == 1:
                raise DatabaseError("something in it cannot be written", sqlstate="22000")
            if len(batches) == 2:
                raise DatabaseUnavailable("gone", maybe_committed=False)
        return await perform(line, plan, **within)

    monkeypatch.setattr(Line, "perform", failing)
    async with app, Workshop(app, lease=LONG) as shop:
        jobs = await app.aenqueue_many([hold.job(n) for n in range(6)])
        await together(app, shop, latch, jobs)
        await shop.ended(*jobs, state="completed")
    assert batches[:2] == [6, 3]
    assert sum(batches[2:]) == 6


async def test_a_job_that_cannot_be_given_back_keeps_nobody_else(dsn: str, protocol: Protocol) -> None:
    # spec: D-25
    app = App(dsn)
    latch = Latch()

    @app.task
    async def hold(n: int) -> int:
        await latch.hold()
        return n

    async with app, Workshop(app, concurrency=1, prefetch=10, lease=LONG) as shop:
        jobs = await app.aenqueue_many([hold.job(n) for n in range(6)])
        await latch.reached()
        await shop.until(lambda: len(shop.worker._backlog) == 5)
        protocol.connection.execute(
            (REFUSING % (f"new.id = {jobs[3].id} and new.state = 'ready'", "23514", "jobs")).encode()
        )
        shop.worker.stop()
        await shop.until(lambda: shop.points["stopping"])
        latch.release()
        await shop.ended(jobs[0], state="completed")
        await shop.event(JobReleased, times=4)
        assert (await shop.event(JobRefused)).job == jobs[3].id
        shop.worker.stop(now=True)
        assert not await shop.stopped()
        protocol.connection.execute("drop trigger refuse on shiftwork.jobs")
        assert protocol.reap() == {jobs[3].id: "ready"}  # it had left, so nobody waits for the lease
    assert protocol.value("select count(*) from {}.jobs where state = 'ready' and resets = 0") == 5


async def test_an_outcome_that_can_never_be_written_does_not_keep_a_worker_from_stopping(
    dsn: str, protocol: Protocol
) -> None:
    # spec: HO-25
    app = App(dsn)

    @app.task
    async def quick() -> None: ...

    async with app, Workshop(app, lease=LONG) as shop:
        protocol.connection.execute(REFUSING % ("true", "23514", "history"))
        job = await quick.aenqueue()
        await shop.event(JobRefused, times=2)
        shop.worker.stop(now=True)
        assert not await shop.stopped()
        protocol.connection.execute("drop trigger refuse on shiftwork.history")
        assert protocol.reap() == {job.id: "ready"}


# A thread cannot be stopped.


async def test_a_stopping_worker_does_not_wait_for_a_thread_that_holds_its_jobs_row(
    dsn: str, protocol: Protocol
) -> None:
    # spec: HO-25, D-25, QU-18
    app = App(dsn)
    protocol.connection.execute("create table effects (attempt int)")
    latch, end, ended = Latch(), threading.Event(), threading.Event()
    errors: list[BaseException] = []

    @app.task(transaction=True)
    def hold(tx: psycopg.Connection[Any], context: Context) -> None:
        tx.execute("insert into effects values (%s)", (context.attempt,))
        latch._enter()
        end.wait(60)
        try:
            tx.execute("insert into effects values (%s)", (context.attempt,))
        except psycopg.Error as error:
            errors.append(error)
        finally:
            tx.close()
            ended.set()

    async with app, Workshop(app, lease=LONG, grace=timedelta()) as shop:
        job = await hold.aenqueue()
        await latch.reached()
        shop.worker.stop(now=True)
        assert not await shop.stopped()
        # Its line is cut, so its row is free: given back in the last moment, or left for the reaper at once.
        while protocol.live(job.id)["state"] != "ready":
            protocol.reap()
        end.set()
        await asyncio.to_thread(ended.wait, 30)
        assert len(errors) == 1
    found = protocol.live(job.id)
    assert (found["attempt"], found["failures"]) == (1, 0)
    assert protocol.rows("select * from effects") == []


async def test_a_claim_that_waits_for_a_lock_does_not_keep_a_worker_from_stopping(
    dsn: str, protocol: Protocol
) -> None:
    # spec: HO-25, D-25
    app = App(dsn)

    @app.task
    async def quick() -> None: ...

    async with app, Workshop(app, lease=timedelta(seconds=3), grace=timedelta(seconds=1)) as shop:
        await shop.asleep()
        with elsewhere(dsn) as holder, holder.connection.transaction():
            holder.rows("lock table {}.pauses in access exclusive mode")  # every claim waits
            job = await quick.aenqueue()
            while await asyncio.to_thread(blocked, protocol, shop.worker.id) is None:
                pass
            shop.worker.stop()
            assert await shop.stopped()
    found = protocol.live(job.id)
    assert (found["state"], found["resets"], found["failures"]) == ("ready", 0, 0)
    assert not shop.seen(JobBegan)


async def test_first_it_claims_what_is_ready_then_it_reaps_then_it_claims_what_that_gave(
    dsn: str, protocol: Protocol
) -> None:
    # spec: QU-2
    app = App(dsn)

    @app.task
    async def work() -> None: ...

    async with app:
        lost = await work.aenqueue()
        gone = protocol.register()
        assert [job["id"] for job in protocol.claim(gone).jobs] == [lost.id]
        protocol.lapse(gone)
        ready = await work.aenqueue()
        async with Workshop(app, concurrency=2) as shop:
            await shop.ended(lost, ready)
            order = [
                event.job if isinstance(event, JobBegan) else type(event).__name__
                for event in shop.events
                if isinstance(event, JobBegan | Reaped)
            ]
            assert order == [ready.id, "Reaped", lost.id]
