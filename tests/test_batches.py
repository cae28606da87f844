"""Handlers that take several jobs at once: brought together as they come, and each with an end of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from shiftwork import App, Batch, ConfigurationError, Context, Poison, Retry, State, TableStore
from shiftwork.events import JobBegan, JobReleased
from shiftwork.worker.run import Stop
from shiftwork.worker.transactions import Transactions, Unsure
from tests.test_conformance import TABLE
from tests.workshop import Latch, Workshop

AT_ONCE = Retry(delays=timedelta(), jitter=0)
AsyncTx = psycopg.AsyncConnection[Any]
WITNESS = """
create table witness (xact xid8 default pg_current_xact_id());
create function witness() returns trigger language plpgsql as $$ begin insert into public.witness default values; return null; end $$;
create trigger witness after insert on effects for each row execute function witness();
create trigger witness after insert on shiftwork.history for each row when (new.task = 'work') execute function witness();
create trigger witness after insert on shiftwork.attempts for each row execute function witness();
"""


@pytest.fixture
def app(dsn: str) -> Iterator[App]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("create table effects (effect int)")
    with App(dsn) as app:
        yield app


async def effects(shop: Workshop) -> list[int]:
    return [row["effect"] for row in await shop.rows("select effect from effects order by effect")]


async def write(tx: AsyncTx, number: int) -> None:
    await tx.execute("insert into effects values (%s)", (number,))


async def test_what_is_at_hand_goes_to_the_handler_together(app: App) -> None:
    # spec: A-19
    seen: list[list[int]] = []

    @app.task
    async def double(numbers: Batch[int]) -> list[int]:
        seen.append(numbers.arguments)
        return [2 * number for number in numbers.arguments]

    handles = await app.aenqueue_many([double.job(number) for number in range(7)])
    async with Workshop(app, concurrency=10) as shop:
        await shop.ended(*handles)
    assert seen == [[0, 1, 2, 3, 4, 5, 6]]
    assert [await handle.aresult(timeout=1) for handle in handles] == [0, 2, 4, 6, 8, 10, 12]


async def test_nobody_waits_for_a_batch_to_fill(app: App) -> None:
    # spec: A-19
    seen: list[list[int]] = []
    latch = Latch()

    @app.task(batch=50)
    async def work(numbers: Batch[int]) -> None:
        seen.append(numbers.arguments)
        await latch.hold()

    async with Workshop(app, concurrency=100) as shop:
        first = await work.aenqueue(1)
        await latch.reached()
        second = await work.aenqueue(2)
        await latch.reached(2)
        latch.release()
        await shop.ended(first, second)
    assert seen == [[1], [2]]


async def test_a_batch_has_no_more_than_it_may(app: App) -> None:
    seen: list[int] = []

    @app.task(batch=3)
    async def work(numbers: Batch[int]) -> None:
        seen.append(len(numbers))

    handles = await app.aenqueue_many([work.job(number) for number in range(8)])
    async with Workshop(app, concurrency=20) as shop:
        await shop.ended(*handles)
    assert seen == [3, 3, 2]


async def test_only_jobs_of_the_same_task_come_together(app: App) -> None:
    # spec: A-19
    seen: list[tuple[str, list[int]]] = []

    @app.task
    async def even(numbers: Batch[int]) -> None:
        seen.append(("even", numbers.arguments))

    @app.task
    async def odd(numbers: Batch[int]) -> None:
        seen.append(("odd", numbers.arguments))

    handles = await app.aenqueue_many([(odd if n % 2 else even).job(n) for n in range(6)])
    async with Workshop(app, concurrency=20) as shop:
        await shop.ended(*handles)
    assert sorted(seen) == [("even", [0, 2, 4]), ("odd", [1, 3, 5])]


async def test_what_fails_in_the_block_of_a_job_is_its_failure_alone(app: App) -> None:
    # spec: A-19
    @app.task
    async def work(numbers: Batch[int]) -> list[str]:
        for job in numbers:
            async with job as number:
                if number == 2:
                    raise Poison("two is one too many")
        return [f"{number}" for number in numbers.arguments]

    handles = await app.aenqueue_many([work.job(number) for number in range(4)])
    async with Workshop(app, concurrency=10) as shop:
        await shop.ended(*handles)
    jobs = [await handle.ainfo() for handle in handles]
    assert [job.state for job in jobs] == [
        State.COMPLETED,
        State.COMPLETED,
        State.FAILED,
        State.COMPLETED,
    ]
    assert [await handles[n].aresult(timeout=1) for n in (0, 1, 3)] == ["0", "1", "3"]


async def test_what_fails_outside_is_everybodys_and_then_each_comes_alone(app: App) -> None:
    seen: list[list[int]] = []

    @app.task(retry=AT_ONCE)
    async def work(numbers: Batch[int]) -> None:
        seen.append(numbers.arguments)
        if 2 in numbers.arguments:
            raise ValueError("there is a two") if len(numbers) > 1 else Poison("it is a two")

    handles = await app.aenqueue_many([work.job(number) for number in range(4)])
    async with Workshop(app, concurrency=10) as shop:
        await shop.ended(*handles, state="scheduled")
        await shop.ended(*(handles[n] for n in (0, 1, 3)), state="completed")
        await shop.ended(handles[2], state="failed")
    assert seen[0] == [0, 1, 2, 3]
    assert sorted(seen[1:]) == [[0], [1], [2], [3]]


async def test_a_transactional_batch_is_one_commit_and_each_job_has_a_savepoint(app: App) -> None:
    # spec: A-19
    with psycopg.connect(app.settings.dsn or "", autocommit=True) as connection:
        connection.execute(WITNESS)
    calls: list[int] = []

    @app.task
    async def follow_up(number: int) -> None: ...

    @app.task(transaction=True)
    async def work(numbers: Batch[int], tx: AsyncTx) -> None:
        calls.append(len(numbers))
        for job in numbers:
            async with job as number:
                await write(tx, number)
                job.context.enqueue(follow_up.job(number))
                if number == 2:
                    await tx.execute("select 1 / 0")

    handles = await app.aenqueue_many([work.job(number) for number in range(5)])
    async with Workshop(app, concurrency=10) as shop:
        await shop.ended(*(handle for n, handle in enumerate(handles) if n != 2))
        await shop.ended(handles[2], state="scheduled")
        assert await effects(shop) == [0, 1, 3, 4]
        commits = await shop.rows("select distinct xact from witness")
        sent = await shop.rows(
            "select (payload ->> 'number')::int as n from shiftwork.all_jobs where task = 'follow_up' order by n"
        )
    assert calls == [5]
    assert len(commits) == 1
    assert [row["n"] for row in sent] == [0, 1, 3, 4]


async def test_a_transactional_batch_that_fails_as_a_whole_leaves_nothing_behind(app: App) -> None:
    @app.task(transaction=True, retry=Retry(max_attempts=1))
    async def work(numbers: Batch[int], tx: AsyncTx) -> None:
        for job in numbers:
            async with job as number:
                await write(tx, number)
        raise ValueError("all in vain")

    handles = await app.aenqueue_many([work.job(number) for number in range(3)])
    async with Workshop(app, concurrency=10) as shop:
        await shop.ended(*handles)
        assert await effects(shop) == []
    for handle in handles:
        job = await handle.ainfo()
        assert job.state is State.FAILED
        assert job.error is not None
        assert job.error["message"] == "all in vain"


async def test_a_session_is_used_by_a_batch_and_not_by_each_of_its_jobs(app: App) -> None:
    latch = Latch()

    @app.task(transaction=True)
    async def work(numbers: Batch[int], tx: AsyncTx) -> None:
        assert len(numbers) == 20
        await latch.hold()

    handles = await app.aenqueue_many([work.job(number) for number in range(20)])
    async with Workshop(app, concurrency=50, transactions=1) as shop:
        await latch.reached()
        latch.release()
        await shop.ended(*handles, state="completed")
    assert latch.arrived == 1


async def test_jobs_gather_while_their_batch_waits_for_a_session(app: App) -> None:
    seen: list[list[int]] = []
    latch = Latch()

    @app.task(transaction=True)
    async def work(numbers: Batch[int], tx: AsyncTx) -> None:
        seen.append(numbers.arguments)
        await latch.hold()

    async with Workshop(app, concurrency=50, transactions=1) as shop:
        first = await work.aenqueue(0)
        await latch.reached()
        later = []
        for number in (1, 2, 3):
            later.append(await work.aenqueue(number))
            await shop.event(JobBegan, job=later[-1])
        latch.release()
        await shop.ended(first, *later, state="completed")
    assert seen == [[0], [1, 2, 3]]


async def test_a_job_that_is_cancelled_leaves_the_others_to_go_on(app: App) -> None:
    latch = Latch()
    seen: list[str | None] = []

    @app.task
    async def work(numbers: Batch[int]) -> None:
        await latch.hold()
        seen.extend(job.context.cancelled for job in numbers)

    handles = await app.aenqueue_many([work.job(number) for number in range(3)])
    async with Workshop(app, concurrency=10) as shop:
        await latch.reached()
        await handles[1].acancel()
        await shop.ended(handles[1], state="cancelled")
        latch.release()
        await shop.ended(handles[0], handles[2], state="completed")
    assert seen == [None, "cancelled", None]


async def test_a_job_that_is_cancelled_in_a_transaction_takes_it_back_and_the_others_run_again(
    app: App,
) -> None:
    latch = Latch()

    @app.task(transaction=True)
    async def work(numbers: Batch[int], tx: AsyncTx) -> None:
        for job in numbers:
            async with job as number:
                await write(tx, number)
        await latch.hold()

    handles = await app.aenqueue_many([work.job(number) for number in range(3)])
    async with Workshop(app, concurrency=10) as shop:
        await latch.reached()
        latch.release()
        shop.worker.tell(shop.worker.holding[handles[1].id], Stop.CANCELLED, "")
        await shop.ended(handles[1], state="cancelled")
        await shop.ended(handles[0], handles[2], state="completed")
        assert await effects(shop) == [0, 2]
        again = await shop.rows(
            "select failures, resets, attempt from shiftwork.history where state = 'completed'"
        )
    assert again == [{"failures": 0, "resets": 0, "attempt": 2}] * 2


async def test_all_jobs_of_a_batch_that_takes_too_long_have_failed(app: App) -> None:
    @app.task(timeout=timedelta(milliseconds=50), retry=Retry(max_attempts=1))
    async def work(numbers: Batch[int]) -> None:
        await asyncio.Event().wait()

    @app.task(timeout=timedelta(milliseconds=50), retry=Retry(max_attempts=1), transaction=True)
    async def book(numbers: Batch[int], tx: AsyncTx) -> None:
        await tx.execute("select pg_sleep(600)")

    handles = await app.aenqueue_many([task.job(number) for task in (work, book) for number in range(3)])
    async with Workshop(app, concurrency=10) as shop:
        await shop.ended(*handles, state="failed")
        codes = {(await shop.job(handle)).error["code"] for handle in handles}  # type: ignore[index]
    assert codes == {"TASK_TIMEOUT"}


@pytest.mark.parametrize("transaction", [False, True])
async def test_a_worker_that_stops_gives_back_all_of_a_batch(app: App, transaction: bool) -> None:
    latch = Latch()
    ends: list[str] = []

    async def hold() -> None:
        try:
            await latch.hold()
        finally:
            ends.append("ended")

    if transaction:

        @app.task(name="work", transaction=True)
        async def book(numbers: Batch[int], tx: AsyncTx) -> None:
            await write(tx, 1)
            await hold()

    else:

        @app.task(name="work")
        async def work(numbers: Batch[int]) -> None:
            await hold()

    handles = await app.aenqueue_many([app.find("work").job(number) for number in range(3)])
    async with Workshop(app, concurrency=10, grace=timedelta()) as shop:
        await latch.reached()
        shop.worker.stop("enough")
        assert await shop.stopped()
        assert len(shop.seen(JobReleased)) == 3
        assert await effects(shop) == []
        waiting = await shop.rows("select state, attempt, failures, resets from shiftwork.jobs")
    assert waiting == [{"state": "ready", "attempt": 1, "failures": 0, "resets": 0}] * 3
    assert ends == ["ended"]
    assert handles


async def test_a_batch_that_ends_since_one_of_its_jobs_was_stopped_is_not_hit_again_for_another(
    app: App,
) -> None:
    working, ending = Latch(), Latch()
    ends: list[str] = []

    @app.task(transaction=True)
    async def work(numbers: Batch[int], tx: AsyncTx) -> None:
        if len(numbers) == 1:
            return
        try:
            await working.hold()
        finally:
            await ending.hold()
            ends.append("cleaned up")

    handles = await app.aenqueue_many([work.job(number) for number in range(3)])
    async with Workshop(app, concurrency=10) as shop:
        await working.reached()
        one, other, _ = (shop.worker.holding[handle.id] for handle in handles)
        shop.worker.tell(one, Stop.CANCELLED, "")
        await ending.reached()
        shop.worker.tell(other, Stop.CANCELLED, "")
        await asyncio.sleep(0)
        ending.release()
        await shop.ended(*handles[:2], state="cancelled")
        await shop.ended(handles[2], state="completed")
    assert ends == ["cleaned up"]


async def test_a_batch_that_was_told_of_a_loss_commits_nothing(app: App) -> None:
    """One of its jobs was taken away while the session was being opened: the fence refuses all, and the rest runs again."""
    seen: list[list[int]] = []

    @app.task(transaction=True)
    async def work(numbers: Batch[int], tx: AsyncTx) -> None:
        seen.append(sorted(numbers.arguments))
        for number in numbers.arguments:
            await write(tx, number)

    handles = await app.aenqueue_many([work.job(number) for number in range(3)])
    async with Workshop(app, concurrency=10) as shop:
        gate = shop.gate("began")
        await gate.reached()
        await shop.rows("update shiftwork.jobs set attempt = attempt + 1 where id = %s", handles[1].id)
        gate.open()
        await shop.ended(handles[0], handles[2], state="completed")
        assert await effects(shop) == [0, 2]
        await shop.rows("delete from shiftwork.jobs")
    assert seen == [[0, 2]]


async def test_an_answer_lost_at_the_commit_of_a_batch_is_asked_for(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute = Transactions._execute
    lost: list[str] = []

    async def losing(self: Transactions, connection: Any, statement: Any, *, commits: bool = False) -> None:
        await execute(self, connection, statement, commits=commits)
        if commits and not lost:
            lost.append("the answer")
            connection.pgconn.finish()
            raise Unsure("the line was cut")

    monkeypatch.setattr(Transactions, "_execute", losing)

    @app.task(transaction=True)
    async def work(numbers: Batch[int], tx: AsyncTx) -> None:
        for number in numbers.arguments:
            await write(tx, number)

    handles = await app.aenqueue_many([work.job(number) for number in range(3)])
    async with Workshop(app, concurrency=10) as shop:
        await shop.ended(*handles, state="completed")
        assert await effects(shop) == [0, 1, 2]
    assert lost


async def test_a_job_that_somebody_has_locked_keeps_no_others_waiting(app: App) -> None:
    @app.task(transaction=True, retry=Retry(max_attempts=1))
    async def work(numbers: Batch[int], tx: AsyncTx) -> None:
        [row] = await (await tx.execute("show lock_timeout")).fetchall()
        for job in numbers:
            async with job as number:
                assert row == ("0",)
                await write(tx, number)

    handles = await app.aenqueue_many([work.job(number) for number in range(4)])
    async with Workshop(app, concurrency=10) as shop:
        gate = shop.gate("began")
        await gate.reached()
        async with await psycopg.AsyncConnection.connect(app.settings.dsn or "") as somebody:
            await somebody.execute("select from shiftwork.jobs where id = %s for update", (handles[0].id,))
            gate.open()
            await shop.ended(*handles[1:], state="completed")
        await shop.ended(handles[0], state="completed")
        assert await effects(shop) == [0, 1, 2, 3]


async def test_a_result_that_cannot_be_kept_undoes_a_transactional_batch(app: App) -> None:
    @app.task(transaction=True, retry=Retry(max_attempts=1))
    async def work(numbers: Batch[int], tx: AsyncTx) -> list[int]:
        await write(tx, 1)
        return [1, 2, "three"]  # type: ignore[list-item]

    handles = await app.aenqueue_many([work.job(number) for number in range(3)])
    async with Workshop(app, concurrency=10) as shop:
        await shop.ended(*handles, state="failed")
        assert await effects(shop) == []
        errors = [(await shop.job(handle)).error for handle in handles]
    assert {error["code"] for error in errors if error} == {"RETURN_TYPE_MISMATCH"}


async def test_too_few_results_are_refused(app: App) -> None:
    @app.task(retry=Retry(max_attempts=1))
    async def work(numbers: Batch[int]) -> list[int]:
        return [1]

    handles = await app.aenqueue_many([work.job(number) for number in range(3)])
    async with Workshop(app, concurrency=10) as shop:
        await shop.ended(*handles, state="failed")
        error = (await shop.job(handles[0])).error
    assert error is not None
    assert "was given 3 jobs and returned 1" in error["message"]


async def test_arguments_that_do_not_fit_fail_alone(app: App) -> None:
    seen: list[list[int]] = []

    @app.task
    async def work(numbers: Batch[int]) -> None:
        seen.append(numbers.arguments)

    async with Workshop(app, concurrency=10) as shop:
        gate = shop.gate("claiming")
        await gate.reached()
        rows = await shop.rows(
            "select (shiftwork.enqueue('work', payload)).id from unnest(array['{\"numbers\": 1}', '{\"numbers\": \"x\"}', "
            "'{\"numbers\": 3}']::jsonb[]) as payload"
        )
        gate.open()
        one, bad, three = (row["id"] for row in rows)
        await shop.ended(one, three, state="completed")
        await shop.ended(bad, state="failed")
    assert sorted(number for numbers in seen for number in numbers) == [1, 3]


async def test_middleware_and_hooks_see_each_job_by_itself(app: App) -> None:
    seen: list[tuple[str, int]] = []

    @app.middleware
    async def layer(context: Context, call: Callable[[], Awaitable[Any]]) -> Any:
        seen.append(("middleware", context.job.payload["numbers"]))
        return await call()

    @app.before_job
    def before(job: Any) -> None:
        seen.append(("before", job.payload["numbers"]))

    @app.task
    async def work(numbers: Batch[int]) -> None:
        seen.append(("handler", len(numbers)))

    handles = await app.aenqueue_many([work.job(number) for number in range(3)])
    async with Workshop(app, concurrency=10) as shop:
        await shop.ended(*handles, state="completed")
    assert sorted(seen) == [
        *(("before", n) for n in range(3)),
        ("handler", 3),
        *(("middleware", n) for n in range(3)),
    ]


async def test_a_handler_that_was_hit_by_a_deadlock_is_called_again_on_the_spot(app: App) -> None:
    calls: list[int] = []

    @app.task(transaction=True, retry=Retry(at_once=2))
    async def work(numbers: Batch[int], tx: AsyncTx) -> None:
        calls.append(len(numbers))
        await write(tx, len(calls))
        if len(calls) == 1:
            raise psycopg.errors.DeadlockDetected("hit")

    handles = await app.aenqueue_many([work.job(number) for number in range(2)])
    async with Workshop(app, concurrency=10) as shop:
        await shop.ended(*handles, state="completed")
        assert await effects(shop) == [2]
    assert calls == [2, 2]


async def test_a_job_that_lost_its_worker_comes_alone(app: App) -> None:
    """It may be the one that kills them: its neighbours would run out of resets with it."""
    seen: list[list[int]] = []

    @app.task
    async def work(numbers: Batch[int]) -> None:
        seen.append(numbers.arguments)

    handles = await app.aenqueue_many([work.job(number) for number in range(4)])
    with psycopg.connect(app.settings.dsn or "", autocommit=True) as connection:
        connection.execute("update shiftwork.jobs set resets = 1 where id = %s", (handles[2].id,))
    async with Workshop(app, concurrency=10) as shop:
        await shop.ended(*handles)
    assert sorted(seen) == [[0, 1, 3], [2]]


async def test_a_batch_does_not_wait_for_other_jobs_that_keep_coming(app: App) -> None:
    order: list[str] = []

    @app.task
    async def together(numbers: Batch[int]) -> None:
        order.append("together")

    @app.task
    async def apart(number: int) -> None:
        time.sleep(0.002)  # the next ones are claimed before all of these have begun
        order.append("apart")

    jobs = [apart.job(number) for number in range(800)]
    await app.aenqueue_many([*jobs[:100], together.job(1), *jobs[100:]])
    async with Workshop(app, concurrency=100) as shop:
        await shop.until(lambda: len(order) == 801)
    assert order.index("together") < 600


@pytest.mark.parametrize("how", ["within another", "at once", "twice", "left open"])
async def test_blocks_that_cannot_be_undone_each_by_itself_are_refused(app: App, how: str) -> None:
    """Savepoints lie one within the other: what another job did meanwhile would go with a failure, or stay in spite of it."""
    left: list[asyncio.Task[None]] = []
    latch = Latch()

    @app.task(transaction=True, retry=Retry(max_attempts=1))
    async def work(numbers: Batch[int], tx: AsyncTx) -> None:
        async def keep(job: Any) -> None:
            async with job as number:
                await write(tx, number)
                if how == "left open":
                    await latch.hold()
                    await write(tx, number)

        one, other = numbers
        match how:
            case "within another":
                async with one:
                    await keep(other)
                    raise ValueError("which undoes both")
            case "at once":
                await asyncio.gather(keep(one), keep(other))
            case "twice":
                await keep(one)
                await keep(one)
            case _:
                left.append(asyncio.create_task(keep(one)))
                await latch.reached()

    handles = await app.aenqueue_many([work.job(number) for number in range(2)])
    async with Workshop(app, concurrency=10) as shop:
        await shop.ended(*handles, state="failed")
        errors = [(await shop.job(handle)).error for handle in handles]
        latch.release()
        await asyncio.gather(*left)
        assert await effects(shop) == []
    assert {error["type"] for error in errors if error} == {"shiftwork.errors.ConfigurationError"}


async def test_a_job_that_failed_in_a_block_has_failed_whatever_comes_after(app: App) -> None:
    @app.task(retry=Retry(max_attempts=1))
    async def work(numbers: Batch[int]) -> None:
        for job in numbers:
            async with job:
                next(iter([]))
        for job in numbers:
            async with job:
                pass

    handles = await app.aenqueue_many([work.job(number) for number in range(2)])
    async with Workshop(app, concurrency=10) as shop:
        await shop.ended(*handles, state="failed")
        errors = [(await shop.job(handle)).error for handle in handles]
    assert {error["message"] for error in errors if error} == {"the block of a job raised StopIteration"}


@pytest.mark.parametrize("transaction", [False, True])
@pytest.mark.parametrize(
    "error", [SystemExit, KeyboardInterrupt, asyncio.CancelledError, StopAsyncIteration, GeneratorExit]
)
async def test_whatever_a_handler_raises_no_job_waits_for_ever(
    app: App, transaction: bool, error: type[BaseException]
) -> None:
    if transaction:

        @app.task(name="work", transaction=True)
        async def book(numbers: Batch[int], tx: AsyncTx) -> None:
            await write(tx, 1)
            if numbers[0].context.job.attempt == 1:
                raise error

    else:

        @app.task(name="work", retry=AT_ONCE)
        async def work(numbers: Batch[int]) -> None:
            if numbers[0].context.job.attempt == 1:
                raise error

    handles = await app.aenqueue_many([app.find("work").job(number) for number in range(2)])
    async with Workshop(app, concurrency=10) as shop:
        # What is closed from outside is given back.
        state = "completed" if error is GeneratorExit else "scheduled"
        await shop.ended(*handles, state=state)
        assert await effects(shop) == [1] * (transaction and error is GeneratorExit)


async def test_the_time_of_a_batch_begins_once_it_has_a_session(app: App) -> None:
    latch = Latch()
    timeout = timedelta(milliseconds=20)

    @app.task(transaction=True)
    async def hold(tx: AsyncTx) -> None:
        await latch.hold()

    @app.task(transaction=True, timeout=timeout, retry=Retry(max_attempts=1))
    async def work(numbers: Batch[int], tx: AsyncTx) -> None: ...

    @app.task(timeout=timeout, retry=Retry(max_attempts=1))
    async def clock() -> None:
        await asyncio.Event().wait()

    async with Workshop(app, concurrency=10, transactions=1) as shop:
        holding = await hold.aenqueue()
        await latch.reached()
        waiting = await work.aenqueue(1)
        await shop.event(JobBegan, job=waiting)
        await shop.ended(await clock.aenqueue(), state="failed")  # as much time has passed
        latch.release()
        await shop.ended(holding, waiting, state="completed")


async def test_middleware_that_waits_no_longer_ends_a_batch_for_which_nobody_else_waits(app: App) -> None:
    latch = Latch()
    ends: list[str] = []

    @app.middleware
    async def impatient(context: Context, call: Callable[[], Awaitable[Any]]) -> Any:
        async with asyncio.timeout(None) as limit:
            calls = asyncio.ensure_future(latch.reached())
            calls.add_done_callback(lambda _: limit.reschedule(0))
            return await call()

    @app.task(retry=Retry(max_attempts=1))
    async def work(numbers: Batch[int]) -> None:
        try:
            await latch.hold()
        finally:
            ends.append("ended")

    handles = await app.aenqueue_many([work.job(number) for number in range(3)])
    async with Workshop(app, concurrency=10) as shop:
        await shop.ended(*handles, state="failed")
        assert ends == ["ended"]


async def test_middleware_that_waits_no_longer_while_a_batch_is_committed_changes_nothing(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = Transactions.close_together
    latch = Latch()

    async def slow(self: Transactions, *given: Any) -> Any:
        written = await close(self, *given)
        await latch.hold()
        return written

    monkeypatch.setattr(Transactions, "close_together", slow)

    @app.middleware
    async def impatient(context: Context, call: Callable[[], Awaitable[Any]]) -> Any:
        calling = asyncio.ensure_future(call())
        if context.job.payload["numbers"] == 1:
            await latch.reached()
            calling.cancel()
            latch.release()
        return await calling

    @app.task(transaction=True)
    async def work(numbers: Batch[int], tx: AsyncTx) -> None:
        for number in numbers.arguments:
            await write(tx, number)

    handles = await app.aenqueue_many([work.job(number) for number in range(3)])
    async with Workshop(app, concurrency=10) as shop:
        await shop.ended(*handles, state="completed")
        assert await effects(shop) == [0, 1, 2]


async def test_middleware_may_call_a_handler_twice_at_once(app: App) -> None:
    @app.middleware
    async def twice(context: Context, call: Callable[[], Awaitable[Any]]) -> Any:
        one, other = await asyncio.gather(call(), call())
        return one + other

    @app.task
    async def work(numbers: Batch[int]) -> list[int]:
        return numbers.arguments

    handle = await work.aenqueue(2)
    async with Workshop(app, concurrency=10) as shop:
        await shop.ended(handle, state="completed")
    assert await handle.aresult(timeout=1) == 4


async def test_a_handler_that_will_not_end_does_not_keep_its_worker_from_ending(app: App) -> None:
    others = asyncio.all_tasks()
    latch = Latch()

    @app.task
    async def work(numbers: Batch[int]) -> None:
        while True:
            try:
                await latch.hold()
            except asyncio.CancelledError:
                continue

    await work.aenqueue(1)
    async with Workshop(app, concurrency=10, grace=timedelta()) as shop:
        await latch.reached()
        shop.worker.stop("enough")
        assert not await shop.stopped()
    for task in asyncio.all_tasks() - others:
        await asyncio.wait([task], timeout=1)
        assert task.done()


@pytest.mark.parametrize("attempts", [False, True], ids=["fenced by its lease", "fenced by its attempt"])
async def test_rows_of_a_table_come_together_as_well(
    connection: psycopg.Connection[dict[str, Any]], dsn: str, attempts: bool
) -> None:
    connection.execute(TABLE.encode())
    connection.execute("create table effects (effect int)")
    if attempts:
        connection.execute("alter table example_jobs add attempt int not null default 0")
    connection.execute("insert into example_jobs (repository_id) select n from generate_series(1, 5) as n")
    store = TableStore("example_jobs", dsn=dsn, retry=Retry(max_attempts=1))
    seen: list[int] = []

    @store.handler(transaction=True, batch=10)
    async def handle(rows: Batch[dict[str, Any]], tx: AsyncTx) -> None:
        seen.append(len(rows))
        for job in rows:
            async with job as row:
                await write(tx, row["repository_id"])
                if row["repository_id"] == 3:
                    await tx.execute("select 1 / 0")

    async with Workshop(store, concurrency=10) as shop:
        await shop.ended(1, 2, 4, 5, state="completed")
        await shop.ended(3, state="failed")
        assert await effects(shop) == [1, 2, 4, 5]
        states = await shop.rows("select state from example_jobs order by id")
    assert [row["state"] for row in states] == ["completed", "completed", "failed", "completed", "completed"]
    assert seen == [5]


@dataclass
class Point:
    x: int
    y: int


async def test_a_batch_can_be_handed_in_by_hand(app: App) -> None:
    @app.task
    async def add(points: Batch[Point]) -> list[int]:
        sums = []
        for job in points:
            async with job as point:
                sums.append(point.x + point.y)
        return sums

    assert await add(Batch.of(Point(1, 2), Point(3, 4))) == [3, 7]
    with pytest.raises(LookupError, match="in the hands of a worker"):
        _ = Batch.of(1)[0].context
    handle = await add.aenqueue(Point(5, 6))
    async with Workshop(app) as shop:
        await shop.ended(handle, state="completed")
    assert await handle.aresult(timeout=1) == 11


def test_what_cannot_be_given_several_jobs_is_refused_when_it_is_declared(app: App) -> None:
    with pytest.raises(ConfigurationError, match="write async def"):

        @app.task(name="plain")
        def plain(numbers: Batch[int]) -> None: ...

    with pytest.raises(ConfigurationError, match=r"write job\.context"):

        @app.task(name="context")
        async def context(numbers: Batch[int], context: Context) -> None: ...

    with pytest.raises(ConfigurationError, match="it takes numbers, more"):

        @app.task(name="more")
        async def more(numbers: Batch[int], more: str) -> None: ...

    with pytest.raises(ConfigurationError, match="no more than 2 of them"):

        @app.task(name="many", batch=3, concurrency=2)
        async def many(numbers: Batch[int]) -> None: ...

    with pytest.raises(ConfigurationError, match="no parameter takes several jobs"):

        @app.task(name="none", batch=3)
        async def none(number: int) -> None: ...

    with pytest.raises(ConfigurationError, match="batch is 0; it must be"):

        @app.task(name="zero", batch=0)
        async def zero(numbers: Batch[int]) -> None: ...
