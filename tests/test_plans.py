"""What the verbs of a worker read does not grow with what else lies in the tables, with fresh statistics, with none, and
with plans that were made when there was nothing yet.

Each verb is run inside a transaction that is rolled back, and what it touched is counted by the server itself: pages of
our tables and their indexes by pg_statio_user_tables, rows of `jobs` by pg_stat_xact_user_tables. (The buffers of EXPLAIN
would count the catalogues as well, which are read anew whenever others on the same server change so much that sessions
have to forget all they know of them.) First with nothing else there, then with half a million other rows:
jobs that wait for their time, jobs that another worker holds, jobs of other queues, and, in front in the same queue,
jobs of a task that the worker does not know and of one that is paused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, LiteralString

import psycopg
import pytest

from tests.conftest import copied
from tests.harness import Claimed, Protocol

OTHERS = 100_000  # of each of five kinds
BATCH = 100


@dataclass(frozen=True)
class Cost:
    """What a statement touched."""

    pages: int
    rows: int


@dataclass
class Scene:
    """A worker with a batch of jobs in every situation, alone or in a crowd."""

    protocol: Protocol
    worker: int
    lapsed: int
    held: list[list[int]]
    parents: list[int]

    def cost(self, text: LiteralString, request: object) -> Cost:
        """Run a verb twice and roll it back; the second time counts, when its plans are made."""
        self._cost(text, request)
        return self._cost(text, request)

    def _cost(self, text: LiteralString, request: object) -> Cost:
        before = self._pages()
        rows = self.rows(text, request)
        return Cost(self._pages() - before, rows)

    def rows(self, text: LiteralString, request: object) -> int:
        """How many rows of `jobs` a verb reads; what it did is taken back."""
        with self.protocol.connection.transaction(force_rollback=True):
            before = self._rows()
            self.protocol.rows(text, json.dumps(request) if isinstance(request, dict) else request)
            return self._rows() - before

    def _rows(self) -> int:
        found = self.protocol.value(
            "select coalesce(sum(seq_tup_read + coalesce(idx_tup_fetch, 0)), 0)::bigint"
            " from pg_stat_xact_user_tables where schemaname = 'shiftwork' and relname = 'jobs'"
        )
        assert isinstance(found, int)
        return found

    def _pages(self) -> int:
        self.protocol.value("select pg_stat_force_next_flush()")  # when this statement is over
        found = self.protocol.value(
            "select sum(heap_blks_read + heap_blks_hit + coalesce(idx_blks_read + idx_blks_hit, 0)"
            " + coalesce(toast_blks_read + toast_blks_hit + tidx_blks_read + tidx_blks_hit, 0))::bigint"
            " from pg_statio_user_tables where schemaname = 'shiftwork'"
        )
        assert isinstance(found, int)
        return found

    def verbs(self) -> dict[str, Cost]:
        claim = {"worker": self.worker, "queues": [{"queue": "default"}], "want": BATCH, "tasks": ["greet"]}
        outcomes = [
            {"id": job, "attempt": attempt, "state": "completed", "result": 1} for job, attempt in self.held
        ]
        retries = [
            outcome | {"state": "scheduled", "delay": 9, "error": {"code": "BAD"}} for outcome in outcomes
        ]
        ids = [job for job, _ in self.held]
        fresh = [{"task": "greet", "unique_key": str(number)} for number in range(BATCH)]
        failures = [outcome | {"state": "failed"} for outcome in outcomes]
        return {
            "claim": self.cost("select * from {}.claim(%s)", claim),
            "settle": self.cost("select * from {}.settle(%s)", {"worker": self.worker, "outcomes": outcomes}),
            "settle children, and end their parents": self.cost(
                "select (select count(*) from {}.settle(%s)), (select count(*) from shiftwork.gather())",
                {"worker": self.worker, "outcomes": outcomes},
            ),
            "settle to run again": self.cost(
                "select * from {}.settle(%s)", {"worker": self.worker, "outcomes": retries}
            ),
            "settle as failed": self.cost(
                "select * from {}.settle(%s)", {"worker": self.worker, "outcomes": failures}
            ),
            "start": self.cost("select * from {}.start(%s)", {"worker": self.worker, "held": self.held}),
            "heartbeat": self.cost(
                "select {}.heartbeat(%s)", {"worker": self.worker, "held": self.held, "answered": 1 << 40}
            ),
            "report": self.cost(
                "select {}.report(%s)",
                {
                    "worker": self.worker,
                    "lines": [[job, attempt, 0, "info", "hello"] for job, attempt in self.held],
                    "progress": [[job, attempt, 0.5, "half"] for job, attempt in self.held],
                },
            ),
            "release": self.cost("select * from {}.release(%s)", {"worker": self.worker, "held": self.held}),
            "reap": self.cost("select * from {}.reap(most => %s)", 1000),
            "promote": self.cost("select * from {}.promote(%s)", 1000),
            "expire": self.cost("select * from {}.expire(%s)", 1000),
            "enqueue": self.cost("select * from {}.enqueue_many(%s)", json.dumps(fresh)),
            "cancel": self.cost("select * from {}.cancel(%s)", ids),
            "cancel families": self.cost("select * from {}.cancel(%s)", self.parents),
            "run now": self.cost("select * from {}.run_now(%s)", ids),
            "look": self.cost("select * from {}.look(%s)", ids),
        }


def scene(connection: psycopg.Connection[Any]) -> Scene:
    protocol = Protocol(connection)
    worker, lapsed = protocol.register(lease=3600), protocol.register()
    protocol.enqueue_many({"task": "greet"} for _ in range(BATCH))
    held = protocol.claim(worker, want=BATCH).held
    parents = parents_of(protocol, worker, held)
    protocol.enqueue_many({"task": "greet"} for _ in range(BATCH))
    assert len(protocol.claim(lapsed, want=BATCH).jobs) == BATCH
    protocol.lapse(lapsed)
    protocol.enqueue_many({"task": "greet", "queue": "default"} for _ in range(2 * BATCH))
    protocol.enqueue_many({"task": "greet", "queue": "later", "delay": 60} for _ in range(BATCH))
    protocol.rows(
        "update {}.jobs set run_at = run_at - interval '2 minutes', created_at = run_at - interval '2 minutes' "
        "where state = 'scheduled'"
    )
    return Scene(protocol, worker, lapsed, held, parents)


def parents_of(protocol: Protocol, worker: int, held: list[list[int]]) -> list[int]:
    """Jobs that wait for those, for one each."""
    protocol.enqueue_many({"task": "greet"} for _ in held)
    waiting = protocol.claim(worker, want=len(held)).held
    protocol.settle(
        worker, *({"id": job, "attempt": attempt, "state": "waiting"} for job, attempt in waiting)
    )
    for (child, _), (parent, _) in zip(held, waiting, strict=True):
        protocol.rows("update {}.jobs set parent = %s where id = %s", parent, child)
    assert protocol.rows("select * from {}.gather()") == []
    return [job for job, _ in waiting]


def rehearse(connection: psycopg.Connection[Any]) -> None:
    """Every verb once, with next to nothing there: its plans are made now, and kept."""
    protocol = Protocol(connection)
    worker = protocol.register(lease=3600)
    protocol.enqueue("greet")
    held = protocol.claim(worker, want=1).held
    Scene(protocol, worker, worker, held, parents_of(protocol, worker, held)).verbs()


def crowd(connection: psycopg.Connection[Any], busy: int) -> None:
    """Half a million other rows."""
    insert = (
        "insert into shiftwork.jobs (task, queue, priority, max_attempts, state, run_at, created_at, attempt, worker, claim,"
        " claimed_at, started_at, parent, expires_at) "
    )
    connection.execute(
        insert
        + "select 'greet', 'default', 0, 5, 'scheduled', now() + interval '1 day' + n * interval '1 second', now(), 0,"
        " null::bigint, null::bigint, null::timestamptz, null::timestamptz, 10000000 + n / 100, now() + interval '2 days'"
        " from generate_series(1, %s) as n",
        (OTHERS,),
    )
    connection.execute(
        insert
        + "select 'greet', 'default', 0, 5, 'running', now(), now(), 1, %s, n / 100, now(), now(), null,"
        " now() - interval '1 day' from generate_series(1, %s) as n",  # their deadline has passed, and they have met it
        (busy, OTHERS),
    )
    for queue, task in (("other", "greet"), ("default", "unknown"), ("default", "paused")):
        connection.execute(
            insert + "select %s, %s, 0, 5, 'ready', now() - interval '1 day', now() - interval '1 day', 0,"
            " null::bigint, null::bigint, null::timestamptz, null::timestamptz, null, null::timestamptz from generate_series(1, %s)",
            (task, queue, OTHERS),
        )
    connection.execute("select shiftwork.pause(task => 'paused')")
    # Lines and progress of other jobs, and workers that hold their lease or are gone.
    connection.execute(
        "insert into shiftwork.logs (job, attempt, level, message)"
        " select 1000000 + n / 10, 1, 'info', 'x' from generate_series(1, %s) as n",
        (OTHERS,),
    )
    connection.execute(
        "insert into shiftwork.progress (job, attempt) select 1000000 + n, 1 from generate_series(1, %s) as n",
        (OTHERS,),
    )
    connection.execute(
        "insert into shiftwork.workers (lease_until, gone_at)"
        " select now() + case when n % 10 = 0 then interval '1 hour' else '-1 hour' end, case when n % 10 <> 0 then now() end"
        " from generate_series(1, 20000) as n"
    )


@pytest.fixture(scope="module")
def alone(server: str, template: str) -> Iterator[dict[str, Cost]]:
    with (
        copied(server, template) as dsn,
        psycopg.connect(dsn, autocommit=True, prepare_threshold=None) as connection,
    ):
        yield scene(connection).verbs()


@pytest.fixture
def crowded(server: str, template: str) -> Iterator[Scene]:
    with (
        copied(server, template) as dsn,
        psycopg.connect(dsn, autocommit=True, prepare_threshold=None) as connection,
    ):
        rehearse(connection)
        found = scene(connection)
        crowd(connection, busy=Protocol(connection).register(lease=3600))
        yield found


def test_what_a_worker_reads_does_not_grow_whenever_its_plans_were_made(
    alone: dict[str, Cost], crowded: Scene
) -> None:
    # spec: SH-4, QU-30
    examined = 1000
    dear = []
    for statistics in ("of old", "none", "fresh"):
        if statistics == "none":
            crowded.protocol.connection.execute("discard plans")
        elif statistics == "fresh":
            crowded.protocol.connection.execute("analyze shiftwork.jobs")
        for verb, cost in crowded.verbs().items():
            # A claim may look at so many rows that are not for it, twice: once to pick, once to say how far it looked.
            spare = 3 * examined if verb == "claim" else 0
            # The way down an index is one page longer here; and turns that were rolled back leave dead entries, of which more
            # or fewer must be passed, as others on the server let them be cleared away. A crowd that is read has 10,000 pages.
            if (
                cost.rows > alone[verb].rows + spare + 20
                or cost.pages > 2 * alone[verb].pages + 2 * spare + 150
            ):
                dear.append((statistics, verb, cost, alone[verb]))
    assert not dear, "\n".join(map(str, dear))


def test_a_claim_gets_past_what_is_not_for_it_and_does_not_look_at_it_again(crowded: Scene) -> None:
    protocol = crowded.protocol
    places: dict[str, Any] = {}
    with protocol.connection.transaction(force_rollback=True):
        claimed = Claimed({})
        for _ in range(2 * OTHERS // 1000 + 2):
            wish = {"queue": "default", "places": places, "mixed": True}
            claimed = protocol.claim(crowded.worker, wish, want=BATCH, tasks=["greet"])
            if claimed.jobs:
                break
            assert claimed.report["more"], "what is behind has not been looked at"
            assert claimed.report["places"]["default"] != places
            places = claimed.report["places"]["default"]
        assert len(claimed.jobs) == BATCH

        request = {
            "worker": crowded.worker,
            "queues": [{"queue": "default", "places": places, "mixed": True}],
            "want": BATCH,
            "tasks": ["greet"],
        }
        assert crowded.rows("select * from {}.claim(%s)", request) <= 4 * BATCH


def test_notes_that_were_read_lie_in_nobodys_way_while_a_snapshot_is_held(server: str, template: str) -> None:
    with (
        copied(server, template) as dsn,
        psycopg.connect(dsn, autocommit=True, prepare_threshold=None) as connection,
        psycopg.connect(dsn) as old,
    ):
        found = scene(connection)
        protocol = found.protocol
        old.execute("set transaction isolation level repeatable read")
        old.execute("select 1 from shiftwork.jobs")
        places = protocol.claim(found.worker, want=1).report["due"]
        claim = {"worker": found.worker, "queues": [{"queue": "none"}], "want": 1, "due": places}
        before = found.cost("select * from {}.claim(%s)", claim)
        protocol.rows(
            "insert into {}.child_ends (at, parent)"
            " select now() - interval '1 minute', n from generate_series(1, 20000) as n"
        )
        protocol.rows("select * from {}.gather(20000)")
        assert found.cost("select * from {}.claim(%s)", claim).pages < before.pages + 50
        protocol.rows("insert into {}.child_ends (parent) values (%s)", found.parents[0])
        assert found.cost("select * from {}.claim(%s)", claim).pages < before.pages + 200


def test_the_end_of_a_child_reads_few_jobs_even_if_there_were_none_when_its_plan_was_made(
    server: str, template: str
) -> None:
    with (
        copied(server, template) as dsn,
        psycopg.connect(dsn, autocommit=True, prepare_threshold=None) as connection,
    ):
        connection.execute("select shiftwork.sleep(600)")  # somebody is to be woken
        protocol = Protocol(connection)
        worker = protocol.register(lease=3600)
        protocol.enqueue_many({"task": "greet"} for _ in range(4))
        held = protocol.claim(worker, want=4).held
        found = Scene(protocol, worker, worker, held, parents_of(protocol, worker, held))
        first, second, third, fourth = held

        def rows(held: list[int]) -> int:
            outcome = {"id": held[0], "attempt": held[1], "state": "completed"}
            return found.rows("select {}.conclude(%s)", {"worker": found.worker, "outcomes": [outcome]})

        rows(first)
        found.rows("select {}.complete(%s)", second[0])
        protocol.enqueue_many({"task": "other", "queue": "other"} for _ in range(5000))
        assert rows(third) < 100
        assert found.rows("select {}.complete(%s)", fourth[0]) < 100


@pytest.mark.parametrize("analyzed", [False, True])
def test_jobs_of_a_worker_are_found_by_their_ids_and_keys_though_its_plans_are_of_a_time_when_nothing_ran(
    server: str, template: str, analyzed: bool
) -> None:
    # spec: SH-4
    with (
        copied(server, template) as dsn,
        psycopg.connect(dsn, autocommit=True, prepare_threshold=None) as connection,
    ):
        connection.execute("set plan_cache_mode = force_generic_plan")
        protocol = Protocol(connection)
        worker = protocol.register(lease=3600)
        protocol.rows("insert into {}.jobs (task) select 'greet' from generate_series(1, 20000)")
        protocol.enqueue("greet", priority=-1, unique_key="held", unique_scope="unfinished")
        if analyzed:
            connection.execute("analyze shiftwork.jobs")
        found = Scene(protocol, worker, worker, protocol.claim(worker, want=1).held, [])

        def dear() -> dict[str, int]:
            """What reads more than a few rows for each job that it is told of."""
            ids = [job for job, _ in found.held]
            outcomes = [{"id": job, "attempt": attempt, "state": "completed"} for job, attempt in found.held]
            request = {"worker": worker, "held": found.held, "outcomes": outcomes, "answered": 0}
            request["lines"] = [[*held, 0, "info", "hello"] for held in found.held]
            verbs: dict[LiteralString, object] = {
                "select * from {}.settle(%s)": request,
                "select * from {}.start(%s)": request,
                "select {}.heartbeat(%s)": request,
                "select {}.report(%s)": request,
                "select * from {}.release(%s)": request,
                "select * from {}.cancel(%s)": ids,
                "select * from {}.look(%s)": ids,
                "select {}.enqueue('greet', unique_action => 'replace', unique_key => %s)": "held",
            }
            rows = {str(verb): found.rows(verb, what) for verb, what in verbs.items()}
            return {verb: count for verb, count in rows.items() if count > 8 * len(ids)}

        assert dear() == {}
        assert protocol.value(
            "with begun as (update {}.jobs set state = 'running', attempt = 1, worker = %s, claim = 1, claimed_at = now()"
            " where state = 'ready' and id <= 3000 returning id) select count(*) from begun",
            worker,
        )
        found.held += [[job, 1] for job in range(1, 20)]
        assert dear() == {}


@pytest.mark.parametrize("verb", ["select * from {}.settle(%s)", "select * from {}.release(%s)"])
def test_what_others_have_locked_is_told_without_reading_all_that_the_worker_holds(
    server: str, template: str, verb: LiteralString
) -> None:
    with (
        copied(server, template) as dsn,
        psycopg.connect(dsn, autocommit=True, prepare_threshold=None) as connection,
        psycopg.connect(dsn) as other,
    ):
        protocol = Protocol(connection)
        worker = protocol.register(lease=3600)
        protocol.enqueue_many({"task": "greet"} for _ in range(2 * BATCH))
        # None is running by now: a plan takes that for the way to find one.
        connection.execute("analyze shiftwork.jobs")
        found = Scene(protocol, worker, worker, protocol.claim(worker, want=2 * BATCH).held, [])
        other.execute("select from shiftwork.jobs for update")
        outcomes = [{"id": job, "attempt": attempt, "state": "completed"} for job, attempt in found.held]
        request = {"worker": worker, "outcomes": outcomes, "held": found.held}
        answers = protocol.rows(verb, json.dumps(request))
        assert [row["answer"] for row in answers] == ["busy"] * len(outcomes)
        assert found.rows(verb, request) <= 3 * len(outcomes)
