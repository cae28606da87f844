from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shiftwork import operations
from shiftwork.codec import Signature
from shiftwork.errors import Cancel, InvalidArgument, Poison, RetryLater, Snooze
from shiftwork.job import Job, NewJob, State, moment
from shiftwork.outcome import MAX_MESSAGE, MAX_TRACEBACK, Outcome, Raised, Returned, decide, describe
from shiftwork.retry import Retry
from tests.harness import Protocol

MINUTE = timedelta(minutes=1)
PLAIN = Retry(jitter=0)


def a_job(**known: Any) -> Job:
    return Job(
        **{
            "id": 1,
            "task": "greet",
            "queue": "default",
            "priority": 0,
            "payload": {},
            "state": State.RUNNING,
            "attempt": 1,
            "max_attempts": 5,
            **known,
        }
    )


def caught(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as raised:  # noqa: BLE001
        return raised


def test_a_handler_that_returns_completes_its_job() -> None:
    outcome = decide(a_job(), Returned({"sent": 3}), PLAIN)
    assert (outcome.state, outcome.result, outcome.error) == (State.COMPLETED, b'{"sent":3}', None)


def test_an_error_is_stored_and_the_job_tried_again_later() -> None:
    # spec: SH-15, SH-18
    outcome = decide(a_job(failures=1), Raised(caught(ValueError("no"))), PLAIN)
    assert (outcome.state, outcome.delay, outcome.counts) == (State.SCHEDULED, MINUTE, True)
    assert outcome.error is not None
    assert outcome.error["message"] == "no"
    assert outcome.error["type"] == "builtins.ValueError"
    assert "Traceback" in outcome.error["traceback"]


def test_the_last_attempt_fails_the_job() -> None:
    # spec: SH-19
    assert decide(a_job(failures=4), Raised(ValueError()), PLAIN).state is State.FAILED
    assert decide(a_job(failures=3), Raised(ValueError()), PLAIN).state is State.SCHEDULED


def test_poison_fails_the_job_at_once_and_keeps_its_cause() -> None:
    # spec: SH-17
    try:
        try:
            raise KeyError("row 7 is gone")
        except KeyError as cause:
            raise Poison from cause
    except Poison as poison:
        outcome = decide(a_job(), Raised(poison), PLAIN)
    assert outcome.state is State.FAILED
    assert outcome.error is not None
    assert outcome.error["code"] == "POISON"
    assert "row 7 is gone" in outcome.error["message"]
    assert "KeyError" in outcome.error["traceback"]


def test_a_snooze_counts_nothing_and_is_never_the_end() -> None:
    # spec: QU-12
    outcome = decide(a_job(failures=4), Raised(Snooze(MINUTE)), PLAIN)
    assert outcome == Outcome(a_job(failures=4), State.SCHEDULED, delay=MINUTE)
    assert decide(a_job(), Raised(Snooze(-MINUTE)), PLAIN).delay == timedelta()


def test_retry_later_sets_the_delay_but_still_counts() -> None:
    outcome = decide(a_job(), Raised(RetryLater(7 * MINUTE, "busy there")), PLAIN)
    assert (outcome.state, outcome.delay, outcome.counts) == (State.SCHEDULED, 7 * MINUTE, True)
    assert decide(a_job(failures=4), Raised(RetryLater(MINUTE)), PLAIN).state is State.FAILED


def test_a_time_may_be_named_instead_of_a_delay() -> None:
    # spec: QU-12, SG-24
    tomorrow = datetime(2026, 1, 2, tzinfo=UTC)
    for verdict, counts in ((Snooze(at=tomorrow), False), (RetryLater(at=tomorrow), True)):
        outcome = decide(a_job(), Raised(verdict), PLAIN)
        assert (outcome.state, outcome.at, outcome.delay) == (State.SCHEDULED, tomorrow, None)
        assert outcome.counts is counts
        assert str(tomorrow) in str(verdict)


def test_a_snooze_may_say_why_and_still_counts_nothing() -> None:
    # spec: QU-12
    cause = Snooze(MINUTE)
    cause.__cause__ = ConnectionError("the other side is down")
    for snooze, said in ((Snooze(MINUTE, "not open yet"), "not open yet"), (cause, "asked to be run again")):
        outcome = decide(a_job(), Raised(snooze), PLAIN)
        assert not outcome.counts
        assert outcome.error is not None
        assert outcome.error["code"] == "SNOOZED"
        assert said in outcome.error["message"]
        assert ("the other side is down" in outcome.error["traceback"]) == (snooze is cause)


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"delay": MINUTE, "at": datetime(2026, 1, 2, tzinfo=UTC)},
        {"at": datetime(2026, 1, 2)},  # noqa: DTZ001
        {"delay": 5},
        {"at": "tomorrow"},
    ],
)
def test_a_snooze_that_nobody_can_follow_is_refused_where_it_is_made(wrong: dict[str, Any]) -> None:
    for verdict in (Snooze, RetryLater):
        with pytest.raises(InvalidArgument, match=verdict.__name__):
            verdict(**wrong)


def test_a_job_that_was_put_off_to_a_time_is_due_then(protocol: Protocol) -> None:
    # spec: QU-12, SG-24
    later, ago = datetime(2100, 1, 2, 3, 4, 5, tzinfo=UTC), datetime(2000, 1, 1, tzinfo=UTC)
    worker = protocol.register()
    protocol.enqueue("put_off")
    protocol.enqueue("put_off")
    jobs = [a_job(id=row["id"], attempt=row["attempt"]) for row in protocol.claim(worker, want=2).jobs]
    for job, at in zip(jobs, (later, ago), strict=True):
        document = operations.encode_outcome(decide(job, Raised(Snooze(at=at)), PLAIN))
        protocol.rows(
            "select * from {}.settle(%s)", f'{{"worker": {worker}, "outcomes": [{document.decode()}]}}'
        )
    waiting = protocol.rows("select run_at, run_at <= now() as due from {}.jobs order by id")
    assert abs(waiting[0]["run_at"] - later) < timedelta(milliseconds=1)
    assert (waiting[0]["due"], waiting[1]["due"]) == (False, True)


def test_cancel_ends_the_job_as_cancelled() -> None:
    outcome = decide(a_job(), Raised(Cancel("not wanted any more")), PLAIN)
    assert outcome.state is State.CANCELLED
    assert outcome.error is not None
    assert outcome.error["message"] == "not wanted any more"


def test_an_error_that_is_not_listed_is_the_end() -> None:
    assert decide(a_job(), Raised(ValueError()), Retry(on=OSError)).state is State.FAILED


def test_a_result_postgres_cannot_hold_is_made_safe() -> None:
    # spec: A-9
    value = {"nul": "a\0b", "lone": "\ud800", "nan": float("nan"), "inf": [float("inf")], "k\0": 1}
    outcome = decide(a_job(), Returned(value), PLAIN)
    assert outcome.state is State.COMPLETED
    assert outcome.result is not None
    assert json.loads(outcome.result) == {
        "nul": "a\N{REPLACEMENT CHARACTER}b",
        "lone": "\N{REPLACEMENT CHARACTER}",
        "nan": None,
        "inf": [None],
        "k\N{REPLACEMENT CHARACTER}": 1,
    }


def test_a_result_is_never_refused_for_its_size() -> None:
    # spec: A-9
    assert decide(a_job(), Returned("x" * 3_000_000), PLAIN).state is State.COMPLETED


@dataclass
class Receipt:
    number: UUID
    sum: Decimal
    at: datetime


def test_a_typed_result_is_stored_as_json() -> None:
    # spec: D-28
    receipt = Receipt(UUID(int=7), Decimal("1.10"), datetime(2026, 1, 2, tzinfo=UTC))
    outcome = decide(a_job(), Returned(receipt), PLAIN)
    assert outcome.result is not None
    assert json.loads(outcome.result) == {
        "number": "00000000-0000-0000-0000-000000000007",
        "sum": "1.10",
        "at": "2026-01-02T00:00:00Z",
    }


def endless() -> list[Any]:
    nest: list[Any] = []
    nest.append(nest)
    return nest


@pytest.mark.parametrize("value", [object(), {"a": object()}, endless(), [10**5000], lambda: 1])
def test_a_result_without_json_fails_the_job_without_another_attempt(value: object) -> None:
    # spec: HO-42
    outcome = decide(a_job(), Returned(value), PLAIN)
    assert outcome.state is State.FAILED
    assert outcome.error is not None
    assert outcome.error["code"] == "RESULT_NOT_JSON"


class HostileError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no message for you")

    def __repr__(self) -> str:
        raise RuntimeError


def test_describing_an_error_never_fails_and_always_fits() -> None:
    # spec: QU-13, HO-42
    def deep(level: int) -> None:
        if level:
            deep(level - 1)
        raise ValueError("x\0\ud800" * 100_000)

    with pytest.raises(ValueError, match="x") as long:
        deep(500)
    for error in (long.value, HostileError(), caught(HostileError()), KeyboardInterrupt(), RecursionError()):
        record = describe(error)
        assert set(record) == {"code", "type", "message", "traceback"}
        assert len(record["message"]) <= MAX_MESSAGE
        assert len(record["traceback"].encode()) <= 3 * MAX_TRACEBACK
        stored = json.dumps(record, ensure_ascii=False).encode()
        assert b"\\u0000" not in stored


@settings(deadline=None)
@given(st.text(st.characters()), st.integers(0, 10), st.integers(1, 10))
def test_every_ending_has_an_outcome(text: str, failures: int, max_attempts: int) -> None:
    job = a_job(failures=failures, max_attempts=max_attempts)
    for ending in (Returned(text), Raised(ValueError(text)), Raised(Poison(text)), Raised(Cancel(text))):
        outcome = decide(job, ending, PLAIN)
        assert (outcome.delay is not None) == (outcome.state is State.SCHEDULED)
        assert (outcome.result is not None) == (outcome.state is State.COMPLETED)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, None),
        ("1767312000.123456", datetime(2026, 1, 2, 0, 0, 0, 123456, tzinfo=UTC)),
        (0, datetime(1970, 1, 1, tzinfo=UTC)),
        ("Infinity", datetime.max.replace(tzinfo=UTC)),
        ("-Infinity", datetime.min.replace(tzinfo=UTC)),
        ("9999999999999", datetime.max.replace(tzinfo=UTC)),
        ("-210866803200", datetime.min.replace(tzinfo=UTC)),
        ("NaN", None),
        ("garbage", None),
    ],
)
def test_any_instant_that_postgres_can_hold_can_be_read(text: object, expected: datetime | None) -> None:
    assert moment(text) == expected


# What a task says that it returns.


def ending(annotation: Any, value: object) -> Outcome:
    def work() -> Any: ...

    work.__annotations__["return"] = annotation
    return decide(a_job(), Returned(value), PLAIN, encode=Signature("work", work).encode_result)


class Shape(msgspec.Struct):
    sides: int


class CustomerId(str):
    """A type of somebody's own."""

    __slots__ = ()


@pytest.mark.parametrize(
    ("annotation", "value", "stored"),
    [
        (None, None, None),
        (int, 5, 5),
        (int, True, 1),
        (int, 10**300, 10**300),
        (float, 5, 5),
        (float, 1.5, 1.5),
        (float, float("nan"), None),
        (list[float], [float("inf")], [None]),
        (str, "a\0b", "a\N{REPLACEMENT CHARACTER}b"),
        (str | None, None, None),
        (int | None, 7, 7),
        (bool, False, False),
        (dict[str, int], {"a": 1}, {"a": 1}),
        (dict[int, str], {1: "a"}, {"1": "a"}),
        (tuple[int, str], (1, "a"), [1, "a"]),
        (Shape, Shape(3), {"sides": 3}),
        (Shape, {"sides": 3}, {"sides": 3}),
        (list[Shape], [Shape(3)], [{"sides": 3}]),
        (datetime, datetime(2026, 1, 2, tzinfo=UTC), "2026-01-02T00:00:00Z"),
        (Any, [1, "x"], [1, "x"]),
        (object, None, None),
        # what cannot be read back by its annotation is not compared with it
        (CustomerId, CustomerId("c-7"), "c-7"),
        (list[CustomerId], [CustomerId("c-7")], ["c-7"]),
        (Shape | Receipt, Shape(3), {"sides": 3}),
    ],
)
def test_a_result_that_fits_completes_the_job(annotation: Any, value: object, stored: object) -> None:
    # spec: HO-39, QU-32
    outcome = ending(annotation, value)
    assert outcome.state is State.COMPLETED, outcome.error
    assert outcome.result is not None
    assert json.loads(outcome.result) == stored


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (str, None),
        (str, 5),
        (int, "5"),
        (int, 5.5),
        (None, "something"),
        (bool, 1),
        (int | None, "x"),
        (str, True),
        (Shape, None),
        (Shape, {"sides": "three"}),
        (Shape, {}),
        (list[int], [1, "x"]),
        (dict[str, int], ["a"]),
        (tuple[int, str], (1,)),
        (datetime, "tomorrow"),
    ],
)
def test_a_result_that_does_not_fit_fails_the_job_without_another_attempt(
    annotation: Any, value: object
) -> None:
    # spec: HO-39, QU-32
    outcome = ending(annotation, value)
    assert (outcome.state, outcome.counts, outcome.result) == (State.FAILED, True, None)
    assert outcome.error is not None
    assert outcome.error["code"] == "RETURN_TYPE_MISMATCH"
    assert f"returned {type(value).__name__}" in outcome.error["message"]


def test_without_an_annotation_anything_goes() -> None:
    # spec: HO-39
    def work(): ...  # type: ignore[no-untyped-def]  # noqa: ANN202

    encode = Signature("work", work).encode_result
    for value in (None, 5, "x", [Shape(3)]):
        assert decide(a_job(), Returned(value), PLAIN, encode=encode).state is State.COMPLETED


def test_a_result_without_json_is_that_and_no_mismatch() -> None:
    # spec: HO-39
    for annotation in (str, Any, Shape):
        outcome = ending(annotation, object())
        assert outcome.error is not None
        assert outcome.error["code"] == "RESULT_NOT_JSON"


def test_what_is_enqueued_with_a_completion_goes_with_it_and_with_nothing_else() -> None:
    jobs = (NewJob[Any](task="next", payload=msgspec.Raw(b"{}")),)
    completed = decide(a_job(), Returned(None), PLAIN, jobs=jobs)
    assert completed.jobs == jobs
    assert json.loads(operations.encode_outcome(completed))["jobs"] == [{"task": "next", "payload": {}}]
    for ended in (Raised(ValueError()), Raised(Snooze(MINUTE)), Raised(Poison()), Returned(object())):
        assert decide(a_job(), ended, PLAIN, jobs=jobs).jobs == ()


def test_anything_that_knows_its_attempt_can_be_decided_about() -> None:
    @dataclass
    class Held:
        id: int = 7
        attempt: int = 1
        failures: int = 2
        max_attempts: int = 3

    assert decide(Held(), Raised(ValueError()), PLAIN).state is State.FAILED
    assert decide(Held(failures=1), Raised(ValueError()), PLAIN).delay == MINUTE
