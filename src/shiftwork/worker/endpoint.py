"""Where a worker tells how it is, over HTTP: /live, /ready and /metrics, from a thread of its own.

It only reads, and says nothing of what is in jobs. A handler that keeps the event loop busy does not keep it from answering; nothing is
claimed meanwhile, so the loop is asked for a sign of life by whoever has to say whether this worker is able to. What
waits in the queues is asked of the database when metrics are asked for, every five seconds at most, on a connection that is there
only meanwhile; while that cannot be had, the figures are those of before, and say how old they are.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET, AF_INET6, socket
from typing import TYPE_CHECKING, Any

from shiftwork import operations
from shiftwork.errors import ConfigurationError
from shiftwork.stores.store import Store
from shiftwork.worker.health import Health
from shiftwork.worker.leases import ping
from shiftwork.worker.line import Line
from shiftwork.worker.metrics import Metrics

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

MEASURE_EVERY = 5.0
PATIENCE = 2.0
"""Seconds that the heartbeat thread and the event loop have to show a sign of life, and the database to answer."""

MOST_AT_ONCE = 16
SLOW = 10.0
"""Seconds after which whoever does not send his question is hung up on."""

MISSING = "Metrics need the extra `prometheus`: pip install 'shiftwork[prometheus]'\n"
JSON = "application/json"
TEXT = "text/plain; charset=utf-8"
Answer = tuple[int, str, bytes]


class Endpoint:
    """Answers for a worker, from `open` to `close`."""

    def __init__(
        self,
        address: tuple[str, int],
        health: Health,
        metrics: Metrics,
        *,
        ping: Callable[[], threading.Event],
        line: Line,
        store: Store,
        queues: Callable[[], list[str]],
    ) -> None:
        self.address = address
        self._health = health
        self._metrics = metrics
        self._ping = ping
        self._line = line
        self._store = store
        self._queues = queues
        self._measuring = threading.Lock()
        self._registry = _registry(metrics)
        self._loop: asyncio.AbstractEventLoop
        self._server: Server | None = None

    @property
    def has_metrics(self) -> bool:
        """Whether the extra is installed."""
        return self._registry is not None

    def open(self) -> None:
        """Listen, or say why that cannot be."""
        self._loop = asyncio.get_running_loop()
        try:
            self._server = Server(self.address, self._answer)
        except (OSError, OverflowError) as error:  # of several processes the last may be past the last port
            host, port = self.address
            raise ConfigurationError(
                f"metrics_port: nobody can listen at {host}, port {port}: {getattr(error, 'strerror', None) or error}"
            ) from None
        threading.Thread(target=self._server.serve_forever, name="shiftwork-endpoint", daemon=True).start()

    async def close(self) -> None:
        """Listen no more."""
        if self._server is not None:
            await asyncio.to_thread(self._server.shutdown)
            self._server.server_close()
        self._line.drop()

    def _answer(self, path: str, accepted: str) -> Answer:
        match path.partition("?")[0]:
            case "/live":
                return self._live()
            case "/ready":
                return self._ready()
            case "/metrics":
                return self._told(accepted)
        return 404, TEXT, b"There are /live, /ready and /metrics.\n"

    def _live(self) -> Answer:
        turns = self._ping().wait(PATIENCE)
        reasons = [] if turns else [f"the heartbeat thread gave no sign of life for {PATIENCE:g} s"]
        return _document(
            {"live": turns, "reasons": reasons, "worker": self._health.worker, "pid": os.getpid()}
        )

    def _ready(self) -> Answer:
        self._look()
        reasons = self._health.reasons()
        return _document(
            {
                "ready": not reasons,
                "reasons": reasons,
                "warnings": self._health.warnings(),
                "worker": self._health.worker,
                "pid": os.getpid(),
            }
        )

    def _look(self) -> None:
        """See whether anything can be claimed at all."""
        self._health.busy = not ping(self._loop).wait(PATIENCE)

    def _told(self, accepted: str) -> Answer:
        if self._registry is None:
            return 501, TEXT, MISSING.encode()
        from prometheus_client.exposition import choose_encoder  # noqa: PLC0415

        with self._measuring:
            self._look()
            if self._metrics.age >= MEASURE_EVERY and not self._health.busy:
                self._measure()
            encode, kind = choose_encoder(accepted)
            return 200, kind, encode(self._registry)

    def _measure(self) -> None:
        asked = asyncio.run_coroutine_threadsafe(self._ask(), self._loop)
        try:
            self._metrics.measured(asked.result(PATIENCE + 1))
        except Exception:  # noqa: BLE001  -- the figures of before have to do
            asked.cancel()  # or those that a busy event loop has not begun would pile up

    async def _ask(self) -> Any:  # noqa: ANN401
        try:
            return await self._line.perform(
                operations.measure_queues(self._store, self._queues()), within=PATIENCE
            )
        finally:
            self._line.drop()


def _registry(metrics: Metrics) -> CollectorRegistry | None:
    try:
        from prometheus_client import CollectorRegistry, ProcessCollector  # noqa: PLC0415
    except ImportError:
        return None
    registry = CollectorRegistry(auto_describe=False)
    registry.register(metrics)
    ProcessCollector(namespace="shiftwork", registry=registry)
    return registry


def _document(said: Mapping[str, object]) -> Answer:
    well = said.get("live", said.get("ready"))
    return 200 if well else 503, JSON, json.dumps(said).encode() + b"\n"


class Server(ThreadingHTTPServer):
    """So many questions at once, and no more."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], answer: Callable[[str, str], Answer]) -> None:
        self.address_family = AF_INET6 if ":" in address[0] else AF_INET
        self.answer = answer
        self._free = threading.BoundedSemaphore(MOST_AT_ONCE)
        super().__init__(address, Handler)

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: socket | tuple[bytes, socket], client_address: Any) -> None:  # noqa: ANN401
        """Whoever hung up too early is told nothing, and nobody is told of it."""


class Handler(BaseHTTPRequestHandler):
    """One question, one answer."""

    server_version = "shiftwork"
    sys_version = ""
    timeout = SLOW

    def do_GET(self) -> None:
        assert isinstance(self.server, Server)  # noqa: S101
        status, kind, body = self.server.answer(self.path, self.headers.get("Accept", ""))
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002, ANN401
        """Questions are not logged."""
