"""Behind PgBouncer in transaction mode: a part of what `make test-pooler` shows, and what happens to poolers themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from shiftwork import App, Retry
from shiftwork.errors import ConfigurationError, SingletonTaken
from shiftwork.events import (
    DatabaseAway,
    JobLost,
    LeaseLapsing,
    LeaseLost,
    ListenerDeaf,
    ListenerProven,
    SingletonLost,
)
from shiftwork.worker import waking
from tests.harness import Protocol
from tests.pooler import MISSING, PROGRAM, Pooler
from tests.test_cli_worker import worked
from tests.workshop import Latch, Workshop

pytestmark = pytest.mark.skipif(not PROGRAM, reason=MISSING)

AT_ONCE = Retry(delays=timedelta(), jitter=0)
KINDS = ("quick", "plain", "transfer", "transfer_blocking")
OFTEN: Any = {"poll": timedelta(milliseconds=200), "reconnect": timedelta(milliseconds=100)}


@pytest.fixture
def pooler(server: str) -> Iterator[Pooler]:
    with Pooler(server) as pooler:
        yield pooler


def working(dsn: str, listen_dsn: str | None = None) -> App:
    """An app with a task of each kind."""
    app = App(dsn, listen_dsn=listen_dsn)

    @app.task(retry=AT_ONCE)
    async def quick() -> int:
        return 1

    @app.task(retry=AT_ONCE)
    def plain() -> int:
        return 1

    @app.task(transaction=True, retry=AT_ONCE)
    async def transfer(tx: psycopg.AsyncConnection[Any]) -> None:
        await tx.execute("select 1")

    @app.task(transaction=True, retry=AT_ONCE)
    def transfer_blocking(tx: psycopg.Connection[Any]) -> None:
        tx.execute("select 1")

    return app


async def works(shop: Workshop, protocol: Protocol) -> None:
    """Jobs of each kind run, and end."""
    jobs = [protocol.enqueue(task) for task in KINDS * 3]
    await shop.ended(*jobs, state="completed")


async def test_behind_a_pooler_everything_works_by_polling_and_nobody_believes_to_hear(
    dsn: str, protocol: Protocol, pooler: Pooler, monkeypatch: pytest.MonkeyPatch
) -> None:
    # spec: A-10, D-5
    # fault: F15
    monkeypatch.setattr(waking, "PROVE_WITHIN", 0.5)
    app = working(pooler.pooled(dsn))
    async with app, Workshop(app, **OFTEN) as shop:
        await works(shop, protocol)
        await shop.event(ListenerDeaf)
        await works(shop, protocol)
        assert await (await app.find("quick").aenqueue()).aresult(timeout=30) == 1
        assert not shop.seen(ListenerProven)
        assert not shop.seen(DatabaseAway)
    assert protocol.value("select count(*) from {}.history where attempt > 1") == 0


async def test_a_second_address_brings_notifications_back(
    dsn: str, protocol: Protocol, pooler: Pooler
) -> None:
    # spec: A-10, D-5
    # fault: F15
    app = working(pooler.pooled(dsn), listen_dsn=dsn)
    async with app, Workshop(app) as shop:  # which would poll after ten minutes
        await shop.asleep()
        assert shop.seen(ListenerProven)
        await works(shop, protocol)
        await shop.asleep()
        await works(shop, protocol)


async def test_a_pooler_that_is_paused_and_restarted_finds_its_workers_at_work(
    dsn: str, protocol: Protocol, pooler: Pooler
) -> None:
    # spec: QU-15
    # fault: F16
    app = working(pooler.pooled(dsn))
    async with app, Workshop(app, lease=timedelta(seconds=20), **OFTEN) as shop:
        await works(shop, protocol)
        await asyncio.to_thread(pooler.tell, "pause")
        jobs = [protocol.enqueue(task) for task in KINDS]
        await asyncio.to_thread(pooler.tell, "resume")
        await shop.ended(*jobs, state="completed")
        await asyncio.to_thread(pooler.stop)
        await shop.event(DatabaseAway, part="claiming")
        await asyncio.to_thread(pooler.start)
        await works(shop, protocol)
        assert not shop.seen(LeaseLost)


async def test_a_worker_that_has_a_way_past_a_pooler_that_is_full_keeps_its_lease(
    dsn: str, protocol: Protocol, server: str
) -> None:
    # spec: SG-16
    # fault: F16, F17
    with Pooler(server, size=1) as pooler:
        app = working(pooler.pooled(dsn), listen_dsn=dsn)
        latch = Latch()

        @app.task(transaction=True)
        async def hold(tx: psycopg.AsyncConnection[Any]) -> None:
            await latch.hold()

        lease = timedelta(seconds=3)
        async with app, Workshop(app, lease=lease) as shop:
            await shop.asleep()
            job = protocol.enqueue("hold")
            await latch.reached()
            until = protocol.value("select lease_until from {}.workers")
            renewed = "select lease_until > %s from shiftwork.workers"
            await shop.found(lambda: asyncio.to_thread(_ask, dsn, renewed, until + lease))
            latch.release()
            await shop.ended(job, state="completed")
            assert not shop.seen(LeaseLapsing) + shop.seen(LeaseLost) + shop.seen(JobLost)


async def test_behind_a_pooler_sessions_keep_the_name_by_which_the_reaper_finds_them(
    dsn: str, protocol: Protocol, pooler: Pooler
) -> None:
    # fault: F15
    app = working(pooler.pooled(dsn))
    latch = Latch()

    @app.task(transaction=True)
    async def hold(tx: psycopg.AsyncConnection[Any]) -> None:
        await latch.hold()

    @app.task(transaction=True)
    def hold_blocking(tx: psycopg.Connection[Any]) -> None:
        latch.hold_blocking()

    async with app, Workshop(app, transactions=2, **OFTEN) as shop:
        await works(shop, protocol)
        jobs = [protocol.enqueue("hold"), protocol.enqueue("hold_blocking")]
        await latch.reached(2)
        holding = "select application_name from pg_stat_activity where datname = current_database() and state like 'idle in%'"
        assert protocol.rows(holding) == [{"application_name": f"shiftwork {shop.worker.id}"}] * 2
        latch.release()
        await shop.ended(*jobs, state="completed")


def busy(pooler: Pooler, dsn: str, many: int = 3) -> None:
    """Let it have so many sessions to lend."""
    with ExitStack() as stack:
        for _ in range(many):
            one = stack.enter_context(psycopg.connect(pooler.pooled(dsn)))
            one.execute("select 1")  # and its transaction stays open


@pytest.mark.parametrize("order", ["the last first", "in turns"])
async def test_behind_a_pooler_a_singleton_is_refused_unless_it_has_a_way_past_it(
    dsn: str, protocol: Protocol, server: str, order: str
) -> None:
    # spec: ST-13, A-10
    more = f"server_round_robin = {int(order == 'in turns')}"
    with Pooler(server, more=more) as pooler:
        await asyncio.to_thread(busy, pooler, dsn)
        app = working(pooler.pooled(dsn))
        async with app:
            refused = await app.worker(singleton="nightly")
            with pytest.raises(ConfigurationError, match=r"pooler that hands sessions around.*listen_dsn"):
                await refused.run()
            locks = (
                "select count(*) from pg_locks as lock join pg_database as here on here.oid = lock.database"
                " where here.datname = current_database() and lock.locktype = 'advisory' and lock.objsubid = 1"
            )
            assert protocol.value(locks) == 0, "nobody has a lock that it does not know of"
            async with Workshop(app, singleton="nightly", listen_dsn=dsn) as shop:
                await works(shop, protocol)
                second = await app.worker(singleton="nightly", listen_dsn=dsn)
                with pytest.raises(SingletonTaken):
                    await second.run()
                assert not shop.seen(SingletonLost)


def test_whoever_starts_a_singleton_behind_a_pooler_is_told_what_it_needs(dsn: str, pooler: Pooler) -> None:
    # spec: ST-13
    only = ("tests/sample.py", "--singleton", "nightly", "--stop-when-idle", "--dsn", pooler.pooled(dsn))
    refused = worked(*only)
    assert refused.returncode == 1
    assert "Error: a singleton needs a session of its own" in refused.stderr
    assert "--listen-dsn" in refused.stderr
    assert worked(*only, "--listen-dsn", dsn).returncode == 0


async def test_a_pooler_that_keeps_sessions_apart_is_no_obstacle_to_a_singleton(
    dsn: str, protocol: Protocol, server: str
) -> None:
    # spec: ST-13
    with Pooler(server, more="pool_mode = session") as pooler:
        app = working(pooler.pooled(dsn))
        async with app, Workshop(app, singleton="nightly") as shop:
            await works(shop, protocol)
            second = await app.worker(singleton="nightly")
            with pytest.raises(SingletonTaken):
                await second.run()


def _ask(dsn: str, text: str, *params: object) -> Any:
    with psycopg.connect(dsn) as connection:
        [[found]] = connection.execute(text.encode(), params).fetchall()
        return found
