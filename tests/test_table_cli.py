"""`shiftwork table`, and workers over a table as they are typed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner

from shiftwork import cli
from shiftwork.stores.fitting import KINDS
from tests import pooler
from tests.test_cli import SHIFTWORK
from tests.test_conformance import TABLE

ROOT = Path(__file__).parent.parent
Connection = psycopg.Connection[dict[str, Any]]
Table = Callable[..., tuple[int, list[str], str]]
STORE = """
import shiftwork
store = shiftwork.TableStore("example_jobs", {options})

@store.handler
async def handle(record: dict) -> None: ...
"""
numbers = count()


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dsn: str) -> Table:
    """Run a command on a store with these options; gives the exit code, the codes of problems if there are any, and all it said."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("DATABASE_URL", dsn)

    def run(
        command: str, options: str = "", *arguments: str, text: str = STORE
    ) -> tuple[int, list[str], str]:
        path = tmp_path / f"stored_{next(numbers)}.py"  # a module is imported once
        path.write_text(text.format(options=options))
        result = CliRunner().invoke(cli.main, ["table", command, str(path), *arguments])
        assert isinstance(result.exception, SystemExit | None), result.exception
        codes = []
        if "--json" in arguments and command == "check":
            problems = json.loads(result.stdout)["problems"]
            assert all((one["severity"], one["cure"]) == KINDS[one["code"]] for one in problems)
            codes = [one["code"] for one in problems]
        return result.exit_code, codes, result.output

    return run


def test_what_does_not_fit_is_told_all_at_once_and_installed_with_one_command(
    table: Table, connection: Connection
) -> None:
    connection.execute("create table example_jobs (id int primary key, status text, started_at timestamp)")
    options = 'columns={"state": "status"}, retry=shiftwork.Retry.never()'
    code, problems, _ = table("check", options, "--json")
    assert code == 1
    assert {"SW-502", "SW-503", "SW-511", "SW-513"} == set(problems)
    code, _, said = table("check", options)
    assert "timestamp without time zone, and has to be timestamp with time zone" in said
    assert said.endswith("a worker cannot work it\n")

    connection.execute("alter table example_jobs alter started_at type timestamptz")
    code, _, printed = table("install", options)
    assert code == 0
    assert 'add column if not exists "last_heartbeat_at"' in printed
    assert table("check", options, "--json")[0] == 1  # it was only printed
    assert table("install", options, "--apply")[0] == 0
    assert table("check", options, "--json")[:2] == (0, [])
    assert table("install", options, "--apply")[0] == 0  # and again
    assert table("check", options)[2] == "a worker can work it\n"


@pytest.mark.parametrize(
    ("ddl", "options", "found"),
    [
        ("select 1", "", ["SW-501"]),
        (TABLE, 'view="nowhere"', ["SW-501"]),
        (TABLE, 'columns={"state": "status"}', ["SW-502"]),
        (TABLE, 'columns={"strange": "x"}', ["SW-502"]),
        (
            TABLE
            + "; create type few as enum ('queued'); alter table example_jobs alter state drop default, alter state type few using 'queued'",
            "",
            ["SW-504"],
        ),
        (TABLE + "; alter table example_jobs drop started_at", "", ["SW-505"]),
        (TABLE + "; create view seen as select id from example_jobs", 'view="seen"', ["SW-506"] * 3),
        (TABLE, 'where="nope > 1"', ["SW-507"]),
        (TABLE + "; alter table example_jobs alter finished_at set not null", "", ["SW-508"]),
        (TABLE.replace("id serial primary key", "id serial"), "", ["SW-509"]),
    ],
)
def test_each_kind_of_problem_is_found(
    table: Table, connection: Connection, ddl: str, options: str, found: list[str]
) -> None:
    connection.execute(ddl.encode())
    code, problems, _ = table("check", options, "--json")
    assert (code, [one for one in problems if KINDS[one][0] == "error"]) == (1, found)


def test_a_record_that_the_handler_does_not_take_is_found_as_well(
    table: Table, connection: Connection
) -> None:
    connection.execute(TABLE.encode())
    text = STORE.replace("record: dict", "record: int")
    assert table("check", "", "--json", text=text)[:2] == (1, ["SW-506"])


# spec: SG-25, SG-32, D-15
def test_a_process_that_runs_nothing_puts_back_what_the_dead_have_left(
    table: Table, connection: Connection
) -> None:
    connection.execute(TABLE.encode())
    connection.execute(
        "insert into example_jobs (repository_id, state, num_resets, last_heartbeat_at)"
        " values (1, 'processing', 0, now() - interval '2 minutes'), (1, 'processing', 7, now() - interval '2 minutes'),"
        " (1, 'processing', 0, now())"
    )
    code, _, said = table("reset")
    assert code == 0
    assert said.splitlines() == [
        "job 1 is ready; its worker had been silent for 2m",
        "job 2 is failed; its worker had been silent for 2m",
        "2 jobs put back.",
    ]
    rows = connection.execute(
        "select state, num_resets, failure_message from example_jobs order by id"
    ).fetchall()
    assert [one["state"] for one in rows] == ["queued", "failed", "processing"]
    assert (rows[0]["num_resets"], rows[1]["failure_message"]) == (
        1,
        "the worker that ran it died, too many times",
    )
    assert table("reset", "", "--json")[2] == ""


# spec: SG-25
def test_a_row_that_will_not_be_changed_keeps_no_other_from_being_put_back_however_many_there_are(
    table: Table, connection: Connection
) -> None:
    # fault: F29
    connection.execute(TABLE.encode())
    connection.execute(
        """create function refuse() returns trigger language plpgsql as $$ begin raise 'not this one'; end $$;
           create trigger refuse before update on example_jobs for each row when (old.id = 2) execute function refuse()"""
    )
    connection.execute(
        "insert into example_jobs (repository_id, state, last_heartbeat_at)"
        " select 1, 'processing', now() - interval '2 minutes' from generate_series(1, 1200)"
    )
    code, _, said = table("reset")
    assert code == 0
    assert "job 2 cannot be put back: a trigger or constraint of the table refuses it" in said.splitlines()
    assert said.endswith("1199 jobs put back.\n")


# spec: SG-31
def test_a_worker_over_a_table_runs_handlers_in_processes_of_their_own(
    connection: Connection, dsn: str
) -> None:
    # fault: F2
    connection.execute(TABLE.encode())
    connection.execute("create table effects (job int)")
    connection.execute("insert into example_jobs (repository_id) values (1), (2), (3)")
    done = subprocess.run(
        [*SHIFTWORK, "worker", "tests/table_app.py", "--stop-when-idle", "--lease", "20s"],
        env={**os.environ, "DATABASE_URL": dsn, **pooler.environment(dsn)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = connection.execute("select * from example_jobs order by id").fetchall()
    assert [one["state"] for one in rows] == ["completed", "failed", "completed"]
    assert [entry["out"] for entry in rows[0]["execution_logs"]] == ["in a process of its own"]
    assert "SIGKILL" in rows[1]["failure_message"]
    assert rows[1]["num_resets"] == 2
    assert [one["job"] for one in connection.execute("select job from effects")] == [3]


def test_there_is_nothing_to_migrate_for_a_table(table: Table, tmp_path: Path) -> None:
    path = tmp_path / "stored_to_migrate.py"
    path.write_text(STORE.format(options=""))
    result = CliRunner().invoke(cli.main, ["worker", str(path), "--migrate"])
    assert result.exit_code == 1
    assert "shiftwork table install" in result.output


# spec: SG-9, SG-11, SG-12, SG-24, SG-25
def test_the_example_over_repositories_does_what_its_page_says(dsn: str) -> None:
    folder = ROOT / "examples" / "repositories"
    done = subprocess.run(
        [sys.executable, "app.py"],
        env={**os.environ, "DATABASE_URL": dsn},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    page = (ROOT / "docs" / "example-repositories.md").read_text("utf-8")
    assert done.stdout.strip() in page
