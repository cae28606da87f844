"""Installing the protocol: tables by numbered migrations, verbs as functions that are re-created whole.

Each migration runs in a transaction of its own, which first takes an advisory lock and then looks what is still missing.
So racing migrators take turns and the later ones find nothing to do, and one that was killed leaves whole migrations
behind: the next goes on where it ended. The lock belongs to the transaction, so a pooler is no obstacle. Locks on
tables are waited for only briefly: better to fail and be run again than to hold up everyone who queues behind us.

The files are written for the schema `shiftwork` and run as they are with psql; another name is put in for that one word.
Functions are re-created only by code that is not older than what is installed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import tuple_row

from shiftwork.errors import ConfigurationError, SchemaTooNew
from shiftwork.settings import check_schema

PROTOCOL = 12
"""Rises whenever a function that a client or a worker calls is added or changes what it does."""

LOCK_TIMEOUT = "5s"
PATIENCE = "120s"
"""How long one migrator waits for another."""


@dataclass(frozen=True)
class Migration:
    """One numbered step of the tables."""

    number: int
    name: str
    text: str


@dataclass(frozen=True)
class Pending:
    """What `migrate` would do."""

    installed: int
    """The protocol that the database has; 0 if none."""
    migrations: tuple[Migration, ...]
    functions: bool
    """Whether the functions differ from ours."""

    def __bool__(self) -> bool:
        return bool(self.migrations) or self.functions


def migrations() -> list[Migration]:
    """All steps, in their order."""
    folder = files("shiftwork.sql") / "migrations"
    found = sorted(file.name for file in folder.iterdir() if file.name.endswith(".sql"))
    return [
        Migration(int(name[:4]), name.removesuffix(".sql"), (folder / name).read_text("utf-8"))
        for name in found
    ]


def functions() -> str:
    """Every verb, as one script."""
    folder = files("shiftwork.sql") / "protocol"
    names = sorted(file.name for file in folder.iterdir() if file.name.endswith(".sql"))
    return "\n".join((folder / name).read_text("utf-8") for name in names) + _HARDEN


def roles() -> str:
    """The roles and what each may do, as one script."""
    return (files("shiftwork.sql") / "roles.sql").read_text("utf-8")


# Nobody gets to call a function by default: who shares the database has no business here. And what a function means
# is not for its caller's search path to decide. (Functions in SQL are inlined into ours, and take over their path; a procedure
# that commits can have no path of its own, and leaves what it does to functions.)
_HARDEN = """
revoke all on all routines in schema shiftwork from public;
do $$
declare
  one record;
begin
  for one in select routine.oid::regprocedure as signature from pg_catalog.pg_proc as routine
               join pg_catalog.pg_language as language on language.oid = routine.prolang
              where routine.pronamespace = 'shiftwork'::regnamespace and language.lanname = 'plpgsql' and routine.prokind = 'f'
                and not exists (select from unnest(routine.proconfig) as setting where setting like 'search_path=%') loop
    execute format('alter function %s set search_path = shiftwork, pg_temp', one.signature);
  end loop;
end $$;
select shiftwork.extend_history();
"""

_BOOTSTRAP = """
create schema if not exists shiftwork;
create table if not exists shiftwork.migrations (
  number      int primary key,
  name        text not null,
  applied_at  timestamptz not null default now()
);
"""


def script(schema: str = "shiftwork", *, with_roles: bool = False) -> str:
    """All of it for psql, to install from nothing."""
    parts = ["begin isolation level read committed;", _BOOTSTRAP]
    for step in migrations():
        parts += [
            step.text,
            f"insert into shiftwork.migrations (number, name) values ({step.number}, '{step.name}');",  # noqa: S608
        ]
    parts += [functions(), _stamp(), roles() if with_roles else "", "commit;"]
    return _for_schema("\n".join(parts), schema)


def pending(connection: psycopg.Connection[Any], schema: str = "shiftwork") -> Pending:
    """What the database lacks. Changes nothing."""
    check_schema(schema)
    with connection.cursor(row_factory=tuple_row) as cursor:
        installed, fingerprint, applied = _installed(cursor, schema)
    missing = tuple(step for step in migrations() if step.number not in applied)
    return Pending(installed, missing, installed <= PROTOCOL and fingerprint != _fingerprint())


def migrate(
    connection: psycopg.Connection[Any], schema: str = "shiftwork", *, with_roles: bool = False
) -> list[str]:
    """Bring the database up to date; says what was done, an empty list if there was nothing to do.

    The connection must not be inside a transaction. Racing migrators are safe.
    """
    check_schema(schema)
    _refuse_foreign(connection, schema)
    if not with_roles:
        _refuse_stranger(connection, schema)
    done = [f"applied {step.name}" for step in _apply(connection, schema)]
    with connection.transaction(), connection.cursor(row_factory=tuple_row) as cursor:
        _take_turn(cursor, schema)
        installed, fingerprint, applied = _installed(cursor, schema)
        if installed > PROTOCOL or max(applied) > migrations()[-1].number:
            raise SchemaTooNew(
                f"schema {schema!r} has protocol {installed}, and this shiftwork knows {PROTOCOL}: "
                "it was installed by a newer release, which has to migrate it"
            )
        if fingerprint != _fingerprint():
            _run(cursor, functions(), schema)
            _run(cursor, _stamp(), schema)
            done.append("re-created the functions" if installed else "created the functions")
        if with_roles or (fingerprint != _fingerprint() and _has_roles(cursor, schema)):
            _run(cursor, roles(), schema)
            done.append("granted the roles")
    return done


def _apply(connection: psycopg.Connection[Any], schema: str) -> Iterator[Migration]:
    for step in migrations():
        with connection.transaction(), connection.cursor(row_factory=tuple_row) as cursor:
            _take_turn(cursor, schema)
            _run(cursor, _BOOTSTRAP, schema)
            _, _, applied = _installed(cursor, schema)
            if step.number in applied:
                continue
            _run(cursor, step.text, schema)
            cursor.execute(
                sql.SQL("insert into {}.migrations (number, name) values (%s, %s)").format(
                    sql.Identifier(schema)
                ),
                (step.number, step.name),
            )
        yield step


def _refuse_foreign(connection: psycopg.Connection[Any], schema: str) -> None:
    """Everything in the schema becomes ours; so there must be nothing in it that is not."""
    with connection.transaction(), connection.cursor(row_factory=tuple_row) as cursor:
        [[ours, others]] = cursor.execute(
            "select to_regclass(%s) is not null, exists (select from pg_class where relnamespace = to_regnamespace(%s))"
            " or exists (select from pg_proc where pronamespace = to_regnamespace(%s))",
            (f'"{schema}".migrations', schema, schema),
        ).fetchall()
    if schema == "public" or (others and not ours):
        raise ConfigurationError(
            f"schema {schema!r} is for other things too: choose one that is empty or does not exist yet"
        )


def _refuse_stranger(connection: psycopg.Connection[Any], schema: str) -> None:
    """What somebody else adds would be his: functions that act for the one owner could not use it."""
    with connection.transaction(), connection.cursor(row_factory=tuple_row) as cursor:
        if not pending(connection, schema):
            return
        strangers = cursor.execute(
            "select relowner::regrole::text, current_user from pg_class where oid = to_regclass(%s)"
            " and relowner <> current_user::regrole and relowner <> coalesce(to_regrole(%s), 0)",
            (f'"{schema}".migrations', f'"{schema}_owner"'),
        ).fetchall()
    for owner, user in strangers:
        raise ConfigurationError(
            f"schema {schema!r} belongs to {owner}, and what {user} adds to it would not: migrate as {owner}"
            f" (set role {owner}), or with --roles, which gives everything to a role of its own"
        )


def _has_roles(cursor: psycopg.Cursor[Any], schema: str) -> bool:
    [[owned]] = cursor.execute(
        "select nspowner::regrole::text = %s from pg_namespace where nspname = %s",
        (f"{schema}_owner", schema),
    ).fetchall()
    return bool(owned)


def _take_turn(cursor: psycopg.Cursor[Any], schema: str) -> None:
    # Whatever the caller's default is: what others wrote while we waited for a lock is to be seen.
    cursor.execute("set transaction isolation level read committed")
    cursor.execute("select set_config('lock_timeout', %s, true)", (PATIENCE,))
    cursor.execute("select pg_advisory_xact_lock(hashtextextended(%s, 0))", (f"{schema} migrate",))
    cursor.execute("select set_config('lock_timeout', %s, true)", (LOCK_TIMEOUT,))


def _installed(cursor: psycopg.Cursor[Any], schema: str) -> tuple[int, str | None, set[int]]:
    name = sql.Identifier(schema)
    [[has_migrations, has_settings]] = cursor.execute(
        "select to_regclass(%s) is not null, to_regclass(%s) is not null",
        (f'"{schema}".migrations', f'"{schema}".settings'),
    ).fetchall()
    if not has_migrations:
        return 0, None, set()
    rows = cursor.execute(sql.SQL("select number from {}.migrations").format(name)).fetchall()
    stamps = (
        cursor.execute(
            sql.SQL("select value from {}.settings where name = 'protocol'").format(name)
        ).fetchall()
        if has_settings
        else []
    )
    stamp = stamps[0][0] if stamps else {}
    return stamp.get("version", 0), stamp.get("fingerprint"), {number for (number,) in rows}


def _fingerprint() -> str:
    return hashlib.sha256(functions().encode()).hexdigest()[:16]


def _stamp() -> str:
    return (
        "insert into shiftwork.settings (name, value) values ('protocol', "  # noqa: S608
        f"""'{{"version": {PROTOCOL}, "fingerprint": "{_fingerprint()}"}}') """
        "on conflict (name) do update set value = excluded.value;"
    )


def _run(cursor: psycopg.Cursor[Any], text: str, schema: str) -> None:
    cursor.execute(_for_schema(text, schema).encode())


def _for_schema(text: str, schema: str) -> str:
    return text.replace("shiftwork", check_schema(schema))
