"""How much a worker does at once, from where, and when it has done enough."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from datetime import timedelta
from types import TracebackType
from typing import Any

import psycopg
import pytest

from shiftwork import App, Context, State
from shiftwork.events import (
    Claimed,
    JobBegan,
    JobEnded,
    JobLost,
    JobReleased,
    WorkerStarted,
    WorkerStopped,
    WorkerStopping,
)
from shiftwork.settings import Settings
from shiftwork.worker.budgets import Budgets
from shiftwork.worker.hooks import Round
from shiftwork.worker.lanes import Lanes
from tests import pooler
from tests.workshop import Latch, Workshop


@pytest.fixture
def app(dsn: str) -> App:
    return App(dsn)


class Crowd:
    """Counts who is inside, and how many there were at most."""

    def __init__(self) -> None:
        self.inside = 0
        self.most = 0

    def __enter__(self) -> None:
        self.inside += 1
        self.most = max(self.most, self.inside)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.inside -= 1

    async def mingle(self) -> None:
        """Be inside for a while, in which others may come."""
        with self:
            for _ in range(5):
                await asyncio.sleep(0)


# Where it takes from.


async def test_queues_are_served_in_their_order(app: App) -> None:
    # spec: HO-3, HO-5, SH-8, D-22
    begun: list[str] = []

    @app.task
    async def work(name: str) -> None:
        begun.append(name)

    jobs = [
        await work.using(queue=queue).aenqueue(queue)
        for _ in range(3)
        for queue in ("last", "first", "second")
    ]
    async with app, Workshop(app, queues="first,second,last", concurrency=2) as shop:
        await shop.ended(*jobs)
        assert begun == ["first"] * 3 + ["second"] * 3 + ["last"] * 3


async def test_what_one_claim_takes_and_what_a_worker_holds_are_bounded(app: App) -> None:
    # spec: HO-5, HO-14, HO-15
    latch = Latch()
    claims: list[int] = []

    @app.task
    async def work() -> None:
        await latch.hold()

    @app.before_claim
    def in_small_batches(claim: Round) -> None:
        claim.limit(2)  # in all
        claim.limit(1, queue="low")  # of one queue

    for queue in ("low", "high"):
        for _ in range(10):
            await work.using(queue=queue).aenqueue()
    settings: dict[str, Any] = {
        "queues": "high,low",
        "concurrency": 4,
        "prefetch": 1,
        "queue_concurrency": "high=3",
    }
    async with app, Workshop(app, **settings) as shop:
        shop.worker.subscribe(
            lambda event: claims.append(sum(event.tasks.values())) if isinstance(event, Claimed) else None
        )
        await latch.reached(4)
        await shop.until(lambda: len(shop.worker.holding) == 5, "one more is fetched ahead")
        held = Counter(run.queue for run in shop.worker.holding.values())
        assert held["high"] == 3, "the first queue goes first, up to what it may have"
        assert max(claims) == 2
        assert latch.inside == 4
        latch.release()
        await shop.event(JobEnded, times=20)
        assert max(claims) == 2
        assert latch.most == 4


def test_queues_are_served_by_weight() -> None:
    # spec: SH-8
    settings = Settings.read({}, queues="heavy=6,middle=3,light=1")
    lanes = Lanes(settings, {}, settings.queues)
    random.seed(7)
    first = Counter(next(iter(lanes.wish())) for _ in range(10_000))
    assert first["heavy"] == pytest.approx(6000, rel=0.05)
    assert first["middle"] == pytest.approx(3000, rel=0.05)
    assert first["light"] == pytest.approx(1000, rel=0.1)
    assert all(set(lanes.wish()) == {"heavy", "middle", "light"} for _ in range(100)), "all are served"


def test_what_is_rare_among_the_work_of_others_is_looked_for_less_often(app: App) -> None:
    @app.task
    async def common() -> None: ...

    @app.task(concurrency=2)
    async def rare() -> None: ...

    lanes = Lanes(Settings.read({}), app.tasks, {"default": None})
    one, other = sorted(lanes.all, key=lambda lane: "rare" in (lane.tasks or ()))
    assert len(lanes.in_turn()) == 3, "as long as nothing is known, all together first"
    other.looked(0, 2, 1000.0, more=True)
    assert set(lanes.in_turn()) == {one, other}, "nobody else has work"
    one.looked(500, 500, 0.01, more=True)
    assert lanes.in_turn() == [one], "it took long, and found nothing"
    one.looked(0, 500, 0.01, more=False)
    assert set(lanes.in_turn()) == {one, other}, "now nobody else has work"
    one.looked(500, 500, 0.01, more=True)
    other.looked(2, 2, 1000.0, more=True)
    other.rests_until = 0.0
    assert set(lanes.in_turn()) == {one, other}, "it found what it wanted"
    other.looked(0, 2, 1000.0, more=True)
    assert other.rests_until < time.monotonic() + 2, (
        "one slow answer of the database is no reason to forget them"
    )


async def test_a_worker_whose_queues_are_full_lets_its_jobs_go_on_while_a_lane_rests(app: App) -> None:
    latch = Latch()

    @app.task
    async def common() -> None:
        await latch.hold()

    @app.task(concurrency=2)
    async def rare() -> None: ...

    async with app, Workshop(app, concurrency=10, queue_concurrency="default=1") as shop:
        jobs = [await common.aenqueue(), await common.aenqueue()]
        await latch.reached()
        for lane in shop.worker._lanes.all:
            lane.more = lane.found = True
            if "rare" in (lane.tasks or ()):
                lane.rests_until = time.monotonic() + 3600
        shop.worker._wake()
        for _ in range(10):  # it looks, and finds no room
            await asyncio.sleep(0)
        latch.release()
        await shop.ended(*jobs)


def test_queues_of_which_enough_was_claimed_lately_stand_back_behind_the_others() -> None:
    # spec: SG-39, A-22
    settings = Settings.read({}, queues="heavy=4,light=1,free=1", queue_budgets="heavy=50,light=20")
    now = 1000.0
    budgets = Budgets(settings.queue_budgets, lambda: now)
    lanes = Lanes(settings, {}, settings.queues, budgets)
    random.seed(7)

    def wishes() -> list[dict[str, int | None]]:
        return [lanes.wish() for _ in range(2_000)]

    budgets.count(["heavy"] * 40 + ["free"] * 1_000)
    first = Counter(next(iter(wish)) for wish in wishes())
    assert first["heavy"] == pytest.approx(2_000 * 4 / 6, rel=0.1), "among those under budget weights decide"
    assert all(wish == {"heavy": 10, "light": 20, "free": None} for wish in wishes()), "up to what is left"

    now += 200
    budgets.count(["heavy"] * 10)
    assert all([*wish.items()][-1] == ("heavy", None) for wish in wishes()), "over it, last and unbounded"
    first = Counter(next(iter(wish)) for wish in wishes())
    assert first["light"] == pytest.approx(1_000, rel=0.1)

    budgets.count(["light"] * 30)
    assert all(next(iter(wish)) == "free" for wish in wishes()), "what has no budget is never over it"
    second = Counter([*wish][1] for wish in wishes())
    assert second["heavy"] == pytest.approx(2_000 * 4 / 5, rel=0.1), (
        "all that are left are over: weights again"
    )

    now += 106  # the first forty are forgotten, the others are not
    assert all(wish["heavy"] == 40 and [*wish][-1] == "light" for wish in wishes())
    now += 200
    assert all(wish == {"heavy": 50, "light": 20, "free": None} for wish in wishes())


def test_what_a_budget_remembers_does_not_grow() -> None:
    # spec: SG-39
    now = 0.0
    budgets = Budgets({"mail": 1_000}, lambda: now)
    for _ in range(10_000):
        budgets.count(["mail"])
        now += 1.0
        assert budgets.left()["mail"] >= 695, "one a second, for five minutes"
    assert budgets.left()["mail"] <= 700
    assert len(budgets._steps) <= 62


async def test_a_budget_turns_the_order_of_queues_and_leaves_no_slot_idle(app: App) -> None:
    # spec: SG-39, A-22
    latch = Latch()
    began: list[str] = []

    @app.task
    async def work(context: Context) -> None:
        began.append(context.job.queue)
        await latch.hold()

    for queue in ["mail"] * 6 + ["default"] * 2:
        await work.using(queue=queue).aenqueue()
    settings = {"queues": "mail,default", "queue_budgets": "mail=3", "concurrency": 8}
    async with app, Workshop(app, **settings) as shop:
        await latch.reached(8)
        assert began == ["mail"] * 3 + ["default"] * 2 + ["mail"] * 3
        assert shop.points["declared"] == 0, "it never thought that nothing was left"
        latch.release()
        await shop.event(JobEnded, times=8)


async def test_a_queue_that_is_full_hides_no_other_that_has_only_met_its_budget(app: App) -> None:
    # spec: SG-39, A-22
    latch = Latch()

    @app.task
    async def work() -> None:
        await latch.hold()

    for queue in ["bulk"] * 2 + ["mail"] * 5:
        await work.using(queue=queue).aenqueue()
    limits = {"queue_concurrency": "bulk=1", "queue_budgets": "mail=2", "concurrency": 6}
    async with app, Workshop(app, queues="bulk,mail", **limits) as shop:
        await latch.reached(6)
        assert shop.points["declared"] == 0, "it never thought that nothing was left"
        assert Counter(run.queue for run in shop.worker.holding.values()) == {"bulk": 1, "mail": 5}
        latch.release()
        await shop.event(JobEnded, times=7)


async def test_a_queue_never_has_more_at_once_than_it_may(app: App) -> None:
    # spec: QU-1, D-22
    latch, crowd = Latch(), Crowd()

    @app.task(queue="mail")
    async def send() -> None:
        with crowd:
            await latch.hold()
        await crowd.mingle()

    @app.task
    async def other() -> None: ...

    jobs = [await send.aenqueue() for _ in range(9)]
    limits = {"queue_concurrency": "mail=2", "concurrency": 5, "prefetch": 4}
    async with app, Workshop(app, queues="mail,default", **limits) as shop:
        await latch.reached(2)
        others = [await other.aenqueue() for _ in range(5)]
        await shop.ended(*others)
        assert crowd.inside == 2
        latch.release()
        await shop.ended(*jobs)
        assert crowd.most == 2


async def test_room_that_a_queue_gains_while_a_claim_is_made_is_used_at_once(app: App) -> None:
    # spec: QU-1, HO-19
    latches = [Latch(), Latch()]

    @app.task(queue="mail")
    async def send(number: int) -> None:
        if number < 2:
            await latches[number].hold()

    async with app, Workshop(app, queues="mail", queue_concurrency="mail=2", concurrency=5) as shop:
        first = await send.aenqueue(0)
        await latches[0].reached()
        await shop.asleep()
        claimed, declared = shop.gate("claimed"), shop.gate("declared")
        others = await app.aenqueue_many([send.job(number) for number in (1, 2, 3)])
        for latch, before in zip(latches, [first, others[0]], strict=True):
            await claimed.reached()  # of the two places one was free: it has taken one job, and left others
            latch.release()
            await shop.ended(before)
            shop.gate("declared")
            claimed.open()
            if latch is latches[0]:
                await latches[1].reached()
                await declared.reached()  # as it believes, nothing is left: it looks for the last time
                shop.gate("claimed")
                declared.open()
        declared.open()
        await shop.ended(*others)


async def test_a_task_never_runs_more_often_at_once_than_it_may(app: App) -> None:
    # spec: QU-1, D-22
    latch, crowds = Latch(), {"by_task": Crowd(), "by_setting": Crowd()}

    @app.task(concurrency=3)
    async def by_task() -> None:
        with crowds["by_task"]:
            await latch.hold()
        await crowds["by_task"].mingle()

    @app.task(concurrency=5)
    async def by_setting() -> None:
        with crowds["by_setting"]:
            await latch.hold()
        await crowds["by_setting"].mingle()

    @app.task
    async def other() -> None: ...

    jobs = [await task.aenqueue() for _ in range(8) for task in (by_task, by_setting)]
    async with app, Workshop(app, task_concurrency="by_setting=1", prefetch=3) as shop:
        await latch.reached(4)
        others = [await other.aenqueue() for _ in range(5)]
        await shop.ended(*others)
        await shop.asleep()  # and does not spin, although there are jobs that it may not take
        assert {name: crowd.inside for name, crowd in crowds.items()} == {"by_task": 3, "by_setting": 1}
        latch.release()
        await shop.ended(*jobs)
        assert {name: crowd.most for name, crowd in crowds.items()} == {"by_task": 3, "by_setting": 1}


async def test_transactional_tasks_run_only_as_far_as_there_are_sessions(app: App) -> None:
    # spec: D-22, SH-10
    latch, crowd = Latch(), Crowd()

    @app.task(transaction=True)
    async def work(tx: psycopg.AsyncConnection[Any]) -> None:
        with crowd:
            await latch.hold()
        await crowd.mingle()

    @app.task
    async def other() -> None: ...

    jobs = [await work.aenqueue() for _ in range(6)]
    async with app, Workshop(app, transactions=2) as shop:
        await latch.reached(2)
        free = await other.aenqueue()
        await shop.ended(free)
        await shop.asleep()
        assert crowd.inside == 2
        claimed = "select count(*) from shiftwork.jobs where state = 'running'"
        assert await shop.value(claimed) == 2, "what cannot run is not claimed"
        latch.release()
        await shop.ended(*jobs)
        assert crowd.most == 2
        await shop.worker._leases.reconcile()
        assert (
            await sessions(shop)
            == (await shop.event(WorkerStarted)).connections
            == expected(shop, transactions=2)
        )


async def test_nobody_starves_beside_a_busy_task(app: App) -> None:
    # spec: SH-8
    latch, over = Latch(), False

    @app.task
    async def busy() -> None:
        if not over:
            await busy.aenqueue()
            await asyncio.sleep(0.01)  # else its slot is free again before others are looked for

    @app.task(concurrency=1)
    async def limited() -> None:
        await latch.hold()

    @app.task(transaction=True)
    async def transacted(tx: psycopg.AsyncConnection[Any]) -> None: ...

    long = [await limited.aenqueue() for _ in range(2)]
    crowd = [await busy.aenqueue() for _ in range(40)]  # and as many at every later time
    few = [await transacted.aenqueue() for _ in range(3)]
    async with app, Workshop(app, concurrency=2) as shop:
        await shop.ended(*few, state="completed")  # the slot that is left is theirs in turn
        latch.release()
        await shop.ended(*long, state="completed")
        over = True
        await shop.ended(*crowd)


async def test_without_a_backlog_tasks_with_and_without_limits_keep_their_order(app: App) -> None:
    # spec: D-22
    begun: list[str] = []

    @app.task
    async def free() -> None:
        begun.append("free")

    @app.task(concurrency=1)
    async def limited() -> None:
        begun.append("limited")

    jobs = [await task.aenqueue() for _ in range(5) for task in (free, limited)]
    async with app, Workshop(app, concurrency=1) as shop:
        await shop.ended(*jobs)
        assert begun == ["free", "limited"] * 5


# How much of it.


async def sessions(shop: Workshop) -> int:
    return await asyncio.to_thread(
        pooler.connections, shop.app.settings.dsn or "", f"shiftwork {shop.worker.id}"
    )


async def no_sessions(shop: Workshop) -> bool:
    return await sessions(shop) == 0


def expected(shop: Workshop, transactions: int = 0) -> int:
    """To claim, to settle, for the lease, and to listen if it does."""
    return 3 + shop.worker.settings.notify + transactions


async def test_a_thousand_jobs_at_once_need_no_more_connections_than_one(app: App) -> None:
    # spec: SH-10, HO-1, QU-1, A-24
    latch = Latch()

    @app.task
    async def first() -> None: ...

    @app.task
    async def wait() -> None:
        await latch.hold()

    async with app, Workshop(app, concurrency=1000) as shop:
        job = await first.aenqueue()
        await shop.ended(job)
        await shop.worker._leases.reconcile()
        stated = (await shop.event(WorkerStarted)).connections
        assert await sessions(shop) == stated == expected(shop)
        jobs = await app.aenqueue_many(wait.job() for _ in range(1000))
        await latch.reached(1000)
        await shop.worker._leases.reconcile()
        assert latch.inside == 1000
        assert await sessions(shop) == stated
        latch.release()
        await shop.ended(*jobs)
        assert await sessions(shop) == stated


async def test_nothing_is_claimed_while_all_slots_are_busy_and_a_freed_slot_claims_at_once(app: App) -> None:
    # spec: SG-27, SG-28, HO-3, HO-19, QU-1, QU-3, SH-9
    latch = Latch()

    @app.task
    async def wait() -> None:
        await latch.hold()

    async with app, Workshop(app, concurrency=2) as shop:
        jobs = [await wait.aenqueue() for _ in range(2)]
        await latch.reached(2)
        claims = shop.points["claiming"]
        jobs += [await wait.aenqueue() for _ in range(3)]
        for _ in range(20):
            shop.worker._wake()
            await asyncio.sleep(0)
        assert shop.points["claiming"] == claims
        assert await shop.value("select count(*) from shiftwork.jobs where state = 'ready'") == 3
        latch.release()
        await shop.ended(*jobs)
        assert latch.most == 2


@pytest.mark.parametrize("plain", [False, True])
async def test_a_slot_that_is_freed_alone_is_filled_while_the_others_run_on(app: App, plain: bool) -> None:
    # spec: HO-19, QU-1, QU-3
    latch = Latch()

    @app.task
    async def wait() -> None:
        await latch.hold()

    @app.task
    def plain_quick() -> None: ...

    @app.task
    async def async_quick() -> None: ...

    quick = plain_quick if plain else async_quick

    async with app, Workshop(app, concurrency=2) as shop:
        slow = await wait.aenqueue()
        await latch.reached()
        jobs = await app.aenqueue_many(quick.job() for _ in range(50))
        await shop.ended(*jobs)
        assert not shop.seen(JobEnded, job=slow)
        latch.release()


@pytest.mark.parametrize("waits", [False, True])
async def test_prefetched_jobs_begin_as_slots_are_freed_though_there_is_room_to_fetch_more(
    app: App, waits: bool
) -> None:
    @app.task
    async def work(number: int) -> None:
        if waits:
            await asyncio.sleep(0.001)

    jobs = await app.aenqueue_many([work.job(number) for number in range(40)])
    async with app, Workshop(app, concurrency=8, prefetch=50, stop_when_idle=True) as shop:
        await shop.ended(*jobs)


async def test_prefetched_jobs_begin_in_their_order_and_are_given_back_at_the_end(app: App) -> None:
    # spec: D-22, D-25, HO-8, QU-14
    latch = Latch()
    begun: list[int] = []

    @app.task
    async def work(context: Context, number: int) -> None:
        begun.append(number)
        if number in {0, 3}:
            await latch.hold()

    jobs = [await work.aenqueue(number) for number in range(8)]
    async with app, Workshop(app, concurrency=1, prefetch=3) as shop:
        await latch.reached()
        await shop.until(lambda: len(shop.worker._backlog) == 3, "three are fetched ahead")
        rows = await shop.rows(
            "select id, started_at from shiftwork.jobs where state = 'running' order by id"
        )
        assert [(row["id"], row["started_at"] is not None) for row in rows] == [
            (job.id, number == 0) for number, job in enumerate(jobs[:4])
        ]
        latch.release()
        latch = Latch()
        await latch.reached()
        assert begun == [0, 1, 2, 3]
        started = await shop.value(
            "select started_at is not null from shiftwork.jobs where id = %s", jobs[3].id
        )
        assert started
        await shop.until(lambda: len(shop.worker._backlog) == 3, "three are fetched ahead")
        shop.worker.stop()
        await shop.event(JobReleased, 3)
        latch.release()
        assert await shop.stopped()
        assert begun == [0, 1, 2, 3]
        for job in jobs[4:]:
            found = await job.ainfo()
            assert (found.state, found.failures, found.resets, found.attempts) == (State.READY, 0, 0, ())


async def test_a_job_that_is_claimed_again_while_it_runs_does_not_run_twice(app: App) -> None:
    # spec: SG-33
    latch = Latch()

    @app.task
    async def work(context: Context) -> int:
        if context.attempt == 1:
            await latch.hold()
        return context.attempt

    async with app, Workshop(app, concurrency=3) as shop:
        job = await work.aenqueue()
        await latch.reached()
        await shop.rows(
            "update shiftwork.jobs set state = 'ready', worker = null, claim = null, claimed_at = null, started_at = null"
        )
        shop.worker._wake()
        await shop.event(JobLost, job=job, attempt=1)
        await shop.ended(job, state="completed")
        assert [event.attempt for event in shop.seen(JobReleased, job=job)] == [2]
        assert await job.aresult(timeout=30) == 3


# When it has done enough.


async def test_a_worker_may_stop_when_nothing_is_left(app: App) -> None:
    # spec: SG-29, SH-30
    @app.task
    async def work(context: Context, left: int) -> None:
        if left:
            context.enqueue(work.job(left - 1))

    job = await work.aenqueue(3)
    later = await work.using(delay=timedelta(days=1)).aenqueue(0)
    async with app, Workshop(app, stop_when_idle=True) as shop:
        assert await shop.stopped()
        assert len(shop.seen(JobEnded)) == 4, "what jobs enqueue is done as well"
        assert (await job.ainfo()).state is State.COMPLETED
        assert (await later.ainfo()).state is State.SCHEDULED


async def test_a_worker_is_not_done_if_what_just_ended_left_more_to_do(app: App) -> None:
    # spec: SG-29
    latch = Latch()

    @app.task
    async def work(context: Context, left: int) -> None:
        if left:
            await latch.hold()
            context.enqueue(work.job(left - 1))

    await work.aenqueue(1)
    async with app, Workshop(app, stop_when_idle=True) as shop:
        await latch.reached()
        gate = shop.gate("claimed")
        shop.worker._wake()
        await gate.reached()  # a claim that has found nothing
        latch.release()
        await shop.event(JobEnded)
        await shop.until(lambda: not shop.worker.holding, "nothing is held")
        gate.open()
        await shop.stopped()
        assert len(shop.seen(JobEnded)) == 2


async def test_a_worker_may_stop_after_so_many_jobs(app: App) -> None:
    # spec: SG-29
    @app.task
    async def work() -> None:
        await asyncio.sleep(0)

    @app.task
    def plain() -> None: ...

    jobs = [await task.aenqueue() for _ in range(4) for task in (work, plain)]
    async with app, Workshop(app, concurrency=2, prefetch=2, max_jobs=5) as shop:
        assert await shop.stopped()
        ended = {event.job for event in shop.seen(JobEnded, state="completed")}
        assert ended == {job.id for job in jobs[:5]}
        assert [(await job.ainfo()).attempt for job in jobs[5:]] == [0] * 3
        assert shop.seen(WorkerStopped)[0].jobs == 5


async def test_a_worker_may_stop_after_some_time_and_lets_running_jobs_end(app: App) -> None:
    # spec: SG-29
    latch = Latch()

    @app.task
    async def work() -> None:
        await latch.hold()

    async with app, Workshop(app, max_time=timedelta(milliseconds=300)) as shop:
        job = await work.aenqueue()
        await latch.reached()
        stopping = await shop.event(WorkerStopping)
        assert (stopping.why, stopping.running) == ("its time is over", 1)
        latch.release()
        assert await shop.stopped()
        assert shop.seen(JobEnded, job=job)[0].state == "completed"


@pytest.mark.parametrize("plain", [False, True])
async def test_stopping_waits_for_what_runs_and_gives_back_what_has_not_begun(app: App, plain: bool) -> None:
    # spec: SG-30, QU-14, SH-24, HO-25, D-25
    latch = Latch()

    @app.task
    def plain_work() -> str:
        latch.hold_blocking()
        return "done"

    @app.task
    async def async_work() -> str:
        await latch.hold()
        return "done"

    work = plain_work if plain else async_work

    async with app, Workshop(app, concurrency=2, prefetch=2, lease=timedelta(minutes=1)) as shop:
        jobs = [await work.aenqueue() for _ in range(6)]
        await latch.reached(2)
        await shop.until(lambda: len(shop.worker._backlog) == 2, "two are fetched ahead")
        shop.worker.stop("enough")
        stopping = await shop.event(WorkerStopping)
        assert (stopping.why, stopping.running) == ("enough", 2)
        await shop.event(JobReleased, 2)
        lease = "select lease_until from shiftwork.workers where id = %s"
        before = await shop.value(lease, shop.worker.id)
        assert await shop.worker._leases.reconcile(), "heartbeats go on"
        assert await shop.value(lease, shop.worker.id) > before
        assert not shop.seen(JobEnded)
        late = await work.aenqueue()
        latch.release()
        assert await shop.stopped()
        for job in jobs[:2]:
            assert await job.aresult(timeout=30) == "done"
        for job in (*jobs[2:], late):
            found = await job.ainfo()
            assert (found.state, found.failures, found.resets, found.attempts) == (State.READY, 0, 0, ())
        assert len(shop.seen(JobBegan)) == 2
        assert isinstance(shop.events[-1], WorkerStopped)
        assert shop.events[-1].clean
        left = "select gone_at is not null or lease_until <= shiftwork.clock() as left from shiftwork.workers where id = %s"
        assert await shop.value(left, shop.worker.id), "its lease is let go"
        await shop.found(lambda: no_sessions(shop))  # the server notices a moment later that nobody is there


async def test_after_the_grace_handlers_are_told_and_their_jobs_given_back(app: App) -> None:
    # spec: SH-24, D-25
    latch = Latch()
    told: list[object] = []

    @app.task
    async def work(context: Context) -> None:
        try:
            await latch.hold()
        except asyncio.CancelledError:
            told.append(context.cancelled)
            raise

    async with app, Workshop(app, grace=timedelta()) as shop:
        job = await work.aenqueue()
        await latch.reached()
        shop.worker.stop()
        assert await shop.stopped()
        assert told == ["shutdown"]
        found = await job.ainfo()
        assert (found.state, found.failures, found.resets, found.attempts) == (State.READY, 0, 0, ())


async def test_a_worker_can_be_stopped_before_it_has_begun(app: App) -> None:
    # spec: QU-14
    @app.task
    async def work() -> None: ...

    async with app:
        worker = await app.worker()
        worker.stop()
        assert await worker.run()
