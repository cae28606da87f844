"""Bugs, planted on purpose: a proof that never fails proves nothing.

Each is an edit, of a function's text in a database of the test's own, or of a file in a copy of the package. One that finds
nothing to edit is an error, so that it cannot rot when the function is rewritten.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
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
    "held.attempt = told.attempt and held.worker = holder and (held.state = 'running') is true",
    "held.state = 'running'",
)
"""Whoever names the id may end the job, whichever attempt holds it."""

REAP_WITHOUT_RECHECK = Plant(
    "reap",
    "one.id <> reaper\n     order by one.id for update skip locked)",
    "one.id <> reaper\n     order by one.id)",
)
"""The lease is read without a lock: a heartbeat can renew it while its jobs are taken away."""

ONLY_THE_LAST_CHILD_TELLS = Plant(
    "tell_parents",
    "where one.parent is not null\n",
    "where one.parent is not null and (one.ending <> 'completed' or not exists (select from shiftwork.jobs as other"
    " where other.parent = one.parent))\n",
)
"""A child that completes and sees others alive says nothing of its end: two that end at once each see the other."""

CLAIM_WITHOUT_NEWCOMERS = Plant(
    "take",
    "timestamptz '-infinity' as run_at, 0::bigint as id\n",
    "timestamptz '-infinity' as run_at, 0::bigint as id where coalesce(wish.places, '{}') = '{}'\n",
)
"""With places, only what lies behind the first of them is read: a more urgent newcomer waits."""


@dataclass(frozen=True)
class Bug:
    """A passage of a file of the package, what stands there instead, and the test that finds it out."""

    file: str
    passage: str
    instead: str
    caught_by: str
    saying: str = "assert"
    """What the test says then, if it does not fail by an assertion of its own or by waiting too long."""

    def sow(self, package: Path) -> None:
        """Put the bug into this copy of the package."""
        file = package / self.file
        text = file.read_text()
        assert self.passage in text, f"{self.file} does not say {self.passage!r} any more: plant it anew"
        file.write_text(text.replace(self.passage, self.instead))


BUGS = {
    "unfenced release": Bug(
        "sql/protocol/release.sql",
        "mine := shiftwork.lock_held(request);",
        "mine := array(select job.id from shiftwork.jobs as job join shiftwork.holds(request -> 'held') as hold on hold.id = job.id"
        " where job.state = 'running' order by job.id for update of job skip locked);",
        "tests/test_races.py::test_a_worker_that_finishes_late_is_refused_whatever_it_tries",
    ),
    "reaper without re-check": Bug(
        "sql/protocol/reap.sql",
        "one.id <> reaper\n     order by one.id for update skip locked)",
        "one.id <> reaper\n     order by one.id)",
        "tests/test_races.py::test_a_reaper_that_meets_a_heartbeat_on_its_way_takes_nothing",
    ),
    "reap keyed by host name": Bug(
        "sql/protocol/reap.sql",
        "where one.gone_at is null and one.lease_until <= present and one.id <> reaper\n",
        "where one.gone_at is null and one.id <> reaper and (one.lease_until <= present\n"
        "           or one.host = (select me.host from shiftwork.workers as me where me.id = reaper))\n",
        "tests/test_resilience.py::test_a_worker_that_drains_and_its_successor_do_not_get_into_each_others_way",
    ),
    "heartbeat on the event loop": Bug(
        "worker/leases.py",
        "        asyncio.run(self._keep())",
        "        asyncio.run_coroutine_threadsafe(self._keep(), self._home).result()",
        "tests/test_worker_leases.py::"
        "test_an_event_loop_that_is_blocked_does_not_keep_the_lease_from_being_renewed",
    ),
    "no poll behind NOTIFY": Bug(
        "worker/resting.py",
        "until = time.monotonic() + seconds",
        "until = time.monotonic() + 3600",
        "tests/test_worker_waking.py::test_without_notifications_work_is_found_by_polling[True]",
    ),
    "strays never found": Bug(
        "sql/protocol/heartbeat.sql",
        "      perform shiftwork.give_back(strays);",
        "      strays := '{}';",
        "tests/test_life.py::test_a_job_whose_claim_was_never_answered_is_a_stray_and_goes_back",
    ),
    "settle that waits on a locked row": Bug(
        "sql/protocol/settle.sql",
        "for update skip locked) as job",
        "for update) as job",
        "tests/test_life.py::test_a_settled_batch_answers_for_each_and_waits_for_no_lock",
    ),
    "one bad row stopping a sweep": Bug(
        "sql/protocol/reap.sql",
        "        -- One of them cannot be written. One by one, so that it stops nobody else.\n",
        "        raise;\n",
        "tests/test_garbage.py::test_a_trigger_that_refuses_to_note_a_lost_attempt_stops_no_other",
        "psycopg.DatabaseError: not this one",
    ),
    "attempts counted only at failure": Bug(
        "sql/protocol/claim.sql",
        "attempt = job.attempt + 1",
        "attempt = job.failures + 1",
        "tests/test_life.py::test_a_worker_that_lost_its_job_changes_nothing_and_is_told",
    ),
    "children left behind at shutdown": Bug(
        "worker/processes.py",
        "        os.killpg(pid, signal.SIGKILL)",
        "        os.kill(pid, signal.SIGKILL)",
        "tests/test_processes.py::test_a_worker_that_stops_leaves_nothing_behind",
    ),
}
"""Kinds of bugs that other systems have had."""
