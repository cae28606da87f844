"""How jobs are kept in a table that somebody already has: the columns, by our names and by theirs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

from shiftwork.errors import ConfigurationError
from shiftwork.retry import Retry

STATES = ("queued", "processing", "errored", "failed", "completed", "canceled")
COLUMNS = (
    *("id", "state", "failure_message", "queued_at", "started_at", "finished_at", "process_after"),
    *(
        "num_resets",
        "num_failures",
        "last_heartbeat_at",
        "execution_logs",
        "worker_hostname",
        "cancel",
        "attempt",
    ),
)
"""What a table may have for us, by our names."""

CHANGED = (
    *("state", "started_at", "last_heartbeat_at", "worker_hostname", "attempt", "finished_at"),
    *("failure_message", "execution_logs"),
)
"""What a claim changes: of these a record has the new values, and not what the view says."""

DIED = "the worker that ran it died, too many times"


def quoted(name: str) -> str:
    """A name as an identifier."""
    return '"' + name.replace('"', '""').replace("%", "%%") + '"'


def literal(text: str) -> str:
    """A text as a constant."""
    return "'" + text.replace("'", "''").replace("%", "%%") + "'"


def relation(name: str) -> str:
    """A table or view, with its schema or without, as it stands in a statement; what needs quotes has them already."""
    parts = re.findall(r'"(?:[^"]|"")+"|[^".]+', name)
    if not 1 <= len(parts) <= 2 or ".".join(parts) != name:
        raise ConfigurationError(
            f'{name!r} is no name of a table; write it like jobs, sales.jobs or sales."Jobs"'
        )
    return ".".join(quoted(part[1:-1].replace('""', '"') if part.startswith('"') else part) for part in parts)


@dataclass(frozen=True)
class Column:
    """A column of somebody's table."""

    name: str
    type: str
    is_required: bool = False
    labels: tuple[str, ...] | None = None
    """The values of an enum."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How jobs are kept in a table."""

    name: str
    """What its jobs are called: the task, and the queue."""

    table: str
    view: str | None = None
    fields: Mapping[str, str] | None = None
    """What a record has, each with how it crosses (see `CROSSING`); None is all there is."""

    argument: str = "record"
    columns: Mapping[str, str | None] = field(default_factory=dict)
    """Our names and theirs; None says that there is no such column."""

    order_by: str | None = None
    where: str | None = None
    retry: Retry = field(default_factory=Retry)
    max_resets: int = 2
    lease: timedelta = timedelta(seconds=30)
    died: str = DIED
    transactional: bool = False
    """Whether the row of a job is locked for as long as its code runs."""

    def theirs(self, our: str) -> str | None:
        """What a column of ours is called there."""
        return self.columns.get(our, our)

    @property
    def retries(self) -> bool:
        """Whether a job that failed is tried again."""
        return self.retry.max_attempts != 1
