"""`shiftwork check`: every kind of problem is found, all of a phase at once, each with its code, and none where there is none."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner
from psycopg.conninfo import make_conninfo

from shiftwork import cli
from shiftwork.cli import check as checking
from shiftwork.cli.check import KINDS, is_pooled
from tests.harness import Protocol
from tests.test_roles import Installation, installed

__all__ = ["installed"]

ROOT = Path(__file__).parent.parent
APP = "import shiftwork\napp = shiftwork.App()\n"
GOOD = APP + "@app.task\nasync def work(n: int) -> None: ...\n"

Check = Callable[..., tuple[int, list[str], dict[str, Any]]]
numbers = count()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where nothing is set."""
    for name in os.environ:
        if name.startswith("SHIFTWORK_") or name == "DATABASE_URL":
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


@pytest.fixture
def check(place: Path) -> Check:
    """Check an app of this text; gives the exit code, the codes of problems, and the whole answer."""

    def run(text: str, *arguments: str) -> tuple[int, list[str], dict[str, Any]]:
        path = place / f"checked_{next(numbers)}.py"  # a module is imported once
        path.write_text(text)
        result = CliRunner().invoke(cli.main, ["check", str(path), *arguments, "--json"])
        assert isinstance(result.exception, SystemExit | None), result.exception
        answer = json.loads(result.stdout)
        for problem in answer["problems"]:
            assert problem["message"]
            assert (problem["severity"], problem["cure"]) == KINDS[problem["code"]]
        return result.exit_code, [problem["code"] for problem in answer["problems"]], answer

    return run


def test_an_app_that_is_in_order_is_said_to_be(check: Check) -> None:
    # spec: A-12, HO-43
    code, problems, answer = check(GOOD)
    assert (code, problems, answer["ok"]) == (0, [], True)
    assert answer["phases"] == ["configuration", "imports", "registry"]


def test_everything_that_is_set_wrongly_is_told_at_once(
    check: Check, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # spec: A-12, HO-43
    (place / "pyproject.toml").write_text('[tool.shiftwork]\nconcurrency = 0\nprefetch = "many"\n')
    monkeypatch.setenv("SHIFTWORK_LEASE", "soon")
    monkeypatch.setenv("SHIFTWORK_QUEUE", "mail")
    code, problems, answer = check("raise Exception('it is not even looked at')")
    assert (code, answer["phases"]) == (1, ["configuration"])
    assert sorted(problems) == ["SW-101", "SW-101", "SW-101", "SW-102"]
    said = " ".join(problem["message"] for problem in answer["problems"])
    for part in (
        "concurrency",
        "prefetch",
        "lease is 'soon' (from SHIFTWORK_LEASE)",
        "did you mean 'queues'",
    ):
        assert part in said
    (place / "pyproject.toml").write_text("[tool.shiftwork]\nconcurency = 5\n")
    assert check(GOOD)[1] == ["SW-101", "SW-101", "SW-102"]


def test_what_is_worth_a_warning_is_no_reason_to_fail(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHIFTWORK_TYPO", "1")
    monkeypatch.setenv("SHIFTWORK_GATEWAY_TOKEN", "a canary that is no setting, but no mistake either")
    monkeypatch.setenv("SHIFTWORK_METRICS_PORT", "9100")
    monkeypatch.setattr(checking, "find_spec", lambda _: None)
    monkeypatch.setenv("DATABASE_URL", "postgresql://me:canary@db.example.org,127.0.0.1/x?sslmode=require")
    code, problems, answer = check(GOOD)
    assert (code, problems) == (0, ["SW-102", "SW-103", "SW-104"])
    assert "the way to db.example.org (dsn, sslmode require)" in json.dumps(answer)
    assert "canary" not in json.dumps(answer)
    monkeypatch.setenv("DATABASE_URL", "postgresql://me@db.example.org/x?sslmode=verify-full")
    assert check(GOOD)[1] == ["SW-102", "SW-104"]
    assert check(GOOD, "--dsn", "nonsense")[:2] == (1, ["SW-102", "SW-101", "SW-104"])


def test_an_option_of_a_task_that_is_written_as_text_means_what_check_says_of_it(
    check: Check, dsn: str, protocol: Protocol
) -> None:
    # It passed, and each job then failed with an AttributeError.
    text = (
        APP
        + "@app.task(timeout='2s', transaction='no', concurrency='3')\ndef work(n: int) -> int:\n    return n\n"
    )
    assert check(text, "--live", "--dsn", dsn)[:2] == (0, [])
    shown: dict[str, Any] = {}
    exec(text.replace("App()", f"App({dsn!r})"), shown)
    with shown["app"] as app:
        job = shown["work"].enqueue(7)
        app.run_worker(stop_when_idle=True)
        assert (job.info().state, job.info().result) == ("completed", 7)

    for wrong in ("timeout='soon'", "transaction='perhaps'", "concurrency='many'"):
        code, problems, answer = check(APP + f"@app.task({wrong})\ndef work(n: int) -> None: ...\n")
        assert (code, problems) == (1, ["SW-202"])
        assert f"task 'work': {wrong.replace('=', ' is ')}; it must be" in answer["problems"][0]["message"]


def test_an_app_that_is_not_there_or_cannot_be_imported_is_told_of(check: Check, place: Path) -> None:
    assert check("x = 1")[1] == ["SW-201"]
    code, problems, answer = check("import shiftwork\nraise ValueError('canary')")
    assert (code, problems) == (1, ["SW-202"])
    assert "canary" in answer["problems"][0]["message"]
    result = CliRunner().invoke(cli.main, ["check", "no.such.module:app"])
    assert result.exit_code == 1
    assert "SW-201 error: there is no module 'no'" in result.stdout


def test_an_app_that_asks_the_database_while_it_is_imported_is_told_of(check: Check, dsn: str) -> None:
    code, problems, _ = check(GOOD.replace("App()", f"App({dsn!r})") + "app.counts()\n")
    assert (code, problems) == (0, ["SW-203"])


MISTAKEN = (
    APP
    + """
from shiftwork import Poison, Retry

@app.task(queue="elsewhere")
async def lost() -> None: ...

@app.task(retry=Retry(on=(OSError, "RATE_LIMIT")))
async def good() -> None: ...

@app.task(retry=Retry(on=(Poison, 42)))
async def hopeless() -> None: ...

@app.task
async def unreadable(what: "Nowhere") -> None: ...
"""
)


def test_every_task_that_cannot_be_run_as_it_is_declared_is_told_of_at_once(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    # spec: A-12
    monkeypatch.setenv("SHIFTWORK_QUEUES", "default")
    monkeypatch.setenv("SHIFTWORK_QUEUE_CONCURRENCY", "nowhere=1")
    monkeypatch.setenv("SHIFTWORK_QUEUE_BUDGETS", "nowhere=1,default=9")
    monkeypatch.setenv("SHIFTWORK_TASK_CONCURRENCY", "godo=1,good=2")
    code, problems, answer = check(MISTAKEN)
    assert (code, answer["phases"][-1]) == (1, "registry")
    assert sorted(problems) == ["SW-302", *3 * ["SW-303"], "SW-305", "SW-305", "SW-306"]
    assert check(APP)[1] == ["SW-301", *4 * ["SW-303"]]
    declared = GOOD.replace("App()", "App(queues=('mail', 'default'))")
    assert check(declared)[1] == 6 * ["SW-303"]


def test_a_task_for_a_process_of_its_own_that_could_not_import_it_is_told_of(check: Check) -> None:
    hidden = "import shiftwork\nclass Hidden:\n    app = shiftwork.App()\n\n@Hidden.app.task(executor='process')\ndef work() -> None: ...\n"
    assert check(hidden + "app = Hidden.app\n")[1] == []
    path = Path("hidden_app.py")
    path.write_text(hidden)
    result = CliRunner().invoke(cli.main, ["check", f"{path}:Hidden.app"])
    assert result.exit_code == 1
    assert "SW-304 error" in result.stdout


# With a database.


@pytest.fixture
def fresh(protocol: Protocol) -> Protocol:
    """Nothing is overdue."""
    protocol.rows("update {}.duties set due_at = {}.clock()".replace("{}", "shiftwork"))
    return protocol


def test_a_database_that_is_in_order_is_said_to_be_and_is_left_as_it_was(
    check: Check, dsn: str, fresh: Protocol
) -> None:
    # spec, HO-43
    code, problems, answer = check(GOOD, "--live", "--dsn", dsn)
    assert (code, problems) == (0, [])
    assert answer["phases"][-1] == "database"
    assert fresh.value("select count(*) from {}.workers") == 0
    assert fresh.value("select count(*) from {}.tasks") == 0


def test_a_database_that_cannot_be_used_is_told_of(
    check: Check, dsn: str, empty_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check(GOOD, "--live", "--dsn", "host=/nowhere password=canary")[:2] == (1, ["SW-401"])
    assert check(GOOD, "--live", "--dsn", empty_dsn)[1][0] == "SW-404"
    read_only = make_conninfo(dsn, options="-c default_transaction_read_only=on")
    assert "SW-403" in check(GOOD, "--live", "--dsn", read_only)[1]
    monkeypatch.setattr(checking, "OLDEST_SERVER", 990_000)
    code, problems, _ = check(GOOD, "--live", "--dsn", empty_dsn)
    assert (code, problems[:2]) == (1, ["SW-402", "SW-404"]), "all of the phase"


@pytest.mark.parametrize("role", ["viewer", "producer"])
def test_rights_that_are_missing_are_told_of(check: Check, installed: Installation, role: str) -> None:
    as_role = make_conninfo(installed.dsn, options=f"-c role={installed.schema}_{role}")
    code, problems, _ = check(GOOD, "--live", "--dsn", as_role, "--schema", installed.schema)
    assert code == 1
    assert "SW-405" in problems
    worker = make_conninfo(installed.dsn, options=f"-c role={installed.schema}_worker")
    code, problems, _ = check(GOOD, "--live", "--dsn", worker, "--schema", installed.schema)
    assert "SW-405" not in problems


def test_what_is_not_well_is_told_of_all_at_once(
    check: Check, dsn: str, fresh: Protocol, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # spec
    # fault: F35
    fresh.rows("select {}.pause(queue => 'mail', lasting => '1 hour')")
    fresh.rows("select {}.pause(everything => true)")
    fresh.rows("update {}.duties set error = 'no luck' where name = 'purge'")
    fresh.rows("update {}.duties set due_at = now() - interval '1 hour' where name = 'expire'")
    monkeypatch.setattr(checking, "OLD", 0.0)
    monkeypatch.setattr(checking, "FULL", -1.0)
    monkeypatch.setattr(checking, "APART", -1.0)
    monkeypatch.setattr(checking, "HEARING", 0.2)
    monkeypatch.setenv("SHIFTWORK_TRANSACTIONS", "900")
    with psycopg.connect(dsn) as idle:
        [pid] = idle.execute("select pg_backend_pid()").fetchone() or []
        code, problems, answer = check(GOOD, "--live", "--dsn", dsn, "--listen-dsn", server)
    assert code == 0, "none of it keeps a worker from working"
    assert {*problems} >= {"SW-412", "SW-421", "SW-422", "SW-423", "SW-424", "SW-425", "SW-426"}
    said = "\n".join(problem["message"] for problem in answer["problems"])
    assert f"the transaction of pid {pid}" in said
    assert "the duty purge failed: no luck" in said
    assert "the duty expire has been due for 3,6" in said
    assert "queue mail is paused, until" in said
    assert "everything is paused, until it is resumed" in said


class Backends:
    """A connection through a pooler: each transaction gets whichever server process is free."""

    def __init__(self, free: list[int], *, keeps: int | None = None) -> None:
        self.free, self.keeps, self.held = free, keeps, 0

    def execute(self, *_: object) -> Backends:
        self.said = self.keeps or self.held or self.free[0]
        return self

    def fetchone(self) -> tuple[int]:
        return (self.said,)

    def transaction(self) -> AbstractContextManager[None]:
        if self.keeps is None:
            self.held = self.free.pop(0)
        return nullcontext()


def test_a_pooler_in_transaction_mode_is_found_out(
    check: Check, dsn: str, fresh: Protocol, monkeypatch: pytest.MonkeyPatch
) -> None:
    # spec: A-10
    free = [11, 12]
    pooled: Any = (Backends(free), Backends(free))
    plain: Any = (Backends([], keeps=11), Backends([], keeps=12))
    assert is_pooled(*pooled)
    assert not is_pooled(*plain)
    monkeypatch.setattr(checking, "is_pooled", lambda *_: True)
    assert check(GOOD, "--live", "--dsn", dsn)[1] == ["SW-411"]
    assert check(GOOD, "--live", "--dsn", dsn, "--listen-dsn", dsn)[1] == []


def test_routines_that_an_app_declares_are_looked_for(check: Check, dsn: str, fresh: Protocol) -> None:
    # spec: D-17
    declared = (
        "app.sql_task('derive', handler='stats.derive(jsonb)', before='pg_catalog.pi()', after='x.y()')\n"
    )
    code, problems, answer = check(APP + declared, "--live", "--dsn", dsn)
    assert (code, problems) == (1, ["SW-406", "SW-406"])
    assert [one["message"] for one in answer["problems"]] == [
        "task 'derive': there is no routine stats.derive(jsonb) in this database",
        "task 'derive': there is no routine x.y() in this database",
    ]


# What is written about it.


def test_the_page_lists_every_code_and_no_other_and_each_is_shown_here() -> None:
    # spec: A-12
    page = (ROOT / "docs/check.md").read_text("utf-8")
    told = dict(re.findall(r"^\| `(SW-\d+)` \| (error|warning) \|", page, re.MULTILINE))
    assert told == {code: severity for code, (severity, _) in KINDS.items()}
    assert set(re.findall(r"SW-\d+", Path(__file__).read_text("utf-8"))) == set(KINDS)


def test_people_read_it_as_text(place: Path) -> None:
    Path("typed.py").write_text(APP)
    result = CliRunner().invoke(cli.main, ["check", "typed.py"])
    assert result.exit_code == 1
    assert result.stdout.splitlines()[:4] == [
        "configuration: ok",
        "imports: ok",
        "registry: 1 problem",
        "  SW-301 error: there are no tasks to run",
    ]
