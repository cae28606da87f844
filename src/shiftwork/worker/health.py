"""Whether a worker is alive, and whether it is able to claim: two questions with two answers.

A worker that cannot claim (the database is away, it is paused, its event loop is blocked, it stops) is alive and must not be killed for that. One whose
heartbeat thread does not turn any more will never be anything else again.
"""

from __future__ import annotations

from shiftwork import events
from shiftwork.events import Event


class Health:
    """What events say about a worker's being able to claim."""

    def __init__(self) -> None:
        self.worker = 0
        self._stopping: str | None = None
        self._lapsing = False
        self._paused = False
        self._another = self._stands_by = ""
        self._barred = False
        self._hook_fails = self._hook_waits = False
        self._away: set[str] = set()
        self._deaf = False
        self.notifications = 0.0
        self.busy = False
        """Whether the event loop gave no sign of life when it was last asked: who asks says so."""

    def __call__(self, event: Event) -> None:  # noqa: PLR0912
        match event:
            case events.WorkerStarted(worker):
                self.worker, self._lapsing, self._paused = worker, False, False
            case events.WorkerStopping(_, why):
                self._stopping = why
            case events.WorkerPaused():
                self._paused = True
            case events.WorkerResumed():
                self._paused = False
            case events.ClaimsBarred(over):
                self._barred = not over
            case events.ClaimHookFailed():
                self._hook_fails = True
            case events.ClaimHookBack():
                self._hook_fails = False
            case events.ClaimHookWaits(over):
                self._hook_waits = not over
            case events.SingletonLost(name):
                self._another = name
            case events.StandingBy(name):
                self._stands_by = name
            case events.SingletonHeld():
                self._another = self._stands_by = ""
            case events.LeaseLapsing():
                self._lapsing = True
            case events.LeaseRenewed():
                self._lapsing = False
            case events.LeaseLost():
                self.worker = 0
            case events.DatabaseAway(part):
                self._away.add(part)
            case events.DatabaseBack(part):
                self._away.discard(part)
            case events.ListenerDeaf():
                self._deaf = True
            case events.ListenerProven():
                self._deaf = False
            case events.NotificationsPileUp(usage, over):
                self.notifications = 0.0 if over else usage

    def reasons(self) -> list[str]:
        """Why it is not able to claim; none if it is."""
        found = []
        if self._stopping is not None:
            found.append(f"it stops: {self._stopping}")
        if self._stands_by:
            found.append(f"it stands by: another worker is at work as {self._stands_by!r}")
        elif not self.worker:
            found.append("it is not registered")
        if self.busy:
            found.append("its event loop is kept busy: no handler and no hook may block it")
        if self._paused:
            found.append("it is paused, or everything is")
        if self._barred:
            found.append("a transaction that pauses or limits something has not ended")
        if self._hook_fails:
            found.append("a hook before claims (before_claim) fails")
        if self._hook_waits:
            found.append("a hook before claims (before_claim) has not ended yet")
        if self._another and not self._stands_by:
            found.append(f"it is not the one at work as {self._another!r} any more")
        if self._lapsing:
            found.append("its lease could not be renewed in time")
        if away := self._away & {"beginning", "claiming", "lease", "settling"}:
            found.append(f"the database cannot be reached: {', '.join(sorted(away))}")
        return found

    def warnings(self) -> list[str]:
        """What somebody should look at, though it does not keep it from claiming."""
        found = []
        if self._deaf:
            found.append("notifications do not arrive; work is found by polling")
        if self.notifications:
            found.append(f"the server's queue of notifications is {self.notifications:.0%} full")
        if "reporting" in self._away:
            found.append("what handlers last said could not be written")
        if aside := self._away & {"duties", "reaping"}:
            found.append(f"what is done for all is interrupted: {', '.join(sorted(aside))}")
        return found
