from __future__ import annotations

from collections.abc import Generator
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from shiftwork import operations
from shiftwork.database import Plan, Rows, Statement, Wait, arun, run
from shiftwork.errors import (
    ConfigurationError,
    DatabaseError,
    DatabaseUnavailable,
    InvalidArgument,
    ResultTimeout,
    UnknownJob,
)
from shiftwork.job import MERGES, Job, NewJob, Sent, State, sending
from shiftwork.stores.protocol import Protocol

STORE = Protocol()


def a_job(payload: bytes = b"{}", **options: Any) -> NewJob[object]:
    return NewJob(task="greet", payload=msgspec.Raw(payload), **options)


def a_row(**known: Any) -> dict[str, Any]:
    texts = ("run_at", "expires_at", "created_at", "claimed_at", "started_at", "finished_at")
    row: dict[str, Any] = dict.fromkeys((*texts, "result", "error", "unique_key", "worker", "parent"))
    row |= {"id": 1, "task": "greet", "queue": "default", "priority": 0, "payload": "{}", "state": "ready"}
    return row | {"attempt": 0, "failures": 0, "resets": 0, "max_attempts": 5, "tags": []} | known


def counting(plan: Plan[Any]) -> tuple[list[int], Any]:
    """Answer every enqueue of a plan, and say how many jobs each statement held."""
    sizes: list[int] = []

    def execute(statement: Statement) -> Rows:
        jobs = msgspec.json.decode(statement.params[0])
        assert len(statement.params[0].encode()) <= operations.CHUNK_BYTES + 2 or len(jobs) == 1
        first = sum(sizes)
        sizes.append(len(jobs))
        rows = [{"ordinal": n + 1, "id": first + n, "outcome": "created"} for n in range(len(jobs))]
        return list(reversed(rows))  # the database promises no order

    return sizes, run(plan, execute)


def test_jobs_go_in_statements_of_a_bounded_number_and_come_back_in_order() -> None:
    sizes, sent = counting(operations.enqueue(STORE, (a_job() for _ in range(12_000))))
    assert sizes == [1000] * 12
    assert [one.id for one in sent] == list(range(12_000))


def test_jobs_go_in_statements_of_a_bounded_size() -> None:
    large = b'{"text":"' + b"x" * (1 << 20) + b'"}'
    sizes, sent = counting(operations.enqueue(STORE, [a_job(large) for _ in range(10)]))
    assert sizes == [3, 3, 3, 1]
    assert len(sent) == 10


def test_nothing_is_sent_for_no_jobs() -> None:
    assert counting(operations.enqueue(STORE, [])) == ([], [])


def test_jobs_are_read_only_as_far_as_they_are_sent() -> None:
    taken = []

    def endless() -> Generator[NewJob[object]]:
        while True:
            taken.append(1)
            yield a_job()

    plan = operations.enqueue(STORE, endless())
    next(plan)
    assert len(taken) == operations.CHUNK_ROWS + 1
    plan.close()


def test_who_sends_many_apart_is_told_how_many_are_in_whatever_keeps_out_the_rest() -> None:
    refusals = [DatabaseError("no", sqlstate="SW005"), DatabaseUnavailable("gone", maybe_committed=False)]
    for refusal in refusals:
        plan = operations.enqueue(STORE, [a_job()] * 1_001, apart=True)
        next(plan)
        plan.send([{"ordinal": n + 1, "id": n, "outcome": "created"} for n in range(1_000)])
        with pytest.raises(
            DatabaseError, match=r"the first 1,000 jobs were committed; then: (no|gone)"
        ) as told:
            plan.throw(refusal)
        assert told.value is refusal
        assert getattr(refusal, "maybe_committed", True)


def test_only_what_was_chosen_is_sent() -> None:
    chosen = a_job(b'{"n":1}', priority=-5, tags=["a"])
    statement = next(operations.enqueue(STORE, [chosen, chosen]))
    assert isinstance(statement, Statement)
    one = {"task": "greet", "payload": {"n": 1}, "priority": -5, "tags": ["a"]}
    assert msgspec.json.decode(statement.params[0]) == [one, one]


def test_one_job_is_sent_as_it_is_and_not_as_a_document() -> None:
    plain = next(operations.enqueue_one(STORE, a_job(b'{"n":1}')))
    assert isinstance(plain, Statement)
    assert plain.params == ("greet", '{"n":1}')
    assert plain.plain == b'select ("shiftwork".enqueue($1::text, $2::text)).id as value'
    chosen = next(operations.enqueue_one(STORE, a_job(b"{}", queue="mail", priority=-5, max_attempts=3)))
    assert isinstance(chosen, Statement)
    assert chosen.params == ("greet", "{}", "mail", -5, 3)
    assert chosen.plain == b'select "shiftwork".enqueue_one($1, $2, $3, $4, $5) as value'
    queued = next(operations.enqueue_one(STORE, a_job(b"{}", queue="mail")))
    assert isinstance(queued, Statement)
    assert queued.params == ("greet", "{}", "mail", None, None)


def test_a_job_of_which_more_is_said_is_sent_as_a_document_with_all_of_it() -> None:
    columns = {"task", "payload", "queue", "priority", "max_attempts"}
    unusual = {"unique_scope", "unique_action", "unique_window", "merge"}  # which go with a key
    values: dict[str, Any] = {
        "unique_key": "k",
        "run_at": "2990-01-01",
        "expires_at": "2990-01-01",
        "tags": ["a"],
        "keep": 3,
    }
    for option in set(NewJob.__struct_fields__) - columns - unusual - {"child"}:
        value = values.get(option, 0)  # which says something, and is not null
        plan = operations.enqueue_one(STORE, a_job(b"{}", **{option: value}))
        statement = next(plan)
        assert isinstance(statement, Statement)
        assert "enqueue_many" in statement.text
        assert msgspec.json.decode(statement.params[0])[0][option] == value
        with pytest.raises(StopIteration) as end:
            plan.send([{"ordinal": 1, "id": 7, "outcome": "created"}])
        assert end.value.value == Sent(7, "created")


def test_statements_speak_of_the_schema_they_were_made_for() -> None:
    text = (
        Protocol("other_place").list(task=None, queue=None, states=None, before=None, limit=1, offset=0).text
    )
    assert '"other_place".all_jobs' in text
    assert "shiftwork" not in text
    with pytest.raises(ConfigurationError):
        Protocol('x"; drop schema public; --')


def waiting(
    rows: list[dict[str, Any] | Exception], timeout: float = 30, poll: float = 15
) -> tuple[list[float], Any]:
    """Run a wait for a job against these looks at it; says how long each pause was."""
    pauses: list[float] = []

    def execute(statement: Statement) -> Rows:
        if "await_results" in statement.text:
            return []
        look = rows.pop(0) if len(rows) > 1 else rows[0]
        if isinstance(look, Exception):
            raise look
        return [look] if look else []

    return pauses, run(
        operations.await_end(STORE, 1, timeout, poll), execute, lambda step: pauses.append(step.seconds)
    )


def test_a_job_that_has_ended_is_not_waited_for() -> None:
    pauses, job = waiting([a_row(state="completed", result="42")])
    assert (pauses, job.result) == ([], 42)


def test_listening_begins_before_the_second_look_and_looks_become_rarer() -> None:
    # spec: QU-26
    looks: list[dict[str, Any] | Exception] = [a_row() for _ in range(7)]
    pauses, job = waiting([*looks, a_row(state="failed")], timeout=1000)
    assert pauses == [0, 1, 2, 4, 8, 15, 15]
    assert job.state is State.FAILED


def test_waiting_ends_when_its_time_is_over() -> None:
    # spec: QU-26
    with pytest.raises(ResultTimeout, match="job 1 is ready"):
        waiting([a_row()], timeout=0)


def test_a_database_that_goes_away_for_a_moment_does_not_end_the_waiting() -> None:
    away = DatabaseUnavailable("away", maybe_committed=False)
    pauses, job = waiting([a_row(), away, away, a_row(state="completed")])
    assert job.state is State.COMPLETED
    assert pauses == [0, 1, 1]


def test_a_job_that_nobody_knows_is_an_error_at_once() -> None:
    with pytest.raises(UnknownJob, match="job 1"):
        waiting([{}])


async def test_an_awaiting_caller_gets_the_same_answers_and_errors() -> None:
    async def execute(statement: Statement) -> Rows:
        return [{"id": 3, "answer": "cancelled"}]

    assert await arun(operations.cancel(STORE, [3], "enough"), execute) == {3: "cancelled"}

    async def refuse(statement: Statement) -> Rows:
        raise DatabaseError("no")

    with pytest.raises(DatabaseError, match="no"):
        await arun(operations.get(STORE, 1), refuse)

    def pausing() -> Plan[None]:
        yield Wait(1, 1)

    with pytest.raises(ConfigurationError, match="lent"):
        await arun(pausing(), execute)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"delay": 5}, "timedelta"),
        ({"delay": timedelta.max}, "hundred years"),
        ({"run_at": "tomorrow"}, "datetime"),
        ({"priority": 2**31}, "priority"),
        ({"priority": True}, "priority"),
        ({"max_attempts": 0}, "max_attempts"),
        ({"unique": ""}, "unique"),
        ({"unique": "a\0"}, "unique"),
        ({"unique": "ü" * 128}, "255 bytes"),
        ({"scope": "always"}, "pending, unfinished, window"),
        ({"action": "ignore"}, "return, replace, merge, refuse"),
        ({"merge": "squash"}, "deep"),
        ({"merge": {"a": "range"}}, "range:daterange"),
        ({"merge": {}}, "no argument"),
        ({"queue": ""}, "queue"),
        ({"queue": "a\nb"}, "queue"),
        ({"queue": "x" * 201}, "queue"),
        ({"tags": ["x"] * 51}, "50"),
        ({"tags": "mail"}, "list"),
        ({"keep": -1}, "keep"),
    ],
)
def test_an_option_that_cannot_work_is_refused_by_its_name(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said) as refused:
        sending(**given)
    assert refused.value.argument in given


def test_every_operator_of_merging_can_be_declared() -> None:
    for operator in MERGES:
        assert sending(merge={"a": operator}) == {"merge": {"a": operator}, "unique_action": "merge"}


def test_rows_that_python_cannot_read_are_read_all_the_same() -> None:
    digits = "9" * 100_000
    job = Job.from_row(
        a_row(
            payload='{"n": %s, "d": 1e400}' % digits,  # noqa: UP031
            result="[" * 100_000 + "]" * 100_000,
            error='"just text"',
            run_at="Infinity",
            created_at="nonsense",
            tags=["a", None, ["b"]],
        )
    )
    assert str(job.payload["n"]) == digits
    assert job.faults == ("result",)
    assert (job.error, job.tags, job.created_at) == (None, ("a",), None)
    assert Job.from_row(a_row(payload="[1]")).faults == ("payload",)
