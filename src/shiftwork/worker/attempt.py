"""One attempt: find the task, read the arguments, call the handler, say how it ended.

Every ending is a value. Nothing that a handler does or raises gets past here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import TracebackType
from typing import Any

from psycopg import AsyncConnection, Connection

from shiftwork.context import Context
from shiftwork.database import Statement, alend, lend
from shiftwork.errors import (
    Cancel,
    ConfigurationError,
    FenceLost,
    FinishUndone,
    Interrupted,
    InvalidArgument,
    TaskTimeout,
    UnfitArguments,
    UnknownHandler,
)
from shiftwork.job import State
from shiftwork.operations import encode_outcome
from shiftwork.outcome import Outcome, Raised, Returned, decide
from shiftwork.retry import Retry
from shiftwork.settings import Settings
from shiftwork.stores.protocol import Protocol
from shiftwork.worker.run import Run, Stop, Task
from shiftwork.worker.settling import Settling
from shiftwork.worker.slots import Deadlines, Isolated
from shiftwork.worker.threads import Threads
from shiftwork.worker.transactions import Ours, OursBlocking, Transactions, Unsure

Middleware = Callable[[Context, Callable[[], Awaitable[Any]]], Awaitable[Any]]
At = Callable[[str], Awaitable[None]]
Ending = Returned | Raised

USUAL = Retry()


class After(Enum):
    """What becomes of a job whose attempt leaves no outcome."""

    DROPPED = "dropped"  # it is not ours any more
    GIVEN_BACK = "given back"  # nothing is counted against it


@dataclass(frozen=True, slots=True)
class Written:
    """The outcome is in the database already."""

    outcome: Outcome


class Attempts:
    """Runs attempts, one in each slot."""

    def __init__(
        self,
        settings: Settings,
        store: Protocol,
        settling: Settling,
        transactions: Transactions,
        *,
        middleware: Sequence[Middleware] = (),
        waits: Callable[[], None],
        began: Callable[[Run], None],
        written: Callable[[Run, Outcome], None],
        dropped: Callable[[Run], None],
        stop: Callable[[Run, Stop, str], None],
        at: At | None = None,
    ) -> None:
        self._settings = settings
        self._store = store
        self._settling = settling
        self._transactions = transactions
        self._middleware = tuple(middleware)
        self._waits = waits
        self._began = began
        self._written = written
        self._dropped = dropped
        self._threads = Threads()
        self._deadlines = Deadlines(stop)
        self._at = at

    async def attempt(self, run: Run) -> None:
        """From the claimed job to its outcome, which is then written by others."""
        if self._at:
            await self._at("began")
        if run.stop is None:
            self._began(run)
            run.began = time.perf_counter()
            ending = await self._called(run)
            run.took = time.perf_counter() - run.began
        else:
            ending = Raised(Interrupted(run.stop.value))
        run.ended = True
        if self._at:
            await self._at("ended")
        fate = self._fate(run, ending) if isinstance(ending, Returned | Raised) else ending
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
        retry = USUAL if run.task is None else run.task.retry or USUAL
        return decide(run, ending, retry)

    def _timeout(self, task: Task) -> Any:  # noqa: ANN401
        return task.timeout or self._settings.timeout

    async def _called(self, run: Run) -> Ending | Written | After:
        """How the handler ended, or what came of it if it was transactional."""
        task: Task | None = run.task
        if task is None:
            return Raised(UnknownHandler(f"this worker has no task {run.name!r}"))
        try:
            args, kwargs = task.signature.decode_json(run.payload or "null")
        except InvalidArgument as error:
            return Raised(UnfitArguments(str(error)))
        except Exception as error:  # noqa: BLE001  -- types of the user's own take part in it
            return Raised(error)
        timeout = task.timeout or self._settings.timeout
        if timeout is not None:
            self._deadlines.add(run, timeout.total_seconds())
        injected = task.signature.injected
        if injected or self._middleware:
            run.context = Context(run, self, timeout)
            for name, kind in injected.items():
                if kind is Context:
                    kwargs[name] = run.context
        if task.transaction:
            return await self._transacted(run, args, kwargs)
        try:
            if self._middleware:
                return Returned(await Isolated(self._wrapped(run, args, kwargs), run, self._waits))
            if task.is_async:
                return Returned(await Isolated(task.function(*args, **kwargs), run, self._waits))
            return Returned(await self._in_thread(run, partial(task.function, *args, **kwargs)))
        except BaseException as error:  # noqa: BLE001  -- every ending is a value
            return self._raised(run, error)

    def _raised(self, run: Run, error: BaseException) -> Raised:
        if isinstance(error, asyncio.CancelledError) and run.stop is None and not run.told:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise error  # the slot itself is cancelled, not its handler
        return Raised(error)

    async def _in_thread(self, run: Run, call: Callable[[], Any]) -> Any:  # noqa: ANN401
        self._waits()
        return await self._threads.run(call, run)

    async def _wrapped(self, run: Run, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        """The handler inside the middleware, the first of which is outermost."""
        task: Task = run.task

        async def innermost() -> Any:  # noqa: ANN401
            if task.is_async:
                return await task.function(*args, **kwargs)
            return await self._in_thread(run, partial(task.function, *args, **kwargs))

        call = innermost
        for layer in reversed(self._middleware):
            call = partial(layer, run.context, call)  # type: ignore[assignment]
        return await call()

    # Transactional tasks.

    async def _transacted(
        self, run: Run, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Ending | Written | After:
        self._waits()
        task: Task = run.task
        tx = next((name for name, kind in task.signature.injected.items() if kind is not Context), None)
        async with self._transactions.turn:
            if task.is_async or self._middleware:
                return await self._transacted_here(run, args, kwargs, tx)
            there = partial(self._transacted_there, run, args, kwargs, tx)
            ended: Ending | Written | After = await self._in_thread(run, there)
            return ended

    async def _transacted_here(
        self, run: Run, args: Sequence[Any], kwargs: dict[str, Any], tx: str | None
    ) -> Ending | Written | After:
        task: Task = run.task
        connection: Ours | OursBlocking | None = None
        try:
            if task.is_async:
                connection = await self._transactions.take()
                await self._transactions.open(run, connection)
            else:
                connection = await asyncio.to_thread(self._transactions.take_blocking)
                await asyncio.to_thread(self._transactions.open_blocking, run, connection)
            if run.context is not None:
                run.context.tx = connection
            if tx is not None:
                kwargs[tx] = connection
            ending: Ending
            try:
                if self._middleware:
                    ending = Returned(await Isolated(self._wrapped(run, args, kwargs), run, self._waits))
                else:
                    ending = Returned(await Isolated(task.function(*args, **kwargs), run, self._waits))
            except BaseException as error:  # noqa: BLE001
                ending = self._raised(run, error)
            run.concluding = True
            outcome = self._fate(run, ending)
            if not isinstance(outcome, Outcome):
                return outcome
            document = encode_outcome(outcome)
            undo = outcome.state is not State.COMPLETED
            if isinstance(connection, Ours):
                await self._transactions.close_with(run, connection, document, undo=undo)
            else:
                await asyncio.to_thread(
                    self._transactions.close_blocking_with, run, connection, document, undo=undo
                )
        except BaseException as error:  # noqa: BLE001
            return self._transaction_failed(run, error)
        finally:
            if connection is not None:
                self._transactions.put(connection)
        return Written(outcome)

    def _transacted_there(
        self, run: Run, args: Sequence[Any], kwargs: dict[str, Any], tx: str | None
    ) -> Ending | Written | After:
        connection: OursBlocking | None = None
        try:
            connection = self._transactions.take_blocking()
            self._transactions.open_blocking(run, connection)
            if run.context is not None:
                run.context.tx = connection
            if tx is not None:
                kwargs[tx] = connection
            ending: Ending
            try:
                ending = Returned(run.task.function(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001
                ending = Raised(error)
            run.concluding = True
            outcome = self._fate(run, ending)
            if not isinstance(outcome, Outcome):
                return outcome
            undo = outcome.state is not State.COMPLETED
            self._transactions.close_blocking_with(run, connection, encode_outcome(outcome), undo=undo)
        except BaseException as error:  # noqa: BLE001
            return self._transaction_failed(run, error)
        finally:
            if connection is not None:
                self._transactions.put(connection)
        return Written(outcome)

    def _transaction_failed(self, run: Run, error: BaseException) -> Ending | After:
        """The transaction is undone, so whatever the handler said does not count."""
        match error:
            case FenceLost():
                return After.DROPPED
            case Unsure():
                return After.GIVEN_BACK
        return self._raised(run, error)

    # What a context asks for.

    def log(self, run: Run, level: str, message: str) -> None:
        """Keep a line with the job."""
        self._settling.log(run, level, message)

    def progress(self, run: Run, fraction: float | None, message: str | None) -> None:
        """Keep how far the job is."""
        self._settling.progress(run, fraction, message)

    def fence(self, run: Run, connection: object) -> Any:  # noqa: ANN401
        """Go on in this transaction only if the job is still ours."""
        return self._lent(connection, self._store.fence(run.id, run.attempt))

    def finish(self, run: Run, connection: object, result: object) -> Any:  # noqa: ANN401
        """End the job as completed in the caller's transaction."""
        outcome = self._finished(run, result)
        run.concluded = True
        return self._lent(connection, self._store.conclude(run.worker, encode_outcome(outcome)))

    def finishing(self, run: Run, result: object) -> _Finishing:
        """A transaction of ours in which the job ends."""
        if run.task.transaction:
            raise ConfigurationError("a transactional task ends with its own transaction: use its tx")
        return _Finishing(self, run, result)

    def _finished(self, run: Run, result: object) -> Outcome:
        outcome = decide(run, Returned(result), USUAL)
        if outcome.state is not State.COMPLETED:
            raise InvalidArgument((outcome.error or {}).get("message", "the result cannot be stored"))
        return outcome

    def _lent(self, connection: object, statement: Statement) -> Any:  # noqa: ANN401
        if isinstance(connection, Connection):
            lend(connection, self._settings.schema)(statement)
            return None
        return _awaited(alend(connection, self._settings.schema)(statement))


async def _awaited(answer: Awaitable[Any]) -> None:
    await answer


def _is_interrupted(ending: Ending) -> bool:
    return isinstance(ending, Raised) and isinstance(ending.error, asyncio.CancelledError | Interrupted)


class _Finishing:
    """A transaction in which a job ends."""

    def __init__(self, attempts: Attempts, run: Run, result: object) -> None:
        self._attempts = attempts
        self._transactions = attempts._transactions  # noqa: SLF001
        self._run = run
        self._outcome = attempts._finished(run, result)  # noqa: SLF001
        self._connection: Any = None

    async def __aenter__(self) -> AsyncConnection[Any]:
        await self._transactions.turn.acquire()
        try:
            self._connection = await self._transactions.take()
            await self._transactions.open(self._run, self._connection)
        except BaseException:
            self._leave()
            raise
        connection: AsyncConnection[Any] = self._connection
        return connection

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        try:
            if error is None:
                self._run.concluding = True
                document = encode_outcome(self._outcome)
                await self._transactions.close_with(self._run, self._connection, document, undo=False)
                self._run.done = self._outcome
        finally:
            self._run.concluding = False
            self._leave()

    def __enter__(self) -> Connection[Any]:
        self._transactions.acquire_blocking()
        try:
            self._connection = self._transactions.take_blocking()
            self._transactions.open_blocking(self._run, self._connection)
        except BaseException:
            self._leave()
            raise
        connection: Connection[Any] = self._connection
        return connection

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        try:
            if error is None:
                self._run.concluding = True
                document = encode_outcome(self._outcome)
                self._transactions.close_blocking_with(self._run, self._connection, document, undo=False)
                self._run.done = self._outcome
        finally:
            self._run.concluding = False
            self._leave()

    def _leave(self) -> None:
        if self._connection is not None:
            self._transactions.put(self._connection)
        self._transactions.release()
