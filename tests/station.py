"""A server of a test's own, to be restarted, crashed and kept away; it comes back under the same address."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

import psycopg

from shiftwork import embedded
from shiftwork.migrate import migrate

WAYS = {"fast": signal.SIGINT, "immediate": signal.SIGQUIT, "kill": signal.SIGKILL}
"""How a server may be ended: its sessions are, or everything at once, or it is not asked at all."""


class Station:
    """An embedded server, with the protocol installed."""

    def __init__(self, *, fsync: bool = False, options: Mapping[str, str] | None = None) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="shiftwork-station-"))
        self._folder.chmod(0o755)
        self.data = self._folder / "data"
        self._fsync = fsync
        # Shared memory with the data, where nothing of it stays behind when the server is killed.
        self._options = {
            "max_connections": "300",
            "dynamic_shared_memory_type": "mmap",
            **(options or {}),
        }
        self._server: embedded.Server | None = None

    def __enter__(self) -> Self:
        self.start()
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            migrate(connection)
        return self

    def __exit__(self, *_: object) -> None:
        self.end("fast")
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def dsn(self) -> str:
        """Where it is, or was."""
        assert self._server is not None
        return self._server.url

    def start(self) -> None:
        """Bring it up, again."""
        former, self._server = (
            self._server,
            embedded.start(self.data, fsync=self._fsync, options=self._options),
        )
        if former is not None:
            former.close()

    def end(self, way: str) -> None:
        """End it; who comes next finds nobody."""
        pid = int((self.data / "cluster" / "postmaster.pid").read_text().split()[0])
        os.kill(pid, WAYS[way])
        with suppress(ProcessLookupError):
            while True:
                os.kill(pid, 0)
                time.sleep(0.01)

    def restart(self, way: str) -> None:
        """End it and bring it up again."""
        self.end(way)
        self.start()
