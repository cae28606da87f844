"""Transactional tasks: what a handler does to the database, and that its job is done, commit together.

The claim has committed, so the job is ours and everybody knows. Now a transaction is opened, and the job's row locked in
it under the fence: from here on nobody can take the job away, whatever becomes of our lease, unless our session ends. The
handler runs inside a savepoint. If it succeeds, its effects, its outcome and what it enqueued are one commit. If it
fails, the savepoint takes its effects back, and the failure is recorded on the same connection.

When a part fails: if the session is lost before COMMIT was sent, everything is undone, and the job is tried again, as after
any error. If it is lost while COMMIT was under way, nobody knows; so the job is given back, which the database
refuses if the commit has been done. A worker that is stopped or cut off while it holds the row is found by the reaper,
which ends its sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, TypeVar, cast

import msgspec
import psycopg
from psycopg import AsyncConnection, AsyncCursor, Connection, Cursor
from psycopg.pq import Escaping, TransactionStatus
from psycopg.pq.abc import PGresult
from psycopg.rows import tuple_row

from shiftwork.database import Statement, aconnect, alend, arun, connect, cut, translate
from shiftwork.errors import ConfigurationError, DatabaseError, DatabaseUnavailable, FenceLost, ShiftworkError
from shiftwork.job import State
from shiftwork.operations import encode_outcome, settle_encoded
from shiftwork.outcome import Outcome
from shiftwork.settings import Settings
from shiftwork.stores.protocol import Protocol
from shiftwork.stores.store import FORGET, Store
from shiftwork.worker.line import Patience
from shiftwork.worker.run import Run
from shiftwork.worker.sql import RoutineFailed
from shiftwork.worker.threads import Threads

C = TypeVar("C")
NO_SESSION = (1.0, 5.0)
"""Seconds before a job is given back for which no session could be had, at first and at most."""

LONGEST = 5.0
"""Seconds that a job waits for a session that others have: it was claimed because they ended fast."""


class Unsure(Exception):  # noqa: N818
    """The commit was sent, and its answer was lost."""


class TransactionEnded(ShiftworkError):  # noqa: N818
    """The handler ended the transaction that is the worker's to end."""

    code = "TRANSACTION_ENDED"


class Ours(AsyncConnection[Any]):
    """A connection whose transaction belongs to the worker."""

    called = ""
    own: AsyncCursor[Any]
    """For what the worker itself says on it."""

    async def commit(self) -> None:
        raise _not_yours()

    async def rollback(self) -> None:
        raise _not_yours()


class OursBlocking(Connection[Any]):
    """A connection whose transaction belongs to the worker."""

    called = ""
    own: Cursor[Any]

    def commit(self) -> None:
        raise _not_yours()

    def rollback(self) -> None:
        raise _not_yours()


def _not_yours() -> TransactionEnded:
    return TransactionEnded(
        "the transaction of a job is ended by the worker: return to commit it, raise to undo it,"
        " or use `with tx.transaction():` for a part that may be undone alone"
    )


class Transactions:
    """As many sessions as transactional tasks may use at once, kept for the next."""

    def __init__(self, settings: Settings, store: Store, name: Callable[[], str]) -> None:
        self._settings = settings
        self._store = store
        self._name = name
        self.threads = Threads()
        self.turn = asyncio.Semaphore(settings.transaction_connections)
        self._loop = asyncio.get_running_loop()
        self._patience = Patience(*NO_SESSION)
        self._pausing_until = 0.0
        self._idle: deque[Ours] = deque()
        self._idle_blocking: deque[OursBlocking] = deque()

    def in_turn(self) -> _Turn:
        """Wait for a turn; says whether it came in time, else others may have room for the job."""
        return _Turn(self.turn)

    async def open(self, run: Run) -> Ours | OursBlocking:
        """A session of the kind that the handler needs, in whose transaction the job's row is locked under the fence."""
        if not run.task.is_async:
            session: OursBlocking = await self.threads.run(partial(self.open_blocking, run), run)
            return session
        return await self._open(self._opening(run))

    async def _open(self, opening: Statement) -> Ours:
        while True:
            used = _last(self._idle)
            connection = used or await self._connect()
            try:
                await self._execute(connection, opening)
            except BaseException as error:
                connection.pgconn.finish()
                if not (used and isinstance(error, DatabaseUnavailable)):
                    raise  # else it was lost while nobody used it, which need not trouble the handler
            else:
                self._patience.reset()
                return connection

    async def open_together(self, runs: Sequence[Run]) -> Ours:
        """A session in whose transaction the rows of several jobs are locked under their fences, in the order given."""
        return await self._open(self._opening(*runs))

    def open_blocking(self, run: Run) -> OursBlocking:
        """The same for a handler in a thread."""
        while True:
            used = _last(self._idle_blocking)
            connection = used or self._connect_blocking()
            try:
                self._execute_blocking(connection, self._opening(run))
            except BaseException as error:
                connection.pgconn.finish()
                if not (used and isinstance(error, DatabaseUnavailable)):
                    raise
            else:
                self._patience.reset()
                return connection

    async def session(self) -> Ours:
        """A session for a routine in the database; its transaction is not open yet."""
        connection = _last(self._idle) or await self._connect()
        self._patience.reset()
        return connection

    async def run_job(self, run: Run, connection: Ours) -> Mapping[str, Any]:
        """Let the routine of a job be called, and what came of it be written: how that was answered."""
        try:
            await self._execute(
                connection, self._protocol.run_job(run.worker, run.id, run.attempt), commits=True
            )
        except FenceLost:
            await self._execute(connection, self._protocol.fence(run.id, run.attempt))
            raise RoutineFailed("SW003", "the routine took the row of its own job away") from None
        except DatabaseUnavailable:
            raise
        except DatabaseError as found:  # by the commit, as a deferred constraint is
            raise RoutineFailed(found.sqlstate, str(found)) from None
        cursor = connection.own
        if _found(cursor) is None:
            raise Unsure("what came of the job was not answered")
        answer, state, wait, error = cast("tuple[Any, ...]", await cursor.fetchone())
        return {"answer": answer, "state": state, "wait": wait, "error": json.loads(error or "null")}

    async def call(self, run: Run, connection: Ours) -> object:
        """Call a routine that commits by itself; what it gives."""
        await self._execute(connection, self._protocol.routine_call(run.id, run.attempt, run.task.handler))
        cursor = connection.own
        text, gives, _ = cast("tuple[Any, ...]", await cursor.fetchone())
        call = "%s::pg_catalog.jsonb".join(
            text.replace("%", "%%").rsplit("$1", 1)
        )  # its name may have one, too
        try:
            await cursor.execute(call.encode(), (run.payload or "{}",))
            [value] = cast("tuple[Any, ...]", await cursor.fetchone()) if gives else [None]
        except BaseException as error:
            lost = connection.closed
            connection.pgconn.finish()  # what was set in this session is not for the next
            if not isinstance(error, psycopg.Error):
                raise
            if lost:
                raise self._meaning(error, connection, commits=False) from None
            raise RoutineFailed(error.sqlstate, str(error)) from None
        await self._execute(connection, Statement(FORGET, (connection.called,)))
        return value

    def pause(self) -> float:
        """How long to wait since no session can be had: for all who ask meanwhile until the same moment."""
        now = self._loop.time()
        if now >= self._pausing_until:
            self._pausing_until = now + self._patience()
        return self._pausing_until - now

    async def _connect(self) -> Ours:
        if other := _last(self._idle_blocking):
            other.pgconn.finish()  # so that there are never more than was said
        name = self._name()
        connection = cast("Ours", await aconnect(self._settings, name=name, kind=Ours))
        connection.called, connection.own = name, connection.cursor(row_factory=tuple_row)
        return connection

    def _connect_blocking(self) -> OursBlocking:
        if other := _last(self._idle):
            other.pgconn.finish()
        name = self._name()
        connection = cast("OursBlocking", connect(self._settings, name=name, kind=OursBlocking))
        connection.called, connection.own = name, connection.cursor(row_factory=tuple_row)
        return connection

    def acquire_blocking(self) -> None:
        """Wait for a turn, in a thread."""
        with contextlib.suppress(RuntimeError):  # a thread has no loop
            if asyncio.get_running_loop() is self._loop:
                raise ConfigurationError("in an async function, write: async with context.finishing()")
        asyncio.run_coroutine_threadsafe(self.turn.acquire(), self._loop).result()

    def release(self) -> None:
        """Let the next have a turn; may be called from any thread."""
        self._loop.call_soon_threadsafe(self.turn.release)

    def put(self, connection: Ours | OursBlocking, *, in_use: bool = False) -> None:
        """Give a session back; one that is not as it was is closed."""
        if in_use:
            cut(connection)
            return
        if (
            connection.closed
            or connection.info.transaction_status != TransactionStatus.IDLE
            or connection.called != self._name()  # the reaper would not find it
        ):
            connection.pgconn.finish()
            return
        connection.row_factory = tuple_row  # the next handler must not find what this one chose
        if isinstance(connection, Ours):
            self._idle.append(connection)
        else:
            self._idle_blocking.append(connection)

    def close(self) -> None:
        """Close what is idle."""
        for connections in (self._idle, self._idle_blocking):
            while connections:
                connection = connections.pop()
                connection.pgconn.finish()  # while it is still referred to: dropped open, it would warn

    async def undo(self, run: Run, connection: Ours | OursBlocking) -> None:
        """Take back what the handler did so far; the row stays locked."""
        statement = self._store.undo_in_transaction()
        if isinstance(connection, OursBlocking):
            await self.threads.run(partial(self._execute_blocking, connection, statement), run)
        else:
            await self._execute(connection, statement)

    async def close_with(self, run: Run, connection: Ours | OursBlocking, outcome: Outcome) -> Outcome:
        """Write the outcome and commit, with what the handler did or without; the outcome as it was written."""
        if isinstance(connection, OursBlocking):
            close = partial(self.close_blocking_with, run, connection, outcome)
            written: Outcome = await self.threads.run(close, run)
            return written
        _refuse_ended(connection)
        await self._execute(connection, self._closing(run, outcome), commits=True)
        return _as_written(outcome, connection.own)

    async def close_together(
        self, worker: int, connection: Ours, outcomes: Sequence[Outcome]
    ) -> list[Outcome]:
        """Write the outcomes of several jobs and commit, all of them or none; as they were written."""
        _refuse_ended(connection)
        encoded = [encode_outcome(outcome) for outcome in outcomes]
        settled = await arun(
            settle_encoded(self._store, worker, encoded), alend(connection, self._store.schema)
        )
        for outcome in outcomes:
            job = outcome.job
            if (answer := settled.answers.get(job.id)) != "settled":
                why = settled.problems.get(job.id, answer)
                raise DatabaseError(f"the outcome of job {job.id} cannot be written: {why}")
        await self._execute(connection, Statement(f"commit; {FORGET}", (connection.called,)), commits=True)
        states = {job: state for state, ids in settled.states.items() for job in ids}
        return [_in_state(outcome, states.get(outcome.job.id, outcome.state)) for outcome in outcomes]

    def close_blocking_with(self, run: Run, connection: OursBlocking, outcome: Outcome) -> Outcome:
        """Write the outcome and commit, with what the handler did or without; the outcome as it was written."""
        _refuse_ended(connection)
        self._execute_blocking(connection, self._closing(run, outcome), commits=True)
        return _as_written(outcome, connection.own)

    @property
    def _protocol(self) -> Protocol:
        """Routines are called only where there is a registry of them."""
        return cast("Protocol", self._store)

    def _opening(self, *runs: Run) -> Statement:
        return self._store.open_transaction([(run.id, run.attempt) for run in runs])

    def _closing(self, run: Run, outcome: Outcome) -> Statement:
        undo = outcome.state not in (State.COMPLETED, State.WAITING)
        return self._store.close_transaction(run.worker, encode_outcome(outcome), undo=undo)

    async def _execute(self, connection: Ours, statement: Statement, *, commits: bool = False) -> None:
        try:
            await connection.own.execute(_composed(connection, statement))
        except psycopg.Error as error:
            raise self._meaning(error, connection, commits=commits) from None

    def _execute_blocking(
        self, connection: OursBlocking, statement: Statement, *, commits: bool = False
    ) -> None:
        try:
            connection.own.execute(_composed(connection, statement))
        except psycopg.Error as error:
            raise self._meaning(error, connection, commits=commits) from None

    def _meaning(self, error: psycopg.Error, connection: Ours | OursBlocking, *, commits: bool) -> Exception:
        if commits and connection.closed:
            return Unsure(str(error))
        return translate(error, self._store.schema, commits=False, alive=not connection.closed)


class _Turn:
    """A turn at having a session, from when it comes until it is over."""

    __slots__ = ("_came", "_turn")

    def __init__(self, turn: asyncio.Semaphore) -> None:
        self._turn = turn
        self._came = True

    async def __aenter__(self) -> bool:
        if not self._turn.locked():
            return await self._turn.acquire()
        try:
            async with asyncio.timeout(LONGEST):
                return await self._turn.acquire()
        except TimeoutError:
            self._came = False
            return False

    async def __aexit__(self, *exception: object) -> None:
        if self._came:
            self._turn.release()


def _composed(connection: Ours | OursBlocking, statement: Statement) -> bytes:
    """A statement with its values in it, so that several can go as one message."""
    quote, encoding = Escaping(connection.pgconn).escape_literal, connection.info.encoding
    values = [
        b"%d" % value if type(value) is int and value >= 0 else quote(str(value).encode(encoding))
        for value in statement.params
    ]
    return _template(statement.text) % tuple(values)


@lru_cache
def _template(text: str) -> bytes:
    return _PLACE.sub(lambda found: b"%b" if found[0] == b"%s" else found[0], text.encode())


_PLACE = re.compile(rb"%[%s]")


def _as_written(outcome: Outcome, cursor: AsyncCursor[Any] | Cursor[Any]) -> Outcome:
    """A job that would run again may have been ended instead: too late, or asked to be cancelled."""
    if outcome.state is not State.SCHEDULED:
        return outcome
    if (result := _found(cursor)) is None:
        return outcome
    state = State((result.get_value(0, 0) or b"").decode())
    return _in_state(outcome, state)


def _in_state(outcome: Outcome, state: State) -> Outcome:
    return outcome if state is outcome.state else msgspec.structs.replace(outcome, state=state, delay=None)


def _found(cursor: AsyncCursor[Any] | Cursor[Any]) -> PGresult | None:
    """The answer with rows among those to several statements; the cursor stands there."""
    while not (result := cursor.pgresult) or not result.ntuples:
        if not cursor.nextset():
            return None
    return result


def _last(idle: deque[C]) -> C | None:
    """The session that was used last, if there is one; others may be asking as well."""
    try:
        return idle.pop()
    except IndexError:
        return None


def _refuse_ended(connection: Connection[Any] | AsyncConnection[Any]) -> None:
    status = connection.info.transaction_status
    if connection.closed:
        raise DatabaseUnavailable(
            "the connection of the job's transaction was lost (nothing was committed)", maybe_committed=False
        )
    if status not in (TransactionStatus.INTRANS, TransactionStatus.INERROR):
        raise TransactionEnded(
            "the handler ended the job's transaction itself; what it did until then is committed or undone"
        )
