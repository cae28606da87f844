"""The embedded server: how long it takes to come, and to go."""

from __future__ import annotations

import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.measuring import PAIRS, Bench
from shiftwork import embedded

USER = """
import sys, pathlib
from shiftwork import embedded
server = embedded.start(pathlib.Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.read()
"""


def embedding(bench: Bench) -> None:
    """The embedded server, fsync on: started from nothing, started again, and gone after its last user was killed with -9."""
    cold: list[float] = []
    warm: list[float] = []
    end: list[float] = []
    for _ in range(PAIRS):
        with tempfile.TemporaryDirectory(prefix="shiftwork-bench-") as folder:
            Path(folder).chmod(0o755)
            data = Path(folder) / "data"
            for taken in (cold, warm):
                began = time.perf_counter()
                with embedded.start(data):
                    taken.append(time.perf_counter() - began)
                embedded.stop(data)
            with subprocess.Popen(
                [sys.executable, "-c", USER, str(data)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            ) as user:
                assert user.stdout
                user.stdout.readline()
                server = embedded.status(data).server
                assert server
                handle = os.pidfd_open(server)
                began = time.perf_counter()
                user.kill()
                select.select([handle], [], [])  # until postgres has ended
                end.append(time.perf_counter() - began)
                os.close(handle)
            embedded.stop(data)
    bench.at_most("from nothing to taking connections", 3, statistics.median(cold), "s")
    bench.at_most("started again", 0.3, statistics.median(warm), "s")
    bench.at_most("gone after its last user was killed", 2, statistics.median(end), "s")
