"""What every store has to keep, as tests: ours pass them, and whoever writes a store of his own can run them too.

    class MyBench(shiftwork.testing.Bench): ...   # how a job is made, read, cancelled, and how its lease is made old

    @pytest.mark.parametrize("case", shiftwork.testing.store_conformance)
    def test_my_store_keeps_what_a_store_has_to(case, my_bench):
        case(my_bench)

Each case is a function with a sentence for a name. It needs an empty store, leaves it as it happens to be, and raises AssertionError.
Nobody sleeps: leases and waits are made old.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, TypeVar

import psycopg

from shiftwork import operations
from shiftwork.database import Plan, executing, run
from shiftwork.errors import FenceLost
from shiftwork.job import Job, State
from shiftwork.operations import Claimed, Pulse
from shiftwork.outcome import Outcome
from shiftwork.program import Program
from shiftwork.stores.store import Store

T = TypeVar("T")
ERROR = {"code": "BROKEN", "message": "it broke"}
Case = Callable[["Bench"], None]
store_conformance: list[Case] = []
"""All cases."""


class Bench:
    """A store on a bench: what the cases need to know of it, and cannot ask it itself."""

    queue = "default"
    task = "task"
    most_resets = 2
    """How often a job may lose its worker before it has failed."""

    def __init__(self, store: Store, connection: psycopg.Connection[Any]) -> None:
        """`connection` is in autocommit."""
        self.store = store
        self.connection = connection
        self.perform(operations.require(store))

    def add(self, many: int = 1) -> list[int]:
        """Make jobs that can be claimed at once, in this order."""
        raise NotImplementedError

    def state(self, job: int) -> State:
        """Where a job is in its life."""
        raise NotImplementedError

    def resets(self, job: int) -> int:
        """How often it lost its worker."""
        raise NotImplementedError

    def lapse(self, worker: int) -> None:
        """Make the lease of a worker old."""
        raise NotImplementedError

    def make_due(self, job: int) -> None:
        """Let the time come for which a job waits."""
        raise NotImplementedError

    def cancel(self, job: int) -> None:
        """Ask that a running job be cancelled, as people do."""
        raise NotImplementedError

    def locked(self, job: int) -> AbstractContextManager[Any]:
        """Somebody else has locked the row of a job for as long as the block lasts."""
        raise NotImplementedError

    def another(self) -> AbstractContextManager[psycopg.Connection[Any]]:
        """A second connection."""
        raise NotImplementedError

    def program(self, handler: Callable[[], Any]) -> Program:
        """A program whose jobs are those of this store, and all call this async function."""
        raise NotImplementedError

    # What a worker does.

    def perform(self, plan: Plan[T], connection: psycopg.Connection[Any] | None = None) -> T:
        """Carry out a plan."""
        return run(plan, executing(connection or self.connection, "shiftwork", lent=False))

    def register(self) -> int:
        """Become a worker."""
        return self.perform(operations.register(self.store, lease=30, queues=[self.queue]))

    def claim(self, worker: int, want: int = 10, *, start: int | None = None) -> Claimed:
        """Claim jobs."""
        return self.perform(operations.claim(self.store, worker, {self.queue: None}, want, start=start))

    def take(self, worker: int, want: int = 10) -> list[Job]:
        """The jobs that a claim gave."""
        return [Job.from_claim(taken, worker, 0) for taken in self.claim(worker, want).taken]

    def settle(self, worker: int, *outcomes: Outcome) -> dict[int, str]:
        """Write how attempts ended."""
        return self.perform(operations.settle(self.store, worker, outcomes))

    def beat(self, worker: int, held: Sequence[Job] = (), **more: Any) -> Pulse:  # noqa: ANN401
        """Renew the lease."""
        return self.perform(operations.heartbeat(self.store, worker, _held(held), **more))

    def release(
        self, worker: int, held: Sequence[Job], crashed: Mapping[int, str] | None = None
    ) -> dict[int, str]:
        """Give jobs back."""
        return self.perform(operations.release(self.store, worker, _held(held), crashed))

    def reap(self) -> dict[int, str]:
        """Take back what the dead have left."""
        return self.perform(operations.reap(self.store, thorough=True))


def case(function: Case) -> Case:
    """One more thing that a store has to keep."""
    store_conformance.append(function)
    return function


def expect(found: object, expected: object, what: str = "") -> None:
    """Fail unless both are the same."""
    if found != expected:
        raise AssertionError(f"{what or 'it'} is {found!r}, and should be {expected!r}")


def _held(jobs: Sequence[Job]) -> list[tuple[int, int]]:
    return [(job.id, job.attempt) for job in jobs]


def _ids(jobs: Sequence[Job]) -> list[int]:
    return [job.id for job in jobs]


def completed(job: Job) -> Outcome:
    """It went well."""
    return Outcome(job, State.COMPLETED, result=b"null")


def broken(job: Job) -> Outcome:
    """It failed, for good."""
    return Outcome(job, State.FAILED, error=ERROR, counts=True)


def again(job: Job, *, counts: bool = True) -> Outcome:
    """It is to be run again in an hour; it has failed, or just wants to."""
    return Outcome(job, State.SCHEDULED, timedelta(hours=1), error=ERROR if counts else None, counts=counts)


# Claiming.


@case
def jobs_are_claimed_in_their_order_and_no_more_than_wanted(bench: Bench) -> None:
    added = bench.add(5)
    worker = bench.register()
    first, rest = bench.claim(worker, 2), bench.claim(worker, 10)
    expect([taken[0] for taken in first.taken], added[:2])
    expect(first.more, True, "that there is more")
    expect([taken[0] for taken in rest.taken], added[2:])
    expect(rest.more, False, "that there is more")
    expect([bench.state(job) for job in added], [State.RUNNING] * 5)
    expect(bench.take(worker), [], "what is left")


@case
def a_claim_says_whose_it_is_and_when(bench: Bench) -> None:
    bench.add()
    worker = bench.register()
    claimed = bench.claim(worker)
    expect(claimed.worker, worker)
    expect(bool(claimed.number and claimed.at), True, "its number and time")
    expect((claimed.taken[0][1], claimed.taken[0][2]), (bench.task, bench.queue))


@case
def no_two_claims_of_a_job_have_the_same_fence(bench: Bench) -> None:
    bench.add()
    worker, attempts = bench.register(), []
    for _ in range(5):
        [job] = bench.take(worker)
        attempts.append(job.attempt)
        expect(bench.release(worker, [job]), {job.id: "released"})
    expect(sorted(set(attempts)), attempts, "the fences, which rise")


@case
def what_somebody_has_locked_is_passed_by(bench: Bench) -> None:
    first, *rest = bench.add(3)
    worker = bench.register()
    with bench.locked(first):
        expect(_ids(bench.take(worker)), rest)
    expect(_ids(bench.take(worker)), [first])


@case
def two_workers_share_what_there_is(bench: Bench) -> None:
    added = bench.add(20)
    workers = [bench.register(), bench.register()]
    found = [job.id for turn in range(10) for job in bench.take(workers[turn % 2], 2)]
    expect(sorted(found), sorted(added))


@case
def prefetched_jobs_are_started_unless_they_are_lost_or_cancelled(bench: Bench) -> None:
    bench.add(3)
    worker = bench.register()
    held = [Job.from_claim(taken, worker, 0) for taken in bench.claim(worker, start=0).taken]
    bench.cancel(held[1].id)
    bench.release(worker, held[2:])
    answers = bench.perform(operations.start(bench.store, worker, _held(held)))
    expect(answers, {held[0].id: "started", held[1].id: "cancelled", held[2].id: "lost"})
    expect(bench.state(held[1].id), State.CANCELLED)


# Settling.


@case
def outcomes_are_written_and_a_second_time_they_are_there_already(bench: Bench) -> None:
    bench.add(3)
    worker = bench.register()
    good, bad, asked = bench.take(worker)
    outcomes = [completed(good), broken(bad), Outcome(asked, State.CANCELLED, error=ERROR)]
    expect(bench.settle(worker, *outcomes), dict.fromkeys((good.id, bad.id, asked.id), "settled"))
    expect(
        [bench.state(job.id) for job in (good, bad, asked)], [State.COMPLETED, State.FAILED, State.CANCELLED]
    )
    expect(bench.settle(worker, *outcomes), dict.fromkeys((good.id, bad.id, asked.id), "already"))


@case
def nobody_ends_what_another_holds(bench: Bench) -> None:
    bench.add()
    mine, other = bench.register(), bench.register()
    [job] = bench.take(mine)
    expect(bench.settle(other, completed(job)), {job.id: "lost"})
    expect(bench.state(job.id), State.RUNNING)
    expect(bench.settle(mine, completed(job)), {job.id: "settled"})


@case
def an_attempt_that_was_given_back_ends_nothing(bench: Bench) -> None:
    bench.add()
    worker = bench.register()
    [former] = bench.take(worker)
    bench.release(worker, [former])
    expect(bench.settle(worker, completed(former)), {former.id: "lost"})
    [latter] = bench.take(worker)
    expect(bench.settle(worker, completed(former)), {former.id: "lost"})
    expect(bench.settle(worker, completed(latter)), {latter.id: "settled"})


@case
def a_job_that_failed_waits_for_its_time_and_its_failure_is_counted(bench: Bench) -> None:
    bench.add()
    worker = bench.register()
    [job] = bench.take(worker)
    expect(bench.settle(worker, again(job)), {job.id: "settled"})
    expect(bench.state(job.id), State.SCHEDULED)
    idle = bench.claim(worker)
    expect(idle.taken, [])
    expect(idle.next_due_in is not None and 3000 < idle.next_due_in <= 3600, True, "when it is due")
    bench.make_due(job.id)
    [second] = bench.take(worker)
    expect((second.id, second.failures), (job.id, 1))


@case
def a_job_that_puts_itself_off_has_not_failed(bench: Bench) -> None:
    bench.add()
    worker = bench.register()
    [job] = bench.take(worker)
    expect(bench.settle(worker, again(job, counts=False)), {job.id: "settled"})
    expect((bench.take(worker), bench.state(job.id)), ([], State.SCHEDULED))
    bench.make_due(job.id)
    [second] = bench.take(worker)
    expect((second.id, second.failures, second.resets), (job.id, 0, 0))


@case
def an_outcome_of_a_locked_job_is_busy_and_keeps_nobody_else(bench: Bench) -> None:
    bench.add(2)
    worker = bench.register()
    one, other = bench.take(worker)
    with bench.locked(one.id):
        expect(bench.settle(worker, completed(one), completed(other)), {one.id: "busy", other.id: "settled"})
        expect(bench.release(worker, [one]), {one.id: "busy"})
    expect(bench.settle(worker, completed(one)), {one.id: "settled"})


# Giving back.


@case
def what_is_given_back_can_be_claimed_and_nothing_is_counted(bench: Bench) -> None:
    bench.add()
    worker = bench.register()
    [job] = bench.take(worker)
    expect(bench.release(worker, [job]), {job.id: "released"})
    expect(bench.release(worker, [job]), {job.id: "lost"})
    [second] = bench.take(bench.register())
    expect((second.id, second.failures, second.resets), (job.id, 0, 0))


@case
def what_took_its_process_down_is_counted_and_fails_in_the_end(bench: Bench) -> None:
    [added] = bench.add()
    worker = bench.register()
    for times in range(bench.most_resets + 1):
        [job] = bench.take(worker)
        expect(job.resets, times)
        answer = "released" if times < bench.most_resets else "failed"
        expect(bench.release(worker, [job], {job.id: "it was killed"}), {job.id: answer})
    expect(bench.state(added), State.FAILED)


# Holding.


@case
def a_heartbeat_tells_what_is_lost(bench: Bench) -> None:
    bench.add(2)
    worker = bench.register()
    mine, gone = bench.take(worker)
    bench.release(worker, [gone])
    pulse = bench.beat(worker, [mine, gone])
    expect((pulse.alive, pulse.lost), (True, [gone.id]))
    expect(bench.beat(worker, [mine]).lost, [])


@case
def a_heartbeat_tells_what_is_to_be_cancelled(bench: Bench) -> None:
    bench.add(2)
    worker = bench.register()
    one, other = bench.take(worker)
    bench.cancel(one.id)
    expect(list(bench.beat(worker, [one, other]).cancel), [one.id])


@case
def a_failure_after_a_request_to_cancel_is_not_tried_again(bench: Bench) -> None:
    bench.add()
    worker = bench.register()
    [job] = bench.take(worker)
    bench.cancel(job.id)
    expect(bench.settle(worker, again(job)), {job.id: "settled"})
    expect(bench.state(job.id), State.CANCELLED)


@case
def what_is_cancelled_is_not_given_back(bench: Bench) -> None:
    bench.add()
    worker = bench.register()
    [job] = bench.take(worker)
    bench.cancel(job.id)
    expect(bench.release(worker, [job]), {job.id: "cancelled"})
    expect(bench.state(job.id), State.CANCELLED)


@case
def a_claim_whose_answer_was_lost_is_given_back(bench: Bench) -> None:
    bench.add(2)
    worker = bench.register()
    [known] = bench.take(worker, 1)
    stray = bench.claim(worker, 1)  # of which the worker learns nothing
    pulse = bench.beat(worker, [known], reconcile=True)
    expect((pulse.strays, pulse.lost), ([stray.taken[0][0]], []))
    expect((bench.state(known.id), bench.state(stray.taken[0][0])), (State.RUNNING, State.READY))


@case
def what_is_not_held_of_an_answered_claim_is_a_stray_and_later_claims_are_none(bench: Bench) -> None:
    bench.add(2)
    worker = bench.register()
    unreadable, late = bench.claim(worker, 1), bench.claim(worker, 1)
    pulse = bench.beat(worker, answered=unreadable.number)
    expect(pulse.strays, [unreadable.taken[0][0]])
    expect(bench.state(late.taken[0][0]), State.RUNNING)


@case
def a_worker_that_beats_keeps_its_jobs(bench: Bench) -> None:
    bench.add()
    worker = bench.register()
    held = bench.take(worker)
    bench.lapse(worker)
    bench.beat(worker, held)
    expect(bench.reap(), {})
    expect(bench.settle(worker, completed(held[0])), {held[0].id: "settled"})


@case
def jobs_of_a_worker_that_fell_silent_run_again_and_it_can_end_them_no_more(bench: Bench) -> None:
    bench.add()
    slow, quick = bench.register(), bench.register()
    [lost] = bench.take(slow)
    bench.lapse(slow)
    expect(bench.beat(quick).reap, True, "that somebody has to reap")
    expect(bench.reap(), {lost.id: "ready"})
    [job] = bench.take(quick)
    expect((job.id, job.resets, job.failures), (lost.id, 1, 0))
    expect(lost.attempt < job.attempt, True, "that the fence has risen")
    expect(bench.settle(slow, completed(lost)), {lost.id: "lost"})
    expect(bench.beat(slow, [lost]).lost, [lost.id])
    expect(bench.settle(quick, completed(job)), {job.id: "settled"})


@case
def a_job_that_loses_its_workers_too_often_has_failed(bench: Bench) -> None:
    [added] = bench.add()
    for times in range(bench.most_resets + 1):
        worker = bench.register()
        [job] = bench.take(worker)
        bench.lapse(worker)
        expect(bench.reap(), {added: "ready" if times < bench.most_resets else "failed"})
        expect(bench.settle(worker, completed(job)), {added: "lost"})
    expect(bench.state(added), State.FAILED)


@case
def who_leaves_has_no_lease_any_more(bench: Bench) -> None:
    bench.add()
    worker = bench.register()
    [job] = bench.take(worker)
    bench.perform(operations.leave(bench.store, worker))
    expect(list(bench.reap()), [job.id])


# Transactions.


@case
def a_job_in_an_open_transaction_cannot_be_taken_away(bench: Bench) -> None:
    bench.add()
    worker = bench.register()
    [job] = bench.take(worker)
    with bench.another() as tx:
        with tx.transaction():
            bench.perform(operations.fence(bench.store, job.id, job.attempt), tx)
            bench.lapse(worker)
            expect(bench.reap(), {}, "what was reaped")
            bench.perform(operations.conclude(bench.store, worker, completed(job)), tx)
        expect(bench.state(job.id), State.COMPLETED)


@case
def an_outcome_in_a_transaction_commits_with_it_or_not_at_all(bench: Bench) -> None:
    bench.add()
    worker = bench.register()
    [job] = bench.take(worker)
    with bench.another() as tx:
        with tx.transaction(force_rollback=True):
            bench.perform(operations.conclude(bench.store, worker, completed(job)), tx)
        expect(bench.state(job.id), State.RUNNING)
        with tx.transaction():
            bench.perform(operations.conclude(bench.store, worker, completed(job)), tx)
    expect(bench.state(job.id), State.COMPLETED)


@case
def who_lost_a_job_can_commit_nothing_with_it(bench: Bench) -> None:
    bench.add()
    worker = bench.register()
    [job] = bench.take(worker)
    bench.lapse(worker)
    bench.reap()
    plans: list[Plan[None]] = [
        operations.fence(bench.store, job.id, job.attempt),
        operations.conclude(bench.store, worker, completed(job)),
    ]
    for plan in plans:
        with bench.another() as tx:
            try:
                with tx.transaction():
                    bench.perform(plan, tx)
            except FenceLost:
                continue
        raise AssertionError("a fence that was lost let somebody pass")
    expect(bench.state(job.id), State.READY)


@case
def lines_of_a_log_are_written_and_changed_by_whoever_holds_the_job(bench: Bench) -> None:
    bench.add()
    worker = bench.register()
    [job] = bench.take(worker)
    held, store = (job.id, job.attempt), bench.store
    place = bench.perform(operations.add_log(store, worker, held, {"key": "log.info", "out": "begun"}))
    later = operations.change_log(store, worker, held, place, {"out": "done"})
    expect(bench.perform(later), True, "that there is such a line")
    bench.release(worker, [job])
    for plan in (
        operations.add_log(store, worker, held, {"key": "log.info", "out": "late"}),
        operations.change_log(store, worker, held, place, {"out": "late"}),
    ):
        try:
            bench.perform(plan)
        except FenceLost:
            continue
        raise AssertionError("who lost a job could write to its log")


# A worker.


@case
def a_worker_runs_all_there_is(bench: Bench) -> None:
    added, done = bench.add(20), []

    async def handler() -> None:
        done.append(1)

    with bench.program(handler) as program:
        expect(program.run_worker(stop_when_idle=True, concurrency=3), True, "that all went well")
    expect(len(done), 20)
    expect({bench.state(job) for job in added}, {State.COMPLETED})


@case
def a_worker_that_is_stopped_gives_back_what_has_not_ended(bench: Bench) -> None:
    added = bench.add(3)

    async def stop_in_the_middle() -> None:
        begun = asyncio.Event()

        async def handler() -> None:
            begun.set()
            await asyncio.Event().wait()

        with bench.program(handler) as program:
            worker = await program.worker(concurrency=1, prefetch=1, grace=timedelta(0))
            running = asyncio.create_task(worker.run())
            await asyncio.wait_for(begun.wait(), 30)
            worker.stop()
            await asyncio.wait_for(running, 30)

    asyncio.run(stop_in_the_middle())
    expect({bench.state(job) for job in added}, {State.READY})
    expect([bench.resets(job) for job in added], [0, 0, 0])


__all__ = ["Bench", "Case", "store_conformance"]
