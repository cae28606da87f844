"""One attempt: find the task, read the arguments, call the handler, say how it ended.

Every ending is a value. Nothing that a handler does or raises gets past here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from functools import partial
from types import CoroutineType, TracebackType
from typing import Any

import msgspec
from psycopg import AsyncConnection, Connection

from shiftwork import events, operations
from shiftwork.codec import Call
from shiftwork.context import Context
from shiftwork.database import Plan, alend, arun, lend
from shiftwork.database import run as carry_out
from shiftwork.errors import (
    Cancel,
    ConfigurationError,
    DatabaseUnavailable,
    FenceLost,
    FinishUndone,
    Interrupted,
    InvalidArgument,
    TaskTimeout,
    UnfitArguments,
    UnknownHandler,
)
from shiftwork.job import Claimed, Job, State, new, sow
from shiftwork.outcome import Outcome, Raised, Returned, completed, decide, done, in_a_line
from shiftwork.retry import Retry
from shiftwork.settings import Settings
from shiftwork.stores.store import Store
from shiftwork.worker.batches import Batches
from shiftwork.worker.hooks import TOLD, Around, Hooks
from shiftwork.worker.interruption import Interruption
from shiftwork.worker.pipe import Completed, Ended
from shiftwork.worker.processes import Crash, NoProcess, Processes, outcome_of
from shiftwork.worker.run import NotNow, Run, Stop, Task
from shiftwork.worker.settling import Settling
from shiftwork.worker.slots import Deadlines, Waiting, first_steps, isolation
from shiftwork.worker.sql import hearing
from shiftwork.worker.threads import NoThread
from shiftwork.worker.transactions import Ours, OursBlocking, TransactionEnded, Transactions, Unsure

Middleware = Callable[[Context, Callable[[], Awaitable[Any]]], Awaitable[Any]]
At = Callable[[str], Awaitable[None] | None]
"""Called at named points; what it gives, if it gives something, is awaited there."""

Ending = Returned | Raised
Quick = tuple[Callable[..., Any], Callable[[str], Call]]
"""A handler, and what reads its arguments."""

Begun = tuple[partial[Any], Awaitable[Any]]
"""A handler with its arguments, and what is left of its first call."""

USUAL = Retry()
DONE = operations.DONE
NOTHING: Call = ((), {})
clock = time.perf_counter
NOT_NOW = 1.0
"""Seconds before a job is given back for which there was no thread or no process."""


class After(Enum):
    """What becomes of a job whose attempt leaves no outcome."""

    DROPPED = "dropped"  # it is not ours any more
    GIVEN_BACK = "given back"  # nothing is counted against it, unless it crashed


@dataclass(frozen=True, slots=True)
class Written:
    """The outcome is in the database already."""

    outcome: Outcome


Fate = Ending | Outcome | Written | After
"""How an attempt ended, or what came of it already."""


class Attempts:
    """Runs attempts, one in each slot."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        settling: Settling,
        transactions: Transactions,
        processes: Processes,
        *,
        hooks: Hooks,
        publish: Callable[[events.Event], None],
        middleware: Sequence[Middleware] = (),
        waits: Callable[[], None],
        closing: Callable[[], bool],
        began: Callable[[Run], None],
        told_beginnings: Sequence[events.Subscriber],
        written: Callable[[Run, Outcome], None],
        dropped: Callable[[Run], None],
        stop: Callable[[Run, Stop, str], None],
        more: Callable[[], int],
        at: At | None = None,
    ) -> None:
        self._settings = settings
        self._store = store
        self._settling = settling
        self.transactions = transactions
        self._processes = processes
        self.hooked = bool(hooks.before_job or hooks.after_job)
        self._publish = publish
        self._before = Around("before_job", hooks.before_job, self._hook_failed, self._is_stopped)
        self._after = Around("after_job", hooks.after_job, self._hook_failed, self._is_stopped)
        self.hook_times = {around.kind: around.took for around in (self._before, self._after)}
        """How long those before and after each job took, kept here and not told: they are as many as jobs."""

        self._middleware = tuple(middleware)
        self._waits = waits
        self._closing = closing
        self._began = began
        self._told_beginnings = told_beginnings
        """Those who want to hear of them, if there are any."""

        self._written = written
        self._dropped = dropped
        self._threads = transactions.threads
        self._deadlines = Deadlines(stop)
        self._steps = first_steps()
        self._plain: set[Task | None] = set()
        """Tasks whose jobs need nothing but their arguments."""

        self._quick: dict[Task | None, Quick] = {}
        """Those of them whose first step can be taken at once."""

        self.batches = Batches(transactions, decided=decided, more=more, timed=self._timed, stop=stop)
        self._at = at

    def begin(self, run: Run) -> Coroutine[Any, Any, None] | None:
        """Begin an attempt; what is left to await of it, None if its outcome is on its way already.

        The first step of a handler is often its only one, and is taken right here: a chain of coroutines around it
        would cost more than all the rest of the job's way.
        """
        task: Task | None = run.task
        if run.stop is not None or (
            task not in self._quick
            and (task is None or task.transaction or task.executor != "loop" or self._middleware)
        ):
            return self._attempt(run)
        if self._at and (held := self._at("began")) is not None:
            return self._attempt(run, held=held)
        if self._told_beginnings:
            tell = self._began  # to call it in one go takes longer: it is an attribute and no method
            tell(run)
        if self.hooked:
            return self._begin_hooked(run)
        ending = self._first_step(run, clock())
        return self._attempt(run, ending) if isinstance(ending, tuple) else self._ended(run, ending)

    def _first_step(self, run: Run, began: float) -> Ending | Begun:
        """How the handler ended, if its first step was its only one; else what is left of it."""
        call: Callable[..., Any]
        args, kwargs = NOTHING
        run.began = began
        try:
            if (quick := self._quick.get(run.task)) is None:
                call = self._prepared(run)
            else:
                call, read = quick
                try:
                    args, kwargs = read(run.payload or "null")
                except InvalidArgument as error:
                    raise UnfitArguments(str(error)) from None
        except Exception as error:  # noqa: BLE001  -- every ending is a value
            return Raised(error)
        steps = self._steps
        try:
            coroutine = call(*args, **kwargs) if kwargs else call(*args)
            if type(coroutine) is not CoroutineType:
                coroutine = _waited_for(coroutine)
            context = isolation(run)
            answer = context.run(steps.send, coroutine)
        except BaseException as error:  # noqa: BLE001  -- every ending is a value
            self._steps = first_steps()
            if _retry(run.task).repeats(error, 0):
                return partial(call, *args, **kwargs), _raise(error)
            ending: Ending = Raised(error)
        else:
            if steps.gi_yieldfrom is not None:
                self._steps = first_steps()
                self._waits()
                return partial(call, *args, **kwargs), Waiting(steps, answer, context.run)
            ending = answer
        run.took = clock() - began
        return ending

    async def _attempt(
        self,
        run: Run,
        begun: Begun | None = None,
        *,
        held: Awaitable[None] | None = None,
        between: Awaitable[Fate] | None = None,
    ) -> None:
        """From the claimed job to its outcome, which is then written by others."""
        fresh = begun is None and between is None
        try:
            if fresh:
                await self._reached("began") if held is None else await held
            if run.stop is not None and fresh:
                ending: Fate = Raised(Interrupted(run.stop.value))
            else:
                if fresh:
                    if self._told_beginnings:
                        self._began(run)
                    run.began = clock()
                if between is not None:
                    ending = await between
                elif self.hooked:
                    sow(job := new(Claimed), run)
                    ending = await self._between_hooks(run, job, self._before.tell(run.began, job))
                else:
                    ending = await self._called(run, begun)
                    run.took = clock() - run.began
                if run.ended:
                    return  # the worker stopped without waiting for it
        except Exception as error:  # noqa: BLE001  -- a fault of ours costs this attempt, and not the slot
            ending = Raised(error)
        if (rest := self._ended(run, ending)) is not None:
            await rest

    def _begin_hooked(self, run: Run) -> Coroutine[Any, Any, None] | None:
        """Begin an attempt between hooks; here too nothing is awaited that does not wait.

        Both are called here and not by a function for both: that would cost as much as they do.
        """
        before, after = self._before, self._after
        sow(job := new(Claimed), run)
        call, began = before.call, clock()
        try:
            answer = call(job)
            if (
                answer is not None
                and (type(answer) is not CoroutineType or (answer := before.steps.send(answer)) is not TOLD)
                and (rest := before.rest(job, began, answer)) is not None
            ):
                self._waits()
                run.began = began
                return self._attempt(run, between=self._between_hooks(run, job, rest))
        except BaseException as error:  # noqa: BLE001  -- it is not ours, and nobody can have cancelled us by now
            before.failed(job, error)
        former, began = began, clock()
        before.fresh.append(began - former)
        ending = self._first_step(run, began)
        if type(ending) is Returned:
            failure = None
        elif isinstance(ending, tuple):
            self.count_hooks()  # it may run for long
            return self._attempt(run, between=self._between_hooks(run, job, None, ending))
        else:
            failure = _failure(ending)
        call, began = after.call, began + run.took
        try:
            answer = call(job, failure)
            if (
                answer is not None
                and (type(answer) is not CoroutineType or (answer := after.steps.send(answer)) is not TOLD)
                and (rest := after.rest(job, began, answer)) is not None
            ):
                self._waits()
                return self._attempt(run, between=self._after_hooks(run, rest, ending))
        except BaseException as error:  # noqa: BLE001  -- as above
            after.failed(job, error)
        after.fresh.append(clock() - began)
        return self._ended(run, ending)

    async def _between_hooks(
        self, run: Run, job: Job, before: Awaitable[None] | None, begun: Begun | None = None
    ) -> Fate:
        """What is left of hooks before the job, the job, and, whatever came of it, hooks after it."""
        ending: Fate = Raised(Interrupted("it was stopped"))
        try:
            if before is not None:
                await before
            if begun is None:
                run.began = clock()
            ending = await self._called(run, begun)
        except BaseException as error:  # noqa: BLE001  -- told to stop while a hook waited
            ending = self._raised(run, error)
        finally:
            ended = clock()
            run.took = ended - run.began  # without the hooks that come now
            after = self._after.tell(ended, job, _failure(ending))
            if after is not None:
                await self._after_hooks(run, after, ending)
        return ending

    async def _after_hooks(self, run: Run, waiting: Awaitable[None], ending: Fate) -> Fate:
        """Let hooks after a job end; whoever is told to stop meanwhile has ended already."""
        try:
            await waiting
        except asyncio.CancelledError:
            if run.stop is None:
                raise
        return ending

    def count_hooks(self) -> None:
        """Some jobs have ended: count how long the hooks around them took."""
        self._before.count()
        self._after.count()

    def _hook_failed(self, run: Run, kind: str, error: BaseException) -> None:
        failed = in_a_line(error)
        self._settling.log(run, "warning", f"{kind} failed: {failed}")
        self._publish(events.HookFailed(kind, run.id, run.name, run.queue, run.attempt, failed))

    def _ended(self, run: Run, ending: Fate) -> Coroutine[Any, Any, None] | None:
        run.ended = True
        if self._at and (held := self._at("ended")) is not None:
            return self._held(held, run, ending)
        if type(ending) is Returned and not (run.stop or run.done or run.concluded):  # as most do
            try:
                if run.jobs:
                    outcome = _completed(run, ending.value)
                else:
                    encode = run.task.signature.encode_result
                    outcome = Outcome(run, DONE, None, encode(ending.value))
            except Exception:  # noqa: BLE001, S110  -- it is looked at again, with patience
                pass
            else:
                self._settling.put(run, outcome)
                return None
        self._pass_on(run, ending)
        return None

    async def _held(self, held: Awaitable[None], run: Run, ending: Fate) -> None:
        await held
        self._pass_on(run, ending)

    def _pass_on(self, run: Run, ending: Fate) -> None:
        """Let what came of it be written."""
        try:
            fate = self._fate(run, ending) if isinstance(ending, Returned | Raised) else ending
        except Exception as error:  # noqa: BLE001  -- a fault of ours, or of a policy
            fate = decide(run, Raised(error), USUAL)
        if isinstance(fate, Outcome):
            self._settling.put(run, fate)
            return
        match fate:
            case Written(outcome):
                self._written(run, outcome)
            case After.GIVEN_BACK:
                self._settling.give_back(run)
            case After.DROPPED:
                self._dropped(run)

    def _fate(self, run: Run, ending: Ending) -> Outcome | Written | After:
        """What becomes of the job."""
        if run.done is not None:
            return Written(run.done)
        if isinstance(ending, Raised) and isinstance(ending.error, NotNow):
            run.why = run.why or str(ending.error)
            return After.GIVEN_BACK
        if run.stop is not None and (run.stop is Stop.LOST or _is_interrupted(ending)):
            match run.stop:
                case Stop.LOST:
                    return After.DROPPED
                case Stop.LAPSED | Stop.SHUTDOWN:
                    return After.GIVEN_BACK
                case Stop.CANCELLED:
                    ending = Raised(Cancel(run.why or "cancelled"))
                case Stop.TIMEOUT:
                    ending = Raised(TaskTimeout(f"it ran longer than {self._timeout(run.task)}"))
        elif run.concluded and isinstance(ending, Returned):
            # Ended in a transaction of the handler's own. Had that been committed, this would find nothing to end.
            ending = Raised(FinishUndone("it was finished in a transaction that was not committed"))
        return decided(run, ending)

    def _timeout(self, task: Task) -> timedelta | None:
        return task.timeout or self._settings.timeout

    async def _called(self, run: Run, begun: Begun | None) -> Fate:
        """How the handler ended, or what came of it if it was transactional or ran elsewhere."""
        try:
            if begun is not None:
                return Returned(await self._repeated(run, *begun))
            if run.runs_apart:
                return await self._in_process(run)
            if run.task is not None and run.task.transaction and not run.task.batch:
                return await self._with_session(run)
            return Returned(await self._repeated(run, self._prepared(run)))
        except BaseException as error:  # noqa: BLE001  -- every ending is a value
            return self._raised(run, error)

    def _prepared(self, run: Run) -> partial[Any]:
        """The handler with its arguments, as far as they are stored or known by now."""
        task: Task | None = run.task
        if task in self._plain:
            return prepared(run)
        if task is None:
            raise UnknownHandler(f"this worker has no task {run.name!r}")
        timeout = self._timeout(task)
        special = bool(self._middleware or task.context_parameters or task.batch)
        if special:
            run.context = Context(run, self, timeout)
        elif timeout is None:
            self._plain.add(task)
            if task.executor == "loop" and not task.transaction:
                self._quick[task] = task.function, task.signature.decode_json
        call = prepared(run)
        if task.batch:
            call = partial(self.batches.join, run, *call.args, *call.keywords.values())
        if not (task.batch and task.transaction):  # whose time begins once they have a session
            self._timed(run)
        return call

    def _timed(self, run: Run) -> None:
        if (timeout := self._timeout(run.task)) is not None:
            self._deadlines.add(run, timeout.total_seconds())

    async def _repeated(
        self,
        run: Run,
        call: Callable[..., Any],
        first: Awaitable[Any] | None = None,
        *,
        undo: Callable[[], Awaitable[None]] | None = None,
    ) -> Any:  # noqa: ANN401
        """What the handler returns; after a deadlock it may be called again on the spot, as its policy says."""
        retry = _retry(run.task)
        repeated = 0
        while True:
            try:
                return await (first or self._handled(run, call))
            except Exception as error:
                if run.stop is not None or run.in_thread or not retry.repeats(error, repeated):
                    raise
                if undo is not None:
                    await undo()
            first = None
            run.jobs = None
            self._waits()
            await asyncio.sleep(retry.pause(repeated).total_seconds())
            repeated += 1

    async def _handled(self, run: Run, call: Callable[..., Any]) -> Any:  # noqa: ANN401
        """What the handler returns, in a context of its own, inside the middleware."""
        if not run.task.is_async and not self._middleware:
            return await self._in_thread(run, call)
        coroutine, context = self._wrapped(run, call) if self._middleware else call(), isolation(run)
        try:
            pending = context.run(coroutine.send, None)
        except StopIteration as end:
            return end.value
        self._waits()
        return await Waiting(coroutine, pending, context.run)

    async def _reached(self, point: str) -> None:
        if self._at and (held := self._at(point)) is not None:
            await held

    def _is_stopped(self, run: Run) -> bool:
        """Whether who finds himself cancelled was cancelled by us: with his job, or with the slot."""
        return run.stop is not None or self._closing()

    def _raised(self, run: Run, error: BaseException) -> Raised:
        if isinstance(error, asyncio.CancelledError) and run.stop is None and self._closing():
            raise error  # the slot itself is cancelled, not its handler
        return Raised(error)

    async def _in_thread(self, run: Run, call: Callable[[], Any]) -> Any:  # noqa: ANN401
        self._waits()
        try:
            return await self._threads.run(call, run)
        except NoThread:
            await asyncio.sleep(NOT_NOW)
            raise

    async def _in_process(self, run: Run) -> Ending | Outcome | After:
        """The handler in a process of its own, middleware and all."""
        self._waits()
        timeout = self._timeout(run.task)

        def began() -> None:
            if timeout is not None:
                self._deadlines.add(run, timeout.total_seconds())

        try:
            ended = await self._processes.run(run, timeout, began)
        except NoProcess as error:
            self._processes.publish(events.ProcessFailed(str(error)))
            await asyncio.sleep(NOT_NOW)
            run.why = str(error)
            return After.GIVEN_BACK  # its code has not begun
        if isinstance(ended, Completed) and run.stop is not Stop.LOST:
            return outcome_of(run, ended)
        if isinstance(ended, Ended) and not (ended.interrupted and run.stop) and run.stop is not Stop.LOST:
            return outcome_of(run, ended)
        if isinstance(ended, Crash) and run.stop is None:
            run.crashed = run.why = ended.why
            return After.GIVEN_BACK
        return Raised(Interrupted(str(run.stop)))

    async def _wrapped(self, run: Run, call: Callable[..., Any]) -> Any:  # noqa: ANN401
        """The first layer is outermost."""
        layered: Callable[[], Awaitable[Any]] = (
            call if run.task.is_async else partial(self._in_thread, run, call)
        )
        for layer in reversed(self._middleware):
            layered = partial(layer, run.context, layered)
        return await layered()

    async def _with_session(self, run: Run) -> Ending | Written | After:
        """The handler, once it is the job's turn to have a session."""
        self._waits()
        async with self.transactions.in_turn() as in_time:
            if not in_time:
                run.why = "no session was free for a while"
                return After.GIVEN_BACK
            if run.in_database:
                return await self._in_database(run)
            return await self._transacted(run, self._prepared(run))

    async def _transacted(self, run: Run, call: partial[Any]) -> Ending | Written | After:
        """The handler inside the job's transaction, which is then closed with the outcome."""
        connection: Ours | OursBlocking | None = None
        try:
            try:
                connection = await self.transactions.open(run)
            except DatabaseUnavailable:
                await asyncio.sleep(self.transactions.pause())
                return After.GIVEN_BACK  # its code has not begun
            if run.context is not None:
                run.context.tx = connection
            if run.task.connection_parameter is not None:
                call.keywords[run.task.connection_parameter] = connection
            if isinstance(connection, OursBlocking):
                run.interruption = Interruption(connection)
            ending: Ending
            try:
                if run.stop is not None:
                    await _raise(Interrupted(run.stop.value))  # while the session was opened
                undo = partial(self.transactions.undo, run, connection)
                ending = Returned(await self._repeated(run, call, undo=undo))
            except BaseException as error:  # noqa: BLE001
                ending = self._raised(run, error)
            if run.in_thread:
                return _left_behind(ending)
            run.concluding = True
            if run.interruption is not None and await run.interruption.caused(ending):
                ending = Raised(Interrupted(str(run.stop)))
            fate = self._fate(run, ending)
            if not isinstance(fate, Outcome):
                return fate
            run.unsure = fate
            return Written(await self.transactions.close_with(run, connection, fate))
        except BaseException as error:  # noqa: BLE001
            return self._transaction_failed(run, error)
        finally:
            if connection is not None:
                self.transactions.put(connection, in_use=run.in_thread)

    async def _in_database(self, run: Run) -> Ending | Written | After:
        """A routine in the database, on a session of ours; middleware is not for it."""
        hear = hearing(partial(self.log, run), partial(self.progress, run))
        try:
            session = await self.transactions.session()
        except DatabaseUnavailable:
            await asyncio.sleep(self.transactions.pause())
            return After.GIVEN_BACK  # its code has not begun
        session.add_notice_handler(hear)
        if (timeout := self._timeout(run.task)) is not None:
            self._deadlines.add(run, timeout.total_seconds())
        try:
            if run.task.commits:
                return Returned(await self.transactions.call(run, session))
            run.unsure = Outcome(run, State.COMPLETED)  # or it failed, which will then be told as lost
            answer = await self.transactions.run_job(run, session)
        except BaseException as error:  # noqa: BLE001
            if run.stop is Stop.LOST and run.unsure is not None:
                return (
                    After.GIVEN_BACK
                )  # its end may be what took it from us: asked again, the database tells
            if isinstance(error, Unsure) and run.stop is None:
                run.crashed = run.why = (
                    f"its session was lost: {error}"  # maybe it does that to every session
                )
            return self._transaction_failed(run, error)
        finally:
            session.remove_notice_handler(hear)
            self.transactions.put(session)
        if answer["answer"] == "lost":
            return After.DROPPED
        delay = None if answer["wait"] is None else timedelta(seconds=answer["wait"])
        return Written(Outcome(run, State(answer["state"]), delay, error=answer["error"]))

    def _transaction_failed(self, run: Run, error: BaseException) -> Ending | After:
        """The transaction is undone, so whatever the handler said does not count."""
        if not isinstance(error, Unsure | asyncio.CancelledError):
            run.unsure = None  # else it may have been committed before it was told to stop
        match error:
            case FenceLost():
                return After.DROPPED
            case Unsure():
                return After.GIVEN_BACK
        return self._raised(run, error)

    # What a context asks for.

    @property
    def enqueues(self) -> bool:
        """Whether jobs can be enqueued together with an outcome."""
        return self._store.enqueues

    def log(self, run: Run, level: str, message: str) -> None:
        """Keep a line with the job."""
        self._settling.log(run, level, message)

    def progress(self, run: Run, fraction: float | None, message: str | None) -> None:
        """Keep how far the job is."""
        self._settling.progress(run, fraction, message)

    def fence(self, run: Run, connection: object) -> Any:  # noqa: ANN401
        """Go on in this transaction only if the job is still ours."""
        return lent(connection, self._settings.schema, operations.fence(self._store, run.id, run.attempt))

    def finish(self, run: Run, connection: object, result: object) -> Any:  # noqa: ANN401
        """End the job as completed in the caller's transaction."""
        _refuse_in_transaction(run)
        outcome = self._finished(run, result)
        plan = operations.conclude(self._store, run.worker, outcome)
        return lent(connection, self._settings.schema, plan, lambda: setattr(run, "concluded", True))

    def finishing(self, run: Run, result: object) -> _Finishing:
        """A transaction of ours in which the job ends."""
        _refuse_in_transaction(run)
        return _Finishing(self, run, self._finished(run, result))

    def _finished(self, run: Run, result: object) -> Outcome:
        encoded = run.task.signature.encode_result(result)
        jobs = tuple(run.jobs or ())
        return Outcome(run, done(jobs), result=encoded, jobs=jobs)


def prepared(run: Run) -> partial[Any]:
    """The handler with its arguments, and with its context, if it has one and asks for it."""
    task: Task = run.task
    try:
        args, kwargs = task.signature.decode_json(run.payload or "null")
    except InvalidArgument as error:
        raise UnfitArguments(str(error)) from None
    if run.context is not None:
        for name in task.context_parameters:
            kwargs[name] = run.context
    return partial(task.function, *args, **kwargs)


def decided(run: Run, ending: Ending) -> Outcome:
    """What becomes of a job, as its task has it."""
    task: Task | None = run.task
    if isinstance(ending, Returned):
        return _completed(run, ending.value)
    return decide(run, ending, USUAL) if task is None else decide(run, ending, _retry(task), coder=task.coder)


def _completed(run: Run, value: object) -> Outcome:
    return completed(run, value, run.task.signature.encode_result, tuple(run.jobs) if run.jobs else ())


def lent(connection: object, schema: str, plan: Plan[None], then: Callable[[], None] = lambda: None) -> Any:  # noqa: ANN401
    """Carry a plan out on a connection of the handler's own, at once or to be awaited."""
    if isinstance(connection, Connection):
        carry_out(plan, lend(connection, schema))
        then()
        return None
    return _awaited(arun(plan, alend(connection, schema)), then)


def _retry(task: Task) -> Retry:
    return task.retry or USUAL


async def _waited_for(answer: Awaitable[Any]) -> Any:  # noqa: ANN401
    return await answer


async def _raise(error: BaseException) -> None:
    raise error


def _failure(ending: Fate) -> str | None:
    """Why an attempt did not succeed, in a line, or None if it did."""
    match ending:
        case Raised(error):
            return in_a_line(error)
        case Written(outcome) if outcome.error is not None:
            return f"{outcome.error.get('code')}: {outcome.error.get('message')}"
        case After():
            return ending.value
    return None


async def _awaited(answer: Awaitable[Any], then: Callable[[], None]) -> None:
    await answer
    then()


def _refuse_in_transaction(run: Run) -> None:
    if run.task.transaction:
        raise ConfigurationError("a transactional task ends with its own transaction: return, or raise")


def _left_behind(ending: Ending) -> Ending:
    """The middleware did not wait for the function, which still has the session: all it does there is undone."""
    if isinstance(ending, Raised):
        return ending
    return Raised(TransactionEnded("its function still runs, so what it did cannot be committed"))


def _is_interrupted(ending: Ending) -> bool:
    return isinstance(ending, Raised) and isinstance(ending.error, asyncio.CancelledError | Interrupted)


class _Finishing:
    """A transaction in which a job ends."""

    def __init__(self, attempts: Attempts, run: Run, outcome: Outcome) -> None:
        self._transactions = attempts.transactions
        self._run = run
        self._outcome = outcome
        self._connection: Any = None

    async def __aenter__(self) -> AsyncConnection[Any]:
        transactions, run = self._transactions, self._run
        await transactions.turn.acquire()
        try:
            self._connection = await transactions.open(run)
        except BaseException:
            self._leave()
            raise
        connection: AsyncConnection[Any] = self._connection
        return connection

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self._run.concluding = error is None
        try:
            if error is None:
                outcome = self._concluding()
                await self._transactions.close_with(self._run, self._connection, outcome)
                self._run.done = outcome
        finally:
            self._run.concluding = False
            self._leave()

    def __enter__(self) -> Connection[Any]:
        transactions, run = self._transactions, self._run
        transactions.acquire_blocking()
        try:
            self._connection = transactions.open_blocking(run)
        except BaseException:
            self._leave()
            raise
        connection: Connection[Any] = self._connection
        return connection

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self._run.concluding = error is None
        try:
            if error is None:
                outcome = self._concluding()
                self._transactions.close_blocking_with(self._run, self._connection, outcome)
                self._run.done = outcome
        finally:
            self._run.concluding = False
            self._leave()

    def _concluding(self) -> Outcome:
        jobs = tuple(self._run.jobs or ())
        return msgspec.structs.replace(self._outcome, state=done(jobs), jobs=jobs)

    def _leave(self) -> None:
        if self._connection is not None:
            self._transactions.put(self._connection)
        self._transactions.release()
