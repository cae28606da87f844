"""What can be set, in one frozen record; what follows from it is a property, not another option."""

# ruff: noqa: RUF009  -- what _set gives is a field

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Self

from shiftwork.errors import ConfigurationError
from shiftwork.printable import QUEUE_BYTES, TASK_BYTES, is_name, shown

UNLIMITED = 2_147_483_647
"""What the database reads as "no limit": attempts without end, history kept for ever."""

LONGEST = timedelta(days=3650)

HIDDEN = "(a connection string that is not shown; is its password %-encoded?)"

_UNITS = {
    "d": timedelta(days=1),
    "h": timedelta(hours=1),
    "m": timedelta(minutes=1),
    "s": timedelta(seconds=1),
    "ms": timedelta(milliseconds=1),
}
_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d)")
_SCHEMA = re.compile(r"[a-z_][a-z0-9_]{0,47}", re.ASCII)

# A schema named with one of these could only be used in quotes, and would surprise in psql.
_RESERVED = frozenset(
    (  # noqa: SIM905  -- what PostgreSQL 18 does not take for the name of a schema, at least before a type
        "all analyse analyze and any array as asc asymmetric authorization between bigint binary bit "
        "boolean both case cast char character check coalesce collate collation column concurrently "
        "constraint create cross current_catalog current_date current_role current_schema current_time "
        "current_timestamp current_user dec decimal default deferrable desc distinct do else end except "
        "exists extract false fetch float for foreign freeze from full grant greatest group grouping "
        "having ilike in initially inner inout int integer intersect interval into is isnull join json "
        "json_array json_arrayagg json_exists json_object json_objectagg json_query json_scalar "
        "json_serialize json_table json_value lateral leading least left like limit localtime "
        "localtimestamp merge_action national natural nchar none normalize not notnull null nullif "
        "numeric offset on only or order out outer overlaps overlay placing position precision primary "
        "real references returning right row select session_user setof similar smallint some substring "
        "symmetric system_user table tablesample then time timestamp to trailing treat trim true union "
        "unique user using values varchar variadic verbose when where window with xmlattributes xmlconcat "
        "xmlelement xmlexists xmlforest xmlnamespaces xmlparse xmlpi xmlroot xmlserialize xmltable "
    ).split()
)


def parse_duration(text: str) -> timedelta:
    """Read `500ms`, `2s`, `5m`, `1h`, `1d`, or several together: `1h30m`."""
    compact = text.strip().replace(" ", "")
    parts = list(_PART.finditer(compact))
    if not parts or "".join(part.group() for part in parts) != compact:
        raise ConfigurationError(
            f"{shown(text)} is not a duration; write it like 500ms, 2s, 5m, 1h, 1d or 1h30m"
        )
    try:
        return sum((float(part[1]) * _UNITS[part[2]] for part in parts), timedelta())
    except OverflowError:
        raise ConfigurationError(f"{shown(text)} is longer than a duration can be") from None


def format_duration(duration: timedelta) -> str:
    """Write a duration as `parse_duration` reads it: `1h30m`, `500ms`, `0s`."""
    if duration < timedelta():
        raise ConfigurationError(f"{duration} is negative; a duration is not")
    written, rest = "", duration
    for unit, length in _UNITS.items():
        whole, rest = divmod(rest, length)
        if unit == "ms" and rest:
            written += f"{whole + rest / length:.3f}ms"
        elif whole:
            written += f"{whole}{unit}"
    return written or "0s"


def check_schema(name: str) -> str:
    """Refuse a schema name that would need quoting, hide another, or be cut short."""
    if not isinstance(name, str) or not _SCHEMA.fullmatch(name):
        raise ConfigurationError(
            f"{shown(name)} cannot be a schema name: use a lower-case letter or underscore, then up to 47 "
            "lower-case letters, digits or underscores"
        )
    if name.startswith("pg_"):
        raise ConfigurationError(f"{name!r} cannot be a schema name: PostgreSQL keeps pg_* for itself")
    if name in _RESERVED:
        raise ConfigurationError(f"{name!r} cannot be a schema name: it is a reserved word of SQL")
    return name


def mask(dsn: str) -> str:
    """Where a connection string leads, as it may be shown: user, host, port and database, and nothing else.

    None of it if it cannot be read, or if what should be a host looks like the end of a password.
    """
    from psycopg import Error  # noqa: PLC0415  -- settings are read without it
    from psycopg.conninfo import conninfo_to_dict, make_conninfo  # noqa: PLC0415

    try:
        given = conninfo_to_dict(dsn)
    except (Error, UnicodeError):
        return HIDDEN
    if any("@" in str(given.get(part, "")) for part in ("host", "hostaddr", "port", "dbname")):
        return HIDDEN
    shown = ("service", "user", "host", "hostaddr", "port", "dbname")
    return make_conninfo("", **{part: given[part] for part in shown if part in given})


# What a setting may be, in words, and the function that takes it from what was written: text, which reads the same
# in a flag, in the environment and in a file, or the value itself. It raises ValueError if it cannot be that.
Rule = tuple[str, Callable[[Any], Any]]


def whole(least: int, most: int) -> Rule:
    """A whole number."""

    def take(written: object) -> int:
        value = int(written) if isinstance(written, str) else written
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ValueError
        return value

    return f"a whole number from {least:,} to {most:,}", take


def length(least: timedelta, most: timedelta) -> Rule:
    """A duration."""

    def take(written: object) -> timedelta:
        try:
            value = parse_duration(written) if isinstance(written, str) else written
        except ConfigurationError:
            raise ValueError from None
        if not isinstance(value, timedelta) or not least <= value <= most:
            raise ValueError
        return value

    return f"a duration from {format_duration(least)} to {format_duration(most)}", take


def maybe(rule: Rule) -> Rule:
    """The same, or none."""
    allowed, take = rule

    def take_it_or_none(written: object) -> object:
        return None if written is None or written == "none" else take(written)

    return f"{allowed}, or none", take_it_or_none


def choice(*choices: str) -> Rule:
    """One of a few words."""

    def take(written: object) -> str:
        value = str(written).lower()
        if value not in choices:
            raise ValueError
        return value

    return f"{', '.join(choices[:-1])} or {choices[-1]}", take


def switch() -> Rule:
    """Yes or no."""
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}

    def take(written: object) -> bool:
        value = words.get(written.lower()) if isinstance(written, str) else written
        if not isinstance(value, bool):
            raise ValueError  # noqa: TRY004  -- whoever asks tells it in other words
        return value

    return "true, false, yes, no, 1 or 0", take


def text(allowed: str, fits: Callable[[str], object] = bool) -> Rule:
    """Text of some form."""

    def take(written: object) -> str:
        if not isinstance(written, str) or not fits(written):
            raise ValueError
        return written

    return allowed, take


def weights() -> Rule:
    """Names in their order, all of them with a weight or none."""

    def take(written: object) -> dict[str, float | None]:
        found = _named(written, QUEUE_BYTES)
        if all(weight is None for weight in found.values()):
            return found
        weighed = {name: float(weight) for name, weight in found.items() if not isinstance(weight, bool)}
        if len(weighed) < len(found) or not all(0 < weight <= 1000 for weight in weighed.values()):
            raise ValueError
        return {**weighed}

    return (
        "names in order (mail,default), or each with a weight above 0, up to 1,000 (mail=3,default=1)",
        take,
    )


def limits(least: int, most: int, longest: int) -> Rule:
    """Names of at most so many bytes, each with a number."""
    _, take_one = whole(least, most)

    def take(written: object) -> dict[str, int]:
        return {name: take_one(limit) for name, limit in _named(written, longest).items()}

    return f"names with whole numbers from {least:,} to {most:,} (mail=5,bulk=1)", take


def variables() -> Rule:
    """Names of variables of the environment, of which the last letters may be left open."""

    def take(written: object) -> tuple[str, ...]:
        found = _named(written, LONGEST_VARIABLE)
        if any(value is not None for value in found.values()) or not all(map(_VARIABLE.fullmatch, found)):
            raise ValueError
        return tuple(found)

    return "names of variables, or their beginnings with a * (AWS_*,SENTRY_DSN)", take


LONGEST_VARIABLE = 200
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\*?", re.ASCII)


def _named(written: object, longest: int) -> dict[str, Any]:
    """Names of at most so many bytes, and what is said of each, from `a=1,b=2`, from a table or from a list."""
    pairs: list[tuple[Any, Any]]
    if isinstance(written, str):
        parts = [part.partition("=") for part in written.split(",")] if written else []
        pairs = [(name.strip(), number.strip() if sign else None) for name, sign, number in parts]
    elif isinstance(written, Mapping):
        pairs = list(written.items())
    elif isinstance(written, Sequence):
        pairs = [(name, None) for name in written]
    else:
        raise ValueError  # noqa: TRY004  -- whoever asks tells it in other words
    if not all(isinstance(name, str) and name for name, _ in pairs):
        raise ValueError
    if unfit := [name for name, _ in pairs if not is_name(name, longest)]:
        raise ConfigurationError(
            f"{shown(unfit[0])} cannot be a name here; it must be 1 to {longest} bytes of printable characters"
        )
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError
    return found


def _set(default: Any, rule: Rule, does: str, *, secret: bool = False) -> Any:  # noqa: ANN401
    about = {"rule": rule, "does": does, "secret": secret}
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata=about)
    return field(default=default, repr=not secret, metadata=about)


_MOMENT, _SECOND, _HOUR, _DAY = (
    timedelta(milliseconds=1),
    timedelta(seconds=1),
    timedelta(hours=1),
    timedelta(days=1),
)
_DSN = text("a connection string or URL")
_SCHEMA_NAME = ("a schema name that needs no quotes in SQL", check_schema)
_NAME = text(
    "1 to 100 letters, digits, dots, underscores and hyphens",
    re.compile(r"[A-Za-z0-9._-]{1,100}", re.ASCII).fullmatch,
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that can be set: where the database is, and how a worker works.

    Each is a flag of the command, a variable SHIFTWORK_* of the environment and a key of `[tool.shiftwork]` in
    pyproject.toml, all of one name.
    """

    # Where the database is, for everybody.
    dsn: str | None = _set(None, maybe(_DSN), "the database; none is the embedded server", secret=True)
    listen_dsn: str | None = _set(
        None,
        maybe(_DSN),
        "where to LISTEN, and to renew the lease, when `dsn` leads through a pooler in transaction mode",
        secret=True,
    )
    schema: str = _set("shiftwork", _SCHEMA_NAME, "the schema that holds the jobs")
    connect_timeout: timedelta = _set(
        10 * _SECOND, length(_MOMENT, _HOUR), "how long to wait for a connection"
    )

    # For whoever enqueues and asks.
    max_connections: int = _set(
        10, whole(1, 10_000), "how many connections a process holds at most, for enqueueing and asking"
    )
    max_payload: int = _set(
        1 << 20, whole(2, 1 << 30), "how large the arguments of one job may be, in bytes of JSON"
    )
    result_poll: timedelta = _set(
        15 * _SECOND,
        length(_MOMENT, _DAY),
        "how often a waiter for a result looks by itself, in case a notification is lost",
    )

    # What a worker takes, and how much at once.
    queues: Mapping[str, float | None] = _set(
        {},
        weights(),
        "the queues to serve: in strict order, or by weight; none are those that the tasks name, and `default`",
    )
    concurrency: int = _set(10, whole(1, 10_000), "how many jobs run at once")
    queue_concurrency: Mapping[str, int] = _set(
        {}, limits(1, 10_000, QUEUE_BYTES), "the same for single queues"
    )
    task_concurrency: Mapping[str, int] = _set({}, limits(1, 10_000, TASK_BYTES), "the same for single tasks")
    queue_budgets: Mapping[str, int] = _set(
        {},
        limits(1, 1_000_000, QUEUE_BYTES),
        "how many jobs of a queue are claimed within five minutes before the other queues go first",
    )
    prefetch: int = _set(0, whole(0, 10_000), "how many jobs to claim ahead of those that run")
    transactions: int | None = _set(
        None,
        maybe(whole(1, 1_000)),
        "how many connections there are for transactional tasks; none is as many as jobs run at once, up to 10",
    )
    process_slots: int | None = _set(
        None,
        maybe(whole(1, 1_000)),
        "how many jobs of tasks with executor process run at once, each in a process of its own; none is as many as there are "
        "cores, up to as many as jobs run at once",
    )
    unknown_tasks: Literal["leave", "fail"] = _set(
        "leave",
        choice("leave", "fail"),
        "whether jobs of tasks that this app lacks are left to others or failed",
    )

    # How many there are.
    processes: int = _set(
        1,
        whole(1, 1_000),
        "how many worker processes the command runs; from 2 on a supervisor starts them and starts them again",
    )
    max_crashes: int | None = _set(
        5,
        maybe(whole(1, 1_000_000)),
        "how often one of its processes may die within a minute before the supervisor gives up; none is as often as it likes",
    )
    singleton: str | None = _set(
        None,
        maybe(_NAME),
        "a name under which only one worker is at work at a time, or one for each of its processes",
    )
    standby: bool = _set(False, switch(), "whether it waits for the name to be free, instead of ending")

    # How it holds, waits and ends.
    lease: timedelta = _set(
        30 * _SECOND,
        length(500 * _MOMENT, _HOUR),
        "how long its jobs stay its own after it has fallen silent; it renews every third of that",
    )
    heartbeat: timedelta | None = _set(
        None,
        maybe(length(10 * _MOMENT, _HOUR / 3)),
        "how often it renews the lease and hears of what was lost or is to be cancelled, where a third of the lease is too rare",
    )
    poll: timedelta = _set(
        30 * _SECOND, length(100 * _MOMENT, 600 * _SECOND), "how often it looks for jobs without being woken"
    )
    reconnect: timedelta = _set(
        500 * _MOMENT,
        length(100 * _MOMENT, 60 * _SECOND),
        "how long it waits before the second try when the database is away; then twice as long each time",
    )
    reconnect_most: timedelta = _set(
        30 * _SECOND, length(500 * _MOMENT, 300 * _SECOND), "how long it waits between two such tries at most"
    )
    reconnect_tries: int | None = _set(
        None, maybe(whole(1, 10_000)), "after how many such tries it ends; none is never"
    )
    notify: bool = _set(True, switch(), "whether it listens for notifications; otherwise it only polls")
    timeout: timedelta | None = _set(
        None, maybe(length(_MOMENT, LONGEST)), "how long an attempt may take, where its task says nothing"
    )
    grace: timedelta = _set(
        30 * _SECOND,
        length(timedelta(), _DAY),
        "how long running jobs may take to end when it is told to stop",
    )
    wait: bool = _set(
        False, switch(), "whether it waits for a schema that is missing or too old, instead of ending"
    )
    stop_when_idle: bool = _set(False, switch(), "whether it ends once nothing is left to do")
    max_jobs: int | None = _set(None, maybe(whole(1, UNLIMITED)), "after how many jobs it ends")
    max_time: timedelta | None = _set(None, maybe(length(_MOMENT, LONGEST)), "after how long it ends")

    # What its processes may.
    process_jobs: int | None = _set(
        1_000, maybe(whole(1, UNLIMITED)), "after how many jobs a process is replaced by a fresh one"
    )
    process_memory: int | None = _set(
        None,
        maybe(whole(16, 1 << 20)),
        "how much memory a process may have, in MiB; one that has more is killed, one that keeps much of it is replaced",
    )
    process_environment: tuple[str, ...] | None = _set(
        None,
        maybe(variables()),
        "the variables that its processes see, beside those that Python needs; none is all. Without DATABASE_URL among them, "
        "they are not told where the database is",
    )
    process_core_dumps: bool = _set(False, switch(), "whether a process that crashes may leave a core dump")

    # What is seen of it.
    name: str = _set("worker", _NAME, "what it is called, where workers are listed")
    metrics_port: int = _set(
        0,
        whole(0, 65_535),
        "where it tells how it is, over HTTP: /live, /ready and /metrics; of several processes each has the next port. 0 is nowhere",
    )
    metrics_host: str = _set(
        "127.0.0.1",
        text("an address of this machine"),
        "the address at which it does; others than this machine's own can be asked from outside",
    )
    log_level: Literal["debug", "info", "warning", "error"] = _set(
        "info", choice("debug", "info", "warning", "error"), "how much it tells"
    )
    log_format: Literal["text", "json"] = _set("text", choice("text", "json"), "for people, or for programs")

    def __post_init__(self) -> None:
        for name, known in KNOWN.items():
            object.__setattr__(self, name, known.read(getattr(self, name), "given"))
        if self.heartbeat is not None and self.heartbeat > self.lease / 3:
            raise ConfigurationError(
                f"heartbeat is {format_duration(self.heartbeat)}, and the lease {format_duration(self.lease)}; it must be at most a "
                "third of that, so that two may go wrong and nothing is lost"
            )

    @classmethod
    def read(
        cls,
        environment: Mapping[str, str] | None = None,
        *,
        beside: Path | None = None,
        **given: Any,  # noqa: ANN401
    ) -> Self:
        """What is given, else what SHIFTWORK_* says (and DATABASE_URL for the dsn), else the file, else the defaults.

        The file is the nearest pyproject.toml, from `beside` (the working directory) upwards.
        """
        environment = os.environ if environment is None else environment
        if unknown := [name for name in given if name not in KNOWN]:
            raise ConfigurationError(f"there is no setting {unknown[0]!r}{_meant(unknown[0])}")
        path, filed = _filed(beside)
        chosen: dict[str, Any] = {}
        for name, known in KNOWN.items():
            written = environment.get(known.variable, "").strip()
            if given.get(name) is not None:
                chosen[name] = known.read(given[name], "given")
            elif written:
                chosen[name] = known.read(written, f"from {known.variable}")
            elif name == "dsn" and environment.get("DATABASE_URL"):
                chosen[name] = environment["DATABASE_URL"]
            elif name in filed:
                chosen[name] = known.read(filed[name], f"from [tool.shiftwork] in {path}")
        return cls(**chosen)

    def changed(self, **given: Any) -> Self:  # noqa: ANN401
        """The same with some of it said otherwise; None leaves a setting as it is."""
        if unknown := [name for name in given if name not in KNOWN]:
            raise ConfigurationError(f"there is no setting {unknown[0]!r}{_meant(unknown[0])}")
        return dataclasses.replace(
            self, **{name: value for name, value in given.items() if value is not None}
        )

    @property
    def done_channel(self) -> str:
        """Where ended jobs are announced while somebody waits for one."""
        return f"{self.schema}_done"

    @property
    def renew_every(self) -> timedelta:
        """How often a lease is renewed: twice it may go wrong, and nothing is lost."""
        return self.heartbeat or self.lease / 3

    @property
    def poll_unproven(self) -> timedelta:
        """How often to look while it is not known that notifications arrive."""
        return min(self.poll, 5 * _SECOND)

    @property
    def answer_within(self) -> timedelta:
        """How soon the database answers a worker; a line on which it does not is given up as half open."""
        return min(max(self.lease / 2, 5 * _SECOND), 15 * _SECOND)

    @property
    def transaction_connections(self) -> int:
        """How many connections there are for transactional tasks, and how many of them run at once."""
        return self.transactions or min(self.concurrency, 10)

    @property
    def processes_at_once(self) -> int:
        """How many jobs run at once in processes of their own."""
        return self.process_slots or min(self.concurrency, os.cpu_count() or 1)

    def connections(self, *, transactional: bool = False) -> int:
        """How many connections a worker holds: to claim, to settle, for its lease, to listen, to be the only one, for transactions.

        However many jobs run at once; the last kind only if its app has transactional tasks.
        """
        own = 3 + self.notify + (self.singleton is not None)
        return own + (self.transaction_connections if transactional else 0)


@dataclass(frozen=True)
class Setting:
    """One thing that can be set: what it may be, and what it does."""

    name: str
    default: Any
    rule: Rule
    does: str
    secret: bool

    @property
    def allowed(self) -> str:
        """What it may be, in words."""
        return self.rule[0]

    @property
    def flag(self) -> str:
        """What it is called on the command line."""
        dashed = self.name.replace("_", "-")
        return f"--{dashed}/--no-{dashed}" if self.default is True else f"--{dashed}"

    @property
    def variable(self) -> str:
        """What it is called in the environment."""
        return f"SHIFTWORK_{self.name.upper()}"

    def read(self, written: object, origin: str) -> Any:  # noqa: ANN401
        """The value; refused, with what it may be, if it cannot be that."""
        _, take = self.rule
        try:
            return take(written.strip() if isinstance(written, str) else written)
        except ConfigurationError as error:
            raise ConfigurationError(f"{self.name} ({origin}): {error}") from None
        except (ValueError, TypeError, OverflowError):
            value = "something that is not shown" if self.secret else shown(written)
            raise ConfigurationError(
                f"{self.name} is {value} ({origin}); it must be {self.allowed}"
            ) from None


KNOWN: Mapping[str, Setting] = {
    known.name: Setting(
        known.name,
        {} if known.default is dataclasses.MISSING else known.default,
        known.metadata["rule"],
        known.metadata["does"],
        known.metadata["secret"],
    )
    for known in dataclasses.fields(Settings)
}
"""Every setting by its name."""


OTHERS = ("SHIFTWORK_GATEWAY_TOKEN", "SHIFTWORK_HOME", "SHIFTWORK_PG_BIN")
"""Variables of ours that are no settings: a secret, and where the embedded server is."""


def wrong(environment: Mapping[str, str], *, beside: Path | None = None) -> list[str]:
    """Everything that is wrong with what the environment and the file say, where `Settings.read` tells of the first."""
    found: list[str] = []
    written: list[tuple[Setting, Any, str]] = [
        (known, environment[known.variable], f"from {known.variable}")
        for known in KNOWN.values()
        if environment.get(known.variable, "").strip()
    ]
    try:
        path, filed = _filed(beside)
        written += [(KNOWN[name], value, f"from [tool.shiftwork] in {path}") for name, value in filed.items()]
    except ConfigurationError as error:
        found.append(str(error))
    for known, value, origin in written:
        try:
            known.read(value, origin)
        except ConfigurationError as error:
            found.append(str(error))
    return found


def strangers(environment: Mapping[str, str]) -> list[str]:
    """Variables that look like settings of ours, and are none."""
    known = {*(one.variable for one in KNOWN.values()), *OTHERS}
    return [
        f"{name} is not a setting{_meant(name.removeprefix('SHIFTWORK_'))}"
        for name in sorted(environment)
        if name.startswith("SHIFTWORK_") and name not in known
    ]


def _filed(beside: Path | None) -> tuple[Path | None, Mapping[str, Any]]:
    """The nearest pyproject.toml, and what it says to us."""
    try:
        start = Path.cwd() if beside is None else beside.absolute()
    except OSError:
        return None, {}  # the working directory has been removed
    for directory in (start, *start.parents):
        path = directory / "pyproject.toml"
        try:
            written = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue
        except OSError as error:
            raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from None
        return path, _table(path, written)
    return None, {}


def _table(path: Path, written: bytes) -> Mapping[str, Any]:
    """What a file has under [tool.shiftwork]."""
    if b"shiftwork" not in written:
        return {}  # most files say nothing to us, and reading TOML takes a while
    import tomllib  # noqa: PLC0415

    try:
        document = tomllib.loads(written.decode())
    except ValueError as error:
        raise ConfigurationError(f"{path} is not valid TOML: {error}") from None
    tool = document.get("tool", {})
    ours = tool.get("shiftwork", {}) if isinstance(tool, dict) else {}
    if not isinstance(ours, dict):
        raise ConfigurationError(f"tool.shiftwork in {path} is not a table; write [tool.shiftwork]")
    for key in ours:
        if key not in KNOWN:
            raise ConfigurationError(
                f"{path}: [tool.shiftwork] has a key {key!r}, and there is no such setting{_meant(key)}"
            )
    return ours


def _meant(name: str) -> str:
    """Which setting was probably meant."""
    import difflib  # noqa: PLC0415  -- only for who made a mistake

    near = difflib.get_close_matches(name.lower().replace("-", "_"), KNOWN, 1)
    return f"; did you mean {near[0]!r}?" if near else f"; there are: {', '.join(sorted(KNOWN))}"
