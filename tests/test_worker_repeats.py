"""Deadlocks and serialization failures: the handler is called again on the spot, within its attempt."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from shiftwork import App, Retry, State
from tests.workshop import Workshop

CONFLICT = "do $$ begin raise exception using errcode = '40001', message = 'somebody was quicker'; end $$"


@pytest.fixture
def app(dsn: str) -> Iterator[App]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("create table effects (what text)")
    with App(dsn) as app:
        yield app


@pytest.mark.parametrize("plain", [False, True], ids=["async", "plain"])
async def test_after_a_conflict_a_transaction_is_undone_and_tried_again_on_the_spot(
    app: App, plain: bool
) -> None:
    # spec: D-8
    calls = []
    retry = Retry(max_attempts=2, at_once=2, delay=timedelta(hours=1))

    def plainly(tx: psycopg.Connection) -> int:
        calls.append(1)
        tx.execute("insert into effects values ('once')")
        if len(calls) < 3:
            tx.execute(CONFLICT)
        return len(calls)

    async def asynchronously(tx: psycopg.AsyncConnection) -> int:
        calls.append(1)
        await tx.execute("insert into effects values ('once')")
        if len(calls) < 3:
            await tx.execute(CONFLICT)
        return len(calls)

    function: Any = plainly if plain else asynchronously
    work = app.task(name="work", transaction=True, retry=retry)(function)

    async with Workshop(app) as shop:
        handle = await work.aenqueue()
        await shop.ended(handle)
        found = await handle.ainfo()
        assert (found.state, found.result, found.attempt, found.failures) == (State.COMPLETED, 3, 1, 0)
        assert await shop.rows("select what from effects") == [{"what": "once"}]


async def test_a_conflict_that_does_not_pass_is_a_failure_and_other_errors_are_not_repeated(app: App) -> None:
    # spec: D-8
    calls: list[str] = []

    @app.task(transaction=True, retry=Retry(max_attempts=1, at_once=1))
    async def unlucky(tx: psycopg.AsyncConnection) -> None:
        calls.append("unlucky")
        await tx.execute(CONFLICT)

    @app.task(retry=Retry(max_attempts=1, at_once=5))
    async def wrong() -> None:
        calls.append("wrong")
        raise ValueError("no conflict")

    async with Workshop(app) as shop:
        jobs = [await unlucky.aenqueue(), await wrong.aenqueue()]
        await shop.ended(*jobs)
        assert [(await job.ainfo()).state for job in jobs] == [State.FAILED, State.FAILED]
        assert sorted(calls) == ["unlucky", "unlucky", "wrong"]
