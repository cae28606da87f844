"""Mistakes; each line that holds one says so, and a type checker must report exactly these lines."""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID

import psycopg

import shiftwork
from shiftwork.context import Context

app = shiftwork.App("postgresql://nowhere/")


@app.task
def greet(name: str, greeting: str = "hello", *, times: int = 1) -> str:
    return f"{greeting}, {name}" * times


@app.task(queue="mail", retry=shiftwork.Retry(max_attempts=5))
async def buy(number: UUID, lines: list[str]) -> int:
    return len(lines)


@app.task
async def report(context: Context, share: float) -> str:
    return f"{share}"


@app.task(transaction=True)
def enter(tx: psycopg.Connection, row: str) -> bool:
    return bool(row)


@app.task(batch=10)
async def lengths(words: shiftwork.Batch[str]) -> list[int]:
    return [len(word) for word in words.arguments]


async def use() -> None:
    greet.enqueue()  # MISTAKE: the name is missing
    greet.enqueue(5)  # MISTAKE: not a name
    greet.enqueue("Ada", volume=3)  # MISTAKE: no such argument
    greet.enqueue("Ada", "hi", 2)  # MISTAKE: times is given by keyword
    greet.job(name=None)  # MISTAKE: not a name
    greet(7)  # MISTAKE: not a name
    greet.using(priority=1).enqueue(5)  # MISTAKE: not a name
    greet.using(priority=1).using(delay=timedelta(1)).job()  # MISTAKE: the name is missing
    greet.using(priority="high")  # MISTAKE: not a number
    greet.using(delay=5)  # MISTAKE: not a timedelta
    greet.using(scope="always")  # MISTAKE: no such scope
    greet.using(colour="blue")  # MISTAKE: no such option
    number: int = greet.enqueue("Ada").result(timeout=1)  # MISTAKE: it is a str
    greet.enqueue("Ada").result()  # MISTAKE: how long to wait must be said
    await buy.aenqueue("1", [])  # MISTAKE: not a UUID
    await buy.aenqueue(UUID(int=1), [1])  # MISTAKE: not a list of str
    await buy.using(queue="slow").aenqueue(UUID(int=1))  # MISTAKE: the lines are missing
    text: str = await buy(UUID(int=1), [])  # MISTAKE: it is an int
    app.enqueue_many([greet.job("Ada"), "buy"])  # MISTAKE: not a job
    app.task(queue=5)  # MISTAKE: not a name
    report.enqueue("half")  # MISTAKE: not a number
    report.enqueue()  # MISTAKE: the share is missing
    await report(0.5)  # MISTAKE: who calls it hands the context in
    enter.enqueue(5)  # MISTAKE: not a row
    app.task(on_lost="forget")  # MISTAKE: no such choice
    app.task(concurrency="3")  # MISTAKE: not a number
    lengths.enqueue(5)  # MISTAKE: not a word
    lengths.enqueue(shiftwork.Batch.of("a"))  # MISTAKE: one by one
    await lengths("hello")  # MISTAKE: who calls it hands a batch in
    print(number, text)
