"""Being told to stop: TERM, INT and HUP, once and twice, under load, with handlers that will not end, and without a database."""

from __future__ import annotations

import signal
import subprocess
import time

import pytest

from tests.crew import Crew, jobs
from tests.wire import Wire


def told(process: subprocess.Popen[bytes], number: int, *, within: float) -> int:
    """Send a signal; gives the exit code, if the process has ended so soon."""
    process.send_signal(number)
    return process.wait(within)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda one: one.name)
def test_a_worker_under_load_stops_within_its_grace_and_loses_nothing(dsn: str, number: int) -> None:
    # spec: SH-24, SH-36, HO-25, QU-14, D-25
    # fault: F28
    with Crew(dsn) as crew:
        for task in ("note", "note_blocking", "transfer", "transfer_blocking"):
            crew.connection.execute("select count(*) from shiftwork.enqueue_many(%s)", (jobs(task, 200),))
        process = crew.hire(concurrency=20, prefetch=20, lease="10s", grace="20s")
        crew.until("select count(*) >= 40 from shiftwork.history")
        assert told(process, number, within=25) == 0
        protocol = crew.protocol
        assert protocol.value("select count(*) from {}.jobs where state not in ('ready')") == 0
        assert protocol.value("select count(*) from {}.all_jobs where failures > 0 or resets > 0") == 0
        assert protocol.value("select count(*) from {}.attempts") == 0
        assert protocol.value("select count(*) from {}.all_jobs") == 800
        assert 0 < protocol.value("select count(*) from {}.history where state = 'completed'") < 800
        # What was done is completed, and what is not completed was not done.
        assert (
            protocol.value("select count(*) from effects where job in (select id from shiftwork.jobs)") == 0
        )
        assert protocol.value("select lease_until <= clock_timestamp() from {}.workers")


def test_what_runs_is_waited_for_and_what_does_not_is_given_back(dsn: str) -> None:
    # spec: SH-24, HO-25, QU-14, SG-30, D-25
    with Crew(dsn) as crew:
        process = crew.hire(concurrency=2, prefetch=5, lease="2s", grace="60s")
        with crew.gate():
            ids = [crew.enqueue("wait", n) for n in range(6)]
            crew.until("select count(*) = 2 from effects where what = 'began'")
            crew.until("select count(*) = 6 from shiftwork.jobs where state = 'running'")
            process.send_signal(signal.SIGTERM)
            crew.until("select count(*) = 4 from shiftwork.jobs where state = 'ready'")
            assert process.poll() is None
        assert process.wait(60) == 0
        states = [crew.protocol.state(job) for job in ids]
        assert states == ["completed", "completed", "ready", "ready", "ready", "ready"]
        assert crew.effects("ended") == {0: 1, 1: 1}


def test_after_the_grace_what_still_runs_is_given_back(dsn: str) -> None:
    # spec: SH-24, HO-25, D-25
    with Crew(dsn) as crew, crew.gate():
        job, transfer = crew.enqueue("wait", 1), crew.enqueue("transfer_waiting", 2)
        process = crew.hire(lease="60s", grace="100ms")
        crew.began(1)
        crew.began(2)
        assert told(process, signal.SIGTERM, within=30) == 0  # every handler listened
        for one in (job, transfer):
            found = crew.protocol.live(one)
            assert (found["state"], found["failures"], found["resets"]) == ("ready", 0, 0)
        assert crew.effects("transactional") == {}


def test_a_second_signal_is_now_and_the_jobs_come_back(dsn: str) -> None:
    # spec: SG-31, D-25
    # fault: F28
    with Crew(dsn) as crew, crew.gate():
        ids = [crew.enqueue("wait", 1), crew.enqueue("stubborn", 2), crew.enqueue("stubborn_transfer", 3)]
        process = crew.hire(concurrency=3, prefetch=1, lease="60s", grace="1h")
        for number in (1, 2, 3):
            crew.began(number)
        ahead = crew.enqueue("note", 4)
        crew.until("select state = 'running' from shiftwork.jobs where id = %s", ahead)
        process.send_signal(signal.SIGTERM)
        crew.until("select state = 'ready' from shiftwork.jobs where id = %s", ahead)  # it has heard
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) in (0, 1)
        assert time.monotonic() - began < 20  # and not an hour
        crew.protocol.reap()
        for job in ids:
            found = crew.protocol.live(job)
            assert (found["state"], found["failures"]) == ("ready", 0)
        assert crew.effects("transactional") == {}


@pytest.mark.parametrize("task", ["stubborn", "stubborn_transfer"])
def test_a_thread_that_will_not_end_is_left_behind_with_exit_code_1(dsn: str, task: str) -> None:
    # spec: HO-25, D-25
    # fault: F31
    with Crew(dsn) as crew:
        job, quick = crew.enqueue(task, 1), crew.enqueue("note", 2)
        process = crew.hire(lease="60s", grace="100ms")
        crew.began(1)
        crew.until("select state = 'completed' from shiftwork.all_jobs where id = %s", quick)
        assert told(process, signal.SIGTERM, within=40) == 1
        crew.protocol.reap()
        found = crew.protocol.live(job)
        assert (found["state"], found["failures"]) == ("ready", 0)


@pytest.mark.parametrize("task", ["stubborn", "stubborn_aside"])
def test_the_command_ends_past_threads_that_will_not(dsn: str, task: str) -> None:
    # spec: HO-25, D-25, SH-1
    # fault: F31
    with Crew(dsn) as crew:
        job = crew.enqueue(task, 1)
        process = crew.hire(command=True, lease="60s", grace="100ms")
        crew.began(1)
        assert told(process, signal.SIGTERM, within=40) == 1
        crew.protocol.reap()
        found = crew.protocol.live(job)
        assert (found["state"], found["failures"]) == ("ready", 0)


def test_an_event_loop_that_is_blocked_does_not_keep_a_second_signal_from_being_heard(dsn: str) -> None:
    # spec: D-25, SG-31
    with Crew(dsn) as crew, crew.gate():
        job = crew.enqueue("spin", 1)
        process = crew.hire(lease="60s", grace="1h")
        crew.began(1)
        process.send_signal(signal.SIGTERM)
        time.sleep(0)
        process.send_signal(signal.SIGINT)
        assert process.wait(40) == 1
        crew.protocol.lapse(crew.worker_of(process))
        assert crew.protocol.reap() == {job: "ready"}


@pytest.mark.parametrize("away", ["refuse", "stall"])
def test_a_worker_can_be_stopped_while_it_waits_for_its_first_database(dsn: str, away: str) -> None:
    # spec: HO-25, D-25
    with Crew(dsn) as crew, Wire(dsn) as wire:
        getattr(wire, away)()
        process = crew.hire(wire.dsn, lease="60s", grace="1s")
        deadline = time.monotonic() + 60
        while not wire.calls and time.monotonic() < deadline:
            pass
        assert told(process, signal.SIGTERM, within=40) == 0


@pytest.mark.parametrize("away", ["refuse", "stall"])
def test_a_worker_can_be_stopped_while_the_database_is_away(dsn: str, away: str) -> None:
    # spec: HO-25, D-25
    # fault: F28
    with Crew(dsn) as crew, Wire(dsn) as wire:
        process = crew.hire(wire.dsn, lease="3s", grace="1s")
        idle = crew.hire(wire.dsn, lease="3s", grace="1s")
        with crew.gate():
            job = crew.enqueue("wait", 1)
            crew.began(1)
            crew.worker_of(process)
            crew.worker_of(idle)
            getattr(wire, away)()
            process.send_signal(signal.SIGTERM)
            assert told(idle, signal.SIGTERM, within=40) in (0, 1)
            code = process.wait(40)
        assert code in (0, 1)
        crew.protocol.rows("update {}.workers set lease_until = 'epoch'")
        crew.protocol.reap()
        found = crew.protocol.live(job)
        assert (found["state"], found["failures"]) == ("ready", 0)
