"""The life of a job, verb by verb."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from shiftwork.cursor import Cursor
from tests.concurrency import elsewhere
from tests.harness import Protocol, Row


def claim_one(protocol: Protocol, worker: int, **more: object) -> Row:
    [job] = protocol.claim(worker, want=1, **more).jobs  # type: ignore[arg-type]
    return job


def retry(job: Row, *, delay: float | None = 30, **more: object) -> Row:
    error = {"code": "RuntimeError", "type": "RuntimeError", "message": "boom"}
    return {
        "id": job["id"],
        "attempt": job["attempt"],
        "state": "scheduled",
        "delay": delay,
        "error": error,
        **more,
    }


def failed(job: Row, message: str = "boom") -> Row:
    return {
        "id": job["id"],
        "attempt": job["attempt"],
        "state": "failed",
        "error": {"code": "POISON", "message": message},
    }


def test_a_job_is_enqueued_claimed_and_completed(protocol: Protocol) -> None:
    # spec: SH-5, SH-14, D-28
    job = protocol.enqueue("greet", {"name": "Ada"})
    worker = protocol.register()
    [claimed] = protocol.claim(worker).jobs
    assert (claimed["id"], claimed["payload"], claimed["attempt"]) == (job, {"name": "Ada"}, 1)
    assert (claimed["state"], claimed["worker"]) == ("running", worker)
    assert protocol.complete(worker, [claimed], "hello") == {job: "settled"}
    ended = protocol.job(job)
    assert (ended["state"], ended["result"], ended["error"]) == ("completed", "hello", None)
    assert ended["created_at"] <= ended["claimed_at"] <= ended["started_at"] <= ended["finished_at"]
    assert protocol.rows("select 1 as one from {}.jobs") == []


def test_a_claim_takes_ready_jobs_once_and_in_order(protocol: Protocol) -> None:
    # spec: SH-7, HO-4, HO-5, QU-4, D-7
    ids = {
        name: protocol.enqueue(name, priority=priority)
        for name, priority in [("late", 100), ("second", 5), ("first", -5), ("third", 5)]
    }
    protocol.enqueue("future", delay=3600, priority=-100)
    worker = protocol.register()
    first = protocol.claim(worker, want=2)
    assert [job["task"] for job in first.jobs] == ["first", "second"]
    assert first.report["more"] is True
    rest = protocol.claim(protocol.register(), want=10)
    assert [job["id"] for job in rest.jobs] == [ids["third"], ids["late"]]
    assert rest.report["more"] is False
    assert 3590 < rest.report["next_due_in"] <= 3600


def test_a_worker_gets_only_tasks_it_knows_from_queues_it_asks_for(protocol: Protocol) -> None:
    # spec: HO-4, HO-5, QU-4
    mine = protocol.enqueue("known", queue="mail")
    other = protocol.enqueue("known", queue="reports")
    protocol.enqueue("unknown", queue="mail", priority=-1)
    worker = protocol.register()
    assert [job["id"] for job in protocol.claim(worker, "mail", tasks=["known"]).jobs] == [mine]
    wishes = ({"queue": "mail", "want": 5}, {"queue": "reports", "want": 0})
    assert protocol.claim(worker, *wishes, tasks=["known"]).jobs == []
    assert [job["id"] for job in protocol.claim(worker, "reports", tasks=["known"]).jobs] == [other]


def test_two_workers_who_claim_at_once_share_the_jobs_and_wait_for_nobody(
    dsn: str, protocol: Protocol
) -> None:
    # spec: SH-7, HO-4, QU-4
    ids = [row["id"] for row in protocol.enqueue_many({"task": "greet"} for _ in range(20))]
    workers = [protocol.register(), protocol.register()]
    with elsewhere(dsn) as other, protocol.connection.transaction(), other.connection.transaction():
        first = [job["id"] for job in protocol.claim(workers[0], want=8).jobs]
        second = [job["id"] for job in other.claim(workers[1], want=20).jobs]
    assert first == ids[:8]
    assert second == ids[8:]


def test_a_prefetched_job_has_not_started_until_it_is_said(protocol: Protocol) -> None:
    # spec: HO-8, D-9
    protocol.enqueue()
    protocol.enqueue()
    worker = protocol.register()
    first, second = protocol.claim(worker, start=1).jobs
    assert first["started_at"] is not None
    assert second["started_at"] is None
    assert protocol.start(worker, [[second["id"], 1]]) == {second["id"]: "started"}
    assert protocol.live(second["id"])["started_at"] is not None
    assert protocol.start(worker, [[second["id"], 2]]) == {second["id"]: "lost"}
    assert protocol.start(protocol.register(), [[second["id"], 1]]) == {second["id"]: "lost"}


def test_a_failing_job_is_scheduled_again_and_keeps_its_error_and_its_attempts(protocol: Protocol) -> None:
    # spec: SH-15, HO-31, HO-41, D-9, D-28
    job = protocol.enqueue("greet", {"name": "Ada"})
    worker = protocol.register()
    for turn in (1, 2):
        claimed = claim_one(protocol, worker)
        assert claimed["attempt"] == turn
        assert protocol.settle(worker, retry(claimed, delay=60)) == {job: "settled"}
        waiting = protocol.live(job)
        assert (waiting["state"], waiting["failures"], waiting["error"]["message"]) == (
            "scheduled",
            turn,
            "boom",
        )
        assert (waiting["claimed_at"], waiting["started_at"]) == (None, None)
        assert waiting["created_at"] < waiting["run_at"]
        assert protocol.claim(worker).jobs == []
        protocol.shift_clock(timedelta(minutes=2 * turn))
        protocol.heartbeat(worker)
    protocol.complete(worker, [claim_one(protocol, worker)])
    attempts = protocol.rows("select * from {}.attempts where job = %s order by attempt", job)
    assert [(one["attempt"], one["outcome"], one["will_retry"], one["code"]) for one in attempts] == [
        (1, "failed", True, "RuntimeError"),
        (2, "failed", True, "RuntimeError"),
    ]
    assert all(one["worker"] == worker and one["claimed_at"] <= one["ended_at"] for one in attempts)
    ended = protocol.job(job)
    assert (ended["state"], ended["attempt"], ended["failures"], ended["error"]) == ("completed", 3, 2, None)


@pytest.mark.parametrize("ending", ["failed", "cancelled"])
def test_an_ending_without_return_keeps_its_cause(protocol: Protocol, ending: str) -> None:
    # spec: SH-17, HO-7, D-10, ST-2
    job = protocol.enqueue()
    worker = protocol.register()
    claimed = claim_one(protocol, worker)
    assert protocol.settle(worker, {**failed(claimed, "no such row"), "state": ending}) == {job: "settled"}
    ended = protocol.job(job)
    assert (ended["state"], ended["error"]["message"]) == (ending, "no such row")
    assert protocol.claim(worker).jobs == []


def test_a_snooze_counts_nothing(protocol: Protocol) -> None:
    # spec: D-9
    job = protocol.enqueue()
    worker = protocol.register()
    claimed = claim_one(protocol, worker)
    snooze = {"id": job, "attempt": claimed["attempt"], "state": "scheduled", "delay": 60}
    assert protocol.settle(worker, snooze) == {job: "settled"}
    assert (protocol.live(job)["failures"], protocol.rows("select 1 as one from {}.attempts")) == (0, [])


def test_a_retry_keeps_when_it_was_sent_and_takes_its_place_behind_those_that_waited(
    protocol: Protocol,
) -> None:
    # spec: HO-41, D-7
    first, second = protocol.enqueue(), protocol.enqueue()
    worker = protocol.register()
    sent = protocol.live(first)["created_at"]
    protocol.settle(worker, retry(claim_one(protocol, worker), delay=0))
    assert [job["id"] for job in protocol.claim(worker).jobs] == [second, first]
    assert protocol.live(first)["created_at"] == sent


def test_a_job_past_its_start_deadline_is_not_claimed_and_expires(protocol: Protocol) -> None:
    # spec: HO-6, HO-7
    ready = protocol.enqueue(expires_in=60)
    scheduled = protocol.enqueue(delay=30, expires_in=60)
    endless = protocol.enqueue()
    protocol.shift_clock(timedelta(minutes=2))
    worker = protocol.register()
    assert [job["id"] for job in protocol.claim(worker).jobs] == [endless]
    assert protocol.expire() == 2
    assert protocol.expire() == 0
    for job in (ready, scheduled):
        ended = protocol.job(job)
        assert (ended["state"], ended["error"]["code"]) == ("expired", "TASK_EXPIRED")
    assert protocol.rows("select 1 as one from {}.attempts") == []


def test_a_prefetched_job_whose_deadline_passes_is_not_started(protocol: Protocol) -> None:
    # spec: HO-6, HO-8
    job, other = protocol.enqueue(expires_in=60), protocol.enqueue()
    worker = protocol.register(lease=3600)
    held = protocol.claim(worker, start=0).held
    protocol.shift_clock(timedelta(minutes=2))
    assert protocol.start(worker, held) == {job: "expired", other: "started"}
    assert protocol.job(job)["error"]["code"] == "TASK_EXPIRED"
    assert protocol.rows("select 1 as one from {}.attempts") == []


@pytest.mark.parametrize("delay", [120, 60, None, 1e300])
def test_a_retry_that_would_land_after_the_start_deadline_fails_instead(
    protocol: Protocol, delay: float | None
) -> None:
    # spec: HO-6
    job = protocol.enqueue(expires_in=60)
    worker = protocol.register(lease=3600)
    claimed = claim_one(protocol, worker)
    if delay is None:
        protocol.shift_clock(timedelta(minutes=2))
    assert protocol.settle(worker, retry(claimed, delay=delay)) == {job: "settled"}
    assert protocol.state(job) == "failed"
    [attempt] = protocol.rows("select * from {}.attempts")
    assert attempt["will_retry"] is False


def test_a_job_that_waits_for_its_retry_expires_and_one_that_runs_does_not(protocol: Protocol) -> None:
    # spec: HO-6
    waits, runs = protocol.enqueue(expires_in=60), protocol.enqueue(expires_in=60)
    worker = protocol.register(lease=3600)
    claimed = protocol.claim(worker, want=2).jobs
    assert protocol.settle(worker, retry(claimed[0], delay=30)) == {waits: "settled"}
    protocol.shift_clock(timedelta(minutes=2))
    assert protocol.expire() == 1
    assert (protocol.state(waits), protocol.state(runs)) == ("expired", "running")


def test_a_worker_that_lost_its_job_changes_nothing_and_is_told(protocol: Protocol) -> None:
    # spec: D-16, HO-8, QU-6
    job = protocol.enqueue()
    late, quick = protocol.register(), protocol.register()
    stale = claim_one(protocol, late)
    protocol.lapse(late)
    assert protocol.reap() == {job: "ready"}
    fresh = claim_one(protocol, quick)
    before = protocol.live(job)

    assert protocol.settle(late, retry(stale)) == {job: "lost"}
    assert protocol.complete(late, [stale], "late") == {job: "lost"}
    assert protocol.release(late, [[job, 1]]) == {job: "lost"}
    assert protocol.start(late, [[job, 1]]) == {job: "lost"}
    assert protocol.heartbeat(late, [[job, 1]])["lost"] == [job]
    with pytest.raises(psycopg.Error) as lost:
        protocol.rows("select {}.fence(%s, %s)", job, 1)
    assert lost.value.sqlstate == "SW003"
    assert protocol.live(job) == before

    protocol.rows("select {}.fence(%s, %s)", job, 2)
    assert protocol.complete(quick, [fresh], "quick") == {job: "settled"}
    assert protocol.complete(late, [stale], "late") == {job: "lost"}
    assert protocol.job(job)["result"] == "quick"


def test_a_worker_whose_lease_lapsed_may_still_finish_what_nobody_took(protocol: Protocol) -> None:
    # spec: QU-7
    job = protocol.enqueue()
    worker = protocol.register()
    claimed = claim_one(protocol, worker)
    protocol.lapse(worker)
    assert protocol.complete(worker, [claimed]) == {job: "settled"}


def test_an_outcome_sent_again_answers_already(protocol: Protocol) -> None:
    # spec: D-16
    ids = [row["id"] for row in protocol.enqueue_many({"task": "greet"} for _ in range(3))]
    worker = protocol.register()
    done, again, poisoned = protocol.claim(worker).jobs
    outcomes = [
        {"id": done["id"], "attempt": 1, "state": "completed", "result": 1},
        retry(again, delay=0),
        failed(poisoned),
    ]
    assert protocol.settle(worker, *outcomes) == dict.fromkeys(ids, "settled")
    assert protocol.settle(worker, *outcomes) == dict.fromkeys(ids, "already")
    assert claim_one(protocol, worker)["attempt"] == 2
    assert protocol.settle(worker, *outcomes) == dict.fromkeys(ids, "already")
    assert [protocol.job(job)["failures"] for job in ids] == [0, 1, 1]


def test_a_claim_by_a_worker_that_was_given_up_takes_nothing(protocol: Protocol) -> None:
    # spec: QU-6
    protocol.enqueue()
    worker = protocol.register()
    protocol.lapse(worker)
    assert protocol.claim(worker).report["alive"] is False
    assert protocol.claim(987654321).report["alive"] is False
    protocol.reap()
    assert protocol.heartbeat(worker)["alive"] is False
    assert protocol.claim(worker).jobs == []


def test_a_heartbeat_renews_one_lease_for_all_and_the_reaper_leaves_it_alone(protocol: Protocol) -> None:
    # spec: SH-21, QU-6, QU-8
    protocol.enqueue_many({"task": "greet"} for _ in range(5))
    worker = protocol.register(lease=10)
    held = protocol.claim(worker).held
    protocol.shift_clock(timedelta(seconds=8))
    assert protocol.heartbeat(worker, held, lease=10) == {
        "alive": True,
        "lost": [],
        "cancel": [],
        "strays": [],
        "why": {},
        "reap": False,
    }
    protocol.shift_clock(timedelta(seconds=16))
    assert protocol.reap() == {}
    protocol.shift_clock(timedelta(seconds=19))
    assert protocol.reap(reaper=worker) == {}  # never its own
    assert protocol.reap() == dict.fromkeys([job for job, _ in held], "ready")


def test_the_reaper_reads_the_lease_again_under_its_lock(dsn: str, protocol: Protocol) -> None:
    # spec: QU-8
    protocol.enqueue()
    worker = protocol.register()
    held = protocol.claim(worker).held
    protocol.lapse(worker)
    with elsewhere(dsn) as other:
        with other.connection.transaction():
            other.heartbeat(worker, held)
            assert protocol.reap() == {}
        assert protocol.reap() == {}
    assert protocol.heartbeat(worker, held)["lost"] == []


def test_a_job_whose_code_had_not_begun_loses_nothing_with_its_worker(protocol: Protocol) -> None:
    # spec: D-2, D-9
    job = protocol.enqueue()
    worker = protocol.register()
    protocol.claim(worker, start=0)
    protocol.lapse(worker)
    assert protocol.reap() == {job: "ready"}
    after = protocol.live(job)
    assert (after["resets"], after["failures"], after["attempt"]) == (0, 0, 1)
    assert protocol.rows("select 1 as one from {}.attempts") == []


def test_a_job_that_kills_its_worker_again_and_again_ends_as_failed(protocol: Protocol) -> None:
    # spec: SH-22, D-2, D-9, HO-31
    job = protocol.enqueue(max_attempts=1)  # resets are bounded on their own
    for turn in (1, 2, 3):
        worker = protocol.register()
        assert claim_one(protocol, worker)["attempt"] == turn
        protocol.lapse(worker)
        assert protocol.reap() == {job: "ready" if turn < 3 else "failed"}
    ended = protocol.job(job)
    assert (ended["state"], ended["resets"], ended["failures"]) == ("failed", 3, 0)
    assert ended["error"]["code"] == "WORKER_CRASHED"
    attempts = protocol.rows("select outcome, will_retry, code from {}.attempts order by attempt")
    assert [(one["outcome"], one["will_retry"]) for one in attempts] == [
        ("lost", True),
        ("lost", True),
        ("lost", False),
    ]


@pytest.mark.parametrize(
    ("on_lost", "max_resets", "answer"), [("fail", None, "failed"), ("requeue", 0, "failed")]
)
def test_the_registry_says_what_becomes_of_a_lost_job(
    protocol: Protocol, on_lost: str, max_resets: int | None, answer: str
) -> None:
    # spec: D-2
    protocol.rows(
        "insert into {}.tasks (name, on_lost, max_resets) values ('greet', %s, %s)", on_lost, max_resets
    )
    job = protocol.enqueue()
    worker = protocol.register()
    protocol.claim(worker)
    protocol.lapse(worker)
    assert protocol.reap() == {job: answer}


def test_a_thorough_reaper_finds_jobs_whose_worker_has_no_row(protocol: Protocol) -> None:
    # spec: D-2, QU-8
    job = protocol.enqueue()
    worker = protocol.register()
    protocol.claim(worker)
    protocol.rows("delete from {}.workers where id = %s", worker)
    assert protocol.reap() == {}
    assert protocol.reap(thorough=True) == {job: "ready"}


def test_a_locked_job_of_a_lapsed_worker_is_taken_once_it_is_free(dsn: str, protocol: Protocol) -> None:
    # spec: D-16, QU-8
    job, other = protocol.enqueue(), protocol.enqueue()
    worker = protocol.register()
    protocol.claim(worker)
    protocol.lapse(worker)
    with elsewhere(dsn) as handler:
        with handler.connection.transaction():
            handler.rows("select {}.fence(%s, 1)", job)
            assert protocol.reap() == {other: "ready"}
            assert protocol.state(job) == "running"
        assert protocol.reap() == {job: "ready"}


def test_released_jobs_keep_their_place_and_nothing_is_counted(protocol: Protocol) -> None:
    # spec: HO-8, D-2
    first, second = protocol.enqueue(), protocol.enqueue()
    worker = protocol.register()
    before = protocol.live(first)
    assert protocol.release(worker, [[claim_one(protocol, worker)["id"], 1]]) == {first: "released"}
    after = protocol.live(first)
    assert {key for key in before if before[key] != after[key]} == {"attempt"}
    assert [job["id"] for job in protocol.claim(worker).jobs] == [first, second]


def test_a_job_whose_claim_was_never_answered_is_a_stray_and_goes_back(protocol: Protocol) -> None:
    # spec: D-16
    protocol.enqueue_many({"task": "greet"} for _ in range(3))
    worker = protocol.register()
    held = protocol.claim(worker, want=1)
    unheard = protocol.claim(worker, want=1)
    running = protocol.claim(worker, want=1)
    answer = protocol.heartbeat(worker, held.held, answered=unheard.report["claim"])
    assert answer["strays"] == [unheard.jobs[0]["id"]]
    stray = protocol.live(unheard.jobs[0]["id"])
    assert (stray["state"], stray["resets"], stray["failures"]) == ("ready", 0, 0)
    assert protocol.state(running.jobs[0]["id"]) == "running"  # its answer may still be on the wire


def test_a_settled_batch_answers_for_each_and_waits_for_no_lock(dsn: str, protocol: Protocol) -> None:
    # spec: D-16
    ids = [row["id"] for row in protocol.enqueue_many({"task": "greet"} for _ in range(4))]
    worker = protocol.register()
    jobs = protocol.claim(worker).jobs
    with elsewhere(dsn) as handler, handler.connection.transaction():
        handler.rows("select {}.fence(%s, 1)", ids[1])
        answers = protocol.settle(
            worker,
            {"id": ids[0], "attempt": 1, "state": "completed", "result": {"deep": [1, None]}},
            {"id": ids[1], "attempt": 1, "state": "completed"},
            {"id": ids[2], "attempt": 7, "state": "completed"},
            {"id": ids[3], "attempt": 1, "state": "unheard of"},
            {"id": 999999, "attempt": 1, "state": "completed"},
        )
    assert answers == {ids[0]: "settled", ids[1]: "busy", ids[2]: "lost", ids[3]: "refused", 999999: "lost"}
    assert protocol.complete(worker, jobs[1:]) == dict.fromkeys(ids[1:], "settled")


def test_a_fenced_transaction_keeps_its_job_until_it_commits(dsn: str, protocol: Protocol) -> None:
    # spec: D-16
    job = protocol.enqueue()
    worker = protocol.register()
    claimed = claim_one(protocol, worker)
    with elsewhere(dsn) as reaper:
        with protocol.connection.transaction():
            protocol.rows("select {}.fence(%s, %s)", job, 1)
            reaper.lapse(worker)
            assert reaper.reap() == {}
            assert protocol.complete(worker, [claimed]) == {job: "settled"}
        assert reaper.reap() == {}
    assert protocol.state(job) == "completed"


def test_one_statement_over_both_rooms_sees_a_job_once_while_it_moves(dsn: str, protocol: Protocol) -> None:
    # spec: D-11
    job = protocol.enqueue()
    worker = protocol.register()
    claimed = claim_one(protocol, worker)
    with elsewhere(dsn) as mover:
        with mover.connection.transaction():
            mover.complete(worker, [claimed])
            assert protocol.state(job) == "running"
            assert mover.state(job) == "completed"
        assert protocol.state(job) == "completed"


def test_state_and_timestamps_cannot_disagree(protocol: Protocol) -> None:
    # spec: SH-2, SH-3, HO-7, QU-5, D-10, D-11, ST-2
    wrong = [
        "update {}.jobs set state = 'running'",
        "update {}.jobs set state = 'running', worker = 1",
        "update {}.jobs set state = 'waiting', claimed_at = now()",
        "update {}.jobs set worker = 1, claimed_at = now()",
        "update {}.jobs set state = 'completed'",
        "update {}.jobs set state = 'failed', worker = 1, claimed_at = now()",
        "insert into {}.jobs (task, state, created_at, run_at, queue, priority, max_attempts)"
        " select task, 'running', created_at, run_at, queue, priority, max_attempts from {}.jobs",
        "update {}.jobs set attempt = -1",
        "update {}.jobs set max_attempts = 0",
        "update {}.jobs set task = ''",
        "update {}.jobs set task = repeat('x', 201)",
        "update {}.jobs set queue = ''",
        "update {}.jobs set payload = '[]'",
        "insert into {}.history (id, state, priority, run_at, created_at, attempt, failures, resets, max_attempts, task, queue,"
        " payload, tags, forget_on) select id, state, priority, run_at, created_at, 0, 0, 0, 5, task, queue, payload, tags,"
        " current_date from {}.jobs",
    ]
    protocol.enqueue()
    for statement in wrong:
        with pytest.raises(psycopg.errors.CheckViolation):
            protocol.connection.execute(statement.replace("{}", "shiftwork").encode())
    with pytest.raises(psycopg.errors.CheckViolation, match='job 1 cannot be "waiting" like this') as told:
        protocol.rows("update {}.jobs set state = 'waiting'")
    assert told.value.diag.message_hint is not None
    assert "has a worker and claimed_at" in told.value.diag.message_hint
    worker = protocol.register()
    protocol.complete(worker, [claim_one(protocol, worker)])
    for statement in ["state = 'running'", "finished_at = null", "error = '{}'", "state = 'failed'"]:
        with pytest.raises(psycopg.errors.CheckViolation):
            protocol.connection.execute(f"update shiftwork.history set {statement}".encode())


def test_only_the_clock_of_the_database_counts_and_tests_may_shift_it(protocol: Protocol) -> None:
    # spec: D-26
    protocol.shift_clock(timedelta(days=400))
    job = protocol.enqueue(delay=60)
    row = protocol.live(job)
    assert row["created_at"] > datetime.now(UTC) + timedelta(days=399)
    assert row["run_at"] - row["created_at"] == timedelta(minutes=1)
    worker = protocol.register()
    assert protocol.claim(worker).jobs == []
    protocol.shift_clock(timedelta(days=400, minutes=2))
    protocol.heartbeat(worker)
    assert claim_one(protocol, worker)["claimed_at"] > row["run_at"]


def test_every_worker_is_new_and_says_who_it_is(protocol: Protocol) -> None:
    # spec: D-27
    # fault: F25
    first, second = (protocol.register(name="mailer", host="box", pid=7) for _ in range(2))
    labels = protocol.rows("select id, label, token, backend_pid from {}.workers order by id")
    assert [one["id"] for one in labels] == [first, second]
    assert labels[0]["label"] == f"mailer@box:7#{labels[0]['token']}"
    assert labels[0]["token"] != labels[1]["token"]
    assert labels[0]["backend_pid"] == protocol.connection.info.backend_pid


def test_jobs_can_be_listed_filtered_and_counted_by_state(protocol: Protocol) -> None:
    # spec: SH-32, SH-3
    ids = [row["id"] for row in protocol.enqueue_many({"task": "greet"} for _ in range(3))]
    protocol.enqueue("other", delay=60)
    worker = protocol.register()
    done, held, poisoned = protocol.claim(worker).jobs
    protocol.settle(worker, {"id": done["id"], "attempt": 1, "state": "completed"}, failed(poisoned))
    counts = protocol.rows("select state, count(*) as jobs from {}.all_jobs group by state order by state")
    assert [(one["state"], one["jobs"]) for one in counts] == [
        ("scheduled", 1),
        ("running", 1),
        ("completed", 1),
        ("failed", 1),
    ]
    newest = protocol.rows(
        "select id from {}.all_jobs where task = 'greet' order by id desc limit 2 offset 1"
    )
    assert [one["id"] for one in newest] == ids[1::-1]
    assert held["id"] in ids


def test_each_query_has_its_own_partial_index_and_the_hot_table_is_kept_clean(protocol: Protocol) -> None:
    # spec: SH-4, QU-30
    indexes = {
        row["indexname"]: row["indexdef"]
        for row in protocol.rows("select indexname, indexdef from pg_indexes where tablename = 'jobs'")
    }
    assert set(indexes) == {
        "jobs_pkey",
        "jobs_ready",
        "jobs_due",
        "jobs_held",
        "jobs_deadline",
        "jobs_unique",
        "jobs_parent",
    }
    assert all("WHERE" in text for name, text in indexes.items() if name != "jobs_pkey")
    options = protocol.value("select reloptions from pg_class where oid = '{}.jobs'::regclass")
    assert "fillfactor=80" in options
    assert "autovacuum_vacuum_scale_factor=0.02" in options


def test_an_ending_that_was_not_written_is_never_said_to_have_been(protocol: Protocol) -> None:
    # spec: D-16
    job, worker = protocol.enqueue(), protocol.register()
    claimed = claim_one(protocol, worker)
    assert protocol.cancel(job) == {job: "signalled"}
    protocol.lapse(worker)
    assert protocol.reap() == {job: "cancelled"}
    assert protocol.complete(worker, [claimed], "a result that is gone") == {job: "lost"}


def test_the_reaper_gets_past_rows_that_somebody_has_locked(dsn: str, protocol: Protocol) -> None:
    # spec: QU-8, D-2
    first, second = protocol.register(), protocol.register()
    locked = [protocol.enqueue() for _ in range(3)]
    protocol.claim(first, want=3)
    free = protocol.enqueue()
    protocol.claim(second)
    protocol.lapse(first)
    protocol.lapse(second)
    with elsewhere(dsn) as handler, handler.connection.transaction():
        handler.rows("select id from {}.jobs where id = any(%s) for no key update", locked)
        assert protocol.reap(most=3) == {free: "ready"}


def test_a_claim_in_a_mixed_queue_hides_nothing_behind_its_places(protocol: Protocol) -> None:
    # spec: QU-4, D-7
    ids = [protocol.enqueue("mine" if n % 2 else "other") for n in range(40)]
    worker, cursor, taken = protocol.register(), Cursor(look_at=1e9), []
    for _ in range(40):
        wish = cursor.wish({"default": None}, now=0.0)
        claimed = protocol.claim(worker, *wish["queues"], want=4, tasks=["mine"], examine=6, due=wish["due"])
        places = [
            (job["queue"], job["priority"], int(job["run_at"].timestamp() * 1e6), job["id"])
            for job in claimed.jobs
        ]
        cursor.learn(claimed.report, places, 0.0, 0.0)
        taken += [job["id"] for job in claimed.jobs]
        if not claimed.report["more"]:
            break
    assert taken == ids[1::2]


def test_a_job_that_takes_down_its_process_counts_a_reset_and_has_failed_once_it_did_so_too_often(
    protocol: Protocol,
) -> None:
    # spec: SH-22, D-2
    job, beside = protocol.enqueue(), protocol.enqueue()
    worker = protocol.register()
    for turn in (1, 2, 3):
        held = protocol.claim(worker).held
        answers = protocol.release(worker, held, {job: "killed by SIGSEGV", 0: "nobody"})
        assert answers == {job: "released" if turn < 3 else "failed", beside: "released"}
    assert protocol.release(worker, [[job, 3]], {job: "again"}) == {job: "lost"}
    found = protocol.job(job)
    assert (found["state"], found["resets"], found["failures"]) == ("failed", 3, 0)
    assert found["error"]["message"] == "killed by SIGSEGV; that was crash 3 of 3 that it may cause"
    assert protocol.live(beside)["resets"] == 0
    noted = protocol.rows("select outcome, code, error ->> 'message' as why from {}.attempts")
    assert noted == [{"outcome": "lost", "code": "WORKER_CRASHED", "why": "killed by SIGSEGV"}] * 3
