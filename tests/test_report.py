"""What handlers say while they run: written under the fence, without touching the job's row, and within bounds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime

import psycopg
import pytest

from shiftwork import App, operations
from shiftwork.errors import UnknownJob
from tests.harness import Protocol, Row


def report(protocol: Protocol, worker: int, **said: object) -> list[list[int]]:
    answer = protocol.value("select {}.report(%s)", json.dumps({"worker": worker, **said}))
    assert answer.keys() == {"lost"}
    return sorted(answer["lost"])


def lines(protocol: Protocol, job: int) -> list[tuple[int, str, str]]:
    rows = protocol.rows("select attempt, level, message from {}.logs where job = %s order by id", job)
    return [(row["attempt"], row["level"], row["message"]) for row in rows]


def progress(protocol: Protocol, job: int) -> tuple[int, float | None, str | None] | None:
    rows = protocol.rows("select attempt, fraction, message from {}.progress where job = %s", job)
    return (rows[0]["attempt"], rows[0]["fraction"], rows[0]["message"]) if rows else None


def claimed(protocol: Protocol, worker: int, number: int = 1) -> list[Row]:
    protocol.enqueue_many({"task": "greet"} for _ in range(number))
    return protocol.claim(worker, want=number).jobs


def test_lines_and_progress_can_be_read_while_a_job_runs(protocol: Protocol) -> None:
    # spec: D-28, SG-34
    worker = protocol.register()
    one, two = (job["id"] for job in claimed(protocol, worker, 2))
    said = [
        [one, 1, 5, "info", "first"],
        [two, 1, None, "debug", "of another"],
        [one, 1, 0, "error", "second"],
    ]
    steps = [[one, 1, 0.25, "begun"], [one, 1, 0.5, "half"], [two, 1, None, None]]
    assert report(protocol, worker, lines=said, progress=steps) == []
    assert lines(protocol, one) == [(1, "info", "first"), (1, "error", "second")]
    assert lines(protocol, two) == [(1, "debug", "of another")]
    assert progress(protocol, one) == (1, 0.5, "half")
    assert progress(protocol, two) == (1, None, None)
    assert protocol.value(
        "select (max(at) - min(at)) = interval '5 seconds' from {}.logs where job = %s", one
    )
    assert report(protocol, worker, progress=[[one, 1, 0.75, "more"]]) == []
    assert progress(protocol, one) == (1, 0.75, "more")
    assert report(protocol, worker) == []


def test_progress_that_is_next_to_nothing_costs_no_lines_of_others(protocol: Protocol) -> None:
    worker = protocol.register()
    one, two = (job["id"] for job in claimed(protocol, worker, 2))
    steps = [[one, 1, 1e-320, "hardly begun"], [two, 1, 0.25, None]]
    assert report(protocol, worker, lines=[[two, 1, 0, "info", "of another"]], progress=steps) == []
    assert progress(protocol, one) == (1, 0.0, "hardly begun")
    assert progress(protocol, two) == (1, 0.25, None)
    assert lines(protocol, two) == [(1, "info", "of another")]


def test_what_a_worker_that_lost_its_job_says_is_not_written(protocol: Protocol) -> None:
    # spec: D-16, SG-34
    late, quick = protocol.register(), protocol.register()
    [job, kept] = claimed(protocol, late, 2)
    protocol.release(late, [[job["id"], 1]])
    assert [one["id"] for one in protocol.claim(quick).jobs] == [job["id"]]
    report(protocol, quick, progress=[[job["id"], 2, 0.1, "anew"]])

    said = [
        [job["id"], 1, 0, "info", "late"],
        [job["id"], 2, 0, "info", "not its own"],
        [kept["id"], 1, 0, "info", "held"],
        [999, 1, 0, "info", "nobody's"],
    ]
    lost = report(protocol, late, lines=said, progress=[[job["id"], 1, 0.9, "late"]])
    assert lost == [[job["id"], 1], [job["id"], 2], [999, 1]]
    assert lines(protocol, job["id"]) == []
    assert lines(protocol, kept["id"]) == [(1, "info", "held")]
    assert progress(protocol, job["id"]) == (2, 0.1, "anew")

    protocol.complete(quick, [{"id": job["id"], "attempt": 2}])
    # Who ended it may finish speaking: a transaction ends its job before what it said is sent. Nobody else may.
    assert report(protocol, quick, lines=[[job["id"], 2, 0, "info", "last words"]]) == []
    assert report(protocol, late, lines=[[job["id"], 2, 0, "info", "not its own"]]) == [[job["id"], 2]]
    assert lines(protocol, job["id"]) == [(2, "info", "last words")]


def test_a_job_whose_row_is_locked_by_its_own_transaction_can_speak(dsn: str, protocol: Protocol) -> None:
    worker = protocol.register()
    [job] = claimed(protocol, worker)
    with psycopg.connect(dsn) as handler:
        handler.execute("select shiftwork.fence(%s, 1)", (job["id"],))
        protocol.rows("set lock_timeout = '5s'")
        assert report(protocol, worker, lines=[[job["id"], 1, 0, "info", "from inside"]]) == []
    assert lines(protocol, job["id"]) == [(1, "info", "from inside")]


def test_of_each_attempt_so_many_lines_are_kept_and_one_that_says_so(protocol: Protocol) -> None:
    worker = protocol.register()
    [job, other] = (one["id"] for one in claimed(protocol, worker, 2))

    def say(*numbers: int) -> None:
        said = [[job, 1, 0, "info", str(number)] for number in numbers]
        report(protocol, worker, lines=[*said, [other, 1, 0, "info", "quiet"]])

    say(*range(1, 700))
    say(*range(700, 1001))
    assert [message for _, _, message in lines(protocol, job)] == [str(n) for n in range(1, 1001)]
    say(*range(1001, 1100))
    say(1100)
    kept = lines(protocol, job)
    assert len(kept) == 1001
    assert kept[-1] == (1, "warning", "what follows is not kept: an attempt has 1000 lines")
    assert len(lines(protocol, other)) == 4

    protocol.settle(worker, {"id": job, "attempt": 1, "state": "scheduled", "delay": 0})
    [again] = protocol.claim(worker).jobs
    report(protocol, worker, lines=[[job, again["attempt"], 0, "info", "anew"]])
    assert lines(protocol, job)[-1] == (2, "info", "anew")


def test_what_is_too_long_or_out_of_range_is_cut(protocol: Protocol) -> None:
    worker = protocol.register()
    [job] = (one["id"] for one in claimed(protocol, worker))
    said = [[job, 1, -5, "x" * 100, "y" * 20_000], [job, 1, 1e9, None, None]]
    assert report(protocol, worker, lines=said, progress=[[job, 1, 7, "z" * 20_000]]) == []
    assert [(len(level), len(message)) for _, level, message in lines(protocol, job)] == [
        (20, 10_000),
        (4, 0),
    ]
    attempt, fraction, message = progress(protocol, job) or (0, 0, "")
    assert (attempt, fraction, len(message or "")) == (1, 1, 10_000)
    assert protocol.value("select max(at) - min(at) = interval '1 day' from {}.logs")


def test_what_was_said_is_forgotten_with_its_job(protocol: Protocol) -> None:
    worker = protocol.register()
    [job] = claimed(protocol, worker)
    report(protocol, worker, lines=[[job["id"], 1, 0, "info", "x"]], progress=[[job["id"], 1, 1, "done"]])
    protocol.complete(worker, [job])
    protocol.rows(
        "create or replace function {}.clock() returns timestamptz language sql stable parallel safe"
        " return now() + interval '9 days'"
    )
    protocol.rows("select {}.purge()")
    assert lines(protocol, job["id"]) == []
    assert progress(protocol, job["id"]) is None


@pytest.fixture
def app(dsn: str) -> Iterator[App]:
    with App(dsn) as app:
        yield app


def test_a_handle_shows_what_its_job_says(app: App, protocol: Protocol) -> None:
    # spec: D-28
    worker = protocol.register()
    [job] = claimed(protocol, worker)
    handle, store = app.job(job["id"]), app.client.store
    assert (handle.progress(), handle.logs()) == (None, [])
    said = [(job["id"], 1, 0.0, "info", f"step {n} \0 \ud800") for n in range(5)]
    plan = operations.report(store, worker, said, [(job["id"], 1, 0.5, "half \0 way"), (77, 1, 0.5, None)])
    assert app.client.perform(plan) == [(77, 1)]

    found = handle.progress()
    assert found is not None
    assert (found.fraction, found.message) == (0.5, "half � way")
    assert isinstance(found.at, datetime)
    told = handle.logs()
    assert [line.message for line in told] == [f"step {n} � �" for n in range(5)]
    assert {(line.attempt, line.level) for line in told} == {(1, "info")}
    assert handle.logs(after=told[2].id) == told[3:]
    assert handle.logs(limit=2) == told[:2]
    assert handle.logs(limit=2, last=True) == told[3:]

    protocol.settle(worker, {"id": job["id"], "attempt": 1, "state": "scheduled", "delay": 0})
    protocol.claim(worker)
    assert handle.progress() is None  # that was another attempt
    with pytest.raises(UnknownJob):
        app.job(999).progress()


async def test_a_handle_shows_the_same_to_those_who_await(app: App, protocol: Protocol) -> None:
    worker = protocol.register()
    [job] = claimed(protocol, worker)
    report(protocol, worker, lines=[[job["id"], 1, 0, "info", "x"]], progress=[[job["id"], 1, 1, "done"]])
    handle = app.job(job["id"])
    found = await handle.aprogress()
    assert found is not None
    assert found.message == "done"
    assert [line.message for line in await handle.alogs()] == ["x"]
