"""A table that somebody already has, as a store: the verbs as plain statements, and nothing of ours in that database.

The table is the judge. A row is free (`queued`, or `errored` and due), held (`processing`) or done; whoever holds it is named by its
fence, which changes with every claim: the number in `attempt`, or, where there is no such column, the moment in `started_at`, which
is never given twice. `worker_hostname` says which worker it is. The lease is the row's own, `last_heartbeat_at`.

What somebody holds is looked up by its id, row by row (that is what `lateral` is for), whatever the server knows of the table's size.

Who locks what: a claim and a heartbeat lock rows FOR NO KEY UPDATE and pass by those that others have locked. A transactional handler
holds its row FOR KEY SHARE, under the fence: heartbeats, and people who set `cancel`, get past that; the resetter, which locks FOR
UPDATE, does not, and leaves the row alone. So a job in an open transaction cannot be taken away; and the statement that ends it
is fenced, and fails, with all that was to be committed, if somebody has changed the row by hand.

When a part fails: a worker that dies leaves `processing` rows whose heartbeat grows old, and any resetter puts them back. One that
was stopped in the middle of a transaction keeps its row locked: then its sessions are ended, which are found by their name, once none of
them has said anything for a lease, and the next turn of the resetter has the row. A claim whose answer was lost left rows that its worker does not know of: its heartbeats give
them back.

Which columns there are is read once, before the first job, and what is missing is left out of the statements. The names of columns
are quoted wherever they stand. `where`, `order_by` and the conditions of hooks are SQL of the program's own and are put in as they are.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

import msgspec
from msgspec.structs import replace

from shiftwork.database import Rows, Statement
from shiftwork.errors import ConfigurationError, NotInstalled
from shiftwork.stores import fitting
from shiftwork.stores.layout import COLUMNS, Column, Layout, literal, relation
from shiftwork.stores.store import FORGET, Apart, Held, opening
from shiftwork.stores.wording import CANDIDATES, CANDIDATES_OF_VIEW, SESSION, SQL, Wording

SHUNNED = 60.0
"""Seconds for which a row is left out that nobody can change."""

HELD = "select (one ->> 0)::bigint as id from jsonb_array_elements(%s::jsonb) as one"
EXISTS = "select exists (select from <table> as job where job.<state>::text = any(%s::text[])) as there"
NOTHING_IN_FLIGHT = "select null::text as virtual_transaction where false"
BY_INDEX = "set local enable_seqscan = off; set local jit = off; "
IN_ORDER = (
    "set local enable_sort = off; set local enable_incremental_sort = off; set local enable_bitmapscan = off;"
    " set local jit = off; "
)
"""By the indexes of what is held and of what waits, whatever the server believes of how much that is: it may have looked when there
was nothing."""

NO_TASKS = "select null::text as name where false"


class Table:
    """The verbs over one table."""

    schema = ""
    in_turn = True
    enqueues = False

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._shunned: dict[int, float] = {}
        self.there: dict[str, Column] = {}
        """The columns of ours that it has, by our names; empty until it was looked at."""

        self.notifies = False
        self._in_order = self._by_index = ""
        self.host = socket.gethostname()
        """What stands before the number of a worker, where a row says who holds it."""

        self.all_columns: tuple[str, ...] = ()
        """Its columns, ours or not."""

        self._wording: Wording | None = None

    @property
    def is_ready(self) -> bool:
        """Whether it is known which columns there are."""
        return bool(self.there)

    @property
    def channels(self) -> tuple[str, str]:
        """Where it is said that there is work, and that a job is to be looked at."""
        name = self.layout.name
        if len(name.encode()) > 48:
            name = f"shiftwork_{sha256(name.encode()).hexdigest()[:16]}"
        return f"{name}_wake", f"{name}_cancel"

    def session(self, worker: int | str) -> str:
        """What the sessions of a worker are called."""
        return f"{SESSION}{worker}"

    # Before anything else.

    def installed(self) -> Statement:
        """The columns of the table and of the view, and the triggers."""
        names = (self.layout.table, self.layout.view or self.layout.table)
        params = tuple(relation(name).replace("%%", "%") for name in names)
        return Statement(SQL["installed"], params, writes=False)

    def accept(self, rows: Rows) -> Sequence[Statement]:
        """Learn which columns there are; refuse a table that cannot be worked."""
        self.learn(rows)
        found = fitting.problems(self, rows)
        if any(one.code == "SW-501" for one in found):
            raise NotInstalled("; ".join(one.message for one in found))
        if wrong := [one.message for one in found if one.is_error]:
            raise ConfigurationError("; ".join(wrong))
        claim = self.claim({"worker": 0, "want": 1})
        return [Statement(f"explain {claim.text}", claim.params, writes=False)]

    def learn(self, rows: Rows) -> None:
        """Take in what `installed` found."""
        columns = {
            row["name"]: Column(
                row["name"],
                row["type"],
                row["is_required"],
                None if row["labels"] is None else tuple(row["labels"]),
            )
            for row in rows
            if row["what"] == "table"
        }
        names = {our: self.layout.theirs(our) for our in COLUMNS}
        there = {our: columns[name] for our, name in names.items() if name is not None and name in columns}
        channel = fitting.plain(literal(self.channels[0]))
        self.notifies = any(row["what"] == "trigger" and channel in row["type"] for row in rows)
        indexes = {row["name"] for row in rows if row["what"] == "index"}
        self._in_order = IN_ORDER if fitting.named(self, "claim") in indexes else ""
        self._by_index = BY_INDEX if fitting.named(self, "held") in indexes else ""
        # Last, the old words are thrown away: another thread may be about to say something, and make them once more.
        self.all_columns, self.there, self._wording = tuple(columns), there, None

    @property
    def fence_column(self) -> str | None:
        """Which column tells one claim from another."""
        return next((our for our in ("attempt", "started_at") if our in self.there), None)

    def declare_tasks(self, tasks: Sequence[Mapping[str, object]]) -> Statement:
        """There is no registry."""
        return Statement("select 0 as written", writes=False)

    def declare_limits(self, limits: Mapping[str, object]) -> Statement:
        """There are none."""
        return Statement("select 0 as written", writes=False)

    def sql_tasks(self) -> Statement:
        """There are none."""
        return Statement(NO_TASKS, writes=False)

    def register(self, details: Mapping[str, object]) -> Statement:
        """A number that nobody has had before: with nowhere to write it down, one of nine quadrillion."""
        return Statement("select %s::bigint as worker", (secrets.randbelow(2**53 - 1) + 1,), writes=False)

    def leave(self, worker: int) -> Statement:
        """What this worker still holds is anybody's now."""
        if not self._has("last_heartbeat_at", "worker_hostname"):
            return Statement("select false as left", writes=False)
        return self._statement(SQL["leave"], self._holder(worker))

    # Holding.

    def claim(self, request: Mapping[str, Any]) -> Statement:
        """Rows for a worker, in their order, and a report."""
        name, want, worker = self.layout.name, int(request["want"]), int(request["worker"])
        bounds = [wish.get("want") for wish in request.get("queues", ()) if wish["queue"] == name]
        if "queues" in request and not bounds:
            want = 0
        for bound in (*bounds, request.get("most", {}).get(name)):
            want = want if bound is None else max(min(want, bound), 0)
        conditions = "".join(f" and ({one.replace('%', '%%')})" for one in request.get("conditions", ()))
        candidates = self._written(self._candidates()) + conditions
        text = self._written(SQL["claim"], candidates=candidates)
        claim = self._left_out(text, (self._holder(worker), worker, want, want, want), as_tuples=True)
        return replace(claim, under=self._in_order)

    def _candidates(self) -> str:
        return CANDIDATES if self.layout.view is None else CANDIDATES_OF_VIEW

    def await_claims(self, worker: int) -> Statement | None:
        """Claims of this worker share a lock, which is had alone only when none is under way."""
        return Statement("select pg_advisory_xact_lock(%s::bigint)", (worker,), writes=False)

    def start(self, worker: int, held: Held) -> Statement:
        """See whether prefetched rows are still held; those that are to be cancelled end here."""
        return self._statement(SQL["start"], self._holder(worker), _json(held))

    def heartbeat(self, request: Mapping[str, Any]) -> Statement:
        """Renew the leases of rows that are held, find those that are not, and what was taken unknowingly."""
        answered = 2**62 if request.get("reconcile") else int(request.get("answered", 0))
        params = (self._holder(int(request["worker"])), _json(request["held"]))
        strays = (answered,) if self._written.can_find_strays else ()
        return replace(self._statement(SQL["heartbeat"], *params, *strays), under=self._by_index)

    def report(self, request: Mapping[str, Any]) -> Statement:
        """Lines go to the execution logs; how far it is has no column."""
        if "execution_logs" not in self.there:
            return Statement("select '{\"lost\": []}' as answer", writes=False)
        return self._statement(SQL["log"], self._holder(int(request["worker"])), _json(request["lines"]))

    def reap(self, reaper: int, most: int, *, thorough: bool) -> Statement:
        """Put back rows whose heartbeat is too old; also called resetting."""
        return replace(self._statement(SQL["reap"], self._holder(reaper), most), under=self._by_index)

    # When somebody's trigger or constraint refuses one row among many.

    @property
    def apart(self) -> Apart:
        """One by one is how it is found."""
        return self

    def suspects(self, verb: str, request: Mapping[str, Any]) -> Statement:
        """The rows that a claim would take, or that are to be put back; of a heartbeat, what is held."""
        if verb == "claim":
            text = self._written(f"{self._candidates()} order by <order> limit %s::int")
            return self._left_out(text, (int(request["want"]),))
        if verb == "heartbeat":
            return Statement(HELD, (_json(request["held"]),), writes=False)
        return self._look(SQL["stalled"])

    def alone(self, verb: str, request: Mapping[str, Any], job: int) -> Statement:
        """The same for one row."""
        only = self._written("job.<id> = ") + f"{job:d}"
        if verb == "claim":
            claim = self.claim({**request, "want": 1, "conditions": [only.replace("%%", "%")]})
            return replace(claim, under="")  # there is no order, and one row to be found
        if verb == "heartbeat":
            held = [hold for hold in request["held"] if hold[0] == job]
            return self.heartbeat({**request, "held": held, "answered": 0, "reconcile": False})
        reap = self.reap(int(request["worker"]), 1, thorough=True)
        return replace(reap, text=reap.text.replace("/*only*/", f"and {only}"))

    def shun(self, job: int) -> None:
        """Leave a row out for a minute."""
        self._shunned[job] = time.monotonic() + SHUNNED

    def _left_out(
        self, text: str, params: tuple[Any, ...], *, writes: bool = True, as_tuples: bool = False
    ) -> Statement:
        """A statement about all rows but those that nobody can change."""
        if self._shunned:
            now = time.monotonic()
            self._shunned = {job: until for job, until in self._shunned.items() if until > now}
            these = ",".join(map(str, self._shunned))
            text = text.replace(
                "/*shunned*/", self._written("and job.<id> <> all(") + f"'{{{these}}}'::bigint[])"
            )
        return Statement(text, params, writes=writes, as_tuples=as_tuples)

    # Letting go.

    def settle(self, worker: int, outcomes: Sequence[bytes], *, brief: bool = False) -> Statement:
        """How attempts ended."""
        text = f"{self._written(SQL['settle'], skipping='skip locked')} {self._written(SQL['settled'])}"
        return Statement(text, (self._holder(worker), f"[{b','.join(outcomes).decode()}]"))

    def release(self, worker: int, held: Held, crashed: Mapping[int, str]) -> Statement:
        """Give rows back; against those that crashed, with the reason for each, that is counted."""
        given = [(job, attempt, crashed.get(job)) for job, attempt in held]
        return self._statement(SQL["release"], self._holder(worker), _json(given))

    # Transactions.

    def open_transaction(self, held: Held) -> Statement:
        """Begin the transaction of jobs, whose rows stay out of the resetter's reach until its end."""
        return opening([self.fence(*one) for one in held])

    def undo_in_transaction(self) -> Statement:
        """Take back what the handler of a job did in its transaction."""
        return Statement("rollback to savepoint shiftwork_handler")

    def close_transaction(self, worker: int, outcome: bytes, *, undo: bool) -> Statement:
        """Write how the job ended, and commit, with what its handler did or without."""
        conclude = self.conclude(worker, outcome)
        back = "rollback to savepoint shiftwork_handler; " if undo else ""
        text = f"{back}release savepoint shiftwork_handler; {conclude.text}; commit; {FORGET}"
        return Statement(text, (*conclude.params, self.session(worker)))

    def conclude(self, worker: int, outcome: bytes) -> Statement:
        """Write how a job ended, or fail, in the caller's transaction."""
        told = msgspec.json.decode(outcome, type=_Fence)
        text = f"{self._written(SQL['settle'], skipping='')} {self._written(SQL['concluded'])}"
        return Statement(text, (self._holder(worker), f"[{outcome.decode()}]", _lost(told.id, told.attempt)))

    def fence(self, job: int, attempt: int) -> Statement:
        """Go on only if this attempt holds its row; until the transaction ends, no resetter takes it."""
        return self._statement(SQL["fence"], _lost(job, attempt), attempt, job)

    # Waiting and looking.

    def sleep(self, seconds: float) -> Statement:
        """The trigger, if there is one, notifies of every insert: nobody has to be waited for."""
        return Statement(NOTHING_IN_FLIGHT, writes=False)

    def rouse(self) -> Statement:
        """Nobody has said that it sleeps."""
        return self.sleep(0)

    def measure_queues(self, queues: Sequence[str]) -> Statement:
        """How much waits, and for how long."""
        return self._look(SQL["measure"])

    def counts(self, states: Sequence[str] | None) -> Statement:
        """How many rows there are in each state: `state, number`."""
        wanted = None if states is None else list(states)
        return self._look(SQL["counts"], wanted, wanted)

    def exists(self, states: Sequence[str]) -> Statement:
        """Whether there is a row in one of these states: `there`."""
        return self._look(EXISTS, list(states))

    # What a handler's own steps leave behind.

    def add_log(self, worker: int, job: int, attempt: int, entry: Mapping[str, object]) -> Statement:
        """Append an entry to the execution logs, or fail: `place`, from 0."""
        params = (self._holder(worker), _json(entry), attempt, job, _lost(job, attempt))
        return self._of_logs(SQL["add_log"], *params)

    def change_log(
        self, worker: int, job: int, attempt: int, place: int, entry: Mapping[str, object]
    ) -> Statement:
        """Change what is given of an entry, or fail."""
        why = f"{_lost(job, attempt)}, or its logs have no entry {place}"
        return self._of_logs(SQL["change_log"], self._holder(worker), _json(entry), attempt, place, job, why)

    def _of_logs(self, text: str, *params: object) -> Statement:
        if "execution_logs" not in self.there:
            raise ConfigurationError(f"{self.layout.table} has no column execution_logs, and keeps no logs")
        return self._statement(text, *params)

    # How statements are written.

    def _holder(self, worker: int) -> str:
        return f"{self.host}:{worker}"

    def _has(self, *ours: str) -> bool:
        return all(our in self.there for our in ours)

    @property
    def _written(self) -> Wording:
        if self._wording is None:
            self._wording = Wording(self.layout, self.there, self.all_columns)
        return self._wording

    def _statement(self, text: str, *params: object) -> Statement:
        return self._left_out(self._written(text), params)

    def _look(self, text: str, *params: object) -> Statement:
        return self._left_out(self._written(text), params, writes=False)


class _Fence(msgspec.Struct):
    id: int
    attempt: int


def _json(document: object) -> str:
    return msgspec.json.encode(document).decode()


def _lost(job: int, attempt: int) -> str:
    return f"shiftwork: attempt {attempt} of job {job} does not hold it any more"
