"""What can be set, in one frozen record; what follows from it is a property, not another option."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Self

from shiftwork.errors import ConfigurationError

UNLIMITED = 2_147_483_647
"""What the database reads as "no limit": attempts without end, history kept for ever."""

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
    (  # noqa: SIM905
        "all analyse analyze and any array as asc asymmetric authorization binary both case cast check "
        "collate collation column concurrently constraint create cross current_catalog current_date "
        "current_role current_schema current_time current_timestamp current_user default deferrable desc "
        "distinct do else end except false fetch for foreign freeze from full grant group having ilike in "
        "initially inner intersect into is isnull join lateral leading left like limit localtime "
        "localtimestamp natural not notnull null offset on only or order outer overlaps placing primary "
        "references returning right select session_user similar some symmetric system_user table "
        "tablesample then to trailing true union unique user using variadic verbose when where window "
        "with "
    ).split()
)


def parse_duration(text: str) -> timedelta:
    """Read `500ms`, `2s`, `5m`, `1h`, `1d`, or several together: `1h30m`."""
    compact = text.strip().replace(" ", "")
    parts = list(_PART.finditer(compact))
    if not parts or "".join(part.group() for part in parts) != compact:
        raise ConfigurationError(f"{text!r} is not a duration; write it like 500ms, 2s, 5m, 1h, 1d or 1h30m")
    try:
        return sum((float(part[1]) * _UNITS[part[2]] for part in parts), timedelta())
    except OverflowError:
        raise ConfigurationError(f"{text!r} is longer than a duration can be") from None


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
            f"{name!r} cannot be a schema name: use a lower-case letter or underscore, then up to 47 "
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


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Where the database is, and the few things a client may want otherwise."""

    dsn: str | None = field(default=None, repr=False)
    """Connection string or URL; None means the embedded server."""

    listen_dsn: str | None = field(default=None, repr=False)
    """Where to LISTEN when `dsn` goes through a pooler in transaction mode."""

    schema: str = "shiftwork"
    max_connections: int = 10
    """How many connections one process holds at most, for enqueueing and asking."""

    max_payload: int = 1 << 20
    """How large the arguments of one job may be, in bytes of JSON."""

    connect_timeout: timedelta = timedelta(seconds=10)
    result_poll: timedelta = timedelta(seconds=15)
    """How often a waiter looks by itself while it also waits for a notification."""

    def __post_init__(self) -> None:
        check_schema(self.schema)
        if self.max_connections < 1:
            raise ConfigurationError(f"max_connections is {self.max_connections}; at least 1 is needed")
        if self.max_payload < 2:
            raise ConfigurationError(f"max_payload is {self.max_payload}; even no arguments take 2 bytes")
        for name in ("connect_timeout", "result_poll"):
            if getattr(self, name) <= timedelta():
                raise ConfigurationError(f"{name} must be longer than nothing")

    @classmethod
    def read(cls, environment: Mapping[str, str] | None = None, **given: Any) -> Self:  # noqa: ANN401
        """What is given, else what SHIFTWORK_* says (and DATABASE_URL for the dsn), else the defaults."""
        environment = os.environ if environment is None else environment
        chosen = {name: value for name, value in given.items() if value is not None}
        for known in dataclasses.fields(cls):
            text = environment.get(f"SHIFTWORK_{known.name.upper()}")
            if text and known.name not in chosen:
                chosen[known.name] = _read(f"SHIFTWORK_{known.name.upper()}", text, type(known.default))
        if environment.get("DATABASE_URL"):
            chosen.setdefault("dsn", environment["DATABASE_URL"])
        return cls(**chosen)

    @property
    def done_channel(self) -> str:
        """Where ended jobs are announced while somebody waits for one."""
        return f"{self.schema}_done"


def _read(name: str, text: str, kind: type) -> object:
    if kind is timedelta:
        return parse_duration(text)
    if kind is int:
        try:
            return int(text)
        except ValueError:
            raise ConfigurationError(f"{name} is {text!r}; it must be a whole number") from None
    return text
