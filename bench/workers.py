"""Workers: real processes, with everything on that is on by default, log lines to a file among it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psycopg

from bench.callers import by_hand, through_client
from bench.measuring import (
    FLOOR,
    PAIRS,
    Bench,
    clear,
    drained_floor,
    fill_floor,
    installed,
    on_its_loop,
    pgbench,
    sql,
)
from shiftwork import App
from shiftwork.settings import Settings

CONCURRENCY = 1000
SESSIONS = 10


@contextlib.contextmanager
def working(
    bench: Bench, processes: int = 1, schema: str = "shiftwork", **settings: object
) -> Iterator[list[int]]:
    """So many worker processes, registered and waiting; they are stopped afterwards."""
    environment = os.environ | {
        "DATABASE_URL": bench.url,
        "SHIFTWORK_SCHEMA": schema,
        **{f"SHIFTWORK_{name.upper()}": str(value) for name, value in settings.items()},
    }
    with tempfile.TemporaryFile() as log, bench.connect() as connection:
        began = connection.execute(sql(f"select coalesce(max(id), 0) from {schema}.workers")).fetchone()
        command = [sys.executable, "-m", "bench.sample"]
        started = [subprocess.Popen(command, env=environment, stderr=log) for _ in range(processes)]
        try:
            known = sql(f"select count(*) = %s from {schema}.workers where id > %s")
            await_true(connection, known, (processes, began[0] if began else 0))
            yield [one.pid for one in started]
        finally:
            for one in started:
                one.terminate()
            codes = [one.wait(60) for one in started]
            log.seek(0)
            assert not any(codes), f"{codes}: {log.read()[-2000:].decode()}"


def await_true(connection: psycopg.Connection[Any], text: bytes, params: tuple[object, ...] = ()) -> None:
    deadline = time.monotonic() + 300
    while connection.execute(text, params).fetchone() != (True,):
        assert time.monotonic() < deadline, text
        time.sleep(0.25)  # rarely: who asks whether a queue is empty reads all that has left it


def prepare(bench: Bench, jobs: int, task: str, schema: str = "shiftwork") -> None:
    """So many jobs in a queue that is paused; what ended before is forgotten."""
    with bench.connect() as connection:
        connection.execute(sql(f"truncate {schema}.history"))
        connection.execute(sql(f"delete from {schema}.jobs where state <> 'scheduled'"))
        connection.execute(sql(f"select {schema}.pause(queue => 'default')"))
        connection.execute(
            sql(
                f"insert into {schema}.jobs (task, payload, queue, priority, max_attempts, state, run_at, created_at) "
                f"select %s, '{{\"n\": 1}}', 'default', 0, 5, 'ready', moment, moment "
                f"  from (select now() - (%s - n) * interval '10 microseconds' as moment from generate_series(1, %s) as n) as one"
            ),
            (task, jobs, jobs),
        )
        connection.execute(sql(f"vacuum analyze {schema}.jobs"))


def let_go(bench: Bench, schema: str = "shiftwork") -> tuple[float, float]:
    """Resume the queue and wait until it is empty: the seconds it took, and the last quarter's pace by the first's."""
    with bench.connect() as connection:
        connection.execute(sql(f"select {schema}.resume(queue => 'default')"))
        await_true(
            connection,
            sql(f"select not exists (select from {schema}.jobs where state in ('ready', 'running'))"),
        )
        [[seconds, first, last]] = connection.execute(
            sql(
                "select extract(epoch from max(finished_at) - min(claimed_at))::float,"
                " extract(epoch from percentile_disc(0.25) within group (order by finished_at) - min(claimed_at))::float,"
                " extract(epoch from max(finished_at) - percentile_disc(0.75) within group (order by finished_at))::float"
                f" from {schema}.history"
            )
        ).fetchall()
        [[other]] = connection.execute(
            sql(f"select count(*) from {schema}.history where state <> 'completed'")
        ).fetchall()
        assert other == 0
        return seconds, first / last


def drained(bench: Bench, jobs: int, task: str = "nothing", processes: int = 1, **settings: object) -> float:
    """Jobs per second through worker processes."""
    prepare(bench, jobs, task)
    chosen = {"concurrency": CONCURRENCY} | settings
    with working(bench, processes, "shiftwork", **chosen):
        return jobs / let_go(bench)[0]


# What is measured.


def drain(bench: Bench) -> None:
    """No-op async jobs through one worker process, against bare statements on one connection."""
    jobs = bench.count(100_000)
    bench.pairs(
        "one worker process, against the floor of one connection",
        0.8,
        lambda: drained(bench, jobs),
        lambda: drained_floor(bench, 1, jobs),
        "jobs/s",
    )


def processes(bench: Bench) -> None:
    """The same through two processes, against two connections."""
    jobs = bench.count(100_000)
    bench.pairs(
        "two worker processes, against the floor of two connections",
        0.7,
        lambda: drained(bench, jobs, processes=2),
        lambda: drained_floor(bench, 2, jobs),
        "jobs/s",
    )


def threads(bench: Bench) -> None:
    """No-op plain functions, in threads."""
    jobs = bench.count(50_000)
    bench.pairs(
        "thread executor, against the floor of one connection",
        0.25,
        lambda: drained(bench, jobs, "nothing_in_a_thread", concurrency=100),
        lambda: drained_floor(bench, 1, jobs),
        "jobs/s",
    )


def transactions(bench: Bench) -> None:
    """Transactional no-op tasks, against BEGIN, SELECT FOR UPDATE, UPDATE, COMMIT on as many connections."""
    jobs = bench.count(10_000)

    def bare() -> float:
        fill_floor(bench, jobs)
        return on_its_loop(_bare_transactions(bench.url, jobs))

    bench.pairs(
        f"transactional tasks, {SESSIONS} sessions, against bare transactions",
        0.7,
        lambda: drained(bench, jobs, "nothing_in_a_transaction", concurrency=100, transactions=SESSIONS),
        bare,
        "jobs/s",
    )


def batches(bench: Bench) -> None:
    """Transactional no-op tasks that take a hundred jobs in one call, against those that take one."""
    jobs = bench.count(10_000)
    bench.pairs(
        f"transactional tasks in batches of 100, {SESSIONS} sessions, against one by one",
        3.0,
        lambda: drained(bench, jobs, "nothing_together", concurrency=200, transactions=SESSIONS),
        lambda: drained(bench, jobs, "nothing_in_a_transaction", concurrency=200, transactions=SESSIONS),
        "jobs/s",
    )


async def _bare_transactions(url: str, jobs: int) -> float:
    ids = iter(range(1, jobs + 1))

    async def loop(connection: psycopg.AsyncConnection[Any]) -> None:
        for one in ids:
            await connection.execute("begin")
            await connection.execute("select id from floor.jobs where id = %s for update", (one,))
            await connection.execute("update floor.jobs set state = 'completed' where id = %s", (one,))
            await connection.execute("commit")

    connections = [
        await psycopg.AsyncConnection.connect(url, autocommit=True, prepare_threshold=None)
        for _ in range(SESSIONS)
    ]
    began = time.perf_counter()
    await asyncio.gather(*map(loop, connections))
    spent = time.perf_counter() - began
    for connection in connections:
        await connection.close()
    return jobs / spent


def routines(bench: Bench) -> None:
    """Handlers in SQL that do nothing, through a worker, against process_jobs in one session."""
    jobs = bench.count(10_000)
    with bench.connect() as connection:
        connection.execute("create procedure public.nothing(payload jsonb) language plpgsql as 'begin end'")
        connection.execute(
            "select shiftwork.register_task('nothing_in_sql', handler => 'public.nothing(jsonb)')"
        )

    def in_session() -> float:
        prepare(bench, jobs, "nothing_in_sql")
        with bench.connect() as connection:
            connection.execute("select shiftwork.resume(queue => 'default')")
            began = time.perf_counter()
            connection.execute("call shiftwork.process_jobs(batch => null)")
            return jobs / (time.perf_counter() - began)

    bench.pairs(
        f"handlers in SQL through a worker with {SESSIONS} sessions, against process_jobs in one session",
        0.8,
        lambda: drained(bench, jobs, "nothing_in_sql", concurrency=100, transactions=SESSIONS),
        in_session,
        "jobs/s",
    )
    with bench.connect() as connection:
        connection.execute("delete from shiftwork.tasks where name = 'nothing_in_sql'")
        connection.execute("drop procedure public.nothing")


def enqueuers(bench: Bench) -> None:
    """32 who enqueue one job at a time while a worker keeps up, against bare inserts."""
    text = """select shiftwork.enqueue('nothing', '{"n": 1}');"""
    bare = """insert into floor.jobs (task, payload) values ('nothing', '{"n": 1}');"""
    seconds = 1 if bench.quick else 4

    def kept_up(enqueue: Callable[[], float], left: list[int]) -> float:
        clear(bench)
        with working(bench, concurrency=CONCURRENCY), bench.connect() as connection:
            pgbench(bench, text, 32, seconds=1)  # until nobody counts as asleep any more
            found = enqueue()
            [[waiting]] = connection.execute("select count(*) from shiftwork.jobs").fetchall()
            left.append(waiting)
            await_true(connection, b"select not exists (select from shiftwork.jobs)")
        return found

    fill_floor(bench, 1)
    for name, ours, theirs in (
        (
            "aenqueue() by 32 callers in one process while a worker keeps up, against as many bare INSERTs of one",
            lambda: through_client(bench, 32),
            lambda: by_hand(bench, 32),
        ),
        (
            "enqueue() on 32 connections while a worker keeps up, against bare INSERTs",
            lambda: pgbench(bench, text, 32, seconds=seconds),
            lambda: pgbench(bench, bare, 32, seconds=seconds),
        ),
    ):
        left: list[int] = []
        bench.pairs(name, 0.6, partial(kept_up, ours, left), theirs, "jobs/s")
        print(f"         jobs that waited when the clients stopped: {left}")


def pickup(bench: Bench) -> None:
    """From enqueue to handler on an idle worker, against INSERT with NOTIFY, and a claim when it is heard."""
    turns = 20 if bench.quick else 100
    fill_floor(bench, 0)
    clear(bench)  # of what others have left dead: nobody vacuums here, and the floor is new
    ours: list[list[float]] = []
    theirs: list[list[float]] = []
    with (
        working(bench, concurrency=10),
        _listening(bench) as bare,
    ):
        time.sleep(1)
        for turn in range(PAIRS):
            for through_worker in (True, False) if turn % 2 else (False, True):
                if through_worker:
                    ours.append(sorted(_picked_up(bench, turns)))
                else:
                    theirs.append(sorted(bare() for _ in range(turns)))
    for name, part, goal in (("p50", 0.5, 0.5), ("p99", 0.99, 0.2)):
        places = [int(part * (turns - 1))] * PAIRS
        mine = [times[place] for times, place in zip(ours, places, strict=True)]
        others = [times[place] for times, place in zip(theirs, places, strict=True)]
        bench.tell(
            f"pickup on an idle worker, {name} (bare by ours)",
            goal,
            [other / one for one, other in zip(mine, others, strict=True)],
            f"{statistics.median(mine) * 1e3:.1f} ms, bare {statistics.median(others) * 1e3:.1f} ms",
        )


def _picked_up(bench: Bench, turns: int) -> list[float]:
    """Nobody waits for a result meanwhile: that would keep the machine busy just then."""
    app = App(settings=Settings(dsn=bench.url))

    @app.task
    async def moment(n: int) -> int:
        """As the worker has it."""
        return time.monotonic_ns()

    sent = []
    for _ in range(turns):
        time.sleep(0.05)  # asleep again
        began = time.monotonic_ns()
        sent.append((began, moment.enqueue(n=1)))
    with app:
        return [(handle.result(30) - began) / 1e9 for began, handle in sent]


@contextlib.contextmanager
def _listening(bench: Bench) -> Iterator[Callable[[], float]]:
    """The bare way: insert and notify in one statement; whoever hears it claims one job."""
    claimed = threading.Semaphore(0)
    at = [0.0]
    done = threading.Event()

    def listen() -> None:
        with bench.connect() as connection:
            connection.execute("listen floor")
            ready.set()
            while not done.is_set():
                if list(connection.notifies(timeout=0.5, stop_after=1)):
                    connection.execute(sql(FLOOR["claim"]), (1, 1)).fetchall()
                    at[0] = time.monotonic()
                    claimed.release()

    ready = threading.Event()
    listener = threading.Thread(target=listen)
    listener.start()
    ready.wait()
    with bench.connect() as connection:

        def once() -> float:
            time.sleep(0.05)
            began = time.monotonic()
            connection.execute(
                "with fresh as (insert into floor.jobs (task, payload) values ('moment', '{}') returning id)"
                " select pg_notify('floor', '') from fresh"
            )
            claimed.acquire()
            return at[0] - began

        yield once
    done.set()
    listener.join()


def crowd(bench: Bench) -> None:
    """A worker beside half a million jobs that wait for their time, against none."""
    jobs, others = bench.count(100_000), bench.count(500_000)
    with installed(bench, "crowded") as connection:
        connection.execute(
            "insert into crowded.jobs (task, payload, queue, priority, max_attempts, state, run_at) "
            """select 'nothing', '{"n": 1}', 'default', 0, 5, 'scheduled', now() + n * interval '1 minute' """
            "  from generate_series(1, %s) as n",
            (others,),
        )
        connection.execute("vacuum analyze crowded.jobs")

        def crowded() -> float:
            prepare(bench, jobs, "nothing", "crowded")
            with working(bench, schema="crowded", concurrency=CONCURRENCY):
                return jobs / let_go(bench, "crowded")[0]

        bench.pairs(
            f"a worker beside {others:,} scheduled jobs, against none",
            0.9,
            crowded,
            lambda: drained(bench, jobs),
            "jobs/s",
        )


def snapshot(bench: Bench) -> None:
    """A worker while an old snapshot is held open, against none."""
    jobs = bench.count(100_000)
    fading: list[float] = []

    def held() -> float:
        prepare(bench, jobs, "nothing")
        with working(bench, concurrency=CONCURRENCY), bench.connect() as old:
            old.execute("begin isolation level repeatable read")
            old.execute("select count(*) from shiftwork.jobs")
            seconds, pace = let_go(bench)
            fading.append(pace)
        return jobs / seconds

    bench.pairs(
        "a worker with an old snapshot held, against none", 0.8, held, lambda: drained(bench, jobs), "jobs/s"
    )
    bench.tell("a worker with an old snapshot held", 0.9, fading, "the last quarter against the first")


def idle(bench: Bench) -> None:
    """What a worker costs that has nothing to do."""
    seconds = 10 if bench.quick else 120
    watched = Bench(f"{bench.url}&options=-c%20track_functions%3Dall", bench.pgbench, bench.quick)
    clear(bench)
    with working(watched) as [pid], bench.connect() as connection:
        time.sleep(15)  # a session that has gone quiet tells after ten seconds what it has done
        began, (asked, beaten) = _cpu(pid), _transactions(connection)
        time.sleep(seconds)
        spent, (asked_by_now, beaten_by_now) = _cpu(pid) - began, _transactions(connection)
        bench.at_most("memory of an idle worker", 70, _rss(pid), "MiB")
    bench.at_most("CPU of an idle worker", 1, 100 * spent / seconds, "% of a core")
    queries, heartbeats = asked_by_now - asked, beaten_by_now - beaten
    bench.at_most(
        "queries of an idle worker beside heartbeats, all that a server with nobody else was asked",
        10,
        (queries - heartbeats) * 60 / seconds,
        "a minute",
    )
    print(f"         {queries} transactions in {seconds} s, {heartbeats} of them heartbeats")


def _transactions(connection: psycopg.Connection[Any]) -> tuple[int, int]:
    """How many this database has seen, and how many of them were heartbeats."""
    row = connection.execute(
        "select xact_commit + xact_rollback,"
        " (select coalesce(sum(calls), 0) from pg_stat_user_functions where funcname = 'heartbeat')::bigint"
        " from pg_stat_database where datname = current_database()"
    ).fetchone()
    assert row is not None
    return int(row[0]), int(row[1])


def metrics(bench: Bench) -> None:
    """Every hook, a subscriber and metrics, and somebody who scrapes every second, against nothing but log lines."""
    jobs, slices = bench.count(25_000), 6
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    done = threading.Event()

    def scrape() -> str:
        with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            return str(answer.read(), "utf8")

    def scrape_on() -> None:
        while not done.wait(1):
            with contextlib.suppress(OSError):
                scrape()

    with (
        working(bench, concurrency=CONCURRENCY),
        working(bench, concurrency=CONCURRENCY, metrics_port=port),
        bench.connect() as connection,
    ):
        [[looked_at], [other]] = connection.execute(
            "select id from shiftwork.workers order by id desc limit 2"
        ).fetchall()
        scraper = threading.Thread(target=scrape_on)
        scraper.start()

        def alone(worker: int, idle: int) -> float:
            """Jobs a second by one of the two, while the other is paused."""
            prepare(bench, jobs, "nothing")
            connection.execute("select shiftwork.resume(worker => %s)", (worker,))
            connection.execute("select shiftwork.pause(worker => %s)", (idle,))
            return jobs / let_go(bench)[0]

        try:
            alone(looked_at, other)  # each has its caches filled before it is measured
            alone(other, looked_at)
            bench.pairs(
                "a worker that is looked at, against one that is not",
                0.9,
                lambda: alone(looked_at, other),
                lambda: alone(other, looked_at),
                "jobs/s",
                slices,
            )
            told = scrape()
        finally:
            done.set()
            scraper.join()
    for hook in ("before_job", "after_job"):
        count = f'shiftwork_hook_duration_seconds_count{{hook="{hook}"}} {float(jobs * (1 + PAIRS * slices))}'
        assert count in told, told


def memory(bench: Bench) -> None:
    """What a worker has grown by after a million jobs."""
    jobs = bench.count(1_000_000)
    prepare(bench, jobs // 5, "nothing")
    with working(bench, concurrency=CONCURRENCY) as [pid]:
        let_go(bench)
        before = _rss(pid)
        for _ in range(5):
            prepare(bench, jobs // 5, "nothing")
            let_go(bench)
        bench.at_most(f"growth over {jobs:,} jobs", 5, _rss(pid) - before, "MiB")


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _rss(pid: int) -> float:
    found = [
        line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS")
    ]
    return int(found[0].split()[1]) / 1024
