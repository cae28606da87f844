"""Several sessions at once: other connections, statements that run in threads, and seeing that one waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Thread
from time import monotonic
from typing import Any, ParamSpec, TypeVar

import psycopg
from psycopg.rows import scalar_row

from tests.harness import Protocol

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def elsewhere(dsn: str, schema: str = "shiftwork") -> Iterator[Protocol]:
    """The verbs over another connection."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        yield Protocol(connection, schema)


def in_thread(call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
    """Begin a call that may have to wait for a lock; its answer comes later."""
    future: Future[R] = Future()

    def run() -> None:
        try:
            future.set_result(call(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future


def waiting_for_lock(watcher: psycopg.Connection[Any], waiting: psycopg.Connection[Any] | int) -> None:
    """Return as soon as a session waits for a lock that another one holds."""
    pid = waiting if isinstance(waiting, int) else waiting.info.backend_pid
    deadline = monotonic() + 30
    while monotonic() < deadline:
        with watcher.cursor(row_factory=scalar_row) as cursor:
            cursor.execute("select cardinality(pg_blocking_pids(%s)) > 0", (pid,))
            if cursor.fetchone():
                return
    raise AssertionError(f"session {pid} never waited for a lock")
