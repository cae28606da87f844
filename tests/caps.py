"""Limits of the cluster while many processes claim at once: never exceeded, and used.

    make caps           8 processes for 60 s under three limits, looked at fifty times a second

Three queues have more to do than they may: one has a limit of its own, in the second a task has one, and over all there
is a third. Each look counts what is running, in one snapshot of the database.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import psycopg

from shiftwork import App, embedded
from shiftwork.migrate import migrate
from tests.harness import Protocol

LIMITS = {("queue", "a"): 5, ("task", "slow"): 3, ("all", ""): 12}
LOOK_EVERY = 0.02
BUSY = 0.9

app = App(queues={"a": 5, "b": None, "c": None}, max_running=12)


@app.task(queue="a")
async def quick(seconds: float) -> None:
    await asyncio.sleep(seconds)


@app.task(queue="b", max_running=3)
async def slow(seconds: float) -> None:
    await asyncio.sleep(seconds)


RUNNING = """
select one.kind, one.name, (
         select count(*) from shiftwork.jobs as job
          where job.state = 'running'
            and one.name = case one.kind when 'queue' then job.queue when 'task' then job.task else '' end) as many
  from {}.limits as one
"""
UNPAIRED = """
select (select count(*) from {}.permits) as permits, (
  select count(*) from shiftwork.permits as permit
   where permit.job is not null
     and not exists (select from shiftwork.jobs as job where job.id = permit.job and job.state = 'running')) as astray
"""


@dataclass
class Account:
    """What was seen: how many were running under each limit, at most and on average."""

    looks: int = 0
    most: dict[tuple[str, str], int] = field(default_factory=lambda: dict.fromkeys(LIMITS, 0))
    total: dict[tuple[str, str], int] = field(default_factory=lambda: dict.fromkeys(LIMITS, 0))
    astray: int = 0
    permits: int = 0
    ended: int = 0

    @property
    def exceeded(self) -> list[tuple[str, str]]:
        """Limits that were."""
        return [limit for limit, most in LIMITS.items() if self.most[limit] > most]

    def busy(self, limit: tuple[str, str]) -> float:
        """The part of it that was in use."""
        return self.total[limit] / max(self.looks, 1) / LIMITS[limit]


def measure(dsn: str, processes: int, seconds: float, length: float) -> Account:
    """Let so many workers go at more than they may do, and look on; a job takes this long, more or less."""
    account = Account()
    account_of = list(LIMITS)
    with psycopg.connect(dsn, autocommit=True) as connection:
        protocol = Protocol(connection)
        many = int(seconds / length * 2) * LIMITS["all", ""] + 100
        for queue, task in (("a", "quick"), ("b", "slow"), ("c", "quick")):
            protocol.enqueue_many(
                {
                    "task": task,
                    "queue": queue,
                    "payload": {"seconds": length * random.uniform(0.5, 1.5)},
                }
                for _ in range(many)
            )
        workers = [_hire(dsn) for _ in range(processes)]
        try:
            while protocol.value("select count(*) from {}.workers") < processes or not all(
                row["many"] for row in protocol.rows(RUNNING)
            ):
                time.sleep(LOOK_EVERY)
            time.sleep(min(2.0, seconds / 4))
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                found = {(row["kind"], row["name"]): row["many"] for row in protocol.rows(RUNNING)}
                account.looks += 1
                for limit in account_of:
                    account.most[limit] = max(account.most[limit], found[limit])
                    account.total[limit] += found[limit]
                time.sleep(LOOK_EVERY)
        finally:
            for worker in workers:
                worker.terminate()
            for worker in workers:
                worker.wait(60)
        account.ended = protocol.value("select count(*) from {}.history")
        [row] = protocol.rows(UNPAIRED)
        account.permits, account.astray = row["permits"], row["astray"]
    return account


def _hire(dsn: str) -> subprocess.Popen[bytes]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SHIFTWORK_")}
    command = "from shiftwork.cli import main; main()"
    options = ("--queues", "a,b,c", "--concurrency", "6", "--log-level", "error", "--grace", "5s")
    return subprocess.Popen(
        [sys.executable, "-c", command, "worker", "tests.caps:app", *options],
        env={**clean, "DATABASE_URL": dsn},
        stdin=subprocess.DEVNULL,
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="make caps", description=__doc__)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--length", type=float, default=0.5, help="seconds that a job takes, more or less")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shiftwork-caps-") as folder:
        Path(folder).chmod(0o755)
        with embedded.start(Path(folder) / "data", options={"max_connections": "200"}) as server:
            with psycopg.connect(server.url, autocommit=True) as connection:
                migrate(connection)
            account = measure(server.url, options.processes, options.seconds, options.length)
    print(
        f"{options.processes} processes, {options.seconds:g} s, jobs of about {options.length:g} s, "
        f"{account.ended:,} ended, {account.looks:,} looks"
    )
    for limit, most in LIMITS.items():
        print(
            f"  {' '.join(limit).strip():<10} limit {most:>3}, at most {account.most[limit]:>3} at once, "
            f"{account.busy(limit):.3f} of it in use"
        )
    print(f"  permits {account.permits}, of which {account.astray} belong to no running job")
    wrong = account.exceeded or account.astray or min(map(account.busy, LIMITS)) < BUSY
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
