"""Tasks that run in processes of their own, and do there what nobody would do in a worker."""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import signal
import subprocess
import threading
import time
from contextvars import ContextVar
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg

import shiftwork
from shiftwork import App, Context, Retry
from shiftwork.settings import Settings

app = App(settings=Settings())  # the test says which database
apart: Any = {"executor": "process"}
once: Any = {"executor": "process", "max_resets": 0, "retry": Retry(max_attempts=1)}
kept: list[bytes] = []
layer: ContextVar[str] = ContextVar("layer", default="none")


def _here(place: str) -> None:
    Path(place).write_text(str(os.getpid()))


@app.middleware
async def layered(context: Context, call: Any) -> Any:
    layer.set(f"around {context.job.task}")
    return await call()


@app.task
async def greet(name: str) -> str:
    return f"hello, {name}, from {os.getpid()}"


@app.task(**apart)
def pid() -> int:
    return os.getpid()


@app.task(**apart)
async def pid_of_async() -> int:
    await asyncio.sleep(0)
    return os.getpid()


@app.task(**apart)
def layer_seen() -> str:
    return layer.get()


# What takes a process down.


@app.task(**apart)
def segfault() -> None:
    ctypes.string_at(0)


@app.task(**once)
def leave(status: int) -> None:
    os._exit(status)


@app.task(**once)
def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(**once)
def overflow() -> None:
    """Call C code that calls itself until its stack is full, which Python cannot refuse."""
    ctypes.CDLL(None).regcomp(ctypes.create_string_buffer(4096), b"(" * 1_000_000, 1)


@app.task(**once)
def fork_many(place: str) -> None:
    """Have many children that would stay for ever, and crash."""
    for _ in range(30):
        if os.fork() == 0:
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            signal.pause()
    Path(place).write_text(Path(f"/proc/self/task/{os.getpid()}/children").read_text())
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(**once)
def exit_politely() -> None:
    raise SystemExit(3)


@app.task(**once)
def hang_up() -> None:
    """Close what is not ours, as daemons do, and stay."""
    os.closerange(3, 100)
    threading.Event().wait()


@app.task(**once)
def hog(mib: int, place: str) -> None:
    """Take memory, and stay."""
    kept.append(b"x" * (mib << 20))
    _here(place)
    threading.Event().wait()


@app.task(**once)
def leak(mib: int) -> int:
    """Keep memory that nobody needs."""
    kept.append(b"x" * (mib << 20))
    return os.getpid()


# What does not end.


@app.task(**once)
def stay(place: str) -> None:
    """Say that it is there, and never end; nothing that can be blocked is heard."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    _here(place)
    while True:
        pass


@app.task(timeout=timedelta(seconds=0.2), **once)
def stay_too_long() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while True:
        pass


@app.task(**apart)
def stay_unless_told(context: Context, place: str) -> None:
    _here(place)
    while True:
        context.check()


@app.task(**apart)
async def wait_unless_told(context: Context, place: str) -> None:
    _here(place)
    try:
        await asyncio.Event().wait()
    finally:
        Path(f"{place}.why").write_text(f"{context.cancelled} {os.getpid()}")


@app.task(**apart)
def wait_once(context: Context, place: str) -> int:
    """Wait in the first attempt, and return in the others."""
    if context.attempt == 1:
        _here(place)
        threading.Event().wait()
    return context.attempt


@app.task(**apart)
def start_another(place: str) -> None:
    """Start a program, which would go on by itself."""
    other = subprocess.Popen(["sleep", "600"])
    Path(place).write_text(f"{os.getpid()} {other.pid}")
    other.wait()


@app.task(**apart)
def hold_the_interpreter(seconds: float) -> None:
    """Call C code that lets no other thread of this process run."""
    ctypes.PyDLL(None).usleep(int(seconds * 1_000_000))


# What can be seen there.


@app.task(**apart)
def look_around() -> dict[str, Any]:
    status = Path("/proc/self/status").read_text()
    return {
        "sockets": [str(one.readlink()) for one in Path("/proc/self/fd").iterdir() if one.exists()],
        "variables": sorted(os.environ),
        "core": resource.getrlimit(resource.RLIMIT_CORE),
        "gains": "NoNewPrivs:\t0" in status,
        "first to go": int(Path("/proc/self/oom_score_adj").read_text()),
        "leads": os.getpgid(0) == os.getpid(),
    }


@app.task(**apart)
def enqueue_there(name: str) -> int:
    return greet.enqueue(name).id


@app.task(**apart)
def print_it(words: str) -> None:
    print(words)


# What is said there.


@app.task(timeout=timedelta(minutes=5), **apart)
def speak(context: Context, name: str) -> dict[str, Any]:
    context.progress(0.5, "half")
    context.log.info("read %d lines", 3)
    context.enqueue(greet.job(name), pid.using(delay=timedelta(hours=1)).job())
    assert context.deadline is not None
    assert context.job.started_at is not None
    return {
        "job": context.job.id,
        "attempt": context.attempt,
        "tags": list(context.job.tags),
        "cancelled": context.cancelled,
        "time": (context.deadline - context.job.started_at).total_seconds(),
    }


@app.task(**apart)
async def move_boxes(context: Context, boxes: int) -> None:
    async with await psycopg.AsyncConnection.connect(app.settings.dsn or "") as connection:
        await context.fence(connection)
        await connection.execute("create table moves (boxes int)")
        await connection.execute("insert into moves values (%s)", (boxes,))


@app.task(**once)
def finish_it(context: Context, commit: bool) -> int:
    with psycopg.connect(app.settings.dsn or "") as connection:
        context.finish(connection, result=5)
        if not commit:
            connection.rollback()
    return 7


@app.task(**once)
def finish_and_crash(context: Context) -> int:
    with psycopg.connect(app.settings.dsn or "") as connection:
        context.finish(connection, result=5)
    os._exit(1)


@app.task(**once)
def finish_and_linger(context: Context, there: str, go: str) -> int:
    """End the job, and go on until somebody says so."""
    with psycopg.connect(app.settings.dsn or "") as connection:
        context.finish(connection, result=5)
    _here(there)
    while not Path(go).exists():
        time.sleep(0.01)
    return 5


@app.task(**once)
def finish_in_a_session_of_the_worker(context: Context) -> None:
    with context.finishing():
        pass


# How it ends there.


class RefusedError(Exception):
    code = "REFUSED"


def _is_mild(error: BaseException) -> bool:
    return "mild" in str(error)


@app.task(retry=Retry(on=(KeyError, "REFUSED"), delays=timedelta(hours=1)), **apart)
def fail_by_list(how: str) -> None:
    raise {"class": KeyError, "code": RefusedError}.get(how, ValueError)(how)


@app.task(retry=Retry(on=_is_mild, delays=timedelta(hours=1)), codes={ValueError: "BAD_VALUE"}, **apart)
def fail_by_function(how: str) -> None:
    raise ValueError(how)


@app.task(**apart)
def decide_itself(how: str) -> None:
    match how:
        case "poison":
            raise shiftwork.Poison("never")
        case "snooze":
            raise shiftwork.Snooze(timedelta(hours=1))
        case "later":
            raise shiftwork.RetryLater(timedelta(hours=1), "busy")
        case "cancel":
            raise shiftwork.Cancel("not needed")


@app.task(**apart)
def say_a_number() -> int:
    return "no number"  # type: ignore[return-value]


@app.task(**apart)
def much(text: str, times: int) -> str:
    return text * times


@app.task(**apart)
def spawn_two(context: Context) -> int:
    """Have two children."""
    context.spawn(pid.job(), pid.job())
    return os.getpid()


@app.task(**apart)
def fork_and_return() -> int:
    """Return twice, in two processes."""
    os.fork()
    time.sleep(0)
    return os.getpid()


@app.task(**apart)
def fork_and_linger(place: str) -> int:
    """Return at once, and once more in a copy, when that is let."""
    if (copy := os.fork()) == 0:
        with Path(place).open() as fifo:
            fifo.read()
    return copy


@app.task(retry=Retry(at_once=2, delays=timedelta(hours=1)), **apart)
def collide(context: Context, place: str) -> int:
    """Be in another's way, the first time."""
    met = Path(place)
    if not met.exists():
        met.touch()
        context.enqueue(greet.job("nobody"))
        raise psycopg.errors.DeadlockDetected("in the way")
    return context.attempt
