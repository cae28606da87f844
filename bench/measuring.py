"""What every measurement needs: the server, pairs that alternate, the floor, and queues to empty."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psycopg

from shiftwork.cursor import Cursor
from shiftwork.migrate import migrate
from shiftwork.program import fastest_loop

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
        self,
        name: str,
        goal: float,
        ours: Callable[[], float],
        theirs: Callable[[], float],
        rate: str,
        slices: int = 1,
    ) -> None:
        """Alternate the two, and print the median of the ratios of their rates.

        In several slices each, which alternate as well and of which the mean counts: whoever else uses the machine slows it down by half
        within seconds, and then both of them.
        """
        ratios, mine, others = [], [], []
        for turn in range(PAIRS):
            both = [ours, theirs] if turn % 2 else [theirs, ours]
            taken: dict[Callable[[], float], list[float]] = {ours: [], theirs: []}
            for measure in both * slices:
                taken[measure].append(measure())
            mine.append(statistics.harmonic_mean(taken[ours]))
            others.append(statistics.harmonic_mean(taken[theirs]))
            ratios.append(mine[-1] / others[-1])
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

    def at_most(self, name: str, limit: float, value: float, unit: str) -> None:
        """Something that is no ratio, and must not be more than this."""
        if value > limit:
            self.missed.append(name)
        verdict = "ok    " if value <= limit else "MISSED"
        print(f"  {verdict} {value:5.2f}  (at most {limit:g} {unit})  {name}", flush=True)


# Loops that empty a queue, as a worker would: claim a batch, and settle all of it.


def drain_floor(connection: psycopg.Connection[Any]) -> None:
    while rows := connection.execute(sql(FLOOR["claim"]), (1, BATCH)).fetchall():
        outcomes = [{"id": row[0], "attempt": row[3], "result": None} for row in rows]
        connection.execute(sql(FLOOR["move"]), (encode(outcomes).decode(), 1))


CLAIM = """
select id, task, payload, attempt, queue, priority, (date_part('epoch', run_at) * 1000000)::bigint
  from shiftwork.take(%s)
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
        request = {"worker": worker, "carrying": False, "brief": True, "outcomes": outcomes}  # as workers ask
        answers = connection.execute(settle, (encode(request).decode(),)).fetchall()
        again = {job for job, answer in answers if answer == "busy"}
        busy = [outcome for outcome in outcomes if outcome["id"] in again]
        done(len(outcomes) - len(busy))


def rate(
    bench: Bench,
    connections: int,
    jobs: int,
    loop: Callable[[psycopg.Connection[Any]], None],
    fill: Callable[[int], None] | None = None,
) -> float:
    """Jobs per second when so many connections run the loop until nothing is left.

    With `fill` each has emptied a queue before: functions are compiled once in a session, which a worker keeps all day.
    """
    with contextlib.ExitStack() as stack:
        lent = [stack.enter_context(bench.connect()) for _ in range(connections)]
        if fill is not None:
            for connection in lent:
                fill(2 * BATCH)
                loop(connection)
            fill(jobs)
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
    return rate(
        bench,
        connections,
        jobs,
        lambda connection: drain(connection, schema),
        lambda many: fill(bench, many, schema),
    )


def drained_floor(bench: Bench, connections: int, jobs: int) -> float:
    return rate(bench, connections, jobs, drain_floor, lambda many: fill_floor(bench, many))


def pgbench(bench: Bench, text: str, clients: int, seconds: int) -> float:
    """Statements per second on so many connections. The first second does not count: functions are compiled once in a session."""
    with tempfile.NamedTemporaryFile("w", suffix=".sql") as script:
        script.write(text)
        script.flush()
        options = {"-M": "extended", "-f": script.name, "-c": clients, "-j": 2, "-P": 1}
        told = subprocess.run(
            [
                str(bench.pgbench),
                "-n",
                *(str(part) for option in options.items() for part in option),
                "-T",
                str(seconds + 1),
                bench.url,
            ],
            check=True,
            capture_output=True,
            text=True,
        )
    found = re.search(r"progress: ([0-9.]+) s, ([0-9.]+) tps", told.stderr)
    whole = re.search(
        r"actually processed: ([0-9]+).*initial connection time = ([0-9.]+) ms\ntps = ([0-9.]+)",
        told.stdout,
        re.DOTALL,
    )
    assert found, told.stderr
    assert whole, told.stdout
    # Connecting is a part of the first second, and not of the whole.
    first, rate_then = float(found[1]), float(found[2])
    count, connecting, overall = int(whole[1]), float(whole[2]) / 1000, float(whole[3])
    return (count - first * rate_then) / (count / overall + connecting - first)


@contextlib.contextmanager
def load(bench: Bench, text: str, clients: int) -> Iterator[Callable[[], float]]:
    """Statements on so many connections that live on between turns: the load generator is stopped, and goes on when it is its turn.

    Gives what takes one turn, and tells jobs per second. It has warmed up by then: functions are compiled once in a session.
    """
    schema = text.removeprefix("insert into ").removeprefix("select ").partition(".")[0]
    options = ["-n", "-M", "extended", "-c", str(clients), "-j", "2", "-T", "3600"]

    with tempfile.NamedTemporaryFile("w", suffix=".sql") as script, bench.connect() as connection:
        script.write(text)
        script.flush()

        def made() -> int:
            """How many jobs were given a number: it stands outside of transactions, and costs little to read."""
            sequence = f"{schema}.jobs_id_seq"
            [[last]] = connection.execute(
                "select coalesce(pg_sequence_last_value(%s::regclass), 0)", (sequence,)
            ).fetchall()
            return int(last)

        at_first = made()
        command = [str(bench.pgbench), *options, "-f", script.name, bench.url]
        generator = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=os.environ | {"PGAPPNAME": Path(script.name).stem},
        )

        def await_alive(seconds: float) -> None:
            time.sleep(seconds)
            assert generator.poll() is None, generator.communicate()[1].decode()

        def turn() -> float:
            """What is under way when it ends counts as well: a statement for each connection, of thousands."""
            before, began = made(), time.perf_counter()
            generator.send_signal(signal.SIGCONT)
            time.sleep(0.25)
            generator.send_signal(signal.SIGSTOP)
            spent = time.perf_counter() - began
            await_alive(0.02)
            return (made() - before) / spent

        try:
            while made() == at_first:
                await_alive(0.05)
            await_alive(1)
            generator.send_signal(signal.SIGSTOP)
            await_alive(0.02)
            yield turn
            [[there]] = connection.execute(
                "select count(*) from pg_stat_activity where application_name = %s", (Path(script.name).stem,)
            ).fetchall()
            assert there == clients, f"of {clients} connections {there} are left"
        finally:
            generator.kill()
            generator.communicate()


def on_its_loop(measure: Coroutine[Any, Any, float]) -> float:
    """On the event loop that a worker has."""
    with asyncio.Runner(loop_factory=fastest_loop()) as runner:
        return runner.run(measure)


def clear(bench: Bench) -> None:
    with bench.connect() as connection:
        connection.execute("truncate shiftwork.jobs")


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
