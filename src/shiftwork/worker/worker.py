"""The worker: its main loop, and what holds the parts together."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from shiftwork import events, operations
from shiftwork.errors import (
    ConfigurationError,
    DatabaseError,
    DatabaseUnavailable,
    NotInstalled,
    ShiftworkError,
    SingletonTaken,
)
from shiftwork.events import Event, JobBegan, JobEnded, Subscriber
from shiftwork.job import State
from shiftwork.operations import Claimed, Pulse, Routine
from shiftwork.outcome import Outcome
from shiftwork.settings import Settings
from shiftwork.stores.store import Store
from shiftwork.worker.attempt import At, Attempts, Middleware
from shiftwork.worker.budgets import Budgets
from shiftwork.worker.duties import STRIKES, Duties
from shiftwork.worker.hooks import Asking, Hooks, Round
from shiftwork.worker.lanes import Lane, Lanes, served
from shiftwork.worker.leases import Held, Leases, through_suspend
from shiftwork.worker.line import Line, Patience, will_pass
from shiftwork.worker.pipe import Begin
from shiftwork.worker.processes import Processes
from shiftwork.worker.resting import NAP, Pace, Sleep
from shiftwork.worker.run import Run, Stop, Task
from shiftwork.worker.settling import Settling
from shiftwork.worker.singleton import Singleton
from shiftwork.worker.slots import Slots
from shiftwork.worker.sql import REGISTRY, Registry
from shiftwork.worker.state import described, memory
from shiftwork.worker.supervised import process
from shiftwork.worker.transactions import Transactions
from shiftwork.worker.waking import Listener, Wake

if TYPE_CHECKING:
    from shiftwork.worker.endpoint import Endpoint
    from shiftwork.worker.health import Health
    from shiftwork.worker.metrics import Durations

BATCH = 500
"""Jobs in one claim at most: while they run, the next are claimed."""

UNWRITTEN = 5_000
"""Outcomes that may wait to be written while more is claimed."""

NOT_UNDERSTOOD = "42"
"""The class of SQLSTATE for names that are not there, and for what may not be done with them."""

READ_ONLY = "25006"
"""What a server says that takes no writes any more."""

AGAIN = 0.5
"""Seconds after which a job is given back whose former attempt still runs here; else we would claim it at once."""

FULL = 0.5
"""How full the server's queue of notifications may be before it is worth a warning; from there on inserts keep silent."""

BARRED = 5.0
"""Seconds after which it is told that nothing can be claimed since somebody's transaction does not end."""

MOST_QUEUES = 100
"""Queues of which metrics tell."""

STUBBORN = 1.0
"""Seconds that handlers have for their cleaning up once they were told to stop at the end of the grace."""

LAST = 1.0
"""Seconds in which the database has to answer at the very end."""

LEFT_ALONE = 600.0
"""Seconds for which reaping is left alone after it was refused too often in a row: it would be refused again."""

LONG = 600.0
"""Seconds that a statement of a duty may take: some of them read and write a lot."""

STANDBY = 1.0
"""Seconds after which a worker that stands by tries again to be the one."""


class Worker:
    """Claims jobs and runs them, until it is told to stop."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        tasks: Mapping[str, Task],
        *,
        routines: Sequence[Routine] = (),
        limits: Mapping[str, Any] | None = None,
        hooks: Hooks | None = None,
        middleware: Sequence[Middleware] = (),
        subscribers: Sequence[Subscriber] = (),
        revive: Callable[[], None] | None = None,
        begin: Begin | None = None,
        at: At | None = None,
    ) -> None:
        """`routines` are entered in the registry first; `begin` is what processes are told first, if tasks need any; `at` is
        called at named points: tests wait there.
        """
        self.id = 0
        self.jobs = 0
        """How many jobs it has claimed."""

        self.holding: Held = {}
        self.settings = settings
        self._store = store
        self._registry = Registry(settings, self._store, tasks, routines, self._publish)
        self._queues, self._budgets = served(settings, tasks), Budgets(settings.queue_budgets)
        self._lanes = Lanes(settings, tasks, self._queues, self._budgets)
        self._limits, self._hooks = limits or {}, hooks or Hooks()
        self._subscribers, self._middleware = list(subscribers), middleware
        self._told_beginnings: list[Subscriber] = []
        self._revive = revive
        self._process_begin = begin
        self._at = at
        self._wake = Wake()
        self._backlog: deque[Run] = deque()
        self._away, self._returns = set[str](), 0  # which parts cannot work, and how often one could again
        self._stopping: str | None = None
        self._stopped_at = 0.0
        self._told = asyncio.Event()
        self._at_once = False
        self._hungry = False
        """Whether there was no room for all that could have been claimed."""

        self._quiet = False
        """Whether nothing was held when it was last looked for more."""

        self._paused = self._barred = False
        self._skipped = False
        """Whether a hook has left a claim out."""

        self._full = False
        """Whether a limit of the cluster kept us from claiming: then what ends here may let another begin."""

        self._passing = False
        """Whether a claim has only looked at jobs that are not for us, and there are more behind them."""

        self._sure = False
        """Whether all queues are looked through from their start, since nothing seems to be left."""

        # Why it may end, if it has done what it was to do; and whether it has asked for what is due by then.
        self._done, self._tidied = "", False
        self._reap_due = False
        self._notifications = self._reap_at = self._barred_since = 0.0
        self._refusals = 0
        self._failed = False
        """Whether it stops for a reason that is none to be content with."""

        self._piling_up = False
        """Whether the server's queue of notifications is about to be full."""

        # Whether our lease was taken for over; whether a claim had no answer; whether what we say is not understood, since a
        # table, or our schema, is not what it was.
        self._given_up = self._unanswered = self._altered = False
        self._abandoned = 0
        self._buried: deque[int] = deque()
        self._due: float | None = None
        self._pace = Pace()
        self._sleep = Sleep(
            self._wake,
            declare=self._declare,
            take_back=self._rouse,
            look=self._look_again,
            due=lambda: self._due,
            poll=self._poll,
            reached=self._reached,
        )

    # From the first to the last.

    async def run(self) -> bool:
        """Claim and run jobs until asked to stop; return when the last one is settled. Says whether all went well."""
        self._asking = Asking(self._hooks.before_claim, self._publish)
        self._ask_subscribers()
        self._line = Line(self.settings, self._name, self._revive)
        self._leases = Leases(
            self.settings,
            self._store,
            self.holding,
            pulse=self._take_pulse,
            lapse=self._lapse,
            silence=lambda error: self._trouble("lease", error),
            broken=self._break,
            says=lambda: {"state": self._state(), **self._duties.wish()},
            revive=self._revive,
        )
        self._duties = Duties(
            self._store,
            Line(self.settings, lambda: f"{self._name()} duties", self._revive, answer=LONG),
            worker=lambda: self.id,
            publish=self._publish,
            trouble=lambda error: self._trouble("duties", error),
        )
        self._settling = Settling(
            self._store,
            Line(self.settings, self._name, self._revive),
            answered=self._answered,
            settled=self._settled,
            trouble=self._trouble,
            more=lambda: bool(self._slots.ready),
            wrote=lambda jobs, seconds: self._publish(events.Settled(jobs, seconds)),
            at=self._at,
        )
        self._transactions = Transactions(self.settings, self._store, self._name)
        self._processes = Processes(
            self.settings, self._process_begin, self._tasks, self._settling, self._publish
        )
        self._attempts = Attempts(
            self.settings,
            self._store,
            self._settling,
            self._transactions,
            self._processes,
            hooks=self._hooks,
            publish=self._publish,
            middleware=self._middleware,
            waits=lambda: self._slots.wake(),  # noqa: PLW0108  -- they are made after this
            closing=lambda: self._slots.closing,
            began=self._began,
            told_beginnings=self._told_beginnings,
            written=lambda run, outcome: self._answered(run, outcome, "settled"),
            dropped=lambda run: self._answered(run, None, "lost"),
            stop=self.tell,
            more=lambda: len(self._slots.ready),
            at=self._at,
        )
        self._slots = Slots(self.settings.concurrency, self._attempts.begin, self._freed)
        self._listener = Listener(
            self.settings,
            self._store,
            self._name,
            work=self._heard_work,
            look=self._heard_of,
            heard=self._heard,
        )
        self._endpoint = self._opened(self._attempts.hook_times) if self.settings.metrics_port else None
        self._singleton = Singleton(self.settings, self._lost_singleton)
        cancelled: asyncio.CancelledError | None = None
        try:
            await self._unless_stopped(self._begin())
            if self.id:
                async with self._settling, self._slots:
                    try:
                        async with self._listener, self._duties:
                            await self._unless_stopped(self._loop())
                    except asyncio.CancelledError as error:
                        cancelled = error
                        self.stop("cancelled", now=True)
                    await self._wind_up()
        finally:
            clean = await self._end()
        if cancelled is not None:
            raise cancelled
        return clean

    async def _loop(self) -> None:
        ends = self._ends_at()
        patience = self._settings_patience()
        while self._stopping is None:
            if ends is not None and time.monotonic() >= ends:
                self.stop("its time is over")
                break
            try:
                if not self._singleton.held:
                    await self._take_singleton()
                    continue
                await self._catch_up()
                if self._leases.lapsed:
                    await self._wake.wait(self._leases.seconds / 10)  # what is claimed now would soon be lost
                    continue
                idle = await self._fill()
                if self._buried:
                    await self._bury()
                if self._reap_due:
                    await self._reap()
                self._trouble("claiming", None)
                if self._stopping is None and not self._is_done(idle):
                    await self._rest(idle, ends)
                if self._done:
                    await self._take_leave(self._done)
                patience.reset()
            except (DatabaseError, ConfigurationError) as error:
                self._unanswered = self._unanswered or getattr(error, "maybe_committed", False)
                self._trouble("claiming", error)
                await self._wait_out(patience)

    async def _catch_up(self) -> None:
        """See to what has become of us, of the tables and of the registry meanwhile."""
        if self._given_up:
            await self._register()
        if self._altered:
            await self._line.perform(operations.require(self._store))
            self._altered = False
        if self._unanswered:
            await self._reconcile()
        if self._registry.is_due:
            await self._follow_registry()

    def _settings_patience(self) -> Patience:
        settings = self.settings
        return Patience(settings.reconnect.total_seconds(), settings.reconnect_most.total_seconds())

    async def _wait_out(self, patience: Patience) -> None:
        """The database is away: wait for the next try, or end if there have been enough."""
        tries = self.settings.reconnect_tries
        if tries is not None and patience.tries >= tries:
            self._failed = True
            self.stop(f"the database was away for {tries} tries")
            return
        until, returns = time.monotonic() + patience(), self._returns
        # What ends meanwhile is no reason to try sooner; that another part is back is one.
        while self._stopping is None and returns == self._returns and (left := until - time.monotonic()) > 0:
            await self._wake.wait(left)

    async def _unless_stopped(self, work: Coroutine[Any, Any, None]) -> None:
        """What this worker does until it is told to stop; then it need not wait for a database that does not answer."""
        working = asyncio.create_task(work)
        told = asyncio.create_task(self._told.wait())
        try:
            await asyncio.wait([working, told], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([working], timeout=LAST if self._at_once else self._patience)
        finally:
            told.cancel()
            if not working.done():
                self._unanswered = bool(self.id)
                await self._line.abandon(working)
        if not working.cancelled():
            working.result()

    @property
    def _patience(self) -> float:
        return max(LAST, min(self.settings.grace, self.settings.renew_every).total_seconds())

    def stop(self, why: str = "asked to stop", *, now: bool = False) -> None:
        """Claim no more; running jobs have the grace to end, or with `now` none."""
        if self._stopping is None:
            self._stopping = why
            self._stopped_at = time.monotonic()
            self._told.set()
            self._publish(events.WorkerStopping(self.id, why, len(self._slots.busy) if self.id else 0))
        self._at_once = self._at_once or now
        self._hungry = True
        self._wake()

    def subscribe(self, subscriber: Subscriber) -> None:
        """Let a function see what happens from now on."""
        self._subscribers.append(subscriber)
        self._ask_subscribers()

    def _ask_subscribers(self) -> None:
        """Who wants to hear of what happens with every job, and is not worth an event otherwise."""
        self._told_beginnings[:] = [one for one in self._subscribers if _wants(one, events.JobBegan)]
        self._told_ends = [_of_ends(one) for one in self._subscribers]

    def bury(self, worker: int) -> None:
        """Take over from a worker whose process is known to be dead: its jobs need not wait for its lease to end."""
        self._buried.append(worker)
        self._wake()

    def ping(self) -> threading.Event:
        """Set by the thread that renews the lease, as soon as it turns; at once if it has not begun."""
        return self._leases.ping()

    # Claiming.

    async def _reconcile(self) -> None:
        if not await self._leases.reconcile():
            raise DatabaseUnavailable(
                "what a claim without an answer took could not be found yet", maybe_committed=False
            )
        self._unanswered = False

    async def _fill(self) -> bool:
        """Claim as much as there is room for; says whether nothing was left, as far as could be seen."""
        await self._begin_prefetched()
        self._hungry, self._quiet = False, not self.holding
        self._due, self._passing, self._skipped, full = None, False, False, False
        lanes = self._lanes.in_turn()
        idle, looked = len(lanes) >= len(self._lanes.all), False
        for lane in lanes:
            if self._room() <= 0 or self._stopping is not None:
                self._hungry = True
                return False
            wish = self._lanes.wish()
            left = min(lane.left, self._slots.free) if lane.limits else lane.left
            if left <= 0 or len(wish) < len(self._queues):
                self._hungry = True  # a slot that is freed may be for what is left out now
                if left <= 0 or not wish:
                    continue
            looked = True
            if lane.more:
                await self._gather(lane)
            claimed = await self._claim(lane, wish)
            if claimed is None:
                return False
            if claimed.skipped:
                self._skipped = True
                lane.looked(0, 0, 0.0, more=False)
            self._hungry = self._hungry or self._lanes.is_full  # with this claim, maybe
            # A queue that had no room for more, and has by now, has been told to nobody; and a budget is no reason to wait.
            again = any(map(self._lanes.has_room, _bounded(wish, claimed)))
            dues = [due for due in (self._due, claimed.next_due_in) if due is not None]
            self._due = min(dues, default=None)
            self._full = full = full or claimed.full or bool(lane.narrowed)
            self._hungry = self._hungry or (
                full and self._slots.free <= 0
            )  # what is limited is not fetched ahead
            self._passing = self._passing or lane.passing
            if lane is self._lanes.together:
                if not claimed.more:
                    return not again
                continue  # lane by lane, then
            idle = idle and not claimed.more and not again
        if not (idle or looked):
            await self._wake.wait(NAP)  # until those that rest have their turn, everybody else has his
        return idle

    async def _gather(self, lane: Lane) -> None:
        """A claim of one costs nearly as much as one of many: if there is more than enough, wait a moment for slots."""
        self._hungry = True
        half = min(lane.most, self._slots.many, BATCH) // 2
        until = time.monotonic() + NAP
        while min(self._room(), lane.left) < half and (left := until - time.monotonic()) > 0:
            await self._wake.wait(left)

    def _room(self) -> int:
        """How many jobs may be claimed now."""
        room = self._slots.free + self.settings.prefetch - len(self._backlog)
        if self.settings.max_jobs is not None:
            room = min(room, self.settings.max_jobs - self.jobs)
        return min(room, BATCH, UNWRITTEN - self._settling.waiting)

    async def _claim(self, lane: Lane, wish: Mapping[str, int | None]) -> Claimed | None:
        free = self._slots.free
        want = min(self._room(), lane.left)
        if lane.limits:
            want = min(want, free)
        await self._reached("claiming")
        wished = Round(self.id, wish, lane.tasks, want, self.holding)
        if self._asking:
            await self._asking.ask(wished)
            if wished.skipped is not None:
                return Claimed.nothing(self.id, self._leases.answered, wished.skipped)
            if lane.narrowed != wished.narrowed and not lane.passing:
                lane.cursor.look()
            lane.narrowed = wished.narrowed
        began = time.perf_counter()
        try:
            claimed = await self._line.perform(
                operations.claim(
                    self._store,
                    self.id,
                    wished.queues,
                    wished.most,
                    cursor=lane.cursor,
                    start=max(free, 0),
                    tasks=lane.tasks,
                    but=lane.but,
                    conditions=wished.conditions,
                    most=wished.limits,
                )
            )
        except DatabaseError as error:
            if not wished.conditions or isinstance(error, DatabaseUnavailable) or will_pass(error):
                raise
            return Claimed.nothing(self.id, self._leases.answered, self._asking.failed(error))
        self._asking.worked(claimed.unanswered)
        seconds = time.perf_counter() - began
        lane.looked(len(claimed.taken), wished.most, seconds, more=claimed.more)
        if self._subscribers:
            tasks = Counter(map(_task_of, claimed.taken))
            self._publish(events.Claimed(tasks, seconds))
        await self._reached("claimed")
        for job in claimed.refused:
            [queue, *_] = wished.queues
            self._publish(events.JobRefused(job, queue, queue, 0, State.RUNNING.value))
        for kind, name, reason in claimed.resumed:
            self._publish(events.PauseEnded(kind, name, reason))
        if claimed.paused is not self._paused:
            self._paused = claimed.paused
            self._publish(events.WorkerPaused(self.id) if self._paused else events.WorkerResumed(self.id))
        self._bar(claimed.barred)
        if not claimed.number:
            self._leases.nudge()  # late; the next beat tells whether we were given up
            await asyncio.sleep(min(0.1, self._leases.seconds / 10))
            return None
        self._take_in(claimed)
        self._leases.answered = claimed.number
        return claimed

    def _bar(self, barred: bool) -> None:
        """Claims are barred for a moment whenever something is paused; of more than a moment is told."""
        now = time.monotonic()
        since, self._barred_since = self._barred_since, (self._barred_since or now) if barred else 0.0
        if self._barred is not (barred and since > 0 and (self._barred or now - since > BARRED)):
            self._barred = not self._barred
            self._publish(events.ClaimsBarred(over=not self._barred))

    def _take_in(self, claimed: Claimed) -> None:
        tasks, holding, slots, lanes = self._tasks, self.holding, self._slots, self._lanes
        worker, at, started = claimed.worker, claimed.at, claimed.started
        stops = self._stopping is not None
        kept: list[Run] = []
        begin: list[Run] = []
        for place, taken in enumerate(claimed.taken):
            run = Run(*taken, worker, at, tasks.get(taken[1]))
            former = holding.get(taken[0])
            if former is not None and not (former.ended or former.concluding):
                # Lost without our knowing. Two attempts of one job do not run here at once; but one that has ended, and
                # of which only the answer has not come yet, is in nobody's way.
                self.tell(former, Stop.LOST, "another attempt of it began")
                self._settling.give_back(run, after=AGAIN)
                continue
            holding[taken[0]] = run
            kept.append(run)
            if stops:
                self._settling.give_back(run)
            elif place < started:
                begin.append(run)
            else:
                run.waited = time.perf_counter()
                self._backlog.append(run)
        lanes.take(kept)
        slots.put(begin)
        self.jobs += len(claimed.taken)
        if self._budgets:
            self._budgets.count(map(_queue_of, claimed.taken))
        self._sure = self._sure and not claimed.taken
        self._pace.count(len(claimed.taken))

    async def _begin_prefetched(self) -> None:
        many = min(self._slots.free, len(self._backlog))
        if many <= 0:
            return
        runs = [self._backlog.popleft() for _ in range(many)]
        held = [(run.id, run.attempt) for run in runs]
        try:
            answers = await self._line.perform(operations.start(self._store, self.id, held))
        except (DatabaseError, asyncio.CancelledError):
            self._backlog.extendleft(reversed(runs))
            raise
        for run in runs:
            answer = answers.get(run.id, "lost")
            if answer == "started" and run.stop is None and self._stopping is None:
                run.waited = time.perf_counter() - run.waited
                self._slots.put((run,))
                continue
            self._lanes.leave((run,))
            if answer in {"started", "busy"}:
                self._settling.give_back(run)
            else:
                self._answered(run, None, answer)

    async def _reap(self, *, within: float | None = None) -> None:
        self._reap_due = False
        if time.monotonic() < self._reap_at:
            return
        try:
            answers = await self._line.perform(operations.reap(self._store, self.id), within=within)
        except DatabaseError as error:
            self._publish(events.ReapFailed(str(error)))
            if will_pass(error):
                raise
            self._refusals += 1  # and no reason to claim any less
            if self._refusals >= STRIKES:
                self._refusals, self._reap_at = 0, time.monotonic() + LEFT_ALONE
            self._trouble("reaping", error)
            return
        self._refusals = 0
        self._trouble("reaping", None)
        if answers:
            self._publish(events.Reaped(answers))
            self._wake()

    async def _bury(self, *, within: float | None = None) -> None:
        while self._buried:
            await self._line.perform(operations.leave(self._store, self._buried[0]), within=within)
            self._publish(events.WorkerBuried(self._buried.popleft()))
        self._reap_due = True

    # Resting.

    async def _rest(self, idle: bool, ends: float | None) -> None:
        if self._pace.is_brisk:
            await self._sleep.give_up()
        if self._room() <= 0:
            self._hungry = True  # now a slot that is freed has to wake us
            crowded = self._settling.waiting >= UNWRITTEN
            await self._wake.wait(NAP if crowded else None if ends is None else ends - time.monotonic())
        elif not idle or (self._backlog and self._slots.free > 0):
            return
        elif self._pace.is_brisk:
            await asyncio.sleep(NAP)
            self._pace.count(0)
        elif await self._sleep(self.jobs, ends):
            self._lanes.look()

    async def _declare(self, seconds: float) -> set[str]:
        if not self.settings.notify:
            return set()
        return await self._line.perform(operations.sleep(self._store, seconds))

    async def _rouse(self) -> None:
        if self.settings.notify:
            await self._line.perform(operations.rouse(self._store))

    async def _look_again(self) -> bool:
        """Whether nothing is left, looked for from the start."""
        self._lanes.look()
        idle = await self._fill()
        while self._passing and not idle:
            idle = await self._fill()
        return idle and not self._is_done(idle)

    def _poll(self) -> float:
        settings = self.settings
        told = self._listener.proven and self._store.notifies
        poll = settings.poll if told else settings.poll_unproven
        return poll.total_seconds() * random.uniform(0.9, 1.0)  # noqa: S311

    def _is_done(self, idle: bool) -> bool:
        """Whether this worker has done what it was to do; then it takes its leave."""
        settings = self.settings
        if self.holding:
            return False
        if settings.max_jobs is not None and self.jobs >= settings.max_jobs:
            self._done = f"{self.jobs} jobs were to be run"
        elif (
            settings.stop_when_idle and idle and self._quiet and not self._skipped
        ):  # else what has just ended may have left more to do
            if self._sure:
                self._done = "nothing is left to do"
            else:
                self._sure = True  # a cursor may have passed by what came late
                self._lanes.look()
                self._wake()
        return bool(self._done) or self._stopping is not None

    async def _take_leave(self, why: str) -> None:
        """Stop, having done what is due for all: a life without a heartbeat would leave that to others, and maybe to nobody."""
        self._done = ""
        if not self._tidied:
            self._tidied, self._sure = True, False
            await (
                self._leases.reconcile()
            )  # brings duties, and tells of workers that fell silent: their jobs may be for us
            return
        if await self._duties.finished():
            await self._leases.reconcile()  # says how they went
        self.stop(why)

    # What the parts have to say.

    def tell(self, run: Run, stop: Stop, why: str) -> None:
        """Tell an attempt to end."""
        if stop is Stop.LOST and run.process is not None:
            run.process.catch_up()  # it may have ended the job itself
        if run.ended or run.concluding:
            return
        if stop is Stop.LOST and (run.concluded or run.done is not None):
            return  # it ended the job itself
        if run.stop is None or (stop is Stop.LOST and run.stop is not Stop.LOST):
            run.stop, run.why = stop, why
        if not run.heard:
            run.heard = True
            self._publish(events.JobStopped(run.id, run.name, run.queue, run.attempt, stop.value, why))
            if run.process is not None:
                run.process.stop(run, stop, why)
            elif run.interruption is not None:
                run.interruption.send()
            elif run.slot is not None and run.task is not None and run.task.executor != "thread":
                run.slot.cancel(stop.value)

    def _take_pulse(self, pulse: Pulse, held: Held) -> None:
        for job in pulse.lost:
            self._lost(held.get(job), pulse.why.get(job, "given up"))
        for job, reason in pulse.cancel.items():
            if (run := held.get(job)) is not None and self.holding.get(job) is run:
                self.tell(run, Stop.CANCELLED, reason or "")
        if pulse.strays:
            self._publish(events.StraysReleased(tuple(pulse.strays)))
        if not pulse.alive and not self._given_up:
            self._given_up = True
            self._publish(events.LeaseLost(self.id))
            for run in list(self.holding.values()):
                self._lost(run, "given up")
            self._wake()
        if pulse.reap:
            self._reap_due = True
            self._wake()
        if pulse.alive:
            self._publish(events.LeaseRenewed(self.id, self._leases.took))
        self._duties.tell(pulse.duties, pulse.reported)
        self._notifications = pulse.notifications
        if (pulse.notifications > FULL) is not self._piling_up:
            self._piling_up = not self._piling_up
            self._publish(events.NotificationsPileUp(pulse.notifications, over=not self._piling_up))

    def _lost(self, run: Run | None, why: str) -> None:
        if run is None or self.holding.get(run.id) is not run:
            return
        if run in self._backlog:
            self._backlog.remove(run)
            self._lanes.leave((run,))
            self._answered(run, None, "lost")
        else:
            self.tell(run, Stop.LOST, why)

    def _lapse(self) -> None:
        self._publish(events.LeaseLapsing(self.id, len(self._slots.busy)))
        for run in (*self._slots.busy, *self._slots.ready):
            self.tell(run, Stop.LAPSED, "the lease could not be renewed")

    def _break(self, why: str) -> None:
        """The lease will not be renewed any more: what runs is given back while it is ours, and nothing is claimed."""
        self._failed = True
        self._publish(events.LeaseBroken(self.id, why, len(self._slots.busy)))
        self.stop("its lease cannot be renewed any more")
        for run in (*self._slots.busy, *self._slots.ready):
            self.tell(run, Stop.LAPSED, "the lease cannot be renewed any more")

    def _answered(self, run: Run, outcome: Outcome | None, answer: str) -> None:
        """The database has spoken, or the job is not ours any more."""
        if answer == "refused":
            state = State.READY if outcome is None else outcome.state
            self._publish(events.JobRefused(run.id, run.name, run.queue, run.attempt, state.value))
            return
        if self.holding.get(run.id) is run:
            del self.holding[run.id]
            self._let_go()
        if self._subscribers:
            self._publish(_end(run, outcome, answer))

    def _settled(self, told: Sequence[tuple[Run, Outcome]]) -> None:
        """The database has taken these outcomes."""
        holding, ended = self.holding, []
        for run, outcome in told:
            if holding.get(run.id) is run:
                del holding[run.id]
            delay = None if outcome.delay is None else outcome.delay.total_seconds()
            ended.append(
                JobEnded(
                    run.id, run.name, run.queue, run.attempt, outcome.state, run.took, outcome.error, delay
                )
            )
        self._let_go()
        for tell in self._told_ends:
            tell(ended)

    def _let_go(self) -> None:
        """Something is not held any more."""
        if not self.holding and (self.settings.stop_when_idle or self.settings.max_jobs):
            self._wake()
        if self._full:
            self._lanes.look()  # what was passed by may have room now
            self._sleep.hurry()
            self._wake()

    def _freed(self, runs: Sequence[Run]) -> None:
        self._lanes.leave(runs)
        if self._attempts.hooked:
            self._attempts.count_hooks()
        if self._hungry or self._backlog:
            self._wake()

    def _began(self, run: Run) -> None:
        event = JobBegan(run.id, run.name, run.queue, run.attempt)
        for subscriber in self._told_beginnings:
            try:  # noqa: SIM105  -- as below
                subscriber(event)
            except Exception:  # noqa: BLE001, S110
                pass

    def _heard_work(self, queue: str) -> None:
        if queue in {"", REGISTRY}:
            self._registry.told()
        if queue in {"", REGISTRY} or queue in self._queues:
            if self._full:
                self._lanes.look()
            self._wake()

    def _heard_of(self, job: int) -> None:
        if job in self.holding:
            self._leases.nudge()

    def _heard(self, proven: bool, error: ShiftworkError | None) -> None:
        self._publish(events.ListenerProven() if proven else events.ListenerDeaf(str(error or "")))

    def _trouble(self, part: str, error: ShiftworkError | None) -> None:
        """Say once that a part cannot work, and once that it can again."""
        if error is None:
            if part in self._away:
                self._away.discard(part)
                self._returns += 1
                self._publish(events.DatabaseBack(part))
                self._wake()  # what another part waits for may be over as well
                if part == "claiming":
                    self._listener.follow()
            return
        state = getattr(error, "sqlstate", None) or ""
        if state.startswith(NOT_UNDERSTOOD):
            self._altered = True
            self._wake()
        if part == "claiming" and state == READ_ONLY:
            self._listener.left_behind = True
        if part not in self._away:
            self._away.add(part)
            self._publish(events.DatabaseAway(part, str(error)))

    def _publish(self, event: Event) -> None:
        for subscriber in self._subscribers:
            try:  # noqa: SIM105  -- suppress() costs as much as all the rest of an event
                subscriber(event)
            except Exception:  # noqa: BLE001, S110  -- whoever looks on changes nothing
                pass

    # Beginning and ending.

    async def _begin(self) -> None:
        """The schema is new enough, the tasks are in the registry, and we are known."""
        patience = self._settings_patience()
        await self._processes.open()
        while self._stopping is None:
            try:
                if not await self._take_singleton():
                    continue
                await self._line.perform(operations.require(self._store))
                await self._line.perform(
                    operations.declare_tasks(
                        self._store, [task.entry for task in self._registry.own.values()]
                    )
                )
                await self._line.perform(operations.declare_limits(self._store, self._limits))
                await self._registry.enter(self._line)
                await self._find_sql_tasks()
                await self._register()
            except DatabaseError as error:
                waits = isinstance(error, NotInstalled) and self.settings.wait
                if not (waits or will_pass(error)):
                    raise
                self._trouble("beginning", error)
                await self._wait_out(patience)
            else:
                self._trouble("beginning", None)
                return

    @property
    def _tasks(self) -> Mapping[str, Task]:
        return self._registry.tasks

    async def _find_sql_tasks(self) -> bool:
        """Whether the registry has other tasks for us than before."""
        if not await self._registry.look(self._line, again=0.8 * self._poll()):
            return False
        self._queues = served(self.settings, self._tasks)
        self._lanes = Lanes(self.settings, self._tasks, self._queues, self._budgets)
        return True

    async def _follow_registry(self) -> None:
        """Take over what is new in the registry, and let go of what is gone; what runs goes on."""
        await self._reached("registry")
        if await self._find_sql_tasks():
            self._lanes.take((*self._backlog, *self._slots.ready, *self._slots.busy))
            self._publish(events.TasksChanged(self.id, tuple(self._queues), tuple(sorted(self._tasks))))
            await self._line.perform(operations.register(self._store, worker=self.id, **self._serving))

    @property
    def _serving(self) -> dict[str, Any]:
        """What is known of us to others."""
        details = {**described(self.settings), "tasks": sorted(self._tasks)}
        return {"queues": list(self._queues), "details": details}

    async def _take_singleton(self) -> bool:
        """Be the only one of our name; who is not waits a moment, or ends."""
        name, standby = self.settings.singleton, self.settings.standby
        if name is None or self._singleton.held:
            return True
        holder = await self._singleton.take()
        if holder is None:
            self._publish(events.SingletonHeld(name))
            return True
        taken = f"another worker is at work as {name!r}: {holder}"
        if self.id and not standby:
            self._failed = True
            self.stop(taken)
        elif not standby:
            raise SingletonTaken(taken)
        else:
            if not self._singleton.waits:
                self._publish(events.StandingBy(name, holder))
            self._singleton.waits = True
            await self._wake.wait(STANDBY * random.uniform(0.8, 1.0))  # noqa: S311
        return False

    def _lost_singleton(self, why: str) -> None:
        self._publish(events.SingletonLost(self.settings.singleton or "", why))
        self._wake()

    async def _register(self) -> None:
        settings, host, pid = self.settings, socket.gethostname(), os.getpid()
        sent = through_suspend()
        self.id = await self._line.perform(
            operations.register(
                self._store,
                name=settings.name,
                host=host,
                pid=pid,
                lease=settings.lease.total_seconds(),
                **self._serving,
            )
        )
        self._line.drop()  # the next ones carry our name
        self._transactions.close()
        self._given_up = self._unanswered = False
        self._leases.begin(self.id, sent)
        self._publish(
            events.WorkerStarted(
                self.id,
                f"{settings.name}@{host}:{pid}",
                tuple(self._queues),
                tuple(sorted(self._tasks)),
                settings.concurrency,
                settings.connections(transactional=any(task.transaction for task in self._tasks.values())),
            )
        )

    async def _wind_up(self) -> None:
        """Give back what has not begun, wait for what has, and in the end tell it to stop."""
        await self._reached("stopping")
        while self._backlog:
            self._settling.give_back(self._backlog.popleft())
        while self._slots.ready:
            run = self._slots.ready.popleft()
            self._settling.give_back(run)
        if self._unanswered:  # what a claim took without our knowing need not wait for the lease
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._leases.reconcile(), LAST)
        if self._buried:  # nor need what a neighbour held that died, whose death may be why we stop
            with contextlib.suppress(DatabaseError):
                await self._bury(within=LAST)
                await self._reap(within=LAST)
        grace = 0.0 if self._at_once else self.settings.grace.total_seconds()
        until = self._stopped_at + max(grace, STUBBORN)
        await self._until_quiet(self._stopped_at + grace - time.monotonic())
        if self._slots.busy:
            for run in list(self._slots.busy):
                self.tell(run, Stop.SHUTDOWN, "the worker stops")
            await self._until_quiet(STUBBORN if not self._at_once else 0.5)
        self._abandoned = len(self._slots.busy)
        for run in list(self._slots.busy):  # a thread cannot be stopped; its job need not wait for the lease
            run.ended = True
            self._settling.give_back(run)
        until = max(until, time.monotonic() + LAST)
        while self._settling.waiting and (left := until - time.monotonic()) > 0:
            if self._at_once and left > LAST:
                until = time.monotonic() + LAST
            await self._settling.drain(0.1)
        self._abandoned += self._settling.waiting

    async def _until_quiet(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self._slots.busy and (left := until - time.monotonic()) > 0:
            hurried = self._at_once
            await self._wake.wait(min(left, 0.2))
            if self._at_once and not hurried:
                return

    async def _end(self) -> bool:
        await self._attempts.batches.close()
        await self._processes.close()
        await self._leases.close()
        if self._endpoint is not None:
            await self._endpoint.close()
        if self.id:
            with contextlib.suppress(ShiftworkError):
                await self._line.perform(operations.leave(self._store, self.id), within=LAST)
        self._line.drop()
        self._transactions.close()
        await self._singleton.close()
        if self.id:
            self._publish(events.WorkerStopped(self.id, not self._abandoned, self.jobs, self._abandoned))
        return not (self._abandoned or self._at_once or self._failed)

    # Small things.

    async def _reached(self, point: str) -> None:
        if self._at and (held := self._at(point)) is not None:
            await held

    def _name(self) -> str:
        """What our sessions are called: the reaper finds by it those of a worker that is lost."""
        return self._store.session(self.id or "worker")

    def _state(self) -> Mapping[str, object]:
        """What is kept with a heartbeat; asked for by its thread."""
        return {
            "running": len(self._slots.busy),
            "held": len(self.holding),
            "unwritten": self._settling.waiting,
            "jobs": self.jobs,
            "memory": memory(),
            "cpu": time.process_time(),
        }

    def _opened(self, hooks: Mapping[str, Durations]) -> Endpoint:
        """Where we tell over HTTP how we are; each of several processes has its own port."""
        from shiftwork.worker.endpoint import Endpoint  # noqa: PLC0415  -- most workers need no web server
        from shiftwork.worker.health import Health  # noqa: PLC0415
        from shiftwork.worker.metrics import Metrics  # noqa: PLC0415

        settings = self.settings
        port = settings.metrics_port + (process() or 0)
        health = Health()
        metrics = Metrics(self._tasks, lambda: self._facts(health), health, hooks)
        endpoint = Endpoint(
            (settings.metrics_host, port),
            health,
            metrics,
            ping=self._leases.ping,
            line=Line(settings, lambda: f"{self._name()} metrics"),
            store=self._store,
            queues=lambda: list(self._queues)[:MOST_QUEUES],
        )
        endpoint.open()
        self.subscribe(metrics)
        self._publish(events.EndpointOpened(*endpoint.address, metrics=endpoint.has_metrics))
        return endpoint

    def _facts(self, health: Health) -> Mapping[str, float]:
        """Gauges, for whoever asks."""
        return {
            "ready": not health.reasons(),
            "slots": self._slots.many,
            "slots_busy": len(self._slots.busy),
            "jobs_held": len(self.holding),
            "outcomes_unwritten": self._settling.waiting,
            "notification_queue_usage": self._notifications,
        }

    def _ends_at(self) -> float | None:
        longest = self.settings.max_time
        return None if longest is None else time.monotonic() + longest.total_seconds()


def _end(run: Run, outcome: Outcome | None, answer: str) -> Event:
    """What is told of an attempt whose outcome the database has answered."""
    job = (run.id, run.name, run.queue, run.attempt)
    if answer == "lost" and run.concluded:
        return events.JobEnded(*job, "completed", run.took)
    if answer == "lost":
        return events.JobLost(*job, run.why or "it is not ours any more")
    if outcome is None:
        return events.JobReleased(*job, f"{answer}: {run.why or run.stop or 'not begun'}")
    delay = None if outcome.delay is None else outcome.delay.total_seconds()
    return events.JobEnded(*job, outcome.state, run.took, outcome.error, delay)


def _wants(subscriber: Subscriber, kind: type[Event]) -> bool:
    wants: Callable[[type[Event]], bool] | None = getattr(subscriber, "wants", None)
    return wants is None or wants(kind)


def _of_ends(subscriber: Subscriber) -> Callable[[Sequence[events.JobEnded]], None]:
    """How a subscriber is told of jobs that ended together."""
    together: Callable[[Sequence[events.JobEnded]], None] | None = getattr(subscriber, "tell_ended", None)

    def tell(ended: Sequence[events.JobEnded]) -> None:
        if together is not None:
            with contextlib.suppress(Exception):  # whoever looks on changes nothing
                together(ended)
            return
        for event in ended:
            try:  # noqa: SIM105  -- suppress() costs as much as all the rest of an event
                subscriber(event)
            except Exception:  # noqa: BLE001, S110
                pass

    return tell


def _bounded(wish: Mapping[str, int | None], claimed: Claimed) -> list[str]:
    """Queues of which as many jobs were taken as was wished for."""
    bounds = {queue: most for queue, most in wish.items() if most is not None}
    if not bounds:
        return []
    taken = Counter(map(_queue_of, claimed.taken))
    return [queue for queue, most in bounds.items() if taken[queue] >= most]


_task_of, _queue_of = itemgetter(1), itemgetter(2)
