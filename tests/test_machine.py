"""All verbs, in any order, beside a model of them in plain Python: after every step both must say the same.

The clock is the test's, in whole milliseconds, so the model can tell every time exactly. Runs are the same
each time; SHIFTWORK_EXPLORE=1 takes new ones, and Hypothesis prints what a failure needs to be seen again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, LiteralString, cast

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from psycopg.rows import dict_row

from tests import planted
from tests.explorer import Clock, empty
from tests.harness import Protocol, Row

Hold = tuple[int, int]

LEASE = 10_000
QUEUES = ("mail", "default")
TASKS = ("greet", "count")
ERROR = {"code": "BROKEN", "message": "it broke"}
LIVE = ("scheduled", "ready", "running")
FINAL = ("completed", "failed", "cancelled", "expired")


@dataclass
class Job:
    """What the model knows of a job."""

    id: int
    task: str
    queue: str
    priority: int
    payload: Row
    state: str
    run_at: int
    created_at: int
    expires_at: int | None = None
    attempt: int = 0
    failures: int = 0
    resets: int = 0
    worker: int | None = None
    claim: int = 0
    started: bool = False
    key: str | None = None
    scope: str | None = None
    held: bool = False

    @property
    def place(self) -> tuple[int, int, int]:
        return (self.priority, self.run_at, self.id)

    def finish(self, state: str) -> None:
        self.state, self.held = state, False

    def give_back(self) -> None:
        self.state, self.worker, self.started = "ready", None, False


@dataclass
class Worker:
    """A worker as the database knows it, and what it believes to hold itself."""

    id: int
    lease_until: int
    gone: bool = False
    believes: set[Hold] = field(default_factory=set)
    answered: int = 0


@dataclass
class Model:
    """What should be in the database."""

    now: int = 0
    jobs: dict[int, Job] = field(default_factory=dict)
    workers: dict[int, Worker] = field(default_factory=dict)
    signals: set[int] = field(default_factory=set)
    paused: set[tuple[str, str]] = field(default_factory=set)
    noted: set[tuple[int, int, str]] = field(default_factory=set)
    accepted: dict[Hold, int] = field(default_factory=dict)

    def in_state(self, *states: str) -> list[Job]:
        return [job for job in self.jobs.values() if job.state in states]

    def holder(self, task: str, key: str) -> Job | None:
        return next(
            (job for job in self.jobs.values() if job.held and (job.task, job.key) == (task, key)), None
        )

    def held_by(self, worker: int, hold: Hold) -> Job | None:
        job = self.jobs.get(hold[0])
        mine = job is not None and (job.state, job.worker, job.attempt) == ("running", worker, hold[1])
        return job if mine else None

    def finish(self, job: Job, state: str) -> None:
        job.finish(state)
        self.signals.discard(job.id)

    def end_if_signalled(self, job: Job) -> bool:
        if job.id not in self.signals:
            return False
        self.finish(job, "cancelled")
        return True

    def promote(self, since: int) -> list[int]:
        """Makes ready what is due; says when each fell due."""
        due = sorted(
            (job for job in self.in_state("scheduled") if since <= job.run_at <= self.now),
            key=lambda job: (job.run_at, job.id),
        )
        for job in due:
            job.state = "ready"
        return [job.run_at for job in due]

    def claimable(self, queue: str, tasks: Sequence[str]) -> list[Job]:
        if ("queue", queue) in self.paused:
            return []
        return sorted(
            (
                job
                for job in self.in_state("ready")
                if job.queue == queue
                and job.task in tasks
                and ("task", job.task) not in self.paused
                and (job.expires_at is None or job.expires_at > self.now)
            ),
            key=lambda job: job.place,
        )


Places = dict[str, dict[int, tuple[int, int]]]
WHICH = st.integers(0, 5)
ENDINGS = ("completed", "completed", "failed", "cancelled", "retry", "retry", "snooze")


def _somebody_holds(machine: Machine) -> bool:
    return any(worker.believes for worker in machine.model.workers.values())


class Machine(RuleBasedStateMachine):
    """The verbs as rules."""

    steps = 0
    runs = 0

    def __init__(self, connection: psycopg.Connection[Any], *, looks_from_the_start: bool = True) -> None:
        super().__init__()
        self.protocol = Protocol(connection)
        self.clock = Clock(connection)
        self.looks_from_the_start = looks_from_the_start
        self.model = Model()
        self.places: Places = {}
        self.mixed: list[str] = []
        self.due = 0
        Machine.runs += 1

    @initialize(workers=st.integers(1, 3))
    def begin(self, workers: int) -> None:
        empty(self.protocol.connection)
        if Machine.runs % 20 == 0:
            self.protocol.rows(
                "vacuum shiftwork.jobs, shiftwork.history, shiftwork.workers, shiftwork.attempts"
            )
        self.clock.set(0)
        for _ in range(workers):
            self.register()

    # Jobs come in.

    @rule(
        task=st.sampled_from(TASKS),
        queue=st.sampled_from(QUEUES),
        priorities=st.lists(st.integers(-1, 1), min_size=1, max_size=4),
        delay=st.sampled_from([0, 0, 0, 1000, 5000]),
        expires=st.sampled_from([None, None, 2000, 20000]),
    )
    def enqueue(self, task: str, queue: str, priorities: list[int], delay: int, expires: int | None) -> None:
        wish: Row = {"task": task, "queue": queue, "payload": {"n": 0}, "delay": delay / 1000}
        if expires is not None:
            wish["expires_in"] = expires / 1000
        rows = self.protocol.enqueue_many([{**wish, "priority": priority} for priority in priorities])
        for row, priority in zip(rows, priorities, strict=True):
            assert row["outcome"] == "created"
            self._born(row["id"], task, queue, priority, delay, expires)

    def _born(
        self, job: int, task: str, queue: str, priority: int, delay: int, expires: int | None, **more: Any
    ) -> None:
        assert job not in self.model.jobs, "an id was given twice"
        now = self.model.now
        more.setdefault("payload", {"n": 0})
        self.model.jobs[job] = Job(
            id=job,
            task=task,
            queue=queue,
            priority=priority,
            state="scheduled" if delay > 0 else "ready",
            run_at=now + delay,
            created_at=now,
            expires_at=None if expires is None else now + expires,
            **more,
        )

    @rule(
        key=st.sampled_from("xy"),
        scope=st.sampled_from(["pending", "unfinished", "window"]),
        action=st.sampled_from(["return", "replace", "merge", "refuse"]),
        queue=st.sampled_from(QUEUES),
        delay=st.sampled_from([0, 0, 1000]),
        n=st.integers(0, 1),
    )
    def enqueue_with_a_key(self, key: str, scope: str, action: str, queue: str, delay: int, n: int) -> None:
        if action in {"replace", "merge"}:
            scope = "pending"
        window, model = 5000, self.model
        wish = {
            "task": "greet",
            "queue": queue,
            "payload": {"n": n},
            "delay": delay / 1000,
            "unique_key": key,
        }
        wish |= {
            "unique_scope": scope,
            "unique_action": action,
            "unique_window": window / 1000,
            "merge": "sum",
        }
        twin = model.holder("greet", key)
        if scope == "window":
            twins = [
                job
                for job in model.in_state(*FINAL)
                if job.key == key and job.created_at > model.now - window
            ] + ([twin] if twin else [])
            twin = max(twins, key=lambda job: job.id) if twins else None

        if twin and action == "refuse" and (twin.payload, twin.queue, twin.priority) != ({"n": n}, queue, 0):
            with pytest.raises(psycopg.Error) as error:
                self.protocol.enqueue_many([wish])
            assert error.value.sqlstate == "SW002"
            return
        [row] = self.protocol.enqueue_many([wish])
        if twin is None:
            assert row["outcome"] == "created"
            self._born(
                row["id"], "greet", queue, 0, delay, None, payload={"n": n}, key=key, scope=scope, held=True
            )
            return
        assert row["id"] == twin.id
        if action in {"return", "refuse"} or twin.state == "running":
            assert row["outcome"] == "existing"
            return
        assert row["outcome"] == {"replace": "replaced", "merge": "merged"}[action]
        twin.payload = {"n": n + (twin.payload["n"] if action == "merge" else 0)}
        twin.queue, twin.priority, twin.expires_at = queue, 0, None
        twin.run_at = model.now + delay
        twin.state = "scheduled" if delay > 0 else "ready"

    # Workers take and hold them.

    def register(self) -> None:
        worker = self.protocol.register(lease=LEASE / 1000)
        self.model.workers[worker] = Worker(worker, self.model.now + LEASE)

    @rule(
        queues=st.permutations(QUEUES),
        want=st.integers(1, 4),
        start=st.sampled_from([None, 0, 1, 2]),
        which=WHICH,
    )
    def claim_from_the_start(self, which: int, queues: list[str], want: int, start: int | None) -> None:
        self._claim(self._live_worker(which), queues, want, start, TASKS, cursored=False)

    @rule(
        queues=st.permutations(QUEUES),
        want=st.integers(1, 4),
        tasks=st.sampled_from([TASKS, TASKS, TASKS[:1]]),
        answer_is_lost=st.sampled_from([False, False, True]),
        which=WHICH,
    )
    def claim_behind_the_places(
        self, which: int, queues: list[str], want: int, tasks: Sequence[str], answer_is_lost: bool
    ) -> None:
        self._claim(self._live_worker(which), queues, want, None, tasks, cursored=True, lost=answer_is_lost)

    @rule(want=st.integers(1, 4), kind=st.sampled_from(ENDINGS), which=WHICH)
    def work(self, which: int, want: int, kind: str) -> None:
        """What a worker mostly does."""
        worker = self._live_worker(which)
        got = self._claim(worker, QUEUES, want, None, TASKS, cursored=True)
        self._settle(worker, {(job.id, job.attempt): kind for job in got})
        worker.believes -= {(job.id, job.attempt) for job in got}

    @rule(which=WHICH)
    def claim_without_a_lease(self, which: int) -> None:
        self._claim(self._worker(which), QUEUES, 1, None, TASKS, cursored=True)

    def _claim(
        self,
        worker: Worker,
        queues: Sequence[str],
        want: int,
        start: int | None,
        tasks: Sequence[str],
        *,
        cursored: bool,
        lost: bool = False,
    ) -> list[Job]:
        model = self.model
        places = self.places if cursored else {}
        due = self.due if cursored else 0
        claimed = self.protocol.claim(
            worker.id,
            *(
                {"queue": queue, "places": places.get(queue, {}), "mixed": cursored and queue in self.mixed}
                for queue in queues
            ),
            want=want,
            tasks=list(tasks),
            start=start,
            due=due,
        )
        if worker.gone or worker.lease_until <= model.now:
            assert (claimed.report["alive"], claimed.jobs) == (False, [])
            return []

        fell_due = model.promote(self.clock.milliseconds(due))
        expected: list[Job] = []
        for queue in queues:
            known = places.get(queue, {})
            for job in model.claimable(queue, tasks):
                # Behind a place of its own priority a job may wait for a look from the start: nothing else.
                seen_at, seen_id = known.get(job.priority, (-1, 0))
                if fell_due:
                    seen_at = min(seen_at, self.clock.microseconds(fell_due[0]) - 1)
                if (self.clock.microseconds(job.run_at), job.id) > (seen_at, seen_id) and len(
                    expected
                ) < want:
                    expected.append(job)
        assert {job["id"] for job in claimed.jobs} == {job.id for job in expected}, "not the first in order"

        answers = {job["id"]: job for job in claimed.jobs}
        for position, job in enumerate(expected):
            job.state, job.worker, job.claim = "running", worker.id, claimed.report["claim"]
            job.attempt += 1
            job.started = start is None or position < start
            job.held = job.held and job.scope != "pending"
            assert answers[job.id]["attempt"] == job.attempt
            assert (answers[job.id]["started_at"] is not None) == job.started, (
                "the first go straight to slots"
            )
        if not lost:
            worker.answered = claimed.report["claim"]
            worker.believes |= {(job.id, job.attempt) for job in expected}
            self._keep_places(expected, claimed.report, queues, cursored=cursored)
        return expected

    def _keep_places(self, got: list[Job], report: Row, queues: Sequence[str], *, cursored: bool) -> None:
        """A client's cursor: behind the last job it got in each priority, or where the looking ended."""
        if not cursored:
            for queue in queues:
                self.places.pop(queue, None)
        for job in got:
            known = self.places.setdefault(job.queue, {})
            known[job.priority] = (self.clock.microseconds(job.run_at), job.id)
        for queue, ends in report["places"].items():
            known = self.places.setdefault(queue, {})
            for priority, (run_at, id_) in ends.items():
                known[int(priority)] = max(known.get(int(priority), (-1, 0)), (run_at, id_))
        self.due, self.mixed = report["due"], report["mixed"]

    @precondition(_somebody_holds)
    @rule(which=WHICH)
    def start(self, which: int) -> None:
        worker = self._holder(which)
        answers = self.protocol.start(worker.id, sorted(worker.believes))
        for hold in sorted(worker.believes):
            job = self.model.held_by(worker.id, hold)
            if job is None:
                assert answers[hold[0]] == "lost"
            elif self.model.end_if_signalled(job):
                assert answers[job.id] == "cancelled"
            elif not job.started and job.expires_at is not None and job.expires_at <= self.model.now:
                assert answers[job.id] == "expired"
                self.model.finish(job, "expired")
            else:
                assert answers[job.id] == "started"
                job.started = True
        worker.believes = {hold for hold in worker.believes if answers[hold[0]] == "started"}

    @precondition(_somebody_holds)
    @rule(
        kinds=st.lists(st.sampled_from(ENDINGS), min_size=1, max_size=3),
        answer_is_lost=st.booleans(),
        which=WHICH,
    )
    def settle(self, which: int, kinds: list[str], answer_is_lost: bool) -> None:
        worker = self._holder(which)
        endings = dict(zip(sorted(worker.believes), kinds, strict=False))
        self._settle(worker, endings)
        if not answer_is_lost:  # Otherwise it will settle them once more.
            worker.believes -= endings.keys()

    @precondition(_somebody_holds)
    @rule(kind=st.sampled_from(ENDINGS), which=WHICH)
    def settle_all(self, which: int, kind: str) -> None:
        worker = self._holder(which)
        self._settle(worker, dict.fromkeys(worker.believes, kind))
        worker.believes.clear()

    def _settle(self, worker: Worker, endings: dict[Hold, str]) -> None:
        model, now, delay = self.model, self.model.now, 3000
        told: dict[str, Row] = {
            "completed": {"state": "completed", "result": 1},
            "failed": {"state": "failed", "error": ERROR},
            "cancelled": {"state": "cancelled"},
            "retry": {"state": "scheduled", "error": ERROR, "delay": delay / 1000},
            "snooze": {"state": "scheduled", "delay": delay / 1000},
        }
        answers = self.protocol.settle(
            worker.id, *({"id": hold[0], "attempt": hold[1], **told[kind]} for hold, kind in endings.items())
        )
        assert answers.keys() == {hold[0] for hold in endings}
        for hold, kind in endings.items():
            answer = answers[hold[0]]
            job = model.held_by(worker.id, hold)
            if job is None:
                written = model.accepted.get(hold) == worker.id and (*hold, "failed") in model.noted
                same = kind in {"failed", "retry", "snooze"}
                assert answer == "already" if written and same else answer in {"already", "lost"}
                continue
            assert answer == "settled"
            assert hold not in model.accepted, "two outcomes of one attempt were accepted"
            model.accepted[hold] = worker.id
            ending = kind
            if kind in {"retry", "snooze"}:
                too_late = kind == "retry" and job.expires_at is not None and now + delay >= job.expires_at
                ending = "cancelled" if job.id in model.signals else "failed" if too_late else "scheduled"
            if kind in {"failed", "retry"}:
                job.failures += 1
                model.noted.add((*hold, "failed"))
            if ending == "scheduled":
                job.state, job.run_at, job.started = "scheduled", now + delay, False
            else:
                model.finish(job, ending)

    @precondition(_somebody_holds)
    @rule(many=st.integers(1, 3), which=WHICH)
    def release(self, which: int, many: int) -> None:
        worker = self._holder(which)
        holds = sorted(worker.believes)[:many]
        answers = self.protocol.release(worker.id, holds)
        for hold in holds:
            job = self.model.held_by(worker.id, hold)
            if job is None:
                assert answers[hold[0]] == "lost"
            elif self.model.end_if_signalled(job):
                assert answers[job.id] == "cancelled"
            else:
                assert answers[job.id] == "released"
                job.give_back()
        worker.believes -= set(holds)

    @rule(which=WHICH)
    def heartbeat(self, which: int) -> None:
        self._renew(self._worker(which), self.protocol)

    @precondition(_somebody_holds)
    @rule(which=WHICH)
    def renew_late_while_somebody_reaps(self, which: int) -> None:
        """A lease has ended, and is renewed in a transaction that is still open when somebody reaps."""
        late = self._holder(which)
        self._leave(late)
        reaping = self.protocol.connection
        with psycopg.Connection[dict[str, Any]].connect(reaping.info.dsn, row_factory=dict_row) as renewing:
            self._renew(late, Protocol(renewing))
            reaping.execute("set lock_timeout = '5s'")
            try:
                self._reap(0, 1000, thorough=False)
            except psycopg.errors.LockNotAvailable:
                raise AssertionError("a reaper waits for a heartbeat") from None
            finally:
                reaping.execute("reset lock_timeout")

    def _renew(self, worker: Worker, protocol: Protocol) -> None:
        answer = protocol.heartbeat(
            worker.id, sorted(worker.believes), answered=worker.answered, since=0, lease=LEASE / 1000
        )
        assert answer["alive"] is not worker.gone
        if worker.gone:
            assert set(answer["lost"]) == {hold[0] for hold in worker.believes}
            worker.believes.clear()
            return
        worker.lease_until = self.model.now + LEASE
        held = {hold for hold in worker.believes if self.model.held_by(worker.id, hold)}
        lost = {hold[0] for hold in worker.believes - held}
        assert set(answer["lost"]) == lost
        assert {one["id"] for one in answer["cancel"]} >= {
            hold[0] for hold in held if hold[0] in self.model.signals
        }
        strays = [
            job
            for job in self.model.in_state("running")
            if job.worker == worker.id and job.claim <= worker.answered and (job.id, job.attempt) not in held
        ]
        assert set(answer["strays"]) == {job.id for job in strays}
        for job in strays:
            if not self.model.end_if_signalled(job):
                job.give_back()
        worker.believes = held

    def _leave(self, worker: Worker) -> None:
        self.protocol.rows("select {}.leave(%s)", worker.id)
        if not worker.gone:
            worker.lease_until = self.model.now
            worker.gone = all(job.worker != worker.id for job in self.model.in_state("running"))

    @precondition(_somebody_holds)
    @rule(which=WHICH, kind=st.sampled_from(["none yet", *ENDINGS]))
    def another_takes_over(self, which: int, kind: str) -> None:
        """A worker loses its lease and its jobs to another; it does not know, goes on, and ends them late."""
        slow = self._holder(which)
        self._leave(slow)
        self._reap(0, 1000, thorough=False)
        self._claim(self._live_worker(which), QUEUES, 10, None, TASKS, cursored=False)
        if kind != "none yet":
            self._settle(slow, dict.fromkeys(slow.believes, kind))
            slow.believes.clear()

    # Others take care of what is late, lost or unwanted.

    @rule(which=WHICH, most=st.sampled_from([1, 1000]), thorough=st.booleans())
    def reap(self, which: int, most: int, thorough: bool) -> None:
        self._reap(self._worker(which).id, most, thorough=thorough)

    def _reap(self, reaper: int, most: int, *, thorough: bool) -> None:
        model = self.model
        answers = self.protocol.reap(reaper=reaper, most=most, thorough=thorough)
        lapsed = {
            worker.id
            for worker in model.workers.values()
            if worker.id != reaper and (thorough if worker.gone else worker.lease_until <= model.now)
        }
        lost = sorted(
            (job for job in model.in_state("running") if job.worker in lapsed), key=lambda job: job.id
        )[:most]
        assert answers.keys() == {job.id for job in lost}
        for job in lost:
            if job.started:
                model.noted.add((job.id, job.attempt, "lost"))
            if model.end_if_signalled(job):
                assert answers[job.id] == "cancelled"
                continue
            job.resets += job.started
            if job.resets > 2 and job.started:
                assert answers[job.id] == "failed"
                model.finish(job, "failed")
            else:
                assert answers[job.id] == "ready"
                job.give_back()
        for worker in lapsed:
            if not any(job.worker == worker for job in model.in_state("running")):
                model.workers[worker].gone = True

    @rule(
        what=st.sampled_from(["promote", "expire", "leave", "register", "pause a queue", "pause a task"]),
        which=WHICH,
    )
    def tend(self, what: str, which: int) -> None:
        match what:
            case "promote":
                self.promote()
            case "expire":
                self.expire()
            case "leave":
                self._leave(self._worker(which))
            case "register":
                self.register()
            case "pause a queue":
                self.pause_or_resume("queue", QUEUES[0])
            case _:
                self.pause_or_resume("task", TASKS[0])

    def promote(self) -> None:
        assert self.protocol.promote() == len(self.model.promote(-1))

    def expire(self) -> None:
        model = self.model
        late = [
            job
            for job in model.in_state("ready", "scheduled")
            if job.expires_at is not None and job.expires_at <= model.now
        ]
        assert self.protocol.expire() == len(late)
        for job in late:
            model.finish(job, "expired")

    @precondition(lambda self: self.model.jobs)
    @rule(some=st.lists(st.integers(0, 50), min_size=1, max_size=3))
    def cancel(self, some: list[int]) -> None:
        jobs = self._some(self.model.jobs.values(), some)
        answers = self.protocol.cancel(*(job.id for job in jobs))
        for job in jobs:
            if job.state in FINAL:
                assert answers[job.id] == "finished"
            elif job.state == "running":
                assert answers[job.id] == "signalled"
                self.model.signals.add(job.id)
            else:
                assert answers[job.id] == "cancelled"
                self.model.finish(job, "cancelled")

    @precondition(lambda self: self.model.jobs)
    @rule(which=st.integers(0, 50))
    def complete(self, which: int) -> None:
        [job] = self._some(self.model.jobs.values(), [which])
        answer = self.protocol.value("select {}.complete(%s, '1')", job.id)
        assert answer == ("finished" if job.state in FINAL else "completed")
        if answer == "completed":
            self.model.finish(job, "completed")

    @precondition(lambda self: self.model.jobs)
    @rule(some=st.lists(st.integers(0, 50), min_size=1, max_size=3))
    def revive(self, some: list[int]) -> None:
        model = self.model
        jobs = sorted(self._some(model.jobs.values(), some), key=lambda job: job.id)
        answers = self.protocol.revive(*(job.id for job in jobs))
        for job in jobs:
            if job.state not in FINAL:
                assert answers[job.id] == "live"
                continue
            assert answers[job.id] == "revived"
            free = job.key is not None and model.holder(job.task, job.key) is None
            job.state, job.run_at, job.held, job.worker = "ready", model.now, free, None
            job.failures = job.resets = 0
            job.started = False
            if job.expires_at is not None and job.expires_at <= model.now:
                job.expires_at = None

    @precondition(lambda self: self.model.jobs)
    @rule(some=st.lists(st.integers(0, 50), min_size=1, max_size=3))
    def run_now(self, some: list[int]) -> None:
        jobs = self._some(self.model.jobs.values(), some)
        answers = self.protocol.run_now(*(job.id for job in jobs))
        for job in jobs:
            said = {"scheduled": "moved", "ready": "ready", "running": "refused"}.get(job.state, "finished")
            assert answers[job.id] == said
            if said == "moved":
                job.state, job.run_at = "ready", self.model.now

    def pause_or_resume(self, kind: str, name: str) -> None:
        target = (name, None) if kind == "queue" else (None, name)
        if (kind, name) in self.model.paused:
            assert self.protocol.value("select {}.resume(queue => %s, task => %s)", *target) is True
        else:
            self.protocol.rows("select {}.pause(queue => %s, task => %s)", *target)
        self.model.paused ^= {(kind, name)}

    @rule(by=st.sampled_from([1, 500, 1500, 4000, 11_000]))
    def time_passes(self, by: int) -> None:
        self.model.now += by
        self.clock.set(self.model.now)

    # What must hold after every step.

    @invariant()
    def the_database_is_as_the_model_says(self) -> None:
        Machine.steps += 1
        found = self.protocol.value(LOOK, Clock.BEGINNING, Clock.BEGINNING)
        rows = found["jobs"] or []
        assert len({row[0] for row in rows}) == len(rows), "a job is in two rooms"
        model = self.model
        assert sorted(rows) == [
            [
                job.id,
                job.state,
                job.attempt,
                job.failures,
                job.resets,
                job.key if job.held else None,
                job.worker if job.state == "running" else None,
                job.started and job.state == "running",
                job.run_at,
                job.payload,
                job.queue,
                job.priority,
            ]
            for _, job in sorted(model.jobs.items())
        ]
        assert set(found["signals"] or []) == model.signals
        assert {tuple(row) for row in found["noted"] or []} == model.noted
        assert sorted(found["workers"] or []) == [
            [worker.id, worker.gone, worker.lease_until] for _, worker in sorted(model.workers.items())
        ]

    def teardown(self) -> None:
        """Whatever happened, a worker that follows the rules of the cursor can bring everything to an end."""
        if not self.model.workers:
            return
        for kind, name in list(self.model.paused):
            self.pause_or_resume(kind, name)
        self.time_passes(60_000)
        self._reap(0, 1000, thorough=True)
        self.expire()
        worker = Worker(self.protocol.register(lease=86_400), self.model.now + 86_400_000)
        self.model.workers[worker.id] = worker
        for _ in range(50):
            got = self._claim(worker, QUEUES, 5, None, TASKS, cursored=True)
            if not got and self.looks_from_the_start:
                got = self._claim(worker, QUEUES, 5, None, TASKS, cursored=False)
            if not got:
                break
            self._settle(worker, {(job.id, job.attempt): "completed" for job in got})
        left = self.model.in_state(*LIVE)
        assert left == [], "jobs that nobody ever claims"
        self.the_database_is_as_the_model_says()

    def _worker(self, which: int) -> Worker:
        workers = list(self.model.workers.values())
        return workers[which % len(workers)]

    def _live_worker(self, which: int) -> Worker:
        def alive() -> list[Worker]:
            return [
                one
                for one in self.model.workers.values()
                if not one.gone and one.lease_until > self.model.now
            ]

        if not alive():
            self.register()
        return alive()[which % len(alive())]

    def _holder(self, which: int) -> Worker:
        holders = [worker for worker in self.model.workers.values() if worker.believes]
        return holders[which % len(holders)]

    @staticmethod
    def _some(jobs: Iterable[Job], which: list[int]) -> list[Job]:
        known = list(jobs)
        return list({known[one % len(known)].id: known[one % len(known)] for one in which}.values())


LOOK: LiteralString = """
select jsonb_build_object(
  'jobs', (
    select jsonb_agg(jsonb_build_array(
             id, state, attempt, failures, resets, held_key, case when state = 'running' then worker end,
             started_at is not null and state = 'running',
             (extract(epoch from run_at) * 1000)::bigint - %s, payload, queue, priority))
      from (select id, state, attempt, failures, resets, held_key, worker, started_at, run_at, payload, queue,
                   priority from {}.jobs
            union all
            select id, state, attempt, failures, resets, held_key, worker, started_at, run_at, payload, queue,
                   priority from shiftwork.history) as job),
  'signals', (select jsonb_agg(job) from shiftwork.signals),
  'noted', (select jsonb_agg(jsonb_build_array(job, attempt, outcome)) from shiftwork.attempts),
  'workers', (
    select jsonb_agg(jsonb_build_array(
             id, gone_at is not null, (extract(epoch from lease_until) * 1000)::bigint - %s))
      from shiftwork.workers))
"""

RUNS = settings(
    max_examples=300,
    stateful_step_count=40,
    deadline=None,
    database=None,
    derandomize="SHIFTWORK_EXPLORE" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    report_multiple_bugs=False,
)


# spec: SH-7, SH-14, SH-15, SH-19, SH-21, SH-22, SH-33, D-7, D-9, D-16, D-20, D-26, QU-23, QU-24
def test_whatever_is_done_the_database_does_what_the_model_says(connection: psycopg.Connection[Any]) -> None:
    Clock(connection).install()
    Machine.runs = Machine.steps = 0
    run(lambda: Machine(connection), RUNS)
    assert Machine.runs >= 200
    assert Machine.steps >= 200 * 40


@pytest.mark.parametrize(
    "plant",
    [
        pytest.param(planted.SETTLE_WITHOUT_FENCE, id="the fence dropped from settle"),
        pytest.param(planted.REAP_WITHOUT_RECHECK, id="reap without looking again"),
        pytest.param(planted.CLAIM_WITHOUT_NEWCOMERS, id="urgent newcomers overlooked"),
    ],
)
def test_a_planted_bug_is_found(connection: psycopg.Connection[Any], plant: planted.Plant) -> None:
    Clock(connection).install()
    plant.sow(connection)
    found(lambda: Machine(connection))


def test_a_client_that_never_resets_its_cursor_is_found(connection: psycopg.Connection[Any]) -> None:
    Clock(connection).install()
    found(lambda: Machine(connection, looks_from_the_start=False))


def found(machine: Callable[[], Machine]) -> None:
    """The machine must fail, and by what it asserts; no time is spent on finding the smallest failure."""
    with pytest.raises(AssertionError):
        run(machine, settings(RUNS, phases=[Phase.generate]))


def run(machine: Callable[[], Machine], how: settings) -> None:
    # A factory is what it takes, though its signature asks for a class.
    run_state_machine_as_test(cast("type[Machine]", machine), settings=how)
