from __future__ import annotations

import json
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shiftwork.errors import ConfigurationError, Poison
from shiftwork.retry import Retry, code_of

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
    assert 0.8 * wait <= Retry().delay(failures, lambda: chance) < 1.2 * wait + timedelta(microseconds=2)


def test_without_jitter_nothing_is_left_to_chance() -> None:
    # spec: QU-11
    retry = Retry(max_attempts=None, delays=timedelta(seconds=10), cap=timedelta(seconds=300), jitter=0)
    assert [retry.delay(n) / SECOND for n in range(1, 8)] == [10, 20, 40, 80, 160, 300, 300]


def test_a_constant_wait_stays_the_same() -> None:
    retry = Retry(delays=timedelta(seconds=7), factor=1, jitter=0)
    assert {retry.delay(n) for n in (1, 2, 50, 10**9)} == {timedelta(seconds=7)}


def test_a_list_of_waits_is_gone_through_and_its_last_one_repeated() -> None:
    steps = [timedelta(seconds=60), timedelta(seconds=300), timedelta(seconds=900)]
    retry = Retry(delays=steps, factor=1, jitter=0)
    assert [retry.delay(n) / SECOND for n in range(1, 6)] == [60, 300, 900, 900, 900]


def test_no_number_of_failures_is_too_large() -> None:
    assert Retry(jitter=0).delay(10**9) == timedelta(hours=1)
    assert Retry(delays=timedelta(), jitter=0).delay(10**9) == timedelta()


def test_the_last_attempt_is_the_end() -> None:
    # spec: SH-19
    retry = Retry(max_attempts=3)
    assert [retry.gives_up(failures, 3, ValueError()) for failures in range(4)] == [False, False, True, True]


def test_poison_is_the_end_at_once() -> None:
    # spec: SH-17
    assert Retry(max_attempts=None).gives_up(0, 2**31 - 1, Poison("bad payload"))


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
        {"cap": timedelta(days=10**6)},
    ],
)
def test_a_policy_that_cannot_work_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        Retry(**wrong)  # type: ignore[arg-type]
