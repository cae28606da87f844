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
was stopped in the middle of a transaction keeps its row locked: then its sessions are ended, which are found by their name, and the next
turn of the resetter has the row. A claim whose answer was lost left rows that its worker does not know of: its heartbeats give
them back.

Which columns there are is read once, before the first job, and what is missing is left out of the statements. The names of columns
are quoted wherever they stand. `where`, `order_by` and the conditions of hooks are SQL of the program's own and are put in as they are.
"""

from __future__ import annotations

import re
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from hashlib import sha256
from typing import Any

import msgspec

from shiftwork.database import Rows, Statement
from shiftwork.errors import ConfigurationError, NotInstalled
from shiftwork.retry import Retry
from shiftwork.settings import UNLIMITED
from shiftwork.stores.store import Held

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
MOST_LINES = 1_000
LOCKED = "1s"
"""How long a log line waits for somebody who has locked the row."""

INSTALLED = """
with named as (
  select 'table' as what, to_regclass(%s) as relation union all select 'view', to_regclass(%s)
)
select named.what, attribute.attname as name, format_type(kind.oid, case when kind.oid = attribute.atttypid then attribute.atttypmod else kind.mod end) as type,
       attribute.attnotnull as is_required, labels.all as labels, attribute.attnum as place
  from named
  join pg_catalog.pg_attribute as attribute on attribute.attrelid = named.relation and attribute.attnum > 0 and not attribute.attisdropped
  cross join lateral (
    select coalesce(nullif(own.typbasetype, 0), own.oid) as oid, own.typtypmod as mod from pg_catalog.pg_type as own
     where own.oid = attribute.atttypid) as kind
  left join lateral (
    select array_agg(label.enumlabel::text) as all from pg_catalog.pg_enum as label where label.enumtypid = kind.oid) as labels on true
union all
select 'trigger', made.tgname, encode(made.tgargs, 'escape'), false, null, 0
  from named join pg_catalog.pg_trigger as made on made.tgrelid = named.relation
 where named.what = 'table' and not made.tgisinternal and made.tgenabled <> 'D'
union all
select 'index', index.relname, pg_get_indexdef(made.indexrelid), false, null, 0
  from named join pg_catalog.pg_index as made on made.indrelid = named.relation
  join pg_catalog.pg_class as index on index.oid = made.indexrelid
 where named.what = 'table' and made.indisvalid
 order by what, place
"""
HERE = "here as materialized (select statement_timestamp() as present, %s::text as holder)"
HOLDS = """hold as materialized (
  select (one ->> 0)::bigint as id, (one ->> 1)::bigint as attempt from jsonb_array_elements(%s::jsonb) as one)"""
CLAIM = """
with here as materialized (
  select statement_timestamp() as present, %s::text as holder, pg_advisory_xact_lock_shared(%s::bigint)
), picked as materialized (
  select array(<candidates> order by <order> limit %s::int for no key update of <locked> skip locked) as ids
), taken as (
  update <table> as job set <claiming>
    from here, picked, unnest(picked.ids) with ordinality as place (id, turn)
   where job.<id> = place.id
  returning place.turn, job.<id> as id, <taken>
)
select told.id, <name>::text, <name>::text, 0, told.payload, told.attempt, told.failures, told.resets, <attempts>, told.run_at,
       told.created_at, null::bigint, null::text, null::text[]
  from (
    select taken.turn, taken.id, '{"<argument>":' || <record> || '}' as payload, taken.attempt, taken.failures, taken.resets,
           taken.run_at, taken.created_at
      from taken where taken.is_live
    union all
    select null, 0, jsonb_build_object(
             'claim', <present_micros>, 'at', <present_micros>, 'more', cardinality(picked.ids) >= %s::int,
             'next_due_in', case when cardinality(picked.ids) < %s::int then
               case when exists (<candidates> and job.<id> <> all(picked.ids)) then 0 else <next_due> end end)::text, 0, 0, 0, 0, 0
      from here, picked
  ) as told
 order by told.turn nulls last
"""
CANDIDATES = "select job.<id> from <table> as job where <due> <where>"
CANDIDATES_OF_VIEW = (
    "select job.<id> from <source> as job join <table> as held (<renamed>) on held.<held_id> = job.<id>"
    " where <due> and <held_due> <where>"
)
SOONEST = "(select min(<at>) from <table> as job where <state> and <at> > statement_timestamp() and <at> < 'infinity')"
RECORD = "(select row_to_json(one)::text from (select <values><of>) as one)"
SEEN = " from <source> as seen where seen.<id> = taken.id limit 1"
START = """
with <here>, <holds>, told as materialized (
  select job.<id> as id from here cross join (select * from hold order by id) as hold cross join lateral (
           select * from <table> as job where job.<id> = hold.id and <held> and <cancel> for no key update of job skip locked) as job
), done as (
  update <table> as job set <cancelling> from here, told where job.<id> = told.id returning job.<id> as id
)
select hold.id, case
         when done.id is not null then 'cancelled'
         else coalesce((select case when <cancel> then 'busy' else 'started' end from here, <table> as job
                         where job.<id> = hold.id and <held>), 'lost') end as answer
  from hold left join done on done.id = hold.id
"""
HEARTBEAT = """
with <here>, <holds>, ours as materialized (
  select job.<id> as id, hold.attempt, <cancel> as asked from here cross join hold cross join lateral (
           select * from <table> as job where job.<id> = hold.id and <held> offset 0) as job
), renewed as (
  <renewing>
), stray as materialized (
  select job.<id> as id from here, <table> as job
   where <strays> and job.<id> <> all(array(select hold.id from hold))
   order by job.<id> for no key update of job skip locked
), returned as (
  update <table> as job set <returning> from here, stray as mine where job.<id> = mine.id returning job.<id> as id
), lost as (
  select hold.id, coalesce((select case when job.<state>::text in ('completed', 'failed', 'canceled') then 'ended' else 'taken' end
                              from <table> as job where job.<id> = hold.id), 'missing') as why
    from hold where not exists (select from ours where ours.id = hold.id and ours.attempt = hold.attempt)
)
select jsonb_build_object(
         'alive', true,
         'lost', coalesce((select jsonb_agg(lost.id) from lost), '[]'),
         'why', coalesce((select jsonb_object_agg(lost.id, lost.why) from lost), '{}'),
         'cancel', coalesce((select jsonb_agg(jsonb_build_object('id', ours.id, 'reason', null)) from ours where ours.asked), '[]'),
         'strays', coalesce((select jsonb_agg(returned.id) from returned), '[]'),
         'reap', exists (select from here, <table> as job where <stalled>
                            and job.<id> <> all(array(select ours.id from ours))),
         'notifications', pg_notification_queue_usage())::text as answer
"""
RENEWING = """update <table> as job set <beat> = greatest(here.present, job.<beat>)
    from here, (
      select job.<id> as id from here cross join (select * from ours order by id) as hold cross join lateral (
               select * from <table> as job where job.<id> = hold.id and <held> for no key update of job skip locked) as job
      offset 0) as mine
   where job.<id> = mine.id returning job.<id>"""
SETTLE = """
with <here>, told as materialized (
  select one.id, one.attempt, one.state, one.failure, one.error, one.delay, one.run_at
    from jsonb_to_recordset(%s::jsonb) as one (
      id bigint, attempt bigint, state text, failure boolean, error jsonb, delay double precision, run_at timestamptz)
), mine as materialized (
  select job.<id> as id, <ending> as ending, <counts> as counts, <message> as message, <wait> as wait
    from here cross join (select * from told order by id) as hold cross join lateral (
           select * from <table> as job where job.<id> = hold.id and <held> for no key update of job <skipping>) as job
), done as (
  update <table> as job set <settling> from here, mine where job.<id> = mine.id
  returning job.<id> as id, <told_state> as state
)
"""
SETTLED = """
select one.answer, one.state, null::text as problem, json_agg(one.id)::text as ids
  from (
    select told.id, done.state, case
             when done.id is not null then 'settled'
             when told.state in ('completed', 'failed', 'cancelled', 'scheduled') is not true then 'refused'
             else coalesce((select case when <held> then 'busy' when <already> then 'already' end
                              from here, <table> as job, (select told.attempt) as hold where job.<id> = told.id), 'lost') end as answer
      from told left join done on done.id = told.id
  ) as one
 group by one.answer, one.state
"""
CONCLUDED = "select coalesce(min(done.state), <unless_one>) as state from done"
FENCE = """
select <unless_one> from (
  select from <table> as job, (select %s::bigint as attempt) as hold
   where job.<id> = %s::bigint and job.<state> = 'processing' and <fence> for key share of job) as done
"""
UNLESS_ONE = "cast(case when count(*) = 0 then %s::text end as uuid)::text"
"""Fails, with these words, if there is none: without a function of ours it is a cast that can say something."""

RELEASE = """
with <here>, hold as materialized (
  select (one ->> 0)::bigint as id, (one ->> 1)::bigint as attempt, one ->> 2 as why from jsonb_array_elements(%s::jsonb) as one
), mine as materialized (
  select job.<id> as id, hold.why, case when <cancel> then 'canceled' when hold.why is not null and <resets> >= <max_resets> then 'failed'
                                         else 'queued' end as ending
    from here cross join (select * from hold order by id) as hold cross join lateral (
           select * from <table> as job where job.<id> = hold.id and <held> for no key update of job skip locked) as job
), done as (
  update <table> as job set <releasing> from here, mine where job.<id> = mine.id returning job.<id> as id, mine.ending
)
select hold.id, case done.ending
         when 'queued' then 'released' when 'failed' then 'failed' when 'canceled' then 'cancelled'
         else case when exists (select from here, <table> as job where job.<id> = hold.id and <held>) then 'busy' else 'lost' end
       end as answer
  from hold left join done on done.id = hold.id
"""
REAP = """
with <here>, mine as materialized (
  select job.<id> as id, <attempt> as attempt, <number> as worker, here.present - <since> as age,
         case when <cancel> then 'canceled' when <resets> >= <max_resets> then 'failed' else 'queued' end as ending
    from here, <table> as job where <stalled>
   order by job.<id> limit %s::int for update of job skip locked
), done as (
  update <table> as job set <resetting> from here, mine where job.<id> = mine.id
  returning job.<id> as id, mine.attempt, mine.worker, mine.ending, mine.age
), ended as materialized (
  <ending_sessions>
)
select done.id, done.attempt, done.worker, extract(epoch from done.age)::double precision as age,
       case done.ending when 'queued' then 'ready' when 'canceled' then 'cancelled' else 'failed' end as answer
  from done where (select count(*) from ended) >= 0
"""
END_SESSIONS = """select pg_terminate_backend(activity.pid, 1000)
    from pg_catalog.pg_stat_activity as activity
   where activity.datname = current_database() and activity.pid <> pg_backend_pid()
     and activity.application_name in (
           select <session> || <number> from here, <table> as job
            where <stalled> and job.<id> <> all(array(select mine.id from mine)))
     and (activity.state like 'idle in transaction%%' or activity.xact_start < clock_timestamp() - interval '5 seconds')
     and pg_has_role(activity.usesysid, 'USAGE')"""
LEAVE = """
with <here>, gone as (
  update <table> as job set <beat> = 'epoch' from here
   where job.<state> = 'processing' and job.<holder> = here.holder returning 1)
select count(*) > 0 as left from gone
"""
LOG = """
with <here>, patience as materialized (select set_config('lock_timeout', '<patience>', true) as set),
said as materialized (
  select (one ->> 0)::bigint as id, (one ->> 1)::bigint as attempt, json_agg(json_build_object(
           'key', 'log.' || (one ->> 3), 'command', '[]'::json,
           'startTime', here.present - coalesce((one ->> 2)::double precision, 0) * interval '1 second', 'out', one ->> 4)
           order by turn) as lines
    from here, jsonb_array_elements(%s::jsonb) with ordinality as lines (one, turn) group by 1, 2
), done as (
  update <table> as job
     set <logs> = (coalesce(job.<logs>, '{}') || array(select line::<log_type> from json_array_elements(hold.lines) as line))[1:<most_lines>]
    from here, said as hold
   where job.<id> = hold.id and <same> and (select count(*) from patience) = 1 returning job.<id> as id
)
select jsonb_build_object('lost', coalesce(jsonb_agg(jsonb_build_array(said.id, said.attempt)), '[]'))::text as answer
  from said where said.id <> all(array(select done.id from done))
"""
ADD_LOG = """
with <here>, done as (
  update <table> as job set <logs> = coalesce(job.<logs>, '{}') || array[%s::<log_type>]
    from here, (select %s::bigint as attempt) as hold
   where job.<id> = %s::bigint and <held> returning cardinality(job.<logs>) - 1 as place
)
select coalesce(min(done.place)::text, <unless_one>)::int as place from done
"""
CHANGE_LOG = """
with <here>, done as (
  update <table> as job
     set <logs>[array_lower(job.<logs>, 1) + hold.place] = (job.<logs>[array_lower(job.<logs>, 1) + hold.place]::jsonb || %s::jsonb)::<log_type>
    from here, (select %s::bigint as attempt, %s::int as place) as hold
   where job.<id> = %s::bigint and <held> and hold.place between 0 and cardinality(job.<logs>) - 1 returning job.<id>
)
select coalesce(min(1)::text, <unless_one>)::int as place from done
"""
MEASURE = """
select <name>::text as queue, count(*) as ready,
       coalesce(extract(epoch from statement_timestamp() - min(<since_when>)), 0)::double precision as oldest
  from <source> as job where <due> <where>
"""
COUNTS = """
select job.<state>::text as state, count(*) as number from <table> as job
 where %s::text[] is null or job.<state>::text = any(%s::text[]) group by job.<state>
"""
EXISTS = "select exists (select from <table> as job where job.<state>::text = any(%s::text[])) as there"
NOTHING_IN_FLIGHT = "select null::text as virtual_transaction where false"
NO_TASKS = "select null::text as name where false"


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


CROSSING: Mapping[str, str] = {
    "plain": "<it>",
    "text": "<it>::text",
    "texts": "<it>::text[]",
    "bytes": "translate(encode(<it>, 'base64'), chr(10), '')",
    "duration": "case when <it> < interval '0' then '-PT' else 'PT' end || abs(extract(epoch from <it>)) || 'S'",
}
"""How a column is written for JSON so that nothing of it is lost."""


class Table:
    """The verbs over one table."""

    schema = ""
    in_turn = True
    enqueues = False

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.table, self.view = relation(layout.table), None if layout.view is None else relation(layout.view)
        self.there: dict[str, Column] = {}
        """The columns of ours that it has, by our names; empty until it was looked at."""

        self._order: list[str] = []
        """All its columns, ours or not."""

        self.notifies = False
        self._host = socket.gethostname()
        self._parts: dict[str, str] = {}

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
        return f"shiftwork table {worker}"

    # Before anything else.

    def installed(self) -> Statement:
        """The columns of the table and of the view, and the triggers."""
        names = (self.table, self.view or self.table)
        return Statement(INSTALLED, tuple(name.replace("%%", "%") for name in names), writes=False)

    def accept(self, rows: Rows) -> Sequence[Statement]:
        """Learn which columns there are; refuse a table that cannot be worked."""
        from shiftwork.stores.fitting import problems  # noqa: PLC0415  -- it looks at what is learned here

        self.learn(rows)
        found = problems(self, rows)
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
        self._order = list(columns)
        names = {our: self.layout.theirs(our) for our in COLUMNS}
        self.there = {
            our: columns[name] for our, name in names.items() if name is not None and name in columns
        }
        self.notifies = any(row["what"] == "trigger" and self.channels[0] in row["type"] for row in rows)
        self._parts = {}

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
        return self._statement(LEAVE, self._holder(worker))

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
        candidates = self._written(CANDIDATES if self.view is None else CANDIDATES_OF_VIEW) + conditions
        text = self._written(CLAIM, candidates=candidates)
        return Statement(text, (self._holder(worker), worker, want, want, want), as_tuples=True)

    def await_claims(self, worker: int) -> Statement | None:
        """Claims of this worker share a lock, which is had alone only when none is under way."""
        return Statement("select pg_advisory_xact_lock(%s::bigint)", (worker,), writes=False)

    def start(self, worker: int, held: Held) -> Statement:
        """See whether prefetched rows are still held; those that are to be cancelled end here."""
        return self._statement(START, self._holder(worker), _json(held))

    def heartbeat(self, request: Mapping[str, Any]) -> Statement:
        """Renew the leases of rows that are held, find those that are not, and what was taken unknowingly."""
        answered = 2**62 if request.get("reconcile") else int(request.get("answered", 0))
        params = (self._holder(int(request["worker"])), _json(request["held"]))
        strays = (answered,) if self._can_find_strays else ()
        return self._statement(HEARTBEAT, *params, *strays)

    def report(self, request: Mapping[str, Any]) -> Statement:
        """Lines go to the execution logs; how far it is has no column."""
        if "execution_logs" not in self.there:
            return Statement("select '{\"lost\": []}' as answer", writes=False)
        return self._statement(LOG, self._holder(int(request["worker"])), _json(request["lines"]))

    def reap(self, reaper: int, most: int, *, thorough: bool) -> Statement:
        """Put back rows whose heartbeat is too old; also called resetting."""
        return self._statement(REAP, self._holder(reaper), most)

    # Letting go.

    def settle(self, worker: int, outcomes: Sequence[bytes]) -> Statement:
        """How attempts ended."""
        text = self._written(SETTLE, skipping="skip locked") + self._written(SETTLED)
        return Statement(text, (self._holder(worker), f"[{b','.join(outcomes).decode()}]"))

    def release(self, worker: int, held: Held, crashed: Mapping[int, str]) -> Statement:
        """Give rows back; against those that crashed, with the reason for each, that is counted."""
        given = [(job, attempt, crashed.get(job)) for job, attempt in held]
        return self._statement(RELEASE, self._holder(worker), _json(given))

    # Transactions.

    def open_transaction(self, job: int, attempt: int) -> Statement:
        """Begin the transaction of a job, whose row stays out of the resetter's reach until its end."""
        fence = self.fence(job, attempt)
        text = f"begin isolation level read committed; {fence.text}; savepoint shiftwork_handler"
        return Statement(text, fence.params)

    def undo_in_transaction(self) -> Statement:
        """Take back what the handler of a job did in its transaction."""
        return Statement("rollback to savepoint shiftwork_handler")

    def close_transaction(self, worker: int, outcome: bytes, *, undo: bool) -> Statement:
        """Write how the job ended, and commit, with what its handler did or without."""
        conclude = self.conclude(worker, outcome)
        back = "rollback to savepoint shiftwork_handler; " if undo else ""
        text = f"{back}release savepoint shiftwork_handler; {conclude.text}; commit; reset all"
        return Statement(text, conclude.params)

    def conclude(self, worker: int, outcome: bytes) -> Statement:
        """Write how a job ended, or fail, in the caller's transaction."""
        told = msgspec.json.decode(outcome, type=_Fence)
        text = self._written(SETTLE, skipping="") + self._written(CONCLUDED)
        return Statement(text, (self._holder(worker), f"[{outcome.decode()}]", _lost(told.id, told.attempt)))

    def fence(self, job: int, attempt: int) -> Statement:
        """Go on only if this attempt holds its row; until the transaction ends, no resetter takes it."""
        return self._statement(FENCE, _lost(job, attempt), attempt, job)

    # Waiting and looking.

    def sleep(self, seconds: float) -> Statement:
        """The trigger, if there is one, notifies of every insert: nobody has to be waited for."""
        return Statement(NOTHING_IN_FLIGHT, writes=False)

    def rouse(self) -> Statement:
        """Nobody has said that it sleeps."""
        return self.sleep(0)

    def measure_queues(self, queues: Sequence[str]) -> Statement:
        """How much waits, and for how long."""
        return self._look(MEASURE)

    def counts(self, states: Sequence[str] | None) -> Statement:
        """How many rows there are in each state: `state, number`."""
        wanted = None if states is None else list(states)
        return self._look(COUNTS, wanted, wanted)

    def exists(self, states: Sequence[str]) -> Statement:
        """Whether there is a row in one of these states: `there`."""
        return self._look(EXISTS, list(states))

    # What a handler's own steps leave behind.

    def add_log(self, worker: int, job: int, attempt: int, entry: Mapping[str, object]) -> Statement:
        """Append an entry to the execution logs, or fail: `place`, from 0."""
        params = (self._holder(worker), _json(entry), attempt, job, _lost(job, attempt))
        return self._statement(ADD_LOG, *params)

    def change_log(
        self, worker: int, job: int, attempt: int, place: int, entry: Mapping[str, object]
    ) -> Statement:
        """Change what is given of an entry, or fail."""
        why = f"{_lost(job, attempt)}, or its logs have no entry {place}"
        return self._statement(CHANGE_LOG, self._holder(worker), _json(entry), attempt, place, job, why)

    # How statements are written.

    def _holder(self, worker: int) -> str:
        return f"{self._host}:{worker}"

    def _has(self, *ours: str) -> bool:
        return all(our in self.there for our in ours)

    def _statement(self, text: str, *params: object) -> Statement:
        return Statement(self._written(text), params)

    def _look(self, text: str, *params: object) -> Statement:
        return Statement(self._written(text), params, writes=False)

    def _written(self, text: str, **more: str) -> str:
        """A statement with its parts put in; in these nothing is looked for."""
        if not self._parts:
            self._parts = self._made()
        parts = {**self._parts, **more}
        return _PART.sub(lambda found: parts[found[1]], text)

    def _name(self, our: str) -> str:
        return quoted(self.there[our].name)

    def _value(self, our: str, otherwise: str, of: str = "job") -> str:
        """What a column has; something else where there is none, or nothing in it."""
        return f"coalesce({of}.{self._name(our)}, {otherwise})" if our in self.there else otherwise

    def _sets(self, **values: str) -> str:
        """Assignments to those of these columns that there are."""
        return ", ".join(f"{self._name(our)} = {value}" for our, value in values.items() if our in self.there)

    def _nothing(self, our: str) -> str:
        """What a column is emptied with."""
        empty = {"failure_message": "''", "execution_logs": "'{}'", "worker_hostname": "''"}
        required = our in self.there and (self.there[our].is_required or our == "worker_hostname")
        return empty.get(our, "null") if required else "null"

    @property
    def _can_find_strays(self) -> bool:
        return "worker_hostname" in self.there and self._since_column is not None

    @property
    def _since_column(self) -> str | None:
        """Where it stands when a row was claimed."""
        return next((our for our in ("started_at", "last_heartbeat_at") if our in self.there), None)

    def _made(self) -> dict[str, str]:
        """The parts of statements, for the columns that there are."""
        layout, has = self.layout, self._has
        parts = {
            "table": self.table,
            "source": self.view or self.table,
            "name": literal(layout.name),
            "argument": layout.argument.replace("%", "%%"),
            "attempts": str(layout.retry.max_attempts or UNLIMITED),
            "max_resets": str(layout.max_resets),
            "most_lines": str(MOST_LINES),
            "patience": LOCKED,
            "here": HERE,
            "holds": HOLDS,
            "unless_one": UNLESS_ONE,
            "session": literal(self.session("")),
            "id": self._name("id"),
            "state": self._name("state"),
            "cancel": self._value("cancel", "false"),
            "resets": self._value("num_resets", "0"),
            "order": (layout.order_by or f"job.{self._name('id')}").replace("%", "%%"),
            "where": f"and ({layout.where.replace('%', '%%')})" if layout.where else "",
            "locked": "job" if self.view is None else "held",
            "logs": self._name("execution_logs") if has("execution_logs") else "",
            "log_type": self.there["execution_logs"].type.removesuffix("[]") if has("execution_logs") else "",
            "holder": self._name("worker_hostname") if has("worker_hostname") else "",
            "beat": self._name("last_heartbeat_at") if has("last_heartbeat_at") else "",
            "number": f"split_part(job.{self._name('worker_hostname')}, ':', -1)"
            if has("worker_hostname")
            else "null::text",
        }
        write = _writer(parts)
        parts["due"] = self._due("job")
        # `where` and `order_by` may name columns without saying whose: those of the table are called otherwise beside a view.
        renamed = {name: f"held {place}" for place, name in enumerate(self._order)}
        parts["renamed"] = ", ".join(map(quoted, renamed.values()))
        parts["held_id"] = quoted(renamed[self.there["id"].name])
        parts["held_due"] = self._due("held", renamed)
        parts["next_due"] = self._next_due()
        parts["since_when"] = self._since_when()
        parts["present_micros"] = _micros("here.present")
        parts["fence"] = self._fenced()
        named = f" and job.{self._name('worker_hostname')} = here.holder" if has("worker_hostname") else ""
        parts["same"] = parts["fence"] + named  # what it said last may come after its end
        parts["held"] = write("job.<state> = 'processing' and <same>")
        since = [f"job.{self._name(our)}" for our in ("last_heartbeat_at", "started_at") if has(our)]
        parts["since"] = f"coalesce({', '.join(since)}, '-infinity'::timestamptz)"
        lease = f"interval '{layout.lease.total_seconds()} seconds'"
        parts["stalled"] = write("job.<state> = 'processing' and <since> <= here.present - ") + lease
        parts["attempt"] = self._fence_value()
        parts["claiming"] = self._claiming()
        parts["taken"], parts["record"] = self._taken(write)
        parts["renewing"] = write(RENEWING) if has("last_heartbeat_at") else "select 1"
        parts["strays"] = "false"
        if self._can_find_strays:
            mine = f"job.{self._name('worker_hostname')} = here.holder"
            known = f"{_micros(f'job.{self._name(str(self._since_column))}')} <= %s::bigint"
            parts["strays"] = write(f"job.<state> = 'processing' and {mine} and {known}")
        parts["ending_sessions"] = (
            write(END_SESSIONS) if has("worker_hostname") else "select true where false"
        )
        return parts | self._endings(write)

    def _due(self, alias: str, renamed: Mapping[str, str] | None = None) -> str:
        """Whether a row may be claimed now."""
        layout, state = self.layout, self._of(alias, "state", renamed)
        free = f"{state} = 'queued'"
        if "process_after" in self.there:
            after = self._of(alias, "process_after", renamed)
            free += f" and ({after} is null or {after} <= statement_timestamp())"
        if not layout.retries or (again := self._again_at(alias, renamed)) is None:
            return f"({free})"
        return f"({state} in ('queued', 'errored') and ({free} or {state} = 'errored' and {again} <= statement_timestamp()))"

    def _of(self, alias: str, our: str, renamed: Mapping[str, str] | None = None) -> str:
        name = self.there[our].name
        return f"{alias}.{quoted(renamed[name] if renamed else name)}"

    def _again_at(self, alias: str, renamed: Mapping[str, str] | None = None) -> str | None:
        """When a row that failed is due: as we said, or, if others wrote it, so long after its end."""
        wait = f"interval '{self.layout.retry.wait(1).total_seconds()} seconds'"
        after = self._of(alias, "process_after", renamed) if "process_after" in self.there else None
        ended = self._of(alias, "finished_at", renamed) if "finished_at" in self.there else None
        if after and ended:
            return f"coalesce(case when {after} >= {ended} then {after} end, {ended} + {wait}, {after}, '-infinity'::timestamptz)"
        return (
            f"coalesce({after or f'{ended} + {wait}'}, '-infinity'::timestamptz)" if after or ended else None
        )

    def _next_due(self) -> str:
        """Seconds until the next row is due that is not yet."""
        state, moments = f"job.{self._name('state')}", []
        if "process_after" in self.there:
            moments.append((f"job.{self._name('process_after')}", f"{state} = 'queued'"))
        if self.layout.retries and (again := self._again_at("job")) is not None:
            moments.append((again, f"{state} = 'errored'"))
        if not moments:
            return "null"
        soonest = ", ".join(
            _writer({"table": self.table, "at": at, "state": held})(SOONEST) for at, held in moments
        )
        return f"extract(epoch from least({soonest}) - statement_timestamp())::double precision"

    def _since_when(self) -> str:
        """Since when a row that is due may be claimed."""
        moments = [f"job.{self._name(our)}" for our in ("queued_at", "process_after") if our in self.there]
        waiting = f"greatest({', '.join(moments)})" if moments else "null::timestamptz"
        if not self.layout.retries or (again := self._again_at("job")) is None:
            return waiting
        return f"case when job.{self._name('state')} = 'errored' then {again} else {waiting} end"

    def _fenced(self) -> str:
        if self.fence_column == "attempt":
            return f"job.{self._name('attempt')} = hold.attempt"
        return f"{self._fence_value()} = hold.attempt"

    def _fence_value(self) -> str:
        if self.fence_column == "attempt":
            return f"job.{self._name('attempt')}"
        return _exact_micros(f"job.{self._name('started_at')}")

    def _claiming(self) -> str:
        asked = self._value("cancel", "false")
        began = "here.present"
        if self.fence_column == "started_at":  # never the same twice, even if the clock was set back
            former = [
                f"job.{self._name(our)}" for our in ("started_at", "last_heartbeat_at") if our in self.there
            ]
            began = f"greatest(here.present, {', '.join(f'{one} + interval {_MOMENT}' for one in former)})"
        return self._sets(
            state=f"case when {asked} then 'canceled' when not {asked} then 'processing' else job.{self._name('state')} end",
            started_at=began,
            last_heartbeat_at=began,
            worker_hostname="here.holder",
            attempt=f"{self._value('attempt', '0')} + 1",
            finished_at=f"case when {asked} then here.present end",
            failure_message=self._nothing("failure_message"),
            execution_logs=self._nothing("execution_logs"),
        )

    def _taken(self, write: Callable[[str], str]) -> tuple[str, str]:
        """What a claim returns of each row, and how the record is made of it."""
        layout = self.layout
        changed = {name: our for our in CHANGED if our in self.there and (name := self.there[our].name)}
        due = [f"job.{self._name(our)}" for our in ("process_after", "queued_at") if our in self.there]
        queued = [f"job.{self._name('queued_at')}"] if "queued_at" in self.there else []
        returned = [
            write("job.<state> = 'processing' as is_live"),
            f"{self._fence_value()}::bigint as attempt",
            f"{self._value('num_failures', '0')}::int as failures",
            f"{self._value('num_resets', '0')}::int as resets",
            f"{_micros(_first(*due, 'here.present'))} as run_at",
            f"{_micros(_first(*queued, 'here.present'))} as created_at",
        ]
        renewed = {name: f"job.{quoted(name)} as {quoted(f'new {our}')}" for name, our in changed.items()}
        if layout.fields is None and self.view is None:
            return ", ".join([*returned, "row_to_json(job.*)::text as record"]), "taken.record"
        if layout.fields is None:
            news = ", ".join(
                f"{literal(name)}, taken.{quoted(f'new {our}')}" for name, our in changed.items()
            )
            seen = f"select to_jsonb(seen.*) || jsonb_build_object({news})"
            return ", ".join([*returned, *renewed.values()]), f"({seen}{write(SEEN)})::text"
        columns = {name: layout.theirs(name) or name for name in layout.fields}
        values = []
        for name, column in columns.items():
            it = f"job.{quoted(column)}"
            if self.view is not None:
                it = (
                    f"taken.{quoted(f'new {changed[column]}')}"
                    if column in changed
                    else f"seen.{quoted(column)}"
                )
            values.append(f"{CROSSING[layout.fields[name]].replace('<it>', it)} as {quoted(name)}")
        of = "" if self.view is None else write(SEEN)
        record = _writer({"values": ", ".join(values), "of": of})(RECORD)
        if self.view is None:
            return ", ".join([*returned, f"{record} as record"]), "taken.record"
        used = [told for name, told in renewed.items() if name in columns.values()]
        return ", ".join([*returned, *used]), record

    def _endings(self, write: Callable[[str], str]) -> dict[str, str]:
        """What is written when a row is let go, in whichever way."""
        state, asked = self._name("state"), self._value("cancel", "false")
        became = (
            "case mine.ending "
            + " ".join(f"when '{one}' then '{one}'" for one in STATES)
            + f" else job.{state} end"
        )
        over, again = "mine.ending <> 'queued'", "mine.ending = 'queued'"
        fence = {
            our
            for our in ("started_at",)
            if our in self.there and not self._has("attempt") and not self._has("last_heartbeat_at")
        }
        started = f"job.{self._name('started_at')}" if "started_at" in self.there else "null"
        # Where it is the only trace of the former claim it stays, so that the next one differs.
        not_started = started if fence else f"case when {over} then {started} end"
        wait = "coalesce(extract(epoch from hold.run_at - here.present)::double precision, hold.delay, 0)"
        cut = f"::{self.there['failure_message'].type}" if "failure_message" in self.there else ""
        ended = f"case when {over} then here.present end"
        returned = {"state": became, "worker_hostname": "''", "started_at": not_started, "finished_at": ended}
        resets = self._value("num_resets", "0")
        return {
            "ending": f"case hold.state when 'completed' then 'completed' when 'cancelled' then 'canceled' else"
            f" case when hold.state = 'scheduled' and not hold.failure then 'queued' when {asked} then 'canceled'"
            " when hold.state = 'scheduled' then 'errored' else 'failed' end end",
            "counts": "coalesce(hold.failure, false)",
            "message": "left((hold.error ->> 'code') || ': ' || (hold.error ->> 'message'), 10000)",
            "wait": f"least(greatest({wait}, 0), 3155760000) * interval '1 second'",
            "told_state": f"case job.{state}::text when 'canceled' then 'cancelled' when 'errored' then 'scheduled'"
            f" when 'queued' then 'scheduled' else job.{state}::text end",
            "settling": self._sets(
                state=became,
                finished_at=ended,
                failure_message=f"coalesce(mine.message{cut}, {self._nothing('failure_message')})",
                num_failures=f"{self._value('num_failures', '0')} + (mine.counts and mine.ending <> 'canceled')::int",
                process_after=(
                    f"case when mine.ending in ('queued', 'errored') then here.present + mine.wait else {self._value('process_after', 'null')} end"
                ),
                queued_at=f"case when {again} then here.present else {self._value('queued_at', 'null')} end",
                started_at=not_started,
                cancel=f"{asked} and {over}",
            ),
            "already": self._already(),
            "cancelling": self._sets(
                state=f"case when job.{state} is not null then 'canceled' else job.{state} end",
                finished_at="here.present",
                failure_message="'cancelled'",
            ),
            "returning": self._sets(
                state=f"case when job.{state} is not null then 'queued' else job.{state} end",
                worker_hostname="''",
                started_at=started if fence else "null",
            ),
            "releasing": self._sets(
                **returned,
                num_resets=f"{resets} + (mine.why is not null)::int",
                failure_message=f"coalesce(case mine.ending when 'failed' then mine.why when 'canceled' then 'cancelled' end{cut},"
                f" {self._nothing('failure_message')})",
            ),
            "resetting": self._sets(
                **returned,
                num_resets=f"{resets} + ({again})::int",
                queued_at=f"case when {again} then here.present else {self._value('queued_at', 'null')} end",
                failure_message=f"coalesce(case mine.ending when 'failed' then {literal(self.layout.died)} when 'canceled' then 'cancelled'"
                f" end{cut}, {self._nothing('failure_message')})",
            ),
        }

    def _already(self) -> str:
        """Whether what is told of a row was written before, by the same attempt."""
        state = f"job.{self._name('state')}::text"
        same = self._fenced()
        if "worker_hostname" in self.there:
            if self.fence_column == "started_at":
                same = f"({same} or {state} = 'queued' and job.{self._name('started_at')} is null)"
            same += f" and job.{self._name('worker_hostname')} = here.holder"
        led = {
            "completed": "'completed'",
            "failed": "'failed', 'canceled'",
            "cancelled": "'canceled'",
            "scheduled": "'errored', 'canceled', 'queued'",
        }
        if "worker_hostname" not in self.there:  # a resetter may have put it back
            led["scheduled"] = "'errored', 'canceled'"
        which = " or ".join(
            f"told.state = '{told}' and {state} in ({states})" for told, states in led.items()
        )
        return f"{same} and ({which})"


_PART = re.compile(r"<(\w+)>")
_MOMENT = "'1 microsecond'"


class _Fence(msgspec.Struct):
    id: int
    attempt: int


def _writer(parts: Mapping[str, str]) -> Callable[[str], str]:
    return lambda text: _PART.sub(lambda found: parts[found[1]], text)


def _json(document: object) -> str:
    return msgspec.json.encode(document).decode()


def _first(*values: str) -> str:
    """The first of these that there is."""
    return f"coalesce({', '.join(values)})"


def _lost(job: int, attempt: int) -> str:
    return f"shiftwork: attempt {attempt} of job {job} does not hold it any more"


def _exact_micros(moment: str) -> str:
    return f"(extract(epoch from {moment}) * 1000000)::bigint"


def _micros(moment: str) -> str:
    """A moment as Python can have it, whatever it is."""
    return _exact_micros(
        f"least(greatest({moment}, 'epoch'::timestamptz), '9999-12-31 00:00+00'::timestamptz)"
    )
