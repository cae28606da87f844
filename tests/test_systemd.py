"""What systemd hears: a socket as it has one, and real workers that talk to it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from uuid import uuid4

import pytest

from shiftwork import App, events
from shiftwork.systemd import Systemd
from tests.crew import Crew
from tests.test_cli import SHIFTWORK
from tests.test_cli_worker import ROOT, surroundings
from tests.test_supervisor import is_alive, supervised
from tests.workshop import Workshop


class Ear:
    """The socket on which systemd listens."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.heard: list[dict[str, str]] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(f"\0{address[1:]}" if address.startswith("@") else address)
        self._socket.settimeout(60)

    def close(self) -> None:
        self._socket.close()

    def next(self) -> dict[str, str]:
        """The next message, as names and values."""
        told = dict(line.split("=", 1) for line in self._socket.recv(4096).decode().split("\n"))
        self.heard.append(told)
        return told

    def silent(self, seconds: float) -> bool:
        """Whether nothing is said for so long."""
        self._socket.settimeout(seconds)
        try:
            self.next()
        except TimeoutError:
            return True
        finally:
            self._socket.settimeout(60)
        return False

    def drain(self) -> None:
        """Hear what was said before."""
        while not self.silent(0.001):
            pass

    def until(self, name: str, value: str = "1") -> dict[str, str]:
        """Wait for a message that says this."""
        while True:
            told = self.next()
            if told.get(name) == value:
                return told


@contextmanager
def listening(address: str | None = None) -> Iterator[Ear]:
    with tempfile.TemporaryDirectory(prefix="sw-") as folder:
        ear = Ear(address or f"{folder}/notify")
        try:
            yield ear
        finally:
            ear.close()


@contextmanager
def service(dsn: str, ear: Ear, *arguments: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A worker that was started by systemd."""
    told = surroundings(dsn, NOTIFY_SOCKET=ear.address, **environment)
    command = [*SHIFTWORK, "worker", "tests.crew:app", "--log-level", "error", *arguments]
    with subprocess.Popen(command, cwd=ROOT, env=told) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("abstract", [False, True])
def test_a_worker_says_that_it_is_ready_what_it_does_and_that_it_stops(dsn: str, abstract: bool) -> None:
    with (
        Crew(dsn) as crew,
        listening(f"@sw-{uuid4().hex}" if abstract else None) as ear,
        service(dsn, ear, WATCHDOG_USEC="600000") as process,
    ):
        ready = ear.until("READY")
        assert ready["STATUS"] == "serves default"
        assert crew.protocol.value("select count(*) from {}.workers") == 1
        ear.until("WATCHDOG")
        assert ear.until("STATUS", "serves default; 0 at hand, 0 claimed so far")
        process.send_signal(signal.SIGTERM)
        stopping = ear.until("STOPPING")
        assert stopping["STATUS"] == "stops (SIGTERM); 0 still running"
        assert process.wait(60) == 0


def test_a_supervisor_speaks_for_all_and_tells_when_it_renews_them(dsn: str) -> None:
    with listening() as ear, service(dsn, ear, "--processes", "2") as process:
        assert ear.next() == {
            "READY": "1",
            "STATUS": "2 of 2 processes at work, 0 started again so far",
        }
        process.send_signal(signal.SIGHUP)
        reloading = ear.until("RELOADING")
        assert int(reloading["MONOTONIC_USEC"]) > 0
        ear.until("READY")
        process.send_signal(signal.SIGTERM)
        ear.until("STOPPING")
        assert process.wait(60) == 0


async def test_a_thread_that_renews_the_lease_and_does_not_turn_is_noticed(dsn: str) -> None:
    app = App(dsn)

    @app.task
    async def nothing() -> None: ...

    async with Workshop(app, lease=timedelta(hours=1)) as shop:
        await shop.event(events.WorkerStarted)
        assert shop.worker.ping().wait(10)
        leases, stuck = shop.worker._leases, threading.Event()
        while leases._loop is None:  # the thread has only just been started
            await asyncio.sleep(0)
        assert leases._thread is not None
        leases._loop.call_soon_threadsafe(stuck.wait, 30)
        ping = shop.worker.ping()
        assert not ping.is_set()
        stuck.set()
        assert ping.wait(10)
        leases._closing = True
        leases.nudge()
        leases._thread.join(10)
        assert not shop.worker.ping().is_set()
    app.close()


def test_a_worker_whose_event_loop_is_blocked_does_not_say_that_it_is_alive(dsn: str) -> None:
    with (
        Crew(dsn) as crew,
        listening() as ear,
        service(dsn, ear, WATCHDOG_USEC="300000") as process,
    ):
        ear.until("WATCHDOG")
        with crew.gate():
            crew.enqueue("spin", 1)
            crew.began(1)
            ear.drain()
            crew.until("select seen_at > clock_timestamp() - interval '1 s' from shiftwork.workers")
            assert ear.silent(1.0)  # three times as long as it may take
        ear.until("WATCHDOG")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_a_supervisor_kills_who_does_not_say_so_and_nobody_else(dsn: str) -> None:
    with (
        Crew(dsn) as crew,
        listening() as ear,
        supervised(dsn, "--processes", "2", NOTIFY_SOCKET=ear.address, WATCHDOG_USEC="2000000") as two,
    ):
        pids = two.up(2)
        with crew.gate():
            crew.enqueue("spin", 1)
            crew.began(1)
            pid = crew.until("select pid from effects where what = 'began'")
            stuck = two.says("WorkerProcessStuck")
            assert stuck["pid"] == pid
            assert "has not said for 2.0 s that it is alive" in stuck["why"]
            two.says("WorkerProcessEnded", pid=pid, code=-signal.SIGKILL)
        two.says("WorkerProcessUp", process=stuck["process"])
        [other] = set(pids.values()) - {pid}
        assert is_alive(other)
        assert two.ends(signal.SIGTERM) == 0, two.told()


def test_what_a_service_starts_is_not_the_service() -> None:
    given = {
        "NOTIFY_SOCKET": "/run/systemd/notify",
        "WATCHDOG_USEC": "5000000",
        "WATCHDOG_PID": "1",
        "HOME": "/",
    }
    environment = dict(given)
    taken = Systemd.take(environment)
    assert taken
    assert taken.watchdog is None  # it is meant for another process
    assert environment == {"HOME": "/"}
    assert Systemd.take({**given, "WATCHDOG_PID": str(os.getpid())}).watchdog == 5
    assert not Systemd.take(environment)
    Systemd("/nowhere/at/all").ready("nobody listens")
