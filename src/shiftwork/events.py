"""What happens in a worker, as values. Whoever wants to know subscribes; looking on changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec


class Event(msgspec.Struct, frozen=True, tag=True):
    """Something that happened."""


class WorkerStarted(Event, frozen=True):
    """A worker is registered and begins to claim."""

    worker: int
    label: str
    queues: tuple[str, ...]
    tasks: tuple[str, ...]
    concurrency: int
    connections: int


class WorkerStopping(Event, frozen=True):
    """A worker claims no more; it waits for what runs."""

    worker: int
    why: str
    running: int


class WorkerStopped(Event, frozen=True):
    """A worker has let its lease go."""

    worker: int
    clean: bool
    jobs: int
    abandoned: int


class TasksChanged(Event, frozen=True):
    """The registry has other tasks in SQL than before, and so a worker serves others."""

    worker: int
    queues: tuple[str, ...]
    tasks: tuple[str, ...]


class TaskLeftOut(Event, frozen=True):
    """A task in SQL cannot be run, or not be entered in the registry; all others can."""

    task: str
    why: str


class EndpointOpened(Event, frozen=True):
    """A worker tells over HTTP how it is."""

    host: str
    port: int
    metrics: bool
    """Whether it has what metrics need."""


class Claimed(Event, frozen=True):
    """A claim was answered."""

    tasks: Mapping[str, int]
    """How many jobs it gave, by task."""

    seconds: float


class Settled(Event, frozen=True):
    """A batch of outcomes was written."""

    jobs: int
    seconds: float


class WorkerBuried(Event, frozen=True):
    """The process of a worker is known to be dead; its jobs need not wait for its lease to end."""

    worker: int


class WorkDone(Event, frozen=True):
    """What a worker that ended by itself has done, by queue and by how it ended."""

    ended: Mapping[str, Mapping[str, int]]


class JobBegan(Event, frozen=True, gc=False):
    """A handler is about to be called."""

    job: int
    task: str
    queue: str
    attempt: int


class JobEnded(Event, frozen=True, gc=False):
    """An outcome has been written."""

    job: int
    task: str
    queue: str
    attempt: int
    state: str
    seconds: float
    error: Mapping[str, Any] | None = None
    delay: float | None = None
    """Seconds until it runs again, if it does."""


class JobStopped(Event, frozen=True):
    """A handler was told to stop."""

    job: int
    task: str
    queue: str
    attempt: int
    why: str
    reason: str


class JobLost(Event, frozen=True):
    """An attempt does not hold its job any more; what it did is dropped."""

    job: int
    task: str
    queue: str
    attempt: int
    why: str


class JobReleased(Event, frozen=True):
    """A job was given back, with nothing counted against it."""

    job: int
    task: str
    queue: str
    attempt: int
    why: str


class JobRefused(Event, frozen=True):
    """An outcome cannot be written as it is; or a job cannot even be claimed, and is left out for a while."""

    job: int
    task: str
    queue: str
    attempt: int
    state: str


class ProcessStarted(Event, frozen=True):
    """A process for jobs is ready."""

    pid: int


class ProcessEnded(Event, frozen=True):
    """A process for jobs is no more."""

    pid: int
    why: str
    jobs: int
    """How many it has run."""

    job: int | None
    """The one that it took with it."""


class ProcessFailed(Event, frozen=True):
    """A process for jobs could not be started; the job that it was for, if any, is given back."""

    error: str


class StraysReleased(Event, frozen=True):
    """Jobs were ours without our knowing, since an answer was lost; they have been given back."""

    jobs: tuple[int, ...]


class Reaped(Event, frozen=True):
    """Jobs were taken from workers that fell silent."""

    jobs: Mapping[int, str]


class ReapFailed(Event, frozen=True):
    """Jobs of workers that fell silent could not be taken back; it is tried again."""

    error: str


class LeaseRenewed(Event, frozen=True):
    """A heartbeat was answered."""

    worker: int
    seconds: float


class LeaseLapsing(Event, frozen=True):
    """The lease could not be renewed in time; all handlers are told to stop."""

    worker: int
    running: int


class LeaseLost(Event, frozen=True):
    """This worker was given up by the others; it registers anew."""

    worker: int


class LeaseBroken(Event, frozen=True):
    """The thread that renews the lease has ended, or does not turn; the worker stops, and all handlers are told."""

    worker: int
    error: str
    running: int


class DatabaseAway(Event, frozen=True):
    """One of the worker's connections cannot do its work."""

    part: str
    error: str


class DatabaseBack(Event, frozen=True):
    """It can again."""

    part: str


class HookFailed(Event, frozen=True):
    """A hook before or after a job has failed; the job goes on."""

    hook: str
    job: int
    task: str
    queue: str
    attempt: int
    error: str


class ClaimHookFailed(Event, frozen=True):
    """A hook before a claim fails, or what it requires cannot be asked; nothing is claimed for a while."""

    error: str


class ClaimHookBack(Event, frozen=True):
    """It does not any more."""


class ClaimHookWaits(Event, frozen=True):
    """A hook before a claim has been waiting for a while, and nothing is claimed until it ends; or it has ended."""

    over: bool


class ClaimsBarred(Event, frozen=True):
    """Somebody has paused or limited something in a transaction that does not end, and nothing can be claimed; or it is over."""

    over: bool


class JobPassedBy(Event, frozen=True):
    """What a hook before a claim requires cannot be answered for this job, and so it is not claimed; told once."""

    job: int


class PauseEnded(Event, frozen=True):
    """The time of a pause was over, and nobody had resumed: of a queue, a task, a worker or all."""

    kind: str
    name: str
    reason: str


class WorkerPaused(Event, frozen=True):
    """This worker claims nothing, since it or everything is paused."""

    worker: int


class WorkerResumed(Event, frozen=True):
    """It claims again."""

    worker: int


class DutyDone(Event, frozen=True):
    """This worker has done something for all."""

    duty: str
    did: int
    seconds: float


class DutyFailed(Event, frozen=True):
    """It could not."""

    duty: str
    error: str
    set_aside: bool
    """Whether this process will not try it again."""


class NotificationsPileUp(Event, frozen=True):
    """The server's queue of notifications fills up, or does so no more: somebody listens and does not read."""

    usage: float
    over: bool = False


class ListenerProven(Event, frozen=True):
    """Notifications arrive."""


class ListenerDeaf(Event, frozen=True):
    """Notifications do not arrive; work is found by polling."""

    error: str


class StandingBy(Event, frozen=True):
    """Another worker is at work under this name; this one waits to take its place."""

    name: str
    holder: str


class SingletonHeld(Event, frozen=True):
    """This worker is the one that is at work under this name."""

    name: str


class SingletonLost(Event, frozen=True):
    """The session that made this worker the only one is gone; nothing is claimed until it is back."""

    name: str
    error: str


class WorkerProcessStarted(Event, frozen=True):
    """A supervisor has started a worker process."""

    process: int
    pid: int


class WorkerProcessUp(Event, frozen=True):
    """A worker process is at work, or stands by."""

    process: int
    pid: int


class WorkerProcessEnded(Event, frozen=True):
    """A worker process has ended; `code` is its exit code, or the signal that killed it as a negative number."""

    process: int
    pid: int
    code: int
    expected: bool


class WorkerProcessRefused(Event, frozen=True):
    """A supervisor could not start a worker process."""

    process: int
    error: str


class WorkerProcessStuck(Event, frozen=True):
    """A worker process does not do what it should, and is killed."""

    process: int
    pid: int
    why: str


class Renewing(Event, frozen=True):
    """A supervisor replaces its processes, one after the other."""

    processes: int
    why: str


class Renewed(Event, frozen=True):
    """It is done with that, or has given it up."""

    processes: int
    error: str = ""


class SupervisorStopping(Event, frozen=True):
    """All processes are told to stop."""

    why: str
    degree: int
    running: int


class SupervisorGaveUp(Event, frozen=True):
    """A supervisor ends because its processes do not stay alive."""

    why: str


class FilesChanged(Event, frozen=True):
    """The program was changed; its processes are replaced."""

    files: tuple[str, ...]


class SupervisorStopped(Event, frozen=True):
    """All processes have ended."""

    clean: bool
    ended: Mapping[str, Mapping[str, int]]
    restarts: int


Subscriber = Callable[[Event], None]
"""Is called with every event. One that has a method `wants(kind)` may so decline events that are not worth making; one that
has a method `tell_ended(jobs)` is called there with the `JobEnded` of a batch of outcomes, all at once; of what ended alone, as in a
transaction, it is told as everybody is."""
