"""A table of one's own, against the built-in store: `python -m bench.table` is the process that works it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass

import shiftwork
from bench.measuring import Bench, sql
from bench.workers import CONCURRENCY, await_true, drained
from shiftwork.database import executing
from shiftwork.logs import set_up
from shiftwork.stores.fitting import installation

TABLE = """
drop table if exists bench_jobs, bench_gate;
create table bench_gate as select false as open;
create table bench_jobs (
  id bigint generated always as identity primary key, state text not null default 'queued', failure_message text,
  queued_at timestamptz default now(), started_at timestamptz, finished_at timestamptz, process_after timestamptz,
  num_resets int not null default 0, num_failures int not null default 0, last_heartbeat_at timestamptz, execution_logs json[],
  worker_hostname text not null default '', cancel boolean not null default false, n int not null
) with (fillfactor = 70)
"""


@dataclass
class Row:
    """What the handler reads of a row."""

    id: int
    n: int


store = shiftwork.TableStore("bench_jobs", record=Row, where="(select open from bench_gate)", order_by="id")


@store.handler
async def nothing(row: Row) -> None:
    """Nothing, in the event loop."""


def drain(bench: Bench) -> None:
    """No-op async jobs through one worker process: rows of a table of one's own, against the built-in store."""
    jobs = bench.count(50_000)
    bench.pairs(
        "a table of one's own, against the built-in store",
        0.5,
        lambda: drained_table(bench, jobs),
        lambda: drained(bench, jobs),
        "jobs/s",
    )


def drained_table(bench: Bench, jobs: int) -> float:
    """Jobs per second through a worker over a table."""
    with bench.connect() as connection, tempfile.TemporaryFile() as log:
        connection.execute(sql(TABLE))
        made = store.store(store.settings)
        made.learn(executing(connection, "", lent=False)(made.installed()))
        for statement in installation(made):
            connection.execute(sql(statement))
        connection.execute("insert into bench_jobs (n) select n from generate_series(1, %s) as n", (jobs,))
        connection.execute("vacuum analyze bench_jobs")
        environment = os.environ | {"DATABASE_URL": bench.url, "SHIFTWORK_CONCURRENCY": str(CONCURRENCY)}
        process = subprocess.Popen([sys.executable, "-m", "bench.table"], env=environment, stderr=log)
        try:
            listening = "select count(*) > 0 from pg_stat_activity where application_name ~ '^shiftwork table [0-9]' and query ~ '^listen|notify'"
            await_true(connection, sql(listening))
            connection.execute("update bench_gate set open = true")
            connection.execute("select pg_notify(%s, '')", (made.channels[0],))
            await_true(
                connection,
                b"select not exists (select from bench_jobs where state in ('queued', 'processing'))",
            )
        finally:
            process.terminate()
            code = process.wait(60)
            log.seek(0)
            assert code == 0, log.read()[-2000:].decode()
        [[seconds, other]] = connection.execute(
            "select extract(epoch from max(finished_at) - min(started_at))::float, count(*) filter (where state <> 'completed')"
            " from bench_jobs"
        ).fetchall()
        assert other == 0
        return jobs / float(seconds)


if __name__ == "__main__":
    set_up(store.settings.log_level, store.settings.log_format)
    sys.exit(0 if store.run_worker() else 1)
