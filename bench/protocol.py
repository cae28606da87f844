"""The verbs and the tables, without a worker."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator

from bench.callers import by_hand, through_client
from bench.measuring import (
    PAIRS,
    Bench,
    Marks,
    clear,
    drain,
    drained,
    drained_floor,
    encode,
    fill,
    fill_floor,
    installed,
    load,
    rate,
    sql,
)


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
            slices=4,
        )


ENQUEUE = {
    "enqueue": """select shiftwork.enqueue('nothing', '{"n": 1}');""",
    "enqueue_one": """select shiftwork.enqueue_one('nothing', '{"n": 1}', 'default', null, 5);""",
}
BARE = """insert into floor.jobs (task, payload) values ('nothing', '{"n": 1}');"""
BARE_HERE = (
    """insert into shiftwork.jobs (task, payload, queue, priority, max_attempts, run_at, created_at)"""
    """ values ('nothing', '{"n": 1}', 'default', 0, 5, now(), now());"""
)


def against(bench: Bench, name: str, goal: float, text: str, other: str, clients: int) -> None:
    """One job per transaction on so many connections, into tables that are empty on both sides when it begins.

    Both loads live as long as that and take turns of a quarter of a second: a slice on new connections takes long to get going, and what
    neighbours do meanwhile counted for more than what is compared.
    """
    clear(bench)
    fill_floor(bench, 1)
    with load(bench, text, clients) as ours, load(bench, other, clients) as theirs:
        bench.pairs(name, goal, ours, theirs, "jobs/s", slices=2 if bench.quick else 16)


def enqueue(bench: Bench) -> None:
    """One job per transaction, nobody asleep, against a bare INSERT; `enqueue_one` as the client calls it, with a queue and attempts."""
    for clients in (1, 32):
        plural = "s" * (clients > 1)
        for name, text in ENQUEUE.items():
            what = f"{name}(), {clients} connection{plural}, against a bare INSERT"
            against(bench, what, 0.8, text, BARE, clients)
            against(bench, f"{what} of the same row into the same table", 0.8, text, BARE_HERE, clients)
    for callers in (1, 32):
        bench.pairs(
            f"aenqueue() by {callers} caller{'s' * (callers > 1)} in one process, against as many bare INSERTs of one",
            0.8,
            lambda n=callers: through_client(bench, n),  # type: ignore[misc]
            lambda n=callers: by_hand(bench, n),  # type: ignore[misc]
            "jobs/s",
        )
    clear(bench)


def registry(bench: Bench) -> None:
    """The same when tasks are registered, so that what an enqueue leaves out has to be looked up."""
    forms = (
        ("enqueue_one(), which leaves nothing out", ENQUEUE["enqueue_one"], 0.8),
        ("enqueue(), which looks the task up", ENQUEUE["enqueue"], 0.7),
    )
    with known(bench):
        for clients in (1, 32):
            plural = "s" * (clients > 1)
            for name, text, goal in forms:
                what = f"{name}, {clients} connection{plural}, against a bare INSERT"
                against(bench, what, goal, text, BARE, clients)
    clear(bench)


@contextlib.contextmanager
def known(bench: Bench) -> Iterator[None]:
    """Twenty tasks that are registered with a queue and a number of attempts, as a worker does when it starts."""
    tasks = [
        {"name": name, "queue": "default", "max_attempts": 5} for name in ("nothing", *"abcdefghijklmnopqrs")
    ]
    with bench.connect() as connection:
        connection.execute("select shiftwork.declare_tasks(%s)", (encode(tasks).decode(),))
        connection.execute("analyze shiftwork.tasks")
        try:
            yield
        finally:
            connection.execute("truncate shiftwork.tasks")
            connection.execute("select setval('shiftwork.heed', 0, false)")  # as if nobody ever had


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
            slices=4,
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
            slices=4,
        )


def snapshot(bench: Bench) -> None:
    """While an old snapshot is held open, so that nothing dead can be removed."""
    jobs = bench.count(100_000)
    for delayed in (False, True):
        kind = "delayed" if delayed else "plain"
        fading, faded, whole = [], [], []
        held_rates, free_rates = [], []
        for turn in range(PAIRS):
            rates, quarters = {}, {}
            for held in (True, False) if turn % 2 else (False, True):
                fill(bench, jobs, delayed=delayed)
                marks = Marks(jobs)
                with bench.connect() as old:
                    if held:
                        old.execute("begin isolation level repeatable read")
                        old.execute("select count(*) from shiftwork.jobs")
                    rates[held] = rate(bench, 1, jobs, lambda c, m=marks: drain(c, done=m.add))  # type: ignore[misc]
                quarters[held] = marks.last_to_first()
                with bench.connect() as connection:
                    connection.execute("vacuum shiftwork.jobs")
            fading.append(quarters[True])
            faded.append(quarters[True] / quarters[False])
            whole.append(rates[True] / rates[False])
            held_rates.append(rates[True])
            free_rates.append(rates[False])
        bench.tell(f"old snapshot held, {kind} jobs", 0.9, fading, "the last quarter against the first")
        if delayed:  # the first also makes them all ready, held or not
            bench.tell(
                f"old snapshot held, {kind} jobs", 0.9, faded, "the same, against the same with nothing held"
            )
        rate_text = f"{statistics.median(held_rates):,.0f} to {statistics.median(free_rates):,.0f} jobs/s"
        bench.tell(f"old snapshot held, {kind} jobs, against none", 0.8, whole, rate_text)
