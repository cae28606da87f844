"""NOTIFY is sent only while somebody sleeps, for every way in, and never for what is rolled back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from tests.concurrency import elsewhere
from tests.harness import Protocol

WAYS: dict[str, Any] = {
    "batch": 'select {}.enqueue_many(\'[{{"task": "t", "queue": "mail"}}]\')',
    "keyed": "select {}.enqueue('t', queue => 'mail', unique_key => 'k')",
    "function": "select {}.enqueue('t', queue => 'mail')",
    "one": "select {}.enqueue_one('t', '{{}}', 'mail', null, null)",
    "insert": "insert into {}.jobs (task, queue) values ('t', 'mail')",
}


class Listener:
    """A session that listens, and says what it heard."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self.connection = connection
        self.heard: list[tuple[str, str]] = []
        connection.add_notify_handler(lambda note: self.heard.append((note.channel, note.payload)))

    def listen(self, channel: str) -> None:
        self.connection.execute(f"listen {channel}".encode())

    def news(self) -> list[tuple[str, str]]:
        """What came since the last call. Our own ping is behind all that was committed before it."""
        self.connection.execute("listen ping")
        self.connection.execute("notify ping")
        assert self.heard[-1] == ("ping", "")
        found, self.heard = self.heard[:-1], []
        return found


@contextmanager
def listening(dsn: str, *channels: str) -> Iterator[Listener]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        listener = Listener(connection)
        for channel in channels:
            listener.listen(channel)
        yield listener


@pytest.fixture
def ear(dsn: str) -> Iterator[Listener]:
    with listening(dsn, "shiftwork_wake", "shiftwork_done", "shiftwork_cancel") as listener:
        yield listener


def sleep(protocol: Protocol, seconds: float = 60) -> list[str]:
    return [row["virtual_transaction"] for row in protocol.rows("select * from {}.sleep(%s)", seconds)]


def test_nobody_is_notified_unless_somebody_sleeps(protocol: Protocol, ear: Listener) -> None:
    # spec: SH-6, D-6
    # fault: F36
    for text in WAYS.values():
        protocol.rows(text)
    assert ear.news() == []


@pytest.mark.parametrize("way", WAYS)
def test_every_way_in_wakes_a_sleeper_with_the_name_of_the_queue(
    protocol: Protocol, ear: Listener, way: str
) -> None:
    # spec: SH-6, D-6, ST-4
    assert sleep(protocol) == []
    protocol.rows(WAYS[way])
    assert ear.news() == [("shiftwork_wake", "mail")]


def test_the_queue_that_the_registry_names_is_woken(protocol: Protocol, ear: Listener) -> None:
    # spec: SH-6, D-6
    protocol.rows("insert into {}.tasks (name, queue) values ('t', 'mail')")
    sleep(protocol)
    ways: list[Any] = [
        'select {}.enqueue_many(\'[{{"task": "t"}}]\')',
        "select {}.enqueue('t')",
        "select {}.enqueue('t', '{{}}')",
        "select {}.enqueue_one('t', '{{}}', null, null, null)",
        "insert into {}.jobs (task) values ('t')",
    ]
    for text in ways:
        protocol.rows(text)
        assert ear.news() == [("shiftwork_wake", "mail")]


def test_a_row_that_says_when_it_was_made_comes_from_elsewhere_and_wakes_nobody(
    protocol: Protocol, ear: Listener
) -> None:
    sleep(protocol)
    protocol.rows(
        "insert into {}.jobs (task, queue, priority, max_attempts, run_at, created_at) "
        "values ('t', 'mail', 0, 5, now(), now())"
    )
    assert ear.news() == []


def test_an_insert_of_many_rows_wakes_each_queue_once(protocol: Protocol, ear: Listener) -> None:
    # spec: SH-6, D-6
    sleep(protocol)
    protocol.rows(
        "insert into {}.jobs (task, queue) select 't', 'q' || n % 2 from generate_series(1, 100) as n"
    )
    assert sorted(ear.news()) == [("shiftwork_wake", "q0"), ("shiftwork_wake", "q1")]


def test_a_statement_notifies_once_for_each_queue_and_once_for_many(
    protocol: Protocol, ear: Listener
) -> None:
    # spec: SH-6, D-6
    # fault: F36
    sleep(protocol)
    protocol.enqueue_many({"task": "t", "queue": f"q{n % 2}"} for n in range(100))
    assert sorted(ear.news()) == [("shiftwork_wake", "q0"), ("shiftwork_wake", "q1")]
    protocol.enqueue_many({"task": "t", "queue": f"q{n}"} for n in range(100))
    assert ear.news() == [("shiftwork_wake", "")]


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_heard_before_commit_or_after_rollback(
    protocol: Protocol, ear: Listener, way: str
) -> None:
    # spec: SH-6, D-6
    sleep(protocol)
    with protocol.connection.transaction(force_rollback=True):
        protocol.rows(WAYS[way])
    assert ear.news() == []
    with protocol.connection.transaction():
        protocol.rows(WAYS[way])
        assert ear.news() == []
    assert ear.news() == [("shiftwork_wake", "mail")]


def test_whoever_has_much_to_do_takes_the_sleep_of_all_back_and_they_are_told(
    protocol: Protocol, ear: Listener
) -> None:
    # spec: D-6
    protocol.rows("select {}.rouse()")
    assert ear.news() == [], "nobody sleeps"
    sleep(protocol)
    protocol.rows("select {}.rouse()")
    assert ear.news() == [("shiftwork_wake", "")]
    protocol.enqueue()
    assert ear.news() == []
    sleep(protocol)
    protocol.enqueue()
    assert ear.news() == [("shiftwork_wake", "default")]


def test_a_sleep_lapses_by_itself_and_no_shorter_one_lowers_it(protocol: Protocol, ear: Listener) -> None:
    # spec: D-6
    sleep(protocol, 3600)
    sleep(protocol, 0)
    sleep(protocol, -5)
    protocol.enqueue()
    assert ear.news() == [("shiftwork_wake", "default")]
    protocol.rows("select setval('shiftwork.asleep_until', last_value - 3600001) from shiftwork.asleep_until")
    protocol.enqueue()
    assert ear.news() == []


@pytest.mark.parametrize(
    "text", ["select {}.enqueue('greet', '{{}}')", "select {}.enqueue_one('greet', '{{}}', 'default', 0, 5)"]
)
def test_a_sleep_that_has_lapsed_is_forgotten_by_the_next_enqueue_and_one_that_has_not_is_kept(
    protocol: Protocol, ear: Listener, text: Any
) -> None:
    # spec: D-6
    for _ in range(2):
        sleep(protocol, 3600)
        protocol.rows(text)
        protocol.rows(text)
        assert ear.news() == [("shiftwork_wake", "default")] * 2
        protocol.rows(
            "select setval('shiftwork.asleep_until', last_value - 3600001) from shiftwork.asleep_until"
        )
        protocol.rows(text)
        assert ear.news() == []
        assert protocol.value("select pg_sequence_last_value('shiftwork.asleep_until')") is None


@pytest.mark.parametrize(
    "text", ["select {}.enqueue('greet', '{{}}')", "select {}.enqueue_one('greet', '{{}}', 'default', 0, 5)"]
)
def test_nobody_forgets_a_sleep_that_is_being_declared_or_keeps_others_from_declaring_theirs(
    dsn: str, protocol: Protocol, text: Any
) -> None:
    # spec: D-6
    def declared() -> object:
        return protocol.value("select pg_sequence_last_value('shiftwork.asleep_until')")

    protocol.rows("select setval('shiftwork.asleep_until', 1)")  # it has lapsed long ago
    with elsewhere(dsn) as other:
        with other.connection.transaction():
            other.rows("select {}.sleep(0)")  # as if it were about to say until when
            other.rows("select setval('shiftwork.asleep_until', 1)")
            protocol.rows(text)
            assert declared() == 1
        with protocol.connection.transaction():
            protocol.rows(text)
            assert declared() is None
            other.rows("set lock_timeout = '5s'")
            other.rows("select {}.sleep(3600)")
            protocol.rows(text)
            assert declared() is not None
    assert protocol.value("select count(*) from {}.jobs") == 3


def test_a_sleeper_is_told_which_transactions_were_already_writing(dsn: str, protocol: Protocol) -> None:
    # spec: SH-6, D-6
    with elsewhere(dsn) as other:
        with other.connection.transaction():
            other.enqueue()  # nobody slept: no notification will come of this
            [flying] = sleep(protocol)
            mine = other.value(
                "select virtualtransaction from pg_locks "
                "where pid = pg_backend_pid() and locktype = 'virtualxid'"
            )
            assert flying == mine
        assert sleep(protocol) == []


@pytest.mark.parametrize(
    ("form", "call"),
    [
        ("enqueue(text, text)", "select {}.enqueue('t', '{{}}')"),
        ("enqueue_one(text, text, text, int, int)", "select {}.enqueue_one('t', '{{}}', 'q', null, 5)"),
    ],
    ids=["enqueue", "enqueue_one"],
)
def test_a_sleeper_is_told_who_has_only_looked_yet_whether_anybody_sleeps(
    dsn: str, protocol: Protocol, form: str, call: Any
) -> None:
    # spec: SH-6, D-6
    source = str(protocol.value("select pg_get_functiondef(%s::regprocedure)", f"shiftwork.{form}"))
    look = source.index("pg_sequence_last_value('shiftwork.heed')")
    assert source.index("begin") < look < source.index("insert into")
    with elsewhere(dsn) as other:
        with other.connection.transaction(force_rollback=True):
            # So far it may have come when somebody says that he sleeps: it will not wake him.
            other.value("select pg_sequence_last_value('{}.heed')")
            [flying] = sleep(protocol)
            other.rows(call)
            assert sleep(protocol) == [flying]
        assert sleep(protocol) == []


def test_a_sleeper_is_told_of_what_is_prepared_and_may_be_committed_by_anybody(
    dsn: str, protocol: Protocol
) -> None:
    # spec: D-6
    if protocol.value("select current_setting('max_prepared_transactions')") == "0":
        pytest.skip("this server prepares no transactions")
    name = f"flying {protocol.connection.info.backend_pid}"
    prepare: Any = f"prepare transaction '{name}'"
    commit: Any = f"commit prepared '{name}'"
    with elsewhere(dsn) as other:
        other.rows("begin")
        other.enqueue()  # nobody slept: no notification will come of this
        other.rows(prepare)
        assert len(sleep(protocol)) == 1
        other.rows(commit)
    assert sleep(protocol) == []


def test_what_there_is_to_heed_is_kept_apart_and_told_by_one_look(protocol: Protocol) -> None:
    # spec: D-6, ST-1
    def heed() -> object:
        return protocol.value("select pg_sequence_last_value('{}.heed')")

    def lapse() -> None:
        protocol.rows(
            "select setval('shiftwork.asleep_until', last_value - 3600001) from shiftwork.asleep_until"
        )
        protocol.rows("select {}.enqueue('other', '{{}}')")

    protocol.rows("select {}.enqueue('other', '{{}}')")
    assert heed() is None
    sleep(protocol, 3600)
    assert heed() == 4
    lapse()
    assert heed() is None
    sleep(protocol, 3600)
    protocol.rows("insert into {}.tasks (name) values ('says nothing')")
    assert heed() == 4
    protocol.rows("insert into {}.tasks (name, max_attempts) values ('often', 9)")
    assert heed() == 5
    protocol.rows("select {}.rouse()")
    assert heed() == 1
    protocol.rows("update {}.tasks set priority = -1 where name = 'often'")
    assert heed() == 3
    sleep(protocol, 3600)
    assert heed() == 7
    lapse()
    assert heed() == 3


def test_whoever_says_that_he_sleeps_is_heeded_from_then_on(protocol: Protocol, ear: Listener) -> None:
    # spec: D-6
    protocol.rows("select {}.enqueue('t', '{{}}')")
    # All that a sleep() of former releases says.
    protocol.rows("select {}.declare_until('shiftwork.asleep_until', 60)")
    protocol.rows("select {}.enqueue('t', '{{}}')")
    assert ear.news() == [("shiftwork_wake", "default")]
    assert protocol.value("select pg_sequence_last_value('{}.heed')") == 4


def test_what_is_registered_and_who_sleeps_are_noted_one_after_the_other(
    dsn: str, protocol: Protocol
) -> None:
    # spec: D-6, ST-1
    first: Any = "insert into {}.tasks (name, queue) values ('first', 'mail')"
    verbs: list[Any] = ["select {}.sleep(60)", "select {}.rouse()"]
    for verb in verbs:
        with elsewhere(dsn) as other, other.connection.transaction():
            other.rows(verb)
            protocol.rows("set lock_timeout = '50ms'")
            with pytest.raises(psycopg.errors.LockNotAvailable):
                protocol.rows(first)
    protocol.rows(first)
    assert protocol.value("select pg_sequence_last_value('{}.heed')") == 1


def test_who_registers_a_task_in_a_long_transaction_is_heeded_at_once_and_keeps_nobody_from_sleeping(
    dsn: str, protocol: Protocol
) -> None:
    # spec: D-6, ST-1
    with elsewhere(dsn) as other:
        with other.connection.transaction():
            other.rows("insert into {}.tasks (name, queue) values ('the first', 'mail')")
            assert protocol.value("select pg_sequence_last_value('{}.heed')") == 1
            with protocol.connection.transaction():
                protocol.rows("set local lock_timeout = '5s'")
                sleep(protocol)
            assert protocol.value("select pg_sequence_last_value('{}.heed')") == 5
        with other.connection.transaction():
            other.rows("insert into {}.tasks (name, queue) values ('another', 'mail')")
            assert sleep(protocol) == []  # nothing for which to look again and again until it ends


def test_a_transaction_with_an_older_snapshot_wakes_a_sleeper_too(
    dsn: str, protocol: Protocol, ear: Listener
) -> None:
    # spec: SH-6, D-6
    with elsewhere(dsn) as other:
        other.connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        with other.connection.transaction():
            other.rows("select 1 from {}.tasks")
            sleep(protocol)
            other.enqueue()
        assert ear.news() == [("shiftwork_wake", "default")]


@pytest.mark.parametrize(
    "way", ["release", "reap", "stray", "retry", "revive", "run_now", "resume", "replace"]
)
def test_whatever_makes_a_job_claimable_wakes_a_sleeper(protocol: Protocol, ear: Listener, way: str) -> None:
    # spec: QU-8, D-6
    job = protocol.enqueue(unique_key="k", delay=60 if way in {"run_now", "replace"} else 0)
    worker = protocol.register()
    claimed = protocol.claim(worker)
    if way == "revive":
        protocol.complete(worker, claimed.jobs)
    if way == "resume":
        protocol.rows("select {}.pause(queue => 'default')")
    sleep(protocol)
    match way:
        case "release":
            protocol.release(worker, claimed.held)
        case "reap":
            protocol.lapse(worker)
            protocol.reap()
        case "stray":
            protocol.heartbeat(worker, answered=claimed.report["claim"])
        case "retry":
            protocol.settle(worker, {"id": job, "attempt": 1, "state": "scheduled", "delay": 1})
        case "revive":
            protocol.revive(job)
        case "run_now":
            protocol.run_now(job)
        case "resume":
            protocol.rows("select {}.resume(queue => 'default')")
        case _:
            protocol.enqueue(unique_key="k", unique_action="replace")
    woken = [news for news in ear.news() if news[0] == "shiftwork_wake"]  # the reaper also tells the loser
    assert woken == [("shiftwork_wake", "default")]


def test_finished_jobs_are_announced_while_somebody_waits_for_results(
    protocol: Protocol, ear: Listener
) -> None:
    # spec: D-6, D-28
    worker = protocol.register()
    protocol.enqueue()
    protocol.complete(worker, protocol.claim(worker).jobs)
    assert ear.news() == []

    protocol.rows("select {}.await_results(60)")
    done, again, cancelled = protocol.enqueue(), protocol.enqueue(), protocol.enqueue()
    expired = protocol.enqueue(expires_in=0)
    protocol.cancel(cancelled)
    protocol.expire()
    protocol.claim(worker)
    protocol.settle(
        worker,
        {"id": done, "attempt": 1, "state": "completed"},
        {"id": again, "attempt": 1, "state": "scheduled", "delay": 60},
    )
    heard = [("shiftwork_done", str(job)) for job in (cancelled, expired, done)]
    assert ear.news() == heard
    with protocol.connection.transaction(force_rollback=True):
        protocol.cancel(again)
    assert ear.news() == []


def test_the_holder_of_a_job_hears_that_it_is_to_be_cancelled(protocol: Protocol, ear: Listener) -> None:
    # spec: D-6
    job = protocol.enqueue()
    protocol.claim(protocol.register())
    protocol.cancel(job)
    assert ear.news() == [("shiftwork_cancel", str(job))]


def test_nobody_notifies_into_a_queue_that_is_more_than_half_full(protocol: Protocol, ear: Listener) -> None:
    # spec: D-6
    # fault: F35
    notifying = protocol.rows(
        "select oid::regprocedure::text as name, pg_get_functiondef(oid) as source from pg_proc "
        "where pronamespace = '{}'::regnamespace and prosrc like '%%pg_notify(%%'",
    )
    assert len(notifying) >= 3
    for function in notifying:
        # As if it were: filling eight gigabytes takes longer than we have.
        source = function["source"].replace("pg_notification_queue_usage()", "0.51")
        assert source != function["source"], function["name"]
        protocol.connection.execute(source.encode())
    sleep(protocol)
    protocol.rows("select {}.await_results(60)")
    for text in WAYS.values():
        protocol.rows(text)
    worker = protocol.register()
    first, *rest = protocol.claim(worker, "mail").jobs
    protocol.cancel(first["id"])
    protocol.complete(worker, rest)
    assert ear.news() == []
