"""The small process that is the embedded server's parent, and ends it when its last user is gone.

It is run by path (`python -I -S keeper.py <data>`, its orders on standard input), in a session of its own,
and imports next to nothing, since every start waits for it. The model, and what happens when each part fails,
is told in `embedded.py`. Here is only this:

- It is born holding keeper.lock, an open file handed down by its starter, so there is never a second keeper.
- A thread waits for the exclusive lock on users.lock. Getting it means that no user is left; the thread then
  sends SIGTERM to its own process, which is also how anyone else asks for the server's end.
- SIGUSR1 asks it to stay: it becomes a user itself. SIGUSR2 takes that back.
- The main thread does nothing but wait for these signals and for SIGCHLD. They are blocked and taken one by
  one (sigwait), so none is missed and no handler interrupts anything.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import sys
import threading
import time
from typing import Any, NoReturn

AWAITED = {signal.SIGCHLD, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM}
SHUTDOWN = [
    (signal.SIGINT, 10),
    (signal.SIGQUIT, 5),
    (signal.SIGKILL, 5),
]  # fast, immediate, by force; seconds
PR_SET_PDEATHSIG = 1


class Keeper:
    """Postgres's parent."""

    def __init__(self, orders: dict[str, Any]) -> None:
        self.orders = orders
        self.since = time.time()
        self.stay: int | None = None
        reading, writing = os.pipe()
        self.server = os.fork()
        if not self.server:
            os.close(writing)
            self.become_server(reading)
        os.close(reading)
        self.write_state()  # first: whoever finds postgres here must be able to tell that it is ours
        os.write(writing, b"!")
        os.close(writing)

    def become_server(self, go: int) -> NoReturn:
        """Turn this freshly forked process into postgres, when told to."""
        command = self.orders["command"]
        try:
            if self.orders["uid"] is not None:
                os.setgroups([])
                os.setgid(self.orders["gid"])
                os.setuid(self.orders["uid"])
            if sys.platform == "linux":  # only now: the kernel forgets this when the user changes
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGINT)
            signal.pthread_sigmask(signal.SIG_SETMASK, set())
            if not os.read(go, 1):
                os._exit(1)  # the keeper is dead already
            os.execve(command[0], command, self.orders["environment"])  # noqa: S606
        except OSError as error:
            os.write(2, f"cannot run {command[0]}: {error}\n".encode())
        os._exit(1)

    def keep(self) -> None:
        """Return when postgres has ended, for whatever reason."""
        threading.Thread(target=self.watch_users, daemon=True).start()
        steps = iter(SHUTDOWN)
        stopping = False
        while True:
            match signal.sigwait(AWAITED):
                case signal.SIGCHLD if os.waitpid(self.server, os.WNOHANG)[0]:
                    return
                case signal.SIGUSR1 if self.stay is None:
                    with contextlib.suppress(OSError):  # who asked is gone already, or the disk is full
                        self.stay = self.join_users()
                        self.write_state()
                case signal.SIGUSR2 if self.stay is not None:
                    os.close(self.stay)
                    self.stay = None
                    with contextlib.suppress(OSError):
                        self.write_state()
                case signal.SIGTERM if stopping:
                    pass
                case signal.SIGTERM | signal.SIGALRM:
                    stopping = True
                    number, patience = next(steps, SHUTDOWN[-1])
                    os.kill(self.server, number)
                    signal.alarm(patience)
                case _:
                    pass

    def watch_users(self) -> None:
        """Wait until nobody uses the server; then keep newcomers out, for as long as this process lives."""
        users = os.open(self.orders["users"], os.O_RDWR)
        fcntl.flock(users, fcntl.LOCK_EX)
        os.kill(os.getpid(), signal.SIGTERM)

    def join_users(self) -> int:
        users = os.open(self.orders["users"], os.O_RDWR)
        try:
            fcntl.flock(users, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            os.close(users)
            raise
        return users

    def write_state(self) -> None:
        """Tell whoever comes later what runs here."""
        state = self.orders["facts"] | {
            "keeper": os.getpid(),
            "server": self.server,
            "since": self.since,
            "stays": self.stay is not None,
        }
        path: str = self.orders["state"]
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{path}.new")  # noqa: PTH108
        file = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        os.write(file, json.dumps(state).encode())
        os.close(file)
        os.replace(f"{path}.new", path)  # noqa: PTH105


def main() -> None:
    orders = json.load(sys.stdin)
    if os.fork():
        os._exit(0)  # the starter waits for this one; the keeper itself is nobody's child
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for file in (orders["lock"], orders["alive"]):
        os.set_inheritable(file, False)  # for as long as this process lives, and not in postgres
    signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
    Keeper(orders).keep()
    with contextlib.suppress(OSError):
        os.rmdir(orders["facts"]["socket"])  # noqa: PTH106


if __name__ == "__main__":
    main()
