"""Who may do what: role by role, verb by verb, table by table; and that nobody borrows the owner's rights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from shiftwork import App
from shiftwork.migrate import migrate
from tests.harness import Protocol, Row
from tests.remote import Remote

ROLES = ["producer", "worker", "operator", "viewer"]
VERBS = ["SELECT", "INSERT", "UPDATE", "DELETE", "TRUNCATE", "REFERENCES", "TRIGGER"]

JOBS = {"jobs", "history", "attempts", "signals", "progress", "logs", "child_ends"}
REGISTRY = {"tasks", "queues", "pauses", "limits", "settings", "schedules", "edges"}
OTHER = {
    "workers",
    "permits",
    "snapshots",
    "duties",
    "runs",
    "run_days",
    "audit",
    "moves",
    "migrations",
    "all_jobs",
}

PRODUCING = {"enqueue", "enqueue_one", "enqueue_many", "clock"}
VIEWING = {"clock", "look", "await_results", "measure_queues"}
STEERING = {
    "cancel",
    "complete",
    "revive",
    "run_now",
    "pause",
    "resume",
    "retain",
    "note",
    "limit_running",
    "set_limit",
    "kind_of",
    "target_of",
}
NOBODY = {
    "change_heed",
    "check_and_wake",
    "check_payload",
    "complete_insert",
    "declare_until",
    "enqueue_unique",
    "forget_lapsed",
    "forget_runs",
    "merge_deep",
    "merge_payload",
    "merge_value",
    "note_registered",
    "purge_companions",
    "purge_partition",
}
"""What only other functions call, with the rights of the owner."""

GIVEN_BY_A_PRODUCER = [
    "task",
    "payload",
    "queue",
    "priority",
    "run_at",
    "expires_at",
    "max_attempts",
    "unique_key",
    "tags",
]


class Installation:
    """A schema with its five roles, which belong to it alone."""

    def __init__(self, dsn: str, schema: str) -> None:
        self.dsn, self.schema = dsn, schema

    @contextmanager
    def acting(self, role: str | None) -> Iterator[Protocol]:
        """A session of somebody who has this role and no other; None is who installed it."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            if role:
                name = sql.Identifier(f"{self.schema}_{role}")
                connection.execute(sql.SQL("set session authorization {}").format(name))
            yield Protocol(connection, self.schema)


@pytest.fixture
def installed(empty_dsn: str) -> Iterator[Installation]:
    schema = f"jobs_{uuid4().hex[:8]}"
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        migrate(connection, schema, with_roles=True)
    try:
        yield Installation(empty_dsn, schema)
    finally:
        with psycopg.connect(empty_dsn, autocommit=True) as connection:
            for role in ["owner", *ROLES]:
                name = sql.Identifier(f"{schema}_{role}")
                connection.execute(sql.SQL("drop owned by {} cascade").format(name))
                connection.execute(sql.SQL("drop role {}").format(name))


def allowed_on(role: str, table: str) -> set[str]:
    reads = {"SELECT"} if role != "producer" else set()
    match role:
        case "worker" | "operator" if table in JOBS | {"runs"}:
            return reads | {"INSERT", "UPDATE", "DELETE"}
        case "worker" | "operator" if table in {"workers", "run_days"}:
            return reads | {"INSERT", "UPDATE"}
        case "worker" if table == "permits":
            return reads | {"UPDATE", "DELETE"}
        case "operator" if table == "permits":
            return reads | {"INSERT", "UPDATE", "DELETE"}
        case "worker" | "operator" if table == "snapshots":
            return reads | {"INSERT"}
        case "worker" | "operator" if table == "duties":
            return reads | {"UPDATE"}
        case "operator" if table in REGISTRY:
            return reads | {"INSERT", "UPDATE", "DELETE"}
    return reads


def test_each_role_has_exactly_its_rights_on_each_table(installed: Installation) -> None:
    with installed.acting(None) as owner:
        rows = owner.rows(
            "select relname as name, relispartition as part from pg_class "
            "where relnamespace = %s::regnamespace and relkind in ('r', 'p', 'v')",
            installed.schema,
        )
        assert {row["name"] for row in rows if not row["part"]} == JOBS | REGISTRY | OTHER
        for row in rows:
            for role in ROLES:
                granted = {
                    verb
                    for verb in VERBS
                    if owner.value(
                        "select has_table_privilege(%s, format('%%I.%%I', %s::text, %s::text), %s)",
                        f"{installed.schema}_{role}",
                        installed.schema,
                        row["name"],
                        verb,
                    )
                }
                if row["part"]:
                    assert granted <= {"SELECT"}, (role, row["name"])
                    assert role != "producer" or not granted
                else:
                    assert granted == allowed_on(role, row["name"]), (role, row["name"])
        columns = owner.rows(
            "select column_name as name, privilege_type as verb "
            "from information_schema.column_privileges where table_schema = %s and grantee = %s",
            installed.schema,
            f"{installed.schema}_producer",
        )
        assert {(row["name"], row["verb"]) for row in columns} == {
            (name, "INSERT") for name in GIVEN_BY_A_PRODUCER
        }


def test_a_worker_reads_sequences_and_counts_claims_and_changes_no_other(installed: Installation) -> None:
    with installed.acting(None) as owner:
        for row in owner.rows(
            "select relname as name from pg_class where relnamespace = %s::regnamespace and relkind = 'S'",
            installed.schema,
        ):
            for role in ROLES:
                granted = {
                    verb
                    for verb in ("SELECT", "USAGE", "UPDATE")
                    if owner.value(
                        "select has_sequence_privilege(%s, format('%%I.%%I', %s::text, %s::text), %s)",
                        f"{installed.schema}_{role}",
                        installed.schema,
                        row["name"],
                        verb,
                    )
                }
                allowed = {"SELECT"} if role in ("worker", "operator") else set()
                assert granted == allowed | ({"USAGE"} if allowed and row["name"] == "claims" else set())


def test_each_role_may_call_exactly_its_functions(installed: Installation) -> None:
    with installed.acting(None) as owner:
        rows = owner.rows(
            "select oid::regprocedure::text as signature, proname as name, proowner::regrole::text as owner "
            "from pg_proc where pronamespace = %s::regnamespace",
            installed.schema,
        )
        every = {row["name"] for row in rows}
        assert {row["owner"] for row in rows} == {f"{installed.schema}_owner"}
        expected = {
            "producer": PRODUCING,
            "viewer": VIEWING,
            "worker": every - STEERING - NOBODY,
            "operator": every - NOBODY,
        }
        for role in ROLES:
            granted = {
                row["name"]
                for row in rows
                if owner.value(
                    "select has_function_privilege(%s, %s, 'execute')",
                    f"{installed.schema}_{role}",
                    row["signature"],
                )
            }
            assert granted == expected[role], role


def test_everything_belongs_to_an_owner_that_nobody_can_log_in_as(installed: Installation) -> None:
    with installed.acting(None) as owner:
        name = f"{installed.schema}_owner"
        login = owner.rows(
            "select rolcanlogin, rolsuper, rolcreaterole from pg_roles where rolname = %s", name
        )
        assert login == [{"rolcanlogin": False, "rolsuper": False, "rolcreaterole": False}]
        others = owner.rows(
            "select classid::regclass::text as kind, objid from pg_shdepend where deptype = 'o' and dbid = "
            "(select oid from pg_database where datname = current_database()) and refobjid <> %s::regrole",
            name,
        )
        assert others == []
        catalogs = owner.rows(
            "select relname from pg_class where relnamespace = %s::regnamespace and relowner <> %s::regrole "
            "union all select typname from pg_type "
            "where typnamespace = %s::regnamespace and typowner <> %s::regrole",
            installed.schema,
            name,
            installed.schema,
            name,
        )
        assert catalogs == []


def test_a_producer_enqueues_in_every_way_and_nothing_else(installed: Installation) -> None:
    # spec: D-19
    with installed.acting(None) as owner, installed.acting("producer") as producer:
        owner.rows("insert into {}.tasks (name, queue) values ('mail', 'letters')")
        [first] = producer.enqueue_many([{"task": "mail", "unique_key": "k"}])
        producer.rows("select * from {}.enqueue('mail', '{{\"to\": \"ada\"}}', unique_key => 'other')")
        producer.rows(
            "insert into {}.jobs "
            "(task, payload, queue, priority, run_at, expires_at, max_attempts, unique_key, tags) "
            "values ('mail', '{{}}', null, 1, now(), now() + interval '1 day', 3, 'third', array['t'])"
        )
        producer.rows("insert into {}.jobs (task) values ('mail')")
        producer.rows("select {}.enqueue('mail', '{{}}')")
        producer.rows("select {}.enqueue_one('mail', '{{}}', null, 1, 3)")
        assert owner.value("select count(*) from {}.jobs where queue = 'letters'") == 6

        denied: list[Any] = [
            "select id from {}.jobs",
            "select count(*) from {}.all_jobs",
            "select * from {}.history",
            "insert into {}.jobs (task) values ('mail') returning id",
            "insert into {}.jobs (task, state) values ('mail', 'ready')",
            "insert into {}.jobs (task, attempt) values ('mail', 5)",
            "insert into {}.jobs (task, keep) values ('mail', 5)",
            "insert into {}.jobs (task, held_key) values ('mail', 'k')",
            "insert into {}.jobs (task, unique_key) values ('mail', 'k') on conflict (task, held_key) "
            "where held_key is not null do update set payload = '{{}}'",
            "update {}.jobs set priority = -100",
            "delete from {}.jobs",
            "truncate {}.jobs",
            "select * from {}.tasks",
            "insert into {}.tasks (name, handler) values ('evil', 'drop')",
            "select * from {}.settings",
            "select nextval('{}.claims')",
            "select setval('{}.asleep_until', 99999999999999)",
            "select * from {}.cancel(array[1::bigint])",
            "select {}.claim('{{}}')",
            "select {}.enqueue_unique('{{}}')",
            "select {}.enqueue_jobs('[]', true)",
            "select {}.merge_value('sum', '1', '2')",
            "select {}.wake(array['mail'])",
            "select {}.purge()",
            "select {}.note('me', 'verb', '{{}}')",
            "create table {}.mine (a int)",
            "create or replace function {}.clock() returns timestamptz language sql stable return now()",
            "alter table {}.jobs disable trigger all",
            "drop schema {} cascade",
        ]
        for statement in denied:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                producer.rows(statement)
        assert owner.live(first["id"])["priority"] == 0


def test_worker_operator_and_viewer_have_what_a_whole_life_needs(installed: Installation) -> None:
    with (
        installed.acting("producer") as producer,
        installed.acting("worker") as worker,
        installed.acting("operator") as operator,
        installed.acting("viewer") as viewer,
    ):
        ids = [row["id"] for row in producer.enqueue_many({"task": "t"} for _ in range(6))]
        expiring = producer.enqueue(expires_in=0)
        later = producer.enqueue(delay=60)
        me = worker.register()
        worker.rows("select * from {}.sleep(60)")
        viewer.rows("select {}.await_results(60)")
        producer.enqueue("t", queue="other")
        claimed = worker.claim(me, start=2)
        assert [job["id"] for job in claimed.jobs] == ids
        assert set(worker.start(me, claimed.held).values()) == {"started"}
        assert operator.cancel(ids[1], ids[2]) == {ids[1]: "signalled", ids[2]: "signalled"}
        assert len(worker.heartbeat(me, claimed.held)["cancel"]) == 2
        error = {"code": "X", "message": "x"}
        answers = worker.settle(
            me,
            {"id": ids[0], "attempt": 1, "state": "completed"},
            {"id": ids[1], "attempt": 1, "state": "scheduled", "error": error, "delay": 1},
            {"id": ids[3], "attempt": 1, "state": "failed", "error": error},
        )
        assert set(answers.values()) == {"settled"}
        lost = worker.value(
            "select {}.report(%s)", json.dumps({"worker": me, "lines": [[ids[5], 1, 0, "info", "x"]]})
        )
        assert lost == {"lost": []}
        assert worker.value("""select {}.declare_tasks('[{{"name": "t", "queue": "default"}}]')""") == 1
        assert worker.release(me, [[ids[2], 1], [ids[4], 1]]) == {ids[2]: "cancelled", ids[4]: "released"}
        worker.rows("select {}.fence(%s, 1)", ids[5])
        worker.rows("update {}.workers set lease_until = 'epoch'")
        assert worker.reap(thorough=True) == {ids[5]: "ready"}
        assert worker.expire() == 1
        worker.rows("select {}.extend_history()")
        worker.rows("select {}.purge()")
        worker.rows("select {}.forget_workers()")
        other = worker.register()
        worker.heartbeat(
            other, state={"running": 0, "held": 0, "unwritten": 0, "jobs": 0}, duties=["expire", "purge"]
        )
        assert len(worker.rows("select {}.take_duties(%s, array['expire'])", other)) == 1
        done = json.dumps({"worker": other, "duty": "expire", "did": 1})
        assert worker.value("select {}.finish_duty(%s)", done)
        assert viewer.value("select count(*) from {}.snapshots") == 1
        assert viewer.value("select did from {}.duties where name = 'expire'") == 1
        worker.enqueue("child")

        assert operator.revive(ids[3]) == {ids[3]: "revived"}
        assert operator.run_now(later) == {later: "moved"}
        assert operator.cancel(ids[4]) == {ids[4]: "cancelled"}
        operator.rows("select {}.pause(queue => 'mail')")
        operator.rows("select {}.resume(queue => 'mail')")
        operator.rows("select {}.limit_running(1)")
        assert worker.value("""select {}.declare_limits('{{"queues": {{"mail": 2}}}}')""") == 1
        operator.rows("select {}.pause(everything => true, lasting => '1 microsecond')")
        held = worker.claim(other, "other", want=9, most={"t": 9}, conditions=["priority = 0"])
        assert len(held.jobs) == 1
        assert held.report["ended"] == [{"kind": "all", "name": ""}]
        assert set(worker.complete(other, held.jobs).values()) == {"settled"}
        operator.rows("select {}.limit_running(null)")
        operator.rows("select {}.retain('mail', completed => 1)")
        operator.rows("update {}.tasks set max_resets = 1 where name = 't'")
        assert operator.value("select {}.complete(%s)", ids[5]) == "completed"
        operator.rows("update {}.settings set value = '10000' where name = 'max_payload'")
        assert viewer.value("select count(*) from {}.audit") == 12
        assert viewer.state(expiring) == "expired"
        assert viewer.value("select queue from {}.measure_queues(array['mail'])") == "mail"
        assert len(viewer.rows("select * from {}.look(%s)", ids)) == len(ids)

        beyond: list[tuple[Protocol, Any]] = [
            (worker, "select * from {}.cancel(array[1::bigint])"),
            (worker, "select {}.complete(1)"),
            (viewer, "select {}.declare_tasks('[]')"),
            (operator, "delete from {}.audit"),
            (viewer, "update {}.jobs set priority = 0"),
        ]
        for who, statement in beyond:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                who.rows(statement)
        for table in ("tasks", "queues", "pauses", "limits", "settings"):
            text: Any = f"delete from {{}}.{table}"
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                worker.rows(text)


def test_worker_and_operator_have_what_a_family_needs(installed: Installation) -> None:
    with installed.acting("worker") as worker, installed.acting("operator") as operator:
        number = worker.register()
        parents = [worker.enqueue(), worker.enqueue()]
        children: list[dict[str, object]] = [
            {"task": "greet", "child": True},
            {"task": "greet", "child": True, "unique_key": "k"},
        ]
        for job in worker.claim(number, want=2).jobs:
            told = {"id": job["id"], "attempt": job["attempt"], "state": "waiting", "jobs": children}
            assert worker.settle(number, told) == {job["id"]: "settled"}
        assert operator.cancel(parents[1]) == {parents[1]: "cancelled"}
        held = worker.claim(number, want=4).jobs
        assert [job["parent"] for job in held] == [parents[0]] * 2
        worker.complete(number, held)
        worker.heartbeat(number)
        assert list(map(worker.state, parents)) == ["completed", "cancelled"]


def test_a_gateway_needs_no_more_than_the_rights_of_a_worker(installed: Installation) -> None:
    worker = make_conninfo(installed.dsn, options=f"-c role={installed.schema}_worker")
    with App(worker, schema=installed.schema, max_connections=1) as app, installed.acting(None) as owner:

        @app.task
        def resize(path: str) -> None: ...

        job = owner.enqueue("resize", {"path": "a"})
        with Remote(app) as remote:
            far = remote.register()
            taken = far.take()
            index = far.tell(taken, "logs", message="begun").said["index"]
            path = f"/jobs/{job}/logs/{index}"
            assert remote.post(path, taken["token"], method="PUT", message="done").status == 204
            assert far.tell(taken, "progress", fraction=1).status == 204
            assert far.ask("heartbeat", jobs=[taken["token"]]).status == 200
            assert far.tell(taken, "release").said["state"] == "ready"
            silent = remote.register().id
            owner.rows("update {}.workers set lease_until = '2020-01-01' where id = %s", silent)
            assert far.tell(far.take(), "complete").said["state"] == "completed"
            assert remote.post(f"/workers/{far.id}", far.token, method="DELETE").status == 204
        gone = [
            row["id"] for row in owner.rows("select id from {}.workers where gone_at is not null order by id")
        ]
        assert gone == [far.id, silent], "one has left, the other was reaped"


def test_a_stranger_in_the_same_database_may_not_even_look(installed: Installation) -> None:
    with installed.acting(None) as owner:
        owner.connection.execute(f"create role {installed.schema}_stranger".encode())
        try:
            with installed.acting("stranger") as stranger:
                statements: list[Any] = [
                    "select {}.clock()",
                    "select * from {}.jobs",
                    "select {}.enqueue('t')",
                ]
                for statement in statements:
                    with pytest.raises(psycopg.errors.InsufficientPrivilege):
                        stranger.rows(statement)
        finally:
            owner.connection.execute(f"drop role {installed.schema}_stranger".encode())


OFFENDERS = """
select routine.oid::regprocedure::text as name
  from pg_proc as routine
 where routine.pronamespace = %s::regnamespace and (
       routine.prosecdef and not coalesce(
         exists (select from unnest(routine.proconfig) as setting where setting = %s), false)
    or routine.proacl is null
    or exists (select from aclexplode(routine.proacl) as granted where granted.grantee = 0))
"""


def test_whatever_runs_with_the_owners_rights_pins_its_search_path_and_nothing_is_public(
    installed: Installation, connection: psycopg.Connection[dict[str, Any]]
) -> None:
    with installed.acting(None) as owner:
        pinned = f"search_path={installed.schema}, pg_temp"
        assert owner.rows(OFFENDERS, installed.schema, pinned) == []
        assert owner.value(
            "select count(*) from pg_proc where prosecdef and pronamespace = %s::regnamespace",
            installed.schema,
        )
    plain = Protocol(connection)  # installed without roles
    assert plain.rows(OFFENDERS, "shiftwork", "search_path=shiftwork, pg_temp") == []


SHADOWED_FUNCTIONS = [
    ("clock()", "timestamptz", "pg_catalog.now()"),
    ("now()", "timestamptz", "pg_catalog.now()"),
    ("statement_timestamp()", "timestamptz", "pg_catalog.now()"),
    ("jsonb_typeof(a jsonb)", "text", "pg_catalog.jsonb_typeof(a)"),
    ("jsonb_array_elements(a jsonb)", "setof jsonb", "pg_catalog.jsonb_array_elements(a)"),
    ("jsonb_array_length(a jsonb)", "int", "pg_catalog.jsonb_array_length(a)"),
    ("jsonb_build_array(variadic a jsonb[])", "jsonb", "pg_catalog.to_jsonb(a)"),
    ("hashtextextended(a text, b bigint)", "bigint", "0::bigint"),
    ("pg_advisory_xact_lock(a bigint)", "void", "null::void"),
    ("pg_try_advisory_xact_lock(a bigint)", "boolean", "true"),
    ("pg_notify(a text, b text)", "void", "null::void"),
    ("pg_notification_queue_usage()", "float8", "0::float8"),
    ("pg_sequence_last_value(a regclass)", "bigint", "1::bigint"),
    ("setval(a regclass, b bigint)", "bigint", "1::bigint"),
    ("octet_length(a text)", "int", "1"),
    ("pg_column_size(a anyelement)", "int", "99999"),
    ("cardinality(a anyarray)", "int", "1"),
    ("format(a text, variadic b text[])", "text", "''"),
    ("check_payload(a text, b jsonb)", "void", "null::void"),
    ("enqueue_unique(a jsonb, out id bigint, out outcome text)", "record", "1::bigint, 'x'::text"),
    ("merge_payload(a jsonb, b jsonb, c jsonb, d boolean)", "jsonb", "b"),
    ("wake(a text[])", "void", "null::void"),
]
SHADOWED_OPERATORS = [
    (operator, kind, "boolean")
    for operator in ("=", "<>", "<", ">", "<=", ">=")
    for kind in ("text", "bigint", "int", "timestamptz", "jsonb", "date", "float8")
] + [("||", "text", "text"), ("||", "jsonb", "jsonb"), ("+", "bigint", "bigint"), ("+", "int", "int")]
SHADOWED_TABLES = ["jobs", "tasks", "settings", "history", "queues", "signals", "workers", "audit", "pauses"]


def set_traps(attacker: Protocol) -> None:
    """In a schema of the attacker's and among its temporary tables: whatever ours might be confused with."""
    run = attacker.connection.execute
    run("create table evil.log (who text default current_user, what text)")
    run("grant all on evil.log to public")
    run("grant usage on schema evil to public")
    run(
        "create function evil.spy(what text) returns boolean language plpgsql as "
        "$$ begin insert into evil.log (what) values (what); return true; end $$"
    )
    for signature, returns, body in SHADOWED_FUNCTIONS:
        name = signature.partition("(")[0]
        run(
            f"create function evil.{signature} returns {returns} language sql as "
            f"$$ select evil.spy('{name}'); select {body} $$".encode()
        )
    for number, (operator, kind, returns) in enumerate(SHADOWED_OPERATORS):
        run(
            f"create function evil.operator_{number}(a {kind}, b {kind}) returns {returns} language sql as "
            f"$$ select evil.spy('operator'); select a operator(pg_catalog.{operator}) b $$".encode()
        )
        run(
            f"create operator evil.{operator} (leftarg = {kind}, rightarg = {kind}, "
            f"function = evil.operator_{number})".encode()
        )
    run("create domain evil.job_state as text")
    for table in SHADOWED_TABLES:
        run(f"create temp table {table} (id bigint, name text, value jsonb, task text)".encode())
        run(f"grant all on pg_temp.{table} to public".encode())


@pytest.mark.parametrize("role", ["producer", "worker", "operator"])
def test_nothing_that_shadows_ours_is_ever_run_with_the_owners_rights(
    installed: Installation, role: str
) -> None:
    attacker_name = f"{installed.schema}_{role}"
    with installed.acting(None) as owner:
        owner.connection.execute(f"create schema evil authorization {attacker_name}".encode())
        owner.rows("insert into {}.tasks (name, unique_action, merge) values ('t', 'merge', '\"union\"')")
        with installed.acting(role) as attacker:
            set_traps(attacker)
            attacker.connection.execute(
                f"set search_path = pg_temp, evil, {installed.schema}, pg_catalog".encode()
            )
            window = {"unique_key": "w", "unique_scope": "window", "unique_action": "refuse"}
            wishes: list[Row] = [
                {"task": "t", "payload": {"a": [1]}},
                {"task": "t", "payload": {"a": [1]}, "unique_key": "k"},
                {"task": "t", "payload": {"a": [2]}, "unique_key": "k"},
                {"task": "t", "payload": {"a": "x" * 10_000}, **window},
            ]
            for wish in wishes:
                attacker.rows("select * from {}.enqueue_many(%s::jsonb)", json.dumps([wish]))
            attacker.rows("select * from {}.enqueue('t', '{{}}'::jsonb, unique_key => 'k')")
            attacker.rows("select {}.enqueue_one('t', %s, 'q', 1, 1)", json.dumps({"a": "x" * 10_000}))
            attacker.rows("insert into {}.jobs (task, unique_key) values ('t', 'plain')")

            # Every function that it may call, with nothing useful: what it does first is done.
            mine = owner.rows(
                "select oid::regprocedure::text as signature, proname as name, "
                "coalesce((select string_agg('null::' || format_type(kind, null), ', ' order by place) "
                "from unnest(proargtypes) with ordinality as one (kind, place)), '') as arguments "
                "from pg_proc "
                "where pronamespace = %s::regnamespace and has_function_privilege(%s, oid, 'execute')",
                installed.schema,
                attacker_name,
            )
            assert len(mine) >= len(PRODUCING)
            for function in mine:
                call = f"select * from {installed.schema}.{function['name']}({function['arguments']})"
                with suppress(psycopg.Error):
                    attacker.connection.execute(call.encode())
            if role != "producer":
                attacker.rows("select * from {}.purge()")
                attacker.rows("select * from {}.extend_history()")
                attacker.rows("select * from {}.sleep(1)")
            caught: Any = "select what from evil.log where who = %s"
            assert owner.rows(caught, f"{installed.schema}_owner") == []

            # The traps do work: a function that forgets to pin its path falls into them.
            owner.connection.execute(
                "create function public.careless() returns timestamptz language plpgsql security definer as "
                "$$ begin return now(); end $$; "
                f"alter function public.careless() owner to {installed.schema}_owner; "
                f"grant usage on schema public to {installed.schema}_owner".encode()
            )
            attacker.rows("select public.careless()")
            assert owner.rows(caught, f"{installed.schema}_owner") == [{"what": "now"}]
        assert owner.value("select count(*) from {}.jobs where task = 't'") == 5
        assert owner.value("select payload from {}.jobs where unique_key = 'k'") == {"a": [1, 2]}


def test_an_operator_on_our_types_is_never_run_by_whoever_calls_a_verb(installed: Installation) -> None:
    """An exact match for a type of ours would win against everything in pg_catalog, if the caller's path counted."""
    with installed.acting(None) as owner:
        owner.rows("create table public.loot (who text)")
        owner.rows("grant insert on public.loot to public")
        owner.rows("grant create, usage on schema public to public")
        owner.enqueue("t")
    with installed.acting("producer") as producer:
        for ours, name in (
            ("task_name", "text"),
            ("counter", "int"),
            ("job_state", f'"{installed.schema}".job_state'),
        ):
            producer.connection.execute(
                f"""create function public.evil(a "{installed.schema}".{ours}, b {name}) returns boolean language plpgsql
                    as $$ begin insert into public.loot values (current_user); return true; end $$;
                    create operator public.= (leftarg = "{installed.schema}".{ours}, rightarg = {name}, function = public.evil)
                """.encode()
            )
    for role in ("worker", "operator", None):
        with installed.acting(role) as somebody:
            worker = somebody.register()
            claimed = somebody.claim(worker, tasks=["t"])
            somebody.heartbeat(worker, claimed.held)
            somebody.release(worker, claimed.held)
            somebody.reap()
            somebody.expire()
    with installed.acting(None) as owner:
        assert owner.rows("select who from public.loot") == []


def test_a_producer_learns_nothing_of_what_others_sent(installed: Installation) -> None:
    with installed.acting(None) as owner:
        owner.enqueue("t", {"password": "hunter2"}, unique_key="k")
    with installed.acting("producer") as producer:
        for operator in ("range:int4range", "multirange:datemultirange", "sum", "min"):
            with pytest.raises(psycopg.Error) as refused:
                producer.enqueue(
                    "t", {"password": 1}, unique_key="k", unique_action="merge", merge={"password": operator}
                )
            assert refused.value.sqlstate == "SW001"
            assert "hunter2" not in str(refused.value) + (refused.value.diag.context or "")
