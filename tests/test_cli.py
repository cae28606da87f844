"""The `shiftwork` command, as it is typed."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import psycopg
import pytest
from click.testing import CliRunner, Result
from psycopg import sql
from psycopg.conninfo import make_conninfo

from shiftwork import cli, embedded
from shiftwork.migrate import PROTOCOL
from shiftwork.printable import clean
from tests.harness import Protocol

SHIFTWORK = [sys.executable, "-c", "from shiftwork.cli import main; main(prog_name='shiftwork')"]
HOSTILE = "\x1b[31mred\x1b[0m\x07 \u202eright\u2066 line\nbreak \x9b2J \x7f"
BAD = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def shiftwork(
    *arguments: str, typed: str = "", environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command as a process of its own."""
    inherited = {name: value for name, value in os.environ.items() if name != "DATABASE_URL"}
    found = subprocess.run(
        [*SHIFTWORK, *arguments],
        input=typed,
        capture_output=True,
        text=True,
        check=False,
        env={**inherited, **(environment or {})},
    )
    assert "Traceback" not in found.stderr, found.stderr
    return found


def told(*arguments: str, dsn: str, typed: str = "") -> Result:
    """Run the command in this process."""
    result = CliRunner().invoke(cli.main, [*arguments, "--dsn", dsn], input=typed)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def answer(*arguments: str, dsn: str) -> Any:
    """What it says with --json."""
    return json.loads(told(*arguments, "--json", dsn=dsn).stdout)


# The command itself.


def test_help_lists_every_command_and_imports_none_of_them() -> None:
    program = (
        "import sys\nfrom shiftwork.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "loaded = {'psycopg', 'rich', 'msgspec', 'shiftwork.embedded', 'shiftwork.demo'} & set(sys.modules)\n"
        "print('loaded:', sorted(loaded))"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert all(f"\n  {name} " in said for name in cli.COMMANDS)
    assert "Exit codes:" in said
    assert said.endswith("loaded: []\n")


def every_command() -> list[list[str]]:
    names = [[name] for name in cli.COMMANDS]
    groups = {
        "db": ["start", "stop", "status", "url", "psql", "reset"],
        "jobs": ["list", "show", "counts", "enqueue", "cancel", "revive", "run-now"],
        "queues": ["list", "pause", "resume", "retain"],
        "tasks": ["list", "pause", "resume"],
    }
    return [*names, *([group, name] for group, members in groups.items() for name in members)]


@pytest.mark.parametrize("command", every_command(), ids=" ".join)
def test_every_command_explains_itself(command: list[str]) -> None:
    result = CliRunner().invoke(cli.main, [*command, "-h"])
    assert result.exit_code == 0
    assert result.stdout.startswith(f"Usage: main {' '.join(command)}")


WITHOUT_JSON = {
    *("db psql", "db reset", "db start", "db stop", "db url"),
    *("demo", "gateway", "worker"),
    *("sql enqueue-function", "table install"),
}
"""What runs until it is stopped, starts or stops a server, or writes SQL."""


def commands(group: click.Group, *above: str) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, *above, name)
        elif command is not None:
            yield " ".join((*above, name)), command


def test_every_command_that_lists_or_answers_does_so_for_programs_too() -> None:
    every = dict(commands(cli.main))
    assert {"migrate", "queues retain", "tasks limit", "workers pause", "resume"} <= every.keys()
    silent = {name for name, one in every.items() if not any("--json" in it.opts for it in one.params)}
    assert silent == WITHOUT_JSON


def test_version_says_which_one_it_is() -> None:
    assert re.fullmatch(r"shiftwork \d+\.\d+\S*\n", shiftwork("--version").stdout)


def test_an_unknown_command_is_wrong_usage() -> None:
    said = shiftwork("jbos")
    assert said.returncode == 2
    assert "jbos" in said.stderr


# migrate


def test_migrate_says_what_it_did_and_the_second_time_that_there_was_nothing_to_do(empty_dsn: str) -> None:
    plan = told("migrate", "--plan", dsn=empty_dsn)
    assert plan.exit_code == 0
    lines = plan.stdout.splitlines()
    assert (lines[0], lines[-1]) == ("• apply 0001_tables", "• create the functions")
    missing = told("migrate", "--check", dsn=empty_dsn)
    assert missing.exit_code == 1
    assert "shiftwork migrate" in missing.stderr

    done = told("migrate", dsn=empty_dsn)
    assert done.exit_code == 0
    assert done.stdout.splitlines()[: len(lines)] == [
        line.replace("apply", "applied").replace("create", "created") for line in lines
    ]
    assert told("migrate", dsn=empty_dsn).stdout.startswith("Nothing to do")
    assert told("migrate", "--check", dsn=empty_dsn).exit_code == 0


def test_migrate_tells_programs_what_is_missing_and_what_was_done(empty_dsn: str) -> None:
    plan = answer("migrate", "--plan", dsn=empty_dsn)
    assert (plan["steps"][0], plan["steps"][-1]) == ("apply 0001_tables", "create the functions")
    assert (plan["installed"], plan["protocol"]) == (0, PROTOCOL)
    checked = told("migrate", "--check", "--json", dsn=empty_dsn)
    assert (checked.exit_code, json.loads(checked.stdout)) == (1, plan)
    assert answer("migrate", "--plan", "--roles", dsn=empty_dsn)["steps"] == [
        *plan["steps"],
        "grant the roles",
    ]

    done = answer("migrate", dsn=empty_dsn)
    assert (len(done["steps"]), done["steps"][0]) == (len(plan["steps"]), "applied 0001_tables")
    nothing = {"steps": [], "installed": PROTOCOL, "protocol": PROTOCOL}
    for more in ([], ["--plan"], ["--check"]):
        again = told("migrate", *more, "--json", dsn=empty_dsn)
        assert (again.exit_code, json.loads(again.stdout)) == (0, nothing)
    assert told("migrate", "--sql", "--json", dsn=empty_dsn).exit_code == 2


def test_two_schemas_live_in_one_database(empty_dsn: str) -> None:
    for schema in ("shiftwork", "other_jobs"):
        assert told("migrate", "--schema", schema, dsn=empty_dsn).exit_code == 0
    sent = answer("jobs", "enqueue", "greet", "--schema", "other_jobs", dsn=empty_dsn)
    assert answer("jobs", "list", dsn=empty_dsn) == []
    [job] = answer("jobs", "list", "--schema", "other_jobs", dsn=empty_dsn)
    assert job["id"] == sent["id"]
    assert [row["name"] for row in answer("queues", "list", "--schema", "other_jobs", dsn=empty_dsn)] == [
        "*",
        "default",
    ]


def test_the_script_of_migrate_is_all_that_psql_needs(empty_dsn: str) -> None:
    script = shiftwork("migrate", "--sql", "--schema", "by_hand")
    assert script.returncode == 0
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        connection.execute(script.stdout.encode())
    assert told("migrate", "--check", "--schema", "by_hand", dsn=empty_dsn).exit_code == 0


def test_with_roles_the_owner_owns_history_too_and_jobs_can_still_be_listed(empty_dsn: str) -> None:
    schema = f"roles_{os.getpid()}"  # roles belong to the whole server, so their names must be ours
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        try:
            done = told("migrate", "--roles", "--schema", schema, dsn=empty_dsn)
            assert "granted the roles" in done.stdout, done.output
            assert told("migrate", "--roles", "--schema", schema, dsn=empty_dsn).exit_code == 0
            assert told("jobs", "list", "--schema", schema, dsn=empty_dsn).exit_code == 0
            assert told("purge", "--schema", schema, dsn=empty_dsn).exit_code == 0
            owners = connection.execute(
                "select distinct relowner::regrole::text from pg_class where relnamespace = %s::regnamespace",
                (schema,),
            ).fetchall()
            assert owners == [(f"{schema}_owner",)]
        finally:
            for role in ("owner", "producer", "worker", "operator", "viewer"):
                name = sql.Identifier(f"{schema}_{role}")
                connection.execute(sql.SQL("drop owned by {} cascade").format(name))
                connection.execute(sql.SQL("drop role {}").format(name))


@pytest.mark.parametrize(
    "name", ['x"; drop schema public', "pg_catalog", "Shiftwork", "select", "", "a" * 60, "ж", "x\x1b[2J"]
)
def test_a_hostile_schema_name_is_refused_as_wrong_usage(name: str) -> None:
    said = shiftwork("migrate", "--sql", "--schema", name)
    assert said.returncode == 2
    assert "cannot be a schema name" in said.stderr
    assert not BAD.search(said.stderr)
    assert said.stdout == ""


def test_a_database_that_is_not_there_is_told_with_what_to_do(server: str) -> None:
    said = shiftwork("migrate", "--dsn", make_conninfo(server, dbname="nothing_here"))
    assert said.returncode == 1
    assert "nothing_here" in said.stderr
    assert "createdb" in said.stderr


def test_a_refused_connection_is_told_without_the_password() -> None:
    for dsn in ("postgresql://ada:hunter2@127.0.0.1:1/db", "host=127.0.0.1 port=1 password=hunter2"):
        for command in (("migrate",), ("jobs", "list"), ("queues", "pause", "mail"), ("purge",)):
            said = shiftwork(*command, "--dsn", dsn)
            assert said.returncode == 1
            assert "cannot connect" in said.stderr
            assert "Start the server" in said.stderr
            assert "hunter2" not in said.stderr + said.stdout


def test_a_dsn_that_is_none_is_told_without_the_password() -> None:
    said = shiftwork("jobs", "list", "--dsn", "postgresql://ada:hunter2@host/db?no_such_thing=1")
    assert said.returncode == 1
    assert "not a connection string" in said.stderr
    assert "hunter2" not in said.stderr


@pytest.mark.parametrize(
    "command",
    [
        ["jobs", "list", "--task", "\udcff"],
        ["jobs", "cancel", "1", "--reason", "\udcff"],
        ["queues", "pause", "q", "--reason", "\udcff"],
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_bytes_that_are_no_text_are_wrong_usage(dsn: str, command: list[str]) -> None:
    said = shiftwork(*command, "--dsn", dsn)
    assert said.returncode == 2, said.stderr
    assert "cannot be sent" in said.stderr


@pytest.mark.parametrize("dsn", ["\udcff", "host=\udcff", "host=a..b"])
def test_a_dsn_that_names_no_host_is_told(dsn: str) -> None:
    for command in (["migrate"], ["jobs", "list"]):
        said = shiftwork(*command, "--dsn", dsn)
        assert said.returncode == 1, said.stderr


def test_missing_rights_are_told(empty_dsn: str) -> None:
    role = f"nobody_{os.getpid()}_{os.urandom(3).hex()}"
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        connection.execute(sql.SQL("create role {} login").format(sql.Identifier(role)))
        try:
            poor = make_conninfo(empty_dsn, options=f"-c role={role}")
            refused = told("migrate", dsn=poor)
            assert refused.exit_code == 1
            assert "permission denied" in refused.stderr
            assert "role that may" in refused.stderr
            assert told("migrate", dsn=empty_dsn).exit_code == 0
            assert told("jobs", "list", dsn=poor).exit_code == 1
        finally:
            connection.execute(sql.SQL("drop role {}").format(sql.Identifier(role)))


def test_a_lock_that_somebody_holds_is_told_as_such(
    dsn: str, monkeypatch: pytest.MonkeyPatch, connection: psycopg.Connection[Any]
) -> None:
    monkeypatch.setattr("shiftwork.migrate.LOCK_TIMEOUT", "10ms")
    connection.execute("update shiftwork.settings set value = '{}' where name = 'protocol'")
    with psycopg.connect(dsn) as other:
        other.execute("lock table shiftwork.jobs")
        said = told("migrate", dsn=dsn)
    assert said.exit_code == 1
    assert "lock timeout" in said.stderr
    assert "run it again" in said.stderr
    assert told("migrate", dsn=dsn).exit_code == 0


def test_a_newer_schema_is_left_to_the_newer_release(dsn: str, protocol: Protocol) -> None:
    newer = json.dumps({"version": 999})
    protocol.rows("update {}.settings set value = value || %s::jsonb where name = 'protocol'", newer)
    said = told("migrate", dsn=dsn)
    assert said.exit_code == 1
    assert "newer release" in said.stderr
    checked = told("migrate", "--check", dsn=dsn)
    assert checked.exit_code == 0
    assert "newer" in checked.stdout


def test_a_database_without_the_schema_says_what_to_run(empty_dsn: str) -> None:
    for command in (("jobs", "list"), ("jobs", "enqueue", "greet"), ("queues", "list"), ("purge",)):
        said = told(*command, dsn=empty_dsn)
        assert said.exit_code == 1
        assert "shiftwork migrate" in said.stderr


# jobs


def test_a_job_is_enqueued_by_hand_and_its_arguments_arrive_as_they_are(dsn: str, protocol: Protocol) -> None:
    # spec: SH-35
    said = told(
        *(
            "jobs",
            "enqueue",
            "send",
            '{"to": "Ada", "big": 123456789012345678901234567890}',
            "--queue",
            "mail",
        ),
        *("--priority", "-3", "--delay", "1h30m", "--max-attempts", "7", "--tag", "a", "--tag", "b"),
        dsn=dsn,
    )
    assert said.exit_code == 0
    job = protocol.job(int(said.stdout.split()[1]))
    assert (job["task"], job["queue"], job["priority"], job["max_attempts"]) == ("send", "mail", -3, 7)
    assert job["payload"] == {"to": "Ada", "big": 123456789012345678901234567890}
    assert (job["run_at"] - job["created_at"]).total_seconds() == 5400
    assert job["tags"] == ["a", "b"]
    assert protocol.job(answer("jobs", "enqueue", "plain", dsn=dsn)["id"])["payload"] == {}
    piped = told("jobs", "enqueue", "piped", "-", dsn=dsn, typed='{"n": 1}\n')
    assert protocol.job(int(piped.stdout.split()[1]))["payload"] == {"n": 1}


def test_the_same_unique_key_by_hand_says_that_the_job_exists(dsn: str) -> None:
    first = answer("jobs", "enqueue", "send", "--unique", "k", dsn=dsn)
    second = answer("jobs", "enqueue", "send", "--unique", "k", dsn=dsn)
    assert first["outcome"] == "created"
    assert second == {"id": first["id"], "outcome": "existing"}
    refused = told("jobs", "enqueue", "send", '{"a": 1}', "--unique", "k", "--action", "refuse", dsn=dsn)
    assert refused.exit_code == 1
    assert "different" in refused.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["[1]"],
        ["nonsense"],
        ['{"a": NaN}'],
        ["[" * 100_000],
        ["{}", "--delay", "5x"],
        ["{}", "--delay", "99999999999999d"],
        ["{}", "--priority", "99999999999"],
        ["{}", "--queue", ""],
        ["{}", "--queue", "x\x1b"],
        ["{}", "--queue", "q" * 101],
        ["{}", "--unique", "k" * 300],
        ["{}", "--tag", ""],
        ["{}", "--scope", "pending", "--window", "5m", "--unique", "k"],
        ["{}", "--unique", "k", "--scope", "unfinished", "--action", "merge"],
        ["{}", "--unique", "k", "--window", "0s"],
        ["{}", "--action", "replace"],
        ["{}", "--scope", "unfinished"],
        ["{}", "--window", "5m"],
    ],
    ids=lambda given: " ".join(given)[:40],
)
def test_what_cannot_be_enqueued_is_wrong_usage_and_enqueues_nothing(dsn: str, arguments: list[str]) -> None:
    said = told("jobs", "enqueue", "send", *arguments, dsn=dsn)
    assert said.exit_code == 2, said.output
    assert not BAD.search(said.stderr)
    assert answer("jobs", "list", dsn=dsn) == []


@pytest.mark.parametrize("value", ["\\u0000", "\\ud800"])
def test_what_the_database_cannot_store_is_wrong_usage_and_its_place_is_named(dsn: str, value: str) -> None:
    said = told("jobs", "enqueue", "send", f'{{"a": ["{value}"]}}', dsn=dsn)
    assert said.exit_code == 2
    assert "a[0]" in said.stderr
    said = told("jobs", "enqueue", "send", f'{{"{value}": 1}}', dsn=dsn)
    assert said.exit_code == 2
    assert "in a key" in said.stderr


def test_a_missing_standard_input_and_a_full_disk_are_told(dsn: str) -> None:
    command = " ".join(map(shlex.quote, SHIFTWORK))
    for rest, code in (
        ("jobs enqueue send - --dsn {} <&-", 2),
        ("jobs list --json --dsn {} >/dev/full", 1),
        ("db status --data /nowhere --json >/dev/full", 1),
    ):
        line = f"{command} {rest.format(shlex.quote(dsn))}"
        said = subprocess.run(["/bin/sh", "-c", line], capture_output=True, text=True, check=False)
        assert said.returncode == code, said.stderr
        assert said.stderr.count("Error") == 1
        assert "Traceback" not in said.stderr


def test_jobs_are_listed_newest_first_and_filtered(dsn: str, protocol: Protocol) -> None:
    # spec: SH-32
    one, two, three = (
        protocol.enqueue("a"),
        protocol.enqueue("b", queue="mail"),
        protocol.enqueue("a", delay=60),
    )

    def ids(*options: str) -> list[int]:
        return [job["id"] for job in answer("jobs", "list", *options, dsn=dsn)]

    assert ids() == [three, two, one]
    assert ids("--task", "a") == [three, one]
    assert ids("--queue", "mail") == [two]
    assert ids("--state", "scheduled") == [three]
    assert ids("--state", "scheduled", "--state", "ready", "--limit", "2") == [three, two]
    assert ids("--before", str(two)) == [one]
    assert ids("--task", "'; drop table x") == []
    assert told("jobs", "list", "--task", "none", dsn=dsn).stdout.startswith(
        "No such jobs in schema shiftwork"
    )
    counts = answer("jobs", "counts", dsn=dsn)
    assert {state: number for state, number in counts.items() if number} == {"ready": 2, "scheduled": 1}
    assert list(counts)[-1] == "expired"
    assert answer("jobs", "counts", "--task", "b", dsn=dsn)["ready"] == 1


def test_show_tells_all_of_a_job_with_its_attempts(dsn: str, protocol: Protocol) -> None:
    job = protocol.enqueue("send", {"to": "Ada"}, tags=["x"])
    worker = protocol.register()
    [held] = protocol.claim(worker).jobs
    error = {"code": "OOPS", "message": "it broke", "traceback": "line one\nline two"}
    protocol.settle(
        worker, {"id": job, "attempt": held["attempt"], "state": "scheduled", "delay": 60, "error": error}
    )
    said = told("jobs", "show", str(job), dsn=dsn).stdout
    for part in (
        "send",
        '{"to": "Ada"}',
        "scheduled",
        "1/5",
        "OOPS: it broke",
        "line two",
        "failed",
        f" {worker} ",
    ):
        assert part in said
    known = answer("jobs", "show", str(job), dsn=dsn)
    assert known["error"] == error
    assert known["tags"] == ["x"]
    [attempt] = known["attempts"]
    assert (attempt["attempt"], attempt["outcome"], attempt["code"]) == (1, "failed", "OOPS")


def test_a_job_that_is_not_there_is_not_so(dsn: str) -> None:
    said = told("jobs", "show", "4711", dsn=dsn)
    assert said.exit_code == 3
    assert "4711" in said.stderr
    assert told("jobs", "show", "none", dsn=dsn).exit_code == 2
    assert told("jobs", "show", str(2**63), dsn=dsn).exit_code == 2


def test_cancel_revive_and_run_now_answer_for_each_job(dsn: str, protocol: Protocol) -> None:
    # spec: SH-33, SH-34
    later, held = protocol.enqueue(delay=3600), protocol.enqueue()
    protocol.claim(protocol.register())

    cancelled = told("jobs", "cancel", str(later), str(held), "999", "--reason", "no more", dsn=dsn)
    assert cancelled.exit_code == 3  # one of them is unknown
    assert cancelled.stdout.splitlines() == [
        f"job {later} cancelled",
        f"job {held} signalled: it is running, and its handler will be told",
        "job 999 unknown: there is no such job",
    ]
    assert protocol.job(later)["error"]["message"] == "no more"
    assert told("jobs", "cancel", str(held), dsn=dsn).exit_code == 0
    assert told("jobs", "cancel", str(later), dsn=dsn).exit_code == 3  # finished already

    assert answer("jobs", "revive", str(later), dsn=dsn) == [{"id": later, "answer": "revived"}]
    assert protocol.state(later) == "ready"
    assert told("jobs", "revive", str(later), dsn=dsn).exit_code == 3  # it is alive

    waiting = protocol.enqueue(delay=3600)
    assert told("jobs", "run-now", str(waiting), str(held), "--strict", dsn=dsn).exit_code == 2
    assert protocol.state(waiting) == "scheduled"
    assert answer("jobs", "run-now", str(waiting), dsn=dsn) == [{"id": waiting, "answer": "moved"}]
    assert protocol.state(waiting) == "ready"


def test_what_a_handler_says_is_shown_and_followed_to_its_end(dsn: str, protocol: Protocol) -> None:
    job, worker = protocol.enqueue(), protocol.register()
    protocol.claim(worker)

    def say(*messages: str) -> None:
        lines = [[job, 1, 0, "warning", message] for message in messages]
        said = {"worker": worker, "lines": lines, "progress": [[job, 1, 0.42, HOSTILE]]}
        protocol.rows("select {}.report(%s)", json.dumps(said))

    assert told("jobs", "logs", str(job), dsn=dsn).stdout == ""
    say(*(f"line {n}" for n in range(12)), HOSTILE)
    shown = told("jobs", "show", str(job), dsn=dsn).stdout
    assert "progress" in shown
    assert "42% " in shown
    assert "line 11" in shown
    assert "line 2\n" not in shown
    assert not BAD.search(shown)
    known = answer("jobs", "show", str(job), dsn=dsn)
    assert known["progress"]["message"] == HOSTILE
    assert [line["message"] for line in known["logs"]][-2:] == ["line 11", HOSTILE]
    listed = told("jobs", "logs", str(job), dsn=dsn).stdout
    assert len(listed.splitlines()) == 13
    assert not BAD.search(listed)
    documents = [
        json.loads(line) for line in told("jobs", "logs", str(job), "--json", dsn=dsn).stdout.splitlines()
    ]
    assert documents[0]["level"] == "warning"
    assert documents[-1]["message"] == HOSTILE

    follower = subprocess.Popen(
        [*SHIFTWORK, "jobs", "logs", str(job), "--follow", "--dsn", dsn], stdout=subprocess.PIPE, text=True
    )
    assert follower.stdout is not None
    for _ in range(13):
        assert follower.stdout.readline()
    say("and more")
    assert follower.stdout.readline().endswith("and more\n")
    protocol.complete(worker, [{"id": job, "attempt": 1}])
    assert follower.communicate(timeout=60)[0] == ""
    assert follower.returncode == 0
    assert told("jobs", "logs", "4711", dsn=dsn).exit_code == 3


def test_a_job_is_completed_by_hand(dsn: str, protocol: Protocol) -> None:
    # spec: QU-25
    one, two = protocol.enqueue(delay=60), protocol.enqueue()
    assert (
        told("jobs", "complete", str(one), "--result", '{"n": 1}', dsn=dsn).stdout == f"job {one} completed\n"
    )
    assert protocol.job(one)["result"] == {"n": 1}
    assert answer("jobs", "complete", str(two), dsn=dsn) == [{"id": two, "answer": "completed"}]
    again = told("jobs", "complete", str(one), dsn=dsn)
    assert (again.exit_code, again.stdout) == (3, f"job {one} finished already\n")
    assert told("jobs", "complete", str(one), "--result", "{", dsn=dsn).exit_code == 2


# queues, tasks, purge


def test_a_paused_queue_is_not_claimed_from_until_it_is_resumed(dsn: str, protocol: Protocol) -> None:
    protocol.enqueue(queue="mail")
    worker = protocol.register()
    said = told("queues", "pause", "mail", "--for", "1h", "--reason", "too much", dsn=dsn)
    assert said.exit_code == 0
    assert protocol.claim(worker, "mail").jobs == []
    [mail] = [row for row in answer("queues", "list", dsn=dsn) if row["name"] == "mail"]
    assert (mail["paused"], mail["reason"], mail["jobs"]) == (True, "too much", {"ready": 1})
    assert mail["until"] is not None
    assert "too much" in told("queues", "list", dsn=dsn).stdout

    assert told("queues", "resume", "mail", dsn=dsn).exit_code == 0
    assert told("queues", "resume", "mail", dsn=dsn).exit_code == 3
    assert len(protocol.claim(worker, "mail").jobs) == 1


@pytest.mark.parametrize(
    "command",
    [("pause",), ("resume",), ("limit", "5"), ("retain", "--failed", "7d")],
    ids=lambda given: given[0],
)
def test_a_queue_that_cannot_be_is_wrong_usage_and_nothing_is_said_of_it(
    dsn: str, command: tuple[str, ...]
) -> None:
    verb, *rest = command
    said = told("queues", verb, "ä" * 51, *rest, dsn=dsn)
    assert said.exit_code == 2
    assert "1 to 100 bytes" in said.stderr
    assert [queue["name"] for queue in answer("queues", "list", dsn=dsn)] == ["*"]


def test_a_paused_task_is_listed_and_resumed(dsn: str, protocol: Protocol) -> None:
    protocol.enqueue("greet")
    protocol.rows("insert into {}.tasks (name, queue, max_attempts) values ('known', 'mail', 3)")
    assert told("tasks", "pause", "greet", dsn=dsn).exit_code == 0
    assert protocol.claim(protocol.register()).jobs == []
    greet, known = answer("tasks", "list", dsn=dsn)
    assert (greet["name"], greet["paused"], greet["until"], greet["jobs"]) == (
        "greet",
        True,
        None,
        {"ready": 1},
    )
    assert (known["name"], known["paused"], known["queue"], known["max_attempts"]) == (
        "known",
        False,
        "mail",
        3,
    )
    assert told("tasks", "resume", "greet", dsn=dsn).exit_code == 0


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["queues", "pause", "mail", "--for", "1h"], {"queue": "mail", "paused": True}),
        (["queues", "resume", "mail"], {"queue": "mail", "resumed": False}),
        (["queues", "limit", "mail", "5"], {"queue": "mail", "max_running": 5}),
        (
            ["queues", "retain", "mail", "--failed", "7d"],
            {"queue": "mail", "completed": None, "failed": 7, "cancelled": None, "expired": None},
        ),
        (["tasks", "pause", "greet"], {"task": "greet", "paused": True}),
        (["tasks", "limit", "greet", "none"], {"task": "greet", "max_running": None}),
        (["workers", "pause", "1"], {"worker": 1, "paused": True}),
        (["workers", "resume", "1"], {"worker": 1, "resumed": False}),
        (["limit", "7"], {"max_running": 7}),
        (["resume"], {"everything": True, "resumed": False}),
        (["resume", "--queue", "mail"], {"queue": "mail", "resumed": False}),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_what_is_steered_is_answered_for_programs_too(
    dsn: str, protocol: Protocol, command: list[str], said: dict[str, Any]
) -> None:
    assert protocol.register() == 1
    found = told(*command, "--json", dsn=dsn)
    assert json.loads(found.stdout) == said
    assert found.exit_code == (3 if said.get("resumed") is False else 0)


def test_what_is_kept_is_said_in_days_and_purge_forgets_the_rest(dsn: str, protocol: Protocol) -> None:
    # spec: SH-31
    assert (
        told("queues", "retain", "mail", "--completed", "0d", "--failed", "forever", dsn=dsn).exit_code == 0
    )
    [mail] = [row for row in answer("queues", "list", dsn=dsn) if row["name"] == "mail"]
    assert (mail["completed"], mail["failed"], mail["expired"]) == (0, 2_147_483_647, None)
    assert "completed 0d, failed forever" in told("queues", "list", dsn=dsn).stdout
    for wrong in ((), ("--failed", "36h"), ("--failed", "-1d"), ("--failed", "soon")):
        assert told("queues", "retain", "mail", *wrong, dsn=dsn).exit_code == 2

    kept, forgotten = protocol.enqueue(), protocol.enqueue(queue="mail")
    worker = protocol.register()
    protocol.complete(worker, protocol.claim(worker, "default", "mail").jobs)
    protocol.shift_clock(timedelta(days=1))
    assert answer("purge", dsn=dsn)["jobs"] == 1
    assert [job["id"] for job in answer("jobs", "list", dsn=dsn)] == [kept]
    assert told("jobs", "show", str(forgotten), dsn=dsn).exit_code == 3
    assert told("purge", dsn=dsn).stdout == "0 jobs forgotten; 0 days of history dropped.\n"


# What is printed.


def test_stored_text_cannot_act_on_a_terminal(dsn: str, protocol: Protocol) -> None:
    job = protocol.enqueue(
        HOSTILE, {"a": HOSTILE, HOSTILE: 1}, queue=HOSTILE, tags=[HOSTILE], unique_key=HOSTILE
    )
    worker = protocol.register()
    [held] = protocol.claim(worker, HOSTILE).jobs
    error = {"code": HOSTILE, "message": HOSTILE, "traceback": f"{HOSTILE}\n{HOSTILE}"}
    protocol.settle(worker, {"id": job, "attempt": held["attempt"], "state": "failed", "error": error})
    protocol.enqueue(HOSTILE, queue=HOSTILE)
    protocol.rows("select {}.pause(queue => %s, reason => %s)", HOSTILE, HOSTILE)
    for command in (("jobs", "list"), ("jobs", "show", str(job)), ("queues", "list"), ("tasks", "list")):
        for form in ((), ("--json",)):
            said = told(*command, *form, dsn=dsn)
            assert said.exit_code == 0
            assert not BAD.search(said.output), (command, form)
            assert "red" in said.output
        seen = on_a_terminal(*command, "--dsn", dsn)
        assert "\x1b[31mred" not in seen
        assert not re.search("[\u202e\u2066\x07\x9b]", seen)


@pytest.mark.parametrize("text", ["plain", "ünïcode 漢字 🎉", ""])
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert clean(text) == text


def test_piped_output_is_plain_and_a_terminal_gets_a_table(dsn: str, protocol: Protocol) -> None:
    protocol.enqueue("greet")
    piped = shiftwork("jobs", "list", "--dsn", dsn, environment={"FORCE_COLOR": "1"})
    heading, row = piped.stdout.splitlines()
    assert heading.split()[:5] == ["ID", "TASK", "QUEUE", "STATE", "ATTEMPT"]
    assert heading.index("TASK") == row.index("greet")
    assert "\x1b" not in piped.stdout
    assert "\x1b[" in on_a_terminal("jobs", "list", "--dsn", dsn)


def test_letters_that_a_terminal_does_not_know_are_no_error(dsn: str, protocol: Protocol) -> None:
    protocol.enqueue("漢字")
    said = shiftwork("jobs", "list", "--dsn", dsn, environment={"PYTHONIOENCODING": "latin-1"})
    assert said.returncode == 0
    assert r"\u6f22\u5b57" in said.stdout


def test_a_reader_that_goes_away_is_no_traceback(dsn: str, protocol: Protocol) -> None:
    protocol.enqueue_many({"task": "greet", "payload": {"text": "x" * 1000}} for _ in range(200))
    reading, writing = os.pipe()
    os.close(reading)
    try:
        command = [*SHIFTWORK, "jobs", "list", "--limit", "200", "--json", "--dsn", dsn]
        said = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(writing)
    assert "Traceback" not in said.stderr


def on_a_terminal(*arguments: str) -> str:
    """What the command writes when its output is a terminal."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "PYTHONUTF8": "1"}
    process = subprocess.Popen([*SHIFTWORK, *arguments], stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    seen = b""
    try:
        while piece := os.read(ours, 65536):
            seen += piece
    except OSError:
        pass  # how a terminal says that nobody writes to it any more
    os.close(ours)
    assert process.wait() == 0, seen.decode()
    return seen.decode()


# Where the database is.


def test_the_database_is_the_one_of_dsn_then_of_the_environment(dsn: str, protocol: Protocol) -> None:
    protocol.enqueue("here")
    nowhere = "postgresql://127.0.0.1:1/x"
    assert "here" in shiftwork("jobs", "list", environment={"DATABASE_URL": dsn}).stdout
    assert "here" in shiftwork("jobs", "list", "--dsn", dsn, environment={"DATABASE_URL": nowhere}).stdout
    assert "here" in shiftwork("jobs", "list", environment={"SHIFTWORK_DSN": dsn}).stdout
    wrong = shiftwork("jobs", "list", environment={"DATABASE_URL": dsn, "SHIFTWORK_SCHEMA": "no good"})
    assert wrong.returncode == 1
    assert "cannot be a schema name" in wrong.stderr


def test_without_a_database_the_embedded_server_is_used(short_path: Path) -> None:
    environment = {"SHIFTWORK_HOME": str(short_path)}
    done = shiftwork("migrate", environment=environment)
    assert done.returncode == 0, done.stderr
    assert "the embedded server" in done.stdout
    sent = shiftwork("jobs", "enqueue", "greet", environment=environment)
    assert sent.stdout == "job 1 created\n", sent.stderr
    assert "greet" in shiftwork("jobs", "list", environment=environment).stdout


def test_an_embedded_server_that_cannot_start_is_told(short_path: Path) -> None:
    (short_path / "postgres").mkdir()
    (short_path / "postgres" / "thesis.tex").touch()
    for command in (("migrate",), ("jobs", "list")):
        said = shiftwork(*command, environment={"SHIFTWORK_HOME": str(short_path)})
        assert said.returncode == 1
        assert "left alone" in said.stderr


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory that the server's user can reach."""
    room = Path(tempfile.mkdtemp(prefix="sw-"))
    room.chmod(0o711)
    yield room
    embedded.stop(room / "postgres", now=True)
    shutil.rmtree(room)
