"""The verbs for tests: each call is one statement, and what comes back is plain Python."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, LiteralString

import psycopg
from psycopg import sql
from psycopg.rows import dict_row

Row = dict[str, Any]


@dataclass
class Claimed:
    """What a claim gave: its report and the jobs, in the order in which they are to run."""

    report: Row
    jobs: list[Row] = field(default_factory=list)

    @property
    def held(self) -> list[list[int]]:
        return [[job["id"], job["attempt"]] for job in self.jobs]


class Protocol:
    """The protocol over one connection, as psql or a worker would use it."""

    def __init__(self, connection: psycopg.Connection[Any], schema: str = "shiftwork") -> None:
        self.connection = connection
        self.schema = schema

    def rows(self, text: LiteralString, *params: object) -> list[Row]:
        """Run a statement in which {} stands for the schema."""
        cursor = self.connection.cursor(row_factory=dict_row)
        statement = sql.SQL(text).format(sql.Identifier(self.schema)) if "{}" in text else sql.SQL(text)
        cursor.execute(statement, params or None)
        return cursor.fetchall() if cursor.description else []

    def value(self, text: LiteralString, *params: object) -> Any:
        [row] = self.rows(text, *params)
        [value] = row.values()
        return value

    def register(self, *, lease: float = 30, **details: object) -> int:
        found = self.value("select {}.register_worker(%s)", json.dumps({"lease": lease, **details}))
        assert isinstance(found, int)
        return found

    def enqueue(self, task: str = "greet", payload: Row | None = None, **options: object) -> int:
        [row] = self.enqueue_many([{"task": task, "payload": payload or {}, **options}])
        found = row["id"]
        assert isinstance(found, int)
        return found

    def enqueue_many(self, jobs: Iterable[Row]) -> list[Row]:
        return sorted(
            self.rows("select * from {}.enqueue_many(%s)", json.dumps(list(jobs))),
            key=lambda row: row["ordinal"],
        )

    def claim(
        self,
        worker: int,
        *queues: str | Row,
        want: int = 10,
        tasks: Sequence[str] | None = None,
        **more: object,
    ) -> Claimed:
        wishes = [{"queue": queue} if isinstance(queue, str) else queue for queue in queues or ("default",)]
        request = {"worker": worker, "queues": wishes, "want": want, "tasks": tasks, **more}
        *jobs, report = self.rows("select * from {}.claim(%s)", json.dumps(request))
        jobs.sort(key=lambda job: (job["priority"], job["run_at"], job["id"]))
        return Claimed(report["payload"], jobs)

    def start(self, worker: int, held: Sequence[Sequence[int]]) -> dict[int, str]:
        return self._answers("select * from {}.start(%s)", {"worker": worker, "held": held})

    def release(
        self, worker: int, held: Sequence[Sequence[int]], crashed: Mapping[int, str] | None = None
    ) -> dict[int, str]:
        request: Row = {"worker": worker, "held": held}
        if crashed is not None:
            request["crashed"] = {str(job): why for job, why in crashed.items()}
        return self._answers("select * from {}.release(%s)", request)

    def settle(self, worker: int, *outcomes: Row) -> dict[int, str]:
        return self._answers("select * from {}.settle(%s)", {"worker": worker, "outcomes": outcomes})

    def complete(self, worker: int, jobs: Iterable[Row], result: object = None) -> dict[int, str]:
        return self.settle(
            worker,
            *(
                {"id": job["id"], "attempt": job["attempt"], "state": "completed", "result": result}
                for job in jobs
            ),
        )

    def heartbeat(self, worker: int, held: Sequence[Sequence[int]] = (), **more: object) -> Row:
        answer = self.value("select {}.heartbeat(%s)", json.dumps({"worker": worker, "held": held, **more}))
        assert isinstance(answer, dict)
        return answer

    def reap(self, **options: object) -> dict[int, str]:
        found = self.rows(
            "select * from {}.reap(%s, %s, %s)",
            options.get("reaper", 0),
            options.get("most", 1000),
            options.get("thorough", False),
        )
        return {row["id"]: row["answer"] for row in found}

    def promote(self, most: int = 1000, after: int = 0) -> int:
        found = self.rows("select * from {}.promote(%s, %s)", most, after)[0]["promoted"]
        assert isinstance(found, int)
        return found

    def expire(self) -> int:
        found = self.value("select {}.expire()")
        assert isinstance(found, int)
        return found

    def cancel(self, *ids: int, reason: str | None = None) -> dict[int, str]:
        return {
            row["id"]: row["answer"]
            for row in self.rows("select * from {}.cancel(%s, %s)", list(ids), reason)
        }

    def revive(self, *ids: int) -> dict[int, str]:
        return {row["id"]: row["answer"] for row in self.rows("select * from {}.revive(%s)", list(ids))}

    def run_now(self, *ids: int, strict: bool = False) -> dict[int, str]:
        return {
            row["id"]: row["answer"]
            for row in self.rows("select * from {}.run_now(%s, null, %s)", list(ids), strict)
        }

    def job(self, job: int) -> Row:
        [row] = self.rows("select * from {}.all_jobs where id = %s", job)
        return row

    def live(self, job: int) -> Row:
        [row] = self.rows("select * from {}.jobs where id = %s", job)
        return row

    def state(self, job: int) -> str:
        found = self.job(job)["state"]
        assert isinstance(found, str)
        return found

    def lapse(self, worker: int) -> None:
        """Make a worker's lease old; nobody sleeps."""
        self.rows(
            "update {}.workers set lease_until = shiftwork.clock() - interval '1 second' where id = %s",
            worker,
        )

    def shift_clock(self, by: timedelta) -> None:
        """Let the protocol's clock run ahead of the server's (or behind), for every session."""
        self.connection.execute(
            sql.SQL(
                "create or replace function {}.clock() returns timestamptz language sql stable parallel safe "
                "return greatest(now(), statement_timestamp()) + {}::interval"
            ).format(sql.Identifier(self.schema), sql.Literal(f"{by.total_seconds()} seconds"))
        )

    def _answers(self, text: LiteralString, request: Row) -> dict[int, str]:
        return {row["id"]: row["answer"] for row in self.rows(text, json.dumps(request))}
