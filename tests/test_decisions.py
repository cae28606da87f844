"""What becomes of a failed job is decided in Python and in SQL: one table of cases, and both say the same."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from shiftwork import Cancel, Poison, Retry, RetryLater, Snooze
from shiftwork.outcome import Raised, decide
from tests.harness import Protocol
from tests.test_outcome import a_job

SECOND = timedelta(seconds=1)


class Coded(Exception):  # noqa: N818
    """An error with a code."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


BROKEN = Coded("23505")
PLAIN = Retry(jitter=0)
LISTED = Retry(delays=[SECOND, 5 * SECOND, 60 * SECOND], factor=1, jitter=0)
CASES: list[tuple[str, Retry, int, int, BaseException, str, float | None]] = [
    ("the first failure", PLAIN, 0, 5, BROKEN, "scheduled", 30),
    ("doubling", PLAIN, 3, 5, BROKEN, "scheduled", 240),
    ("the last attempt", PLAIN, 4, 5, BROKEN, "failed", None),
    ("one attempt only", Retry.never(), 0, 1, BROKEN, "failed", None),
    ("the cap", PLAIN, 10, 50, BROKEN, "scheduled", 3600),
    ("far beyond the cap", PLAIN, 1_000_000, 2**31 - 1, BROKEN, "scheduled", 3600),
    ("a constant", Retry(delay=10 * SECOND, factor=1, jitter=0), 7, 99, BROKEN, "scheduled", 10),
    ("nothing to wait for", Retry(delay=0 * SECOND, jitter=0), 900, 999, BROKEN, "scheduled", 0),
    ("a cap of nothing", Retry(cap=0 * SECOND, jitter=0), 3, 9, BROKEN, "scheduled", 0),
    ("a list, its first", LISTED, 0, 9, BROKEN, "scheduled", 1),
    ("a list, its last", LISTED, 2, 9, BROKEN, "scheduled", 60),
    ("a list, behind its last", LISTED, 5, 9, BROKEN, "scheduled", 60),
    ("a list that goes on", Retry(delays=[SECOND, 5 * SECOND], jitter=0), 3, 9, BROKEN, "scheduled", 20),
    ("a listed step above the cap", Retry(delays=[90 * SECOND], cap=60 * SECOND, jitter=0), 0, 9, BROKEN, "scheduled", 60),
    ("chance, at its least", Retry(jitter=0.5), 0, 5, BROKEN, "scheduled", 15),
    ("a code that is listed", Retry(on="23505", jitter=0), 0, 5, BROKEN, "scheduled", 30),
    ("a code that is not", Retry(on=("40001", "23503")), 0, 5, BROKEN, "failed", None),
    ("no code at all", Retry(on=()), 0, 5, BROKEN, "failed", None),
    ("poison", PLAIN, 0, 5, Poison("no"), "failed", None),
    ("poison that is listed", Retry(on="POISON"), 0, 5, Poison("no"), "failed", None),
    ("later", PLAIN, 0, 5, RetryLater(7 * SECOND), "scheduled", 7),
    ("later, too often", PLAIN, 4, 5, RetryLater(7 * SECOND), "failed", None),
    ("later, which is not listed", Retry(on="23505"), 0, 5, RetryLater(7 * SECOND), "failed", None),
    ("a snooze", PLAIN, 4, 5, Snooze(7 * SECOND, "why"), "scheduled", 7),
    ("a snooze into the past", PLAIN, 0, 5, Snooze(-7 * SECOND, "why"), "scheduled", 0),
    ("cancelled", PLAIN, 0, 5, Cancel("no"), "cancelled", None),
]  # fmt: skip


def in_sql(
    protocol: Protocol, retry: Retry, failures: int, max_attempts: int, error: BaseException, chance: float
) -> tuple[str, float | None, bool]:
    delay = getattr(error, "delay", None)
    [row] = protocol.rows(
        "select state::text, wait, counts from {}.decide(%s::int, %s::int, %s::jsonb, %s, %s, %s)",
        failures,
        max_attempts,
        json.dumps(retry.as_json()),
        getattr(error, "code", None),
        None if delay is None else delay.total_seconds(),
        chance,
    )
    return row["state"], row["wait"], row["counts"]


@pytest.fixture
def no_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Retry.after, "__defaults__", (lambda: 0.0,))


@pytest.mark.usefixtures("no_chance")
def test_python_and_sql_decide_the_same(protocol: Protocol) -> None:
    # spec: D-8, QU-11, HO-29
    for name, retry, failures, max_attempts, error, state, wait in CASES:
        outcome = decide(a_job(failures=failures, max_attempts=max_attempts), Raised(error), retry)
        delay = None if outcome.delay is None else outcome.delay.total_seconds()
        assert (str(outcome.state), delay) == (state, wait), name
        said = in_sql(protocol, retry, failures, max_attempts, error, 0.0)
        assert said == (state, pytest.approx(wait) if wait is not None else None, outcome.counts), name


policies = st.builds(
    Retry,
    delays=st.lists(st.integers(0, 4000).map(lambda n: n * SECOND), min_size=1, max_size=4),
    factor=st.floats(1, 1000),
    cap=st.integers(0, 100_000).map(lambda n: n * SECOND),
    jitter=st.floats(0, 0.99),
    on=st.none() | st.lists(st.sampled_from(["23505", "40001"]), max_size=2).map(tuple),
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(policies, st.integers(0, 2000), st.integers(1, 2000), st.floats(0, 1))
@example(Retry(jitter=5e-324), 0, 2, 0.25)
@example(Retry(jitter=0.5), 0, 2, 5e-324)
def test_python_and_sql_agree_about_any_policy(
    protocol: Protocol, retry: Retry, failures: int, max_attempts: int, chance: float
) -> None:
    gives_up = retry.gives_up(failures, max_attempts, BROKEN)
    state, wait, counts = in_sql(protocol, retry, failures, max_attempts, BROKEN, chance)
    assert (state, counts) == ("failed" if gives_up else "scheduled", True)
    if not gives_up:
        expected: Any = retry.after(failures + 1, lambda: chance).total_seconds()
        assert wait == pytest.approx(expected, rel=1e-6, abs=1e-3)


def test_without_a_policy_sql_takes_the_usual_one(protocol: Protocol) -> None:
    usual = Retry().as_json()
    for policy in (None, "{}"):
        [row] = protocol.rows("select * from {}.decide(2, 5, %s::jsonb, '23505', chance => 0.5)", policy)
        assert (row["state"], row["wait"]) == ("scheduled", 120)
    [row] = protocol.rows("select * from {}.decide(2, 5, %s::jsonb, '23505', chance => 0)", json.dumps(usual))
    assert row["wait"] == pytest.approx(96)
