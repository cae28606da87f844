"""Workers that have no way to the database: a real gateway, on a real socket, before a real database."""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

import shiftwork
from shiftwork import App, Retry, TableStore
from shiftwork.errors import ConfigurationError, Snooze
from shiftwork.gateway import Gateway
from shiftwork.gateway.tokens import OfWorker
from shiftwork.job import Job
from tests.harness import Protocol
from tests.remote import SECRET, Remote, RemoteWorker, Row
from tests.test_cli import SHIFTWORK
from tests.test_cli_worker import surroundings
from tests.wire import Wire

ROOT = Path(__file__).parent.parent


@dataclass
class Report:
    """What is returned."""

    pages: int


def made(dsn: str) -> App:
    """An app whose tasks are done elsewhere."""
    app = App(dsn)

    @app.task(retry=Retry(max_attempts=3, delay=timedelta(seconds=10), jitter=0, on=("TimeoutError", "BUSY")))
    async def greet(name: str, times: int = 1) -> str:
        raise AssertionError("done elsewhere")

    @app.task(queue="press", timeout=timedelta(minutes=5), max_resets=0)
    def print_it(pages: int) -> Report:
        raise AssertionError("done elsewhere")

    @app.task(transaction=True)
    async def pay(amount: int, tx: psycopg.AsyncConnection[Any]) -> None:
        raise AssertionError("not done elsewhere")

    return app


@pytest.fixture
def app(dsn: str) -> Iterator[App]:
    with made(dsn) as app:
        yield app


@pytest.fixture
def remote(app: App) -> Iterator[Remote]:
    with Remote(app) as remote:
        yield remote


@pytest.fixture
def worker(remote: Remote) -> RemoteWorker:
    return remote.register(name="far", host="away.example")


def state(protocol: Protocol, job: int) -> Row:
    [row] = protocol.rows("select * from {}.all_jobs where id = %s", job)
    return row


# The life of a job.


def test_a_job_is_taken_told_of_and_completed(
    protocol: Protocol, remote: Remote, worker: RemoteWorker
) -> None:
    # spec: SG-38, A-23
    first = protocol.enqueue("greet", {"name": "Ada"}, tags=["vip"])
    second = protocol.enqueue("print_it", {"pages": 3}, queue="press")

    [row] = protocol.rows("select name, host, queues, gone_at from {}.workers where id = %s", worker.id)
    assert row == {"name": "far", "host": "away.example", "queues": ["default", "press"], "gone_at": None}
    assert (worker.answer["lease"], worker.answer["heartbeat"]) == (30, 10)

    answer = worker.ask("dequeue")
    assert answer.status == 200
    [job] = answer.said["jobs"]
    assert (job["id"], job["attempt"], job["task"], job["queue"]) == (first, 1, "greet", "default")
    assert (job["payload"], job["tags"], job["timeout"]) == ({"name": "Ada"}, ["vip"], None)
    assert (job["failures"], job["max_attempts"]) == (
        0,
        protocol.value("select max_attempts from {}.jobs where id = %s", first),
    )
    [held] = protocol.rows("select state, worker, claim from {}.jobs where id = %s", first)
    assert held == {"state": "running", "worker": worker.id, "claim": answer.said["claim"]}

    assert worker.tell(job, "progress", fraction=0.5, message="half").status == 204
    assert protocol.value("select message from {}.progress where job = %s", first) == "half"
    done = worker.tell(job, "complete", result="hello Ada")
    assert (done.status, done.said["state"]) == (200, "completed")
    ended = state(protocol, first)
    assert (ended["state"], ended["result"], ended["worker"]) == ("completed", "hello Ada", worker.id)

    other = worker.take()
    assert (other["id"], other["queue"], other["timeout"]) == (second, "press", 300)
    assert worker.tell(other, "complete", result={"pages": 3}).said["state"] == "completed"
    assert worker.ask("dequeue").status == 204
    assert remote.post(f"/workers/{worker.id}", worker.token, method="DELETE").status == 204
    assert worker.ask("heartbeat").status in {200, 410}


def test_an_ending_that_is_said_twice_has_the_same_answer_and_another_is_refused(
    protocol: Protocol, worker: RemoteWorker
) -> None:
    # spec: SG-38
    protocol.enqueue("greet", {"name": "Ada"})
    job = worker.take()
    said = [worker.tell(job, "complete", result="hello") for _ in range(2)]
    assert [answer.said for answer in said] == [{"state": "completed", "delay": None}] * 2
    for verb in ("fail", "error", "release", "logs", "progress"):
        late = worker.tell(job, verb, **({"message": "late"} if verb != "release" else {}))
        assert late.status == 409
        assert "has ended" in late.said["error"]
    assert state(protocol, job["id"])["result"] == "hello"
    assert protocol.rows("select * from {}.logs") == []


def test_a_failure_is_decided_about_as_its_task_says(protocol: Protocol, worker: RemoteWorker) -> None:
    # spec: SG-38
    protocol.enqueue("greet", {"name": "Ada"}, max_attempts=3)
    trace = "Traceback …\nurllib.error.TimeoutError: slow"
    again = worker.tell(
        worker.take(), "error", message="slow", type="urllib.error.TimeoutError", traceback=trace
    )
    assert again.said == {"state": "scheduled", "delay": 10}
    [attempt] = protocol.rows("select * from {}.attempts")
    assert (attempt["code"], attempt["will_retry"], attempt["worker"]) == ("TimeoutError", True, worker.id)
    assert (attempt["error"]["type"], attempt["error"]["traceback"]) == ("urllib.error.TimeoutError", trace)

    protocol.shift_clock(timedelta(seconds=11))
    worker = worker.remote.register()
    later = worker.tell(worker.take(), "error", message="not yet", code="BUSY", delay=3600)
    assert later.said == {"state": "scheduled", "delay": 3600}

    protocol.shift_clock(timedelta(hours=2))
    worker = worker.remote.register()
    last = worker.tell(worker.take(), "error", message="still", code="BUSY")
    assert last.said == {"state": "failed", "delay": None}
    [ended] = protocol.rows("select * from {}.history")
    assert (ended["attempt"], ended["failures"], ended["error"]["code"]) == (3, 3, "BUSY")


def test_an_error_that_the_policy_does_not_name_and_poison_fail_at_once(
    protocol: Protocol, worker: RemoteWorker
) -> None:
    jobs = [protocol.enqueue("greet", {"name": "Ada"}) for _ in range(3)]
    assert worker.tell(worker.take(), "error", message="unknown", type="KeyError").said["state"] == "failed"
    assert worker.tell(worker.take(), "fail", message="never").said["state"] == "failed"
    assert worker.tell(worker.take(), "fail", message="no", code="NO_SUCH_FILE").said["state"] == "failed"
    codes = [state(protocol, job)["error"]["code"] for job in jobs]
    assert codes == ["KeyError", "POISON", "NO_SUCH_FILE"]


def test_a_result_that_is_not_what_the_task_returns_is_a_failure(
    protocol: Protocol, worker: RemoteWorker
) -> None:
    job = protocol.enqueue("print_it", {"pages": 3}, queue="press")
    assert worker.tell(worker.take(), "complete", result={"pages": "three"}).said["state"] == "failed"
    assert state(protocol, job)["error"]["code"] == "RETURN_TYPE_MISMATCH"


def test_lines_are_added_and_changed_under_the_token(protocol: Protocol, worker: RemoteWorker) -> None:
    # spec: SG-38
    [first, second] = [protocol.enqueue("greet", {"name": name}) for name in ("Ada", "Bob")]
    protocol.rows("alter table {}.logs alter column id restart with 5000000000")
    [job, other] = worker.dequeue(most=2)
    added = worker.tell(job, "logs", message="cloning")
    assert added.status == 201
    index = added.said["index"]
    worker.tell(other, "logs", message="other", level="warning")
    path = f"logs/{index}"
    remote = worker.remote
    changed = remote.post(
        f"/jobs/{first}/{path}", job["token"], method="PUT", message="cloned\0", level="info"
    )
    assert changed.status == 204
    assert remote.post(f"/jobs/{second}/{path}", other["token"], method="PUT", message="mine").status == 404
    assert remote.post(f"/jobs/{first}/{path}", other["token"], method="PUT", message="mine").status == 404
    lines = protocol.rows("select job, attempt, level, message from {}.logs order by id")
    assert [tuple(line.values()) for line in lines] == [
        (first, 1, "info", "cloned\ufffd"),
        (second, 1, "warning", "other"),
    ]
    protocol.rows(
        "insert into {}.logs (job, attempt, level, message) select %s, 1, 'info', '' from generate_series(1, 999)",
        first,
    )
    full = worker.tell(job, "logs", message="one too many")
    assert (full.status, "full" in full.said["error"]) == (413, True)

    worker.tell(job, "complete", result="done")
    assert remote.post(f"/jobs/{first}/{path}", job["token"], method="PUT", message="late").status == 409


# Who holds what.


def test_a_job_that_was_taken_away_and_given_to_another_can_be_ended_only_by_him(
    protocol: Protocol, remote: Remote, worker: RemoteWorker
) -> None:
    # spec: SG-38, A-23
    job = protocol.enqueue("greet", {"name": "Ada"})
    slow = worker.take()
    protocol.lapse(worker.id)
    other = remote.register()
    quick = other.take()  # nobody else reaps here
    assert (quick["id"], quick["attempt"]) == (job, 2)

    for verb in ("complete", "error", "fail", "release"):
        late = worker.tell(slow, verb)
        assert late.status == 409
        assert "not held under this token any more" in late.said["error"]
    assert worker.tell(slow, "logs", message="late").status == 409
    assert worker.tell(slow, "progress", fraction=1).status == 409
    for verb in ("heartbeat", "dequeue"):
        gone = worker.ask(verb)
        assert gone.status == 410
        assert "register anew" in gone.said["error"]
    assert other.tell(quick, "complete", result="hello").said["state"] == "completed"
    assert protocol.rows("select from {}.logs") == []


def test_a_heartbeat_renews_the_lease_and_tells_what_is_lost_and_what_to_cancel(
    protocol: Protocol, worker: RemoteWorker
) -> None:
    # spec: SG-38
    jobs = [protocol.enqueue("greet", {"name": "Ada"}) for _ in range(3)]
    held = worker.dequeue(most=3)
    tokens = [job["token"] for job in held]
    protocol.rows("select {}.cancel(array[%s::bigint], 'changed my mind')", jobs[1])
    protocol.rows("select {}.complete(%s)", jobs[2])
    before = protocol.value("select lease_until from {}.workers where id = %s", worker.id)
    beat = worker.ask("heartbeat", jobs=tokens)
    assert beat.said == {"lost": [jobs[2]], "cancel": [{"id": jobs[1], "reason": "changed my mind"}]}
    assert protocol.value("select lease_until from {}.workers where id = %s", worker.id) > before
    assert worker.tell(held[1], "release").said == {"state": "cancelled"}
    assert worker.tell(held[0], "release").said == {"state": "ready"}
    assert [state(protocol, job)["state"] for job in jobs] == ["ready", "cancelled", "completed"]
    assert state(protocol, jobs[0])["resets"] == 0


def test_a_worker_whose_answer_was_lost_gets_the_job_with_its_next_dequeue(
    protocol: Protocol, worker: RemoteWorker
) -> None:
    # spec: SG-38, A-23
    job = protocol.enqueue("greet", {"name": "Ada"})
    lost = worker.take()  # and its answer never arrived
    found = worker.take()
    assert (found["id"], found["attempt"]) == (job, 2)
    assert state(protocol, job)["resets"] == 0, "nothing is counted against it"
    assert worker.tell(lost, "complete").status == 409
    assert worker.tell(found, "complete", result="hello").said["state"] == "completed"


def test_what_a_worker_says_that_it_holds_stays_its_own_and_strays_are_found_by_heartbeats(
    protocol: Protocol, worker: RemoteWorker
) -> None:
    # spec: SG-38
    jobs = [protocol.enqueue("greet", {"name": "Ada"}) for _ in range(3)]
    first = worker.take()
    _lost = worker.ask("dequeue", jobs=[first["token"]])  # the answer never arrived
    worker.ask("heartbeat", jobs=[first["token"]])
    assert state(protocol, jobs[1])["state"] == "running", "its claim is newer than any that had an answer"
    protocol.rows("select {}.pause(task => 'print_it')")
    protocol.rows(
        "update {}.jobs set run_at = run_at + interval '1 s', state = 'scheduled' where id = %s", jobs[2]
    )
    answered = protocol.value("select nextval('shiftwork.claims')")
    beat = worker.ask("heartbeat", jobs=[first["token"]], claim=answered)
    assert beat.said["lost"] == []
    assert [state(protocol, job)["state"] for job in jobs] == ["running", "ready", "scheduled"]
    second = worker.take(jobs=[first["token"]])
    assert second["id"] == jobs[1]
    assert [worker.tell(job, "complete", result="").status for job in (first, second)] == [200, 200]


def test_who_leaves_gives_back_what_it_holds_with_nothing_counted(
    protocol: Protocol, remote: Remote, worker: RemoteWorker
) -> None:
    job = protocol.enqueue("print_it", {"pages": 1}, queue="press")
    held = worker.take()
    assert remote.send(f"/workers/{worker.id}", worker.token, b"", method="DELETE").status == 204
    row = state(protocol, job)
    assert (row["state"], row["resets"]) == ("ready", 0)
    assert worker.tell(held, "complete").status == 409
    assert remote.register().take()["attempt"] == 2


def test_two_gateways_with_one_secret_serve_the_same_worker(protocol: Protocol, app: App, dsn: str) -> None:
    # spec: SG-38
    job = protocol.enqueue("greet", {"name": "Ada"})
    with made(dsn) as twin, Remote(app) as one, Remote(twin) as two:
        worker = one.register()
        there = RemoteWorker(two, worker.id, worker.token, worker.answer)
        taken = there.take()
        index = worker.tell(taken, "logs", message="here").said["index"]
        assert (
            two.post(f"/jobs/{job}/logs/{index}", taken["token"], method="PUT", message="there").status == 204
        )
        assert worker.ask("heartbeat", jobs=[taken["token"]]).said == {"lost": [], "cancel": []}
        assert worker.tell(taken, "complete", result="hello").said["state"] == "completed"
    with made(dsn) as twin, Remote(twin, token="another-secret-of-some-length") as three:
        stranger = RemoteWorker(three, worker.id, worker.token, worker.answer)
        assert stranger.ask("heartbeat").status == 401
        assert stranger.tell(taken, "complete").status == 401


def test_whatever_is_lost_on_the_way_every_job_ends_once(protocol: Protocol, app: App, dsn: str) -> None:
    # spec: SG-38, A-23
    jobs = {protocol.enqueue("greet", {"name": str(number)}) for number in range(60)}
    chance = random.Random(4711)
    accepted: dict[int, set[str]] = {job: set() for job in jobs}

    def work(worker: RemoteWorker, doubtful: list[float]) -> None:
        while True:
            found = worker.dequeue(most=2)
            if not found:
                return
            luck = doubtful.pop() if doubtful else 1
            if luck < 0.2:
                continue  # the answer never came
            for job in found:
                if worker.tell(job, "complete", result=job["token"]).status == 200:
                    accepted[job["id"]].add(job["token"])
                if luck < 0.4:  # nor did that one, and it is said again
                    assert worker.tell(job, "complete", result=job["token"]).status == 200
            if luck > 0.9:
                worker.dequeue()  # and never heard of again, with a job in its hands
                protocol_of_its_own(dsn, worker.id)
                worker = worker.remote.register()

    with made(dsn) as twin, Remote(app) as one, Remote(twin) as two:
        # The same job may meet with three who are never heard of again, since it goes back to the front, and would have failed.
        protocol.rows(
            "insert into {}.tasks (name, max_resets) values ('greet', 100)"
            " on conflict (name) do update set max_resets = 100"
        )
        threads = [
            threading.Thread(target=work, args=(remote.register(), [chance.random() for _ in range(20)]))
            for remote in (one, two, one, two)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        while protocol.value("select exists (select from {}.jobs)"):
            work(one.register(), [])
    rows = protocol.rows("select id, state, result, resets from {}.history")
    assert {row["id"]: row["state"] for row in rows} == dict.fromkeys(jobs, "completed")
    assert all(accepted[row["id"]] == {row["result"]} for row in rows)
    assert any(row["resets"] for row in rows)


def protocol_of_its_own(dsn: str, lapsed: int) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        Protocol(connection).lapse(lapsed)


# Who may say what.


def test_each_token_opens_one_thing_and_nothing_else(
    protocol: Protocol, remote: Remote, worker: RemoteWorker
) -> None:
    # spec: SG-38
    jobs = [protocol.enqueue("greet", {"name": "Ada"}) for _ in range(2)]
    [job, other] = worker.dequeue(most=2)
    forged = f"{other['token'].partition('.')[0]}.{job['token'].partition('.')[2]}"
    complete, beat = f"/jobs/{jobs[0]}/complete", f"/workers/{worker.id}/heartbeat"
    for path, tokens in {
        "/workers": (None, "", SECRET[:-1], f"{SECRET}x", "\u00fc" * 20, worker.token, job["token"]),
        beat: (None, SECRET, "x.y", job["token"]),
        complete: (None, SECRET, worker.token, forged, job["token"][:-2], "."),
    }.items():
        for token in tokens:
            answer = remote.send(path, token, b"{}")
            assert answer.status == 401, (path, token)
            assert answer.headers["www-authenticate"] == "Bearer"
    assert remote.post(f"/workers/{worker.id + 1}/heartbeat", worker.token).status == 404
    for stranger in (jobs[1], 999_999):
        unknown = remote.post(f"/jobs/{stranger}/complete", job["token"])
        assert unknown.status == 404
        assert f"opens job {jobs[0]}" in unknown.said["error"]
    another = remote.register()
    assert another.ask("heartbeat", jobs=[job["token"]]).status == 422, "one worker holds nothing for another"
    assert [state(protocol, one)["state"] for one in jobs] == ["running", "running"]

    protocol.rows("delete from {}.jobs where id = %s", jobs[0])
    assert worker.tell(job, "complete").said == {"error": f"there is no job {jobs[0]}"}
    assert worker.tell(job, "logs", message="late").status == 404


GARBAGE: list[tuple[str, bytes, int, str]] = [
    ("/workers", b"{", 400, "JSON"),
    ("/workers", b'{"name": "\xff"}', 400, "JSON"),
    ("/workers", b"[]", 422, "object"),
    ("/workers", b'{"nmae": "x"}', 422, "nmae"),
    ("/workers", b'{"name": "a b"}', 422, "name"),
    ("/workers", b'{"lease": 0.5}', 422, "lease"),
    ("/workers", b'{"queues": ["a\\u0000"]}', 422, "queues"),
    ("/workers", b'{"tasks": ["pay"]}', 422, "pay"),
    ("/workers", b'{"host": "%s"}' % (b"x" * 2_000_000), 413, "bytes"),
    ("dequeue", b'{"most": 0}', 422, "most"),
    ("dequeue", b'{"wait": 1e9}', 422, "wait"),
    ("dequeue", b'{"jobs": ["x.y"]}', 422, "jobs"),
    ("dequeue", b'{"tasks": ["nothing"]}', 422, "nothing"),
    ("heartbeat", b'{"claim": -1}', 422, "claim"),
    ("heartbeat", b'{"jobs": [1]}', 422, "jobs"),
    ("complete", b'{"result": ' + b"[" * 100_000, 400, "JSON"),
    ("complete", b'{"result": NaN}', 400, "JSON"),
    ("complete", b'{"result": %s}' % (b"[" * 3_000 + b"]" * 3_000), 400, "JSON"),
    ("error", b'{"delay": -1}', 422, "delay"),
    ("error", b'{"delay": 1e300}', 422, "delay"),
    ("fail", b'{"code": "WORKER_CRASHED"}', 422, "code"),
    ("logs", b"{}", 422, "message"),
    ("logs", b'{"message": "x", "level": "\\u0000"}', 422, "level"),
    ("progress", b'{"fraction": 2}', 422, "fraction"),
]


def test_garbage_is_refused_and_what_is_wrong_with_it_is_named(
    protocol: Protocol, worker: RemoteWorker
) -> None:
    # spec: SG-38
    protocol.enqueue("greet", {"name": "Ada"})
    job = worker.take()
    paths = {"/workers": ("/workers", SECRET)}
    paths |= {verb: (f"/workers/{worker.id}/{verb}", worker.token) for verb in ("dequeue", "heartbeat")}
    for verb, body, status, names in GARBAGE:
        path, token = paths.get(verb, (f"/jobs/{job['id']}/{verb}", job["token"]))
        answer = worker.remote.send(path, token, body)
        assert (answer.status, names in answer.said["error"]) == (status, True), (verb, body[:50], answer)
    assert state(protocol, job["id"])["state"] == "running"
    assert worker.tell(job, "complete", result="hello").status == 200


def test_what_can_be_said_is_said_safely(protocol: Protocol, worker: RemoteWorker) -> None:
    jobs = [protocol.enqueue("greet", {"name": "Ada"}) for _ in range(3)]
    body = b'{"result": "a\\u0000b"}'
    first = worker.take()
    assert worker.remote.send(f"/jobs/{jobs[0]}/complete", first["token"], body).said["state"] == "completed"
    assert state(protocol, jobs[0])["result"] == "a\ufffdb"
    long = {"message": "m" * 100_000, "type": "T" * 5_000, "traceback": "t\0" * 100_000, "code": "BUSY"}
    assert worker.tell(worker.take(), "fail", **long).said["state"] == "failed"
    error = state(protocol, jobs[1])["error"]
    assert [len(error[part]) for part in ("message", "type")] == [10_000, 500]
    assert error["traceback"].startswith("t\ufffd")
    for method, path in (
        ("GET", "/workers"),
        ("POST", "/jobs/x/complete"),
        ("GET", "/"),
        ("POST", "/jobs/-1/fail"),
    ):
        answer = worker.remote.send(path, SECRET, b"", method=method)
        assert answer.status in {404, 405}
        assert answer.said["error"]
    assert worker.remote.post(f"/jobs/{2**70}/complete", first["token"]).status == 404
    assert worker.remote.post(
        f"/jobs/{jobs[0]}/logs/{2**70}", first["token"], method="PUT", message=""
    ).status in {404, 409}


# What is given out.


def test_a_job_whose_payload_does_not_fit_has_failed_and_the_next_one_is_given(
    protocol: Protocol, worker: RemoteWorker
) -> None:
    # spec: SG-38
    bad = [protocol.enqueue("greet", payload) for payload in ({"name": 1}, {"nmae": "Ada"}, {})]
    good = protocol.enqueue("greet", {"name": "Ada", "times": 2})
    assert worker.take()["id"] == good
    for job in bad:
        row = state(protocol, job)
        assert (row["state"], row["error"]["code"], row["attempt"]) == ("failed", "ARGUMENTS_INVALID", 1)
        assert "name" in row["error"]["message"] or "nmae" in row["error"]["message"]


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_what_is_given_out_can_be_transformed_and_a_job_for_which_that_fails_has_failed(
    protocol: Protocol, app: App, kind: str
) -> None:
    # spec: SG-38
    def transform(job: Job) -> object:
        match job.payload["name"]:
            case "Eve":
                raise LookupError("there is no Eve")
            case "Set":
                return {1, object()}
            case "Later":
                raise Snooze(timedelta(hours=1))
        return {"greeting": f"Dear {job.payload['name']}", "secret": "for your eyes"}

    async def awaited(job: Job) -> object:
        return transform(job)

    jobs = [protocol.enqueue("greet", {"name": name}) for name in ("Eve", "Set", "Later", "Ada")]
    with Remote(app, transform=transform if kind == "plain" else awaited) as remote:
        [job] = remote.register().dequeue(most=4)
    assert job["id"] == jobs[3]
    assert job["payload"] == {"greeting": "Dear Ada", "secret": "for your eyes"}
    rows = [state(protocol, one) for one in jobs]
    assert [row["state"] for row in rows] == ["failed", "failed", "scheduled", "running"]
    assert "LookupError: there is no Eve" in rows[0]["error"]["message"]
    assert "for your eyes" not in json.dumps([row["payload"] for row in rows])


def test_a_transformation_that_does_not_end_costs_its_job_and_no_other(protocol: Protocol, dsn: str) -> None:
    async def transform(job: Job) -> object:
        if job.payload["name"] == "Eve":
            await asyncio.Event().wait()
        return job.payload

    jobs = [protocol.enqueue("greet", {"name": name}) for name in ("Eve", "Ada")]
    with made(dsn) as app:
        app.settings = app.settings.changed(lease="500ms")
        with Remote(app, transform=transform) as remote:
            assert remote.register(lease=30).take()["id"] == jobs[1]
    assert "TimeoutError" in state(protocol, jobs[0])["error"]["message"]


def test_a_worker_is_heard_though_nobody_can_be_reaped(
    protocol: Protocol, remote: Remote, worker: RemoteWorker
) -> None:
    protocol.lapse(remote.register().id)
    protocol.rows("alter function {}.reap(bigint, int, boolean) rename to not_today")
    assert worker.ask("heartbeat").status == 200
    assert worker.ask("dequeue").status == 204


def test_only_tasks_that_need_no_database_and_that_a_worker_names_are_given_to_it(
    protocol: Protocol, remote: Remote
) -> None:
    protocol.rows("create function in_sql(jsonb) returns void language sql as ''")
    protocol.rows("select {}.register_task('in_sql', 'public.in_sql(jsonb)')")
    for task in ("pay", "in_sql", "unknown"):
        protocol.enqueue(task, {"amount": 1})
    printing = protocol.enqueue("print_it", {"pages": 1})
    greeting = protocol.enqueue("greet", {"name": "Ada"})
    assert remote.register(queues=["press"]).ask("dequeue").status == 204
    assert remote.register(tasks=["greet"]).take(most=10)["id"] == greeting
    assert remote.register().take(most=10)["id"] == printing
    assert remote.register().ask("dequeue").status == 204
    assert protocol.value("select count(*) from {}.jobs where state = 'ready'") == 3


def test_what_lies_behind_a_thousand_jobs_for_others_is_found(protocol: Protocol, remote: Remote) -> None:
    protocol.enqueue_many({"task": "pay", "payload": {"amount": 1}} for _ in range(2_500))
    job = protocol.enqueue("greet", {"name": "Ada"})
    assert remote.register().take()["id"] == job


def test_who_waits_is_given_what_comes_meanwhile(
    protocol: Protocol, remote: Remote, worker: RemoteWorker
) -> None:
    found: list[Row] = []
    waiting = threading.Thread(target=lambda: found.extend(worker.dequeue(wait=30)))
    waiting.start()
    while protocol.value("select last_value < 2 from {}.claims"):
        pass  # it looks, and finds nothing
    job = protocol.enqueue("greet", {"name": "Ada"})
    waiting.join(60)
    assert [one["id"] for one in found] == [job]
    assert remote.register(lease=1).ask("dequeue", wait=30).status == 204, (
        "nobody waits longer than its lease lasts"
    )


def test_who_waits_is_sent_home_when_the_gateway_stops(remote: Remote, protocol: Protocol) -> None:
    worker = remote.register(lease=3600)
    answers: list[int] = []
    waiting = threading.Thread(target=lambda: answers.append(worker.ask("dequeue", wait=30).status))
    waiting.start()
    while protocol.value("select last_value < 2 from {}.claims"):
        pass
    remote.__exit__()
    waiting.join(60)
    assert answers == [204]


def test_a_job_whose_worker_hung_up_before_it_was_given_is_given_back(
    protocol: Protocol, remote: Remote, worker: RemoteWorker, dsn: str
) -> None:
    head = f"POST /workers/{worker.id}/dequeue HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {worker.token}\r\n\r\n"
    with psycopg.connect(dsn) as holder:
        holder.execute("lock table shiftwork.jobs in access exclusive mode")
        with socket.create_connection(("127.0.0.1", remote.port)) as line:
            line.sendall(head.encode())
            waiting = (
                "select count(*) from pg_locks where locktype = 'relation' and not granted"
                " and database = (select oid from pg_database where datname = current_database())"
            )
            while not protocol.value(waiting):
                pass
        holder.execute("""select shiftwork.enqueue('greet', '{"name": "Ada"}')""")
    while protocol.value("select max(attempt) = 0 from {}.jobs"):
        pass
    assert remote.register().take(wait=10)["attempt"] == 2


def test_a_task_that_takes_several_at_once_is_given_out_job_by_job(protocol: Protocol, app: App) -> None:
    @app.task
    async def count(words: shiftwork.Batch[str]) -> list[int]:
        raise AssertionError("done elsewhere")

    protocol.enqueue_many({"task": "count", "payload": {"words": word}} for word in ("to be", "or"))
    with Remote(app) as remote:
        worker = remote.register()
        first, second = worker.dequeue(most=2)
        assert first["payload"] == {"words": "to be"}
        assert worker.tell(first, "complete", result=2).said["state"] == "completed"
        assert worker.tell(second, "complete", result=[1]).said["state"] == "failed"


def test_queues_limits_and_pauses_of_an_app_hold_for_remote_workers(protocol: Protocol, dsn: str) -> None:
    with App(dsn, queues={"mail": 1, "default": None}) as app:

        @app.task(queue="mail")
        def post(to: str) -> None: ...

        protocol.enqueue_many({"task": "post", "queue": "mail", "payload": {"to": "Ada"}} for _ in range(3))
        with Remote(app) as remote:
            strange = remote.post("/workers", queues=["mial"])
            assert (strange.status, "mail, default" in strange.said["error"]) == (422, True)
            worker = remote.register()
            job = worker.take(most=3)
            assert remote.register().ask("dequeue").status == 204, "one at once, in the whole cluster"
            assert worker.tell(job, "complete").status == 200
            protocol.rows("select {}.pause(queue => 'mail')")
            assert worker.ask("dequeue").status == 204


# When the database is away, and what is kept from whom.


def test_while_the_database_is_away_that_is_said_and_then_all_goes_on(
    protocol: Protocol, dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    # spec: SG-38
    # fault: F11
    job = protocol.enqueue("greet", {"name": "Ada"})
    with Wire(dsn) as wire, made(wire.dsn) as app, Remote(app) as remote:
        wire.refuse()
        away = remote.post("/workers")
        assert (away.status, away.headers["retry-after"]) == (503, "2")
        wire.accept()
        worker = remote.register()
        wire.losing('shiftwork".take(')
        assert worker.ask("dequeue").status == 503, "the answer was lost, and the job with it"
        assert state(protocol, job)["state"] == "running"
        taken = worker.take()
        assert (taken["id"], taken["attempt"]) == (job, 2)
        wire.refuse()
        for _ in range(3):
            assert worker.tell(taken, "complete", result="hello").status == 503
        wire.accept()
        wire.losing('shiftwork".settle(')
        assert worker.tell(taken, "complete", result="hello").status == 503, (
            "it is written, and the answer lost"
        )
        assert worker.tell(taken, "complete", result="hello").said["state"] == "completed"
    said = [record.getMessage() for record in caplog.records if "is interrupted" in record.getMessage()]
    assert len(said) == 3, "told once for each time"


def test_who_hangs_up_in_the_middle_of_a_sentence_troubles_nobody(
    remote: Remote, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_connection(("127.0.0.1", remote.port)) as line:
        line.sendall(
            f"POST /workers HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {SECRET}\r\nContent-Length: 9\r\n\r\n{{".encode()
        )
    assert remote.register().ask("dequeue").status == 204
    remote.__exit__()
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_a_row_that_somebody_has_locked_is_tried_again(
    protocol: Protocol, worker: RemoteWorker, dsn: str
) -> None:
    protocol.enqueue("greet", {"name": "Ada"})
    job = worker.take()
    with psycopg.connect(dsn) as other:
        other.execute("select from shiftwork.jobs for update")
        busy = worker.tell(job, "complete", result="hello")
        assert (busy.status, busy.headers["retry-after"]) == (503, "1")
        assert worker.tell(job, "release").status == 503
    assert worker.tell(job, "complete", result="hello").said["state"] == "completed"


def test_what_the_database_refuses_to_have_written_is_a_failure(
    protocol: Protocol, worker: RemoteWorker
) -> None:
    protocol.rows(
        "create function no_hello() returns trigger language plpgsql as $$ begin"
        " if new.result = '\"hello\"' then raise exception 'no hello'; end if; return new; end $$"
    )
    protocol.rows(
        "create trigger no_hello before insert on {}.history for each row execute function no_hello()"
    )
    job = protocol.enqueue("greet", {"name": "Ada"})
    assert worker.tell(worker.take(), "complete", result="hello").said["state"] == "failed"
    assert "no hello" in state(protocol, job)["error"]["message"]


@pytest.mark.parametrize(
    ("token", "says"),
    [("", "make one with"), ("short", "5 characters"), ("with spaces in between", "spaces")],
)
def test_without_a_secret_that_keeps_others_out_there_is_no_gateway(
    app: App, monkeypatch: pytest.MonkeyPatch, token: str, says: str
) -> None:
    monkeypatch.setenv("SHIFTWORK_GATEWAY_TOKEN", token)
    with pytest.raises(ConfigurationError, match=says) as refused:
        Gateway(app)
    assert not token or token not in str(refused.value)
    monkeypatch.setenv("SHIFTWORK_GATEWAY_TOKEN", SECRET)
    Gateway(app)


def test_a_token_of_a_schema_opens_nothing_in_a_table_of_the_same_name() -> None:
    app = App("postgresql://nowhere", schema="jobs")

    @app.task
    def work() -> None: ...

    schema, table = Gateway(app, token=SECRET), Gateway(TableStore("jobs"), token=SECRET)
    token = schema._seal.sign(OfWorker(1, 30.0, (), ()))
    assert schema._seal.read(token, OfWorker) is not None
    assert table._seal.read(token, OfWorker) is None


def test_an_app_without_anything_to_be_done_elsewhere_is_refused() -> None:
    app = App("postgresql://nowhere")

    @app.task(transaction=True)
    async def pay(amount: int, tx: psycopg.AsyncConnection[Any]) -> None: ...

    with pytest.raises(ConfigurationError, match="transactional"):
        Gateway(app, token=SECRET)


# Rows of a table.

TABLE = """
create table example_jobs (
  id serial primary key, state text not null default 'queued', failure_message text, started_at timestamptz, finished_at timestamptz,
  process_after timestamptz, num_resets int not null default 0, num_failures int not null default 0, last_heartbeat_at timestamptz,
  execution_logs json[], worker_hostname text not null default '', cancel boolean not null default false, pages int)
"""


def test_rows_of_a_table_are_worked_in_the_same_way(empty_dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # spec: SG-38, A-23
    hosts = iter(("here", "there"))
    monkeypatch.setattr("shiftwork.stores.table.socket.gethostname", lambda: next(hosts))
    with psycopg.connect(empty_dsn, autocommit=True) as table:
        table.execute(TABLE)
        table.execute("insert into example_jobs (pages) values (1), (2), (3), (4)")

        def row(job: int) -> Row:
            cursor = table.cursor(row_factory=dict_row)
            return cursor.execute("select * from example_jobs where id = %s", (job,)).fetchone() or {}

        stores = [TableStore("example_jobs", dsn=empty_dsn, retry=Retry(max_attempts=2)) for _ in range(2)]
        with stores[0], stores[1], Remote(stores[0]) as remote, Remote(stores[1]) as twin:
            worker = remote.register(lease=7)
            assert worker.answer["lease"] == 30, "the lease is the table's"
            there = RemoteWorker(twin, worker.id, worker.token, worker.answer)
            first = there.take()
            assert (first["id"], first["payload"]["record"]["pages"]) == (1, 1)
            index = worker.tell(first, "logs", message="begun").said["index"]
            assert (
                twin.post(f"/jobs/1/logs/{index}", first["token"], method="PUT", message="done").status == 204
            )
            missing = twin.post("/jobs/1/logs/99", first["token"], method="PUT", message="")
            assert (missing.status, missing.said) == (404, {"error": "the log of job 1 has no line 99"})
            table.execute("update example_jobs set cancel = true where id = 1")
            assert worker.ask("heartbeat", jobs=[first["token"]]).said["cancel"] == [
                {"id": 1, "reason": None}
            ]
            assert worker.tell(first, "complete").said["state"] == "completed"
            assert (row(1)["state"], row(1)["execution_logs"][0]["out"]) == ("completed", "done")
            assert worker.tell(first, "logs", message="late").status == 409

            second = worker.take()
            assert worker.take()["id"] == 2, "what it does not say that it holds is given back"
            assert worker.tell(second, "complete").status == 409
            again = worker.take()
            assert worker.tell(again, "error", message="jammed").said["state"] == "scheduled"
            assert (row(2)["state"], row(2)["failure_message"].endswith("jammed")) == ("errored", True)
            table.execute("alter table example_jobs drop column execution_logs")
            assert worker.ask("dequeue").status == 503, "it is looked at again"
            third = worker.take()
            unlogged = worker.tell(third, "logs", message="torn")
            assert (unlogged.status, "execution_logs" in unlogged.said["error"]) == (501, True)
            assert worker.tell(third, "fail", message="torn").said["state"] == "failed"
            fourth = worker.take()
            table.execute("update example_jobs set last_heartbeat_at = now() - interval '1 day' where id = 4")
            assert remote.register().take()["id"] == 4, "who falls silent loses it"
            assert worker.tell(fourth, "complete").status == 409
            table.execute("delete from example_jobs where id = 4")
            assert worker.tell(fourth, "complete").status == 404


# The command, and the example.

EXAMPLE = ROOT / "examples" / "remote"


class Served:
    """`shiftwork gateway`, as it is typed."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [*SHIFTWORK, "gateway", *arguments],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**surroundings(), **environment},
        )
        self.said = ""

    def __enter__(self) -> str:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said += line
            if found := re.search(r"http://\S+", line):
                return found[0]
        raise AssertionError(self.said)

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.said += self.process.communicate(timeout=30)[1]


def test_the_example_works_as_it_stands_and_nothing_secret_is_told(
    dsn: str, protocol: Protocol, tmp_path: Path
) -> None:
    # spec: SG-38, A-23
    secret = tmp_path / "secret"
    secret.write_text(f"{SECRET}\n")
    lines = len((EXAMPLE / "worker.py").read_text().splitlines())
    assert lines <= 80
    served = Served(
        *(str(EXAMPLE / "app.py"), "--port", "0", "--token-file", str(secret)),
        DATABASE_URL=dsn,
        SHIFTWORK_LOG_LEVEL="debug",
    )
    jobs = [protocol.enqueue("count_words", {"text": "one two three"}, queue="words")]
    jobs.append(protocol.enqueue("count_words", {"text": None}, queue="words"))
    with served as url:
        command = [sys.executable, "-I", str(EXAMPLE / "worker.py")]
        told = {"GATEWAY": url, "SHIFTWORK_GATEWAY_TOKEN": SECRET}
        remote = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=told)
        assert remote.stdout is not None
        assert remote.stdout.readline() == f"job {jobs[0]}: completed\n"
        jobs.append(protocol.enqueue("count_words", {"text": "four"}, queue="words"))
        assert remote.stdout.readline() == f"job {jobs[2]}: completed\n"
        remote.send_signal(signal.SIGTERM)
        said, _ = remote.communicate(timeout=30)
        assert remote.returncode == 0
    assert served.process.returncode == 0
    rows = [state(protocol, job) for job in jobs]
    assert [(row["state"], row["result"]) for row in rows] == [
        ("completed", 3),
        ("failed", None),
        ("completed", 1),
    ]
    assert (
        protocol.rows("select from {}.workers where gone_at is null and lease_until > clock_timestamp()")
        == []
    )
    assert "has left" in served.said
    assert "has stopped" in served.said
    for hidden in (SECRET, "Bearer", "WyJ3b3JrZXIi", "WyJqb2Ii", "one two three"):
        assert hidden not in served.said + said


def test_the_command_refuses_to_start_without_a_secret_or_where_it_cannot_listen(dsn: str) -> None:
    def refused(*arguments: str, **environment: str) -> str:
        ran = subprocess.run(
            [*SHIFTWORK, "gateway", str(EXAMPLE / "app.py"), *arguments],
            capture_output=True,
            text=True,
            check=False,
            env={**surroundings(dsn), **environment},
        )
        assert ran.returncode == 1
        assert "Traceback" not in ran.stderr
        return ran.stderr

    assert "SHIFTWORK_GATEWAY_TOKEN" in refused()
    assert "16 or more" in refused(SHIFTWORK_GATEWAY_TOKEN="short")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"port {port}" in refused("--port", port, SHIFTWORK_GATEWAY_TOKEN=SECRET)


@pytest.mark.parametrize("missing", ["starlette", "uvicorn"])
def test_without_the_extra_it_is_said_which_one_is_needed(missing: str) -> None:
    program = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from shiftwork.cli import main; main(['gateway', 'examples/remote/app.py', '--port', '0'])"
    )
    environment = surroundings("postgresql://nowhere", SHIFTWORK_GATEWAY_TOKEN=SECRET)
    ran = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=environment,
    )
    assert ran.returncode == 1
    assert "shiftwork[web]" in ran.stderr
    assert "Traceback" not in ran.stderr
