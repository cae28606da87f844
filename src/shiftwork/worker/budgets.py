"""Budgets of queues: of which this worker has had enough for a while, so that the others go first.

Counted are this worker's own claims, by its own clock: each worker is fair by itself, and so are all of them together.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping

WINDOW = 300.0
"""Seconds for which a claim counts."""

STEP = 5.0
"""Claims are counted together for so long, and so are forgotten late by that at most."""


class Budgets:
    """How many jobs of some queues may be claimed within the window before other queues go first."""

    def __init__(self, most: Mapping[str, int], clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._steps: deque[tuple[float, Counter[str]]] = deque()
        self._claimed: Counter[str] = Counter()

    def __bool__(self) -> bool:
        return bool(self._most)

    def left(self) -> Mapping[str, int]:
        """What is left of each."""
        forgotten = self._clock() - WINDOW - STEP
        while self._steps and self._steps[0][0] <= forgotten:
            self._claimed.subtract(self._steps.popleft()[1])
        return {queue: max(most - self._claimed[queue], 0) for queue, most in self._most.items()}

    def count(self, queues: Iterable[str]) -> None:
        """A job of each of these was claimed."""
        now = self._clock()
        if not self._steps or now >= self._steps[-1][0] + STEP:
            self._steps.append((now, Counter()))
        claimed = [queue for queue in queues if queue in self._most]
        self._steps[-1][1].update(claimed)
        self._claimed.update(claimed)
