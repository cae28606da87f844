"""Hooks: asked before a claim, told before and after a job; and what becomes of their errors."""

from __future__ import annotations

import asyncio
import dataclasses
from datetime import timedelta
from typing import Any, cast

import pytest
from psycopg import sql

from shiftwork import App, Context, Job, Retry
from shiftwork.events import (
    ClaimHookBack,
    ClaimHookFailed,
    ClaimHookWaits,
    HookFailed,
    JobBegan,
    JobEnded,
    JobPassedBy,
)
from shiftwork.worker import attempt, hooks
from shiftwork.worker.hooks import Round
from tests.harness import Protocol
from tests.workshop import Latch, Workshop

SIZE = sql.SQL("(job.payload ->> 'size')::int <= {}")


@pytest.fixture
def app(dsn: str) -> App:
    return App(dsn)


async def test_a_budget_passes_by_what_is_too_large_and_never_spends_more_than_it_has(app: App) -> None:
    # spec: SG-4, SG-2
    budget, spent, most = 10, 0, 0
    latch = Latch()

    @app.task
    async def work(size: int) -> None:
        nonlocal spent, most
        spent += size
        most = max(most, spent)
        await latch.hold()
        spent -= size

    @app.before_claim
    def within_budget(claim: Round) -> None:
        free = budget - sum(job.payload["size"] for job in claim.holding)
        claim.require(SIZE.format(free))
        claim.limit(1)

    large = [await work.aenqueue(7) for _ in range(3)]
    small = [await work.aenqueue(3) for _ in range(4)]
    async with app, Workshop(app, concurrency=10) as shop:
        await latch.reached(
            2
        )  # a large one, and the first small one, although two large ones stand before it
        await shop.asleep()
        assert [event.job for event in shop.seen(JobBegan)] == [large[0].id, small[0].id]
        latch.release()
        await shop.ended(*large, *small)
    assert most == budget


async def test_what_is_passed_by_does_not_hide_what_lies_far_behind_it(app: App, protocol: Protocol) -> None:
    # spec: SG-4
    @app.task
    async def work(size: int) -> None: ...

    @app.before_claim
    async def small(claim: Round) -> None:
        claim.require(SIZE.format(5))

    protocol.enqueue_many({"task": "work", "payload": {"size": 9}} for _ in range(2500))
    job = await work.aenqueue(1)
    async with app, Workshop(app) as shop:
        await shop.ended(job)
        assert len(shop.seen(JobEnded)) == 1


async def test_a_hook_may_leave_rounds_out_and_is_asked_again(app: App) -> None:
    # spec: SG-2
    open_, asked = False, 0

    @app.task
    async def work() -> None: ...

    @app.before_claim
    def by_day(claim: Round) -> None:
        nonlocal asked
        asked += 1
        if not open_:
            claim.skip(timedelta(milliseconds=50))

    job = await work.aenqueue()
    async with app, Workshop(app) as shop:
        await shop.found(lambda: _true(asked > 4))
        assert (await shop.job(job)).state == "ready"
        open_ = True
        await shop.ended(job)


async def _true(value: bool) -> bool:
    return value


async def test_conditions_are_joined_each_by_itself_and_limits_hold_for_queue_task_and_round(
    app: App, protocol: Protocol
) -> None:
    # spec: SG-2
    @app.task(queue="a")
    async def work(size: int) -> None: ...

    @app.task(queue="b")
    async def other(size: int) -> None: ...

    asked: list[Round] = []

    @app.before_claim
    def narrow(claim: Round) -> None:
        asked.append(claim)
        claim.require(sql.SQL("job.priority = 0 or job.priority = 1"))
        claim.require(sql.SQL("tags = {}").format(sql.Literal(["yes"])))

    both = [
        work.using(tags=["yes"]),
        work.using(priority=1, tags=["yes"]),
        work.using(priority=2, tags=["yes"]),
    ]
    jobs = [await one.aenqueue(1) for one in (*both, work.using(tags=["no"]), other.using(tags=["yes"]))]
    async with app, Workshop(app) as shop:
        await shop.ended(jobs[0], jobs[1], jobs[4])
        await shop.asleep()
        assert [(await shop.job(job)).state for job in jobs[2:4]] == ["ready", "ready"]
        assert asked[0].queues == {"a": None, "b": None, "default": None}
        assert asked[0].tasks == frozenset({"work", "other"})
    worker = protocol.register()
    protocol.enqueue_many({"task": task, "queue": "c"} for _ in range(5) for task in ("x", "y"))
    claimed = protocol.claim(worker, {"queue": "c", "want": 6}, most={"x": 2}).jobs
    assert sorted(job["task"] for job in claimed) == ["x", "x", "y", "y", "y", "y"]


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("no figures"), "RuntimeError: no figures"),
        (SystemExit(3), "SystemExit: 3"),
        (asyncio.CancelledError(), "CancelledError: "),
    ],
)
async def test_a_hook_that_fails_skips_the_round_and_is_told_of_once(
    app: App, error: BaseException, said: str, waits: bool
) -> None:
    # spec: D-29, SG-2
    failing, asked = True, 0

    @app.task
    async def work() -> None: ...

    @app.before_claim
    async def broken(claim: Round) -> None:
        nonlocal asked
        asked += 1
        if waits:
            await asyncio.sleep(0)
        if failing:
            raise error

    job = await work.aenqueue()
    async with app, Workshop(app) as shop:
        await shop.event(ClaimHookFailed, error=said)
        for _ in range(3):
            await work.aenqueue()  # wakes it
            seen = asked
            await shop.found(lambda seen=seen: _true(asked > seen))  # type: ignore[misc]
        assert (await shop.job(job)).state == "ready"
        failing = False
        await work.aenqueue()
        await shop.ended(job)
        await shop.event(ClaimHookBack)
        assert len(shop.seen(ClaimHookFailed)) == 1


async def test_a_hook_that_leaves_a_round_out_does_not_fail_any_more(app: App) -> None:
    failing = True

    @app.task
    async def work() -> None: ...

    @app.before_claim
    def by_night(claim: Round) -> None:
        if failing:
            raise RuntimeError("no clock")
        claim.skip(timedelta(hours=1))

    async with app, Workshop(app) as shop:
        await shop.event(ClaimHookFailed)
        failing = False
        await work.aenqueue()
        await shop.event(ClaimHookBack)


@pytest.mark.parametrize("fails", [False, True])
async def test_a_hook_before_a_claim_that_does_not_end_is_told_of_once_and_waited_for(
    app: App, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    latch = Latch()

    @app.task
    async def work() -> None: ...

    @app.before_claim
    async def slow(claim: Round) -> None:
        await latch.hold()
        if fails and latch.arrived == 1:
            raise RuntimeError("too late")

    monkeypatch.setattr(hooks, "WAITING", 0.05)
    job = await work.aenqueue()
    async with app, Workshop(app) as shop:
        await shop.event(ClaimHookWaits, over=False)
        assert (await shop.job(job)).state == "ready"
        monkeypatch.undo()
        latch.release()
        await shop.event(ClaimHookWaits, over=True)
        await shop.ended(job)
        assert [event.over for event in shop.seen(ClaimHookWaits)] == [False, True]
        assert len(shop.seen(ClaimHookFailed)) == fails


async def test_a_job_for_which_a_condition_cannot_be_answered_is_passed_by_and_told_of_once(
    app: App, protocol: Protocol
) -> None:
    # spec: SG-4, D-29
    # fault: F29
    @app.task
    async def work(size: int) -> None: ...

    @app.before_claim
    def small(claim: Round) -> None:
        claim.require(SIZE.format(5))

    hostile = protocol.enqueue("work", payload={"size": "a word"}, priority=-1)
    jobs = [await work.aenqueue(n) for n in range(5)]
    large = await work.aenqueue(7)
    async with app, Workshop(app, concurrency=2) as shop:
        await shop.ended(*jobs)
        await shop.ended(await work.aenqueue(1))
        assert [(await shop.job(job)).state for job in (hostile, large)] == ["ready", "ready"]
        assert [event.job for event in shop.seen(JobPassedBy)] == [hostile]
        assert not shop.seen(ClaimHookFailed)


@pytest.mark.parametrize("condition", ["no SQL at all", sql.SQL("no_such_column > 1"), sql.SQL("true) or (")])
async def test_a_condition_that_cannot_be_asked_is_an_error_of_the_hook(app: App, condition: Any) -> None:
    # spec: SG-2, D-29
    failing = True

    @app.task
    async def work() -> None: ...

    @app.before_claim
    def wrong(claim: Round) -> None:
        if failing:
            claim.require(condition)

    job = await work.aenqueue()
    async with app, Workshop(app) as shop:
        await shop.event(ClaimHookFailed)
        await shop.asleep()
        assert (await shop.job(job)).state == "ready"
        failing = False
        await work.aenqueue()
        await shop.ended(job)


async def test_hooks_run_before_and_after_every_job_whatever_comes_of_it(app: App) -> None:
    # spec: SG-3, SG-36, D-29
    told: list[object] = []

    @app.task
    async def good() -> str:
        told.append("good")
        return "good"

    @app.task
    def bad() -> None:
        told.append("bad")
        raise LookupError("gone")

    @app.before_job
    async def before(job: Job) -> None:
        await asyncio.sleep(0)
        told.append(("before", job.task))

    @app.after_job
    def after(job: Job, failure: str | None) -> None:
        told.append(("after", job.task, failure))

    async with app, Workshop(app, concurrency=1) as shop:
        jobs = [await good.aenqueue(), await bad.using(max_attempts=1).aenqueue()]
        await shop.ended(*jobs)
        assert told == [
            *(("before", "good"), "good", ("after", "good", None)),
            *(("before", "bad"), "bad", ("after", "bad", "LookupError: gone")),
        ]
        assert not shop.seen(HookFailed)


async def test_an_error_of_a_hook_around_a_job_is_a_warning_on_it(app: App) -> None:
    # spec: D-29
    @app.task
    async def work() -> int:
        return 42

    @app.before_job
    def before(job: Job) -> None:
        raise RuntimeError("not ready")

    @app.after_job
    async def after(job: Job, failure: str | None) -> None:
        raise RuntimeError("too late")

    async with app, Workshop(app) as shop:
        job = await work.aenqueue()
        await shop.ended(job, state="completed")
        assert await job.aresult(timeout=5) == 42
        await shop.found(lambda: _logged(shop, job.id, 2))
        lines = await shop.rows(
            "select level, message from shiftwork.logs where job = %s order by id", job.id
        )
        assert [tuple(line.values()) for line in lines] == [
            ("warning", "before_job failed: RuntimeError: not ready"),
            ("warning", "after_job failed: RuntimeError: too late"),
        ]
        assert [event.error for event in shop.seen(HookFailed)] == [
            "RuntimeError: not ready",
            "RuntimeError: too late",
        ]


async def _logged(shop: Workshop, job: int, many: int) -> bool:
    count = await shop.value("select count(*) from shiftwork.logs where job = %s", job)
    return cast("int", count) >= many


async def test_a_hook_that_finds_something_cancelled_has_failed_and_stops_nobody(app: App) -> None:
    # spec: SG-2
    gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    gone.cancel()

    @app.task
    async def work(n: int) -> int:
        return n

    @app.before_job
    async def look(job: Job) -> None:
        if job.payload["n"] == 2:
            await gone

    jobs = [await work.aenqueue(n) for n in range(5)]
    async with app, Workshop(app, concurrency=2) as shop:
        await shop.ended(*jobs, state="completed")
        [failed] = shop.seen(HookFailed)
    assert (failed.job, failed.hook) == (jobs[2].id, "before_job")
    assert "CancelledError" in failed.error


async def test_what_comes_after_a_job_runs_although_it_was_cancelled(app: App) -> None:
    # spec: SG-3, D-29
    latch = Latch()
    told: list[str | None] = []

    @app.task
    async def work() -> None:
        await latch.hold()

    @app.after_job
    def after(job: Job, failure: str | None) -> None:
        told.append(failure)

    async with app, Workshop(app) as shop:
        job = await work.aenqueue()
        await latch.reached()
        await job.acancel()
        await shop.ended(job, state="cancelled")
        assert len(told) == 1
        assert told[0] is not None


@pytest.mark.parametrize(("kind", "state"), [("before", "cancelled"), ("after", "completed")])
async def test_a_job_is_cancelled_while_a_hook_waits_and_its_slot_goes_on(
    app: App, kind: str, state: str
) -> None:
    # spec: SG-3, D-29
    latch = Latch()
    told: list[str] = []

    @app.task
    async def work() -> None:
        told.append("work")

    @app.before_job
    async def before(job: Job) -> None:
        if kind == "before" and job.attempt == 1 and not told:
            await latch.hold()

    @app.after_job
    async def after(job: Job, failure: str | None) -> None:
        told.append("after")
        if kind == "after" and told == ["work", "after"]:
            await latch.hold()

    async with app, Workshop(app, concurrency=1) as shop:
        job = await work.aenqueue()
        await latch.reached()
        await job.acancel()
        await shop.ended(job, state=state)
        assert told == (["after"] if kind == "before" else ["work", "after"])
        other = await work.aenqueue()
        await shop.ended(other, state="completed")
        assert told[-2:] == ["work", "after"]


async def test_several_hooks_run_in_order_whether_they_wait_or_fail(app: App) -> None:
    # spec: SG-3, D-29
    told: list[str] = []

    @app.task
    async def work() -> None:
        told.append("work")

    def plain(job: Job, failure: str | None = None) -> str:
        told.append("plain")
        return "nobody asks for this"

    async def at_once(job: Job, failure: str | None = None) -> None:
        told.append("at once")

    async def failing(job: Job, failure: str | None = None) -> None:
        told.append("failing")
        raise asyncio.CancelledError

    def future(job: Job, failure: str | None = None) -> asyncio.Future[None]:
        told.append("future")
        return asyncio.ensure_future(asyncio.sleep(0))

    async def waiting(job: Job, failure: str | None = None) -> None:
        await asyncio.sleep(0)
        told.append("waiting")
        raise LookupError("after a while")

    async def cancelled(job: Job, failure: str | None = None) -> None:
        await asyncio.sleep(0)
        told.append("cancelled")
        raise asyncio.CancelledError("by itself")

    hooks: list[Any] = [plain, at_once, failing, future, waiting, failing, cancelled, plain, at_once]
    for hook in hooks:
        app.before_job(hook)
        app.after_job(hook)
    around = ["plain", "at once", "failing", "future", "waiting", "failing", "cancelled", "plain", "at once"]
    async with app, Workshop(app, concurrency=1) as shop:
        jobs = [await work.aenqueue() for _ in range(3)]
        await shop.ended(*jobs, state="completed")
        assert told == [*around, "work", *around] * 3
        assert [event.error for event in shop.seen(HookFailed)] == [
            *(
                "CancelledError: ",
                "LookupError: after a while",
                "CancelledError: ",
                "CancelledError: by itself",
            ),
        ] * 6


@pytest.mark.parametrize(
    "how",
    [
        "waits",
        "fails at once",
        "fails after a while",
        "exits at once",
        "exits after a while",
        "is cancelled after a while",
        "gives a future",
    ],
)
async def test_a_hook_alone_may_wait_and_fail_and_is_counted_each_time(app: App, how: str) -> None:
    # spec: SG-3, D-29
    told: list[str] = []
    errors = {"fails": LookupError(how), "exits": SystemExit(how), "is": asyncio.CancelledError(how)}
    error = errors.get(how.split(maxsplit=1)[0])

    @app.task
    async def work() -> None:
        told.append("work")

    async def hook(job: Job, failure: str | None = None) -> None:
        if error is not None and how.endswith("at once"):
            raise error
        await asyncio.sleep(0)
        told.append("hook")
        if error is not None:
            raise error

    def future(job: Job, failure: str | None = None) -> asyncio.Future[None]:
        return asyncio.ensure_future(hook(job))

    app.before_job(future if how == "gives a future" else hook)
    app.after_job(future if how == "gives a future" else hook)
    async with app, Workshop(app, concurrency=1) as shop:
        jobs = [await work.aenqueue() for _ in range(3)]
        await shop.ended(*jobs, state="completed")
        times = shop.worker._attempts.hook_times
        assert {kind: sum(durations.many) for kind, durations in times.items()} == {
            "before_job": 3,
            "after_job": 3,
        }
        assert len(shop.seen(HookFailed)) == (0 if error is None else 6)
    assert told == (["work"] if how.endswith("at once") else ["hook", "work", "hook"]) * 3


async def test_hooks_see_the_job_as_its_handler_does(app: App) -> None:
    # spec: SG-3
    seen: list[Job] = []

    @app.task
    async def work(context: Context, n: int) -> None:
        seen.append(context.job)

    @app.before_job
    def before(job: Job) -> None:
        seen.append(job)

    async with app, Workshop(app) as shop:
        await shop.ended(await work.using(tags=["blue"], priority=3).aenqueue(5))
    [hooked, handled] = seen
    assert hooked == handled
    assert handled == hooked
    assert repr(hooked) == repr(handled)
    assert (hooked.payload, hooked.tags, hooked.priority) == ({"n": 5}, ("blue",), 3)
    with pytest.raises(AttributeError, match="cannot assign"):
        hooked.priority = 4  # type: ignore[misc]
    assert dataclasses.replace(hooked, priority=4).priority == 4
    with pytest.raises(AttributeError, match="no 'colour'"):
        hooked.colour  # type: ignore[attr-defined]  # noqa: B018


class Wordless(Exception):  # noqa: N818
    def __str__(self) -> str:
        raise LookupError("no words")


@pytest.mark.parametrize("who", ["before", "after", "handler"])
@pytest.mark.parametrize("waits", [False, True])
async def test_an_error_that_cannot_say_what_it_is_costs_what_others_cost(
    app: App, who: str, *, waits: bool
) -> None:
    # spec: D-29
    failures: list[str | None] = []

    async def fail(here: str) -> None:
        if waits:
            await asyncio.sleep(0)
        if who == here:
            raise Wordless

    @app.task(retry=Retry(max_attempts=1))
    async def work() -> None:
        await fail("handler")

    @app.before_job
    async def before(job: Job) -> None:
        await fail("before")

    @app.after_job
    async def after(job: Job, failure: str | None) -> None:
        failures.append(failure)
        await fail("after")

    async with app, Workshop(app, concurrency=1) as shop:
        jobs = [await work.aenqueue() for _ in range(3)]
        await shop.ended(*jobs, state="failed" if who == "handler" else "completed")
        told = [event.error for event in shop.seen(HookFailed)]
    unreadable = "Wordless (its message cannot be read)"
    assert told == ([] if who == "handler" else [unreadable] * 3)
    assert failures == ([unreadable] * 3 if who == "handler" else [None] * 3)


@pytest.mark.parametrize("waits", [False, True])
async def test_hooks_are_no_part_of_how_long_a_handler_took(
    app: App, monkeypatch: pytest.MonkeyPatch, *, waits: bool
) -> None:
    now = 0.0
    for module in (attempt, hooks):
        monkeypatch.setattr(module, "clock", lambda: now)

    async def spend(seconds: float, *, wait: bool) -> None:
        nonlocal now
        if wait:
            await asyncio.sleep(0)
        now += seconds

    @app.task
    async def work(*, wait: bool) -> None:
        await spend(1, wait=wait)

    @app.before_job
    async def before(job: Job) -> None:
        await spend(10, wait=waits)

    @app.after_job
    async def after(job: Job, failure: str | None) -> None:
        await spend(100, wait=waits)

    async with app, Workshop(app, concurrency=1) as shop:
        jobs = [await work.aenqueue(wait=wait) for wait in (False, True)]
        await shop.ended(*jobs, state="completed")
        assert [event.seconds for event in shop.seen(JobEnded)] == [1, 1]
        assert {kind: durations.total for kind, durations in shop.worker._attempts.hook_times.items()} == {
            "before_job": 20,
            "after_job": 200,
        }
