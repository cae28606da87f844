"""What a worker process tells whoever started it: systemd, or a supervisor of ours.

That it is ready, once it is registered; that it stops; what it has done; and, if a watchdog wants to hear from it, that it is
alive. Alive is who turns in both places: the event loop in which jobs are run, since this is said from there, and the
thread that renews the lease, which has to have answered since the last time. A database that is away is no reason to be killed.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Self

from shiftwork import events
from shiftwork.events import Event, Subscriber
from shiftwork.systemd import Systemd
from shiftwork.worker.supervised import Order, Supervised
from shiftwork.worker.worker import Worker

TELL_EVERY = 10.0
"""Seconds between two words to systemd about what is being done."""


class Service:
    """A worker as those see it who started its process."""

    def __init__(
        self,
        worker: Worker,
        order: Order,
        *,
        tell: Subscriber,
        systemd: Systemd,
        supervised: Supervised | None,
    ) -> None:
        self._worker = worker
        self._settings = worker.settings
        self._order = order
        self._tell = tell
        self._systemd = systemd
        self._supervised = supervised
        self._ended: Counter[tuple[str, str]] = Counter()
        self._words = ""
        self._watching: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._systemd or self._supervised or self._settings.stop_when_idle:
            self._worker.subscribe(self)
        if self._systemd or self._systemd.watchdog:
            self._watching = asyncio.create_task(self._watch())
        if self._supervised:
            loop = asyncio.get_running_loop()

            def dead(worker: int) -> None:
                with suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(self._worker.bury, worker)

            self._supervised.heed(self._order, dead)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        if self._supervised:
            self._supervised.heed(lambda *_: None, lambda _: None)

    def wants(self, kind: type[Event]) -> bool:
        """Beginnings are many, and of no interest here."""
        return kind is not events.JobBegan

    def __call__(self, event: Event) -> None:
        match event:
            case events.JobEnded():
                self.tell_ended((event,))
            case events.WorkerStarted(worker, _, queues):
                self._words = f"serves {', '.join(queues)}"
                self._systemd.ready(self._words)
                if self._supervised:
                    grace, once = self._settings.grace.total_seconds(), self._settings.stop_when_idle
                    self._supervised.tell(ready=worker, grace=grace, once=once)
            case events.TasksChanged(_, queues):
                self._words = f"serves {', '.join(queues)}"
            case events.StandingBy(_, holder):
                self._systemd.ready(f"stands by: {holder}")
                if self._supervised:
                    self._supervised.tell(waiting=True)
            case events.WorkerBuried(worker) if self._supervised:
                self._supervised.tell(buried=worker)
            case events.WorkerStopping(_, why, running):
                self._words = f"stops ({why}); {running} still running"
                self._systemd.stopping(self._words)
            case events.WorkerStopped():
                self._sum_up()

    def tell_ended(self, jobs: Sequence[events.JobEnded]) -> None:
        """Count them."""
        self._ended.update([(event.queue, event.state) for event in jobs])

    def _sum_up(self) -> None:
        done: dict[str, dict[str, int]] = {}
        for (queue, state), many in sorted(self._ended.items()):
            done.setdefault(queue, {})[state] = many
        if self._supervised:
            self._supervised.tell(ended=done)
        elif self._settings.stop_when_idle:
            self._tell(events.WorkDone(done))

    async def _watch(self) -> None:
        every = min(TELL_EVERY, (self._systemd.watchdog or TELL_EVERY) / 3)
        answered = threading.Event()
        answered.set()  # it has only just begun
        while True:
            await asyncio.sleep(every)
            if self._systemd.watchdog and answered.is_set():
                self._systemd.alive()
                if self._supervised:
                    self._supervised.tell(alive=True)
            answered = self._worker.ping()
            if self._words.startswith("serves"):
                many = len(self._worker.holding)
                self._systemd.status(f"{self._words}; {many} at hand, {self._worker.jobs:,} claimed so far")
