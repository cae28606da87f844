"""What a worker does that has found nothing: sleep, without missing anything and without keeping others busy.

Before it sleeps it says so, since nobody notifies as long as nobody sleeps; then it looks once more, for what came before it
had said so. Transactions that were inserting at that moment have notified nobody either, so as long as one of them is
open it wakes again and again. Behind all of it stands a poll.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from shiftwork.worker.waking import Wake

DECLARE = 60.0
"""Seconds for which a sleeper asks to be notified."""

BRISK = 200.0
"""Jobs a second from which on it does not pay to go to sleep between them."""

STALE = 0.3
"""Seconds after which a rate says nothing any more."""

NAP = 0.005
MOST_IN_VAIN = 0.2
MOST_FLYING = 2.0
LOCKED = (0.05, 1.0)
"""Seconds until a job is looked for again that is due, and that somebody has locked; at first and at most."""


class Pace:
    """How brisk it is: jobs a second, over tenths of a second."""

    def __init__(self) -> None:
        self.rate = 0.0
        self._since, self._many = 0.0, 0

    def count(self, jobs: int) -> None:
        """So many have come."""
        now = time.monotonic()
        self._many += jobs
        if now - self._since > 0.1:
            self.rate = self._many / (now - self._since)
            self._since, self._many = now, 0

    @property
    def lately(self) -> float:
        """The rate, if anything has come for a while."""
        return self.rate if time.monotonic() - self._since < STALE else 0.0

    @property
    def is_brisk(self) -> bool:
        """Whether the next ones are likely to come before a sleeper would have said that it sleeps."""
        return self.rate > BRISK


class Sleep:
    """From nothing found to a reason to look again."""

    def __init__(
        self,
        wake: Wake,
        *,
        declare: Callable[[float], Awaitable[set[str]]],
        take_back: Callable[[], Awaitable[None]],
        look: Callable[[], Awaitable[bool]],
        due: Callable[[], float | None],
        poll: Callable[[], float],
        reached: Callable[[str], Awaitable[None]],
    ) -> None:
        """`declare` tells others for so long that we sleep, and answers which transactions were inserting by then; `take_back`
        tells them that nobody does; `look` looks once more and says whether to sleep nevertheless; `due` says in how many
        seconds the next job falls due.
        """
        self.hurry = Wake()
        """Something of our own makes it worth to look again at once."""

        self._wake = wake
        self._say = declare
        self._take_back = take_back
        self._look = look
        self._due = due
        self._poll = poll
        self._reached = reached
        self._again_at = self._said_until = 0.0
        self._told = False
        """Whether we were told of all that came since before we last looked; then looking once is enough."""

        self._locked = LOCKED[0]
        self._woken = False
        self._jobs = self._in_vain = 0

    async def __call__(self, jobs: int, ends: float | None) -> bool:
        """Sleep, with so many jobs had so far, until something calls, or till a time; says if nothing has for a whole poll."""
        await asyncio.sleep(0)  # what was just claimed begins first
        await self._pause_if_in_vain(jobs)
        flying: set[str] = set()
        if not self._told or time.monotonic() > self._again_at:
            flying = await self._declare()
            await self._reached("declared")
            if not await self._look():
                return False
        self._told = False
        until = self._until(ends)
        await self._reached("asleep")
        pause = NAP
        while (left := until - time.monotonic()) > 0:
            if await self._wake.wait(min(left, pause if flying else self._again_at - time.monotonic())):
                self._woken = True
                return False
            if flying:
                flying &= await self._declare()
                pause = min(2 * pause, MOST_FLYING)
                if not flying:
                    return False  # what was being inserted is there now, or will never be
            elif time.monotonic() >= self._again_at:
                await self._declare()
        self._told = not flying
        return True

    async def give_up(self) -> None:
        """There is too much to do: what we said is taken back, since notifying us costs everybody who enqueues."""
        if time.monotonic() < self._said_until:
            self._again_at = self._said_until = 0.0
            await self._take_back()

    async def _declare(self) -> set[str]:
        now = time.monotonic()
        self._again_at, self._said_until = now + DECLARE * 0.8, now + DECLARE
        return await self._say(DECLARE)

    def _until(self, ends: float | None) -> float:
        due, (first, most) = self._due(), LOCKED
        self._locked = min(2 * self._locked, most) if due is not None and due <= 0 else first
        seconds = self._poll() if due is None else min(self._poll(), max(due, self._locked))
        until = time.monotonic() + seconds
        return until if ends is None else min(until, ends)

    async def _pause_if_in_vain(self, jobs: int) -> None:
        """Whoever is woken again and again for nothing, by whatever reason, takes his time."""
        found, self._jobs = jobs - self._jobs, jobs
        self._in_vain = 0 if found or not self._woken else min(self._in_vain + 1, 10)
        self._woken = False
        if self._in_vain > 1:
            await self.hurry.wait(min(MOST_IN_VAIN, NAP * 2**self._in_vain))
