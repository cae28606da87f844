"""A store whose handler runs in a process of its own, and which may die there."""

from __future__ import annotations

import os
import signal
from typing import Any

import psycopg

import shiftwork

store = shiftwork.TableStore("example_jobs", retry=shiftwork.Retry.never(), max_resets=1)


@store.handler(executor="process")
def handle(record: dict[str, Any], context: shiftwork.Context) -> None:
    """Do as the row says."""
    match record["repository_id"]:
        case 1:
            context.log.info("in a process of its own")
        case 2:
            os.kill(os.getpid(), signal.SIGKILL)
        case 3:
            with psycopg.connect(os.environ["DATABASE_URL"]) as connection:
                context.fence(connection)
                connection.execute("insert into effects values (%s)", (record["id"],))
                context.finish(connection)
