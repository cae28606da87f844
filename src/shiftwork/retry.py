"""Whether a failed job is tried again, and when: a policy that is data, so that SQL can follow it too."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import InitVar, dataclass
from datetime import timedelta
from typing import Any, Self

from shiftwork.codes import code_of
from shiftwork.errors import ConfigurationError, Poison

Reason = type[BaseException] | str
LONGEST = timedelta(days=3650)

CONFLICTS = frozenset({"40001", "40P01"})
"""What PostgreSQL says when two transactions stood in each other's way: serialization failure, deadlock."""


_FIRST = timedelta(seconds=30)


@dataclass(frozen=True, kw_only=True)
class Retry:
    """How often, and how far apart, a failing job is tried again.

    The first waits are read from `delays`; after the last of them each is `factor` times the one before,
    never more than `cap`. So a constant is one delay with factor 1, a list is a list with factor 1, and
    the default doubles from 30 seconds up to an hour.

        Retry(max_attempts=5)
        Retry.unlimited(delay=timedelta(seconds=10), factor=1)
        Retry(delays=[timedelta(minutes=1), timedelta(minutes=5)], factor=1, on=(OSError, "RATE_LIMIT"))
    """

    max_attempts: int | None = 5
    """Attempts in all, the first one included; None is without end."""

    delays: timedelta | Sequence[timedelta] = _FIRST
    factor: float = 2.0
    cap: timedelta = timedelta(hours=1)
    jitter: float = 0.2
    """Each wait is multiplied by a random number from 1 - jitter up to 1 + jitter."""

    on: Reason | Sequence[Reason] | Callable[[BaseException], bool] | None = None
    """Which errors are worth another attempt: classes, error codes, or a function; None is all of them."""

    at_once: int = 0
    """How often an attempt is repeated on the spot after a deadlock or serialization failure, before it fails."""

    delay: InitVar[timedelta | None] = None
    """The same as `delays`, for who has one."""

    def __post_init__(self, delay: timedelta | None) -> None:
        if delay is not None:
            if self.delays != _FIRST:
                raise ConfigurationError("delay and delays say the same thing; give one of them")
            object.__setattr__(self, "delays", delay)
        steps = (self.delays,) if isinstance(self.delays, timedelta) else tuple(self.delays)
        object.__setattr__(self, "delays", steps)
        if isinstance(self.on, list):
            object.__setattr__(self, "on", tuple(self.on))
        if self.max_attempts is not None and not 1 <= self.max_attempts < 2**31:
            raise ConfigurationError(
                f"max_attempts is {self.max_attempts}; it counts the first attempt, so at least 1"
            )
        if not steps or min(steps) < timedelta() or max(*steps, self.cap) > LONGEST or self.cap < timedelta():
            raise ConfigurationError("delays and cap must be durations from nothing to ten years")
        if not 1 <= self.factor <= 1000:
            raise ConfigurationError(f"factor is {self.factor}; it can be 1 (always the same wait) to 1000")
        if not 0 <= self.jitter < 1:
            raise ConfigurationError(f"jitter is {self.jitter}; it can be 0 (none) to just under 1")
        if not isinstance(self.at_once, int) or not 0 <= self.at_once <= 100:
            raise ConfigurationError(f"at_once is {self.at_once!r}; it can be 0 (never) to 100")

    @classmethod
    def never(cls) -> Self:
        """One attempt, and that is all."""
        return cls(max_attempts=1)

    @classmethod
    def unlimited(cls, **policy: Any) -> Self:  # noqa: ANN401
        """Attempts without end; a job can then only succeed, be cancelled, or be poisoned."""
        return cls(max_attempts=None, **policy)

    @property
    def steps(self) -> tuple[timedelta, ...]:
        """The waits that are listed one by one."""
        return (self.delays,) if isinstance(self.delays, timedelta) else tuple(self.delays)

    def after(self, failures: int, chance: Callable[[], float] = random.random) -> timedelta:
        """How long to wait after that many failures."""
        spread = 1 - self.jitter + 2 * self.jitter * chance()
        return self.wait(failures) * spread

    def wait(self, failures: int) -> timedelta:
        """The wait after that many failures, before chance moves it."""
        steps, failures = self.steps, max(failures, 1)
        if failures <= len(steps):
            return min(steps[failures - 1], self.cap)
        try:
            return min(steps[-1] * self.factor ** (failures - len(steps)), self.cap)
        except OverflowError:
            return self.cap if steps[-1] else timedelta()

    def allows(self, error: BaseException, code: str | None = None) -> bool:
        """Whether such an error, of this code, is worth another attempt."""
        if is_poison(error):
            return False
        if self.on is None:
            return True
        code = code_of(error) if code is None else code
        if isinstance(self.on, (type, str)):
            return _is(error, code, self.on)
        if isinstance(self.on, Sequence):
            return any(_is(error, code, reason) for reason in self.on)
        try:
            return bool(self.on(error))
        except Exception:  # noqa: BLE001  -- a broken judge must not stop the outcome from being written
            return True

    def gives_up(
        self, failures: int, max_attempts: int, error: BaseException, code: str | None = None
    ) -> bool:
        """Whether this error, coming after `failures` earlier ones, is the end."""
        return failures + 1 >= max_attempts or not self.allows(error, code)

    def repeats(self, error: BaseException, repeated: int = 0) -> bool:
        """Whether to repeat the attempt on the spot, having done so this often: others were in its way."""
        return repeated < self.at_once and is_conflict(error)

    @staticmethod
    def pause(repeated: int, chance: Callable[[], float] = random.random) -> timedelta:
        """How long to wait before a repeat on the spot: 100 ms, doubling, and up to 50 ms more by chance."""
        return timedelta(milliseconds=100 * 2 ** min(repeated, 10) + 50 * chance())

    def as_json(self) -> dict[str, Any]:
        """The policy as the registry keeps it; a function in `on` stays with Python and reads null."""
        on: list[str] | None = None
        if isinstance(self.on, (type, str)):
            on = [_called(self.on)]
        elif isinstance(self.on, Sequence):
            on = [_called(reason) for reason in self.on]
        return {
            "max_attempts": self.max_attempts,
            "delays": [step.total_seconds() for step in self.steps],
            "factor": self.factor,
            "cap": self.cap.total_seconds(),
            "jitter": self.jitter,
            "on": on,
            "at_once": self.at_once,
        }

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Self:
        """A policy read back; errors are then known by their codes and the names of their classes."""
        return cls(
            max_attempts=stored["max_attempts"],
            delays=tuple(timedelta(seconds=step) for step in stored["delays"]),
            factor=stored["factor"],
            cap=timedelta(seconds=stored["cap"]),
            jitter=stored["jitter"],
            on=None if stored["on"] is None else tuple(stored["on"]),
            at_once=stored.get("at_once", 0),
        )


def is_poison(error: BaseException) -> bool:
    """Whether an error says, itself or by what it was raised from, that no attempt can help."""
    return any(isinstance(one, Poison) for one in _causes(error))


def is_conflict(error: BaseException) -> bool:
    """Whether an error says, itself or by what it was raised from, that transactions stood in each other's way."""
    return any(getattr(one, "sqlstate", None) in CONFLICTS for one in _causes(error))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error, what it was raised from, and the members of groups."""
    waiting, seen = [error], set[int]()
    while waiting and len(seen) < 1000:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        if one.__cause__ is not None:
            waiting.append(one.__cause__)
        if isinstance(one, BaseExceptionGroup):
            waiting.extend(one.exceptions)


def _is(error: BaseException, code: str, reason: Reason) -> bool:
    if isinstance(reason, str):
        return reason == code or any(reason == kind.__name__ for kind in type(error).__mro__)
    return isinstance(error, reason)


def _called(reason: Reason) -> str:
    return reason if isinstance(reason, str) else reason.__name__
