"""Several worker processes under one roof: `shiftwork worker app:app --processes 4`.

The supervisor starts the same command once for each of its places, by exec and never by fork alone, and knows nothing of the app: it imports
none of it and has no connection to the database. So there is nothing that a child could share with it but the line between them
(`shiftwork.worker.supervised`), and little in it that could fail.

What it does when a process of its own
- dies: another is started in its place, at first after half a second, then later and later; and a neighbour is told which worker that
  was, so that its jobs need not wait for its lease. One place that dies too often within a minute ends it all, loudly.
- ends by itself (`max_jobs`, `max_time`): another is started at once. With `stop_when_idle` its place stays empty.
- does not come up in the first place: it ends with the same exit code; to try again would only say the same again.
- does not stop within its grace and a moment: it is killed.
- is silent for longer than the watchdog of systemd allows: it is killed, and that counts as a death.

When it is told to stop, it tells them; told twice, it tells them twice. If it is killed itself, the line breaks, and they stop.
When it is told to renew itself (HUP), it first lets a process import the app and end. Only if that went well, and within a minute, are the others replaced, one
at a time: the next is told to stop when the one before has been replaced and is at work.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shiftwork import events
from shiftwork.events import Event
from shiftwork.settings import Settings
from shiftwork.systemd import Systemd
from shiftwork.worker.line import Patience
from shiftwork.worker.supervised import LINE, PROCESS, REHEARSAL

GAVE_UP = 4
"""The exit code of a supervisor whose processes die again and again."""

AGAIN = (0.5, 30.0)
"""Seconds until a dead process is replaced, at first and at most."""

WINDOW = 60.0
"""Seconds within which deaths are counted; who lived longer begins anew."""

MOMENT = 5.0
"""Seconds beyond its grace after which a process is killed that was told to stop."""

AT_ONCE = 4.0
"""The same for one that was told to stop now."""

IMPORT_WITHIN = 60.0
"""Seconds within which the app must be imported before processes are replaced; systemd waits for 90 of them."""

LOOK_EVERY = 0.5
"""Seconds between two looks at the files, with --reload."""

SKIPPED = ("__pycache__", "node_modules", "site-packages")
"""Folders in which nobody works; nor in those that begin with a dot, and in virtual environments."""


class Place:
    """One of the processes, and whoever follows it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.process: subprocess.Popen[bytes] | None = None
        self.line: socket.socket | None = None
        self.worker = 0
        """Which worker its process is, once it is at work."""

        self.here = asyncio.Event()
        """Set while its process is at work or stands by."""

        self.gone = asyncio.Event()
        """Set while it has no process."""

        self.came = False
        """Whether its last process was ever here."""

        self.told = False
        """Whether its process was told to stop."""

        self.coming: asyncio.Future[bool] | None = None
        """Whether the process comes up for which somebody waits."""

        self.grace = 30.0
        self.once = False
        self.code = 0
        self.heard = 0.0
        self.deaths: deque[float] = deque()
        self.patience = Patience(*AGAIN)
        self.killing: asyncio.TimerHandle | None = None
        self.unread = b""

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start a process here."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self.process = subprocess.Popen(  # noqa: S603  -- the command that this process was started with
                    command,
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env={**environment, PROCESS: str(self.number), LINE: str(theirs.fileno())},
                )
            except OSError:
                ours.close()
                raise
        ours.setblocking(False)
        self.line, self.unread = ours, b""
        self.came = self.told = False
        self.gone.clear()

    def tell(self, **facts: Any) -> None:  # noqa: ANN401
        """Say something to its process."""
        if self.line is not None:
            with suppress(OSError):
                self.line.send(json.dumps(facts).encode() + b"\n")

    def end(self, code: int) -> None:
        """Its process has ended."""
        if self.killing is not None:
            self.killing.cancel()
        if self.line is not None:
            self.line.close()
        if self.coming is not None and not self.told and not self.coming.done():
            self.coming.set_result(False)
        self.process = self.line = self.killing = None
        self.worker, self.code = 0, code
        self.here.clear()
        self.gone.set()


class Supervisor:
    """Keeps worker processes running until it is told to stop."""

    def __init__(
        self,
        settings: Settings,
        command: Sequence[str],
        *,
        tell: Callable[[Event], None],
        systemd: Systemd,
        watched: Sequence[Path] = (),
    ) -> None:
        """`watched`: folders whose Python files are looked at; a change replaces all processes."""
        self._settings = settings
        self._command = command
        self._tell = tell
        self._systemd = systemd
        self._watched = watched
        self._places = [Place(number) for number in range(settings.processes)]
        self._environment = dict(os.environ)
        if systemd.watchdog:  # they are watched as we are
            self._environment["WATCHDOG_USEC"] = str(round(systemd.watchdog * 1_000_000))
        self._ordered = 0
        """How urgently all were told to stop."""

        self._began = False
        """Whether any process was ever here."""

        self._code = 0
        self._restarts = 0
        self._dead: set[int] = set()
        self._ended: dict[str, Counter[str]] = {}
        self._rehearsal: tuple[subprocess.Popen[bytes], asyncio.Future[int]] | None = None
        self._renewal: asyncio.Task[None] | None = None
        self._renew_again = False

    async def run(self) -> int:
        """Start them, and keep them running; gives the exit code."""
        self._loop = asyncio.get_running_loop()
        self._stop, self._changed, self._up = asyncio.Event(), asyncio.Event(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._heed, number)
        self._loop.add_signal_handler(signal.SIGHUP, self._renew, "SIGHUP")
        self._loop.add_signal_handler(signal.SIGCHLD, self._look)
        aside = [asyncio.create_task(self._watch())]
        if self._watched:
            aside.append(asyncio.create_task(self._watch_files()))
        first, *others = self._places
        keeping = [asyncio.create_task(self._keep(first))]
        await _first(first.here.wait(), asyncio.shield(keeping[0]))  # it tells for all what is wrong
        keeping += [asyncio.create_task(self._keep(place)) for place in others]
        for place, kept in zip(self._places, keeping, strict=True):
            await _first(place.here.wait(), asyncio.shield(kept))
        if not self._ordered:
            self._up.set()
            self._systemd.ready(self._status())
        await asyncio.gather(*keeping)
        for task in (*aside, *([self._renewal] if self._renewal else [])):
            task.cancel()
        clean = not self._code and all(place.code == 0 for place in self._places)
        ended = {queue: dict(sorted(states.items())) for queue, states in sorted(self._ended.items())}
        self._tell(events.SupervisorStopped(clean, ended, self._restarts))
        return 0 if clean else self._code or 1

    # One place.

    async def _keep(self, place: Place) -> None:
        while not self._ordered:
            changed = self._changed
            try:
                place.start(self._command, self._environment)
            except OSError as error:  # no memory, or no more processes
                self._tell(events.WorkerProcessRefused(place.number, str(error)))
                place.code = 1
                await self._pause(place)
                continue
            if place.process is not None and place.line is not None:
                self._loop.add_reader(place.line, self._hear, place)
                self._tell(events.WorkerProcessStarted(place.number, place.process.pid))
            await place.gone.wait()
            if self._ordered or (place.code == 0 and place.once and not place.told):
                return
            if place.code == 0 or place.told:
                continue
            if self._watched and not place.came:
                await _first(changed.wait(), self._stop.wait())
            elif not self._began and place.code in (1, 2):
                self._give_up(place.code, f"worker process {place.number} could not begin")
            else:
                await self._pause(place)

    async def _pause(self, place: Place) -> None:
        """Wait before a dead process is replaced; too many deaths, and we give up."""
        now, deaths = time.monotonic(), place.deaths
        deaths.append(now)
        while now - deaths[0] > WINDOW:
            deaths.popleft()
        most = self._settings.max_crashes
        if most is not None and len(deaths) >= most:
            why = f"worker process {place.number} has died {len(deaths)} times within {WINDOW:.0f} s (max_crashes)"
            self._give_up(GAVE_UP, why)
            return
        if len(deaths) == 1:
            place.patience.reset()
        self._restarts += 1
        with suppress(TimeoutError):
            async with asyncio.timeout(place.patience()):
                await self._stop.wait()

    def _hear(self, place: Place) -> None:
        """Hear what a process has to say."""
        if place.line is None:
            return
        try:
            said = place.line.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if not said:
            self._loop.remove_reader(place.line)
        *lines, place.unread = (place.unread + said).split(b"\n")
        for line in lines:
            match json.loads(line):
                case {"ready": int(worker), "grace": float(grace), "once": bool(once)}:
                    place.worker, place.grace, place.once = worker, grace, once
                    self._arrived(place)
                    self._bury()
                case {"waiting": True}:
                    self._arrived(place)
                case {"buried": int(worker)}:
                    self._dead.discard(worker)
                case {"alive": True}:
                    place.heard = time.monotonic()
                case {"ended": dict(ended)}:
                    for queue, states in ended.items():
                        self._ended.setdefault(queue, Counter()).update(states)

    def _arrived(self, place: Place) -> None:
        if place.here.is_set() or place.process is None:
            return
        place.here.set()
        place.came = self._began = True
        place.heard = time.monotonic()
        self._tell(events.WorkerProcessUp(place.number, place.process.pid))
        if place.coming is not None and not place.coming.done():
            place.coming.set_result(True)
        if self._up.is_set():
            self._systemd.status(self._status())

    def _look(self) -> None:
        """See who has ended."""
        if self._rehearsal is not None:
            process, ended = self._rehearsal
            if (code := process.poll()) is not None and not ended.done():
                ended.set_result(code)
        for place in self._places:
            if place.process is None or (code := place.process.poll()) is None:
                continue
            self._hear(place)  # its last words
            if place.line is not None:
                self._loop.remove_reader(place.line)
            if place.told and not place.came and code == -signal.SIGTERM:
                code = 0  # it had not even begun to listen
            self._tell(
                events.WorkerProcessEnded(place.number, place.process.pid, code, place.told or code == 0)
            )
            if code != 0 and place.worker:
                self._dead.add(place.worker)
            place.end(code)
            self._bury()
            if self._up.is_set() and not self._ordered:
                self._systemd.status(self._status())

    def _bury(self) -> None:
        """Tell somebody who lives which workers are dead, until somebody has seen to it."""
        for place in self._places:
            if place.worker and not place.told:
                for worker in self._dead:
                    place.tell(dead=worker)
                return

    # Stopping.

    def _heed(self, number: int) -> None:
        self._order_all(min(self._ordered + 1, 3), signal.Signals(number).name)

    def _give_up(self, code: int, why: str) -> None:
        if not self._code:
            self._code = code
            self._tell(events.SupervisorGaveUp(why))
            self._order_all(max(self._ordered, 1), why)

    def _order_all(self, degree: int, why: str) -> None:
        if degree > self._ordered:
            self._ordered = degree
            self._stop.set()
            running = sum(place.process is not None for place in self._places)
            self._tell(events.SupervisorStopping(why, degree, running))
            self._systemd.stopping(f"stops ({why})")
            if self._rehearsal is not None:
                self._rehearsal[0].kill()
            for place in self._places:
                self._order(place, degree, why)

    def _order(self, place: Place, degree: int, why: str) -> None:
        """Tell a process to stop, and kill it if it does not."""
        if place.process is None:
            return
        place.told = True
        place.tell(stop=degree, why=why)
        if place.killing is not None:
            place.killing.cancel()
        patience = (place.grace + MOMENT, AT_ONCE, 0.0)[degree - 1]
        place.killing = self._loop.call_later(patience, self._kill, place, "it was told to stop")

    def _kill(self, place: Place, why: str) -> None:
        if place.process is not None:
            self._tell(events.WorkerProcessStuck(place.number, place.process.pid, why))
            place.process.kill()

    # Replacing all of them, one by one.

    def _renew(self, why: str) -> None:
        if self._renewal is not None and not self._renewal.done():
            self._renew_again = True  # what was imported meanwhile may be older
        elif not self._ordered:
            self._renewal = asyncio.create_task(self._replace_all(why))

    async def _replace_all(self, why: str) -> None:
        await self._up.wait()
        self._renew_again = True
        while self._renew_again and not self._ordered:
            self._renew_again = False
            self._tell(events.Renewing(len(self._places), why))
            self._systemd.reloading(f"renews its processes ({why})")
            error = await self._rehearse()
            if not error:
                for place in self._places:
                    if not await self._replace(place, why):
                        error = f"worker process {place.number} does not come up again; the others go on as they were"
                        break
            if not self._ordered:
                self._tell(events.Renewed(len(self._places), error))
                self._systemd.ready(self._status())

    async def _rehearse(self) -> str:
        """Let a process import the app, and end; gives what went wrong."""
        ended: asyncio.Future[int] = self._loop.create_future()
        environment = {**self._environment, REHEARSAL: "1"}
        try:
            process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, env=environment)  # noqa: S603, ASYNC220
        except OSError as error:
            return f"no process can be started ({error}); all goes on as it was"
        self._rehearsal = process, ended
        try:
            async with asyncio.timeout(IMPORT_WITHIN):
                return "" if await ended == 0 else "the app cannot be imported; all goes on as it was"
        except TimeoutError:
            process.kill()
            return f"the app was not imported within {IMPORT_WITHIN:g} s; all goes on as it was"
        finally:
            self._rehearsal = None

    async def _replace(self, place: Place, why: str) -> bool:
        """Whether another process has taken the place of this one."""
        if place.process is None or self._ordered:
            return not self._ordered  # it is being started anyway, or never again
        place.coming = self._loop.create_future()
        self._order(place, 1, why)
        await _first(asyncio.shield(place.coming), self._stop.wait())
        return place.coming.done() and place.coming.result()

    async def _watch_files(self) -> None:
        seen = await asyncio.to_thread(_files, self._watched)
        while True:
            await asyncio.sleep(LOOK_EVERY)
            now = await asyncio.to_thread(_files, self._watched)
            if changed := sorted(str(path) for path, _ in seen.items() ^ now.items()):
                seen = now
                self._tell(events.FilesChanged(tuple(dict.fromkeys(changed))))
                before, self._changed = self._changed, asyncio.Event()
                before.set()
                for place in self._places:
                    if not self._ordered and not place.told:
                        self._order(place, 1, "files have changed")

    # Being watched, and watching.

    async def _watch(self) -> None:
        longest = self._systemd.watchdog
        while longest:
            self._systemd.alive()
            await asyncio.sleep(longest / 3)
            for place in self._places:
                if place.here.is_set() and not place.told and time.monotonic() - place.heard > longest:
                    self._kill(place, f"it has not said for {longest:.1f} s that it is alive")

    def _status(self) -> str:
        here = sum(place.here.is_set() for place in self._places)
        return f"{here} of {len(self._places)} processes at work, {self._restarts} started again so far"


def supervise(settings: Settings, *, watched: Sequence[Path] = (), tell: Callable[[Event], None]) -> int:
    """Run the command that this process was started with in processes of their own; gives the exit code."""
    command = [sys.executable, *sys.orig_argv[1:]]
    supervisor = Supervisor(settings, command, tell=tell, systemd=Systemd.take(), watched=watched)
    return asyncio.run(supervisor.run())


async def _first(*waits: Awaitable[object]) -> None:
    """Wait until one of them has come about."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def _files(folders: Sequence[Path]) -> dict[Path, int]:
    """When the Python files below these folders were last changed."""
    found: dict[Path, int] = {}
    for folder in folders:
        for here, below, names in os.walk(folder):
            below[:] = [
                name
                for name in below
                if not name.startswith(".")
                and name not in SKIPPED
                and not Path(here, name, "pyvenv.cfg").exists()
            ]
            for name in names:
                if name.endswith(".py") or name == "pyproject.toml":
                    with suppress(OSError):  # it has just gone
                        found[Path(here, name)] = Path(here, name).stat().st_mtime_ns
    return found
