"""How an attempt ended, and what becomes of its job: one value, decided in one place, without I/O."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, Protocol

import msgspec

from shiftwork.codec import encode_result, safe_text
from shiftwork.codes import code_of
from shiftwork.errors import Again, Cancel, InvalidArgument, RetryLater, Snooze
from shiftwork.job import NewJob, State
from shiftwork.retry import Retry

MAX_MESSAGE = 10_000
MAX_TRACEBACK = 64 * 1024


class Attempted(Protocol):
    """What is to be known of a job when its attempt has ended."""

    @property
    def id(self) -> int: ...
    @property
    def attempt(self) -> int: ...
    @property
    def failures(self) -> int: ...
    @property
    def max_attempts(self) -> int: ...


class Returned(msgspec.Struct, frozen=True):
    """The handler returned this."""

    value: Any


class Raised(msgspec.Struct, frozen=True):
    """The handler raised this."""

    error: BaseException


class Outcome(msgspec.Struct, frozen=True):
    """What becomes of a job: its next state, and what is to be written with it."""

    job: Attempted
    state: State
    delay: timedelta | None = None
    """When `state` is scheduled: how long until it is due again."""

    result: bytes | None = None
    """JSON, ready to be stored."""

    error: dict[str, str] | None = None
    counts: bool = False
    """Whether this was a failure, which the retry policy counts."""

    at: datetime | None = None
    """When `state` is scheduled: when it is due again, if the handler named a time instead of a delay."""

    jobs: tuple[NewJob[Any], ...] = ()
    """What is enqueued with it, if it completes, or waits for some of them."""


def decide(
    job: Attempted,
    ending: Returned | Raised,
    retry: Retry,
    *,
    coder: Callable[[BaseException], str] = code_of,
    encode: Callable[[object], bytes] = encode_result,
    jobs: tuple[NewJob[Any], ...] = (),
) -> Outcome:
    """What becomes of a job, given how its handler ended."""
    if isinstance(ending, Raised):
        return _raised(job, ending.error, retry, coder(ending.error))
    return completed(job, ending.value, encode, jobs)


def completed(
    job: Attempted, value: object, encode: Callable[[object], bytes], jobs: tuple[NewJob[Any], ...] = ()
) -> Outcome:
    """What becomes of a job whose handler returned this."""
    try:
        return Outcome(job, done(jobs), None, encode(value), None, False, None, jobs)
    except InvalidArgument as error:
        # The work is done and would end the same way again, so there is nothing to gain from another attempt.
        return Outcome(job, State.FAILED, error=describe(error), counts=True)


def done(jobs: tuple[NewJob[Any], ...]) -> State:
    """Where a job goes whose handler returned: it is completed, unless it has children to wait for."""
    return State.WAITING if jobs and any(job.child for job in jobs) else State.COMPLETED


def _raised(job: Attempted, error: BaseException, retry: Retry, code: str) -> Outcome:
    match error:
        case Snooze():
            told = describe(error, code) if error.says_why or error.__cause__ is not None else None
            return _scheduled(job, error, told, counts=False)
        case Cancel():
            return Outcome(job, State.CANCELLED, error=describe(error, code))
        case _ if retry.gives_up(job.failures, job.max_attempts, error, code):
            return Outcome(job, State.FAILED, error=describe(error, code), counts=True)
        case RetryLater():
            return _scheduled(job, error, describe(error, code), counts=True)
        case _:
            delay = retry.after(job.failures + 1)
            return Outcome(job, State.SCHEDULED, delay=delay, error=describe(error, code), counts=True)


def _scheduled(job: Attempted, asked: Again, error: dict[str, str] | None, *, counts: bool) -> Outcome:
    delay = None if asked.delay is None else max(asked.delay, timedelta())
    return Outcome(job, State.SCHEDULED, delay=delay, error=error, counts=counts, at=asked.at)


def describe(error: BaseException, code: str | None = None) -> dict[str, str]:
    """An error as it is stored: code, type, message, traceback. Never fails; always fits."""
    kind = type(error)
    return {
        "code": safe_text(code or code_of(error), 200),
        "type": safe_text(f"{kind.__module__}.{kind.__qualname__}", 500),
        "message": safe_text(_message(error), MAX_MESSAGE),
        "traceback": safe_text(_traceback(error)),
    }


def in_a_line(error: BaseException) -> str:
    """What an error is called and says, whatever its own words do."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001  -- as below
        return _message(error)


def _message(error: BaseException) -> str:
    try:
        message = str(error)
    except Exception:  # noqa: BLE001  -- whoever wrote __str__ is not here to be told
        return f"{type(error).__name__} (its message cannot be read)"
    if not message and error.__cause__ is not None:
        return _message(error.__cause__)
    return message or type(error).__name__


def _traceback(error: BaseException) -> str:
    """Where it happened, without values of variables; of a long one the end, nearest to the cause."""
    try:
        lines = "".join(traceback.format_exception(error))
    except Exception:  # noqa: BLE001
        return "(the traceback cannot be read)"
    encoded = lines.encode(errors="replace")
    if len(encoded) <= MAX_TRACEBACK:
        return lines
    return "…\n" + encoded[-MAX_TRACEBACK + 8 :].decode(errors="ignore")
