"""Where a worker's claims go on reading, so that they pass by what earlier ones have seen.

A claimed job leaves a dead entry at the front of its queue's index, and while an old transaction is open nobody can
remove it. So a worker remembers, for each queue and priority, the last place that was examined, and the next claim
begins behind it. What lies before and between the known priorities is always read, so nothing more urgent is overlooked.

A place may also hide something: a job that was released or retried belongs before it, one whose transaction took long
to commit too, and a row that another worker had locked and let go. Therefore a look without places comes once a second.
When looking has become expensive it comes more rarely, so that it takes no more than a twentieth of the time, but at
least every half minute.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

LOOK_EVERY = 1.0
LOOK_SHARE = 20
LOOK_AT_LAST = 30.0
MOST_PLACES = 100


@dataclass
class Cursor:
    """The places of one worker; times are seconds of a monotonic clock, given by the caller."""

    places: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    mixed: set[str] = field(default_factory=set)
    due: int = 0
    look_at: float = 0.0

    def wish(self, queues: Mapping[str, int | None], now: float) -> dict[str, Any]:
        """What a claim is to be asked: these queues, each up to so many jobs, from where the last one ended."""
        if now >= self.look_at:
            self.places.clear()
            self.mixed.clear()
            self.due = 0
        return {
            "due": self.due,
            "queues": [
                {
                    "queue": queue,
                    "want": want,
                    "places": self.places.get(queue, {}),
                    "mixed": queue in self.mixed,
                }
                for queue, want in queues.items()
            ],
        }

    def learn(
        self,
        report: Mapping[str, Any],
        taken: Iterable[tuple[str, int, int, int]],
        began: float,
        ended: float,
    ) -> None:
        """Take in an answer: its report, and of each job its queue, priority, run_at in microseconds and id."""
        if began >= self.look_at:
            self.look_at = ended + min(max(LOOK_EVERY, LOOK_SHARE * (ended - began)), LOOK_AT_LAST)
        if report.get("more") and not report.get("taken"):
            self.look_at = max(self.look_at, ended + LOOK_EVERY)  # first to the end of what is not for us
        if (earliest := report.get("earliest")) is not None:
            self._go_back(earliest)
        for queue, priority, run_at, job in taken:
            known = self.places.setdefault(queue, {})
            known[str(priority)] = max(known.get(str(priority), [0, 0]), [run_at, job])
        for queue, ends in report["places"].items():
            self.places.setdefault(queue, {}).update(ends)
        self.places = {queue: known for queue, known in self.places.items() if len(known) <= MOST_PLACES}
        self.mixed.update(report["mixed"])
        self.due = report.get("due", 0)

    def look(self) -> None:
        """Let the next claim look from the start."""
        self.look_at = 0.0

    def _go_back(self, earliest: int) -> None:
        """Jobs became due that belong before places already passed."""
        for known in self.places.values():
            for priority, place in known.items():
                if place[0] >= earliest:
                    known[priority] = [earliest - 1, 0]
