"""Measure the protocol against bare tables and against itself: `make bench`, or `make bench ARGS="--only claim --quick"`.

Every figure is a ratio of two rates within one run, the median of five pairs that alternate (A B, B A, A B, …), since
machines are shared and noisy. The floor is `floor.sql`, which is frozen. A goal stands beside each ratio; missing one
is exit code 1.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import psycopg

from bench import apart, cancelling, embedding, protocol, table, workers
from bench.measuring import PAIRS, Bench
from shiftwork import embedded
from shiftwork.migrate import migrate
from shiftwork.program import fastest_loop

MEASURES: dict[str, Callable[[Bench], None]] = {
    "claim": protocol.claim,
    "enqueue": protocol.enqueue,
    "registry": protocol.registry,
    "bulk": protocol.bulk,
    "crowd": protocol.crowd,
    "snapshot": protocol.snapshot,
    "history": protocol.history,
    "drain": workers.drain,
    "processes": workers.processes,
    "threads": workers.threads,
    "apart": apart.processes,
    "transactions": workers.transactions,
    "batches": workers.batches,
    "sql": workers.routines,
    "enqueuers": workers.enqueuers,
    "pickup": workers.pickup,
    "worker-crowd": workers.crowd,
    "worker-snapshot": workers.snapshot,
    "idle": workers.idle,
    "metrics": workers.metrics,
    "memory": workers.memory,
    "table": table.drain,
    "cancel": cancelling.cancel,
    "embedded": embedding.embedding,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--only", choices=MEASURES, action="append", help="measure just this; may be repeated"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a tenth of everything: to see that it runs, not to believe"
    )
    parser.add_argument(
        "--fsync", action="store_true", help="leave fsync on; it hides what the CPU does behind the disk"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that nothing is left running
    with tempfile.TemporaryDirectory(prefix="shiftwork-bench-") as folder:
        Path(folder).chmod(0o755)
        tuning = {
            "shared_buffers": "1GB",
            "max_wal_size": "8GB",
            "max_connections": "100",
            "autovacuum": "off",
        }
        with embedded.start(Path(folder) / "data", fsync=options.fsync, options=tuning) as server:
            bench = Bench(server.url, find_pgbench(server), options.quick)
            with bench.connect() as connection:
                migrate(connection)
            print(
                f"PostgreSQL {server.version}, Python {platform.python_version()}, psycopg {psycopg.__version__}, "
                f"{'uvloop' if fastest_loop() else 'asyncio'}, "
                f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, fsync {'on' if options.fsync else 'off'}, "
                f"{', '.join(f'{name}={value}' for name, value in tuning.items())}\n"
                f"each ratio is the median of {PAIRS} alternating pairs, with the least and the greatest beside it",
                flush=True,
            )
            for name in options.only or MEASURES:
                print(f"{name}: {(MEASURES[name].__doc__ or '').strip()}", flush=True)
                MEASURES[name](bench)
        embedded.stop(Path(folder) / "data")
    for name in bench.missed:
        print(f"missed: {name}")
    return 1 if bench.missed and not options.quick else 0


def find_pgbench(server: embedded.Server) -> Path:
    """The load generator that comes with PostgreSQL."""
    return server.bin_dir / "pgbench"


if __name__ == "__main__":
    sys.exit(main())
