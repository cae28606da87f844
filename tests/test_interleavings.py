"""Any two verbs at a job in any state, and five hundred seeded interleavings of all of them on two to four sessions.

How they are made, and what must hold, is in the explorer.
SHIFTWORK_SEED=123 runs that one alone; SHIFTWORK_EXPLORE=1 takes five hundred new ones.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from contextlib import closing
from itertools import product

import psycopg
import pytest

from tests import planted
from tests.explorer import Explorer

RUNS = 500
SHARES = 4


def seeds(share: int) -> list[int]:
    if seed := os.environ.get("SHIFTWORK_SEED"):
        return [int(seed)] if share == 0 else []
    first = random.SystemRandom().randrange(10**9) if "SHIFTWORK_EXPLORE" in os.environ else 0
    return list(range(first + share, first + RUNS, SHARES))


# spec: D-2, D-9, D-16, SH-21, SH-22
@pytest.mark.parametrize("share", range(SHARES))
def test_no_interleaving_breaks_an_invariant(dsn: str, share: int) -> None:
    # fault: F27
    explorer = Explorer(dsn)
    with closing(explorer):
        explore(explorer, seeds(share))
    if "SHIFTWORK_SEED" not in os.environ:
        assert explorer.parked > 0, "no statement ever had to wait: nothing was interleaved"
        assert min(explorer.ended.values()) > 0


STATES = ("blocked", "scheduled", "ready", "running", "waiting", "completed")
VERBS = ("claim", "settle", "release", "reap", "cancel", "promote", "expire", "revive", "heartbeat", "purge")


@pytest.mark.parametrize("state", STATES)
def test_any_two_verbs_may_meet_at_a_job_in_any_state(dsn: str, state: str) -> None:
    # fault: F27
    pairs = list(product(VERBS, VERBS))
    explorer = Explorer(dsn)
    with closing(explorer):
        for seed, (first, second) in enumerate(pairs):
            explorer.meet(state, first, second, seed)
    assert len(pairs) * len(STATES) >= 600
    assert sum(explorer.ended.values()) == 2 * len(pairs), "each has ended, and none in an error"


# spec: ST-18
def test_in_no_interleaving_is_a_parent_left_waiting_or_ended_before_its_children(dsn: str) -> None:
    explorer = families(dsn)
    with closing(explorer):
        explore(explorer, range(60), turns=40)
    assert explorer.gathered.keys() == {"completed", "failed"}


def test_children_that_miss_each_others_end_are_found(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        planted.ONLY_THE_LAST_CHILD_TELLS.sow(connection)
    explorer = families(dsn)
    explorer.only(claim=5, settle=20)
    explorer.endings = ("completed", "completed", "completed", "spawning")
    with closing(explorer), pytest.raises(AssertionError, match="jobs that cannot be brought to an end"):
        explore(explorer, range(RUNS), turns=40)


def families(dsn: str) -> Explorer:
    """Jobs that spawn children, which spawn others."""
    explorer = Explorer(dsn)
    explorer.only(claim=5, settle=12, cancel=0.3, heartbeat=1, expire=0.3)
    explorer.endings = ("completed", "completed", "completed", "spawning", "failed")
    return explorer


def test_a_reaper_that_does_not_look_at_the_lease_again_is_found(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        planted.REAP_WITHOUT_RECHECK.sow(connection)
    explorer = Explorer(dsn)
    explorer.only(enqueue=1, claim=4, heartbeat=6, reap=6)
    with closing(explorer), pytest.raises(AssertionError, match="reaped from a worker that holds its lease"):
        explore(explorer, range(RUNS))


def explore(explorer: Explorer, seeds: Iterable[int], turns: int = 24) -> None:
    for seed in seeds:
        explorer.run(seed, turns)
