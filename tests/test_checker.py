"""The judge is judged: a good history passes, and each forged one is told apart by what is wrong with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.checker import Act, Execution, History, Lease, Look, Loss, Sent, Step, check


def step(job: int, attempt: int, worker: int | None, state: str, at: float) -> Step:
    return Step(job, attempt, worker, state, at)


GOOD = History(
    sent=[
        Sent(1, "ok", transactional=True),
        Sent(2, "ok"),
        Sent(3, "failed"),
        Sent(4, "unknown"),
        Sent(5, "unknown"),
    ],
    numbers={10: 1, 20: 2, 40: 4},
    steps=[
        step(10, 0, None, "ready", 0.0),
        step(20, 0, None, "ready", 0.0),
        step(40, 0, None, "ready", 0.0),
        step(10, 1, 7, "running", 1.0),
        step(20, 1, 7, "running", 1.0),
        step(40, 1, 8, "running", 1.0),
        step(40, 1, 8, "completed", 1.5),
        step(10, 1, None, "ready", 4.0),
        step(20, 1, None, "scheduled", 2.0),
        step(20, 2, 8, "running", 2.5),
        step(10, 2, 8, "running", 4.5),
        step(20, 2, 8, "completed", 3.0),
        step(10, 2, 8, "completed", 5.0),
    ],
    acts=[
        Act(1, 10, 2, transactional=True),
        Act(2, 20, 1),
        Act(2, 20, 2),
        Act(4, 40, 1),
    ],
    left=[],
    losses=[Loss(10, 1, 2.0)],
    outages=[],
    bound=5.0,
    executions=[
        Execution(10, 1, 1.1, 4.7),  # stopped past its lease, and then it went on
        Execution(10, 2, 4.6, 4.9),
        Execution(20, 1, 1.1, 1.9),
        Execution(20, 2, 2.6, 2.9),
        Execution(40, 1, 1.1, None),  # killed
    ],
    leases=[Lease(7, 0.0, 2.0), Lease(7, 1.5, 3.5), Lease(8, 0.0, 9.0)],
    looks=[Look(100, 1.0, {"sockets": 9, "children": 1}), Look(101, 2.0, {"sockets": 10})],
    most={"sockets": 10, "children": 1},
    reported={"completed by 8": 3.0},
    true={"completed by 8": 3.0},
)

FORGED: dict[str, tuple[str, dict[str, Any]]] = {
    "an accepted job that is nowhere": ("lost", {"numbers": {10: 1, 40: 4}}),
    "a job that ended as failed": (
        "lost",
        {"steps": [*GOOD.steps[:-1], step(10, 2, 8, "failed", 5.0)], "acts": GOOD.acts[1:]},
    ),
    "a completed job whose effect is missing": ("lost", {"acts": GOOD.acts[1:]}),
    "a plain effect that never happened": ("lost", {"acts": GOOD.acts[:-1]}),
    "a refused job that is there": ("phantoms", {"numbers": {**GOOD.numbers, 30: 3}}),
    "one sending that became two jobs": (
        "phantoms",
        {
            "numbers": {**GOOD.numbers, 41: 4},
            "steps": [*GOOD.steps, *(replace(one, job=41) for one in GOOD.steps if one.job == 40)],
        },
    ),
    "a job that nobody sent": ("phantoms", {"numbers": {**GOOD.numbers, 99: 99}}),
    "an effect of a job that was rolled back": ("phantoms", {"acts": [*GOOD.acts, Act(3, 30, 1)]}),
    "an effect that was committed twice": (
        "doubled",
        {"acts": [*GOOD.acts, Act(1, 10, 2, transactional=True)]},
    ),
    "a job that ended twice": ("doubled", {"steps": [*GOOD.steps, step(10, 2, 8, "completed", 6.0)]}),
    "an ending by who had lost the job": (
        "stale",
        {"steps": [*GOOD.steps[:-1], step(10, 1, 7, "completed", 5.0)], "acts": GOOD.acts[1:]},
    ),
    "an effect of an attempt that was lost": (
        "stale",
        {"acts": [Act(1, 10, 1, transactional=True), *GOOD.acts[1:]]},
    ),
    "an attempt number that came twice": (
        "stale",
        {"steps": [*GOOD.steps[:9], step(20, 1, 8, "running", 2.5), *GOOD.steps[10:]]},
    ),
    "a job that is left": ("stuck", {"left": [10], "steps": GOOD.steps[:-1], "acts": GOOD.acts[1:]}),
    "a recovery that took too long": ("slow", {"bound": 1.0}),
    "a job that goes on after its end": (
        "illegal",
        {"steps": [*GOOD.steps, step(10, 2, None, "ready", 6.0)]},
    ),
    "a job that ends without having run": (
        "illegal",
        {"steps": [*GOOD.steps[:5], *GOOD.steps[6:]]},
    ),
    "two at once while the first still had its lease": (
        "overlapping",
        {"leases": [*GOOD.leases, Lease(7, 3.0, 5.0)]},
    ),
    "an attempt that began before the one before it had ended": (
        "overlapping",
        {"executions": [*GOOD.executions[:2], Execution(20, 1, 1.1, 2.7), *GOOD.executions[3:]]},
    ),
    "a process that keeps opening sockets": (
        "unbounded",
        {"looks": [*GOOD.looks, Look(100, 3.0, {"sockets": 11})]},
    ),
    "a child that was left behind": ("unbounded", {"looks": [*GOOD.looks, Look(101, 3.0, {"children": 2})]}),
    "a metric that counts too much": ("untrue", {"reported": {"completed by 8": 4.0}}),
    "a metric that forgets": ("untrue", {"reported": {}}),
}


def test_a_good_history_is_found_good() -> None:
    verdict = check(GOOD)
    assert verdict.violations == []
    assert verdict.recoveries == [2.5]


@pytest.mark.parametrize("forgery", FORGED)
def test_a_forged_history_is_rejected_for_what_is_wrong_with_it(forgery: str) -> None:
    kind, changes = FORGED[forgery]
    verdict = check(replace(GOOD, **changes))
    assert verdict.kinds[kind], verdict


def test_the_time_that_the_server_was_away_is_not_held_against_a_recovery() -> None:
    late = replace(GOOD, bound=1.0)
    assert check(late).slow
    assert not check(replace(late, outages=[(2.0, 4.0)])).slow
    assert check(replace(late, outages=[(20.0, 40.0)])).slow
