"""Processes for tasks whose code may crash, hog the interpreter or not end: one for each job at a time, used again.

The worker never runs such code itself, so whatever it does (ends the process, corrupts its memory, holds the interpreter's
lock, ignores every signal) costs that one attempt. A process is a fresh Python (never a fork: it has none of the worker's
connections, threads or locks), which imports the app as the worker found it and is told of jobs over a pipe. It is the
leader of a process group of its own, and is killed with everything it has started.

Who finds out what: a thread for each process starts it and waits for its end, so neither holds up the event loop, and the
end of a process is known at once. That its line is closed proves nothing, since something it has started may hold it
open. What it said before its end still counts: a job whose outcome arrived has ended, however the process did.

When a part fails: a process that dies while it runs a job is a crash of that job, which counts as the loss of a worker does
(`resets`). One that we kill because the attempt was told to stop ends as that attempt does. One that cannot be started
is no fault of the job, which is given back. If the worker dies, the kernel ends its processes (on Linux; elsewhere each
does so when it next reads or speaks).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fnmatch
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

from shiftwork import events
from shiftwork.errors import ConfigurationError
from shiftwork.job import State
from shiftwork.outcome import Outcome
from shiftwork.settings import Settings
from shiftwork.worker.pipe import (
    Begin,
    Broken,
    Call,
    Completed,
    Concluded,
    Ended,
    FromProcess,
    Halt,
    Message,
    Progressed,
    Ready,
    Said,
    Unframing,
    Unready,
    framed,
    heard,
)
from shiftwork.worker.run import Run, Stop, Task
from shiftwork.worker.settling import Settling
from shiftwork.worker.state import memory_of

GRACE = 1.0
"""Seconds in which a job that was cancelled, or took too long, may end by itself."""

LAST_GRACE = 0.4
"""The same when the worker stops: it does not wait longer than that."""

RETIRING = 2.0
"""Seconds in which a process that is not needed any more may end by itself."""

TRAILING = 0.5
"""Seconds in which what a dead process said last has to be read."""

DYING = 0.5
"""Seconds in which a process whose line has ended has to be found dead; else it has hung up, and lives."""

FIRST_TRIES = (0.2, 1.0, 3.0)
"""Seconds to wait before the first process is tried again; it may have been killed by chance."""

STARTING = 120.0
"""Seconds in which a process has to be ready."""

LOOK = 0.1
"""Seconds between looks at how much memory processes have."""

MIB = 1 << 20
ALWAYS = (
    "PATH",
    "HOME",
    "USER",
    "LANG",
    "LANGUAGE",
    "LC_*",
    "TZ",
    "TMPDIR",
    "PYTHON*",
    "VIRTUAL_ENV",
    "LD_LIBRARY_PATH",
)
"""Variables of the environment without which Python, or the programs that it starts, may not run."""

WHERE_THE_DATABASE_IS = ("DATABASE_URL", "SHIFTWORK_DSN")


here = False
"""Whether this is such a process itself."""


class NoProcess(Exception):  # noqa: N818
    """A process could not be started; that says nothing about the job."""


class NoApp(NoProcess):
    """A process could not import the app, and none ever will."""


@dataclasses.dataclass(frozen=True)
class Crash:
    """The process ended before its job did."""

    why: str


Ending = Completed | Ended | Crash
Tell = Callable[[asyncio.Future[Ending], Ending], None]


def soon(answer: asyncio.Future[Ending], how: Ending) -> None:
    """Let whoever waits for this go on when it is their turn."""
    answer.set_result(how)


def at_once(answer: asyncio.Future[Ending], how: Ending) -> None:
    """Let whoever waits for this go on right here, which may be done only where no task runs.

    Another turn of the event loop would make each job a third dearer for the worker.
    """
    waiting = getattr(answer, "_callbacks", None) or []  # not for everybody, hence with a way without
    if len(waiting) != 1:
        soon(answer, how)
        return
    [(go_on, context)] = waiting
    answer.remove_done_callback(go_on)
    answer.set_result(how)
    context.run(go_on, answer)


def beginning(app: object, settings: Settings, tasks: Mapping[str, Task], *, tells: bool) -> Begin | None:
    """What processes of this app are told first; None if no task needs any."""
    chosen = [task for task in tasks.values() if task.executor == "process"]
    if not chosen:
        return None
    if here:
        raise ConfigurationError(
            "a process that runs jobs has no workers of its own; a script that starts one does so only if it is the program: "
            'if __name__ == "__main__": app.run_worker()'
        )
    allowed = settings.process_environment
    withheld = allowed is not None and not any(_matches(name, allowed) for name in WHERE_THE_DATABASE_IS)
    if withheld:
        settings = dataclasses.replace(settings, dsn=None, listen_dsn=None)
    where = _locate(app, [task.function.__module__ for task in chosen])
    if where is None:
        raise ConfigurationError(
            f"task {chosen[0].name!r} is to run in a process of its own, and another process cannot import the app: it is no "
            "global variable of a module. Make it one, as in `app = shiftwork.App()` in app.py"
        )
    return Begin(where, [str(one) for one in sys.path], settings, withheld, tells, os.getpid())


def _locate(app: object, likely: list[str]) -> str | None:
    """Where a fresh process finds this app: module:name."""
    for name in dict.fromkeys([*likely, *sys.modules]):
        module = sys.modules.get(name)
        importable = _name_of_program() if name == "__main__" else name
        if module is None or importable is None:
            continue
        for variable, value in list(vars(module).items()):
            if value is app:
                return f"{importable}:{variable}"
    return None


def _name_of_program() -> str | None:
    """The name under which the program itself can be imported, if there is one."""
    program = sys.modules["__main__"]
    if (spec := getattr(program, "__spec__", None)) is not None:
        name: str = spec.name
        return name
    path = Path(getattr(program, "__file__", None) or "")
    is_found = path.suffix == ".py" and str(path.parent.resolve()) in map(os.path.realpath, sys.path)
    return path.stem if is_found and path.stem.isidentifier() else None


class Processes:
    """As many processes as jobs may run at once in them, started when they are needed."""

    def __init__(
        self,
        settings: Settings,
        begin: Begin | None,
        tasks: Mapping[str, Task],
        settling: Settling,
        publish: Callable[[events.Event], None],
    ) -> None:
        self.begin = begin
        self.settling = settling
        self.publish = publish
        self.environment = _environment(settings)
        self._most_jobs = settings.process_jobs
        self._most_memory = None if settings.process_memory is None else settings.process_memory * MIB
        self._needed = {name for name, task in tasks.items() if task.executor == "process"}
        self._all: set[Process] = set()
        self._idle: list[Process] = []
        self._watching: asyncio.TimerHandle | None = None

    async def open(self) -> None:
        """Start the first one, so that an app which cannot be imported is told of now, and not at the first job."""
        if self.begin is None:
            return
        process = await self._first()
        self._idle.append(process)
        if missing := sorted(self._needed - process.tasks):
            raise ConfigurationError(
                f"task {missing[0]!r} is to run in a process of its own, and is not there when another process imports "
                f"{self.begin.where}: declare it while that module is imported"
            )

    async def _first(self) -> Process:
        tries = iter(FIRST_TRIES)
        while True:
            try:
                return await self._start()
            except NoProcess as error:
                pause = None if isinstance(error, NoApp) else next(tries, None)
                if pause is None:
                    raise ConfigurationError(str(error)) from None
                self.publish(events.ProcessFailed(str(error)))
                await asyncio.sleep(pause)

    async def run(self, run: Run, within: timedelta | None, began: Callable[[], None]) -> Ending:
        """How a job ended in a process; `began` is called when it is about to begin there."""
        while True:
            process = self._idle.pop() if self._idle else await self._start()
            if process.is_ready:
                break  # else it ended while nobody used it, which is no fault of this job
        began()
        if self._most_memory is not None:
            self._watch()
        try:
            return await process.call(run, within)
        finally:
            run.process = None
            if self._is_worn(process):
                process.retire()
            elif process.is_ready:
                self._idle.append(process)

    async def _start(self) -> Process:
        process = Process(self)
        self._all.add(process)
        try:
            await process.start()
        except BaseException:
            process.kill()
            raise
        self.publish(events.ProcessStarted(process.pid))
        return process

    def ended(self, process: Process) -> None:
        """It is no more."""
        self._all.discard(process)
        if process in self._idle:
            self._idle.remove(process)

    def _is_worn(self, process: Process) -> bool:
        """Whether it has run as many jobs as it may, or kept so much memory that the next may have too little."""
        if self._most_jobs is not None and process.jobs >= self._most_jobs:
            process.why = f"it has run {process.jobs} jobs"
        elif self._most_memory is not None and process.memory > (process.at_first + self._most_memory) / 2:
            process.why = f"it has kept {process.memory // MIB} MiB of memory"
        else:
            return False
        return True

    def _watch(self) -> None:
        if self._watching is None:
            self._watching = asyncio.get_running_loop().call_later(LOOK, self._look)

    def _look(self) -> None:
        self._watching = None
        busy = [process for process in self._all if process.run is not None]
        for process in busy:
            if (memory := process.memory) > (self._most_memory or 0):
                process.why = f"its process had {memory // MIB:,} MiB of memory, and may have {(self._most_memory or 0) // MIB:,}"
                process.kill()
        if busy:
            self._watch()

    async def close(self) -> None:
        """End them all: those that are idle by themselves, if they do so soon."""
        if self._watching is not None:
            self._watching.cancel()
        for process in self._all:
            if process.run is None and process.is_ready:
                process.retire()
            else:
                process.kill()
        if self._all:
            await asyncio.wait([process.gone for process in self._all], timeout=LAST_GRACE)
        for process in list(self._all):
            process.kill()
        if self._all:
            await asyncio.wait([process.gone for process in self._all], timeout=RETIRING)


class Process:
    """One process, as its worker sees it."""

    def __init__(self, owner: Processes) -> None:
        self.pid = 0
        self.jobs = 0
        """How many it has begun."""

        self.run: Run | None = None
        self.is_ready = False
        """Whether it can be given a job."""

        self.tasks: frozenset[str] = frozenset()
        self.at_first = 0
        """The memory that it had when it was ready."""

        self.why: str | None = None
        """Why it ends, if that is known before."""

        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self.gone: asyncio.Future[None] = self._loop.create_future()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._answer: asyncio.Future[Ending] | None = None
        self._source = self._sink = -1
        """Our ends of two pipes, from it and to it."""

        self._pieces = Unframing()
        self._unsent = b""
        self._hung_up = True
        self._retiring = False
        self._code: int | None = None
        self._life = threading.Lock()
        """Held by whoever kills it and by whoever finds it dead: a pid that is free may be another's."""

        self._doomed = False
        self._dead = False

    @property
    def memory(self) -> int:
        """The bytes that it has, where that can be seen."""
        return memory_of(self.pid)

    async def start(self) -> None:
        """Start it, and wait until it has imported the app."""
        assert self._owner.begin is not None  # noqa: S101
        try:
            self._keep_in_thread(*self._lay_pipes())
        except (OSError, RuntimeError) as error:  # there are no more files, or no more threads
            self._not_started(error)
        else:
            self._say(self._owner.begin)
        try:
            async with asyncio.timeout(STARTING):
                await asyncio.shield(self._ready)
        except TimeoutError:
            raise NoProcess(f"a process was not ready within {STARTING:.0f} s") from None

    def _lay_pipes(self) -> tuple[int, int]:
        """A pipe each way, of which the process gets the other ends: to hand a job over they cost half of what sockets do."""
        self._source, sink = os.pipe()
        try:
            source, self._sink = os.pipe()
        except OSError:
            os.close(self._source)
            os.close(sink)
            raise
        for end in (self._source, self._sink):
            os.set_blocking(end, False)
        self._loop.add_reader(self._source, self._read, at_once)
        self._hung_up = False
        return source, sink

    def _keep_in_thread(self, *theirs: int) -> None:
        try:
            threading.Thread(target=self._keep, args=theirs, name="shiftwork-process", daemon=True).start()
        except RuntimeError:
            for end in theirs:
                os.close(end)
            raise

    def _keep(self, *theirs: int) -> None:
        """In a thread: start it, wait for its end, and end what it has left behind."""
        try:
            process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-P", "-m", "shiftwork.child", *map(str, theirs)],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what handlers print goes where log lines go
                env=self._owner.environment,
                pass_fds=theirs,
                process_group=0,  # not a session: the kernel may share out time by sessions, and then the pipe is slow
            )
        except Exception as error:  # noqa: BLE001  -- somebody waits for an answer
            self._dead = True
            self._tell(self._not_started, error)
            return
        finally:
            for end in theirs:
                os.close(end)
        with self._life:
            self.pid = process.pid
            if self._doomed:
                _kill(self.pid)
        if hasattr(os, "waitid"):
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        else:
            process.wait()
        with self._life:
            self._dead, self.is_ready = True, False
            _kill(self.pid)
        self._tell(self._died, process.wait())

    def _tell(self, call: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, nobody waits any more
            self._loop.call_soon_threadsafe(call, *args)

    def kill(self, run: Run | None = None) -> None:
        """End it and all that it has started, now, unless it is done with this job; may be called from any thread."""
        with self._life:
            if run is not None and self.run is not run:
                return
            self._doomed, self.is_ready = True, False
            if self.pid and not self._dead:
                _kill(self.pid)

    def retire(self) -> None:
        """Let it end by itself, soon."""
        if not self._retiring:
            self._retiring = True
            self._hang_up()
            self._loop.call_later(RETIRING, self.kill)

    def call(self, run: Run, within: timedelta | None) -> asyncio.Future[Ending]:
        """Give it a job; how that ends can be awaited."""
        self._answer = self._loop.create_future()
        self.run, run.process = run, self
        self.jobs += 1
        self._say(Call(run.taken, run.worker, run.claimed_at, run.waited, within))
        return self._answer

    def stop(self, run: Run, stop: Stop, why: str) -> None:
        """Tell its job to end; one that is not ours any more, or may soon not be, has no time for that."""
        if self.run is not run:
            return  # it has ended, and its slot will know in a moment
        if stop in (Stop.LOST, Stop.LAPSED):
            self.kill()
            return
        self._say(Halt(stop.value, why))
        self._loop.call_later(LAST_GRACE if stop is Stop.SHUTDOWN else GRACE, self.kill, run)

    def catch_up(self) -> None:
        """Hear what it has said by now, before something is decided about its job."""
        while self._read(soon):
            pass

    def _end_job(self, how: Ending, tell: Tell) -> None:
        answer, self._answer = self._answer, None
        self.run = None
        if answer is not None and not answer.done():
            tell(answer, how)

    # The line.

    def _say(self, message: Message) -> None:
        told = framed(message)
        if self._unsent:
            self._unsent += told
        elif (sent := self._send(told)) < len(told):
            self._unsent = told[sent:]
            self._loop.add_writer(self._sink, self._send_more)

    def _send_more(self) -> None:
        self._unsent = self._unsent[self._send(self._unsent) :]
        if not self._unsent:
            self._loop.remove_writer(self._sink)

    def _send(self, told: bytes) -> int:
        if self._hung_up:
            return len(told)
        try:
            return os.write(self._sink, told)
        except BlockingIOError:
            return 0
        except OSError:  # it is gone, which is told by its end
            return len(told)

    def _read(self, tell: Tell) -> bool:
        """Hear what has come; says whether there was anything."""
        if self._hung_up:
            return False
        try:
            piece = os.read(self._source, 1 << 16)
        except BlockingIOError:
            return False
        except OSError:
            piece = b""
        if not piece:
            self._hang_up()
            if self._code is not None:
                self._bury()
            else:
                self._loop.call_later(DYING, self._renounce)
            return False
        try:
            body = self._pieces.take(piece)
            while body is not None:
                self._hear(heard(body), tell)
                body = self._pieces.take() if self._pieces.left else None
        except Broken as error:
            self.why = f"its process broke the line to its worker: {error}"
            self.kill()
            return False
        return True

    def _renounce(self) -> None:
        """End it if it lives: it has hung up, and cannot be told of anything any more."""
        if not (self._dead or self._doomed):
            self.why = "its process hung up on its worker"
            self.kill()

    def _hang_up(self) -> None:
        if not self._hung_up:
            self._hung_up, self.is_ready = True, False
            self._loop.remove_reader(self._source)
            self._loop.remove_writer(self._sink)
            os.close(self._source)
            os.close(self._sink)

    def _hear(self, message: FromProcess, tell: Tell) -> None:
        run = self.run
        if isinstance(message, Completed) and run is not None and run.id == message.job:  # as most are
            self._end_job(message, tell)
            return
        match message:
            case Ended(job) if run is not None and run.id == job:
                self._end_job(message, tell)
            case Ready(tasks):
                self.tasks, self.at_first = frozenset(tasks), self.memory
                with self._life:
                    self.is_ready = not (self._doomed or self._dead)
                if not self._ready.done():
                    self._ready.set_result(None)
            case Unready(why):
                self._fail_start(NoApp(f"a process cannot run jobs: {why}"))
            case Said(job, level, text) if run is not None and run.id == job:
                self._owner.settling.log(run, level, text)
            case Progressed(job, fraction, text) if run is not None and run.id == job:
                self._owner.settling.progress(run, fraction, text)
            case Concluded(job) if run is not None and run.id == job:
                run.concluded = True

    # Its end.

    def _not_started(self, error: Exception) -> None:
        self._fail_start(NoProcess(f"a process could not be started: {error}"))
        self._bury()

    def _died(self, code: int) -> None:
        self._code = code
        if self._hung_up:
            self._bury()
        else:
            self._loop.call_later(TRAILING, self._bury)  # sooner, if all that it said has been read

    def _bury(self) -> None:
        if self.gone.done():
            return
        self.gone.set_result(None)
        why = self.why or _ending(self._code or 0)
        self._fail_start(NoProcess(f"a process ended while it started: {why}"))
        self._owner.ended(self)
        if self.run is not None and self.run.stop is not None:
            why = f"its job was to stop: {self.run.stop}"
        job = None if self.run is None or self.run.stop is not None else self.run.id
        self._owner.publish(events.ProcessEnded(self.pid, why, self.jobs, job))
        self._end_job(Crash(why), soon)
        self._hang_up()

    def _fail_start(self, error: NoProcess) -> None:
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # nobody may be waiting for it any more


def outcome_of(run: Run, ended: Completed | Ended) -> Outcome:
    """How a job ended in a process, as all outcomes are."""
    if isinstance(ended, Completed):
        return Outcome(run, State.COMPLETED, None, bytes(ended.result))
    result = bytes(ended.result) if ended.state in (State.COMPLETED, State.WAITING) else None
    return Outcome(
        run, ended.state, ended.delay, result, ended.error, ended.counts, ended.at, tuple(ended.jobs)
    )


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _ending(code: int) -> str:
    if code >= 0:
        return f"its process ended with exit status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    maybe = ", maybe for want of memory" if -code == signal.SIGKILL else ""
    return f"its process was killed by {name}{maybe}"


def _environment(settings: Settings) -> dict[str, str] | None:
    allowed = settings.process_environment
    if allowed is None:
        return None
    return {name: value for name, value in os.environ.items() if _matches(name, (*ALWAYS, *allowed))}


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
