"""`shiftwork worker`, as it is typed: real processes on a real database."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from shiftwork import embedded, presets
from shiftwork.cli.worker import PRESETS, SECTIONS
from shiftwork.migrate import migrate
from shiftwork.settings import KNOWN
from tests import pooler
from tests.harness import Protocol
from tests.test_cli import BAD, HOSTILE, SHIFTWORK

SAMPLE = Path(__file__).with_name("sample.py")
ROOT = SAMPLE.parent.parent
STAMP = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} (DEBUG|INFO|WARNING|ERROR|CRITICAL) ")


def surroundings(dsn: str | None = None, **more: str) -> dict[str, str]:
    """An environment that says nothing to shiftwork but this, and how workers of this run find their database."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name != "DATABASE_URL" and (not name.startswith("SHIFTWORK_") or name == "SHIFTWORK_PG_BIN")
    }
    given = {"DATABASE_URL": dsn, **pooler.environment(dsn)} if dsn else {}
    return {**inherited, **given, **more}


def worked(
    *arguments: str, dsn: str | None = None, cwd: Path = ROOT, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a worker to its end."""
    done = subprocess.run(
        [*SHIFTWORK, "worker", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env=surroundings(dsn, **(environment or {})),
    )
    assert done.stdout == ""
    return done


class Running:
    """A worker that runs, and what it says."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []

    def says(self, part: str) -> str:
        """Wait for a line that has this in it."""
        assert self.process.stderr
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            if part in line:
                return line
        raise AssertionError(f"it ended without saying {part!r}:\n" + "\n".join(self.lines))

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def ends(self) -> int:
        """Wait for its end; gives the exit code."""
        assert self.process.stderr
        self.lines += self.process.stderr.read().splitlines()
        return self.process.wait()


@contextmanager
def running(*arguments: str, dsn: str, cwd: Path = ROOT) -> Iterator[Running]:
    """A worker in a process of its own, which is ended with the block."""
    command = [*SHIFTWORK, "worker", *arguments]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, cwd=cwd, env=surroundings(dsn)
    ) as process:
        try:
            yield Running(process)
        finally:
            process.kill()


def objects(text: str) -> list[dict[str, Any]]:
    """Lines of JSON, each of them an object."""
    return [json.loads(line) for line in text.splitlines()]


# It runs jobs.


@pytest.mark.parametrize(
    "where", ["tests.sample:app", "tests.sample", "tests/sample.py", "tests/sample.py:app", str(SAMPLE)]
)
def test_the_command_runs_the_jobs_of_an_app(dsn: str, protocol: Protocol, where: str) -> None:
    # spec: SH-1, HO-43
    job = protocol.enqueue("greet", {"name": "Ada"})
    done = worked(where, "--stop-when-idle", dsn=dsn)
    assert done.returncode == 0, done.stderr
    assert protocol.job(job)["result"] == "Hello, Ada!"


def test_what_handlers_enqueue_goes_to_the_database_that_was_named(dsn: str, protocol: Protocol) -> None:
    nowhere = "postgresql://127.0.0.1:1/nowhere"
    protocol.enqueue("post", {"to": "Grace"}, queue="mail")
    done = worked("tests/sample.py", "--dsn", dsn, "--stop-when-idle", dsn=nowhere)
    assert done.returncode == 0, done.stderr
    results = {job["result"] for job in protocol.rows("select * from {}.history")}
    assert results == {"Grace", "Hello, Grace!"}


def test_an_app_in_a_file_is_imported_from_where_it_is_and_with_its_package(tmp_path: Path, dsn: str) -> None:
    package = tmp_path / "elsewhere" / "shop"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "jobs.py").write_text("from .names import app\n")
    (package / "names.py").write_text(
        "import shiftwork\napp = shiftwork.App()\n@app.task\ndef sell() -> None: ...\n"
    )
    done = worked("elsewhere/shop/jobs.py", "--stop-when-idle", "--log-format", "json", dsn=dsn, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert any(line.get("tasks") == ["sell"] for line in objects(done.stderr))


LOOPING = """
import asyncio
import shiftwork

app = shiftwork.App()


@app.task
async def loop() -> str:
    return type(asyncio.get_running_loop()).__module__.partition(".")[0]
"""


@pytest.mark.parametrize("installed", [True, False])
def test_a_worker_runs_on_uvloop_where_it_is_installed(
    tmp_path: Path, dsn: str, protocol: Protocol, installed: bool
) -> None:
    blocked = "" if installed else "import sys; sys.modules['uvloop'] = None"
    (tmp_path / "looping.py").write_text(f"{blocked}{LOOPING}")
    job = protocol.enqueue("loop")
    done = worked("looping.py", "--stop-when-idle", dsn=dsn, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert protocol.value("select result from {}.history where id = %s", job) == (
        "uvloop" if installed else "asyncio"
    )


def test_without_a_database_the_embedded_server_is_started_and_migrated(dsn: str) -> None:
    # spec: HO-2
    room = Path(tempfile.mkdtemp(prefix="sw-"))
    room.chmod(0o711)  # started by root, the server runs as another user
    try:
        done = worked(
            "tests/sample.py", "--stop-when-idle", "--migrate", environment={"SHIFTWORK_HOME": str(room)}
        )
        assert done.returncode == 0, done.stderr
        assert "using the embedded PostgreSQL" in done.stderr
    finally:
        embedded.stop(room / "postgres", now=True)
        shutil.rmtree(room)


# It stops.


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_stops_it_when_what_runs_has_ended(
    dsn: str, protocol: Protocol, tmp_path: Path, number: signal.Signals
) -> None:
    # spec: SG-31
    sign = tmp_path / "sign"
    job = protocol.enqueue("wait_for", {"path": str(sign)})
    with running("tests/sample.py", "--log-level", "debug", dsn=dsn) as worker:
        worker.says("wait_for (queue default, attempt 1) began")
        worker.stop(number)
        worker.says(f"stops ({number.name}); 1 job still running")
        sign.touch()
        assert worker.ends() == 0, worker.lines
    assert protocol.job(job)["result"] == "seen"
    assert protocol.value("select lease_until <= shiftwork.clock() from {}.workers")


def test_a_second_signal_stops_it_at_once_and_the_job_is_given_back(
    dsn: str, protocol: Protocol, tmp_path: Path
) -> None:
    # spec: SG-31
    job = protocol.enqueue("wait_for", {"path": str(tmp_path / "never")})
    with running("tests/sample.py", "--log-level", "debug", dsn=dsn) as worker:
        worker.says("began")
        worker.stop()
        worker.says("stops (SIGTERM)")
        worker.stop()
        worker.ends()
    found = protocol.job(job)
    assert (found["state"], found["failures"], found["resets"]) == ("ready", 0, 0)


def test_who_is_stopped_before_the_worker_has_begun_has_stopped_cleanly(dsn: str) -> None:
    nowhere = "postgresql://127.0.0.1:1/nowhere"
    for arguments in ((), ("--migrate",)):
        with running("tests/sample.py", *arguments, dsn=nowhere) as worker:
            worker.says("goes on by itself: cannot connect")
            worker.stop()
            assert worker.ends() == 0, worker.lines


LOST = """
import os, signal, sys
from shiftwork import App
from shiftwork.cli import main

class Told:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)  # what a handler of signals raises in here is lost

def told(method):
    def first(self, *given, **named):
        Told()
        return method(self, *given, **named)
    return first

setattr(App, sys.argv[1], told(getattr(App, sys.argv[1])))
main(sys.argv[2:])
"""


@pytest.mark.parametrize("point", ["run_worker", "worker", "migrate"])
def test_a_signal_is_not_lost_where_nobody_could_hear_it(dsn: str, protocol: Protocol, point: str) -> None:
    # spec: SG-31, D-25
    # fault: F28
    job = protocol.enqueue("greet", {"name": "Ada"})
    where = "postgresql://127.0.0.1:1/nowhere" if point == "migrate" else dsn
    arguments = ("worker", "tests/sample.py", "--stop-when-idle", "--migrate")
    command = [sys.executable, "-W", "ignore", "-c", LOST, point, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=surroundings(where)
    )
    assert done.returncode == 0, done.stderr
    assert "Exception ignored" in done.stderr
    assert protocol.state(job) == "ready"


FAILED = """
import os, signal, sys
from shiftwork import App
from shiftwork.cli import main

worked = App.run_worker

def fails(self, **settings):
    worked(self, **settings)
    os.kill(os.getpid(), signal.SIGTERM)
    return False

App.run_worker = fails
main(sys.argv[1:])
"""


def test_a_signal_at_the_very_end_does_not_make_a_failure_look_well(dsn: str) -> None:
    # spec: SH-1, D-25
    command = [sys.executable, "-c", FAILED, "worker", "tests/sample.py", "--stop-when-idle"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=surroundings(dsn)
    )
    assert done.returncode == 1, done.stderr


# What it is told.


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--concurrency", "0"], "concurrency is '0' (from --concurrency); it must be a whole number from 1 to 10,000"),
        (["--concurrency", "many"], "a whole number from 1 to 10,000"),
        (["--concurrency", "10001"], "a whole number from 1 to 10,000"),
        (["--lease", "100ms"], "lease is '100ms' (from --lease); it must be a duration from 500ms to 1h"),
        (["--lease", "30"], "a duration from 500ms to 1h"),
        (["--queues", "mail=3,default"], "names in order (mail,default), or each with a weight"),
        (["--queue-concurrency", "mail=0"], "whole numbers from 1 to 10,000"),
        (["--log-format", "xml"], "text or json"),
        (["--name", "a b"], "letters, digits, dots"),
        (["--schema", "no good"], "cannot be a schema name"),
        (["--max-jobs", "-1"], "a whole number from 1"),
        (["--lese", "3s"], "--lease"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_bad_value_is_refused_with_what_it_may_be(arguments: list[str], said: str) -> None:
    # spec: SH-9
    done = worked("tests/sample.py", *arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_the_environment_and_the_file_are_refused_in_the_same_way(tmp_path: Path) -> None:
    # spec: SH-9
    done = worked("tests/sample.py", environment={"SHIFTWORK_PREFETCH": "-1"})
    assert done.returncode == 2
    assert "prefetch is '-1' (from SHIFTWORK_PREFETCH); it must be a whole number from 0" in done.stderr
    (tmp_path / "pyproject.toml").write_text("[tool.shiftwork]\nleese = '3s'\n")
    done = worked(str(SAMPLE), cwd=tmp_path)
    assert done.returncode == 2
    assert "did you mean 'lease'?" in done.stderr


def test_flag_environment_and_file_name_the_same_settings_and_count_in_that_order(
    dsn: str, tmp_path: Path
) -> None:
    # spec: SH-9
    (tmp_path / "pyproject.toml").write_text(
        '[tool.shiftwork]\nconcurrency = 3\nname = "filed"\nqueues = ["mail", "default"]\nlog_format = "json"\n'
        "stop_when_idle = true\n"
    )

    def started(*arguments: str, **environment: str) -> dict[str, Any]:
        done = worked(str(SAMPLE), *arguments, dsn=dsn, cwd=tmp_path, environment=environment)
        assert done.returncode == 0, done.stderr
        [line] = [line for line in objects(done.stderr) if line.get("event") == "WorkerStarted"]
        return line

    line = started()
    assert (line["concurrency"], line["queues"]) == (3, ["mail", "default"])
    assert line["label"].startswith("filed@")
    line = started(SHIFTWORK_CONCURRENCY=" 5 ", SHIFTWORK_NAME="")
    assert (line["concurrency"], line["label"].partition("@")[0]) == (5, "filed")
    line = started("--concurrency", "7", "--name", "flagged", SHIFTWORK_CONCURRENCY="5")
    assert (line["concurrency"], line["label"].partition("@")[0]) == (7, "flagged")


def test_a_worker_says_who_it_is_and_can_be_found_by_that(dsn: str, protocol: Protocol) -> None:
    # spec: SH-27, SH-28
    with running("tests/sample.py", "--name", "night-shift", "--log-format", "json", dsn=dsn) as worker:
        line = json.loads(worker.says("WorkerStarted"))
        [row] = protocol.rows("select * from {}.workers")
        assert row["id"] == line["worker"]
        assert (row["name"], row["host"], row["pid"]) == (
            "night-shift",
            socket.gethostname(),
            worker.process.pid,
        )
        assert line["label"] == f"night-shift@{socket.gethostname()}:{worker.process.pid}"
        assert (line["concurrency"], line["queues"]) == (10, ["default", "mail"])
        assert line["tasks"] == ["greet", "post", "stumble", "wait_for"]
        worker.stop()
        assert worker.ends() == 0


# What it says.


def test_lines_of_json_carry_job_task_queue_and_attempt(dsn: str, protocol: Protocol) -> None:
    # spec: SH-27
    post = protocol.enqueue("post", {"to": "Ada"}, queue="mail")
    fall = protocol.enqueue("stumble", {"message": "no"})
    done = worked("tests/sample.py", "--stop-when-idle", "--log-format", "json", dsn=dsn)
    lines = objects(done.stderr)
    assert all({"at", "level", "message"} <= line.keys() for line in lines)

    about: dict[int, list[dict[str, Any]]] = {}
    for line in lines:
        if "job" in line:
            about.setdefault(line["job"], []).append(line)
    said, ended = about[post]
    expected = {"job": post, "task": "post", "queue": "mail", "attempt": 1}
    assert said.items() >= {**expected, "message": "to Ada", "level": "info"}.items()
    assert ended.items() >= {**expected, "event": "JobEnded", "state": "completed", "level": "info"}.items()
    assert ended["seconds"] >= 0
    said, ended = about[fall]
    expected = {"job": fall, "task": "stumble", "queue": "default", "attempt": 1}
    assert said.items() >= {**expected, "message": "about to say no", "level": "warning"}.items()
    assert ended.items() >= {**expected, "state": "failed", "level": "error"}.items()
    assert ended["error"] == {"code": "POISON", "type": "shiftwork.errors.Poison", "message": "no"}


@pytest.mark.parametrize("form", ["text", "json"])
def test_no_name_and_no_message_breaks_out_of_its_line(dsn: str, protocol: Protocol, form: str) -> None:
    forged = f"{HOSTILE}\r\n2026-01-01 00:00:00.000 INFO    job 1 completed"
    said = protocol.enqueue("stumble", {"message": forged})
    named = protocol.enqueue("red\u202e\u2066\u200f")
    arguments = ("--stop-when-idle", "--unknown-tasks", "fail", "--log-format", form)
    done = worked("tests/sample.py", *arguments, dsn=dsn)
    assert done.returncode == 0, done.stderr
    assert protocol.state(said) == protocol.state(named) == "failed"
    assert not BAD.search(done.stderr)
    for line in done.stderr.split("\n")[:-1]:
        if form == "json":
            assert json.loads(line)
        else:
            assert STAMP.match(line), line


# What it needs.


def test_a_schema_that_is_missing_or_too_old_is_told_and_migrate_mends_it(
    empty_dsn: str, protocol: Protocol, dsn: str
) -> None:
    # spec: HO-2
    done = worked("tests/sample.py", "--stop-when-idle", dsn=empty_dsn)
    assert done.returncode == 1
    assert "is not installed" in done.stderr
    assert done.stderr.endswith("run: shiftwork migrate, or start the worker with --migrate\n")
    done = worked("tests/sample.py", "--stop-when-idle", "--migrate", dsn=empty_dsn)
    assert done.returncode == 0, done.stderr

    protocol.rows("""update {}.settings set value = '{{"version": 0}}' where name = 'protocol'""")
    for form in ("text", "json"):
        done = worked("tests/sample.py", "--stop-when-idle", "--log-format", form, dsn=dsn)
        assert done.returncode == 1
        assert "shiftwork migrate" in done.stderr
    assert objects(done.stderr)[-1]["level"] == "critical"
    assert worked("tests/sample.py", "--stop-when-idle", "--migrate", dsn=dsn).returncode == 0


@pytest.mark.parametrize("arguments", [(), ("--migrate",)])
def test_a_database_that_is_away_is_waited_for_and_that_is_said_once(
    server: str, template: str, arguments: tuple[str, ...]
) -> None:
    # spec: HO-2
    name = f"shiftwork_test_{uuid4().hex[:12]}"
    dsn = make_conninfo(server, dbname=name)
    with (
        running("tests/sample.py", *arguments, dsn=dsn) as worker,
        psycopg.connect(server, autocommit=True) as admin,
    ):
        worker.says("goes on by itself: cannot connect")
        try:
            admin.execute(
                sql.SQL("create database {} template {}").format(
                    sql.Identifier(name), sql.Identifier(template)
                )
            )
            worker.says("serves default, mail")
            worker.stop()
            assert worker.ends() == 0
        finally:
            worker.process.kill()
            admin.execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))
    assert sum("cannot connect" in line for line in worker.lines) == 1
    assert "Traceback" not in "\n".join(worker.lines)


def test_who_is_told_to_wait_waits_for_a_schema_that_is_not_there_yet(empty_dsn: str) -> None:
    # spec: ST-24
    with running("tests/sample.py", "--wait", dsn=empty_dsn) as worker:
        worker.says("is interrupted, and goes on by itself: the schema 'shiftwork' is not installed")
        with psycopg.connect(empty_dsn, autocommit=True) as connection:
            migrate(connection)
        worker.says("serves default, mail")
        worker.stop()
        assert worker.ends() == 0
    assert sum("is not installed" in line for line in worker.lines) == 1


# What it has done.


def test_who_ends_when_idle_says_what_was_done_by_queue_and_ending(dsn: str, protocol: Protocol) -> None:
    # spec: ST-25
    for name in ("Ada", "Grace"):
        protocol.enqueue("greet", {"name": name})
    protocol.enqueue("stumble", {"message": "no"})
    protocol.enqueue("post", {"to": "Ada"}, queue="mail")
    later = protocol.enqueue("greet", {"name": "Joan"}, run_at="tomorrow")
    done = worked("tests/sample.py", "--stop-when-idle", dsn=dsn)
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"done: default: 3 completed, 1 failed; mail: 1 completed$", done.stderr.strip(), re.MULTILINE
    )
    assert protocol.state(later) == "scheduled"  # it does not wait for the future


def test_a_preset_is_below_what_is_said_beside_it(dsn: str) -> None:
    arguments = ("--preset", "shithub", "--stop-when-idle", "--log-format", "json")
    for more, concurrency in ((), 4), (("--concurrency", "7"), 7):
        done = worked("tests/sample.py", *arguments, *more, dsn=dsn)
        assert done.returncode == 0, done.stderr
        assert [line["concurrency"] for line in objects(done.stderr) if "concurrency" in line] == [
            concurrency
        ]
    done = worked("tests/sample.py", "--preset", "celery", dsn=dsn)
    assert done.returncode == 2
    assert "there is no preset 'celery'; there are: shithub," in done.stderr
    assert set(PRESETS) == {
        name for name, value in vars(presets).items() if isinstance(value, presets.Preset)
    }


# Which app is meant.


def test_what_a_program_enqueues_while_it_is_imported_is_not_sent(
    dsn: str, protocol: Protocol, tmp_path: Path
) -> None:
    # spec: HO-43
    (tmp_path / "eager.py").write_text(
        "import shiftwork\napp = shiftwork.App()\n@app.task\ndef sell() -> None: ...\n"
        "one = sell.enqueue()\nmany = app.enqueue_many([sell.job(), sell.job()])\n"
        "assert one.outcome == 'unsent'\nassert len(many) == 2\n"
    )
    done = worked("eager.py", "--stop-when-idle", dsn=dsn, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert protocol.value("select count(*) from {}.all_jobs") == 0
    assert "3 jobs of sell were enqueued while eager.py was imported, and are not sent" in done.stderr


@pytest.mark.parametrize(
    ("where", "code", "said"),
    [
        ("nowhere:app", 2, "there is no module 'nowhere' (looked in "),
        ("pack.nowhere:app", 2, "there is no module 'pack.nowhere'"),
        ("nowhere.py", 2, "there is no file nowhere.py"),
        ("pack/", 2, "there is no file pack/"),
        (":app", 2, "names no module"),
        ("one:two", 2, "one has no 'two'; it has app"),
        ("one:shiftwork", 2, "'shiftwork' in one is no shiftwork.App but a module; it has app"),
        ("none.py", 2, "there is no shiftwork.App in none.py"),
        ("several.py", 2, "several Apps in several.py; say which one: several.py:mail or several.py:post"),
        ("shadow/json.py", 2, "there is another module 'json'"),
        ("broken:app", 1, 'line 3, in total\n    return price * count\n'),
        ("broken.py", 1, "NameError: name 'price' is not defined"),
        ("lacking", 1, "ModuleNotFoundError: No module named 'no_such_thing'"),
        ("leaving.py", 1, "SystemExit: 3"),
        ("wrong.py", 1, "SyntaxError"),
        ("hostile.py", 1, "ValueError: \\x1b[2J"),
        ("empty.py", 1, "there are no tasks to run"),
    ],
)  # fmt: skip
def test_an_app_that_is_not_there_is_told_in_so_many_words(
    tmp_path: Path, where: str, code: int, said: str
) -> None:
    # spec: HO-2, HO-43
    app = "import shiftwork\napp = shiftwork.App()\n@app.task\ndef sell() -> None: ...\n"
    (tmp_path / "one.py").write_text(app)
    (tmp_path / "shadow").mkdir()
    (tmp_path / "shadow" / "json.py").write_text(app)
    (tmp_path / "none.py").touch()
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").touch()
    (tmp_path / "several.py").write_text(app.replace("app", "mail") + app.replace("app", "post"))
    (tmp_path / "broken.py").write_text(
        "def total(count):\n    # of all\n    return price * count\n\ntotal(1)\n"
    )
    (tmp_path / "lacking.py").write_text("import no_such_thing\n")
    (tmp_path / "leaving.py").write_text("import sys\nsys.exit(3)\n")
    (tmp_path / "wrong.py").write_text("def (:\n")
    (tmp_path / "hostile.py").write_text("raise ValueError('\\x1b[2J')\n")
    (tmp_path / "empty.py").write_text("import shiftwork\napp = shiftwork.App()\n")
    done = worked(where, dsn="postgresql://127.0.0.1:1/nowhere", cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback (most" not in done.stderr
    assert "importlib" not in done.stderr
    assert not BAD.search(done.stderr)


# Its help.


def test_help_shows_every_setting_once_in_its_section_and_needs_no_database() -> None:
    # spec: SH-9
    program = (
        "import sys\nfrom shiftwork.cli import main\n"
        "try: main(['worker', '--help'])\nexcept SystemExit: pass\n"
        "loaded = {'psycopg', 'rich', 'msgspec', 'asyncio', 'shiftwork.app', 'shiftwork.worker'} & set(sys.modules)\n"
        "print('loaded:', sorted(loaded))"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said.endswith("loaded: []\n")
    assert "Exit codes: 0 stopped" in said
    sections = [name for names in SECTIONS.values() for name in names]
    assert sorted(sections) == sorted([*KNOWN, "migrate", "preset", "reload"])
    flags = re.findall(r"^  (--[\w-]+)", said, re.MULTILINE)
    assert flags == [f"--{name.replace('_', '-')}" for name in sections]
    assert re.search(r"--concurrency N .*\[10; 1\s+to 10,000\]", said, re.DOTALL)
