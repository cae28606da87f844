"""Error codes: the short names by which failures are counted, looked for and retried.

Which code an error gets, the first that there is:

1. its own: an attribute `code` in UPPER_SNAKE_CASE, for whoever raises it has chosen it
2. what the task says of its class: `@app.task(codes={KeyError: "NO_SUCH_ROW"})`
3. what the app says of its class: `App(codes=…)`
4. the task's `default_code`, then the app's
5. its own `code` if that is text of another form, else the name of its class

Classes are compared exactly; a subclass is another class.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from shiftwork.errors import ConfigurationError, ShiftworkError, Verdict

RESERVED: Mapping[str, str] = {
    "ARGUMENTS_INVALID": "the stored arguments do not fit the signature of the task; no attempt can help",
    "CHILD_FAILED": "a job that it spawned and waited for did not complete",
    "FAILED": "the job failed, and whoever said so gave no reason",
    "FINISH_UNDONE": "the handler finished its job in a transaction that was then not committed",
    "OUTCOME_REFUSED": "the database refused to store how the job ended",
    "POISON": "the handler raised Poison: no further attempt can help",
    "RESULT_NOT_JSON": "the handler returned something for which there is no JSON; its work is not repeated",
    "RETRY_LATER": "the handler raised RetryLater, and had no attempts left",
    "RETURN_TYPE_MISMATCH": "the handler returned something else than its annotation says; its work is not repeated",
    "SNOOZED": "the handler raised Snooze and gave a reason; nothing was counted",
    "TASK_CANCELLED": "the job was cancelled",
    "TASK_EXPIRED": "nobody started the job before its deadline",
    "TASK_TIMEOUT": "the attempt took longer than its task may; it counts as any failure does",
    "UNKNOWN_TASK": "the worker has no such task, and was told to fail such jobs",
    "WORKER_CRASHED": "the worker fell silent while it ran the job, or the job took down its own process",
}
"""Codes that shiftwork gives itself, and what each of them says; nobody else may use them."""

_CODE = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*", re.ASCII)
MAX_CODE = 100


@dataclass(frozen=True, kw_only=True)
class Codes:
    """Which code an error gets, as a task and its app say."""

    task: Mapping[type[BaseException], str] = field(default_factory=dict)
    app: Mapping[type[BaseException], str] = field(default_factory=dict)
    default: str | None = None

    def __call__(self, error: BaseException) -> str:
        """The code of an error."""
        kind = type(error)
        return own_code(error) or self.task.get(kind) or self.app.get(kind) or self.default or code_of(error)


def own_code(error: BaseException) -> str | None:
    """The code that an error was given by whoever raised it."""
    code = _attribute(error)
    if code is None or not is_code(code):
        return None
    ours = isinstance(error, Verdict | ShiftworkError)
    return code if ours or code not in RESERVED else None


def code_of(error: BaseException) -> str:
    """The short name of an error of which nobody says anything: its own `code`, else the name of its class."""
    code = _attribute(error)
    if code is None or (code in RESERVED and own_code(error) is None):
        return type(error).__name__
    return code


def _attribute(error: BaseException) -> str | None:
    try:
        code = getattr(error, "code", None)
    except Exception:  # noqa: BLE001  -- a property of somebody else's exception may do anything
        return None
    return code[:200] if isinstance(code, str) and code.isprintable() and code else None


def is_code(text: str) -> bool:
    """Whether it is written as a code is."""
    return len(text) <= MAX_CODE and _CODE.fullmatch(text) is not None


def check_codes(whose: str, codes: Mapping[type[BaseException], str], default: str | None) -> None:
    """Refuse codes that cannot be, or that are not theirs to use."""
    for kind, code in codes.items():
        if not isinstance(kind, type) or not issubclass(kind, BaseException):
            raise ConfigurationError(f"{whose}: codes maps classes of exceptions, and {kind!r} is none")
        _check(whose, f"the code of {kind.__name__}", code)
    if default is not None:
        _check(whose, "default_code", default)


def _check(whose: str, what: str, code: object) -> None:
    if not isinstance(code, str) or not is_code(code):
        raise ConfigurationError(
            f"{whose}: {what} is {code!r}; it must be UPPER_SNAKE_CASE, up to {MAX_CODE} characters"
        )
    if code in RESERVED:
        raise ConfigurationError(
            f"{whose}: {what} is {code!r}, which shiftwork itself uses: {RESERVED[code]}"
        )
