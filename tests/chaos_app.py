"""What the workers of `make chaos` run: a task for each way of running code, and the rows of a table. What it does is written to a file,
or in its transaction."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

from psycopg import AsyncConnection, Connection

import shiftwork
from shiftwork import App, Context

app = App()

ALWAYS: Any = {
    "max_resets": 1_000_000,
    "retry": shiftwork.Retry(max_attempts=1_000_000, delays=timedelta(milliseconds=100), factor=1),
}
store = shiftwork.TableStore("chaos_rows", **ALWAYS)
"""Lost and failed as often as may be: sessions are ended under these handlers, and that is an error like others."""

EFFECT = "insert into public.effects (number, job, attempt) values (%s, %s, %s)"
PLAIN = ("note", "note_blocking", "note_in_a_process", "note_and_spawn")
TRANSACTIONAL = ("transfer", "transfer_together", "transfer_blocking", "transfer_in_sql")
ROW = "row"
LONGEST = 0.05


def _write(what: str, context: Context, number: int) -> None:
    """A line is whole or not there, however many write and die."""
    line = f"{what} {number} {context.job.id} {context.attempt} {os.getpid()} {time.time()}\n"
    file = os.open(os.environ["CHAOS_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


@contextmanager
def _at_work(context: Context, number: int) -> Iterator[None]:
    """Code of this attempt runs meanwhile."""
    _write("began", context, number)
    try:
        yield
    finally:
        _write("left", context, number)


@app.task(**ALWAYS)
async def note(context: Context, number: int) -> None:
    with _at_work(context, number):
        _write("did", context, number)
        await asyncio.sleep(random.uniform(0, LONGEST))


@app.task(**ALWAYS)
def note_blocking(context: Context, number: int) -> None:
    with _at_work(context, number):
        _write("did", context, number)
        time.sleep(random.uniform(0, LONGEST))


@app.task(executor="process", **ALWAYS)
def note_in_a_process(context: Context, number: int) -> None:
    with _at_work(context, number):
        _write("did", context, number)
        time.sleep(random.uniform(0, LONGEST))


@app.task(**ALWAYS)
async def leaf() -> None:
    await asyncio.sleep(random.uniform(0, LONGEST))


@app.task(**ALWAYS)
async def note_and_spawn(context: Context, number: int) -> None:
    with _at_work(context, number):
        _write("did", context, number)
        context.spawn(leaf.job(), leaf.job())


@app.task(transaction=True, **ALWAYS)
async def transfer(tx: AsyncConnection[Any], context: Context, number: int) -> None:
    with _at_work(context, number):
        await tx.execute(EFFECT, (number, context.job.id, context.attempt))
        await asyncio.sleep(random.uniform(0, LONGEST))


@app.task(transaction=True, batch=10, **ALWAYS)
async def transfer_together(number: shiftwork.Batch[int], tx: AsyncConnection[Any]) -> None:
    with ExitStack() as stack:
        for job in number:
            stack.enter_context(_at_work(job.context, job.argument))
        for job in number:
            async with job as one:
                await tx.execute(EFFECT, (one, job.context.job.id, job.context.attempt))
        await asyncio.sleep(random.uniform(0, LONGEST))


@app.task(transaction=True, **ALWAYS)
def transfer_blocking(tx: Connection[Any], context: Context, number: int) -> None:
    with _at_work(context, number):
        tx.execute(EFFECT, (number, context.job.id, context.attempt))
        time.sleep(random.uniform(0, LONGEST))


@store.handler(transaction=True)
async def transfer_for_a_row(row: dict[str, Any], tx: AsyncConnection[Any], context: Context) -> None:
    with _at_work(context, row["number"]):
        await tx.execute(EFFECT, (row["number"], context.job.id, context.attempt))
        await asyncio.sleep(random.uniform(0, LONGEST))


ROUTINE = f"""
create procedure public.transfer_in_sql(payload jsonb) language plpgsql as $$
declare
  running constant text[] := string_to_array(current_setting('shiftwork.job'), ' ');
begin
  insert into public.effects (number, job, attempt) values ((payload ->> 'number')::int, running[1]::bigint, running[2]::int);
  perform pg_sleep(random() * {LONGEST});
end $$
"""
app.sql_task("transfer_in_sql", handler="public.transfer_in_sql(jsonb)", **ALWAYS)
