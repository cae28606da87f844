"""`shiftwork demo`: real workers, one death, and an account that is right, or said to be wrong."""

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

from shiftwork.database import connect
from shiftwork.demo import Demo, Room, Screen
from shiftwork.demo_app import app
from shiftwork.job import State
from shiftwork.settings import Settings
from tests.harness import Protocol

DEMO = [sys.executable, "-m", "shiftwork", "demo"]


class Notes(Screen):
    """The demo, written down."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.expected: dict[State, int] = {}
        self.found: dict[State, int] = {}

    def say(self, text: str, *, good: bool = False, bad: bool = False) -> None:
        self.lines.append(text)

    def account(self, expected: Mapping[State, int], found: Mapping[State, int]) -> None:
        self.expected, self.found = dict(expected), dict(found)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def pids(told: str) -> list[int]:
    """The processes of the workers that were started."""
    return [int(pid) for pid in re.findall(r"\(pid (\d+),", told)]


def test_real_workers_run_the_jobs_one_is_killed_and_all_are_accounted_for(
    empty_dsn: str, tmp_path: Path
) -> None:
    # spec: SH-1, SH-21
    notes = Notes()
    assert Demo(notes, Room(tmp_path, empty_dsn), 400).perform(), notes.lines
    told = "\n".join(notes.lines)
    for part in (
        r"kill -9 \d+: the worker '(first|second)' is dead",
        r"It held \d+ jobs? \(",
        r"Taken back after \d+\.\d s, ready for the others: jobs \d+",
        r"The 4 watches are cancelled while they run: 4 signalled",
        r"TERM to the workers; exit codes after .*: \w+ 0, third 0\.",
        r"every one has ended as it should, once",
        r"attempts failed, exactly those that were to fail",
        r"18 orders were committed with their jobs, and each led to one invoice",
        r"bookings were made in transactions of jobs, each exactly once",
        r"attempts were lost with their worker, and made again",
    ):
        assert re.search(part, told), part
    assert notes.found == notes.expected
    assert notes.found[State.CANCELLED] == 4
    assert len(pids(told)) == 3
    assert not any(map(is_alive, pids(told)))


def account(dsn: str, protocol: Protocol, tmp_path: Path) -> tuple[Demo, Notes]:
    """A demo of four jobs that has been played to its end, except for the account."""
    notes = Notes()
    demo = Demo(notes, Room(tmp_path, dsn), 200)
    protocol.rows("create table orders (number int primary key)")
    protocol.rows("create table bookings (job bigint not null, amount int not null)")
    worker = protocol.register()
    ended: dict[int, dict[str, object]] = {
        protocol.enqueue("greet"): {"state": "completed"},
        protocol.enqueue("book"): {"state": "completed"},
        protocol.enqueue("order"): {"state": "completed"},
        protocol.enqueue("deliver"): {"state": "failed", "error": {"code": "POISON"}},
        protocol.enqueue("invoice"): {"state": "completed"},
    }
    protocol.claim(worker, want=10)
    protocol.rows("update {}.jobs set resets = 1 where id = 1")
    protocol.settle(worker, *({"id": job, "attempt": 1, **how} for job, how in ended.items()))
    for job in (1, 2, 3):
        demo.plan.note(job, State.COMPLETED, books=7 if job == 2 else None)
    demo.plan.note(4, State.FAILED, failures=1)
    demo.plan.orders = 1
    demo.lost = {1}
    protocol.rows("insert into orders values (1)")
    protocol.rows("insert into bookings values (2, 7)")
    return demo, notes


@pytest.mark.parametrize(
    ("meddling", "said"),
    [
        (None, None),
        ("insert into shiftwork.jobs (task, payload) values ('greet', '{}')", "6 found"),
        ("delete from shiftwork.history where id = 1", "should be: 1"),
        ("update shiftwork.history set state = 'failed', error = '{}' where id = 1", "should be: 1"),
        ("insert into shiftwork.history select * from shiftwork.history where id = 1", "(1 doubled)"),
        ("delete from shiftwork.history where task = 'invoice'", "0 invoices"),
        ("update shiftwork.history set failures = 2 where id = 4", "miscounted for 4"),
        ("insert into bookings values (2, 7)", "1 more than once"),
        ("delete from bookings", "0 were"),
        ("insert into bookings values (4, 1)", "2 were"),
        ("update shiftwork.history set resets = 0", "no attempt was lost"),
    ],
)
def test_an_account_that_does_not_add_up_is_said_to_be_wrong(
    dsn: str, protocol: Protocol, tmp_path: Path, meddling: str | None, said: str | None
) -> None:
    demo, notes = account(dsn, protocol, tmp_path)
    if meddling:
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(meddling.encode())
    app.settings = Settings(dsn=dsn)
    with connect(app.settings) as demo.connection:
        assert demo.add_up() == (meddling is None), notes.lines
    assert said is None or said in "\n".join(notes.lines)


@pytest.fixture
def room() -> Iterator[Path]:
    """Where the demo's temporary files go."""
    room = Path(tempfile.mkdtemp(prefix="sw-"))
    room.chmod(0o711)  # started by root, the server runs as another user
    yield room
    shutil.rmtree(room)


def surroundings(room: Path) -> dict[str, str]:
    """An environment for the demo that also points to another database, which is none of its business."""
    return {**os.environ, "TMPDIR": str(room), "DATABASE_URL": "postgresql://127.0.0.1:1/nowhere"}


def test_the_command_tells_it_in_plain_lines_and_leaves_nothing_behind(room: Path) -> None:
    environment = {**surroundings(room), "SHIFTWORK_CONCURRENCY": "nonsense"}  # none of its business either
    said = subprocess.run(
        [*DEMO, "--jobs", "200"], capture_output=True, text=True, check=False, env=environment
    )
    assert said.returncode == 0, said.stdout + said.stderr
    assert "every one has ended as it should, once" in said.stdout
    assert re.search(r"\d\.\d s: \d+ enqueued, \d+ ended \(\d+/s\)", said.stdout)
    assert "\x1b" not in said.stdout
    assert said.stderr == ""
    assert list(room.iterdir()) == []
    assert len(pids(said.stdout)) == 3
    assert not any(map(is_alive, pids(said.stdout)))


def test_on_a_terminal_there_is_a_picture_and_with_keep_the_data_stays(room: Path) -> None:
    ours, theirs = pty.openpty()
    environment = {**surroundings(room), "TERM": "xterm-256color", "COLUMNS": "100"}
    command = [*DEMO, "--jobs", "200", "--keep"]
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
    assert "■" in seen
    assert "dead, holding" in seen
    assert "every one has ended as it should" in seen
    [kept] = room.iterdir()
    assert (kept / "data" / "cluster").is_dir()
    assert not (kept / "data" / "cluster" / "postmaster.pid").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("everybody", [True, False])
def test_an_interrupted_demo_leaves_nothing_behind(
    room: Path, number: signal.Signals, everybody: bool
) -> None:
    process = subprocess.Popen(
        [*DEMO, "--jobs", "100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**surroundings(room), "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    assert process.stdout
    told = ""
    for line in process.stdout:
        told += line
        if "Two producers begin" in line:
            break
    if everybody:
        os.killpg(process.pid, number)  # as Ctrl-C does
    else:
        process.send_signal(number)
    _, errors = process.communicate()
    assert process.returncode == (1 if number == signal.SIGINT else 128 + number), errors
    assert "Traceback" not in errors
    assert list(room.iterdir()) == []
    assert len(pids(told)) == 2
    assert not any(map(is_alive, pids(told)))


def test_a_server_that_cannot_start_is_told(room: Path) -> None:
    environment = {**surroundings(room), "SHIFTWORK_PG_BIN": str(room / "none")}
    said = subprocess.run(DEMO, capture_output=True, text=True, check=False, env=environment)
    assert said.returncode == 1
    assert said.stderr.startswith("Error: ")
    assert "Traceback" not in said.stderr
    assert list(room.iterdir()) == []
