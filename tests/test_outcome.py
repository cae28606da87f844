from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shiftwork.errors import Cancel, Poison, RetryLater, Snooze
from shiftwork.job import Job, State, moment
from shiftwork.outcome import MAX_MESSAGE, MAX_TRACEBACK, Outcome, Raised, Returned, decide, describe
from shiftwork.retry import Retry

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
