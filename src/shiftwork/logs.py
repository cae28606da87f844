"""Log lines: what happens in a worker, told to people or, as JSON, to programs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, TextIO

import msgspec

from shiftwork import events
from shiftwork.events import Event
from shiftwork.printable import clean
from shiftwork.worker.run import current
from shiftwork.worker.supervised import process

log = logging.getLogger("shiftwork.worker")

WHOLE = 4096
"""Bytes that are written to a pipe in one piece, whoever else writes to it."""


class Telling:
    """Renders events as log records; a job's carry its id, task, queue and attempt."""

    def __init__(self, logger: logging.Logger = log) -> None:
        self._logger = logger
        self._stream = _sole_stream(logger)

    def wants(self, kind: type[Event]) -> bool:
        """Whether an event of this kind may become a line; those of every job are many, and not even made in vain."""
        return kind is not events.JobBegan or self._logger.isEnabledFor(logging.DEBUG)

    def __call__(self, event: Event) -> None:
        level, words = _ended(event) if type(event) is events.JobEnded else _words(event)
        if words is None or not self._logger.isEnabledFor(level):
            return
        if self._stream is not None:
            self._stream.tell(level, words, event)
            return
        record = logging.LogRecord(self._logger.name, level, "", 0, words, None, None)
        record.event = event
        self._logger.handle(record)

    def tell_ended(self, jobs: Sequence[events.JobEnded]) -> None:
        """Render jobs that ended together; most have completed, and their lines are all of one kind."""
        heading = None if self._stream is None else self._stream.heading(logging.INFO)
        told = self._logger.isEnabledFor(logging.INFO)
        lines: list[str] = []
        for event in jobs:
            if heading is None or event.state != "completed":
                self._put(lines)
                with contextlib.suppress(Exception):  # what else handles log records may fail on one of them
                    self(event)
            elif told:
                about, took = _about(event.task, event.queue), _took(event.seconds)
                lines.append(f"{heading}job {event.job} {about}{event.attempt}) completed in {took}")
        self._put(lines)

    def _put(self, lines: list[str]) -> None:
        if lines and self._stream is not None:
            self._stream.put(lines)
            lines.clear()


def _sole_stream(logger: logging.Logger) -> Stream | None:
    """Our own handler, if it is the only one: a line for every job need not go through all of logging."""
    handlers: list[logging.Handler] = []
    above: logging.Logger | None = logger
    while above is not None:
        if above.filters or above.disabled:
            return None
        handlers += above.handlers
        above = above.parent if above.propagate else None
    [only] = handlers if len(handlers) == 1 else [None]
    return only if isinstance(only, Stream) and not only.filters else None


def _words(event: Event) -> tuple[int, str | None]:  # noqa: PLR0911, PLR0912
    match event:
        case events.JobBegan(job, task, queue, attempt):
            return logging.DEBUG, f"job {job} {task} (queue {queue}, attempt {attempt}) began"
        case events.JobStopped(job, task, queue, attempt, why, reason):
            told = f": {reason}" if reason else ""
            return (
                logging.WARNING,
                f"job {job} {task} (queue {queue}, attempt {attempt}) is told to stop, {why}{told}",
            )
        case events.JobLost(job, task, queue, attempt, why):
            return logging.WARNING, (
                f"job {job} {task} (queue {queue}, attempt {attempt}) was lost ({why}); its result is dropped"
            )
        case events.JobReleased(job, task, queue, attempt, why):
            return logging.INFO, f"job {job} {task} (queue {queue}, attempt {attempt}) is given back ({why})"
        case events.JobRefused(job, task, queue, 0, _):
            return logging.ERROR, (
                f"job {job} {task} (queue {queue}): the database will not have it claimed; it is left out for a while"
            )
        case events.JobRefused(job, task, queue, attempt, state):
            return logging.ERROR, (
                f"job {job} {task} (queue {queue}, attempt {attempt}): the database refuses its outcome, {state}"
            )
        case events.WorkerStarted(worker, label, queues, tasks, concurrency, connections):
            return logging.INFO, (
                f"worker {worker} ({label}) serves {', '.join(queues)}: {_many(len(tasks), 'task')}, "
                f"{_many(concurrency, 'job')} at once, {connections} connections"
            )
        case events.EndpointOpened(host, port, metrics):
            at = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            if metrics:
                return logging.INFO, f"how it is can be asked at http://{at} (/live, /ready, /metrics)"
            return logging.WARNING, (
                f"how it is can be asked at http://{at} (/live, /ready); for /metrics install shiftwork[prometheus]"
            )
        case events.ReapFailed(error):
            return logging.DEBUG, f"jobs of workers that fell silent cannot be taken back now: {error}"
        case events.WorkerStopping(worker, why, running):
            return logging.INFO, f"worker {worker} stops ({why}); {_many(running, 'job')} still running"
        case events.WorkerStopped(worker, clean, jobs, abandoned):
            rest = "" if clean else f", {_many(abandoned, 'job')} left behind"
            return logging.INFO if clean else logging.WARNING, (
                f"worker {worker} has stopped after {_many(jobs, 'job')}{rest}"
            )
        case events.Reaped(jobs):
            shown = ", ".join(f"{job} is {answer}" for job, answer in list(jobs.items())[:10])
            return logging.WARNING, f"{_many(len(jobs), 'job')} taken from workers that fell silent: {shown}"
        case events.ProcessStarted(pid):
            return logging.DEBUG, f"process {pid} is ready"
        case events.ProcessEnded(pid, why, jobs, job):
            if job is None:
                return logging.DEBUG, f"process {pid} has ended after {_many(jobs, 'job')}: {why}"
            return logging.WARNING, f"process {pid} has ended while it ran job {job}: {why}"
        case events.ProcessFailed(error):
            return logging.ERROR, f"{error}; it is tried again, and no job pays for that"
        case events.StraysReleased(jobs):
            return logging.WARNING, (
                f"{_many(len(jobs), 'job')} given back whose claim had no answer: {', '.join(map(str, jobs[:10]))}"
            )
        case events.LeaseLapsing(worker, running):
            return logging.ERROR, (
                f"worker {worker} could not renew its lease in time; {_many(running, 'handler')} told to stop"
            )
        case events.LeaseLost(worker):
            return logging.ERROR, f"worker {worker} was given up by the others; it registers anew"
        case events.LeaseBroken(worker, error, running):
            return logging.CRITICAL, (
                f"worker {worker} cannot renew its lease any more, for its thread fails: {error}; "
                f"{_many(running, 'handler')} told to stop, and the worker ends"
            )
        case events.DatabaseAway(part, error):
            return logging.ERROR, f"{part} is interrupted, and goes on by itself: {error}"
        case events.DatabaseBack(part):
            return logging.INFO, f"{part} goes on"
        case events.HookFailed(hook, job, task, queue, attempt, error):
            said = f"job {job} {task} (queue {queue}, attempt {attempt}): {hook} failed, and the job goes on"
            return logging.WARNING, f"{said}: {error}"
        case events.ClaimsBarred(over):
            if over:
                return logging.INFO, "claiming goes on: that transaction has ended"
            why = "a transaction that pauses or limits something has not ended; `select * from pg_locks where locktype = 'advisory'` shows whose"
            return logging.ERROR, f"nothing can be claimed: {why}"
        case events.JobPassedBy(job):
            why = "a condition of before_claim cannot be answered for it"
            return logging.WARNING, f"job {job} is passed by here: {why}"
        case events.PauseEnded(kind, name, reason):
            what = "everything" if kind == "all" else f"{kind} {name}"
            told = f" (paused for: {reason})" if reason else ""
            return logging.WARNING, f"{what} is resumed: the time of its pause is over{told}"
        case events.WorkerPaused(worker):
            return logging.INFO, f"worker {worker} is paused; what runs goes on"
        case events.WorkerResumed(worker):
            return logging.INFO, f"worker {worker} is not paused any more"
        case events.DutyDone(duty, did, seconds):
            return logging.INFO if did else logging.DEBUG, f"duty {duty} done in {_took(seconds)}: {did}"
        case events.DutyFailed(duty, error, set_aside):
            rest = "; this process will not try it again" if set_aside else ""
            return logging.CRITICAL if set_aside else logging.ERROR, f"duty {duty} failed: {error}{rest}"
        case events.NotificationsPileUp(usage, over):
            if over:
                return logging.INFO, f"the queue of notifications is read again ({usage:.0%} full)"
            return logging.WARNING, (
                f"the queue of notifications is {usage:.0%} full: a session listens and does not read, "
                "for example inside a transaction; workers are not woken any more and find work by polling"
            )
        case events.ListenerProven():
            return logging.DEBUG, "notifications arrive"
        case events.ListenerDeaf(error):
            told = f": {error}" if error else ""
            return logging.WARNING, f"notifications do not arrive, work is found by polling{told}"
    return _other_words(event)


def _other_words(event: Event) -> tuple[int, str | None]:  # noqa: PLR0911, PLR0912
    """What is said of hooks before claims, of singletons and of supervisors."""
    match event:
        case events.ClaimHookFailed(error):
            return logging.ERROR, f"before_claim failed; nothing is claimed until it succeeds again: {error}"
        case events.ClaimHookBack():
            return logging.INFO, "before_claim succeeds again"
        case events.ClaimHookWaits(over):
            if over:
                return logging.INFO, "before_claim does not wait any more"
            return logging.ERROR, "before_claim has not ended yet; nothing is claimed until it does"
        case events.WorkerBuried(worker):
            return logging.INFO, f"the process of worker {worker} is dead; its jobs do not wait for its lease"
        case events.WorkDone(ended):
            return logging.INFO, f"done: {tally(ended)}"
        case events.TasksChanged(worker, queues, tasks):
            return (
                logging.INFO,
                f"worker {worker} serves {', '.join(queues)} now: {_many(len(tasks), 'task')}",
            )
        case events.TaskLeftOut(task, why):
            return logging.ERROR, f"task {task} is left out: {why}"
        case events.StandingBy(name, holder):
            return logging.INFO, f"stands by: another worker is at work as {name!r}: {holder}"
        case events.SingletonHeld(name):
            return logging.INFO, f"is at work as {name!r}, and the only one"
        case events.SingletonLost(name, error):
            return (
                logging.ERROR,
                f"is not sure to be the only {name!r} any more, and claims nothing until it is: {error}",
            )
        case events.WorkerProcessStarted(process, pid):
            return logging.DEBUG, f"worker process {process} is started (pid {pid})"
        case events.WorkerProcessUp(process, pid):
            return logging.INFO, f"worker process {process} is up (pid {pid})"
        case events.WorkerProcessEnded(process, pid, code, expected):
            how = f"was killed by {_signal(-code)}" if code < 0 else f"has ended with exit code {code}"
            return logging.INFO if expected else logging.ERROR, f"worker process {process} (pid {pid}) {how}"
        case events.WorkerProcessRefused(process, error):
            return logging.ERROR, f"worker process {process} cannot be started: {error}"
        case events.WorkerProcessStuck(process, pid, why):
            return logging.ERROR, f"worker process {process} (pid {pid}) is killed: {why}"
        case events.Renewing(processes, why):
            return (
                logging.INFO,
                f"{_many(processes, 'process', 'processes')} to be replaced, one by one ({why})",
            )
        case events.Renewed(processes, error):
            if error:
                return logging.ERROR, f"not replaced: {error}"
            return logging.INFO, f"{_many(processes, 'process', 'processes')} replaced"
        case events.FilesChanged(files):
            more = f" and {len(files) - 3} more" if len(files) > 3 else ""
            return logging.INFO, f"changed: {', '.join(files[:3])}{more}"
        case events.SupervisorStopping(why, degree, running):
            how = ("", " at once", ", whatever it takes")[degree - 1]
            return logging.INFO, f"all stop{how} ({why}): {_many(running, 'process', 'processes')}"
        case events.SupervisorGaveUp(why):
            return logging.CRITICAL, f"gives up: {why}"
        case events.SupervisorStopped(clean, ended, restarts):
            rest = f"; started again {_many(restarts, 'time')}" if restarts else ""
            how = (
                "all processes have stopped" if clean else "all processes have ended, not all of them cleanly"
            )
            return logging.INFO if clean else logging.ERROR, f"{how}; done: {tally(ended)}{rest}"
    return logging.DEBUG, None


def tally(ended: Mapping[str, Mapping[str, int]]) -> str:
    """What was done, by queue and by how it ended."""
    queues = (
        f"{queue}: {', '.join(f'{many:,} {state}' for state, many in states.items())}"
        for queue, states in ended.items()
    )
    return "; ".join(queues) or "no job"


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _ended(event: events.JobEnded) -> tuple[int, str]:
    job = f"job {event.job} {event.task} (queue {event.queue}, attempt {event.attempt})"
    state, error, took = event.state, event.error, _took(event.seconds)
    if state == "completed":
        return logging.INFO, f"{job} completed in {took}"
    if state == "waiting":
        return logging.INFO, f"{job} returned after {took}, and waits for its children"
    why = f": {error.get('code')}: {error.get('message')}" if error else ""
    if state == "scheduled":
        level = logging.WARNING if error else logging.INFO
        return level, f"{job} will run again in {event.delay or 0:.1f} s{why}"
    level = logging.ERROR if state == "failed" else logging.INFO
    return level, f"{job} {state} after {took}{why}"


@lru_cache
def _about(task: str, queue: str) -> str:
    return clean(f"{task} (queue {queue}, attempt ")


def _took(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _many(number: int, noun: str, nouns: str = "") -> str:
    return f"{number} {noun if number == 1 else nouns or f'{noun}s'}"


class TextFormatter(logging.Formatter):
    """A line for people: when, how grave, what; lines of a handler say of which job."""

    _moment = 0
    _stamp = ""

    def __init__(self) -> None:
        super().__init__()
        number = process()
        self._which = "" if number is None else f"[{number}] "

    def format(self, record: logging.LogRecord) -> str:
        run = current.get(None)
        about = f"job {run.id} {clean(run.name)}: " if run else ""
        line = self.line(record.created, record.levelno, f"{about}{record.getMessage()}")
        if record.exc_info:
            trace = self.formatException(record.exc_info)
            line += "".join(f"\n  {clean(part)}" for part in trace.splitlines())
        return line

    def line(self, at: float, level: int, words: str, _: Event | None = None) -> str:
        """One line."""
        return f"{self.heading(at, level)}{clean(words)}"

    def heading(self, at: float, level: int) -> str:
        """What a line begins with."""
        moment = int(at * 1000)
        if self._moment != moment:  # many lines share one
            self._moment = moment
            self._stamp = f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(at))}.{moment % 1000:03d}"
        return f"{self._stamp} {logging.getLevelName(level):<7} {self._which}"


class JsonFormatter(logging.Formatter):
    """A line for programs: one JSON object."""

    def __init__(self) -> None:
        super().__init__()
        number = process()
        self._which = {} if number is None else {"process": number}

    def format(self, record: logging.LogRecord) -> str:
        more: dict[str, Any] = {"logger": record.name}
        if run := current.get(None):
            more |= {"job": run.id, "task": run.name, "queue": run.queue, "attempt": run.attempt}
        if record.exc_info:
            more["traceback"] = self.formatException(record.exc_info)
        return self._written(record.created, record.levelno, record.getMessage(), more)

    def line(self, at: float, level: int, words: str, event: Event) -> str:
        """One line, with all that the event says; of an error no traceback, which is kept with the job."""
        more = {"event": type(event).__name__, **msgspec.to_builtins(event, str_keys=True)}
        more.pop("type", None)
        if isinstance(error := more.get("error"), dict):
            more["error"] = {name: error[name] for name in ("code", "type", "message") if name in error}
        return self._written(at, level, words, more)

    def _written(self, at: float, level: int, words: str, more: dict[str, Any]) -> str:
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at))
        line = {"at": f"{when}.{int(at % 1 * 1000):03d}Z", "level": logging.getLevelName(level).lower()}
        return json.dumps({**line, **self._which, "message": words, **more}, default=str)


class Stream(logging.StreamHandler[TextIO]):
    """Writes to standard error; what is logged in one go in the event loop is written in one go."""

    def __init__(self, form: TextFormatter | JsonFormatter) -> None:
        super().__init__()
        self.setFormatter(form)
        self._form = form
        self._alone = process() is None
        self._lines: deque[str] = deque()
        self._due = False
        """Whether they are about to be written. How many there are does not tell: threads add to them as well."""

    def emit(self, record: logging.LogRecord) -> None:
        event = getattr(record, "event", None)
        try:
            if event is None:
                self.put([self.format(record)])
            else:
                self.tell(record.levelno, record.getMessage(), event)
        except Exception:  # noqa: BLE001  -- as in logging: a bad line is no reason to fail
            self.handleError(record)

    def tell(self, level: int, words: str, event: Event) -> None:
        """Write what an event says."""
        self.put([self._form.line(time.time(), level, words, event)])

    def heading(self, level: int) -> str | None:
        """What lines begin with now, if words are all that follows."""
        return self._form.heading(time.time(), level) if isinstance(self._form, TextFormatter) else None

    def put(self, lines: list[str]) -> None:
        """Write these lines soon."""
        self._lines.extend(lines)
        if not self._due:
            self._due = True
            try:
                asyncio.get_running_loop().call_soon(self.flush)
            except RuntimeError:
                self.flush()

    def flush(self) -> None:
        with self.lock or contextlib.nullcontext():
            self._due = False
            lines = []
            while self._lines:
                lines.append(self._lines.popleft())  # threads may add more meanwhile
            if lines:
                with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
                    for part in [lines] if self._alone else _parts(lines):
                        self.stream.write("\n".join(part) + "\n")
                        self.stream.flush()


def _parts(lines: list[str]) -> Iterator[list[str]]:
    """Lines in parts that go into a pipe whole, so that several processes can write to it."""
    part: list[str] = []
    size = 0
    for line in lines:
        length = len(line.encode(errors="replace")) + 1
        if part and size + length > WHOLE:
            yield part
            part, size = [], 0
        part.append(line)
        size += length
    yield part


def is_set_up() -> bool:
    """Whether lines are written as we do."""
    return any(isinstance(handler, Stream) for handler in logging.getLogger().handlers)


def set_up(level: str, form: str) -> None:
    """Log to standard error."""
    root = logging.getLogger()
    root.handlers = [Stream(JsonFormatter() if form == "json" else TextFormatter())]
    root.setLevel(level.upper())
