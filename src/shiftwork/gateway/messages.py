"""What remote workers may say, and how they are told that something cannot be."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from shiftwork.codec import safe_text
from shiftwork.codes import RESERVED
from shiftwork.outcome import MAX_MESSAGE, MAX_TRACEBACK, Outcome

T = TypeVar("T")

Name = Annotated[str, Meta(min_length=1, max_length=200)]
Names = Annotated[list[Name], Meta(max_length=100)]
Tokens = Annotated[list[str], Meta(max_length=1000)]
Seconds = Annotated[float, Meta(ge=0, le=86_400 * 3650)]


class Refusal(Exception):  # noqa: N818
    """Why a request is not done, as it is answered."""

    def __init__(self, status: int, why: str, **headers: str) -> None:
        super().__init__(why)
        self.status = status
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


class Said(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The body of a request."""


class Registration(Said, frozen=True):
    """Who wants to work, and what it serves; nothing named is everything."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,100}$")] = "remote"
    host: Annotated[str, Meta(pattern=r"^[!-~]{0,255}$")] = ""
    queues: Names = []
    tasks: Names = []
    lease: Annotated[float, Meta(ge=1, le=3600)] | None = None


class Wish(Said, frozen=True):
    """What a worker would take now, and the tokens of the jobs that it holds."""

    queues: Names = []
    tasks: Names = []
    most: Annotated[int, Meta(ge=1, le=100)] = 1
    wait: Annotated[float, Meta(ge=0, le=30)] = 0
    jobs: Tokens = []


class Beat(Said, frozen=True):
    """A worker is alive: the tokens of the jobs that it holds, and the last claim that it had an answer to."""

    jobs: Tokens = []
    claim: Annotated[int, Meta(ge=0, le=2**62)] | None = None


class Line(Said, frozen=True):
    """A line of a job's log."""

    message: str
    level: Annotated[str, Meta(pattern=r"^[a-z]{1,20}$")] = "info"

    @property
    def entry(self) -> dict[str, object]:
        """As a store takes it."""
        return {"key": f"log.{self.level}", "command": [], "out": safe_text(self.message, MAX_MESSAGE)}


class Progress(Said, frozen=True):
    """How far a job is."""

    fraction: Annotated[float, Meta(ge=0, le=1)] | None = None
    message: str | None = None


class Result(Said, frozen=True):
    """What a job has led to."""

    result: Any = None


class Failure(Said, frozen=True):
    """Why a job has failed."""

    message: str = ""
    code: str | None = None
    kind: str | None = msgspec.field(default=None, name="type")
    traceback: str | None = None

    def as_error(self, base: type[Exception], *given: object) -> Exception:
        """An error of the class that it had there, which is one of ours as well."""
        if self.code in RESERVED:
            raise Refusal(422, f"code: {self.code} is one that shiftwork itself uses")
        name = safe_text(self.kind or base.__name__, 200).rpartition(".")[2]
        kind = type(name, (base,), {"code": self.code} if self.code else {})
        error: Exception = kind(*given, self.message)
        return error

    def told(self, outcome: Outcome) -> Outcome:
        """The outcome with the class and the traceback that the error had there, in place of ours."""
        there = {
            "type": safe_text(self.kind or "", 500),
            "traceback": safe_text(self.traceback or "", MAX_TRACEBACK),
        }
        return msgspec.structs.replace(outcome, error={**(outcome.error or {}), **there})


class PassingFailure(Failure, frozen=True):
    """Why an attempt has failed, and when to try again if the policy is not to say."""

    delay: Seconds | None = None


async def read(request: Request, kind: type[T], most: int) -> T:
    """The body of a request, which has so many bytes at most."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most:
            raise Refusal(413, f"the body is larger than {most:,} bytes")
    try:
        return msgspec.json.decode(bytes(body) or b"{}", type=kind)
    except msgspec.ValidationError as error:
        raise Refusal(422, str(error)) from None
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is not JSON that can be read: {error}") from None


def bearer(request: Request) -> str:
    """The token that came with a request."""
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else ""


def told(_: Request, error: Exception) -> JSONResponse:
    """A refusal, ours or of the router, as it is answered."""
    if isinstance(error, HTTPException):
        return JSONResponse({"error": error.detail}, error.status_code, error.headers)
    status, headers = (error.status, error.headers) if isinstance(error, Refusal) else (500, None)
    return JSONResponse({"error": str(error)}, status, headers)
