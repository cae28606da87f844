from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shiftwork import errors
from shiftwork.app import App
from shiftwork.codes import RESERVED, Codes, code_of, own_code
from shiftwork.errors import Cancel, ConfigurationError, Poison
from shiftwork.outcome import Raised, decide
from shiftwork.retry import Retry
from tests.test_outcome import a_job


class RateLimitedError(Exception):
    code = "RATE_LIMIT"


class DriverError(Exception):
    """As those of SQLAlchemy, which have a code for their manual."""

    code = "gkpj"


class PretenderError(Exception):
    code = "WORKER_CRASHED"


@pytest.mark.parametrize(
    ("error", "codes", "expected"),
    [
        # 1: its own
        (RateLimitedError(), {"task": {RateLimitedError: "TASK_SAYS"}, "default": "USUAL"}, "RATE_LIMIT"),
        (Poison(), {"default": "USUAL"}, "POISON"),
        # 2, 3: the task, then the app; exactly this class
        (KeyError(), {"task": {KeyError: "TASK_SAYS"}, "app": {KeyError: "APP_SAYS"}}, "TASK_SAYS"),
        (KeyError(), {"app": {KeyError: "APP_SAYS"}, "default": "USUAL"}, "APP_SAYS"),
        (DriverError(), {"app": {DriverError: "APP_SAYS"}}, "APP_SAYS"),
        (ConnectionError(), {"task": {OSError: "TASK_SAYS"}}, "ConnectionError"),
        # 4: the default
        (ConnectionError(), {"task": {OSError: "TASK_SAYS"}, "default": "USUAL"}, "USUAL"),
        (PretenderError(), {"default": "USUAL"}, "USUAL"),
        # 5: what it is called
        (DriverError(), {}, "gkpj"),
        (PretenderError(), {}, "PretenderError"),
        (ValueError(), {}, "ValueError"),
    ],
)
def test_the_first_that_has_something_to_say_gives_the_code(
    error: Exception, codes: dict[str, Any], expected: str
) -> None:
    # spec: HO-30, D-12
    assert Codes(**codes)(error) == expected


def test_a_task_comes_before_its_app() -> None:
    # spec: HO-30
    app = App(
        "postgresql://nowhere/",
        codes={KeyError: "NO_SUCH_ROW", OSError: "OFFLINE"},
        default_code="APP_BROKE",
    )

    @app.task(codes={KeyError: "NO_SUCH_CUSTOMER"}, default_code="TASK_BROKE")
    def first() -> None: ...

    @app.task
    def second() -> None: ...

    errors = (KeyError(), OSError(), ValueError())
    assert [first.coder(error) for error in errors] == ["NO_SUCH_CUSTOMER", "OFFLINE", "TASK_BROKE"]
    assert [second.coder(error) for error in errors] == ["NO_SUCH_ROW", "OFFLINE", "APP_BROKE"]


def test_the_code_is_stored_and_is_what_the_policy_goes_by() -> None:
    # spec: HO-12, HO-29, D-12
    coder, retry = Codes(task={KeyError: "NOT_THERE_YET"}), Retry(on="NOT_THERE_YET", jitter=0)
    again = decide(a_job(), Raised(KeyError("row")), retry, coder=coder)
    assert again.state == "scheduled"
    assert again.error is not None
    assert again.error["code"] == "NOT_THERE_YET"
    assert decide(a_job(), Raised(ValueError()), retry, coder=coder).state == "failed"
    assert decide(a_job(), Raised(KeyError()), retry).state == "failed"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"codes": {KeyError: "no_such_row"}}, "UPPER_SNAKE_CASE"),
        ({"codes": {KeyError: "NO SUCH ROW"}}, "UPPER_SNAKE_CASE"),
        ({"codes": {KeyError: "_X"}}, "UPPER_SNAKE_CASE"),
        ({"codes": {KeyError: "X" * 101}}, "100 characters"),
        ({"codes": {KeyError: 5}}, "the code of KeyError is 5"),
        ({"codes": {"KeyError": "X"}}, "'KeyError' is none"),
        ({"codes": {int: "X"}}, "is none"),
        ({"default_code": "broken"}, "default_code is 'broken'"),
        ({"default_code": "POISON"}, "which shiftwork itself uses: the handler raised Poison"),
        *(({"codes": {KeyError: code}}, "which shiftwork itself uses") for code in RESERVED),
    ],
)
def test_a_code_that_cannot_be_or_is_not_theirs_is_refused(wrong: dict[str, Any], said: str) -> None:
    # spec: HO-13
    with pytest.raises(ConfigurationError, match=f"App: .*{said}"):
        App("postgresql://nowhere/", **wrong)
    with pytest.raises(ConfigurationError, match=f"task 'work': .*{said}"):
        App("postgresql://nowhere/").task(name="work", **wrong)(lambda: None)


def test_every_code_that_shiftwork_gives_is_reserved_and_explained() -> None:
    # spec: HO-12, HO-13
    ours = {kind.code for kind in vars(errors).values() if isinstance(getattr(kind, "code", None), str)}
    assert ours <= set(RESERVED)
    told = {"TASK_EXPIRED", "WORKER_CRASHED", "OUTCOME_REFUSED", "UNKNOWN_TASK", "ARGUMENTS_INVALID"}
    assert told | {"TASK_TIMEOUT", "TASK_CANCELLED", "RETURN_TYPE_MISMATCH", "RESULT_NOT_JSON"} <= set(
        RESERVED
    )
    assert all(len(sentence) > 10 for sentence in RESERVED.values())


def test_who_is_not_of_ours_cannot_take_a_reserved_code() -> None:
    # spec: HO-13
    assert own_code(PretenderError()) is None
    assert code_of(PretenderError()) == "PretenderError"
    assert own_code(Cancel()) == code_of(Cancel()) == "TASK_CANCELLED"


def test_a_timeout_is_an_ordinary_failure() -> None:
    # spec: SG-19
    timeout = errors.TaskTimeout("it ran longer than 5m")
    outcome = decide(a_job(), Raised(timeout), Retry(), coder=Codes(default="USUAL"))
    assert (outcome.state, outcome.counts) == ("scheduled", True)
    assert outcome.error is not None
    assert outcome.error["code"] == "TASK_TIMEOUT"
    assert decide(a_job(), Raised(timeout), Retry(on="TASK_TIMEOUT")).state == "scheduled"
    assert decide(a_job(), Raised(timeout), Retry(on=TimeoutError)).state == "scheduled"
    assert decide(a_job(), Raised(timeout), Retry(on=KeyError)).state == "failed"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.UnknownHandler("this worker has no task 'x'"), "UNKNOWN_TASK"),
        (errors.UnfitArguments("argument 'to' of task 'mail' is missing"), "ARGUMENTS_INVALID"),
    ],
)
def test_what_no_attempt_can_help_fails_at_once(error: Exception, code: str) -> None:
    # spec: SH-17, SH-20
    outcome = decide(a_job(), Raised(error), Retry.unlimited(), coder=Codes(default="USUAL"))
    assert outcome.state == "failed"
    assert outcome.error is not None
    assert outcome.error["code"] == code


def test_the_page_of_errors_tells_what_each_reserved_code_means() -> None:
    # spec: HO-13
    page = (Path(__file__).parent.parent / "docs/errors.md").read_text("utf-8")
    told = page.split("## Reserved codes")[1].split("\n## ")[0]
    lines = {line for line in told.splitlines() if line.startswith("| `")}
    assert lines == {f"| `{code}` | {sentence} |" for code, sentence in RESERVED.items()}
