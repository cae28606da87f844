"""Three clocks, each of which can be put forward by itself: a test that is about an hour waits for none of it.

What is due is decided by the database, in one function. Whether a lease is still held is decided by the worker, by a clock that goes
on while the machine sleeps. How long handlers have at the end is counted by the worker's loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from shiftwork import App
from shiftwork.events import JobEnded, JobStopped, LeaseLapsing
from shiftwork.worker import leases, worker
from tests.harness import Protocol
from tests.wire import Wire
from tests.workshop import Latch, Workshop

HOUR = timedelta(hours=1)
GOES_ON: Any = {"lease": HOUR, "grace": HOUR}
"""Nothing of this comes about while a test runs."""


class Ahead:
    """A clock that can be put forward."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.by = 0.0

    def __call__(self) -> float:
        return self._clock() + self.by


async def test_a_job_is_due_when_the_clock_of_the_database_says_so(dsn: str, protocol: Protocol) -> None:
    # spec: SG-42
    app = App(dsn)

    @app.task
    async def greet() -> None: ...

    async with app, Workshop(app, **GOES_ON) as shop:
        job = await greet.using(delay=HOUR).aenqueue()
        await shop.asleep()
        assert not shop.seen(JobEnded)
        protocol.shift_clock(HOUR)
        shop.worker._wake()
        await shop.ended(job, state="completed")


async def test_a_lease_lapses_by_the_clock_of_heartbeats(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # spec: SG-42
    clock = Ahead(leases.through_suspend)
    monkeypatch.setattr(leases, "through_suspend", clock)
    with Wire(dsn) as wire:
        app, latch = App(wire.dsn), Latch()

        @app.task
        async def hold() -> None:
            await latch.hold()

        async with app, Workshop(app, **GOES_ON) as shop:
            job = await hold.aenqueue()
            await latch.reached()
            wire.refuse()
            clock.by = HOUR.total_seconds()
            shop.worker._leases.nudge()
            await shop.event(LeaseLapsing)
            await shop.event(JobStopped, job=job, why="lapsed")
            wire.accept()


async def test_the_grace_is_over_by_the_clock_of_the_loop(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # spec: SG-42
    clock = Ahead(time.monotonic)
    monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=clock, perf_counter=time.perf_counter))
    app, latch = App(dsn), Latch()

    @app.task
    async def hold() -> None:
        await latch.hold()

    async with app, Workshop(app, **GOES_ON) as shop:
        job = await hold.aenqueue()
        await latch.reached()
        shop.worker.stop()
        await asyncio.sleep(0)
        assert not shop.seen(JobStopped)
        clock.by = HOUR.total_seconds()
        await shop.event(JobStopped, job=job, why="shutdown")
        assert await shop.stopped()
        assert (await shop.job(job)).state == "ready"
