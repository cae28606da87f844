"""The same harm as in `make chaos`, to workers over a table of one's own: killed, stopped, cut off, their server crashed, while rows
are inserted; afterwards every row and every effect is accounted for.

    python -m tests.table_chaos          5,000 rows, 4 worker processes; two minutes
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg

import shiftwork
from tests.checker import Act, History, Loss, Sent, Step, Verdict, check
from tests.station import Station
from tests.wire import Wire

TABLES = """
create table public.chaos_jobs (
  id bigint generated always as identity primary key, state text not null default 'queued', failure_message text,
  queued_at timestamptz default now(), started_at timestamptz, finished_at timestamptz, process_after timestamptz,
  num_resets int not null default 0, num_failures int not null default 0, last_heartbeat_at timestamptz,
  worker_hostname text not null default '', attempt int not null default 0, number int not null);
create table public.effects (number int not null, job bigint not null, attempt int not null);
create table public.steps (
  n bigint generated always as identity, job bigint, attempt int, worker bigint, state text,
  at timestamptz not null default clock_timestamp());
create function public.note_step() returns trigger language plpgsql as $$
begin
  insert into public.steps (job, attempt, worker, state) values (
    new.id, new.attempt, nullif(split_part(new.worker_hostname, ':', -1), '')::bigint,
    case new.state when 'queued' then 'ready' when 'errored' then 'scheduled' when 'processing' then 'running'
                   when 'canceled' then 'cancelled' else new.state end);
  return null;
end $$;
create trigger note_beginning after insert on chaos_jobs for each row execute function public.note_step();
create trigger note_step after update of state on chaos_jobs for each row
  when (old.state is distinct from new.state) execute function public.note_step();
"""
SAID = {"claim": "picked as materialized", "outcome": "told as materialized", "renew": "ours as materialized"}
"""What is cut, and the words it is known by; a commit goes with its outcome."""

store = shiftwork.TableStore(
    "chaos_jobs",
    retry=shiftwork.Retry(max_attempts=1_000_000, delays=timedelta(milliseconds=100), factor=1),
    max_resets=1_000_000,
)


@store.handler(transaction=True)
async def transfer(row: dict[str, Any], tx: psycopg.AsyncConnection[Any], context: shiftwork.Context) -> None:
    """Leave an effect, which commits with the row."""
    line = f"{context.job.id} {context.attempt} {os.getpid()} {time.time()}\n"
    with open(os.environ["CHAOS_LOG"], "ab", buffering=0) as log:  # noqa: PTH123
        log.write(line.encode())  # in one piece, whoever else writes
    await tx.execute(
        "insert into public.effects values (%s, %s, %s)", (row["number"], context.job.id, context.attempt)
    )
    await asyncio.sleep(random.uniform(0, 0.3))


@dataclass(frozen=True)
class Size:
    """How much of everything; the seconds are those in which rows are inserted and harm is done."""

    jobs: int = 5_000
    workers: int = 4
    seconds: float = 100
    kills: int = 25
    stops: int = 10
    restarts: int = 3
    terminations: int = 40
    cuts: int = 80
    lease: float = 2.0
    poll: float = 2.0
    slack: float = 1.0

    @property
    def bound(self) -> float:
        """Seconds until a row that was lost runs again; one that was locked waits for one more look."""
        return self.lease + 2 * self.lease / 3 + self.poll + self.slack


class Havoc:
    """One run."""

    def __init__(self, size: Size, seed: int) -> None:
        self.size, self.seed = size, seed
        self.did: Counter[str] = Counter()
        self.sent: list[Sent] = []
        self.gone: dict[int, float] = {}
        self.outages: list[tuple[float, float]] = []
        self.crew: list[subprocess.Popen[bytes]] = []
        self._dice = random.Random(seed)
        self._harm = threading.Lock()
        """One worker at a time is killed or stopped: the others take over."""

        self._folder = Path(tempfile.mkdtemp(prefix="shiftwork-chaos-"))
        self._folder.chmod(0o777)
        self._log = self._folder / "acts.log"

    def run(self) -> Verdict:
        """Do all of it, and say what came of it."""
        size = self.size
        lanes: dict[str, tuple[Callable[[], bool], int]] = {
            "kill": (self.kill, size.kills),
            "stop": (self.stop, size.stops),
            "restart": (self.restart, size.restarts),
            "terminate": (self.terminate, size.terminations),
            "cut": (self.cut, size.cuts),
        }
        with Station(fsync=True) as self.station, Wire(self.station.dsn) as self.wire:
            try:
                self._ask(TABLES)
                self.crew = [self._hired() for _ in range(size.workers)]
                self._all_up()
                threads = [threading.Thread(target=self._produce)]
                threads += [
                    threading.Thread(target=self._lane, args=(name, *lane)) for name, lane in lanes.items()
                ]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                self._drain()
                self._all_up()  # who has only just been started does not know yet what TERM means to it
                for process in self.crew:
                    process.terminate()
                codes = [process.wait(60) for process in self.crew]
                verdict = check(self._history())
                if any(codes):
                    verdict.illegal.append(f"exit codes after TERM: {codes}")
                return verdict
            finally:
                for process in self.crew:
                    with suppress(ProcessLookupError):
                        process.send_signal(signal.SIGCONT)
                        process.kill()
                    process.wait()
                shutil.rmtree(self._folder, ignore_errors=True)

    def _hired(self) -> subprocess.Popen[bytes]:
        given = {
            "lease": f"{self.size.lease}s",
            "poll": f"{self.size.poll}s",
            "concurrency": 5,
            "reconnect": "200ms",
            "reconnect_most": "2s",
        }
        clean = {name: value for name, value in os.environ.items() if not name.startswith("SHIFTWORK_")}
        settings = {f"SHIFTWORK_{name.upper()}": str(value) for name, value in given.items()}
        return subprocess.Popen(
            [
                sys.executable,
                "-c",
                "from shiftwork.cli import main; main()",
                "worker",
                "tests.table_chaos:store",
                "--log-level",
                "error",
            ],
            env={**clean, **settings, "DATABASE_URL": self.wire.dsn, "CHAOS_LOG": str(self._log)},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def _produce(self) -> None:
        for number in range(self.size.jobs):
            time.sleep(self.size.seconds / self.size.jobs)
            sent = False
            try:
                with psycopg.connect(self.wire.dsn, autocommit=True) as connection:
                    sent = True
                    connection.execute("insert into chaos_jobs (number) values (%s)", (number,))
            except psycopg.Error:
                self.sent.append(Sent(number, "unknown" if sent else "failed", transactional=True))
                time.sleep(0.2)
            else:
                self.sent.append(Sent(number, "ok", transactional=True))

    def _lane(self, name: str, act: Callable[[], bool], many: int) -> None:
        began = time.monotonic()
        deadline = began + self.size.seconds * 1.5
        for turn in range(1, many + 1):
            time.sleep(max(0.0, began + turn * self.size.seconds / (many + 1) - time.monotonic()))
            while time.monotonic() < deadline:
                with suppress(psycopg.Error, ProcessLookupError):
                    if act():
                        self.did[name] += 1
                        break
                time.sleep(0.05)

    def _somebody(self) -> subprocess.Popen[bytes] | None:
        """A worker that has just begun something."""
        lines = self._log.read_text().splitlines()[-50:] if self._log.exists() else []
        busy = {int(pid) for _, _, pid, at in map(str.split, lines) if float(at) > time.time() - 0.1}
        working = [process for process in self.crew if process.pid in busy]
        return self._dice.choice(working) if working else None

    def kill(self) -> bool:
        """A worker, with -9; another takes its place."""
        with self._harm:
            if (victim := self._somebody()) is None:
                return False
            self.crew.remove(victim)
            self.gone[victim.pid] = time.time()
            victim.kill()
            victim.wait()
            self.crew.append(self._hired())
        return True

    def stop(self) -> bool:
        """A worker, for longer than its lease; then it goes on."""
        with self._harm:
            if (victim := self._somebody()) is None:
                return False
            self.gone[victim.pid] = time.time()
            victim.send_signal(signal.SIGSTOP)
            time.sleep(self.size.lease * 1.7)
            victim.send_signal(signal.SIGCONT)
        return True

    def restart(self) -> bool:
        """The server, at once and without a farewell."""
        gone = time.time()
        self.station.restart("immediate")
        self.outages.append((gone, time.time()))
        return True

    def terminate(self) -> bool:
        """A session of some worker."""
        rows = self._ask(
            "select pg_terminate_backend(pid) from (select pid from pg_stat_activity"
            " where application_name like 'shiftwork table %' order by random() limit 1) as one"
        )
        return bool(rows and rows[0][0])

    def cut(self) -> bool:
        """A line, before something on it is carried, or before its answer is."""
        what = self._dice.choice(list(SAID))
        text, losing = SAID[what], self._dice.random() < 0.5
        before, until = self.wire.said[text], time.monotonic() + 5
        (self.wire.losing if losing else self.wire.cutting)(text)
        while self.wire.said[text] == before and time.monotonic() < until:
            time.sleep(0.01)
        self.wire.losing(text, 0)
        self.wire.cutting(text, 0)
        self.did[f"{'lost' if losing else 'cut'} {what}"] += self.wire.said[text] != before
        return self.wire.said[text] != before

    def _ask(self, text: str, *params: object) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.station.dsn, autocommit=True, connect_timeout=5) as connection:
            cursor = connection.execute(text.encode(), params or None)
            return cursor.fetchall() if cursor.description else []

    def _all_up(self) -> None:
        up = "select count(distinct application_name) >= %s from pg_stat_activity where application_name ~ '^shiftwork table [0-9]+$'"
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self._ask(up, len(self.crew)) != [(True,)]:
            time.sleep(0.1)

    def _drain(self) -> None:
        deadline = time.monotonic() + 90
        left = "select 1 from chaos_jobs where state not in ('completed', 'failed', 'canceled') limit 1"
        while time.monotonic() < deadline and self._ask(left):
            time.sleep(0.2)

    def _history(self) -> History:
        steps = (
            "select job, attempt, worker, state, extract(epoch from at)::float from public.steps order by n"
        )
        held = [line.split() for line in self._log.read_text().splitlines()]
        return History(
            sent=self.sent,
            numbers=dict(self._ask("select id, number from chaos_jobs")),
            steps=[Step(*row) for row in self._ask(steps)],
            acts=[
                Act(number, job, attempt, transactional=True)
                for number, job, attempt in self._ask("select number, job, attempt from public.effects")
            ],
            left=[
                job
                for (job,) in self._ask(
                    "select id from chaos_jobs where state not in ('completed', 'failed', 'canceled')"
                )
            ],
            losses=[
                Loss(int(job), int(attempt), self.gone[int(pid)])
                for job, attempt, pid, at in held
                if float(at) <= self.gone.get(int(pid), 0.0)
            ],
            outages=sorted(self.outages),
            bound=self.size.bound,
        )


def main() -> None:
    """Do it in full, and tell."""
    parser = argparse.ArgumentParser(
        description="Do harm to workers over a table, and account for every row."
    )
    for name, default in asdict(Size()).items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    given = vars(parser.parse_args())
    havoc = Havoc(Size(**{name: value for name, value in given.items() if name != "seed"}), given["seed"])
    verdict = havoc.run()
    found = verdict.recoveries
    print(f"seed {havoc.seed}: {len(havoc.sent):,} rows: {dict(Counter(sent.answer for sent in havoc.sent))}")
    print(f"done to them: {', '.join(f'{what} {many}' for what, many in sorted(havoc.did.items()))}")
    if found:
        print(
            f"{len(found)} attempts lost who ran them, which ran again after {found[len(found) // 2]:.2f} s, {found[-1]:.2f} s at most"
        )
    print(", ".join(f"{kind} {len(many)}" for kind, many in verdict.kinds.items()))
    print(*verdict.violations[:50], sep="\n")
    sys.exit(1 if verdict.violations else 0)


if __name__ == "__main__":
    main()
