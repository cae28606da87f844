"""What a worker does with jobs: it runs them, and writes down how each of them ended."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Generator, Sequence
from contextvars import ContextVar
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from shiftwork import (
    App,
    Cancel,
    ConfigurationError,
    Context,
    Interrupted,
    JobCancelled,
    JobFailed,
    Poison,
    Retry,
    RetryLater,
    Snooze,
    State,
)
from shiftwork.events import (
    DutyDone,
    Event,
    JobBegan,
    JobEnded,
    JobStopped,
    WorkerStarted,
    WorkerStopped,
)
from shiftwork.outcome import Returned
from tests.harness import Protocol
from tests.test_garbage import put
from tests.workshop import Latch, Workshop

AT_ONCE = Retry(delays=timedelta(), jitter=0)


@pytest.fixture
def app(dsn: str) -> App:
    return App(dsn)


# Running.


async def test_async_and_plain_functions_run_and_what_came_of_them_is_kept(app: App) -> None:
    # spec: SH-13, SH-14, SH-28, SH-29, HO-1, HO-9, HO-10, QU-16
    @app.task
    async def add(a: int, b: int) -> int:
        return a + b

    @app.task(queue="other")
    def subtract(a: int, b: int) -> int:
        assert threading.current_thread() is not threading.main_thread()
        return a - b

    async with app, Workshop(app) as shop:
        first, second = await add.aenqueue(1, 2), await subtract.aenqueue(5, 3)
        await shop.ended(first, second)
        assert await first.aresult(timeout=30) == 3
        assert await second.aresult(timeout=30) == 2

        for handle in (first, second):
            job = await handle.ainfo()
            assert (job.state, job.attempt, job.failures, job.resets) == (State.COMPLETED, 1, 0, 0)
            assert (job.worker, job.error, job.attempts) == (shop.worker.id, None, ())
            # A claim is as old as its beginning, and may take what came while it was being made.
            times = [job.claimed_at, job.started_at, job.finished_at]
            assert times == sorted(time for time in times if time is not None)


async def test_what_a_worker_serves_is_known_and_what_is_not_its_own_is_left(
    app: App, protocol: Protocol
) -> None:
    # spec: SH-27, HO-2, QU-10, QU-16, D-17
    @app.task(queue="mail")
    async def send() -> None: ...

    elsewhere = protocol.enqueue("send", queue="elsewhere")
    unknown = protocol.enqueue("unheard_of", queue="mail")
    async with app, Workshop(app, name="postman", concurrency=3) as shop:
        known = await send.aenqueue()
        await shop.ended(known)
        started = await shop.event(WorkerStarted)
        assert started.label.startswith("postman@")
        assert (started.queues, started.tasks, started.concurrency) == (("default", "mail"), ("send",), 3)
        row = await shop.rows("select * from shiftwork.workers where id = %s", shop.worker.id)
        assert row[0]["name"] == "postman"
    assert protocol.state(elsewhere) == protocol.state(unknown) == "ready"
    assert protocol.job(unknown)["attempt"] == 0


async def test_a_worker_without_tasks_is_refused(app: App) -> None:
    # spec: HO-2
    async with app:
        with pytest.raises(ConfigurationError, match="no tasks"):
            await app.worker()


async def test_an_unknown_task_is_failed_if_the_worker_is_told_so(app: App, protocol: Protocol) -> None:
    # spec: SH-20, HO-12, D-17
    @app.task
    async def known() -> None: ...

    @app.task(concurrency=1)
    async def limited() -> None: ...

    unknown = protocol.enqueue("unheard_of")
    async with app, Workshop(app, unknown_tasks="fail") as shop:
        jobs = [await known.aenqueue(), await limited.aenqueue()]
        await shop.ended(unknown, *jobs)
        assert [(await shop.job(job)).state for job in jobs] == [State.COMPLETED] * 2
        job = await shop.job(unknown)
        assert (job.state, job.failures) == (State.FAILED, 1)
        assert job.error is not None
        assert (job.error["code"], job.error["message"]) == (
            "UNKNOWN_TASK",
            "this worker has no task 'unheard_of'",
        )


seen: ContextVar[list[int] | None] = ContextVar("seen", default=None)


@pytest.mark.parametrize("waits", [False, True])
async def test_context_variables_do_not_leak_from_one_job_to_the_next(app: App, waits: bool) -> None:
    # spec: QU-1
    found: list[object] = []

    @app.task
    async def leave(number: int) -> None:
        found.append(seen.get())
        seen.set([number])
        if waits:
            await asyncio.sleep(0)
        assert seen.get() == [number]

    @app.task
    def leave_in_thread(number: int) -> None:
        found.append(seen.get())
        seen.set([number])

    async with app, Workshop(app, concurrency=1) as shop:
        jobs = [await task.aenqueue(number) for number in range(3) for task in (leave, leave_in_thread)]
        await shop.ended(*jobs)
        assert found == [None] * 6


async def test_a_handler_may_use_timeouts_and_groups_of_its_own(app: App) -> None:
    # spec: QU-1
    @app.task
    async def work() -> list[int]:
        try:
            async with asyncio.timeout(0):
                await asyncio.Event().wait()
        except TimeoutError:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(asyncio.sleep(0, number)) for number in range(3)]
            return [task.result() for task in tasks]
        return []

    async with app, Workshop(app, concurrency=1) as shop:
        jobs = [await work.aenqueue() for _ in range(2)]
        await shop.ended(*jobs)
        assert [await job.aresult(timeout=30) for job in jobs] == [[0, 1, 2]] * 2


async def test_tasks_run_in_place_when_they_are_called(app: App, protocol: Protocol) -> None:
    # spec: HO-44
    @app.task
    async def double(number: int) -> int:
        return 2 * number

    assert await double(4) == 8
    assert protocol.value("select count(*) from {}.jobs") == 0


# Endings.


class Unforeseen(Exception):  # noqa: N818
    """What nobody expects."""


def stop_iteration() -> None:
    raise StopIteration(5)


def cancelled() -> None:
    raise asyncio.CancelledError("by the handler itself")


def interrupted() -> None:
    raise Interrupted("by the handler itself")


def keyboard() -> None:
    raise KeyboardInterrupt


def leaves() -> None:
    raise SystemExit(3)


def generator_exit() -> None:
    raise GeneratorExit


def unforeseen() -> None:
    raise Unforeseen("oh")


def unreadable() -> None:
    class OddError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

        @property
        def code(self) -> str:
            raise RuntimeError("no code")

    raise OddError


RAISING: list[Callable[[], None]] = [
    stop_iteration,
    cancelled,
    interrupted,
    keyboard,
    leaves,
    generator_exit,
    unforeseen,
    unreadable,
]


async def test_whatever_a_handler_raises_is_a_failure_and_the_slot_goes_on(app: App) -> None:
    # spec: SH-18, SH-15, SG-5, HO-12, D-12
    @app.task(retry=Retry(max_attempts=2, delays=timedelta(hours=1), jitter=0))
    async def waiting(kind: int) -> None:
        await asyncio.sleep(0)
        RAISING[kind]()

    @app.task
    async def hasty(kind: int) -> None:
        RAISING[kind]()

    @app.task
    def plain(kind: int) -> None:
        RAISING[kind]()

    @app.task
    async def good() -> int:
        return 1

    async with app, Workshop(app, concurrency=2) as shop:
        jobs = [await task.aenqueue(kind) for kind in range(len(RAISING)) for task in (waiting, hasty, plain)]
        await shop.ended(*jobs)
        for job in jobs:
            found = await job.ainfo()
            assert (found.state, found.failures, found.attempt) == (State.SCHEDULED, 1, 1), found
            assert found.error is not None
            assert found.error["message"]
            assert found.error["traceback"]
            [attempt] = found.attempts
            assert attempt.will_retry
        error = (await jobs[-6].ainfo()).error
        assert error is not None
        assert (error["code"], error["message"]) == ("Unforeseen", "oh")
        both = [await good.aenqueue() for _ in range(4)]
        await shop.ended(*both)
        assert len(shop.worker._slots._slots) <= 2


async def test_a_payload_that_does_not_fit_fails_at_once(app: App, protocol: Protocol) -> None:
    # spec: SH-13, SH-17, HO-12, QU-32
    @app.task
    async def count(a: int) -> int:
        return a

    payloads: list[dict[str, Any]] = [{"a": "no number"}, {}, {"a": 1, "b": 2}, {"a": None}, {"a": [[]]}]
    bad = [protocol.enqueue("count", payload) for payload in payloads]
    async with app, Workshop(app) as shop:
        good = await count.aenqueue(1)
        await shop.ended(*bad, good)
        for job in [await shop.job(number) for number in bad]:
            assert (job.state, job.attempt, job.failures) == (State.FAILED, 1, 1)
            assert job.error is not None
            assert job.error["code"] == "ARGUMENTS_INVALID"
        assert (await shop.job(good)).state is State.COMPLETED


async def test_odd_rows_stop_no_worker(app: App, protocol: Protocol) -> None:
    # spec: SH-2, HO-9
    @app.task
    async def odd(x: Any = None) -> str:
        return "fine"

    @app.task
    async def good() -> int:
        return 1

    found = put(protocol, worker=protocol.register(lease=86400))
    async with app, Workshop(app, concurrency=3, prefetch=2, unknown_tasks="fail") as shop:
        jobs = [await good.aenqueue() for _ in range(5)]
        await shop.ended(*jobs)
        # Every odd job that was ready has come to some end or is still waiting for a worker that may take it.
        await shop.asleep()
        rows = await shop.rows(
            "select id, state::text from shiftwork.all_jobs where id = any(%s)", found["ready"]
        )
        states = {row["id"]: row["state"] for row in rows}
        assert len(states) == len(found["ready"])
        ended = [job for job, state in states.items() if state in {"completed", "failed", "expired"}]
        assert len(ended) >= len(states) - 3
        assert "running" not in states.values()


async def test_poison_fails_at_once_with_its_cause(app: App) -> None:
    # spec: SH-17, SG-5, D-12
    @app.task(retry=Retry(max_attempts=None))
    async def work() -> None:
        raise Poison("the row is gone") from KeyError("row 7")

    async with app, Workshop(app) as shop:
        job = await work.aenqueue()
        await shop.ended(job, state="failed")
        with pytest.raises(JobFailed, match="the row is gone") as raised:
            await job.aresult(timeout=30)
        assert raised.value.error is not None
        assert raised.value.error["code"] == "POISON"
        assert "KeyError: 'row 7'" in (await job.ainfo()).error["traceback"]  # type: ignore[index]


async def test_a_snooze_counts_as_nothing(app: App) -> None:
    # spec: SG-24, QU-12, D-9
    times = 0

    @app.task(retry=Retry.never())
    async def work() -> int:
        nonlocal times
        times += 1
        if times < 4:
            raise Snooze(timedelta())
        return times

    async with app, Workshop(app) as shop:
        job = await work.aenqueue()
        await shop.ended(job, state="completed")
        found = await job.ainfo()
        assert (found.attempt, found.failures, found.result, found.attempts) == (4, 0, 4, ())


async def test_a_snooze_may_name_a_time(app: App) -> None:
    # spec: QU-12, SG-24
    tomorrow = datetime.now(UTC).replace(microsecond=0) + timedelta(days=1)

    @app.task
    async def work() -> None:
        raise Snooze(at=tomorrow)

    async with app, Workshop(app) as shop:
        job = await work.aenqueue()
        await shop.ended(job, state="scheduled")
        found = await job.ainfo()
        assert (found.state, found.run_at, found.failures) == (State.SCHEDULED, tomorrow, 0)


async def test_retry_later_is_a_failure_with_a_time_of_its_own(app: App) -> None:
    # spec: SH-15, SH-19, HO-29
    @app.task(retry=Retry(max_attempts=3))
    async def work() -> None:
        raise RetryLater(timedelta(), "not yet")

    async with app, Workshop(app) as shop:
        job = await work.aenqueue()
        await shop.ended(job, state="failed")
        found = await job.ainfo()
        assert (found.attempt, found.failures) == (3, 3)
        assert [event.delay for event in shop.seen(JobEnded)] == [0, 0, None]
        assert [attempt.will_retry for attempt in found.attempts] == [True, True, False]


async def test_a_handler_may_cancel_its_job(app: App) -> None:
    # spec: SG-18
    @app.task
    def work() -> None:
        raise Cancel("nobody wants it any more")

    async with app, Workshop(app) as shop:
        job = await work.aenqueue()
        await shop.ended(job, state="cancelled")
        with pytest.raises(JobCancelled, match="nobody wants it"):
            await job.aresult(timeout=30)
        assert (await job.ainfo()).failures == 0


async def test_retries_go_on_without_end_if_told_so(app: App) -> None:
    # spec: D-8, QU-11, D-9
    times = 0

    @app.task(retry=Retry(max_attempts=None, delays=timedelta(), jitter=0))
    async def work() -> int:
        nonlocal times
        times += 1
        if times < 30:
            raise Unforeseen(str(times))
        return times

    async with app, Workshop(app) as shop:
        job = await work.aenqueue()
        await shop.ended(job, state="completed")
        found = await job.ainfo()
        assert (found.attempt, found.failures, found.error) == (30, 29, None)


async def test_waits_follow_the_policy_and_the_last_attempt_is_the_last(app: App) -> None:
    # spec: SH-15, SH-16, SH-19, HO-29, D-8
    seconds = [timedelta(seconds=number) for number in range(100)]
    policies = {
        (30, 60, 120): Retry(max_attempts=4, jitter=0),
        (40, 80, 90): Retry(max_attempts=4, delays=seconds[40], cap=seconds[90], jitter=0),
        (9, 7, 7): Retry(max_attempts=4, delays=[seconds[9], seconds[7]], factor=1, jitter=0),
    }

    def declare(name: str, retry: Retry) -> Any:
        @app.task(name=name, retry=retry)
        async def work() -> None:
            raise Unforeseen("oh")

        return work

    tasks = {waits: declare(f"work_{waits[0]}", retry) for waits, retry in policies.items()}
    async with app, Workshop(app) as shop:
        jobs = {waits: await task.aenqueue() for waits, task in tasks.items()}
        for number in range(1, 4):
            for waits, job in jobs.items():
                wait = waits[number - 1]
                event = await shop.event(JobEnded, number, job=job)
                assert (event.state, event.delay) == ("scheduled", wait)
                found = await job.ainfo()
                assert found.run_at is not None
                assert found.attempts[-1].ended_at is not None
                assert (found.run_at - found.attempts[-1].ended_at).total_seconds() == pytest.approx(wait)
                await app.arun_now([job.id])
        await shop.ended(*jobs.values(), state="failed")
        for job in jobs.values():
            found = await job.ainfo()
            assert (found.attempt, found.failures) == (4, 4)
            assert [attempt.attempt for attempt in found.attempts] == [1, 2, 3, 4]


async def test_only_errors_that_are_worth_it_are_tried_again(app: App) -> None:
    # spec: HO-29, D-8, D-12
    reasons: list[tuple[Any, str]] = [
        (None, "scheduled"),
        (OSError, "scheduled"),
        ((KeyError, "ConnectionError"), "scheduled"),
        (lambda error: "later" in str(error), "scheduled"),
        (KeyError, "failed"),
        ("SOMETHING_ELSE", "failed"),
        (lambda _: False, "failed"),
    ]

    def declare(number: int, on: Any) -> Any:
        @app.task(name=f"work_{number}", retry=Retry(on=on))
        def work() -> None:
            raise ConnectionResetError("later")

        return work

    tasks = [declare(number, on) for number, (on, _) in enumerate(reasons)]
    async with app, Workshop(app) as shop:
        for task, (_, state) in zip(tasks, reasons, strict=True):
            job = await task.aenqueue()
            assert (await shop.event(JobEnded, job=job)).state == state


async def test_error_codes_are_mapped(dsn: str) -> None:
    # spec: HO-13, HO-30
    class MineError(Exception):
        code = "MY_OWN"

    app = App(dsn, codes={OSError: "OF_THE_APP", KeyError: "OF_THE_APP"}, default_code="APP_DEFAULT")
    kinds: list[type[Exception]] = [KeyError, OSError, ConnectionError, MineError]

    @app.task(codes={KeyError: "OF_THE_TASK"}, retry=Retry.never())
    async def mapped(kind: int) -> None:
        raise kinds[kind]("x")

    @app.task(default_code="TASK_DEFAULT", retry=Retry.never())
    def defaulted(kind: int) -> None:
        raise kinds[kind]("x")

    async with app, Workshop(app) as shop:
        jobs = [await task.aenqueue(kind) for task in (mapped, defaulted) for kind in range(4)]
        await shop.ended(*jobs)
        codes = [(await shop.job(job)).error["code"] for job in jobs]  # type: ignore[index]
        assert codes == [
            *("OF_THE_TASK", "OF_THE_APP", "APP_DEFAULT", "MY_OWN"),
            *("OF_THE_APP", "OF_THE_APP", "TASK_DEFAULT", "MY_OWN"),
        ]


async def test_codes_that_a_task_maps_decide_what_is_tried_again(app: App) -> None:
    # spec: HO-29, HO-30
    @app.task(codes={ValueError: "BAD_LUCK"}, retry=Retry(on="BAD_LUCK"))
    async def work(kind: str) -> None:
        raise ValueError if kind == "lucky" else TypeError

    async with app, Workshop(app) as shop:
        again, never = await work.aenqueue("lucky"), await work.aenqueue("other")
        await shop.ended(again, never)
        assert (await shop.event(JobEnded, job=again)).state == "scheduled"
        assert (await shop.event(JobEnded, job=never)).state == "failed"


async def test_what_a_handler_yields_by_hand_is_its_own_fault_and_no_others(app: App) -> None:
    class Odd:
        def __await__(self) -> Generator[Any, Any, None]:
            yield Returned("stolen")

    @app.task(retry=Retry(max_attempts=1))
    async def odd() -> str:
        await Odd()
        return "odd"

    @app.task
    async def plain(n: int) -> int:
        return n

    [first, bad, *rest] = await app.aenqueue_many([plain.job(0), odd.job(), plain.job(1), plain.job(2)])
    async with app, Workshop(app, concurrency=3) as shop:
        await shop.ended(first, *rest, state="completed")
        await shop.ended(bad, state="failed")
        assert [(await shop.job(handle)).result for handle in (first, *rest)] == [0, 1, 2]
        assert "bad yield" in ((await shop.job(bad)).error or {})["message"]


async def test_what_a_handler_returned_is_not_kept_for_the_next(app: App) -> None:
    class Large(str):
        __slots__ = ("__weakref__",)

    kept: list[weakref.ref[Large]] = []

    @app.task
    async def work() -> str:
        large = Large("result")
        kept.append(weakref.ref(large))
        return large

    job = await work.aenqueue()
    async with app, Workshop(app) as shop:
        await shop.ended(job, state="completed")
        await shop.asleep()
        gc.collect()
        assert kept[0]() is None


async def test_what_a_handler_returns_has_to_be_what_it_promised(app: App) -> None:
    # spec: HO-13, HO-39, QU-32
    @app.task
    async def count() -> int:
        return "many"  # type: ignore[return-value]

    @app.task
    def nothing() -> str:
        return None  # type: ignore[return-value]

    @app.task
    async def odd() -> Any:
        return object()

    async with app, Workshop(app) as shop:
        jobs = [await count.aenqueue(), await nothing.aenqueue(), await odd.aenqueue()]
        await shop.ended(*jobs)
        found = [await shop.job(job) for job in jobs]
        assert [job.state for job in found] == [State.FAILED] * 3
        assert [job.attempt for job in found] == [1] * 3
        codes = [job.error["code"] for job in found]  # type: ignore[index]
        assert codes == ["RETURN_TYPE_MISMATCH", "RETURN_TYPE_MISMATCH", "RESULT_NOT_JSON"]


# Time limits.


async def test_an_async_handler_that_takes_too_long_is_cancelled_and_tried_again(app: App) -> None:
    # spec: SH-23, SG-19, D-14
    told: list[str] = []

    @app.task(timeout=timedelta(milliseconds=50), retry=AT_ONCE)
    async def work(context: Context) -> str:
        if context.attempt > 1:
            return "at last"
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            told.append(str(context.cancelled))
            raise
        return "never"

    async with app, Workshop(app, concurrency=1) as shop:
        job = await work.aenqueue()
        await shop.ended(job, state="completed")
        found = await job.ainfo()
        assert (found.attempt, found.failures, found.result) == (2, 1, "at last")
        assert [attempt.code for attempt in found.attempts] == ["TASK_TIMEOUT"]
        assert told == ["timeout"]
        assert shop.seen(JobStopped, job=job)[0].why == "timeout"


async def test_a_plain_function_that_takes_too_long_is_told_by_its_context(app: App) -> None:
    # spec: SH-23, SG-19, D-14
    told: list[object] = []

    @app.task(retry=AT_ONCE)
    def work(context: Context) -> str:
        if context.attempt > 1:
            return "at last"
        for _ in range(10_000):
            if context.cancelled is not None:
                break
            threading.Event().wait(0.003)
        told.append(context.cancelled)
        with pytest.raises(Interrupted) as raised:
            context.progress(0.5)
        told.append(raised.value.reason)
        context.check()
        return "never"

    async with app, Workshop(app, timeout=timedelta(milliseconds=50)) as shop:
        job = await work.aenqueue()
        await shop.ended(job, state="completed")
        found = await job.ainfo()
        assert (found.attempt, found.failures, found.result) == (2, 1, "at last")
        assert [attempt.code for attempt in found.attempts] == ["TASK_TIMEOUT"]
        assert told == ["timeout", "timeout"]


async def test_a_handler_that_ends_well_although_it_was_told_has_ended_well(app: App) -> None:
    # spec: SG-19
    @app.task(timeout=timedelta(milliseconds=20))
    async def work() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "tidied up"
        return "never"

    async with app, Workshop(app) as shop:
        job = await work.aenqueue()
        await shop.ended(job, state="completed")
        assert await job.aresult(timeout=30) == "tidied up"


async def test_time_limits_of_jobs_that_have_ended_are_forgotten(app: App) -> None:
    # spec: SG-19
    @app.task(timeout=timedelta(hours=1))
    async def work() -> None: ...

    async with app, Workshop(app, concurrency=50) as shop:
        jobs = await app.aenqueue_many(work.job() for _ in range(3000))
        await shop.ended(*jobs)
        deadlines = shop.worker._slots._begin.__self__._deadlines  # type: ignore[attr-defined]
        assert len(deadlines._heap) <= 1100


async def test_a_job_is_not_started_after_its_deadline(app: App, protocol: Protocol) -> None:
    # spec: D-14, HO-8
    begun: list[int] = []

    @app.task(queue="slow")
    async def work(number: int) -> None:
        begun.append(number)

    late = protocol.enqueue("work", {"number": 1}, queue="slow", expires_in=0.000001)
    async with app, Workshop(app, lease=timedelta(seconds=2)) as shop:
        good = await work.aenqueue(2)
        await shop.ended(good)
        assert begun == [2]
        await shop.event(DutyDone, duty="expire")
        assert (await shop.job(late)).state is State.EXPIRED


async def test_a_job_fetched_ahead_is_not_started_after_its_deadline(app: App, protocol: Protocol) -> None:
    # spec: D-14, HO-8
    latch = Latch()
    begun: list[int] = []

    @app.task
    async def work(number: int) -> None:
        begun.append(number)
        await latch.hold()

    async with app, Workshop(app, concurrency=1, prefetch=2) as shop:
        first = await work.aenqueue(1)
        await latch.reached()
        doomed = await work.using(expires_in=timedelta(minutes=1)).aenqueue(2)
        await shop.until(lambda: len(shop.worker._backlog) == 1, "one is fetched ahead")
        protocol.shift_clock(timedelta(minutes=2))
        latch.release()
        last = await work.aenqueue(3)
        await shop.ended(first, last)
        assert begun == [1, 3]
        found = await shop.job(doomed)
        assert (found.state, found.failures, found.attempts) == (State.EXPIRED, 0, ())
    assert not shop.worker.holding


async def test_a_retry_that_would_come_after_the_deadline_is_refused(app: App) -> None:
    # spec: D-14
    @app.task(retry=Retry(delays=timedelta(hours=1)), expires_in=timedelta(minutes=1))
    async def work() -> None:
        raise Unforeseen("oh")

    async with app, Workshop(app) as shop:
        job = await work.aenqueue()
        await shop.ended(job)
        found = await job.ainfo()
        assert (found.state, found.failures) == (State.FAILED, 1)
        assert found.error is not None
        assert found.error["code"] == "Unforeseen"


# Cancelling.


async def test_a_job_that_is_cancelled_before_it_begins_never_begins(app: App) -> None:
    # spec: SG-18
    latch = Latch()

    @app.task
    async def work() -> None:
        await latch.hold()

    async with app, Workshop(app, concurrency=1, prefetch=1) as shop:
        first = await work.aenqueue()
        await latch.reached()
        ahead, behind = await work.aenqueue(), await work.aenqueue()
        await shop.until(lambda: len(shop.worker._backlog) == 1, "one is fetched ahead")
        assert await app.acancel([ahead.id, behind.id]) == {ahead.id: "signalled", behind.id: "cancelled"}
        latch.release()
        await shop.ended(first)
        await shop.until(lambda: not shop.worker.holding, "nothing is held")
        assert [(await shop.job(job)).state for job in (ahead, behind)] == [State.CANCELLED] * 2
        assert [event.job for event in shop.seen(JobBegan)] == [first.id]


@pytest.mark.parametrize("notify", [True, False])
async def test_a_running_async_handler_is_cancelled_with_the_reason(app: App, notify: bool) -> None:
    # spec: SG-18, QU-9
    told: list[object] = []
    latch = Latch()

    @app.task
    async def work(context: Context) -> None:
        try:
            await latch.hold()
        except asyncio.CancelledError:
            told.append(context.cancelled)
            raise

    # With notifications the next heartbeat is far away; without them it brings the news.
    lease = timedelta(minutes=5) if notify else timedelta(seconds=1)
    async with app, Workshop(app, notify=notify, lease=lease) as shop:
        if notify:
            await shop.asleep()
        job = await work.aenqueue()
        if not notify:
            shop.worker._wake()
        await latch.reached()
        assert await job.acancel("changed our mind") == "signalled"
        await shop.ended(job, state="cancelled")
        found = await job.ainfo()
        assert (found.state, found.failures, found.attempts) == (State.CANCELLED, 0, ())
        assert found.error is not None
        assert found.error["message"] == "changed our mind"
        assert told == ["cancelled"]
        assert shop.seen(JobStopped)[0].reason == "changed our mind"


@pytest.mark.parametrize("layered", [False, True])
async def test_a_running_plain_function_is_told_and_interrupted_at_its_next_word(
    app: App, layered: bool
) -> None:
    # spec: SG-18, QU-9
    told: list[object] = []
    latch = Latch()

    if layered:

        @app.middleware
        async def layer(context: Context, call: Callable[[], Any]) -> Any:
            return await call()

    @app.task
    def work(context: Context) -> None:
        latch.hold_blocking()
        told.append(context.cancelled)
        try:
            context.log.info("on we go")
        except Interrupted as error:
            told.append(str(error))
            raise

    async with app, Workshop(app, lease=timedelta(minutes=5), concurrency=1) as shop:
        await shop.asleep()
        job = await work.aenqueue()
        await latch.reached()
        assert await job.acancel("changed our mind") == "signalled"
        await shop.event(JobStopped, job=job)
        assert not shop.seen(JobEnded), "a thread cannot be stopped, only told"
        assert len(shop.worker._slots.busy) == 1
        latch.release()
        await shop.ended(job, state="cancelled")
        assert told == ["cancelled", "cancelled: changed our mind"]


async def test_a_failure_after_a_request_to_cancel_is_not_tried_again(app: App) -> None:
    # spec: SG-18
    latch = Latch()

    @app.task(retry=Retry(max_attempts=None))
    async def work() -> None:
        try:
            await latch.hold()
        finally:
            raise Unforeseen("while tidying up")

    async with app, Workshop(app) as shop:
        await shop.asleep()
        job = await work.aenqueue()
        await latch.reached()
        await job.acancel()
        await shop.ended(job)
        assert (await job.ainfo()).state is State.CANCELLED


async def test_a_job_that_has_ended_is_not_cancelled(app: App) -> None:
    # spec: SG-18
    @app.task
    async def work() -> int:
        return 1

    async with app, Workshop(app) as shop:
        gate = shop.gate("settled")
        job = await work.aenqueue()
        await gate.reached()
        assert await job.acancel() == "finished"
        gate.open()
        await shop.ended(job, state="completed")
        assert await job.aresult(timeout=30) == 1


async def test_a_request_to_cancel_that_comes_after_the_last_line_changes_nothing(app: App) -> None:
    # spec: SG-18
    @app.task
    async def work() -> int:
        return 1

    async with app, Workshop(app) as shop:
        gate = shop.gate("settling")
        job = await work.aenqueue()
        await gate.reached()
        assert await job.acancel() == "signalled"
        gate.open()
        await shop.ended(job, state="completed")
        assert await job.aresult(timeout=30) == 1
        assert await shop.value("select count(*) from shiftwork.signals") == 0


async def test_a_job_that_is_completed_from_outside_is_taken_from_its_handler(app: App) -> None:
    # spec: QU-9, QU-25
    latch = Latch()
    told: list[object] = []

    @app.task
    async def work(context: Context) -> str:
        try:
            await latch.hold()
        except asyncio.CancelledError:
            told.append(context.cancelled)
            raise
        return "ours"

    async with app, Workshop(app, lease=timedelta(minutes=5)) as shop:
        await shop.asleep()
        job = await work.aenqueue()
        await latch.reached()
        assert await shop.value("select shiftwork.complete(%s, '\"theirs\"')", job.id) == "completed"
        await shop.until(lambda: not shop.worker.holding, "it is let go")
        assert told == ["lost"]
        assert await job.aresult(timeout=30) == "theirs"


# Looking on.


async def test_a_subscriber_that_raises_changes_nothing(app: App) -> None:
    # spec: QU-14
    called: list[Event] = []

    @app.subscribe
    def look(event: Event) -> None:
        called.append(event)
        raise RuntimeError("I do not like what I see")

    @app.task
    async def work() -> None: ...

    async with app, Workshop(app) as shop:
        job = await work.aenqueue()
        await shop.ended(job, state="completed")
    assert [type(event) for event in called] == [type(event) for event in shop.events]
    assert isinstance(called[-1], WorkerStopped)


async def test_jobs_that_end_together_are_told_of_one_by_one_and_together_whoever_fails(app: App) -> None:
    one_by_one: list[int] = []
    together: list[int] = []

    class Counting:
        def __call__(self, event: Event) -> None:
            assert not isinstance(event, JobEnded)

        def tell_ended(self, jobs: Sequence[JobEnded]) -> None:
            together.extend(event.job for event in jobs)
            raise RuntimeError("I do not like what I see")

    app.subscribe(Counting())

    @app.subscribe
    def look(event: Event) -> None:
        if isinstance(event, JobEnded):
            one_by_one.append(event.job)
            raise RuntimeError("neither do I")

    @app.task
    async def work() -> None: ...

    async with app, Workshop(app) as shop:
        jobs = [await work.aenqueue() for _ in range(20)]
        await shop.ended(*jobs, state="completed")
    assert one_by_one == together
    assert sorted(together) == [job.id for job in jobs]


async def test_a_worker_refuses_a_database_without_the_schema(empty_dsn: str) -> None:
    # spec: HO-2
    app = App(empty_dsn)

    @app.task
    async def work() -> None: ...

    async with app:
        with pytest.raises(ConfigurationError, match="shiftwork migrate"):
            await app.arun_worker(signals=False)
    with psycopg.connect(empty_dsn) as connection:
        [many] = connection.execute(
            "select count(*) from pg_namespace where nspname = 'shiftwork'"
        ).fetchone()  # type: ignore[misc]
    assert many == 0
