"""Signals: the first asks the worker to stop, the second to stop now, the third ends the process."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from shiftwork.worker.worker import Worker

HEEDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
AT_ONCE = 2.0
"""Seconds after which a worker that was told to stop now is gone, whatever its handlers do."""


class Early:
    """Heeds signals from now until a worker does: who is told to stop before it has begun has stopped cleanly."""

    def __init__(self) -> None:
        self.heard: int | None = None
        for number in HEEDED:
            signal.signal(number, self)

    def __call__(self, number: int, _: object) -> NoReturn:
        """Leave; where that is not heeded, as in a destructor, the worker will find that we were told."""
        self.heard = number
        sys.exit(0)


@contextmanager
def heeding(worker: Worker) -> Iterator[Callable[[int, str], None]]:
    """While the block lasts, TERM, INT and HUP stop this worker; only the main thread can do that.

    Gives a function that orders the same: 1 to stop, 2 to stop now, 3 to end the process; to order less than was ordered
    before changes nothing. What an `Early` has heard counts; it does not get the signals back, for then the process ends.
    """
    loop = asyncio.get_running_loop()
    heard = ordered = 0
    last: threading.Timer | None = None

    def order(degree: int, why: str) -> None:
        nonlocal ordered, last
        if degree <= ordered:
            return
        ordered = degree
        if degree >= 3:
            os._exit(1)
        if degree == 2:
            # A handler that blocks the event loop would keep it from hearing this.
            last = threading.Timer(AT_ONCE, os._exit, (1,))
            last.daemon = True
            last.start()
        with suppress(RuntimeError):  # the loop is closed: it has ended
            loop.call_soon_threadsafe(lambda: worker.stop(why, now=degree == 2))

    def heed(number: int, _: object) -> None:
        nonlocal heard
        heard += 1
        order(heard, signal.Signals(number).name)

    is_main = threading.current_thread() is threading.main_thread()
    former = {number: signal.signal(number, heed) for number in HEEDED} if is_main else {}
    early = next((one for one in former.values() if isinstance(one, Early)), None)
    if early is not None and early.heard is not None:
        heed(early.heard, None)
    try:
        yield order
    finally:
        if last is not None:
            last.cancel()
        if early is None:
            for number, handler in former.items():
                signal.signal(number, handler)
