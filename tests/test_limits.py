"""Limits on what runs at once in the whole cluster: never exceeded, and given back whatever becomes of a job."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.harness import Protocol, Row
from tests.test_moves import DEEDS, Deed, situations


def limit(protocol: Protocol, most: int | None, **what: str) -> bool:
    found = protocol.value(
        "select {}.limit_running(%s, queue => %s, task => %s)", most, what.get("queue"), what.get("task")
    )
    assert isinstance(found, bool)
    return found


def unpaired(protocol: Protocol) -> list[Row]:
    """Running jobs without a permit that they need, and permits of jobs that do not run, or more than one for a job."""
    return protocol.rows(
        """with needed as (
             select one.kind, one.name, job.id as job from {}.limits as one
               join shiftwork.jobs as job on job.state = 'running'
                and one.name = case one.kind when 'queue' then job.queue when 'task' then job.task else '' end
           ), lent as (select kind, name, job from shiftwork.permits where job is not null)
           (select 'missing' as what, * from needed except all select 'missing', * from lent)
           union all
           (select 'left over', * from lent except all select 'left over', * from needed)"""
    )


def rest(protocol: Protocol, kind: str, name: str = "") -> int:
    found = protocol.value(
        "select count(*) from {}.permits where kind = %s and name = %s and job is null", kind, name
    )
    assert isinstance(found, int)
    return found


@contextmanager
def elsewhere(dsn: str) -> Iterator[Protocol]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        yield Protocol(connection)


def test_no_more_of_a_queue_run_at_once_than_its_limit(protocol: Protocol) -> None:
    # spec: HO-16, D-23
    protocol.enqueue_many({"task": "greet", "queue": "mail"} for _ in range(5))
    other = protocol.enqueue(queue="other")
    assert limit(protocol, 2, queue="mail") is True
    assert limit(protocol, 2, queue="mail") is False
    one, two = protocol.register(), protocol.register()
    first = protocol.claim(one, "mail", "other", want=1)
    assert [job["queue"] for job in first.jobs] == ["mail"]
    second = protocol.claim(two, "mail", "other")
    assert [job["queue"] for job in second.jobs] in (["mail", "other"], ["other", "mail"])
    assert other in [job["id"] for job in second.jobs]
    assert (second.report["more"], second.report["full"]) == (False, True)
    assert protocol.claim(one, "mail").jobs == []
    protocol.complete(one, first.jobs)
    again = protocol.claim(one, "mail")
    assert len(again.jobs) == 1
    assert unpaired(protocol) == []


def test_a_limit_of_one_makes_a_queue_serial_in_the_whole_cluster(protocol: Protocol) -> None:
    # spec: D-23, ST-15
    jobs = [row["id"] for row in protocol.enqueue_many({"task": "greet", "queue": "one"} for _ in range(4))]
    limit(protocol, 1, queue="one")
    workers = [protocol.register() for _ in range(3)]
    order = []
    for _ in jobs:
        claims = [(worker, protocol.claim(worker, "one")) for worker in workers]
        [(worker, claimed)] = [(worker, claimed) for worker, claimed in claims if claimed.jobs]
        order += [job["id"] for job in claimed.jobs]
        protocol.complete(worker, claimed.jobs)
        workers.append(workers.pop(0))
    assert order == jobs


def test_what_is_full_does_not_hold_up_what_waits_behind_it(protocol: Protocol) -> None:
    # spec: HO-16
    protocol.enqueue_many({"task": "slow"} for _ in range(30))
    quick = [row["id"] for row in protocol.enqueue_many({"task": "quick"} for _ in range(3))]
    limit(protocol, 2, task="slow")
    worker = protocol.register()
    claimed = protocol.claim(worker, want=10, tasks=["slow", "quick"])
    assert [job["task"] for job in claimed.jobs].count("slow") == 2
    assert [job["id"] for job in claimed.jobs if job["task"] == "quick"] == quick
    assert (claimed.report["more"], claimed.report["full"]) == (False, True)
    assert unpaired(protocol) == []
    # With a cursor and a short sight it gets past them as well, and returns to them when it looks from the start.
    protocol.enqueue_many({"task": "quick"} for _ in range(3))
    places: Row = {}
    found: list[Row] = []
    for _ in range(10):
        wish = {"queue": "default", "places": places, "mixed": True}
        claimed = protocol.claim(worker, wish, tasks=["slow", "quick"], examine=5)
        found += claimed.jobs
        if not claimed.report["more"]:
            break
        places |= claimed.report["places"].get("default", {})
    assert [job["task"] for job in found] == ["quick"] * 3
    held = protocol.rows("select id, attempt from {}.jobs where state = 'running' and task = 'slow'")
    protocol.complete(worker, held[:1])
    assert [job["task"] for job in protocol.claim(worker, tasks=["slow", "quick"]).jobs] == ["slow"]


def test_a_limit_over_all_counts_every_queue_and_task(protocol: Protocol) -> None:
    # spec: HO-16, HO-36
    for queue in ("a", "b"):
        protocol.enqueue_many({"task": "greet", "queue": queue} for _ in range(5))
    limit(protocol, 3)
    limit(protocol, 2, queue="a")
    one, two = protocol.register(), protocol.register()
    first = protocol.claim(one, "a", "b")
    assert sorted(job["queue"] for job in first.jobs) == ["a", "a", "b"]
    assert first.report["more"] is False
    assert protocol.claim(two, "b").jobs == []
    protocol.complete(one, first.jobs[:1])
    assert len(protocol.claim(two, "b").jobs) == 1
    assert unpaired(protocol) == []


def leaving(deed: Deed) -> bool:
    return deed.verb not in {"enqueue", "promote", "claim", "revive", "run_now", "pause", "resume"}


# fault: I10
# spec: HO-16
@pytest.mark.parametrize("verb", sorted({deed.verb for deed in DEEDS if leaving(deed)}))
def test_whatever_a_verb_does_to_a_running_job_its_permits_fit(protocol: Protocol, verb: str) -> None:
    for situation in situations("running"):
        for deed in DEEDS:
            if deed.verb != verb:
                continue
            case = f"{deed.verb} ({deed.how or 'plain'}) on {situation}"
            with protocol.connection.transaction(force_rollback=True):
                job = situation.arrange(protocol)
                for what in ({"queue": "here"}, {"task": "greet"}, {}):
                    limit(protocol, 2, **what)
                assert unpaired(protocol) == [], case
                assert rest(protocol, "queue", "here") == 1, case
                deed.act(protocol, job)
                assert unpaired(protocol) == [], case
                runs = protocol.state(job["id"]) == "running"
                assert rest(protocol, "queue", "here") == (1 if runs else 2), case


@pytest.mark.parametrize("state", ["completed", "failed", "scheduled"])
def test_a_job_that_is_concluded_in_a_transaction_gives_its_permits_back_with_it(
    protocol: Protocol, state: str
) -> None:
    protocol.enqueue()
    limit(protocol, 1)
    worker = protocol.register()
    [job] = protocol.claim(worker).jobs
    outcome = {"id": job["id"], "attempt": 1, "state": state, "delay": 60}
    error = None if state == "completed" else {"code": "X", "message": "x"}
    request = Jsonb({"worker": worker, "outcomes": [outcome | {"error": error}]})
    with protocol.connection.transaction(force_rollback=True):
        protocol.rows("select {}.conclude(%s)", request)
        assert rest(protocol, "all") == 1
    assert (rest(protocol, "all"), unpaired(protocol)) == (0, [])
    protocol.rows("select {}.conclude(%s)", request)
    assert (rest(protocol, "all"), unpaired(protocol)) == (1, [])


def test_what_falls_under_a_limit_is_not_fetched_ahead(protocol: Protocol) -> None:
    # spec: HO-15, HO-17
    for queue, task in (("mail", "greet"), ("free", "slow"), ("free", "greet")):
        protocol.enqueue_many({"task": task, "queue": queue} for _ in range(6))
    limit(protocol, 5, queue="mail")
    limit(protocol, 5, task="slow")
    worker = protocol.register()
    claimed = protocol.claim(worker, "mail", "free", want=12, start=2)
    assert [(job["queue"], job["task"]) for job in claimed.jobs if job["started_at"]] == [
        ("mail", "greet")
    ] * 2
    ahead = [(job["queue"], job["task"]) for job in claimed.jobs if not job["started_at"]]
    assert ahead == [("free", "greet")] * 6
    assert unpaired(protocol) == []
    limit(protocol, 100)
    assert protocol.claim(worker, "free", want=5, start=0).jobs == []
    limit(protocol, None)
    assert protocol.claim(worker, "free", want=5, start=0).report["full"] is True


def test_what_runs_already_counts_when_a_limit_is_set(protocol: Protocol) -> None:
    # spec: HO-16
    protocol.enqueue_many({"task": "greet"} for _ in range(9))
    worker = protocol.register()
    running = protocol.claim(worker, want=4).jobs
    limit(protocol, 3, task="greet")
    assert unpaired(protocol) == []
    assert protocol.claim(worker).jobs == []
    protocol.complete(worker, running[:1])
    assert protocol.claim(worker).jobs == []
    protocol.complete(worker, running[1:2])
    assert len(protocol.claim(worker).jobs) == 1
    assert unpaired(protocol) == []


def test_a_limit_can_be_lowered_raised_and_lifted_while_jobs_run(protocol: Protocol) -> None:
    protocol.enqueue_many({"task": "greet"} for _ in range(40))
    worker = protocol.register()
    limit(protocol, 6, queue="default")
    running = protocol.claim(worker).jobs
    assert len(running) == 6
    limit(protocol, 2, queue="default")
    assert unpaired(protocol) == []
    protocol.complete(worker, running[:4])
    assert protocol.claim(worker).jobs == []
    limit(protocol, 3, queue="default")
    assert len(protocol.claim(worker).jobs) == 1
    limit(protocol, 2, queue="default")  # three are running
    limit(protocol, 5, queue="default")  # and the one too many is none any more
    assert len(protocol.claim(worker).jobs) == 2
    assert unpaired(protocol) == []
    limit(protocol, None, queue="default")
    assert len(protocol.claim(worker).jobs) == 10
    limit(protocol, 4, queue="default")
    assert (unpaired(protocol), protocol.claim(worker).jobs) == ([], [])
    held = protocol.rows("select id, attempt from {}.jobs where state = 'running'")
    protocol.complete(worker, held)
    assert protocol.value("select count(*) from {}.permits") == 4
    assert len(protocol.claim(worker).jobs) == 4


def test_a_limit_waits_for_claims_that_are_under_way(dsn: str, protocol: Protocol) -> None:
    # spec: HO-16
    protocol.enqueue_many({"task": "greet"} for _ in range(4))
    worker = protocol.register()
    with elsewhere(dsn) as other:
        setting = threading.Thread(target=limit, args=(other, 1))
        with protocol.connection.transaction():
            assert len(protocol.claim(worker, want=2).jobs) == 2
            setting.start()
            waits = (
                "select exists (select from pg_locks where locktype = 'advisory' and mode = 'ExclusiveLock'"
                " and not granted and pid = %s)"
            )
            while not protocol.value(waits, other.connection.info.backend_pid):
                pass
        setting.join()
    assert (unpaired(protocol), protocol.claim(worker).jobs) == ([], [])


def test_a_claim_that_finds_permits_in_another_hand_says_to_come_back(dsn: str, protocol: Protocol) -> None:
    for queue in ("a", "b"):
        protocol.enqueue(queue=queue)
    limit(protocol, 2)
    one, two = protocol.register(), protocol.register()
    with elsewhere(dsn) as other:
        with other.connection.transaction():
            assert len(other.claim(one, "a").jobs) == 1  # it has locked both, and lends one
            report = protocol.claim(two, "b").report
            assert (report["taken"], report["full"], report["next_due_in"]) == (0, True, 0)
        assert len(protocol.claim(two, "b").jobs) == 1
    assert unpaired(protocol) == []


def test_a_permit_whose_job_is_gone_comes_back_by_itself(protocol: Protocol) -> None:
    protocol.enqueue_many({"task": "greet"} for _ in range(5))
    limit(protocol, 2)
    worker = protocol.register()
    gone, moved = protocol.claim(worker).jobs
    protocol.rows("delete from {}.jobs where id = %s", gone["id"])
    protocol.rows(
        "update {}.jobs set state = 'scheduled', worker = null, claim = null, claimed_at = null, started_at = null,"
        " run_at = run_at + interval '1 hour' where id = %s",
        moved["id"],
    )
    assert protocol.claim(worker).jobs == []
    protocol.expire()
    assert unpaired(protocol) == []
    assert len(protocol.claim(worker).jobs) == 2
    # So does one of a limit that is gone, and one that was too many.
    limit(protocol, 1)
    held = protocol.rows("select id from {}.jobs where state = 'running'")
    protocol.rows("delete from {}.jobs where id = any(%s)", [row["id"] for row in held])
    protocol.rows("insert into {}.permits (kind, name) values ('queue', 'never')")
    protocol.expire()
    assert protocol.rows("select kind, job, surplus from {}.permits") == [
        {"kind": "all", "job": None, "surplus": False}
    ]


def test_whoever_gives_a_permit_back_wakes_who_sleeps(dsn: str, protocol: Protocol) -> None:
    # spec: HO-19
    protocol.enqueue_many({"task": "greet", "queue": queue} for queue in ("mail", "mail", "other"))
    limit(protocol, 1, queue="mail")
    worker = protocol.register()
    claimed = protocol.claim(worker, "mail")
    with psycopg.connect(dsn, autocommit=True) as listener:
        listener.execute("listen shiftwork_wake")
        protocol.complete(worker, claimed.jobs)
        assert list(listener.notifies(timeout=0.1)) == []  # nobody sleeps
        claimed = protocol.claim(worker, "mail")
        protocol.rows("select {}.sleep(60)")
        protocol.complete(worker, claimed.jobs)
        [note] = listener.notifies(timeout=5, stop_after=1)
        assert note.payload == "mail"


@pytest.mark.parametrize(
    "call",
    [
        "select {}.limit_running(0)",
        "select {}.limit_running(10001)",
        "select {}.limit_running(-1, queue => 'q')",
        "select {}.limit_running(1, queue => 'q', task => 't')",
        "select {}.limit_running(1, queue => '')",
        "select {}.limit_running(1, task => repeat('x', 201))",
    ],
)
def test_a_limit_that_cannot_be_is_refused(protocol: Protocol, call: Any) -> None:
    with pytest.raises(psycopg.Error) as refused:
        protocol.rows(call)
    assert refused.value.sqlstate == "SW001"


def test_workers_declare_limits_and_what_they_leave_out_stays(protocol: Protocol) -> None:
    limit(protocol, 9, queue="other")
    declared = Jsonb({"queues": {"mail": 5}, "tasks": {"resize": 2}, "all": 20})
    assert protocol.value("select {}.declare_limits(%s)", declared) == 3
    assert protocol.value("select {}.declare_limits(%s)", declared) == 0
    found = protocol.rows("select kind, name, max_running from {}.limits order by kind, name")
    assert [tuple(row.values()) for row in found] == [
        ("all", "", 20),
        ("queue", "mail", 5),
        ("queue", "other", 9),
        ("task", "resize", 2),
    ]


def test_a_change_of_a_limit_is_in_the_audit(protocol: Protocol) -> None:
    limit(protocol, 2, queue="mail")
    protocol.rows("select {}.limit_running(3, queue => 'mail', actor => 'ada')")
    rows = protocol.rows("select actor, verb, target, before, after from {}.audit order by id")
    assert rows[1] == {
        "actor": "ada",
        "verb": "limit",
        "target": {"queue": "mail"},
        "before": {"max_running": 2},
        "after": {"max_running": 3},
    }


# fault: I10
def test_claimers_at_once_never_exceed_a_limit(dsn: str, protocol: Protocol) -> None:
    # spec: HO-16, HO-36
    caps = {("queue", "a"): 3, ("task", "slow"): 2, ("all", ""): 5}
    for (kind, name), many in caps.items():
        limit(protocol, many, **({} if kind == "all" else {kind: name}))
    protocol.enqueue_many(
        {"task": task, "queue": queue}
        for _ in range(40)
        for task in ("slow", "quick")
        for queue in ("a", "b")
    )
    wrong: list[object] = []

    def work() -> None:
        with elsewhere(dsn) as own:
            worker = own.register(lease=600)
            while own.value("select exists (select from {}.jobs where state = 'ready')"):
                claimed = own.claim(worker, "a", "b", want=4)
                if not claimed.jobs:
                    continue
                if faults := unpaired(own):
                    wrong.append(faults)
                again = [[job["id"], 1] for job in claimed.jobs if job["attempt"] == 1 and job["id"] % 3 == 0]
                done = [job for job in claimed.jobs if [job["id"], 1] not in again]
                while again:  # somebody else's claim may have locked a row for a moment
                    answers = own.release(worker, again)
                    again = [held for held in again if answers[held[0]] == "busy"]
                while done:
                    answers = own.complete(worker, done)
                    done = [job for job in done if answers[job["id"]] == "busy"]

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    counts = """
      select kind, name, (select count(*) from shiftwork.jobs as job where job.state = 'running'
               and one.name = case one.kind when 'queue' then job.queue when 'task' then job.task else '' end) as many
        from {}.limits as one"""
    most: dict[tuple[str, str], int] = dict.fromkeys(caps, 0)
    while any(thread.is_alive() for thread in threads):
        for row in protocol.rows(counts):
            key = (row["kind"], row["name"])
            most[key] = max(most[key], row["many"])
    assert wrong == []
    assert all(most[key] <= caps[key] for key in caps), most
    assert max(most.values()) > 1, most
    assert protocol.value("select count(*) from {}.history where state = 'completed'") == 160
    assert protocol.value("select count(*) from {}.permits where job is not null") == 0
