"""What workers and people ask, through Python: the same plans, run by blocking and by awaiting callers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from shiftwork import App, operations
from shiftwork.cursor import Cursor
from shiftwork.database import Plan
from shiftwork.errors import FenceLost, Poison, Snooze
from shiftwork.job import Job, NewJob, State
from shiftwork.outcome import Raised, Returned, decide
from shiftwork.retry import Retry

Perform = Callable[[Plan[Any]], Any]


@pytest.fixture
def app(dsn: str) -> Iterator[App]:
    with App(dsn) as app:

        @app.task
        def greet(name: str) -> str:
            return f"hello {name}"

        yield app


@pytest.fixture(params=["blocking", "awaiting"])
def perform(app: App, request: pytest.FixtureRequest) -> Iterator[Perform]:
    """Run a plan on a connection of the app, in either world."""
    if request.param == "blocking":
        yield app.client.perform
        return
    with asyncio.Runner() as runner:
        yield lambda plan: runner.run(app.client.aperform(plan))
        app.close()


def enqueued(app: App, *names: str) -> list[int]:
    return [handle.id for handle in app.enqueue_many([app.find("greet").job(name) for name in names])]


def attempted(app: App, job: Job) -> object:
    args, kwargs = app.find(job.task).signature.decode(job.payload)
    return app.find(job.task).function(*args, **kwargs)


def test_a_job_goes_through_its_life_in_python(app: App, perform: Perform) -> None:
    # spec: D-16, D-28
    store, [job] = app.client.store, enqueued(app, "Ada")
    worker = perform(operations.register(store, name="tester", lease=60))
    claimed = perform(operations.claim(store, worker, {"default": None}, 10, tasks=["greet"]))
    [mine] = claimed.jobs
    assert (mine.id, mine.attempt, mine.state, claimed.more) == (job, 1, State.RUNNING, False)
    perform(operations.fence(store, job, 1))

    outcome = decide(mine, Returned(attempted(app, mine)), Retry())
    assert perform(operations.settle(store, worker, [outcome])) == {job: "settled"}
    assert perform(operations.settle(store, worker, [outcome])) == {job: "already"}
    assert app.job(job).result(timeout=5) == "hello Ada"
    with pytest.raises(FenceLost):
        perform(operations.fence(store, job, 1))
    assert perform(operations.leave(store, worker))


def test_a_retry_a_release_and_a_poisonous_job_end_as_they_should(app: App, perform: Perform) -> None:
    # spec: SH-15, SH-17
    store, [again, back, poison] = app.client.store, enqueued(app, "a", "b", "c")
    worker = perform(operations.register(store))
    jobs = {job.id: job for job in perform(operations.claim(store, worker, {"default": 3}, 3, start=2)).jobs}
    assert perform(operations.release(store, worker, [(back, 7)])) == {back: "lost"}
    assert perform(operations.release(store, worker, [(back, 1)])) == {back: "released"}
    outcomes = [
        decide(jobs[again], Raised(RuntimeError("once more")), Retry(max_attempts=2, delays=timedelta(0))),
        decide(jobs[poison], Raised(Poison("never")), Retry()),
    ]
    assert perform(operations.settle(store, worker, outcomes)) == {again: "settled", poison: "settled"}
    assert app.counts()[State.FAILED] == 1
    assert perform(operations.promote(store)) == 1
    ready = perform(operations.claim(store, worker, {"default": None}, 10)).jobs
    assert [(job.id, job.attempt, job.failures) for job in ready] == [(back, 2, 0), (again, 2, 1)]


def test_outcomes_encoded_once_carry_jobs_and_what_is_refused_says_why(app: App, perform: Perform) -> None:
    store, _ = app.client.store, enqueued(app, "a", "b", "c")
    worker = perform(operations.register(store))
    done, bad, cancelled = perform(operations.claim(store, worker, {"default": None}, 3)).jobs
    app.cancel([cancelled.id])
    outcomes = [
        operations.encode_outcome(
            decide(done, Returned(None), Retry()),
            [app.find("greet").job("Eve"), app.find("greet").job("Bob")],
        ),
        operations.encode_outcome(
            decide(bad, Returned(1), Retry()), [NewJob(task="", payload=msgspec.Raw(b"{}"))]
        ),
        operations.encode_outcome(decide(cancelled, Raised(Snooze(timedelta(hours=1))), Retry())),
    ]
    settled = perform(operations.settle_encoded(store, worker, outcomes))
    assert settled.answers == {done.id: "settled", bad.id: "refused", cancelled.id: "settled"}
    assert settled.states == {State.COMPLETED: [done.id], State.CANCELLED: [cancelled.id]}
    assert "task_name" in settled.problems.pop(bad.id)
    assert settled.problems == {}
    more = perform(operations.claim(store, worker, {"default": None}, 10)).jobs
    assert [job.payload["name"] for job in more] == ["Eve", "Bob"]
    assert perform(operations.settle_encoded(store, worker, outcomes[:1])).answers == {done.id: "already"}
    assert perform(operations.settle_encoded(store, worker, [])).answers == {}


def test_of_a_batch_that_is_completed_that_alone_is_said_to_who_wants_it_brief(
    app: App, perform: Perform
) -> None:
    store, ids = app.client.store, enqueued(app, "a", "b", "c")
    worker = perform(operations.register(store))
    jobs = perform(operations.claim(store, worker, {"default": None}, 3)).jobs
    first, second, third = (operations.encode_outcome(decide(job, Returned(1), Retry())) for job in jobs)
    settled = perform(operations.settle_encoded(store, worker, [first, second], brief=True))
    assert settled == operations.Settled({}, {}, {}, completed=True)
    assert app.counts()[State.COMPLETED] == 2
    settled = perform(operations.settle_encoded(store, worker, [first, third], brief=True))
    assert not settled.completed
    assert settled.answers == {ids[0]: "already", ids[2]: "settled"}
    nonsense = b'{"id":"that one","attempt":1,"state":"completed"}'
    assert not perform(operations.settle_encoded(store, worker, [nonsense], brief=True)).completed


def test_prefetched_jobs_are_started_and_what_is_lost_is_told(app: App, perform: Perform) -> None:
    # spec: HO-8, D-2
    store, ids = app.client.store, enqueued(app, "a", "b")
    worker = perform(operations.register(store, lease=60))
    claimed = perform(operations.claim(store, worker, {"default": None}, 2, start=0))
    assert [job.started_at for job in claimed.jobs] == [None, None]
    held = [(job, 1) for job in ids]
    assert perform(operations.start(store, worker, held)) == dict.fromkeys(ids, "started")

    app.cancel([ids[0]], "too late")
    pulse = perform(operations.heartbeat(store, worker, [*held, (99, 1)], answered=claimed.number))
    assert (pulse.alive, pulse.lost, pulse.cancel, pulse.strays) == (True, [99], {ids[0]: "too late"}, [])
    assert (pulse.why, pulse.reap) == ({99: "missing"}, False)

    perform(operations.leave(store, worker))
    assert perform(operations.reap(store)) == {ids[0]: "cancelled", ids[1]: "ready"}
    assert not perform(operations.heartbeat(store, worker, held)).alive


def test_queues_and_tasks_are_paused_and_history_is_kept_and_forgotten(app: App, perform: Perform) -> None:
    # spec: D-3, SH-31
    store, _ = app.client.store, enqueued(app, "Ada")
    worker = perform(operations.register(store))
    perform(operations.pause(store, task="greet", lasting=timedelta(hours=1), reason="repairs"))
    assert perform(operations.claim(store, worker, {"default": None}, 1)).jobs == []
    [task] = perform(operations.list_tasks(store))
    assert (task["name"], task["paused"], task["reason"]) == ("greet", True, "repairs")
    assert perform(operations.resume(store, task="greet"))
    assert not perform(operations.resume(store, queue="default"))
    perform(operations.retain(store, "default", {State.COMPLETED: 1}))
    assert {row["name"]: row["completed"] for row in perform(operations.list_queues(store))}["default"] == 1
    assert perform(operations.purge(store)) == (0, 0, False)
    assert perform(operations.extend_history(store)) == 0
    assert perform(operations.expire(store)) == 0


def test_a_claim_whose_answer_was_lost_is_given_back_at_once_by_reconciling(
    app: App, perform: Perform
) -> None:
    # spec: SG-17
    store, ids = app.client.store, enqueued(app, "a", "b")
    worker = perform(operations.register(store, lease=60))
    perform(operations.claim(store, worker, {"default": None}, 10))  # and the answer never arrives
    unaware = perform(operations.heartbeat(store, worker, []))
    assert unaware.strays == []
    pulse = perform(operations.heartbeat(store, worker, [], reconcile=True))
    assert sorted(pulse.strays) == ids
    assert app.counts()[State.READY] == 2


def test_places_hold_what_was_seen_and_are_forgotten_for_a_look_from_the_start() -> None:
    cursor = Cursor()
    report = {"places": {"mail": {"5": [70, 7]}}, "mixed": ["mail"], "due": 80}
    assert cursor.wish({"mail": 3}, now=100.0)["queues"] == [
        {"queue": "mail", "want": 3, "places": {}, "mixed": False}
    ]
    cursor.learn(report, [("mail", 0, 50, 2), ("mail", 0, 50, 1)], began=100.0, ended=100.01)
    wish = cursor.wish({"mail": 3}, now=100.5)
    assert wish == {
        "due": 80,
        "queues": [{"queue": "mail", "want": 3, "places": {"0": [50, 2], "5": [70, 7]}, "mixed": True}],
    }
    assert cursor.wish({"mail": 3}, now=101.02)["queues"][0]["places"] == {}


def test_looking_from_the_start_takes_no_more_than_a_twentieth_of_the_time() -> None:
    cursor = Cursor()
    cursor.learn({"places": {}, "mixed": []}, [("mail", 0, 1, 1)], began=10.0, ended=10.5)
    assert cursor.wish({"mail": 1}, now=20.0)["queues"][0]["places"]
    assert not cursor.wish({"mail": 1}, now=20.5)["queues"][0]["places"]
