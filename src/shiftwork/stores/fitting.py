"""Whether a table can be worked, and what would have to be done to it.

What is found has a code that never changes its meaning; `shiftwork table check` shows all of it, and a worker refuses to begin on what
is an error, in the same words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING

from shiftwork.database import Rows
from shiftwork.stores.layout import COLUMNS, STATES, Column, literal, quoted, relation

if TYPE_CHECKING:
    from shiftwork.stores.table import Table

WHOLE = ("bigint", "integer", "smallint")
TEXT = ("text", "character varying")
MOMENT = ("timestamp with time zone",)
TYPES: Mapping[str, tuple[str, ...]] = {
    "id": WHOLE,
    "state": TEXT,
    "failure_message": TEXT,
    "queued_at": MOMENT,
    "started_at": MOMENT,
    "finished_at": MOMENT,
    "process_after": MOMENT,
    "num_resets": WHOLE,
    "num_failures": WHOLE,
    "last_heartbeat_at": MOMENT,
    "execution_logs": ("json[]", "jsonb[]"),
    "worker_hostname": TEXT,
    "cancel": ("boolean",),
    "attempt": WHOLE,
}
"""What each column may be; `state` may be an enum as well."""

MADE: Mapping[str, str] = {
    "state": "text not null default 'queued'",
    "failure_message": "text",
    "queued_at": "timestamp with time zone default now()",
    "started_at": "timestamp with time zone",
    "finished_at": "timestamp with time zone",
    "process_after": "timestamp with time zone",
    "num_resets": "integer not null default 0",
    "num_failures": "integer not null default 0",
    "last_heartbeat_at": "timestamp with time zone",
    "execution_logs": "json[]",
    "worker_hostname": "text not null default ''",
    "cancel": "boolean not null default false",
    "attempt": "bigint not null default 0",
}
"""What a column is made as, where it is missing."""

ROOM = 80
"""Letters that the name of a worker may need: 63 for its host, and a number."""

CLEARED = ("started_at", "finished_at", "process_after", "last_heartbeat_at")
"""Columns that are empty at times."""

KINDS: Mapping[str, tuple[str, str]] = {
    "SW-501": ("error", "Create it, or correct its name."),
    "SW-502": ("error", "Run `shiftwork table install`, or say in `columns` what it is called."),
    "SW-503": ("error", "Change its type: alter table … alter column … type …"),
    "SW-504": ("error", "Add the values to the enum: alter type … add value …"),
    "SW-505": ("error", "Add a column `attempt`, or `started_at`, with `shiftwork table install`."),
    "SW-506": ("error", "Correct the record, or let the view have such a column."),
    "SW-507": (
        "error",
        "Correct `where` and `order_by`: they are put into the statement that claims, over `job`.",
    ),
    "SW-508": ("error", "Let it be null: alter table … alter column … drop not null."),
    "SW-509": ("error", "Make it the primary key, or unique: alter table … add unique (…)."),
    "SW-511": ("warning", "Run `shiftwork table install`; without it work is found by polling."),
    "SW-512": (
        "warning",
        "Run `shiftwork table install`; without it a claim reads and sorts all that waits.",
    ),
    "SW-513": (
        "warning",
        "Run `shiftwork table install`; without the column the worker does without what it is for.",
    ),
}
"""Each with how grave it is, and what to do about it."""

NEEDED_FOR: Mapping[str, str] = {
    "cancel": "a running job cannot be cancelled",
    "execution_logs": "nothing that a handler logs is kept",
    "failure_message": "nobody can see why a job failed",
    "num_resets": "a job that takes its workers down is run again without end",
    "worker_hostname": "claims whose answer was lost, and workers that were stopped in a transaction, are not found",
}


@dataclass(frozen=True)
class Problem:
    """Something that does not fit."""

    code: str
    message: str

    @property
    def is_error(self) -> bool:
        """Whether nothing can be done until it is mended."""
        return KINDS[self.code][0] == "error"


def problems(store: Table, rows: Rows) -> list[Problem]:
    """What does not fit, all of it, as far as it can be told from the columns."""
    if not any(row["what"] == "table" for row in rows):
        return [Problem("SW-501", f"there is no table {store.layout.table}")]
    if not any(row["what"] == "view" for row in rows):
        return [Problem("SW-501", f"there is no view {store.layout.view}")]
    return [
        *_missing(store),
        *_wrong_types(store),
        *_unfit(store, rows),
        *_unknown_fields(store, rows),
        *_doing_without(store),
    ]


def _missing(store: Table) -> Iterator[Problem]:
    layout, there = store.layout, store.there
    needed = {"id": "jobs cannot be told apart", "state": "nobody knows which are free"}
    if store.fence_column is None:
        yield Problem(
            "SW-505",
            f"the table {layout.table} has nothing that tells one claim of a job from the next, so that a worker that lost it could "
            "still write to it",
        )
    if not (layout.transactional and "started_at" in there):
        needed["last_heartbeat_at"] = "nobody could tell whether its worker is alive"
    if layout.retries:
        if layout.retry.max_attempts is not None:
            needed["num_failures"] = "failures cannot be counted, and `retry` allows more than one attempt"
        if "finished_at" not in there:
            needed["process_after"] = (
                "a job cannot wait for its next attempt, and `retry` allows more than one"
            )
    for our, why in needed.items():
        if our not in there:
            called = layout.theirs(our) or our
            as_ours = "" if called == our else f" (it is to be {our})"
            yield Problem("SW-502", f"the table {layout.table} has no column {called}{as_ours}: {why}")
    for our, theirs in layout.columns.items():
        if our not in COLUMNS:
            yield Problem(
                "SW-502", f"`columns` names {our!r}, which is none of ours; there are: {', '.join(COLUMNS)}"
            )
        elif theirs is not None and our not in there and our not in needed:
            yield Problem("SW-502", f"the table {layout.table} has no column {theirs}, which is to be {our}")


def _wrong_types(store: Table) -> Iterator[Problem]:
    for our, column in store.there.items():
        plain = re.sub(r"\(\d+\)", "", column.type)
        if our == "state" and column.labels is not None:
            if absent := [state for state in STATES if state not in column.labels]:
                yield Problem("SW-504", f"the type of {column.name} has no {', '.join(absent)}")
        elif plain not in TYPES[our]:
            hint = (
                "; a time without its zone is another one in every session"
                if plain.endswith("without time zone")
                else ""
            )
            yield Problem(
                "SW-503", f"{column.name} is {column.type}, and has to be {' or '.join(TYPES[our])}{hint}"
            )
        elif our == "worker_hostname" and 0 < _length(column.type) < ROOM:
            yield Problem(
                "SW-503", f"{column.name} is {column.type}, too short for the name of a host and a number"
            )
        elif our == "started_at" == store.fence_column and column.type not in MOMENT:
            yield Problem(
                "SW-503", f"{column.name} is {column.type}, too coarse to tell one claim from the next"
            )


def _length(kind: str) -> int:
    """How many letters a column takes; 0 is any number."""
    found = re.search(r"\((\d+)\)", kind)
    return int(found[1]) if found else 0


def _unfit(store: Table, rows: Rows) -> Iterator[Problem]:
    known = [row["type"] for row in rows if row["what"] == "index"]
    own = f"({_bare(store.there['id'].name)})" if "id" in store.there else ""
    if own and not any("UNIQUE INDEX" in made and made.endswith(own) for made in known):
        yield Problem(
            "SW-509", f"{store.there['id'].name} is not unique, so that a job would be several rows"
        )
    for our in CLEARED:
        if our in store.there and store.there[our].is_required:
            yield Problem("SW-508", f"{store.there[our].name} may not be null, and has to be at times")


def _unknown_fields(store: Table, rows: Rows) -> Iterator[Problem]:
    layout = store.layout
    seen = {row["name"] for row in rows if row["what"] == "view"}
    where = f"the view {layout.view}" if layout.view else f"the table {layout.table}"
    if layout.view:
        for our in ("id", "state", "process_after", *(("finished_at",) if layout.retries else ())):
            if our in store.there and (name := store.there[our].name) not in seen:
                yield Problem("SW-506", f"{where} has no column {name}, by which free jobs are found")
    for name in layout.fields or ():
        column = layout.theirs(name) or name
        if column not in seen:
            yield Problem("SW-506", f"the record has a field {name!r}, and {where} has no column {column}")


def _doing_without(store: Table) -> Iterator[Problem]:
    for our, without in NEEDED_FOR.items():
        if our not in store.there:
            yield Problem("SW-513", f"there is no column {store.layout.theirs(our) or our}: {without}")
    if not store.notifies:
        yield Problem("SW-511", f"nobody is told of jobs that are inserted into {store.layout.table}")


# What would make it fit.


def installation(store: Table) -> list[str]:
    """Statements that add what is missing: columns, indexes, triggers. They can be run again."""
    return [*_columns(store), *indexes(store), *_triggers(store)]


def _columns(store: Table) -> Iterator[str]:
    absent = [our for our in MADE if our not in store.there and _wanted(store, our)]
    if "attempt" in absent and store.fence_column == "started_at":
        absent.remove("attempt")  # one fence is enough
    for our in absent:
        yield f"alter table {plain(relation(store.layout.table))} add column if not exists {_quoted(store, our)} {MADE[our]};"


def indexes(store: Table) -> Iterator[str]:
    """The indexes that claims, and whoever looks for lost jobs, go by."""
    state = _quoted(store, "state")
    free = "in ('queued', 'errored')" if store.layout.retries else "= 'queued'"
    yield _index(store, "claim", _order(store), f"{state} {free}")
    yield _index(store, "held", _quoted(store, "id"), f"{state} = 'processing'")
    if _wanted(store, "process_after"):
        after = _quoted(store, "process_after")
        yield _index(store, "due", after, f"{state} {free} and {after} is not null")


def _order(store: Table) -> str:
    """What can be indexed of the order: columns of the table, until there is something else."""
    terms: list[str] = []
    for term in (store.layout.order_by or "").split(","):
        found = _TERM.fullmatch(term)
        if found is None or (found[1] or found[2].lower()).replace('""', '"') not in store.all_columns:
            break
        terms.append(term.strip().removeprefix("job."))
    return ", ".join(terms) or _quoted(store, "id")


_TERM = re.compile(
    r'\s*(?:job\.)?(?:"((?:[^"]|"")+)"|([a-z_]\w*))(?:\s+(?:asc|desc))?(?:\s+nulls\s+(?:first|last))?\s*',
    re.IGNORECASE,
)


def is_indexed(store: Table, rows: Rows) -> bool:
    """Whether there is an index of only what waits."""
    free = ("queued", "errored") if store.layout.retries else ("queued",)
    made = [row["type"].partition(" WHERE ")[2] for row in rows if row["what"] == "index"]
    return any(all(state in where for state in free) and "processing" not in where for where in made)


def _index(store: Table, what: str, columns: str, where: str) -> str:
    return f"create index if not exists {plain(quoted(named(store, what)))} on {plain(relation(store.layout.table))} ({columns}) where {where};"


def _triggers(store: Table) -> Iterator[str]:
    """They say that there is work: after every INSERT, and when a row waits anew; and that a job is to be looked at since somebody cancels it."""
    wake, cancel = store.channels
    yield _notifying(store, "wake", "tg_argv[1]")
    told = f"{_function(store, 'wake')}({plain(literal(wake))}, {plain(literal(store.layout.name))});"
    yield f"{_trigger(store, 'wake', 'after insert')} for each statement execute function {told}"
    free = [_quoted(store, our) for our in ("state", "process_after") if _wanted(store, our)]
    former, now = (", ".join(f"{of}.{column}" for column in free) for of in ("old", "new"))
    update = f"after update of {', '.join(free)}"
    yield (
        f"{_trigger(store, 'again', update)} for each row"
        f" when (new.{_quoted(store, 'state')} in ('queued', 'errored') and row({former}) is distinct from row({now})) execute function {told}"
    )
    if _wanted(store, "cancel"):
        column = _quoted(store, "cancel")
        yield _notifying(store, "cancel", f"new.{_quoted(store, 'id')}::text")
        yield (
            f"{_trigger(store, 'cancel', f'after update of {column}')} for each row"
            f" when (new.{column} and not coalesce(old.{column}, false)) execute function {_function(store, 'cancel')}({plain(literal(cancel))});"
        )


def _notifying(store: Table, what: str, payload: str) -> str:
    return (
        f"create or replace function {_function(store, what)}() returns trigger language plpgsql as $$\n"
        "begin\n"
        "  if pg_notification_queue_usage() < 0.5 then  -- it is a hint, and must not fail a commit\n"
        f"    perform pg_notify(tg_argv[0], {payload});\n"
        "  end if;\n"
        "  return null;\n"
        "end $$;"
    )


def _trigger(store: Table, what: str, when: str) -> str:
    return f"create or replace trigger {plain(quoted(named(store, what)))} {when} on {plain(relation(store.layout.table))}"


def _wanted(store: Table, our: str) -> bool:
    """Whether there is such a column, or is to be one."""
    return store.layout.theirs(our) is not None


def _quoted(store: Table, our: str) -> str:
    known: Column | None = store.there.get(our)
    return plain(quoted(known.name if known else store.layout.theirs(our) or our))


def _bare(name: str) -> str:
    """A name as the server writes it: in quotes only if it needs them."""
    return name if re.fullmatch(r"[a-z_][a-z0-9_$]*", name) else plain(quoted(name))


def plain(text: str) -> str:
    return text.replace("%%", "%")


def named(store: Table, what: str) -> str:
    """A name for something of ours beside the table."""
    name = f"{store.layout.table.split('.')[-1].strip(chr(34))}_{what}"
    return name if len(name.encode()) <= 63 else f"shiftwork_{sha256(name.encode()).hexdigest()[:16]}_{what}"


def _function(store: Table, what: str) -> str:
    """A function in the schema of the table."""
    *schema, _ = re.findall(r'"(?:[^"]|"")+"', plain(relation(store.layout.table)))
    return ".".join([*schema, plain(quoted(named(store, what)))])
