"""Counting what happens in a worker, for Prometheus.

Every job passes here, so counting is kept to a few additions; what was counted is put into the words of Prometheus only
when somebody asks for it. That happens in another thread, which only reads: a figure may be one event older than its
neighbour. Labels are bounded, whatever is enqueued: tasks that this worker does not have are all called `unknown`, and of a
great many tasks the last ones are all called `other`.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, ItemsView, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from shiftwork import events
from shiftwork.events import Event, Subscriber
from shiftwork.job import State

if TYPE_CHECKING:
    from prometheus_client.core import Metric

BOUNDS = tuple(0.005 * 2.5**place for place in range(12))
"""Seconds of a job, from 5 ms to two minutes."""

QUICK = tuple(0.0005 * 2.5**place for place in range(12))
"""Seconds of a statement, from half a millisecond to twelve seconds."""

MOST_TASKS = 200
POISON = frozenset({"POISON", "ARGUMENTS_INVALID", "UNKNOWN_TASK"})
DONE = State.COMPLETED
UNKNOWN = "unknown"
OTHER = "other"

Facts = Mapping[str, float]
Waiting = Iterable[Mapping[str, Any]]


class Durations:
    """A histogram."""

    __slots__ = ("bounds", "many", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.many = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        """It took so long."""
        self.many[bisect_left(self.bounds, seconds)] += 1
        self.total += seconds

    def add_all(self, many: list[float]) -> None:
        """Each of them took so long."""
        if not many:
            return
        self.total += sum(many)
        if max(many) <= self.bounds[0]:  # as all that is quick
            self.many[0] += len(many)
            return
        many.sort()
        above = 0
        for place, bound in enumerate(self.bounds):
            below, above = above, bisect_right(many, bound)
            self.many[place] += above - below
            if above == len(many):
                break
        self.many[-1] += len(many) - above

    def told(self) -> tuple[list[tuple[str, float]], float]:
        """As Prometheus has it: how many took at most so long, and the sum."""
        names = [*(f"{bound:g}" for bound in self.bounds), "+Inf"]
        return [*zip(names, accumulate(self.many), strict=True)], self.total


class Task:
    """What was counted of one task."""

    __slots__ = ("claimed", "most", "ok", "outcomes", "took")

    def __init__(self) -> None:
        self.claimed = 0
        self.ok = 0
        self.outcomes: Counter[str] = Counter()
        """Those that did not end well."""

        self.took = Durations(BOUNDS)
        self.most = 0
        """The most that were in flight since somebody last asked."""

    @property
    def flying(self) -> int:
        """How many are claimed and have not ended."""
        return self.claimed - self.ok - self.outcomes.total()


class Metrics:
    """Counts events; a collector of Prometheus."""

    def __init__(
        self,
        tasks: Collection[str],
        facts: Callable[[], Facts],
        then: Subscriber = lambda _: None,
        hooks: Mapping[str, Durations] = MappingProxyType({}),
    ) -> None:
        """`facts` are gauges that are asked for when somebody looks, and so are the durations of `hooks`; `then` is told of what does not
        concern single jobs."""
        self._hooks = hooks
        self._facts = facts
        self._then = then
        self._unknown = Task()
        self._tasks: dict[str, Task] = {}
        self._named = {UNKNOWN: self._unknown}
        self._know(tasks)
        self._claims, self._settlements, self._renewals = Durations(QUICK), Durations(QUICK), Durations(QUICK)
        self._counts: Counter[tuple[str, ...]] = Counter()
        self._listens = 0
        self._waiting: Waiting = ()
        self._measured = float("-inf")

    def _know(self, tasks: Collection[str]) -> None:
        """Have a label for each of these; those that had one keep it. Who reads meanwhile has the former ones."""
        known, named = dict(self._tasks), dict(self._named)
        for name in sorted(set(tasks) - known.keys()):
            called = name if len(known) < MOST_TASKS else OTHER
            known[name] = named.setdefault(called, Task())
        self._tasks, self._named = known, named

    def wants(self, kind: type[Event]) -> bool:
        """Beginnings are not counted: what is in flight follows from claims and ends."""
        return kind is not events.JobBegan

    def __call__(self, event: Event) -> None:
        if type(event) is events.JobEnded:
            self.tell_ended((event,))
        else:
            self._count(event)
            self._then(event)

    def tell_ended(self, jobs: Sequence[events.JobEnded]) -> None:
        """The same for jobs that ended together."""
        alike = len({event.task for event in jobs}) == 1
        for name, ended in {jobs[0].task: jobs}.items() if alike else _by_task(jobs):
            task = self._tasks.get(name) or self._unknown
            task.took.add_all([event.seconds for event in ended])
            others = [event for event in ended if event.state is not DONE and event.state != DONE]
            task.ok += len(ended) - len(others)
            task.outcomes.update(map(_outcome, others))

    def _count(self, event: Event) -> None:  # noqa: PLR0912
        counts = self._counts
        match event:
            case events.Claimed(tasks, seconds):
                self._claims.add(seconds)
                for name, many in tasks.items():
                    task = self._tasks.get(name) or self._unknown
                    task.claimed += many
                    task.most = max(task.most, task.flying)
            case events.WorkerStarted(tasks=names) | events.TasksChanged(tasks=names):
                self._know(names)
            case events.Settled(_, seconds):
                self._settlements.add(seconds)
            case events.LeaseRenewed(_, seconds):
                self._renewals.add(seconds)
            case events.JobReleased(_, name) | events.JobLost(_, name):
                task = self._tasks.get(name) or self._unknown
                task.outcomes["released" if isinstance(event, events.JobReleased) else "lost"] += 1
            case events.Reaped(jobs):
                for answer in jobs.values():
                    counts["reset_failures" if answer == "failed" else "resets",] += 1
            case events.ReapFailed():
                counts["reset_errors",] += 1
            case events.DatabaseAway(part):
                counts["outages", part] += 1
            case events.DatabaseBack(part):
                counts["reconnects", part] += 1
            case events.DutyDone(duty):
                counts["duties", duty, "done"] += 1
            case events.DutyFailed(duty):
                counts["duties", duty, "failed"] += 1
            case events.LeaseLapsing():
                counts["leases", "lapsing"] += 1
            case events.LeaseLost():
                counts["leases", "lost"] += 1
            case events.StraysReleased(jobs):
                counts["strays",] += len(jobs)
            case events.JobRefused():
                counts["refused",] += 1
            case events.ListenerProven():
                self._listens = 1
            case events.ListenerDeaf():
                self._listens = 0

    def measured(self, waiting: Waiting) -> None:
        """So much waits in the queues, now."""
        self._waiting, self._measured = waiting, time.monotonic()

    @property
    def age(self) -> float:
        """How old the figures of the queues are, in seconds."""
        return time.monotonic() - self._measured

    # What is told of it.

    def describe(self) -> Iterator[Metric]:
        """Nothing beforehand: asking what there is would count as asking."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Everything, for whoever asks; then the most in flight begins anew."""
        from prometheus_client.core import (  # noqa: PLC0415  -- an extra
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        processed = CounterMetricFamily(
            "shiftwork_jobs_processed",
            "Attempts that ended, by what became of the job.",
            labels=("task", "outcome"),
        )
        took = HistogramMetricFamily(
            "shiftwork_job_duration_seconds", "How long handlers took.", labels=("task",)
        )
        flying = GaugeMetricFamily(
            "shiftwork_jobs_in_flight",
            "Jobs that this worker held at once, the most since the last scrape.",
            labels=("task",),
        )
        for name, task in self._named.items():
            for outcome, many in {"ok": task.ok, **task.outcomes}.items():
                processed.add_metric((name, outcome), many)
            buckets, total = task.took.told()
            if name in self._tasks or buckets[-1][1] or task.most:
                took.add_metric((name,), buckets, total)
                flying.add_metric((name,), max(task.most, task.flying))
            task.most = task.flying
        yield from (processed, took, flying)

        for name, words, durations in (
            ("claim", "How long claims took.", self._claims),
            ("settle", "How long writing a batch of outcomes took.", self._settlements),
            ("lease_renewal", "How long renewing the lease took.", self._renewals),
        ):
            family = HistogramMetricFamily(f"shiftwork_{name}_duration_seconds", words)
            family.add_metric((), *durations.told())
            yield family

        hooks = HistogramMetricFamily(
            "shiftwork_hook_duration_seconds", "How long hooks before and after jobs took.", labels=("hook",)
        )
        for name, durations in self._hooks.items():
            hooks.add_metric((name,), *durations.told())
        yield hooks

        for name, (words, labels) in COUNTERS.items():
            counter = CounterMetricFamily(f"shiftwork_{name}", words, labels=labels)
            if not labels:
                counter.add_metric((), self._counts[name,])
            for (kind, *values), many in self._counts.copy().items():
                if kind == name and labels:
                    counter.add_metric(values, many)
            yield counter

        for name, value in {
            "listening": self._listens,
            "queue_depth_age_seconds": self.age,
            **self._facts(),
        }.items():
            gauge = GaugeMetricFamily(f"shiftwork_{name}", GAUGES[name])
            gauge.add_metric((), value)
            yield gauge

        depth = GaugeMetricFamily(
            "shiftwork_queue_depth", "Jobs that are ready, counted up to 10,000.", labels=("queue",)
        )
        oldest = GaugeMetricFamily(
            "shiftwork_queue_oldest_wait_seconds",
            "For how long the oldest ready job has been due.",
            labels=("queue",),
        )
        for row in self._waiting:
            depth.add_metric((row["queue"],), row["ready"])
            oldest.add_metric((row["queue"],), row["oldest"])
        yield from (depth, oldest)


def _by_task(jobs: Sequence[events.JobEnded]) -> ItemsView[str, Sequence[events.JobEnded]]:
    grouped: defaultdict[str, list[events.JobEnded]] = defaultdict(list)
    for event in jobs:
        grouped[event.task].append(event)
    return grouped.items()


def _outcome(event: events.JobEnded) -> str:
    if event.state == "scheduled":
        return "snoozed" if event.error is None or event.error.get("code") == "SNOOZED" else "retry"
    poisoned = event.state == "failed" and (event.error or {}).get("code") in POISON
    return "poison" if poisoned else event.state


COUNTERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "resets": ("Jobs taken from workers that fell silent, to run again or to be cancelled.", ()),
    "reset_failures": ("Jobs taken from workers that fell silent, and failed: it happened too often.", ()),
    "reset_errors": ("Attempts to take jobs back that failed.", ()),
    "strays": ("Jobs given back whose claim had no answer.", ()),
    "refused": ("Outcomes that the database refused.", ()),
    "leases": ("Leases that could not be renewed in time, or were lost.", ("what",)),
    "outages": ("How often a part of this worker could not reach the database.", ("part",)),
    "reconnects": ("How often it could again.", ("part",)),
    "duties": ("Duties that this worker did for all.", ("duty", "outcome")),
}
GAUGES: Mapping[str, str] = {
    "listening": "Whether notifications are known to arrive.",
    "ready": "Whether this worker is able to claim.",
    "slots": "How many jobs may run at once.",
    "slots_busy": "How many run now.",
    "jobs_held": "Jobs that are claimed and not written about yet.",
    "outcomes_unwritten": "Outcomes that wait to be written.",
    "notification_queue_usage": "How full the server's queue of notifications is, from 0 to 1.",
    "queue_depth_age_seconds": "How old the figures of the queues are.",
}
