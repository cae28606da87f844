"""Workers that come to harm at a certain point: one process for each point and harm, forked from one that has imported everything.

    python -m tests.points      reads what to do as JSON from standard input, and writes how each ended

A point is one at which the worker itself says that it is there (`claimed`, `began` …), or the moment before a statement is sent
(`asking take`) or after it was answered (`answered take`). The harm is done once, when the point is first reached.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import psycopg

from shiftwork import logs
from shiftwork.database import cut
from shiftwork.worker.worker import Worker
from tests.crew import app

HARMS = ("die", "raise", "sleep", "drop")
LEASE = 1.0
AT_ONCE = 12
WHILE = 30.0
"""Seconds in which a worker comes to its point; beside other tests it may lose its lease a few times before."""

PATIENCE = 2 * WHILE
"""Seconds after which a worker that goes on is taken for one that hangs."""

ENDED, HURT = 0, 10
"""Exit codes: it never came to its point; it did, and ended by itself."""

SAID = ("claiming", "claimed", "began", "ended", "settling", "settled", "declared", "asleep", "stopping")
VERBS = (
    *(
        "declare_tasks",
        "register_worker",
        "take",
        "start",
        "fence",
        "conclude",
        "settle",
        "report",
        "sleep",
        "heartbeat",
    ),
    *("release", "leave"),
)
POINTS = (*SAID, *(f"{moment} {verb}" for verb in VERBS for moment in ("asking", "answered")))
LAST = ("stopping", "asking leave", "answered leave")
VERB = re.compile(rb'"shiftwork"\.(\w+)\(')


class Harm:
    """What is done to the worker of this process, and where."""

    def __init__(self, point: str, kind: str) -> None:
        self.point = point
        self.kind = kind
        self.done = False
        self.worker: Worker

    def reached(self, point: str) -> Awaitable[None] | None:
        """A point of the worker's own."""
        if point == "claimed" and self.point.endswith("release"):
            self.worker.stop("to give back what has not begun")
        if point == "asleep" and (self.done or self.point in LAST):
            self.worker.stop("there is nothing left to see")
        if self.comes(point) and self.kind == "drop":
            for line in (self.worker._line, self.worker._settling._line):
                if line._connection is not None:
                    cut(line._connection)
        return None

    def comes(self, point: str) -> bool:
        """Whether the harm is to be done now; three of four kinds are done right here."""
        if point != self.point or self.done:
            return False
        self.done = True
        match self.kind:
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "raise":
                raise RuntimeError(f"planted at {point}")
            case "sleep":
                time.sleep(LEASE * 1.7)
        return True

    def around(self, execute: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        """A cursor's execute, with points before and after."""

        async def executed(cursor: psycopg.AsyncCursor[Any], query: Any, *given: Any, **named: Any) -> Any:
            found = VERB.search(query) if isinstance(query, bytes) else None  # what handlers ask is not
            verb = found[1].decode() if found else ""
            if self.comes(f"asking {verb}") and self.kind == "drop":
                cut(cursor.connection)
            answer = await execute(cursor, query, *given, **named)
            if self.comes(f"answered {verb}") and self.kind == "drop":
                cut(cursor.connection)
                raise psycopg.OperationalError("planted: the answer was lost")
            return answer

        return executed


async def work(harm: Harm, queue: str) -> None:
    """Be a worker that ends where it is hurt, or when it is idle after that."""
    harm.worker = await app.worker(
        queues=queue,
        concurrency=1,
        prefetch=1,
        lease=timedelta(seconds=LEASE),
        poll=timedelta(seconds=1),
        reconnect=timedelta(milliseconds=100),
        reconnect_most=timedelta(milliseconds=500),
        grace=timedelta(seconds=1),
        max_time=timedelta(seconds=WHILE),
    )
    harm.worker._at = harm.reached
    psycopg.AsyncCursor.execute = harm.around(psycopg.AsyncCursor.execute)  # type: ignore[assignment, method-assign]
    await harm.worker.run()


def begin(point: str, kind: str, queue: str) -> int:
    """Fork; gives the process."""
    if pid := os.fork():
        return pid
    watchdog = threading.Timer(PATIENCE, os._exit, (1,))
    watchdog.daemon = True
    watchdog.start()
    harm = Harm(point, kind)
    try:
        asyncio.run(work(harm, queue))
    except BaseException as error:  # noqa: BLE001  -- a fork never gets out of here
        if "planted" not in str(error):
            traceback.print_exception(error)
            os._exit(2)
    os._exit(HURT if harm.done else ENDED)


def main() -> None:
    """All of them, a few at once."""
    logs.set_up("critical", "text")
    left: list[tuple[str, str, str]] = json.load(sys.stdin)
    running: dict[int, str] = {}
    codes: dict[str, int] = {}
    while left or running:
        while left and len(running) < AT_ONCE:
            point, kind, queue = left.pop()
            running[begin(point, kind, queue)] = queue
        pid, status = os.wait()
        codes[running.pop(pid)] = os.waitstatus_to_exitcode(status)
    print(json.dumps(codes))


if __name__ == "__main__":
    main()
