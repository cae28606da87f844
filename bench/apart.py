"""Processes for jobs, against the least that could be: two processes, a pipe to each and one back, and JSON."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import selectors
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import shiftwork
from bench.measuring import Bench, on_its_loop
from shiftwork.settings import Settings
from shiftwork.worker.processes import Processes, beginning, outcome_of
from shiftwork.worker.run import Run

SLOTS = 2
HEADER = struct.Struct(">I")
app = shiftwork.App(settings=Settings())


@app.task(executor="process")
def nothing(n: int) -> None:
    """Nothing, in a process of its own."""


@app.task(executor="process")
def millisecond(n: int) -> int:
    """A thousandth of a second of computing."""
    until = time.perf_counter() + 0.001
    while time.perf_counter() < until:
        n += 1
    return n


def processes(bench: Bench) -> None:
    """Jobs in processes of their own, two at once, without the database, against two bare pipes."""
    for task, jobs, what in (
        (nothing, 20_000, "no-op jobs"),
        (millisecond, 4_000, "jobs of a millisecond"),
    ):
        many = bench.count(jobs)
        with _bare() as bare:
            bench.pairs(
                f"process executor with {SLOTS} slots, {what}, against {SLOTS} bare pipes",
                0.7,
                lambda name=task.name, many=many: on_its_loop(_ours(name, many)),  # type: ignore[misc]
                lambda name=task.name, many=many, bare=bare: bare(name, many),  # type: ignore[misc]
                "jobs/s",
            )


async def _ours(name: str, many: int) -> float:
    """Jobs a second through the executor as attempts use it."""
    settings = Settings(process_jobs=None)
    begin = beginning(app, settings, app.tasks, tells=False)
    executor = Processes(settings, begin, app.tasks, None, lambda _: None)  # type: ignore[arg-type]
    await executor.open()

    async def slot(ids: Iterator[int]) -> None:
        for one in ids:
            run = Run(
                one, name, "default", 0, '{"n": 1}', 1, 0, 0, 5, 0, 0, None, None, None, task=app.tasks[name]
            )
            ended = await executor.run(run, None, lambda: None)
            outcome_of(run, ended)  # type: ignore[arg-type]

    async def rate(jobs: int) -> float:
        ids = iter(range(jobs))
        began = time.perf_counter()
        await asyncio.gather(*(slot(ids) for _ in range(SLOTS)))
        return jobs / (time.perf_counter() - began)

    await rate(max(many // 10, SLOTS))
    found = await rate(many)
    await executor.close()
    return found


@contextlib.contextmanager
def _bare() -> Iterator[Callable[[str, int], float]]:
    """Two processes with a loop that reads, calls and answers, and nothing else."""
    ends = []
    for _ in range(SLOTS):
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        command = [sys.executable, "-m", "bench.apart", str(theirs_in), str(theirs_out)]
        process = subprocess.Popen(command, pass_fds=(theirs_in, theirs_out))
        os.close(theirs_in)
        os.close(theirs_out)
        ends.append((process, ours_in, ours_out))

    def rate(name: str, many: int) -> float:
        left = iter(range(many))
        done = 0
        with selectors.DefaultSelector() as ready:
            for _, ours_in, ours_out in ends:
                ready.register(ours_in, selectors.EVENT_READ, ours_out)
            began = time.perf_counter()
            for (_, _, ours_out), one in zip(ends, left, strict=False):
                _write(ours_out, {"id": one, "task": name, "payload": {"n": 1}})
            # To the last answer: one that is left would be on its way beside those of the next time.
            while done < many:
                for key, _ in ready.select():
                    _read(key.fd)
                    done += 1
                    for one in left:
                        _write(key.data, {"id": one, "task": name, "payload": {"n": 1}})
                        break
            return done / (time.perf_counter() - began)

    try:
        rate("nothing", 1_000)
        yield rate
    finally:
        for process, ours_in, ours_out in ends:
            os.close(ours_out)
            os.close(ours_in)
            process.wait()


def _serve(source: int, sink: int) -> None:
    functions = {name: task.function for name, task in app.tasks.items()}
    while (message := _read(source)) is not None:
        result = functions[message["task"]](**message["payload"])
        _write(sink, {"id": message["id"], "result": result})


def _read(source: int) -> Any:
    header = os.read(source, HEADER.size)
    return json.loads(os.read(source, *HEADER.unpack(header))) if header else None


def _write(sink: int, message: object) -> None:
    body = json.dumps(message).encode()
    os.write(sink, HEADER.pack(len(body)) + body)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]))
