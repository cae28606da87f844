"""Tasks in SQL that a program declares, and what a worker makes of a registry that changes while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from shiftwork import App, ConfigurationError, InvalidArgument, Retry
from shiftwork.events import TaskLeftOut, TasksChanged, WorkerStarted
from tests.harness import Protocol
from tests.test_metrics import by_task, port, scrape
from tests.test_roles import Installation, installed
from tests.test_sql_tasks import WORLD, register
from tests.workshop import Latch, Workshop

__all__ = ["installed", "port"]


@pytest.fixture
def stats(protocol: Protocol) -> Protocol:
    protocol.connection.execute(WORLD.encode())
    return protocol


@pytest.fixture
def app(dsn: str) -> Iterator[App]:
    with App(dsn) as app:
        yield app


# Declared in Python.


async def test_a_routine_is_declared_in_python_entered_in_the_registry_and_enqueued_like_any_task(
    stats: Protocol, app: App
) -> None:
    # spec: D-17, ST-1, ST-30
    policy = Retry(max_attempts=3, delays=timedelta(seconds=5), on=("40001", "U0001"), at_once=2)
    derive = app.sql_task(
        "derive",
        handler="stats.derive_units(jsonb)",
        queue="analytics",
        priority=7,
        retry=policy,
        timeout=timedelta(minutes=1),
        before="stats.note()",
        after="stats.note_after(jsonb)",
        description="derives units",
        merge={"ids": "union"},
        on_lost="fail",
        max_resets=4,
    )
    pending = derive.using(unique="derive")
    first, again = await pending.aenqueue(ids=[1, 2]), await pending.aenqueue(ids=[2, 3])
    assert (first.id, again.outcome) == (again.id, "merged")
    async with Workshop(app) as shop:
        await shop.ended(first)
        assert shop.seen(WorkerStarted)[0].tasks == ("derive",)
        [job] = await app.aenqueue_many([derive.job(ids=[9])])
        await shop.ended(job)
    assert [row["id"] for row in stats.rows("select id from stats.units order by id")] == [1, 2, 3, 9]
    [row] = stats.rows("select * from {}.tasks")
    assert (row["handler"], row["before"], row["after"]) == (
        "stats.derive_units(jsonb)",
        "stats.note()",
        "stats.note_after(jsonb)",
    )
    assert (row["queue"], row["priority"], row["max_attempts"], row["retry"]) == (
        *("analytics", 7, 3),
        policy.as_json(),
    )
    assert (row["timeout"], row["merge"], row["unique_action"]) == (
        *(timedelta(minutes=1), {"ids": "union"}, "merge"),
    )
    assert (row["on_lost"], row["max_resets"], row["description"]) == ("fail", 4, "derives units")
    assert stats.job(first.id)["max_attempts"] == 3
    assert stats.value("select count(*) from {}.audit where verb = 'register'") == 1


async def test_a_routine_that_is_not_there_costs_its_own_task_and_no_other(stats: Protocol, app: App) -> None:
    # spec: D-17
    lost = app.sql_task("lost", handler="stats.nowhere(jsonb)", queue="elsewhere")
    double = app.sql_task("double", handler="stats.double(jsonb)")
    async with Workshop(app) as shop:
        waits, done = await lost.aenqueue(), await double.aenqueue(n=21)
        await shop.ended(done)
        [told] = shop.seen(TaskLeftOut)
        assert told.task == "lost"
        assert (
            "there is no routine stats.nowhere(jsonb) in this database. Name it with its schema" in told.why
        )
        assert await done.aresult(timeout=5) == 42
    assert stats.state(waits.id) == "ready"
    assert [row["name"] for row in stats.rows("select name from {}.tasks")] == ["double"]


def test_a_worker_may_say_what_the_registry_has_already_and_nothing_new(installed: Installation) -> None:
    # spec: D-17
    # fault: S6
    with installed.acting(None) as owner:
        owner.connection.execute(
            "create function public.same(payload jsonb) returns jsonb language sql as 'select payload'"
        )
    with installed.acting("operator") as operator:
        assert register(operator, "same", "public.same(jsonb)", queue="a")
    with installed.acting("worker") as worker:
        assert not register(worker, "same", "public.same(jsonb)", queue="a")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            register(worker, "same", "public.same(jsonb)", queue="b")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            register(worker, "other", "public.same(jsonb)")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"name": "greet"}, "there is a task 'greet' already"),
        ({"name": "sql"}, "there is a task 'sql' already"),
        ({"queue": "nowhere"}, "is not one of the queues of this app"),
        ({"retry": Retry(on=(OSError,))}, "what a routine fails with has a code"),
        ({"retry": Retry(on=lambda _: True)}, "what a routine fails with has a code"),
        ({"timeout": timedelta(0)}, "timeout is"),
        ({"max_running": 0}, "max_running is 0"),
        ({"on_lost": "shrug"}, "on_lost is 'shrug'"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_declared(wrong: dict[str, Any], says: str) -> None:
    app = App("postgresql://nowhere", queues=("default", "mail"))
    app.sql_task("sql", handler="stats.double(jsonb)", queue="mail")

    @app.task
    def greet() -> None: ...

    with pytest.raises(ConfigurationError, match=says):
        app.sql_task(**{"name": "t", "handler": "stats.double(jsonb)", **wrong})
    with pytest.raises(ConfigurationError, match="there is a task 'sql' already"):
        app.task(name="sql")(lambda: None)
    with pytest.raises(InvalidArgument, match="too many positional arguments"):
        app.sql_tasks["sql"].job(1)
    assert sorted(app.sql_tasks) == ["sql"]


async def test_as_many_of_a_routine_run_at_once_in_the_cluster_as_it_is_declared(
    stats: Protocol, app: App
) -> None:
    app.sql_task("double", handler="stats.double(jsonb)", max_running=3)
    async with Workshop(app) as shop:
        await shop.asleep()
    assert stats.value("select max_running from {}.limits where kind = 'task' and name = 'double'") == 3


# Followed while it changes.


def greeting(app: App) -> None:
    @app.task
    async def greet() -> str:
        return "hello"


async def test_what_is_registered_while_a_worker_sleeps_is_run_at_once(stats: Protocol, app: App) -> None:
    # spec: ST-5, ST-15
    greeting(app)
    async with Workshop(app) as shop:
        await shop.asleep()
        job = stats.enqueue("double", {"n": 4}, queue="analytics")
        register(
            stats, "double", "stats.double(jsonb)", queue="analytics"
        )  # the next poll is ten minutes away
        await shop.ended(job)
        [changed] = shop.seen(TasksChanged)
        assert (changed.queues, changed.tasks) == (("analytics", "default"), ("double", "greet"))
        [row] = stats.rows("select queues, details from {}.workers")
        assert (row["queues"], row["details"]["tasks"]) == (["analytics", "default"], ["double", "greet"])
        assert row["details"]["concurrency"] == 10
    assert stats.job(job)["result"] == 8


async def test_without_notifications_the_registry_is_looked_at_with_every_poll(
    stats: Protocol, app: App
) -> None:
    # spec: ST-5, ST-15
    greeting(app)
    soon = timedelta(milliseconds=200)
    async with Workshop(app, notify=False, poll=soon) as shop:
        await shop.asleep()
        register(stats, "double", "stats.double(jsonb)", queue="analytics")
        job = stats.enqueue("double", {"n": 4}, queue="analytics")
        await shop.ended(job)
        stats.rows("delete from {}.tasks where name = 'double'")
        await shop.event(TasksChanged, times=2)
        stats.enqueue("double", {"n": 4}, queue="analytics")
        assert shop.seen(TasksChanged)[-1].tasks == ("greet",)
    assert stats.value("select state from {}.jobs") == "ready"


async def test_a_worker_that_has_lost_its_last_task_waits_for_the_next(stats: Protocol, app: App) -> None:
    # spec: ST-15
    app.sql_task("double", handler="stats.double(jsonb)")
    async with Workshop(app) as shop:
        await shop.asleep()
        stats.rows("delete from {}.tasks")
        stats.rows("select pg_notify('shiftwork_wake', '*')")
        await shop.event(TasksChanged, tasks=())
        await shop.asleep()
        register(stats, "double", "stats.double(jsonb)")
        job = stats.enqueue("double", {"n": 4})
        await shop.ended(job)


async def test_another_handler_and_another_timeout_are_taken_over_and_what_runs_goes_on(
    stats: Protocol, app: App
) -> None:
    # spec: ST-15
    latch = Latch()

    @app.task(concurrency=1)
    async def hold() -> None:
        await latch.hold()

    stats.connection.execute(
        "create procedure stats.dawdle(payload jsonb) language plpgsql as $$ begin perform pg_sleep(600); end $$"
    )
    register(stats, "work", "stats.double(jsonb)", retry={"max_attempts": 1})
    async with Workshop(app) as shop:
        held, waits = await hold.aenqueue(), await hold.aenqueue()
        first = stats.enqueue("work", {"n": 4})
        await shop.ended(first)
        await latch.reached()
        limits = {"timeout": timedelta(seconds=0.2), "retry": {"max_attempts": 1}}
        register(stats, "work", "stats.dawdle(jsonb)", **limits)
        await shop.event(TasksChanged)
        second = stats.enqueue("work")
        await shop.ended(second)
        assert latch.most == 1  # what ran before still counts
        latch.release()
        await shop.ended(held, waits)
    assert stats.job(second)["error"]["code"] == "TASK_TIMEOUT"


@pytest.mark.parametrize(
    "policy",
    ['{"max_attempts": 0}', '{"delays": 7}', '"often"', f'{{"cap": 1{"0" * 5000}}}', '{"factor": "x"}'],
)
async def test_a_row_that_nobody_can_read_is_left_out_and_told_once(
    stats: Protocol, app: App, policy: str
) -> None:
    # spec: D-17
    # fault: F40
    greeting(app)
    register(stats, "double", "stats.double(jsonb)")
    register(stats, "shrug", "stats.shrug(jsonb)")
    stats.rows("update {}.tasks set retry = %s where name = 'shrug'", policy)
    async with Workshop(app) as shop:
        await shop.ended(stats.enqueue("double", {"n": 4}))
        register(stats, "break", "stats.break(jsonb)")
        await shop.event(TasksChanged)
        [told] = shop.seen(TaskLeftOut)
        assert told.task == "shrug"
        assert "cannot be read" in told.why
        waits = stats.enqueue("shrug")
        await shop.ended(stats.enqueue("double", {"n": 4}))
        assert stats.state(waits) == "ready"
        register(stats, "shrug", "stats.shrug(jsonb)", retry={"max_attempts": 1})
        await shop.ended(waits)
        assert len(shop.seen(TaskLeftOut)) == 1


async def test_metrics_know_tasks_and_queues_that_were_found_later(
    stats: Protocol, app: App, port: int
) -> None:
    # spec: ST-15
    greeting(app)
    register(stats, "double", "stats.double(jsonb)", queue="early")
    async with Workshop(app, metrics_port=port) as shop:
        await shop.ended(stats.enqueue("double", {"n": 1}))
        register(stats, "shrug", "stats.shrug(jsonb)", queue="late")
        await shop.ended(stats.enqueue("shrug"))
        seen = await scrape(port)
    assert by_task(seen) == {("double", "ok"): 1, ("shrug", "ok"): 1}
    assert {labels[1] for labels in seen if labels[0] == "queue_depth"} == {"default", "early", "late"}
