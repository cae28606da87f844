"""Rows that others write by hand are refused, or stop no verb: the good ones beside them move."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.rows import scalar_row

from tests.harness import Protocol, Row

REFUSED = [
    "task = null",
    "task = ''",
    "task = repeat('x', 201)",
    "queue = null",
    "queue = repeat('q', 101)",
    "payload = null",
    "payload = 'null'",
    "payload = '[]'",
    "payload = '5'",
    "state = null",
    "priority = null",
    "run_at = null",
    "run_at = 'infinity'",
    "run_at = '-infinity'",
    "run_at = '10000-01-01'",
    "run_at = '0044-03-15 BC'",
    "expires_at = 'infinity'",
    "expires_at = '-infinity'",
    "created_at = 'infinity'",
    "created_at = null",
    "attempt = -1",
    "attempt = 1000000001",
    "failures = -1",
    "failures = 2147483647",
    "resets = 1000000001",
    "max_attempts = 0",
    "max_attempts = null",
    "tags = null",
    "tags = array[repeat('t', 1048577)]",
    "tags = array_fill(repeat('t', 30000), '{50}')",
    "unique_key = repeat('k', 256), unique_scope = 'pending'",
    "unique_key = '', unique_scope = 'pending'",
    "state = 'running'",
    "state = 'running', claimed_at = now()",
    "state = 'failed'",
]

# At the limits of what is allowed; each is a row of its own in every state.
ALLOWED: list[Row] = [
    {"task": "never heard of", "queue": "default"},
    {"task": "x" * 200, "tags": ["t" * 10_000] * 50},
    {"attempt": 1_000_000_000, "failures": 1_000_000_000, "resets": 1_000_000_000, "max_attempts": 1},
    {"attempt": 999_999_999, "failures": 1_000_000_000, "max_attempts": 2_147_483_647},
    {"priority": 2**31 - 1, "run_at": "9999-12-31 23:59:59.999999+00", "expires_at": "9999-12-31"},
    {"priority": -(2**31), "run_at": "0001-01-01", "created_at": "0001-01-01", "expires_at": "0001-01-01"},
    {"run_at": "1960-06-01", "created_at": "9999-01-01"},
    {"payload": json.loads("[" * 500 + "]" * 500)},
    {"payload": 10**400},
    {"payload": "\\u0000 ' \" $$ %s {}"},
    {"payload": "x" * 900_000},
    {"keep": 2**31 - 1},
    {"keep": 0},
    {"keep": -1},
    {"keep": -(2**31)},
    {"tags": [None] * 50},
    {"unique_scope": "unfinished"},
    {"held_key": "a key that is none"},
    {"unique_key": "key", "unique_scope": "pending", "held_key": "another"},
    {"started_at": "infinity", "finished_at": "-infinity"},
    {"keep": 36_500},
    {"keep": 36_501},
    {"result": {"left": "over"}, "error": "not an object"},
    {"error": []},
    {"unique_key": "k" * 255, "unique_scope": "window"},
    {"worker": -1, "claim": -1},
    {"worker": 2**63 - 1, "claim": 2**63 - 1},
]
STATES = ["blocked", "scheduled", "ready", "running", "waiting"]
HELD = {"running", "waiting"}


def test_what_breaks_a_rule_is_refused(protocol: Protocol) -> None:
    # spec: SH-2, ST-2, D-11
    protocol.enqueue()
    for change in REFUSED:
        try:
            protocol.connection.execute(f"update shiftwork.jobs set {change}".encode())
        except psycopg.errors.IntegrityError:
            continue
        pytest.fail(f"{change} was let in")


@pytest.mark.parametrize("time", ["infinity", "-infinity"])
@pytest.mark.parametrize(
    "statement",
    [
        "insert into shiftwork.pauses (kind, name, until, actor) values ('queue', 'elsewhere', %s, 'me')",
        "insert into shiftwork.child_ends (at, parent) values (%s, 1)",
    ],
)
def test_a_time_that_never_comes_is_refused_and_one_from_before_that_stops_no_claim(
    protocol: Protocol, statement: Any, time: str
) -> None:
    # spec: D-11
    with pytest.raises(psycopg.errors.CheckViolation):
        protocol.connection.execute(statement, (time,))
    protocol.connection.execute(
        "alter table shiftwork.pauses drop constraint pauses_until_check;"
        "alter table shiftwork.child_ends drop constraint child_ends_at_check"
    )
    protocol.connection.execute(statement, (time,))
    worker = protocol.register()
    [job] = good(protocol, 1)
    claimed = protocol.claim(worker, want=9)
    assert [one for one, _ in claimed.held] == [job]
    assert protocol.claim(worker, want=9).report["next_due_in"] is None


def test_a_pause_may_last_for_ages_and_stops_nothing_else(protocol: Protocol) -> None:
    # spec: D-11
    protocol.rows("select {}.pause(queue => 'elsewhere', lasting => '9000 years')")
    worker = protocol.register()
    [job] = good(protocol, 1)
    assert [one for one, _ in protocol.claim(worker, want=9).held] == [job]
    assert protocol.claim(worker, want=9).report["next_due_in"] > 1e11
    with pytest.raises(
        psycopg.Error, match=r"ends at some time|interval"
    ):  # before PostgreSQL 17 there is none
        protocol.rows("select {}.pause(queue => 'elsewhere', lasting => 'infinity')")


MANY_DIGITS = '{"x": [' + ", ".join(["1e131000"] * 100) + "]}"


@pytest.mark.parametrize(
    "statement",
    [
        "select shiftwork.enqueue('big', %s)",
        "select shiftwork.enqueue('big', (%s)::jsonb)",
        "select shiftwork.enqueue('big', (%s)::jsonb, unique_key => 'k')",
        "select shiftwork.enqueue_one('big', %s, null, null, null)",
        "select * from shiftwork.enqueue_many(jsonb_build_array(jsonb_build_object('task', 'big', 'payload', (%s)::jsonb)))",
        "insert into shiftwork.jobs (task, payload) values ('big', %s)",
    ],
)
def test_a_payload_is_measured_as_its_reader_gets_it(protocol: Protocol, statement: Any) -> None:
    # fault: F40
    with pytest.raises(psycopg.Error, match="13100307 bytes, and 1048576 are allowed"):
        protocol.connection.execute(statement, (MANY_DIGITS,))
    assert protocol.value("select count(*) from {}.jobs") == 0


@pytest.mark.parametrize(
    "statement",
    [
        "select shiftwork.enqueue('big', payload) from public.source",
        "insert into shiftwork.jobs (task, payload) select 'big', payload from public.source",
    ],
)
def test_a_payload_that_is_stored_compressed_is_measured_as_well(protocol: Protocol, statement: Any) -> None:
    # fault: F40
    protocol.connection.execute(
        "create table public.source as select jsonb_build_object('x', repeat('x', 1900000)) as payload"
    )
    assert protocol.value("select pg_column_size(payload) < 100000 from public.source")
    with pytest.raises(psycopg.Error, match="1900009 bytes, and 1048576 are allowed"):
        protocol.connection.execute(statement)


def put(protocol: Protocol, worker: int) -> dict[str, list[int]]:
    """Every odd row in every state, as somebody with all rights would write it."""
    found: dict[str, list[int]] = {}
    for state in STATES:
        for number, odd in enumerate(ALLOWED):
            row: Row = {
                "task": "odd",
                "queue": "default",
                "priority": 0,
                "max_attempts": 5,
                "state": state,
                **odd,
            }
            row["payload"] = json.dumps({"x": odd["payload"]} if "payload" in odd else {})
            for name in ("result", "error"):
                if name in odd:
                    row[name] = json.dumps(odd[name])
            if state in HELD:
                started = "-infinity" if number % 2 else "now"
                row |= {"claimed_at": "infinity" if number % 3 == 0 else "now", "started_at": started}
                row |= {"worker": odd.get("worker", worker), "claim": odd.get("claim", 0)}
            if len(row.get("unique_key", "")) == 255:
                row["unique_key"] = row["held_key"] = row["unique_key"][:-9] + f"{state:>9}"
            elif "held_key" in row:
                row["held_key"] += state
            names = sql.SQL(", ").join(map(sql.Identifier, row))
            values = sql.SQL(", ").join(sql.Placeholder() * len(row))
            statement = sql.SQL("insert into shiftwork.jobs ({}) values ({}) returning id")
            cursor = psycopg.ClientCursor(protocol.connection, row_factory=scalar_row)
            [job] = cursor.execute(statement.format(names, values), list(row.values()))
            found.setdefault(state, []).append(job)
    # The trigger looks after what is inserted; an update goes past it.
    odd_times: Any = "update {}.jobs set run_at = %s where id = %s"
    for number, odd in enumerate(ALLOWED):
        if "run_at" in odd:
            protocol.rows(odd_times, odd["run_at"], found["ready"][number])
            protocol.rows("update {}.jobs set state = 'ready' where id = %s", found["ready"][number])
    return found


def good(protocol: Protocol, number: int = 3, **options: object) -> list[int]:
    answers = protocol.enqueue_many({"task": "good", **options} for _ in range(number))
    return [answer["id"] for answer in answers]


def states(protocol: Protocol, jobs: list[int]) -> set[str]:
    rows = protocol.rows("select state from {}.all_jobs where id = any(%s)", jobs)
    assert len(rows) == len(jobs)
    return {row["state"] for row in rows}


def test_no_verb_is_stopped_by_odd_rows_and_every_job_can_be_brought_to_an_end(protocol: Protocol) -> None:
    # spec: SH-2, ST-2
    # fault: F29, F40
    worker = protocol.register(lease=86400)
    odd = put(protocol, worker)

    jobs = good(protocol)
    claimed = protocol.claim(worker, want=10_000, tasks=["good"])
    assert [job["id"] for job in claimed.jobs] == jobs
    assert set(protocol.complete(worker, claimed.jobs).values()) == {"settled"}

    # Promote: whatever time has come, however long ago.
    later = good(protocol, delay=60)
    protocol.shift_clock(timedelta(minutes=2))
    protocol.promote()
    assert states(protocol, later) == {"ready"}
    [ancient] = protocol.rows(
        "select count(*) as jobs from {}.jobs where state = 'scheduled' and run_at < now()"
    )
    assert ancient["jobs"] == 0

    # Claim all of them, start them, tell of them, give them back.
    text: Any = "select id, attempt from {}.claim(%s)"
    request = {"worker": worker, "queues": [{"queue": "default"}], "want": 10_000, "start": 3}
    everything = [row for row in protocol.rows(text, json.dumps(request)) if row["id"]]
    assert set(later) <= {row["id"] for row in everything}
    held = [[row["id"], row["attempt"]] for row in everything]
    held += [
        [row["id"], row["attempt"]]
        for row in protocol.rows("select id, attempt from {}.jobs where worker = %s", worker)
    ]
    assert protocol.heartbeat(worker, held, answered=0)["alive"] is True
    answers = protocol.start(worker, held)
    assert {answers[job] for job in later} == {"started"}
    assert set(answers.values()) <= {"started", "expired", "lost"}
    answers = protocol.release(worker, held)
    assert {answers[job] for job in later} == {"released"}
    protocol.heartbeat(worker, answered=2**62)

    # Settle every kind of ending over whatever can be claimed.
    everything = [row for row in protocol.rows(text, json.dumps(request)) if row["id"]]
    outcomes: list[Row] = []
    for number, row in enumerate(everything):
        state = ["completed", "failed", "cancelled", "scheduled"][number % 4]
        error = None if state == "completed" else {"code": "X", "message": "x"}
        outcomes.append({**row, "state": state, "error": error, "delay": 1e300 if number % 8 == 3 else 1})
    settled = protocol.settle(worker, *outcomes)
    assert set(settled.values()) == {"settled"}

    # Reap, expire, cancel, revive, run now.
    fresh = good(protocol)
    doomed = protocol.register()
    protocol.claim(doomed, want=10_000)
    protocol.rows("update {}.workers set lease_until = 'epoch'")
    reaped = protocol.reap(thorough=True)
    assert {reaped[job] for job in fresh} == {"ready"}
    assert states(protocol, fresh) == {"ready"}
    protocol.expire()
    assert (
        protocol.rows("select id from {}.jobs where expires_at < now() and state in ('ready', 'scheduled')")
        == []
    )

    live = [row["id"] for row in protocol.rows("select id from {}.jobs")]
    protocol.run_now(*live)
    assert set(protocol.cancel(*live).values()) == {"cancelled"}
    everyone = [row["id"] for row in protocol.rows("select id from {}.history")]
    assert len(everyone) >= len(STATES) * len(ALLOWED)
    assert set(odd["ready"]) <= set(everyone)
    assert set(protocol.revive(*everyone).values()) == {"revived"}
    assert set(protocol.cancel(*everyone).values()) == {"cancelled"}
    protocol.shift_clock(timedelta(days=400))
    protocol.rows("select * from {}.extend_history()")
    protocol.rows("select * from {}.purge()")
    assert set(protocol.cancel(*good(protocol)).values()) == {"cancelled"}


@contextmanager
def refusing(protocol: Protocol, table: str, column: str, job: int) -> Iterator[None]:
    """A trigger of the user's that says no to one job."""
    protocol.connection.execute(
        f"""create function public.say_no() returns trigger language plpgsql as
            $$ begin raise exception 'not this one' using errcode = 'ZZ001'; end $$;
            create trigger say_no before insert on shiftwork.{table} for each row when (new.{column} = {job})
            execute function public.say_no()""".encode()
    )
    protocol.connection.add_notice_handler(lambda notice: told.append(notice.message_primary or ""))
    told: list[str] = []
    yield
    assert any(str(job) in one and "not this one" in one for one in told), told
    protocol.connection.execute(f"drop trigger say_no on shiftwork.{table}".encode())


def test_a_trigger_that_refuses_one_outcome_stops_no_other(protocol: Protocol) -> None:
    # spec: D-16
    # fault: F29
    first, bad, last = good(protocol)
    worker = protocol.register()
    jobs = protocol.claim(worker).jobs
    with refusing(protocol, "history", "id", bad):
        assert protocol.complete(worker, jobs) == {first: "settled", bad: "refused", last: "settled"}
    assert protocol.state(bad) == "running"
    assert protocol.complete(worker, jobs) == {first: "already", bad: "settled", last: "already"}


def test_a_trigger_that_silently_keeps_one_job_out_of_history_loses_none(protocol: Protocol) -> None:
    jobs = [protocol.enqueue("work") for _ in range(3)]
    worker = protocol.register()
    claimed = protocol.claim(worker, want=3, start=3).jobs
    protocol.connection.execute(
        f"""create function public.keep_out() returns trigger language plpgsql as $$ begin return null; end $$;
            create trigger keep_out before insert on shiftwork.history for each row when (new.id = {jobs[1]})
            execute function public.keep_out()""".encode()
    )
    answers = protocol.complete(worker, claimed)
    assert answers == {jobs[0]: "settled", jobs[1]: "refused", jobs[2]: "settled"}
    assert protocol.state(jobs[1]) == "running"


def test_a_trigger_that_refuses_one_lost_job_stops_no_other(protocol: Protocol) -> None:
    # spec: D-2, QU-8
    # fault: F29
    protocol.rows("insert into {}.tasks (name, on_lost) values ('good', 'fail')")
    first, bad, last = good(protocol)
    worker = protocol.register()
    protocol.claim(worker)
    protocol.lapse(worker)
    with refusing(protocol, "history", "id", bad):
        assert protocol.reap() == {first: "failed", last: "failed"}
    assert protocol.reap() == {bad: "failed"}


def test_a_trigger_that_refuses_to_note_a_lost_attempt_stops_no_other(protocol: Protocol) -> None:
    # spec: D-2, QU-8
    first, bad, last = good(protocol)
    worker = protocol.register()
    protocol.claim(worker)
    protocol.lapse(worker)
    with refusing(protocol, "attempts", "job", bad):
        assert protocol.reap() == {first: "ready", last: "ready"}
    assert protocol.reap() == {bad: "ready"}


def test_a_trigger_that_refuses_one_expired_job_stops_no_other(protocol: Protocol) -> None:
    # spec: HO-6
    # fault: F29
    first, bad, last = good(protocol, expires_in=60)
    protocol.shift_clock(timedelta(minutes=2))
    with refusing(protocol, "history", "id", bad):
        assert protocol.expire() == 2
    assert states(protocol, [first, last]) == {"expired"}
    assert protocol.expire() == 1


def test_a_trigger_that_refuses_one_cancelled_job_stops_no_other_and_it_ends_when_it_can(
    protocol: Protocol,
) -> None:
    # spec: SH-34
    first, bad, last = good(protocol)
    with refusing(protocol, "history", "id", bad):
        assert protocol.cancel(first, bad, last) == {first: "cancelled", bad: "signalled", last: "cancelled"}
    assert protocol.expire() == 1
    assert protocol.state(bad) == "cancelled"


def test_a_prefetched_job_that_cannot_be_expired_is_not_started_either(protocol: Protocol) -> None:
    # spec: HO-6, HO-8
    bad, other = good(protocol, 2, expires_in=60)
    worker = protocol.register(lease=3600)
    held = protocol.claim(worker, start=0).held
    protocol.shift_clock(timedelta(minutes=2))
    with refusing(protocol, "history", "id", bad):
        assert protocol.start(worker, held) == {bad: "busy", other: "expired"}
    assert protocol.live(bad)["started_at"] is None


def test_a_trigger_that_refuses_one_revived_job_stops_no_other(protocol: Protocol) -> None:
    # spec: SH-33
    first, bad, last = good(protocol)
    protocol.cancel(first, bad, last)
    with refusing(protocol, "jobs", "id", bad):
        assert protocol.revive(first, bad, last) == {first: "revived", bad: "refused", last: "revived"}
    assert protocol.revive(bad) == {bad: "revived"}


def test_history_written_by_hand_stops_nobody_from_being_revived(protocol: Protocol) -> None:
    # spec: SH-33
    first, bad, last = good(protocol)
    protocol.cancel(first, bad, last)
    protocol.rows("update {}.history set max_attempts = 0 where id = %s", bad)
    assert protocol.revive(first, bad, last) == {first: "revived", bad: "refused", last: "revived"}
    protocol.rows("insert into {}.jobs (id, task) overriding system value values (%s, 'same id')", bad)
    assert protocol.revive(bad)[bad] == "refused"


def test_nonsense_for_a_settle_is_answered_and_stops_nobody(protocol: Protocol) -> None:
    # spec: D-16
    first, second, third = good(protocol)
    worker = protocol.register()
    protocol.claim(worker)
    answers = protocol.settle(
        worker,
        {"id": first, "attempt": 1, "state": None},
        {"id": second, "attempt": 1, "state": "running"},
        {"id": third, "attempt": 1, "state": "completed", "result": None, "error": {"code": "ignored"}},
        {"id": 2**62, "attempt": 2**31 - 1, "state": "failed", "error": "just text"},
    )
    assert answers == {first: "refused", second: "refused", third: "settled", 2**62: "lost"}
    told = {"id": first, "attempt": 1, "state": "failed", "error": ["no", "object"]}
    assert protocol.settle(worker, told) == {first: "settled"}
    assert protocol.job(first)["state"] == "failed"
