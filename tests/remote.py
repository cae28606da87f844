"""A gateway on a real socket, and what remote workers say to it.

with Remote(app) as remote:
    worker = remote.register()
    [job] = worker.dequeue()
    assert remote.post(f"/jobs/{job['id']}/complete", job["token"]).status == 200
"""

from __future__ import annotations

import json
import socket
import threading
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any, Self

import uvicorn

from shiftwork.gateway import Gateway
from shiftwork.program import Program

SECRET = "a secret of sufficient length".replace(" ", "-")
Row = dict[str, Any]


@dataclass
class Answer:
    """What came back."""

    status: int
    said: Any
    headers: dict[str, str]


class Remote:
    """A gateway for as long as it is needed, served by a thread of its own."""

    def __init__(self, program: Program, **options: Any) -> None:
        self.gateway = Gateway(program, **{"token": SECRET, **options})
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._server = uvicorn.Server(
            uvicorn.Config(self.gateway, log_config=None, lifespan="off", timeout_graceful_shutdown=5)
        )
        self.gateway.closing = lambda: self._server.should_exit
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop; once more is no harm."""
        self._server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()
        self._socket.close()

    def post(self, path: str, token: str = SECRET, *, method: str = "POST", **said: Any) -> Answer:
        """Say something."""
        return self.send(path, token, json.dumps(said).encode(), method=method)

    def send(self, path: str, token: str | None, body: bytes, *, method: str = "POST") -> Answer:
        """Say something, however it is written."""
        line = HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            headers = {} if token is None else {"Authorization": f"Bearer {token}"}
            line.request(method, path, body, headers)
            answer = line.getresponse()
            content = answer.read()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, json.loads(content) if content else None, found)
        finally:
            line.close()

    def register(self, **said: Any) -> RemoteWorker:
        """Become a worker."""
        answer = self.post("/workers", **said)
        assert answer.status == 201, answer
        return RemoteWorker(self, answer.said["worker"], answer.said["token"], answer.said)


@dataclass
class RemoteWorker:
    """A worker that knows of nothing but HTTP."""

    remote: Remote
    id: int
    token: str
    answer: Row

    def ask(self, verb: str, **said: Any) -> Answer:
        """Ask for something in its name."""
        return self.remote.post(f"/workers/{self.id}/{verb}", self.token, **said)

    def dequeue(self, **said: Any) -> list[Row]:
        """Take jobs."""
        answer = self.ask("dequeue", **said)
        assert answer.status in {200, 204}, answer
        jobs: list[Row] = [] if answer.said is None else answer.said["jobs"]
        return jobs

    def take(self, **said: Any) -> Row:
        """Take the one job that there is."""
        [job] = self.dequeue(**said)
        return job

    def tell(self, job: Row, verb: str, **said: Any) -> Answer:
        """Say something about a job."""
        return self.remote.post(f"/jobs/{job['id']}/{verb}", job["token"], **said)
