"""Seeded interleavings of what workers do to a table that somebody already has; see the explorer.

SHIFTWORK_SEED=123 runs that one alone; SHIFTWORK_EXPLORE=1 takes new ones.
"""

from __future__ import annotations

import os
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import closing
from datetime import timedelta
from typing import Any, cast

import psycopg
import pytest
from psycopg import pq

from shiftwork import Retry, TableStore, operations
from shiftwork.database import Statement, executing, run
from shiftwork.job import Job, State
from shiftwork.operations import encode_outcome
from shiftwork.outcome import Outcome
from shiftwork.stores.wording import SQL
from tests.explorer import DAY, LEASE, Explorer, Hold, Session, Turn, Worker
from tests.test_conformance import TABLE, WITH_ATTEMPT

RUNS = 40
CLOCK = """
create sequence public.clock minvalue 0 start 0;
create function public.there() returns timestamptz language sql stable as $$
  select timestamptz '2030-01-01 00:00+00' + pg_sequence_last_value('public.clock') * interval '1 millisecond'
$$;
select setval('public.clock', 0);
"""
TRAIL = """
create table public.trail (
  seq bigint generated always as identity, verb text, job bigint, before text, after text, former bigint, fence bigint, stale boolean
);
create function public.write_trail() returns trigger language plpgsql as $$
begin
  insert into public.trail (verb, job, before, after, former, fence, stale) values (
    current_setting('test.verb', true), new.id, case when tg_op = 'UPDATE' then old.state end, new.state,
    case when tg_op = 'UPDATE' then <old> end, <new>,
    case when tg_op = 'UPDATE' then old.last_heartbeat_at <= public.there() - interval '10 seconds' end);
  return null;
end $$;
create trigger write_trail after insert or update on example_jobs for each row execute function public.write_trail();
"""
FREE, OVER = {"queued", "errored"}, {"completed", "failed", "canceled"}
MOVES: dict[str, set[tuple[str | None, str]]] = {
    "insert": {(None, "queued")},
    "claim": {(before, after) for before in FREE for after in ("processing", "canceled")},
    "settle": {("processing", after) for after in ("errored", "queued", *OVER)},
    "conclude": {("processing", after) for after in ("errored", "queued", *OVER)},
    "release": {("processing", "queued"), ("processing", "canceled")},
    "heartbeat": {("processing", "processing"), ("processing", "queued")},
    "reap": {("processing", "queued"), ("processing", "failed"), ("processing", "canceled")},
    "cancel": {(state, state) for state in (*FREE, *OVER, "processing")},
}


class RowsSession(Session):
    """A session whose answers are rows."""

    def answer(self) -> tuple[str | None, Any]:
        assert self._last is not None
        if self._last.status == pq.ExecStatus.FATAL_ERROR:
            return super().answer()
        return None, [
            [
                None if (value := self._last.get_value(row, column)) is None else value.decode()
                for column in range(self._last.nfields)
            ]
            for row in range(self._last.ntuples)
        ]


class TableExplorer(Explorer):
    """The same, over a table."""

    def __init__(self, dsn: str, ddl: str) -> None:
        self.monitor = psycopg.connect(dsn, autocommit=True)
        fence = "attempt" if "attempt" in ddl else "started_at"
        value = (
            "<row>.attempt"
            if fence == "attempt"
            else "(extract(epoch from <row>.started_at) * 1000000)::bigint"
        )
        trail = TRAIL.replace("<old>", value.replace("<row>", "old")).replace(
            "<new>", value.replace("<row>", "new")
        )
        self.monitor.execute(f"{CLOCK}; {ddl}; {trail}".encode())
        front = TableStore(
            "example_jobs", dsn=dsn, retry=Retry(max_attempts=3), lease=timedelta(milliseconds=LEASE)
        )
        self.store = front.store(front.settings)
        run(operations.require(self.store), executing(self.monitor, "", lent=False))
        self.sessions = [RowsSession(dsn) for _ in range(4)]
        self.runs = self.parked = 0
        self.ended: Counter[str] = Counter()
        self.verbs: dict[Callable[[random.Random], Turn], float] = {
            self._insert: 2,
            self._claim: 6,
            self._heartbeat: 3,
            self._reap: 3,
            self._ask_to_cancel: 1,
            self._settle: 10,
            self._conclude: 3,
            self._release: 3,
            self._fence: 2,
        }
        self.needs_a_holder = {self._settle, self._release, self._conclude, self._fence}

    def _empty(self) -> None:
        self.runs += 1
        self.monitor.execute("truncate example_jobs, public.trail")
        self.now = 0
        self.monitor.execute("select setval('public.clock', 0)")
        self.settled: Counter[Hold] = Counter()
        self.fenced: set[Hold] = set()
        self.workers = []

    def _explore(self, rng: random.Random, turns: int) -> None:
        self.monitor.execute("set test.verb = 'insert'")
        self.monitor.execute(
            "insert into example_jobs (repository_id) select 1 from generate_series(1, %s)",
            (rng.randint(3, 8),),
        )
        self.workers = [Worker(place + 1) for place in range(rng.randint(2, 3))]
        self.tastes = {make: weight * rng.choice([0.1, 1, 1, 4]) for make, weight in self.verbs.items()}
        sessions: list[Session] = [*self.sessions[: rng.randint(2, 4)]]
        busy: dict[Session, Turn] = {}
        while turns or busy:
            if turns and rng.random() < 0.08:
                self._time_passes(rng.choice([1, 1000, 3000, LEASE + 1000]))
            able = [one for one in sessions if (busy[one].phase != "parked" if one in busy else turns)]
            assert able, "everybody waits for everybody"
            session = rng.choice(able)
            name, turn = f"{sessions.index(session)}", busy.get(session)
            if turn is None:
                turns -= 1
                turn = busy[session] = self._choose(rng)
                self._finish(session, f"begin; set local test.verb = '{turn.verb}'")
            elif turn.phase == "begun":
                session.send(turn.text, *turn.params)
                turn.phase = "running"
                self._look(session, turn, name)
            else:
                self._end(rng, session, turn, name)
                del busy[session]
                for other, waiting in busy.items():
                    if waiting.phase == "parked":
                        self._look(other, waiting, f"{sessions.index(other)}")

    def _look(self, session: Session, turn: Turn, name: str) -> None:
        while not session.has_answered(0.002):
            if self._waits(session):
                if turn.phase != "parked":
                    self.parked += 1
                    turn.phase = "parked"
                    self.trace.append(f"{name}: {turn.verb} {turn.params} is parked")
                return
        turn.phase = "done"
        turn.failed, turn.value = session.answer()
        self.trace.append(f"{name}: {turn.verb} {turn.params} -> {turn.failed or ''} {turn.value}")
        assert turn.failed in {None, "22P02"}, f"{turn.verb} failed: {turn.value}"
        if turn.verb == "fence" and not turn.failed:
            self.fenced.add((int(turn.params[2]), int(turn.params[1])))

    def _end(self, rng: random.Random, session: Session, turn: Turn, name: str) -> None:
        if turn.verb == "fence" and not turn.failed:
            hold = (int(turn.params[2]), int(turn.params[1]))
            self.fenced.discard(hold)
            taken = self.monitor.execute(
                "select from public.trail where verb = 'reap' and job = %s and former = %s and seq > %s",
                (*hold, 0),
            ).fetchone()
            assert taken is None, f"job {hold[0]} was taken from a transaction that holds it"
        if turn.failed or rng.random() < 0.12:
            self._finish(session, "rollback")
            self.trace.append(f"{name}: {turn.verb} is rolled back")
            return
        self._finish(session, "commit")
        self.ended[turn.verb] += 1
        self.trace.append(f"{name}: {turn.verb} is committed")
        turn.learn(turn.value)

    def _time_passes(self, by: int) -> None:
        self.now += by
        self.monitor.execute("select setval('public.clock', %s)", (self.now,))
        self.trace.append(f"{by} ms pass")

    # What a session may ask.

    def _asking(self, verb: str, statement: Statement, learn: Callable[[Any], None] = lambda _: None) -> Turn:
        places = iter(range(1, 100))
        text = re.sub("%%|%s", lambda found: "%" if found[0] == "%%" else f"${next(places)}", statement.text)
        text = text.replace("statement_timestamp()", "public.there()")
        return Turn(verb, cast("Any", text), tuple(str(one) for one in statement.params), learn)

    def _insert(self, rng: random.Random) -> Turn:
        return self._asking("insert", Statement("insert into example_jobs (repository_id) values (1)"))

    def _claim(self, rng: random.Random) -> Turn:
        worker, lost = rng.choice(self.workers), rng.random() < 0.2

        def learn(rows: list[Any]) -> None:
            if lost:
                self.trace.append("   and its answer is lost")
                return
            *taken, report = rows
            worker.believes |= {(int(one[0]), int(one[5])) for one in taken}
            worker.answered = max(worker.answered, int(re.findall(r'"claim": (\d+)', report[4])[0]))

        return self._asking(
            "claim", self.store.claim({"worker": worker.id, "want": rng.randint(1, 4)}), learn
        )

    def _outcome(self, rng: random.Random, hold: Hold) -> bytes:
        job = Job(id=hold[0], task="", queue="", priority=0, payload={}, state=State.RUNNING, attempt=hold[1])
        error = {"code": "BROKEN", "message": "it broke"}
        return encode_outcome(
            rng.choice(
                [
                    Outcome(job, State.COMPLETED, result=b"1"),
                    Outcome(job, State.FAILED, error=error, counts=True),
                    Outcome(job, State.CANCELLED, error=error),
                    Outcome(job, State.SCHEDULED, timedelta(seconds=3), error=error, counts=True),
                    Outcome(job, State.SCHEDULED, timedelta(seconds=1)),
                ]
            )
        )

    def _settle(self, rng: random.Random) -> Turn:
        worker, holds = self._some_held(rng)
        lost = rng.random() < 0.2

        def learn(rows: list[Any]) -> None:
            answers = {int(job): row[0] for row in rows for job in re.findall(r"\d+", row[3])}
            self.settled.update(hold for hold in holds if answers[hold[0]] == "settled")
            if not lost:
                worker.believes -= {hold for hold in holds if answers[hold[0]] != "busy"}

        return self._asking(
            "settle", self.store.settle(worker.id, [self._outcome(rng, hold) for hold in holds]), learn
        )

    def _conclude(self, rng: random.Random) -> Turn:
        worker, [hold, *_] = self._some_held(rng)

        def learn(_: list[Any]) -> None:
            self.settled[hold] += 1
            worker.believes.discard(hold)

        return self._asking("conclude", self.store.conclude(worker.id, self._outcome(rng, hold)), learn)

    def _release(self, rng: random.Random) -> Turn:
        worker, holds = self._some_held(rng)

        def learn(rows: list[Any]) -> None:
            worker.believes -= {hold for hold in holds if dict(rows)[str(hold[0])] != "busy"}

        return self._asking("release", self.store.release(worker.id, holds, {}), learn)

    def _heartbeat(self, rng: random.Random) -> Turn:
        worker = rng.choice(self.workers)
        held = dict(sorted(worker.believes))

        def learn(rows: list[Any]) -> None:
            lost = re.search(r'"lost": \[([\d, ]*)\]', rows[0][0])
            gone = {int(job) for job in re.findall(r"\d+", lost[1] if lost else "")}
            worker.believes -= {(job, fence) for job, fence in held.items() if job in gone}

        request = {"worker": worker.id, "held": list(held.items()), "answered": worker.answered}
        return self._asking("heartbeat", self.store.heartbeat(request), learn)

    def _reap(self, rng: random.Random) -> Turn:
        return self._asking("reap", self.store.reap(0, rng.choice([1, 1000]), thorough=True))

    def _ask_to_cancel(self, rng: random.Random) -> Turn:
        text = "update example_jobs set cancel = true where id = (select id from example_jobs order by random() limit 1)"
        return self._asking("cancel", Statement(text))

    def _fence(self, rng: random.Random) -> Turn:
        _, [hold, *_] = self._some_held(rng)
        return self._asking("fence", self.store.fence(*hold))

    # What must hold.

    def _check(self) -> None:
        """Every move is legal; fences rise, are given out once and given up once; only what is stale is reaped."""
        trail = self.monitor.execute(
            "select verb, job, before, after, former, fence, stale from public.trail order by seq"
        )
        highest: Counter[int] = Counter()
        left: Counter[Hold] = Counter()
        ended: Counter[Hold] = Counter()
        for verb, job, before, after, former, fence, stale in trail:
            story = f"{verb} moved job {job} from {before} to {after}"
            assert (before, after) in MOVES[verb], f"{story}, which is illegal"
            if verb == "claim":
                assert fence > highest[job], f"{story}, and its fence does not rise"
                highest[job] = fence
            if before == "processing" and after != "processing":
                left[job, former] += 1
                ended[job, former] += verb in {"settle", "conclude"}
            if verb == "reap":
                assert stale, f"{story}, and its lease had not ended"
        assert max(left.values(), default=0) <= 1, "an attempt ended twice"
        assert +ended == self.settled, "what was answered is not what was written"

    def _drain(self) -> None:
        """Whatever happened, everything can still be brought to an end."""
        self.monitor.execute("update example_jobs set cancel = false")
        there = executing(self.monitor, "", lent=False)

        def perform(statement: Statement) -> Any:
            return there(
                Statement(
                    statement.text.replace("statement_timestamp()", "public.there()"),
                    statement.params,
                    as_tuples=statement.as_tuples,
                )
            )

        for _ in range(8):
            self._time_passes(DAY)
            self.monitor.execute("set test.verb = 'reap'")
            perform(self.store.reap(0, 1000, thorough=True))
            self.monitor.execute("set test.verb = 'claim'")
            *taken, _report = perform(self.store.claim({"worker": 99, "want": 1000}))
            outcome = b'{"id":%d,"attempt":%d,"state":"completed","failure":false,"result":null}'
            self.monitor.execute("set test.verb = 'settle'")
            perform(self.store.settle(99, [outcome % (one[0], one[5]) for one in taken]))
        left = self.monitor.execute(
            "select id, state from example_jobs where state = any(%s)", ([*FREE, "processing"],)
        ).fetchall()
        assert left == [], "jobs that cannot be brought to an end"


def seeds() -> Iterable[int]:
    if seed := os.environ.get("SHIFTWORK_SEED"):
        return [int(seed)]
    first = random.SystemRandom().randrange(10**9) if "SHIFTWORK_EXPLORE" in os.environ else 0
    return range(first, first + RUNS)


# spec: D-18, SG-16, SG-20
@pytest.mark.parametrize("ddl", [TABLE, WITH_ATTEMPT], ids=["times", "attempts"])
def test_no_interleaving_breaks_an_invariant_of_a_table(dsn: str, ddl: str) -> None:
    # fault: F27
    explorer = TableExplorer(dsn, ddl)
    with closing(explorer):
        explore(explorer, seeds())
    if "SHIFTWORK_SEED" not in os.environ:
        assert explorer.parked > 0, "no statement ever had to wait: nothing was interleaved"
        assert min(explorer.ended.values()) > 0


def test_a_resetter_that_does_not_mind_locks_is_found(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lax = SQL["reap"].replace("for update of job skip locked", "for no key update of job skip locked")
    monkeypatch.setitem(SQL, "reap", lax)
    explorer = TableExplorer(dsn, TABLE)
    explorer.only(insert=1, claim=4, fence=6, reap=6)
    with closing(explorer), pytest.raises(AssertionError, match="was taken from a transaction that holds it"):
        explore(explorer, range(RUNS))


def explore(explorer: TableExplorer, seeds: Iterable[int]) -> None:
    for seed in seeds:
        explorer.run(seed)
