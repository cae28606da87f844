"""What a store has to keep, on both of ours: the schema, and a table that somebody already has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from shiftwork import App, Retry, TableStore
from shiftwork.job import State
from shiftwork.program import Program
from shiftwork.stores.protocol import Protocol
from shiftwork.testing import Bench, store_conformance
from tests import harness
from tests.explorer import empty

TABLE = """
create table example_jobs (
  id serial primary key, state text default 'queued', failure_message text, queued_at timestamptz default now(),
  started_at timestamptz, finished_at timestamptz, process_after timestamptz, num_resets int not null default 0,
  num_failures int not null default 0, last_heartbeat_at timestamptz, execution_logs json[],
  worker_hostname text not null default '', cancel boolean not null default false, repository_id int not null
)
"""


class ProtocolBench(Bench):
    """The schema of ours."""

    def __init__(self, connection: psycopg.Connection[Any], dsn: str) -> None:
        self.dsn = dsn
        self.verbs = harness.Protocol(connection)
        super().__init__(Protocol(), connection)

    def add(self, many: int = 1) -> list[int]:
        return [row["id"] for row in self.verbs.enqueue_many([{"task": self.task, "payload": {}}] * many)]

    def state(self, job: int) -> State:
        return State(self.verbs.state(job))

    def resets(self, job: int) -> int:
        return int(self.verbs.job(job)["resets"])

    def lapse(self, worker: int) -> None:
        self.verbs.lapse(worker)

    def make_due(self, job: int) -> None:
        self.verbs.run_now(job)

    def cancel(self, job: int) -> None:
        self.verbs.cancel(job)

    @contextmanager
    def locked(self, job: int) -> Iterator[None]:
        with self.another() as other, other.transaction():
            other.execute("select from shiftwork.jobs where id = %s for update", (job,))
            yield

    def another(self) -> AbstractContextManager[psycopg.Connection[Any]]:
        return psycopg.connect(self.dsn, autocommit=True)

    def program(self, handler: Callable[[], Any]) -> Program:
        app = App(self.dsn)
        app.task(name=self.task)(handler)
        return app


class TableBench(Bench):
    """A table of somebody's."""

    task = queue = "example_jobs"

    def __init__(
        self, connection: psycopg.Connection[Any], dsn: str, table: str = TABLE, **options: Any
    ) -> None:
        self.dsn = dsn
        self.options = {"order_by": "repository_id, id", "retry": Retry(max_attempts=3), **options}
        connection.execute(table.encode())
        super().__init__(self.made().store(self.made().settings), connection)

    def made(self) -> TableStore:
        return TableStore("example_jobs", dsn=self.dsn, **self.options)

    def add(self, many: int = 1) -> list[int]:
        insert = "insert into example_jobs (repository_id) select place / 2 from generate_series(1, %s) as place returning id"
        return [row["id"] for row in self.rows(insert, many)]

    def rows(self, text: str, *params: object) -> list[Any]:
        return self.connection.execute(text.encode(), params or None).fetchall()

    def state(self, job: int) -> State:
        [row] = self.rows("select state, process_after > now() as waits from example_jobs where id = %s", job)
        waits = State.SCHEDULED if row["waits"] else State.READY
        states = {
            "queued": waits,
            "errored": State.SCHEDULED,
            "processing": State.RUNNING,
            "canceled": State.CANCELLED,
        }
        return states.get(row["state"]) or State(row["state"])

    def resets(self, job: int) -> int:
        return int(self.rows("select num_resets from example_jobs where id = %s", job)[0]["num_resets"])

    def lapse(self, worker: int) -> None:
        self.connection.execute(
            "update example_jobs set last_heartbeat_at = last_heartbeat_at - interval '1 hour'"
            " where split_part(worker_hostname, ':', -1) = %s",
            (str(worker),),
        )

    def make_due(self, job: int) -> None:
        self.connection.execute("update example_jobs set process_after = now() where id = %s", (job,))

    def cancel(self, job: int) -> None:
        self.connection.execute("update example_jobs set cancel = true where id = %s", (job,))

    @contextmanager
    def locked(self, job: int) -> Iterator[None]:
        with self.another() as other, other.transaction():
            other.execute("select from example_jobs where id = %s for update", (job,))
            yield

    def another(self) -> AbstractContextManager[psycopg.Connection[Any]]:
        return psycopg.connect(self.dsn, autocommit=True)

    def program(self, handler: Callable[[], Any]) -> Program:
        store = self.made()

        async def handle(record: dict[str, Any]) -> None:
            await handler()

        store.handler(handle)
        return store


WITH_ATTEMPT = TABLE.replace("repository_id int", "attempt int not null default 0, repository_id int")
WITH_VIEW = TABLE + "; create view seen as select *, 'repository ' || repository_id as name from example_jobs"
WITH_ENUM = (
    "create type job_state as enum ('queued', 'processing', 'errored', 'failed', 'completed', 'canceled');"
    + (TABLE.replace("state text default", "state job_state default"))
)
KINDS: dict[str, Callable[..., Bench]] = {
    "schema": ProtocolBench,
    "table": TableBench,
    "attempts": lambda connection, dsn: TableBench(connection, dsn, WITH_ATTEMPT),
    "view": lambda connection, dsn: TableBench(connection, dsn, WITH_VIEW, view="seen"),
    "enum": lambda connection, dsn: TableBench(connection, dsn, WITH_ENUM, lease=timedelta(seconds=20)),
}


# spec: QU-33, D-18, SG-1
@pytest.mark.parametrize("kind", KINDS)
def test_a_store_keeps_what_a_store_has_to(
    kind: str, connection: psycopg.Connection[dict[str, Any]], dsn: str
) -> None:
    for case in store_conformance:
        empty(connection)
        connection.execute("drop table if exists example_jobs cascade; drop type if exists job_state")
        try:
            case(KINDS[kind](connection, dsn))
        except Exception as error:
            error.add_note(f"in the case: {case.__name__}")
            raise
