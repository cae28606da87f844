"""Tasks whose code is a routine in the database, as the registry has them.

The worker lends a session and listens: the routine is called by `shiftwork.run_job`, in one statement and one transaction with
what becomes of its job, which is decided there. One that commits by itself is called as it is, at the top of a
session, and is held by the lease alone; then what becomes of its job is decided here.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from psycopg.errors import Diagnostic

from shiftwork.codec import Signature, safe_text
from shiftwork.codes import code_of
from shiftwork.errors import ShiftworkError
from shiftwork.retry import Retry

PROGRESS, ALREADY_KEPT = "SW010", "SW015"
LEVELS = {"NOTICE": "info", "INFO": "info", "WARNING": "warning"}


class RoutineFailed(ShiftworkError):  # noqa: N818
    """A routine that commits by itself has failed; its code is the SQLSTATE."""

    def __init__(self, code: str | None, message: str) -> None:
        super().__init__(message)
        self.code = code or "FAILED"


@dataclass(frozen=True)
class SqlTask:
    """A task of the registry, for a worker."""

    name: str
    handler: str
    queue: str | None
    retry: Retry
    """The policy, for one that commits by itself; all others are decided about in the database."""

    timeout: timedelta | None
    commits: bool

    is_async = True
    transaction = True
    """It draws on the same sessions as transactional tasks."""

    executor = "sql"
    concurrency = None
    context_parameters = ()
    connection_parameter = None
    coder = staticmethod(code_of)

    @staticmethod
    def function(**payload: object) -> Any:  # noqa: ANN401
        """What stands in for the routine where a function is looked at."""

    signature = Signature("sql", function)
    """It takes anything."""

    @property
    def entry(self) -> Mapping[str, Any]:
        """It is in the registry already."""
        return {"name": self.name}


def found(row: Mapping[str, Any]) -> SqlTask:
    """A task as the registry has it."""
    seconds = row["timeout"]
    return SqlTask(
        row["name"],
        row["handler"],
        row["queue"],
        Retry.from_json({**Retry().as_json(), **(row["retry"] or {})}),
        None if seconds is None else timedelta(seconds=float(seconds)),
        row["commits"],
    )


def hearing(
    log: Callable[[str, str], None], progress: Callable[[float | None, str | None], None]
) -> Callable[[Diagnostic], None]:
    """What to do with what a routine says while it runs."""

    def hear(said: Diagnostic) -> None:
        message = safe_text(said.message_primary or "", 10_000)
        if said.sqlstate == ALREADY_KEPT:
            return
        if said.sqlstate == PROGRESS:
            with contextlib.suppress(ValueError, TypeError, KeyError):  # else it is not from report_progress
                told = json.loads(message)
                far = None if told["fraction"] is None else min(max(float(told["fraction"]), 0.0), 1.0)
                progress(far, told["message"])
                return
        log(LEVELS.get(said.severity_nonlocalized or "", "debug"), message)

    return hear
