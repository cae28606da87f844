"""Tasks whose code is a routine in the database: the registry, and sessions that process jobs by themselves."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from tests.harness import Protocol, Row

WORLD = """
create schema stats;
create table stats.units (id int, run int default 1);
create table stats.said (what text);
create procedure stats.derive_units(payload jsonb) language plpgsql as $$
begin
  insert into stats.units select one::int from jsonb_array_elements_text(payload -> 'ids') as one;
end $$;
create procedure stats.count_units(payload jsonb, inout info jsonb) language plpgsql as $$
begin
  info := jsonb_build_object('units', (select count(*) from stats.units), 'asked', payload);
end $$;
create function stats.double(payload jsonb) returns jsonb language sql as $$
  select to_jsonb((payload ->> 'n')::int * 2)
$$;
create function stats.shrug(payload jsonb) returns void language plpgsql as $$
begin
  insert into stats.said values ('shrug');
end $$;
create procedure stats.break(payload jsonb) language plpgsql as $$
begin
  insert into stats.units values (-1);
  raise exception 'it broke' using detail = 'the spring', hint = 'wind it less', errcode = 'U0001';
end $$;
create procedure stats.verdict(payload jsonb) language plpgsql as $$
begin
  raise exception 'thus' using errcode = payload ->> 'code', detail = coalesce(payload ->> 'wait', '');
end $$;
create procedure stats.note() language plpgsql as $$ begin insert into stats.said values ('before'); end $$;
create procedure stats.note_after(payload jsonb) language plpgsql as $$
begin
  insert into stats.said values ('after ' || payload::text);
end $$;
create procedure stats.bad_hook() language plpgsql as $$ begin raise exception 'the hook is bent'; end $$;
"""


@pytest.fixture
def stats(protocol: Protocol) -> Protocol:
    """A database with some routines."""
    protocol.connection.execute(WORLD.encode())
    return protocol


def register(protocol: Protocol, task: str, handler: str, **options: Any) -> bool:
    named = "".join(f", {name} => %s" for name in options)
    values = [
        json.dumps(value) if isinstance(value, dict) or name == "merge" else value
        for name, value in options.items()
    ]
    text: Any = f"select {{}}.register_task(%s, %s{named})"
    found = protocol.value(text, task, handler, *values)
    assert isinstance(found, bool)
    return found


def process(protocol: Protocol, **options: Any) -> list[str]:
    """Process jobs; the warnings that were told."""
    told: list[str] = []

    def hear(notice: psycopg.errors.Diagnostic) -> None:
        told.append(notice.message_primary or "")

    protocol.connection.add_notice_handler(hear)
    named = ", ".join(f"{name} => %s" for name in options)
    text: Any = f"call {{}}.process_jobs({named})"
    try:
        protocol.rows(text, *options.values())
    finally:
        protocol.connection.remove_notice_handler(hear)
    return told


def units(protocol: Protocol) -> list[int]:
    return [row["id"] for row in protocol.rows("select id from stats.units order by id")]


@contextmanager
def another(dsn: str) -> Iterator[Protocol]:
    with psycopg.Connection[Row].connect(dsn, autocommit=True, row_factory=dict_row) as connection:
        yield Protocol(connection)


# The registry.


def test_a_task_is_registered_with_its_routine_and_all_that_is_said_of_it(stats: Protocol) -> None:
    # spec: ST-1, D-17
    policy = {"max_attempts": 3, "delays": [1, 5], "at_once": 2}
    options: dict[str, Any] = {
        "queue": "analytics",
        "priority": 7,
        "retry": policy,
        "before": "stats.note()",
        "after": "stats.note_after(jsonb)",
        "description": "derives units",
        "unique_action": "merge",
        "merge": {"ids": "union"},
    }
    assert register(stats, "derive", "stats.derive_units( jsonb )", **options)
    [row] = stats.rows("select * from {}.tasks where name = 'derive'")
    assert (row["handler"], row["before"], row["after"]) == (
        "stats.derive_units(jsonb)",
        "stats.note()",
        "stats.note_after(jsonb)",
    )
    assert (row["queue"], row["priority"], row["max_attempts"], row["retry"]) == ("analytics", 7, 3, policy)
    assert (row["commits"], row["timeout"], row["merge"]) == (False, None, {"ids": "union"})
    assert not register(stats, "derive", "stats.derive_units(jsonb)", **options)
    assert register(stats, "derive", "stats.derive_units(jsonb)", queue="other")
    [row] = stats.rows("select * from {}.tasks where name = 'derive'")
    assert (row["queue"], row["priority"], row["before"], row["max_attempts"]) == ("other", None, None, None)
    assert stats.value("select count(*) from {}.audit where verb = 'register'") == 2


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"handler": "stats.nowhere(jsonb)"}, "there is no routine"),
        ({"handler": "derive_units(jsonb)"}, "there is no routine"),
        ({"handler": "stats.derive_units(int)"}, "there is no routine"),
        ({"handler": "stats.note()"}, "cannot run jobs"),
        ({"handler": "pg_catalog.jsonb_typeof(jsonb)"}, "cannot run jobs"),
        ({"handler": "pg_catalog.jsonb_array_elements(jsonb)"}, "cannot run jobs"),
        ({"handler": "pg_catalog.jsonb_agg(anyelement)"}, "cannot run jobs"),
        ({"before": "pg_catalog.upper(text)"}, "cannot run before or after a job"),
        ({"before": "stats.note()", "commits": True}, "nothing runs before or after it"),
        ({"after": "stats.note()", "commits": True}, "nothing runs before or after it"),
        ({"retry": {"delays": []}}, "is no way to retry"),
        ({"retry": {"delays": ["x"]}}, "is no way to retry"),
        ({"retry": {"factor": 0}}, "is no way to retry"),
        ({"retry": {"tries": 4}}, "is no way to retry"),
        ({"retry": {"max_attempts": 0}}, "is no way to retry"),
        ({"merge": {"ids": "unite"}}, "is no way to merge"),
        ({"merge": {"ids": None}}, "is no way to merge"),
        ({"merge": {"days": "range:datemultirange"}}, "is no way to merge"),
        ({"merge": ["union"]}, "is no way to merge"),
        ({"merge": 3}, "is no way to merge"),
        ({"merge": "function:stats.nowhere"}, "cannot merge"),
        ({"merge": "function:pg_catalog.jsonb_typeof"}, "cannot merge"),
    ],
)
def test_what_cannot_be_run_is_refused_when_it_is_registered(
    stats: Protocol, wrong: dict[str, Any], says: str
) -> None:
    with pytest.raises(psycopg.Error, match=says) as refused:
        register(stats, "t", **{"handler": "stats.derive_units(jsonb)", **wrong})
    assert refused.value.sqlstate == "SW001"
    assert refused.value.diag.message_hint
    assert stats.rows("select * from {}.tasks") == []


@pytest.mark.parametrize(
    "merge",
    [
        "deep",
        {"a": "union", "b": "range:daterange", "c": "multirange:int8multirange"},
        "function:pg_catalog.jsonb_concat",
        {},
    ],
)
def test_what_can_be_merged_is_registered(stats: Protocol, merge: object) -> None:
    assert register(stats, "t", "stats.derive_units(jsonb)", merge=merge)


def test_without_an_end_is_an_allowance_that_nobody_reaches(stats: Protocol) -> None:
    register(stats, "t", "stats.break(jsonb)", retry={"max_attempts": None})
    assert stats.value("select max_attempts from {}.tasks") == 2147483647


# Processing.


def test_a_procedure_runs_where_it_is_and_its_job_is_completed(stats: Protocol) -> None:
    # spec: ST-6, ST-9
    register(stats, "derive", "stats.derive_units(jsonb)", queue="analytics")
    register(stats, "count", "stats.count_units(jsonb, jsonb)", queue="analytics")
    register(stats, "double", "stats.double(jsonb)")
    register(stats, "shrug", "stats.shrug(jsonb)")
    jobs = [
        stats.enqueue("derive", {"ids": [1, 2]}),
        stats.enqueue("count", {"why": "x"}),
        stats.enqueue("double", {"n": 21}),
        stats.enqueue("shrug"),
    ]
    assert process(stats) == []
    assert [stats.state(job) for job in jobs] == ["completed"] * 4
    assert units(stats) == [1, 2]
    assert [stats.job(job)["result"] for job in jobs] == [
        None,
        {"units": 2, "asked": {"why": "x"}},
        42,
        None,
    ]
    assert stats.value("select count(*) from {}.workers where gone_at is null") == 0
    assert stats.job(jobs[0])["worker"] == stats.value("select max(id) from {}.workers")


def test_enqueue_in_a_transaction_process_assert_and_roll_back(dsn: str, stats: Protocol) -> None:
    # spec: ST-10, ST-29
    register(stats, "derive", "stats.derive_units(jsonb)", queue="analytics")
    with another(dsn) as other:
        stats.rows("begin")
        job = stats.enqueue("derive", {"ids": [1, 2]})
        process(stats, queue="analytics")
        assert stats.state(job) == "completed"
        assert units(stats) == [1, 2]
        assert units(other) == []
        stats.rows("rollback")
        assert units(stats) == []
        assert stats.rows("select * from {}.all_jobs") == []
        assert stats.rows("select * from {}.workers") == []


WAYS = {
    "simple": ("call shiftwork.process_jobs()", True),
    "several in one message": ("select 1; call shiftwork.process_jobs()", False),
    "a block": ("do $$ begin call shiftwork.process_jobs(); end $$", True),
    "a block with an exception clause": (
        "do $$ begin call shiftwork.process_jobs(); exception when division_by_zero then null; end $$",
        False,
    ),
    "a procedure": ("call stats.outer()", True),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("language", ["C", "de_DE.utf8"])
def test_each_job_is_committed_by_itself_wherever_something_can_be_committed(
    dsn: str, stats: Protocol, way: str, language: str
) -> None:
    text, commits = WAYS[way]
    see_commits(stats)
    register(stats, "see", "stats.see(jsonb)")
    try:
        stats.connection.execute(f"set lc_messages = '{language}'".encode())
    except psycopg.errors.InvalidParameterValue:
        pytest.skip("the server has no such language")
    jobs = [stats.enqueue("see"), stats.enqueue("see")]
    stats.connection.execute(text.encode())
    assert [stats.state(job) for job in jobs] == ["completed"] * 2
    seen = [row["others"] for row in stats.rows("select others from stats.seen order by id")]
    assert (seen == [0, 1]) is commits
    assert (len({row["xid"] for row in stats.rows("select xid from stats.seen")}) == 2) is commits


def see_commits(stats: Protocol) -> None:
    """A handler that notes the transaction it runs in, and how many were committed before, as far as others see."""
    stats.connection.execute(
        """
        create table stats.seen (id int generated always as identity, xid text, others int);
        create procedure stats.see(payload jsonb) language plpgsql as $$
        begin
          insert into stats.seen (xid, others) values (
            pg_current_xact_id()::text,
            (select count(*) from stats.seen where xmin::text::bigint <> pg_current_xact_id()::text::bigint and
               pg_xact_status(xmin::text::xid8) = 'committed'));
        end $$;
        create procedure stats.outer() language plpgsql as $$ begin call shiftwork.process_jobs(); end $$;
        """
    )


def test_a_prepared_call_commits_too_and_one_between_begin_and_commit_does_not(
    dsn: str, stats: Protocol
) -> None:
    see_commits(stats)
    register(stats, "see", "stats.see(jsonb)")
    stats.enqueue("see")
    stats.enqueue("see")
    stats.connection.execute("call shiftwork.process_jobs(batch => %s)", (2,), prepare=True)
    stats.enqueue("see")
    with stats.connection.transaction():
        stats.connection.execute("savepoint a")
        stats.connection.execute("call shiftwork.process_jobs(batch => %s)", (2,), prepare=True)
    others = [row["others"] for row in stats.rows("select others from stats.seen order by id")]
    assert others == [0, 1, 2]


def test_an_exception_block_around_the_call_can_undo_all_of_it(stats: Protocol) -> None:
    register(stats, "derive", "stats.derive_units(jsonb)")
    job = stats.enqueue("derive", {"ids": [1]})
    stats.rows(
        "do $$ begin call {}.process_jobs(); perform 1 / 0; exception when division_by_zero then null; end $$"
    )
    assert (stats.state(job), stats.job(job)["attempt"], units(stats)) == ("ready", 0, [])
    assert stats.rows("select * from {}.workers") == []


def test_a_failure_is_recorded_with_detail_hint_and_context_and_its_effects_are_undone(
    stats: Protocol,
) -> None:
    # spec: ST-11, ST-2
    register(stats, "break", "stats.break(jsonb)", retry={"max_attempts": 2, "jitter": 0})
    job = stats.enqueue("break")
    [told] = process(stats)
    assert told == f"job {job} (break, attempt 1) failed: it broke"
    row = stats.live(job)
    assert (row["state"], row["failures"], units(stats)) == ("scheduled", 1, [])
    error = row["error"]
    assert (error["code"], error["message"], error["detail"], error["hint"]) == (
        "U0001",
        "it broke",
        "the spring",
        "wind it less",
    )
    assert "stats.break(jsonb) line 4" in error["context"]
    stats.run_now(job)
    process(stats)
    assert (stats.state(job), stats.job(job)["failures"]) == ("failed", 2)
    assert [
        (row["attempt"], row["will_retry"], row["code"]) for row in stats.rows("select * from {}.attempts")
    ] == [(1, True, "U0001"), (2, False, "U0001")]


@pytest.mark.parametrize(
    ("code", "wait", "state", "failures"),
    [
        ("SW011", None, "failed", 1),
        ("SW012", "7 minutes", "scheduled", 1),
        ("SW013", "7 minutes", "scheduled", 0),
        ("SW014", None, "cancelled", 0),
        ("SW012", "soon", "scheduled", 1),
    ],
)
def test_a_handler_says_with_its_error_what_is_to_become_of_the_job(
    stats: Protocol, code: str, wait: str | None, state: str, failures: int
) -> None:
    # spec: ST-11
    register(stats, "verdict", "stats.verdict(jsonb)", retry={"delays": [3600], "jitter": 0})
    job = stats.enqueue("verdict", {"code": code, "wait": wait})
    process(stats)
    row = stats.job(job)
    assert (row["state"], row["failures"]) == (state, failures)
    if state == "scheduled":
        minutes = stats.value("select round(extract(epoch from run_at - now()) / 60) from {}.jobs")
        assert minutes == (7 if wait == "7 minutes" else 60)


def test_hooks_run_around_a_job_however_it_ends_and_what_goes_wrong_in_them_is_a_warning(
    stats: Protocol,
) -> None:
    # spec: ST-9
    hooks = {"before": "stats.note()", "after": "stats.note_after(jsonb)"}
    register(stats, "break", "stats.break(jsonb)", **hooks)
    register(stats, "shrug", "stats.shrug(jsonb)", before="stats.bad_hook()", after="stats.bad_hook()")
    stats.enqueue("break", {"a": 1})
    job = stats.enqueue("shrug")
    told = process(stats)
    said = [row["what"] for row in stats.rows("select what from stats.said")]
    assert said == ["before", 'after {"a": 1}', "shrug"]
    assert told[1:] == [f"stats.bad_hook() of job {job} failed: the hook is bent"] * 2
    assert stats.state(job) == "completed"
    lines = stats.rows("select level, message from {}.logs where job = %s", job)
    assert lines == [{"level": "warning", "message": "stats.bad_hook() failed: the hook is bent (P0001)"}] * 2


def test_deadlocks_and_serialization_failures_are_repeated_on_the_spot(stats: Protocol) -> None:
    # spec: ST-12, D-8
    stats.connection.execute(
        """
        create sequence stats.turn;
        create procedure stats.collide(payload jsonb) language plpgsql as $$
        begin
          insert into stats.units values (1);
          if nextval('stats.turn') <= (payload ->> 'times')::int then
            raise exception 'in the way' using errcode = payload ->> 'code';
          end if;
        end $$;
        """
    )
    register(stats, "collide", "stats.collide(jsonb)", retry={"at_once": 2, "max_attempts": 1})
    jobs = []
    for code, times in (("40P01", 2), ("40001", 2), ("40001", 3), ("23505", 1)):
        jobs.append(stats.enqueue("collide", {"code": code, "times": times}))
        process(stats)
        stats.rows("alter sequence stats.turn restart")
    assert [stats.state(job) for job in jobs] == ["completed", "completed", "failed", "failed"]
    assert units(stats) == [1, 1]


def test_a_handler_may_not_commit(stats: Protocol) -> None:
    # spec: D-1
    stats.connection.execute(
        "create procedure stats.commit_it(payload jsonb) language plpgsql as "
        "$$ begin insert into stats.units values (1); commit; end $$"
    )
    register(stats, "commit_it", "stats.commit_it(jsonb)", retry={"max_attempts": 1})
    job = stats.enqueue("commit_it")
    process(stats)
    assert stats.job(job)["error"]["code"] == "2D000"
    assert units(stats) == []
    register(stats, "commit_it", "stats.commit_it(jsonb)", commits=True)
    left = stats.enqueue("commit_it")
    process(stats)
    assert stats.state(left) == "ready"


def test_only_what_is_asked_for_is_processed(stats: Protocol) -> None:
    # spec: ST-7, ST-8
    register(stats, "double", "stats.double(jsonb)")
    here = [stats.enqueue("double", {"n": 1}, queue="here", priority=n) for n in (5, 3, 4)]
    there = stats.enqueue("double", {"n": 1}, queue="there")
    foreign = stats.enqueue("python", {}, queue="here", priority=-9)
    later = stats.enqueue("double", {"n": 1}, queue="here", delay=3600)
    process(stats, queue="here", batch=1)
    assert [stats.state(job) for job in here] == ["ready", "completed", "ready"]
    process(stats, queue="here", max_priority=4)
    assert [stats.state(job) for job in here] == ["ready", "completed", "completed"]
    process(stats, max_runtime="0 s")
    assert stats.state(there) == "ready"
    process(stats, batch=None)
    assert [stats.state(job) for job in (here[0], there)] == ["completed"] * 2
    assert [stats.state(job) for job in (foreign, later)] == ["ready", "scheduled"]
    stats.run_now(later)
    process(stats)
    assert stats.state(later) == "completed"


def test_a_handler_is_called_in_the_search_path_of_whoever_processes(stats: Protocol) -> None:
    stats.connection.execute(
        "create procedure stats.bare(payload jsonb) language plpgsql as "
        "$$ begin insert into units values (1); end $$"
    )
    register(stats, "bare", "stats.bare(jsonb)", retry={"max_attempts": 1})
    failing = stats.enqueue("bare")
    process(stats)
    assert stats.job(failing)["error"]["code"] == "42P01"
    stats.rows("set search_path = stats")
    job = stats.enqueue("bare")
    process(stats)
    assert stats.state(job) == "completed"
    assert stats.value("show search_path") == "stats"


HELD = """
create procedure stats.hold(payload jsonb) language plpgsql as $$
begin
  insert into stats.units values (1);
  perform pg_advisory_xact_lock(42);
end $$;
"""


WAITING = """
select 1 from pg_locks where locktype = 'advisory' and not granted and objid = 42
   and database = (select oid from pg_database where datname = current_database())
"""


@contextmanager
def processing(
    dsn: str, stats: Protocol, task: str = "hold"
) -> Iterator[tuple[int, Protocol, Future[list[str]]]]:
    """A session that is in the middle of a job, until advisory lock 42 is let go."""
    stats.connection.execute(HELD.encode())
    register(stats, task, "stats.hold(jsonb)")
    stats.rows("select pg_advisory_lock(42)")
    job = stats.enqueue(task)
    with another(dsn) as session, ThreadPoolExecutor(1) as pool:
        call = pool.submit(process, session)
        try:
            until(lambda: bool(stats.rows(WAITING)))
            yield job, session, call
        finally:
            stats.rows("select pg_advisory_unlock_all()")
            call.exception(30)


def until(condition: Callable[[], bool]) -> None:
    """Ask the database again and again, for what nobody tells."""
    patience = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < patience, "it did not come about"
        time.sleep(0.01)


def test_a_long_handler_outlives_its_lease_since_its_row_is_locked(dsn: str, stats: Protocol) -> None:
    # spec: D-1
    with processing(dsn, stats) as (job, _, call):
        worker = stats.live(job)["worker"]
        stats.lapse(worker)
        assert stats.reap(thorough=True) == {}
        stats.rows("select pg_advisory_unlock_all()")
        assert call.result(30) == []
        assert (stats.state(job), stats.job(job)["resets"], units(stats)) == ("completed", 0, [1])


def test_a_session_that_was_given_up_between_two_jobs_goes_on_as_another_worker(
    dsn: str, stats: Protocol
) -> None:
    with processing(dsn, stats) as (job, _, call):
        register(stats, "double", "stats.double(jsonb)")
        # Given up as soon as it holds nothing: its next job finds it gone.
        stats.connection.execute(
            "create function stats.give_up() returns trigger language plpgsql as $$ begin "
            "update shiftwork.workers set gone_at = now() where id = new.worker; return null; end $$;"
            "create trigger give_up after insert on shiftwork.history for each row execute function stats.give_up()"
        )
        other = stats.enqueue("double", {"n": 1})
        stats.rows("select pg_advisory_unlock_all()")
        call.result(30)
        assert [stats.state(one) for one in (job, other)] == ["completed"] * 2
        assert stats.job(job)["worker"] != stats.job(other)["worker"]


def test_a_session_that_dies_leaves_its_job_to_the_reaper(dsn: str, stats: Protocol) -> None:
    # spec: ST-14
    with processing(dsn, stats) as (job, session, call):
        assert stats.reap() == {}
        stats.rows("select pg_terminate_backend(%s, 10000)", session.connection.info.backend_pid)
        assert isinstance(call.exception(30), psycopg.OperationalError)
        assert stats.reap() == {job: "ready"}
        assert (stats.live(job)["resets"], units(stats)) == (1, [])


def test_the_next_session_takes_over_from_one_that_died(dsn: str, stats: Protocol) -> None:
    # spec: ST-14
    with processing(dsn, stats) as (job, session, call):
        stats.rows("select pg_terminate_backend(%s, 10000)", session.connection.info.backend_pid)
        assert isinstance(call.exception(30), psycopg.OperationalError)
        stats.rows("begin")
        process(stats)
        assert stats.state(job) == "running"  # inside a transaction nobody else's affairs are touched
        stats.rows("rollback")
        process(stats)
        assert (stats.state(job), stats.job(job)["resets"], units(stats)) == ("completed", 1, [1])


def test_a_session_of_another_database_is_not_taken_for_one_of_this(server: str, stats: Protocol) -> None:
    # spec: ST-14
    job = stats.enqueue("hold")
    [opened] = stats.rows("select * from {}.open_session(null, '')")
    stats.claim(opened["worker"])
    assert stats.reap() == {}  # it is there
    with psycopg.connect(server, autocommit=True) as foreign:
        elsewhere = "update {}.workers set backend_pid = %s, started_at = 'infinity' where id = %s"
        stats.rows(f"{elsewhere} returning id", foreign.info.backend_pid, opened["worker"])
        assert stats.reap() == {job: "ready"}
        foreign.execute("select 1")


def interrupt(stats: Protocol, session: Protocol) -> None:
    """Cancel what a session does, with one signal: a request of the client's own is two of them before PostgreSQL 18."""
    assert stats.value("select pg_cancel_backend(%s)", session.connection.info.backend_pid)


def test_a_call_that_is_cancelled_gives_its_job_back_at_once(dsn: str, stats: Protocol) -> None:
    with processing(dsn, stats) as (job, session, call):
        interrupt(stats, session)
        assert isinstance(call.exception(30), psycopg.errors.QueryCanceled)
        row = stats.live(job)
        assert (row["state"], row["failures"], row["resets"], units(stats)) == ("ready", 0, 1, [])
        assert stats.value("select count(*) from {}.workers where gone_at is null") == 0


@contextmanager
def interrupted(dsn: str, stats: Protocol) -> Iterator[tuple[int, Protocol, Future[list[str]]]]:
    """A session that was cancelled in the middle of a job, and is stopped while it gives it back."""
    with processing(dsn, stats) as (job, session, call):
        with stats.connection.transaction():
            stats.rows("lock table {}.attempts in share mode")
            interrupt(stats, session)
            until(lambda: stopped_since(stats, session) is not None)
            yield job, session, call
        assert isinstance(call.exception(30), psycopg.errors.QueryCanceled)


def stopped_since(stats: Protocol, session: Protocol) -> datetime | None:
    """When a session began to wait for a table, if it does."""
    found = stats.rows(
        "select waitstart from pg_locks where pid = %s and locktype = 'relation' and not granted",
        session.connection.info.backend_pid,
    )
    return found[0]["waitstart"] if found else None


def test_a_call_that_is_cancelled_again_while_it_gives_its_job_back_does_so_all_the_same(
    dsn: str, stats: Protocol
) -> None:
    with interrupted(dsn, stats) as (job, session, _):
        interrupt(stats, session)  # as the second signal of one request does that comes late
    row = stats.live(job)
    assert (row["state"], row["failures"], row["resets"], units(stats)) == ("ready", 0, 1, [])
    assert stats.value("select count(*) from {}.workers where gone_at is null") == 0


def test_whoever_goes_on_cancelling_a_call_is_obeyed_and_its_job_is_left_to_the_reaper(
    dsn: str, stats: Protocol
) -> None:
    with interrupted(dsn, stats) as (job, session, call):
        before = stopped_since(stats, session)
        interrupt(stats, session)
        until(lambda: stopped_since(stats, session) not in (None, before))
        interrupt(stats, session)
        assert isinstance(call.exception(30), psycopg.errors.QueryCanceled)  # although nobody let it go on
    worker = stats.live(job)["worker"]
    assert (stats.state(job), units(stats)) == ("running", [])
    stats.lapse(worker)
    assert stats.reap() == {job: "ready"}


def test_a_call_that_is_cancelled_while_it_tells_of_a_failure_ends_and_gives_its_job_back(
    dsn: str, stats: Protocol
) -> None:
    stats.connection.execute(
        """create function stats.refuse() returns trigger language plpgsql as $$ begin raise 'never'; end $$;
           create constraint trigger refuse after insert on stats.units deferrable initially deferred
             for each row execute function stats.refuse()"""
    )
    with processing(dsn, stats) as (job, session, call):
        with stats.connection.transaction():
            stats.rows("lock table {}.attempts in share mode")
            stats.rows("select pg_advisory_unlock_all()")
            until(lambda: stopped_since(stats, session) is not None)
            interrupt(stats, session)
        assert isinstance(call.exception(30), psycopg.errors.QueryCanceled)
    row = stats.live(job)
    assert (row["state"], row["failures"], row["resets"], units(stats)) == ("ready", 0, 1, [])


@pytest.mark.parametrize(
    ("body", "patience"),
    [
        ("raise exception 'as if it were cancelled' using errcode = '57014'", "0"),
        ("perform pg_sleep(60)", "2s"),  # of the whole call, and the job has to have begun by then
        ("insert into stats.late values (1)", "0"),
    ],
)
def test_a_job_that_ends_every_session_in_which_it_runs_has_failed_in_the_end(
    stats: Protocol, body: str, patience: str
) -> None:
    # fault: F29
    stats.connection.execute(
        f"""create table stats.late (n int);
            create function stats.refuse() returns trigger language plpgsql as $$ begin raise 'not now' using errcode = '55000'; end $$;
            create constraint trigger refuse after insert on stats.late deferrable initially deferred
              for each row execute function stats.refuse();
            create procedure stats.spoil(payload jsonb) language plpgsql as $$ begin {body}; end $$""".encode()
    )
    register(stats, "spoil", "stats.spoil(jsonb)")
    register(stats, "derive", "stats.derive_units(jsonb)")
    bad, good = stats.enqueue("spoil"), stats.enqueue("derive", {"ids": [1]})
    stats.rows("select set_config('statement_timeout', %s, false)", patience)
    for _ in range(3):
        with pytest.raises(psycopg.Error, match=f"job {bad} could not be ended: "):
            stats.connection.execute("call shiftwork.process_jobs()")
    stats.rows("reset statement_timeout")
    stats.connection.execute("call shiftwork.process_jobs()")
    assert (stats.state(bad), stats.state(good)) == ("failed", "completed")
    told = stats.job(bad)
    assert (told["error"]["code"], told["resets"], told["failures"]) == ("WORKER_CRASHED", 3, 0)
    assert f"job {bad} could not be ended" in told["error"]["message"]


def test_a_job_whose_cancelling_was_asked_for_is_not_run_and_not_run_again(dsn: str, stats: Protocol) -> None:
    with processing(dsn, stats) as (job, _, call):
        assert stats.cancel(job) == {job: "signalled"}
        stats.connection.execute(
            "create or replace procedure stats.hold(payload jsonb) language plpgsql as $$ begin perform 1 / 0; end $$"
        )
        stats.rows("select pg_advisory_unlock_all()")
        call.result(30)
        assert stats.state(job) == "completed"  # it had succeeded before it heard of it
    stats.enqueue("hold")
    worker = stats.register()
    [held] = stats.claim(worker).jobs
    stats.cancel(held["id"])
    [ran] = stats.rows("select * from {}.run_job(%s, %s, 1)", worker, held["id"])
    assert (ran["answer"], ran["state"], stats.state(held["id"])) == ("settled", "cancelled", "cancelled")


def test_who_does_not_hold_a_job_runs_nothing(stats: Protocol) -> None:
    register(stats, "shrug", "stats.shrug(jsonb)")
    stats.enqueue("shrug")
    worker = stats.register()
    [held] = stats.claim(worker).jobs
    for who, attempt in ((worker, 2), (worker + 1, 1)):
        [ran] = stats.rows("select * from {}.run_job(%s, %s, %s)", who, held["id"], attempt)
        assert ran["answer"] == "lost"
    assert stats.rows("select * from stats.said") == []
    assert stats.state(held["id"]) == "running"


def test_sessions_share_the_jobs_and_none_runs_twice(dsn: str, stats: Protocol) -> None:
    # spec: ST-8
    register(stats, "derive", "stats.derive_units(jsonb)")
    stats.enqueue_many({"task": "derive", "payload": {"ids": [n]}} for n in range(60))

    def drain() -> None:
        with another(dsn) as session:
            process(session, batch=None)

    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(drain) for _ in range(3)]:
            done.result(60)
    assert units(stats) == list(range(60))
    assert stats.value("select count(*) from {}.history where state = 'completed'") == 60


def test_a_strictly_serial_queue_stays_so(dsn: str, stats: Protocol) -> None:
    # spec: ST-15
    stats.rows("select {}.limit_running(1, queue => 'default')")
    with processing(dsn, stats) as (job, _, call):
        register(stats, "double", "stats.double(jsonb)")
        other = stats.enqueue("double", {"n": 1})
        process(stats)
        assert [stats.state(one) for one in (job, other)] == ["running", "ready"]
        stats.rows("select pg_advisory_unlock_all()")
        call.result(30)
        assert [stats.state(one) for one in (job, other)] == ["completed"] * 2


def test_how_long_a_job_took_and_when_it_is_tried_again_count_from_its_end(stats: Protocol) -> None:
    # spec: ST-11
    stats.connection.execute(
        "create procedure stats.linger(payload jsonb) language plpgsql as $$ begin perform pg_sleep(0.2); "
        "if payload ? 'fail' then raise exception 'no'; end if; end $$"
    )
    register(stats, "linger", "stats.linger(jsonb)", retry={"delays": [0]})
    done, failed = stats.enqueue("linger"), stats.enqueue("linger", {"fail": True})
    process(stats, batch=2)
    took = "select finished_at - started_at >= interval '0.2 s' from {}.history where id = %s"
    assert stats.value(took, done)
    assert stats.value(
        "select live.run_at - attempt.started_at >= interval '0.2 s' from {}.jobs as live, shiftwork.attempts as attempt "
        "where live.id = %s and attempt.job = live.id",
        failed,
    )


def test_progress_is_there_once_the_job_is_committed_and_outside_of_a_job_it_is_nothing(
    stats: Protocol,
) -> None:
    stats.connection.execute(
        "create procedure stats.half(payload jsonb) language plpgsql as "
        "$$ begin perform shiftwork.report_progress(0.25); perform shiftwork.report_progress(0.5, 'half'); end $$"
    )
    register(stats, "half", "stats.half(jsonb)")
    job = stats.enqueue("half")
    process(stats)
    stats.rows("select {}.report_progress(1)")
    assert stats.rows("select job, attempt, fraction, message from {}.progress") == [
        {"job": job, "attempt": 1, "fraction": 0.5, "message": "half"}
    ]


def test_a_handler_that_is_gone_fails_its_job_with_that(stats: Protocol) -> None:
    register(stats, "double", "stats.double(jsonb)", retry={"max_attempts": 1})
    job = stats.enqueue("double", {"n": 1})
    stats.rows("drop function stats.double")
    process(stats)
    assert "there is no routine stats.double(jsonb)" in stats.job(job)["error"]["message"]


SPOILT = pytest.mark.parametrize(
    ("body", "code"),
    [
        ("insert into stats.lonely values (1), (1)", "23505"),  # found by the commit
        ("set local role shiftwork_nobody", "42501"),  # so that nothing of ours can be written
        ("delete from shiftwork.jobs where task = 'spoil'", "SW003"),
        (
            "insert into stats.sworn values (1)",
            "P0004",
        ),  # found by the commit, in a way that is rarely caught
    ],
)


def spoil(stats: Protocol, body: str) -> int:
    """A job whose end cannot be written, since its routine has done this."""
    stats.connection.execute(
        f"""create table stats.lonely (n int unique deferrable initially deferred);
            create table stats.sworn (n int);
            create function stats.swear() returns trigger language plpgsql as $$ begin assert false, 'never'; end $$;
            create constraint trigger swear after insert on stats.sworn deferrable initially deferred
              for each row execute function stats.swear();
            do $do$ begin create role shiftwork_nobody; exception when duplicate_object or unique_violation then null; end $do$;
            create procedure stats.spoil(payload jsonb) language plpgsql as $$ begin {body}; end $$""".encode()
    )
    register(stats, "spoil", "stats.spoil(jsonb)", retry={"max_attempts": 2, "delays": [0]})
    return stats.enqueue("spoil")


@SPOILT
def test_a_job_whose_end_cannot_be_written_has_failed_and_stops_nobody(
    stats: Protocol, body: str, code: str
) -> None:
    # fault: F29
    register(stats, "derive", "stats.derive_units(jsonb)")
    bad, good = spoil(stats, body), stats.enqueue("derive", {"ids": [1]})
    stats.connection.execute("call shiftwork.process_jobs()")
    assert (stats.state(bad), stats.state(good)) == ("failed", "completed")
    told = stats.job(bad)
    assert (told["error"]["code"], told["failures"]) == (code, 2)
    assert stats.rows("select * from stats.lonely") == []
