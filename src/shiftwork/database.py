"""Statements, plans, and the connections they run on.

An operation is a plan: a generator that yields statements, is sent their rows, and returns its answer.
`run` and `arun` drive it for blocking and for awaiting callers; they and what they hold connections with
are the only code that exists twice.

Who is the judge of what: a lent connection belongs to its owner, who began the transaction and ends it;
we only put statements on it, with a cursor and row factory of our own. A connection of ours is in
autocommit, so a single statement commits itself. That decides what can be said when the line goes dead:
inside a transaction nothing has been committed yet; while the answer of a statement that commits itself,
or of COMMIT, is awaited, it may have been.

The pools connect in the caller's own thread or task. So a database that is away is reported at once and
with its reason, nothing runs in the background, a forked child starts with none of its parent's
connections, and each event loop has its own.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar, cast

import msgspec
import psycopg
from psycopg import (
    AsyncClientCursor,
    AsyncConnection,
    AsyncCursor,
    ClientCursor,
    Connection,
    Cursor,
    IsolationLevel,
    generators,
)
from psycopg.abc import PQGen
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus, TransactionStatus
from psycopg.pq.abc import PGconn
from psycopg.rows import dict_row, tuple_row
from psycopg.types.numeric import Int8BinaryLoader

from shiftwork.errors import (
    ConfigurationError,
    DatabaseError,
    DatabaseUnavailable,
    DuplicateDiffers,
    FenceLost,
    InvalidArgument,
    NotAllowed,
    NotInstalled,
    PayloadTooLarge,
    SchemaTooOld,
    ShiftworkError,
)
from shiftwork.settings import HIDDEN, Settings, mask

T = TypeVar("T")
Rows = Sequence[Any]
"""Rows of an answer: mappings by column, or tuples if the statement asks for them."""

IDLE_TOO_LONG = 600.0


class Statement(msgspec.Struct, frozen=True):
    """One statement for the database, with its values beside it."""

    text: str
    params: tuple[Any, ...] = ()
    writes: bool = True
    as_tuples: bool = False
    """Rows come as tuples: for answers of many rows, which a worker reads by position."""

    under: str = ""
    """What is set for this statement alone, as SQL before it in the same message and so in the same transaction."""

    plain: bytes = b""
    """The same with $1, $2 … in it, for connections of ours, if its values are texts, numbers or null and the answer is one `value`: it comes as a text."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait so many seconds, or until this job is announced; listening begins with the first wait."""

    job: int
    seconds: float


Plan = Generator[Statement | Wait, Rows, T]
Execute = Callable[[Statement], Rows]
AExecute = Callable[[Statement], Awaitable[Rows]]


def run(plan: Plan[T], execute: Execute, wait: Callable[[Wait], None] | None = None) -> T:
    """Carry out a plan, blocking."""
    try:
        step = next(plan)
        while True:
            try:
                rows = execute(step) if isinstance(step, Statement) else (wait or _cannot_wait)(step)
            except ShiftworkError as error:
                step = plan.throw(error)  # most plans let it pass
            else:
                step = plan.send(rows or ())
    except StopIteration as end:
        answer: T = end.value
        return answer
    finally:
        plan.close()


async def arun(plan: Plan[T], execute: AExecute, wait: Callable[[Wait], Awaitable[None]] | None = None) -> T:
    """Carry out a plan, awaiting."""
    try:
        step = next(plan)
        while True:
            try:
                rows = await (execute(step) if isinstance(step, Statement) else (wait or _cannot_wait)(step))
            except ShiftworkError as error:
                step = plan.throw(error)
            else:
                step = plan.send(rows or ())
    except StopIteration as end:
        answer: T = end.value
        return answer
    finally:
        plan.close()


def _cannot_wait(_: Wait) -> NoReturn:
    raise ConfigurationError("a result cannot be waited for on a lent connection: it could not see the end")


# Errors, all translated here. The driver's own is not chained: it quotes rows and documents, and so payloads.

# Lost connections, shutdown, no resources, read-only after a switchover, failing disks.
_AWAY = ("08", "57P", "53", "25006", "58")
_UNSENT = (psycopg.DataError, psycopg.ProgrammingError, psycopg.NotSupportedError)  # if the driver says so
_AGAIN = ("40001", "40P01", "55P03", "57014")  # the caller's own retry logic looks for these by their class


def translate(  # noqa: PLR0911
    error: psycopg.Error, schema: str, *, commits: bool, alive: bool
) -> ShiftworkError:
    """What a driver's error means for our caller. `commits`: the statement would have committed itself.

    `schema` is empty if the statement is about none of ours.
    """
    state, said = error.sqlstate, _said(error)
    match state:
        case "SW001":
            return InvalidArgument(said)
        case "SW002":
            return DuplicateDiffers(said)
        case "SW003":
            return FenceLost(said)
        case "22P02" if (
            "shiftwork: attempt" in said
        ):  # so it is said by a table, which has no functions of ours
            return FenceLost(said[said.index("attempt") :].rstrip('"'))
        case "SW004":
            return PayloadTooLarge(said)
        case "3F000" | "42P01" if schema:
            return NotInstalled(
                f"the schema {schema!r} is not installed in this database ({said}); run: shiftwork migrate",
                sqlstate=state,
            )
        case "42883" | "42703" | "42704" if schema:
            return SchemaTooOld(
                f"the schema {schema!r} is older than this program needs ({said}); run: shiftwork migrate",
                sqlstate=state,
            )
        case "42501":
            return NotAllowed(f"the database role may not do this: {said}", sqlstate=state)
    if state is None and isinstance(error, _UNSENT):
        return InvalidArgument(f"this cannot be sent to the database: {said}")
    if not alive or (state or "08").startswith(_AWAY):
        maybe = commits and not alive
        certainty = "it may have been committed" if maybe else "nothing was committed"
        return DatabaseUnavailable(
            f"the database is not available: {said} ({certainty})", maybe_committed=maybe, sqlstate=state
        )
    return DatabaseError(f"the database refused: {said}", sqlstate=state)


def _said(error: psycopg.Error) -> str:
    said = (error.diag.message_primary or str(error) or type(error).__name__).strip()
    return f"{said}. {error.diag.message_hint}" if error.diag.message_hint else said


def _unsendable(error: UnicodeEncodeError) -> InvalidArgument:
    return InvalidArgument(f"this cannot be sent to the database: {error}")


def _unnamed(error: UnicodeError, dsn: str) -> ConfigurationError:
    return ConfigurationError(f"the connection string names a host that cannot be one ({mask(dsn)}): {error}")


def _unreachable(error: Exception, dsn: str) -> DatabaseUnavailable:
    sqlstate = getattr(error, "sqlstate", None)
    where = mask(dsn)
    why = "" if where == HIDDEN else f": {str(error).strip()}"
    return DatabaseUnavailable(
        f"cannot connect to {where}{why} (nothing was sent, so nothing was committed)",
        maybe_committed=False,
        sqlstate=sqlstate,
    )


def commits_each(connection: object) -> bool:
    """Whether every statement that is put on this connection (None: on one of ours) commits itself."""
    if not isinstance(connection, Connection | AsyncConnection):
        return connection is None
    return connection.autocommit and _is_idle(connection)


# Connections of ours.


def _conninfo(dsn: str, settings: Settings, name: str | None) -> str:
    """The caller's connection string, with what it leaves open filled in; a worker's session has a name to be found by."""
    try:
        given = conninfo_to_dict(dsn)
    except (psycopg.Error, UnicodeError):  # which may quote a part of the password
        raise ConfigurationError(
            "what is given as dsn is not a connection string; write postgresql://user:password@host:port/database,"
            " with what is special in the password %-encoded, or host=… user=… dbname=…"
        ) from None
    ours: dict[str, Any] = {
        "application_name": "shiftwork client",
        "connect_timeout": max(2, round(settings.connect_timeout.total_seconds())),
        "keepalives_idle": 30,
        "keepalives_interval": 10,
        "keepalives_count": 3,
        "tcp_user_timeout": 30_000,
    }
    given["client_encoding"] = "utf8"  # as we write and read, whatever the connection string says
    if name is not None:
        given["application_name"] = name
        patience = settings.answer_within.total_seconds()  # a half-open line is noticed within this
        ours |= {
            "keepalives_idle": max(1, int(patience * 0.4)),
            "keepalives_interval": max(1, int(patience * 0.2)),
            "tcp_user_timeout": round(patience * 1000),
        }
    if "," in str(given.get("host", "")) + str(given.get("hostaddr", "")):
        ours["target_session_attrs"] = "read-write"  # of several servers, the one that takes writes
    return make_conninfo("", **{**ours, **given})


def cut(connection: Connection[Any] | AsyncConnection[Any]) -> None:
    """End a session that somebody still uses, and so must not be freed under him: he finds the line dead."""
    with (
        suppress(psycopg.Error, OSError),
        socket.socket(fileno=os.dup(connection.fileno())) as line,
    ):
        line.shutdown(socket.SHUT_RDWR)


def _is_idle(connection: Connection[Any] | AsyncConnection[Any]) -> bool:
    """Whether it is there, and no transaction is open on it."""
    return connection.pgconn.transaction_status == TransactionStatus.IDLE


def _dsn(settings: Settings) -> str:
    if settings.dsn is None:
        raise ConfigurationError("no database is set: give a dsn, or set DATABASE_URL")
    return settings.dsn


def connect(
    settings: Settings,
    dsn: str | None = None,
    *,
    name: str | None = None,
    kind: type[Connection[Any]] = Connection,
) -> Connection[Any]:
    """A new connection in autocommit, or a clear error."""
    dsn = dsn or _dsn(settings)
    try:
        connection = kind.connect(_conninfo(dsn, settings, name), autocommit=True, prepare_threshold=None)
    except psycopg.Error as error:
        raise _unreachable(error, dsn) from None
    except UnicodeError as error:
        raise _unnamed(error, dsn) from None
    connection.isolation_level = IsolationLevel.READ_COMMITTED
    return connection


async def aconnect(
    settings: Settings,
    dsn: str | None = None,
    *,
    name: str | None = None,
    kind: type[AsyncConnection[Any]] = AsyncConnection,
) -> AsyncConnection[Any]:
    """A new connection in autocommit, or a clear error."""
    dsn = dsn or _dsn(settings)
    try:
        connection = await kind.connect(
            _conninfo(dsn, settings, name), autocommit=True, prepare_threshold=None
        )
    except psycopg.Error as error:
        raise _unreachable(error, dsn) from None
    except UnicodeError as error:
        raise _unnamed(error, dsn) from None
    await connection.set_isolation_level(IsolationLevel.READ_COMMITTED)
    return connection


class Own(Connection[Any]):
    """A connection of a pool, and the way to put statements on it."""

    execute_ours: Execute
    watch: select.poll


class AOwn(AsyncConnection[Any]):
    """The same for awaiting callers."""

    execute_ours: AExecute
    watch: select.poll


def _watch(connection: Own | AOwn) -> select.poll:
    watch = select.poll()
    watch.register(connection.fileno(), select.POLLIN | select.POLLHUP | select.POLLERR)
    return watch


def _still_there(connection: Own | AOwn) -> bool:
    """Whether an idle connection is silent, as it should be; a goodbye or a dead line can be read."""
    return not (connection.closed or connection.watch.poll(0))


class Pool:
    """Connections for blocking callers: made when needed, kept for the next, replaced when dead."""

    def __init__(self, settings: Settings, revive: Callable[[], None] | None = None) -> None:
        """`revive` is called before a second try if the database cannot be reached."""
        self._settings = settings
        self._revive = revive
        self._closed = False
        self._renew()

    def _renew(self) -> None:
        self._process = os.getpid()
        self._free = threading.BoundedSemaphore(self._settings.max_connections)
        self._idle: deque[tuple[Own, float]] = deque()

    @contextmanager
    def connection(self) -> Iterator[Own]:
        """A connection for as long as the block lasts."""
        connection, free = self._lend()
        try:
            yield connection
        except DatabaseUnavailable:
            connection.close()  # its server may take no writes any more, while another does
            raise
        finally:
            try:
                self._put(connection, free)
            finally:
                free.release()

    def execute(self, statement: Statement) -> Rows:
        """One statement on one of them: a block around it would cost a good part of its way."""
        connection, free = self._lend()
        try:
            return connection.execute_ours(statement)
        except DatabaseUnavailable:
            connection.close()
            raise
        finally:
            try:
                self._put(connection, free)
            finally:
                free.release()

    def _lend(self) -> tuple[Own, threading.BoundedSemaphore]:
        if self._process != os.getpid():
            self._renew()  # forked: the parent's connections are the parent's
        free = self._free
        if not free.acquire(timeout=self._settings.connect_timeout.total_seconds()):
            raise _all_busy(self._settings)
        try:
            return self._take() or self._connect(), free
        except BaseException:
            free.release()
            raise

    def _connect(self) -> Own:
        try:
            connection = cast("Own", connect(self._settings, kind=Own))
        except DatabaseUnavailable:
            if self._revive is None:
                raise
            self._revive()
            connection = cast("Own", connect(self._settings, kind=Own))
        connection.execute_ours = executing(connection, self._settings.schema, lent=False)
        connection.watch = _watch(connection)
        return connection

    def _take(self) -> Own | None:
        while True:
            try:
                connection, _ = self._idle.pop()
            except IndexError:
                return None
            if _still_there(connection):
                return connection
            connection.close()

    def _put(self, connection: Own, free: threading.BoundedSemaphore) -> None:
        if free is not self._free:
            return  # forked meanwhile: it is the parent's
        now = time.monotonic()
        if _is_idle(connection) and not self._closed:
            self._idle.append((connection, now))
        else:
            connection.close()
        with suppress(IndexError):
            while now - self._idle[0][1] > IDLE_TOO_LONG:
                self._idle.popleft()[0].close()

    def close(self) -> None:
        """Close what is idle now, and the rest when it comes back."""
        self._closed = True
        if self._process == os.getpid():
            with suppress(IndexError):
                while True:
                    self._idle.pop()[0].close()


class APool:
    """Connections for awaiting callers, a shelf for each event loop, cleared once its loop is closed."""

    def __init__(self, settings: Settings, revive: Callable[[], None] | None = None) -> None:
        """`revive` is called before a second try if the database cannot be reached."""
        self._settings = settings
        self._revive = revive
        self._shelves: dict[asyncio.AbstractEventLoop, _Shelf] = {}
        self._process = os.getpid()
        self._closed = False

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[AOwn]:
        """A connection for as long as the block lasts."""
        shelf = self._shelf()
        connection = await self._lend(shelf)
        try:
            yield connection
        except DatabaseUnavailable:
            connection.pgconn.finish()  # its server may take no writes any more, while another does
            raise
        finally:
            self._put(connection, shelf)

    async def execute(self, statement: Statement) -> Rows:
        """One statement on one of them: a block around it would cost a good part of its way."""
        shelf = self._shelf()
        connection = await self._lend(shelf)
        try:
            return await connection.execute_ours(statement)
        except DatabaseUnavailable:
            connection.pgconn.finish()
            raise
        finally:
            self._put(connection, shelf)

    async def _lend(self, shelf: _Shelf) -> AOwn:
        if shelf.lent < self._settings.max_connections:
            shelf.lent += 1
        else:
            try:
                async with asyncio.timeout(self._settings.connect_timeout.total_seconds()):
                    await shelf.wait()
            except TimeoutError:
                raise _all_busy(self._settings) from None
        try:
            return self._take(shelf) or await self._connect()
        except BaseException:
            shelf.give_back()
            raise

    def _shelf(self) -> _Shelf:
        if self._process != os.getpid():
            self._shelves, self._process = {}, os.getpid()
        loop = asyncio.get_running_loop()
        if (shelf := self._shelves.get(loop)) is None:
            for other in list(self._shelves):
                if other.is_closed() and (left := self._shelves.pop(other, None)):
                    left.clear()
            shelf = self._shelves[loop] = _Shelf(loop)
        return shelf

    async def _connect(self) -> AOwn:
        try:
            connection = cast("AOwn", await aconnect(self._settings, kind=AOwn))
        except DatabaseUnavailable:
            if self._revive is None:
                raise
            await asyncio.to_thread(self._revive)
            connection = cast("AOwn", await aconnect(self._settings, kind=AOwn))
        connection.execute_ours = aexecuting(connection, self._settings.schema, lent=False)
        connection.watch = _watch(connection)
        return connection

    def _take(self, shelf: _Shelf) -> AOwn | None:
        try:
            while True:
                connection, _ = shelf.idle.pop()
                if _still_there(connection):
                    return connection
                connection.pgconn.finish()
        except IndexError:
            return None

    def _put(self, connection: AOwn, shelf: _Shelf) -> None:
        try:
            now = time.monotonic()
            if _is_idle(connection) and not self._closed:
                shelf.idle.append((connection, now))
            else:
                connection.pgconn.finish()  # nothing to wait for
            while now - shelf.idle[0][1] > IDLE_TOO_LONG:
                shelf.idle.popleft()[0].pgconn.finish()
        except IndexError:
            pass  # none is idle; or somebody has closed them all, in another thread
        finally:
            shelf.give_back()

    def close(self) -> None:
        """Close what is idle now, in whichever event loop it was used, and the rest when it comes back."""
        self._closed = True
        if self._process == os.getpid():
            for shelf in list(self._shelves.values()):
                shelf.clear()


class _Shelf:
    """The connections of one event loop: some idle, some lent."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.idle: deque[tuple[AOwn, float]] = deque()
        self.lent = 0
        self._loop = loop
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        """Until one that is lent is given back, and lent to us: whoever comes later cannot take it."""
        turn = self._loop.create_future()
        self._waiting.append(turn)
        try:
            await turn
        except BaseException:
            if not turn.cancel() and not turn.cancelled():
                self.give_back()  # it was given to us in the very moment in which we gave up
            raise

    def give_back(self) -> None:
        """One is lent no more, or to him who has waited for longest."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.lent -= 1

    def clear(self) -> None:
        """Close what is idle."""
        with suppress(IndexError):
            while True:
                self.idle.pop()[0].pgconn.finish()  # nothing to wait for, so no event loop is needed


def _all_busy(settings: Settings) -> DatabaseUnavailable:
    return DatabaseUnavailable(
        f"all {settings.max_connections} connections of this process are in use; raise max_connections or do "
        "less at once (nothing was sent, so nothing was committed)",
        maybe_committed=False,
    )


# Statements on connections, ours or lent.


def executing(connection: Connection[Any], schema: str, *, lent: bool) -> Execute:
    """A way to put statements on this connection, with cursors of our own whatever its row factory is.

    One that is not lent is in autocommit.
    """
    # A cursor that is used again knows how to read what comes. It keeps the last of it, so lists have a new one each.
    cursors: dict[tuple[bool, bool], Cursor[Any]] = {}

    def execute(statement: Statement) -> Rows:
        commits = statement.writes and _is_idle(connection) and (not lent or connection.autocommit)
        try:
            if statement.plain and not lent:
                return connection.wait(_exchange(connection.pgconn, statement))
            kind = statement.as_tuples, bool(statement.under)
            cursor = cursors.get(kind) if statement.writes else None
            if cursor is None:
                shape = tuple_row if statement.as_tuples else dict_row
                if statement.under:
                    cursor = ClientCursor(connection, row_factory=shape)
                else:
                    cursor = connection.cursor(row_factory=shape, binary=statement.as_tuples)
                    if statement.as_tuples:
                        _read_plainly(cursor)
                if statement.writes:
                    cursors[kind] = cursor
            cursor.execute((statement.under + statement.text).encode(), statement.params, prepare=False)
            while cursor.nextset():
                pass
            return cursor.fetchall()  # in a pipeline, too
        except UnicodeEncodeError as error:
            raise _unsendable(error) from None
        except psycopg.Error as error:
            if lent and error.sqlstate in _AGAIN:
                raise
            alive = not connection.closed
            ours = schema if f'"{schema}"' in statement.text else ""
            raise translate(error, ours, commits=commits, alive=alive) from None

    return execute


def _exchange(line: PGconn, statement: Statement) -> PQGen[Rows]:
    """All that a plain statement needs of the driver: its cursors read and write any value, and take twice as long for it."""
    values = [None if value is None else str(value).encode() for value in statement.params]
    if any(value is not None and 0 in value for value in values):
        raise psycopg.DataError("a text holds a NUL character")  # where it would end, unnoticed
    line.send_query_params(statement.plain, values)
    result = (yield from generators.execute(line))[-1]
    if result.status != ExecStatus.TUPLES_OK:
        raise error_from_result(result)
    value = result.get_value(0, 0)
    return ({"value": None if value is None else value.decode()},)


def _read_plainly(cursor: Cursor[Any] | AsyncCursor[Any]) -> None:
    """Let instants that come in binary be what they are there, microseconds since 2000: no calendar of Python's is asked."""
    cursor.adapters.register_loader("timestamptz", Int8BinaryLoader)


def aexecuting(connection: AsyncConnection[Any], schema: str, *, lent: bool) -> AExecute:
    """The same for an awaiting caller."""
    cursors: dict[tuple[bool, bool], AsyncCursor[Any]] = {}

    async def execute(statement: Statement) -> Rows:
        commits = statement.writes and _is_idle(connection) and (not lent or connection.autocommit)
        try:
            if statement.plain and not lent:
                return await connection.wait(_exchange(connection.pgconn, statement))
            kind = statement.as_tuples, bool(statement.under)
            cursor = cursors.get(kind) if statement.writes else None
            if cursor is None:
                shape = tuple_row if statement.as_tuples else dict_row
                if statement.under:
                    cursor = AsyncClientCursor(connection, row_factory=shape)
                else:
                    cursor = connection.cursor(row_factory=shape, binary=statement.as_tuples)
                    if statement.as_tuples:
                        _read_plainly(cursor)
                if statement.writes:
                    cursors[kind] = cursor
            await cursor.execute((statement.under + statement.text).encode(), statement.params, prepare=False)
            while cursor.nextset():
                pass
            return await cursor.fetchall()  # in a pipeline, too
        except UnicodeEncodeError as error:
            raise _unsendable(error) from None
        except psycopg.Error as error:
            if lent and error.sqlstate in _AGAIN:
                raise
            alive = not connection.closed
            ours = schema if f'"{schema}"' in statement.text else ""
            raise translate(error, ours, commits=commits, alive=alive) from None

    return execute


Lender = Callable[[object, str], "Execute | None"]
ALender = Callable[[object, str], "AExecute | None"]

LENDERS: list[Lender] = []
ALENDERS: list[ALender] = []
"""Other drivers put themselves here: given a connection they know, they return a way to execute on it."""


def lend(connection: object, schema: str) -> Execute:
    """A way to put statements on a connection that a blocking caller lends us."""
    if isinstance(connection, Connection):
        return executing(connection, schema, lent=True)
    for lender in LENDERS:
        if execute := lender(connection, schema):
            return execute
    if isinstance(connection, AsyncConnection):
        raise ConfigurationError("this is an async connection: await the task's aenqueue instead of enqueue")
    raise _unknown(connection)


def alend(connection: object, schema: str) -> AExecute:
    """The same for an awaiting caller."""
    if isinstance(connection, AsyncConnection):
        return aexecuting(connection, schema, lent=True)
    for lender in ALENDERS:
        if execute := lender(connection, schema):
            return execute
    if isinstance(connection, Connection):
        raise ConfigurationError("this connection blocks: use enqueue with it instead of aenqueue")
    raise _unknown(connection)


def _unknown(connection: object) -> ConfigurationError:
    kind = f"{type(connection).__module__}.{type(connection).__qualname__}"
    return ConfigurationError(
        f"cannot enqueue on a {kind}; psycopg's Connection and AsyncConnection are known"
    )


@contextmanager
def committing(connection: Connection[Any], schema: str, *, lent: bool = False) -> Iterator[None]:
    """One transaction around the block; an error tells whether it may have been committed after all."""
    done = False
    try:
        with connection.transaction():
            yield
            done = True
    except psycopg.Error as error:
        if lent and error.sqlstate in _AGAIN:
            raise
        raise translate(error, schema, commits=done, alive=not connection.closed) from None


@asynccontextmanager
async def acommitting(
    connection: AsyncConnection[Any], schema: str, *, lent: bool = False
) -> AsyncIterator[None]:
    """The same for an awaiting caller."""
    done = False
    try:
        async with connection.transaction():
            yield
            done = True
    except psycopg.Error as error:
        if lent and error.sqlstate in _AGAIN:
            raise
        raise translate(error, schema, commits=done, alive=not connection.closed) from None
