"""How the statements over a table are written, for the columns that it has.

The texts are in `sql/table`, a verb in a file. What stands in angle brackets there are the parts that are made here: names, quoted; what
is set, for the columns that there are; and what the store was told, as it was told.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files

from shiftwork.job import POSTGRES_EPOCH
from shiftwork.settings import UNLIMITED
from shiftwork.stores.layout import CHANGED, STATES, Column, Layout, literal, quoted, relation

SESSION = "shiftwork table "
"""How the names of our sessions begin."""

MOST_LINES = 1_000
"""Log lines that an attempt may leave."""

LOCKED, LOCKED_LONG = "1s", "5s"
"""How long a log line waits for somebody who has locked the row, and how long a step of a handler's own."""

HERE = "here as materialized (select statement_timestamp() as present, %s::text as holder)"
HOLDS = """hold as materialized (
  select (one ->> 0)::bigint as id, (one ->> 1)::bigint as attempt from jsonb_array_elements(%s::jsonb) as one)"""
CANDIDATES = "select job.<id> from <table> as job where <due> /*shunned*/ <where>"
CANDIDATES_OF_VIEW = (
    "select job.<id> from <source> as job join <table> as held (<renamed>) on held.<held_id> = job.<id>"
    " where <due> and <held_due> /*shunned*/ <where>"
)
SOONEST = "(select min(<at>) from <table> as job where <state> and <at> > statement_timestamp() and <at> < 'infinity')"
RECORD = "(select row_to_json(one)::text from (select <values><of>) as one)"
SEEN = " from <source> as seen where seen.<id> = taken.id limit 1"
UNLESS_ONE = "cast(case when count(*) = 0 then %s::text end as uuid)::text"
"""Fails, with these words, if there is none: without a function of ours it is a cast that can say something."""

CROSSING: Mapping[str, str] = {
    "plain": "<it>",
    "text": "<it>::text",
    "texts": "<it>::text[]",
    "bytes": "translate(encode(<it>, 'base64'), chr(10), '')",
    "duration": "case when <it> < interval '0' then '-PT' else 'PT' end || abs(extract(epoch from <it>)) || 'S'",
}
"""How a column is written for JSON so that nothing of it is lost."""


class Wording:
    """The parts of statements over one table."""

    def __init__(self, layout: Layout, there: Mapping[str, Column], order: Sequence[str]) -> None:
        """`there` are the columns of ours by our names, `order` are all that it has."""
        self.layout, self.there = layout, there
        self._order = order
        self.table, self.view = relation(layout.table), None if layout.view is None else relation(layout.view)
        self._parts = self._made()

    def __call__(self, text: str, **more: str) -> str:
        """A statement with its parts put in; in these nothing is looked for."""
        parts = {**self._parts, **more}
        return _PART.sub(lambda found: parts[found[1]], text)

    @property
    def fence_column(self) -> str:
        """Which column tells one claim from another."""
        return "attempt" if "attempt" in self.there else "started_at"

    def _has(self, *ours: str) -> bool:
        return all(our in self.there for our in ours)

    def _name(self, our: str) -> str:
        return quoted(self.there[our].name)

    def _value(self, our: str, otherwise: str, of: str = "job") -> str:
        """What a column has; something else where there is none, or nothing in it."""
        return f"coalesce({of}.{self._name(our)}, {otherwise})" if our in self.there else otherwise

    def _sets(self, **values: str) -> str:
        """Assignments to those of these columns that there are."""
        return ", ".join(f"{self._name(our)} = {value}" for our, value in values.items() if our in self.there)

    def _state(self, state: str) -> str:
        """A state as the type that the column has, which may be an enum."""
        column = f"job.{self._name('state')}"
        return f"case when {column} is not null then '{state}' else {column} end"

    def _nothing(self, our: str) -> str:
        """What a column is emptied with."""
        empty = {"failure_message": "''", "execution_logs": "'{}'", "worker_hostname": "''"}
        required = our in self.there and (self.there[our].is_required or our == "worker_hostname")
        return empty.get(our, "null") if required else "null"

    @property
    def can_find_strays(self) -> bool:
        """Whether it can be told which rows a worker took without its knowing."""
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
            "long_patience": LOCKED_LONG,
            "here": HERE,
            "holds": HOLDS,
            "unless_one": UNLESS_ONE,
            "session": literal(SESSION),
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
        parts["lease"] = f"interval '{layout.lease.total_seconds()} seconds'"
        parts["stalled"] = write("job.<state> = 'processing' and <since> <= here.present - <lease>")
        parts["attempt"] = self._fence_value()
        parts["claiming"] = self._claiming()
        parts["taken"], parts["record"] = self._taken(write)
        parts["renewing"] = write(SQL["renew"]) if has("last_heartbeat_at") else "select 1"
        parts["strays"] = "false"
        if self.can_find_strays:
            mine = f"job.{self._name('worker_hostname')} = here.holder"
            known = f"{_micros(f'job.{self._name(str(self._since_column))}')} <= %s::bigint"
            parts["strays"] = write(f"job.<state> = 'processing' and {mine} and {known}")
        parts["ending_sessions"] = (
            write(SQL["end_sessions"]) if has("worker_hostname") else "select true where false"
        )
        return parts | self._endings()

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
            f"{_micros(_first(*due, 'here.present'))} - {POSTGRES_EPOCH} as run_at",
            f"{_micros(_first(*queued, 'here.present'))} - {POSTGRES_EPOCH} as created_at",
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

    def _endings(self) -> dict[str, str]:
        """What is written when a row is let go, in whichever way."""
        state, asked = self._name("state"), self._value("cancel", "false")
        became = (
            "case mine.ending "
            + " ".join(f"when '{one}' then '{one}'" for one in STATES)
            + f" else job.{state} end"
        )
        over, again = "mine.ending <> 'queued'", "mine.ending = 'queued'"
        started = f"job.{self._name('started_at')}" if "started_at" in self.there else "null"
        # Where it is the only trace of the former claim it stays, so that the next one differs.
        only_trace = not (self._has("attempt") or self._has("last_heartbeat_at"))
        not_started = started if only_trace else f"case when {over} then {started} end"
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
                state=self._state("canceled"),
                finished_at="here.present",
                failure_message="'cancelled'",
            ),
            "returning": self._sets(
                state=self._state("queued"),
                worker_hostname="''",
                started_at=started if only_trace else "null",
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


def _writer(parts: Mapping[str, str]) -> Callable[[str], str]:
    return lambda text: _PART.sub(lambda found: parts[found[1]], text)


def _first(*values: str) -> str:
    """The first of these that there is."""
    return f"coalesce({', '.join(values)})"


def _exact_micros(moment: str) -> str:
    return f"(extract(epoch from {moment}) * 1000000)::bigint"


def _micros(moment: str) -> str:
    """A moment as Python can have it, whatever it is."""
    return _exact_micros(
        f"least(greatest({moment}, 'epoch'::timestamptz), '9999-12-31 00:00+00'::timestamptz)"
    )


def _texts() -> dict[str, str]:
    """The statements, by the names of their files, without the sentence above each."""
    folder = files("shiftwork.sql") / "table"
    found = (
        (one.name.removesuffix(".sql"), one.read_text("utf-8"))
        for one in folder.iterdir()
        if one.name.endswith(".sql")
    )
    return {name: re.sub(r"\A(?:--.*\n)+", "", text).strip() for name, text in found}


SQL = _texts()
