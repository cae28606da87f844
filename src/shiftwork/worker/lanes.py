"""What a worker may claim, and how much of it: tasks without a limit together, those with one apart.

Each lane has a cursor of its own, since a place in a queue is only good for the tasks that were looked for. The lanes take
turns at being first, so that a busy one does not starve the others.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shiftwork.cursor import Cursor
from shiftwork.settings import Settings
from shiftwork.worker.budgets import Budgets
from shiftwork.worker.resting import Pace
from shiftwork.worker.run import Run, Task

FREELY = 1 << 30
SOON = 0.04
"""Seconds for which a job may be expected to wait for a session that others have."""

PATIENCE = 9.0
"""How many times as long as it took to find few, or none, until they are looked for again: others have work meanwhile."""

LONGEST = 1.0
"""Seconds until then at most: what took long may have waited for the database, and says nothing of how rare they are."""

AHEAD = 4
"""How many times as many as may run are had beforehand, at most."""


@dataclass(eq=False)
class Limit:
    """So many at once, on this worker."""

    most: int
    taken: int = 0
    pace: Pace | None = None
    """How fast they end, where some may be had beforehand: sessions would be idle while the next jobs are claimed."""

    @property
    def room(self) -> int:
        """How many may be held, those beforehand among them."""
        ahead = 0 if self.pace is None else min(int(self.pace.lately * SOON), AHEAD * self.most)
        return self.most + ahead

    @property
    def left(self) -> int:
        """How many more."""
        return self.room - self.taken

    def leave(self) -> None:
        """One less."""
        self.taken -= 1
        if self.pace is not None:
            self.pace.count(1)


@dataclass(eq=False)
class Lane:
    """Tasks that are claimed together."""

    tasks: frozenset[str] | None
    """None: whatever there is."""

    but: frozenset[str] = frozenset()
    """What is claimed by other lanes then."""

    limits: tuple[Limit, ...] = ()
    cursor: Cursor = field(default_factory=Cursor)
    more: bool = False
    """Whether the last claim left something behind."""

    passing: bool = False
    """Whether all that it looked at was passed by."""

    found: bool = False
    """Whether the last claim had something."""

    rests_until: float = 0.0
    """When to look again, if meanwhile there is enough to do in other lanes."""

    narrowed: Sequence[object] = ()
    """To what hooks had narrowed it."""

    @property
    def most(self) -> int:
        """How many may be held at once."""
        return min((limit.room for limit in self.limits), default=FREELY)

    def looked(self, taken: int, wanted: int, seconds: float, *, more: bool) -> None:
        """So many were found of those wanted, in so long. If few, they are rare among what other lanes look for."""
        self.more, self.found, self.passing = more, taken > 0, more and not taken
        if more and taken < wanted:
            self.rests_until = time.monotonic() + min(PATIENCE * seconds, LONGEST)

    @property
    def left(self) -> int:
        """How many more may run."""
        return min((limit.left for limit in self.limits), default=FREELY)


class Lanes:
    """All lanes of a worker, and what it runs in each."""

    def __init__(
        self,
        settings: Settings,
        tasks: Mapping[str, Task],
        queues: Mapping[str, float | None],
        budgets: Budgets | None = None,
    ) -> None:
        self._queues = queues
        self._budgets = budgets
        self._queue_limits = settings.queue_concurrency
        self._in_queue: Counter[str] = Counter()
        sessions = Limit(settings.transaction_connections, pace=Pace())
        processes = Limit(settings.processes_at_once)
        limited: dict[str, Lane] = {}
        sharing: dict[Limit, set[str]] = {sessions: set(), processes: set()}
        for name, task in tasks.items():
            limits = []
            if (most := settings.task_concurrency.get(name, task.concurrency)) is not None:
                limits.append(Limit(most))
            shared = (
                sessions
                if task.transaction and not task.batch
                else processes
                if task.executor == "process"
                else None
            )
            if shared is not None:
                limits.append(shared)
                if most is None:
                    sharing[shared].add(name)
                    continue
            if limits:
                limited[name] = Lane(frozenset({name}), limits=tuple(limits))
        together = [Lane(frozenset(names), limits=(limit,)) for limit, names in sharing.items()]
        self._of = limited | {name: lane for lane in together for name in lane.tasks or ()}
        unlimited = Lane(frozenset(tasks) - self._of.keys())
        if settings.unknown_tasks == "fail":
            unlimited = Lane(None, but=frozenset(self._of))
        self.all = [
            lane for lane in (unlimited, *together, *limited.values()) if lane.tasks is None or lane.tasks
        ]
        every = {limit: None for lane in self.all for limit in lane.limits}
        known = None if settings.unknown_tasks == "fail" else frozenset(tasks)
        self.together = Lane(known, limits=tuple(every)) if len(self.all) > 1 else None
        """All lanes at once: up to what the fullest of them may still have, no limit can be exceeded."""

    def in_turn(self) -> list[Lane]:
        """The lanes, another one first each time; as long as none is known to have a backlog, all together first.

        As long as one has work, those are left out that looked at much lately and found little: a queue full of what is for
        one lane would otherwise be read once for each of them.
        """
        self.all = [*self.all[1:], *self.all[:1]]
        if self.together is None:
            return list(self.all)
        if not any(lane.more for lane in self.all):
            return [self.together, *self.all]
        now = time.monotonic()
        awake = [lane for lane in self.all if now >= lane.rests_until]
        return awake if any(lane.found and lane.left > 0 for lane in awake) else list(self.all)

    def wish(self) -> dict[str, int | None]:
        """The queues in the order in which they are served now, each with how many it may still have."""
        names: Iterable[str] = self._queues
        if any(weight is not None for weight in self._queues.values()):
            names = sorted(names, key=self._draw, reverse=True)
        budgets: Mapping[str, int] = {}
        if self._budgets:
            budgets = self._budgets.left()
            names = sorted(names, key=lambda name: budgets.get(name) == 0)  # behind the others, and unbounded
        wish: dict[str, int | None] = {}
        for name in names:
            most = self._queue_limits.get(name)
            left = None if most is None else most - self._in_queue[name]
            if left is None or left > 0:
                if budget := budgets.get(name):
                    left = budget if left is None else min(left, budget)
                wish[name] = left
        return wish

    def _draw(self, queue: str) -> float:
        return math.log(random.random()) / (self._queues[queue] or 1.0)  # noqa: S311  -- fair, not secret

    def take(self, runs: Iterable[Run]) -> None:
        """These run as well."""
        lanes, counts = self._of, bool(self._queue_limits)
        for run in runs:
            if run.name in lanes:
                for limit in lanes[run.name].limits:
                    limit.taken += 1
            if counts:
                self._in_queue[run.queue] += 1

    def leave(self, runs: Iterable[Run]) -> None:
        """These run no more."""
        lanes, counts = self._of, bool(self._queue_limits)
        for run in runs:
            if run.name in lanes:
                for limit in lanes[run.name].limits:
                    limit.leave()
            if counts:
                self._in_queue[run.queue] -= 1

    @property
    def is_full(self) -> bool:
        """Whether some queue has as many as it may."""
        return not all(map(self.has_room, self._queue_limits))

    def has_room(self, queue: str) -> bool:
        """Whether a queue may have one more."""
        most = self._queue_limits.get(queue)
        return most is None or self._in_queue[queue] < most

    def look(self) -> None:
        """Let every lane look from the start next time."""
        for lane in self.all if self.together is None else (self.together, *self.all):
            lane.cursor.look()


def served(settings: Settings, tasks: Mapping[str, Task]) -> Mapping[str, float | None]:
    """The queues that are served, with their weights: those that the settings name, else all that tasks go to."""
    if settings.queues:
        return settings.queues
    named = {"default", *(task.queue for task in tasks.values() if task.queue)}
    return dict.fromkeys(sorted(named))
