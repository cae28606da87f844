"""Everything at once: workers and their children killed and stopped, the server crashed, sessions ended, lines cut in the middle of
what is said on them, while producers enqueue; and an account of every job afterwards.

    make chaos          20,000 jobs, 5 producers, 8 worker processes; six minutes

Each way of doing harm is a lane, with a thread of its own. What producers were told, what handlers wrote and what triggers noted in
the database is then given to the judge, tests/checker.py.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, LiteralString, Self
from urllib.request import urlopen

import psycopg

from shiftwork import App
from shiftwork.errors import DatabaseError, DatabaseUnavailable
from tests.chaos_app import PLAIN, ROUTINE, ROW, TRANSACTIONAL
from tests.checker import Act, Execution, History, Lease, Look, Loss, Sent, Step, Verdict, check
from tests.station import Station
from tests.wire import Wire

TABLES = """
create table public.effects (number int not null, job bigint not null, attempt int not null);
create table public.steps (
  n bigint generated always as identity, job bigint, attempt int, worker bigint, state text,
  at timestamptz not null default clock_timestamp());
create table public.leases (worker bigint, until timestamptz, at timestamptz not null default clock_timestamp());
create function public.note_step() returns trigger language plpgsql as $$
begin
  insert into public.steps (job, attempt, worker, state) values (new.id, new.attempt, new.worker, new.state::text);
  return null;
end $$;
create trigger note_beginning after insert on shiftwork.jobs for each row execute function public.note_step();
create trigger note_step after update of state on shiftwork.jobs for each row
  when (old.state is distinct from new.state or old.worker is distinct from new.worker) execute function public.note_step();
create trigger note_end after insert on shiftwork.history for each row execute function public.note_step();
create function public.note_lease() returns trigger language plpgsql as $$
begin
  insert into public.leases values (new.id, new.lease_until);
  return null;
end $$;
create trigger note_lease after insert or update of lease_until on shiftwork.workers for each row execute function public.note_lease();
create table public.chaos_rows (
  id bigint generated always as identity (start with 1000000000) primary key, state text not null default 'queued', failure_message text,
  queued_at timestamptz default now(), started_at timestamptz, finished_at timestamptz, process_after timestamptz,
  num_resets int not null default 0, num_failures int not null default 0, last_heartbeat_at timestamptz,
  worker_hostname text not null default '', attempt int not null default 0, number int not null);
create function public.note_row() returns trigger language plpgsql as $$
begin
  insert into public.steps (job, attempt, worker, state) values (
    new.id, new.attempt, nullif(split_part(new.worker_hostname, ':', -1), '')::bigint,
    case new.state when 'queued' then 'ready' when 'errored' then 'scheduled' when 'processing' then 'running'
                   when 'canceled' then 'cancelled' else new.state end);
  return null;
end $$;
create trigger note_beginning after insert on public.chaos_rows for each row execute function public.note_row();
create trigger note_step after update of state on public.chaos_rows for each row
  when (old.state is distinct from new.state) execute function public.note_row();
"""
FIRST_ROW = 1_000_000_000
"""What is as large is the id of a row, and not of a job."""

LEFT = "select id from public.chaos_rows where state not in ('completed', 'failed', 'canceled')"

FAMILIES = """
select parent.id, array_agg(child.state) from shiftwork.history as parent left join shiftwork.all_jobs as child on child.parent = parent.id
 where parent.task = 'note_and_spawn' and parent.state = 'completed'
 group by parent.id having count(child.id) <> 2 or bool_or(child.state <> 'completed')
"""
"""Parents that have not the children which they spawned, once each; or ended before them."""

COMMAND = ("-c", "from shiftwork.cli import main; main()", "worker", "--log-level", "error")
PROGRAMS = ("app", "store")
SAID = {
    "claim": ".take(",
    "settle": ".settle(",
    "enqueue": ".enqueue",
    "commit": ".conclude(",
    "run": ".run_job(",
    "renew": ".heartbeat(",
    "claim of rows": "picked as materialized",
    "commit of a row": "told as materialized",
    "renew of rows": "ours as materialized",
}
"""What is cut, and the words it is known by; a transactional job's commit goes with its conclusion, in SQL with its code."""

MOST = {"sockets": 24, "descriptors": 64, "children": 2, "MiB of memory": 160, "log lines a second": 5}
"""What a worker process may take up, whatever is done to it: seven connections, two event loops, a child and its successor."""

YOUNG = 10.0
"""Seconds for which it is not asked how much a process logs."""


@dataclass(frozen=True)
class Size:
    """How much of everything; the seconds are those in which producers send and harm is done."""

    jobs: int = 20_000
    producers: int = 5
    workers: int = 6
    table_workers: int = 2
    seconds: float = 300
    kills: int = 60
    children: int = 50
    stops: int = 24
    restarts: int = 6
    terminations: int = 120
    cuts: int = 240
    lease: float = 2.0
    poll: float = 2.0
    slack: float = 1.0

    @property
    def bound(self) -> float:
        """Seconds until a job or a row that was lost runs again: a lease, a third of it until others look, a poll, and some."""
        return self.lease + self.lease / 3 + self.poll + self.slack


@dataclass(frozen=True)
class Hired:
    """A worker process: what it works for, since when, where it tells its metrics, and where it logs."""

    program: str
    began: float
    port: int
    said: Path


@dataclass
class Account:
    """What was done, and what came of it."""

    size: Size
    seed: int
    verdict: Verdict = field(default_factory=Verdict)
    did: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    again: int = 0
    """Plain effects that happened more than once, as they may."""

    most: dict[str, float] = field(default_factory=dict)
    """The most that any worker process took up."""

    violations: list[str] = field(default_factory=list)

    def told(self) -> str:
        """For people."""
        found, kinds = self.verdict.recoveries, self.verdict.kinds
        median = f"{found[len(found) // 2]:.2f}" if found else "-"
        slowest = f"{found[-1]:.2f}" if found else "-"
        harm = ", ".join(f"{what} {many}" for what, many in sorted(self.did.items()))
        lines = [
            f"seed {self.seed}: {sum(self.answers.values()):,} jobs sent in {self.seconds:.0f} s: "
            + ", ".join(f"{many:,} {answer}" for answer, many in sorted(self.answers.items())),
            f"done to them: {harm}",
            f"{len(found)} attempts lost who ran them; their jobs ran again after {median} s at the median, {slowest} s at most; "
            f"{self.size.bound:.2f} s are allowed",
            f"{self.again} plain effects happened more than once, as they may",
            "at most, a worker process had "
            + ", ".join(f"{much:.1f} {name}".replace(".0 ", " ") for name, much in sorted(self.most.items())),
            ", ".join(f"{kind} {len(many)}" for kind, many in kinds.items()),
            *(f"VIOLATION: {one}" for one in self.violations[:50]),
        ]
        return "\n".join(lines)


class Havoc:
    """One run."""

    def __init__(self, size: Size, seed: int) -> None:
        self.size = size
        self.dice = random.Random(seed)
        self.account = Account(size, seed)
        self.sent: list[Sent] = []
        self.outages: list[tuple[float, float]] = []
        self.gone: list[tuple[int, float]] = []
        """Processes that were killed or stopped, and when."""

        self.looks: list[Look] = []
        self.hired: dict[int, Hired] = {}

        self.crew: list[subprocess.Popen[bytes]] = []
        self.codes: list[int] = []
        self._numbers = iter(range(size.jobs))
        self._guard = threading.Lock()
        self._over = threading.Event()
        self._folder = Path(tempfile.mkdtemp(prefix="shiftwork-chaos-"))
        self._folder.chmod(0o777)
        self.log = self._folder / "acts.log"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.crew:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def run(self) -> Account:
        with (
            Station(fsync=True, options={"max_connections": "400"}) as self.station,
            Wire(self.station.dsn) as self.wire,
        ):
            with psycopg.connect(self.station.dsn, autocommit=True) as connection:
                connection.execute(TABLES)
                connection.execute(ROUTINE.encode())
            for program, many in zip(PROGRAMS, (self.size.workers, self.size.table_workers), strict=True):
                for _ in range(many):
                    self._hire(program)
            self._all_up()  # what is done to them is spread over the time in which they work
            began = time.monotonic()
            lanes = {
                "kill": (self.kill, self.size.kills),
                "kill a child": (self.kill_child, self.size.children),
                "stop": (self.stop, self.size.stops),
                "restart": (self.restart, self.size.restarts),
                "terminate": (self.terminate, self.size.terminations),
                "cut": (self.cut, self.size.cuts),
            }
            threads = [
                *(threading.Thread(target=self._produce, args=(n,)) for n in range(self.size.producers)),
                *(threading.Thread(target=self._lane, args=(name, *lane)) for name, lane in lanes.items()),
            ]
            for thread in threads:
                thread.start()
            watch = threading.Thread(target=self._watch)
            watch.start()
            for thread in threads:
                thread.join()
            self._over.set()
            watch.join()
            self._drain()
            self.account.seconds = time.monotonic() - began
            self._compare()
            self._dismiss()
            return self._judge()

    # Workers and producers.

    def _watch(self) -> None:
        """Who ends by itself is replaced, and told of: nobody has a reason to. How much each takes up is noted."""
        while not self._over.wait(0.2):
            with self._guard:
                there = [process.pid for process in self.crew]
            children = Counter(parent for _, parent in _processes())
            for pid in there:
                with suppress(OSError, ValueError):
                    self.looks.append(self._look(pid, children[pid]))
            with self._guard:
                dead = [process for process in self.crew if process.poll() is not None]
                self.crew = [process for process in self.crew if process not in dead]
                self.account.violations += [
                    f"a worker ended by itself, with {one.returncode}" for one in dead
                ]
            for one in dead:
                self._hire(self.hired[one.pid].program)

    def _hire(self, program: str) -> None:
        size = self.size
        given: dict[str, Any] = {
            "lease": f"{size.lease}s",
            "poll": f"{size.poll}s",
            "concurrency": 10,
            "transactions": 3,
            "process_slots": 1,
            "reconnect": "200ms",
            "reconnect_most": "2s",
            "metrics_port": _free_port(),
        }
        clean = {name: value for name, value in os.environ.items() if not name.startswith("SHIFTWORK_")}
        settings = {f"SHIFTWORK_{name.upper()}": str(value) for name, value in given.items()}
        said = self._folder / f"worker-{len(self.hired)}.log"
        with said.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, *COMMAND, f"tests.chaos_app:{program}"],
                env={**clean, **settings, "DATABASE_URL": self.wire.dsn, "CHAOS_LOG": str(self.log)},
                stdin=subprocess.DEVNULL,
                stderr=log,
            )
        with self._guard:
            self.hired[process.pid] = Hired(program, time.monotonic(), given["metrics_port"], said)
            self.crew.append(process)

    def _all_up(self) -> None:
        """Wait until everybody is known to the database."""
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            here = {pid for (pid,) in self._ask("select pid from shiftwork.workers")}
            [(working,)] = self._ask(
                "select count(distinct application_name) from pg_stat_activity where application_name ~ '^shiftwork table [0-9]+$'"
            )
            with self._guard:
                crew = [one.pid for one in self.crew]
            missing = [pid for pid in crew if pid not in here]
            if working >= len(missing) == sum(self.hired[pid].program == "store" for pid in crew):
                return
            time.sleep(0.1)

    def _look(self, pid: int, children: int) -> Look:
        """What a process takes up now."""
        one = self.hired[pid]
        place, age = Path(f"/proc/{pid}"), time.monotonic() - one.began
        open_files = [str(one.readlink()) for one in (place / "fd").iterdir()]
        pages = int((place / "statm").read_text().split()[1])
        has = {
            "descriptors": len(open_files),
            "sockets": sum(one.startswith("socket:") for one in open_files),
            "children": children,
            "MiB of memory": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        }
        if age > YOUNG:
            has["log lines a second"] = one.said.read_bytes().count(b"\n") / age
        return Look(pid, time.time(), has)

    def _produce(self, which: int) -> None:
        """Send jobs one by one, in three ways, evenly over the time."""
        dice = random.Random(f"{self.account.seed} {which}")
        pause = self.size.seconds * self.size.producers / self.size.jobs
        with App(self.wire.dsn) as app:
            tasks = {name: app.task(name=name)(_by_name) for name in (*PLAIN, *TRANSACTIONAL)}
            due = time.monotonic()
            while (number := self._number()) is not None:
                due += pause
                self._over.wait(max(0.0, due - time.monotonic()))
                transactional = number % 3 == 0
                kinds = (*TRANSACTIONAL, ROW) if transactional else (*PLAIN[:2] * 4, *PLAIN[2:])
                kind = dice.choice(kinds)
                answer = self._insert(number) if kind == ROW else self._send(app, tasks[kind], number, dice)
                with self._guard:
                    self.sent.append(Sent(number, answer, transactional))  # type: ignore[arg-type]
                if answer != "ok":
                    self._over.wait(0.2)

    def _number(self) -> int | None:
        with self._guard:
            return next(self._numbers, None)

    def _send(self, app: App, task: Any, number: int, dice: random.Random) -> str:
        way = dice.random()
        if way < 0.2:  # with a key, again and again until it is in
            sending = task.using(unique=f"number {number}", window=timedelta(hours=1))
            while True:
                try:
                    sending.enqueue(number=number)
                except DatabaseUnavailable:
                    self._over.wait(0.2)
                else:
                    return "ok"
        try:
            if way < 0.3:  # in a transaction of the caller's
                return self._send_in_transaction(task, number, undone=dice.random() < 0.3)
            task.enqueue(number=number)
        except DatabaseUnavailable as error:
            return "unknown" if error.maybe_committed else "failed"
        return "ok"

    def _insert(self, number: int) -> str:
        """A row, as anybody may insert one."""
        connected = False
        try:
            with psycopg.connect(self.wire.dsn, autocommit=True) as connection:
                connected = True
                connection.execute("insert into public.chaos_rows (number) values (%s)", (number,))
        except psycopg.Error:
            return "unknown" if connected else "failed"
        return "ok"

    def _send_in_transaction(self, task: Any, number: int, *, undone: bool) -> str:
        committing = False
        try:
            with psycopg.connect(self.wire.dsn) as connection:
                task.using(connection=connection).enqueue(number=number)
                if undone:
                    connection.rollback()
                    return "failed"
                committing = True
                connection.commit()
        except (psycopg.Error, DatabaseError):
            return "unknown" if committing else "failed"
        return "ok"

    # Lanes.

    def _lane(self, name: str, act: Callable[[], bool], many: int) -> None:
        """Do this so many times, evenly over the time; what found nobody to do it to is tried again."""
        dice = random.Random(f"{self.account.seed} {name}")
        began, pause = time.monotonic(), self.size.seconds / (many + 1)
        deadline = began + self.size.seconds * 1.5
        for turn in range(1, many + 1):
            due = began + pause * (turn + dice.uniform(-0.5, 0.5))
            self._over.wait(max(0.0, due - time.monotonic()))
            while time.monotonic() < deadline:
                with suppress(psycopg.Error, ProcessLookupError):
                    if act():
                        break
                time.sleep(0.05)
            else:
                break
            with self._guard:
                self.account.did[name] += 1

    @contextmanager
    def _somebody(self) -> Iterator[subprocess.Popen[bytes] | None]:
        """A worker that nobody else is doing anything to."""
        with self._guard:
            chosen = (
                self.dice.choice(self.crew)
                if len(self.crew) > (self.size.workers + self.size.table_workers) // 2
                else None
            )
            if chosen is not None:
                self.crew.remove(chosen)
        try:
            yield chosen
        finally:
            if chosen is not None and chosen.poll() is None:
                with self._guard:
                    self.crew.append(chosen)

    def kill(self) -> bool:
        """A worker, with -9; another takes its place."""
        with self._somebody() as victim:
            if victim is None or not self._caught(victim):
                return False
            victim.kill()
            victim.wait()
        self._hire(self.hired[victim.pid].program)
        return True

    def kill_child(self) -> bool:
        """A process that runs jobs, with -9."""
        with self._guard:
            parents = {process.pid for process in self.crew}
        if not self.log.exists():
            return False
        busy = {int(line.split()[4]) for line in self.log.read_text().splitlines()[-500:]}
        children = [pid for pid, parent in _processes() if parent in parents and pid in busy]
        if not children:
            return False
        chosen = self.dice.choice(children)
        self.gone.append((chosen, time.time()))
        os.kill(chosen, signal.SIGKILL)
        return True

    def stop(self) -> bool:
        """A worker, for longer than its lease; then it goes on."""
        with self._somebody() as victim:
            if victim is None or not self._caught(victim):
                return False
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
            " where application_name like 'shiftwork %' and backend_type = 'client backend' order by random() limit 1) as one"
        )
        return bool(rows and rows[0][0])

    def cut(self) -> bool:
        """A line, before something on it is carried, or before its answer is."""
        what = self.dice.choice(list(SAID))
        text = SAID[what]
        before = self.wire.said[text]
        (self.wire.losing if self.dice.random() < 0.5 else self.wire.cutting)(text)
        until = time.monotonic() + 5
        while self.wire.said[text] == before and time.monotonic() < until:
            time.sleep(0.01)
        self.wire.losing(text, 0)
        self.wire.cutting(text, 0)
        if self.wire.said[text] == before:
            return False
        with self._guard:
            self.account.did[f"cut {what}"] += 1
        return True

    def _caught(self, victim: subprocess.Popen[bytes]) -> bool:
        """Whether a worker was stopped while it holds jobs; else it goes on."""
        if victim.pid not in self._at_work():
            return False
        victim.send_signal(signal.SIGSTOP)
        at, caught = time.time(), False
        try:
            caught = victim.pid in self._at_work()
        finally:
            if not caught:
                victim.send_signal(signal.SIGCONT)
        if caught:
            self.gone.append((victim.pid, at))
        return caught

    def _at_work(self) -> set[int]:
        """Processes that hold something: jobs, as the database knows, or rows, as far as their handlers have said so."""
        rows = self._ask(
            "select distinct worker.pid from shiftwork.workers as worker join shiftwork.jobs as job on job.worker = worker.id"
            " where job.state = 'running'"
        )
        held = self._ask("select id, attempt from public.chaos_rows where state = 'processing'")
        ran = self._ran()
        return {pid for (pid,) in rows} | {
            ran[job, attempt] for job, attempt in held if (job, attempt) in ran
        }

    def _ran(self) -> dict[tuple[int, int], int]:
        """Which process ran an attempt, as its handler has said."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return {(int(job), int(attempt)): int(pid) for _, _, job, attempt, pid, _ in map(str.split, lines)}

    def _ask(self, text: LiteralString, *params: object) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.station.dsn, autocommit=True, connect_timeout=5) as connection:
            return connection.execute(text, params or None).fetchall()

    # The end.

    def _drain(self) -> None:
        """What is left is done within a minute and a half, and who was hired last is there: nothing is in the way any more."""
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline and (
            self._ask("select from shiftwork.jobs limit 1") or self._ask(LEFT)
        ):
            time.sleep(0.2)
        self._all_up()

    def _dismiss(self) -> None:
        for process in self.crew:
            process.terminate()
        self.codes = [process.wait(60) for process in self.crew]

    def _compare(self) -> None:
        """What is reported, and what is so; an answer that is still on its way to a worker is waited for."""
        deadline = time.monotonic() + 10
        self.true = self._true()
        while (told := self._reported()) != self.true and time.monotonic() < deadline:
            time.sleep(0.2)
        self.reported = told

    def _reported(self) -> dict[str, float]:
        """What workers that are still there count, and what the app says there is."""
        with App(self.station.dsn) as app:
            told = {f"{state} jobs": float(many) for state, many in app.counts().items() if many}
        for process in self.crew:
            with (
                suppress(OSError),
                urlopen(f"http://127.0.0.1:{self.hired[process.pid].port}/metrics") as answer,
            ):
                told[f"completed by process {process.pid}"] = sum(
                    float(value)
                    for value in re.findall(rb'jobs_processed_total{.*outcome="ok".*} (.*)', answer.read())
                )
        return told

    def _true(self) -> dict[str, float]:
        """The same, as tables have it."""
        true = {
            f"{state} jobs": float(many)
            for state, many in self._ask(
                "select state::text, count(*) from shiftwork.all_jobs group by state"
            )
        }
        completed = Counter(
            dict(
                self._ask(
                    "select worker.pid, count(*) from shiftwork.history as job join shiftwork.workers as worker"
                    " on worker.id = job.worker where job.state = 'completed' and job.task <> 'note_and_spawn' group by worker.pid"
                )
            )
        )
        ran = self._ran()
        completed.update(
            ran[job, attempt]
            for job, attempt in self._ask(
                "select id, attempt from public.chaos_rows where state = 'completed'"
            )
        )
        pids = [process.pid for process in self.crew]
        return true | {f"completed by process {pid}": float(completed[pid]) for pid in pids}

    def _judge(self) -> Account:
        account = self.account
        steps = [
            Step(*row)
            for row in self._ask(
                "select job, attempt, worker, state, extract(epoch from at)::float from public.steps order by n"
            )
        ]
        acts = [
            Act(number, job, attempt, transactional=True)
            for number, job, attempt in self._ask("select number, job, attempt from public.effects")
        ]
        began: list[tuple[int, int, int, float]] = []
        left: dict[tuple[int, int], float] = {}
        for line in self.log.read_text().splitlines():
            what, number, job, attempt, pid, at = line.split()
            if what == "did":
                acts.append(Act(int(number), int(job), int(attempt)))
            elif what == "began":
                began.append((int(pid), int(job), int(attempt), float(at)))
            else:
                left[int(job), int(attempt)] = float(at)
        # A worker over a table is known to nobody but its rows.
        ran = self._ran()
        workers = [
            *self._ask("select id, pid from shiftwork.workers"),
            *{
                (step.worker, ran[step.job, step.attempt])
                for step in steps
                if step.job >= FIRST_ROW and (step.job, step.attempt) in ran
            },
        ]
        history = History(
            sent=self.sent,
            numbers={
                **dict(
                    self._ask(
                        "select id, (payload ->> 'number')::int from shiftwork.all_jobs where parent is null"
                    )
                ),
                **dict(self._ask("select id, number from public.chaos_rows")),
            },
            steps=steps,
            acts=acts,
            left=[job for (job,) in (*self._ask("select id from shiftwork.jobs"), *self._ask(LEFT))],
            losses=[
                *_losses_of_workers(steps, workers, self.gone),
                *_losses_of_children(began, left, self.gone),
            ],
            outages=sorted(self.outages),
            bound=self.size.bound,
            executions=[
                Execution(job, attempt, at, left.get((job, attempt))) for _, job, attempt, at in began
            ],
            leases=[
                Lease(*row)
                for row in self._ask(
                    "select worker, extract(epoch from at)::float, extract(epoch from until)::float from public.leases"
                )
            ],
            looks=self.looks,
            most=MOST,
            reported=self.reported,
            true=self.true,
        )
        for look in self.looks:
            account.most |= {name: max(much, account.most.get(name, 0)) for name, much in look.has.items()}
        account.verdict = check(history)
        account.answers = Counter(sent.answer for sent in self.sent)
        plain = Counter(act.number for act in acts if not act.transactional)
        account.again = sum(times > 1 for times in plain.values())
        account.violations += account.verdict.violations
        account.violations += [f"job {job} has {many} children" for job, many in self._ask(FAMILIES)]
        if any(self.codes):
            account.violations.append(f"exit codes after TERM: {self.codes}")
        return account


def _by_name(number: int) -> None:
    """What producers know of a task: its name and its argument."""


def _losses_of_workers(
    steps: list[Step], workers: list[tuple[Any, ...]], gone: list[tuple[int, float]]
) -> Iterator[Loss]:
    """What each worker held when its process was killed or stopped."""
    held: dict[int, list[Step]] = {}
    ended: dict[tuple[int, int], float] = {}
    before: dict[int, Step] = {}
    for step in steps:
        if (former := before.get(step.job)) is not None and former.state == "running":
            ended[former.job, former.attempt] = step.at
        if step.state == "running" and step.worker is not None:
            held.setdefault(step.worker, []).append(step)
        before[step.job] = step
    for pid, at in gone:
        for worker in (worker for worker, its in workers if its == pid):
            for step in held.get(worker, []):
                if step.at <= at < ended.get((step.job, step.attempt), float("inf")):
                    yield Loss(step.job, step.attempt, at)


def _losses_of_children(
    began: list[tuple[int, int, int, float]],
    left: Mapping[tuple[int, int], float],
    gone: list[tuple[int, float]],
) -> Iterator[Loss]:
    """What each child ran when it was killed."""
    killed = dict(gone)
    for pid, job, attempt, at in began:
        if at <= killed.get(pid, 0) and (job, attempt) not in left:
            yield Loss(job, attempt, killed[pid])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _processes() -> Iterator[tuple[int, int]]:
    """Every process and its parent."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError, ValueError):
            yield int(entry.name), int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])


def unleash(size: Size, seed: int) -> Account:
    """Do all of it, and say what came of it."""
    with Havoc(size, seed) as havoc:
        return havoc.run()


def main() -> None:
    """As `make chaos` does."""
    parser = argparse.ArgumentParser(
        description="Do harm to workers, lines and the server, and account for every job."
    )
    for name, default in asdict(Size()).items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    given = vars(parser.parse_args())
    seed = given.pop("seed")
    print(f"seed {seed}", flush=True)
    account = unleash(Size(**given), seed)
    print(account.told())
    sys.exit(1 if account.violations else 0)


if __name__ == "__main__":
    main()
