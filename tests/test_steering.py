"""What people do to jobs: cancel, revive, run now, pause, resume; and that each act is written down."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import psycopg
import pytest

from tests.concurrency import elsewhere
from tests.harness import Protocol


def acts(protocol: Protocol) -> list[str]:
    return [row["verb"] for row in protocol.rows("select verb from {}.audit order by id")]


def test_a_job_that_nobody_holds_is_cancelled_at_once(protocol: Protocol) -> None:
    # spec: SH-34, HO-7
    ready, later = protocol.enqueue(), protocol.enqueue(delay=60)
    blocked = protocol.enqueue()
    protocol.rows("update {}.jobs set state = 'blocked' where id = %s", blocked)
    answers = protocol.cancel(ready, later, blocked, 999, reason="not needed")
    assert answers == {ready: "cancelled", later: "cancelled", blocked: "cancelled", 999: "unknown"}
    ended = protocol.job(ready)
    assert (ended["state"], ended["error"]) == (
        "cancelled",
        {"code": "TASK_CANCELLED", "message": "not needed"},
    )
    assert protocol.cancel(ready) == {ready: "finished"}
    assert protocol.claim(protocol.register()).jobs == []


def test_the_holder_of_a_job_is_told_to_cancel_it(protocol: Protocol) -> None:
    job = protocol.enqueue()
    worker = protocol.register()
    held = protocol.claim(worker).held
    assert protocol.cancel(job, reason="stop") == {job: "signalled"}
    assert protocol.cancel(job) == {job: "signalled"}
    assert protocol.state(job) == "running"
    assert protocol.heartbeat(worker, held)["cancel"] == [{"id": job, "reason": "stop"}]
    told = {
        "id": job,
        "attempt": 1,
        "state": "cancelled",
        "error": {"code": "TASK_CANCELLED", "message": "ok"},
    }
    assert protocol.settle(worker, told) == {job: "settled"}
    assert protocol.state(job) == "cancelled"
    assert protocol.rows("select * from {}.signals") == []


def test_a_job_that_finished_before_its_handler_was_told_is_finished(protocol: Protocol) -> None:
    job = protocol.enqueue()
    worker = protocol.register()
    jobs = protocol.claim(worker).jobs
    protocol.cancel(job)
    assert protocol.complete(worker, jobs, 1) == {job: "settled"}
    assert (protocol.state(job), protocol.rows("select * from {}.signals")) == ("completed", [])


@pytest.mark.parametrize("way", ["retry", "snooze", "release", "reap", "start", "stray"])
def test_a_job_that_was_to_be_cancelled_does_not_run_again(protocol: Protocol, way: str) -> None:
    # spec: HO-7, D-2
    job = protocol.enqueue()
    worker = protocol.register()
    claimed = protocol.claim(worker, start=0 if way == "start" else 1)
    protocol.cancel(job, reason="stop")
    told = {"id": job, "attempt": 1, "state": "scheduled", "delay": 0}
    match way:
        case "retry":
            protocol.settle(worker, {**told, "error": {"code": "X", "message": "x"}})
        case "snooze":
            protocol.settle(worker, told)
        case "release":
            assert protocol.release(worker, claimed.held) == {job: "cancelled"}
        case "reap":
            protocol.lapse(worker)
            assert protocol.reap() == {job: "cancelled"}
        case "start":
            assert protocol.start(worker, claimed.held) == {job: "cancelled"}
        case _:
            protocol.heartbeat(worker, answered=claimed.report["claim"])
    assert protocol.state(job) == "cancelled"
    assert protocol.rows("select * from {}.signals") == []


def test_a_job_that_is_just_being_moved_is_cancelled_soon_after(dsn: str, protocol: Protocol) -> None:
    job = protocol.enqueue()
    with elsewhere(dsn) as other:
        with other.connection.transaction():
            other.rows("select 1 from {}.jobs where id = %s for update", job)
            assert protocol.cancel(job) == {job: "signalled"}
        assert protocol.expire() == 1
    assert protocol.state(job) == "cancelled"


@pytest.mark.parametrize("ending", ["completed", "failed", "cancelled", "expired"])
def test_a_finished_job_is_revived_with_its_id_and_forgiven(protocol: Protocol, ending: str) -> None:
    # spec: SH-33
    job = protocol.enqueue("greet", {"name": "Ada"}, expires_in=60, tags=["t"], keep=3, priority=4)
    before = protocol.live(job)
    worker = protocol.register(lease=3600)
    if ending == "cancelled":
        protocol.cancel(job)
    elif ending == "expired":
        protocol.shift_clock(timedelta(minutes=5))
        protocol.expire()
    else:
        protocol.claim(worker)
        error = {"code": "X", "message": "x"} if ending == "failed" else None
        protocol.settle(worker, {"id": job, "attempt": 1, "state": ending, "error": error, "result": 1})
    protocol.shift_clock(timedelta(minutes=10))
    attempt = protocol.job(job)["attempt"]
    assert protocol.revive(job, 999) == {job: "revived", 999: "unknown"}
    assert protocol.revive(job) == {job: "live"}
    row = protocol.live(job)
    same = ("task", "payload", "tags", "keep", "priority", "queue", "max_attempts", "created_at")
    assert [row[name] for name in same] == [before[name] for name in same]
    assert (row["state"], row["attempt"], row["failures"], row["resets"]) == ("ready", attempt, 0, 0)
    assert (row["error"], row["result"], row["expires_at"]) == (None, None, None)
    assert row["run_at"] > before["run_at"]
    [claimed] = protocol.claim(worker).jobs
    assert claimed["attempt"] == attempt + 1
    protocol.complete(worker, [claimed])
    assert protocol.value("select count(*) from {}.all_jobs") == 1


def test_two_who_revive_the_same_job_make_one(dsn: str, protocol: Protocol) -> None:
    # spec: SH-33
    job = protocol.enqueue()
    protocol.cancel(job)
    with elsewhere(dsn) as other:
        with other.connection.transaction():
            assert other.revive(job) == {job: "revived"}
            assert protocol.revive(job) == {job: "busy"}
        assert protocol.revive(job) == {job: "live"}
    assert protocol.value("select count(*) from {}.all_jobs") == 1


def test_a_job_that_waits_for_its_time_can_run_now(protocol: Protocol) -> None:
    # spec: QU-24
    later, ready = protocol.enqueue(delay=3600), protocol.enqueue()
    gone = protocol.enqueue()
    protocol.cancel(gone)
    assert protocol.run_now(later, ready, gone, 999) == {
        later: "moved",
        ready: "ready",
        gone: "finished",
        999: "unknown",
    }
    worker = protocol.register()
    assert [job["id"] for job in protocol.claim(worker).jobs] == [ready, later]
    assert protocol.run_now(later) == {later: "refused"}


def test_run_now_can_be_all_or_nothing(protocol: Protocol) -> None:
    # spec: QU-24
    later, gone = protocol.enqueue(delay=3600), protocol.enqueue()
    protocol.cancel(gone)
    with pytest.raises(psycopg.Error) as refused:
        protocol.run_now(later, gone, strict=True)
    assert refused.value.sqlstate == "SW001"
    assert f"job {gone} is cancelled" in str(refused.value)
    assert (protocol.state(later), acts(protocol)) == ("scheduled", ["cancel"])
    assert protocol.run_now(later, strict=True) == {later: "moved"}


@pytest.mark.parametrize("kind", ["queue", "task"])
def test_nobody_claims_from_what_is_paused_and_what_runs_goes_on(protocol: Protocol, kind: str) -> None:
    name = {"queue": "mail", "task": "greet"}[kind]
    job = protocol.enqueue("greet", queue="mail")
    other = protocol.enqueue("other", queue="default")
    worker = protocol.register()
    running = protocol.enqueue("greet", queue="mail", priority=-1)
    held = protocol.claim(worker, "mail", want=1).jobs
    call: Any = "select {}.pause(queue => %s)" if kind == "queue" else "select {}.pause(task => %s)"
    protocol.rows(call, name)
    assert [one["id"] for one in protocol.claim(worker, "mail", "default").jobs] == [other]
    assert protocol.complete(worker, held) == {running: "settled"}
    back = (
        "select {}.resume(queue => %s) as was" if kind == "queue" else "select {}.resume(task => %s) as was"
    )
    assert protocol.value(back, name) is True
    assert protocol.value(back, name) is False
    assert [one["id"] for one in protocol.claim(worker, "mail").jobs] == [job]


def test_a_pause_may_end_by_itself(protocol: Protocol) -> None:
    job = protocol.enqueue()
    worker = protocol.register(lease=86400)
    protocol.rows("select {}.pause(queue => 'default', lasting => '1 hour', reason => 'night')")
    assert protocol.claim(worker).jobs == []
    protocol.shift_clock(timedelta(hours=2))
    assert [one["id"] for one in protocol.claim(worker).jobs] == [job]


@pytest.mark.parametrize(
    "call",
    [
        "select {}.pause()",
        "select {}.pause(queue => 'q', task => 't')",
        "select {}.pause(queue => 'q', lasting => '0 seconds')",
        "select {}.pause(queue => 'q', lasting => '-1 hour')",
        "select {}.resume()",
        "select {}.resume(queue => 'q', task => 't')",
    ],
)
def test_a_pause_that_says_nothing_is_refused(protocol: Protocol, call: Any) -> None:
    with pytest.raises(psycopg.Error) as refused:
        protocol.rows(call)
    assert refused.value.sqlstate == "SW001"


def test_every_act_of_a_person_leaves_one_row_in_its_transaction(protocol: Protocol) -> None:
    # spec: SH-33, SH-34
    job, later = protocol.enqueue(), protocol.enqueue(delay=60)
    protocol.rows("select {}.cancel(array[%s::bigint], 'why', 'ada')", job)
    protocol.rows("select {}.revive(array[%s::bigint], 'ada')", job)
    protocol.rows("select {}.run_now(array[%s::bigint])", later)
    protocol.rows("select {}.pause(queue => 'mail', actor => 'ada')")
    protocol.rows("select {}.resume(queue => 'mail')")
    protocol.rows("select {}.retain('mail', completed => 3)")
    with protocol.connection.transaction(force_rollback=True):
        protocol.rows("select {}.pause(queue => 'mail')")
    assert acts(protocol) == ["cancel", "revive", "run_now", "pause", "resume", "retain"]
    rows = protocol.rows("select * from {}.audit order by id")
    me = protocol.value("select session_user")
    assert [row["actor"] for row in rows] == ["ada", "ada", me, "ada", me, me]
    assert rows[0]["target"] == {"jobs": [job]}
    assert rows[0]["after"]["reason"] == "why"
    assert rows[1]["before"][str(job)]["state"] == "cancelled"
    assert rows[4]["before"]["name"] == "mail"
