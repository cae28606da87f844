"""Measure the protocol against bare tables and against itself: `make bench`, or `make bench ARGS="--only claim --quick"`.

Every figure is a ratio of two rates within one run, the median of five pairs that alternate (A B, B A, A B, …), since
machines are shared and noisy. The floor is `floor.sql`, which is frozen. A goal stands beside each ratio; missing one
is exit code 1.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psycopg

from shiftwork import embedded
from shiftwork.cursor import Cursor
from shiftwork.migrate import migrate

BATCH = 250
PAIRS = 5
FLOOR = dict(
    re.findall(
        r"-- name: (\w+)\n(.*?)(?=\n-- name:|\Z)", (Path(__file__).parent / "floor.sql").read_text(), re.S
    )
)
encode = msgspec.json.Encoder().encode


def sql(text: str) -> bytes:
    """Our own text, put together here."""
    return text.encode()


@dataclass
class Bench:
    """The server, how much to do, and what came out."""

    url: str
    pgbench: Path
    quick: bool
    missed: list[str] = field(default_factory=list)

    def connect(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self.url, autocommit=True, prepare_threshold=None)

    def count(self, jobs: int) -> int:
        return jobs // 10 if self.quick else jobs

    def pairs(
        self, name: str, goal: float, ours: Callable[[], float], theirs: Callable[[], float], rate: str
    ) -> None:
        """Alternate the two, and print the median of the ratios of their rates."""
        ratios, mine, others = [], [], []
        for turn in range(PAIRS):
            both = [ours, theirs] if turn % 2 else [theirs, ours]
            rates = {measure: measure() for measure in both}
            mine.append(rates[ours])
            others.append(rates[theirs])
            ratios.append(rates[ours] / rates[theirs])
        self.tell(
            name, goal, ratios, f"{statistics.median(mine):,.0f} to {statistics.median(others):,.0f} {rate}"
        )

    def tell(self, name: str, goal: float, ratios: list[float], more: str) -> None:
        ratio = statistics.median(ratios)
        verdict = "ok    " if ratio >= goal else "MISSED"
        if ratio < goal:
            self.missed.append(name)
        spread = f"{min(ratios):.2f}–{max(ratios):.2f}"  # noqa: RUF001
        print(f"  {verdict} {ratio:5.2f}  (goal {goal:.2f}; {spread})  {name}: {more}", flush=True)


# Loops that empty a queue, as a worker would: claim a batch, and settle all of it.


def drain_floor(connection: psycopg.Connection[Any]) -> None:
    while rows := connection.execute(sql(FLOOR["claim"]), (1, BATCH)).fetchall():
        outcomes = [{"id": row[0], "attempt": row[3], "result": None} for row in rows]
        connection.execute(sql(FLOOR["move"]), (encode(outcomes).decode(), 1))


CLAIM = """
select id, task, payload::text, attempt, queue, priority, (extract(epoch from run_at) * 1000000)::bigint
  from shiftwork.claim(%s)
"""


def drain(
    connection: psycopg.Connection[Any],
    schema: str = "shiftwork",
    done: Callable[[int], None] = lambda _: None,
) -> None:
    claim = sql(CLAIM.replace("shiftwork", schema))
    settle = sql(f"select id, answer from {schema}.settle(%s)")
    [worker] = connection.execute(
        sql(f"select {schema}.register_worker(%s)"), ('{"lease": 3600}',)
    ).fetchone() or [0]
    cursor = Cursor()
    busy: list[dict[str, Any]] = []
    while True:
        began = time.monotonic()
        wish = cursor.wish({"default": BATCH}, began)
        looked = not wish["queues"][0]["places"]
        request = {"worker": worker, "want": BATCH, "tasks": ["nothing"], **wish}
        *rows, last = connection.execute(claim, (encode(request).decode(),)).fetchall()
        cursor.learn(
            msgspec.json.decode(last[2]),
            [(row[4], row[5], row[6], row[0]) for row in rows],
            began,
            time.monotonic(),
        )
        if not rows and not busy:
            if looked:
                return
            cursor.look()
            continue
        outcomes = [
            *busy,
            *({"id": row[0], "attempt": row[3], "state": "completed", "result": None} for row in rows),
        ]
        request = {"worker": worker, "outcomes": outcomes}
        answers = connection.execute(settle, (encode(request).decode(),)).fetchall()
        again = {job for job, answer in answers if answer == "busy"}
        busy = [outcome for outcome in outcomes if outcome["id"] in again]
        done(len(outcomes) - len(busy))


def rate(bench: Bench, connections: int, jobs: int, loop: Callable[[psycopg.Connection[Any]], None]) -> float:
    """Jobs per second when so many connections run the loop until nothing is left."""
    with contextlib.ExitStack() as stack:
        lent = [stack.enter_context(bench.connect()) for _ in range(connections)]
        threads = [threading.Thread(target=loop, args=(connection,)) for connection in lent]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return jobs / (time.perf_counter() - began)


def fill(bench: Bench, jobs: int, schema: str = "shiftwork", *, delayed: bool = False) -> None:
    """So many jobs that may be claimed now: ready ones, or delayed ones whose time has come."""
    with bench.connect() as connection:
        left = connection.execute(
            sql(f"select count(*) from {schema}.jobs where state <> 'scheduled'")
        ).fetchone()
        assert left == (0,), f"{left} jobs were left over"
        connection.execute(
            sql(
                f"insert into {schema}.jobs (task, payload, queue, priority, max_attempts, state, run_at, created_at) "
                f"select 'nothing', '{{\"n\": 1}}', 'default', 0, 5, '{'scheduled' if delayed else 'ready'}', moment, moment "
                f"  from (select now() - (%s - n) * interval '10 microseconds' as moment from generate_series(1, %s) as n) as one"
            ),
            (jobs, jobs),
        )
        connection.execute(sql(f"vacuum analyze {schema}.jobs"))


def fill_floor(bench: Bench, jobs: int) -> None:
    with bench.connect() as connection:
        connection.execute(sql(FLOOR["tables"]))
        connection.execute(sql(FLOOR["fill"]), (jobs,))
        connection.execute("vacuum analyze floor.jobs")


def drained(bench: Bench, connections: int, jobs: int, schema: str = "shiftwork") -> float:
    fill(bench, jobs, schema)
    return rate(bench, connections, jobs, lambda connection: drain(connection, schema))


def drained_floor(bench: Bench, connections: int, jobs: int) -> float:
    fill_floor(bench, jobs)
    return rate(bench, connections, jobs, drain_floor)


# What is measured.


def claim(bench: Bench) -> None:
    """Claim 250 and settle them, against bare statements on bare tables."""
    jobs = bench.count(30_000)
    for connections in (1, 2):
        bench.pairs(
            f"claim and settle, {connections} connection{'s' * (connections > 1)}, against the floor",
            0.7,
            lambda n=connections: drained(bench, n, jobs),  # type: ignore[misc]
            lambda n=connections: drained_floor(bench, n, jobs),  # type: ignore[misc]
            "jobs/s",
        )


def enqueue(bench: Bench) -> None:
    """One job per transaction, nobody asleep, against a bare INSERT."""
    fill_floor(bench, 1)
    forms = {
        "enqueue()": """select shiftwork.enqueue('nothing', '{"n": 1}');""",
        "enqueue_many() of one, as the client calls it": (
            """select * from shiftwork.enqueue_many('[{"task": "nothing", "payload": {"n": 1}, "queue": "default"}]');"""
        ),
    }
    bare = """insert into floor.jobs (task, payload) values ('nothing', '{"n": 1}');"""
    for clients in (1, 32):
        for name, text in forms.items():
            bench.pairs(
                f"{name}, {clients} client{'s' * (clients > 1)}, against a bare INSERT",
                0.8,
                lambda t=text, n=clients: pgbench(bench, t, n),  # type: ignore[misc]
                lambda n=clients: pgbench(bench, bare, n),  # type: ignore[misc]
                "jobs/s",
            )
    clear(bench)


def pgbench(bench: Bench, text: str, clients: int) -> float:
    with tempfile.NamedTemporaryFile("w", suffix=".sql") as script:
        script.write(text)
        script.flush()
        command = [
            str(bench.pgbench),
            "-n",
            "-M",
            "extended",
            "-f",
            script.name,
            "-c",
            str(clients),
            "-j",
            "2",
        ]
        told = subprocess.run(
            [*command, "-T", "1" if bench.quick else "3", bench.url],
            check=True,
            capture_output=True,
            text=True,
        )
    found = re.search(r"tps = ([0-9.]+)", told.stdout)
    assert found, told.stdout
    return float(found[1])


def bulk(bench: Bench) -> None:
    """Many jobs in one call, against COPY into the same table."""
    jobs = bench.count(50_000)
    documents = [
        encode([{"task": "nothing", "payload": {"n": n}} for n in range(start, start + 1000)]).decode()
        for start in range(0, jobs, 1000)
    ]

    def many() -> float:
        with bench.connect() as connection:
            began = time.perf_counter()
            with connection.transaction():
                for document in documents:
                    connection.execute("select * from shiftwork.enqueue_many(%s)", (document,)).fetchall()
            spent = time.perf_counter() - began
        clear(bench)
        return jobs / spent

    def copy() -> float:
        moment = "2000-01-01 00:00+00"
        with bench.connect() as connection:
            began = time.perf_counter()
            columns = "task, payload, queue, priority, max_attempts, run_at, created_at"
            with connection.cursor().copy(sql(f"copy shiftwork.jobs ({columns}) from stdin")) as into:
                for n in range(jobs):
                    into.write(f'nothing\t{{"n": {n}}}\tdefault\t0\t5\t{moment}\t{moment}\n')
            spent = time.perf_counter() - began
        clear(bench)
        return jobs / spent

    bench.pairs(
        "bulk enqueue in chunks of 1,000, against COPY into the same table", 0.5, many, copy, "jobs/s"
    )


def clear(bench: Bench) -> None:
    with bench.connect() as connection:
        connection.execute("truncate shiftwork.jobs")


def crowd(bench: Bench) -> None:
    """With half a million jobs that wait for their time beside them, against none."""
    jobs, others = bench.count(30_000), bench.count(500_000)
    with installed(bench, "crowded") as connection:
        connection.execute(
            "insert into crowded.jobs (task, payload, queue, priority, max_attempts, state, run_at) "
            """select 'nothing', '{"n": 1}', 'default', 0, 5, 'scheduled', now() + interval '1 day' + n * interval '1 second' """
            "  from generate_series(1, %s) as n",
            (others,),
        )
        connection.execute("vacuum analyze crowded.jobs")
        bench.pairs(
            f"claim and settle beside {others:,} scheduled jobs, against none",
            0.9,
            lambda: drained(bench, 1, jobs, "crowded"),
            lambda: drained(bench, 1, jobs),
            "jobs/s",
        )


def history(bench: Bench) -> None:
    """With five million finished jobs in history, against none."""
    jobs, others = bench.count(30_000), bench.count(5_000_000)
    with installed(bench, "aged") as connection:
        for _ in range(10):
            connection.execute(
                "insert into aged.history (id, state, priority, run_at, created_at, attempt, failures, resets, max_attempts,"
                "  claimed_at, started_at, finished_at, worker, claim, task, queue, payload, tags, result, forget_on) "
                "select nextval(pg_get_serial_sequence('aged.jobs', 'id')), 'completed', 0, now(), now(), 1, 0, 0, 5, now(),"
                """ now(), now(), 1, 1, 'nothing', 'default', '{"n": 1}', '{}', 'null', current_date + 1 + n %% 30 """
                "  from generate_series(1, %s) as n",
                (others // 10,),
            )
        connection.execute("vacuum analyze aged.history")
        with bench.connect() as other:
            other.execute("truncate shiftwork.history")
        bench.pairs(
            f"claim and settle with {others:,} jobs in history, against none",
            0.95,
            lambda: drained(bench, 1, jobs, "aged"),
            lambda: drained(bench, 1, jobs),
            "jobs/s",
        )


def snapshot(bench: Bench) -> None:
    """While an old snapshot is held open, so that nothing dead can be removed."""
    jobs = bench.count(100_000)
    for delayed in (False, True):
        kind = "delayed" if delayed else "plain"
        fading, whole = [], []
        held_rates, free_rates = [], []
        for turn in range(PAIRS):
            rates = {}
            for held in (True, False) if turn % 2 else (False, True):
                fill(bench, jobs, delayed=delayed)
                marks = Marks(jobs)
                with bench.connect() as old:
                    if held:
                        old.execute("begin isolation level repeatable read")
                        old.execute("select count(*) from shiftwork.jobs")
                    rates[held] = rate(bench, 1, jobs, lambda c, m=marks: drain(c, done=m.add))  # type: ignore[misc]
                if held:
                    fading.append(marks.last_to_first())
                with bench.connect() as connection:
                    connection.execute("vacuum shiftwork.jobs")
            whole.append(rates[True] / rates[False])
            held_rates.append(rates[True])
            free_rates.append(rates[False])
        bench.tell(f"old snapshot held, {kind} jobs", 0.9, fading, "the last quarter against the first")
        rate_text = f"{statistics.median(held_rates):,.0f} to {statistics.median(free_rates):,.0f} jobs/s"
        bench.tell(f"old snapshot held, {kind} jobs, against none", 0.8, whole, rate_text)


@dataclass
class Marks:
    """When each quarter of the jobs was done."""

    jobs: int
    count: int = 0
    times: list[float] = field(default_factory=lambda: [time.perf_counter()])

    def add(self, more: int) -> None:
        self.count += more
        while len(self.times) <= 4 and self.count >= self.jobs * len(self.times) / 4:
            self.times.append(time.perf_counter())

    def last_to_first(self) -> float:
        return (self.times[1] - self.times[0]) / (self.times[4] - self.times[3])


@contextlib.contextmanager
def installed(bench: Bench, schema: str) -> Iterator[psycopg.Connection[Any]]:
    with bench.connect() as connection:
        migrate(connection, schema)
        try:
            yield connection
        finally:
            connection.execute(sql(f"drop schema {schema} cascade"))


MEASURES: dict[str, Callable[[Bench], None]] = {
    "claim": claim,
    "enqueue": enqueue,
    "bulk": bulk,
    "crowd": crowd,
    "snapshot": snapshot,
    "history": history,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--only", choices=MEASURES, action="append", help="measure just this; may be repeated"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a tenth of everything: to see that it runs, not to believe"
    )
    parser.add_argument(
        "--fsync", action="store_true", help="leave fsync on; it hides what the CPU does behind the disk"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shiftwork-bench-") as folder:
        Path(folder).chmod(0o755)
        tuning = {
            "shared_buffers": "1GB",
            "max_wal_size": "8GB",
            "max_connections": "100",
            "autovacuum": "off",
        }
        with embedded.start(Path(folder) / "data", fsync=options.fsync, options=tuning) as server:
            bench = Bench(server.url, find_pgbench(server), options.quick)
            with bench.connect() as connection:
                migrate(connection)
            print(
                f"PostgreSQL {server.version}, Python {platform.python_version()}, psycopg {psycopg.__version__}, "
                f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, fsync {'on' if options.fsync else 'off'}, "
                f"{', '.join(f'{name}={value}' for name, value in tuning.items())}\n"
                f"each ratio is the median of {PAIRS} alternating pairs, with the least and the greatest beside it",
                flush=True,
            )
            for name in options.only or MEASURES:
                print(f"{name}: {(MEASURES[name].__doc__ or '').strip()}", flush=True)
                MEASURES[name](bench)
        embedded.stop(Path(folder) / "data")
    for name in bench.missed:
        print(f"missed: {name}")
    return 1 if bench.missed and not options.quick else 0


def find_pgbench(server: embedded.Server) -> Path:
    """The load generator that comes with PostgreSQL."""
    return server.bin_dir / "pgbench"


if __name__ == "__main__":
    sys.exit(main())
