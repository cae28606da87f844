"""Being the only one under a name: who is refused, who stands by, and what happens when the session of the lock is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from shiftwork import App, Settings, events
from shiftwork.errors import ConfigurationError, SingletonTaken
from shiftwork.worker.singleton import Singleton
from tests import pooler
from tests.crew import Crew
from tests.test_cli_worker import worked
from tests.test_supervisor import supervised
from tests.wire import Wire
from tests.workshop import Workshop

has_a_session = pytest.mark.skipif(
    pooler.MODE == "poll",
    reason="behind a pooler a singleton without listen_dsn is refused, see test_pooler.py",
)
LOCKED = "select pid from pg_stat_activity where datname = current_database() and application_name like 'singleton %'"


class Greeting:
    """An app with a task."""

    def __init__(self, dsn: str) -> None:
        self.app = App(dsn)

        @self.app.task
        async def greet(name: str) -> str:
            return f"Hello, {name}!"

        self.greet = greet


@pytest.fixture
def made(dsn: str) -> Iterator[Greeting]:
    greeting = Greeting(dsn)
    yield greeting
    greeting.app.close()


@has_a_session
async def test_only_one_is_at_work_and_the_next_takes_over_when_it_has_gone(made: Greeting) -> None:
    # spec: ST-13, D-4
    app, greet = made.app, made.greet
    async with Workshop(app, singleton="nightly") as first:
        await first.event(events.WorkerStarted)
        async with Workshop(app, singleton="nightly", standby=True) as second:
            waits = await second.event(events.StandingBy)
            assert waits.holder.startswith(f"process {os.getpid()} on {socket.gethostname()}, since 20")
            async with Workshop(app, singleton="other") as third:  # other names are nobody's business
                await third.event(events.WorkerStarted)
                third.worker.stop()
                await third.stopped()
            await first.ended(await greet.aenqueue("Ada"))
            assert second.seen(events.WorkerStarted) == []
            first.worker.stop()
            assert await first.stopped()
            await second.event(events.WorkerStarted)
            await second.ended(await greet.aenqueue("Grace"))


@has_a_session
async def test_a_second_one_is_refused_and_told_who_is_at_work(made: Greeting, dsn: str) -> None:
    # spec: ST-13, D-4
    app = made.app
    async with Workshop(app, singleton="nightly") as first:
        await first.event(events.WorkerStarted)
        second = await app.worker(singleton="nightly")
        with pytest.raises(SingletonTaken, match=rf"as 'nightly': process {os.getpid()} on .+, since 20"):
            await second.run()
        assert await first.value("select count(*) from shiftwork.workers") == 1
        done = await asyncio.to_thread(
            worked, "tests/sample.py", "--singleton", "nightly", "--stop-when-idle", dsn=dsn
        )
        assert done.returncode == 1
        assert f"Error: another worker is at work as 'nightly': process {os.getpid()} on" in done.stderr


@has_a_session
async def test_who_stands_by_can_be_told_to_stop(made: Greeting) -> None:
    # spec: D-4
    app = made.app
    async with Workshop(app, singleton="nightly") as first:
        await first.event(events.WorkerStarted)
        async with Workshop(app, singleton="nightly", standby=True) as second:
            await second.event(events.StandingBy)
            second.worker.stop()
            assert await second.stopped()


async def test_without_the_session_of_its_lock_a_worker_claims_nothing_until_it_has_it_back(
    made: Greeting, dsn: str
) -> None:
    # spec: ST-13, ST-23, D-4
    with Wire(dsn) as wire:
        app, greet = made.app, made.greet
        app.settings = app.settings.changed(listen_dsn=wire.past, lease=timedelta(seconds=2))
        async with Workshop(app, singleton="nightly") as shop:
            await shop.ended(await greet.aenqueue("Ada"))
            wire.refuse()
            await shop.event(events.SingletonLost)
            await shop.event(events.DatabaseAway, part="claiming")  # whatever it was claiming by then is over
            job = await greet.aenqueue("Grace")
            shop.worker._wake()
            assert (await shop.job(job)).state == "ready"
            wire.accept()
            await shop.ended(job)
            kinds = (events.SingletonHeld, events.SingletonLost, events.JobBegan)
            order = [type(event) for event in shop.events if isinstance(event, kinds)]
            held, lost, began = kinds
            assert order == [held, began, lost, held, began]


@pytest.mark.parametrize("standby", [True, False])
async def test_who_finds_its_place_taken_stands_by_or_ends(made: Greeting, dsn: str, standby: bool) -> None:
    # spec: ST-13, D-4
    with Wire(dsn) as wire:
        app, greet = made.app, made.greet
        given: dict[str, Any] = {"singleton": "nightly", "lease": timedelta(seconds=2)}
        async with Workshop(app, **given, standby=standby, listen_dsn=wire.past) as first:
            await first.event(events.WorkerStarted)
            async with Workshop(app, **given, standby=True, listen_dsn=dsn) as second:
                await second.event(events.StandingBy)
                wire.refuse()
                await second.event(events.WorkerStarted)
                wire.accept()
                if standby:
                    await first.event(events.StandingBy)
                    second.worker.stop()
                    await second.stopped()
                    await first.ended(await greet.aenqueue("Ada"))
                else:
                    assert not await first.stopped()
                    [told] = first.seen(events.WorkerStopping)
                    assert "another worker is at work as 'nightly'" in told.why
                    await second.ended(await greet.aenqueue("Ada"))


@has_a_session
async def test_a_session_that_is_ended_by_the_server_is_noticed_at_once(made: Greeting) -> None:
    # spec: ST-23
    app, greet = made.app, made.greet
    async with Workshop(app, singleton="nightly", lease=timedelta(hours=1)) as shop:
        await shop.event(events.WorkerStarted)
        await shop.rows(f"select pg_terminate_backend(pid) from ({LOCKED}) as one")
        await shop.event(events.SingletonLost)
        await shop.event(events.SingletonHeld, times=2)
        await shop.ended(await greet.aenqueue("Ada"))


async def test_a_lock_that_somebody_took_away_is_noticed_when_it_is_asked_for(dsn: str) -> None:
    # spec: ST-13
    lost: list[str] = []
    told = asyncio.Event()

    def lose(why: str) -> None:
        lost.append(why)
        told.set()

    one = Singleton(Settings(dsn=dsn, singleton="nightly", lease=timedelta(milliseconds=500)), lose)
    assert await one.take() is None
    assert one._connection is not None
    one._key += 1  # as if it were not there
    async with asyncio.timeout(30):
        await told.wait()
    assert lost == ["its lock is not there any more"]
    assert not one.held
    await one.close()


@has_a_session
def test_each_process_of_a_supervisor_has_a_lock_of_its_own(dsn: str) -> None:
    # spec: D-4
    with Crew(dsn) as crew, supervised(dsn, "--processes", "2", "--singleton", "nightly") as two:
        two.up(2)
        done = worked("tests/sample.py", "--singleton", "nightly", "--stop-when-idle", dsn=dsn)
        assert done.returncode == 1
        with supervised(dsn, "--processes", "2", "--singleton", "nightly", "--standby") as others:
            assert {others.says("StandingBy")["process"] for _ in range(2)} == {0, 1}
            assert two.ends(signal.SIGTERM) == 0, two.told()
            crew.until("select count(*) = 4 from shiftwork.workers")
            assert others.ends(signal.SIGTERM) == 0, others.told()


# Behind a pooler.


class Pooler:
    """A pooler in transaction mode: all clients share one session of the server, a statement at a time."""

    def __init__(self, dsn: str, folder: Path) -> None:
        self._dsn = dsn
        self._path = folder / ".s.PGSQL.5432"
        self.dsn = make_conninfo(dsn, host=str(folder), port=5432)
        self._turn = asyncio.Lock()
        self._serving: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> str:
        with psycopg.connect(self._dsn) as connection:
            info = connection.info
            self._names = (info.user, info.dbname)
            path = f"{info.host}/.s.PGSQL.{info.port}"
            assert info.host.startswith("/"), "the test's server is reached by a socket"
        self._there = await asyncio.open_unix_connection(path)
        user, database = (name.encode() for name in self._names)
        hello = b"\x00\x03\x00\x00user\x00" + user + b"\x00database\x00" + database + b"\x00\x00"
        self._there[1].write((len(hello) + 4).to_bytes(4) + hello)
        self._greeting = await self._answer()
        self._server = await asyncio.start_unix_server(
            lambda *ends: self._serving.append(asyncio.create_task(self._serve(*ends))), self._path
        )
        return self.dsn

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        self._there[1].transport.abort()

    async def _answer(self) -> bytes:
        said = b""
        while not said.endswith(b"Z\x00\x00\x00\x05I"):
            part = await self._there[0].read(1 << 16)
            assert part
            said += part
        return said

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readexactly(int.from_bytes(await reader.readexactly(4)) - 4)
            place = self._greeting.index(b"K\x00\x00\x00\x0c")  # as PgBouncer does, with a key of its own
            writer.write(self._greeting[: place + 5] + os.urandom(8) + self._greeting[place + 13 :])
            asked = b""
            while True:
                kind, length = await reader.readexactly(1), await reader.readexactly(4)
                asked += kind + length + await reader.readexactly(int.from_bytes(length) - 4)
                if kind == b"X":
                    return
                if kind in b"SQ":
                    async with self._turn:
                        self._there[1].write(asked)
                        writer.write(await self._answer())
                    asked = b""
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="sw-") as folder:
        yield Path(folder)


async def test_behind_a_pooler_that_hands_sessions_around_a_singleton_is_refused(
    dsn: str, short_path: Path
) -> None:
    # spec: ST-13
    async with Pooler(dsn, short_path) as pooled:
        greeting = Greeting(pooled)
        app, greet = greeting.app, greeting.greet
        worker = await app.worker(singleton="nightly", notify=False)
        with pytest.raises(ConfigurationError, match=r"pooler that hands sessions around.*listen_dsn"):
            await worker.run()
        async with Workshop(app, singleton="nightly", listen_dsn=dsn, lease=timedelta(minutes=5)) as shop:
            await shop.ended(await greet.aenqueue("Ada"))
        app.close()
