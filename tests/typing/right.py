"""How tasks are meant to be used; a type checker has nothing to say."""

from __future__ import annotations

from datetime import timedelta
from typing import assert_type
from uuid import UUID

import shiftwork

app = shiftwork.App("postgresql://nowhere/")


@app.task
def greet(name: str, greeting: str = "hello", *, times: int = 1) -> str:
    return f"{greeting}, {name}" * times


@app.task(queue="mail", retry=shiftwork.Retry(max_attempts=5), timeout=timedelta(minutes=5))
async def buy(number: UUID, lines: list[str]) -> int:
    return len(lines)


@app.task(name="plain")
def plain() -> None: ...


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
