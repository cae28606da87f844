"""Jobs in a table of one's own, one repository after the other: `python app.py` shows it, `shiftwork worker app.py` works on."""

import asyncio
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import psycopg

import shiftwork


@dataclass
class ExampleJob:
    """A row of the view."""

    id: int
    state: str
    num_failures: int
    repository_id: int
    repository_name: str


store = shiftwork.TableStore(
    "example_jobs",
    view="example_jobs_with_repository_name",
    record=ExampleJob,
    order_by="repository_id, id",
    retry=shiftwork.Retry(max_attempts=3, delay=timedelta(milliseconds=500), factor=1),
    lease=timedelta(seconds=5),  # a row whose heartbeat is older is stalled
    heartbeat=timedelta(seconds=1),
    max_resets=5,
    died="the worker that ran this job died too many times",
)


@store.handler(transaction=True)
async def handle(job: ExampleJob, context: shiftwork.Context, tx: psycopg.AsyncConnection) -> None:
    """Visit a repository; what is written commits with the job, or not at all."""
    step = await store.aadd_log(context, "visit", ["git", "fetch", job.repository_name])
    await tx.execute("insert into visits (repository_id) values (%s)", (job.repository_id,))
    if job.repository_name == "flaky" and job.num_failures == 0:
        raise ConnectionError("the other side hung up")
    await asyncio.sleep(0.01)
    await store.achange_log(context, step, exit_code=0, out="up to date")


def main() -> None:
    """Make the tables, insert some jobs, leave one behind as a dead worker would, and work all of it."""
    dsn = store.client.settings.dsn or ""  # with no DATABASE_URL, this starts the embedded server
    with psycopg.connect(dsn, autocommit=True) as connection:
        if connection.execute("select to_regclass('example_jobs')").fetchone() == (None,):
            connection.execute((Path(__file__).parent / "repositories.sql").read_bytes())
            connection.execute("insert into repositories (name) values ('shiftwork'), ('flaky'), ('website')")
        connection.execute("insert into example_jobs (repository_id) values (3), (1), (2), (1)")
        connection.execute(
            "insert into example_jobs (repository_id, state, worker_hostname, started_at, last_heartbeat_at)"
            " values (2, 'processing', 'a-machine-that-died:1', now() - interval '1 hour', now() - interval '1 hour')"
        )
        for job, (answer, silent) in store.reset().items():
            print(f"job {job} is {answer} again: nobody was heard of for {silent.total_seconds():.0f} s")

        store.run_worker(stop_when_idle=True, concurrency=4)
        while store.exists("queued", "errored"):  # one of them waits for its second attempt
            store.run_worker(max_jobs=1)

        for name, jobs, failures, resets in connection.execute(
            "select repository_name, count(*), sum(num_failures), sum(num_resets) from example_jobs_with_repository_name"
            " where state = 'completed' group by repository_name order by min(repository_id)"
        ):
            print(f"{name}: {jobs} completed, after {failures} failures and {resets} resets")
        for (visits,) in connection.execute("select count(*) from visits"):
            print(f"{visits} visits")
    store.close()


if __name__ == "__main__":
    main()
