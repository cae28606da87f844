"""Signals: the first asks the worker to stop, the second to stop now, the third ends the process."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from shiftwork.worker.worker import Worker

HEEDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
AT_ONCE = 2.0
"""Seconds after which a worker that was told to stop now is gone, whatever its handlers do."""


@contextmanager
def heeding(worker: Worker) -> Iterator[None]:
    """While the block lasts, TERM, INT and HUP stop this worker; only the main thread can do that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    heard = 0
    last: threading.Timer | None = None

    def heed(number: int, _: object) -> None:
        nonlocal heard, last
        heard += 1
        name = signal.Signals(number).name
        if heard == 1:
            loop.call_soon_threadsafe(worker.stop, name)
        elif heard == 2:
            # A handler that blocks the event loop would keep it from hearing this.
            last = threading.Timer(AT_ONCE, os._exit, (1,))
            last.daemon = True
            last.start()
            loop.call_soon_threadsafe(lambda: worker.stop(name, now=True))
        else:
            os._exit(1)

    former = {number: signal.signal(number, heed) for number in HEEDED}
    try:
        yield
    finally:
        if last is not None:
            last.cancel()
        for number, handler in former.items():
            signal.signal(number, handler)
