"""A job as it is asked for, as it is stored, and what is known of its attempts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from typing import Any, Generic, Literal, NamedTuple, Self, TypeVar, get_args

import msgspec

from shiftwork.codec import read_json
from shiftwork.errors import InvalidArgument
from shiftwork.printable import QUEUE_BYTES, TASK_BYTES, is_name, shown

R_co = TypeVar("R_co", covariant=True)

Scope = Literal["pending", "unfinished", "window"]
Action = Literal["return", "replace", "merge", "refuse"]
Answer = Literal["created", "existing", "replaced", "merged", "unsent"]

MAX_KEY_BYTES = 255
MAX_TAGS = 50
LONGEST = timedelta(days=36_525)


class State(StrEnum):
    """Where a job is in its life."""

    BLOCKED = "blocked"  # waits for other jobs
    SCHEDULED = "scheduled"  # waits for its time; snoozes and retries too
    READY = "ready"  # may be claimed now
    RUNNING = "running"  # held by a worker
    WAITING = "waiting"  # its handler returned, its children have not
    COMPLETED = "completed"
    FAILED = "failed"  # poison, or out of attempts
    CANCELLED = "cancelled"
    EXPIRED = "expired"  # nobody started it in time

    @property
    def is_final(self) -> bool:
        """Whether the job is over, unless somebody revives it."""
        return self in FINAL


FINAL = frozenset({State.COMPLETED, State.FAILED, State.CANCELLED, State.EXPIRED})


class NewJob(msgspec.Struct, Generic[R_co], frozen=True, kw_only=True, omit_defaults=True):
    """A job to be enqueued, as `shiftwork.enqueue_many` takes it; the database fills in the rest."""

    task: str
    payload: msgspec.Raw
    queue: str | None = None
    priority: int | None = None
    delay: float | None = None
    run_at: str | None = None
    expires_in: float | None = None
    expires_at: str | None = None
    max_attempts: int | None = None
    unique_key: str | None = None
    unique_scope: Scope | None = None
    unique_action: Action | None = None
    unique_window: float | None = None
    merge: str | dict[str, str] | None = None
    tags: list[str] | None = None
    keep: int | None = None
    child: bool = False
    """Whether the job with whose outcome it is enqueued waits for it."""


class Sent(msgspec.Struct, frozen=True):
    """What the database answered to one job of an enqueue."""

    id: int
    outcome: Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt that did not succeed: it failed, or its worker was lost."""

    job: int
    attempt: int
    outcome: str  # failed | lost
    will_retry: bool
    code: str | None
    error: Mapping[str, Any] | None
    worker: int | None
    claimed_at: datetime | None
    started_at: datetime | None
    ended_at: datetime | None

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Self:
        """Read a row; an error that cannot be decoded is left out, never raised."""
        known = {name: row[name] for name in ("job", "attempt", "outcome", "will_retry", "code", "worker")}
        error, _ = read_json(row["error"])
        return cls(
            **known,
            error=error if isinstance(error, dict) else None,
            claimed_at=moment(row["claimed_at"]),
            started_at=moment(row["started_at"]),
            ended_at=moment(row["ended_at"]),
        )


Taken = tuple[
    int, str, str, int, str | None, int, int, int, int, int, int, int | None, str | None, list[str] | None
]
"""A job as a claim gives it: id, task, queue, priority, payload, attempt, failures, resets, max_attempts, run_at,
created_at, expires_at, unique_key, tags; times as PostgreSQL has them, in microseconds since 2000, by the database's clock."""

POSTGRES_EPOCH = 946_684_800_000_000
"""When that was, in microseconds since 1970."""


class Progress(NamedTuple):
    """How far a handler said it is."""

    fraction: float | None
    message: str | None
    at: datetime | None


class Line(NamedTuple):
    """A line that a handler logged."""

    id: int
    attempt: int
    at: datetime | None
    level: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job as the database has it. Times are UTC, by the database's clock."""

    id: int
    task: str
    queue: str
    priority: int
    payload: Mapping[str, Any]
    state: State
    run_at: datetime | None = None
    expires_at: datetime | None = None
    attempt: int = 0
    failures: int = 0
    resets: int = 0
    max_attempts: int = 1
    unique_key: str | None = None
    worker: int | None = None
    parent: int | None = None
    """The job that spawned it, and waits for it; not told of a job that was just claimed."""

    created_at: datetime | None = None
    claimed_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    result: Any = None
    error: Mapping[str, Any] | None = None
    tags: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    """Columns that hold something Python cannot read; the row is read all the same, without them."""

    attempts: tuple[Attempt, ...] = field(default=(), compare=False)
    """Attempts that did not succeed, oldest first; filled in by `Handle.info`."""

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Self:
        """Read a row, whoever wrote it: a value that cannot be read becomes a fault, not an error."""
        faults = []
        decoded: dict[str, Any] = {name: moment(row[name]) for name in _MOMENTS}
        for name in ("payload", "result", "error"):
            decoded[name], readable = read_json(row[name])
            if not readable:
                faults.append(name)
        if not isinstance(decoded["payload"], dict):
            faults.append("payload")
            decoded["payload"] = {}
        if not isinstance(decoded["error"], dict):
            decoded["error"] = None
        return cls(
            **{name: row[name] for name in _PLAIN},
            **decoded,
            state=State(row["state"]),
            tags=tuple(tag for tag in row["tags"] or () if isinstance(tag, str)),
            faults=tuple(dict.fromkeys(faults)),
        )

    @classmethod
    def from_claim(cls, taken: Taken, worker: int, at: int, *, started: bool = True) -> Self:
        """A job that a worker has just claimed."""
        payload, readable = read_json(taken[4])
        fits = readable and isinstance(payload, dict)
        return cls(
            id=taken[0],
            task=taken[1],
            queue=taken[2],
            priority=taken[3],
            payload=payload if fits else {},
            state=State.RUNNING,
            attempt=taken[5],
            failures=taken[6],
            resets=taken[7],
            max_attempts=taken[8],
            run_at=_since(taken[9]),
            created_at=_since(taken[10]),
            expires_at=None if taken[11] is None else _since(taken[11]),
            unique_key=taken[12],
            tags=tuple(taken[13] or ()),
            worker=worker,
            claimed_at=_since(at),
            started_at=_since(at) if started else None,
            faults=() if fits else ("payload",),
        )


class Claimed(Job):
    """A job that a worker has just claimed, read only when somebody looks at it: most hooks look at little, and some at nothing."""

    __slots__ = ("_seed",)
    __qualname__ = "Job"
    _seed: Any

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        """Called once, for the first field that is asked for: then all of them are there."""
        if name not in Job.__slots__:
            raise AttributeError(f"a job has no {name!r}")
        whole = self._whole
        for field_name in Job.__slots__:
            object.__setattr__(self, field_name, getattr(whole, field_name))
        return getattr(whole, name)

    @property
    def _whole(self) -> Job:
        run = self._seed
        return Job.from_claim(run.taken, run.worker, run.claimed_at)

    def __eq__(self, other: object) -> bool:
        return self._whole == (other._whole if isinstance(other, Claimed) else other)

    def __hash__(self) -> int:
        return hash(self._whole)


new, sow, seed_of = object.__new__, Claimed._seed.__set__, Claimed._seed.__get__  # noqa: SLF001
"""`sow(job := new(Claimed), run)` does what a constructor would, for half of what one costs; a run has the row as it was `taken`, by which worker and
when it was claimed. `seed_of(job)` is that run."""

_PLAIN = (
    *("id", "task", "queue", "priority", "attempt", "failures", "resets", "max_attempts"),
    *("unique_key", "worker", "parent"),
)
_MOMENTS = ("run_at", "expires_at", "created_at", "claimed_at", "started_at", "finished_at")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LAST = datetime.max.replace(tzinfo=UTC)
_FIRST = datetime.min.replace(tzinfo=UTC)


def moment(value: object) -> datetime | None:
    """An instant from seconds since 1970; beyond Python's calendar, its last or first moment."""
    if value is None or isinstance(value, datetime):
        return value
    try:
        seconds = Decimal(str(value))
    except InvalidOperation:
        return None
    if seconds.is_nan():
        return None
    try:
        return _EPOCH + timedelta(microseconds=int(seconds * 1_000_000))
    except OverflowError:
        return _LAST if seconds > 0 else _FIRST


def _since(microseconds: int) -> datetime:
    return _EPOCH + timedelta(microseconds=POSTGRES_EPOCH + microseconds)


def sending(
    *,
    queue: str | None = None,
    priority: int | None = None,
    delay: timedelta | None = None,
    run_at: datetime | None = None,
    expires_in: timedelta | None = None,
    expires_at: datetime | None = None,
    max_attempts: int | None = None,
    unique: str | None = None,
    scope: Scope | None = None,
    action: Action | None = None,
    window: timedelta | None = None,
    merge: str | Mapping[str, str] | None = None,
    tags: Sequence[str] | None = None,
    keep: timedelta | int | None = None,
) -> dict[str, Any]:
    """How a job is to be sent, checked, as fields of a NewJob; only what was given."""
    _not_both("delay", delay, "run_at", run_at)
    _not_both("expires_in", expires_in, "expires_at", expires_at)
    chosen = {
        "queue": None if queue is None else check_name("queue", queue, QUEUE_BYTES),
        "priority": _whole("priority", priority, -(2**31), 2**31 - 1),
        "delay": _seconds("delay", delay),
        "run_at": _instant("run_at", run_at),
        "expires_in": _seconds("expires_in", expires_in),
        "expires_at": _instant("expires_at", expires_at),
        "max_attempts": _whole("max_attempts", max_attempts, 1, 2**31 - 1),
        "unique_key": _key(unique),
        "unique_scope": _choice("scope", scope, get_args(Scope)),
        "unique_action": _choice("action", action, get_args(Action)),
        "unique_window": _seconds("window", window),
        "merge": None if merge is None else check_merge(merge),
        "tags": None if tags is None else _tags(tags),
        "keep": _whole("keep", _days(keep) if isinstance(keep, timedelta) else keep, 0, 2**31 - 1),
    }
    if window is not None:
        if window <= timedelta():
            raise InvalidArgument(
                f"window is {window}, and a key is held for longer than nothing; write one like timedelta(hours=1)",
                argument="window",
            )
        if scope not in (None, "window"):
            raise InvalidArgument(
                f"window goes with scope='window', not with scope={scope!r}", argument="window"
            )
        chosen["unique_scope"] = "window"
    if merge is not None and action is None:
        chosen["unique_action"] = "merge"
    return {name: value for name, value in chosen.items() if value is not None}


_OF_A_KEY = {"unique_window": "window", "unique_scope": "scope", "merge": "merge", "unique_action": "action"}


def about_a_key(chosen: Mapping[str, Any]) -> str | None:
    """What was said that only means something to a job with a unique key, by its name; None if nothing was."""
    return next((option for name, option in _OF_A_KEY.items() if name in chosen), None)


def without_a_key(task: str, option: str) -> InvalidArgument:
    """Why a job cannot be sent for which that was said, and no key."""
    return InvalidArgument(
        f"task {task!r}: {option} is about jobs that have the same key, and this one has none; give it unique=…, or leave {option} out",
        task=task,
        argument=option,
    )


_RANGES = ("int4", "int8", "num", "date", "ts", "tstz")
MERGES = frozenset(
    {
        *("replace", "deep", "append", "union", "min", "max", "sum"),
        *(f"range:{kind}range" for kind in _RANGES),
        *(f"multirange:{kind}multirange" for kind in _RANGES),
    }
)


def check_merge(merge: str | Mapping[str, str]) -> str | dict[str, str]:
    """How two payloads become one: an operator for all arguments, or one for each that is named."""
    if isinstance(merge, str):
        return _operator(merge)
    if not merge:
        raise InvalidArgument("merge names no argument", argument="merge")
    return {argument: _operator(operator) for argument, operator in merge.items()}


def _operator(operator: str) -> str:
    if operator not in MERGES:
        raise InvalidArgument(
            f"{shown(operator)} is no way to merge; there are: {', '.join(sorted(MERGES))}. For a function of "
            "your own, have it entered in the registry, and say action='merge' without merge",
            argument="merge",
        )
    return operator


def _not_both(one: str, first: object, other: str, second: object) -> None:
    if first is not None and second is not None:
        raise InvalidArgument(f"{one} and {other} say the same thing; give one of them", argument=one)


def _seconds(name: str, value: timedelta | None) -> float | None:
    if value is None:
        return None
    if not isinstance(value, timedelta):
        raise InvalidArgument(f"{name} must be a timedelta, not {shown(value)}", argument=name)
    if abs(value) > LONGEST:
        raise InvalidArgument(f"{name} is {value}; a hundred years are the most", argument=name)
    return value.total_seconds()


def _instant(name: str, value: datetime | None) -> str | None:
    if value is None:
        return None
    if not isinstance(value, datetime):
        raise InvalidArgument(f"{name} must be a datetime, not {shown(value)}", argument=name)
    if value.utcoffset() is None:
        raise InvalidArgument(
            f"{name} has no time zone; attach one, as in datetime.now(UTC)",
            argument=name,
        )
    return value.isoformat()


def _days(keep: timedelta) -> int:
    if keep % timedelta(days=1):
        raise InvalidArgument(f"keep is {keep}; history is kept by whole days", argument="keep")
    return keep.days


def _whole(name: str, value: int | None, least: int, most: int) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise InvalidArgument(
            f"{name} must be a whole number from {least} to {most}, not {shown(value)}", argument=name
        )
    return value


def _choice(name: str, value: str | None, choices: tuple[str, ...]) -> str | None:
    if value is not None and value not in choices:
        raise InvalidArgument(f"{name} is {shown(value)}; it can be {', '.join(choices)}", argument=name)
    return value


def _key(value: str | None) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value or not _storable(value):
        raise InvalidArgument(
            f"unique must be text that can be stored, not {shown(value)}", argument="unique"
        )
    if len(value.encode()) > MAX_KEY_BYTES:
        raise InvalidArgument(
            f"unique is longer than {MAX_KEY_BYTES} bytes; use a digest of it", argument="unique"
        )
    return value


def _tags(tags: Sequence[str]) -> list[str]:
    if isinstance(tags, str) or len(tags) > MAX_TAGS:
        raise InvalidArgument(f"tags must be a list of at most {MAX_TAGS} names", argument="tags")
    return [check_name("tags", tag) for tag in tags]


def check_name(what: str, name: str, most: int = TASK_BYTES) -> str:
    """Refuse a name (of a task, queue or tag) that is empty, too long, or holds control characters."""
    if not isinstance(name, str) or not is_name(name, most):
        raise InvalidArgument(
            f"{shown(name)} cannot be used as {what}: 1 to {most} bytes of printable characters",
            argument=what,
        )
    return name


def _storable(text: str) -> bool:
    return "\0" not in text and not any("\ud800" <= letter <= "\udfff" for letter in text)
