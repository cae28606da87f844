"""The app of `shiftwork demo`: a shop whose tasks end in every way that a task can end.

It is a program like any other. The demo enqueues its jobs, and workers run them: `shiftwork worker shiftwork.demo_app:app`.
"""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta

import psycopg

import shiftwork
from shiftwork.settings import Settings

app = shiftwork.App(settings=Settings())  # the demo says which database


@app.task
async def greet(name: str) -> str:
    """Ends at once."""
    return f"Hello, {name}!"


@app.task
def resize(picture: int, seconds: float) -> int:
    """Takes its time, in a thread, since it is a plain function."""
    time.sleep(seconds)
    return picture


@app.task(retry=shiftwork.Retry(max_attempts=5, delays=timedelta(milliseconds=400), factor=1))
async def call(context: shiftwork.Context, number: int, busy: int) -> str:
    """Is busy so many times, and gets through at last."""
    if context.job.failures < busy:
        raise ConnectionError(f"{number} is busy")
    return f"{number} answered"


@app.task(retry=shiftwork.Retry(max_attempts=3, delays=timedelta(milliseconds=200), factor=1))
async def parse(document: int) -> None:
    """Never succeeds, so it fails when its attempts are used up."""
    raise ValueError(f"document {document} makes no sense")


@app.task
async def deliver(parcel: int) -> None:
    """Poisonous: no further attempt can help, and it says so."""
    raise shiftwork.Poison(f"nobody lives where parcel {parcel} should go")


@app.task(transaction=True)
async def book(tx: psycopg.AsyncConnection[object], context: shiftwork.Context, amount: int) -> int:
    """Writes in the transaction in which its job ends: both are done, or neither is."""
    await tx.execute("insert into bookings (job, amount) values (%s, %s)", (context.job.id, amount))
    await asyncio.sleep(0.02)
    if amount < 0:
        raise shiftwork.Poison(f"cannot book {amount}")
    return amount


@app.task
async def order(context: shiftwork.Context, number: int) -> None:
    """Enqueues an invoice that is there if and only if this job completes."""
    context.enqueue(invoice.job(number))


@app.task
async def invoice(number: int) -> int:
    """What an order leads to."""
    return number


@app.task
async def watch(context: shiftwork.Context, door: int) -> None:
    """Goes on until it is told to stop."""
    context.progress(message=f"watching door {door}")
    await asyncio.Event().wait()
