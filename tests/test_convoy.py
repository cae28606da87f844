"""Single jobs that are enqueued at the same time in one event loop go together."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any, LiteralString

import psycopg
import pytest

from shiftwork import App, Handle, Task, convoy
from shiftwork.errors import DatabaseError, DatabaseUnavailable
from tests.concurrency import elsewhere
from tests.harness import Protocol
from tests.test_client import SOON, until

MANY = 20
Greet = Task[[str], str]
Sending = asyncio.Task[Handle[str]]


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convoy, "PATIENCE", SOON)


@pytest.fixture
async def app(dsn: str) -> AsyncIterator[App]:
    async with App(dsn, max_connections=30) as app:
        yield app


@pytest.fixture
def watcher(dsn: str) -> Iterator[Protocol]:
    with elsewhere(dsn) as protocol:
        yield protocol


def declare(app: App) -> Greet:
    @app.task
    def greet(name: str) -> str:
        return f"hello, {name}"

    return greet


@contextmanager
def held_up(protocol: Protocol) -> Iterator[None]:
    """Nobody gets a job in while the block lasts."""
    with protocol.connection.transaction():
        protocol.connection.execute("lock table shiftwork.jobs in exclusive mode")
        yield


def blocked(watcher: Protocol, kind: str = "relation") -> list[int]:
    """The sessions that wait for somebody's lock."""
    rows = watcher.rows(
        "select pid from pg_locks where not granted and locktype = %s and database ="
        " (select oid from pg_database where datname = current_database())",
        kind,
    )
    return [row["pid"] for row in rows]


def stored(protocol: Protocol) -> dict[int, str]:
    return {
        row["id"]: row["name"] for row in protocol.rows("select id, payload ->> 'name' as name from {}.jobs")
    }


def commits(protocol: Protocol) -> int:
    number = protocol.value("select count(distinct xmin::text) from {}.jobs")
    assert isinstance(number, int)
    return number


def waiting(app: App) -> int:
    """How many wait to go with others."""
    client: Any = app.client
    return sum(len(one._waiting) for one in client._convoys.values())


async def come_true(condition: Any) -> None:
    await asyncio.to_thread(until, condition)


async def everyone(sent: list[Sending]) -> list[Handle[str] | BaseException]:
    """What came of each."""
    return await asyncio.wait_for(asyncio.gather(*sent, return_exceptions=True), SOON)


async def pile_up(app: App, greet: Greet, watcher: Protocol, *names: str) -> list[Sending]:
    """Two that are on their way, and the others, who wait in this order; to be called while jobs are held up."""
    sent = [asyncio.create_task(greet.aenqueue(name)) for name in names]
    await come_true(lambda: len(blocked(watcher)) == 2 and waiting(app) == len(names) - 2)
    return sent


def rule(protocol: Protocol, name: str, body: LiteralString) -> None:
    """Let somebody's own trigger see the job that greets this one."""
    protocol.connection.execute(
        b"create function public.rule() returns trigger language plpgsql as $$ begin "
        + body.encode()
        + b" end $$"
    )
    protocol.connection.execute(
        "create trigger rule before insert on shiftwork.jobs for each row"
        f" when (new.payload ->> 'name' = '{name}') execute function public.rule()".encode()
    )


STOP: LiteralString = "perform pg_advisory_xact_lock(42); return new;"
"""Whoever enqueues it waits for a lock."""


@contextmanager
def locked(dsn: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(dsn) as connection:
        connection.execute("select pg_advisory_xact_lock(42)")
        yield connection


async def test_who_enqueues_alone_goes_at_once(app: App, protocol: Protocol) -> None:
    greet = declare(app)
    handles = [await greet.aenqueue(str(n)) for n in range(3)]
    assert stored(protocol) == {handle.id: str(n) for n, handle in enumerate(handles)}
    assert commits(protocol) == 3


async def test_those_who_come_while_others_are_on_their_way_go_together_and_each_gets_his_own(
    app: App, protocol: Protocol, watcher: Protocol
) -> None:
    greet, names = declare(app), [str(n) for n in range(MANY)]
    with held_up(protocol):
        sent = await pile_up(app, greet, watcher, *names)
    handles = await asyncio.gather(*sent)
    assert stored(protocol) == {handle.id: name for name, handle in zip(names, handles, strict=True)}
    assert commits(protocol) == 3, "two who were first, and all others"
    assert {handle.outcome for handle in handles} == {"created"}
    assert (await greet.aenqueue("later")).id not in {handle.id for handle in handles}


async def test_one_that_is_refused_costs_nobody_else_anything(
    app: App, protocol: Protocol, watcher: Protocol
) -> None:
    greet, names = declare(app), [str(n) for n in range(MANY)]
    rule(protocol, "7", "raise 'nobody greets %', new.payload ->> 'name';")
    with held_up(protocol):
        sent = await pile_up(app, greet, watcher, *names)
    answers = await everyone(sent)
    assert isinstance(answers[7], DatabaseError)
    assert "nobody greets 7" in str(answers[7])
    jobs = stored(protocol)
    assert len(jobs) == MANY - 1
    for name, answer in zip(names, answers, strict=True):
        if name != "7":
            assert isinstance(answer, Handle)
            assert jobs[answer.id] == name
    assert commits(protocol) < MANY / 2, "the others still go together"


async def test_a_quota_that_one_job_exceeds_is_told_to_its_sender_alone(
    app: App, protocol: Protocol, watcher: Protocol
) -> None:
    rule(protocol, "4", "raise 'too many' using errcode = 'configuration_limit_exceeded';")
    greet = declare(app)
    with held_up(protocol):
        sent = await pile_up(app, greet, watcher, *"012345")
    answers = await everyone(sent)
    assert [type(answer) for answer in answers] == [Handle] * 4 + [DatabaseUnavailable] + [Handle]
    assert sorted(stored(protocol).values()) == [*"01235"]


async def test_when_their_line_is_lost_each_is_told_that_nobody_knows(
    app: App, dsn: str, protocol: Protocol, watcher: Protocol
) -> None:
    greet = declare(app)
    rule(protocol, "4", STOP)
    with locked(dsn):
        with held_up(protocol):
            sent = await pile_up(app, greet, watcher, *"012345")
        await come_true(lambda: len(blocked(watcher, "advisory")) == 1)
        [pid] = blocked(watcher, "advisory")
        watcher.connection.execute("select pg_terminate_backend(%s)", (pid,))
        answers = await everyone(sent)
    errors = answers[2:]
    assert [type(error) for error in errors] == [DatabaseUnavailable] * 4
    assert all(isinstance(error, DatabaseUnavailable) and error.maybe_committed for error in errors)
    assert len({id(error) for error in errors}) == 4, "each is raised in a place of its own"
    assert sorted(stored(protocol).values()) == [*"01"], "nothing is sent again that may have been committed"
    assert (await greet.aenqueue("later")).id in stored(protocol)


async def test_when_a_trigger_leaves_one_out_nobody_is_told_of_somebody_elses_job(
    app: App, protocol: Protocol, watcher: Protocol
) -> None:
    greet = declare(app)
    rule(protocol, "4", "return null;")
    with held_up(protocol):
        sent = await pile_up(app, greet, watcher, *"012345")
    answers = await everyone(sent)
    assert [type(answer) for answer in answers] == [Handle] * 4 + [DatabaseError, Handle]
    assert "'greet' was kept out of the queue by a trigger" in str(answers[4])
    there = stored(protocol)
    assert [there[answer.id] for answer in answers if isinstance(answer, Handle)] == [*"01235"]
    assert len(there) == 5


async def test_who_is_cancelled_takes_nobody_with_him(
    app: App, dsn: str, protocol: Protocol, watcher: Protocol
) -> None:
    greet = declare(app)
    rule(protocol, "5", STOP)
    with locked(dsn):
        with held_up(protocol):
            sent = await pile_up(app, greet, watcher, *"012345")
            sent[2].cancel()  # while it waits
            await asyncio.wait([sent[2]])
        await come_true(lambda: len(blocked(watcher, "advisory")) == 1)
        sent[3].cancel()  # while it is on its way with others
        await asyncio.wait([sent[3]])
    handles = await asyncio.gather(*(sent[place] for place in (0, 1, 4, 5)))
    jobs = stored(protocol)
    assert [jobs[handle.id] for handle in handles] == [*"0145"]
    assert sorted(jobs.values()) == [*"01345"], "who left while he waited has sent nothing"
    assert (await greet.aenqueue("later")).id > max(jobs)


async def test_who_was_cancelled_can_still_enqueue_on_his_way_out(
    app: App, protocol: Protocol, watcher: Protocol
) -> None:
    greet = declare(app)
    begun = asyncio.Semaphore(0)

    async def leave(name: str) -> None:
        try:
            begun.release()
            await asyncio.sleep(SOON)
        finally:
            await greet.aenqueue(name)

    tasks = [asyncio.create_task(leave(name)) for name in "012345"]
    for _ in tasks:
        await begun.acquire()
    with held_up(protocol):
        for task in tasks:
            task.cancel()
        await come_true(lambda: len(blocked(watcher)) == 2 and waiting(app) == 4)
    await asyncio.wait(tasks, timeout=SOON)
    assert sorted(stored(protocol).values()) == [*"012345"]


def test_an_event_loop_can_end_while_some_are_on_their_way_and_others_wait(
    dsn: str, protocol: Protocol, watcher: Protocol, caplog: pytest.LogCaptureFixture
) -> None:
    app = App(dsn)
    greet = declare(app)

    async def leave_them() -> None:
        sent = await pile_up(app, greet, watcher, *"012345")
        assert len(sent) == 6

    async def once() -> None:
        await greet.aenqueue("later")

    with app:
        with held_up(protocol), caplog.at_level(logging.ERROR, "asyncio"):
            asyncio.run(leave_them())
            gc.collect()
        assert not caplog.records
        asyncio.run(once())
        client: Any = app.client
        assert len(client._convoys) == 1, "that of the loop which is closed is forgotten"
    assert "later" in stored(protocol).values()


async def test_nobody_waits_for_others_who_do_not_come_back(
    app: App, dsn: str, protocol: Protocol, watcher: Protocol, monkeypatch: pytest.MonkeyPatch
) -> None:
    greet = declare(app)
    monkeypatch.setattr(convoy, "PATIENCE", 0.1)
    rule(protocol, "stuck", STOP)
    with locked(dsn):
        stuck = [asyncio.create_task(greet.aenqueue("stuck")) for _ in range(2)]
        await come_true(lambda: len(blocked(watcher, "advisory")) == 2)
        others = await asyncio.wait_for(asyncio.gather(*map(greet.aenqueue, "012345")), SOON)
        assert sorted(stored(protocol).values()) == [*"012345"]
        assert commits(protocol) == 1, "who goes without waiting takes the others along"
        assert {handle.outcome for handle in others} == {"created"}
    await asyncio.gather(*stuck)


async def test_jobs_that_go_together_do_not_wait_for_a_lock_that_one_of_their_senders_holds(
    app: App, dsn: str, protocol: Protocol, watcher: Protocol, monkeypatch: pytest.MonkeyPatch
) -> None:
    greet = declare(app)
    rule(protocol, "3", STOP)
    async with await psycopg.AsyncConnection.connect(dsn) as mine:

        async def enqueue_holding_a_lock() -> Handle[str]:
            await mine.execute("select pg_advisory_xact_lock(42)")
            handle = await greet.aenqueue("2")
            await mine.rollback()
            return handle

        with held_up(protocol):
            sent = [asyncio.create_task(greet.aenqueue(name)) for name in "01"]
            await come_true(lambda: len(blocked(watcher)) == 2)
            sent.append(asyncio.create_task(enqueue_holding_a_lock()))
            await come_true(lambda: waiting(app) == 1)
            sent += [asyncio.create_task(greet.aenqueue(name)) for name in "3456789"]
            await come_true(lambda: waiting(app) == 8)
            monkeypatch.setattr(convoy, "PATIENCE", 0.1)
        await asyncio.wait_for(asyncio.gather(*sent), SOON)
    assert sorted(stored(protocol).values()) == [*"0123456789"]
    assert commits(protocol) == 10, "those who went with them do not wait for that lock again and again"


async def test_a_job_with_a_unique_key_waits_for_nobody_elses(
    app: App, protocol: Protocol, watcher: Protocol
) -> None:
    greet = declare(app)
    with held_up(protocol):
        sent = await pile_up(app, greet, watcher, *"01")
        sent.append(asyncio.create_task(greet.using(unique="me").aenqueue("2")))
        await come_true(lambda: len(blocked(watcher)) == 3)
    await asyncio.gather(*sent)
    assert sorted(stored(protocol).values()) == [*"012"]


@pytest.mark.parametrize(("bound", "most"), [("BYTES_TOGETHER", 350), ("MOST_TOGETHER", 2)])
async def test_no_more_go_in_one_statement_than_may(
    app: App,
    protocol: Protocol,
    watcher: Protocol,
    monkeypatch: pytest.MonkeyPatch,
    bound: str,
    most: int,
) -> None:
    greet, names = declare(app), [f"{n}" * 100 for n in range(6)]
    monkeypatch.setattr(convoy, bound, most)
    with held_up(protocol):
        sent = await pile_up(app, greet, watcher, *names)
    handles = await asyncio.gather(*sent)
    assert stored(protocol) == {handle.id: name for name, handle in zip(names, handles, strict=True)}
    assert commits(protocol) == 4
