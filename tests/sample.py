"""An app for tests of the command: `shiftwork worker tests/sample.py`."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import shiftwork

app = shiftwork.App()
log = logging.getLogger("sample")


@app.task
async def greet(name: str) -> str:
    return f"Hello, {name}!"


@app.task(queue="mail")
def post(context: shiftwork.Context, to: str) -> str:
    """A plain function, which runs in a thread."""
    context.log.info("to %s", to)
    context.enqueue(greet.job(to))
    return to


@app.task(retry=shiftwork.Retry(max_attempts=1))
async def stumble(message: str) -> None:
    log.warning("about to say %s", message)
    raise shiftwork.Poison(message)


@app.task
async def wait_for(path: str) -> str:
    """Goes on for as long as there is no such file."""
    while not Path(path).exists():
        await asyncio.sleep(0.01)
    return "seen"
