"""`shiftwork demo`: the play is performed, and its account is right, or said to be wrong."""

from __future__ import annotations

import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import psycopg
import pytest

from shiftwork.demo import Play, Story
from shiftwork.job import State

DEMO = [sys.executable, "-c", "from shiftwork.cli import main; main(prog_name='shiftwork')", "demo"]


class Notes(Story):
    """The story, written down."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.counted: dict[State, int] = {}

    def heading(self, text: str) -> None:
        self.lines.append(text)

    def say(self, text: str, *, good: bool = False) -> None:
        self.lines.append(text)

    def counts(self, counts: Mapping[State, int]) -> None:
        self.counted = dict(counts)


def test_the_play_accounts_for_every_job(empty_dsn: str) -> None:
    notes = Notes()
    assert Play(notes, empty_dsn, 300).perform()
    told = "\n".join(notes.lines)
    for part in (
        "job 2. Rolled back …\n… and there is no order and no job 2.",
        "job 6 created, job 6 existing",
        "jobs 1, 3 and 4 are ready again",
        "at attempt 2: 5 settled",
        "settles at last: 3 lost",
        "'the scale is stuck' and is scheduled",
        "is due again: completed at attempt 2",
        "'nobody lives at this address' and is failed",
        "revived: completed",
        "→ cancelled",
        "within 1 ms: expired",
        "'Hello, Alan!'",
        "311 jobs were enqueued, and all are accounted for.",
    ):
        assert part in told
    assert notes.counted == {State.COMPLETED: 308, State.FAILED: 1, State.CANCELLED: 1, State.EXPIRED: 1}


@pytest.mark.parametrize(
    ("meddling", "said"),
    [
        ("insert into shiftwork.jobs (task, payload) values ('greet', '{}')", "and 14 rows found"),
        ("delete from shiftwork.history where id = 1", "and 12 rows found"),
        ("update shiftwork.history set state = 'failed', error = '{}' where id = 1", "should be: 1."),
        ("insert into shiftwork.history select * from shiftwork.history where id = 1", "and 14 rows found"),
    ],
)
def test_an_account_that_does_not_add_up_is_said_to_be_wrong(
    empty_dsn: str, meddling: str, said: str
) -> None:
    class Meddling(Play):
        def add_up(self) -> bool:
            with psycopg.connect(empty_dsn, autocommit=True) as connection:
                connection.execute(meddling.encode())
            return super().add_up()

    notes = Notes()
    assert not Meddling(notes, empty_dsn, 2).perform()
    assert said in notes.lines[-1]


@pytest.fixture
def room() -> Iterator[Path]:
    """Where the demo's temporary files go."""
    room = Path(tempfile.mkdtemp(prefix="sw-", dir="/tmp"))
    room.chmod(0o711)  # started by root, the server runs as another user
    yield room
    shutil.rmtree(room)


def surroundings(room: Path) -> dict[str, str]:
    """An environment for the demo that also points to another database, which is none of its business."""
    return {**os.environ, "TMPDIR": str(room), "DATABASE_URL": "postgresql://127.0.0.1:1/nowhere"}


def test_the_command_tells_it_in_plain_lines_and_leaves_nothing_behind(room: Path) -> None:
    said = subprocess.run(
        [*DEMO, "--jobs", "100"], capture_output=True, text=True, check=False, env=surroundings(room)
    )
    assert said.returncode == 0, said.stdout + said.stderr
    assert said.stdout.endswith("✓ 111 jobs were enqueued, and all are accounted for.\n")
    assert "\x1b" not in said.stdout
    assert said.stderr == ""
    assert list(room.iterdir()) == []


def test_on_a_terminal_there_is_a_picture_and_with_keep_the_data_stays(room: Path) -> None:
    ours, theirs = pty.openpty()
    environment = {**surroundings(room), "TERM": "xterm-256color", "COLUMNS": "100"}
    command = [*DEMO, "--jobs", "100", "--keep"]
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    seen = ""
    try:
        while piece := os.read(ours, 65536):
            seen += piece.decode(errors="replace")
    except OSError:
        pass  # how a terminal says that nobody writes to it any more
    os.close(ours)
    assert process.wait() == 0, seen
    assert "█" in seen
    assert "all are accounted for" in seen
    [kept] = room.iterdir()
    assert (kept / "data" / "cluster").is_dir()
    assert not (kept / "data" / "cluster" / "postmaster.pid").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing_behind(room: Path, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [*DEMO, "--jobs", "100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**surroundings(room), "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    assert process.stdout
    for line in process.stdout:
        if re.match(r"100,000 jobs", line):
            break
    os.killpg(process.pid, number)  # as Ctrl-C does, to all of them
    _, errors = process.communicate()
    assert process.returncode == (1 if number == signal.SIGINT else 128 + number)
    assert "Traceback" not in errors
    assert list(room.iterdir()) == []


def test_a_server_that_cannot_start_is_told(room: Path) -> None:
    environment = {**surroundings(room), "SHIFTWORK_PG_BIN": str(room / "none")}
    said = subprocess.run(DEMO, capture_output=True, text=True, check=False, env=environment)
    assert said.returncode == 1
    assert said.stderr.startswith("Error: ")
    assert "Traceback" not in said.stderr
    assert list(room.iterdir()) == []
