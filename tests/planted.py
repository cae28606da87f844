"""Bugs, planted on purpose: a proof that never fails proves nothing.

Each is an edit of a function's text in a database of the test's own. A plant that finds nothing to edit is an
error, so that it cannot rot when the function is rewritten.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.rows import scalar_row


@dataclass(frozen=True)
class Plant:
    """A function of the protocol, a passage of it, and what stands there instead."""

    function: str
    passage: str
    instead: str

    def sow(self, connection: psycopg.Connection[Any]) -> None:
        """Put the bug into this database."""
        cursor = connection.cursor(row_factory=scalar_row)
        text = cursor.execute(
            "select pg_get_functiondef(oid) from pg_proc "
            "where pronamespace = 'shiftwork'::regnamespace and proname = %s",
            (self.function,),
        ).fetchone()
        assert isinstance(text, str)
        assert self.passage in text, f"{self.function} does not say {self.passage!r} any more: plant it anew"
        connection.execute(text.replace(self.passage, self.instead).encode())


SETTLE_WITHOUT_FENCE = Plant(
    "settle",
    "job.attempt = told.attempt and job.worker = holder and (job.state = 'running') is true",
    "job.state = 'running'",
)
"""Whoever names the id may end the job, whichever attempt holds it."""

REAP_WITHOUT_RECHECK = Plant(
    "reap",
    "one.id <> reaper\n     order by one.id for update skip locked)",
    "one.id <> reaper\n     order by one.id)",
)
"""The lease is read without a lock: a heartbeat can renew it while its jobs are taken away."""

CLAIM_WITHOUT_NEWCOMERS = Plant(
    "claim",
    "timestamptz '-infinity' as run_at, 0::bigint as id\n",
    "timestamptz '-infinity' as run_at, 0::bigint as id where coalesce(wish.places, '{}') = '{}'\n",
)
"""With places, only what lies behind the first of them is read: a more urgent newcomer waits."""
