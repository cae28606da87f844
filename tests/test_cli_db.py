"""`shiftwork db`, as it is typed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from shiftwork import embedded

SHIFTWORK = [sys.executable, "-c", "from shiftwork.cli import main; main(prog_name='shiftwork')"]


@pytest.fixture
def data() -> Iterator[Path]:
    room = Path(tempfile.mkdtemp(prefix="sw-"))
    room.chmod(0o711)
    yield room / "data"
    embedded.stop(room / "data", now=True)
    shutil.rmtree(room)


def db(data: Path, verb: str, *arguments: str, answer: str = "") -> subprocess.CompletedProcess[str]:
    command = [*SHIFTWORK, "db", verb, "--data", str(data), *arguments]
    return subprocess.run(command, input=answer, capture_output=True, text=True, check=False)


def test_start_keeps_the_server_running_until_stop(data: Path) -> None:
    begun = db(data, "start")
    assert begun.returncode == 0, begun.stderr
    assert str(data) in begun.stdout
    with psycopg.connect(begun.stdout.splitlines()[-1]) as connection:
        assert connection.execute("select 1").fetchone() == (1,)
    assert db(data, "start").stdout == begun.stdout  # again does no harm
    assert (ended := db(data, "stop")).returncode == 0, ended.stderr
    assert not embedded.status(data).running
    assert "not running" in db(data, "stop").stdout


def test_status_says_where_it_is_and_who_uses_it_and_its_exit_code_whether_it_runs(data: Path) -> None:
    assert db(data, "status").returncode == 3
    with embedded.start(data, fsync=False) as server:
        said = db(data, "status")
        assert said.returncode == 0
        assert all(
            part in said.stdout for part in (str(data), server.url, server.version, "with its last user")
        )
        told = json.loads(db(data, "status", "--json").stdout)
        assert told["running"] is True
        assert told["url"] == server.url
    embedded.stop(data, now=True)
    gone = db(data, "status", "--json")
    assert gone.returncode == 3
    assert json.loads(gone.stdout)["running"] is False


def test_url_prints_the_url_and_nothing_else_and_it_works(data: Path) -> None:
    said = db(data, "url")
    with psycopg.connect(said.stdout.strip()) as connection:
        assert connection.execute("select 1").fetchone() == (1,)


def test_stop_leaves_a_server_that_others_use_unless_it_is_now(data: Path) -> None:
    with embedded.start(data, fsync=False):
        refused = db(data, "stop")
        assert refused.returncode == 3
        assert "in use" in refused.stderr
        assert embedded.status(data).running
        assert db(data, "stop", "--now").returncode == 0
        assert not embedded.status(data).running


def test_psql_is_a_user_of_the_server_itself(data: Path) -> None:
    said = db(data, "psql", "-At", answer="select 40 + 2;\n\\! kill -0 $PPID && echo alive\n")
    assert said.stdout.split() == ["42", "alive"], said.stderr
    assert db(data, "psql", "-Atc", "select 7").stdout == "7\n"
    with embedded.start(data):
        pass  # waits for its end if it is ending
    assert not embedded.status(data).stays


def test_reset_asks_first(data: Path) -> None:
    db(data, "start")
    asked = db(data, "reset", answer="n\n")
    assert asked.returncode == 1
    assert str(data) in asked.stdout
    assert embedded.status(data).running
    assert db(data, "reset", answer="y\n").returncode == 0
    assert not (data / "cluster").exists()
    db(data, "start")
    assert db(data, "reset", "--yes").returncode == 0
    assert not (data / "cluster").exists()


def test_reset_looks_before_it_asks(data: Path) -> None:
    missing = db(data, "reset")
    assert (missing.returncode, missing.stdout) == (0, f"There was nothing in {data}.\n")
    data.mkdir()
    assert "There was nothing" in db(data, "reset").stdout
    (data / "thesis.tex").touch()
    foreign = db(data, "reset", answer="y\n")
    assert (foreign.returncode, foreign.stdout) == (1, "")
    assert "left alone" in foreign.stderr
    assert (data / "thesis.tex").exists()
    assert "not a directory" in db(data / "thesis.tex", "reset").stderr


@pytest.mark.parametrize("verb", ["start", "stop", "status", "reset"])
def test_a_directory_without_a_name_is_wrong_usage(tmp_path: Path, verb: str) -> None:
    said = subprocess.run(
        [*SHIFTWORK, "db", verb, "--data", ""], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert said.returncode == 2
    assert "it names no directory" in said.stderr
    assert not list(tmp_path.iterdir())


def test_an_error_is_told_in_words_and_ends_with_1(data: Path) -> None:
    data.mkdir()
    (data / "thesis.tex").touch()
    said = db(data, "start")
    assert said.returncode == 1
    assert "left alone" in said.stderr
    assert "Traceback" not in said.stderr


def test_the_exit_codes_are_in_the_help() -> None:
    said = subprocess.run([*SHIFTWORK, "db", "--help"], capture_output=True, text=True, check=True).stdout
    assert "Exit codes:" in said
