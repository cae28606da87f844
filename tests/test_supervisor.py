"""Several worker processes under a supervisor, as an operator has them: real processes, real signals, a real database."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from shiftwork import App, events
from shiftwork.settings import Settings
from shiftwork.supervisor import GAVE_UP, Supervisor
from shiftwork.systemd import Systemd
from tests.crew import Crew, jobs
from tests.harness import Protocol
from tests.test_cli import SHIFTWORK
from tests.test_cli_worker import ROOT, surroundings
from tests.workshop import Workshop

Line = dict[str, Any]


class Supervised:
    """A supervisor that runs, and what it and its processes say."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[Line] = []

    def hears(self) -> Iterator[Line]:
        """What it says from now on; what is no JSON is a message and nothing else."""
        assert self.process.stderr
        for text in self.process.stderr:
            line = json.loads(text) if text.startswith("{") else {"message": text.rstrip()}
            self.lines.append(line)
            yield line

    def says(self, *names: str, **facts: object) -> Line:
        """Wait for a line about such an event."""
        for line in self.hears():
            if line.get("event") in names and facts.items() <= line.items():
                return line
        raise AssertionError(f"it ended without {names} {facts}:\n{self.told()}")

    def says_plainly(self, part: str) -> None:
        """Wait for a line that has this in it."""
        assert any(part in line["message"] for line in self.hears()), self.told()

    def said(self, event: str) -> list[Line]:
        return [line for line in self.lines if line.get("event") == event]

    def up(self, many: int) -> dict[int, int]:
        """Wait until so many processes are up; gives their pids by their numbers."""
        found: dict[int, int] = {}
        while len(found) < many:
            line = self.says("WorkerProcessUp")
            found[line["process"]] = line["pid"]
        return found

    def told(self) -> str:
        return "\n".join(str(line.get("message")) for line in self.lines)

    def ends(self, number: signal.Signals | None = None) -> int:
        """Wait for its end; gives the exit code."""
        if number is not None:
            self.process.send_signal(number)
        list(self.hears())
        return self.process.wait()


@contextmanager
def supervised(
    dsn: str,
    *arguments: str,
    where: str = "tests.crew:app",
    cwd: Path = ROOT,
    program: Sequence[str] = SHIFTWORK,
    **environment: str,
) -> Iterator[Supervised]:
    """A supervisor in a process of its own, which is ended with the block, and so are those it started."""
    command = [*program, "worker", where, "--log-format", "json", *arguments]
    with subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env=surroundings(dsn, **environment),
    ) as process:
        try:
            yield Supervised(process)
        finally:
            process.kill()


def is_alive(pid: int) -> bool:
    """Whether there is such a process, and it is no corpse."""
    try:
        return not re.search(r"^State:\s+[ZX]", Path(f"/proc/{pid}/status").read_text("utf-8"), re.MULTILINE)
    except OSError:
        return False


def wait_for_end(pid: int) -> None:
    """Wait until a process that need not be our child has ended."""
    with suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            assert select.select([descriptor], [], [], 60)[0]
        finally:
            os.close(descriptor)


def test_processes_share_the_work_and_stop_together_with_one_signal(dsn: str) -> None:
    # spec: SG-31, HO-36, SH-36
    with Crew(dsn) as crew, supervised(dsn, "--processes", "2", "--concurrency", "5") as two:
        pids = two.up(2)
        assert pids.keys() == {0, 1}
        assert two.process.pid not in pids.values()
        with crew.gate():
            for number in range(10):
                crew.enqueue("wait", number)
            crew.until("select count(distinct pid) = 2 and count(*) = 10 from effects where what = 'began'")
        assert two.ends(signal.SIGTERM) == 0, two.told()
        assert crew.effects("ended") == dict.fromkeys(range(10), 1)
        # Their lines can be told apart, and at the end it is summed up.
        began = {(line["process"], line["label"].rpartition(":")[2]) for line in two.said("WorkerStarted")}
        assert began == {(number, str(pid)) for number, pid in pids.items()}
        [end] = two.said("SupervisorStopped")
        assert (end["clean"], end["ended"], end["restarts"]) == (True, {"default": {"completed": 10}}, 0)
        assert not any(is_alive(pid) for pid in pids.values())


def test_what_died_is_replaced_and_its_jobs_do_not_wait_for_its_lease(dsn: str) -> None:
    # spec: SG-31, HO-36
    # fault: F2
    with (
        Crew(dsn) as crew,
        supervised(dsn, "--processes", "2", "--concurrency", "1", "--lease", "1h") as two,
        crew.gate(),
    ):
        pids = two.up(2)
        crew.enqueue("wait", 1)
        crew.began(1)
        pid = crew.until("select pid from effects where what = 'began'")
        os.kill(pid, signal.SIGKILL)
        crew.began(1, times=2)  # by its neighbour: the lease would have lasted an hour
        line = two.says("WorkerProcessEnded", pid=pid)
        assert (line["code"], line["expected"], line["level"]) == (-signal.SIGKILL, False, "error")
        again = two.says("WorkerProcessUp", process=line["process"])
        assert again["pid"] not in pids.values()
        job = crew.protocol.live(1)
        assert (job["attempt"], job["resets"], job["failures"]) == (2, 1, 0)


def test_the_jobs_of_the_last_one_that_died_are_taken_over_by_its_successor(dsn: str) -> None:
    # fault: F2
    with (
        Crew(dsn) as crew,
        supervised(dsn, "--processes", "2", "--lease", "1h") as two,
        crew.gate(),
    ):
        pids = two.up(2)
        crew.enqueue("wait", 1)
        crew.began(1)
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
        crew.began(1, times=2)


def test_a_second_signal_is_passed_on(dsn: str) -> None:
    # spec: SG-31
    with (
        Crew(dsn) as crew,
        supervised(dsn, "--processes", "2", "--grace", "1h", "--lease", "1h") as two,
        crew.gate(),
    ):
        two.up(2)
        crew.enqueue("wait", 1)
        crew.began(1)
        two.process.send_signal(signal.SIGINT)
        two.says("WorkerStopping", running=1)
        assert two.ends(signal.SIGTERM) == 1
        crew.protocol.reap()
        assert (crew.protocol.live(1)["state"], crew.protocol.live(1)["failures"]) == ("ready", 0)


def test_a_signal_that_reaches_all_of_a_group_counts_once(dsn: str) -> None:
    # As from a terminal, or from systemd with its KillMode=control-group.
    # spec: SG-31
    with Crew(dsn) as crew, supervised(dsn, "--processes", "2") as two:
        pids = two.up(2)
        with crew.gate():
            crew.enqueue("wait", 1)
            crew.began(1)
            for pid in (*pids.values(), two.process.pid):
                os.kill(pid, signal.SIGTERM)
            order = {two.says("SupervisorStopping", "WorkerStopping")["event"] for _ in range(3)}
            assert order == {"SupervisorStopping", "WorkerStopping"}
        assert two.ends() == 0, two.told()
        assert crew.effects("ended") == {1: 1}


def test_whoever_does_not_stop_in_time_is_killed(dsn: str) -> None:
    # spec: SG-31, ST-22
    with Crew(dsn) as crew, supervised(dsn, "--processes", "2", "--grace", "100ms") as two, crew.gate():
        two.up(2)
        crew.enqueue("spin", 1)  # its event loop is blocked, and hears nothing
        crew.began(1)
        assert two.ends(signal.SIGTERM) == 1
        [stuck] = two.said("WorkerProcessStuck")
        assert any(line["code"] == -signal.SIGKILL for line in two.said("WorkerProcessEnded"))
        assert not is_alive(stuck["pid"])


def test_if_the_supervisor_is_killed_nobody_is_left_behind(dsn: str) -> None:
    # spec: SG-31
    with Crew(dsn) as crew, supervised(dsn, "--processes", "2") as two:
        pids = two.up(2)
        with crew.gate():
            crew.enqueue("wait", 1)
            crew.began(1)
            two.process.kill()
            for _ in range(2):
                two.says("WorkerStopping", why="its supervisor is gone")
        two.ends()
        for pid in pids.values():
            wait_for_end(pid)
        assert crew.effects("ended") == {1: 1}
        assert crew.protocol.state(1) == "completed"


def test_a_rolling_restart_under_load_loses_and_counts_nothing(dsn: str) -> None:
    # spec: SH-36, SG-31
    # fault: F25, F26, F28
    with Crew(dsn) as crew, supervised(dsn, "--processes", "2", "--concurrency", "4") as two:
        before = two.up(2)
        for task in ("note", "note_blocking", "transfer", "transfer_blocking"):
            crew.connection.execute("select count(*) from shiftwork.enqueue_many(%s)", (jobs(task, 50),))
        crew.until("select count(*) >= 10 from shiftwork.history")
        two.process.send_signal(signal.SIGHUP)
        two.says("Renewing")
        order: list[tuple[str, int]] = []
        after: dict[int, int] = {}
        while len(after) < 2:
            line = two.says("WorkerProcessEnded", "WorkerProcessUp")
            order.append((line["event"], line["process"]))
            if line["event"] == "WorkerProcessUp":
                after[line["process"]] = line["pid"]
        # The second was told only when the first had been replaced.
        assert order == [
            ("WorkerProcessEnded", 0),
            ("WorkerProcessUp", 0),
            ("WorkerProcessEnded", 1),
            ("WorkerProcessUp", 1),
        ]
        assert not set(before.values()) & set(after.values())
        two.says("Renewed", error="")
        crew.until("select count(*) = 200 from shiftwork.history where state = 'completed'")
        assert two.ends(signal.SIGTERM) == 0, two.told()
        assert crew.protocol.value("select count(*) from {}.history where failures > 0 or resets > 0") == 0
        assert crew.protocol.value("select count(*) from {}.attempts") == 0
        effects = crew.protocol.value("select count(*) from effects")
        assert effects == 200


APP = """
import os
import shiftwork

app = shiftwork.App()


@app.task
async def greet() -> str:
    return "{greeting}"
"""


def test_a_program_that_cannot_be_imported_replaces_nothing(dsn: str, tmp_path: Path) -> None:
    # spec: SG-31
    program = tmp_path / "program.py"
    program.write_text(APP.format(greeting="hello"))
    with supervised(dsn, "--processes", "2", where="program.py", cwd=tmp_path) as two:
        pids = two.up(2)
        program.write_text("def broken(:\n")
        two.process.send_signal(signal.SIGHUP)
        line = two.says("Renewed")
        assert "cannot be imported" in line["error"]
        assert all(is_alive(pid) for pid in pids.values())
        assert two.ends(signal.SIGTERM) == 0


HASTY = """
from shiftwork import cli, supervisor
supervisor.IMPORT_WITHIN = 2.0
cli.main()
"""
ENDLESS = """
import os, pathlib, signal
pathlib.Path("hung").write_text(str(os.getpid()))
signal.pause()
"""


def test_a_program_whose_import_does_not_end_replaces_nothing_and_is_killed(dsn: str, tmp_path: Path) -> None:
    # spec: SG-31
    program = tmp_path / "program.py"
    program.write_text(APP.format(greeting="hello"))
    hasty = (sys.executable, "-c", HASTY)
    with supervised(dsn, "--processes", "2", where="program.py", cwd=tmp_path, program=hasty) as two:
        pids = two.up(2)
        program.write_text(ENDLESS)
        two.process.send_signal(signal.SIGHUP)
        line = two.says("Renewed")
        assert line["error"] == "the app was not imported within 2 s; all goes on as it was"
        assert all(is_alive(pid) for pid in pids.values())
        if (hung := tmp_path / "hung").exists():  # unless the time was not even enough to begin
            wait_for_end(int(hung.read_text("utf-8")))
        assert two.ends(signal.SIGTERM) == 0, two.told()


def test_who_cannot_begin_says_so_once_and_with_its_exit_code(empty_dsn: str, tmp_path: Path) -> None:
    # spec: SG-31
    (tmp_path / "broken.py").write_text("import no_such_thing\n")
    for where, code, said in (
        ("broken.py", 1, "No module named 'no_such_thing'"),
        (str(ROOT / "tests/sample.py"), 1, "is not installed"),
    ):
        done = subprocess.run(
            [*SHIFTWORK, "worker", where, "--processes", "3"],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env=surroundings(empty_dsn),
        )
        assert done.returncode == code, done.stderr
        assert done.stderr.count(said) == 1
        assert "gives up: worker process 0 could not begin" in done.stderr


def test_a_crash_loop_ends_loudly(dsn: str) -> None:
    # spec: SG-31
    with Crew(dsn) as crew, supervised(dsn, "--processes", "2", "--max-crashes", "3") as two:
        pids = two.up(2)
        pid = pids[1]
        for _ in range(2):
            os.kill(pid, signal.SIGKILL)
            pid = two.says("WorkerProcessUp", process=1)["pid"]
        os.kill(pid, signal.SIGKILL)
        assert two.ends() == 4
        [gave_up] = two.said("SupervisorGaveUp")
        assert gave_up["level"] == "critical"
        assert "worker process 1 has died 3 times" in gave_up["why"]
        # The other one was told to stop, and did.
        assert [line["code"] for line in two.said("WorkerProcessEnded") if line["process"] == 0] == [0]
        assert (
            crew.protocol.value("select count(*) from {}.workers where lease_until > clock_timestamp()") <= 1
        )


async def test_who_is_told_of_a_death_and_to_stop_takes_over_first(dsn: str, protocol: Protocol) -> None:
    """As when the death of a neighbour is one too many, and the supervisor gives up."""
    app = App(dsn)

    @app.task
    async def work() -> None: ...

    async with app, Workshop(app) as shop:
        await shop.asleep()
        dead = protocol.register(lease=3600)
        job = protocol.enqueue("work", queue="another")
        assert protocol.claim(dead, "another").held == [[job, 1]]
        shop.worker.bury(dead)
        shop.worker.stop("its supervisor gives up")
        await shop.stopped()
        assert shop.seen(events.WorkerBuried, worker=dead)
        assert (protocol.job(job)["state"], protocol.job(job)["resets"]) == ("ready", 1)


def test_processes_that_end_by_themselves_are_replaced_or_not_as_they_were_told(dsn: str) -> None:
    # spec: ST-25
    with Crew(dsn) as crew:
        crew.connection.execute("select count(*) from shiftwork.enqueue_many(%s)", (jobs("note", 9),))
        with supervised(dsn, "--processes", "2", "--concurrency", "1", "--max-jobs", "3") as two:
            crew.until("select count(*) = 9 from shiftwork.history")
            assert two.ends(signal.SIGTERM) == 0, two.told()
            assert len(two.said("WorkerStarted")) > 2
            assert two.said("SupervisorStopped")[0]["restarts"] == 0  # none of them died
        crew.connection.execute("select count(*) from shiftwork.enqueue_many(%s)", (jobs("note", 10),))
        with supervised(dsn, "--processes", "2", "--stop-when-idle") as two:
            assert two.ends() == 0, two.told()
            assert two.said("SupervisorStopped")[0]["ended"] == {"default": {"completed": 10}}


def sockets(pid: int) -> set[str]:
    """The sockets of a process."""
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # it was closed meanwhile
            found.add(str(entry.readlink()))
    return {name for name in found if "socket:" in name}


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_no_process_shares_a_socket_with_another(dsn: str) -> None:
    # fault: F33
    with Crew(dsn) as crew, supervised(dsn, "--processes", "2") as two:
        pids = two.up(2)
        with crew.gate():
            for number in range(4):
                crew.enqueue("transfer_waiting", number)
            crew.until("select count(*) = 4 from effects where what = 'began'")
            everybody = [sockets(pid) for pid in (two.process.pid, *pids.values())]
            assert all(everybody)
            assert sum(map(len, everybody)) == len(set.union(*everybody))
        assert two.ends(signal.SIGTERM) == 0


async def test_a_process_that_cannot_be_started_is_tried_again_and_then_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[events.Event] = []
    monkeypatch.setattr("shiftwork.supervisor.AGAIN", (0.001, 0.001))
    settings = Settings(processes=2, max_crashes=3)
    nowhere = Supervisor(settings, ["/nowhere/at/all"], tell=seen.append, systemd=Systemd())
    assert await nowhere.run() == GAVE_UP
    assert sum(isinstance(event, events.WorkerProcessRefused) for event in seen) == 3
    assert any(isinstance(event, events.SupervisorGaveUp) for event in seen)


# While one writes the program.


def test_a_change_of_the_program_starts_it_again_and_a_mistake_is_waited_out(
    dsn: str, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(APP.format(greeting="hello"))
    with Crew(dsn) as crew, supervised(dsn, "--reload", where="program.py", cwd=tmp_path) as one:

        def greeted() -> str:
            job = crew.protocol.enqueue("greet", {})
            crew.until("select state = 'completed' from shiftwork.all_jobs where id = %s", job)
            return str(crew.protocol.job(job)["result"])

        one.up(1)
        assert greeted() == "hello"
        program.write_text(APP.format(greeting="good evening"))
        one.says("FilesChanged")
        one.up(1)
        assert greeted() == "good evening"

        program.write_text("def broken(:\n")
        one.says_plainly("SyntaxError")
        program.write_text(APP.format(greeting="good night"))
        one.up(1)
        assert greeted() == "good night"
        (tmp_path / "notes.txt").write_text("no program")
        assert one.ends(signal.SIGINT) == 0, one.told()


# What it says about itself.


def test_lines_for_people_say_which_process_they_are_from(dsn: str) -> None:
    done = subprocess.run(
        [*SHIFTWORK, "worker", "tests.crew:app", "--processes", "2", "--stop-when-idle"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=surroundings(dsn),
    )
    assert done.returncode == 0, done.stderr
    for number in (0, 1):
        assert re.search(rf"INFO    \[{number}\] worker \d+ .* serves default", done.stderr)
    assert re.search(r"INFO    all processes have stopped; done: no job$", done.stderr, re.MULTILINE)
