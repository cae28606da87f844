"""A process in which jobs run, one after the other: `python -m shiftwork.child`, as a worker starts it.

It reads a job from the pipe, runs it in its main thread, and says how it ended; all that depends on the program (arguments,
middleware, error codes, whether an error is worth another attempt) is decided here, where the program's own types are.
While a job runs nothing reads the pipe, except an event loop, for an async function, and the context of a plain one,
whenever it is asked. Whoever asks nothing is killed when its time is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import io
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from shiftwork import logs, operations
from shiftwork.context import Context, Finishing
from shiftwork.errors import (
    ConfigurationError,
    FinishUndone,
    Interrupted,
    UnknownHandler,
)
from shiftwork.operations import importing
from shiftwork.outcome import Outcome, Raised, Returned, decide, done
from shiftwork.program import Program
from shiftwork.retry import Retry
from shiftwork.worker import processes
from shiftwork.worker.attempt import USUAL, decided, lent, prepared
from shiftwork.worker.pipe import (
    Begin,
    Call,
    Completed,
    Concluded,
    Ended,
    Halt,
    Line,
    Progressed,
    Ready,
    Said,
    Unready,
)
from shiftwork.worker.run import Run, Stop
from shiftwork.worker.slots import isolation

PR_SET_PDEATHSIG = 1
PR_SET_NO_NEW_PRIVS = 38
FIRST_TO_GO = "500"
"""Who is to die when memory runs out: rather this process than the worker, or the database."""

NOTHING = msgspec.Raw(b"null")


def main() -> None:
    """Run jobs until the worker hangs up."""
    if len(sys.argv) < 3:
        sys.exit("a process that runs jobs is started by a worker: shiftwork worker --help")
    line = Line(*map(int, sys.argv[1:3]))
    begin = line.listen()
    if not isinstance(begin, Begin):
        return
    confine(begin)
    processes.here = True
    try:
        app = load(begin)
    except BaseException as error:  # noqa: BLE001  -- whatever the program does while it is imported
        line.say(Unready(_told(begin.where, error)))
        sys.exit(1)
    gc.collect()
    gc.freeze()  # what was imported stays: nobody need look through it for garbage again and again
    with app:
        line.say(Ready(sorted(app.tasks)))
        Place(app, line).serve()


def confine(begin: Begin) -> None:
    """End with the worker, gain no rights, dump no core unless that is wanted, and be the first to go for want of memory.

    Where the code was when it crashed is written to standard error.
    """
    faulthandler.enable()
    if sys.platform == "linux":
        system = ctypes.CDLL(None)
        system.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        system.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(FIRST_TO_GO, "ascii")
    if os.getppid() != begin.worker:
        sys.exit(1)  # it died before it could take us with it
    if not begin.settings.process_core_dumps:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def load(begin: Begin) -> Program:
    """The app, imported as the worker has imported it, with the worker's settings."""
    sys.path[:] = begin.path
    if begin.tells:
        logs.set_up(begin.settings.log_level, begin.settings.log_format)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # so that nothing is lost that was printed before a crash
    module, _, name = begin.where.partition(":")
    with importing():
        app = getattr(importlib.import_module(module), name)
    if not isinstance(app, Program):
        raise ConfigurationError(f"{begin.where} is no App, but a {type(app).__name__}")
    app.close()  # whatever it opened while it was imported
    app.settings = begin.settings
    if begin.withheld:
        app.withheld = (
            "this process is not told where the database is, since DATABASE_URL is not among the variables that "
            "process_environment lets through"
        )
    return app


def _told(where: str, error: BaseException) -> str:
    said = "".join(traceback.format_exception_only(error)).strip()
    frames = traceback.extract_tb(error.__traceback__)
    at = next((f" ({one.filename}:{one.lineno})" for one in reversed(frames) if one.filename != __file__), "")
    return f"it cannot import {where}: {said}{at}"


class Place:
    """Where jobs run, and what their contexts ask for."""

    def __init__(self, app: Program, line: Line) -> None:
        self._app = app
        self._line = line
        self._store = app.store(app.settings)
        self._tasks = app.tasks
        self._middleware = app.layers
        self._run: Run | None = None
        """What runs, if it may be told something meanwhile."""

        self._listening = threading.Lock()
        """Held by whoever reads the pipe while a job runs: any thread of its handler may."""

        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_copy = False
        os.register_at_fork(after_in_child=self._be_a_copy)

    def serve(self) -> None:
        """Job after job."""
        while (message := self._line.listen()) is not None:
            if isinstance(message, Call) and not self._perform(message):
                return

    def _be_a_copy(self) -> None:
        self._is_copy = True

    def _perform(self, call: Call) -> bool:
        """Run a job and say how it ended; says whether anybody has heard that."""
        task = self._tasks.get(call.taken[1])
        run = Run(*call.taken, call.worker, call.claimed_at, task, None, call.waited)
        ending = self._called(run, call.timeout)
        if isinstance(ending, Raised):
            ending = self._repeated(run, call.timeout, ending)
        if self._run is not None:
            with self._listening:
                self._run = None
        run.ended = True
        if self._is_copy:
            os._exit(0)  # a copy that the handler has forked, and that came back from it
        try:  # noqa: SIM105  -- which takes longer than what it does here
            sys.stdout.flush()
        except (OSError, ValueError):
            pass
        try:
            self._line.say(self._completed(run, ending) or self._ended(run, ending))
        except ConnectionError:
            return False
        except Exception as error:  # noqa: BLE001  -- something in it cannot be written, in what it enqueues perhaps
            self._line.say(_said(decide(run, Raised(error), USUAL)))
        return True

    def _completed(self, run: Run, ending: Returned | Raised) -> Completed | None:
        """How a job ended of which nothing needs to be decided."""
        if isinstance(ending, Raised) or run.jobs or run.concluded:
            return None
        try:
            return Completed(run.id, msgspec.Raw(run.task.signature.encode_result(ending.value)))
        except Exception:  # noqa: BLE001  -- it is looked at again, with patience
            return None

    def _ended(self, run: Run, ending: Returned | Raised) -> Ended:
        interrupted = isinstance(ending, Raised) and isinstance(
            ending.error, asyncio.CancelledError | Interrupted
        )
        if run.concluded and isinstance(ending, Returned):
            # Had that transaction been committed, this would find nothing to end.
            ending = Raised(FinishUndone("it was finished in a transaction that was not committed"))
        return _said(decided(run, ending), interrupted=interrupted)

    def _called(self, run: Run, timeout: timedelta | None) -> Returned | Raised:
        """How the handler ended."""
        try:
            return Returned(self._once(run, timeout))
        except BaseException as error:  # noqa: BLE001  -- every ending is a value
            return Raised(error)

    def _repeated(self, run: Run, timeout: timedelta | None, ending: Returned | Raised) -> Returned | Raised:
        """How a handler ended that raised: after a deadlock it may be called again on the spot, as its policy says."""
        retry: Retry = USUAL if run.task is None else run.task.retry or USUAL
        repeated = 0
        while isinstance(ending, Raised) and run.stop is None and retry.repeats(ending.error, repeated):
            run.jobs = None
            time.sleep(retry.pause(repeated).total_seconds())
            repeated += 1
            ending = self._called(run, timeout)
        return ending

    def _once(self, run: Run, timeout: timedelta | None) -> Any:  # noqa: ANN401
        task = run.task
        if task is None:
            raise UnknownHandler(f"this process has no task {run.name!r}")
        if self._middleware or task.context_parameters:
            run.context = ListeningContext(run, self, timeout)
            self._run = run
        call = prepared(run)
        if task.is_async or self._middleware:
            return self._awaited(run, call)
        return isolation(run).run(call)

    def _awaited(self, run: Run, call: Callable[[], Any]) -> Any:  # noqa: ANN401
        """What the handler returns, in an event loop that hears what the worker says, inside the middleware."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
        layered: Callable[[], Awaitable[Any]] = call if run.task.is_async else partial(_on_the_spot, call)
        for layer in reversed(self._middleware):
            layered = partial(layer, run.context, layered)
        task = self._loop.create_task(_as_value(layered), context=isolation(run))
        self._run = run
        run.slot = task  # type: ignore[assignment]
        self._loop.add_reader(self._line.fileno(), self.listen)
        self._loop.call_soon(self.listen)  # it may have been read with the job
        try:
            ending = self._loop.run_until_complete(task)
        finally:
            if not self._is_copy:  # which shares the selector: we would not be told any more
                self._loop.remove_reader(self._line.fileno())
            run.slot = None
        if isinstance(ending, Raised):
            raise ending.error
        return ending.value

    def listen(self) -> None:
        """Hear what the worker says while a job runs, if it says anything; never what it says to who forked this copy."""
        if self._is_copy:
            return
        with self._listening:
            while (run := self._run) is not None and self._line.has_news():
                message = self._line.listen()
                if message is None:
                    os._exit(1)  # the worker is gone
                if isinstance(message, Halt):
                    run.stop, run.why = Stop(message.reason), message.why
                    if run.slot is not None and run.task.is_async and self._loop is not None:
                        self._loop.call_soon_threadsafe(run.slot.cancel, message.reason)

    # What a context asks for.

    @property
    def enqueues(self) -> bool:
        """Whether jobs can be enqueued together with an outcome."""
        return self._store.enqueues

    def log(self, run: Run, level: str, message: str) -> None:
        """Keep a line with the job."""
        self._line.say(Said(run.id, level, message))

    def progress(self, run: Run, fraction: float | None, message: str | None) -> None:
        """Keep how far the job is."""
        self._line.say(Progressed(run.id, fraction, message))

    def fence(self, run: Run, connection: object) -> Any:  # noqa: ANN401
        """Go on in this transaction only if the job is still ours."""
        return lent(connection, self._app.settings.schema, operations.fence(self._store, run.id, run.attempt))

    def finish(self, run: Run, connection: object, result: object) -> Any:  # noqa: ANN401
        """End the job as completed in the caller's transaction."""
        encoded = run.task.signature.encode_result(result)
        jobs = tuple(run.jobs or ())
        outcome = Outcome(run, done(jobs), result=encoded, jobs=jobs)
        plan = operations.conclude(self._store, run.worker, outcome)

        def then() -> None:
            run.concluded = True
            self._line.say(Concluded(run.id))

        return lent(connection, self._app.settings.schema, plan, then)

    def finishing(self, run: Run, result: object) -> Finishing:
        """There is none: the worker's sessions are in another process."""
        raise ConfigurationError(
            f"task {run.name!r} runs in a process of its own, which has none of the worker's sessions; open a connection, "
            "and end the job in its transaction: context.finish(connection)"
        )


class ListeningContext(Context):
    """A context that listens to the worker whenever it is asked something."""

    __slots__ = ()

    @property
    def cancelled(self) -> str | None:
        """Why this attempt is to end now; None while it may go on."""
        self._listen()
        return super().cancelled

    def check(self) -> None:
        """Raise if this attempt is to end now."""
        self._listen()
        super().check()

    def _listen(self) -> None:
        assert isinstance(self._place, Place)  # noqa: S101
        self._place.listen()


async def _on_the_spot(call: Callable[[], Any]) -> Any:  # noqa: ANN401
    return call()


async def _as_value(call: Callable[[], Awaitable[Any]]) -> Returned | Raised:
    try:
        return Returned(await call())
    except BaseException as error:  # noqa: BLE001  -- asyncio would let some of them end the process
        return Raised(error)


def _said(outcome: Outcome, *, interrupted: bool = False) -> Ended:
    result = NOTHING if outcome.result is None else msgspec.Raw(outcome.result)
    return Ended(
        *(outcome.job.id, interrupted, outcome.state, outcome.counts, result),
        *(outcome.error, outcome.delay, outcome.at, list(outcome.jobs)),
    )


if __name__ == "__main__":
    main()
