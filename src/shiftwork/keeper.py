"""The small process that is the embedded server's parent, and ends it when its last user is gone.

It is run by path (`python -I -S keeper.py <data>`, orders on standard input), away from its starter's session, and imports next to nothing, since
every start waits for it. The model, and what happens when each part fails, is told in `embedded.py`; here is only this:

- It was born holding the lock `keeper.lock` (an open file handed down by its starter), so there is never a second keeper.
- A thread waits for the exclusive lock on `users.lock`. Getting it means that no user is left; the thread then sends
  SIGTERM to its own process, which is also how anyone else asks for the server's end.
- SIGUSR1 asks it to stay: it becomes a user itself. SIGUSR2 takes that back.
- The main thread does nothing but wait for these signals and for SIGCHLD. They are blocked and taken one by one
  (sigwait), so none is missed and no handler interrupts anything.
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


def become_server(orders: dict[str, Any], keeper: int) -> NoReturn:
    """Turn this freshly forked process into postgres."""
    # Here and not earlier: the kernel forgets the death signal when the user changes.
    if orders["uid"] is not None:
        os.setgroups([])
        os.setgid(orders["gid"])
        os.setuid(orders["uid"])
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGINT)
        if os.getppid() != keeper:
            os._exit(1)  # it died before the line above
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    os.execve(orders["command"][0], orders["command"], orders["environment"])  # noqa: S606


class Keeper:
    def __init__(self, orders: dict[str, Any], server: int) -> None:
        self.orders = orders
        self.server = server
        self.since = time.time()
        self.stay: int | None = None

    def write_state(self) -> None:
        """Tell whoever comes later what runs here; only true while `keeper.lock` is held."""
        state = self.orders["facts"] | {
            "keeper": os.getpid(),
            "server": self.server,
            "since": self.since,
            "stays": self.stay is not None,
        }
        path = self.orders["state"]
        fresh = path + ".new"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(fresh)  # noqa: PTH108
        file = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
        os.write(file, json.dumps(state).encode())
        os.close(file)
        os.replace(fresh, path)  # noqa: PTH105

    def watch_users(self) -> None:
        """Wait until nobody uses the server; from then on hold off new users, until this process ends."""
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

    def keep(self) -> int:
        """Return postgres's exit status, once it has ended for whatever reason."""
        self.write_state()
        threading.Thread(target=self.watch_users, daemon=True).start()
        steps = iter(SHUTDOWN)
        stopping = False
        while True:
            match signal.sigwait(AWAITED):
                case signal.SIGCHLD:
                    pid, status = os.waitpid(self.server, os.WNOHANG)
                    if pid:
                        return os.waitstatus_to_exitcode(status)
                case signal.SIGUSR1 if self.stay is None:
                    with contextlib.suppress(OSError):  # whoever asked is gone already, or the disk is full
                        self.stay = self.join_users()
                        self.write_state()
                case signal.SIGUSR2 if self.stay is not None:
                    os.close(self.stay)
                    self.stay = None
                    with contextlib.suppress(OSError):
                        self.write_state()
                case signal.SIGTERM | signal.SIGALRM as why:
                    if why == signal.SIGTERM and stopping:
                        continue
                    stopping = True
                    number, patience = next(steps, SHUTDOWN[-1])
                    os.kill(self.server, number)
                    signal.alarm(patience)
                case _:
                    pass


def main() -> None:
    orders = json.load(sys.stdin)
    if os.fork():
        os._exit(0)  # the starter waits for this one; the keeper itself belongs to init
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
    keeper = os.getpid()
    server = os.fork()
    if not server:
        try:
            os.closerange(3, 256)  # the locks above all: postgres must not hold them
            become_server(orders, keeper)
        except OSError as error:
            os.write(2, f"cannot run {orders['command'][0]}: {error}\n".encode())
            os._exit(1)
    status = Keeper(orders, server).keep()
    with contextlib.suppress(OSError):  # a starter may still be waiting for readiness
        os.write(orders["report"], str(status).encode())


if __name__ == "__main__":
    main()
