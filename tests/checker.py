"""The judge of a chaotic run: from what producers were told, what handlers did and what the database noted, what went wrong.

It is a function of these and nothing else, so it can be shown histories that never happened (tests/test_checker.py).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Literal

RESUME = 5.0
"""Seconds after an outage in which nobody need have found back to work."""

ENDINGS = {"completed", "failed", "cancelled", "expired"}
LEGAL = {
    "": {"ready", "scheduled"},
    "ready": {"running"},
    "scheduled": {"ready", "running"},  # promoted and claimed in one go
    "running": {"ready", "scheduled", "waiting", *ENDINGS},
    "waiting": {"completed"},
}
"""Which state may follow which, as far as these jobs go."""


@dataclass(frozen=True)
class Sent:
    """What a producer was told of the job with this number: it is in, it is not, or nobody knows."""

    number: int
    answer: Literal["ok", "failed", "unknown"]
    transactional: bool = False


@dataclass(frozen=True)
class Step:
    """A job as it was written, in the order of writing; times are seconds of the server's clock."""

    job: int
    attempt: int
    worker: int | None
    state: str
    at: float


@dataclass(frozen=True)
class Act:
    """Something that a handler did: its plain effect, or one that was to be committed with the job."""

    number: int
    job: int
    attempt: int
    transactional: bool = False


@dataclass(frozen=True)
class Loss:
    """An attempt that lost whoever ran it: the process was killed, or stopped for longer than its lease."""

    job: int
    attempt: int
    at: float


@dataclass(frozen=True)
class Execution:
    """A handler's code at work on an attempt, from and until; None if it never came to its end."""

    job: int
    attempt: int
    began: float
    left: float | None


@dataclass(frozen=True)
class Lease:
    """A worker held its jobs from then on until a time, by the server's clock."""

    worker: int
    at: float
    until: float


@dataclass(frozen=True)
class Look:
    """What a worker process took up at a moment, by the names of `History.most`."""

    process: int
    at: float
    has: Mapping[str, float]


@dataclass(frozen=True)
class History:
    """All that is known of a run after it."""

    sent: Sequence[Sent]
    numbers: Mapping[int, int]
    """The number of each job that was ever seen in the database."""

    steps: Sequence[Step]
    acts: Sequence[Act]
    left: Sequence[int]
    """Jobs that have not ended."""

    losses: Sequence[Loss] = ()
    outages: Sequence[tuple[float, float]] = ()
    """When the server was away, from and until."""

    bound: float = 0.0
    """Seconds after which a job that was lost has to run again."""

    executions: Sequence[Execution] = ()
    leases: Sequence[Lease] = ()
    looks: Sequence[Look] = ()
    most: Mapping[str, float] = field(default_factory=dict)
    """How much of each a worker process may take up."""

    reported: Mapping[str, float] = field(default_factory=dict)
    """What metrics and commands say at the end, and, by the same names, what tables have."""

    true: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Verdict:
    """What went wrong, by kind; each a sentence."""

    lost: list[str] = field(default_factory=list)
    phantoms: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    slow: list[str] = field(default_factory=list)
    illegal: list[str] = field(default_factory=list)
    overlapping: list[str] = field(default_factory=list)
    unbounded: list[str] = field(default_factory=list)
    untrue: list[str] = field(default_factory=list)

    recoveries: list[float] = field(default_factory=list)
    """Seconds from each loss until the job ran again, without the time that the server was away."""

    @property
    def kinds(self) -> dict[str, list[str]]:
        """What may go wrong, and what did."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != "recoveries"}

    @property
    def violations(self) -> list[str]:
        """All of it."""
        return [f"{kind}: {one}" for kind, many in self.kinds.items() for one in many]


def check(history: History) -> Verdict:
    """What is wrong with a history."""
    verdict = Verdict()
    steps: dict[int, list[Step]] = defaultdict(list)
    for step in history.steps:
        steps[step.job].append(step)
    _check_sending(history, steps, verdict)
    _check_steps(steps, verdict)
    _check_acts(history, steps, verdict)
    verdict.stuck += [f"job {job} has not ended" for job in history.left]
    _check_recoveries(history, steps, verdict)
    _check_executions(history, steps, verdict)
    _check_looks(history, verdict)
    verdict.untrue += [
        f"{name} is {history.true.get(name)}, and {history.reported.get(name)} is told"
        for name in sorted({*history.true, *history.reported})
        if history.true.get(name) != history.reported.get(name)
    ]
    return verdict


def _check_sending(history: History, steps: Mapping[int, list[Step]], verdict: Verdict) -> None:
    jobs: dict[int, list[int]] = defaultdict(list)
    for job, number in history.numbers.items():
        jobs[number].append(job)
    left = set(history.left)
    for sent in history.sent:
        found = jobs.pop(sent.number, [])
        if sent.answer == "ok" and not found:
            verdict.lost.append(f"number {sent.number} was accepted, and there is no job of it")
        if sent.answer == "failed" and found:
            verdict.phantoms.append(f"number {sent.number} was refused, and is job {found}")
        if sent.answer != "failed" and len(found) > 1:
            verdict.phantoms.append(f"number {sent.number} was sent once, and is jobs {found}")
        for job in found:
            endings = [step.state for step in steps.get(job, []) if step.state in ENDINGS]
            if job not in left and endings[-1:] != ["completed"]:
                verdict.lost.append(f"job {job} did not complete: {endings or 'it is nowhere'}")
    for number, found in jobs.items():
        verdict.phantoms.append(f"nobody sent number {number}, which is job {found}")


def _check_steps(steps: Mapping[int, list[Step]], verdict: Verdict) -> None:
    for job, many in steps.items():
        state, attempt, worker, ended = "", 0, None, 0
        for step in many:
            if ended:
                kind = verdict.doubled if step.state in ENDINGS else verdict.illegal
                kind.append(f"job {job} was {step.state} after it had ended")
            elif step.state not in LEGAL.get(state, ()):
                verdict.illegal.append(f"job {job} went from {state or 'nothing'} to {step.state}")
            if step.state == "running":
                if step.attempt != attempt + 1:
                    verdict.stale.append(f"job {job} was claimed as attempt {step.attempt} after {attempt}")
                attempt, worker = step.attempt, step.worker
            elif step.state in ENDINGS and (step.attempt, step.worker) != (attempt, worker):
                verdict.stale.append(
                    f"job {job} was ended by worker {step.worker} as attempt {step.attempt},"
                    f" and was with worker {worker} as attempt {attempt}"
                )
            ended += step.state in ENDINGS
            state = step.state


def _check_acts(history: History, steps: Mapping[int, list[Step]], verdict: Verdict) -> None:
    done = Counter(act.number for act in history.acts if act.transactional)
    did = {act.number for act in history.acts}
    last = {
        job: many[-1]
        for job, many in steps.items()
        if many[-1].state == "completed" and job in history.numbers
    }
    transactional = {sent.number for sent in history.sent if sent.transactional}
    for number, times in done.items():
        if times > 1:
            verdict.doubled.append(f"the effect of number {number} was committed {times} times")
    for act in history.acts:
        if act.job not in history.numbers:
            verdict.phantoms.append(f"job {act.job} of number {act.number} had an effect, and never was")
        elif act.transactional and (act.job not in last or last[act.job].attempt != act.attempt):
            verdict.stale.append(f"attempt {act.attempt} of job {act.job} was committed, and did not end it")
    for job in last:
        number = history.numbers[job]
        if number not in did or (number in transactional and not done[number]):
            verdict.lost.append(f"job {job} has completed, and number {number} had no effect")


def _check_recoveries(history: History, steps: Mapping[int, list[Step]], verdict: Verdict) -> None:
    for loss in history.losses:
        many = steps.get(loss.job, [])
        place = next(
            (n for n, step in enumerate(many) if (step.state, step.attempt) == ("running", loss.attempt)),
            None,
        )
        if place is None or place + 1 >= len(many):
            continue  # never noted, or stuck, which is told above
        after = many[place + 1]
        if after.at < loss.at or after.state != "ready":
            continue  # it was not lost any more, or was ended in the last moment
        again = next((step for step in many[place + 1 :] if step.state == "running"), None)
        if again is None:
            continue
        began = max(loss.at, many[place].at)
        took = again.at - began - _away(history.outages, began, again.at)
        verdict.recoveries.append(took)
        if took > history.bound:
            verdict.slow.append(
                f"job {loss.job} ran again after {took:.2f} s; {history.bound:.2f} s are allowed"
            )
    verdict.recoveries.sort()


def _check_executions(history: History, steps: Mapping[int, list[Step]], verdict: Verdict) -> None:
    """Two attempts of a job run at once only if the lease of the first was over when the second was claimed."""
    claims = {
        (one.job, one.attempt): one for many in steps.values() for one in many if one.state == "running"
    }
    leases: dict[int, list[Lease]] = defaultdict(list)
    for lease in sorted(history.leases, key=lambda one: one.at):
        leases[lease.worker].append(lease)
    executions: dict[int, list[Execution]] = defaultdict(list)
    for execution in sorted(history.executions, key=lambda one: one.attempt):
        executions[execution.job].append(execution)
    for job, many in executions.items():
        for former, later in pairwise(many):
            if former.left is None or later.began >= former.left:
                continue
            claimed, held = claims.get((job, later.attempt)), claims.get((job, former.attempt))
            if claimed is None or held is None or held.worker is None:
                continue  # of an attempt that was never written, another check tells
            renewed = [lease for lease in leases[held.worker] if lease.at <= claimed.at]
            if renewed and renewed[-1].until > claimed.at:
                verdict.overlapping.append(
                    f"attempts {former.attempt} and {later.attempt} of job {job} ran at once, and worker {held.worker} had"
                    f" its lease for another {renewed[-1].until - claimed.at:.2f} s"
                )


def _check_looks(history: History, verdict: Verdict) -> None:
    """A process that takes up more than it may is told of once for each kind, by the most that was seen."""
    seen: dict[tuple[int, str], float] = {}
    for look in history.looks:
        for name, much in look.has.items():
            if much > history.most.get(name, float("inf")):
                seen[look.process, name] = max(much, seen.get((look.process, name), 0.0))
    verdict.unbounded += [
        f"process {process} had {much:g} {name}; {history.most[name]:g} are allowed"
        for (process, name), much in seen.items()
    ]


def _away(outages: Sequence[tuple[float, float]], since: float, until: float) -> float:
    """How long of this time the server was away, or had just come back; outages are in order."""
    total = 0.0
    for gone, back in outages[: bisect_right(outages, (until, until))]:
        total += max(0.0, min(until, back + RESUME) - max(since, gone))
    return total
