from __future__ import annotations

import json
from datetime import timedelta

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shiftwork.codes import code_of
from shiftwork.errors import ConfigurationError, DatabaseError, Poison
from shiftwork.retry import Retry, is_conflict

SECOND = timedelta(seconds=1)


def test_the_default_doubles_from_thirty_seconds_to_an_hour() -> None:
    # spec: SH-16
    waits = [Retry().wait(failures) / SECOND for failures in range(1, 10)]
    assert waits == [30, 60, 120, 240, 480, 960, 1920, 3600, 3600]
    assert Retry().wait(0) == Retry().wait(-5) == timedelta(seconds=30)


@settings(deadline=None)
@given(st.integers(min_value=-5, max_value=2**40), st.floats(min_value=0, max_value=1, exclude_max=True))
def test_chance_moves_a_wait_by_a_fifth_at_most(failures: int, chance: float) -> None:
    # spec: SH-16
    wait = Retry().wait(failures)
    assert 0.8 * wait <= Retry().after(failures, lambda: chance) < 1.2 * wait + timedelta(microseconds=2)


def test_without_jitter_nothing_is_left_to_chance() -> None:
    # spec: QU-11
    retry = Retry(max_attempts=None, delays=timedelta(seconds=10), cap=timedelta(seconds=300), jitter=0)
    assert [retry.after(n) / SECOND for n in range(1, 8)] == [10, 20, 40, 80, 160, 300, 300]


def test_a_constant_wait_stays_the_same() -> None:
    retry = Retry(delays=timedelta(seconds=7), factor=1, jitter=0)
    assert {retry.after(n) for n in (1, 2, 50, 10**9)} == {timedelta(seconds=7)}


def test_one_delay_may_be_called_so() -> None:
    # spec: SG-22
    fixed = Retry(delay=timedelta(seconds=7), factor=1)
    assert fixed == Retry(delays=timedelta(seconds=7), factor=1)
    assert fixed.wait(1) == fixed.wait(50) == timedelta(seconds=7)
    with pytest.raises(ConfigurationError, match="delay and delays say the same"):
        Retry(delay=SECOND, delays=[SECOND])


def test_attempts_may_be_without_end() -> None:
    # spec: QU-11, D-8
    retry = Retry.unlimited(delay=timedelta(seconds=10), on=OSError)
    assert (retry.max_attempts, retry.wait(1)) == (None, timedelta(seconds=10))
    assert not retry.gives_up(10**6, 2**31 - 1, OSError())
    assert retry.gives_up(0, 2**31 - 1, ValueError())


def test_the_limit_is_of_all_attempts_and_not_of_those_after_the_first() -> None:
    # spec: SG-21, D-9
    assert Retry(max_attempts=1).gives_up(0, 1, ValueError())
    assert not Retry(max_attempts=2).gives_up(0, 2, ValueError())
    assert Retry(max_attempts=2).gives_up(1, 2, ValueError())


def test_a_list_of_waits_is_gone_through_and_its_last_one_repeated() -> None:
    steps = [timedelta(seconds=60), timedelta(seconds=300), timedelta(seconds=900)]
    retry = Retry(delays=steps, factor=1, jitter=0)
    assert [retry.after(n) / SECOND for n in range(1, 6)] == [60, 300, 900, 900, 900]


def test_no_number_of_failures_is_too_large() -> None:
    assert Retry(jitter=0).after(10**9) == timedelta(hours=1)
    assert Retry(delays=timedelta(), jitter=0).after(10**9) == timedelta()


def test_the_last_attempt_is_the_end() -> None:
    # spec: SH-19
    retry = Retry(max_attempts=3)
    assert [retry.gives_up(failures, 3, ValueError()) for failures in range(4)] == [False, False, True, True]


def test_poison_is_the_end_at_once() -> None:
    # spec: SH-17
    assert Retry(max_attempts=None).gives_up(0, 2**31 - 1, Poison("bad payload"))


def test_poison_is_found_under_what_it_was_wrapped_in() -> None:
    # spec: SG-5, SH-17
    wrapped = RuntimeError("no")
    wrapped.__cause__ = ValueError("because")
    assert Retry().allows(wrapped)
    wrapped.__cause__.__cause__ = Poison("the row is gone")
    assert not Retry().allows(wrapped)
    assert not Retry().allows(ExceptionGroup("some", [OSError(), ExceptionGroup("more", [Poison()])]))
    in_a_circle = RuntimeError()
    in_a_circle.__cause__ = in_a_circle
    assert Retry().allows(in_a_circle)


def test_only_transactions_in_each_others_way_are_repeated_on_the_spot() -> None:
    # spec: D-8, ST-12
    retry = Retry(at_once=3)
    deadlock, serialization = psycopg.errors.DeadlockDetected(), psycopg.errors.SerializationFailure()
    wrapped = RuntimeError()
    wrapped.__cause__ = deadlock
    for error in (deadlock, serialization, wrapped, DatabaseError("x", sqlstate="40001")):
        assert [retry.repeats(error, repeated) for repeated in range(5)] == [True, True, True, False, False]
    for other in (psycopg.errors.UniqueViolation(), ValueError(), psycopg.OperationalError()):
        assert not is_conflict(other)
        assert not retry.repeats(other)
    assert not Retry().repeats(deadlock)
    assert Retry.from_json(retry.as_json()).at_once == 3


def test_repeats_on_the_spot_wait_a_little_and_longer_each_time() -> None:
    # spec: ST-12
    assert [Retry.pause(n, lambda: 0) / SECOND for n in range(3)] == [0.1, 0.2, 0.4]
    assert [Retry.pause(n, lambda: 1) / SECOND for n in range(3)] == [0.15, 0.25, 0.45]


class RateLimitedError(Exception):
    code = "RATE_LIMIT"


@pytest.mark.parametrize(
    ("on", "error", "again"),
    [
        (None, ValueError(), True),
        (OSError, ConnectionError(), True),
        (OSError, ValueError(), False),
        ((OSError, "RATE_LIMIT"), RateLimitedError(), True),
        ("RATE_LIMIT", ValueError(), False),
        ("OSError", ConnectionError(), True),
        ([KeyError, ValueError], ValueError(), True),
        (lambda error: "later" in str(error), ValueError("later"), True),
        (lambda error: "later" in str(error), ValueError("never"), False),
        (lambda error: 1 / 0, ValueError(), True),
        (None, Poison(), False),
    ],
)
def test_which_errors_are_worth_another_attempt(on: object, error: Exception, again: bool) -> None:
    assert Retry(on=on).allows(error) is again  # type: ignore[arg-type]


def test_the_code_of_an_error_can_always_be_told() -> None:
    class Awkward(Exception):  # noqa: N818
        @property
        def code(self) -> str:
            raise RuntimeError

    class Numbered(Exception):  # noqa: N818
        code = 42

    assert code_of(Awkward()) == "Awkward"
    assert code_of(Numbered()) == "Numbered"
    assert code_of(RateLimitedError()) == "RATE_LIMIT"


def test_a_policy_is_data_and_reads_back_the_same() -> None:
    retry = Retry(max_attempts=None, delays=[SECOND, 2 * SECOND], factor=3, on=(OSError, "RATE_LIMIT"))
    back = Retry.from_json(json.loads(json.dumps(retry.as_json())))
    assert [back.wait(n) for n in range(10)] == [retry.wait(n) for n in range(10)]
    assert back.as_json() == retry.as_json()
    assert back.allows(ConnectionError())
    assert not back.allows(ValueError())


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_attempts": 0},
        {"delays": []},
        {"delays": timedelta(seconds=-1)},
        {"factor": 0.5},
        {"factor": float("nan")},
        {"jitter": 1},
        {"jitter": -0.1},
        {"at_once": -1},
        {"at_once": 101},
        {"at_once": None},
        {"delay": timedelta(seconds=-1)},
        {"cap": timedelta(days=10**6)},
    ],
)
def test_a_policy_that_cannot_work_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        Retry(**wrong)  # type: ignore[arg-type]
