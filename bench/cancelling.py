"""How long the server stays with a statement of ten minutes after its job was cancelled: `python -m bench.cancelling` is the worker."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import psycopg

import shiftwork
from bench.measuring import Bench, clear, sql
from bench.workers import await_true
from shiftwork.database import executing
from shiftwork.logs import set_up
from shiftwork.stores.fitting import installation

TIMES = 20
LONG = "select pg_sleep(600)"
WORLD = """
drop table if exists bench_jobs;
create table bench_jobs (
  id bigint generated always as identity primary key, state text not null default 'queued', failure_message text,
  started_at timestamptz, finished_at timestamptz, last_heartbeat_at timestamptz, worker_hostname text not null default '',
  attempt int not null default 0, cancel boolean not null default false);
create or replace procedure bench_dawdle(payload jsonb) language plpgsql as $$ begin perform pg_sleep(600); end $$;
select shiftwork.register_task('in SQL', handler => 'public.bench_dawdle(jsonb)');
"""
DAWDLING = sql(
    "select exists (select from pg_stat_activity where wait_event = 'PgSleep' and application_name like 'shiftwork %%')"
)
app = shiftwork.App()
store = shiftwork.TableStore("bench_jobs")


@app.task(transaction=True)
async def dawdle(tx: psycopg.AsyncConnection[Any]) -> None:
    """A statement of ten minutes, in a transaction."""
    await tx.execute(LONG)


@app.task(transaction=True)
def dawdle_in_a_thread(tx: psycopg.Connection[Any]) -> None:
    """The same, in a thread."""
    tx.execute(LONG)


@store.handler(transaction=True)
async def dawdle_over_a_row(row: dict[str, Any], tx: psycopg.AsyncConnection[Any]) -> None:
    """The same, for a row of a table."""
    await tx.execute(LONG)


def cancel(bench: Bench) -> None:
    """From the call that cancels a job to the end of the statement of ten minutes in which its handler is, the longest of twenty."""
    insert = "insert into bench_jobs default values returning id"
    by_hand = "update bench_jobs set cancel = true where id = %s returning id"
    with bench.connect() as connection, shiftwork.App(bench.url) as client:
        clear(bench)
        connection.execute(sql(WORLD))
        made = store.store(store.settings)
        made.learn(executing(connection, "", lent=False)(made.installed()))
        for statement in installation(made):
            connection.execute(sql(statement))

        def one(text: str, *params: object) -> Any:
            row = connection.execute(sql(text), params).fetchone()
            return row and row[0]

        def enqueue(task: str) -> int:
            return int(one("select (shiftwork.enqueue(%s)).id", task))

        def timed(what: str, enqueue: Callable[[], int], cancel: Callable[[int], object]) -> None:
            took = []
            for _ in range(bench.count(TIMES)):
                job = enqueue()
                await_true(connection, DAWDLING)
                began = time.perf_counter()
                cancel(job)
                while connection.execute(DAWDLING).fetchone() == (True,):
                    pass
                took.append(time.perf_counter() - began)
            bench.at_most(f"{what}: the longest of {len(took)}", 1.0, max(took), "s")

        tasks = {"a handler in SQL": "in SQL", "a transactional handler": dawdle.name}
        tasks["a transactional handler in a thread"] = dawdle_in_a_thread.name
        with tempfile.TemporaryFile() as log:
            environment = os.environ | {"DATABASE_URL": bench.url}
            workers = [
                subprocess.Popen(
                    [sys.executable, "-m", "bench.cancelling", what], env=environment, stderr=log
                )
                for what in ("app", "store")
            ]
            try:
                for what, task in tasks.items():
                    timed(what, lambda task=task: enqueue(task), lambda job: client.job(job).cancel())  # type: ignore[misc]
                timed("a row of one's own table", lambda: int(one(insert)), lambda job: one(by_hand, job))
            finally:
                for worker in workers:
                    worker.terminate()
                codes = [worker.wait(60) for worker in workers]
                log.seek(0)
                assert not any(codes), log.read()[-2000:].decode()


if __name__ == "__main__":
    program = {"app": app, "store": store}[sys.argv[1]]
    set_up(program.settings.log_level, program.settings.log_format)
    sys.exit(0 if program.run_worker() else 1)
