"""Workers enter their tasks in the registry: what differs, nothing else, and in one order."""

from __future__ import annotations

import json
import threading
from datetime import timedelta
from typing import Any

import psycopg

from shiftwork import App, operations
from tests.harness import Protocol, Row

WHOLE: Row = {
    "name": "send",
    "queue": "mail",
    "priority": -5,
    "max_attempts": 7,
    "retry": {"delays": [1, 2]},
    "max_resets": 1,
    "on_lost": "fail",
    "unique_scope": "unfinished",
    "unique_action": "refuse",
    "unique_window": 90.5,
    "description": "sends a letter",
}


def declare(protocol: Protocol, *tasks: Row) -> int:
    found = protocol.value("select {}.declare_tasks(%s)", json.dumps(tasks))
    assert isinstance(found, int)
    return found


def registered(protocol: Protocol, name: str = "send") -> Row:
    [row] = protocol.rows("select xmin::text as version, * from {}.tasks where name = %s", name)
    return row


def test_a_task_is_entered_with_all_that_is_said_of_it(protocol: Protocol) -> None:
    assert declare(protocol, WHOLE, {"name": "plain"}) == 2
    row = registered(protocol)
    assert row["unique_window"] == timedelta(seconds=90.5)
    assert {key: row[key] for key in WHOLE if key != "unique_window"} == {
        key: value for key, value in WHOLE.items() if key != "unique_window"
    }
    plain = registered(protocol, "plain")
    assert (plain["queue"], plain["on_lost"], plain["max_attempts"]) == (None, "requeue", None)


def test_what_says_nothing_new_writes_nothing(protocol: Protocol) -> None:
    declare(protocol, WHOLE, {"name": "plain"})
    before = registered(protocol)["version"], registered(protocol, "plain")["version"]
    assert declare(protocol, WHOLE, {"name": "plain"}) == 0
    assert declare(protocol, {**WHOLE, "priority": 3}, {"name": "plain"}) == 1
    after = registered(protocol)["version"], registered(protocol, "plain")["version"]
    assert before[0] != after[0]
    assert before[1] == after[1]


def test_what_is_left_out_stays_and_null_takes_it_back(protocol: Protocol) -> None:
    declare(protocol, WHOLE)
    assert declare(protocol, {"name": "send", "queue": "letters", "max_resets": None, "on_lost": None}) == 1
    row = registered(protocol)
    assert (row["queue"], row["max_resets"], row["on_lost"], row["max_attempts"]) == (
        "letters",
        None,
        "requeue",
        7,
    )


def test_what_only_operators_may_say_is_not_touched(protocol: Protocol) -> None:
    protocol.rows(
        """insert into {}.tasks (name, merge, handler) values ('send', '"sum"', 'shiftwork.clock()')"""
    )
    declare(protocol, {**WHOLE, "merge": "replace", "handler": "pg_sleep(100)"})
    row = registered(protocol)
    assert (row["merge"], row["handler"], row["queue"]) == ("sum", "shiftwork.clock()", "mail")


def test_said_twice_the_last_counts_and_what_makes_no_sense_is_refused(protocol: Protocol) -> None:
    assert declare(protocol, {"name": "send", "queue": "a"}, {"name": "send", "queue": "b"}) == 1
    assert registered(protocol)["queue"] == "b"
    bad: list[tuple[Any, str]] = [
        ({"name": "send"}, "SW001"),
        ([{"queue": "a"}], "23502"),
        ([{"name": "x", "max_attempts": 0}], "23514"),
        ([{"name": "x", "on_lost": "shrug"}], "23514"),
    ]
    for tasks, state in bad:
        try:
            protocol.value("select {}.declare_tasks(%s)", json.dumps(tasks))
        except psycopg.Error as error:
            assert error.sqlstate == state  # noqa: PT017
        else:
            raise AssertionError(f"{tasks} was taken")


def test_workers_that_start_together_do_not_get_into_each_others_way(dsn: str, protocol: Protocol) -> None:
    names = [f"task {n}" for n in range(40)]
    errors: list[Exception] = []

    def start(turn: int) -> None:
        order = names if turn % 2 else names[::-1]
        with psycopg.connect(dsn, autocommit=True) as connection:
            for round_ in range(5):
                try:
                    declare(
                        Protocol(connection), *({"name": name, "priority": round_ + turn} for name in order)
                    )
                except psycopg.Error as error:
                    errors.append(error)

    threads = [threading.Thread(target=start, args=(turn,)) for turn in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert protocol.value("select count(*) from {}.tasks") == 40


def test_a_plan_enters_tasks(dsn: str, protocol: Protocol) -> None:
    with App(dsn) as app:
        store = app.client.store
        assert app.client.perform(operations.declare_tasks(store, [WHOLE])) == 1
        assert app.client.perform(operations.declare_tasks(store, [WHOLE])) == 0
        assert app.client.perform(operations.declare_tasks(store, [])) == 0
    assert registered(protocol)["queue"] == "mail"
