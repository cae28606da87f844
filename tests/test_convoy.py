"""Single jobs that are enqueued at the same time go together."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from shiftwork import App, Handle, Task, convoy
from shiftwork.errors import DatabaseError, DatabaseUnavailable
from tests.concurrency import elsewhere, in_thread
from tests.harness import Protocol
from tests.test_client import SOON, until

MANY = 20
Greet = Task[[str], str]


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convoy, "PATIENCE", SOON)


@pytest.fixture
def app(dsn: str) -> Iterator[App]:
    with App(dsn) as app:
        yield app


@pytest.fixture
async def aapp(dsn: str) -> AsyncIterator[App]:
    async with App(dsn) as app:
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


def named(protocol: Protocol, sent: list[Future[Handle[str]]]) -> set[str]:
    """Whom those greet that were sent, once all of them are in."""
    handles = [future.result(SOON) for future in sent]
    jobs = stored(protocol)
    return {jobs[handle.id] for handle in handles}


def commits(protocol: Protocol) -> int:
    number = protocol.value("select count(distinct xmin::text) from {}.jobs")
    assert isinstance(number, int)
    return number


def senders(app: App) -> list[Any]:
    """Whose jobs wait to go with others, in threads or in this event loop."""
    client: Any = app.client
    waiting = [client._convoy._waiting, *(one._waiting for one in client._aconvoys.values())]
    return [sender for one in waiting for sender in one.senders]


def pile_up(app: App, greet: Greet, watcher: Protocol, names: list[str]) -> list[Future[Handle[str]]]:
    """Two that are on their way, and the others, who wait in the order of their names."""
    sent = []
    for place, name in enumerate(names):
        sent.append(in_thread(greet.enqueue, name))
        ahead = max(0, place - 1)
        until(lambda n=place, m=ahead: len(blocked(watcher)) == min(n + 1, 2) and len(senders(app)) == m)  # type: ignore[misc]
    return sent


def refuse(protocol: Protocol, name: str) -> None:
    """Somebody's own rule keeps this job out."""
    protocol.connection.execute(
        "create function public.refuse() returns trigger language plpgsql as $$"
        " begin raise 'nobody greets %', new.payload ->> 'name'; end $$"
    )
    _trigger(protocol, name, "refuse")


def stop_at(protocol: Protocol, name: str) -> None:
    """Whoever enqueues this job waits for the advisory lock 42."""
    protocol.connection.execute(
        "create function public.stop() returns trigger language plpgsql as $$"
        " begin perform pg_advisory_xact_lock(42); return new; end $$"
    )
    _trigger(protocol, name, "stop")


def _trigger(protocol: Protocol, name: str, function: str) -> None:
    text = (
        f"create trigger {function} before insert on shiftwork.jobs for each row"
        f" when (new.payload ->> 'name' = '{name}') execute function public.{function}()"
    )
    protocol.connection.execute(text.encode())


def test_who_enqueues_alone_goes_at_once(app: App, protocol: Protocol) -> None:
    greet = declare(app)
    handles = [greet.enqueue(str(n)) for n in range(3)]
    assert stored(protocol) == {handle.id: str(n) for n, handle in enumerate(handles)}
    assert commits(protocol) == 3


def test_those_who_come_while_others_are_on_their_way_go_together_and_each_gets_his_own(
    app: App, protocol: Protocol, watcher: Protocol
) -> None:
    greet, names = declare(app), [str(n) for n in range(MANY)]
    with held_up(protocol):
        sent = pile_up(app, greet, watcher, names)
    found = {future.result(SOON).id: name for name, future in zip(names, sent, strict=True)}
    assert stored(protocol) == found
    assert len(found) == MANY
    assert commits(protocol) == 3, "two who were first, and all others"
    assert {future.result().outcome for future in sent} == {"created"}
    assert greet.enqueue("later").id not in found


async def test_awaiting_callers_go_together_as_well(aapp: App, protocol: Protocol, watcher: Protocol) -> None:
    greet, names = declare(aapp), [str(n) for n in range(MANY)]
    with held_up(protocol):
        sent = [asyncio.create_task(greet.aenqueue(name)) for name in names]
        await asyncio.to_thread(until, lambda: len(blocked(watcher)) == 2 and len(senders(aapp)) == MANY - 2)
    handles = await asyncio.gather(*sent)
    assert stored(protocol) == {handle.id: name for name, handle in zip(names, handles, strict=True)}
    assert commits(protocol) == 3


def test_one_that_is_refused_costs_nobody_else_anything(
    app: App, protocol: Protocol, watcher: Protocol
) -> None:
    greet, names = declare(app), [str(n) for n in range(6)]
    refuse(protocol, "4")
    with held_up(protocol):
        sent = pile_up(app, greet, watcher, names)
    with pytest.raises(DatabaseError, match="nobody greets 4"):
        sent[4].result(SOON)
    found = {future.result(SOON).id: name for name, future in zip(names, sent, strict=True) if name != "4"}
    assert stored(protocol) == found


async def test_one_that_is_refused_costs_no_awaiting_caller_anything(
    aapp: App, protocol: Protocol, watcher: Protocol
) -> None:
    greet = declare(aapp)
    refuse(protocol, "4")
    with held_up(protocol):
        sent = [asyncio.create_task(greet.aenqueue(str(n))) for n in range(6)]
        await asyncio.to_thread(until, lambda: len(blocked(watcher)) == 2 and len(senders(aapp)) == 4)
    answers = await asyncio.gather(*sent, return_exceptions=True)
    assert [type(answer) for answer in answers] == [Handle] * 4 + [DatabaseError] + [Handle]
    assert sorted(stored(protocol).values()) == ["0", "1", "2", "3", "5"]


def test_when_their_line_is_lost_each_is_told_that_nobody_knows(
    app: App, protocol: Protocol, watcher: Protocol
) -> None:
    greet, names = declare(app), [str(n) for n in range(6)]
    stop_at(protocol, "4")
    with watcher.connection.transaction():
        watcher.connection.execute("select pg_advisory_xact_lock(42)")
        with held_up(protocol):
            sent = pile_up(app, greet, watcher, names)
        until(lambda: len(blocked(watcher, "advisory")) == 1)
        [pid] = blocked(watcher, "advisory")
        watcher.connection.execute("select pg_terminate_backend(%s)", (pid,))
        errors = [future.exception(SOON) for future in sent[2:]]
    assert [type(error) for error in errors] == [DatabaseUnavailable] * 4
    assert all(isinstance(error, DatabaseUnavailable) and error.maybe_committed for error in errors)
    assert len({id(error) for error in errors}) == 4, "each is raised in a thread of its own"
    assert sorted(stored(protocol).values()) == ["0", "1"], (
        "nothing is sent again that may have been committed"
    )
    assert greet.enqueue("later").id in stored(protocol)


async def test_who_is_cancelled_takes_nobody_with_him(
    aapp: App, protocol: Protocol, watcher: Protocol
) -> None:
    greet = declare(aapp)
    stop_at(protocol, "5")
    with watcher.connection.transaction():
        watcher.connection.execute("select pg_advisory_xact_lock(42)")
        with held_up(protocol):
            sent = [asyncio.create_task(greet.aenqueue(str(n))) for n in range(6)]
            await asyncio.to_thread(until, lambda: len(blocked(watcher)) == 2 and len(senders(aapp)) == 4)
            sent[2].cancel()  # while it waits
            await asyncio.wait([sent[2]])
            assert len(senders(aapp)) == 3
        await asyncio.to_thread(until, lambda: len(blocked(watcher, "advisory")) == 1)
        sent[3].cancel()  # while it is on its way with others
        await asyncio.wait([sent[3]])
    handles = await asyncio.gather(*(sent[place] for place in (0, 1, 4, 5)))
    jobs = stored(protocol)
    assert [jobs[handle.id] for handle in handles] == ["0", "1", "4", "5"]
    assert sorted(jobs.values()) == ["0", "1", "3", "4", "5"], "who left while he waited has sent nothing"
    assert (await greet.aenqueue("later")).id > max(jobs)


def test_nobody_waits_for_others_who_do_not_come_back(
    app: App, protocol: Protocol, watcher: Protocol, monkeypatch: pytest.MonkeyPatch
) -> None:
    greet, names = declare(app), ["0", "1"]
    with held_up(protocol):
        sent = pile_up(app, greet, watcher, names)
        monkeypatch.setattr(convoy, "PATIENCE", 0.05)
        sent.append(in_thread(greet.enqueue, "2"))
        until(lambda: len(blocked(watcher)) == 3)
    for future in sent:
        future.result(SOON)
    assert commits(protocol) == 3


async def test_no_awaiting_caller_waits_for_others_who_do_not_come_back(
    aapp: App, protocol: Protocol, watcher: Protocol, monkeypatch: pytest.MonkeyPatch
) -> None:
    greet = declare(aapp)
    monkeypatch.setattr(convoy, "PATIENCE", 0.05)
    with held_up(protocol):
        sent = [asyncio.create_task(greet.aenqueue(str(n))) for n in range(4)]
        await asyncio.to_thread(until, lambda: len(blocked(watcher)) == 4)
    await asyncio.gather(*sent)
    assert commits(protocol) == 4


def test_a_job_with_a_unique_key_waits_for_nobody_elses(
    app: App, protocol: Protocol, watcher: Protocol
) -> None:
    greet = declare(app)
    with held_up(protocol):
        sent = pile_up(app, greet, watcher, ["0", "1"])
        sent.append(in_thread(greet.using(unique="me").enqueue, "2"))
        until(lambda: len(blocked(watcher)) == 3)
    assert named(protocol, sent) == {"0", "1", "2"}


def test_what_is_large_does_not_all_go_in_one_statement(
    app: App, protocol: Protocol, watcher: Protocol, monkeypatch: pytest.MonkeyPatch
) -> None:
    greet, names = declare(app), [f"{n}" * 100 for n in range(6)]
    monkeypatch.setattr(convoy, "BYTES_TOGETHER", 250)
    with held_up(protocol):
        sent = pile_up(app, greet, watcher, names)
    assert named(protocol, sent) == set(names)
    assert commits(protocol) == 4


def test_in_a_forked_process_nobody_waits_for_threads_that_are_not_there(
    app: App, protocol: Protocol, watcher: Protocol
) -> None:
    greet = declare(app)
    convoy: Any = app.client
    with held_up(protocol):
        sent = pile_up(app, greet, watcher, ["0", "1"])
        convoy._convoy._process = -1  # as if all before had been in another
        sent.append(in_thread(greet.enqueue, "2"))
        until(lambda: len(blocked(watcher)) == 3)
    assert named(protocol, sent) == {"0", "1", "2"}


class Pressed(BaseException):
    """Somebody pressed ^C."""


@contextmanager
def interrupting() -> Iterator[Any]:
    """Call what is given, from any thread, to have the main thread raise Pressed."""
    assert threading.current_thread() is threading.main_thread()

    def press(*_: object) -> None:
        raise Pressed

    former = signal.signal(signal.SIGUSR2, press)
    try:
        yield lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, former)


def test_who_is_interrupted_while_he_waits_sends_nothing_and_holds_nobody_up(
    app: App, protocol: Protocol, watcher: Protocol
) -> None:
    greet = declare(app)
    with held_up(protocol):
        sent = pile_up(app, greet, watcher, ["0", "1"])
        with interrupting() as press:

            def wait_and_press() -> None:
                until(lambda: len(senders(app)) == 1)
                press()

            pressing = in_thread(wait_and_press)
            with pytest.raises(Pressed):
                greet.enqueue("mine")
        pressing.result(SOON)
        assert not senders(app)
        sent.append(in_thread(greet.enqueue, "3"))
    assert named(protocol, sent) == {"0", "1", "3"}
    assert "mine" not in stored(protocol).values()


def test_who_is_interrupted_while_he_sends_for_others_leaves_nobody_waiting(
    app: App, protocol: Protocol, watcher: Protocol
) -> None:
    greet = declare(app)
    stop_at(protocol, "mine")
    with psycopg.connect(app.settings.dsn or "") as locker:
        locker.execute("select pg_advisory_xact_lock(42)")
        gate = threading.Event()

        def others() -> list[Future[Handle[str]]]:
            until(lambda: len(senders(app)) == 1)
            after = in_thread(greet.enqueue, "3")
            until(lambda: len(senders(app)) == 2)
            gate.set()
            until(lambda: len(blocked(watcher, "advisory")) == 1)
            press()
            return [after]

        holding = threading.Event()

        def hold() -> None:
            with held_up(protocol):
                holding.set()
                gate.wait(SOON)

        held = in_thread(hold)
        holding.wait(SOON)
        first = pile_up(app, greet, watcher, ["0", "1"])
        with interrupting() as press:
            told = in_thread(others)
            with pytest.raises(Pressed):
                greet.enqueue("mine")
        [after] = told.result(SOON)
        held.result(SOON)
        error = after.exception(SOON)
    assert isinstance(error, DatabaseUnavailable)
    assert error.maybe_committed
    assert {future.result(SOON).outcome for future in first} == {"created"}
    assert greet.enqueue("later").id in stored(protocol)
