"""Enqueueing: one, many, from SQL and by plain INSERT, with what the registry knows."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from tests.concurrency import elsewhere
from tests.harness import Protocol, Row


def sqlstate(protocol: Protocol, text: Any, *params: object) -> str | None:
    with pytest.raises(psycopg.Error) as refused:
        protocol.rows(text, *params)
    return refused.value.sqlstate


def the_one(protocol: Protocol) -> Row:
    [row] = protocol.rows("select * from {}.jobs")
    return row


def register_task(protocol: Protocol) -> None:
    protocol.rows(
        "insert into {}.tasks (name, queue, priority, max_attempts) values ('mail', 'letters', -3, 9)"
    )


WAYS = {
    "batch": "select {}.enqueue_many(jsonb_build_array(jsonb_build_object('task', %s::text)))",
    "function": "select {}.enqueue(%s)",
    "literal": "select {}.enqueue(%s, '{{}}')",
    "null": "select {}.enqueue(%s, null)",
    "one": "select {}.enqueue_one(%s, '{{}}', null, null, null)",
    "one of nothing": "select {}.enqueue_one(%s, null, null, null, null)",
    "document": "select {}.enqueue(%s, jsonb_build_object())",
    "insert": "insert into {}.jobs (task) values (%s)",
    "nulls": "insert into {}.jobs (task, queue, priority, max_attempts) values (%s, null, null, null)",
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_left_out_comes_from_the_registry_or_is_ordinary(protocol: Protocol, way: str) -> None:
    # spec: SH-5, ST-1, D-19, HO-5
    register_task(protocol)
    text: Any = WAYS[way]
    protocol.rows(text, "mail")
    row = the_one(protocol)
    assert (row["queue"], row["priority"], row["max_attempts"], row["payload"]) == ("letters", -3, 9, {})
    protocol.rows("delete from {}.jobs")
    protocol.rows(text, "unheard")
    row = the_one(protocol)
    assert (row["queue"], row["priority"], row["max_attempts"], row["state"]) == ("default", 0, 5, "ready")
    assert (row["run_at"], row["attempt"], row["tags"]) == (row["created_at"], 0, [])


@pytest.mark.parametrize("way", WAYS)
def test_while_nobody_has_registered_anything_all_is_ordinary(protocol: Protocol, way: str) -> None:
    # spec: SH-5, D-19
    text: Any = WAYS[way]
    protocol.rows(text, "mail")
    row = the_one(protocol)
    assert (row["queue"], row["priority"], row["max_attempts"], row["state"]) == ("default", 0, 5, "ready")
    assert (row["task"], row["payload"], row["tags"]) == ("mail", {}, [])
    assert (row["run_at"], row["attempt"], row["failures"]) == (row["created_at"], 0, 0)


@pytest.mark.parametrize("way", WAYS)
def test_what_is_registered_holds_for_whoever_enqueues_from_its_commit_on(
    dsn: str, protocol: Protocol, way: str
) -> None:
    # spec: ST-1
    text: Any = WAYS[way]

    def made() -> tuple[object, ...]:
        protocol.rows("delete from {}.jobs")
        protocol.rows(text, "mail")
        row = the_one(protocol)
        return row["queue"], row["priority"], row["max_attempts"]

    assert made() == ("default", 0, 5)
    with psycopg.connect(dsn) as connection:
        operator = Protocol(connection)
        register_task(operator)
        operator.rows(text, "mail")  # who registers it sees it at once
        assert operator.value("select max(priority) from {}.jobs where queue = 'letters'") == -3
        assert made() == ("default", 0, 5)
        connection.rollback()
        assert made() == ("default", 0, 5)
        register_task(operator)
        connection.commit()
    assert made() == ("letters", -3, 9)
    protocol.rows("update {}.tasks set queue = null, max_attempts = null")
    assert made() == ("default", -3, 5)
    protocol.rows("delete from {}.tasks")
    assert made() == ("default", 0, 5)


def test_a_priority_that_somebody_registers_is_found_though_all_else_is_said(protocol: Protocol) -> None:
    # spec: SH-5
    def made(priority: int | None) -> tuple[object, ...]:
        job = protocol.value("select {}.enqueue_one('mail', '{{}}', 'mine', %s, 7)", priority)
        row = protocol.live(job)
        return row["queue"], row["priority"], row["max_attempts"]

    protocol.rows("insert into {}.tasks (name, queue, max_attempts) values ('mail', 'letters', 9)")
    assert made(None) == ("mine", 0, 7)
    protocol.rows("update {}.tasks set priority = -3")
    assert made(None) == ("mine", -3, 7)
    assert made(2) == ("mine", 2, 7)


def test_tasks_that_come_by_replication_are_looked_for_as_well(protocol: Protocol) -> None:
    # spec: ST-1
    with protocol.connection.transaction():
        protocol.rows("set local session_replication_role = replica")
        register_task(protocol)
    protocol.rows("select {}.enqueue('mail', '{{}}')")
    assert the_one(protocol)["queue"] == "letters"


def looks(protocol: Protocol) -> int:
    """How many rows of the registry this transaction has read."""
    count = protocol.value(
        "select seq_tup_read + idx_tup_fetch from pg_stat_xact_user_tables"
        " where schemaname = 'shiftwork' and relname = 'tasks'"
    )
    assert isinstance(count, int)
    return count


@pytest.mark.parametrize("way", ["literal", "one"])
def test_a_registry_of_many_tasks_is_not_read_whole_by_every_enqueue(protocol: Protocol, way: str) -> None:
    protocol.rows(
        "insert into {}.tasks (name, queue) select 'task ' || number, 'letters' from generate_series(1, 300) as number"
    )
    protocol.rows("analyze {}.tasks")
    text: Any = WAYS[way]
    with protocol.connection.transaction():
        for _ in range(10):  # the first of them with a plan of their own
            before = looks(protocol)
            protocol.rows(text, "task 250")
            assert looks(protocol) - before == 1


def test_the_registry_is_not_read_by_an_enqueue_that_says_all_of_it(protocol: Protocol) -> None:
    protocol.rows("insert into {}.tasks (name, queue, max_attempts) values ('mail', 'letters', 9)")
    # A plan made for what is said could leave out what is not needed.
    protocol.rows("set plan_cache_mode = force_generic_plan")
    with protocol.connection.transaction():
        before = looks(protocol)
        protocol.rows("select {}.enqueue_one('mail', '{{}}', 'mine', null, 7)")  # nobody has said a priority
        assert looks(protocol) == before
        protocol.rows("update {}.tasks set priority = -3")
        before = looks(protocol)
        protocol.rows("select {}.enqueue_one('mail', '{{}}', 'mine', 2, 7)")
        assert looks(protocol) == before
        protocol.rows("select {}.enqueue_one('mail', '{{}}', 'mine', null, 7)")
        assert looks(protocol) == before + 1


@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize(
    "text",
    ["select {}.enqueue('mail', %s::text)", "select {}.enqueue_one('mail', %s, 'default', 0, 5)"],
)
def test_what_is_too_large_is_refused_before_it_is_written(
    protocol: Protocol, text: Any, registered: bool
) -> None:
    # spec: A-9
    if registered:
        register_task(protocol)
    size: Any = "select pg_total_relation_size('shiftwork.jobs')"
    before = protocol.value(size)
    for _ in range(3):
        assert sqlstate(protocol, text, json.dumps({"a": "x" * 2_000_000})) == "SW004"
    assert protocol.value(size) == before
    assert sqlstate(protocol, text, '{"n": [' + ", ".join(["1e131000"] * 9) + "]}") == "SW004"
    protocol.rows(text, json.dumps({"a": "x" * 900_000}))
    assert len(the_one(protocol)["payload"]["a"]) == 900_000


def test_sql_and_python_enqueue_the_same_row(protocol: Protocol) -> None:
    # spec: D-19, SH-5
    due = datetime(2990, 1, 1, tzinfo=UTC)
    gone = due + timedelta(days=1)
    payload = {"to": "ada@example.org", "n": [1, {"deep": None}]}
    protocol.enqueue(
        "mail",
        payload,
        queue="q",
        priority=4,
        run_at=due.isoformat(),
        expires_at=gone.isoformat(),
        max_attempts=7,
        tags=["a", "b"],
        keep=3,
    )
    protocol.rows(
        "select {}.enqueue('mail', %s, queue => 'q', priority => 4, run_at => %s, expires_at => %s, "
        "max_attempts => 7, tags => array['a', 'b'], keep => 3)",
        json.dumps(payload),
        due,
        gone,
    )
    protocol.rows(
        "insert into {}.jobs (task, payload, queue, priority, run_at, expires_at, max_attempts, tags, keep) "
        "values ('mail', %s, 'q', 4, %s, %s, 7, array['a', 'b'], 3)",
        json.dumps(payload),
        due,
        gone,
    )
    rows = protocol.rows("select * from {}.jobs order by id")
    for row in rows:
        del row["id"], row["created_at"]
    assert rows[0] == rows[1] == rows[2]
    assert rows[0]["state"] == "scheduled"


def test_an_enqueue_rides_in_the_callers_transaction(dsn: str, protocol: Protocol) -> None:
    # spec: SH-5, D-19
    with elsewhere(dsn) as other:
        with protocol.connection.transaction(force_rollback=True):
            protocol.enqueue()
            protocol.rows("select {}.enqueue('greet')")
            protocol.rows("insert into {}.jobs (task) values ('greet')")
            assert other.claim(other.register()).jobs == []
        assert protocol.value("select count(*) from {}.jobs") == 0
        with protocol.connection.transaction():
            job = protocol.enqueue()
        assert [one["id"] for one in other.claim(other.register()).jobs] == [job]


@pytest.mark.parametrize(
    "when", [{"run_at": "1999-01-01T00:00:00Z"}, {"delay": -3600}, {"run_at": "-infinity"}, {"delay": 0}, {}]
)
def test_nobody_jumps_the_queue_with_a_time_that_has_passed(protocol: Protocol, when: Row) -> None:
    # spec: QU-24
    earlier = protocol.enqueue()
    later = protocol.enqueue(**when)
    protocol.rows("insert into {}.jobs (task, run_at) values ('greet', '1999-01-01')")
    assert protocol.live(later)["state"] == "ready"
    jobs = protocol.claim(protocol.register()).jobs
    assert [job["id"] for job in jobs] == [earlier, later, later + 1]


@pytest.mark.parametrize("when", [{"delay": 60}, {"run_at": "2999-01-01T00:00:00Z"}])
def test_a_job_for_later_waits_for_its_time(protocol: Protocol, when: Row) -> None:
    # spec: QU-24, SH-5
    job = protocol.enqueue(**when)
    assert protocol.state(job) == "scheduled"
    assert protocol.claim(protocol.register()).jobs == []


def test_a_delay_and_a_deadline_are_counted_by_the_database(protocol: Protocol) -> None:
    # spec: D-26, QU-24
    row = protocol.live(protocol.enqueue(delay=90, expires_in=120))
    assert row["run_at"] - row["created_at"] == timedelta(seconds=90)
    assert row["expires_at"] - row["created_at"] == timedelta(seconds=120)


def test_a_batch_answers_for_each_by_its_place(protocol: Protocol) -> None:
    # spec: D-19
    wishes: list[Row] = [
        {"task": f"task{n}", "payload": {"n": n}, **({"unique_key": "same"} if n % 3 == 0 else {})}
        for n in range(30)
    ]
    answers = protocol.enqueue_many(wishes)
    assert [one["ordinal"] for one in answers] == list(range(1, 31))
    for wish, answer in zip(wishes, answers, strict=True):
        job = protocol.live(answer["id"])
        assert (job["task"], job["payload"], answer["outcome"]) == (wish["task"], wish["payload"], "created")


def test_ten_thousand_jobs_go_in_with_one_statement(protocol: Protocol) -> None:
    # spec: SH-5
    assert len(protocol.enqueue_many({"task": "greet", "payload": {"n": n}} for n in range(10_000))) == 10_000
    assert protocol.value("select count(distinct payload) from {}.jobs") == 10_000


REFUSED: list[Row] = [
    {},
    {"task": None},
    {"task": ""},
    {"task": "x" * 201},
    {"task": "t", "queue": ""},
    {"task": "t", "queue": "q" * 101},
    {"task": "t", "payload": []},
    {"task": "t", "payload": "text"},
    {"task": "t", "priority": 2**31},
    {"task": "t", "max_attempts": 0},
    {"task": "t", "run_at": "infinity"},
    {"task": "t", "run_at": "10000-01-01"},
    {"task": "t", "run_at": "soon"},
    {"task": "t", "delay": 1e300},
    {"task": "t", "expires_at": "infinity"},
    {"task": "t", "expires_at": "-infinity"},
    {"task": "t", "expires_in": 1e300},
    {"task": "t", "unique_key": ""},
    {"task": "t", "unique_key": "k" * 256},
    {"task": "t", "unique_key": "k", "unique_scope": "sometimes"},
    {"task": "t", "unique_key": "k", "unique_action": "explode"},
    {"task": "t", "unique_key": "k", "unique_scope": "unfinished", "unique_action": "replace"},
    {"task": "t", "unique_key": "k", "unique_scope": "window", "unique_action": "merge"},
]


def test_what_cannot_be_a_job_is_refused_whole(protocol: Protocol) -> None:
    # spec: SH-2, ST-2
    for wish in REFUSED:
        code = sqlstate(protocol, "select * from {}.enqueue_many(%s)", json.dumps([{"task": "good"}, wish]))
        assert code is not None
        assert code[:2] in {"22", "23", "SW"}, wish
    assert protocol.value("select count(*) from {}.jobs") == 0


def test_a_batch_is_an_array_of_objects(protocol: Protocol) -> None:
    for document in ("{}", "null", '"text"', "[1]", "[null]", "[[]]"):
        code = sqlstate(protocol, "select * from {}.enqueue_many(%s)", document)
        assert code is not None
        assert code[:2] in {"22", "23", "SW"}, document
    assert protocol.value("select count(*) from {}.jobs") == 0


def test_an_empty_batch_is_no_work(protocol: Protocol) -> None:
    assert protocol.enqueue_many([]) == []


@pytest.mark.parametrize("way", ["batch", "keyed", "merged", "function", "text", "insert"])
def test_a_payload_that_is_too_large_is_refused_at_enqueue_and_only_there(
    protocol: Protocol, way: str
) -> None:
    # spec: A-9
    def send(size: int) -> None:
        payload = {"text": "x" * size}
        match way:
            case "batch":
                protocol.enqueue("t", payload)
            case "keyed":
                protocol.enqueue("t", payload, unique_key=f"key{size}")
            case "merged":
                protocol.enqueue(
                    "t", {"text": "first"}, unique_key="k", unique_action="merge", merge="append"
                )
                protocol.enqueue("t", payload, unique_key="k", unique_action="merge", merge="append")
            case "function":
                protocol.rows("select {}.enqueue('t', %s::jsonb)", json.dumps(payload))
            case "text":
                protocol.rows("select {}.enqueue('t', %s)", json.dumps(payload))
            case _:
                protocol.rows("insert into {}.jobs (task, payload) values ('t', %s)", json.dumps(payload))

    send(1_000_000)
    with pytest.raises(psycopg.Error) as refused:
        send(1_048_577)
    assert refused.value.sqlstate == "SW004"
    assert "1048576" in str(refused.value)

    protocol.rows("update {}.settings set value = '3000000' where name = 'max_payload'")
    send(1_048_577)

    worker = protocol.register()
    jobs = protocol.claim(worker).jobs
    protocol.rows("update {}.settings set value = '8192' where name = 'max_payload'")
    answers = protocol.complete(worker, jobs, "y" * 2_000_000)
    assert set(answers.values()) == {"settled"}
    [failed] = {job["id"] for job in jobs if job["id"] == jobs[0]["id"]}
    assert protocol.revive(failed) == {failed: "revived"}


def test_a_refused_job_says_what_is_wrong_and_what_to_do(protocol: Protocol) -> None:
    with pytest.raises(psycopg.Error) as refused:
        protocol.enqueue("t", unique_key="k", unique_scope="never")
    assert refused.value.sqlstate == "SW001"
    assert '"never" is no scope' in (refused.value.diag.message_primary or "")
    assert "pending, unfinished, window" in (refused.value.diag.message_hint or "")


@pytest.mark.parametrize("key", [None, "k"])
def test_a_payload_that_is_null_is_an_empty_one(protocol: Protocol, key: str | None) -> None:
    # spec: D-19
    protocol.rows("select {}.enqueue('t', null, unique_key => %s)", key)
    protocol.rows(
        "select {}.enqueue_many(%s)", json.dumps([{"task": "u", "payload": None, "unique_key": key}])
    )
    assert [row["payload"] for row in protocol.rows("select payload from {}.jobs")] == [{}, {}]


@pytest.mark.parametrize("way", ["insert", "batch", "keyed", "function"])
def test_a_job_has_at_most_fifty_tags(protocol: Protocol, way: str) -> None:
    # spec: SH-2
    def send(tags: list[str]) -> None:
        match way:
            case "batch":
                protocol.enqueue(tags=tags)
            case "keyed":
                protocol.enqueue(tags=tags, unique_key=f"key{len(tags)}")
            case "function":
                protocol.rows("select {}.enqueue('greet', tags => %s)", tags)
            case _:
                protocol.rows("insert into {}.jobs (task, tags) values ('greet', %s)", tags)

    send(["t" * 300] * 50)
    with pytest.raises(psycopg.Error) as refused:
        send(["t" * 300] * 51)
    assert refused.value.sqlstate == "23514"


@pytest.mark.parametrize("key", [[], [None], 5, {}, True])
def test_a_key_that_is_no_text_is_refused_and_no_job_is_dropped(protocol: Protocol, key: object) -> None:
    # spec: D-20
    with pytest.raises(psycopg.Error) as refused:
        protocol.enqueue_many([{"task": "t"}, {"task": "t", "unique_key": key}])
    assert refused.value.sqlstate == "SW001"
    assert [
        row["ordinal"] for row in protocol.enqueue_many([{"task": "t"}, {"task": "t", "unique_key": None}])
    ] == [1, 2]


@pytest.mark.parametrize("key", [{}, {"unique_key": "k"}])
def test_a_batch_of_which_a_trigger_keeps_some_out_is_refused_instead_of_told_of_wrongly(
    protocol: Protocol, key: Row
) -> None:
    protocol.connection.execute(
        "create function public.rule() returns trigger language plpgsql as $$ begin return null; end $$"
    )
    protocol.connection.execute(
        "create trigger rule before insert on shiftwork.jobs for each row"
        " when (new.task = 'unwanted') execute function public.rule()"
    )
    with pytest.raises(psycopg.Error, match="a trigger on jobs has kept 1 of these 4 jobs out") as refused:
        protocol.enqueue_many([{"task": "a"}, {"task": "unwanted"}, {"task": "b"}, {"task": "c", **key}])
    assert refused.value.sqlstate == "SW005"
    assert protocol.value("select count(*) from {}.jobs") == 0
    answers = protocol.enqueue_many([{"task": "a"}, {"task": "b"}, {"task": "c", **key}])
    told = {row["id"]: "abc"[row["ordinal"] - 1] for row in answers}
    assert told == {row["id"]: row["task"] for row in protocol.rows("select id, task from {}.jobs")}
    assert protocol.value("select {}.enqueue_one('unwanted', '{{}}', null, null, null)") is None
    for form in ("'{{}}'", "'{{}}', queue => 'mail'"):
        text: Any = f"select id, outcome from {{}}.enqueue('unwanted', {form})"
        assert protocol.rows(text) == [{"id": None, "outcome": None}]


def test_an_option_that_there_is_not_is_refused_by_name(protocol: Protocol) -> None:
    # spec: D-11
    for job in ({"task": "greet", "queu": "mail"}, {"task": "greet", "queu": "mail", "unique_key": "k"}):
        with pytest.raises(
            psycopg.Error, match='task "greet" says "queu", which is none of the options'
        ) as refused:
            protocol.enqueue_many([{"task": "good"}, job])
        assert refused.value.sqlstate == "SW001"
        assert "max_attempts, tags, keep, unique_key" in (refused.value.diag.message_hint or "")
    assert protocol.value("select count(*) from {}.jobs") == 0
