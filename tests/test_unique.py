"""Unique keys: scopes, actions, merging, and newcomers who meet their twin at the worst moment."""

from __future__ import annotations

from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from tests.concurrency import elsewhere, in_thread, waiting_for_lock
from tests.harness import Protocol, Row

STATES = ["ready", "scheduled", "running", "retrying", "completed", "failed", "cancelled", "expired"]
PENDING = {"ready", "scheduled"}
FINISHED = {"completed", "failed", "cancelled", "expired"}


def keyed(protocol: Protocol, payload: Row | None = None, key: str = "key", **options: object) -> Row:
    [answer] = protocol.enqueue_many(
        [{"task": "greet", "payload": payload or {}, "unique_key": key, **options}]
    )
    return answer


def outcome(protocol: Protocol, payload: Row | None = None, **options: Any) -> str:
    found = keyed(protocol, payload, **options)["outcome"]
    assert isinstance(found, str)
    return found


def twin_in(protocol: Protocol, state: str, scope: str, key: str = "key") -> int:
    """A job with the key, brought to a state as a worker or a person would."""
    later = {"delay": 3600} if state == "scheduled" else {"expires_in": 60} if state == "expired" else {}
    job = int(keyed(protocol, {"n": 1}, key=key, queue=state, unique_scope=scope, **later)["id"])
    worker = protocol.register(lease=86400)
    match state:
        case "cancelled":
            protocol.cancel(job)
        case "expired":
            protocol.shift_clock(timedelta(minutes=2))
            protocol.expire()
        case "running" | "retrying" | "completed" | "failed":
            protocol.claim(worker, state)
            if state != "running":
                ending = {"retrying": "scheduled"}.get(state, state)
                error = None if state == "completed" else {"code": "X", "message": "x"}
                told = {"id": job, "attempt": 1, "state": ending, "error": error, "delay": 600}
                assert protocol.settle(worker, told) == {job: "settled"}
    return job


def holds(scope: str, state: str) -> bool:
    """Whether a job in this state keeps its key."""
    return {"pending": state in PENDING, "unfinished": state not in FINISHED, "window": True}[scope]


@pytest.mark.parametrize("scope", ["pending", "unfinished", "window"])
def test_a_key_is_held_as_long_as_its_scope_says(protocol: Protocol, scope: str) -> None:
    # spec: D-20, QU-23, A-7
    for state in STATES:
        job = twin_in(protocol, state, scope, key=state)
        answer = keyed(protocol, {"n": 2}, key=state, unique_scope=scope)
        assert (answer["id"] == job) is holds(scope, state), state
        assert answer["outcome"] == ("existing" if holds(scope, state) else "created"), state
        assert protocol.job(job)["payload"] == {"n": 1}


@pytest.mark.parametrize("action", ["replace", "merge"])
def test_only_a_pending_twin_is_replaced_or_merged(protocol: Protocol, action: str) -> None:
    # spec: D-20, ST-4
    for state in STATES:
        job = twin_in(protocol, state, "pending", key=state)
        options: Row = {"unique_action": action, "merge": "sum", "priority": 7, "queue": "other"}
        answer = keyed(protocol, {"n": 2}, key=state, **options)
        if state in PENDING:
            assert (answer["id"], answer["outcome"]) == (job, action + "d")
            now = protocol.live(job)
            assert now["payload"] == {"n": 3 if action == "merge" else 2}
            assert (now["priority"], now["queue"], now["state"]) == (7, "other", "ready")
        else:
            assert answer["outcome"] == "created", state
            assert protocol.job(job)["payload"] == {"n": 1}


@pytest.mark.parametrize("scope", ["pending", "unfinished", "window"])
def test_the_same_job_is_existing_and_a_different_one_is_refused(protocol: Protocol, scope: str) -> None:
    # spec: HO-45, A-7, D-20
    for state in STATES:
        job = twin_in(protocol, state, scope, key=state)
        options: Row = {"key": state, "unique_scope": scope, "unique_action": "refuse", "queue": state}
        if not holds(scope, state):
            assert outcome(protocol, {"n": 2}, **options) == "created", state
            continue
        same = keyed(protocol, {"n": 1}, **options)
        assert (same["id"], same["outcome"]) == (job, "existing")
        different: list[Row] = [
            {"payload": {"n": 2}},
            {"queue": "q"},
            {"priority": 1},
            {"tags": ["t"]},
            {"max_attempts": 3},
        ]
        for change in different:
            with pytest.raises(psycopg.Error) as refused:
                keyed(protocol, **{"payload": {"n": 1}, **options, **change})
            assert refused.value.sqlstate == "SW002"
            assert f"job {job}" in str(refused.value)


def test_a_window_ends_and_a_key_belongs_to_its_task(protocol: Protocol) -> None:
    # spec: QU-23, A-7, HO-45
    first = twin_in(protocol, "completed", "window")
    assert keyed(protocol, unique_scope="window", unique_window=3600)["id"] == first
    assert protocol.enqueue("another", unique_key="key", unique_scope="window") != first
    protocol.shift_clock(timedelta(hours=2))
    assert keyed(protocol, unique_scope="window", unique_window=7201)["id"] == first
    second = keyed(protocol, unique_scope="window", unique_window=3600)
    assert second["outcome"] == "created"
    assert keyed(protocol, unique_scope="window", unique_window=3600)["id"] == second["id"]


def test_the_window_is_a_day_unless_said_otherwise(protocol: Protocol) -> None:
    # spec: A-7
    twin_in(protocol, "completed", "window")
    protocol.shift_clock(timedelta(hours=23))
    assert outcome(protocol, unique_scope="window") == "existing"
    protocol.shift_clock(timedelta(hours=25))
    assert outcome(protocol, unique_scope="window") == "created"


def test_a_merged_job_takes_the_place_of_the_newcomer(protocol: Protocol) -> None:
    # spec: ST-4
    merged = keyed(protocol, {"ids": [1]})["id"]
    other = protocol.enqueue("other")
    assert outcome(protocol, {"ids": [2]}, unique_action="merge", merge="union") == "merged"
    jobs = protocol.claim(protocol.register()).jobs
    assert [job["id"] for job in jobs] == [other, merged]
    assert jobs[1]["payload"] == {"ids": [1, 2]}


def test_replacing_can_put_a_job_off_and_bring_it_forward(protocol: Protocol) -> None:
    # spec: ST-4, D-20
    job = keyed(protocol)["id"]
    assert outcome(protocol, unique_action="replace", delay=3600) == "replaced"
    assert protocol.state(job) == "scheduled"
    assert outcome(protocol, unique_action="replace") == "replaced"
    assert protocol.state(job) == "ready"


def test_an_argument_is_merged_by_its_operator(protocol: Protocol) -> None:
    # spec: ST-4, D-20
    january, spring = "[2026-01-01,2026-02-01)", "[2026-01-15,2026-03-01)"
    cases: list[tuple[str, object, object, object]] = [
        ("replace", 1, 2, 2),
        ("deep", {"a": {"b": 1, "c": 2}}, {"a": {"b": 9, "d": 3}}, {"a": {"b": 9, "c": 2, "d": 3}}),
        ("deep", {"a": 1}, [2], [2]),
        ("append", [1, 2], [2, 3], [1, 2, 2, 3]),
        ("append", 1, [2], [1, 2]),
        ("union", [3, 1], [1, 2], [3, 1, 2]),
        ("union", [], [], []),
        ("min", 2, 1.5, 1.5),
        ("min", "2026-01-02", "2026-01-01", "2026-01-01"),
        ("max", 2, 10, 10),
        ("max", "2026-01-02", "2026-01-01", "2026-01-02"),
        ("sum", 1.5, 2, 3.5),
        ("range:int4range", "[1,3)", "[7,9)", "[1,9)"),
        ("range:daterange", january, spring, "[2026-01-01,2026-03-01)"),
        ("multirange:int4multirange", "{[1,3)}", "{[7,9)}", "{[1,3),[7,9)}"),
        ("multirange:int4multirange", "{[1,3)}", "{[2,9)}", "{[1,9)}"),
        ("sum", None, 2, 2),
        ("sum", 1, None, 1),
        ("union", None, None, None),
    ]
    for number, (operator, old, new, merged) in enumerate(cases):
        key = str(number)
        job = keyed(protocol, {"x": old, "kept": 1}, key)["id"]
        options: Row = {"unique_action": "merge", "merge": {"x": operator}}
        assert outcome(protocol, {"x": new, "fresh": 2}, key=key, **options) == "merged"
        assert protocol.live(job)["payload"] == {"x": merged, "kept": 1, "fresh": 2}, operator


def test_a_merge_that_makes_no_sense_is_refused_and_changes_nothing(protocol: Protocol) -> None:
    # spec: ST-4
    job = keyed(protocol, {"x": "one"})["id"]
    cases: list[tuple[object, object, str]] = [
        ({"x": "explode"}, 2, "SW001"),
        ({"x": "range:text"}, 2, "SW001"),
        ({"x": "range:int4multirange"}, 2, "SW001"),
        ({"x": "multirange:int4range"}, 2, "SW001"),
        ({"x": "range:int4range"}, "two", "SW001"),
        ({"x": "sum"}, 2, "SW001"),
        ({"x": "min"}, 2, "SW001"),
        ({"x": "function:pg_read_file"}, 2, "SW001"),
        ("function:pg_catalog.jsonb_concat", 2, "SW001"),
        (5, 2, "SW001"),
        (["sum"], 2, "SW001"),
    ]
    for merge, value, code in cases:
        with pytest.raises(psycopg.Error) as refused:
            keyed(protocol, {"x": value}, unique_action="merge", merge=merge)
        assert refused.value.sqlstate == code, merge
    assert protocol.live(job)["payload"] == {"x": "one"}


def test_a_function_of_the_users_merges_only_where_the_registry_says_so(protocol: Protocol) -> None:
    # spec: ST-4, ST-2
    protocol.rows(
        "create function public.join_names(old jsonb, new jsonb) returns jsonb language sql as "
        "$$ select jsonb_build_object('name', (old ->> 'name') || ' ' || (new ->> 'name')) $$"
    )
    protocol.rows(
        "insert into {}.tasks (name, unique_action, merge) "
        "values ('greet', 'merge', '\"function:public.join_names\"')"
    )
    job = keyed(protocol, {"name": "Ada"})["id"]
    assert outcome(protocol, {"name": "Lovelace"}) == "merged"
    assert protocol.live(job)["payload"] == {"name": "Ada Lovelace"}
    protocol.rows("select {}.enqueue('greet', '{{\"name\": \"Byron\"}}', unique_key => 'key')")
    assert protocol.live(job)["payload"] == {"name": "Ada Lovelace Byron"}
    with pytest.raises(psycopg.Error) as refused:
        keyed(protocol, {"name": "x"}, merge="function:public.join_names")
    assert refused.value.sqlstate == "SW001"


def test_scope_action_window_and_operators_come_from_the_registry(protocol: Protocol) -> None:
    # spec: ST-1, ST-4
    protocol.rows(
        "insert into {}.tasks (name, unique_scope, unique_window) values ('greet', 'window', '1 hour')"
    )
    job = twin_in(protocol, "completed", "window")
    assert keyed(protocol)["id"] == job
    protocol.shift_clock(timedelta(hours=2))
    assert outcome(protocol) == "created"

    protocol.rows(
        "update {}.tasks set unique_scope = 'pending', unique_action = 'merge', merge = '{{\"n\": \"sum\"}}'"
    )
    pending = keyed(protocol, {"n": 1}, key="sums")["id"]
    assert keyed(protocol, {"n": 4}, key="sums")["outcome"] == "merged"
    assert protocol.live(pending)["payload"] == {"n": 5}


def test_duplicates_inside_a_batch_become_one_job(protocol: Protocol) -> None:
    # spec: QU-23, D-20
    def wish(key: str, n: int, **more: object) -> Row:
        return {"task": "greet", "payload": {"n": n}, "unique_key": key, **more}

    answers = protocol.enqueue_many(
        [wish("b", 1), wish("a", 2), {"task": "greet"}, wish("b", 3), wish("a", 4)]
    )
    assert [one["outcome"] for one in answers] == ["created", "created", "created", "existing", "existing"]
    assert answers[0]["id"] == answers[3]["id"]
    assert protocol.live(answers[0]["id"])["payload"] == {"n": 1}

    sums = protocol.enqueue_many(wish("s", n, unique_action="merge", merge="sum") for n in (1, 2, 3))
    assert [one["outcome"] for one in sums] == ["created", "merged", "merged"]
    assert protocol.live(sums[0]["id"])["payload"] == {"n": 6}

    window = protocol.enqueue_many(wish("w", n, unique_scope="window") for n in (1, 2))
    assert [one["outcome"] for one in window] == ["created", "existing"]


def test_sql_says_what_happened_and_a_plain_insert_may_skip_a_twin(protocol: Protocol) -> None:
    # spec: D-20, ST-4, D-19
    call = "select id, outcome from {}.enqueue('greet', '{{}}', unique_key => 'key')"
    [first], [second] = protocol.rows(call), protocol.rows(call)
    assert (first["outcome"], second["outcome"], first["id"] == second["id"]) == ("created", "existing", True)

    protocol.rows("insert into {}.jobs (task, unique_key) values ('greet', 'key') on conflict do nothing")
    with pytest.raises(psycopg.errors.UniqueViolation):
        protocol.rows("insert into {}.jobs (task, unique_key) values ('greet', 'key')")
    protocol.rows("insert into {}.jobs (task, unique_key) values ('greet', 'other')")
    assert outcome(protocol, key="other") == "existing"
    assert protocol.value("select count(*) from {}.jobs") == 2


@pytest.mark.parametrize("scope", ["pending", "unfinished", "window"])
@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_parallel_transactions_make_one_job_and_no_error(
    dsn: str, protocol: Protocol, scope: str, ending: str
) -> None:
    # spec: QU-23, D-20
    with elsewhere(dsn) as other:
        answers: Future[Row]
        with protocol.connection.transaction(force_rollback=ending == "rollback"):
            first = keyed(protocol, {"n": 1}, unique_scope=scope)
            answers = in_thread(keyed, other, {"n": 2}, unique_scope=scope)
            with psycopg.connect(dsn, autocommit=True) as watcher:
                waiting_for_lock(watcher, other.connection)
        second = answers.result(timeout=30)
    if ending == "commit":
        assert (second["id"], second["outcome"]) == (first["id"], "existing")
    else:
        assert second["outcome"] == "created"
    assert protocol.value("select count(*) from {}.jobs") == 1


@pytest.mark.parametrize(
    "options",
    [
        {"unique_scope": "pending"},
        {"unique_scope": "unfinished"},
        {"unique_scope": "window"},
        {"unique_scope": "pending", "unique_action": "replace"},
        {"unique_scope": "pending", "unique_action": "merge", "merge": "sum"},
    ],
    ids=str,
)
def test_batches_with_the_same_keys_in_opposite_orders_never_deadlock(
    dsn: str, protocol: Protocol, options: Row
) -> None:
    # spec: QU-23, D-20
    # fault: F39
    wishes = [
        {"task": f"task{n % 3}", "payload": {"n": 1}, "unique_key": f"key{n}", **options} for n in range(40)
    ]

    def repeat(one: Protocol, batch: list[Row]) -> list[str]:
        return [answer["outcome"] for _ in range(15) for answer in one.enqueue_many(batch)]

    with elsewhere(dsn) as a, elsewhere(dsn) as b, elsewhere(dsn) as c:
        running = [
            in_thread(repeat, a, wishes),
            in_thread(repeat, b, wishes[::-1]),
            in_thread(repeat, c, wishes[1::2] + wishes[::2]),
        ]
        outcomes = [outcome for future in running for outcome in future.result(timeout=60)]
    assert outcomes.count("created") == 40
    assert protocol.value("select count(*) from {}.jobs") == 40
    if options.get("unique_action") == "merge":
        assert protocol.value("select sum((payload ->> 'n')::int) from {}.jobs") == 3 * 15 * 40


@pytest.mark.parametrize("way", ["reap", "release", "retry", "stray", "revive"])
def test_a_job_that_comes_back_never_collides_with_its_successor(protocol: Protocol, way: str) -> None:
    # spec: D-20, QU-23
    first = keyed(protocol)["id"]
    worker = protocol.register()
    claimed = protocol.claim(worker)
    second = keyed(protocol)["id"]
    assert second != first
    match way:
        case "reap":
            protocol.lapse(worker)
            assert protocol.reap() == {first: "ready"}
        case "release":
            assert protocol.release(worker, claimed.held) == {first: "released"}
        case "retry":
            error = {"code": "X"}
            outcome = {"id": first, "attempt": 1, "state": "scheduled", "error": error, "delay": 0}
            assert protocol.settle(worker, outcome) == {first: "settled"}
        case "stray":
            assert protocol.heartbeat(worker, answered=claimed.report["claim"])["strays"] == [first]
        case _:
            protocol.complete(worker, claimed.jobs)
            assert protocol.revive(first) == {first: "revived"}
    assert keyed(protocol)["id"] == second
    again = protocol.claim(protocol.register()).jobs
    assert sorted(job["id"] for job in again) == [first, second]


def test_a_revived_job_takes_its_key_again_if_it_is_free(protocol: Protocol) -> None:
    # spec: D-20
    job = twin_in(protocol, "completed", "unfinished")
    protocol.revive(job)
    assert keyed(protocol, unique_scope="unfinished")["id"] == job


@pytest.mark.parametrize("action", ["return", "replace", "merge", "refuse"])
def test_a_newcomer_waits_for_the_claim_that_takes_its_twin(
    dsn: str, protocol: Protocol, action: str
) -> None:
    # spec: D-20
    worker = protocol.register()
    with psycopg.connect(dsn, autocommit=True) as watcher, elsewhere(dsn) as other:
        for key, rolled_back in (("kept", False), ("undone", True)):
            first = keyed(protocol, {"n": 1}, key, queue=key)["id"]
            options: Row = {"queue": key, "unique_action": action, "merge": "sum"}
            with protocol.connection.transaction(force_rollback=rolled_back):
                protocol.claim(worker, key)
                answer = in_thread(keyed, other, {"n": 1}, key, **options)
                waiting_for_lock(watcher, other.connection)
            told = answer.result(timeout=30)
            if rolled_back:
                existing = {"replace": "replaced", "merge": "merged"}.get(action, "existing")
                assert (told["id"], told["outcome"]) == (first, existing)
            else:
                assert told["outcome"] == "created"
                assert protocol.live(first)["payload"] == {"n": 1}


@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_a_twin_that_is_moving_rooms_is_seen_in_one_of_them(
    dsn: str, protocol: Protocol, ending: str
) -> None:
    # spec: QU-23, D-20
    job = twin_in(protocol, "running", "window")
    [row] = protocol.rows("select id, attempt, worker from {}.jobs")
    with elsewhere(dsn) as other:
        with protocol.connection.transaction(force_rollback=ending == "rollback"):
            protocol.complete(row["worker"], [row])
            assert keyed(other, unique_scope="window")["id"] == job
        assert keyed(other, unique_scope="window")["id"] == job
        unfinished = outcome(protocol, unique_scope="unfinished")
        assert unfinished == ("created" if ending == "commit" else "existing")


def test_settling_and_enqueueing_in_parallel_never_make_two_within_a_window(
    dsn: str, protocol: Protocol
) -> None:
    # spec: QU-23, D-20
    def send(one: Protocol) -> set[int]:
        return {keyed(one, key=f"key{n % 10}", unique_scope="window")["id"] for n in range(200)}

    def work(one: Protocol) -> None:
        worker = one.register()
        done = 0
        while done < 10:
            jobs = one.claim(worker).jobs
            one.complete(worker, jobs)
            done += len(jobs)

    with elsewhere(dsn) as a, elsewhere(dsn) as b, elsewhere(dsn) as c:
        senders = [in_thread(send, a), in_thread(send, b)]
        working = in_thread(work, c)
        seen = senders[0].result(timeout=60) | senders[1].result(timeout=60)
        working.result(timeout=60)
    assert len(seen) == 10
    assert protocol.value("select count(*) from {}.all_jobs") == 10


def test_keys_of_the_greatest_length_and_of_any_letters_are_fine(protocol: Protocol) -> None:
    # spec: A-7
    for key in ("k" * 255, "ключ " * 20, "' \" \\ % $1 {} \n"):
        assert outcome(protocol, key=key) == "created"
        assert outcome(protocol, key=key) == "existing"
