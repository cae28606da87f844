"""What a heartbeat tells of jobs that were lost and of workers that are; how a loser learns of it at once; and how a reaper
gets at jobs that a stopped worker keeps locked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo
from psycopg.rows import dict_row

from shiftwork.migrate import migrate
from tests.conftest import copied
from tests.harness import Protocol


@contextmanager
def session(dsn: str, name: str) -> Iterator[psycopg.Connection[Any]]:
    """A session under a name of its own."""
    connection = psycopg.connect(make_conninfo(dsn, application_name=name))
    try:
        yield connection
    finally:
        connection.close()


def is_alive(connection: psycopg.Connection[Any]) -> bool:
    try:
        connection.execute("select 1")
    except psycopg.OperationalError:
        return False
    return True


def heard(connection: psycopg.Connection[Any], number: int) -> list[str]:
    return sorted(one.payload for one in connection.notifies(timeout=30, stop_after=number))


def test_a_heartbeat_says_why_each_job_was_lost(protocol: Protocol) -> None:
    # spec: QU-9
    worker, other = protocol.register(lease=60), protocol.register(lease=60)
    ids = [protocol.enqueue() for _ in range(5)]
    held = protocol.claim(worker).held
    protocol.release(worker, held[:2])
    protocol.claim(other, want=1)
    protocol.settle(worker, {"id": ids[2], "attempt": 1, "state": "completed"})
    protocol.settle(worker, {"id": ids[3], "attempt": 1, "state": "scheduled", "delay": 60})

    answer = protocol.heartbeat(worker, [*held, [999, 1]])
    assert sorted(answer["lost"]) == [*ids[:4], 999]
    assert answer["why"] == {
        str(ids[0]): "taken",
        str(ids[1]): "taken",
        str(ids[2]): "ended",
        str(ids[3]): "taken",
        "999": "missing",
    }
    assert protocol.heartbeat(worker, held[4:])["why"] == {}


def test_a_worker_that_was_given_up_learns_why_as_well(protocol: Protocol) -> None:
    # spec: QU-9
    worker = protocol.register()
    taken, ended = protocol.enqueue(), protocol.enqueue()
    held = protocol.claim(worker).held
    protocol.lapse(worker)
    protocol.reap()
    protocol.cancel(ended)
    answer = protocol.heartbeat(worker, held)
    assert (answer["alive"], answer["reap"]) == (False, False)
    assert answer["why"] == {str(taken): "taken", str(ended): "ended"}


def test_a_heartbeat_says_that_there_is_something_to_reap(protocol: Protocol) -> None:
    # spec: QU-8
    worker, other = protocol.register(lease=60), protocol.register(lease=60)
    assert protocol.heartbeat(worker)["reap"] is False
    protocol.lapse(other)
    assert protocol.heartbeat(worker)["reap"] is True
    protocol.reap(reaper=worker)
    assert protocol.heartbeat(worker)["reap"] is False
    protocol.lapse(worker)
    assert protocol.heartbeat(worker)["reap"] is False  # it is its own, and just renewed


def test_who_leaves_and_holds_nothing_is_gone_and_what_another_holds_is_left_to_the_reaper(
    protocol: Protocol,
) -> None:
    done, holder, reaper = protocol.register(), protocol.register(), protocol.register()
    job = protocol.enqueue()
    protocol.claim(holder)
    for worker, gone in ((done, True), (holder, False)):
        assert protocol.value("select {}.leave(%s)", worker)
        assert protocol.value("select gone_at is not null from {}.workers where id = %s", worker) is gone
    assert not protocol.value("select {}.leave(%s)", done)
    assert protocol.heartbeat(done, [])["alive"] is False
    assert protocol.reap(reaper=reaper) == {job: "ready"}
    assert protocol.heartbeat(reaper, [])["reap"] is False


def test_who_leaves_while_it_claims_is_left_to_the_reaper(dsn: str, protocol: Protocol) -> None:
    """What a claim takes, whose answer nobody awaits any more, cannot be seen before it is committed."""
    worker, job = protocol.register(), protocol.enqueue()
    with psycopg.Connection[dict[str, Any]].connect(dsn, row_factory=dict_row) as claiming:
        assert Protocol(claiming).claim(worker).held == [[job, 1]]
        assert protocol.value("select {}.leave(%s)", worker)
    assert protocol.reap() == {job: "ready"}


def test_whoever_loses_a_job_to_the_reaper_is_notified_of_its_id(dsn: str, protocol: Protocol) -> None:
    # spec: QU-8, QU-9
    worker = protocol.register()
    begun, ahead = protocol.enqueue(), protocol.enqueue()
    protocol.claim(worker, start=1)
    protocol.enqueue()  # nobody holds it
    protocol.lapse(worker)
    with psycopg.connect(dsn, autocommit=True) as loser:
        loser.execute("listen shiftwork_cancel")
        assert protocol.reap() == {begun: "ready", ahead: "ready"}
        assert heard(loser, 2) == sorted([str(begun), str(ahead)])


def test_sessions_of_a_lapsed_worker_that_keep_its_jobs_locked_are_ended(
    dsn: str, server: str, template: str, protocol: Protocol
) -> None:
    # spec: D-16
    worker, other = protocol.register(), protocol.register(lease=60)
    job, theirs = protocol.enqueue(), protocol.enqueue()
    protocol.claim(worker, want=1)
    protocol.claim(other, want=1)
    name = f"shiftwork {worker}"
    with (
        copied(server, template) as elsewhere,
        session(elsewhere, name) as foreign,
        session(dsn, f"shiftwork {other}") as busy,
        session(dsn, f"{name}7") as alike,
        session(dsn, "shiftwork client") as unnamed,
        session(dsn, name) as idle,
        session(dsn, name) as stopped,
    ):
        for connection in (foreign, alike, unnamed):
            connection.execute("select 1")  # each is in a transaction, as the stopped one is
        idle.execute("select 1")
        idle.commit()
        busy.execute("select shiftwork.fence(%s, 1)", (theirs,))
        stopped.execute("select shiftwork.fence(%s, 1)", (job,))

        assert protocol.reap() == {}  # its lease holds
        assert is_alive(stopped)
        protocol.lapse(worker)
        assert protocol.reap() == {job: "ready"}
        assert not is_alive(stopped)
        assert [is_alive(one) for one in (foreign, busy, alike, unnamed, idle)] == [True] * 5
    assert protocol.live(job)["resets"] == 1
    assert protocol.live(theirs)["worker"] == other
    assert protocol.value("select gone_at is not null from {}.workers where id = %s", worker)


def test_a_reaper_does_not_end_itself_nor_who_holds_nothing(dsn: str, protocol: Protocol) -> None:
    worker = protocol.register()
    job = protocol.enqueue()
    protocol.claim(worker)
    protocol.lapse(worker)
    name = f"shiftwork {worker}"
    with session(dsn, name) as harmless, session(dsn, name) as reaper:
        harmless.execute("select 1")
        reaper.execute("select 1")
        assert Protocol(reaper).reap() == {job: "ready"}  # nothing was locked
        reaper.commit()
        assert is_alive(harmless)


def test_a_worker_in_another_schema_has_names_of_its_own(dsn: str, protocol: Protocol) -> None:
    migrate(protocol.connection, "second")
    second = Protocol(protocol.connection, "second")
    worker, job = second.register(), second.enqueue()
    second.claim(worker)
    protocol.connection.execute("update second.workers set lease_until = 'epoch'")
    with session(dsn, f"shiftwork {worker}") as namesake, session(dsn, f"second {worker}") as stopped:
        namesake.execute("select 1")
        stopped.execute("select second.fence(%s, 1)", (job,))
        assert second.reap() == {job: "ready"}
        assert is_alive(namesake)
        assert not is_alive(stopped)


def test_a_reaper_that_may_not_end_sessions_warns_and_goes_on(dsn: str, protocol: Protocol) -> None:
    worker = protocol.register()
    locked, free = protocol.enqueue(), protocol.enqueue()
    protocol.claim(worker)
    protocol.lapse(worker)
    role = f"reaper_{uuid4().hex[:8]}"
    name = sql.Identifier(role)
    admin = protocol.connection
    admin.execute(sql.SQL("create role {} login").format(name))
    try:
        admin.execute(sql.SQL("grant usage on schema shiftwork to {}").format(name))
        for what in ("tables", "sequences", "routines"):
            grant = sql.SQL("grant all on all {} in schema shiftwork to {}")
            admin.execute(grant.format(sql.SQL(what), name))
        with session(dsn, f"shiftwork {worker}") as stopped, psycopg.connect(dsn, autocommit=True) as weak:
            stopped.execute("select shiftwork.fence(%s, 1)", (locked,))
            weak.execute(sql.SQL("set session authorization {}").format(name))
            said: list[str] = []
            weak.add_notice_handler(lambda notice: said.append(notice.message_primary or ""))
            assert Protocol(weak).reap() == {free: "ready"}
            assert is_alive(stopped)
            assert any("cannot be ended" in line for line in said)
    finally:
        admin.execute(sql.SQL("drop owned by {}").format(name))
        admin.execute(sql.SQL("drop role {}").format(name))
    assert protocol.reap() == {locked: "ready"}


@pytest.mark.parametrize("thorough", [False, True])
def test_a_reaper_looks_again_at_what_it_freed_once(dsn: str, protocol: Protocol, thorough: bool) -> None:
    worker = protocol.register()
    ids = [protocol.enqueue() for _ in range(6)]
    protocol.claim(worker)
    protocol.lapse(worker)
    with session(dsn, f"shiftwork {worker}") as one, session(dsn, f"shiftwork {worker}") as two:
        one.execute("select shiftwork.fence(%s, 1)", (ids[0],))
        two.execute("select shiftwork.fence(%s, 1), shiftwork.fence(%s, 1)", (ids[1], ids[2]))
        assert protocol.reap(thorough=thorough) == dict.fromkeys(ids, "ready")
