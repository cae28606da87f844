"""Duties: what one worker does for all. Somebody does it, nobody has to be there for it, and nothing that goes wrong with it
costs anybody a job or a lease."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from shiftwork import App
from shiftwork.database import Plan, Statement
from shiftwork.events import DutyDone, DutyFailed, NotificationsPileUp, Reaped, WorkerStarted
from shiftwork.maintenance import purging
from shiftwork.operations import Pulse
from shiftwork.stores.protocol import Protocol as Store
from shiftwork.worker import duties
from shiftwork.worker.duties import DUTIES, Publish
from tests.harness import Protocol
from tests.test_cli import answer
from tests.workshop import Latch, Workshop

SOON: dict[str, Any] = {"lease": timedelta(seconds=1)}
"""Three heartbeats a second."""

Row = dict[str, Any]


@pytest.fixture
def app(dsn: str) -> App:
    app = App(dsn)
    app.task(name="idle")(_idle)
    return app


async def _idle() -> None: ...


def duty(protocol: Protocol, name: str) -> Row:
    [row] = protocol.rows("select * from {}.duties where name = %s", name)
    return row


def only(protocol: Protocol, *names: str) -> None:
    """Let nothing but these be due."""
    protocol.rows(
        "update {}.duties set due_at = shiftwork.clock() + case when name = any(%s) then '0' else interval '1 day' end",
        list(names),
    )


def beat(protocol: Protocol, worker: int, *names: str, done: Sequence[Row] = ()) -> list[str]:
    """The duties that a heartbeat brings to a worker which would do these."""
    found = protocol.heartbeat(worker, duties=names, done=done)["duties"]
    assert isinstance(found, list)
    return sorted(found)


def take(protocol: Protocol, worker: int, *names: str) -> set[str]:
    rows = protocol.rows("select * from {}.take_duties(%s, %s)", worker, list(names or DUTIES))
    return {row["take_duties"] for row in rows}


# Who does it.


def test_a_duty_is_one_workers_until_it_says_that_it_is_done(protocol: Protocol) -> None:
    first, second = protocol.register(), protocol.register()
    assert beat(protocol, first, "expire", "purge") == ["expire", "purge"]
    assert beat(protocol, second, "expire", "purge", "reap") == ["reap"]
    assert beat(protocol, first, "expire") == ["expire"], "should an answer have been lost"
    done = {"duty": "expire", "did": 3, "seconds": 0.5}
    assert beat(protocol, second, "expire", done=[done]) == [], "it was not its own to end"
    assert beat(protocol, first, "expire", done=[done]) == []

    row = duty(protocol, "expire")
    assert (row["worker"], row["did"], row["seconds"], row["error"]) == (None, 3, 0.5, None)
    assert row["due_at"] - row["ended_at"] == row["every"] == timedelta(minutes=1)
    protocol.shift_clock(timedelta(minutes=2))
    protocol.rows("update {}.workers set lease_until = lease_until + interval '2 minutes'")
    assert beat(protocol, second, "expire") == ["expire"]


def test_whoever_loses_its_lease_loses_its_duties_by_the_clock_of_the_database(protocol: Protocol) -> None:
    # spec: D-26
    first, second = protocol.register(lease=30), protocol.register(lease=3600)
    assert take(protocol, first, "purge") == {"purge"}
    assert beat(protocol, second, "purge") == []
    protocol.shift_clock(timedelta(seconds=31))
    assert take(protocol, first, "expire") == set(), "who has no lease takes nothing"
    assert beat(protocol, second, "purge") == ["purge"]


def test_a_heartbeat_brings_what_is_due_of_what_was_asked_for(protocol: Protocol) -> None:
    # fault: F35
    worker = protocol.register()
    assert "duties" not in protocol.heartbeat(worker)
    assert beat(protocol, worker, "purge", "of another release") == ["purge"]
    only(protocol)
    assert beat(protocol, worker, *DUTIES) == []
    assert 0 <= protocol.heartbeat(worker, duties=[])["notifications"] < 0.5


def test_a_heartbeat_renews_whatever_the_worker_says_of_itself(protocol: Protocol) -> None:
    worker = protocol.register(lease=1)
    assert protocol.heartbeat(worker, lease=3600, state={"running": "many"}, duties=["expire"])["alive"]
    left = protocol.value("select lease_until - shiftwork.clock() from {}.workers where id = %s", worker)
    assert left > timedelta(minutes=59)


@pytest.mark.parametrize("table", ["duties", "snapshots", "runs", "run_days"])
def test_a_heartbeat_does_not_wait_for_whoever_has_locked_what_it_does_besides(
    protocol: Protocol, dsn: str, table: str
) -> None:
    # spec: D-26
    worker = protocol.register(lease=1)
    done = [{"duty": name, "did": 0} for name in take(protocol, worker)]
    protocol.rows("set statement_timeout = '10s'")
    with psycopg.connect(dsn) as somebody:
        somebody.execute(f"lock table shiftwork.{table}".encode())
        state = {"running": 0, "held": 0, "unwritten": 0, "jobs": 0}
        assert protocol.heartbeat(worker, lease=3600, state=state, duties=["expire"], done=done)["alive"]
    left = protocol.value("select lease_until - shiftwork.clock() from {}.workers where id = %s", worker)
    assert left > timedelta(minutes=59)


def test_the_worker_does_every_duty_that_the_table_has(protocol: Protocol) -> None:
    assert {row["name"] for row in protocol.rows("select name from {}.duties")} == set(DUTIES)


# What is done.


async def test_a_worker_does_for_all_what_is_due(app: App, protocol: Protocol) -> None:
    # spec: SH-31, HO-38, D-3
    late = [protocol.enqueue("idle", queue="nobody", expires_in=0) for _ in range(3)]
    old = protocol.enqueue("idle", queue="nobody", keep=0)
    protocol.cancel(old)
    orphan = protocol.enqueue("idle", queue="orphans")
    gone = protocol.register()
    protocol.claim(gone, "orphans")
    protocol.rows("delete from {}.workers where id = %s", gone)
    long_gone = protocol.register()
    protocol.rows("update {}.workers set gone_at = shiftwork.clock() where id = %s", long_gone)
    protocol.shift_clock(timedelta(days=8))

    async with app, Workshop(app, **SOON) as shop:
        for name in DUTIES:
            await shop.event(DutyDone, duty=name)
        assert {protocol.state(job) for job in late} == {"expired"}
        assert protocol.rows("select 1 from {}.all_jobs where id = %s", old) == []
        assert protocol.state(orphan) == "ready"
        assert shop.seen(Reaped)[0].jobs == {orphan: "ready"}
        assert protocol.rows("select 1 from {}.workers where id = %s", long_gone) == []
        ahead = protocol.value(
            "select to_regclass(format('shiftwork.history_%s', to_char({}.today() + 39, 'YYYY_MM_DD')))"
        )
        assert ahead is not None
        await shop.found(
            lambda: shop.rows(
                "select 1 from shiftwork.duties having count(ended_at) = 5 and count(worker) = 0"
            )
        )
        assert protocol.value("select count(error) from {}.duties") == 0


async def test_duties_are_done_by_a_worker_that_has_no_slot_to_spare(app: App, protocol: Protocol) -> None:
    latch = Latch()

    @app.task
    async def work() -> None:
        await latch.hold()

    async with app, Workshop(app, concurrency=1, **SOON) as shop:
        await work.aenqueue()
        await latch.reached()
        late = protocol.enqueue("idle", queue="nobody", expires_in=0)
        only(protocol, "expire")
        await shop.found(lambda: shop.rows("select 1 from shiftwork.history where id = %s", late))
        latch.release()


async def test_a_worker_that_ends_before_its_first_heartbeat_does_what_is_due_before_it_ends(
    app: App, protocol: Protocol
) -> None:
    # spec: ST-25, SH-31
    late = protocol.enqueue("idle", queue="nobody", expires_in=0)
    old = protocol.enqueue("idle", queue="nobody", keep=0)
    protocol.cancel(old)
    protocol.shift_clock(timedelta(days=1))
    async with app, Workshop(app, lease=timedelta(hours=1), stop_when_idle=True) as shop:
        assert await shop.stopped()
        assert {event.duty for event in shop.seen(DutyDone)} == set(DUTIES)
    assert protocol.state(late) == "expired"
    assert protocol.rows("select 1 from {}.all_jobs where id = %s", old) == []
    assert protocol.value("select count(ended_at) = 5 and count(worker) = 0 from {}.duties"), (
        "it said how they went"
    )


async def test_a_worker_that_is_about_to_end_takes_over_from_those_that_fell_silent(
    app: App, protocol: Protocol
) -> None:
    # spec: ST-25
    only(protocol)
    job = protocol.enqueue("idle")
    silent = protocol.register()
    protocol.claim(silent, start=1)
    protocol.lapse(silent)
    async with app, Workshop(app, lease=timedelta(hours=1), stop_when_idle=True) as shop:
        assert await shop.stopped()
    assert protocol.state(job) == "completed"


async def test_the_death_of_whoever_does_it_is_survived(app: App, protocol: Protocol) -> None:
    # spec: D-15
    victim = protocol.register(lease=3600)
    assert take(protocol, victim) == set(DUTIES)
    async with app, Workshop(app, **SOON) as shop:
        await shop.event(WorkerStarted)
        await shop.worker._leases.reconcile()
        assert not shop.seen(DutyDone)
        protocol.lapse(victim)
        for name in DUTIES:
            await shop.event(DutyDone, duty=name)


def test_what_is_done_in_parts_leaves_the_rest_to_the_next_time() -> None:
    # spec: A-24
    def part() -> Plan[int]:
        yield from ()
        return 5

    plan = duties._in_parts(part, full=5)
    with pytest.raises(StopIteration) as end:
        next(plan)
    assert end.value.value == 5 * duties.TURNS


async def test_one_row_that_cannot_be_written_does_not_stop_a_sweep(app: App, protocol: Protocol) -> None:
    # fault: F29
    jobs = [protocol.enqueue("idle", queue="nobody", expires_in=0) for _ in range(5)]
    protocol.connection.execute(
        "create function public.refuse() returns trigger language plpgsql as "
        "$$ begin raise exception 'not this one'; end $$;"
        "create trigger refuse before insert on shiftwork.history for each row "
        f"when (new.id = {jobs[2]}) execute function public.refuse()".encode()
    )
    async with app, Workshop(app, **SOON) as shop:
        done = await shop.event(DutyDone, duty="expire")
        assert done.did == 4
        assert [protocol.state(job) for job in jobs] == ["expired", "expired", "ready", "expired", "expired"]


async def test_what_takes_long_keeps_nobody_from_running_jobs_nor_the_worker_from_stopping(
    app: App, protocol: Protocol, monkeypatch: pytest.MonkeyPatch
) -> None:
    def endless(_: Store, __: int, ___: Publish) -> Plan[int]:
        yield Statement("select pg_sleep(600)")
        return 0

    monkeypatch.setitem(duties.DUTIES, "expire", endless)
    only(protocol, "expire")
    async with app, Workshop(app, **SOON) as shop:
        await shop.found(lambda: shop.rows("select 1 from shiftwork.duties where worker is not null"))
        assert duty(protocol, "expire")["worker"] == shop.worker.id
        await shop.ended(await app.find("idle").aenqueue())
        shop.worker.stop()
        assert await shop.stopped()
    asleep = "select 1 from pg_stat_activity where datname = current_database() and state = 'active' and query like '%pg_sleep(600)%'"
    assert len(protocol.rows(asleep)) == 1, "what it asked for is ended as well"
    successor = protocol.register()
    assert take(protocol, successor, "expire") == {"expire"}, "the others need not wait for a lease"


@pytest.mark.parametrize("payload", [{}, {"days": "many", "archive": 5}])
async def test_history_can_be_purged_by_a_job_whatever_it_was_sent_with(
    app: App, protocol: Protocol, payload: Row
) -> None:
    # spec: SH-31
    purging(app, queue="maintenance")
    old = protocol.enqueue("idle", queue="nobody", keep=0)
    kept = protocol.enqueue("idle", queue="nobody", keep=30)
    protocol.cancel(old, kept)
    protocol.rows("update {}.history set forget_on = forget_on - 1 where id = %s", old)
    job = protocol.enqueue("purge", payload, queue="maintenance")
    async with app, Workshop(app) as shop:
        await shop.ended(job, state="completed")
        assert (await shop.job(job)).result["jobs"] == 1
        assert protocol.rows("select id from {}.history where id = any(%s)", [old, kept]) == [{"id": kept}]
        assert "1 jobs forgotten" in protocol.value("select message from {}.logs where job = %s", job)


@pytest.mark.parametrize("who", ["worker", "command", "job"])
async def test_whoever_purges_goes_on_until_all_is_gone(
    app: App, dsn: str, protocol: Protocol, who: str
) -> None:
    # spec: SH-31, A-24
    purging(app, queue="maintenance")
    old = [protocol.enqueue("idle", queue="nobody", keep=0) for _ in range(2)]
    protocol.cancel(*old)
    lines = (
        "insert into {}.logs (job, attempt, level, message) select %s, 1, '', '' from generate_series(1, 350)"
    )
    for job in old:
        protocol.rows(lines, job)
    protocol.connection.execute(  # two rows a statement, two hundred a call
        "alter function shiftwork.purge_part(boolean, int) rename to purge_part_of;"
        "create function shiftwork.purge_part(boolean, out partitions int, out jobs bigint, out more boolean)"
        " language sql as $$ select * from shiftwork.purge_part_of($1, 2) $$"
    )
    protocol.shift_clock(timedelta(days=2))
    only(protocol, "purge" if who == "worker" else "")
    match who:
        case "worker":
            async with app, Workshop(app, **SOON) as shop:
                assert (await shop.event(DutyDone, duty="purge")).did == 2
        case "job":
            job = protocol.enqueue("purge", queue="maintenance")
            async with app, Workshop(app) as shop:
                await shop.ended(job, state="completed")
                assert (await shop.job(job)).result["jobs"] == 2
        case _:
            assert answer("purge", dsn=dsn)["jobs"] == 2
    assert protocol.rows("select 1 from {}.history where id = any(%s)", old) == []
    assert protocol.value("select count(*) from {}.logs where job = any(%s)", old) == 0


# What is remembered of it.


def runs(protocol: Protocol) -> list[tuple[str, str, Any, Any, Any]]:
    """Duty, host, what was done, and how long it took, of those that have ended."""
    found = protocol.rows("select * from {}.runs order by id")
    return [(run["duty"], run["host"], run["seconds"], run["did"], run["error"]) for run in found]


def test_a_run_is_remembered_from_its_start_to_its_stop(protocol: Protocol) -> None:
    # spec: SG-37
    worker = protocol.register(host="web1", lease=86400)
    assert beat(protocol, worker, "expire") == ["expire"]
    assert beat(protocol, worker, "expire") == ["expire"], "should an answer have been lost: the same run"
    [begun] = protocol.rows("select * from {}.runs")
    assert (begun["worker"], begun["ended_at"], begun["seconds"]) == (worker, None, None)
    protocol.shift_clock(timedelta(seconds=10))
    beat(protocol, worker, done=[{"duty": "expire", "did": 3, "seconds": 0.5}])
    beat(protocol, worker, done=[{"duty": "expire", "did": 4, "seconds": 0.6}])
    assert runs(protocol) == [("expire", "web1", 0.5, 3, None)], "it is told once"
    [ended] = protocol.rows("select * from {}.runs")
    assert timedelta(seconds=10) <= ended["ended_at"] - begun["began_at"] < timedelta(seconds=20)

    only(protocol, "expire")
    beat(protocol, worker, "expire")
    beat(protocol, worker, done=[{"duty": "expire", "seconds": 0.25, "error": "no luck"}])
    assert runs(protocol)[1:] == [("expire", "web1", 0.25, None, "no luck")]


def test_the_run_of_a_worker_that_died_has_no_stop(protocol: Protocol) -> None:
    # spec: SG-37
    first, second = protocol.register(host="web1"), protocol.register(host="web2", lease=86400)
    beat(protocol, first, "purge")
    protocol.shift_clock(timedelta(minutes=1))
    assert beat(protocol, second, "purge") == ["purge"]
    beat(protocol, second, done=[{"duty": "purge", "did": 7, "seconds": 2.0}])
    lost = ("purge", "web1", None, None, None)
    assert runs(protocol) == [lost, ("purge", "web2", 2.0, 7, None)]

    told = {"worker": first, "duty": "purge", "did": 5, "seconds": 70.0}
    assert protocol.value("select {}.finish_duty(%s)", Jsonb(told)) is False
    assert runs(protocol)[0] == ("purge", "web1", 70.0, 5, None), "it was only slow"


def test_of_each_duty_and_host_the_last_hundred_runs_are_kept(protocol: Protocol) -> None:
    # spec: SG-37
    protocol.rows("select {}.begin_run('purge', host => 'web2') from generate_series(1, 3)")
    first = [protocol.value("select {}.begin_run('purge', host => 'web1')") for _ in range(105)]
    kept = protocol.rows("select id from {}.runs where host = 'web1' order by id")
    assert [row["id"] for row in kept] == first[5:]
    assert protocol.value("select count(*) from {}.runs where host = 'web2'") == 3


def test_runs_are_counted_by_day_and_host(protocol: Protocol) -> None:
    # spec: SG-37
    def run(host: str, **told: object) -> None:
        number = protocol.value("select {}.begin_run('expire', host => %s)", host)
        assert protocol.value("select {}.end_run(%s)", Jsonb({"run": number, **told})) is True
        assert protocol.value("select {}.end_run(%s)", Jsonb({"run": number, **told})) is False

    for seconds, did in ((2.0, 5), (0.5, 0), (0.5, 1)):
        run("web1", seconds=seconds, did=did)
    run("web1", seconds=9.0, error="no luck")
    run("web2", seconds=1.0, did=1)
    protocol.shift_clock(timedelta(days=1))
    run("web1", seconds=1.0, did=2)
    found = protocol.rows(
        "select host, shiftwork.today() - day as ago, runs, errors, shortest, longest, seconds, did"
        " from {}.run_days order by day, host"
    )
    assert [tuple(row.values()) for row in found] == [
        ("web1", 1, 4, 1, 0.5, 9.0, 12.0, 6),
        ("web2", 1, 1, 0, 1.0, 1.0, 1.0, 1),
        ("web1", 0, 1, 0, 1.0, 1.0, 1.0, 2),
    ]


def test_a_host_is_forgotten_after_six_days_of_silence(protocol: Protocol) -> None:
    # spec: SG-37
    def run(duty: str, host: str) -> None:
        number = protocol.value("select {}.begin_run(%s, host => %s)", duty, host)
        protocol.rows("select {}.end_run(%s)", Jsonb({"run": number}))

    def known(table: str) -> set[tuple[str, str]]:
        text: Any = f"select duty, host from {{}}.{table}"
        found = protocol.rows(text)
        return {(row["duty"], row["host"]) for row in found}

    for _ in range(4):
        run("purge", "silent")
    run("purge", "busy")
    protocol.shift_clock(timedelta(days=5))
    run("purge", "busy")
    run("expire", "silent")
    assert protocol.value("select {}.forget_workers()") == 0
    protocol.shift_clock(timedelta(days=6, hours=1))
    assert protocol.value("select {}.forget_workers(most => 3)") == 3, "in batches"
    assert ("purge", "silent") in known("runs")
    assert protocol.value("select {}.forget_workers(most => 3)") == 2, "the last run, and the day"
    assert known("runs") == known("run_days") == {("purge", "busy"), ("expire", "silent")}
    assert protocol.value("select count(*) from {}.runs") == 3, "what is not silent is kept whole"
    protocol.shift_clock(timedelta(days=33))
    run("purge", "busy")
    assert protocol.value("select {}.forget_workers()") == 1 + 2, "days are forgotten after a month"
    assert known("run_days") == {("purge", "busy")}


def test_one_bad_value_in_what_is_told_of_a_run_stops_nothing(protocol: Protocol) -> None:
    # spec: SG-37
    # fault: F29
    worker = protocol.register(lease=86400)
    beat(protocol, worker, "expire", "reap", "purge")
    done: list[Any] = [
        {"duty": "expire", "did": "many", "seconds": "NaN", "error": "\u202e\x1b[31m" + "long " * 10_000},
        {"duty": "reap", "did": -1, "seconds": -5},
        {"duty": "purge", "did": 1e300, "seconds": 1e300},
        {"duty": ["?"], "did": {}},
        "no duty at all",
    ]
    assert beat(protocol, worker, "extend_history", done=done) == ["extend_history"]
    found = {run[0]: run for run in runs(protocol)}
    assert found["reap"][2:] == (0.0, 0, None)
    assert found["purge"][2:] == (1e9, 10**15, None)
    assert len(found["expire"][4]) == 1000
    assert protocol.value("select count(*) from {}.run_days") == 3
    assert protocol.value("select count(worker) from {}.duties") == 1, "the others are given back"


def test_a_heartbeat_hears_of_duties_also_while_nothing_can_be_remembered_of_them(
    protocol: Protocol, dsn: str
) -> None:
    # spec: SG-37
    worker = protocol.register(lease=86400)
    beat(protocol, worker, "expire")
    with psycopg.connect(dsn) as somebody:
        somebody.execute("lock table shiftwork.runs in share mode")
        done = [{"duty": "expire", "did": 3, "seconds": 0.5}]
        assert beat(protocol, worker, "purge", done=done) == ["purge"]
    assert duty(protocol, "expire")["did"] == 3
    assert [run[0] for run in runs(protocol)] == ["expire"]
    assert beat(protocol, worker, done=[{"duty": "purge", "did": 0}]) == []
    assert duty(protocol, "purge")["worker"] is None


async def test_workers_measure_how_long_they_took_also_when_they_failed(
    app: App, protocol: Protocol, monkeypatch: pytest.MonkeyPatch
) -> None:
    # spec: SG-37
    monkeypatch.setitem(duties.DUTIES, "expire", _raising("22012"))
    async with app, Workshop(app, stop_when_idle=True) as shop:
        assert await shop.stopped()
    found = {run["duty"]: run for run in protocol.rows("select * from {}.runs")}
    assert set(found) == set(DUTIES)
    assert all(run["host"] == socket.gethostname() and run["ended_at"] for run in found.values())
    measured = {event.duty: event.seconds for event in shop.seen(DutyDone)}
    assert {name: run["seconds"] for name, run in found.items() if name != "expire"} == measured
    assert "broken" in found["expire"]["error"]
    assert found["expire"]["seconds"] > 0


# What goes wrong.


def _raising(*codes: str) -> Any:
    """A duty that fails with each of these, and then no more."""
    left = list(codes)

    def broken(_: Store, __: int, ___: Publish) -> Plan[int]:
        if left:
            code = left.pop(0)
            yield Statement(f"do $$ begin raise exception 'broken' using errcode = '{code}'; end $$")
        return 7

    return broken


async def fail(shop: Workshop, protocol: Protocol, times: int) -> DutyFailed:
    """Have `expire` fail so many times in all; each time it is due again within a minute."""
    failed = await shop.event(DutyFailed, times)

    def given_back() -> bool:
        row = duty(protocol, "expire")
        return row["worker"] is None and row["error"] == failed.error

    while not given_back():
        await shop.found(lambda: shop.rows("select 1"))
    row = duty(protocol, "expire")
    assert row["due_at"] - row["ended_at"] == timedelta(minutes=1)
    only(protocol, "expire")
    return failed


async def test_whoever_cannot_do_a_duty_leaves_it_to_others_after_three_failures(
    app: App, protocol: Protocol, monkeypatch: pytest.MonkeyPatch
) -> None:
    # spec: HO-23
    monkeypatch.setitem(duties.DUTIES, "expire", _raising(*["22012"] * 4))
    only(protocol, "expire")
    async with app, Workshop(app, **SOON) as shop:
        asides = [(await fail(shop, protocol, times)).set_aside for times in (1, 2, 3)]
        assert asides == [False, False, True]
        only(protocol, "expire", "purge")
        await shop.event(DutyDone, duty="purge")
        assert len(shop.seen(DutyFailed)) == 3
        assert duty(protocol, "expire")["worker"] is None, "others may try"


async def test_failures_that_pass_by_themselves_do_not_count(
    app: App, protocol: Protocol, monkeypatch: pytest.MonkeyPatch
) -> None:
    # spec: HO-23
    codes = ["22012", "22012", "40P01", "22012", "22012"]
    monkeypatch.setitem(duties.DUTIES, "expire", _raising(*codes))
    only(protocol, "expire")
    async with app, Workshop(app, **SOON) as shop:
        for times in range(1, 6):
            assert not (await fail(shop, protocol, times)).set_aside
        assert (await shop.event(DutyDone, duty="expire")).did == 7


async def test_a_queue_of_notifications_that_fills_up_is_told_of_once(app: App) -> None:
    # fault: F35
    async with app, Workshop(app) as shop:
        await shop.event(WorkerStarted)
        for usage in (0.4, 0.6, 0.7, 0.3):
            shop.worker._take_pulse(Pulse(True, [], {}, [], {}, False, [], usage), {})
        seen = shop.seen(NotificationsPileUp)
        assert [(event.usage, event.over) for event in seen] == [(0.6, False), (0.3, True)]


# What workers say of themselves.


async def test_a_worker_says_with_its_heartbeats_what_it_does_and_costs(app: App, protocol: Protocol) -> None:
    # spec: HO-37
    latch = Latch()

    @app.task
    async def work() -> None:
        await latch.hold()

    async with app, Workshop(app, concurrency=2, prefetch=1) as shop:
        for _ in range(3):
            await work.aenqueue()
        await latch.reached(2)
        await shop.until(lambda: len(shop.worker.holding) == 3)
        await shop.worker._leases.reconcile()
        [said] = protocol.rows("select * from {}.snapshots")
        assert (said["worker"], said["running"], said["held"], said["unwritten"], said["jobs"]) == (
            shop.worker.id,
            2,
            3,
            0,
            3,
        )
        assert said["memory"] > 10_000_000
        assert said["cpu"] > 0
        await shop.worker._leases.reconcile()
        assert len(protocol.rows("select 1 from {}.snapshots")) == 1, "every five seconds at most"
        details = protocol.value("select details from {}.workers where id = %s", shop.worker.id)
        lease = shop.worker.settings.lease.total_seconds()
        assert (details["concurrency"], details["prefetch"], details["lease"]) == (2, 1, lease)
        assert set(details["tasks"]) == {"idle", "work"}
        latch.release()


def test_the_pause_of_a_worker_that_is_gone_is_forgotten(protocol: Protocol) -> None:
    first, second = protocol.register(), protocol.register(lease=3600)
    for worker in (first, second):
        protocol.rows("select {}.pause(worker => %s)", worker)
    protocol.rows("select {}.pause(queue => %s)", str(first))
    protocol.shift_clock(timedelta(minutes=1))
    protocol.rows("select * from {}.reap()")
    assert protocol.value("select {}.forget_workers()") == 1
    assert protocol.rows("select kind, name from {}.pauses order by kind") == [
        {"kind": "queue", "name": str(first)},
        {"kind": "worker", "name": str(second)},
    ]


def test_what_workers_said_is_kept_for_some_days_or_not_at_all(protocol: Protocol) -> None:
    # spec: HO-37, HO-38
    state = {"running": 1, "held": 2, "unwritten": 0, "jobs": 5}
    worker = protocol.register(lease=86400)
    protocol.heartbeat(worker, lease=86400, state=state)
    protocol.shift_clock(timedelta(seconds=6))
    protocol.heartbeat(worker, lease=86400, state=state)
    assert len(protocol.rows("select 1 from {}.snapshots")) == 2
    assert protocol.value("select {}.forget_workers()") == 0
    protocol.shift_clock(timedelta(days=7, seconds=3))
    assert protocol.value("select {}.forget_workers()") == 1
    protocol.rows("update {}.settings set value = '0' where name = 'keep_workers'")
    assert protocol.value("select {}.forget_workers()") == 1
    protocol.heartbeat(worker, lease=86400, state=state)
    assert protocol.rows("select 1 from {}.snapshots") == []
    assert len(protocol.rows("select 1 from {}.workers")) == 1, "it is not gone"
