"""Two hands at one job at the same moment: who wins, and what the other is told.

Each race is held at its worst point by an open transaction, or by a lock put into a function's text. Nobody
sleeps.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta

import psycopg
import pytest

from tests.concurrency import elsewhere, in_thread, waiting_for_lock
from tests.harness import Protocol, Row
from tests.planted import Plant

ERROR = {"code": "BROKEN", "message": "it broke"}
ENDINGS: tuple[Row, ...] = (
    {"state": "completed"},
    {"state": "failed", "error": ERROR},
    {"state": "scheduled", "delay": 0.01, "error": ERROR},
)


@pytest.fixture
def other(dsn: str) -> Iterator[Protocol]:
    """The verbs over a second connection."""
    with elsewhere(dsn) as protocol:
        yield protocol


# spec: SH-21, D-16
def test_a_worker_that_finishes_late_is_refused_whatever_it_tries(protocol: Protocol) -> None:
    job = protocol.enqueue()
    slow, quick = protocol.register(), protocol.register()
    [lost] = held = protocol.claim(slow).held
    protocol.lapse(slow)
    assert protocol.reap() == {job: "ready"}
    [taken] = protocol.claim(quick).jobs
    before = protocol.live(job)

    for outcome in (
        {"state": "completed"},
        {"state": "failed", "error": ERROR},
        {"state": "scheduled", "delay": 1},
    ):
        assert protocol.settle(slow, {"id": job, "attempt": lost[1], **outcome}) == {job: "lost"}
    assert protocol.start(slow, held) == {job: "lost"}
    assert protocol.release(slow, held) == {job: "lost"}
    assert protocol.heartbeat(slow, held, answered=2**60)["lost"] == [job]
    with pytest.raises(psycopg.Error, match="does not hold it any more"):
        protocol.rows("select {}.fence(%s, %s)", *lost)
    assert protocol.live(job) == before
    assert protocol.complete(quick, [taken]) == {job: "settled"}


# spec: D-2, D-16
def test_a_reaper_that_meets_a_heartbeat_on_its_way_takes_nothing(
    protocol: Protocol, other: Protocol
) -> None:
    job = protocol.enqueue()
    worker = protocol.register()
    held = protocol.claim(worker).held
    protocol.lapse(worker)
    with protocol.connection.transaction():
        assert protocol.heartbeat(worker, held)["alive"] is True
        assert other.reap() == {}
        assert other.reap(thorough=True) == {}
    assert other.reap() == {}
    assert protocol.state(job) == "running"


@pytest.mark.parametrize("reaper_commits", [True, False])
def test_a_heartbeat_that_meets_a_reaper_waits_and_learns_how_it_ended(
    protocol: Protocol, other: Protocol, reaper_commits: bool
) -> None:
    job = protocol.enqueue()
    worker = protocol.register()
    held = protocol.claim(worker).held
    protocol.lapse(worker)
    with protocol.connection.transaction(force_rollback=not reaper_commits):
        assert protocol.reap() == {job: "ready"}
        late = in_thread(other.heartbeat, worker, held)
        waiting_for_lock(protocol.connection, other.connection)
    answer = late.result(30)
    assert answer["alive"] is not reaper_commits
    assert answer["lost"] == ([job] if reaper_commits else [])


def test_a_claim_that_meets_a_reaper_takes_nothing_for_a_worker_that_is_gone(
    protocol: Protocol, other: Protocol
) -> None:
    job = protocol.enqueue()
    worker = protocol.register()
    protocol.lapse(worker)
    with protocol.connection.transaction():
        assert protocol.reap() == {}
        claim = in_thread(other.claim, worker)
    assert claim.result(30).report["alive"] is False
    assert protocol.state(job) == "ready"


# spec: D-2
def test_a_worker_never_reaps_its_own_jobs(protocol: Protocol) -> None:
    job = protocol.enqueue()
    worker = protocol.register()
    protocol.claim(worker)
    protocol.lapse(worker)
    assert protocol.reap(reaper=worker, thorough=True) == {}
    assert protocol.state(job) == "running"
    assert protocol.reap(reaper=protocol.register()) == {job: "ready"}


# spec: SH-6, QU-20
def test_an_enqueue_that_is_rolled_back_leaves_no_job_and_wakes_nobody(
    protocol: Protocol, other: Protocol
) -> None:
    protocol.rows("select {}.sleep(60)")
    other.rows("listen shiftwork_wake")
    with protocol.connection.transaction(force_rollback=True):
        job = protocol.enqueue()
    protocol.rows("notify shiftwork_wake, 'after it'")
    assert next(other.connection.notifies()).payload == "after it"
    assert protocol.rows("select id from {}.all_jobs where id = %s", job) == []


# spec: HO-31
def test_a_deadline_that_passes_between_claim_and_start_ends_the_job_once(
    protocol: Protocol, other: Protocol
) -> None:
    worker = protocol.register(lease=3600)
    job = protocol.enqueue(expires_in=30)
    held = protocol.claim(worker, start=0).held
    protocol.shift_clock(timedelta(seconds=60))
    assert protocol.expire() == 0, "a job that is held is for its holder to end"
    with protocol.connection.transaction():
        assert protocol.start(worker, held) == {job: "expired"}
        assert other.start(worker, held) == {job: "busy"}
        assert other.expire() == 0
    assert other.start(worker, held) == {job: "lost"}
    assert (protocol.state(job), protocol.job(job)["error"]["code"]) == ("expired", "TASK_EXPIRED")


def test_a_retry_that_would_land_after_the_deadline_fails_and_a_snooze_expires(protocol: Protocol) -> None:
    worker = protocol.register()
    retried, snoozed = protocol.enqueue(expires_in=30), protocol.enqueue(expires_in=30)
    protocol.claim(worker)
    protocol.settle(
        worker,
        {"id": retried, "attempt": 1, "state": "scheduled", "delay": 60, "error": ERROR},
        {"id": snoozed, "attempt": 1, "state": "scheduled", "delay": 60},
    )
    assert (protocol.state(retried), protocol.state(snoozed)) == ("failed", "scheduled")
    protocol.shift_clock(timedelta(seconds=31))
    assert protocol.expire() == 1
    assert protocol.state(snoozed) == "expired"


# spec: SG-16
@pytest.mark.parametrize("first", ["settle", "heartbeat"])
def test_heartbeats_and_outcomes_of_the_same_jobs_never_wait_for_each_other(
    protocol: Protocol, other: Protocol, first: str
) -> None:
    worker = protocol.register()
    jobs = [protocol.enqueue() for _ in range(4)]
    claimed = protocol.claim(worker)
    held, strays = claimed.held[::-1], claimed.held[:2]
    other.rows("set statement_timeout = '30s'")
    with protocol.connection.transaction():
        if first == "settle":
            assert set(protocol.complete(worker, claimed.jobs).values()) == {"settled"}
            assert other.heartbeat(worker, held, answered=2**60)["lost"] == []
        else:
            answer = protocol.heartbeat(worker, claimed.held[2:], answered=2**60)
            assert answer["strays"] == [hold[0] for hold in strays]
            answers = other.complete(worker, claimed.jobs[::-1])
            assert answers == {job: "busy" if job in jobs[:2] else "settled" for job in jobs}


# spec: SG-18
def test_a_job_is_cancelled_before_its_start_while_it_runs_or_not_at_all(protocol: Protocol) -> None:
    worker = protocol.register()
    waits, later = protocol.enqueue(queue="elsewhere"), protocol.enqueue(delay=60)
    prefetched, running, returns, ended = (protocol.enqueue() for _ in range(4))
    assert protocol.cancel(waits, later) == {waits: "cancelled", later: "cancelled"}

    claimed = {job["id"]: job for job in protocol.claim(worker, want=4, start=0).jobs}
    hold = {id: [id, job["attempt"]] for id, job in claimed.items()}  # noqa: A001
    protocol.start(worker, [hold[running], hold[returns], hold[ended]])
    protocol.complete(worker, [claimed[ended]])
    answers = protocol.cancel(prefetched, running, returns, ended, reason="not wanted")
    assert answers == {prefetched: "signalled", running: "signalled", returns: "signalled", ended: "finished"}
    assert protocol.start(worker, [hold[prefetched]]) == {prefetched: "cancelled"}
    told = protocol.heartbeat(worker, [hold[running], hold[returns]])["cancel"]
    assert {one["id"]: one["reason"] for one in told} == {running: "not wanted", returns: "not wanted"}

    again = {"id": running, "attempt": 1, "state": "scheduled", "delay": 5, "error": ERROR}
    assert protocol.settle(worker, again) == {running: "settled"}
    assert protocol.complete(worker, [claimed[returns]]) == {returns: "settled"}
    states = {job: protocol.state(job) for job in (prefetched, running, returns, ended)}
    assert states == {prefetched: "cancelled", running: "cancelled", returns: "completed", ended: "completed"}
    assert protocol.cancel(running, ended, 10**12) == {
        running: "finished",
        ended: "finished",
        10**12: "unknown",
    }
    assert protocol.rows("select job from {}.signals") == []


def test_a_cancel_that_meets_a_claim_becomes_a_signal_to_whoever_got_the_job(
    protocol: Protocol, other: Protocol
) -> None:
    job = protocol.enqueue()
    worker = protocol.register()
    with protocol.connection.transaction():
        held = protocol.claim(worker).held
        assert other.cancel(job) == {job: "signalled"}
    assert [one["id"] for one in protocol.heartbeat(worker, held)["cancel"]] == [job]


@pytest.mark.parametrize("revived_first", [True, False])
def test_a_request_to_cancel_that_came_too_late_does_not_reach_a_later_life(
    protocol: Protocol, other: Protocol, revived_first: bool
) -> None:
    job = protocol.enqueue()
    worker = protocol.register()
    claimed = protocol.claim(worker)
    with protocol.connection.transaction():
        protocol.complete(worker, claimed.jobs)
        assert other.cancel(job) == {job: "signalled"}
    if revived_first:
        assert protocol.revive(job) == {job: "revived"}
        assert protocol.expire() == 0
    else:
        assert protocol.expire() == 0
        assert protocol.revive(job) == {job: "revived"}
    assert protocol.complete(worker, protocol.claim(worker).jobs) == {job: "settled"}


# spec: D-20, QU-23
@pytest.mark.parametrize("scope", ["pending", "unfinished", "window"])
@pytest.mark.parametrize("first_commits", [True, False])
def test_the_second_of_two_enqueues_with_one_key_waits_for_the_first(
    protocol: Protocol, other: Protocol, scope: str, first_commits: bool
) -> None:
    wish = {"task": "greet", "unique_key": "k", "unique_scope": scope}
    with protocol.connection.transaction(force_rollback=not first_commits):
        [first] = protocol.enqueue_many([wish])
        late = in_thread(other.enqueue_many, [wish])
        waiting_for_lock(protocol.connection, other.connection)
    [second] = late.result(30)
    assert (second["outcome"], second["id"] == first["id"]) == (
        ("existing", True) if first_commits else ("created", False)
    )
    assert protocol.value("select count(*) from {}.all_jobs") == 1


def test_reviving_and_enqueueing_the_same_keys_cannot_deadlock(
    dsn: str, protocol: Protocol, other: Protocol
) -> None:
    keyed = [{"task": "greet", "unique_key": key, "unique_scope": "unfinished"} for key in "ba"]
    ended = [row["id"] for row in protocol.enqueue_many(keyed)]
    worker = protocol.register()
    protocol.complete(worker, protocol.claim(worker).jobs)
    with elsewhere(dsn) as third:
        with protocol.connection.transaction(force_rollback=True):
            protocol.enqueue_many(keyed[1:])
            revival = in_thread(other.revive, *ended)
            waiting_for_lock(protocol.connection, other.connection)
            newcomers = in_thread(third.enqueue_many, keyed)
            waiting_for_lock(protocol.connection, third.connection)
        assert set(revival.result(30).values()) == {"revived"}
        assert {row["outcome"] for row in newcomers.result(30)} <= {"created", "existing"}
    assert protocol.value("select count(*) from {}.jobs where held_key is not null") == 2


# spec: D-16
def test_an_outcome_is_settled_only_if_it_was_written(protocol: Protocol, other: Protocol) -> None:
    """The row changes between the statement's snapshot and its lock: it is written as it is when it is locked."""
    protocol.rows(
        "create function public.hold_on() returns boolean return pg_advisory_xact_lock(7) is not null"
    )
    fence = "where held.id = told.id and"
    Plant("settle", fence, fence.replace("where", "where public.hold_on() and")).sow(protocol.connection)
    job = protocol.enqueue()
    worker = protocol.register()
    claimed = protocol.claim(worker)
    protocol.rows("select pg_advisory_lock(7)")
    outcome = in_thread(other.complete, worker, claimed.jobs)
    try:
        waiting_for_lock(protocol.connection, other.connection)
        protocol.rows("update {}.jobs set tags = array['changed'] where id = %s", job)
    finally:
        protocol.rows("select pg_advisory_unlock(7)")

    assert outcome.result(30)[job] == "settled"
    assert (protocol.state(job), protocol.job(job)["tags"]) == ("completed", ["changed"])


@pytest.mark.parametrize("second", [{"state": "failed", "error": ERROR}, {"state": "scheduled", "delay": 5}])
def test_of_two_outcomes_of_one_attempt_in_a_batch_one_counts(protocol: Protocol, second: Row) -> None:
    job = protocol.enqueue()
    worker = protocol.register()
    protocol.claim(worker)
    told = [{"id": job, "attempt": 1, **outcome} for outcome in ({"state": "completed"}, second)]
    rows = protocol.rows("select * from {}.settle(%s)", json.dumps({"worker": worker, "outcomes": told}))
    assert [row["answer"] for row in rows].count("settled") == 1
    assert len(rows) == 2
    assert len(protocol.rows("select id from {}.all_jobs where id = %s", job)) == 1
    assert protocol.value("select count(*) from {}.attempts") == 0


@pytest.mark.parametrize("place", [0, 1], ids=["before", "behind"])
@pytest.mark.parametrize("state", ["completed", "failed", "scheduled"])
def test_a_stale_outcome_beside_that_of_the_attempt_which_holds_the_job_is_told_so_and_leaves_no_trace(
    protocol: Protocol, state: str, place: int
) -> None:
    # spec: D-16
    job, neighbour = protocol.enqueue(), protocol.enqueue()
    worker = protocol.register()
    protocol.claim(worker, want=1)
    protocol.rows("select {}.complete(%s)", job)
    protocol.rows("select {}.revive(%s)", [job])
    protocol.claim(worker, want=2)
    failed = {"state": "failed", "error": {"code": "STALE"}}
    told: list[Row] = [
        {"id": job, "attempt": 2, "state": state, "error": {"code": "REAL"}},
        {"id": neighbour, "attempt": 1, **failed, "error": {"code": "OTHER"}},
    ]
    told.insert(place, {"id": job, "attempt": 1, **failed})
    rows = protocol.rows("select * from {}.settle(%s)", json.dumps({"worker": worker, "outcomes": told}))
    answers = sorted((row["id"], row["answer"]) for row in rows)
    assert answers == [(job, "lost"), (job, "settled"), (neighbour, "settled")]
    noted = protocol.rows("select job, attempt, code from {}.attempts order by job")
    real = [{"job": job, "attempt": 2, "code": "REAL"}] if state != "completed" else []
    assert noted == [*real, {"job": neighbour, "attempt": 1, "code": "OTHER"}]


VERBS = (
    *("claim", "claim", "settle", "settle", "settle", "release", "cancel", "reap", "revive", "heartbeat"),
    *("run_now", "expire", "promote", "purge", "enqueue"),
)
STEPS = 500


class Storm:
    """One of many sessions that ask for anything, of the same jobs and in any order; it believes that it holds what it once claimed."""

    def __init__(self, dsn: str, jobs: list[int], seed: int) -> None:
        self.dsn, self.jobs = dsn, jobs
        self.rng = random.Random(seed)
        self.held: list[list[int]] = []
        self.did: Counter[str] = Counter()

    def rage(self) -> Counter[str]:
        """As often as it may; gives what it has done, and what went wrong."""
        with elsewhere(self.dsn) as protocol:
            protocol.rows("set deadlock_timeout = '50ms'")
            self.worker = protocol.register(lease=0.2)
            for _ in range(STEPS):
                verb = self.rng.choice(VERBS)
                try:
                    self._ask(protocol, verb)
                except psycopg.Error as error:
                    verb = f"{error.sqlstate} by {verb}: {error}"
                self.did[verb] += 1
        return self.did

    def _ask(self, protocol: Protocol, verb: str) -> None:
        some = self.rng.sample(self.jobs, self.rng.randint(1, 60))
        self.rng.shuffle(self.held)
        many = self.rng.randint(1, 30)
        match verb:
            case "claim":
                if not protocol.heartbeat(self.worker, self.held)["alive"]:
                    self.worker = protocol.register(lease=0.2)
                self.held += protocol.claim(self.worker, want=many).held
            case "settle":
                told = [
                    {"id": job, "attempt": attempt, **self.rng.choice(ENDINGS)}
                    for job, attempt in self._let_go(many)
                ]
                protocol.settle(self.worker, *told)
            case "release":
                protocol.release(self.worker, self._let_go(many))
            case "heartbeat":
                protocol.heartbeat(self.worker, self.held)
            case "reap":
                protocol.reap(thorough=self.rng.random() < 0.3)
            case "enqueue":
                keys = self.rng.sample(range(50), 20)
                wishes = [{"task": "greet", "unique_key": f"{k}", "unique_scope": "unfinished"} for k in keys]
                self.jobs += [
                    row["id"] for row in protocol.enqueue_many(wishes) if row["outcome"] == "created"
                ]
            case "cancel" | "revive" | "run_now":
                getattr(protocol, verb)(*some)
            case "purge":
                protocol.rows("select {}.purge()")
            case _:
                getattr(protocol, verb)()

    def _let_go(self, many: int) -> list[list[int]]:
        first = {job: [job, attempt] for job, attempt in self.held[:many]}  # answers name the job alone
        self.held = self.held[many:]
        return list(first.values())


def test_in_a_storm_of_all_verbs_over_the_same_jobs_nobody_deadlocks(dsn: str, protocol: Protocol) -> None:
    # fault: F39
    made = protocol.enqueue_many({"task": "greet", "max_attempts": 5} for _ in range(200))
    jobs = [row["id"] for row in made]
    raging = [in_thread(Storm(dsn, jobs, seed).rage) for seed in range(16)]
    did = sum((one.result(120) for one in raging), Counter[str]())
    assert did.keys() == set(VERBS)
    deadlocks = "select deadlocks from pg_stat_database where datname = current_database()"
    assert protocol.value(deadlocks) == 0

    protocol.rows("update {}.workers set lease_until = 'epoch'")
    protocol.reap(thorough=True)
    worker = protocol.register()
    while protocol.value("select count(*) > 0 from {}.jobs"):
        protocol.expire()  # what was to be cancelled while somebody held its row
        protocol.rows("select {}.run_now(array(select id from shiftwork.jobs where state = 'scheduled'))")
        answers = protocol.complete(worker, protocol.claim(worker, want=1000).jobs)
        assert set(answers.values()) == {"settled"}
    ended = [row["id"] for row in protocol.rows("select id from {}.all_jobs order by id")]
    assert ended == sorted(jobs)
