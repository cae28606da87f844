"""How tasks are meant to be used; a type checker has nothing to say."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, assert_type
from uuid import UUID

import psycopg

import shiftwork
from shiftwork.context import Context

app = shiftwork.App("postgresql://nowhere/")


@app.task
def greet(name: str, greeting: str = "hello", *, times: int = 1) -> str:
    return f"{greeting}, {name}" * times


@app.task(queue="mail", retry=shiftwork.Retry(max_attempts=5), timeout=timedelta(minutes=5))
async def buy(number: UUID, lines: list[str]) -> int:
    return len(lines)


@app.task(name="plain")
def plain() -> None: ...


# What the worker hands in comes first, so that type checkers know that nobody has to send it.


@app.task
async def report(context: Context, share: float) -> str:
    return f"{share}"


@app.task(queue="slow")
def count(context: Context, upto: int) -> int:
    return upto


@app.task(transaction=True)
async def book(tx: psycopg.AsyncConnection, amount: int) -> None: ...


@app.task(transaction=True, concurrency=3, on_lost="fail", max_resets=1, codes={KeyError: "NO_SUCH_ROW"})
def enter(tx: psycopg.Connection[dict[str, Any]], context: Context, row: str) -> bool:
    return bool(row)


@app.task(default_code="BROKEN")
def anything(payload: Any, times: int = 1) -> int:
    return times


@app.task
async def lengths(words: shiftwork.Batch[str]) -> list[int]:
    return [len(word) for word in words.arguments]


@app.task(transaction=True, batch=50)
async def keep(words: shiftwork.Batch[str], tx: psycopg.AsyncConnection) -> None:
    for job in words:
        async with job as word:
            assert_type(word, str)
            assert_type(job.argument, str)


async def use_batches(tx: psycopg.AsyncConnection) -> None:
    assert_type(await lengths.aenqueue("hello"), shiftwork.Handle[int])
    assert_type(lengths.using(priority=1).job("hello"), shiftwork.NewJob[int])
    assert_type(await lengths(shiftwork.Batch.of("hello", "world")), list[int])
    assert_type(keep.enqueue("hello"), shiftwork.Handle[None])
    await keep(shiftwork.Batch.of("hello"), tx)


derive = app.sql_task("derive", handler="stats.derive(jsonb)", queue="analytics", merge={"ids": "union"})


async def use_a_routine() -> None:
    assert_type(derive, shiftwork.SqlTask)
    assert_type(derive.enqueue(ids=[1, 2], since="2026-01-01"), shiftwork.Handle[Any])
    assert_type(await derive.using(unique="derive").aenqueue(ids=[1]), shiftwork.Handle[Any])
    app.enqueue_many([derive.job(ids=[1])])


async def use_what_is_handed_in(
    context: Context, tx: psycopg.AsyncConnection, blocking: psycopg.Connection[dict[str, Any]]
) -> None:
    assert_type(report.enqueue(0.5), shiftwork.Handle[str])
    assert_type(await report(context, 0.5), str)
    assert_type(count.using(priority=1).job(upto=3), shiftwork.NewJob[int])
    assert_type(count(context, upto=3), int)
    assert_type(await book.aenqueue(5), shiftwork.Handle[None])
    await book(tx, 5)
    enter.enqueue("x")
    enter(blocking, context, "x")
    anything.enqueue({}, times=2)
    anything.enqueue(payload=[])


async def use() -> None:
    assert_type(greet.enqueue("Ada", times=2), shiftwork.Handle[str])
    assert_type(greet.enqueue("Ada").result(timeout=1), str)
    assert_type(await buy.aenqueue(UUID(int=1), lines=[]), shiftwork.Handle[int])
    assert_type(await (await buy.aenqueue(UUID(int=1), [])).aresult(timeout=timedelta(seconds=1)), int)
    assert_type(greet("Ada"), str)
    assert_type(await buy(UUID(int=1), []), int)
    assert_type(greet.using(priority=1, unique="x").enqueue("Ada").status(), shiftwork.State)
    assert_type(greet.using(delay=timedelta(1)).using(tags=["a"]).job("Ada"), shiftwork.NewJob[str])
    assert_type(app.enqueue_many([greet.job("Ada"), greet.job("Bob")]), list[shiftwork.Handle[str]])
    app.enqueue_many([greet.job("Ada"), buy.job(UUID(int=1), [])])
    assert_type(
        await app.aenqueue_many(buy.job(UUID(int=n), []) for n in range(3)), list[shiftwork.Handle[int]]
    )
    plain.enqueue()
    plain()
