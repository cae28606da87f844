"""How an attempt ended, and what becomes of its job: one value, decided in one place, without I/O."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from shiftwork.codec import encode_result, safe_text
from shiftwork.errors import Cancel, InvalidArgument, RetryLater, Snooze
from shiftwork.job import Job, State
from shiftwork.retry import Retry, code_of

MAX_MESSAGE = 10_000
MAX_TRACEBACK = 64 * 1024


@dataclass(frozen=True, slots=True)
class Returned:
    """The handler returned this."""

    value: Any


@dataclass(frozen=True, slots=True)
class Raised:
    """The handler raised this."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class Outcome:
    """What becomes of a job: its next state, and what is to be written with it."""

    job: Job
    state: State
    delay: timedelta | None = None
    """When `state` is scheduled: how long until it is due again."""

    result: bytes | None = None
    """JSON, ready to be stored."""

    error: dict[str, str] | None = None
    counts: bool = False
    """Whether this was a failure, which the retry policy counts."""


def decide(job: Job, ending: Returned | Raised, retry: Retry) -> Outcome:
    """What becomes of a job, given how its handler ended."""
    match ending:
        case Returned(value):
            return _returned(job, value)
        case Raised(Snooze(delay)):
            return Outcome(job, State.SCHEDULED, delay=_not_negative(delay))
        case Raised(Cancel() as error):
            return Outcome(job, State.CANCELLED, error=describe(error))
        case Raised(error) if retry.gives_up(job.failures, job.max_attempts, error):
            return Outcome(job, State.FAILED, error=describe(error), counts=True)
        case Raised(RetryLater(delay) as error):
            return Outcome(
                job, State.SCHEDULED, delay=_not_negative(delay), error=describe(error), counts=True
            )
        case Raised(error):
            delay = retry.delay(job.failures + 1)
            return Outcome(job, State.SCHEDULED, delay=delay, error=describe(error), counts=True)


def _returned(job: Job, value: object) -> Outcome:
    try:
        return Outcome(job, State.COMPLETED, result=encode_result(value))
    except InvalidArgument as error:
        # The work is done and would end the same way again, so there is nothing to gain from another attempt.
        record = describe(error) | {"code": "RESULT_NOT_JSON"}
        return Outcome(job, State.FAILED, error=record, counts=True)


def _not_negative(delay: timedelta) -> timedelta:
    return max(delay, timedelta())


def describe(error: BaseException) -> dict[str, str]:
    """An error as it is stored: code, type, message, traceback. Never fails; always fits."""
    kind = type(error)
    return {
        "code": safe_text(code_of(error), 200),
        "type": safe_text(f"{kind.__module__}.{kind.__qualname__}", 500),
        "message": safe_text(_message(error), MAX_MESSAGE),
        "traceback": safe_text(_traceback(error)),
    }


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
