"""Workers as processes of their own, for tests that stop, cut off and kill them.

What their handlers do is written to the table `effects`, in the same database, and whoever waits for it is notified. A handler
that is to wait does so for an advisory lock (`Crew.gate`), which the test holds: nobody sleeps.

    with Crew(dsn) as crew:
        process = crew.hire(lease="2s")
        with crew.gate():
            job = crew.enqueue("wait", number=1)
            crew.until("select exists (select from effects where what = 'began')")
            process.kill()
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import psycopg
from psycopg import AsyncConnection, Connection
from psycopg.rows import dict_row

import shiftwork
from shiftwork import App, Context, logs
from shiftwork.worker.signals import heeding
from tests import pooler
from tests.harness import Protocol

COMMAND = ("-c", "from shiftwork.cli import main; main()", "worker", "tests.crew:app", "--log-level", "error")
PATIENCE = 60.0
GATE = 4_711

EFFECTS = """
create table effects (
  what text not null, number int not null, job bigint not null, attempt int not null, pid int not null,
  at timestamptz not null default clock_timestamp());
create function tell_effect() returns trigger language plpgsql as $$
begin
  perform pg_notify('effects', '');
  return null;
end $$;
create trigger tell after insert on effects for each statement execute function tell_effect();
"""
EFFECT = "insert into effects (what, number, job, attempt, pid) values (%s, %s, %s, %s, %s)"


class Crew:
    """Worker processes on one database."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        self.connection = psycopg.Connection[dict[str, Any]].connect(
            self.dsn, autocommit=True, row_factory=dict_row
        )
        self.connection.execute(EFFECTS)
        self.connection.execute("listen effects")
        self.protocol = Protocol(self.connection)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        self.connection.close()

    def hire(
        self, dsn: str | None = None, *, die_at: str = "", command: bool = False, **settings: object
    ) -> subprocess.Popen[bytes]:
        """Start a worker; `die_at`: it kills itself when it first comes to this point while it holds a job.

        As a `command` it is started as people do it.
        """
        dsn = dsn or self.dsn
        given = {f"SHIFTWORK_{name.upper()}": str(value) for name, value in settings.items()}
        given |= pooler.environment(dsn)  # handlers go to the database themselves
        clean = {name: value for name, value in os.environ.items() if not name.startswith("SHIFTWORK_")}
        process = subprocess.Popen(
            [sys.executable, *(COMMAND if command else ("-m", "tests.crew"))],
            env={**clean, **given, "DATABASE_URL": dsn, "CREW_DIE_AT": die_at},
            stdin=subprocess.DEVNULL,
        )
        self.processes.append(process)
        return process

    def enqueue(self, task: str, number: int = 0, **options: object) -> int:
        """Enqueue one job."""
        return self.protocol.enqueue(task, {"number": number}, **options)

    def worker_of(self, process: subprocess.Popen[bytes]) -> int:
        """The id of the worker that this process is now, once it is registered."""
        found = self.until("select max(id) from shiftwork.workers where pid = %s", process.pid)
        assert isinstance(found, int)
        return found

    def until(self, text: str, *params: object) -> Any:
        """Wait until the answer to this is true, asked whenever a handler has done something."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            row = self.connection.execute(text.encode(), params or None).fetchone()
            [found] = row.values() if row else [None]
            if found:
                return found
            for _ in self.connection.notifies(timeout=0.05, stop_after=1):
                pass
        workers = self.protocol.rows("select * from {}.workers")
        jobs = self.protocol.rows("select * from {}.all_jobs where state <> 'completed' limit 10")
        raise AssertionError(f"never came about: {text} {params}; workers {workers}; jobs {jobs}")

    def began(self, number: int, times: int = 1) -> None:
        """Wait until handlers of jobs with this number have begun."""
        self.until("select count(*) >= %s from effects where what = 'began' and number = %s", times, number)

    def effects(self, what: str) -> dict[int, int]:
        """How often each number had this effect."""
        found = self.protocol.rows(
            "select number, count(*) as times from effects where what = %s group by number", what
        )
        return {row["number"]: row["times"] for row in found}

    @contextmanager
    def gate(self) -> Iterator[None]:
        """Whoever comes to the gate waits there, as long as the block lasts."""
        with psycopg.connect(self.dsn, autocommit=True) as holder:
            holder.execute("select pg_advisory_lock(%s)", (GATE,))
            yield


# The other side: what the processes run.

app = App()


def _effect(what: str, number: int, context: Context) -> tuple[Any, ...]:
    return (what, number, context.job.id, context.attempt, os.getpid())


async def _note(what: str, number: int, context: Context) -> None:
    async with await AsyncConnection.connect(os.environ["DATABASE_URL"], autocommit=True) as connection:
        await connection.execute(EFFECT, _effect(what, number, context))


def _note_blocking(what: str, number: int, context: Context) -> None:
    with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as connection:
        connection.execute(EFFECT, _effect(what, number, context))


async def _pass_gate() -> None:
    async with await AsyncConnection.connect(os.environ["DATABASE_URL"], autocommit=True) as connection:
        await connection.execute("select pg_advisory_lock_shared(%s)", (GATE,))


FOREVER: Any = {"max_resets": 1_000_000, "retry": shiftwork.Retry(max_attempts=1)}
"""Lost as often as may be, and failed never: whatever is counted as a failure ends the job, and is seen."""


@app.task(**FOREVER)
async def note(context: Context, number: int) -> None:
    """An effect that is committed at once."""
    await _note("plain", number, context)
    await asyncio.sleep(random.uniform(0, 0.2))


@app.task(**FOREVER)
async def journey(context: Context, number: int) -> None:
    """The same, with something said on the way."""
    context.log.info("on the way")
    context.progress(0.5, "half")
    await _note("plain", number, context)


@app.task(**FOREVER)
def note_blocking(context: Context, number: int) -> None:
    """The same in a thread."""
    _note_blocking("plain", number, context)
    time.sleep(random.uniform(0, 0.2))


@app.task(transaction=True, **FOREVER)
async def transfer(tx: AsyncConnection[Any], context: Context, number: int) -> None:
    """An effect that is committed with the job."""
    await tx.execute(EFFECT, _effect("transactional", number, context))
    await asyncio.sleep(random.uniform(0, 0.2))


@app.task(transaction=True, **FOREVER)
def transfer_blocking(tx: Connection[Any], context: Context, number: int) -> None:
    """The same in a thread."""
    tx.execute(EFFECT, _effect("transactional", number, context))
    time.sleep(random.uniform(0, 0.2))


@app.task(**FOREVER)
async def wait(context: Context, number: int) -> None:
    """Say that it began, pass the gate, say that it ended."""
    await _note("began", number, context)
    await _pass_gate()
    await _note("ended", number, context)


@app.task(transaction=True, **FOREVER)
async def transfer_waiting(tx: AsyncConnection[Any], context: Context, number: int) -> None:
    """An effect that is committed with the job, once the gate is open."""
    await tx.execute(EFFECT, _effect("transactional", number, context))
    await _note("began", number, context)
    await _pass_gate()


@app.task(**FOREVER)
def stubborn(context: Context, number: int) -> None:
    """Never return, whatever it is told."""
    _note_blocking("began", number, context)
    threading.Event().wait()


@app.task(transaction=True, **FOREVER)
def stubborn_transfer(tx: Connection[Any], context: Context, number: int) -> None:
    """Never return, and keep the job's row locked."""
    tx.execute(EFFECT, _effect("transactional", number, context))
    _note_blocking("began", number, context)
    threading.Event().wait()


@app.task(**FOREVER)
async def stubborn_aside(context: Context, number: int) -> None:
    """Wait for a thread of its own that never ends."""
    await _note("began", number, context)
    await asyncio.to_thread(threading.Event().wait)


@app.task(**FOREVER)
async def spin(context: Context, number: int) -> None:
    """Block the event loop until the gate is open."""
    _note_blocking("began", number, context)
    with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as connection:
        while not connection.execute("select pg_try_advisory_lock_shared(%s)", (GATE,)).fetchone()[0]:  # type: ignore[index]
            sum(range(10_000))


@app.task(on_lost="fail")
async def precious(context: Context, number: int) -> None:
    """Begin once at most."""
    await _note("began", number, context)
    await _pass_gate()


@app.task(max_resets=1)
async def deadly(context: Context, number: int) -> None:
    """Kill the process."""
    await _note("began", number, context)
    os.kill(os.getpid(), signal.SIGKILL)


def _something_runs() -> bool:
    with psycopg.connect(os.environ["DATABASE_URL"]) as connection:
        found = connection.execute("select from shiftwork.jobs where state = 'running'").fetchall()
        return bool(found)


async def _work() -> bool:
    worker = await app.worker()
    point = os.environ["CREW_DIE_AT"]

    def die(reached: str) -> None:
        if reached == point and (worker.jobs or (reached == "claimed" and _something_runs())):
            os.kill(os.getpid(), signal.SIGKILL)

    if point:
        worker._at = die
    with heeding(worker):
        return await worker.run()


if __name__ == "__main__":
    logs.set_up(os.environ.get("CREW_LOG", "error"), "text")
    sys.exit(0 if asyncio.run(_work()) else 1)


def jobs(task: str, many: int, first: int = 0) -> str:
    """So many jobs, numbered from the first, as enqueue_many takes them."""
    return json.dumps([{"task": task, "payload": {"number": first + n}} for n in range(many)])


__all__ = ["Crew", "jobs"]
