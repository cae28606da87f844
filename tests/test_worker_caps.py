"""Workers under limits of the cluster, and pauses: what ends lets the next begin, and nobody polls for it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner, Result

from shiftwork import App
from shiftwork.cli import main
from shiftwork.errors import ConfigurationError
from shiftwork.events import PauseEnded, WorkerPaused, WorkerResumed
from tests import caps
from tests.harness import Protocol
from tests.workshop import Latch, Workshop


@pytest.fixture
def app(dsn: str) -> App:
    return App(dsn)


def run(dsn: str, *arguments: str) -> Result:
    return CliRunner().invoke(main, [*arguments[:1], *arguments[1:], "--dsn", dsn])


async def test_what_ends_lets_the_next_begin_on_its_own_worker_and_on_others(app: App) -> None:
    # spec: HO-19, HO-16
    latches = {name: Latch() for name in "abcd"}

    @app.task(max_running=2)
    async def work(name: str) -> None:
        await latches[name].hold()

    jobs = {name: await work.aenqueue(name) for name in latches}
    async with app, Workshop(app, concurrency=1) as one, Workshop(app, concurrency=1) as two:
        await latches["a"].reached()
        await latches["b"].reached()
        async with Workshop(app, concurrency=5) as three:  # it finds nothing, and sleeps
            await three.asleep()
            latches["a"].release()
            await latches["c"].reached()
            latches["b"].release()
            await latches["d"].reached()
            for latch in latches.values():
                latch.release()
            shops = (one, two, three)
            for name, job in jobs.items():
                await one.found(lambda job=job: _ended(one, job.id))  # type: ignore[misc]
                assert latches[name].arrived == 1
            assert sum(shop.worker.jobs for shop in shops) == 4


async def _ended(shop: Workshop, job: int) -> bool:
    return (await shop.job(job)).state.is_final


async def test_a_limit_of_one_runs_a_queue_in_order_through_two_workers(app: App) -> None:
    # spec: D-23, ST-15
    order: list[int] = []
    inside = 0

    @app.task(queue="serial")
    async def work(number: int) -> None:
        nonlocal inside
        inside += 1
        assert inside == 1
        order.append(number)
        inside -= 1

    limited = App(app.settings.dsn, queues={"serial": 1, "default": None})
    limited._tasks = app._tasks
    jobs = [await work.aenqueue(number) for number in range(20)]
    async with app, limited, Workshop(limited, concurrency=4) as one, Workshop(limited, concurrency=4) as two:
        for job in jobs:
            await one.found(lambda job=job: _ended(one, job.id))  # type: ignore[misc]
        assert one.worker.jobs + two.worker.jobs == 20
    assert order == list(range(20))


async def test_a_program_says_its_limits_and_they_are_there_when_its_worker_starts(dsn: str) -> None:
    app = App(dsn, queues={"mail": 5, "default": None}, max_running=20)

    @app.task(max_running=2, queue="mail")
    async def work() -> None: ...

    async with app, Workshop(app) as shop:
        await shop.asleep()
        found = await shop.rows("select kind, name, max_running from shiftwork.limits order by kind, name")
    assert [tuple(row.values()) for row in found] == [
        ("all", "", 20),
        ("queue", "mail", 5),
        ("task", "work", 2),
    ]
    assert app.queues == ("mail", "default")


@pytest.mark.parametrize("given", [{"max_running": 0}, {"max_running": 10_001}, {"queues": {"mail": -1}}])
def test_a_limit_that_cannot_be_is_refused_with_the_range(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="1 to 10,000"):
        App("postgresql://nowhere", **given)
    app = App("postgresql://nowhere")
    with pytest.raises(ConfigurationError, match=r"max_running is 0; it must be .*1"):
        app.task(max_running=0)(lambda: None)


async def test_a_worker_that_is_paused_claims_nothing_until_it_is_resumed(app: App) -> None:
    # spec: D-30, ST-21
    held = Latch()

    @app.task
    async def work(name: str) -> str:
        if name == "held":
            await held.hold()
        return name

    async with app, Workshop(app) as shop:
        running = await work.aenqueue("held")
        await held.reached()
        await shop.rows("select shiftwork.pause(worker => %s, reason => 'a test')", shop.worker.id)
        job = await work.aenqueue("waits")
        await shop.event(WorkerPaused, worker=shop.worker.id)
        await shop.asleep()
        held.release()  # what runs goes on
        await shop.ended(running)
        assert (await shop.job(job)).state == "ready"
        async with Workshop(app) as other:  # and another worker is none of its business
            await other.ended(job)
        last = await work.aenqueue("last")
        await shop.asleep()
        await shop.rows("select shiftwork.resume(worker => %s)", shop.worker.id)
        await shop.event(WorkerResumed)
        await shop.ended(last)


async def test_a_pause_that_is_over_is_told_of_once_and_work_goes_on_by_itself(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    # spec: ST-21, D-30
    @app.task(queue="mail")
    async def work() -> None: ...

    async with app, Workshop(app) as one, Workshop(app) as two:
        await one.rows("select shiftwork.pause(queue => 'mail', lasting => '300 ms', reason => 'the night')")
        job = await work.aenqueue()
        await one.found(lambda: _ended(one, job.id))
        [told] = one.seen(PauseEnded) + two.seen(PauseEnded)
        assert told == PauseEnded("queue", "mail", "the night")
        assert await one.value("select count(*) from shiftwork.pauses") == 0
        assert await one.value("select actor from shiftwork.audit where verb = 'resume'") == "shiftwork"
    assert "WARNING" in caplog.text
    assert "queue mail is resumed: the time of its pause is over (paused for: the night)" in caplog.text


async def test_everything_can_be_paused_and_resumed_at_once(app: App) -> None:
    # spec: D-30, ST-21
    @app.task
    async def work() -> None: ...

    async with app, Workshop(app) as shop:
        await shop.rows("select shiftwork.pause(everything => true)")
        job = await work.aenqueue()
        await shop.event(WorkerPaused)
        await shop.asleep()
        await shop.rows("select shiftwork.resume(everything => true)")
        await shop.ended(job)


def test_a_pause_waits_for_claims_that_are_under_way(dsn: str, protocol: Protocol) -> None:
    # spec: D-30, SH-36
    protocol.enqueue()
    worker = protocol.register()
    with psycopg.connect(dsn) as other:
        Protocol(other).claim(worker)  # not committed
        protocol.connection.execute("set statement_timeout = '300ms'")
        with pytest.raises(psycopg.errors.QueryCanceled):
            protocol.rows("select {}.pause(everything => true)")
        other.rollback()
    protocol.connection.execute("set statement_timeout = 0")
    protocol.rows("select {}.pause(everything => true)")
    assert protocol.claim(worker).report["paused"] is True


def test_a_pause_or_limit_that_is_not_committed_holds_up_no_claim_for_longer_than_itself(
    dsn: str, protocol: Protocol
) -> None:
    job, worker = protocol.enqueue(), protocol.register()
    for made in ("pause(queue => 'other')", "limit_running(5, queue => 'other')"):
        with psycopg.connect(dsn) as other:
            Protocol(other).rows(f"select {{}}.{made}")  # by somebody who has gone for lunch
            report = protocol.claim(worker).report
            assert (report["taken"], report["more"], report["next_due_in"]) == (0, False, 0)
            other.rollback()
    assert [one["id"] for one in protocol.claim(worker).jobs] == [job]


def test_limits_are_set_shown_and_lifted_on_the_command_line(dsn: str, protocol: Protocol) -> None:
    # spec: HO-16
    assert run(dsn, "queues", "limit", "mail", "5").output == "queue mail runs at most 5 at once.\n"
    assert run(dsn, "tasks", "limit", "resize", "2").output == "task resize runs at most 2 at once.\n"
    assert run(dsn, "limit", "20").output == "the cluster runs at most 20 at once.\n"
    [mail, *_] = [
        row for row in json.loads(run(dsn, "queues", "list", "--json").output) if row["name"] == "mail"
    ]
    assert mail["max_running"] == 5
    lines = run(dsn, "tasks", "list").output.splitlines()
    assert lines[0].split()[-2:] == ["LIMIT", "PAUSED"]
    assert lines[1].split() == ["resize", "2"]
    worker = protocol.register()
    protocol.enqueue("resize", queue="mail")
    protocol.enqueue("other")
    protocol.claim(worker, "mail", "default")
    table = [line.split() for line in run(dsn, "limit").output.splitlines()]
    assert table == [
        ["OF", "NAME", "LIMIT", "RUNNING"],
        ["all", "20", "2"],
        ["queue", "mail", "5", "1"],
        ["task", "resize", "2", "1"],
    ]
    assert json.loads(run(dsn, "limit", "--json").output)[0] == {
        "kind": "all",
        "name": "",
        "max_running": 20,
        "running": 2,
    }
    assert run(dsn, "limit", "none").output == "the cluster has no limit.\n"
    assert protocol.rows("select kind, name from {}.limits order by kind") == [
        {"kind": "queue", "name": "mail"},
        {"kind": "task", "name": "resize"},
    ]
    for wrong in ("0", "10001", "many", "-1", "1.5"):
        assert run(dsn, "queues", "limit", "mail", "--", wrong).exit_code == 2


def test_draining_waits_until_nothing_runs_and_says_what_does(dsn: str, protocol: Protocol) -> None:
    # spec: SH-36, A-26, D-30
    job, other = protocol.enqueue("slow", queue="mail"), protocol.enqueue("quick", queue="other")
    worker = protocol.register()
    claimed = protocol.claim(worker, "mail").jobs
    result = run(dsn, "drain", "--wait", "--timeout", "200ms")
    assert result.exit_code == 3
    assert "everything is paused" in result.output
    assert "1 job still running" in result.output
    assert "end that with `shiftwork resume`" in result.output
    assert str(job) in result.output.splitlines()[-1]
    assert protocol.claim(worker, "other").jobs == []
    assert run(dsn, "drain").exit_code == 3
    protocol.complete(worker, claimed)
    told = run(dsn, "drain", "--wait", "--json")
    assert (told.exit_code, json.loads(told.output)) == (0, {"drained": True, "running": 0, "jobs": []})
    assert run(dsn, "resume").output == "everything goes on.\n"
    assert run(dsn, "resume").exit_code == 3
    assert [one["id"] for one in protocol.claim(worker, "other").jobs] == [other]


def test_a_drain_that_takes_longer_than_its_pause_has_not_drained(dsn: str, protocol: Protocol) -> None:
    # spec: SH-36, D-30
    protocol.enqueue("slow", queue="mail")
    worker = protocol.register()
    protocol.claim(worker, "mail")
    result = run(dsn, "drain", "--wait", "--timeout", "1m", "--for", "200ms")
    assert result.exit_code == 3
    assert "everything is not paused any more" in result.output
    assert "1 job still running: it took longer than --for" in result.output


@contextmanager
def draining(dsn: str, protocol: Protocol, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A drain that waits, in a process of its own, and has paused already."""
    command = [sys.executable, "-m", "shiftwork", "drain", "--wait", "--dsn", dsn, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            while not protocol.rows("select name from {}.pauses"):
                assert process.poll() is None
            yield process
        finally:
            process.kill()


def test_a_drain_whose_pause_somebody_ends_has_not_drained(dsn: str, protocol: Protocol) -> None:
    # spec: SH-36, D-30
    protocol.enqueue()
    worker = protocol.register()
    claimed = protocol.claim(worker).jobs
    with draining(dsn, protocol) as drain:
        assert run(dsn, "resume").exit_code == 0
        protocol.complete(worker, claimed)
        later = protocol.enqueue()
        said, _ = drain.communicate(timeout=30)
    assert drain.returncode == 3
    assert "everything is not paused any more" in said
    assert "somebody has resumed it" in said
    assert [one["id"] for one in protocol.claim(worker).jobs] == [later]


def test_a_drain_waits_for_a_claim_that_its_pause_did_not_wait_for(dsn: str, protocol: Protocol) -> None:
    # spec: SH-36, D-30
    protocol.rows(
        "alter function {}.pause(text, text, interval, text, text, bigint, boolean) set lock_timeout = '50ms'"
    )
    protocol.enqueue()
    worker = protocol.register()
    with psycopg.connect(dsn) as other:
        claimed = Protocol(other).claim(worker).jobs  # not committed
        for options in ((), ("--wait", "--timeout", "200ms")):
            result = run(dsn, "drain", *options)
            assert result.exit_code == 3
            assert "nothing of it runs, and a claim is under way that may take something yet" in result.output
        protocol.rows("select {}.resume(everything => true)")
        with draining(dsn, protocol) as drain:
            other.commit()
            assert [row["id"] for row in json.loads(run(dsn, "drain", "--json").output)["jobs"]] == [
                claimed[0]["id"]
            ]
            assert drain.poll() is None
            protocol.complete(worker, claimed)
            said, _ = drain.communicate(timeout=30)
    assert (drain.returncode, "nothing of it runs; end that with" in said) == (0, True)
    protocol.enqueue()
    assert protocol.claim(worker).jobs == []


def test_a_worker_that_leaves_while_it_is_drained_is_drained(dsn: str, protocol: Protocol) -> None:
    protocol.enqueue()
    worker = protocol.register()
    protocol.claim(worker)
    with draining(dsn, protocol, "--worker", str(worker)) as drain:
        protocol.rows("select {}.leave(%s)", worker)
        protocol.reap()
        protocol.rows("select {}.forget_workers()")  # and with it its pause
        assert protocol.rows("select name from {}.pauses") == []
        assert drain.wait(30) == 0


@pytest.mark.parametrize(("option", "name"), [("--queue", "mail"), ("--task", "slow")])
def test_one_queue_or_task_can_be_drained(dsn: str, protocol: Protocol, option: str, name: str) -> None:
    # spec: SH-36, A-26
    protocol.enqueue("slow", queue="mail")
    worker = protocol.register()
    protocol.enqueue("quick", queue="other")
    protocol.claim(worker, "other")
    result = run(dsn, "drain", option, name, "--wait", "--timeout", "5s", "--for", "1h")
    assert result.exit_code == 0, result.output
    assert f"shiftwork resume {option} {name}" in result.output
    assert protocol.claim(worker, "mail").jobs == []
    assert run(dsn, "resume", option, name).exit_code == 0
    assert len(protocol.claim(worker, "mail").jobs) == 1
    assert run(dsn, "drain", option, name).exit_code == 3


def test_a_worker_is_paused_and_resumed_on_the_command_line(dsn: str, protocol: Protocol) -> None:
    # spec: D-30
    worker = protocol.register()
    protocol.enqueue()
    assert run(dsn, "workers", "pause", str(worker), "--for", "1h").exit_code == 0
    assert protocol.claim(worker).report["paused"] is True
    [row] = json.loads(run(dsn, "workers", "--json").output)
    assert row["state"] == "paused"
    assert run(dsn, "workers", "resume", str(worker)).output == f"worker {worker} goes on.\n"
    assert run(dsn, "workers", "resume", str(worker)).exit_code == 3
    assert len(protocol.claim(worker).jobs) == 1
    assert run(dsn, "workers", "pause", "nobody").exit_code == 2
    refused = run(dsn, "workers", "pause", "999")
    assert (refused.exit_code, "there is no worker 999" in refused.output) == (2, True)
    assert run(dsn, "drain", "--queue", "a", "--task", "b").exit_code == 2
    assert run(dsn, "drain", "--timeout", "1s").exit_code == 2


async def test_a_pause_of_a_task_holds_only_that_task_and_resuming_wakes(app: App) -> None:
    # spec: ST-21, D-30
    @app.task
    async def work() -> None: ...

    @app.task
    async def other() -> None: ...

    async with app, Workshop(app, poll=timedelta(minutes=10)) as shop:
        await shop.rows("select shiftwork.pause(task => 'work')")
        waits, goes = await work.aenqueue(), await other.aenqueue()
        await shop.ended(goes)
        await shop.asleep()
        assert (await shop.job(waits)).state == "ready"
        await shop.rows("select shiftwork.resume(task => 'work')")
        await shop.ended(waits)


# fault: I10
def test_processes_that_claim_at_once_never_exceed_a_limit(dsn: str) -> None:
    # spec: HO-16, HO-36
    account = caps.measure(dsn, processes=3, seconds=3, length=0.05)
    assert account.exceeded == []
    assert account.astray == 0
    assert account.permits == sum(caps.LIMITS.values())
    assert account.ended > 0
