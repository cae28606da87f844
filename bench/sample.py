"""The app that is measured, and a process that works for it: `python -m bench.sample`, set by SHIFTWORK_* variables."""

from __future__ import annotations

import sys
import time
from collections import Counter

import psycopg

import shiftwork
from shiftwork import events
from shiftwork.logs import set_up

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


@app.task
async def moment(n: int) -> int:
    """When it began, by a clock that all processes of this machine share."""
    return time.monotonic_ns()


seen: Counter[str] = Counter()


def look_on(event: events.Event) -> None:
    """Subscribe as a program might."""
    seen[type(event).__name__] += 1


if __name__ == "__main__":
    if app.settings.metrics_port:
        app.subscribe(look_on)
    set_up(app.settings.log_level, app.settings.log_format)
    sys.exit(0 if app.run_worker() else 1)
