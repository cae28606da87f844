"""Jobs that are completed from outside, whoever holds them."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from shiftwork import App
from tests.harness import Protocol


def complete(protocol: Protocol, job: int, result: str | None = None, actor: str | None = None) -> str:
    return str(protocol.value("select {}.complete(%s, %s, %s)", job, result, actor))


def test_a_job_that_nobody_holds_is_completed_with_a_result(protocol: Protocol) -> None:
    # spec: QU-25
    job = protocol.enqueue(delay=60, unique_key="k", unique_scope="unfinished")
    assert complete(protocol, job, '{"by": "hand"}', "ada") == "completed"
    ended = protocol.job(job)
    assert (ended["state"], ended["result"], ended["worker"], ended["error"]) == (
        "completed",
        {"by": "hand"},
        None,
        None,
    )
    assert complete(protocol, job) == "finished"
    assert complete(protocol, 999) == "unknown"
    assert protocol.enqueue(unique_key="k", unique_scope="unfinished") != job  # its key is free
    [first, *_] = protocol.rows("select * from {}.audit order by id")
    assert (first["verb"], first["actor"], first["target"]) == ("complete", "ada", {"jobs": [job]})
    assert first["before"]["state"] == "scheduled"


def test_a_running_job_is_taken_from_its_worker_which_is_told_at_once(dsn: str, protocol: Protocol) -> None:
    # spec: QU-25, QU-9
    worker = protocol.register()
    job = protocol.enqueue()
    held = protocol.claim(worker).held
    protocol.cancel(job)
    with psycopg.connect(dsn, autocommit=True) as loser:
        loser.execute("listen shiftwork_cancel")
        assert complete(protocol, job, "null") == "completed"
        assert [one.payload for one in loser.notifies(timeout=30, stop_after=1)] == [str(job)]
    pulse = protocol.heartbeat(worker, held)
    assert (pulse["lost"], pulse["why"], pulse["strays"]) == ([job], {str(job): "ended"}, [])
    for state in ("completed", "failed", "scheduled", "cancelled"):
        assert protocol.settle(worker, {"id": job, "attempt": 1, "state": state}) == {job: "lost"}
    ended = protocol.job(job)
    assert (ended["state"], ended["result"], ended["worker"]) == ("completed", None, None)
    assert protocol.rows("select job from {}.signals") == []


def test_a_job_that_failed_before_is_completed_without_its_error(protocol: Protocol) -> None:
    worker = protocol.register()
    job = protocol.enqueue()
    protocol.claim(worker)
    error = {"code": "X", "message": "x"}
    protocol.settle(worker, {"id": job, "attempt": 1, "state": "scheduled", "error": error, "delay": 60})
    assert complete(protocol, job) == "completed"
    assert (protocol.job(job)["error"], protocol.job(job)["failures"]) == (None, 1)
    assert protocol.revive(job) == {job: "revived"}


def test_one_whose_row_is_locked_is_busy_and_stays(dsn: str, protocol: Protocol) -> None:
    worker = protocol.register()
    job = protocol.enqueue()
    protocol.claim(worker)
    with psycopg.connect(dsn) as handler:
        handler.execute("select shiftwork.fence(%s, 1)", (job,))
        assert complete(protocol, job) == "busy"
    assert protocol.state(job) == "running"
    assert complete(protocol, job) == "completed"


def test_who_waits_for_the_result_is_told(dsn: str, protocol: Protocol) -> None:
    job = protocol.enqueue()
    with psycopg.connect(dsn, autocommit=True) as waiter:
        waiter.execute("listen shiftwork_done")
        waiter.execute("select shiftwork.await_results(60)")
        complete(protocol, job, "1")
        assert [one.payload for one in waiter.notifies(timeout=30, stop_after=1)] == [str(job)]


def test_a_job_that_a_trigger_keeps_is_not_said_to_be_completed(protocol: Protocol) -> None:
    job = protocol.enqueue()
    protocol.rows(
        "create function public.keep() returns trigger language plpgsql as $$ begin return null; end $$"
    )
    protocol.rows("create trigger keep before delete on {}.jobs for each row execute function public.keep()")
    with pytest.raises(psycopg.errors.RaiseException, match="a trigger keeps job"):
        complete(protocol, job)
    assert protocol.state(job) == "ready"


@pytest.fixture
def app(dsn: str) -> Iterator[App]:
    with App(dsn) as app:
        yield app


async def test_an_app_completes_jobs_in_both_worlds(app: App, protocol: Protocol) -> None:
    # spec: QU-25
    @app.task
    def add(a: int, b: int) -> int:
        return a + b

    one, two = add.enqueue(1, 2), add.enqueue(3, 4)
    assert app.complete(one.id, 3) == "completed"
    assert await app.acomplete(two.id, 7) == "completed"
    assert (one.result(timeout=5), two.result(timeout=5)) == (3, 7)
    assert app.complete(one.id) == "finished"
    assert app.complete(999) == "unknown"
