"""What the world does to a worker's connections: it goes on by itself, says so once, and says when it is over."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import TransactionStatus

from shiftwork import App, Context, Retry, database, operations
from shiftwork.errors import DatabaseUnavailable, NotInstalled
from shiftwork.events import (
    DatabaseAway,
    DatabaseBack,
    JobBegan,
    JobEnded,
    JobLost,
    JobReleased,
    JobStopped,
    LeaseLapsing,
    LeaseLost,
    ListenerDeaf,
    ListenerProven,
    WorkerStarted,
    WorkerStopping,
)
from shiftwork.settings import Settings
from shiftwork.stores.protocol import Protocol as Verbs
from shiftwork.worker import waking
from shiftwork.worker.health import Health
from shiftwork.worker.line import Line, Patience
from shiftwork.worker.singleton import Singleton
from shiftwork.worker.waking import Listener
from tests.harness import Protocol
from tests.station import Station
from tests.wire import Wire
from tests.workshop import Latch, Workshop

LONG = timedelta(seconds=20)
QUICK: Any = {"lease": LONG, "reconnect": timedelta(milliseconds=100), "reconnect_most": timedelta(seconds=1)}
AT_ONCE = Retry(delays=timedelta(), jitter=0)


def working(dsn: str) -> App:
    """An app with a task of each kind."""
    app = App(dsn)

    @app.task
    async def quick(n: int = 0) -> int:
        return n

    @app.task(transaction=True, retry=AT_ONCE)
    async def transfer(tx: psycopg.AsyncConnection[Any], n: int = 0) -> int:
        await tx.execute("select 1")
        return n

    @app.task(transaction=True, retry=AT_ONCE)
    def transfer_blocking(tx: psycopg.Connection[Any], n: int = 0) -> int:
        tx.execute("select 1")
        return n

    return app


async def works(shop: Workshop) -> None:
    """One job of each kind runs, and ends."""
    jobs = [await shop.app.find(task).aenqueue() for task in ("quick", "transfer", "transfer_blocking")]
    await shop.ended(*jobs, state="completed")


def told(shop: Workshop) -> list[str]:
    """What was said of outages."""
    names = {
        DatabaseAway: "away",
        DatabaseBack: "back",
    }
    return [
        f"{event.part} {names[type(event)]}"
        for event in shop.events
        if isinstance(event, DatabaseAway | DatabaseBack)
    ]


async def over(shop: Workshop, part: str = "claiming") -> None:
    """Wait until this part is back, as often as it was away."""
    await shop.until(
        lambda: len(shop.seen(DatabaseBack, part=part)) == len(shop.seen(DatabaseAway, part=part)) > 0,
        f"the end of the outage of {part}",
    )


def judged(shop: Workshop) -> Health:
    """Whether it can claim, by what was said so far."""
    health = Health()
    for event in shop.events:
        health(event)
    return health


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines count as half open soon."""
    monkeypatch.setattr(Settings, "answer_within", timedelta(seconds=0.5))
    monkeypatch.setattr(waking, "PROVE_WITHIN", 0.5)


# Sessions that are ended.

TERMINATE = (
    "select count(pg_terminate_backend(pid)) from pg_stat_activity"
    " where datname = current_database() and application_name = %s and query ~ %s"
)


SAID = {
    "claiming": r"\.(take|sleep|expire|reap)\(",
    "settling": r"\.settle\(",
    "lease": r"\.heartbeat\(",
    "listener": r"pg_notify\(\$1",
    "idle session": r"\.conclude\(",
}
"""By what the sessions of a worker are known."""


@pytest.mark.parametrize("part", SAID)
async def test_any_of_its_sessions_may_be_ended(dsn: str, protocol: Protocol, part: str) -> None:
    # spec: QU-15, HO-28
    # fault: F7, F8
    app = working(dsn)
    async with app, Workshop(app, **QUICK) as shop:
        await works(shop)
        await shop.asleep()
        shop.worker._leases.nudge()
        await shop.found(lambda: shop.value("select seen_at > started_at from shiftwork.workers"))
        assert protocol.value(TERMINATE, f"shiftwork {shop.worker.id}", SAID[part])
        await works(shop)
        if part == "lease":
            shop.worker._leases.nudge()
            await over(shop, part)
        if part == "listener":
            await shop.event(ListenerProven, 2)
            assert len(shop.seen(ListenerDeaf)) == 1
        assert {event.part for event in shop.seen(DatabaseAway)} <= {part}
        assert not shop.seen(LeaseLost) + shop.seen(LeaseLapsing) + shop.seen(JobLost)
    assert protocol.value("select count(*) from {}.history where failures + resets > 0") == 0


@pytest.mark.parametrize("plain", [False, True], ids=["async", "plain"])
async def test_a_transaction_whose_session_is_ended_is_undone_and_made_anew(
    dsn: str, protocol: Protocol, plain: bool
) -> None:
    # spec: D-1, QU-18
    # fault: F7
    app = App(dsn)
    protocol.connection.execute("create table effects (attempt int)")
    latch = Latch()

    insert = "insert into effects values (%s)"

    async def asynchronously(tx: psycopg.AsyncConnection[Any], context: Context) -> None:
        await tx.execute(insert, (context.attempt,))
        await latch.hold()
        await tx.execute(insert, (context.attempt,))

    def plainly(tx: psycopg.Connection[Any], context: Context) -> None:
        tx.execute(insert, (context.attempt,))
        latch.hold_blocking()
        tx.execute(insert, (context.attempt,))

    function: Any = plainly if plain else asynchronously
    transfer = app.task(name="transfer", transaction=True, retry=AT_ONCE)(function)
    async with app, Workshop(app, **QUICK) as shop:
        job = await transfer.aenqueue()
        await latch.reached()
        assert protocol.value(TERMINATE, f"shiftwork {shop.worker.id}", "insert into effects") == 1
        latch.release()
        await shop.ended(job, state="completed")
        assert not shop.seen(DatabaseAway)
    assert protocol.rows("select attempt from effects") == [{"attempt": 2}, {"attempt": 2}]


# Lines that are refused, and lines on which nobody answers.


async def test_a_database_that_takes_no_calls_is_waited_for_and_that_is_said_once(
    dsn: str, protocol: Protocol
) -> None:
    # spec: HO-26, QU-15, ST-23
    # fault: F14
    with Wire(dsn) as wire:
        app = working(wire.dsn)
        async with app, Workshop(app, **QUICK) as shop:
            await works(shop)
            await shop.asleep()
            wire.refuse()
            before = wire.calls
            await asyncio.to_thread(_calls, wire, before + 6)
            shop.worker._wake()
            await shop.event(DatabaseAway, part="claiming")
            wire.accept()
            await works(shop)
            await over(shop)
            if shop.worker.settings.notify:
                await shop.event(ListenerProven, 2)
                assert len(shop.seen(ListenerDeaf)) == 1
            assert len(told(shop)) == len(set(told(shop)))
            assert not shop.seen(LeaseLost)


def _calls(wire: Wire, many: int) -> None:
    deadline = time.monotonic() + 30
    while wire.calls < many:
        assert time.monotonic() < deadline, f"{wire.calls} of {many} calls"
        time.sleep(0.01)


def test_the_waits_between_tries_double_up_to_a_limit_and_are_not_the_same_for_everybody() -> None:
    # spec: HO-26, ST-23
    # fault: F14
    settings = Settings()
    first, most = settings.reconnect.total_seconds(), settings.reconnect_most.total_seconds()
    assert (first, most) == (0.5, 30)
    many = [Patience(first, most) for _ in range(200)]
    for turn in range(10):
        waits = [patience() for patience in many]
        middle = min(first * 2**turn, most)
        assert min(waits) >= middle * 0.75
        assert max(waits) <= min(middle * 1.25, most)
        assert len(set(waits)) > 50
    for patience in many:
        patience.reset()
        assert patience() <= first * 1.25


async def test_a_worker_can_be_told_to_end_after_so_many_tries(dsn: str) -> None:
    # spec: HO-26
    with Wire(dsn) as wire:
        app = working(wire.dsn)
        async with app, Workshop(app, **{**QUICK, "reconnect_tries": 3}) as shop:
            await works(shop)
            await shop.asleep()
            wire.refuse()
            shop.worker._wake()
            assert not await shop.stopped()
            wire.accept()


async def test_jobs_that_end_meanwhile_do_not_use_up_the_tries(dsn: str) -> None:
    # spec: HO-26
    with Wire(dsn) as wire:
        app, latches = working(wire.dsn), (Latch(), Latch())

        @app.task
        async def held(number: int) -> None:
            await latches[number].hold()

        later = timedelta(minutes=1)
        given = {**QUICK, "reconnect": later, "reconnect_most": later, "reconnect_tries": 1}
        for number in (0, 1, *[1] * 5):  # so many that a slot which is freed is waited for
            await held.aenqueue(number)
        async with app, Workshop(app, **given, concurrency=2, prefetch=0) as shop:
            await latches[0].reached()
            await latches[1].reached()
            wire.refuse()
            latches[0].release()
            await shop.event(DatabaseAway, part="claiming")
            before = wire.calls
            latches[1].release()
            await shop.until(lambda: not shop.worker._slots.busy, "the end of what ran")
            await asyncio.to_thread(_calls, wire, before + 4)
            assert not shop.seen(WorkerStopping)
            wire.accept()
            await over(shop)  # sooner than it would have tried: another part was
            await works(shop)


async def test_a_part_that_went_later_and_is_back_sooner_is_reason_to_try_again(dsn: str) -> None:
    # spec: HO-26
    with Wire(dsn) as wire:
        app, latch = working(wire.dsn), Latch()

        @app.task
        async def held() -> None:
            await latch.hold()

        later = timedelta(minutes=5)
        async with (
            app,
            Workshop(app, **{**QUICK, "reconnect": timedelta(minutes=1), "reconnect_most": later}) as shop,
        ):
            job = await held.aenqueue()
            await latch.reached()
            await shop.asleep()
            wire.refuse()
            shop.worker._wake()
            await shop.event(DatabaseAway, part="claiming")
            latch.release()
            await shop.event(DatabaseAway, part="settling")
            wire.accept()
            await shop.ended(job.id, state="completed")
            await over(shop)
            await works(shop)


@pytest.mark.parametrize(
    ("state", "kept"), [("P0001", ["2", "3"]), ("55P03", ["0", "1", "2", "3"])], ids=["never", "not now"]
)
async def test_what_handlers_say_and_cannot_be_written_is_one_outage_that_keeps_no_outcome(
    dsn: str, protocol: Protocol, state: str, kept: list[str]
) -> None:
    app, more = working(dsn), asyncio.Queue[None]()

    @app.task
    async def talking(context: Context) -> None:
        for number in range(4):
            context.log.info("%s", number)
            await more.get()

    protocol.connection.execute(
        f"""create sequence public.calls;
            alter function shiftwork.report(jsonb) rename to report_kept;
            create function shiftwork.report(jsonb) returns jsonb language plpgsql as
              $$ begin perform nextval('public.calls'); raise 'not now' using errcode = '{state}'; end $$""".encode()
    )

    async def asked(times: int) -> None:
        while protocol.value("select is_called and last_value >= %s from public.calls", times) is not True:
            await asyncio.sleep(0.01)  # nothing is said of it

    async with app, Workshop(app, **QUICK) as shop:
        job = await talking.aenqueue()
        await asked(1)
        more.put_nowait(None)
        await asked(2)
        await works(shop)  # what others come to is written meanwhile
        assert [(event.part, event.error) for event in shop.seen(DatabaseAway)] == [
            ("reporting", "the database refused: not now")
        ]
        assert not shop.seen(DatabaseBack)
        assert (health := judged(shop)).reasons() == []
        assert health.warnings() == ["what handlers last said could not be written"]
        protocol.connection.execute(
            """drop function shiftwork.report(jsonb);
               alter function shiftwork.report_kept(jsonb) rename to report"""
        )
        more.put_nowait(None)
        await over(shop, "reporting")
        assert judged(shop).warnings() == []
        for _ in range(2):
            more.put_nowait(None)
        await shop.ended(job.id, state="completed")
    lines = protocol.connection.execute("select message from shiftwork.logs order by id").fetchall()
    assert [line["message"] for line in lines] == kept


@pytest.mark.parametrize("said", [".take(", ".sleep(", ".settle("])
@pytest.mark.usefixtures("impatient")
async def test_a_line_that_is_half_open_is_noticed_and_replaced(
    dsn: str, protocol: Protocol, said: str
) -> None:
    # spec: QU-15, HO-28
    # fault: F12
    with Wire(dsn) as wire:
        app = working(wire.dsn)
        async with app, Workshop(app, **QUICK) as shop:
            await shop.asleep()
            wire.silence(said)
            job = await app.find("quick").aenqueue()
            part = "settling" if said == ".settle(" else "claiming"
            away = await shop.event(DatabaseAway, part=part)
            assert "no answer within" in away.error
            wire.listen_again()
            await shop.ended(job, state="completed")
            await over(shop, part)
            await works(shop)
            assert len(set(told(shop))) == len(told(shop)) == 2
    assert protocol.value("select count(*) from {}.history where failures + resets > 0") == 0


@pytest.mark.usefixtures("impatient")
async def test_when_no_line_answers_any_more_handlers_are_told_in_time_and_all_goes_on_afterwards(
    dsn: str, protocol: Protocol
) -> None:
    # spec: QU-15, SG-16
    # fault: F12
    with Wire(dsn) as wire:
        app = working(wire.dsn)
        latch = Latch()
        left: list[Any] = []

        @app.task
        async def hold() -> None:
            try:
                await latch.hold()
            except asyncio.CancelledError:
                left.append(protocol.value("select max(lease_until) > clock_timestamp() from {}.workers"))
                raise

        async with app, Workshop(app, **{**QUICK, "lease": timedelta(seconds=2)}) as shop:
            job = await hold.aenqueue()
            await latch.reached()
            wire.stall()
            await shop.event(JobStopped, job=job, why="lapsed")
            await shop.until(lambda: left == [True])
            latch.release()
            wire.go_on()
            await shop.ended(job, state="completed")
            await works(shop)
            await over(shop, "lease")


async def fails_while_it_is_cancelled(task: asyncio.Task[Any], connection: Any) -> None:
    """Nobody answers a statement; whoever waits for it is told to end, has it cancelled, and is cut off."""
    while connection.info.transaction_status != TransactionStatus.ACTIVE:
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    database.cut(connection)


async def test_a_line_that_fails_while_a_part_is_told_to_end_does_not_make_it_forget_that(dsn: str) -> None:
    with Wire(dsn) as wire:
        line, store = Line(Settings.read(dsn=wire.dsn), partial(str, "test")), Verbs()
        await line.perform(operations.sql_tasks(store))
        wire.stall()
        asking = asyncio.create_task(line.perform(operations.sql_tasks(store)))
        await fails_while_it_is_cancelled(asking, line._connection)
        await asyncio.wait([asking])
        assert asking.cancelled()


async def test_nobody_hangs_up_under_who_still_watches_the_line(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The descriptor could be another's by the time he stops watching it, and that one would be heard no more.
    loop, watched, freed = asyncio.get_running_loop(), 0, []

    def remove_reader(descriptor: int) -> bool:
        nonlocal watched
        watched += 1
        try:
            os.fstat(descriptor)
        except OSError:
            freed.append(traceback.format_stack(limit=12))
        return type(loop).remove_reader(loop, descriptor)

    monkeypatch.setattr(loop, "remove_reader", remove_reader)
    async with Workshop(working(dsn)) as shop:
        await shop.asleep()
    singleton = Singleton(Settings.read(dsn=dsn, singleton="one"), lambda _: None)
    assert await singleton.take() is None
    await asyncio.sleep(0)  # now it watches
    await singleton.close()
    with Wire(dsn) as wire:
        line, store = Line(Settings.read(dsn=wire.dsn), partial(str, "test")), Verbs()
        await line.perform(operations.sql_tasks(store))
        wire.stall()
        with pytest.raises(DatabaseUnavailable, match="no answer"):
            await line.perform(operations.sql_tasks(store), within=0.01)
        wire.go_on()
        await line.perform(operations.sql_tasks(store))
        wire.stall()
        await line.abandon(asyncio.create_task(line.perform(operations.sql_tasks(store))))
    assert watched
    assert not freed, freed


async def test_a_listener_ends_though_its_line_fails_when_it_is_told_to(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waking, "PROVE_EVERY", 0.001)
    monkeypatch.setattr(waking, "PROVE_WITHIN", 60.0)
    proven = asyncio.Event()
    with Wire(dsn) as wire:
        listener = Listener(
            Settings.read(dsn=wire.past),
            Verbs(),
            partial(str, "test"),
            work=lambda _: None,
            look=lambda _: None,
            heard=lambda *_: proven.set(),
        )
        async with listener, asyncio.timeout(60):
            await proven.wait()
            wire.stall()
            assert listener._task is not None
            await fails_while_it_is_cancelled(listener._task, listener._connection)
        assert listener._task.done()


async def test_a_slow_network_is_no_reason_to_give_anybody_up(dsn: str, protocol: Protocol) -> None:
    # spec: SG-16
    # fault: F13
    with Wire(dsn) as wire:
        app = working(wire.dsn)
        async with app, Workshop(app, lease=timedelta(seconds=4)) as shop:
            wire.delay = 0.15
            jobs = [protocol.enqueue(task) for task in ("quick", "transfer", "transfer_blocking") * 3]
            await shop.ended(*jobs, state="completed")
            other = protocol.register(lease=60)
            assert protocol.rows("select * from {}.reap(%s)", other) == []
            assert not shop.seen(LeaseLapsing) + shop.seen(DatabaseAway)
            wire.delay = 0.0
    assert protocol.value("select count(*) from {}.history where attempt > 1") == 0


@pytest.mark.usefixtures("impatient")
async def test_a_listener_on_a_half_open_line_is_deaf_and_calls_again(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # spec: HO-28, A-10
    # fault: F8, F12
    monkeypatch.setattr(waking, "PROVE_EVERY", 0.2)
    with Wire(dsn) as wire:
        app = working(wire.dsn)
        async with app, Workshop(app, **QUICK) as shop:
            await shop.event(ListenerProven)
            wire.silence("pg_backend_pid")
            await shop.event(ListenerDeaf)
            wire.listen_again()
            await shop.event(ListenerProven, 2)
            await shop.asleep()
            await works(shop)
            assert not shop.seen(DatabaseAway)


def test_a_workers_lines_are_watched_so_that_a_dead_one_is_noticed_within_15_seconds() -> None:
    # fault: F12
    for lease in (1, 10, 30, 600):
        settings = Settings(lease=timedelta(seconds=lease))
        given = conninfo_to_dict(database._conninfo("postgresql://host/db", settings, "shiftwork 1"))
        idle, interval, count = (
            int(given[f"keepalives_{name}"] or 0) for name in ("idle", "interval", "count")
        )
        assert idle + interval * count <= 15
        assert int(given["tcp_user_timeout"] or 0) <= 15_000
        assert settings.answer_within <= timedelta(seconds=15)


# Servers that say no.


@pytest.fixture
def role(dsn: str, connection: psycopg.Connection[Any]) -> Iterator[str]:
    """A role of the test's own that may work."""
    name = f"hand_{conninfo_to_dict(dsn)['dbname'][-12:]}"  # type: ignore[index]
    connection.execute(
        f"create role {name} login; grant usage on schema shiftwork to {name};"
        f" grant all on all tables in schema shiftwork to {name};"
        f" grant all on all sequences in schema shiftwork to {name};"
        f" grant execute on all functions in schema shiftwork to {name}".encode()
    )
    yield name
    connection.execute(f"drop owned by {name}".encode())
    connection.execute(f"drop role {name}".encode())


REFUSALS = {
    "too many connections": ("alter role {} connection limit 0", "alter role {} connection limit -1"),
    "not let in": ("alter role {} nologin", "alter role {} login"),
    "read only": (
        "alter role {} set default_transaction_read_only = on",
        "alter role {} reset default_transaction_read_only",
    ),
    "statement timeout": ("alter role {} set statement_timeout = 1", "alter role {} reset statement_timeout"),
}


@pytest.mark.parametrize("kind", REFUSALS)
async def test_a_server_that_says_no_is_asked_again_until_it_says_yes(
    dsn: str, protocol: Protocol, role: str, kind: str
) -> None:
    # spec: QU-15, HO-26, HO-27
    # fault: F14, F20, F39
    no, yes = (text.format(role).encode() for text in REFUSALS[kind])
    app = working(make_conninfo(dsn, user=role))
    slow = kind == "statement timeout"
    async with app, Workshop(app, **QUICK) as shop:
        await works(shop)
        await shop.asleep()
        if slow:
            protocol.connection.execute("alter function shiftwork.take(jsonb) rename to take_quickly")
            rows = protocol.value(
                "select pg_get_function_result('shiftwork.take_quickly(jsonb)'::regprocedure)"
            )
            protocol.connection.execute(
                f"create function shiftwork.take(request jsonb) returns {rows} language plpgsql as"
                " 'begin perform pg_sleep(0.01); return query select * from shiftwork.take_quickly(request); end'".encode()
            )
        protocol.connection.execute(no)
        protocol.value(TERMINATE, f"shiftwork {shop.worker.id}", ".")
        shop.worker._wake()
        await shop.event(DatabaseAway, part="claiming")
        job = protocol.enqueue("quick", {"n": 1})
        protocol.connection.execute(yes)  # for sessions that begin now: the old ones have to go
        await shop.ended(job, state="completed")
        await over(shop)
        await works(shop)
        assert not shop.seen(LeaseLost)
        assert len(shop.seen(DatabaseAway)) <= 4


async def test_a_worker_begins_when_it_is_let(dsn: str, protocol: Protocol, role: str) -> None:
    # spec: HO-2, HO-26, HO-27
    # fault: F14
    protocol.connection.execute(f"alter role {role} nologin".encode())
    app = working(make_conninfo(dsn, user=role))
    async with app, Workshop(app, **QUICK) as shop:
        await shop.event(DatabaseAway, part="beginning")
        protocol.connection.execute(f"alter role {role} login".encode())
        await shop.event(DatabaseBack, part="beginning")
        await works(shop)


async def test_what_no_waiting_can_mend_ends_the_worker_with_the_reason(empty_dsn: str) -> None:
    # spec: HO-27
    app = working(empty_dsn)
    async with app:
        worker = await app.worker()
        with pytest.raises(NotInstalled, match="shiftwork migrate"):
            await worker.run()


REFUSING = """
create function public.refuse() returns trigger language plpgsql as $$
begin
  if {} then
    raise exception using errcode = '{}', message = 'not now';
  end if;
  return new;
end $$;
create trigger refuse before update on shiftwork.{} for each row execute function public.refuse();
create sequence public.refusals;
"""


@pytest.mark.parametrize("code", ["40P01", "40001", "55P03", "57014"])
async def test_a_claim_that_is_called_off_is_made_again(dsn: str, protocol: Protocol, code: str) -> None:
    # spec: QU-15
    # fault: F39
    app = working(dsn)
    async with app, Workshop(app, **QUICK) as shop:
        await shop.asleep()
        condition = "new.state = 'running' and nextval('public.refusals') <= 3"
        protocol.connection.execute(REFUSING.format(condition, code, "jobs").encode())
        job = await app.find("quick").aenqueue()
        await shop.ended(job, state="completed")
        await over(shop)
        assert told(shop) == ["claiming away", "claiming back"]
    found = protocol.job(job.id)
    assert (found["attempt"], found["failures"], found["resets"]) == (1, 0, 0)


async def test_a_reaping_that_is_refused_again_and_again_is_left_alone_and_claiming_goes_on(
    dsn: str, protocol: Protocol
) -> None:
    # spec: HO-23
    # fault: F29
    app = working(dsn)
    async with app, Workshop(app, lease=timedelta(seconds=1)) as shop:
        await shop.asleep()
        protocol.connection.execute(
            "create or replace function shiftwork.reap(reaper bigint default 0, most int default 1000,"
            " thorough boolean default false) returns table (id bigint, attempt int, worker bigint, answer text)"
            " language plpgsql as $$ begin raise exception 'this one is broken'; end $$"
        )
        protocol.register(lease=0.05)
        away = await shop.event(DatabaseAway)
        assert (away.part, "this one is broken" in away.error) == ("reaping", True)
        await works(shop)
        await shop.until(lambda: shop.worker._reap_at > 0, "the third refusal")
        await works(shop)
        assert told(shop) == ["reaping away"]


# Whole servers.


@pytest.fixture(scope="module")
def station() -> Iterator[Station]:
    """A server that may be restarted."""
    with Station(fsync=True, options={"max_notify_queue_pages": "64"}) as station:
        yield station


@pytest.mark.parametrize("way", ["fast", "immediate"])
async def test_a_server_that_restarts_finds_its_workers_at_work(station: Station, way: str) -> None:
    # spec: QU-15, HO-26, ST-23
    # fault: F9, F10
    app = working(station.dsn)
    latch = Latch()

    @app.task
    async def hold(n: int) -> int:
        await latch.hold()
        return n

    async with app, Workshop(app, **QUICK) as shop:
        await shop.event(ListenerProven)
        await works(shop)
        jobs = await app.aenqueue_many([hold.job(n) for n in range(5)])
        await latch.reached(5)
        await asyncio.to_thread(station.end, way)
        latch.release()  # their outcomes have to wait
        await shop.event(DatabaseAway, part="settling")
        await asyncio.to_thread(station.start)
        await shop.ended(*jobs, state="completed")
        await over(shop, "settling")
        await shop.event(ListenerProven, 2)
        await works(shop)
        assert [(await job.ainfo()).attempt for job in jobs] == [1] * 5
        assert len(told(shop)) == len(set(told(shop)))
        assert not shop.seen(LeaseLost) + shop.seen(LeaseLapsing)


async def test_a_worker_follows_to_the_server_that_takes_over(station: Station) -> None:
    # spec: D-27
    # fault: F20
    with Station() as other:
        with psycopg.connect(other.dsn) as connection:
            connection.execute("alter table shiftwork.jobs alter id restart 1000")
        hosts = [conninfo_to_dict(one.dsn)["host"] for one in (station, other)]
        app = working(make_conninfo(station.dsn, host=",".join(map(str, hosts)), port="5432,5432"))
        async with app, Workshop(app, **QUICK) as shop:
            await works(shop)
            with psycopg.connect(station.dsn, autocommit=True) as connection:
                connection.execute("alter system set default_transaction_read_only = on")
                connection.execute("select pg_reload_conf()")
            try:
                # What is asked now is refused, and the next session is looked for elsewhere: nobody knows us there.
                shop.worker._wake()
                shop.worker._leases.nudge()
                await shop.event(WorkerStarted, 2)
                with pytest.raises(DatabaseUnavailable, match="nothing was committed"):
                    await app.find("quick").aenqueue()  # whoever enqueues is told, and goes on as well
                await works(shop)
                # The former server is still there, and whoever went on listening to it would be told of nothing.
                await shop.event(ListenerProven, 2)
                await shop.asleep()
                await works(shop)
            finally:
                with psycopg.connect(station.dsn, autocommit=True) as connection:
                    connection.execute("set default_transaction_read_only = off")
                    connection.execute("alter system reset default_transaction_read_only")
                    connection.execute("select pg_reload_conf()")
        with psycopg.connect(other.dsn) as connection:
            [[many]] = connection.execute("select count(*) from shiftwork.history").fetchall()
        assert many == 6


def test_of_several_servers_the_one_that_takes_writes_is_meant() -> None:
    # fault: F20
    several = conninfo_to_dict(database._conninfo("postgresql://a,b/db", Settings(), None))
    alone = conninfo_to_dict(database._conninfo("postgresql://a/db", Settings(), None))
    chosen = "postgresql://a,b/db?target_session_attrs=any"
    assert several["target_session_attrs"] == "read-write"
    assert "target_session_attrs" not in alone
    assert conninfo_to_dict(database._conninfo(chosen, Settings(), None))["target_session_attrs"] == "any"


async def test_a_notification_queue_that_is_full_fails_no_enqueue_and_keeps_no_job_waiting(
    station: Station,
) -> None:
    # spec: D-6
    # fault: F35
    app = working(station.dsn)
    async with app, Workshop(app, poll=timedelta(milliseconds=200), lease=LONG) as shop:
        await shop.asleep()
        async with await psycopg.AsyncConnection.connect(station.dsn) as idle:
            await idle.execute("listen everything")
            await idle.commit()
            await idle.execute("select 1")  # in a transaction, it reads nothing
            async with await psycopg.AsyncConnection.connect(station.dsn, autocommit=True) as loud:
                with pytest.raises(psycopg.Error, match="too many notifications"):
                    await fill(loud)
            jobs = [await app.find("quick").aenqueue() for _ in range(20)]
            await shop.ended(*jobs, state="completed")
            await shop.rows(
                "do $$ begin for n in 1..2000 loop perform shiftwork.enqueue('quick', tags => '{flood}'); commit; end loop; end $$"
            )
            await shop.found(
                lambda: shop.value(
                    "select count(*) = 2000 from shiftwork.history where tags = '{flood}' and state = 'completed'"
                )
            )
            await idle.rollback()


async def fill(connection: psycopg.AsyncConnection[Any]) -> None:
    while True:
        await connection.execute("select pg_notify('everything', repeat('x', 7000) || random())")


# The rest of the world.


async def test_a_worker_that_drains_and_its_successor_do_not_get_into_each_others_way(
    dsn: str, protocol: Protocol
) -> None:
    # spec: D-27
    # fault: F25, F26
    app = working(dsn)
    latch = Latch()

    @app.task
    async def hold() -> None:
        await latch.hold()

    async with app, Workshop(app, lease=LONG) as former:
        held = await hold.aenqueue()
        await latch.reached()
        former.worker.stop("deployed anew")
        async with Workshop(app, lease=LONG) as latter:  # of the same host, process and name
            await works(latter)
            assert protocol.rows("select * from {}.reap(%s, thorough => true)", latter.worker.id) == []
            assert not latter.seen(JobBegan, job=held)
            latch.release()
            assert await former.stopped()
            assert former.seen(JobEnded, job=held)
            await works(latter)
            assert not latter.seen(LeaseLost)
    # A claim may have been under way when the former was told to stop: then it gave that job back, which counts nothing.
    assert protocol.value("select count(*) from {}.history where failures + resets > 0") == 0
    assert protocol.job(held.id)["attempt"] == 1


async def test_a_machine_without_threads_to_spare_costs_a_job_nothing(
    dsn: str, protocol: Protocol, monkeypatch: pytest.MonkeyPatch
) -> None:
    # spec: HO-20
    app = App(dsn)
    calls: list[int] = []

    @app.task(retry=Retry.never())
    def plain(context: Context) -> None:
        calls.append(context.attempt)

    start = threading.Thread.start

    def none_left(thread: threading.Thread) -> None:
        if thread.name.startswith("shiftwork-slot"):
            raise RuntimeError("can't start new thread")
        start(thread)

    async with app, Workshop(app, lease=LONG) as shop:
        monkeypatch.setattr(threading.Thread, "start", none_left)
        job = await plain.aenqueue()
        await shop.event(JobReleased, job=job)
        monkeypatch.undo()
        await shop.ended(job, state="completed")
    assert len(calls) == 1
    found = protocol.job(job.id)
    assert (found["failures"], found["resets"]) == (0, 0)


@pytest.mark.parametrize("hours", [-24, 24])
async def test_the_clock_of_a_workers_machine_may_show_what_it_likes(
    dsn: str, protocol: Protocol, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    # fault: F22
    app = working(dsn)
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + hours * 3600)
    async with app, Workshop(app, lease=timedelta(seconds=6)) as shop:
        later = await app.find("quick").using(delay=timedelta(milliseconds=300)).aenqueue()
        await works(shop)
        await shop.ended(later, state="completed")
        assert not shop.seen(LeaseLost) + shop.seen(LeaseLapsing)
    assert protocol.value(
        "select bool_and(finished_at between clock_timestamp() - interval '1 min' and clock_timestamp()"
        " and started_at > run_at - interval '1 min') from {}.history"  # a claim is as old as its beginning
    )


@pytest.mark.parametrize("jump", [2, -2, 28_800], ids=["two leases on", "two leases back", "a day on"])
async def test_a_clock_of_the_server_that_jumps_costs_time_and_nothing_else(
    dsn: str, protocol: Protocol, jump: int
) -> None:
    # fault: F23
    app = working(dsn)
    latch = Latch()

    @app.task
    async def hold(context: Context) -> int:
        await latch.hold()
        return context.attempt

    async with app, Workshop(app, lease=timedelta(seconds=3)) as shop:
        job = await hold.aenqueue()
        await latch.reached()
        protocol.shift_clock(timedelta(seconds=3) * jump)
        lost = protocol.reap()
        assert lost == ({job.id: "ready"} if jump > 0 else {})
        latch.release()
        await shop.ended(job, state="completed")
        await works(shop)
        if jump > 0:
            assert shop.seen(LeaseLost)
    found = protocol.job(job.id)
    assert (found["attempt"], found["resets"], found["failures"]) == ((2, 1, 0) if jump > 0 else (1, 0, 0))


async def test_a_flood_of_notifications_makes_few_claims_and_keeps_no_job_waiting(
    dsn: str, protocol: Protocol
) -> None:
    # spec: QU-29, ST-5
    # fault: F34
    app = working(dsn)
    async with app, Workshop(app, **QUICK) as shop:
        await shop.asleep()
        before, began = shop.points["claiming"], time.monotonic()
        for garbage in ("", "default", "no such queue", "x" * 7_900, "\N{SNOWMAN}", "-1"):
            for channel in ("shiftwork_wake", "shiftwork_cancel"):
                protocol.rows(
                    "select count(pg_notify(%s, %s || case when %s <> '' then '' else n::text end))"
                    " from generate_series(1, 500) as n",
                    channel,
                    garbage,
                    garbage,
                )
        await works(shop)
        claims = shop.points["claiming"] - before
        assert claims <= 40 + 20 * (time.monotonic() - began), "6,000 notifications"
        await shop.asleep()
        seen = shop.points["claiming"]
        protocol.rows("select pg_notify('shiftwork_wake', 'not ours'), pg_notify('shiftwork_cancel', '0')")
        await works(shop)
        assert shop.points["claiming"] - seen < 20
