"""Installing and upgrading: raced, killed, locked out, refused; and the same by script and by Python."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from time import monotonic
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.rows import scalar_row, tuple_row

from shiftwork import migrate as installing
from shiftwork.database import executing, run
from shiftwork.errors import ConfigurationError, NotInstalled, SchemaTooNew
from shiftwork.migrate import Migration, migrate, pending, script
from shiftwork.operations import require as requirement
from shiftwork.settings import check_schema
from shiftwork.stores.protocol import Protocol as Store
from tests.concurrency import elsewhere, in_thread, waiting_for_lock
from tests.harness import Protocol
from tests.test_psql import psql

CATALOGS = """
select 'relation' as kind, relname::text as name,
       concat_ws(' ', relkind, relispartition, reloptions::text, relacl::text) as shape
  from pg_class where relnamespace = %(schema)s::regnamespace and relkind <> 't'
union all
select 'column', attrelid::regclass || '.' || attname,
       concat_ws(' ', attnum, format_type(atttypid, atttypmod), attnotnull, attidentity, attgenerated,
                 pg_get_expr(adbin, adrelid))
  from pg_attribute join pg_class on pg_class.oid = attrelid
  left join pg_attrdef on adrelid = attrelid and adnum = attnum
 where relnamespace = %(schema)s::regnamespace and relkind in ('r', 'p', 'v') and attnum > 0
union all
select 'constraint', conrelid::regclass || '.' || conname, pg_get_constraintdef(oid)
  from pg_constraint where connamespace = %(schema)s::regnamespace
union all
select 'index', indexrelid::regclass::text, pg_get_indexdef(indexrelid)
  from pg_index join pg_class on pg_class.oid = indexrelid where relnamespace = %(schema)s::regnamespace
union all
select 'function', oid::regprocedure::text, concat_ws(' ', pg_get_functiondef(oid), proacl::text)
  from pg_proc where pronamespace = %(schema)s::regnamespace
union all
select 'trigger', tgrelid::regclass || '.' || tgname, pg_get_triggerdef(pg_trigger.oid)
  from pg_trigger join pg_class on pg_class.oid = tgrelid where relnamespace = %(schema)s::regnamespace
union all
select 'type', typname, concat_ws(' ', typtype, format_type(typbasetype, typtypmod), (
         select string_agg(enumlabel, ',' order by enumsortorder) from pg_enum where enumtypid = pg_type.oid))
  from pg_type where typnamespace = %(schema)s::regnamespace and typtype in ('d', 'e')
"""
CONTENTS = {
    "moves": "verb || coalesce(before::text, '') || after",
    "queues": "queues::text",
    "settings": "settings::text",
    "migrations": "number || name",
}


def shape_of(connection: psycopg.Connection[Any], schema: str) -> set[tuple[str, ...]]:
    """Everything that was installed, with the schema's name left out."""
    with connection.cursor(row_factory=tuple_row) as cursor:
        rows = cursor.execute(CATALOGS, {"schema": schema}).fetchall()
        for table, columns in CONTENTS.items():
            text: Any = f"select '{table}', {columns}, '' from {schema}.{table}"
            rows += cursor.execute(text).fetchall()
    assert len(rows) > 200
    return {tuple(one.replace(schema, "schema") for one in row) for row in rows}


@pytest.fixture
def empty(empty_dsn: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        yield connection


def require(connection: psycopg.Connection[Any]) -> None:
    run(requirement(Store()), executing(connection, "shiftwork", lent=False))


def test_migrating_installs_everything_once_and_then_finds_nothing_to_do(
    empty: psycopg.Connection[Any],
) -> None:
    # spec: HO-35, QU-30
    plan = pending(empty)
    assert (plan.installed, bool(plan), plan.functions) == (0, True, True)
    with pytest.raises(NotInstalled, match="shiftwork migrate"):
        require(empty)
    done = migrate(empty)
    assert done == [*(f"applied {step.name}" for step in installing.migrations()), "created the functions"]
    job = Protocol(empty).enqueue()
    assert not pending(empty)
    require(empty)
    before = shape_of(empty, "shiftwork")
    assert migrate(empty) == []
    assert shape_of(empty, "shiftwork") == before
    assert Protocol(empty).state(job) == "ready"


RACER = """
import json, sys, psycopg
from shiftwork.migrate import migrate
with psycopg.connect(sys.argv[1], autocommit=True) as connection:
    connection.execute("select pg_advisory_lock_shared(1)")
    print(json.dumps(migrate(connection)))
"""


def test_migrators_that_race_in_many_processes_do_it_once(
    empty_dsn: str, empty: psycopg.Connection[Any]
) -> None:
    # spec: HO-35
    empty.execute("select pg_advisory_lock(1)")
    with contextlib.ExitStack() as stack:
        racers = [
            stack.enter_context(
                subprocess.Popen([sys.executable, "-c", RACER, empty_dsn], stdout=subprocess.PIPE, text=True)
            )
            for _ in range(4)
        ]
        deadline = monotonic() + 60
        waiting = 0
        with empty.cursor(row_factory=scalar_row) as cursor:
            while waiting < len(racers):
                assert monotonic() < deadline, "the racers never came to the start"
                assert all(racer.poll() is None for racer in racers)
                cursor.execute(
                    "select count(*) from pg_locks where locktype = 'advisory' and not granted"
                    " and database = (select oid from pg_database where datname = current_database())"
                )
                waiting = cursor.fetchone() or 0
        empty.execute("select pg_advisory_unlock(1)")
        answers = [json.loads(racer.communicate(timeout=120)[0]) for racer in racers]
    assert [racer.returncode for racer in racers] == [0] * len(racers)
    said = [line for answer in answers for line in answer]
    assert sorted(said) == sorted(
        [*(f"applied {step.name}" for step in installing.migrations()), "created the functions"]
    )
    assert not pending(empty)


# Each child has a schema of its own, and kills itself right before its n-th statement.
KILLED = """
import os, signal, sys, psycopg
from shiftwork import migrate as installing
from tests.test_migrate import no_partitions, three_steps

steps, functions = three_steps(), no_partitions()
installing.migrations, installing.functions = lambda: steps, lambda: functions
original = psycopg.Cursor.execute
for number in range(1, 200):
    child = os.fork()
    if child == 0:
        left = number
        def execute(self, *args, **kwargs):
            global left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(self, *args, **kwargs)
        psycopg.Cursor.execute = execute
        with psycopg.connect(sys.argv[1], autocommit=True) as connection:
            installing.migrate(connection, f"killed_{number}")
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        sys.exit(os.waitstatus_to_exitcode(status) or print(number))
"""


def three_steps() -> list[Migration]:
    """All of our migrations as one, however many there are, and two more: a first, one between, and a last."""
    ours = installing.migrations()
    texts = [
        "\n".join(step.text for step in ours),
        "create table shiftwork.second (a int); insert into shiftwork.second values (1);",
        "alter table shiftwork.second add b int not null default 2;",
    ]
    return [Migration(number, f"step_{number}", text) for number, text in enumerate(texts, 1)]


def no_partitions() -> str:
    """The functions, without the call that makes the partitions: two thirds of the time, and one statement with the rest."""
    return installing.functions().replace("select shiftwork.extend_history();", "")


def test_a_migrator_that_was_killed_at_any_step_is_resumed_by_the_next(
    empty_dsn: str, empty: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # spec: HO-35
    killing = subprocess.run(
        [sys.executable, "-c", KILLED, empty_dsn], check=False, capture_output=True, text=True, timeout=200
    )
    assert killing.returncode == 0, killing.stderr
    survivor = int(killing.stdout)
    assert survivor > 20
    steps, functions = three_steps(), no_partitions()
    monkeypatch.setattr(installing, "migrations", lambda: steps)
    monkeypatch.setattr(installing, "functions", lambda: functions)
    whole = shape_of(empty, f"killed_{survivor}")
    resumed = {len(migrate(empty, f"killed_{number}")) for number in range(1, survivor)}
    assert resumed == set(range(1, len(steps) + 2))
    for number in range(1, survivor):
        assert shape_of(empty, f"killed_{number}") == whole


def test_what_was_registered_before_and_while_the_schema_was_brought_up_to_date_is_looked_for(
    empty: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # spec: HO-35, ST-1
    steps = installing.migrations()
    monkeypatch.setattr(installing, "migrations", lambda: steps[:8])
    assert len(list(installing._apply(empty, "shiftwork"))) == 8
    empty.execute(
        "insert into shiftwork.tasks (name, queue) select 'early ' || n, 'letters' from generate_series(1, 100) as n"
    )
    monkeypatch.setattr(installing, "migrations", lambda: steps)
    assert list(installing._apply(empty, "shiftwork")) == steps[8:]
    assert empty.execute("select pg_sequence_last_value('shiftwork.heed')").fetchone() == (1,)
    empty.execute("insert into shiftwork.tasks (name, queue) values ('between these', 'letters')")
    assert empty.execute("select pg_sequence_last_value('shiftwork.heed')").fetchone() == (1,)
    empty.execute("insert into shiftwork.tasks (name, priority) values ('between', -3)")
    assert migrate(empty) == ["created the functions"]
    empty.execute("analyze shiftwork.tasks")

    def read() -> tuple[int, int]:
        found = empty.execute(
            "select seq_tup_read, idx_tup_fetch from pg_stat_xact_user_tables where relid = 'shiftwork.tasks'::regclass"
        ).fetchone()
        assert found is not None
        return found[0], found[1]

    with empty.transaction():
        whole, single = read()
        empty.execute("select shiftwork.enqueue('early 50', '{}')")
        empty.execute("select shiftwork.enqueue_one('between', '{}', 'mine', null, 5)")
        assert read() == (whole, single + 2)  # not one page after the other
    made = empty.execute("select queue, priority from shiftwork.jobs order by id").fetchall()
    assert made == [("letters", 0), ("mine", -3)]
    assert empty.execute("select pg_sequence_last_value('shiftwork.heed')").fetchone() == (3,)


def test_who_sleeps_and_what_is_registered_while_it_is_upgraded_is_heeded(
    empty: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # spec: HO-35, D-6, ST-1
    steps = installing.migrations()
    monkeypatch.setattr(installing, "migrations", lambda: steps[:10])
    list(installing._apply(empty, "shiftwork"))
    # What the functions of that release had left behind: a task with a priority is registered, and workers may sleep.
    empty.execute(
        "create function shiftwork.sleep(seconds double precision) returns void language sql return null"
    )
    empty.execute("insert into shiftwork.tasks (name, priority) values ('mail', -3)")
    monkeypatch.setattr(installing, "migrations", lambda: steps)
    with (
        psycopg.connect(empty.info.dsn) as other,
        psycopg.connect(empty.info.dsn, autocommit=True) as watcher,
    ):
        other.execute("insert into shiftwork.tasks (name, queue) values ('letter', 'letters')")
        migrated = in_thread(lambda: list(installing._apply(empty, "shiftwork")))
        waiting_for_lock(watcher, empty)  # who is just registering is waited for
        other.commit()
        assert migrated.result(timeout=60) == steps[10:]
        heed = "select pg_sequence_last_value('shiftwork.heed')"
        assert empty.execute(heed).fetchone() == (7,)

        # Until the functions are re-created, both the former flags and the new one are said, the latter in turn with sleepers.
        empty.execute(
            "select setval(name, 1, false) from unnest('{shiftwork.registered, shiftwork.registered_priority}'::regclass[]) as name"
        )
        empty.execute("select setval('shiftwork.heed', 4)")
        other.execute("set search_path = shiftwork")
        turn = "select pg_advisory_xact_lock(hashtextextended('shiftwork declare ' || 'asleep_until'::regclass, 0))"
        other.execute(turn)
        empty.execute("set lock_timeout = '50ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            empty.execute("update shiftwork.tasks set name = name")
        other.rollback()
        with empty.transaction():
            empty.execute("update shiftwork.tasks set name = name")
            other.execute("set search_path = shiftwork; set lock_timeout = '5s'")
            other.execute(turn)  # given back at once
            other.rollback()
        assert empty.execute(heed).fetchone() == (7,)
        former = "select pg_sequence_last_value('shiftwork.registered'), pg_sequence_last_value('shiftwork.registered_priority')"
        assert empty.execute(former).fetchone() == (1, 1)
    empty.execute("drop function shiftwork.sleep(double precision)")
    empty.execute("reset lock_timeout")
    assert migrate(empty) == ["created the functions"]
    empty.execute("select shiftwork.enqueue('mail', '{}')")
    assert empty.execute("select priority from shiftwork.jobs").fetchone() == (-3,)


def test_an_upgrade_with_roles_by_somebody_else_leaves_registering_possible_at_every_step(
    empty: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # spec: HO-35
    schema = f"stepwise_{empty.info.backend_pid}"
    steps = installing.migrations()
    with contextlib.ExitStack() as stack:
        stack.callback(drop_roles, empty, schema)
        monkeypatch.setattr(installing, "migrations", lambda: steps[:10])
        list(installing._apply(empty, schema))
        for text in (
            f"create role {schema}_owner",
            f"create role {schema}_operator",
            f"alter schema {schema} owner to {schema}_owner",
            f"alter table {schema}.tasks owner to {schema}_owner",
            f"alter sequence {schema}.registered owner to {schema}_owner",
            f"alter sequence {schema}.registered_priority owner to {schema}_owner",
            f"alter sequence {schema}.asleep_until owner to {schema}_owner",
            f"alter function {schema}.note_registered() owner to {schema}_owner",
            f"grant usage on schema {schema} to {schema}_operator",
            f"grant insert on {schema}.tasks to {schema}_operator",
        ):
            empty.execute(text.encode())
        monkeypatch.setattr(installing, "migrations", lambda: steps)
        for _ in installing._apply(empty, schema):
            empty.execute(sql.SQL("set role {}").format(sql.Identifier(f"{schema}_operator")))
            empty.execute(
                f"insert into {schema}.tasks (name, queue) values (gen_random_uuid(), 'mail')".encode()
            )
            empty.execute("reset role")
        assert empty.execute(f"select pg_sequence_last_value('{schema}.heed')".encode()).fetchone() == (1,)


def drop_roles(connection: psycopg.Connection[Any], prefix: str) -> None:
    """The roles of a test, with all that is theirs."""
    connection.execute("reset role")
    for [role] in connection.execute(
        "select rolname from pg_roles where rolname ~ %s", (f"^{prefix}(_|$)",)
    ).fetchall():
        connection.execute(sql.SQL("drop owned by {} cascade").format(sql.Identifier(role)))
        connection.execute(sql.SQL("drop role {}").format(sql.Identifier(role)))


def test_what_is_registered_while_a_migrator_waits_is_seen_whatever_its_session_says_of_snapshots(
    empty: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # spec: HO-35
    steps = installing.migrations()
    monkeypatch.setattr(installing, "migrations", lambda: steps[:8])
    list(installing._apply(empty, "shiftwork"))
    monkeypatch.setattr(installing, "migrations", lambda: steps)
    empty.execute("set default_transaction_isolation = 'repeatable read'")
    with (
        psycopg.connect(empty.info.dsn) as other,
        psycopg.connect(empty.info.dsn, autocommit=True) as watcher,
    ):
        other.execute("insert into shiftwork.tasks (name, queue) values ('mail', 'letters')")
        migrated = in_thread(migrate, empty)
        waiting_for_lock(watcher, empty)
        other.commit()
        migrated.result(timeout=60)
    empty.execute("select shiftwork.enqueue('mail', '{}')")
    assert empty.execute("select queue from shiftwork.jobs").fetchone() == ("letters",)


def test_somebody_else_than_the_owner_of_a_schema_is_refused_unless_everything_gets_an_owner_of_its_own(
    empty: psycopg.Connection[Any],
) -> None:
    # spec: HO-35
    login = f"stranger_{empty.info.backend_pid}"
    schema = f"{login}_jobs"
    name, database = sql.Identifier(login), sql.Identifier(empty.info.dbname)
    enqueue = sql.SQL("select {}.enqueue('mail', '{{}}')").format(sql.Identifier(schema))
    outdate = sql.SQL("delete from {}.settings where name = 'protocol'").format(sql.Identifier(schema))
    empty.execute(sql.SQL("create role {}").format(name))
    try:
        empty.execute(sql.SQL("grant create on database {} to {}").format(database, name))
        empty.execute(sql.SQL("set role {}").format(name))
        migrate(empty, schema)
        empty.execute("reset role")
        assert migrate(empty, schema) == [], "nothing is missing"
        empty.execute(outdate)
        with pytest.raises(
            ConfigurationError, match=rf"'{schema}' belongs to {login}.*set role {login}.*--roles"
        ):
            migrate(empty, schema)
        empty.execute(sql.SQL("set role {}").format(name))
        assert migrate(empty, schema) == ["created the functions"]
        empty.execute(enqueue)
        empty.execute("reset role")

        empty.execute(outdate)
        assert migrate(empty, schema, with_roles=True) == ["created the functions", "granted the roles"]
        empty.execute(outdate)
        assert migrate(empty, schema) == ["created the functions", "granted the roles"]
        empty.execute(sql.SQL("set role {}").format(sql.Identifier(f"{schema}_producer")))
        empty.execute(enqueue)
    finally:
        drop_roles(empty, login)


def test_a_table_that_is_in_use_is_waited_for_only_briefly(
    dsn: str, connection: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # spec: HO-35
    monkeypatch.setattr(installing, "LOCK_TIMEOUT", "50ms")
    connection.execute(
        "update shiftwork.settings set value = value || '{\"fingerprint\": \"else\"}' where name = 'protocol'"
    )
    before = shape_of(connection, "shiftwork")
    with elsewhere(dsn) as user:
        with user.connection.transaction():
            user.rows("lock table {}.jobs in access exclusive mode")
            with pytest.raises(psycopg.errors.LockNotAvailable):
                migrate(connection)
        assert shape_of(connection, "shiftwork") == before
        assert migrate(connection) == ["re-created the functions"]


def test_several_schemas_live_in_one_database_and_know_nothing_of_each_other(
    empty_dsn: str, empty: psycopg.Connection[Any]
) -> None:
    # spec: QU-30
    for schema in ("first_crew", "second_crew", "shiftwork"):
        migrate(empty, schema)
    shapes = [shape_of(empty, schema) for schema in ("first_crew", "second_crew", "shiftwork")]
    assert shapes[0] == shapes[1] == shapes[2]

    heard: list[str] = []
    with elsewhere(empty_dsn, "first_crew") as mine, elsewhere(empty_dsn, "second_crew") as other:
        other.connection.add_notify_handler(lambda note: heard.append(note.channel))
        other.connection.execute("listen first_crew_wake; listen second_crew_wake; listen shiftwork_wake")
        for each in (mine, other):
            each.rows("select * from {}.sleep(60)")
        job = mine.enqueue("greet", unique_key="k", unique_scope="window")
        assert other.claim(other.register()).jobs == []
        assert heard == ["first_crew_wake"]
        with mine.connection.transaction():
            mine.enqueue("greet", unique_key="window", unique_scope="window")
            other.enqueue(
                "greet", unique_key="window", unique_scope="window"
            )  # waits for no lock of the other's
        worker = mine.register()
        [first, _] = mine.claim(worker).jobs
        assert mine.complete(worker, [first]) == {job: "settled"}
        mine.connection.execute("drop schema first_crew cascade")
        assert len(other.claim(other.register()).jobs) == 1


HOSTILE = [
    "",
    " ",
    "Jobs",
    "jobs; drop table users",
    'jobs"',
    "jobs'",
    "jobs--",
    "jobs.public",
    "jobs$",
    "1jobs",
    "jobs\n",
    "jobs\0",
    "jöbs",
    "\uff4aobs",
    "jobs%s",
    "{jobs}",
    "x" * 49,
    "pg_jobs",
    "pg_catalog",
    "select",
    "user",
    "table",
    "jobs ",
    "jobs/**/",
    "$$",
    "\\",
]


@pytest.mark.parametrize("call", [migrate, pending, script], ids=lambda call: call.__name__)
def test_a_hostile_name_for_a_schema_is_refused_before_anything_is_sent(dsn: str, call: Any) -> None:
    # spec: QU-30
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.close()  # nothing can be sent
        for name in HOSTILE:
            with pytest.raises(ConfigurationError):
                call(name) if call is script else call(connection, name)


def test_a_schema_with_the_longest_name_works(empty: psycopg.Connection[Any]) -> None:
    # spec: QU-30
    name = "j" * 48
    migrate(empty, name)
    protocol = Protocol(empty, name)
    protocol.rows("select * from {}.sleep(60)")
    job = protocol.enqueue()
    worker = protocol.register()
    assert protocol.complete(worker, protocol.claim(worker).jobs) == {job: "settled"}


def test_the_script_for_psql_installs_exactly_what_migrate_does(
    empty_dsn: str, empty: psycopg.Connection[Any]
) -> None:
    # spec: HO-35
    psql(empty_dsn, script("by_script"))
    migrate(empty, "by_python")
    assert shape_of(empty, "by_script") == shape_of(empty, "by_python")
    assert migrate(empty, "by_script") == []


def test_what_a_newer_release_installed_is_refused_and_left_alone(
    connection: psycopg.Connection[Any],
) -> None:
    # spec: HO-35
    connection.execute(
        'update shiftwork.settings set value = \'{"version": 999, "fingerprint": "newer"}\' '
        "where name = 'protocol'"
    )
    connection.execute(
        "create or replace function shiftwork.clock() returns timestamptz language sql stable return now()"
    )
    before = shape_of(connection, "shiftwork")
    with pytest.raises(SchemaTooNew, match="999"):
        migrate(connection)
    assert shape_of(connection, "shiftwork") == before
    assert not pending(connection)
    require(connection)  # a newer schema serves older clients


def test_a_migration_that_we_do_not_know_is_refused_as_well(connection: psycopg.Connection[Any]) -> None:
    # spec: HO-35
    connection.execute("insert into shiftwork.migrations (number, name) values (999, 'of the future')")
    with pytest.raises(SchemaTooNew):
        migrate(connection)


def test_functions_that_differ_are_put_back_and_grants_are_kept(connection: psycopg.Connection[Any]) -> None:
    # spec: HO-35
    whole = shape_of(connection, "shiftwork")
    connection.execute(
        "create or replace function shiftwork.failure(code text, message text) returns jsonb "
        "language sql immutable as $$ select '{}'::jsonb $$; "
        "update shiftwork.settings set value = value || '{\"fingerprint\": \"old\"}' where name = 'protocol'"
    )
    assert pending(connection).functions
    assert migrate(connection) == ["re-created the functions"]
    assert shape_of(connection, "shiftwork") == whole


def test_an_installer_inside_a_transaction_of_its_own_is_not_needed(empty: psycopg.Connection[Any]) -> None:
    # spec: HO-35
    empty.autocommit = False
    migrate(empty)
    empty.rollback()
    with empty.cursor(row_factory=scalar_row) as cursor:
        cursor.execute(sql.SQL("select count(*) from shiftwork.migrations"))
        assert cursor.fetchone() == len(installing.migrations())


@pytest.mark.parametrize(
    "thing", ["table app.customers (name text)", "function app.price() returns int return 1"]
)
def test_a_schema_that_holds_other_things_is_left_alone(empty: psycopg.Connection[Any], thing: str) -> None:
    # spec: HO-35
    empty.execute("create schema app")
    empty.execute(f"create {thing}".encode())
    for schema in ("app", "public"):
        with pytest.raises(ConfigurationError, match="other things"):
            migrate(empty, schema)


def test_making_the_functions_anew_waits_for_nobody_who_writes_jobs(empty: psycopg.Connection[Any]) -> None:
    # spec: HO-35
    migrate(empty)
    empty.execute(
        "update shiftwork.settings set value = value || '{\"fingerprint\": \"older\"}' where name = 'protocol'"
    )
    with psycopg.connect(empty.info.dsn) as writer:
        writer.execute("select shiftwork.enqueue('t')")
        writer.execute("select count(*) from shiftwork.all_jobs")
        assert migrate(empty) == ["re-created the functions"]


def test_no_word_that_the_server_keeps_for_itself_becomes_a_schema(protocol: Protocol) -> None:
    kept = protocol.rows("select word from pg_get_keywords() where catcode <> 'U'")
    assert len(kept) > 100
    for row in kept:
        with pytest.raises(ConfigurationError, match="schema name"):
            check_schema(row["word"])
