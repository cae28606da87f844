"""The state machine is the table `moves`: every state meets every verb, and what happens is compared with it.

A job is put into each state in every variant that matters (due or not, late or not, prefetched or started,
its worker alive or lapsed, its cancelling asked for or not, its key held or not). Each verb is then tried on
a fresh one, inside a transaction that is undone. What is not in the table must change nothing, and the
answer must say so.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.harness import Protocol, Row

STATES = (
    "blocked",
    "scheduled",
    "ready",
    "running",
    "waiting",
    "completed",
    "failed",
    "cancelled",
    "expired",
)
ERROR = {"code": "BROKEN", "message": "it broke"}
EVER = 2**60

Move = tuple[str, str | None, str]


@dataclass(frozen=True)
class Situation:
    """A job in some state, and what is true of it there."""

    state: str
    late: bool = False
    due: bool = True
    started: bool = True
    lapsed: bool = False
    signalled: bool = False
    worn: bool = False  # it lost as many workers as it may
    keyed: bool = False

    def arrange(self, protocol: Protocol) -> Row:
        """Put a job there by hand; its queue and task are its own."""
        worker = protocol.register()
        held = self.state in {"running", "waiting"}
        terminal = self.state in {"completed", "failed", "cancelled", "expired"}
        given = {
            "state": "running" if terminal else self.state,
            "due": self.due,
            "late": self.late,
            "started": self.started,
            "attempt": 3 if held or terminal else 0,
            "worker": worker if held or terminal else None,
            "resets": 2 if self.worn else 0,
            "key": "k" if self.keyed else None,
        }
        job = protocol.value(
            """insert into {}.jobs (
                 task, queue, priority, max_attempts, state, run_at, created_at, expires_at, attempt, worker,
                 claim, claimed_at, started_at, resets, unique_key, held_key, unique_scope)
               select 'greet', 'here', 0, 5, state, present + case when due then '0' else '1 h' end::interval,
                      present, case when late then present - interval '1 s' end, attempt, worker,
                      case when worker is not null then nextval('shiftwork.claims') end,
                      case when worker is not null then present end,
                      case when worker is not null and started then present end,
                      resets, key, key,
                      case when key is not null then 'unfinished'::shiftwork.unique_scope end
                 from jsonb_to_record(%s) as given (
                        state shiftwork.job_state, due boolean, late boolean, started boolean, attempt int,
                        worker bigint, resets int, key text),
                      shiftwork.clock() as present
               returning id""",
            Jsonb(given),
        )
        if terminal:
            protocol.rows(
                "select {}.finish(%s, %s, %s)",
                [job],
                self.state,
                None if self.state == "completed" else Jsonb(ERROR),
            )
        if self.signalled:
            protocol.rows("insert into {}.signals (job, actor) values (%s, 'someone')", job)
        if self.lapsed:
            protocol.lapse(worker)
        return {"id": job, "attempt": given["attempt"], "worker": worker}


def situations(state: str) -> Iterator[Situation]:
    """Every variant of a state that some verb looks at."""
    either = (False, True)
    if state in {"blocked", "ready"}:
        for late, signalled, keyed in itertools.product(either, either, either):
            yield Situation(state, late=late, signalled=signalled, keyed=keyed)
    elif state == "scheduled":
        for late, due, signalled, keyed in itertools.product(either, either, either, either):
            yield Situation(state, late=late, due=due, signalled=signalled, keyed=keyed)
    elif state == "running":
        for late, started, lapsed, signalled in itertools.product(either, either, either, either):
            yield Situation(state, late=late, started=started, lapsed=lapsed, signalled=signalled)
        for late, signalled in itertools.product(either, either):
            yield Situation(state, late=late, lapsed=True, signalled=signalled, worn=True)
        yield Situation(state, keyed=True)
    elif state == "waiting":
        for lapsed, signalled, keyed in itertools.product(either, either, either):
            yield Situation(state, lapsed=lapsed, signalled=signalled, keyed=keyed)
    else:
        yield Situation(state)
        yield Situation(state, keyed=True)


@dataclass(frozen=True)
class Deed:
    """One way to apply a verb, and the answers with which it says that it did something."""

    verb: str
    how: str
    act: Callable[[Protocol, Row], str]
    yes: frozenset[str]


DEEDS: list[Deed] = []


def deed(verb: str, how: str, *yes: str) -> Callable[[Callable[[Protocol, Row], str]], None]:
    def keep(act: Callable[[Protocol, Row], str]) -> None:
        DEEDS.append(Deed(verb, how, act, frozenset(yes)))

    return keep


def enqueue_again(action: str, delay: int) -> Callable[[Protocol, Row], str]:
    def act(protocol: Protocol, job: Row) -> str:
        wish = {"task": "greet", "queue": "here", "payload": {"again": 1}, "unique_key": "k", "delay": delay}
        [row] = protocol.enqueue_many([wish | {"unique_action": action, "merge": "replace"}])
        return str(row["outcome"]) if row["id"] == job["id"] else "another"

    return act


for action, delay in itertools.product(("return", "replace", "merge"), (0, 60)):
    deed("enqueue", f"{action} its twin, delay {delay}", "replaced", "merged")(enqueue_again(action, delay))


@deed("promote", "", "promoted")
def _promote(protocol: Protocol, job: Row) -> str:
    return "promoted" if protocol.promote() else "none"


@deed("claim", "its task", "claimed", "promoted")
def _claim(protocol: Protocol, job: Row) -> str:
    claimed = protocol.claim(protocol.register(), "here")
    if [one["id"] for one in claimed.jobs] == [job["id"]]:
        return "claimed"
    return "promoted" if claimed.report["promoted"] else "none"


@deed("claim", "another task", "promoted")
def _claim_another(protocol: Protocol, job: Row) -> str:
    claimed = protocol.claim(protocol.register(), "here", tasks=["another"])
    assert claimed.jobs == []
    return "promoted" if claimed.report["promoted"] else "none"


@deed("claim", "of a worker that lost its lease")
def _claim_lapsed(protocol: Protocol, job: Row) -> str:
    worker = protocol.register()
    protocol.lapse(worker)
    claimed = protocol.claim(worker, "here")
    assert claimed.report["alive"] is False
    return "dead" if not claimed.jobs else "claimed"


@deed("start", "its holder", "started", "expired", "cancelled")
def _start(protocol: Protocol, job: Row) -> str:
    return protocol.start(job["worker"], [[job["id"], job["attempt"]]])[job["id"]]


@deed("release", "its holder", "released", "cancelled")
def _release(protocol: Protocol, job: Row) -> str:
    return protocol.release(job["worker"], [[job["id"], job["attempt"]]])[job["id"]]


@deed("release", "its holder, after a crash", "released", "failed", "cancelled")
def _release_crashed(protocol: Protocol, job: Row) -> str:
    held = [[job["id"], job["attempt"]]]
    return protocol.release(job["worker"], held, {job["id"]: "its process was killed"})[job["id"]]


OUTCOMES: dict[str, Row] = {
    "completed": {"state": "completed", "result": 1},
    "failed": {"state": "failed", "error": ERROR},
    "cancelled": {"state": "cancelled"},
    "retry": {"state": "scheduled", "error": ERROR, "delay": 5},
    "snooze": {"state": "scheduled", "delay": 5},
    "waiting": {"state": "waiting", "result": 1, "jobs": [{"task": "greet", "child": True}]},
}


def settle_as(outcome: Row) -> Callable[[Protocol, Row], str]:
    def act(protocol: Protocol, job: Row) -> str:
        told = {"id": job["id"], "attempt": job["attempt"], **outcome}
        return protocol.settle(job["worker"], told)[job["id"]]

    return act


for name, outcome in OUTCOMES.items():
    deed("settle", name, "settled")(settle_as(outcome))
deed("settle", "an outcome that does not exist")(settle_as({"state": "ready"}))


@deed("heartbeat", "it is a stray", "stray")
def _heartbeat_stray(protocol: Protocol, job: Row) -> str:
    answer = protocol.heartbeat(job["worker"], [], answered=EVER)
    return "stray" if answer["strays"] == [job["id"]] else "none"


@deed("heartbeat", "its holder")
def _heartbeat(protocol: Protocol, job: Row) -> str:
    answer = protocol.heartbeat(job["worker"], [[job["id"], job["attempt"]]], answered=EVER)
    return "lost" if job["id"] in answer["lost"] else "held"


@deed("reap", "", "ready", "failed", "cancelled")
def _reap(protocol: Protocol, job: Row) -> str:
    return protocol.reap().get(job["id"], "none")


@deed("reap", "thorough, its worker has no row", "ready", "failed", "cancelled")
def _reap_thoroughly(protocol: Protocol, job: Row) -> str:
    protocol.rows("delete from {}.workers where id = %s", job["worker"])
    return protocol.reap(thorough=True).get(job["id"], "none")


@deed("reap", "by its own holder")
def _reap_own(protocol: Protocol, job: Row) -> str:
    return protocol.reap(reaper=job["worker"], thorough=True).get(job["id"], "none")


@deed("expire", "", "ended")
def _expire(protocol: Protocol, job: Row) -> str:
    return "ended" if protocol.expire() else "none"


@deed("cancel", "", "cancelled", "signalled")
def _cancel(protocol: Protocol, job: Row) -> str:
    return protocol.cancel(job["id"])[job["id"]]


def gather_after(failure: Row | None) -> Callable[[Protocol, Row], str]:
    def act(protocol: Protocol, job: Row) -> str:
        note = "insert into {}.child_ends (parent, failure) values (%s, %s)"
        protocol.rows(note, job["id"], failure and Jsonb(failure))
        return next((row["answer"] for row in protocol.rows("select * from {}.gather()")), "none")

    return act


@deed("gather", "a child of its failed, and another lives", "told")
def _gather_one(protocol: Protocol, job: Row) -> str:
    protocol.rows(
        "insert into {}.jobs (task, queue, parent) values ('greet', 'other', %s)",
        job["id"],
    )
    assert gather_after(ERROR)(protocol, job) == "none"
    return (
        "told"
        if protocol.rows("select 1 from {}.jobs where id = %s and error = %s", job["id"], Jsonb(ERROR))
        else "none"
    )


deed("gather", "its children completed", "completed")(gather_after(None))
deed("gather", "a child of its failed", "failed")(gather_after(ERROR))


@deed("complete", "", "completed")
def _complete(protocol: Protocol, job: Row) -> str:
    return str(protocol.value("select {}.complete(%s, '1')", job["id"]))


@deed("run_now", "", "moved", "ready")
def _run_now(protocol: Protocol, job: Row) -> str:
    return protocol.run_now(job["id"])[job["id"]]


@deed("revive", "", "revived")
def _revive(protocol: Protocol, job: Row) -> str:
    return protocol.revive(job["id"])[job["id"]]


# Verbs that move nothing at all, and hands that have lost the job: no answer of theirs is a yes.
@deed("pause", "")
def _pause(protocol: Protocol, job: Row) -> str:
    protocol.rows("select {}.pause(queue => 'here'), shiftwork.pause(task => 'greet')")
    return "none"


@deed("resume", "")
def _resume(protocol: Protocol, job: Row) -> str:
    protocol.rows("select {}.pause(queue => 'here'), shiftwork.resume(queue => 'here')")
    return "none"


@deed("report", "")
def _report(protocol: Protocol, job: Row) -> str:
    said = [[job["id"], job["attempt"], 0, "info", "hello"]]
    protocol.rows("select {}.report(%s)", Jsonb({"worker": job["worker"], "lines": said}))
    return "none"


@deed("leave", "")
def _leave(protocol: Protocol, job: Row) -> str:
    protocol.rows("select {}.leave(%s)", job["worker"])
    return "none"


def fence_with(attempts_ago: int) -> Callable[[Protocol, Row], str]:
    def act(protocol: Protocol, job: Row) -> str:
        try:
            with protocol.connection.transaction():
                protocol.rows("select {}.fence(%s, %s)", job["id"], job["attempt"] - attempts_ago)
        except psycopg.Error as error:
            return "lost" if error.sqlstate == "SW003" else f"error {error}"
        return "held"

    return act


deed("fence", "")(fence_with(0))
deed("fence", "an older attempt")(fence_with(1))


def with_a_stale_hand(verb: str, attempts_ago: int) -> Callable[[Protocol, Row], str]:
    """The verb in the hands of a worker that lost the job: its attempt is older, or its number another."""

    def act(protocol: Protocol, job: Row) -> str:
        worker = job["worker"] if attempts_ago else protocol.register()
        hold = [job["id"], job["attempt"] - attempts_ago]
        match verb:
            case "start":
                answer = protocol.start(worker, [hold])[job["id"]]
            case "release":
                answer = protocol.release(worker, [hold])[job["id"]]
            case "crash":
                answer = protocol.release(worker, [hold], {job["id"]: "crashed"})[job["id"]]
            case "heartbeat":
                lost = protocol.heartbeat(worker, [hold])["lost"]
                answer = "lost" if lost == [job["id"]] else "held"
            case _:
                told = {"id": hold[0], "attempt": hold[1], **OUTCOMES[verb]}
                answer = protocol.settle(worker, told)[job["id"]]
        assert answer == "lost"
        return answer

    return act


for verb, ago in itertools.product(("start", "release", "crash", "heartbeat", *OUTCOMES), (0, 1)):
    name = {"crash": "release", **dict.fromkeys(OUTCOMES, "settle")}.get(verb, verb)
    deed(name, f"{verb} by {'an older attempt' if ago else 'another worker'}")(with_a_stale_hand(verb, ago))


def everything(protocol: Protocol, job: int) -> list[Row]:
    """The whole row, in whichever room, with what the view leaves out."""
    return protocol.rows(
        "select to_jsonb(job) as row from shiftwork.jobs as job where id = %s union all "
        "select to_jsonb(ended) from shiftwork.history as ended where id = %s",
        job,
        job,
    )


def moves(protocol: Protocol) -> set[Move]:
    rows = protocol.rows("select verb, before::text, after::text from {}.moves")
    return {(row["verb"], row["before"], row["after"]) for row in rows}


def act(protocol: Protocol, deed: Deed, job: Row) -> tuple[str, list[Row]]:
    """What was answered and what the job was then; nothing of it stays."""
    with protocol.connection.transaction(force_rollback=True):
        return deed.act(protocol, job), everything(protocol, job["id"])


# spec: SH-3, D-10, D-11, D-16
@pytest.mark.parametrize("state", STATES)
def test_every_verb_does_to_a_job_in_this_state_what_the_table_says(protocol: Protocol, state: str) -> None:
    legal = {move for move in moves(protocol) if move[1] == state}
    seen: set[Move] = set()
    for situation in situations(state):
        with protocol.connection.transaction(force_rollback=True):
            job = situation.arrange(protocol)
            before = everything(protocol, job["id"])
            done = [(deed, *act(protocol, deed, job)) for deed in DEEDS]
        for deed, answer, after in done:
            case = f"{deed.verb} ({deed.how or 'plain'}) on {situation}"
            assert len(after) == 1, f"{case}: the job is in {len(after)} rooms"
            [row] = after
            move = (deed.verb, state, row["row"]["state"])
            if answer in deed.yes:
                seen.add(move)
                assert move in legal, f"{case} answered {answer!r} and made an illegal move to {move[2]}"
            else:
                assert after == before, f"{case} answered {answer!r}, and yet changed the job"
            assert row["row"]["attempt"] == job["attempt"] + (answer == "claimed"), case
    assert legal - seen == set(), "the table allows what never happened"


def test_a_job_is_born_where_the_table_says(protocol: Protocol) -> None:
    seen: set[Move] = set()
    ways: list[Row] = [
        {},
        {"delay": 60},
        {"delay": -60},
        {"unique_key": "a"},
        {"unique_key": "b", "delay": 60},
    ]
    for options in ways:
        job = protocol.enqueue(**options)
        seen.add(("enqueue", None, protocol.state(job)))
    assert seen == {move for move in moves(protocol) if move[1] is None}


def test_the_table_knows_every_state_and_only_verbs_that_exist(protocol: Protocol) -> None:
    enum = protocol.rows("select unnest(enum_range(null::shiftwork.job_state))::text as state")
    assert tuple(row["state"] for row in enum) == STATES
    routines = {
        row["proname"]
        for row in protocol.rows("select proname from pg_proc where pronamespace = 'shiftwork'::regnamespace")
    }
    assert {verb for verb, _, _ in moves(protocol)} <= routines
