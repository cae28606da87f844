"""An explorer of interleavings: several sessions, one step of one of them at a time, by a seeded choice.

Every transaction is three steps: it begins (and what it will ask is fixed, so that it may be stale when it
is asked), it runs one verb, and it ends, mostly in a commit. Between any two steps others take theirs. A
statement that has to wait for a lock is parked, which is seen in `pg_blocking_pids` and never guessed from
the time it takes; it goes on when whoever blocks it ends. Now and then the answer to a claim or a settle is
lost on the wire: it is committed, and its worker does not know.

A trigger writes down every change of every job. At the end all is committed, the trail is read, and then the
rest is worked off. A failure says its seed and what happened, step by step.
"""

from __future__ import annotations

import json
import random
import select
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, LiteralString

import psycopg
from psycopg import pq
from psycopg.rows import scalar_row

from tests.harness import Protocol, Row

Hold = tuple[int, int]
QUEUES = ("mail", "default")
ERROR = {"code": "BROKEN", "message": "it broke"}
LEASE = 10_000
DAY = 86_400_000
CHILD = {"task": "greet", "queue": "mail", "child": True}
FINAL = {"completed", "failed", "cancelled", "expired"}


class Clock:
    """The protocol's clock in the hands of a test: whole milliseconds since a day long ahead.

    It is kept in a sequence, whose value stands outside of transactions: every session sees it at once.
    """

    BEGINNING: ClassVar[int] = 1_893_456_000_000  # 2030-01-01, in epoch milliseconds

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self.connection = connection

    def install(self) -> None:
        self.connection.execute(
            """create sequence public.clock minvalue 0 start 0;
               select setval('public.clock', 0);
               create or replace function shiftwork.clock() returns timestamptz language sql stable as $$
                 select timestamptz '2030-01-01 00:00+00'
                      + pg_sequence_last_value('public.clock') * interval '1 millisecond'
               $$"""
        )

    def set(self, milliseconds: int) -> None:
        self.connection.execute("select setval('public.clock', %s)", (milliseconds,))

    @classmethod
    def microseconds(cls, milliseconds: int) -> int:
        """A time of this clock as a cursor has it."""
        return (cls.BEGINNING + milliseconds) * 1000

    @classmethod
    def milliseconds(cls, microseconds: int) -> int:
        """The reverse; times before the beginning are negative."""
        return microseconds // 1000 - cls.BEGINNING


def empty(connection: psycopg.Connection[Any]) -> None:
    """Take out all jobs and all that is known of them; cheaper than another database."""
    connection.execute(
        """with live as (delete from shiftwork.jobs), ended as (delete from shiftwork.history),
                workers as (delete from shiftwork.workers), signals as (delete from shiftwork.signals),
                pauses as (delete from shiftwork.pauses), attempts as (delete from shiftwork.attempts),
                ends as (delete from shiftwork.child_ends)
           delete from shiftwork.audit"""
    )


class Session:
    """A connection on which a statement is sent without waiting for its end."""

    def __init__(self, dsn: str) -> None:
        self.connection = psycopg.connect(dsn, autocommit=True)
        self.pid = self.connection.info.backend_pid
        self._pq = self.connection.pgconn
        self._last: pq.abc.PGresult | None = None

    def close(self) -> None:
        self.connection.close()

    def send(self, text: str, *params: str) -> None:
        self._last = None
        if params:
            self._pq.send_query_params(text.encode(), [param.encode() for param in params])
        else:
            self._pq.send_query(text.encode())
        self._pq.flush()

    def has_answered(self, patience: float) -> bool:
        """Whether the statement has ended, after at most that many seconds."""
        if self._pq.is_busy():
            if not select.select([self._pq.socket], [], [], patience)[0]:
                return False
            self._pq.consume_input()
            if self._pq.is_busy():
                return False
        while (result := self._pq.get_result()) is not None:
            self._last = result
        return True

    def answer(self) -> tuple[str | None, Any]:
        """The error's SQLSTATE, or the JSON value that came."""
        assert self._last is not None
        if self._last.status == pq.ExecStatus.FATAL_ERROR:
            state = self._last.error_field(pq.DiagnosticField.SQLSTATE) or b"?"
            return state.decode(), (self._last.error_message or b"").decode()
        value = self._last.get_value(0, 0) if self._last.ntuples else None
        return None, None if value is None else json.loads(value)


@dataclass
class Worker:
    """A worker as it sees itself."""

    id: int
    believes: set[Hold] = field(default_factory=set)
    answered: int = 0


@dataclass
class Turn:
    """A transaction of one verb, and what its worker makes of the answer when it has committed."""

    verb: str
    text: LiteralString
    params: tuple[str, ...]
    learn: Callable[[Any], None] = lambda _: None
    phase: str = "begun"
    value: Any = None
    failed: str | None = None
    lives: dict[int, int] = field(default_factory=dict)


class Explorer:
    """Runs interleavings in one database, which is emptied before each."""

    def __init__(self, dsn: str) -> None:
        self.monitor = psycopg.connect(dsn, autocommit=True)
        self.protocol = Protocol(self.monitor)
        self.clock = Clock(self.monitor)
        self.sessions = [Session(dsn) for _ in range(4)]
        self.runs = 0
        self.parked = 0
        self.ended: Counter[str] = Counter()
        self.rollbacks = 0.12
        """The share of transactions that end in a rollback."""

        self.endings: Sequence[str] = ()
        """How attempts end; in any way, if that is not said."""

        self.gathered: Counter[str] = Counter()
        """How parents have ended, that were looked at."""

        self.verbs: dict[Callable[[random.Random], Turn], float] = {
            self._enqueue: 2,
            self._claim: 6,
            self._heartbeat: 2,
            self._reap: 2,
            self._cancel: 1.5,
            self._complete: 1,
            self._revive: 1.5,
            self._run_now: 0.5,
            self._promote: 0.5,
            self._expire: 0.7,
            self._settle: 12,
            self._release: 3,
            self._start: 2,
            self._fence: 1.5,
            self._run_job: 6,
        }
        self.needs_a_holder = {self._settle, self._release, self._start, self._fence, self._run_job}
        self.clock.install()
        self.monitor.execute(ROUTINE)
        self.monitor.execute(TRAIL)
        rows = self.protocol.rows("select verb, before::text, after::text from {}.moves")
        self.moves = {(row["verb"], row["before"], row["after"]) for row in rows}
        self.moves.add(("enqueue", None, "blocked"))  # as _arrange does it

    def only(self, **weights: float) -> None:
        """Ask these verbs and no others, each so often: for a race that is rare among all that can happen."""
        self.verbs = {getattr(self, f"_{verb}"): weight for verb, weight in weights.items()}

    def close(self) -> None:
        for session in self.sessions:
            session.close()
        self.monitor.close()

    def run(self, seed: int, turns: int = 24) -> None:
        """One interleaving. The same seed gives the same one again."""
        self.trace: list[str] = []
        try:
            self._empty()
            self._explore(random.Random(seed), turns)
            self._check()
            self._drain()
        except (AssertionError, psycopg.Error) as error:
            story = "\n".join(self.trace)
            raise AssertionError(f"seed {seed}: {error}\n{story}") from error

    def meet(self, state: str, first: str, second: str, seed: int) -> None:
        """Two verbs at a job that is in this state: the second is asked while the first has not committed."""
        self.trace = [f"{first}, and then {second}, of a job that is {state}"]
        verbs = first, second
        self.rollbacks = 0.0
        try:
            self._empty()
            self._arrange(state, expires_in=5 if "expire" in verbs else None)
            self._time_passes(LEASE + 1000 if "reap" in verbs else 6000)
            rng = random.Random(seed)
            turns = [getattr(self, f"_{verb}")(rng) for verb in verbs]
            for session, turn in zip(self.sessions, turns, strict=False):
                self._finish(session, f"begin; set local test.verb = '{turn.verb}'")
                turn.lives = dict(self.revived)
                session.send(turn.text, *turn.params)
                self._look(session, turn, turn.verb)
            for session, turn in zip(self.sessions, turns, strict=False):
                if turn.phase == "parked":
                    self._look(session, turn, turn.verb)
                assert turn.phase != "parked", f"{turn.verb} waits for somebody who has ended"
                self._end(rng, session, turn, turn.verb)
            self._check()
            self._drain()
        except (AssertionError, psycopg.Error) as error:
            story = "\n".join(self.trace)
            raise AssertionError(f"{error}\n{story}") from error

    def _arrange(self, state: str, expires_in: int | None) -> None:
        """A job in this state, and a worker that believes to hold it, whether it does or not."""
        worker = Worker(self.protocol.register(lease=LEASE / 1000))
        self.workers.append(worker)
        with self._as("enqueue"):
            wish = {"task": "greet", "queue": "mail", "expires_in": expires_in}
            [job] = [row["id"] for row in self.protocol.enqueue_many([wish])]
            if state == "blocked":  # which nobody can make yet
                self.protocol.rows("update {}.jobs set state = 'blocked' where id = %s", job)
        self.known.append(job)
        if state == "blocked":
            worker.believes = {(job, 0)}
            return
        with self._as("claim"):
            claimed = self.protocol.claim(worker.id, "mail")
        worker.answered, worker.believes = claimed.report["claim"], {(job, 1)}
        endings: dict[str, Row] = {
            "scheduled": {"state": "scheduled", "error": ERROR, "delay": 3},
            "waiting": {"state": "waiting", "jobs": [CHILD]},
            "completed": {"state": "completed"},
        }
        if state == "ready":
            with self._as("release"):
                self.protocol.release(worker.id, claimed.held)
        elif state != "running":
            with self._as("settle"):
                self.protocol.settle(worker.id, {"id": job, "attempt": 1, **endings[state]})
            self.settled[job, 1] += 1
            born = self.protocol.rows("select id from {}.all_jobs where parent = %s", job)
            self.known += [row["id"] for row in born]
        assert self.protocol.state(job) == state

    @contextmanager
    def _as(self, verb: str) -> Iterator[None]:
        with self.monitor.transaction():
            self.monitor.execute("select set_config('test.verb', %s, true)", (verb,))
            yield

    def _empty(self) -> None:
        self.runs += 1
        if self.runs % 20 == 1:
            self.monitor.execute("vacuum")
        empty(self.monitor)
        self.monitor.execute("truncate public.trail, public.effects")
        self.clock.set(0)
        self.now = 0
        self.known: list[int] = []
        self.workers: list[Worker] = []
        self.settled: Counter[Hold] = Counter()
        self.ran: set[Hold] = set()
        """Attempts whose code, in the database, has succeeded."""

        self.revived: Counter[int] = Counter()
        self.signalled: set[tuple[int, int]] = set()

    # One step of one session after the other.

    def _explore(self, rng: random.Random, turns: int) -> None:
        with self.monitor.transaction():
            self.monitor.execute("select set_config('test.verb', 'enqueue', true)")
            wishes = [{"task": "greet", "queue": rng.choice(QUEUES)} for _ in range(rng.randint(4, 10))]
            self.known += [row["id"] for row in self.protocol.enqueue_many(wishes)]
        self.workers = [Worker(self.protocol.register(lease=LEASE / 1000)) for _ in range(rng.randint(2, 3))]
        # Each run has tastes of its own, what it does often and what hardly ever, so that rare things meet.
        self.tastes = {make: weight * rng.choice([0.1, 1, 1, 4]) for make, weight in self.verbs.items()}
        sessions = self.sessions[: rng.randint(2, 4)]
        busy: dict[Session, Turn] = {}
        while turns or busy:
            if turns and rng.random() < 0.08:
                self._time_passes(rng.choice([1, 1000, 3000, LEASE + 1000]))
            able = [
                session
                for session in sessions
                if (busy[session].phase != "parked" if session in busy else turns)
            ]
            assert able, "everybody waits for everybody"
            session = rng.choice(able)
            name = f"{sessions.index(session)}"
            turn = busy.get(session)
            if turn is None:
                turns -= 1
                turn = busy[session] = self._choose(rng)
                self._finish(session, f"begin; set local test.verb = '{turn.verb}'")
            elif turn.phase == "begun":
                turn.lives = dict(self.revived)
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
        """Until its statement has ended, or waits for somebody else."""
        while not session.has_answered(0.002):
            if self._waits(session):
                if turn.phase != "parked":
                    self.parked += 1
                    turn.phase = "parked"
                    self.trace.append(f"{name}: {turn.verb} {turn.params} is parked")
                return
        turn.phase = "done"
        turn.failed, turn.value = session.answer()
        said = turn.value
        if turn.verb == "claim":
            said = [(row["id"], row["attempt"]) if row["id"] else row["payload"] for row in turn.value]
        self.trace.append(f"{name}: {turn.verb} {turn.params} -> {turn.failed or ''} {said}")
        assert turn.failed in {None, "SW003"}, f"{turn.verb} failed: {turn.value}"

    def _waits(self, session: Session) -> bool:
        cursor = self.monitor.cursor(row_factory=scalar_row)
        return bool(cursor.execute("select cardinality(pg_blocking_pids(%s)) > 0", (session.pid,)).fetchone())

    def _end(self, rng: random.Random, session: Session, turn: Turn, name: str) -> None:
        if turn.failed or rng.random() < self.rollbacks:
            self.trace.append(f"{name}: {turn.verb} is rolled back")
            self._finish(session, "rollback")
            return
        if turn.verb == "reap":
            self._only_lapsed(turn.value)
        self._finish(session, "commit")
        self.ended[turn.verb] += 1
        self.trace.append(f"{name}: {turn.verb} is committed")
        if turn.verb == "cancel":
            for row in turn.value:
                if row["answer"] == "signalled":
                    # A revival may have come while this was open: then either order of the two is right.
                    first, last = turn.lives.get(row["id"], 0), self.revived[row["id"]]
                    self.signalled |= {(row["id"], life) for life in range(first, last + 1)}
        turn.learn(turn.value)

    def _finish(self, session: Session, text: str) -> None:
        session.send(text)
        while not session.has_answered(5):
            pass

    def _only_lapsed(self, taken: list[Row]) -> None:
        """Nobody loses a job whose worker holds its lease: not even one that renewed it a moment ago."""
        alive = self.protocol.rows(
            "select id from {}.workers "
            "where id = any(%s) and lease_until > shiftwork.clock() and gone_at is null",
            [row["worker"] for row in taken],
        )
        assert alive == [], "jobs were reaped from a worker that holds its lease"

    def _time_passes(self, by: int) -> None:
        self.now += by
        self.clock.set(self.now)
        self.trace.append(f"{by} ms pass")

    # What a session may ask.

    def _choose(self, rng: random.Random) -> Turn:
        able = self.tastes
        if not any(worker.believes for worker in self.workers):
            able = {make: weight for make, weight in able.items() if make not in self.needs_a_holder}
        [make] = rng.choices(list(able), list(able.values()))
        return make(rng)

    def _enqueue(self, rng: random.Random) -> Turn:
        wishes = []
        for _ in range(rng.randint(1, 3)):
            wish: Row = {
                "task": "greet",
                "payload": {"n": 1},
                "queue": rng.choice(QUEUES),
                "priority": rng.randint(-1, 1),
            }
            wish["delay"] = rng.choice([0, 0, 3])
            if rng.random() < 0.2:
                wish["expires_in"] = rng.choice([2, 12])
            if rng.random() < 0.7:
                wish |= {
                    "unique_key": rng.choice("xyz"),
                    "unique_scope": rng.choice(["pending", "unfinished", "window"]),
                }
                wish["unique_action"] = rng.choice(["return", "replace", "merge"])
                if wish["unique_action"] != "return":
                    wish |= {"unique_scope": "pending", "merge": "sum"}
            wishes.append(wish)

        def learn(rows: list[Row]) -> None:
            self.known += [row["id"] for row in rows if row["outcome"] == "created"]

        return self._ask("enqueue", "shiftwork.enqueue_many($1::jsonb)", wishes, learn=learn)

    def _claim(self, rng: random.Random) -> Turn:
        worker = rng.choice(self.workers)
        lost = rng.random() < 0.2
        request: Row = {
            "worker": worker.id,
            "queues": [{"queue": queue} for queue in QUEUES],
            "want": rng.randint(1, 4),
        }
        request["start"] = rng.choice([None, None, 0, 1])

        def learn(rows: list[Row]) -> None:
            if lost:
                self.trace.append("   and its answer is lost")
                return
            for row in rows:
                if row["id"]:
                    worker.believes.add((row["id"], row["attempt"]))
                elif row["payload"]["alive"]:
                    worker.answered = max(worker.answered, row["payload"]["claim"])
                else:
                    self._replace(worker)

        return self._ask("claim", "shiftwork.claim($1::jsonb)", request, learn=learn)

    def _replace(self, worker: Worker) -> None:
        """A worker that was given up registers anew."""
        worker.believes.clear()
        worker.id = self.protocol.register(lease=LEASE / 1000)

    def _settle(self, rng: random.Random) -> Turn:
        worker, holds = self._some_held(rng)
        lost = rng.random() < 0.2
        endings: dict[str, Row] = {
            "completed": {"state": "completed", "result": 1},
            "failed": {"state": "failed", "error": ERROR},
            "cancelled": {"state": "cancelled"},
            "retry": {"state": "scheduled", "error": ERROR, "delay": 3},
            "snooze": {"state": "scheduled", "delay": 1},
            "spawning": {"state": "waiting", "jobs": [CHILD] * rng.randint(1, 3)},
        }
        outcomes = [
            {"id": hold[0], "attempt": hold[1], **endings[rng.choice(self.endings or list(endings))]}
            for hold in holds
        ]
        attempts = dict(holds)

        def learn(rows: list[Row]) -> None:
            for row in rows:
                hold = (row["id"], attempts[row["id"]])
                if row["answer"] == "settled":
                    self.settled[hold] += 1
                if row["answer"] != "busy" and not lost:
                    worker.believes.discard(hold)
            born = self.protocol.rows(
                "select id from {}.all_jobs where id <> all(%s) and parent is not null", self.known
            )
            self.known += [row["id"] for row in born]

        return self._ask(
            "settle", "shiftwork.settle($1::jsonb)", {"worker": worker.id, "outcomes": outcomes}, learn=learn
        )

    def _run_job(self, rng: random.Random) -> Turn:
        """The code of a job is called in the database; what comes of it is settled in the same transaction."""
        worker, [hold, *_] = self._some_held(rng)

        def learn(rows: list[Row]) -> None:
            [row] = rows
            worker.believes.discard(hold)
            self.settled[hold] += row["answer"] == "settled"
            if row["state"] == "completed":
                self.ran.add(hold)

        call: LiteralString = (
            "shiftwork.run_job(($1::jsonb ->> 0)::bigint, ($1::jsonb ->> 1)::bigint, ($1::jsonb ->> 2)::int)"
        )
        return self._ask("settle", call, [worker.id, *hold], learn=learn)

    def _release(self, rng: random.Random) -> Turn:
        return self._hand_over(rng, "release", "shiftwork.release($1::jsonb)")

    def _start(self, rng: random.Random) -> Turn:
        return self._hand_over(rng, "start", "shiftwork.start($1::jsonb)")

    def _hand_over(self, rng: random.Random, verb: str, call: LiteralString) -> Turn:
        worker, holds = self._some_held(rng)
        attempts = dict(holds)

        def learn(rows: list[Row]) -> None:
            worker.believes -= {
                (row["id"], attempts[row["id"]]) for row in rows if row["answer"] not in {"busy", "started"}
            }

        return self._ask(verb, call, {"worker": worker.id, "held": holds}, learn=learn)

    def _heartbeat(self, rng: random.Random) -> Turn:
        worker = rng.choice(self.workers)
        held = sorted(dict(sorted(worker.believes)).items())
        request = {
            "worker": worker.id,
            "held": held,
            "answered": worker.answered,
            "since": 0,
            "lease": LEASE / 1000,
        }
        attempts = dict(held)

        def learn(rows: list[Any]) -> None:
            [answer] = rows
            worker.believes -= {(job, attempts[job]) for job in answer["lost"]}
            if not answer["alive"]:
                self._replace(worker)

        return self._ask("heartbeat", "shiftwork.heartbeat($1::jsonb)", request, learn=learn)

    def _fence(self, rng: random.Random) -> Turn:
        _, [hold, *_] = self._some_held(rng)
        return self._ask("fence", "shiftwork.fence(($1::jsonb ->> 0)::bigint, ($1::jsonb ->> 1)::int)", hold)

    def _reap(self, rng: random.Random) -> Turn:
        reapers = [0, self.workers[0].id] if len(self.workers) > 1 else [0]  # nobody reaps its own
        options = [rng.choice(reapers), rng.choice([1, 1000]), rng.random() < 0.3]
        call: LiteralString = (
            "shiftwork.reap(($1::jsonb ->> 0)::bigint, ($1::jsonb ->> 1)::int, ($1::jsonb ->> 2)::boolean)"
        )
        return self._ask("reap", call, options)

    def _purge(self, rng: random.Random) -> Turn:
        return self._ask("purge", "shiftwork.purge_part(($1::jsonb ->> 0)::boolean)", [False])

    def _promote(self, rng: random.Random) -> Turn:
        return self._ask("promote", "shiftwork.promote(($1::jsonb ->> 0)::int)", [1000])

    def _expire(self, rng: random.Random) -> Turn:
        return self._ask("expire", "shiftwork.expire(($1::jsonb ->> 0)::int)", [1000])

    def _cancel(self, rng: random.Random) -> Turn:
        return self._ask(
            "cancel",
            "shiftwork.cancel(array(select jsonb_array_elements_text($1::jsonb)::bigint))",
            self._some(rng),
        )

    def _complete(self, rng: random.Random) -> Turn:
        call: LiteralString = "shiftwork.complete(($1::jsonb ->> 0)::bigint, '1')"
        return self._ask("complete", call, [rng.choice(self.known)])

    def _run_now(self, rng: random.Random) -> Turn:
        return self._ask(
            "run_now",
            "shiftwork.run_now(array(select jsonb_array_elements_text($1::jsonb)::bigint))",
            self._some(rng),
        )

    def _revive(self, rng: random.Random) -> Turn:
        def learn(rows: list[Row]) -> None:
            self.revived.update(row["id"] for row in rows if row["answer"] == "revived")

        call: LiteralString = "shiftwork.revive(array(select jsonb_array_elements_text($1::jsonb)::bigint))"
        return self._ask("revive", call, self._some(rng), learn=learn)

    def _some(self, rng: random.Random) -> list[int]:
        return rng.sample(self.known, min(len(self.known), rng.randint(1, 5)))

    def _some_held(self, rng: random.Random) -> tuple[Worker, list[Hold]]:
        worker = rng.choice([worker for worker in self.workers if worker.believes])
        holds = dict(rng.sample(sorted(worker.believes), rng.randint(1, len(worker.believes))))
        return worker, list(holds.items())  # at most one attempt of each job: answers name the job alone

    @staticmethod
    def _ask(
        verb: str, call: LiteralString, request: object, learn: Callable[[Any], None] = lambda _: None
    ) -> Turn:
        text: LiteralString = "select coalesce(jsonb_agg(to_jsonb(row)), '[]') from " + call + " as row"
        return Turn(verb, text, (json.dumps(request),), learn)

    # What must hold.

    def _check(self) -> None:
        """No job lost, none in two rooms; attempts only rise; an attempt ends once; every move is legal."""
        cursor = self.monitor.cursor()
        trail = cursor.execute(
            "select xid, verb, job, room, before, after, attempt_before, attempt_after "
            "from public.trail order by seq"
        ).fetchall()
        acts: dict[tuple[int, int], list[Any]] = defaultdict(list)
        for xid, verb, job, *change in trail:
            acts[job, xid].append((verb, *change))
        rooms: dict[int, dict[str, tuple[str, int]]] = defaultdict(dict)
        moved = []
        for (job, _), changes in acts.items():
            former = next(iter(rooms[job].values()), (None, 0))
            for _, room, before, after, attempt_before, attempt_after in changes:
                if before is not None:
                    assert rooms[job].pop(room, None) == (before, attempt_before), f"job {job} changed unseen"
                if after is not None:
                    rooms[job][room] = (after, attempt_after)
            assert len(rooms[job]) == 1, f"job {job} is in {len(rooms[job])} rooms"
            [latter] = rooms[job].values()
            verb = changes[0][0]
            if former[0] == "waiting" and verb in {"claim", "heartbeat"}:
                verb = "gather"  # which they do on the way
            moved.append((verb if former[0] else "enqueue", job, former, latter))
        self.parents: dict[int, int] = dict(
            cursor.execute("select id, parent from shiftwork.all_jobs where parent is not null").fetchall()
        )
        self._check_moves(moved)
        self._check_families(moved)

        did = cursor.execute("select job, attempt from public.effects order by job, attempt").fetchall()
        assert did == sorted(self.ran), "what was done in the database is not what was completed there"

        found = cursor.execute("select id, state::text from shiftwork.all_jobs").fetchall()
        assert sorted(job for job, _ in found) == sorted(self.known), (
            "a job was lost, doubled, or came from nowhere"
        )
        assert dict(found) == {job: next(iter(room.values()))[0] for job, room in rooms.items()}

    def _check_moves(self, moved: Sequence[tuple[str, int, tuple[str | None, int], tuple[str, int]]]) -> None:
        claimed: Counter[Hold] = Counter()
        left: Counter[Hold] = Counter()
        settled: Counter[Hold] = Counter()
        lives: Counter[int] = Counter()
        for verb, job, (former, last), (state, attempt) in moved:
            story = f"{verb} moved job {job} from {former} to {state}"
            assert (verb, former, state) in self.moves, f"{story}, which is illegal"
            rose = verb == "claim" and state == "running"
            assert attempt == last + rose, f"{story}, and its attempt from {last} to {attempt}"
            claimed[job, attempt] += rose
            left[job, attempt] += former == "running" and state != "running"
            settled[job, attempt] += verb == "settle"
            lives[job] += verb == "revive"
            if (
                state == "cancelled"
                and verb in {"start", "release", "heartbeat", "reap", "expire"}
                and job not in self.parents  # else it may have been asked of that
            ):
                assert (job, lives[job]) in self.signalled, (
                    f"{story}, and nobody asked for that since it was revived"
                )
        assert max(claimed.values(), default=0) <= 1, "an attempt was given out twice"
        assert max(left.values(), default=0) <= 1, "an attempt ended twice"
        assert +settled == self.settled, "what settle answered is not what it wrote"

    def _check_families(
        self, moved: Sequence[tuple[str, int, tuple[str | None, int], tuple[str, int]]]
    ) -> None:
        """A parent ends after its children, completed if they all were; families in which somebody was revived aside."""
        ended: dict[int, str] = {}
        for verb, job, _, (state, _) in moved:
            children = [child for child, parent in self.parents.items() if parent == job]
            if verb == "gather" and state in FINAL and not any(self.revived[one] for one in (job, *children)):
                endings = [ended.get(child) for child in children]
                assert None not in endings, f"job {job} did not wait for its children: {endings}"
                well = all(ending == "completed" for ending in endings)
                assert state == ("completed" if well else "failed"), f"job {job} is {state} after {endings}"
                self.gathered[state] += 1
            if state in FINAL:
                ended[job] = state

    def _drain(self) -> None:
        """Whatever happened, everything can still be brought to an end."""
        blocked = self.protocol.rows("select id from {}.jobs where state = 'blocked'")
        self.protocol.cancel(*(row["id"] for row in blocked))
        for _ in range(8):
            self.now += DAY
            self.clock.set(self.now)
            self.protocol.reap(thorough=True)
            self.protocol.expire()
            worker = self.protocol.register()
            self.protocol.complete(worker, self.protocol.claim(worker, *QUEUES, want=1000).jobs)
            if not self.protocol.value("select count(*) from {}.jobs"):
                break
        left = self.protocol.rows("select id, state::text, attempt, worker from {}.jobs")
        assert left == [], "jobs that cannot be brought to an end"
        self.protocol.rows("select * from {}.gather()")
        assert self.protocol.rows("select * from {}.child_ends") == [], "notes that nobody reads"
        self.protocol.expire()
        assert self.protocol.rows("select job from {}.signals") == [], "signals that nobody clears"


ROUTINE = """
create table public.effects (job bigint, attempt int);
create procedure public.greet(payload jsonb) language plpgsql as $$
declare
  running constant int[] := (string_to_array(current_setting('shiftwork.job'), ' '))[1:2]::int[];
begin
  insert into public.effects values (running[1], running[2]);
  if running[2] % 3 = 2 then
    raise exception 'it broke';
  end if;
end $$;
select shiftwork.register_task('greet', handler => 'public.greet(jsonb)');
"""
TRAIL = """
create table public.trail (
  seq bigint generated always as identity, xid bigint, verb text, job bigint, room text,
  before text, after text, attempt_before int, attempt_after int
);
create function public.write_trail() returns trigger language plpgsql as $$
begin
  insert into public.trail (xid, verb, job, room, before, after, attempt_before, attempt_after)
  values (pg_current_xact_id()::text::bigint, current_setting('test.verb', true), coalesce(new.id, old.id),
          tg_argv[0],
          case when tg_op <> 'INSERT' then old.state end, case when tg_op <> 'DELETE' then new.state end,
          case when tg_op <> 'INSERT' then old.attempt end, case when tg_op <> 'DELETE' then new.attempt end);
  return null;
end $$;
create trigger write_trail after insert or update or delete on shiftwork.jobs
  for each row execute function public.write_trail('jobs');
create trigger write_trail after insert or update or delete on shiftwork.history
  for each row execute function public.write_trail('history');
"""
