"""What a worker says of itself: how it was set, and what it costs."""

from __future__ import annotations

import os
import platform
import resource
import sys
from collections.abc import Mapping
from importlib.metadata import version

from shiftwork.settings import Settings

SAID = ("prefetch", "unknown_tasks", "notify", "stop_when_idle", "max_jobs")
SAID_IN_SECONDS = ("lease", "poll", "grace", "timeout", "max_time")


def described(settings: Settings) -> Mapping[str, object]:
    """How a worker was set, as far as it matters to whoever looks at it from outside; nothing that is secret."""
    lengths = {name: getattr(settings, name) for name in SAID_IN_SECONDS}
    return {
        "version": version("shiftwork"),
        "python": platform.python_version(),
        "concurrency": settings.concurrency,
        "queue_concurrency": dict(settings.queue_concurrency),
        "task_concurrency": dict(settings.task_concurrency),
        "queue_budgets": dict(settings.queue_budgets),
        "weights": {queue: weight for queue, weight in settings.queues.items() if weight is not None},
        "transactions": settings.transaction_connections,
        **{name: getattr(settings, name) for name in SAID},
        **{name: None if length is None else length.total_seconds() for name, length in lengths.items()},
    }


def memory() -> int:
    """How much memory this process has, in bytes; where that cannot be seen, the most that it ever had."""
    if seen := memory_of("self"):
        return seen
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def memory_of(process: int | str) -> int:
    """How much memory a process has, in bytes; 0 where that cannot be seen."""
    try:
        with open(f"/proc/{process}/statm", "rb") as told:  # noqa: PTH123  -- again and again, and quicker
            return int(told.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0
