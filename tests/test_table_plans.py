"""What a worker reads of a table that somebody already has does not grow with what else lies in it."""

from __future__ import annotations

import re
from typing import Any

import psycopg
import pytest

from shiftwork import TableStore, operations
from shiftwork.database import Statement, executing, run
from shiftwork.stores.table import Table
from tests.test_conformance import TABLE
from tests.test_table import installing

OTHERS = 30_000
BATCH = 20
Connection = psycopg.Connection[dict[str, Any]]


class Scene:
    """A worker that holds a batch, and a batch that waits."""

    def __init__(self, connection: Connection, dsn: str, view: str | None) -> None:
        self.connection = connection
        front = TableStore("example_jobs", dsn=dsn, order_by="repository_id, id", view=view)
        self.store: Table = front.store(front.settings)
        run(operations.require(self.store), executing(connection, "", lent=False))
        self.insert("repository_id", "1", 2 * BATCH)
        claimed = run(
            operations.claim(self.store, 7, {"example_jobs": None}, BATCH),
            executing(connection, "", lent=False),
        )
        self.held = [(one[0], one[5]) for one in claimed.taken]

    def insert(self, columns: str, values: str, many: int) -> None:
        text = f"insert into example_jobs ({columns}) select {values} from generate_series(1, {many}) as n"
        self.connection.execute(text.encode())

    def buffers(self, statement: Statement) -> int:
        """What a statement touches."""
        text = f"explain (analyze, buffers, timing off, format text) {statement.text}"
        with self.connection.transaction(force_rollback=True):
            self.connection.execute(statement.under.encode())
            plan = [one["QUERY PLAN"] for one in self.connection.execute(text.encode(), statement.params)]
        found = re.search(r"shared hit=(\d+)(?: read=(\d+))?", "\n".join(plan))
        assert found is not None, plan
        return int(found[1]) + int(found[2] or 0)

    def costs(self) -> dict[str, int]:
        outcome = b'{"id":%d,"attempt":%d,"state":"completed","failure":false,"result":null}'
        return {
            "claim": self.buffers(self.store.claim({"worker": 7, "want": BATCH})),
            "settle": self.buffers(self.store.settle(7, [outcome % hold for hold in self.held])),
            "release": self.buffers(self.store.release(7, self.held, {})),
            "heartbeat": self.buffers(
                self.store.heartbeat({"worker": 7, "held": self.held, "answered": 2**60})
            ),
            "reap": self.buffers(self.store.reap(7, 1000, thorough=False)),
            "fence": self.buffers(self.store.fence(*self.held[0])),
        }


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("view", [None, "seen"])
def test_what_is_read_does_not_grow_with_what_has_ended_and_what_waits(
    connection: Connection, dsn: str, view: str | None, stale: bool
) -> None:
    connection.execute(TABLE.encode())
    connection.execute("create table repositories as select n as id from generate_series(1, 100) as n")
    connection.execute("alter table repositories add primary key (id)")
    connection.execute(
        "create view seen as select job.* from example_jobs as job join repositories as one on one.id = job.repository_id"
    )
    installing(TableStore("example_jobs", dsn=dsn, order_by="repository_id, id"), connection)
    scene = Scene(connection, dsn, view)
    connection.execute("vacuum analyze")
    alone = scene.costs()
    scene.insert("repository_id, state, finished_at", "n % 100 + 1, 'completed', now()", OTHERS)
    scene.insert("repository_id", "n % 99 + 2", OTHERS)  # all of them behind what waits
    connection.execute("vacuum" if stale else "vacuum analyze")
    crowd = scene.costs()
    grown = {verb: (alone[verb], cost) for verb, cost in crowd.items() if cost > 3 * alone[verb] + 100}
    assert not grown, f"buffers alone and in a crowd: {grown}"
