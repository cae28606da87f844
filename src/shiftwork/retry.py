"""Whether a failed job is tried again, and when: a policy that is data, so that SQL can follow it too."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

from shiftwork.errors import ConfigurationError, Poison

Reason = type[BaseException] | str
LONGEST = timedelta(days=3650)


@dataclass(frozen=True, kw_only=True)
class Retry:
    """How often, and how far apart, a failing job is tried again.

    The first waits are read from `delays`; after the last of them each is `factor` times the one before,
    never more than `cap`. So a constant is one delay with factor 1, a list is a list with factor 1, and
    the default doubles from 30 seconds up to an hour.

        Retry(max_attempts=5)
        Retry(max_attempts=None, delays=timedelta(seconds=10), factor=1)
        Retry(delays=[timedelta(minutes=1), timedelta(minutes=5)], factor=1, on=(OSError, "RATE_LIMIT"))
    """

    max_attempts: int | None = 5
    """Attempts in all, the first one included; None is without end."""

    delays: timedelta | Sequence[timedelta] = timedelta(seconds=30)
    factor: float = 2.0
    cap: timedelta = timedelta(hours=1)
    jitter: float = 0.2
    """Each wait is multiplied by a random number from 1 - jitter up to 1 + jitter."""

    on: Reason | Sequence[Reason] | Callable[[BaseException], bool] | None = None
    """Which errors are worth another attempt: classes, error codes, or a function; None is all of them."""

    def __post_init__(self) -> None:
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

    @classmethod
    def never(cls) -> Self:
        """One attempt, and that is all."""
        return cls(max_attempts=1)

    @property
    def steps(self) -> tuple[timedelta, ...]:
        """The waits that are listed one by one."""
        return (self.delays,) if isinstance(self.delays, timedelta) else tuple(self.delays)

    def delay(self, failures: int, chance: Callable[[], float] = random.random) -> timedelta:
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

    def allows(self, error: BaseException) -> bool:
        """Whether such an error is worth another attempt."""
        if isinstance(error, Poison):
            return False
        if self.on is None:
            return True
        if isinstance(self.on, (type, str)):
            return _is(error, self.on)
        if isinstance(self.on, Sequence):
            return any(_is(error, reason) for reason in self.on)
        try:
            return bool(self.on(error))
        except Exception:  # noqa: BLE001  -- a broken judge must not stop the outcome from being written
            return True

    def gives_up(self, failures: int, max_attempts: int, error: BaseException) -> bool:
        """Whether this error, coming after `failures` earlier ones, is the end."""
        return failures + 1 >= max_attempts or not self.allows(error)

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
        )


def code_of(error: BaseException) -> str:
    """The short name of an error: its own `code` if it has one, else the name of its class."""
    try:
        code = getattr(error, "code", None)
    except Exception:  # noqa: BLE001  -- a property of somebody else's exception may do anything
        code = None
    return code[:200] if isinstance(code, str) and code.isprintable() and code else type(error).__name__


def _is(error: BaseException, reason: Reason) -> bool:
    if isinstance(reason, str):
        return reason == code_of(error) or any(reason == kind.__name__ for kind in type(error).__mro__)
    return isinstance(error, reason)


def _called(reason: Reason) -> str:
    return reason if isinstance(reason, str) else reason.__name__
