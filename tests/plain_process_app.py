"""Tasks with processes of their own in an app without middleware, where most jobs need nothing but their arguments."""

from __future__ import annotations

import os
import threading
import time
from contextvars import ContextVar
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg

from shiftwork import App, Context, Retry
from shiftwork.settings import Settings
from shiftwork.worker.run import current

app = App(settings=Settings())  # the test says which database
apart: Any = {"executor": "process"}
left_behind: ContextVar[str] = ContextVar("left_behind", default="nothing")


@app.task(**apart)
def pid() -> int:
    return os.getpid()


@app.task(**apart)
async def pid_of_async() -> int:
    return os.getpid()


@app.task(**apart)
def leave_a_mark() -> list[object]:
    """What the one before left, and whose code this is."""
    found = left_behind.get()
    left_behind.set("a mark")
    return [found, current.get().id]


@app.task(**apart)
def much(text: str, times: int) -> str:
    return text * times


@app.task(retry=Retry(max_attempts=1), **apart)
def fail() -> None:
    raise KeyError("here")


@app.task(**apart)
def say_a_number() -> int:
    return "no number"  # type: ignore[return-value]


@app.task(retry=Retry(at_once=2, delays=timedelta(hours=1)), **apart)
def collide(place: str) -> str:
    """Be in another's way, the first time."""
    met = Path(place)
    if not met.exists():
        met.touch()
        raise psycopg.errors.DeadlockDetected("in the way")
    return "done"


@app.task(timeout=timedelta(seconds=0.2), retry=Retry(max_attempts=1), **apart)
def stay_too_long() -> None:
    threading.Event().wait()


@app.task(**apart)
def stay_unless_told(context: Context, place: str) -> None:
    Path(place).write_text(str(os.getpid()))
    while True:
        context.check()


@app.task(**apart)
def fork_and_return() -> int:
    """Return twice, in two processes."""
    os.fork()
    time.sleep(0)
    return os.getpid()


@app.task(**apart)
def leave_a_thread(context: Context, go: str) -> None:
    """Return, and leave a thread that asks the context without end once it is let."""

    def ask() -> None:
        with Path(go).open() as fifo:
            fifo.read()
        while True:
            context.check()

    threading.Thread(target=ask, daemon=True).start()
