"""Handlers that take several jobs at once.

What is at hand of such a task when one of its jobs begins goes to the handler together, and nobody waits for more to come. Each job
keeps a slot, an attempt, a lease and an end of its own: all that is shared is the call. So hooks, limits, retries and metrics
know nothing of batches.

A handler works on one job in a block of that job's own. What fails in it is that job's failure, and if the batch is
transactional, its effects are taken back to a savepoint. What fails outside is everybody's. One that has failed before, or
lost its worker, comes alone: whatever it does, it does not do to others a second time.

Savepoints lie one within the other. So in a transaction a job has one block, and no other begins meanwhile: else more would be
undone than belongs to the job, or less.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from shiftwork.context import Context
from shiftwork.errors import (
    ConfigurationError,
    DatabaseError,
    DatabaseUnavailable,
    FenceLost,
    Interrupted,
    ReturnTypeMismatch,
)
from shiftwork.outcome import Outcome, Raised, Returned
from shiftwork.retry import Retry
from shiftwork.worker.line import will_pass
from shiftwork.worker.run import NotNow, Run, Stop, Task, current
from shiftwork.worker.slots import end_all
from shiftwork.worker.transactions import Ours, Transactions, Unsure

T = TypeVar("T")


class Member(Generic[T]):
    """A job of a batch.

    async with job as document:     # what fails in here fails this job, and no other
        await tx.execute(…)
    """

    def __init__(self, argument: T) -> None:
        self.argument = argument
        """What it was enqueued with."""

        self.error: Exception | None = None
        """What failed in its block."""

        self._context: Context | None = None
        self._blocks: Blocks | None = None
        self._run: Run | None = None
        self._block: list[Any] = []

    def __repr__(self) -> str:
        return f"<Member {self.argument!r}>"

    @property
    def context(self) -> Context:
        """The job itself, and what can be said of it."""
        if self._context is None:
            raise LookupError("a job has a context only in the hands of a worker")
        return self._context

    async def __aenter__(self) -> T:
        savepoint = None
        if self._blocks is not None:
            savepoint = self._blocks.begin(self)
            try:
                await savepoint.__aenter__()
            except BaseException:
                self._blocks.open = None
                raise
        self._block.append((savepoint, None if self._run is None else current.set(self._run)))
        return self.argument

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> bool:
        savepoint, token = self._block.pop()
        if token is not None:
            current.reset(token)
        if self._blocks is not None:
            try:
                if await savepoint.__aexit__(kind, error, trace):
                    return True  # it was taken back on purpose
            finally:
                self._blocks.open = None
        if self._run is None or error is None:
            return False
        if isinstance(error, asyncio.CancelledError) and self._run.stop is not None and not _is_cancelled():
            error = Interrupted(self._run.stop.value, self._run.why)  # it alone was told to stop
        if not isinstance(error, Exception):
            return False
        if isinstance(error, StopIteration):  # which cannot be handed on: it would end who is given it
            error = RuntimeError("the block of a job raised StopIteration")
        self.error = error
        return True


class Blocks:
    """The blocks of one call in a transaction: one for each job, one after the other."""

    def __init__(self, session: Ours) -> None:
        self._session = session
        self._begun: set[Member[Any]] = set()
        self.open: Member[Any] | None = None
        self._fault: ConfigurationError | None = None

    def begin(self, member: Member[Any]) -> Any:  # noqa: ANN401
        """A savepoint, to be entered."""
        why = None
        if self.open is not None:
            why = "began before that of another had ended, which would undo what is done in it"
        elif member in self._begun:
            why = "is its second; if that failed, what was done in the first would stay"
        if why is not None:
            self._fault = ConfigurationError(
                f"jobs that share a transaction have one block each, one after the other; this one {why}"
            )
            raise self._fault
        self.open = member
        self._begun.add(member)
        return self._session.transaction()

    def end(self) -> None:
        """Refuse what went wrong, whoever has caught it."""
        if self._fault is not None:
            raise self._fault
        if self.open is not None:
            raise ConfigurationError("the handler returned while something was still in the block of a job")


class Batch(tuple[Member[T], ...]):
    """Jobs of one task, for a handler that takes several at once.

    @app.task
    async def index(documents: shiftwork.Batch[Document]) -> None:
        await search.put_all(documents.arguments)
    """

    __slots__ = ()

    @classmethod
    def of(cls, *arguments: T) -> Self:
        """A batch to call a handler with by hand; what fails in a block of its jobs is then simply raised."""
        return cls(Member(argument) for argument in arguments)

    @property
    def arguments(self) -> list[T]:
        """What the jobs were enqueued with."""
        return [member.argument for member in self]


class Gathering:
    """A batch that is being gathered, or at work."""

    def __init__(self, task: Task, most: int) -> None:
        self.task = task
        self.most = most
        self.members: dict[Run, Member[Any]] = {}
        self.ends: dict[Run, asyncio.Future[Any]] = {}
        self.begun = False
        self.blocks: Blocks | None = None
        self.at_work: asyncio.Task[None]

    @property
    def is_full(self) -> bool:
        """Whether it takes nobody more."""
        return self.begun or len(self.members) >= self.most

    @property
    def is_inside(self) -> bool:
        """Whether somebody may still be at work in a block."""
        return self.blocks is not None and self.blocks.open is not None

    @property
    def is_deserted(self) -> bool:
        """Whether nobody wants to know any more what comes of it."""
        return all(end.done() or run.stop is not None for run, end in self.ends.items())

    def let_go(self, error: BaseException) -> None:
        """Nothing came of it for those that still wait."""
        for end in self.ends.values():
            if not end.done():
                end.set_exception(error)


class Batches:
    """Brings jobs of a task together."""

    def __init__(
        self,
        transactions: Transactions,
        *,
        decided: Callable[[Run, Returned | Raised], Outcome],
        more: Callable[[], int],
        timed: Callable[[Run], None],
        stop: Callable[[Run, Stop, str], None],
    ) -> None:
        """`more` says how many jobs are about to begin; `timed` lets the time run that one has."""
        self._transactions = transactions
        self._decided = decided
        self._more = more
        self._timed = timed
        self._stop = stop
        self._gathering: dict[str, Gathering] = {}
        self._at_work: set[asyncio.Task[None]] = set()

    async def join(self, run: Run, argument: object) -> Any:  # noqa: ANN401
        """Take part in the next batch: what comes of it for this job."""
        alone = run.failures > 0 or run.resets > 0
        gathering = None if alone else self._gathering.get(run.name)
        if gathering is None or gathering.is_full or run in gathering.members:
            gathering = self._new(run.task, alone=alone)
        member = Member(argument)
        member._run, member._context = run, run.context  # noqa: SLF001
        gathering.members[run] = member
        end = gathering.ends[run] = asyncio.get_running_loop().create_future()
        try:
            return await end
        except asyncio.CancelledError:
            await self._leave(gathering, run)
            raise

    async def close(self) -> None:
        """Nobody waits for what is still at work."""
        await end_all(self._at_work)

    def _new(self, task: Task, *, alone: bool) -> Gathering:
        assert task.batch is not None  # noqa: S101
        gathering = Gathering(task, 1 if alone else task.batch)
        if not alone:
            self._gathering[task.name] = gathering
        gathering.at_work = asyncio.create_task(self._work(gathering))
        self._at_work.add(gathering.at_work)
        gathering.at_work.add_done_callback(self._at_work.discard)
        return gathering

    async def _leave(self, gathering: Gathering, run: Run) -> None:
        """A job was told to stop. What others do goes on, unless it is in the same transaction."""
        if not gathering.begun:
            del gathering.members[run], gathering.ends[run]
            return
        if run.concluding:  # too late
            await asyncio.wait([gathering.at_work])
            return
        if run.stop is Stop.TIMEOUT:
            for other in gathering.members:
                self._stop(other, Stop.TIMEOUT, run.why)
        if gathering.task.transaction or gathering.is_deserted:
            if not gathering.at_work.cancelling():  # once: what it does at its end is not to be hit as well
                gathering.at_work.cancel()
            await asyncio.wait([gathering.at_work])

    async def _work(self, gathering: Gathering) -> None:
        try:
            turns = self._more()  # in each of them one begins at least; who comes later is not waited for
            while turns and self._more() and not gathering.is_full:
                await asyncio.sleep(0)
                turns -= 1
            if gathering.task.transaction:
                await self._transacted(gathering)
            else:
                await self._called(gathering)
        except BaseException as error:  # noqa: BLE001  -- every ending is a value
            gathering.begun = True  # nobody is to join it any more
            stopped = isinstance(error, asyncio.CancelledError) and _is_cancelled()
            if stopped or isinstance(error, GeneratorExit):  # which would end whoever is told of it
                error = NotNow("its batch was stopped")
            gathering.let_go(error)

    def _begin(self, gathering: Gathering) -> Batch[Any]:
        gathering.begun = True
        if self._gathering.get(gathering.task.name) is gathering:
            del self._gathering[gathering.task.name]
        return Batch(gathering.members.values())

    async def _called(self, gathering: Gathering) -> None:
        batch = self._begin(gathering)
        if not batch:
            return
        results = await _call(gathering.task, batch)
        for end, member, result in zip(gathering.ends.values(), batch, results, strict=True):
            if end.done():
                continue
            if member.error is None:
                end.set_result(result)
            else:
                end.set_exception(member.error)

    async def _transacted(self, gathering: Gathering) -> None:
        """The handler inside one transaction, which all of its jobs have in common."""
        async with self._transactions.in_turn() as in_time:
            batch = self._begin(gathering)
            if not batch:
                return
            if not in_time:
                raise NotNow("no session was free for a while")
            for run in gathering.members:
                self._timed(run)
            session: Ours | None = None
            runs = sorted(gathering.members, key=lambda run: run.id)
            try:
                session = await self._transactions.open_together(runs)
                endings = await self._endings(gathering, batch, session)
                await self._conclude(gathering, session, endings)
            except DatabaseError as error:
                if session is not None or not will_pass(error):
                    raise
                if isinstance(error, DatabaseUnavailable):
                    await asyncio.sleep(self._transactions.pause())
                raise NotNow(str(error)) from None  # its code has not begun
            except FenceLost:
                raise NotNow("a job of its batch is not ours any more") from None
            finally:
                if session is not None:
                    self._transactions.put(session, in_use=gathering.is_inside)

    async def _endings(
        self, gathering: Gathering, batch: Batch[Any], session: Ours
    ) -> dict[Run, Returned | Raised]:
        """How it ended for each; an error of all of them has undone everything."""
        task, retry = gathering.task, gathering.task.retry or Retry()
        repeated = 0
        while True:
            gathering.blocks = Blocks(session)
            for member in batch:
                member._blocks, member.context.tx, member.error = gathering.blocks, session, None  # noqa: SLF001
            try:
                results = await _call(task, batch, session)
                gathering.blocks.end()
                for result in results:
                    task.signature.encode_result(result)
            except Exception as error:
                if gathering.is_inside:
                    raise  # it would write on after it is undone
                await self._transactions.undo(next(iter(gathering.members)), session)
                if not retry.repeats(error, repeated):
                    return dict.fromkeys(gathering.members, Raised(error))
                for run in gathering.members:
                    run.jobs = None
                await asyncio.sleep(retry.pause(repeated).total_seconds())
                repeated += 1
            else:
                return {
                    run: Returned(result) if member.error is None else Raised(member.error)
                    for (run, member), result in zip(gathering.members.items(), results, strict=True)
                }

    async def _conclude(
        self, gathering: Gathering, session: Ours, endings: dict[Run, Returned | Raised]
    ) -> None:
        if any(run.stop is not None for run in endings):
            raise NotNow("another job of its batch was stopped")
        outcomes = [self._decided(run, ending) for run, ending in endings.items()]
        for run, outcome in zip(endings, outcomes, strict=True):
            run.concluding, run.unsure = True, outcome
        try:
            worker = next(iter(endings)).worker
            written = await self._transactions.close_together(worker, session, outcomes)
        except BaseException as error:
            if isinstance(error, Unsure):
                raise NotNow(str(error)) from None
            for run in endings:
                run.concluding, run.unsure = False, None
            raise
        for run, outcome in zip(endings, written, strict=True):
            run.done = outcome
            if not (end := gathering.ends[run]).done():  # middleware may not wait any more
                end.set_result(None)


async def _call(task: Task, batch: Batch[Any], session: Ours | None = None) -> Sequence[Any]:
    """What the handler returns for each job."""
    assert task.batch_parameter is not None  # noqa: S101
    given: dict[str, Any] = {task.batch_parameter: batch}
    if task.connection_parameter is not None:
        given[task.connection_parameter] = session
    returned = await task.function(**given)
    if returned is None:
        return [None] * len(batch)
    if not isinstance(returned, list | tuple) or len(returned) != len(batch):
        many = f"{len(returned)}" if isinstance(returned, list | tuple) else type(returned).__name__
        raise ReturnTypeMismatch(
            f"task {task.name!r} was given {len(batch)} jobs and returned {many}; it returns None, or a list with a result for each",
            task=task.name,
        )
    return returned


def _is_cancelled() -> bool:
    work = asyncio.current_task()
    return work is not None and work.cancelling() > 0


__all__ = ["Batch", "Batches", "Member"]
