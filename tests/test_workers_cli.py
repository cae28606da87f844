"""`shiftwork workers`, `duties` and `reap`, as they are typed."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest
from psycopg.conninfo import make_conninfo

from tests.harness import Protocol
from tests.test_cli import HOSTILE, SHIFTWORK, answer, told
from tests.test_roles import Installation, installed

__all__ = ["installed"]

STATE = {"running": 1, "held": 2, "unwritten": 0, "jobs": 41, "memory": 50 << 20, "cpu": 3.5}


@pytest.fixture
def staff(protocol: Protocol) -> dict[str, int]:
    """One of each kind; the first holds two jobs, of which one has begun."""
    details = {"concurrency": 10, "tasks": ["greet"]}
    alive = protocol.register(
        name="mailer", host="web1", pid=4711, queues=["mail", "default"], details=details
    )
    lapsed, gone = protocol.register(name="old"), protocol.register(name="older")
    for _ in range(2):
        protocol.enqueue("greet")
    protocol.claim(alive, start=1)
    protocol.heartbeat(alive, state=STATE, answered=0)
    protocol.lapse(lapsed)
    protocol.rows("update {}.workers set gone_at = now() where id = %s", gone)
    return {"alive": alive, "lapsed": lapsed, "gone": gone}


def test_workers_are_listed_with_what_they_run_and_cost(dsn: str, staff: dict[str, int]) -> None:
    # spec: HO-37, D-27
    found = {worker["id"]: worker for worker in answer("workers", dsn=dsn)}
    assert {one: found[worker]["state"] for one, worker in staff.items() if worker in found} == {
        "alive": "alive",
        "lapsed": "lapsed",
    }
    alive = found[staff["alive"]]
    assert {name: alive[name] for name in STATE} == STATE
    assert [(job["task"], job["started_at"] is None) for job in alive["holding"]] == [
        ("greet", False),
        ("greet", True),
    ]
    assert alive["label"].startswith("mailer@web1:4711#")
    assert datetime.fromisoformat(alive["started_at"]).tzinfo is not None
    listed = told("workers", dsn=dsn).stdout
    assert "mailer@web1:4711" in listed
    assert "2/10" in listed
    assert "50 MiB" in listed
    assert "older" not in listed
    assert {worker["state"] for worker in answer("workers", "list", "--all", dsn=dsn)} == {
        "alive",
        "lapsed",
        "gone",
    }


def test_one_worker_is_shown_whole_or_said_not_to_be_there(dsn: str, staff: dict[str, int]) -> None:
    shown = told("workers", "show", str(staff["alive"]), dsn=dsn).stdout
    for part in ("mailer", "mail, default", "concurrency", "not begun", "greet"):
        assert part in shown
    assert answer("workers", "show", str(staff["gone"]), dsn=dsn)["state"] == "gone"
    assert told("workers", "show", "999", dsn=dsn).exit_code == 3


def test_a_worker_that_has_stopped_cleanly_is_not_listed_as_lapsed(dsn: str, protocol: Protocol) -> None:
    stopped = protocol.register(name="done")
    protocol.rows("select {}.leave(%s)", stopped)
    assert answer("workers", dsn=dsn) == []
    [one] = answer("workers", "list", "--all", dsn=dsn)
    assert (one["id"], one["state"]) == (stopped, "gone")


def test_a_paused_worker_is_shown_as_that(dsn: str, staff: dict[str, int], protocol: Protocol) -> None:
    protocol.rows("select {}.pause(worker => %s, lasting => '1 hour')", staff["alive"])
    one, other = answer("workers", dsn=dsn)
    assert (one["state"], other["state"]) == ("paused", "lapsed")
    assert one["paused_until"] is not None
    assert "paused until" in told("workers", dsn=dsn).stdout
    protocol.rows("select {}.pause(everything => true)")
    assert answer("workers", dsn=dsn)[0]["paused_until"] is None


def test_nothing_that_a_worker_says_is_obeyed_by_a_terminal(dsn: str, protocol: Protocol) -> None:
    protocol.register(host=HOSTILE, queues=[HOSTILE])
    shown = told("workers", dsn=dsn).stdout
    assert "\\x1b[31m" in shown
    assert "\x1b" not in shown + told("workers", "show", "1", dsn=dsn).stdout


def test_whoever_may_only_look_sees_workers_and_duties(installed: Installation) -> None:
    with installed.acting("worker") as worker:
        worker.heartbeat(worker.register(), state=STATE)
    options = f"-c role={installed.schema}_viewer"
    dsn = make_conninfo(installed.dsn, options=options)
    [one] = answer("workers", "--schema", installed.schema, dsn=dsn)
    assert one["jobs"] == 41
    assert len(answer("duties", "--schema", installed.schema, dsn=dsn)) == 5


def test_duties_are_listed_with_how_they_went(dsn: str, protocol: Protocol) -> None:
    worker = protocol.register()
    assert protocol.rows("select {}.take_duties(%s, array['expire', 'purge'])", worker)
    protocol.rows(
        """select {}.finish_duty('{{"worker": 1, "duty": "expire", "did": 3, "error": "no luck"}}'::jsonb)"""
    )
    found = {duty["name"]: duty for duty in answer("duties", dsn=dsn)}
    assert found["purge"]["worker"] == worker
    assert (found["expire"]["did"], found["expire"]["error"], found["expire"]["every"]) == (3, "no luck", 60)
    shown = told("duties", dsn=dsn).stdout
    assert "no luck" in shown
    assert "extend_history" in shown


def test_the_last_runs_of_a_duty_are_shown_and_those_that_were_lost(dsn: str, protocol: Protocol) -> None:
    # spec: SG-37
    for host in ("web1", HOSTILE):
        worker = protocol.register(host=host)
        for went in ({"did": 3, "seconds": 1.5}, {"seconds": 0.5, "error": HOSTILE}):
            protocol.rows("update {}.duties set due_at = shiftwork.clock()")
            assert protocol.heartbeat(worker, duties=["purge"])["duties"] == ["purge"]
            protocol.heartbeat(worker, duties=[], done=[{"duty": "purge", **went}])
    protocol.rows("update {}.duties set due_at = shiftwork.clock()")
    protocol.heartbeat(worker, duties=["purge"])
    [running, *_] = answer("duties", "show", "purge", dsn=dsn)["runs"]
    assert running["state"] == "running"
    protocol.lapse(worker)

    purge = next(one for one in answer("duties", dsn=dsn) if one["name"] == "purge")
    assert [(one["host"], one["state"]) for one in purge["hosts"]] == [(HOSTILE, "lost"), ("web1", "failed")]
    assert all(datetime.fromisoformat(one["ended_at"]).tzinfo is not None for one in purge["hosts"])
    shown = answer("duties", "show", "purge", "--limit", "3", dsn=dsn)
    assert [(run["state"], run["seconds"]) for run in shown["runs"]] == [
        ("lost", None),
        ("failed", 0.5),
        ("done", 1.5),
    ]
    assert [(day["runs"], day["errors"], day["mean"], day["did"]) for day in shown["days"]] == 2 * [
        (2, 1, 1.0, 3)
    ]
    for text in (told("duties", dsn=dsn).stdout, told("duties", "show", "purge", dsn=dsn).stdout):
        assert "\\x1b[31m" in text
        assert "\x1b" not in text
        assert "lost" in text
        assert "web1" in text
    unknown = told("duties", "show", "tidy", dsn=dsn)
    assert unknown.exit_code == 3
    assert "there are: expire," in unknown.stderr


def test_jobs_that_are_taken_back_by_a_command_are_a_run_of_that_duty(dsn: str, protocol: Protocol) -> None:
    # spec: SG-37
    told("reap", dsn=dsn)
    [run] = protocol.rows("select * from {}.runs")
    assert (run["duty"], run["host"], run["worker"], run["did"]) == ("reap", socket.gethostname(), None, 0)
    assert run["ended_at"] is not None


def test_jobs_are_taken_back_by_a_command(dsn: str, staff: dict[str, int], protocol: Protocol) -> None:
    # spec: SG-32, D-15
    assert told("reap", dsn=dsn).stdout == "0 jobs taken back.\n"
    protocol.lapse(staff["alive"])
    [begun, waiting] = [row["id"] for row in protocol.rows("select id from {}.jobs order by id")]
    assert told("reap", dsn=dsn).stdout.splitlines() == [
        f"job {begun} is ready",
        f"job {waiting} is ready",
        "2 jobs taken back.",
    ]


@pytest.fixture
def reaper(dsn: str) -> Iterator[subprocess.Popen[str]]:
    command = [*SHIFTWORK, "reap", "--every", "50ms", "--thorough", "--json", "--dsn", dsn]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def test_jobs_are_taken_back_by_a_process_that_runs_none(
    reaper: subprocess.Popen[str], protocol: Protocol
) -> None:
    # spec: SG-25, SG-32, D-15
    job = protocol.enqueue()
    worker = protocol.register()
    protocol.claim(worker)
    protocol.lapse(worker)
    assert reaper.stdout is not None
    assert _read(reaper) == {"job": job, "answer": "ready"}
    protocol.rows(
        "select pg_terminate_backend(pid) from pg_stat_activity"
        " where datname = current_database() and application_name = 'shiftwork client'"
    )
    other = protocol.enqueue("other", queue="other")
    unknown = protocol.register()
    protocol.claim(unknown, "other")
    protocol.rows("delete from {}.workers where id = %s", unknown)
    assert _read(reaper) == {"job": other, "answer": "ready"}
    assert protocol.live(job)["resets"] == 1
    reaper.send_signal(signal.SIGINT)
    assert reaper.wait(30) == 1


def _read(reaper: subprocess.Popen[str]) -> Any:
    assert reaper.stdout is not None
    return json.loads(reaper.stdout.readline())
