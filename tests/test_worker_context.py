"""What a handler can know and say while it runs, what may be put around it, and what is told of it."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from shiftwork import App, ConfigurationError, Context, FenceLost, InvalidArgument, Retry, State
from shiftwork.events import JobBegan, JobEnded, JobLost
from shiftwork.logs import JsonFormatter, Stream, Telling, TextFormatter
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


# Knowing.


async def test_a_handler_knows_its_job_its_attempt_and_its_deadline(app: App) -> None:
    # spec: HO-9, D-9, D-14
    known: list[Context] = []

    @app.task(timeout=timedelta(minutes=7), retry=AT_ONCE)
    async def work(context: Context, number: int) -> None:
        known.append(context)
        if context.attempt < 2:
            raise ValueError("again")

    @app.task
    def endless(context: Context, number: int) -> None:
        known.append(context)

    async with app, Workshop(app) as shop:
        job = await work.using(tags=["blue"], priority=3).aenqueue(5)
        await shop.ended(job, state="completed")
        other = await endless.aenqueue(6)
        await shop.ended(other)
        first, second, third = known
        assert (first.attempt, second.attempt, third.attempt) == (1, 2, 1)
        assert (second.job.id, second.job.task, second.job.queue) == (job.id, "work", "default")
        assert (second.job.priority, second.job.tags, second.job.payload) == (3, ("blue",), {"number": 5})
        assert (second.job.failures, second.job.worker) == (1, shop.worker.id)
        found = await job.ainfo()
        assert found.started_at is not None
        assert second.job.started_at == found.started_at
        assert second.deadline == found.started_at + timedelta(minutes=7)
        assert (third.deadline, third.cancelled) == (None, None)
        assert (third.job.id, third.job.payload) == (other.id, {"number": 6})


async def test_the_deadline_of_a_job_fetched_ahead_is_counted_from_its_beginning(app: App) -> None:
    # spec: D-14
    latch = Latch()
    known: list[Context] = []

    @app.task(timeout=timedelta(minutes=7))
    async def work(context: Context) -> None:
        known.append(context)
        await latch.hold()

    async with app, Workshop(app, concurrency=1, prefetch=1) as shop:
        jobs = [await work.aenqueue() for _ in range(2)]
        await latch.reached()
        await shop.until(lambda: len(shop.worker._backlog) == 1, "one is fetched ahead")
        before = datetime.now(UTC)
        latch.release()
        await shop.ended(*jobs)
        deadline = known[1].deadline
        assert deadline is not None
        # Half a second for two clocks, read one after the other.
        assert deadline > before + timedelta(minutes=7) - timedelta(seconds=0.5)


# Saying.


@pytest.mark.parametrize("plain", [False, True], ids=["async", "plain"])
async def test_progress_and_log_lines_can_be_read_while_it_runs_and_afterwards(app: App, plain: bool) -> None:
    # spec: D-28
    latch = Latch()

    def say(context: Context) -> None:
        context.progress(0.25, "a quarter")
        context.log.info("seen %s of %s", 1, 4)
        context.progress(0.5, "half\x00 of it")
        context.log.warning("one\nodd: %(what)s", {"what": "thing"})
        context.log.debug("not a %d", "number")

    def end(context: Context) -> None:
        context.progress(1)
        context.log.error("the last word")

    @app.task
    def plain_work(context: Context) -> None:
        say(context)
        latch.hold_blocking()
        end(context)

    @app.task
    async def async_work(context: Context) -> None:
        say(context)
        await latch.hold()
        end(context)

    work = plain_work if plain else async_work

    async with app, Workshop(app) as shop:
        job = await work.aenqueue()
        await latch.reached()
        lines = await shop.found(job.alogs)
        progress = await shop.found(job.aprogress)
        assert (await job.ainfo()).state is State.RUNNING
        assert progress is not None
        assert progress[:2] == (0.5, "half\N{REPLACEMENT CHARACTER} of it")
        assert [(line.level, line.message) for line in lines] == [
            ("info", "seen 1 of 4"),
            ("warning", "one\nodd: thing"),
            ("debug", "'not a %d' ('number',)"),
        ]
        latch.release()
        await shop.ended(job, state="completed")
        assert [line.message for line in await job.alogs()][-1] == "the last word"
        last = await job.aprogress()
        assert last is not None
        assert last.fraction == 1


async def test_progress_goes_from_nothing_to_all(app: App) -> None:
    @app.task
    async def work(context: Context) -> None:
        for wrong in (-0.1, 1.1, float("nan")):
            with pytest.raises(InvalidArgument, match="from 0 to 1"):
                context.progress(wrong)

    async with app, Workshop(app) as shop:
        job = await work.aenqueue()
        await shop.ended(job, state="completed")


async def test_what_a_job_enqueues_comes_into_being_with_its_completion_and_only_then(app: App) -> None:
    # spec: HO-10, SH-30, QU-20
    latch = Latch()

    @app.task(queue="unserved")
    async def follow_up(number: int) -> None: ...

    @app.task(retry=AT_ONCE)
    async def work(context: Context) -> None:
        context.enqueue(*(follow_up.job(context.attempt * 10 + number) for number in range(2)))
        if context.attempt == 1:
            raise ValueError("again")
        await latch.hold()

    @app.task(retry=Retry.never())
    def wrong(context: Context) -> None:
        context.enqueue({"task": "follow_up"})  # type: ignore[arg-type]

    counted = "select count(*) from shiftwork.jobs where queue = 'unserved'"
    async with app, Workshop(app, queues="default") as shop:
        job = await work.aenqueue()
        await latch.reached()
        assert await shop.value(counted) == 0
        latch.release()
        await shop.ended(job, state="completed")
        rows = await shop.rows("select payload from shiftwork.jobs where queue = 'unserved' order by id")
        assert [row["payload"] for row in rows] == [{"number": 20}, {"number": 21}]
        bad = await wrong.aenqueue()
        await shop.ended(bad, state="failed")
        assert await shop.value(counted) == 2


async def test_a_job_is_completed_although_a_trigger_keeps_one_of_those_out_that_it_enqueued(
    app: App,
) -> None:
    @app.task
    async def wanted() -> None: ...

    @app.task
    async def unwanted() -> None: ...

    @app.task
    async def chain(context: Context) -> None:
        context.enqueue(wanted.job(), unwanted.job(), unwanted.using(unique="k").job())

    async with app, Workshop(app) as shop:
        await shop.rows(
            """create function rule() returns trigger language plpgsql as $$ begin return null; end $$;
               create trigger rule before insert on shiftwork.jobs for each row when (new.task = 'unwanted')
                 execute function rule()"""
        )
        job = await chain.aenqueue()
        await shop.ended(job, state="completed")
        tasks = await shop.rows("select distinct task from shiftwork.all_jobs order by task")
    assert [row["task"] for row in tasks] == ["chain", "wanted"]


async def test_what_cannot_be_enqueued_is_no_completion(app: App) -> None:
    # spec: HO-10
    @app.task(queue="unserved")
    async def follow_up() -> None: ...

    @app.task
    async def work(context: Context) -> None:
        context.enqueue(follow_up.using(unique="one", action="refuse", scope="unfinished", priority=7).job())

    first = await follow_up.using(unique="one", scope="unfinished").aenqueue()
    async with app, Workshop(app, queues="default") as shop:
        job = await work.aenqueue()
        await shop.ended(job, state="failed")
        found = await job.ainfo()
        assert found.error is not None
        assert found.error["code"] == "OUTCOME_REFUSED"
        rows = await shop.rows("select id from shiftwork.jobs")
        assert [row["id"] for row in rows] == [first.id]


# Ending in a transaction of one's own.


@pytest.mark.parametrize("plain", [False, True], ids=["async", "plain"])
async def test_the_fence_holds_for_a_transaction_of_ones_own(app: App, dsn: str, plain: bool) -> None:
    # spec: D-16, D-1
    latch, lost = Latch(), list[BaseException]()

    @app.task
    def plain_work(context: Context) -> None:
        with psycopg.connect(dsn) as own:
            context.fence(own)
            own.execute("insert into effects values ('while it was ours')")
        latch.hold_blocking()
        with psycopg.connect(dsn) as own:
            own.execute("insert into effects values ('too late')")
            try:
                context.fence(own)
            except FenceLost as error:
                lost.append(error)
                raise

    @app.task
    async def async_work(context: Context) -> None:
        async with await psycopg.AsyncConnection.connect(dsn) as own:
            await context.fence(own)
            await own.execute("insert into effects values ('while it was ours')")
        await latch.hold()
        async with await psycopg.AsyncConnection.connect(dsn) as own:
            await own.execute("insert into effects values ('too late')")
            try:
                await context.fence(own)
            except FenceLost as error:
                lost.append(error)
                raise

    work = plain_work if plain else async_work

    async with app, Workshop(app, lease=timedelta(minutes=5)) as shop:
        job = await work.aenqueue()
        await latch.reached()
        await shop.rows("update shiftwork.jobs set attempt = attempt + 1")  # as if another had it now
        latch.release()
        await shop.event(JobLost, job=job)
        assert len(lost) == 1
        assert await effects(shop) == ["while it was ours"]
        await shop.rows("delete from shiftwork.jobs")


def finishing_task(app: App, dsn: str, *, plain: bool, end: Callable[[Context], None]) -> Any:
    """A task that ends in a transaction of its own, which `end` may break."""

    @app.task(retry=AT_ONCE)
    def plain_work(context: Context) -> str:
        with psycopg.connect(dsn) as own:
            own.execute("insert into effects values (%s)", (f"attempt {context.attempt}",))
            context.finish(own, "in the transaction")
            end(context)
        return "returned"

    @app.task(retry=AT_ONCE)
    async def async_work(context: Context) -> str:
        async with await psycopg.AsyncConnection.connect(dsn) as own:
            await own.execute("insert into effects values (%s)", (f"attempt {context.attempt}",))
            await context.finish(own, "in the transaction")
            end(context)
        return "returned"

    return plain_work if plain else async_work


both = pytest.mark.parametrize("plain", [False, True], ids=["async", "plain"])


@both
async def test_a_job_can_end_in_the_handlers_own_transaction(app: App, dsn: str, plain: bool) -> None:
    # spec: QU-18
    @app.task(queue="unserved")
    async def follow_up() -> None: ...

    work = finishing_task(app, dsn, plain=plain, end=lambda context: None)
    async with app, Workshop(app, queues="default") as shop:
        job = await work.aenqueue()
        await shop.ended(job, state="completed")
        found = await job.ainfo()
        assert (found.result, found.attempt, found.failures) == ("in the transaction", 1, 0)
        assert await effects(shop) == ["attempt 1"]
        assert not shop.seen(JobLost)
        assert not shop.worker.holding


@both
async def test_an_end_that_is_rolled_back_is_none(app: App, dsn: str, plain: bool) -> None:
    # spec: QU-18, QU-19
    def end(context: Context) -> None:
        if context.attempt == 1:
            raise psycopg.Rollback  # undone, and nobody is told of it
        if context.attempt == 2:
            raise ValueError("after all")

    @app.task(retry=AT_ONCE)
    def plain_work(context: Context) -> str:
        with psycopg.connect(dsn) as own, own.transaction():
            own.execute("insert into effects values (%s)", (f"attempt {context.attempt}",))
            context.finish(own, "done")
            end(context)
        return "returned"

    @app.task(retry=AT_ONCE)
    async def async_work(context: Context) -> str:
        async with await psycopg.AsyncConnection.connect(dsn) as own, own.transaction():
            await own.execute("insert into effects values (%s)", (f"attempt {context.attempt}",))
            await context.finish(own, "done")
            end(context)
        return "returned"

    work = plain_work if plain else async_work

    async with app, Workshop(app) as shop:
        job = await work.aenqueue()
        await shop.ended(job, state="completed")
        found = await job.ainfo()
        assert (found.result, found.attempt, found.failures) == ("done", 3, 2)
        assert [attempt.code for attempt in found.attempts] == ["FINISH_UNDONE", "ValueError"]
        assert await effects(shop) == ["attempt 3"]


async def test_an_error_after_the_end_was_committed_changes_nothing(app: App, dsn: str) -> None:
    # spec: QU-18
    @app.task(retry=AT_ONCE)
    async def work(context: Context) -> None:
        async with await psycopg.AsyncConnection.connect(dsn) as own:
            await context.finish(own)
        raise ValueError("too late")

    async with app, Workshop(app) as shop:
        job = await work.aenqueue()
        await shop.ended(job, state="completed")
        found = await job.ainfo()
        assert (found.state, found.failures, found.attempt) == (State.COMPLETED, 0, 1)


async def test_a_job_that_was_taken_away_cannot_be_finished(app: App, dsn: str) -> None:
    # spec: D-16, QU-18
    lost: list[str] = []
    latch = Latch()

    @app.task
    async def work(context: Context) -> None:
        await latch.hold()
        async with await psycopg.AsyncConnection.connect(dsn) as own:
            await own.execute("insert into effects values ('too late')")
            try:
                await context.finish(own)
            except FenceLost as error:
                lost.append(str(error))
                await own.rollback()

    async with app, Workshop(app, lease=timedelta(minutes=5)) as shop:
        job = await work.aenqueue()
        await latch.reached()
        await shop.rows("update shiftwork.jobs set attempt = attempt + 1")
        latch.release()
        await shop.event(JobLost, job=job)
        assert len(lost) == 1
        assert await effects(shop) == []
        await shop.rows("delete from shiftwork.jobs")


@both
async def test_long_work_can_be_prepared_outside_and_finished_in_a_transaction(app: App, plain: bool) -> None:
    # spec: QU-18, QU-19
    @app.task(queue="unserved")
    async def follow_up() -> None: ...

    @app.task(retry=AT_ONCE)
    def plain_work(context: Context) -> int | None:
        context.enqueue(follow_up.job())
        with context.finishing(result=context.attempt) as tx:
            context.enqueue(follow_up.job())
            tx.execute("insert into effects values (%s)", (f"attempt {context.attempt}",))
            if context.attempt == 1:
                raise ValueError("again")
        with pytest.raises(InvalidArgument, match="has ended"):
            context.enqueue(follow_up.job())
        return None

    @app.task(retry=AT_ONCE)
    async def async_work(context: Context) -> int | None:
        context.enqueue(follow_up.job())
        async with context.finishing(result=context.attempt) as tx:
            context.enqueue(follow_up.job())
            await tx.execute("insert into effects values (%s)", (f"attempt {context.attempt}",))
            if context.attempt == 1:
                raise ValueError("again")
        with pytest.raises(InvalidArgument, match="has ended"):
            context.enqueue(follow_up.job())
        return None

    work = plain_work if plain else async_work

    async with app, Workshop(app, queues="default") as shop:
        job = await work.aenqueue()
        await shop.ended(job, state="completed")
        found = await job.ainfo()
        assert (found.result, found.attempt, found.failures) == (2, 2, 1)
        assert await effects(shop) == ["attempt 2"]
        assert await shop.value("select count(*) from shiftwork.jobs where task = 'follow_up'") == 2
        assert len(shop.seen(JobEnded, job=job)) == 2
        assert not shop.worker.holding


async def test_what_a_job_is_finished_with_has_to_be_what_was_promised(app: App, dsn: str) -> None:
    # spec: HO-39
    refused: list[str] = []

    @app.task
    async def work(context: Context) -> int:
        for result in ("many", object()):
            with pytest.raises(InvalidArgument) as raised:
                async with context.finishing(result):
                    raise AssertionError("it is not begun")
            refused.append(type(raised.value).__name__)
        async with await psycopg.AsyncConnection.connect(dsn) as own:
            with pytest.raises(InvalidArgument):
                await context.finish(own, None)
        return 5

    async with app, Workshop(app) as shop:
        job = await work.aenqueue()
        await shop.ended(job, state="completed")
        assert await job.aresult(timeout=30) == 5
        assert refused == ["ReturnTypeMismatch", "ResultNotJson"]


async def test_who_finishes_a_job_that_was_taken_away_has_no_effect(app: App) -> None:
    # spec: D-16, QU-18
    latch = Latch()

    @app.task
    async def work(context: Context) -> None:
        await latch.hold()
        async with context.finishing() as tx:
            await tx.execute("insert into effects values ('never')")

    async with app, Workshop(app, lease=timedelta(minutes=5)) as shop:
        job = await work.aenqueue()
        await latch.reached()
        await shop.rows("update shiftwork.jobs set attempt = attempt + 1")
        latch.release()
        await shop.event(JobLost, job=job)
        assert await effects(shop) == []
        await shop.rows("delete from shiftwork.jobs")


# Around it.


async def test_middleware_wraps_every_kind_of_task_the_first_outermost(app: App) -> None:
    # spec: SG-3, QU-17
    said: list[str] = []

    @app.middleware
    async def outer(context: Context, call: Callable[[], Awaitable[Any]]) -> Any:
        said.append(f"outer {context.job.task}")
        try:
            return await call()
        finally:
            said.append("outer ends")

    @app.middleware
    async def inner(context: Context, call: Callable[[], Awaitable[Any]]) -> Any:
        said.append(f"inner, attempt {context.attempt}")
        result = await call()
        said.append("inner ends")
        return [result, "changed"]

    @app.task
    async def awaited() -> Any:
        said.append("handler")
        return 1

    @app.task
    def plain() -> Any:
        assert threading.current_thread() is not threading.main_thread()
        said.append("handler")
        return 2

    @app.task(transaction=True)
    async def transacted(tx: AsyncTx) -> Any:
        await tx.execute("insert into effects values ('async')")
        said.append("handler")
        return 3

    @app.task(transaction=True)
    def transacted_plain(tx: Tx) -> Any:
        tx.execute("insert into effects values ('plain')")
        said.append("handler")
        return 4

    async with app, Workshop(app, concurrency=1) as shop:
        for number, task in enumerate((awaited, plain, transacted, transacted_plain), 1):
            said.clear()
            job = await task.aenqueue()
            await shop.ended(job, state="completed")
            assert await job.aresult(timeout=30) == [number, "changed"]
            assert said == [
                *(f"outer {task.name}", "inner, attempt 1", "handler", "inner ends", "outer ends")
            ]
        assert await effects(shop) == ["async", "plain"]


async def test_middleware_may_change_errors_and_need_not_call(app: App) -> None:
    # spec: SG-3, QU-17, D-12
    @app.middleware
    async def layer(context: Context, call: Callable[[], Awaitable[Any]]) -> Any:
        if context.job.task == "skipped":
            return "not called"
        try:
            return await call()
        except KeyError as error:
            raise LookupError("changed") from error
        except OSError:
            return "saved"

    @app.task(retry=Retry.never())
    async def broken(kind: str) -> Any:
        raise {"key": KeyError, "os": OSError}[kind]("x")

    @app.task(transaction=True, retry=Retry.never())
    async def transacted(tx: AsyncTx) -> None:
        await tx.execute("insert into effects values ('never')")
        raise KeyError("x")

    @app.task
    def skipped() -> Any:
        raise AssertionError("it is not called")

    async with app, Workshop(app) as shop:
        jobs = [
            *(await broken.aenqueue("key"), await broken.aenqueue("os")),
            *(await skipped.aenqueue(), await transacted.aenqueue()),
        ]
        await shop.ended(*jobs)
        found = [await job.ainfo() for job in jobs]
        assert [job.state.value for job in found] == ["failed", "completed", "completed", "failed"]
        codes = [job.error and job.error["code"] for job in found]
        assert codes == ["LookupError", None, None, "LookupError"]
        assert [job.result for job in found[1:3]] == ["saved", "not called"]
        assert await effects(shop) == []


async def test_middleware_may_enqueue_and_is_cancelled_with_the_handler(app: App) -> None:
    # spec: QU-17, SG-19
    told: list[str] = []

    @app.task(queue="unserved")
    async def follow_up() -> None: ...

    @app.middleware
    async def layer(context: Context, call: Callable[[], Awaitable[Any]]) -> Any:
        context.enqueue(follow_up.job())
        try:
            return await call()
        except asyncio.CancelledError:
            told.append("middleware")
            raise

    @app.task(timeout=timedelta(milliseconds=30), retry=AT_ONCE)
    async def work(context: Context) -> None:
        if context.attempt == 1:
            await asyncio.Event().wait()

    async with app, Workshop(app, queues="default") as shop:
        job = await work.aenqueue()
        await shop.ended(job, state="completed")
        assert told == ["middleware"]
        assert await shop.value("select count(*) from shiftwork.jobs where task = 'follow_up'") == 1


def test_middleware_is_an_async_function(app: App) -> None:
    # spec: QU-17
    with pytest.raises(ConfigurationError, match="async function"):
        app.middleware(lambda context, call: call())


async def test_a_worker_may_require_middleware_in_order(app: App) -> None:
    # spec: QU-17
    async def first(context: Context, call: Callable[[], Awaitable[Any]]) -> Any:
        return await call()

    async def between(context: Context, call: Callable[[], Awaitable[Any]]) -> Any:
        return await call()

    async def second(context: Context, call: Callable[[], Awaitable[Any]]) -> Any:
        return await call()

    @app.task
    async def work() -> None: ...

    app.require_middleware(first, second)
    async with app:
        for layer in (second, between, first):  # only then are both there, and in the wrong order
            app.middleware(layer)
            with pytest.raises(ConfigurationError, match=r"first, second; there is: second"):
                await app.worker()
        app.middleware(second)
        await app.worker()


# What is told of it.


@pytest.fixture
def told() -> Iterator[Callable[[logging.Formatter], io.StringIO]]:
    """What is logged, as it would be written to standard error in this form."""
    logger, handlers = logging.getLogger("shiftwork"), list[logging.Handler]()
    level = logger.level

    def written(formatter: Any) -> io.StringIO:
        handler = Stream(formatter)
        handler.stream = io.StringIO()
        handlers.append(handler)
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
        return handler.stream

    yield written
    for handler in handlers:
        logger.removeHandler(handler)
    logger.setLevel(level)


async def work_and_fail(app: App) -> Workshop:
    @app.task(retry=Retry.never())
    async def good(context: Context) -> None:
        context.log.info("so far so good\nworker 7 has stopped")

    @app.task(retry=Retry(delays=timedelta(minutes=1), jitter=0))
    def bad() -> None:
        raise ValueError("oh\x1b[31m no")

    async with app, Workshop(app, name="teller") as shop:
        jobs = [await good.aenqueue(), await bad.aenqueue()]
        await shop.ended(*jobs)
    return shop


async def test_log_lines_can_be_read_by_people(
    app: App, told: Callable[[logging.Formatter], io.StringIO]
) -> None:
    # spec: SH-27
    stream = told(TextFormatter())
    shop = await work_and_fail(app)
    lines = [line[24:] for line in stream.getvalue().splitlines()]  # behind date and time
    first, second = (event.job for event in sorted(shop.seen(JobBegan), key=lambda event: event.job))

    def told_of(text: str) -> str:
        [line] = [line for line in lines if text in line]
        return line

    label = "teller@"
    assert told_of("serves").startswith(f"INFO    worker {shop.worker.id} ({label}")
    connections = 4 if shop.worker.settings.notify else 3
    assert f"serves default: 2 tasks, 10 jobs at once, {connections} connections" in told_of("serves")
    assert told_of("completed").startswith(
        f"INFO    job {first} good (queue default, attempt 1) completed in "
    )
    assert told_of("so far") == f"INFO    job {first} good: so far so good\\nworker 7 has stopped"
    assert told_of("will run again") == (
        f"WARNING job {second} bad (queue default, attempt 1) will run again in 60.0 s: ValueError: oh\\x1b[31m no"
    )
    assert told_of("has stopped after") == f"INFO    worker {shop.worker.id} has stopped after 2 jobs"


async def test_log_lines_can_be_read_by_programs(
    app: App, told: Callable[[logging.Formatter], io.StringIO]
) -> None:
    # spec: SH-27
    stream = told(JsonFormatter())
    shop = await work_and_fail(app)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    ended = {line["task"]: line for line in lines if line.get("event") == "JobEnded"}
    assert ended["good"]["level"] == "info"
    assert ended["good"].items() >= {"queue": "default", "attempt": 1, "state": "completed"}.items()
    assert ended["good"]["seconds"] >= 0
    assert ended["bad"]["level"] == "warning"
    assert (ended["bad"]["state"], ended["bad"]["delay"]) == ("scheduled", 60)
    assert ended["bad"]["error"] == {
        "code": "ValueError",
        "type": "builtins.ValueError",
        "message": "oh\x1b[31m no",
    }
    [own] = [line for line in lines if line.get("logger") == "shiftwork.job"]
    assert own.items() >= {"job": ended["good"]["job"], "task": "good", "queue": "default"}.items()
    assert own["message"] == "so far so good\nworker 7 has stopped"
    [started] = [line for line in lines if line.get("event") == "WorkerStarted"]
    assert (started["worker"], started["queues"]) == (shop.worker.id, ["default"])
    assert all(line["at"].endswith("Z") and line["level"] for line in lines)


@pytest.mark.parametrize("form", [TextFormatter, JsonFormatter])
@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING])
def test_jobs_that_ended_together_have_the_lines_that_they_have_one_by_one(
    form: type[TextFormatter | JsonFormatter], level: int
) -> None:
    # spec: SH-27
    error = {"code": "ValueError", "message": "oh\x1b[31m no"}
    ended = [
        JobEnded(1, "good", "default", 1, "completed", 0.0123),
        JobEnded(2, "bad", "default", 2, "failed", 0.5, error),
        JobEnded(3, "good", "mail", 1, "completed", 61.0),
        JobEnded(4, "two\nlines", "default", 1, "completed", 0.0),
        JobEnded(5, "good", "default", 1, "scheduled", 0.1, error, 60.0),
        JobEnded(6, "good", "default", 1, "waiting", 0.1),
    ]

    def lines(tell: Callable[[Telling], None]) -> list[str]:
        handler = Stream(form())
        handler.stream = io.StringIO()
        logger = logging.Logger("alone", level)
        logger.addHandler(handler)
        tell(Telling(logger))
        written = handler.stream.getvalue()
        return re.sub(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d\.\d{3}", "", written).splitlines()

    def one_by_one(telling: Telling) -> None:
        for event in ended:
            telling(event)

    together = lines(lambda telling: telling.tell_ended(ended))
    assert together == lines(one_by_one)
    assert len(together) == (6 if level == logging.INFO else 2)


async def test_lines_that_threads_add_in_the_same_moment_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    # spec: SH-27
    class Shared(deque[str]):
        """To which another thread always adds something just then."""

        def extend(self, lines: Iterable[str]) -> None:
            super().extend([*lines, "of another thread"])

    handler = Stream(TextFormatter())
    handler.stream = io.StringIO()
    monkeypatch.setattr(handler, "_lines", Shared())
    for line in ("first", "second"):
        handler.put([line])
        await asyncio.sleep(0)
    assert handler.stream.getvalue().splitlines() == [
        "first",
        "of another thread",
        "second",
        "of another thread",
    ]
