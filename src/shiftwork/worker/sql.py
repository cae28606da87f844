"""Tasks whose code is a routine in the database, as the registry has them.

The worker lends a session and listens: the routine is called by `shiftwork.run_job`, in one statement and one transaction with
what becomes of its job, which is decided there. One that commits by itself is called as it is, at the top of a
session, and is held by the lease alone; then what becomes of its job is decided here.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

from psycopg.errors import Diagnostic

from shiftwork import events, operations
from shiftwork.codec import Signature, safe_text
from shiftwork.codes import code_of
from shiftwork.errors import ConfigurationError, ShiftworkError
from shiftwork.events import Event
from shiftwork.operations import Routine
from shiftwork.retry import Retry
from shiftwork.settings import Settings
from shiftwork.stores.protocol import Protocol
from shiftwork.stores.store import Store
from shiftwork.worker.line import Line, will_pass
from shiftwork.worker.run import Task

REGISTRY = "*"
"""What a notification says instead of a queue when the registry has changed."""

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
    batch = None
    batch_parameter = None
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


class Registry:
    """The tasks of a worker: those of its program, and those that run in the database, as the registry has them by now."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        own: Mapping[str, Task],
        routines: Sequence[Routine],
        publish: Callable[[Event], None],
    ) -> None:
        if not (own or routines) and settings.unknown_tasks == "leave":
            raise ConfigurationError("there are no tasks to run; declare some with @app.task or app.sql_task")
        self.tasks = own
        self.own = own
        self._routines = routines
        self._store = store
        self._publish = publish
        self._look_at = 0.0
        self._left_out: dict[str, str] = {}
        """Why some are not among them, as far as it was told."""

    def told(self) -> None:
        """It has changed, as somebody says."""
        self._look_at = 0.0

    @property
    def is_due(self) -> bool:
        """Whether to look at it; sooner or later that is so even if nobody told."""
        return time.monotonic() >= self._look_at

    async def enter(self, line: Line) -> None:
        """What the program says of routines goes into it, each by itself: one that is refused stops no other."""
        for routine in self._routines:
            try:
                await line.perform(operations.register_task(cast("Protocol", self._store), routine))
            except ShiftworkError as error:
                if will_pass(error):
                    raise
                self._leave_out(routine.task, str(error))

    async def look(self, line: Line, *, again: float) -> bool:
        """See what it has, and again after so many seconds at the latest; says whether the tasks are others now.

        What the program has under the same name goes before. Who writes there by hand may write anything: what
        cannot be read is left out.
        """
        self._look_at = time.monotonic() + again
        found: dict[str, Task] = {}
        for row in await line.perform(operations.sql_tasks(self._store)):
            try:
                found[row["name"]] = _read(row)
            except Exception as error:  # noqa: BLE001  -- one bad row stops nobody
                self._leave_out(row["name"], f"its row in the registry cannot be read: {error!r}")
        former, self.tasks = self.tasks, {**found, **self.own}
        return former != self.tasks

    def _leave_out(self, task: str, why: str) -> None:
        if self._left_out.get(task) != why:
            self._left_out[task] = why
            self._publish(events.TaskLeftOut(task, why))


def _read(row: Mapping[str, Any]) -> SqlTask:
    seconds = row["timeout"]
    return SqlTask(
        row["name"],
        row["handler"],
        row["queue"],
        Retry.from_json({**Retry().as_json(), **json.loads(row["retry"] or "{}")}),
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
