"""What a worker does with jobs."""

from __future__ import annotations

from shiftwork import App
from tests.workshop import Workshop


async def test_async_and_plain_functions_run(dsn: str) -> None:
    app = App(dsn)

    @app.task
    async def add(a: int, b: int) -> int:
        return a + b

    @app.task
    def subtract(a: int, b: int) -> int:
        return a - b

    async with app, Workshop(app) as shop:
        first, second = await add.aenqueue(1, 2), await subtract.aenqueue(5, 3)
        await shop.ended(first, second)
        assert await first.aresult(timeout=30) == 3
        assert await second.aresult(timeout=30) == 2
