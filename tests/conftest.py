"""One PostgreSQL for the whole run, a database for each test, and one room for everything temporary.

Without DATABASE_URL the run starts an embedded server of its own, with fsync off, that ends with it. With it, that server
is used, and only databases that the run made itself are touched. The room is in memory where there is enough of it: a
database is a thousand files, and copying them is most of what many a test costs. TMPDIR puts it elsewhere.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo
from psycopg.rows import dict_row

from shiftwork import embedded
from shiftwork.migrate import migrate
from tests import pooler
from tests.harness import Protocol

SERVER = "SHIFTWORK_TEST_SERVER"
ROOM = "shiftwork-test-"
ENOUGH = 4 << 30
"""Bytes of memory that must be left over before temporary files go there."""

_rooms: list[tuple[Path, int]] = []
_started: list[tuple[embedded.Server, Path]] = []
_pooling: list[pooler.Pooler] = []


def pytest_configure(config: pytest.Config) -> None:
    """Start the server once, before the processes that run the tests; they find it in their environment."""
    if hasattr(config, "workerinput") or config.option.collectonly or SERVER in os.environ:
        return
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell has it for what runs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _rooms.append(room := take_room())
    os.environ["TMPDIR"] = tempfile.tempdir = str(room[0])
    if url := os.environ.get("DATABASE_URL"):
        os.environ[SERVER] = url
        return
    folder = Path(tempfile.mkdtemp(prefix="server-"))
    folder.chmod(0o755)
    server = embedded.start(
        folder / "data",
        fsync=False,
        options={
            "max_connections": "300",
            "max_prepared_transactions": "10",
            "shared_buffers": "256MB",
            "max_wal_size": "2GB",
            "autovacuum": "off",
            "dynamic_shared_memory_type": "mmap",  # in the room, and gone with it
        },
    )
    _started.append((server, folder))
    os.environ[SERVER] = server.url
    if pooler.MODE and pooler.PROGRAM:
        _pooling.append(pooler.Pooler(server.url).__enter__())
        os.environ[pooler.PLACE] = str(_pooling[0].folder)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Two tests at once for each core: half of them wait for a lease, a process or the disk."""
    return min(2 * len(os.sched_getaffinity(0)), 16) if hasattr(os, "sched_getaffinity") else 4


LENT = "a session of the server is lent for one transaction: it looks for the same one, or at what was left in it"
KNOWN = "the pooler has an account of its own at the server, whoever calls it"
ALONE = "a singleton without an address that leads past the pooler is refused, which test_pooler.py shows"
DEAF = "without notifications nobody is told, and nobody has to say that it sleeps"

POOLED = {
    "test_sessions_are_used_again_and_one_that_was_lost_meanwhile_troubles_nobody": LENT,
    "test_any_of_its_sessions_may_be_ended[claiming]": LENT,
    "test_any_of_its_sessions_may_be_ended[settling]": LENT,
    "test_any_of_its_sessions_may_be_ended[idle session]": LENT,
    "test_one_that_commits_tells_how_far_it_is_and_leaves_nothing_of_its_session_to_others": LENT,
    "test_a_server_that_says_no_is_asked_again_until_it_says_yes": KNOWN,
    "test_a_worker_begins_when_it_is_let": KNOWN,
}
"""Why tests cannot be made through a pooler."""

POLLED = {
    "test_an_insert_that_is_rolled_back_wakes_nobody_and_leaves_nothing": DEAF,
    "test_under_steady_work_nobody_notifies_and_who_sleeps_all_the_same_hears_of_it": DEAF,
    "test_a_line_that_is_half_open_is_noticed_and_replaced[.sleep(]": DEAF,
    "test_a_listener_on_a_half_open_line_is_deaf_and_calls_again": DEAF,
    "test_a_listener_that_is_cut_off_listens_again_and_looks_for_what_it_missed": DEAF,
    "test_any_of_its_sessions_may_be_ended[lease]": LENT,
    "test_any_of_its_sessions_may_be_ended[listener]": DEAF,
    "test_without_notifications_work_is_found_by_polling[True]": DEAF,
    "test_a_queue_of_notifications_that_fills_up_is_a_warning": DEAF,
    "test_who_stands_by_says_so_instead_of_being_ready": ALONE,
}
"""Why tests cannot be made through a pooler and by polling alone."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Through a pooler, the sessions of the server are not the worker's, and without an address to listen at nobody hears."""
    if not pooler.MODE:
        return
    reasons = POOLED | (POLLED if pooler.MODE == "poll" else {})
    for item in items:
        why = reasons.get(item.name) or reasons.get(getattr(item, "originalname", ""))
        if why or not pooler.PROGRAM:
            item.add_marker(pytest.mark.skip(reason=why or pooler.MISSING))


def pytest_unconfigure(config: pytest.Config) -> None:
    """Stop what was started."""
    while _pooling:
        _pooling.pop().__exit__()
    for server, folder in _started:
        os.environ.pop(SERVER, None)
        server.close()
        embedded.stop(folder / "data")
    _started.clear()
    for room, lock in _rooms:
        shutil.rmtree(room, ignore_errors=True)
        os.close(lock)
    _rooms.clear()


def take_room() -> tuple[Path, int]:
    """A directory for everything temporary, which everybody may pass and a socket's path can be in, and its lock.

    Rooms of runs that were killed are cleared on the way.
    """
    base = Path(os.environ.get("TMPDIR") or ("/dev/shm" if has_memory() else "/tmp"))
    for former in base.glob(f"{ROOM}*/lock"):
        with former.open() as lock, suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(former.parent, ignore_errors=True)
    room = Path(tempfile.mkdtemp(prefix=ROOM, dir=base))
    room.chmod(0o1777)
    held = os.open(room / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(held, fcntl.LOCK_EX)
    return room, held


def has_memory() -> bool:
    """Whether temporary files may be kept in memory, and programs among them be run there."""
    try:
        place = os.statvfs("/dev/shm")
        left = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text("utf-8"))
    except OSError:
        return False
    roomy = place.f_bavail * place.f_frsize >= ENOUGH and left and int(left[1]) << 10 >= ENOUGH
    return bool(roomy) and not place.f_flag & os.ST_NOEXEC


@pytest.fixture(scope="session")
def server() -> str:
    """A connection string of the server, for a user who may create databases."""
    return os.environ[SERVER]


@pytest.fixture(scope="session")
def template(server: str) -> Iterator[str]:
    """A database with the protocol installed, to be copied."""
    name = f"shiftwork_template_{uuid4().hex[:12]}"
    with psycopg.connect(server, autocommit=True) as admin:
        admin.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
        with psycopg.connect(make_conninfo(server, dbname=name), autocommit=True) as connection:
            migrate(connection)
        yield name
        admin.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


@pytest.fixture
def dsn(server: str, template: str) -> Iterator[str]:
    """A database of the test's own, with the protocol installed, and history's partitions as of today."""
    with copied(server, template) as conninfo:
        with psycopg.connect(conninfo, autocommit=True) as connection:
            # A run may go on past midnight, and then its template is from yesterday.
            connection.execute(
                "select shiftwork.purge(), shiftwork.extend_history() where to_regclass(format("
                "'shiftwork.history_%s', to_char(shiftwork.today() + 39, 'YYYY_MM_DD'))) is null"
            )
        yield conninfo


@pytest.fixture
def empty_dsn(server: str) -> Iterator[str]:
    """A database of the test's own, with nothing in it."""
    with copied(server, "template0") as conninfo:
        yield conninfo


@pytest.fixture
def connection(dsn: str) -> Iterator[psycopg.Connection[dict[str, Any]]]:
    """A connection to it, in autocommit."""
    with psycopg.Connection[dict[str, Any]].connect(dsn, autocommit=True, row_factory=dict_row) as connection:
        yield connection


@pytest.fixture
def protocol(connection: psycopg.Connection[dict[str, Any]]) -> Protocol:
    """The verbs, as a worker or a person calls them."""
    return Protocol(connection)


class copied:  # noqa: N801
    """A copy of a database for as long as it is needed; gives its connection string."""

    def __init__(self, server: str, template: str) -> None:
        self.server, self.template = server, template
        self.name = f"shiftwork_test_{uuid4().hex[:12]}"

    def __enter__(self) -> str:
        with psycopg.connect(self.server, autocommit=True) as admin:
            admin.execute(
                sql.SQL("create database {} template {} strategy file_copy").format(
                    sql.Identifier(self.name), sql.Identifier(self.template)
                )
            )
        return make_conninfo(self.server, dbname=self.name)

    def __exit__(self, *_: object) -> None:
        with psycopg.connect(self.server, autocommit=True) as admin:
            admin.execute(
                sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(self.name))
            )
