"""PgBouncer before the server, lending a session for one transaction at a time: the strictest kind of pooler.

`SHIFTWORK_TEST_POOLER=poll` or `=listen` puts it before all workers of the run: with polling alone, or with a second address to
listen at (`make test-pooler` does both). Tests themselves look at the database directly.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import dict_row

from shiftwork.settings import format_duration

MODE = os.environ.get("SHIFTWORK_TEST_POOLER", "")
PROGRAM = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
MISSING = "pgbouncer is not installed (Debian: apt install pgbouncer)"
PORT = 6432
PLACE = "SHIFTWORK_TEST_POOLER_AT"
"""Where the pooler of this run is, for the processes that run its tests."""

WIRE = "shiftwork-wire-"
PAST = 5433
"""The port of a wire that leads past the pooler."""

SOON = timedelta(seconds=6)

INI = """
[databases]
* = host={host} port={port} user=postgres
[pgbouncer]
unix_socket_dir = {folder}
unix_socket_mode = 0777
listen_port = {listen}
auth_type = any
admin_users = postgres
pool_mode = transaction
default_pool_size = {size}
max_client_conn = 1000
logfile = {folder}/log
pidfile = {folder}/pid
{more}
"""


class Pooler:
    """A pooler for as long as it is needed."""

    def __init__(self, server: str, *, size: int = 20, more: str = "") -> None:
        assert PROGRAM, MISSING
        self.folder = Path(tempfile.mkdtemp(prefix="shiftwork-pool-"))
        given = conninfo_to_dict(server)
        host = str(given["host"])
        self._owner = Path(host).stat().st_uid if host.startswith("/") else os.getuid()
        self._ini = self.folder / "ini"
        self._ini.write_text(
            INI.format(
                host=host, port=given.get("port", 5432), folder=self.folder, listen=PORT, size=size, more=more
            )
        )
        self.folder.chmod(0o755)
        if os.getuid() == 0:  # it refuses to be root, and has to be let in by the server
            os.chown(self.folder, self._owner, -1)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self) -> None:
        """Bring it up, again."""
        assert PROGRAM
        self._process = process = subprocess.Popen(
            [PROGRAM, "-q", str(self._ini)],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            user=self._owner if os.getuid() == 0 else None,
        )
        while not (self.folder / f".s.PGSQL.{PORT}").exists():
            assert process.poll() is None, (self.folder / "log").read_text()
            time.sleep(0.01)

    def stop(self) -> None:
        """End it; who is connected loses his line."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def pooled(self, dsn: str) -> str:
        """The same database, by way of the pooler."""
        return make_conninfo(dsn, host=str(self.folder), port=PORT)

    def tell(self, command: str) -> None:
        """Give an order at its console."""
        with psycopg.connect(self.pooled("dbname=pgbouncer user=postgres"), autocommit=True) as console:
            console.execute(command.encode(), prepare=False)


def pooled(dsn: str) -> str:
    """The same database, by way of the pooler of this run if it has one; it leads to the server of the run only."""
    if not is_pooled(dsn):
        return dsn
    return make_conninfo(dsn, host=os.environ[PLACE], port=PORT)


def is_pooled(dsn: str) -> bool:
    """Whether workers find this database through a pooler: it is on the server of the run, and no wire leads there."""
    if PLACE not in os.environ:
        return False
    return conninfo_to_dict(dsn).get("host") == conninfo_to_dict(os.environ["SHIFTWORK_TEST_SERVER"]).get(
        "host"
    )


def settings(dsn: str, lease: timedelta | None = None, listen_dsn: str | None = None) -> dict[str, Any]:
    """How a worker finds its database in this run, and what it learns there and when.

    Without notifications it hears with a heartbeat that a job is to be cancelled, so none is far away. A wire of a test's own
    leads to the pooler, and has a second end that leads past it. Who was given an address to listen at keeps it.
    """
    if PLACE not in os.environ or not (is_pooled(dsn) or WIRE in dsn):
        return {}
    if listen_dsn is None and MODE == "listen":
        listen_dsn = make_conninfo(dsn, port=PAST) if WIRE in dsn else dsn
    if listen_dsn is not None:
        return {"dsn": pooled(dsn), "listen_dsn": listen_dsn}
    soon = {} if lease is None or lease <= SOON else {"lease": SOON}
    return {"dsn": pooled(dsn), "notify": False, "poll": timedelta(milliseconds=100), **soon}


def connections(dsn: str, name: str) -> int:
    """How many connections somebody of this name has to this database, by way of the pooler of this run and past it."""
    with psycopg.connect(dsn) as connection:
        mine = "select pid from pg_stat_activity where datname = current_database() and application_name = %s"
        past = {pid for (pid,) in connection.execute(mine, (name,))}
        database = connection.info.dbname
    if not is_pooled(dsn):
        return len(past)
    with psycopg.Connection[dict[str, Any]].connect(
        make_conninfo("", host=os.environ[PLACE], port=PORT, dbname="pgbouncer", user="postgres"),
        autocommit=True,
        row_factory=dict_row,
    ) as console:
        clients = console.execute("show clients", prepare=False).fetchall()
        lent = {row["remote_pid"] for row in console.execute("show servers", prepare=False)}
    mine_there = [row for row in clients if (row["database"], row["application_name"]) == (database, name)]
    return len(mine_there) + len(past - lent)


def environment(dsn: str) -> dict[str, str]:
    """The same for a worker in a process of its own."""
    return {
        f"SHIFTWORK_{name.upper()}": format_duration(value) if isinstance(value, timedelta) else str(value)
        for name, value in settings(dsn).items()
    }
