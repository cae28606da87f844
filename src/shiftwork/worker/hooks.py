"""What a program wants to be asked before a claim, and to be told before and after a job.

A hook before a claim may leave the round out, or narrow it: by conditions on jobs, and by how many it may take. If it
fails, nothing is claimed for a while, and that is said once. Hooks around a job change nothing: their errors are
warnings on the job, and those that come after it always run.
"""

from __future__ import annotations

import asyncio
import inspect
import time
import types
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import CoroutineType
from typing import Any, cast

from psycopg import sql

from shiftwork import events
from shiftwork.errors import InvalidArgument
from shiftwork.events import Event
from shiftwork.job import Job, seed_of
from shiftwork.outcome import Returned, in_a_line
from shiftwork.worker.line import Patience
from shiftwork.worker.metrics import QUICK, Durations
from shiftwork.worker.run import Run
from shiftwork.worker.slots import Steps, Waiting, directly

AGAIN = 5.0
"""Seconds until a hook is asked again that has left a round out, unless it says otherwise."""

PATIENCE = (1.0, 60.0)
"""Seconds for which nothing is claimed after a hook has failed, at first and at most."""

WAITING = 5.0
"""Seconds after which it is told that a hook before a claim waits, and that nothing is claimed."""

REMEMBERED = 1000
"""Jobs of which it is known that they were told of."""

TOLD = Returned(None)
"""What is given when a coroutine of a hook has ended with its first step: this very one, whatever else hooks may yield."""

clock = time.perf_counter


class Round:
    """A claim that is about to be made.

    @app.before_claim
    def by_night(claim):
        if not is_night():
            claim.skip(timedelta(minutes=1))
    """

    def __init__(
        self,
        worker: int,
        queues: Mapping[str, int | None],
        tasks: Iterable[str] | None,
        most: int,
        holding: Mapping[int, Run],
    ) -> None:
        self.worker = worker
        self.queues = dict(queues)
        """The queues that are looked through, each with how many it may have at most, None for any number."""

        self.tasks = None if tasks is None else frozenset(tasks)
        """The tasks that are looked for, None for all."""

        self.most = most
        """How many jobs are claimed at most."""

        self.limits: dict[str, int] = {}
        """How many of a task at most."""

        self.conditions: list[str] = []
        self.skipped: float | None = None
        """Seconds for which nothing is to be claimed."""

        self._limited: dict[str, int] = {}
        self._holding = holding

    @property
    def holding(self) -> list[Job]:
        """Jobs that this worker has claimed and that have not ended: what they take up is not free."""
        runs = [run for run in self._holding.values() if not run.ended]
        return [Job.from_claim(run.taken, run.worker, run.claimed_at) for run in runs]

    def skip(self, lasting: timedelta | None = None) -> None:
        """Claim nothing now; ask again after a while, or when there is news."""
        self.skipped = AGAIN if lasting is None else max(lasting.total_seconds(), 0.01)

    def require(self, condition: sql.Composable) -> None:
        """Pass by jobs for which this does not hold: SQL over the columns of `job`, with its values as literals.

        claim.require(sql.SQL("(job.payload ->> 'size')::int <= {}").format(free))
        """
        if not isinstance(condition, sql.Composable):
            raise InvalidArgument(
                f"a condition is psycopg.sql.SQL(…), with values put in by .format(…), and not {condition!r}"
            )
        self.conditions.append(condition.as_string(None))

    def limit(self, most: int, *, queue: str | None = None, task: str | None = None) -> None:
        """Take at most so many: of a queue, of a task, or in all."""
        most = max(most, 0)
        if queue is not None and task is not None:
            raise InvalidArgument("a limit is for a queue, for a task or for the whole round")
        if task is not None:
            self.limits[task] = min(most, self.limits.get(task, most))
        elif queue is None:
            self.most = min(self.most, most)
        elif queue in self.queues:
            former = self.queues[queue]
            self.queues[queue] = most if former is None else min(most, former)
            self._limited[queue] = most

    @property
    def narrowed(self) -> Sequence[object]:
        """What it is narrowed to; where that changes, what was passed by is looked at again."""
        return (*self.conditions, *sorted(self.limits.items()), *sorted(self._limited.items()))


BeforeClaim = Callable[[Round], Awaitable[None] | None]
BeforeJob = Callable[[Job], Awaitable[None] | None]
AfterJob = Callable[[Job, str | None], Awaitable[None] | None]


@dataclass
class Hooks:
    """The hooks of a program, each kind in the order in which they were declared."""

    before_claim: list[BeforeClaim] = field(default_factory=list)
    before_job: list[BeforeJob] = field(default_factory=list)
    after_job: list[AfterJob] = field(default_factory=list)


class Around:
    """The hooks before or after every job, and how long they took. One that fails is a warning on the job, and changes nothing."""

    def __init__(
        self,
        kind: str,
        hooks: Sequence[Callable[..., Any]],
        failed: Callable[[Run, str, BaseException], None],
        stopped: Callable[[Run], bool],
    ) -> None:
        """`failed` is told of those that do; `stopped` says whether who finds himself cancelled was told to stop with his job."""
        self.kind = kind
        self._hooks = tuple(hooks)
        self._failed = failed
        self._stopped = stopped
        self.call = _alone(self._hooks) or self._call_in_turn
        """Calls them; gives what is to be awaited, if anything is."""

        self.took = Durations(QUICK)
        self.fresh: list[float] = []
        """Seconds that are not counted yet: many at once are counted faster."""

        self._renew()

    def _renew(self) -> None:
        self.steps = cast("Steps", _steps())
        """Takes the first step of each coroutine that is sent to it; gives `TOLD` if that was its only one."""

        self.steps.send(None)

    def tell(self, began: float, *given: Any) -> Coroutine[Any, Any, None] | None:  # noqa: ANN401
        """Call them, with a job first of all; what is left to await, if one of them waits."""
        try:
            answer = self.call(*given)
            if answer is not None and (rest := self.rest(given[0], began, answer)) is not None:
                return rest
        except BaseException as error:  # noqa: BLE001  -- it is not ours, and nobody can have cancelled us by now
            self.failed(given[0], error)
        self.fresh.append(clock() - began)
        return None

    def rest(self, job: Job, began: float, answer: object) -> Coroutine[Any, Any, None] | None:
        """What is left to await, if anything is; `answer` is what a hook gave, or then `steps`."""
        waiting = self._waiting(answer)
        return None if waiting is None else self._awaited(job, began, waiting)

    def failed(self, job: Job, error: BaseException) -> None:
        """Keep a warning with the job; what takes first steps may have ended with it."""
        self._renew()
        self._failed(seed_of(job), self.kind, error)

    async def _forgiven(self, job: Job, waiting: Awaitable[None]) -> None:
        """Wait for a hook, which may fail; what it finds cancelled is its own affair, unless it is told to stop itself."""
        try:
            await waiting
        except asyncio.CancelledError as error:
            if self._stopped(seed_of(job)):
                raise
            self.failed(job, error)
        except GeneratorExit:
            raise
        except BaseException as error:  # noqa: BLE001  -- it is not ours
            self.failed(job, error)

    def count(self) -> None:
        """Some jobs have ended: count how long the hooks around them took."""
        if self._hooks:
            self.took.add_all(self.fresh)
        self.fresh.clear()

    def _waiting(self, answer: Any) -> Waiting | None:  # noqa: ANN401
        steps = self.steps
        if steps.gi_yieldfrom is None:  # its first step is not taken yet
            if not inspect.isawaitable(answer):
                return None
            answer = steps.send(answer if type(answer) is CoroutineType else _awaiting(answer))
            if answer is TOLD:
                return None
        waiting = Waiting(steps, answer, directly)
        self._renew()
        return waiting

    async def _awaited(self, job: Job, began: float, waiting: Awaitable[None]) -> None:
        await self._forgiven(job, waiting)
        self.took.add(clock() - began)

    def _call_in_turn(self, *given: Any) -> Coroutine[Any, Any, None] | None:  # noqa: ANN401
        """Call several; what is left of that, once one of them waits."""
        hooks = iter(self._hooks)
        for hook in hooks:
            try:
                answer = hook(*given)
                if answer is not None and (waiting := self._waiting(answer)) is not None:
                    return self._others(waiting, hooks, *given)
            except BaseException as error:  # noqa: BLE001  -- as above
                self.failed(given[0], error)
        return None

    async def _others(
        self,
        waiting: Awaitable[None],
        hooks: Iterator[Callable[..., Any]],
        *given: Any,  # noqa: ANN401
    ) -> None:
        await self._forgiven(given[0], waiting)
        for hook in hooks:
            await self._forgiven(given[0], call(hook, *given))


async def _awaiting(answer: Awaitable[Any]) -> None:
    await answer


def _alone(hooks: Sequence[Callable[..., Any]]) -> Callable[..., Any] | None:
    """What calls at most one."""
    if len(hooks) > 1:
        return None
    return hooks[0] if hooks else lambda *_: None


@types.coroutine
def _steps() -> Any:  # noqa: ANN401
    """As in `slots.first_steps`."""
    coroutine = yield
    while True:
        yield from coroutine
        coroutine = yield TOLD


async def call(hook: Callable[..., Any], *given: object) -> None:
    """Call a hook, plain or async."""
    answer = hook(*given)
    if inspect.isawaitable(answer):
        await answer


def _ends_us(error: BaseException) -> bool:
    """Whether whoever waits for a hook is to end himself: what else a hook finds cancelled is its own affair."""
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0
    return isinstance(error, GeneratorExit)


class Asking:
    """Asks the hooks before every claim; of one that fails it tells once, and waits longer each time."""

    def __init__(self, hooks: Sequence[BeforeClaim], publish: Callable[[Event], None]) -> None:
        self._hooks = tuple(hooks)
        self._publish = publish
        self._patience = Patience(*PATIENCE)
        self._failing = self._waiting = False
        self._passed_by: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._hooks)

    async def ask(self, wished: Round) -> None:
        """Let the hooks narrow a claim, or leave it out; one that fails leaves it out."""
        waiting = asyncio.get_running_loop().call_later(WAITING, self._wait)
        try:
            for hook in self._hooks:
                await call(hook, wished)
        except BaseException as error:  # it is not ours
            if _ends_us(error):
                raise
            wished.skipped = self.failed(error)
        else:
            wished.queues = {name: most for name, most in wished.queues.items() if most is None or most > 0}
            if wished.skipped is None and (wished.most <= 0 or not wished.queues):
                wished.skip()
            if wished.skipped is not None:
                self.worked()  # there will be no claim to tell that by
        finally:
            waiting.cancel()
        if self._waiting:
            self._waiting = False
            self._publish(events.ClaimHookWaits(over=True))

    def _wait(self) -> None:
        self._waiting = True
        self._publish(events.ClaimHookWaits(over=False))

    def failed(self, error: BaseException) -> float:
        """A hook has, or what it requires cannot be asked; says how long to wait."""
        if not self._failing:
            self._failing = True
            self._publish(events.ClaimHookFailed(in_a_line(error)))
        return self._patience()

    def worked(self, unanswered: Sequence[int] = ()) -> None:
        """A claim was made as the hooks wanted it, but for jobs of which a condition could not be answered."""
        for job in unanswered:
            if job not in self._passed_by:
                if len(self._passed_by) >= REMEMBERED:
                    self._passed_by.clear()
                self._passed_by.add(job)
                self._publish(events.JobPassedBy(job))
        if self._failing:
            self._failing = False
            self._patience.reset()
            self._publish(events.ClaimHookBack())
