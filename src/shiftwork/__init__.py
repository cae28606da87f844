"""Background work for Python on PostgreSQL, and nothing but PostgreSQL."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shiftwork.app import App
    from shiftwork.client import Handle
    from shiftwork.context import Context
    from shiftwork.errors import (
        Cancel,
        ConfigurationError,
        DatabaseError,
        DatabaseUnavailable,
        DuplicateDiffers,
        EmbeddedError,
        FenceLost,
        Interrupted,
        InvalidArgument,
        JobCancelled,
        JobEnded,
        JobExpired,
        JobFailed,
        NotAllowed,
        NotInstalled,
        PayloadTooLarge,
        Poison,
        ResultTimeout,
        RetryLater,
        SchemaTooNew,
        SchemaTooOld,
        ShiftworkError,
        Snooze,
        UnknownJob,
        UnknownTask,
    )
    from shiftwork.job import Attempt, Job, NewJob, State
    from shiftwork.program import Worker
    from shiftwork.retry import Retry
    from shiftwork.settings import Settings
    from shiftwork.tables import TableStore
    from shiftwork.task import AsyncTask, PlainTask, SqlTask, Task
    from shiftwork.worker.batches import Batch, Member
    from shiftwork.worker.hooks import Round

__all__ = [
    "App",
    "AsyncTask",
    "Attempt",
    "Batch",
    "Cancel",
    "ConfigurationError",
    "Context",
    "DatabaseError",
    "DatabaseUnavailable",
    "DuplicateDiffers",
    "EmbeddedError",
    "FenceLost",
    "Handle",
    "Interrupted",
    "InvalidArgument",
    "Job",
    "JobCancelled",
    "JobEnded",
    "JobExpired",
    "JobFailed",
    "Member",
    "NewJob",
    "NotAllowed",
    "NotInstalled",
    "PayloadTooLarge",
    "PlainTask",
    "Poison",
    "ResultTimeout",
    "Retry",
    "RetryLater",
    "Round",
    "SchemaTooNew",
    "SchemaTooOld",
    "Settings",
    "ShiftworkError",
    "Snooze",
    "SqlTask",
    "State",
    "TableStore",
    "Task",
    "UnknownJob",
    "UnknownTask",
    "Worker",
]

_HOMES = {
    "shiftwork.app": ("App",),
    "shiftwork.client": ("Handle",),
    "shiftwork.context": ("Context",),
    "shiftwork.job": ("Attempt", "Job", "NewJob", "State"),
    "shiftwork.program": ("Worker",),
    "shiftwork.retry": ("Retry",),
    "shiftwork.settings": ("Settings",),
    "shiftwork.tables": ("TableStore",),
    "shiftwork.task": ("AsyncTask", "PlainTask", "SqlTask", "Task"),
    "shiftwork.worker.batches": ("Batch", "Member"),
    "shiftwork.worker.hooks": ("Round",),
}


def __getattr__(name: str) -> object:
    """Public names are imported when first used, so that `import shiftwork` and the command start at once."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib  # noqa: PLC0415

    home = next((home for home, names in _HOMES.items() if name in names), "shiftwork.errors")
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
