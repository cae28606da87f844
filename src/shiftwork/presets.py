"""Five ways of running jobs, as five systems that people know run them, in our options.

    app = App(settings=Settings.read(**presets.queuert.settings))

    @app.task(**presets.queuert.task)
    async def ship(order: int) -> None: ...

What follows from a setting here and was a setting there (how often a lease is renewed, how often others look for lapsed
ones) is not repeated. A wait "until all is done" is the longest grace there is. Where an original would run a job that
kills its workers for ever, so does its preset: give `max_resets` beside it, and it ends.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from types import MappingProxyType
from typing import Any

from shiftwork.retry import Retry
from shiftwork.settings import UNLIMITED

_SECOND = timedelta(seconds=1)
_MINUTE = timedelta(minutes=1)
_AS_LONG_AS_IT_TAKES = timedelta(days=1)


@dataclass(frozen=True)
class Preset:
    """Options of a task, settings of a worker, and how many days finished jobs are kept."""

    task: Mapping[str, Any]
    settings: Mapping[str, Any]
    keep: Mapping[str, int] = field(default_factory=dict)
    """Days by ending, for `shiftwork.retain`; empty where the original leaves it to its users."""


def _preset(task: dict[str, Any], settings: dict[str, Any], keep: dict[str, int]) -> Preset:
    return Preset(MappingProxyType(task), MappingProxyType(settings), MappingProxyType(keep))


shithub = _preset(
    task={
        "retry": Retry(max_attempts=5, delay=30 * _SECOND, factor=2, cap=timedelta(hours=1), jitter=0.2),
        "timeout": 5 * _MINUTE,
        "on_lost": "requeue",
        "max_resets": UNLIMITED,
    },
    settings={"concurrency": 4, "poll": 5 * _SECOND, "lease": 5 * _MINUTE, "grace": 5 * _MINUTE},
    keep={"completed": 14, "failed": 30},
)
"""Five attempts, half a minute doubling to an hour, and five minutes for each."""

sourcegraph = _preset(
    task={"retry": Retry.never(), "timeout": None, "on_lost": "requeue", "max_resets": 5},
    settings={
        "concurrency": 1,
        "poll": _SECOND,
        "notify": False,
        "lease": 5 * _SECOND,
        "heartbeat": _SECOND,
        "grace": 10 * _SECOND,
    },
    keep={},
)
"""One attempt unless told otherwise, polled for every second, lost five times at most.

For its retries: `Retry(max_attempts=n, delay=after, factor=1, jitter=0)`, where n counts every failure.
"""

horsies = _preset(
    task={
        "retry": Retry(
            max_attempts=4,
            delays=(60 * _SECOND, 300 * _SECOND, 900 * _SECOND),
            factor=1,
            jitter=0.25,
            on=(),
        ),
        "timeout": None,
        "on_lost": "fail",
        "max_resets": 0,
    },
    settings={
        "concurrency": os.cpu_count() or 1,
        "poll": 5 * _SECOND,
        "lease": 5 * _MINUTE,
        "grace": _AS_LONG_AS_IT_TAKES,
    },
    keep={"completed": 30, "failed": 30},
)
"""Three retries after 1, 5 and 15 minutes, for errors that are listed: `replace(retry, on=("RATE_LIMIT", …))`.

Who lists WORKER_CRASHED there says `on_lost="requeue", max_resets=3` here.
"""

queuert = _preset(
    task={
        "retry": Retry.unlimited(delay=10 * _SECOND, factor=2, cap=300 * _SECOND, jitter=0),
        "timeout": None,
        "on_lost": "requeue",
        "max_resets": UNLIMITED,
    },
    settings={"concurrency": 1, "poll": 60 * _SECOND, "lease": 60 * _SECOND, "grace": _AS_LONG_AS_IT_TAKES},
    keep={"completed": 7, "failed": 7},
)
"""Tried until it succeeds: ten seconds doubling to five minutes, without chance."""

statbus = _preset(
    task={
        "retry": Retry(max_attempts=1, at_once=3),
        "timeout": None,
        "on_lost": "requeue",
        "max_resets": UNLIMITED,
    },
    settings={
        "concurrency": 6,
        "queue_concurrency": {"import": 1, "analytics": 4, "maintenance": 1},
        "poll": 60 * _SECOND,
        "grace": 5 * _SECOND,
    },
    keep={"completed": 7, "failed": 30},
)
"""One attempt; only deadlocks and serialization failures are repeated, three times, on the spot."""
