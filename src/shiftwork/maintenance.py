"""Tasks that look after the database, for who wants to enqueue or schedule what workers else do by themselves."""

from __future__ import annotations

from typing import Any

from shiftwork import operations
from shiftwork.app import App
from shiftwork.context import Context
from shiftwork.task import AsyncTask

TURNS = 1000
"""How often one job goes on at once; what is then left waits for the next one."""


def purging(app: App, name: str = "purge", *, queue: str | None = None) -> AsyncTask[..., dict[str, int]]:
    """Declare a task that forgets finished jobs which need not be kept any longer, as `shiftwork purge` does.

        purge = purging(app, queue="maintenance")
        purge.enqueue()  # or purge.enqueue(archive=True)

    It takes any arguments, and heeds only `archive`: a schedule that was written carelessly purges all the same.
    """

    async def purge(context: Context, archive: object = False, **_: object) -> dict[str, int]:
        client = await app.aclient()
        partitions = jobs = 0
        for _turn in range(TURNS):
            plan = operations.purge(client.store, archive=archive is True)
            days, gone, more = await client.aperform(plan)
            partitions, jobs = partitions + days, jobs + gone
            if not more or context.cancelled:
                break
        context.log.info("%d jobs forgotten; %d days of history dropped", jobs, partitions)
        return {"partitions": partitions, "jobs": jobs}

    declared: Any = app.task(name=name, queue=queue)(purge)
    task: AsyncTask[..., dict[str, int]] = declared
    return task
