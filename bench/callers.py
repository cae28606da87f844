"""Coroutines of one process that enqueue one job after the other, through the client and by hand."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager

import psycopg

from bench.measuring import FLOOR, Bench, on_its_loop, sql
from shiftwork import App
from shiftwork.settings import Settings

Call = Callable[[], Awaitable[object]]


def through_client(bench: Bench, callers: int) -> float:
    """Jobs a second by `aenqueue()`."""
    with App(settings=Settings(dsn=bench.url)) as app:

        @app.task
        async def nothing(n: int) -> None:
            """As the worker has it."""

        @contextlib.asynccontextmanager
        async def begin() -> AsyncIterator[Call]:
            yield lambda: nothing.aenqueue(n=1)

        return _calls(bench, callers, begin)


def by_hand(bench: Bench, callers: int) -> float:
    """Rows a second by bare INSERTs, each caller on a connection of its own."""

    @contextlib.asynccontextmanager
    async def begin() -> AsyncIterator[Call]:
        async with await psycopg.AsyncConnection.connect(
            bench.url, autocommit=True, prepare_threshold=None
        ) as connection:
            yield lambda: connection.execute(sql(FLOOR["insert"]), ("nothing", '{"n": 1}'))

    return _calls(bench, callers, begin)


def _calls(bench: Bench, callers: int, begin: Callable[[], AbstractAsyncContextManager[Call]]) -> float:
    seconds = 1 if bench.quick else 3

    async def call_on(call: Call, until: float) -> int:
        made = 0
        while time.perf_counter() < until:
            await call()
            made += 1
        return made

    async def all_of_them() -> float:
        async with contextlib.AsyncExitStack() as stack:
            calls = [await stack.enter_async_context(begin()) for _ in range(callers)]
            began = time.perf_counter()
            made = await asyncio.gather(*(call_on(call, began + seconds) for call in calls))
            return sum(made) / (time.perf_counter() - began)

    return on_its_loop(all_of_them())
