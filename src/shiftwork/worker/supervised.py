"""The line between a worker process and the supervisor that started it.

It is a pair of connected sockets, one line of JSON for each message, and it ends with either of them. So a supervisor that was
killed, however, is noticed at once by all it started: they stop as if they had been told to, and nobody is left behind.

    from the worker:      {"ready": 17, "grace": 30.0, "once": false}    its id; how long it may take to stop; whether it ends by itself
                          {"waiting": true}                              it stands by
                          {"alive": true}                                the watchdog was answered
                          {"buried": 16}                                 nothing waits for the lease of that worker any more
                          {"ended": {"mail": {"completed": 3}}}          what it has done
    from the supervisor:  {"stop": 1, "why": "SIGTERM"}                  2 is now, 3 is on the spot
                          {"dead": 16}                                   that worker is no more: its jobs need not wait for its lease

Orders to stop have a degree instead of being counted. A terminal, or systemd, may signal every process of a group itself; whoever was
signalled and told has still been told once.

Here it is heard on a thread, from before the app is imported: neither a long import nor a blocked event loop keeps an order
from being followed.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

PROCESS = "SHIFTWORK_PROCESS"
"""Which of its supervisor's processes this is, from 0."""

LINE = "SHIFTWORK_LINE"
"""The file descriptor of the line."""

REHEARSAL = "SHIFTWORK_REHEARSAL"
"""Whether the process is only to import its app, and to end."""

Order = Callable[[int, str], None]


class Supervised:
    """The worker's end of the line."""

    def __init__(self, line: socket.socket) -> None:
        line.set_inheritable(False)  # what handlers start has no business here
        self._line = line
        self._order: Order | None = None
        self._asked: tuple[int, str] = (0, "")
        self._dead: Callable[[int], None] | None = None
        self._guard = threading.Lock()
        threading.Thread(target=self._hear, name="shiftwork-supervised", daemon=True).start()

    def tell(self, **facts: Any) -> None:  # noqa: ANN401
        """Say something, if there is still somebody to hear it."""
        with suppress(OSError):
            self._line.send(json.dumps(facts).encode() + b"\n", socket.MSG_DONTWAIT)  # never waits for it

    def heed(self, order: Order, dead: Callable[[int], None]) -> None:
        """Let orders be followed, and deaths be heard of, by these; what was asked before is told them now."""
        with self._guard:
            self._order, self._dead = order, dead
            asked, why = self._asked
        if asked:
            order(asked, why)

    def _hear(self) -> None:
        with suppress(OSError), self._line.makefile("rb") as lines:
            for line in lines:
                match json.loads(line):
                    case {"stop": int(degree), "why": str(why)}:
                        self._follow(degree, why)
                    case {"dead": int(worker)} if self._dead is not None:
                        self._dead(worker)
        self._follow(1, "its supervisor is gone")

    def _follow(self, degree: int, why: str) -> None:
        with self._guard:
            order, self._asked = self._order, max(self._asked, (degree, why))
        if order is not None:
            order(degree, why)
        else:
            os.kill(os.getpid(), signal.SIGTERM)  # nothing has begun yet


_joined: list[Supervised] = []


def join() -> Supervised | None:
    """The line of this process to its supervisor; None if it has none."""
    if not _joined and (descriptor := os.environ.pop(LINE, "")).isdecimal():
        with suppress(OSError):  # a stranger's variable
            _joined.append(Supervised(socket.socket(fileno=int(descriptor))))
    return _joined[0] if _joined else None


def process() -> int | None:
    """Which of its supervisor's processes this is."""
    number = os.environ.get(PROCESS, "")
    return int(number) if number.isdecimal() else None
