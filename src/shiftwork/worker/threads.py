"""Threads for plain functions.

They are daemons, since a function that never returns must not keep the process from ending; that is what the standard
library's pool cannot do. What they finish is handed to the event loop in bunches: waking it costs more than most calls.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from queue import SimpleQueue
from typing import Any

from shiftwork.worker.run import NotNow, Run, current

Call = tuple[Callable[[], Any], Run, "asyncio.Future[Any]"]


class NoThread(NotNow):
    """The machine has no thread left for a function, which therefore has not begun."""


class Impatient(ThreadPoolExecutor):
    """The threads that handlers use through `asyncio.to_thread`: the end of the event loop does not wait for them."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=True)


class Threads:
    """As many threads as there have been calls at once."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls: SimpleQueue[Call] = SimpleQueue()
        self._ended: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        self._idle = 0
        self._awake = False

    def run(self, function: Callable[[], Any], run: Run) -> asyncio.Future[Any]:
        """Call a function in a thread; its answer can be awaited."""
        if self._idle <= 0:
            try:
                threading.Thread(target=self._work, name="shiftwork-slot", daemon=True).start()
            except RuntimeError as error:  # before anybody could find the call
                raise NoThread(str(error)) from None
        else:
            self._idle -= 1
        future = self._loop.create_future()
        run.in_thread = True
        self._calls.put((function, run, future))
        return future

    def _work(self) -> None:
        while True:
            function, run, future = self._calls.get()
            context = copy_context()
            context.run(current.set, run)
            try:
                answer, error = context.run(function), None
            except BaseException as raised:  # noqa: BLE001  -- every ending is an answer
                answer, error = None, raised
            run.in_thread = False
            self._ended.append((future, answer, error))
            del function, run, future, answer, error, context
            if not self._awake:
                self._awake = True
                try:
                    self._loop.call_soon_threadsafe(self._deliver)
                except RuntimeError:  # the loop is closed, nobody waits any more
                    return

    def _deliver(self) -> None:
        self._awake = False
        while self._ended:
            future, answer, error = self._ended.popleft()
            self._idle += 1
            if future.cancelled():
                continue
            if error is None:
                future.set_result(answer)
            elif isinstance(
                error, StopIteration | GeneratorExit
            ):  # which mean something else to whoever awaits
                future.set_exception(RuntimeError(f"the function raised {error!r}"))
            else:
                future.set_exception(error)
