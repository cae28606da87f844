"""What a worker tells over HTTP: whether it lives, whether it is able to claim, and what it has counted, which is the truth."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import socket
import sys
import threading
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from prometheus_client.parser import text_string_to_metric_families

import shiftwork
from shiftwork import App, Job, events
from shiftwork.errors import ConfigurationError
from shiftwork.events import DatabaseAway, DatabaseBack, WorkerStarted
from shiftwork.worker import endpoint, hooks
from shiftwork.worker import worker as main_loop
from shiftwork.worker.hooks import Round
from shiftwork.worker.metrics import BOUNDS, MOST_TASKS, Durations, Metrics
from tests import pooler
from tests.harness import Protocol
from tests.wire import Wire
from tests.workshop import Latch, Workshop

Samples = dict[tuple[str, ...], float]
"""By name and the values of the labels, in the order of their names."""


@pytest.fixture
def app(dsn: str) -> App:
    return App(dsn)


@pytest.fixture
def port() -> int:
    """One that is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        found = probe.getsockname()[1]
        assert isinstance(found, int)
        return found


def ask(port: int, path: str, method: str = "GET") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        assert answer.headers["Server"].strip() == "shiftwork", "and nothing of its version"
        return answer.status, answer.read().decode()
    finally:
        connection.close()


async def asked(port: int, path: str) -> tuple[int, Any]:
    status, text = await asyncio.to_thread(ask, port, path)
    return status, json.loads(text)


async def scrape(port: int) -> Samples:
    status, text = await asyncio.to_thread(ask, port, "/metrics")
    assert status == 200, text
    return read(text)


def read(text: str) -> Samples:
    return {
        (sample.name.removeprefix("shiftwork_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def by_task(samples: Samples) -> Counter[tuple[str, str]]:
    return Counter(
        {
            (task, outcome): int(value)
            for (name, *labels), value in samples.items()
            if name == "jobs_processed_total" and value
            for outcome, task in [labels]
        }
    )


# What is counted is the truth.


async def test_what_is_counted_is_what_the_database_says(app: App, protocol: Protocol, port: int) -> None:
    # spec: SH-25, SH-26, QU-31
    # fault: I12
    latch = Latch()

    @app.task
    async def good() -> None: ...

    @app.task(retry=shiftwork.Retry(max_attempts=2, delay=timedelta(0)))
    async def bad() -> None:
        raise ValueError("bad")

    @app.task
    def poisonous() -> None:
        raise shiftwork.Poison("never")

    @app.task
    async def sleepy(context: shiftwork.Context) -> None:
        if context.attempt < 3:
            raise shiftwork.Snooze(timedelta(0), "not yet" if context.attempt == 2 else "")

    @app.task
    async def cancelled() -> None:
        await latch.hold()

    jobs = [await task.aenqueue() for task in (good, bad, poisonous, sleepy) for _ in range(3)]
    unknown = protocol.enqueue("nobody knows")
    async with (
        app,
        Workshop(app, metrics_port=port, unknown_tasks="fail", poll=timedelta(milliseconds=100)) as shop,
    ):
        stopped = await cancelled.aenqueue()
        await latch.reached()
        await stopped.acancel("enough")
        await shop.ended(*jobs, state=None)
        await shop.found(
            lambda: shop.rows("select 1 from shiftwork.history having count(*) = %s", len(jobs) + 2)
        )
        await shop.until(lambda: not shop.worker.holding)
        seen = await scrape(port)
        truth = Counter(
            {
                (row["task"], row["outcome"]): row["number"]
                for row in protocol.rows(
                    "select case when task = 'nobody knows' then 'unknown' else task end as task,"
                    " case when state = 'completed' then 'ok' when error ->> 'code' in ('POISON', 'UNKNOWN_TASK') then 'poison'"
                    " else state::text end as outcome, count(*) as number from {}.history group by 1, 2"
                    " union all select job.task, 'retry', count(*) from {}.attempts as tried join {}.history as job"
                    " on job.id = tried.job where tried.will_retry group by 1".replace("{}", "shiftwork")
                )
            }
        )
        truth["sleepy", "snoozed"] = protocol.value(
            "select sum(attempt - 1)::int from {}.history where task = 'sleepy'"
        )
        assert by_task(seen) == truth
        assert truth["bad", "retry"] == truth["bad", "failed"] == 3
        assert protocol.state(unknown) == "failed"
        for task, outcome in {("good", 3), ("bad", 6), ("sleepy", 9), ("unknown", 1)}:
            assert seen["job_duration_seconds_count", task] == outcome
        assert seen["jobs_held",] == 0
        assert {value for (name, *_), value in (await scrape(port)).items() if name == "jobs_in_flight"} == {
            0
        }


def test_durations_are_counted_in_twelve_buckets_from_5_ms_on() -> None:
    # spec: SH-25
    assert len(BOUNDS) == 12
    assert BOUNDS[:3] == pytest.approx((0.005, 0.0125, 0.03125))
    metrics = Metrics(["t"], dict)
    for seconds in (0.001, 0.005, 0.006, 1000.0):
        metrics(events.JobEnded(1, "t", "default", 1, "completed", seconds))
    buckets = {
        sample.labels["le"]: sample.value
        for family in metrics.collect()
        for sample in family.samples
        if sample.name == "shiftwork_job_duration_seconds_bucket" and sample.labels["task"] == "t"
    }
    assert len(buckets) == 13
    assert (buckets["0.005"], buckets["0.0125"], buckets["+Inf"]) == (2, 3, 4)


def test_durations_that_are_added_together_are_counted_as_they_are_one_by_one() -> None:
    took = [0.0, BOUNDS[0], 0.006, BOUNDS[3], 0.2, 1000.0, BOUNDS[-1], 0.2]
    for many in ([], took[:1], took[5:6], took):
        together, one_by_one = Durations(BOUNDS), Durations(BOUNDS)
        together.add_all(list(many))
        for seconds in many:
            one_by_one.add(seconds)
        assert together.many == one_by_one.many
        assert together.total == pytest.approx(one_by_one.total)


async def test_the_most_in_flight_since_the_last_scrape_is_told_and_not_just_what_is_in_flight_then(
    app: App, port: int
) -> None:
    # spec: SG-36
    latch = Latch()

    @app.task
    async def work() -> None:
        await latch.hold()

    async with app, Workshop(app, metrics_port=port, concurrency=5) as shop:
        jobs = [await work.aenqueue() for _ in range(5)]
        await latch.reached(5)
        assert (await scrape(port))["slots_busy",] == 5
        latch.release()
        await shop.ended(*jobs)
        assert (await scrape(port))["jobs_in_flight", "work"] == 5
        assert (await scrape(port))["jobs_in_flight", "work"] == 0


async def test_what_waits_in_a_queue_is_asked_of_the_database_but_not_with_every_scrape(
    app: App, protocol: Protocol, port: int
) -> None:
    # spec: SG-36
    @app.task(queue="mail")
    async def letter() -> None: ...

    protocol.rows("select {}.pause(queue => 'mail')")
    protocol.enqueue_many({"task": "letter", "queue": "mail", "priority": n % 3} for n in range(7))
    protocol.rows("update {}.jobs set run_at = run_at - interval '1 hour' where id = 6")
    async with app, Workshop(app, metrics_port=port) as shop:
        await shop.event(WorkerStarted)
        seen = await scrape(port)
        assert seen["queue_depth", "mail"] == 7
        assert seen["queue_depth", "default"] == seen["queue_oldest_wait_seconds", "default"] == 0
        assert 3600 <= seen["queue_oldest_wait_seconds", "mail"] < 3700
        protocol.enqueue("letter", queue="mail")
        again = await scrape(port)
        assert again["queue_depth", "mail"] == 7
        assert again["queue_depth_age_seconds",] > 0

        def has_hung_up() -> bool:
            return not pooler.connections(app.settings.dsn or "", f"shiftwork {shop.worker.id} metrics")

        assert await shop.found(lambda: asyncio.to_thread(has_hung_up)), "only while it is asked"
    assert protocol.value("select ready from {}.measure_queues(array['mail'], 3)") == 3, (
        "it counts so far at most"
    )


async def test_claims_settlements_renewals_and_outages_are_counted(dsn: str, port: int) -> None:
    # spec: QU-31
    with Wire(dsn) as wire:
        app = App(wire.dsn)

        @app.task
        async def work() -> None: ...

        async with app, Workshop(app, metrics_port=port, lease=timedelta(seconds=3)) as shop:
            await shop.ended(await work.aenqueue())
            await shop.worker._leases.reconcile()
            await shop.asleep()
            seen = await scrape(port)
            assert seen["claim_duration_seconds_count",] >= 1
            assert seen["settle_duration_seconds_count",] == 1
            assert seen["lease_renewal_duration_seconds_count",] >= 1
            assert (seen["listening",], seen["ready",], seen["slots",]) == (
                shop.worker.settings.notify,
                1,
                10,
            )
            assert not any(name == "outages_total" for name, *_ in seen)
            wire.refuse()
            await shop.event(DatabaseAway, part="lease")
            status, told = await asked(port, "/ready")
            assert status == 503
            assert told["reasons"][0].startswith("the database cannot be reached")
            assert (await asked(port, "/live"))[0] == 200, (
                "nobody is to be killed because the database is away"
            )
            wire.accept()
            await shop.event(DatabaseBack, part="lease")
            seen = await scrape(port)
            assert seen["outages_total", "lease"] == seen["reconnects_total", "lease"] == 1


def test_jobs_taken_from_the_dead_are_counted_by_what_became_of_them() -> None:
    # spec: SG-26
    metrics = Metrics(["t"], dict)
    for event in (
        events.Reaped({1: "ready", 2: "failed", 3: "cancelled"}),
        events.Reaped({4: "ready"}),
        events.ReapFailed("no"),
    ):
        metrics(event)
    seen = {sample.name: sample.value for family in metrics.collect() for sample in family.samples}
    assert seen["shiftwork_resets_total"] == 3
    assert seen["shiftwork_reset_failures_total"] == seen["shiftwork_reset_errors_total"] == 1


async def test_hooks_before_and_after_jobs_are_timed_apart_from_them(app: App, port: int) -> None:
    # spec: SG-36
    @app.task
    async def work() -> None: ...

    @app.before_job
    def before(job: Job) -> None: ...

    @app.after_job
    def after(job: Job, failure: str | None) -> None: ...

    @app.after_job
    async def after_a_while(job: Job, failure: str | None) -> None:
        await asyncio.sleep(0.01)

    async with app, Workshop(app, metrics_port=port) as shop:
        await shop.ended(await work.aenqueue(), await work.aenqueue())
        seen = await scrape(port)
    assert (
        seen["hook_duration_seconds_count", "before_job"],
        seen["hook_duration_seconds_count", "after_job"],
    ) == (2, 2)
    assert seen["hook_duration_seconds_sum", "after_job"] > 0.019


def test_labels_are_bounded_whatever_is_enqueued() -> None:
    # spec: A-24
    metrics = Metrics([f"task {n:04d}" for n in range(MOST_TASKS + 50)], dict)
    for n in range(MOST_TASKS + 50):
        metrics(events.Claimed({f"task {n:04d}": 1, f"made up {n}": 1}, 0.1))
        metrics(events.JobEnded(1, f"task {n:04d}", "q", 1, "completed", 0.1))
        metrics(events.JobEnded(1, f"made up {n}", "q", 1, "failed", 0.1, {"code": f"CODE_{n}"}))
    told = {
        sample.labels["task"]: sample.value
        for family in metrics.collect()
        for sample in family.samples
        if sample.name == "shiftwork_jobs_processed_total" and sample.value
    }
    assert len(told) == MOST_TASKS + 2
    assert (told["other"], told["unknown"]) == (50, MOST_TASKS + 50)


# Alive, and able to claim.


async def test_ready_is_who_is_registered_and_does_not_stop(app: App, port: int) -> None:
    latch = Latch()

    @app.task
    async def work() -> None:
        await latch.hold()

    async with app, Workshop(app, metrics_port=port) as shop:
        gate = shop.gate("claiming")
        await gate.reached()
        status, told = await asked(port, "/ready")
        assert (status, told["ready"], told["reasons"], told["worker"]) == (200, True, [], shop.worker.id)
        assert told["pid"] == os.getpid()
        gate.open()
        await work.aenqueue()
        await latch.reached()
        shop.worker.stop("enough for today")
        status, told = await asked(port, "/ready")
        assert (status, told["ready"], told["reasons"]) == (503, False, ["it stops: enough for today"])
        assert (await asked(port, "/live"))[0] == 200
        latch.release()
        await shop.stopped()
        with pytest.raises(ConnectionRefusedError):
            ask(port, "/live")


async def test_a_worker_that_is_paused_is_not_ready(app: App, protocol: Protocol, port: int) -> None:
    @app.task
    async def work() -> None: ...

    async with app, Workshop(app, metrics_port=port) as shop:
        await shop.event(WorkerStarted)
        protocol.rows("select {}.pause(worker => %s)", shop.worker.id)
        job = await work.aenqueue()
        await shop.event(events.WorkerPaused)
        status, told = await asked(port, "/ready")
        assert (status, told["reasons"]) == (503, ["it is paused, or everything is"])
        protocol.rows("select {}.resume(worker => %s)", shop.worker.id)
        await shop.ended(job)
        assert (await asked(port, "/ready"))[0] == 200


async def test_whom_a_transaction_that_does_not_end_keeps_from_claiming_says_so_and_is_not_ready(
    app: App, dsn: str, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # spec: D-30
    @app.task
    async def work() -> None: ...

    monkeypatch.setattr(main_loop, "BARRED", 0.1)
    async with app, Workshop(app, metrics_port=port) as shop:
        await shop.event(WorkerStarted)
        with psycopg.connect(dsn) as somebody:
            somebody.execute("select shiftwork.pause(queue => 'another')")
            job = await work.aenqueue()
            await shop.event(events.ClaimsBarred, over=False)
            status, told = await asked(port, "/ready")
            assert status == 503
            assert told["reasons"] == ["a transaction that pauses or limits something has not ended"]
        await shop.ended(job)
        assert [event.over for event in shop.seen(events.ClaimsBarred)] == [False, True]
        assert (await asked(port, "/ready"))[0] == 200


async def test_a_singleton_that_lost_its_place_is_not_ready_until_it_has_it_back(
    app: App, dsn: str, port: int
) -> None:
    # spec: ST-13
    @app.task
    async def work() -> None: ...

    with Wire(dsn) as wire:
        async with app, Workshop(app, metrics_port=port, singleton="nightly", listen_dsn=wire.past) as shop:
            await shop.event(WorkerStarted)
            assert (await asked(port, "/ready"))[0] == 200
            wire.refuse()
            await shop.event(events.SingletonLost)
            status, told = await asked(port, "/ready")
            assert status == 503
            assert "it is not the one at work as 'nightly' any more" in told["reasons"]
            wire.accept()
            await shop.event(events.SingletonHeld, 2)
            await shop.ended(await work.aenqueue())
            assert (await asked(port, "/ready"))[0] == 200


async def test_a_hook_before_claims_that_fails_or_does_not_end_keeps_a_worker_from_being_ready(
    app: App, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails, latch = True, Latch()

    @app.task
    async def work() -> None: ...

    @app.before_claim
    async def look(claim: Round) -> None:
        if fails:
            raise RuntimeError("no figures")
        await latch.hold()

    async def reasons() -> list[str]:
        status, told = await asked(port, "/ready")
        assert (await scrape(port))["ready",] == (status == 200)
        assert (status == 200) is (not told["reasons"])
        return [str(reason) for reason in told["reasons"]]

    monkeypatch.setattr(hooks, "WAITING", 0.05)
    async with app, Workshop(app, metrics_port=port) as shop:
        await shop.event(events.ClaimHookFailed)
        assert await reasons() == ["a hook before claims (before_claim) fails"]
        fails = False
        job = await work.aenqueue()
        await shop.event(events.ClaimHookWaits, over=False)
        assert "a hook before claims (before_claim) has not ended yet" in await reasons()
        monkeypatch.undo()
        latch.release()
        await shop.ended(job)
        assert await reasons() == []
        assert [event.over for event in shop.seen(events.ClaimHookWaits)] == [False, True]


async def test_who_stands_by_says_so_instead_of_being_ready(app: App, port: int) -> None:
    @app.task
    async def work() -> None: ...

    async with app, Workshop(app, singleton="nightly") as first:
        await first.event(WorkerStarted)
        async with Workshop(app, metrics_port=port, singleton="nightly", standby=True) as second:
            await second.event(events.StandingBy)
            status, told = await asked(port, "/ready")
            assert (status, told["reasons"]) == (
                503,
                ["it stands by: another worker is at work as 'nightly'"],
            )
            first.worker.stop()
            await first.stopped()
            await second.event(WorkerStarted)
            assert (await asked(port, "/ready"))[0] == 200


async def test_before_it_could_register_a_worker_is_alive_and_not_ready(dsn: str, port: int) -> None:
    with Wire(dsn) as wire:
        app = App(wire.dsn)

        @app.task
        async def work() -> None: ...

        wire.refuse()
        async with app, Workshop(app, metrics_port=port) as shop:
            await shop.event(DatabaseAway, part="beginning")
            status, told = await asked(port, "/ready")
            assert status == 503
            assert "it is not registered" in told["reasons"]
            assert (await asked(port, "/live"))[0] == 200
            wire.accept()
            await shop.event(WorkerStarted)
            assert (await asked(port, "/ready"))[0] == 200


async def test_a_handler_that_keeps_the_event_loop_busy_does_not_keep_it_from_answering(
    app: App, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lives, and is not able to claim."""

    @app.task
    async def block() -> list[Any]:
        live = ask(port, "/live")[0]
        monkeypatch.setattr(endpoint, "PATIENCE", 0.1)
        status, told = ask(port, "/ready")
        scraped, text = ask(port, "/metrics")
        monkeypatch.undo()
        return [live, status, json.loads(told)["reasons"], scraped, read(text)["ready",]]

    async with app, Workshop(app, metrics_port=port) as shop:
        job = await block.aenqueue()
        await shop.ended(job)
        assert await job.aresult(timeout=30) == [
            200,
            503,
            ["its event loop is kept busy: no handler and no hook may block it"],
            200,
            0,
        ]
        assert (await asked(port, "/ready"))[0] == 200
        assert (await scrape(port))["ready",] == 1


async def test_whose_heartbeat_thread_does_not_turn_is_not_alive(
    app: App, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    @app.task
    async def work() -> None: ...

    monkeypatch.setattr(endpoint, "PATIENCE", 0.1)
    stuck = threading.Event()
    async with app, Workshop(app, metrics_port=port) as shop:
        await shop.ended(await work.aenqueue())
        assert (await asked(port, "/live"))[0] == 200
        loop = shop.worker._leases._loop
        assert loop is not None
        loop.call_soon_threadsafe(stuck.wait)
        status, told = await asked(port, "/live")
        assert (status, told["live"]) == (503, False)
        assert "heartbeat thread" in told["reasons"][0]
        stuck.set()
        monkeypatch.setattr(endpoint, "PATIENCE", 30)
        assert (await asked(port, "/live"))[0] == 200


async def test_a_queue_of_notifications_that_fills_up_is_a_warning(app: App, port: int) -> None:
    # fault: F35
    @app.task
    async def work() -> None: ...

    async with app, Workshop(app, metrics_port=port) as shop:
        await shop.asleep()
        assert (await asked(port, "/ready"))[1]["warnings"] == []
        shop.worker._publish(events.NotificationsPileUp(0.6))
        shop.worker._publish(events.ListenerDeaf(""))
        status, told = await asked(port, "/ready")
        assert status == 200, "it can claim all the same"
        assert len(told["warnings"]) == 2
        assert any("60% full" in warning for warning in told["warnings"])


# Who may ask, and what.


def listening() -> set[tuple[str, int]]:
    """Addresses at which this process listens, as the system has them."""
    sockets = set()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if match := re.fullmatch(r"socket:\[(\d+)\]", str(path.readlink())):
                sockets.add(match[1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:
                address, port = fields[1].split(":")
                found.add((address, int(port, 16)))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_nobody_listens_unless_told_to_and_then_only_on_this_machine(app: App, port: int) -> None:
    # fault: S21
    @app.task
    async def work() -> None: ...

    before = listening()
    async with app, Workshop(app) as shop:
        await shop.event(WorkerStarted)
        assert listening() == before
    async with app, Workshop(app, metrics_port=port) as shop:
        await shop.event(WorkerStarted)
        assert listening() - before == {("0100007F", port)}


async def test_nothing_of_a_job_is_told_and_nothing_can_be_changed(app: App, port: int) -> None:
    # fault: S21
    @app.task
    async def work(secret: str) -> str:
        raise shiftwork.Poison(secret)

    async with app, Workshop(app, metrics_port=port) as shop:
        await shop.ended(await work.using(tags=["canary"], unique="canary").aenqueue("canary"))
        for path in ("/live", "/ready", "/metrics"):
            assert "canary" not in (await asyncio.to_thread(ask, port, path))[1]
        for path in ("/", "/metrics/..", "/jobs", "/live/"):
            assert (await asyncio.to_thread(ask, port, path))[0] == 404
        for method in ("POST", "PUT", "DELETE"):
            assert (await asyncio.to_thread(ask, port, "/live", method))[0] == 501
        assert (await asyncio.to_thread(ask, port, "/ready?x=1"))[0] == 200


async def test_whoever_asks_and_says_nothing_keeps_nobody_else_from_asking_for_long(
    app: App, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    @app.task
    async def work() -> None: ...

    monkeypatch.setattr(endpoint.Handler, "timeout", 0.2)
    async with app, Workshop(app, metrics_port=port) as shop:
        await shop.event(WorkerStarted)
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(2 * endpoint.MOST_AT_ONCE)]
        for one in silent:
            await asyncio.to_thread(one.recv, 1)  # hung up on, at once or after a while
            one.close()
        assert (await asked(port, "/live"))[0] == 200


async def test_without_the_extra_there_are_no_metrics_but_health(
    app: App, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    @app.task
    async def work() -> None: ...

    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    async with app, Workshop(app, metrics_port=port) as shop:
        await shop.event(WorkerStarted)
        assert (await asked(port, "/live"))[0] == (await asked(port, "/ready"))[0] == 200
        status, text = await asyncio.to_thread(ask, port, "/metrics")
        assert status == 501
        assert "pip install 'shiftwork[prometheus]'" in text


async def test_a_port_that_is_taken_is_told_before_anything_is_claimed(
    app: App, port: int, protocol: Protocol
) -> None:
    @app.task
    async def work() -> None: ...

    async with app:
        worker = await app.worker(metrics_port=port)
        with socket.create_server(("127.0.0.1", port)), pytest.raises(ConfigurationError, match="nobody can"):
            await worker.run()
    assert protocol.rows("select id from {}.workers") == []


async def test_each_of_several_processes_has_a_port_of_its_own(
    app: App, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    @app.task
    async def work() -> None: ...

    monkeypatch.setenv("SHIFTWORK_PROCESS", "1")
    async with app, Workshop(app, metrics_port=port - 1) as shop:
        await shop.event(WorkerStarted)
        assert (await asked(port, "/ready"))[0] == 200


async def test_a_port_past_the_last_one_is_refused(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    @app.task
    async def work() -> None: ...

    monkeypatch.setenv("SHIFTWORK_PROCESS", "1")
    async with app:
        worker = await app.worker(metrics_port=65_535)
        with pytest.raises(ConfigurationError, match=r"port 65536: .*0-65535"):
            await worker.run()


async def test_every_name_is_ours(app: App, port: int) -> None:
    @app.task
    async def work() -> None: ...

    async with app, Workshop(app, metrics_port=port) as shop:
        await shop.ended(await work.aenqueue())
        _, text = await asyncio.to_thread(ask, port, "/metrics")
        assert {family.name.split("_")[0] for family in text_string_to_metric_families(text)} == {"shiftwork"}
        assert psycopg.__name__ not in text
