"""Outcomes that carry jobs: they are enqueued with the completion that they belong to, once, or not at all."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest

from tests.harness import Protocol, Row

ERROR = {"code": "BROKEN", "message": "it broke"}


def claimed(protocol: Protocol, worker: int, number: int) -> list[Row]:
    protocol.enqueue_many({"task": "parent"} for _ in range(number))
    jobs = protocol.claim(worker, want=number, tasks=["parent"]).jobs
    assert len(jobs) == number
    return jobs


def done(job: Row, *jobs: Any, **more: Any) -> Row:
    return {"id": job["id"], "attempt": job["attempt"], "state": "completed", "jobs": jobs, **more}


def answered(protocol: Protocol, worker: int, *outcomes: Row) -> dict[int, tuple[str, str | None]]:
    request = json.dumps({"worker": worker, "outcomes": outcomes})
    rows = protocol.rows("select id, answer, problem from {}.settle(%s)", request)
    assert len(rows) == len({row["id"] for row in rows})
    return {row["id"]: (row["answer"], row["problem"]) for row in rows}


def names(protocol: Protocol) -> list[str]:
    rows = protocol.rows("select payload ->> 'n' as n from {}.jobs where task = 'child' order by id")
    return [row["n"] for row in rows]


def child(n: int, **options: Any) -> Row:
    return {"task": "child", "payload": {"n": n}, **options}


def test_jobs_that_a_completion_carries_are_enqueued_with_it_in_their_order(protocol: Protocol) -> None:
    worker = protocol.register()
    one, two, three = claimed(protocol, worker, 3)
    answers = protocol.settle(
        worker, done(one, child(1), child(2, delay=60)), done(two), done(three, child(3, queue="other"))
    )
    assert set(answers.values()) == {"settled"}
    assert names(protocol) == ["1", "2", "3"]
    rows = protocol.rows("select queue, state::text from {}.jobs where task = 'child' order by id")
    assert [(row["queue"], row["state"]) for row in rows] == [
        ("default", "ready"),
        ("default", "scheduled"),
        ("other", "ready"),
    ]


def test_an_outcome_that_is_sent_again_or_comes_too_late_enqueues_nothing(protocol: Protocol) -> None:
    worker, other = protocol.register(), protocol.register()
    one, two, three = claimed(protocol, worker, 3)
    assert protocol.settle(worker, done(one, child(1))) == {one["id"]: "settled"}
    assert protocol.settle(worker, done(one, child(1))) == {one["id"]: "already"}
    assert protocol.settle(other, done(two, child(2))) == {two["id"]: "lost"}
    stale = {**three, "attempt": three["attempt"] - 1}
    answers = protocol.settle(worker, done(stale, child(3)), done(three, child(4)))
    assert answers == {three["id"]: "settled"}
    assert names(protocol) == ["1", "4"]


def test_what_is_said_twice_in_a_batch_enqueues_once(protocol: Protocol) -> None:
    worker = protocol.register()
    [job] = claimed(protocol, worker, 1)
    assert protocol.settle(worker, done(job, child(1)), done(job, child(2))) == {job["id"]: "settled"}
    assert names(protocol) == ["1"]


def test_a_row_that_is_locked_enqueues_nothing_until_it_is_settled(dsn: str, protocol: Protocol) -> None:
    worker = protocol.register()
    [job] = claimed(protocol, worker, 1)
    with psycopg.connect(dsn) as holder:
        holder.execute("select from shiftwork.jobs where id = %s for update", (job["id"],))
        assert protocol.settle(worker, done(job, child(1))) == {job["id"]: "busy"}
        assert names(protocol) == []
    assert protocol.settle(worker, done(job, child(1))) == {job["id"]: "settled"}
    assert names(protocol) == ["1"]


@pytest.mark.parametrize("ending", ["failed", "cancelled", "scheduled"])
def test_what_any_other_ending_carries_is_dropped(protocol: Protocol, ending: str) -> None:
    worker = protocol.register()
    [job] = claimed(protocol, worker, 1)
    outcome = done(job, child(1), state=ending, error=ERROR, delay=5)
    assert protocol.settle(worker, outcome) == {job["id"]: "settled"}
    assert names(protocol) == []


@pytest.mark.parametrize(
    "bad",
    [
        {"task": "", "payload": {}},
        {"task": "child", "payload": [1]},
        {"task": "child", "max_attempts": 0},
        {"task": "child", "payload": {"text": "x" * 2_000_000}},
        {"task": "child", "unique_key": 7},
        "no job",
        None,
    ],
)
def test_a_job_that_cannot_be_enqueued_refuses_only_its_own_outcome_and_says_why(
    protocol: Protocol, bad: Any
) -> None:
    worker = protocol.register()
    one, two, three = claimed(protocol, worker, 3)
    answers = answered(protocol, worker, done(one, child(1)), done(two, child(2), bad), done(three, child(3)))
    answer, problem = answers.pop(two["id"])
    assert answer == "refused"
    assert problem
    assert answers == {one["id"]: ("settled", None), three["id"]: ("settled", None)}
    assert names(protocol) == ["1", "3"]
    assert protocol.state(two["id"]) == "running"
    assert protocol.settle(worker, done(two)) == {two["id"]: "settled"}


def test_no_list_of_jobs_is_no_list(protocol: Protocol) -> None:
    worker = protocol.register()
    one, two = claimed(protocol, worker, 2)
    answers = answered(protocol, worker, {**done(one), "jobs": None}, {**done(two), "jobs": 5})
    assert answers[one["id"]] == ("settled", None)
    assert answers[two["id"]][0] == "refused"


def test_the_key_of_a_job_that_ends_is_free_for_what_it_carries(protocol: Protocol) -> None:
    worker = protocol.register()
    options = {"unique_key": "the one", "unique_scope": "unfinished"}
    first = protocol.enqueue("child", {"n": 1}, **options)
    [job] = protocol.claim(worker).jobs
    assert protocol.settle(worker, done(job, child(2, **options))) == {first: "settled"}
    assert names(protocol) == ["2"]
    assert protocol.value("select count(*) from {}.jobs where held_key = 'the one'") == 1


def test_a_settlement_that_is_rolled_back_takes_its_jobs_along(protocol: Protocol) -> None:
    worker = protocol.register()
    [job] = claimed(protocol, worker, 1)
    with protocol.connection.transaction(force_rollback=True):
        assert protocol.settle(worker, done(job, child(1))) == {job["id"]: "settled"}
    assert names(protocol) == []
    assert protocol.state(job["id"]) == "running"


def test_an_ending_that_there_is_not_says_so(protocol: Protocol) -> None:
    worker = protocol.register()
    [job] = claimed(protocol, worker, 1)
    answers = answered(protocol, worker, {"id": job["id"], "attempt": 1, "state": "sideways"})
    assert answers == {job["id"]: ("refused", '"sideways" is no way for an attempt to end')}


def test_a_settle_that_was_installed_without_problems_is_made_anew(protocol: Protocol) -> None:
    from shiftwork.migrate import migrate  # noqa: PLC0415

    protocol.rows("drop function {}.settle(jsonb)")
    protocol.rows(
        "create function {}.settle(request jsonb) returns table (id bigint, answer text, state shiftwork.job_state)"
        " language sql as $$ select 1, 'settled', 'ready'::shiftwork.job_state $$"
    )
    protocol.rows(
        "update {}.settings set value = value || '{{\"fingerprint\": \"other\"}}' where name = 'protocol'"
    )
    migrate(protocol.connection)
    worker = protocol.register()
    [job] = claimed(protocol, worker, 1)
    assert answered(protocol, worker, done(job)) == {job["id"]: ("settled", None)}


def test_a_retry_that_comes_too_late_is_written_in_one_go_with_another_that_does_not(
    protocol: Protocol,
) -> None:
    worker = protocol.register()
    late, again = protocol.enqueue(expires_in=100), protocol.enqueue()
    held = protocol.claim(worker, want=2).held
    protocol.connection.execute(
        b"create sequence public.writes;"
        b"create function public.count_it() returns trigger language plpgsql as"
        b" $$ begin perform nextval('public.writes'); return new; end $$;"
        b"create trigger count_it before insert on shiftwork.history for each row execute function public.count_it()"
    )
    told = [
        {"id": job, "attempt": attempt, "state": "scheduled", "delay": 1000, "error": ERROR}
        for job, attempt in held
    ]
    assert set(protocol.settle(worker, *told).values()) == {"settled"}
    assert (protocol.state(late), protocol.state(again)) == ("failed", "scheduled")
    assert protocol.value("select last_value from public.writes") == 1, "the batch was taken apart"


def test_a_batch_that_is_completed_is_answered_for_in_one_row_if_that_will_do(protocol: Protocol) -> None:
    worker = protocol.register()
    first, second, third, fourth = claimed(protocol, worker, 4)

    def brief(*outcomes: Row) -> list[tuple[object, ...]]:
        request = json.dumps({"worker": worker, "brief": True, "outcomes": outcomes})
        rows = protocol.rows("select id, answer, state from {}.settle(%s) order by id", request)
        return [(row["id"], row["answer"], row["state"]) for row in rows]

    assert brief(done(first)) == [(None, "settled", "completed")]
    answers = [(first["id"], "already", None), (second["id"], "settled", "completed")]
    assert brief(done(first), done(second)) == answers
    assert brief(done(third, state="failed")) == [(third["id"], "settled", "failed")]
    bad = done(fourth, {"task": ""})
    assert brief(bad) == [(fourth["id"], "refused", None)]
    [fifth] = claimed(protocol, worker, 1)
    assert brief(bad, done(fifth)) == [(fourth["id"], "refused", None), (fifth["id"], "settled", "completed")]
    assert brief({**done(fourth), "id": "that one"}) == [(None, "refused", None)]
    ended = [protocol.state(job["id"]) for job in (first, second, third, fourth)]
    assert ended == ["completed", "completed", "failed", "running"]
