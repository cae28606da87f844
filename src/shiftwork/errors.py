"""Every error that shiftwork raises itself; each says what happened, to which job, and what to do next.

Two families. `ShiftworkError` is what a caller may get from us. `Verdict` is the other way round: what a
handler raises to tell us what should become of its job.
"""

# ruff: noqa: N818  -- these names are said aloud: "raise Poison", "except JobFailed"

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any


class ShiftworkError(Exception):
    """Anything that shiftwork refuses or cannot do."""


class ConfigurationError(ShiftworkError):
    """A setting, name or combination of options that cannot work."""


class EmbeddedError(ShiftworkError):
    """The embedded PostgreSQL cannot be started, found or used."""


# What is wrong with the call.


class InvalidArgument(ShiftworkError, ValueError):
    """An argument or option that cannot be enqueued, or a stored one that its task cannot take."""

    def __init__(self, message: str, *, task: str | None = None, argument: str | None = None) -> None:
        super().__init__(message)
        self.task = task
        self.argument = argument


class PayloadTooLarge(InvalidArgument):
    """The arguments of one job are too large; store them elsewhere and send a reference."""


class ResultNotJson(InvalidArgument):
    """There is no JSON for what a handler returned."""

    code = "RESULT_NOT_JSON"


class ReturnTypeMismatch(InvalidArgument):
    """A handler returned something else than its annotation says."""

    code = "RETURN_TYPE_MISMATCH"


class UnknownTask(ShiftworkError, LookupError):
    """No task of that name is declared on this app."""


class UnknownJob(ShiftworkError, LookupError):
    """No job has that id: it never existed, or its history has been purged."""


class DuplicateDiffers(ShiftworkError):
    """A job with this unique key exists already and is not the same (`action="refuse"`)."""


class FenceLost(ShiftworkError):
    """This attempt no longer holds its job; whatever it was about to commit must not be committed."""


# What is wrong with the database.


class DatabaseError(ShiftworkError):
    """The database refused or failed a statement of ours."""

    def __init__(self, message: str, *, sqlstate: str | None = None) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate


class NotInstalled(DatabaseError, ConfigurationError):
    """The schema is not in this database yet: run `shiftwork migrate`."""


class SchemaTooOld(NotInstalled):
    """The schema is there but older than this program needs: run `shiftwork migrate`."""


class SchemaTooNew(DatabaseError, ConfigurationError):
    """The schema was installed by a newer shiftwork; only that one may change it."""


class NotAllowed(DatabaseError):
    """The database role may not do this; `shiftwork migrate --roles` makes roles that may."""


class DatabaseUnavailable(DatabaseError):
    """The database cannot be reached, or was lost on the way; trying again later may help.

    `maybe_committed` tells whether the work may have been done all the same. If it is true, only a unique key
    (`using(unique=…)`) makes it safe to send again.
    """

    def __init__(self, message: str, *, maybe_committed: bool, sqlstate: str | None = None) -> None:
        super().__init__(message, sqlstate=sqlstate)
        self.maybe_committed = maybe_committed


class SingletonTaken(ShiftworkError):
    """Another worker is at work under this name."""


# What became of a job whose result was asked for.


class JobEnded(ShiftworkError):
    """The job ended without a result."""

    def __init__(self, message: str, *, job: int, error: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.job = job
        self.error = error


class JobFailed(JobEnded):
    """The job failed for good; `error` holds the code, type and message of its last attempt."""


class JobCancelled(JobEnded):
    """The job was cancelled."""


class JobExpired(JobEnded):
    """Nobody started the job before its deadline."""


class ResultTimeout(ShiftworkError, TimeoutError):
    """The job had not ended when the time to wait for it was over; it may still end."""


# What a handler raises.


class Verdict(Exception):
    """What a handler raises to say what becomes of its job."""


class Poison(Verdict):
    """Raise this when no further attempt can help: the job fails at once."""

    code = "POISON"


class Again(Verdict):
    """What a handler raises to be run again at a time of its own choice."""

    _asked = "asked to be run again"

    def __init__(
        self, delay: timedelta | None = None, message: str = "", *, at: datetime | None = None
    ) -> None:
        named = type(self).__name__
        if (delay is None) == (at is None):
            raise InvalidArgument(f"{named} takes a delay or a time (at=…), one of them", argument="delay")
        if delay is not None and not isinstance(delay, timedelta):
            raise InvalidArgument(
                f"the delay of {named} must be a timedelta, not {delay!r}", argument="delay"
            )
        if at is not None and (not isinstance(at, datetime) or at.utcoffset() is None):
            raise InvalidArgument(
                f"at of {named} must be a datetime with a time zone, as in datetime.now(UTC), not {at!r}",
                argument="at",
            )
        super().__init__(message or f"{self._asked} {f'in {delay}' if at is None else f'at {at}'}")
        self.delay = delay
        self.at = at
        self.says_why = bool(message)


class RetryLater(Again):
    """Raise this to be tried again after a delay or `at` a time; it counts as a failure, as any error does.

    raise RetryLater(timedelta(minutes=5), "the other side is down") from error
    """

    code = "RETRY_LATER"
    _asked = "asked to be tried again"


class Snooze(Again):
    """Raise this to be run again after a delay or `at` a time; nothing is counted against the job.

    raise Snooze(at=tomorrow)
    """

    code = "SNOOZED"


class Cancel(Verdict):
    """Raise this to end the job as cancelled."""

    code = "TASK_CANCELLED"


# What the worker says of an attempt in the same way.


class UnknownHandler(Poison):
    """This worker has no such task."""

    code = "UNKNOWN_TASK"


class UnfitArguments(Poison):
    """What is stored does not fit the signature of the task."""

    code = "ARGUMENTS_INVALID"


class TaskTimeout(Verdict, TimeoutError):
    """The attempt ran longer than its task may; it counts as any failure does."""

    code = "TASK_TIMEOUT"


class FinishUndone(Verdict):
    """The handler ended its job in a transaction that was then not committed."""

    code = "FINISH_UNDONE"


class Interrupted(BaseException):
    """Raised in a plain function, by its context, when its attempt is to end: let it pass."""

    def __init__(self, reason: str, why: str = "") -> None:
        super().__init__(f"{reason}: {why}" if why else reason)
        self.reason = reason
