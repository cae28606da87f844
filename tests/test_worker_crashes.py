"""Workers that die, at every point of a job's way and with kill -9; that are stopped and come back; and what becomes of their jobs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from tests import pooler
from tests.chaos import Size, unleash
from tests.crew import Crew
from tests.points import HARMS, HURT, POINTS

WAY = ["claimed", "began", "ended", "settling", "settled"]


@pytest.mark.parametrize("point", WAY)
def test_a_worker_may_die_at_any_point(dsn: str, point: str) -> None:
    # spec: SG-15, D-2, HO-22, HO-24, SH-21
    # fault: F3
    with Crew(dsn) as crew:
        job = crew.enqueue("note", 1)
        process = crew.hire(die_at=point, lease="60s")
        assert process.wait(60) == -signal.SIGKILL
        protocol = crew.protocol
        [worker] = [row["id"] for row in protocol.rows("select id from {}.workers")]
        assert protocol.reap() == {}  # its lease holds
        protocol.lapse(worker)
        if point == "settled":  # the outcome is written, whoever may have been told
            assert protocol.reap() == {}
            assert protocol.state(job) == "completed"
            assert crew.effects("plain") == {1: 1}
            return
        assert protocol.reap() == {job: "ready"}
        found = protocol.live(job)
        assert (found["failures"], found["resets"], found["attempt"]) == (0, 1, 1)
        ran = point in ("ended", "settling")
        assert crew.effects("plain") == ({1: 1} if ran else {})

        crew.hire(stop_when_idle="yes").wait(60)
        assert protocol.state(job) == "completed"
        assert crew.effects("plain") == {1: 1 + ran}
        assert protocol.job(job)["failures"] == 0


def test_a_worker_may_come_to_harm_at_every_point(dsn: str) -> None:
    # spec: SG-15, D-1, D-2, HO-22, HO-24, SH-21
    # fault: F3
    assert len(POINTS) >= 25
    deaf = pooler.MODE == "poll"  # and then nobody has to say that it sleeps
    harms = [(point, kind) for point in POINTS for kind in HARMS if not (deaf and point.endswith(" sleep"))]
    with Crew(dsn) as crew:
        protocol = crew.protocol
        for number, _ in enumerate(harms):
            for task in ("journey", "journey", "transfer"):
                crew.enqueue(task, number, queue=f"q{number}", max_attempts=5)
        asked = json.dumps([(point, kind, f"q{number}") for number, (point, kind) in enumerate(harms)])
        done = subprocess.run(
            [sys.executable, "-m", "tests.points"], input=asked, text=True, stdout=subprocess.PIPE,
            env={**os.environ, "DATABASE_URL": dsn, **pooler.environment(dsn)}, check=True,
        )  # fmt: skip
        ended = {harms[int(queue[1:])]: code for queue, code in json.loads(done.stdout).items()}
        wrong = {
            harm: code
            for harm, code in ended.items()
            if code != (-signal.SIGKILL if harm[1] == "die" else HURT)
        }
        assert wrong == {}, "every point was reached, and nobody hangs"

        protocol.rows("update {}.workers set lease_until = 'epoch'")
        while protocol.reap():
            pass
        protocol.rows("select {}.run_now(array(select id from shiftwork.jobs where state = 'scheduled'))")
        queues = ",".join(f"q{number}" for number, _ in enumerate(harms))
        assert crew.hire(stop_when_idle="yes", queues=queues).wait(60) == 0

        left = protocol.rows("select id, queue, state, failures from {}.all_jobs where state <> 'completed'")
        assert [(harms[int(row["queue"][1:])], row) for row in left] == []
        numbers = range(len(harms))
        assert crew.effects("transactional") == dict.fromkeys(numbers, 1)
        assert crew.effects("plain").keys() == set(numbers)
        counted = protocol.rows("select distinct queue from {}.all_jobs where failures > 0")
        assert {harms[int(row["queue"][1:])][1] for row in counted} <= {"raise", "drop"}


def test_what_was_fetched_ahead_by_a_worker_that_dies_has_lost_nothing(dsn: str) -> None:
    # spec: SG-15, D-2, HO-22
    with Crew(dsn) as crew, crew.gate():
        jobs = [crew.enqueue("wait", n) for n in range(3)]
        process = crew.hire(concurrency=1, prefetch=2, lease="60s")
        crew.began(0)
        crew.until("select count(*) = 3 from shiftwork.jobs where state = 'running'")
        process.kill()
        protocol = crew.protocol
        protocol.lapse(crew.worker_of(process))
        assert protocol.reap() == dict.fromkeys(jobs, "ready")
        assert [protocol.live(job)["resets"] for job in jobs] == [1, 0, 0]
        assert [protocol.live(job)["failures"] for job in jobs] == [0, 0, 0]
        lost = protocol.rows("select job, outcome, code from {}.attempts")
        assert lost == [{"job": jobs[0], "outcome": "lost", "code": "WORKER_CRASHED"}]


def test_a_task_says_what_becomes_of_a_job_that_lost_its_worker(dsn: str) -> None:
    # spec: D-2, HO-22
    with Crew(dsn) as crew, crew.gate():
        precious, usual = crew.enqueue("precious", 1), crew.enqueue("wait", 2)
        process = crew.hire(lease="60s")
        crew.began(1)
        crew.began(2)
        process.kill()
        crew.protocol.lapse(crew.worker_of(process))
        assert crew.protocol.reap() == {precious: "failed", usual: "ready"}
        assert crew.protocol.job(precious)["error"]["code"] == "WORKER_CRASHED"


def test_a_job_that_kills_its_process_ends_as_failed(dsn: str) -> None:
    # spec: SH-22, D-2, D-9
    # fault: F30
    with Crew(dsn) as crew:
        job = crew.enqueue("deadly", 1)
        for turn in range(2):
            process = crew.hire(lease="60s")
            assert process.wait(60) == -signal.SIGKILL
            crew.protocol.lapse(crew.worker_of(process))
            assert crew.protocol.reap() == {job: "ready" if turn == 0 else "failed"}
        assert crew.effects("began") == {1: 2}
        found = crew.protocol.job(job)
        assert (found["error"]["code"], found["failures"], found["resets"]) == ("WORKER_CRASHED", 0, 2)


def test_a_stopped_worker_loses_its_transaction_and_can_commit_nothing(dsn: str) -> None:
    # spec: D-1, D-16, QU-18, SG-17
    # fault: F4
    with Crew(dsn) as crew:
        with crew.gate():
            job = crew.enqueue("transfer_waiting", 1)
            process = crew.hire(lease="1s")
            crew.began(1)
            former = crew.worker_of(process)
            process.send_signal(signal.SIGSTOP)
            helper = crew.hire(lease="2s", poll="500ms")
            # The helper waits for the lease, ends the session that keeps the row locked, and takes the job.
            crew.until(
                "select worker <> %s from shiftwork.jobs where id = %s and state = 'running'", former, job
            )
            crew.began(1, times=2)
            process.send_signal(signal.SIGCONT)
            crew.until("select max(id) > %s from shiftwork.workers where pid = %s", former, process.pid)
        crew.until("select state = 'completed' from shiftwork.all_jobs where id = %s", job)
        found = crew.protocol.job(job)
        assert (found["worker"], found["resets"], found["failures"]) == (crew.worker_of(helper), 1, 0)
        assert crew.effects("transactional") == {1: 1}
        assert crew.protocol.value("select distinct attempt from effects where what = 'transactional'") == 2
        for one in (process, helper):
            one.terminate()
            assert one.wait(60) == 0


def test_whatever_happens_every_effect_happens_and_every_job_ends() -> None:
    # spec: D-1, D-2, D-16, QU-18, SH-21, HO-22, SG-14, SG-15, SG-25
    # fault: F1, F2, F4, F7, F10, F11
    small = Size(
        jobs=500, producers=3, workers=3, table_workers=1, seconds=12, kills=3, children=2, stops=1, restarts=1, terminations=4, cuts=10,
        slack=15,  # other tests run beside this one
    )  # fmt: skip
    account = unleash(small, seed=1)
    assert account.violations == [], account.told()
    assert account.verdict.recoveries, account.told()
    assert account.did["restart"] == 1
