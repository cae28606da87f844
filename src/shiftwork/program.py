"""A program that can be run by workers: where its database is, its hooks, and how a worker of it is started.

`App` and `TableStore` are programs: what they share is here, what a job is to them is theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

from shiftwork.client import Client
from shiftwork.codes import check_codes
from shiftwork.errors import ConfigurationError
from shiftwork.events import Subscriber
from shiftwork.logs import Telling, is_set_up
from shiftwork.operations import Routine
from shiftwork.settings import Settings, mask
from shiftwork.stores.store import Store
from shiftwork.systemd import Systemd
from shiftwork.task import Surroundings, Task
from shiftwork.worker import Middleware, supervised
from shiftwork.worker import Worker as Running
from shiftwork.worker.hooks import AfterJob, BeforeClaim, BeforeJob, Hooks
from shiftwork.worker.processes import beginning
from shiftwork.worker.service import Service
from shiftwork.worker.signals import heeding
from shiftwork.worker.threads import Impatient

if TYPE_CHECKING:
    from shiftwork.embedded import Server

log = logging.getLogger("shiftwork")

COLLECT = 20_000
PYTHONS_OWN = (700, 2_000)
"""After how many objects more garbage is looked for in a worker, and in Python as it comes."""


class Program(Surroundings):
    """What workers run."""

    def __init__(
        self,
        settings: Settings,
        *,
        codes: Mapping[type[BaseException], str] | None = None,
        default_code: str | None = None,
    ) -> None:
        self.settings = settings
        self.codes = dict(codes or {})
        self.default_code = default_code
        check_codes(type(self).__name__, self.codes, default_code)
        self._tasks: dict[str, Task[Any, Any]] = {}
        self._client: Client | None = None
        self._server: Server | None = None
        self._opening = threading.Lock()
        self._middleware: list[Middleware] = []
        self._required: list[tuple[Middleware, ...]] = []
        self._subscribers: list[Subscriber] = []
        self._hooks = Hooks()
        self.withheld: str | None = None
        """Why this process may not use the database, if it may not."""

    @property
    def tasks(self) -> Mapping[str, Task[Any, Any]]:
        """The tasks by name."""
        return MappingProxyType(self._tasks)

    def store(self, settings: Settings) -> Store:
        """Where the jobs are, for a worker with these settings."""
        raise NotImplementedError

    def prepare(self, settings: Settings) -> None:
        """Make ready the database of an embedded server: nobody else looks after it."""

    def migrate(self) -> None:
        """Install what its jobs need in the database."""
        raise ConfigurationError(
            "there is nothing to migrate for a table of yours; see: shiftwork table install"
        )

    def routines(self) -> Sequence[Routine]:
        """Tasks whose code is in the database, which a worker enters in the registry."""
        return ()

    def limits(self) -> Mapping[str, Any]:
        """How many may run at once in the whole cluster."""
        return {}

    @property
    def client(self) -> Client:
        """The way to the database, opened when first needed."""
        if self._client is None:
            with self._opening:
                if self._client is None:
                    self._client = self._open()
        return self._client

    async def aclient(self) -> Client:
        """The same for an awaiting caller; an embedded server is started in a thread, since it takes a while."""
        if self._client is not None:
            return self._client
        return await asyncio.to_thread(lambda: self.client) if self.settings.dsn is None else self.client

    def _open(self) -> Client:
        if self.withheld is not None:
            raise ConfigurationError(self.withheld)
        if self.settings.dsn is not None:
            log.info("using the database at %s, schema %s", mask(self.settings.dsn), self.settings.schema)
            return Client(self.settings)
        self._server, self.settings = _serve(self.settings, self.prepare)
        log.info("using the embedded PostgreSQL, data in %s", self._server.data)
        return Client(self.settings, self._serve_again)

    def _serve_again(self) -> None:
        """Have the embedded server back, if it is not there any more."""
        with self._opening:
            gone = self._server
            if gone is not None:
                self._server, _ = _serve(self.settings, self.prepare)
                gone.close()

    def middleware(self, layer: Middleware) -> Middleware:
        """Wrap every attempt on a worker of this app; the first layer that was declared is outermost.

        @app.middleware
        async def timed(context, call):
            with timer(context.job.task):
                return await call()
        """
        if not inspect.iscoroutinefunction(layer):
            raise ConfigurationError("middleware is an async function of two arguments: context and call")
        self._middleware.append(layer)
        return layer

    def require_middleware(self, *layers: Middleware) -> None:
        """Let no worker of this app start unless it has these layers, in this order, the outermost first.

        For a module of tasks that are not to run without: app.require_middleware(authenticated, in_session)
        """
        self._required.append(layers)

    def _check_middleware(self) -> None:
        for required in self._required:
            present = iter(self._middleware)
            if not all(layer in present for layer in required):  # each one behind the one before
                wanted, there = (
                    ", ".join(getattr(one, "__name__", repr(one)) for one in many) or "none"
                    for many in (required, self._middleware)
                )
                raise ConfigurationError(
                    f"middleware is required that is not there, or in another order: {wanted}; there is: {there}"
                )

    @property
    def layers(self) -> Sequence[Middleware]:
        """The middleware, the outermost first."""
        return tuple(self._middleware)

    def before_claim(self, hook: BeforeClaim) -> BeforeClaim:
        """Ask a function, async or plain, before every claim of a worker of this app; it may skip or narrow it.

        @app.before_claim
        def within_budget(claim):
            claim.require(sql.SQL("(job.payload ->> 'size')::int <= {}").format(free()))
        """
        self._hooks.before_claim.append(hook)
        return hook

    def before_job(self, hook: BeforeJob) -> BeforeJob:
        """Call a function, async or plain, with every job before its handler; if it fails, that is a warning."""
        self._hooks.before_job.append(hook)
        return hook

    def after_job(self, hook: AfterJob) -> AfterJob:
        """Call a function, async or plain, with every job after its handler, and with the error if it failed."""
        self._hooks.after_job.append(hook)
        return hook

    def subscribe(self, subscriber: Subscriber) -> Subscriber:
        """Let a function see what happens in workers of this app; see `shiftwork.events`."""
        self._subscribers.append(subscriber)
        return subscriber

    @property
    def subscribers(self) -> Sequence[Subscriber]:
        """Who looks on."""
        return tuple(self._subscribers)

    def run_worker(self, **settings: Any) -> bool:  # noqa: ANN401
        """Run jobs until told to stop (TERM, INT or HUP), as `shiftwork worker` does; says whether all went well.

        app.run_worker(queues="mail,default", concurrency=20)
        """
        with asyncio.Runner(loop_factory=fastest_loop()) as runner, _collecting_rarely():
            runner.get_loop().set_default_executor(Impatient())
            return runner.run(self._be_worker(settings))

    async def _be_worker(self, settings: Mapping[str, Any]) -> bool:
        """Be a worker and nothing else, and tell how it fares to whoever started this process."""
        worker = await self.worker(**settings)
        with heeding(worker) as order:
            systemd, supervisor = Systemd.take(), supervised.join()
            async with Service(worker, order, tell=Telling(), systemd=systemd, supervised=supervisor):
                return await worker.run()

    async def arun_worker(self, *, signals: bool = True, **settings: Any) -> bool:  # noqa: ANN401
        """Run jobs until told to stop or cancelled; without `signals`, those are left to the caller."""
        worker = await self.worker(**settings)
        with heeding(worker) if signals else contextlib.nullcontext():
            return await worker.run()

    async def worker(self, **settings: Any) -> Running:  # noqa: ANN401
        """A worker for the tasks of this program, not running yet; `settings` overrule those of the program."""
        self._check_middleware()
        client = await self.aclient()
        chosen = self.chosen(settings)
        return Running(
            chosen,
            self.store(chosen),
            self._tasks,
            begin=beginning(self, chosen, self._tasks, tells=is_set_up()),
            routines=self.routines(),
            limits=self.limits(),
            hooks=self._hooks,
            middleware=self._middleware,
            subscribers=[Telling(), *self.subscribers],
            revive=client.revive,
        )

    def chosen(self, settings: Mapping[str, Any]) -> Settings:
        """What a worker is set to, with what it is told beside the program's own settings."""
        return self.settings.changed(**settings)

    def close(self) -> None:
        """Close the connections, of both worlds, and let go of the embedded server; it can be used again."""
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._server is not None:
            self._server.close()
            self._server = None
            self.settings = dataclasses.replace(self.settings, dsn=None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


class Worker:
    """Runs the jobs of an app, or of a table, until told to stop.

    shiftwork.Worker(app, queues="mail", concurrency=20).run()
    """

    def __init__(self, program: Program, **settings: Any) -> None:  # noqa: ANN401
        self._program = program
        self._settings = settings
        program.chosen(settings)  # refuses now what cannot be

    def run(self) -> bool:
        """Run jobs until told to stop (TERM, INT or HUP); says whether all went well."""
        return self._program.run_worker(**self._settings)

    async def arun(self, *, signals: bool = True) -> bool:
        """Run jobs until told to stop or cancelled; without `signals`, those are left to the caller."""
        return await self._program.arun_worker(signals=signals, **self._settings)


def fastest_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """What makes event loops: uvloop where it is installed, since a worker then needs less of the processor; else Python's own."""
    try:
        import uvloop  # noqa: PLC0415
    except ImportError:
        return None
    return uvloop.new_event_loop


@contextlib.contextmanager
def _collecting_rarely() -> Iterator[None]:
    """Look for garbage in cycles less often than Python would: hundreds of jobs come at once, and are gone a moment later.

    Who has chosen a threshold of his own keeps it. What was loaded until now stays anyway, and is not looked through.
    """
    usual = gc.get_threshold()
    gc.freeze()
    if usual[0] in PYTHONS_OWN:
        gc.set_threshold(COLLECT, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)
        gc.unfreeze()


def _serve(settings: Settings, prepare: Callable[[Settings], None]) -> tuple[Server, Settings]:
    """The embedded server, ready for use, and the settings that lead to it."""
    from shiftwork.embedded import start  # noqa: PLC0415  -- and with it what starts servers

    server = start()
    try:
        settings = dataclasses.replace(settings, dsn=server.url)
        prepare(settings)
    except BaseException:
        server.close()
        raise
    return server, settings
