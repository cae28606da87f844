"""The app that is measured, and a process that works for it: `python -m bench.sample`, set by SHIFTWORK_* variables."""

from __future__ import annotations

import sys
import time

import psycopg

import shiftwork
from shiftwork import events
from shiftwork.logs import set_up

CONCURRENCY = 1000
app = shiftwork.App()


@app.task
async def nothing(n: int) -> None:
    """Nothing, in the event loop."""


@app.task
def nothing_in_a_thread(n: int) -> None:
    """Nothing, in a thread."""


@app.task(transaction=True)
async def nothing_in_a_transaction(n: int, tx: psycopg.AsyncConnection) -> None:
    """Nothing, in a transaction."""


@app.task(transaction=True)
async def nothing_together(n: shiftwork.Batch[int], tx: psycopg.AsyncConnection) -> None:
    """Nothing, for a hundred jobs in one transaction."""


@app.task
async def moment(n: int) -> int:
    """When it began, by a clock that all processes of this machine share."""
    return time.monotonic_ns()


# Hooks do as little as the jobs: what is measured is what it costs to call them. Metrics say how often that was.


def look_on(event: events.Event) -> None:
    """Subscribe to everything that happens."""


def look_at_claim(claim: shiftwork.Round) -> None:
    """Ask for no more than there is room for, as a program with a budget does."""
    claim.limit(CONCURRENCY)


def look_at_job(job: shiftwork.Job) -> None:
    """Before a job, in a plain function."""


async def look_at_end(job: shiftwork.Job, failure: str | None) -> None:
    """After it, in an async one."""


if __name__ == "__main__":
    if app.settings.metrics_port:
        app.subscribe(look_on)
        app.before_claim(look_at_claim)
        app.before_job(look_at_job)
        app.after_job(look_at_end)
    set_up(app.settings.log_level, app.settings.log_format)
    sys.exit(0 if app.run_worker() else 1)
