"""Holding on to jobs: a worker that works renews its lease whatever its handlers do; one that cannot tells them in time; what it
lost it knows of, with the reason; and what an answer that was lost on the wire would have told it, it finds out."""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from shiftwork import App, Context, Interrupted
from shiftwork.errors import DatabaseUnavailable
from shiftwork.events import (
    DatabaseAway,
    DatabaseBack,
    JobBegan,
    JobEnded,
    JobLost,
    JobReleased,
    JobStopped,
    LeaseBroken,
    LeaseLapsing,
    LeaseLost,
    Reaped,
    StraysReleased,
    WorkerStarted,
)
from shiftwork.worker import leases
from shiftwork.worker.line import Line
from shiftwork.worker.transactions import Transactions
from tests.harness import Protocol
from tests.wire import Wire
from tests.workshop import PATIENCE, Latch, Workshop

BEATS = """
create table public.beats (worker bigint, at timestamptz, was_until timestamptz);
create function public.note_beat() returns trigger language plpgsql as $$
begin
  insert into public.beats values (new.id, new.seen_at, old.lease_until);
  return null;
end $$;
create trigger note_beat after update of seen_at on shiftwork.workers for each row execute function public.note_beat();
"""


def beats(protocol: Protocol) -> int:
    found = protocol.value("select count(*) from beats")
    assert isinstance(found, int)
    return found


def never_late(protocol: Protocol, lease: float) -> bool:
    """Whether every renewal came before two thirds of the lease were over: a third later than it should, at most."""
    found = protocol.value(
        "select coalesce(bool_and(was_until - at > make_interval(secs => %s)), true) from beats", lease / 3
    )
    assert isinstance(found, bool)
    return found


# A worker that works renews its lease.


async def test_an_event_loop_that_is_blocked_does_not_keep_the_lease_from_being_renewed(
    dsn: str, protocol: Protocol
) -> None:
    # spec: SG-16, QU-6, D-13
    # fault: F5
    app = App(dsn)
    protocol.connection.execute(BEATS)

    @app.task
    async def block() -> int:
        with psycopg.connect(dsn, autocommit=True) as connection:
            before, until = beats(Protocol(connection)), time.monotonic() + PATIENCE
            while (seen := beats(Protocol(connection)) - before) < 5 and time.monotonic() < until:
                sum(range(10_000))
        return seen

    async with app, Workshop(app, lease=timedelta(seconds=1.5)) as shop:
        job = await block.aenqueue()
        await shop.ended(job, state="completed")
        assert not shop.seen(LeaseLapsing)
        assert not shop.seen(LeaseLost)
    assert never_late(protocol, 1.5)


async def test_threads_that_burn_the_processor_do_not_either(dsn: str, protocol: Protocol) -> None:
    # spec: QU-6, D-13
    # fault: F5
    app = App(dsn)
    protocol.connection.execute(BEATS)
    enough = threading.Event()

    @app.task
    def burn() -> None:
        while not enough.is_set():
            sum(range(10_000))

    async with app, Workshop(app, concurrency=4, lease=timedelta(seconds=5)) as shop:
        jobs = [await burn.aenqueue() for _ in range(4)]
        try:
            await shop.event(JobBegan, times=4)
            await asyncio.to_thread(seen_beats, dsn, 4)
        finally:
            enough.set()  # or they burn on while other tests run
        await shop.ended(*jobs, state="completed")
        assert not shop.seen(LeaseLapsing)
    assert never_late(protocol, 5)


def seen_beats(dsn: str, many: int) -> None:
    """Wait until so many more renewals have been seen."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        before = beats(Protocol(connection))
        while beats(Protocol(connection)) - before < many:
            pass


async def test_handlers_that_hold_every_session_do_not_either(dsn: str, protocol: Protocol) -> None:
    # spec: SG-16, QU-6
    # fault: F17
    app = App(dsn)
    protocol.connection.execute(BEATS)
    latch = Latch()

    @app.task(transaction=True)
    async def hold(tx: psycopg.AsyncConnection[Any]) -> None:
        await tx.execute("select 1")
        await latch.hold()

    @app.task
    async def quick() -> None: ...

    async with app, Workshop(app, concurrency=20, transactions=2, lease=timedelta(seconds=1.5)) as shop:
        held = [await hold.aenqueue() for _ in range(20)]
        await latch.reached(2)
        await asyncio.to_thread(seen_beats, dsn, 6)  # two leases
        await shop.ended(await quick.aenqueue(), state="completed")
        assert latch.most == 2
        latch.release()
        await shop.ended(*held, state="completed")
        assert not shop.seen(LeaseLapsing)
    assert protocol.value("select count(*) from {}.all_jobs where resets > 0 or attempt > 1") == 0
    assert never_late(protocol, 1.5)


# One that cannot acts before it ends.


async def test_handlers_are_told_before_a_lease_ends_that_cannot_be_renewed(
    dsn: str, protocol: Protocol
) -> None:
    # spec: SG-17, QU-9, D-13
    # fault: F6
    with Wire(dsn) as wire:
        app = App(wire.dsn)
        latch = Latch()
        left: list[float] = []
        reasons: list[str] = []

        def lease_left() -> float:
            found = protocol.value(
                "select extract(epoch from max(lease_until) - clock_timestamp())::float from {}.workers"
            )
            assert isinstance(found, float)
            return found

        @app.task
        async def hold(context: Context) -> None:
            try:
                await latch.hold()
            except asyncio.CancelledError:
                left.append(lease_left())
                reasons.append(context.cancelled or "")
                raise

        @app.task
        def hold_blocking(context: Context) -> None:
            latch._enter()
            try:
                while True:
                    context.check()
            except Interrupted as told:
                reasons.append(told.reason)
                raise
            finally:
                latch._leave()

        async with app, Workshop(app, lease=timedelta(seconds=4)) as shop:
            jobs = [await hold.aenqueue(), await hold_blocking.aenqueue()]
            await latch.reached(2)
            wire.silence(".heartbeat(")
            await shop.event(LeaseLapsing)
            for job in jobs:
                assert (await shop.event(JobStopped, job=job)).why == "lapsed"
                await shop.event(JobReleased, job=job)
            assert left[0] > 0  # the job was still its own
            assert reasons == ["lapsed", "lapsed"]
            claims = shop.points["claiming"]
            assert [(await shop.job(job)).state for job in jobs] == ["ready", "ready"]
            assert shop.points["claiming"] == claims  # nothing is claimed on a lease in doubt
            latch.release()
            wire.listen_again()
            await shop.event(DatabaseBack, part="lease")
            await shop.event(JobBegan, job=jobs[0], attempt=2)
            await shop.ended(jobs[0], state="completed")
            await shop.event(JobBegan, job=jobs[1], attempt=2)
            protocol.cancel(jobs[1].id)
            await shop.ended(jobs[1], state="cancelled")
        for job in jobs:
            found = protocol.job(job.id)
            assert (found["failures"], found["resets"]) == (0, 0)


def fails() -> dict[str, object]:
    raise RuntimeError("planted")


@pytest.mark.parametrize(
    ("does", "said"), [(fails, "RuntimeError: planted"), (threading.Event().wait, "not turned")]
)
async def test_a_worker_whose_lease_thread_fails_gives_its_jobs_back_and_ends(
    dsn: str, protocol: Protocol, monkeypatch: pytest.MonkeyPatch, does: Any, said: str
) -> None:
    # spec: SG-17, D-13
    # fault: F6
    monkeypatch.setattr(leases, "STUCK", (0.5, 0.0))
    app = App(dsn)
    latch = Latch()

    @app.task
    async def hold() -> None:
        await latch.hold()

    async with (
        app,
        Workshop(app, lease=timedelta(seconds=6), concurrency=1, grace=timedelta(hours=1)) as shop,
    ):
        held, waiting = await hold.aenqueue(), await hold.aenqueue()
        await latch.reached()
        shop.worker._leases._says = does
        shop.worker._leases.nudge()
        broken = await shop.event(LeaseBroken, running=1)
        assert said in broken.error
        assert (await shop.event(JobStopped, job=held)).why == "lapsed"
        assert not await shop.stopped()  # exit code 1
        assert not shop.seen(JobBegan, job=waiting)
        for job in (held, waiting):
            found = protocol.live(job.id)
            assert (found["state"], found["failures"], found["resets"]) == ("ready", 0, 0)
        assert protocol.reap() == {}  # given back, and not taken back


async def test_a_worker_that_was_given_up_registers_anew_and_goes_on(dsn: str, protocol: Protocol) -> None:
    # spec: SG-17, QU-9, D-16, D-27
    app = App(dsn)
    latch = Latch()

    @app.task
    async def hold(context: Context) -> int:
        await latch.hold()
        return context.attempt

    async with app, Workshop(app, concurrency=1, lease=timedelta(seconds=60)) as shop:
        job = await hold.aenqueue()
        await latch.reached()
        former = shop.worker.id
        protocol.lapse(former)
        assert protocol.reap() == {job.id: "ready"}  # which tells it at once

        await shop.event(LeaseLost, worker=former)
        await shop.event(JobStopped, job=job, why="lost")
        await shop.event(JobLost, job=job, attempt=1)
        await shop.event(WorkerStarted, times=2)
        assert shop.worker.id != former
        latch.release()
        await shop.ended(job, state="completed")
        assert await job.aresult(timeout=30) == 2
    found = protocol.job(job.id)
    assert (found["resets"], found["failures"], found["worker"]) == (1, 0, shop.worker.id)


async def test_a_worker_whose_row_was_deleted_registers_anew_and_finds_its_jobs(
    dsn: str, protocol: Protocol
) -> None:
    # spec: D-27
    # fault: F25
    app = App(dsn)
    latch = Latch()

    @app.task
    async def hold() -> None:
        await latch.hold()

    async with app, Workshop(app, lease=timedelta(seconds=2)) as shop:
        job = await hold.aenqueue()
        await latch.reached()
        protocol.rows("delete from {}.workers")
        await shop.event(JobLost, job=job)
        await shop.event(Reaped)
        latch.release()
        await shop.ended(job, state="completed")


async def test_a_blocked_event_loop_hears_all_of_it_afterwards(dsn: str, protocol: Protocol) -> None:
    # fault: F5
    app = App(dsn)
    protocol.connection.execute(BEATS)
    former: list[int] = []

    @app.task
    async def block() -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            verbs = Protocol(connection)
            if not former:
                former.append(shop.worker.id)
                before = beats(verbs)
                verbs.lapse(shop.worker.id)
                verbs.reap()
                # A worker that was given up renews nothing; it asks again, and again.
                while verbs.value("select count(*) from {}.workers where gone_at is null"):
                    pass
                assert beats(verbs) - before <= 1

    async with app, Workshop(app, lease=timedelta(seconds=1)) as shop:
        job = await block.aenqueue()
        await shop.event(LeaseLost)
        await shop.ended(job, state="completed")
        assert shop.worker.id != former[0]


# What is lost, and why.


@pytest.mark.parametrize("why", ["taken", "ended", "missing"])
async def test_a_handler_is_told_why_its_job_is_lost(dsn: str, protocol: Protocol, why: str) -> None:
    # spec: QU-9, QU-27
    app = App(dsn)
    latch = Latch()

    @app.task
    async def hold(context: Context) -> None:
        await latch.hold()

    async with app, Workshop(app, lease=timedelta(seconds=5)) as shop:
        job = await hold.aenqueue()
        await latch.reached()
        other = protocol.register(lease=60)
        match why:
            case "taken":
                protocol.rows("update {}.jobs set worker = %s, attempt = 2", other)
            case "ended":
                protocol.settle(shop.worker.id, {"id": job.id, "attempt": 1, "state": "failed"})
            case "missing":
                protocol.rows("delete from {}.jobs")
        stopped = await shop.event(JobStopped, job=job)
        assert (stopped.why, stopped.reason) == ("lost", why)
        assert (await shop.event(JobLost, job=job)).why == why
        assert not shop.seen(JobEnded)


async def test_of_two_attempts_of_one_job_only_one_runs_here(dsn: str, protocol: Protocol) -> None:
    # spec: SG-33
    app = App(dsn)
    go, arrived = threading.Event(), threading.Semaphore(0)
    inside: list[int] = []

    @app.task
    def hold(context: Context) -> list[int]:
        inside.append(context.attempt)
        arrived.release()
        now = list(inside)
        go.wait(30)
        inside.remove(context.attempt)
        return now

    async with app, Workshop(app, concurrency=4, lease=timedelta(seconds=60)) as shop:
        job = await hold.aenqueue()
        await shop.event(JobBegan, job=job)
        await asyncio.to_thread(arrived.acquire)
        protocol.lapse(shop.worker.id)
        protocol.reap()
        # The thread goes on. The job is claimed by this very process, and given back, until that has ended.
        released = await shop.event(JobReleased, job=job)
        assert released.attempt > 1
        go.set()
        await shop.event(JobLost, job=job, attempt=1)
        await shop.ended(job, state="completed")
        assert len(await job.aresult(timeout=30)) == 1
    assert protocol.job(job.id)["failures"] == 0


# Answers that are lost on the wire.


async def test_what_a_claim_took_without_telling_is_found_and_given_back(
    dsn: str, protocol: Protocol
) -> None:
    # spec: SG-33, D-16
    # fault: F11
    with Wire(dsn) as wire:
        app = App(wire.dsn)

        @app.task
        async def quick() -> None: ...

        async with app, Workshop(app, lease=timedelta(seconds=60)) as shop:
            await shop.asleep()
            wire.losing(".take(")
            claims, then = shop.points["claiming"], []
            shop.worker._subscribers.append(lambda event: then.append((type(event), shop.points["claiming"])))
            jobs = await app.aenqueue_many([quick.job() for _ in range(3)])
            strays = await shop.event(StraysReleased)
            assert set(strays.jobs) == {job.id for job in jobs}
            assert dict(then)[StraysReleased] == claims + 1  # the one that was lost, and none since
            assert wire.said[".take("] == 1
            await shop.ended(*jobs, state="completed")
            assert [event.part for event in shop.seen(DatabaseAway)] == ["claiming"]
    for job in jobs:
        found = protocol.job(job.id)
        assert (found["attempt"], found["failures"], found["resets"]) == (2, 0, 0)


async def test_nothing_is_claimed_before_what_was_lost_is_found(
    dsn: str, protocol: Protocol, monkeypatch: pytest.MonkeyPatch
) -> None:
    # spec: SG-33
    app = App(dsn)
    perform = Line.perform
    said: list[str] = []
    losing = [False]

    @app.task
    async def quick() -> None: ...

    async def losing_answers(line: Line, plan: Any, **within: Any) -> Any:
        name = plan.gi_code.co_name
        if name in ("claim", "heartbeat"):
            said.append(name)
        answer = await perform(line, plan, **within)
        if losing[0] and name == "claim" and answer.taken:
            losing[0] = False
            said.append("lost")
            raise DatabaseUnavailable("lost on the wire", maybe_committed=True)
        if "lost" in said and name == "heartbeat" and said.count("failed") < 2:
            said[-1] = "failed"
            raise DatabaseUnavailable("lost on the wire", maybe_committed=True)
        return answer

    monkeypatch.setattr(Line, "perform", losing_answers)
    async with app, Workshop(app, lease=timedelta(seconds=60)) as shop:
        await shop.asleep()
        losing[0] = True
        job = await quick.aenqueue()
        await shop.ended(job, state="completed")
        after = said[said.index("lost") + 1 :]
        assert after[:4] == ["failed", "failed", "heartbeat", "claim"]
    assert protocol.job(job.id)["attempt"] in (2, 3)


async def test_an_outcome_whose_answer_was_lost_is_written_once(dsn: str, protocol: Protocol) -> None:
    # spec: HO-10, D-16
    # fault: F11
    with Wire(dsn) as wire:
        app = App(wire.dsn)
        ran: list[int] = []

        @app.task
        async def quick(n: int) -> None:
            ran.append(n)

        async with app, Workshop(app) as shop:
            await shop.asleep()
            wire.losing(".settle(")
            jobs = await app.aenqueue_many([quick.job(n) for n in range(3)])
            await shop.ended(*jobs, state="completed")
            assert wire.said[".settle("] == 1
            assert (await shop.event(DatabaseAway)).part == "settling"
            assert not shop.seen(JobLost)
        assert sorted(ran) == [0, 1, 2]
    assert protocol.value("select count(*) from {}.history where attempt = 1") == 3


async def test_a_commit_whose_answer_was_lost_is_no_reason_to_run_again(dsn: str, protocol: Protocol) -> None:
    # spec: QU-18, D-1
    # fault: F11
    protocol.connection.execute("create table effects (attempt int)")
    with Wire(dsn) as wire:
        app = App(wire.dsn)

        @app.task(transaction=True)
        async def transfer(tx: psycopg.AsyncConnection[Any], context: Context) -> None:
            await tx.execute("insert into effects values (%s)", (context.attempt,))

        async with app, Workshop(app) as shop:
            await shop.asleep()
            wire.losing(".conclude(")
            job = await transfer.aenqueue()
            await shop.until(lambda: job.id not in shop.worker.holding and shop.seen(JobBegan))
            assert wire.said[".conclude("] == 1
            await shop.ended(job, state="completed")
            assert not shop.seen(JobLost), "what is told is what happened"
    assert protocol.rows("select * from effects") == [{"attempt": 1}]
    assert protocol.state(job.id) == "completed"


async def test_nor_is_the_answer_of_a_routine_that_was_lost(dsn: str, protocol: Protocol) -> None:
    # spec: D-1
    # fault: F11
    protocol.connection.execute(
        "create table effects (payload jsonb); create procedure act(payload jsonb) language sql as "
        "'insert into effects values (payload)'"
    )
    with Wire(dsn) as wire:
        app = App(wire.dsn)
        act = app.sql_task("act", handler="public.act(jsonb)")
        async with app, Workshop(app) as shop:
            await shop.asleep()
            wire.losing(".run_job(")
            job = await act.aenqueue()
            await shop.ended(job, state="completed")
            assert wire.said[".run_job("] == 1
            assert not shop.seen(JobLost), "what is told is what happened"
    assert protocol.value("select count(*) from effects") == 1
    assert protocol.state(job.id) == "completed"


async def test_a_routine_that_has_ended_is_not_lost_because_a_heartbeat_was_quicker(
    dsn: str, protocol: Protocol, monkeypatch: pytest.MonkeyPatch
) -> None:
    # spec: D-1
    protocol.connection.execute("create procedure act(payload jsonb) language sql as 'select 1'")
    latch, run_job = Latch(), Transactions.run_job

    async def answered_late(self: Transactions, *given: Any) -> Any:
        answer = await run_job(self, *given)
        await latch.hold()
        return answer

    monkeypatch.setattr(Transactions, "run_job", answered_late)
    app = App(dsn)
    act = app.sql_task("act", handler="public.act(jsonb)")
    async with app, Workshop(app) as shop:
        job = await act.aenqueue()
        await latch.reached()
        assert protocol.state(job.id) == "completed"
        shop.worker._leases.nudge()
        await shop.event(JobStopped, job=job)
        await shop.ended(job, state="completed")
        assert not shop.seen(JobLost), "what is told is what happened"


# A database that is away.


async def test_outcomes_wait_for_a_database_that_is_away(dsn: str, protocol: Protocol) -> None:
    # spec: HO-10, QU-15
    with Wire(dsn) as wire:
        app = App(wire.dsn)
        latch = Latch()

        @app.task
        async def hold(n: int) -> int:
            await latch.hold()
            return n

        async with app, Workshop(app, lease=timedelta(seconds=60)) as shop:
            jobs = await app.aenqueue_many([hold.job(n) for n in range(5)])
            await latch.reached(5)
            wire.refuse()
            latch.release()
            await shop.event(DatabaseAway, part="settling")
            assert protocol.value("select count(*) from {}.jobs where state = 'running'") == 5
            wire.accept()
            await shop.ended(*jobs, state="completed")
            assert [await job.aresult(timeout=30) for job in jobs] == [0, 1, 2, 3, 4]
            await shop.event(DatabaseBack, part="settling")
            assert not shop.seen(LeaseLost)
    assert protocol.value("select count(*) from {}.history where attempt = 1") == 5


async def test_a_worker_that_was_away_for_longer_than_its_lease_loses_its_jobs_and_nothing_else(
    dsn: str, protocol: Protocol
) -> None:
    # spec: SG-17, QU-15, D-16
    with Wire(dsn) as wire:
        app = App(wire.dsn)
        latch = Latch()

        @app.task
        async def hold(context: Context) -> int:
            await latch.hold()
            return context.attempt

        async with app, Workshop(app, lease=timedelta(seconds=1)) as shop:
            job = await hold.aenqueue()
            await latch.reached()
            wire.refuse()
            await shop.event(JobStopped, job=job, why="lapsed")
            protocol.lapse(shop.worker.id)
            assert protocol.reap() == {job.id: "ready"}
            latch.release()
            wire.accept()
            await shop.event(JobLost, job=job)
            await shop.ended(job, state="completed")
            assert await job.aresult(timeout=30) == 2


async def test_every_session_may_be_ended_at_any_time(dsn: str, protocol: Protocol) -> None:
    # spec: QU-15, HO-28
    # fault: F7
    app = App(dsn)
    ran: list[int] = []

    @app.task
    async def quick(n: int) -> None:
        ran.append(n)

    async with app, Workshop(app, lease=timedelta(seconds=60)) as shop:
        for turn in range(5):
            await shop.asleep()
            assert protocol.value(
                "select count(pg_terminate_backend(pid)) from pg_stat_activity"
                " where datname = current_database() and application_name = %s",
                f"shiftwork {shop.worker.id}",
            )
            await shop.ended(
                *await app.aenqueue_many([quick.job(turn) for _ in range(10)]), state="completed"
            )
        assert not shop.seen(LeaseLost)
    assert len(ran) == 50
