"""Tokens: each opens one thing, and says itself what that is, so that a gateway has nothing to remember.

The secret lets somebody register. What he is given then opens the worker that he has become, and with every job comes a token
that opens this attempt of it. Both are words of ours, signed with the secret: whoever has the secret can read them, at any gateway
and after any restart. They do not run out. Whether the worker still has its lease, and the attempt its job, the database says, which
is asked each time; so a token is good for as long as what it opens, and not a moment longer.
"""

from __future__ import annotations

import base64
import hmac
import os
from typing import TypeVar

import msgspec

from shiftwork.errors import ConfigurationError

VARIABLE = "SHIFTWORK_GATEWAY_TOKEN"
"""Where the secret is, unless it is given."""

LEAST = 16
MAKE = "make one with: python -c 'import secrets; print(secrets.token_urlsafe(32))'"


class OfWorker(msgspec.Struct, frozen=True, array_like=True, tag="worker"):
    """Opens a worker; without queues or tasks named, it serves all."""

    id: int
    lease: float
    queues: tuple[str, ...]
    tasks: tuple[str, ...]


class OfJob(msgspec.Struct, frozen=True, array_like=True, tag="job"):
    """Opens one attempt of a job, and carries what has to be known when that ends."""

    id: int
    attempt: int
    worker: int
    claim: int
    task: str
    queue: str
    failures: int
    max_attempts: int
    since: float
    """When it was given out, by the clock of that gateway; for log lines."""

    @property
    def held(self) -> tuple[int, int]:
        """What is held under it."""
        return self.id, self.attempt

    @property
    def about(self) -> tuple[int, str, str, int]:
        """What events say of a job."""
        return self.id, self.task, self.queue, self.attempt


T = TypeVar("T", OfWorker, OfJob)


class Seal:
    """Signs and reads the tokens of one store."""

    def __init__(self, secret: str, store: str) -> None:
        self._secret = secret.encode()
        self._key = hmac.digest(self._secret, f"shiftwork gateway {store}".encode(), "sha256")

    def is_secret(self, given: str) -> bool:
        """Whether this is the secret itself."""
        return hmac.compare_digest(given.encode(), self._secret)

    def sign(self, words: OfWorker | OfJob) -> str:
        """The token that says so."""
        said = _text(msgspec.json.encode(words))
        return f"{said}.{self._signature(said)}"

    def read(self, token: str, kind: type[T]) -> T | None:
        """What a token of this kind says; None if it is none, or not ours."""
        said, _, signature = token.partition(".")
        if not hmac.compare_digest(signature.encode(), self._signature(said).encode()):
            return None
        try:
            return msgspec.json.decode(base64.urlsafe_b64decode(said + "=" * (-len(said) % 4)), type=kind)
        except msgspec.DecodeError:  # of the other kind, or of another release
            return None

    def _signature(self, said: str) -> str:
        return _text(hmac.digest(self._key, said.encode(), "sha256"))


def _text(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def check_secret(given: str | None) -> str:
    """The secret, from the environment unless it is given; refused, with what to do, if it cannot keep anybody out."""
    secret = (os.environ.get(VARIABLE, "") if given is None else given).strip()
    if not secret:
        raise ConfigurationError(
            f"the gateway lets nobody in without a secret; put one in {VARIABLE}, or in a file: {MAKE}"
        )
    if len(secret) < LEAST or not (secret.isascii() and secret.isprintable() and " " not in secret):
        raise ConfigurationError(
            f"the secret of the gateway has {len(secret)} characters; it must have {LEAST} or more, of ASCII and without spaces: {MAKE}"
        )
    return secret
