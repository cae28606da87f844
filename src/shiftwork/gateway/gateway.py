"""The gateway: workers that have no way to the database take jobs over HTTP, under the same leases and fences as all others.

It remembers nothing. A worker's row and its lease are in the database, as everybody's; what its requests have to say beside that
stands in their tokens. So any number of gateways can stand before one database, and each of them may be started anew at any time.

When a part fails. The answer of a dequeue never arrives: with the next one its worker says what it holds, and what else is its own
in the database is given back; its heartbeats do the same, up to the last claim that it had an answer to. A worker falls silent: its
lease ends, and its jobs go to others. It comes back after that: its tokens open nothing, and it is told so. The answer to an
ending never arrives: the same ending, said again, has the same answer. The database is away: 503, and nothing is kept here.
A job whose payload cannot be given out ends as failed, and the next one is offered.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import time
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from shiftwork import events, operations
from shiftwork.codec import Signature, encode_result
from shiftwork.cursor import Cursor
from shiftwork.database import Plan
from shiftwork.errors import (
    ConfigurationError,
    DatabaseError,
    FenceLost,
    InvalidArgument,
    NotInstalled,
    PayloadTooLarge,
    Poison,
    RetryLater,
    ShiftworkError,
    UnfitArguments,
    Verdict,
)
from shiftwork.events import Subscriber
from shiftwork.gateway import messages
from shiftwork.gateway.messages import Refusal, Said, bearer, read, told
from shiftwork.gateway.tokens import OfJob, OfWorker, Seal, check_secret
from shiftwork.job import Job, State, Taken, check_name
from shiftwork.logs import Telling
from shiftwork.operations import Pulse
from shiftwork.outcome import Outcome, Raised, Returned, decide, in_a_line
from shiftwork.printable import QUEUE_BYTES
from shiftwork.program import Program
from shiftwork.retry import Retry
from shiftwork.stores.table import Table
from shiftwork.task import Task
from shiftwork.worker.lanes import served
from shiftwork.worker.line import will_pass

T = TypeVar("T", OfWorker, OfJob)
A = TypeVar("A")
B = TypeVar("B", bound=Said)
Transform = Callable[[Job], Any]
"""What a remote worker gets as the payload of a job; async or plain."""

ROOM = 1 << 16
"""Bytes that a body may have beside what it carries."""

LOOK_EVERY = 1.0
"""Seconds between two looks for somebody who waits."""

ROUNDS = 100
"""Claims in one look at most: past what is not for this worker, or cannot be given to anybody."""

BUSY = (0.02, 0.1, 0.5)
"""Seconds after which it is tried again to write about a row that somebody has locked."""

AGAIN = "2"
"""Seconds after which a remote worker may try again, while the database is away."""

REFUSED = "OUTCOME_REFUSED"
NOT_UNDERSTOOD = ("427", "42P", "428")
"""SQLSTATEs of names that are not there: a table has changed meanwhile, and is looked at again."""

LOST = {
    "taken": "it was given back or taken away, as happens when its worker falls silent",
    "ended": "it has ended",
}

log = logging.getLogger("shiftwork.gateway")


class RemoteFailure(Exception):  # noqa: N818
    """A remote worker says that an attempt has failed."""


class Gateway:
    """An ASGI application through which remote workers take the jobs of an app, or of a table.

    application = shiftwork.gateway.Gateway(app)  # served by uvicorn, or by: shiftwork gateway app:app

    `token` is the secret with which they register; else it is SHIFTWORK_GATEWAY_TOKEN. `transform` is called with each job, and what it
    returns is given out as its payload.
    """

    def __init__(
        self, program: Program, *, token: str | None = None, transform: Transform | None = None
    ) -> None:
        settings = program.chosen({})
        self._program = program
        self._store = program.store(settings)
        self._tasks: Mapping[str, Task[Any, Any]] = {
            name: task for name, task in program.tasks.items() if not task.transaction
        }
        self._queues = tuple(served(settings, self._tasks))
        self._timeout = settings.timeout
        self._lease = settings.lease.total_seconds()
        self._retry = Retry()
        self._is_table = isinstance(self._store, Table)
        if isinstance(self._store, Table):
            self._store.host = "gateway"  # the same at all of them: each has to find what another gave out
            self._retry = self._store.layout.retry
        if not (self._tasks or (self._is_table and not program.tasks)):
            raise ConfigurationError(
                "there is nothing that could be done without the database: no task, or all transactional"
            )
        self._transform = transform
        kind = "table" if self._is_table else "schema"  # which may have the same name
        self._seal = Seal(check_secret(token), f"{kind} {self._store.channels[0]}")
        self._most = settings.max_payload + ROOM
        self._tell: list[Subscriber] = [Telling(log), *program.subscribers]
        self._met = self._away = False
        self._reap_at = 0.0
        self.closing: Callable[[], bool] = lambda: False
        """Whether nobody is to wait any longer."""

        post = {
            "/workers": self._register,
            "/workers/{id:int}/heartbeat": self._heartbeat,
            "/workers/{id:int}/dequeue": self._dequeue,
            "/jobs/{id:int}/logs": self._add_log,
            "/jobs/{id:int}/progress": self._progress,
            "/jobs/{id:int}/complete": self._complete,
            "/jobs/{id:int}/error": self._error,
            "/jobs/{id:int}/fail": self._fail,
            "/jobs/{id:int}/release": self._release,
        }
        self._application = Starlette(
            routes=[
                *(Route(path, endpoint, methods=["POST"]) for path, endpoint in post.items()),
                Route("/workers/{id:int}", self._leave, methods=["DELETE"]),
                Route("/jobs/{id:int}/logs/{index:int}", self._change_log, methods=["PUT"]),
            ],
            exception_handlers={
                Refusal: told,
                HTTPException: told,
                ClientDisconnect: told,
                ShiftworkError: self._troubled,
            },
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._application(scope, receive, send)

    # Workers.

    async def _register(self, request: Request) -> Response:
        if not self._seal.is_secret(bearer(request)):
            raise _unauthorized("the secret of this gateway")
        asked = await read(request, messages.Registration, self._most)
        queues, tasks = self._served(asked.queues), self._known(asked.tasks)
        lease = self._lease if asked.lease is None or self._is_table else asked.lease
        said = {"name": asked.name, "host": asked.host, "queues": queues, "lease": lease}
        details = {"remote": True, "lease": lease, "tasks": sorted(tasks)}
        worker = await self._ask(operations.register(self._store, **said, details=details))
        log.info(
            "worker %d (%s@%s) works over HTTP; it serves %s",
            worker,
            asked.name,
            asked.host,
            ", ".join(queues),
        )
        token = self._seal.sign(OfWorker(worker, lease, tuple(asked.queues), tuple(asked.tasks)))
        return JSONResponse({"worker": worker, "token": token, "lease": lease, "heartbeat": lease / 3}, 201)

    async def _heartbeat(self, request: Request) -> Response:
        worker, asked = await self._opened(request, OfWorker, messages.Beat)
        held = self._held(worker, asked.jobs)
        answered = max((job.claim for job in held), default=0) if asked.claim is None else asked.claim
        pulse = await self._beat(worker, held, answered=answered)
        cancel = [{"id": job, "reason": reason} for job, reason in pulse.cancel.items()]
        return JSONResponse({"lost": pulse.lost, "cancel": cancel})

    async def _leave(self, request: Request) -> Response:
        worker, _ = await self._opened(request, OfWorker, Said)
        await self._beat(worker, (), reconcile=True)
        await self._ask(operations.leave(self._store, worker.id))
        log.info("worker %d has left", worker.id)
        return Response(status_code=204)

    async def _dequeue(self, request: Request) -> Response:
        worker, asked = await self._opened(request, OfWorker, messages.Wish)
        queues, tasks = self._served(asked.queues or worker.queues), self._known(asked.tasks or worker.tasks)
        await self._beat(worker, self._held(worker, asked.jobs), reconcile=True)
        until, cursor = time.monotonic() + min(asked.wait, worker.lease / 3), Cursor()
        while True:
            offered = await self._look(worker, queues, tasks, asked.most, cursor)
            if await request.is_disconnected():
                await self._ask(operations.release(self._store, worker.id, [job.held for job, _ in offered]))
                return Response(status_code=204)
            left = until - time.monotonic()
            if offered or left <= 0 or self.closing():
                break
            await asyncio.sleep(min(left, LOOK_EVERY))
        if not offered:
            return Response(status_code=204)
        answer = {"claim": offered[0][0].claim, "jobs": [said for _, said in offered]}
        return Response(msgspec.json.encode(answer), media_type="application/json")

    async def _beat(
        self, worker: OfWorker, held: Collection[OfJob], *, answered: int = 0, reconcile: bool = False
    ) -> Pulse:
        """Renew a lease, and give back what its worker does not hold; if somebody else fell silent, his jobs go on as well."""
        ids, lease = [job.held for job in held], worker.lease
        pulse = await self._ask(
            operations.heartbeat(
                self._store, worker.id, ids, lease=lease, answered=answered, reconcile=reconcile
            )
        )
        if not pulse.alive:
            raise _gone(worker)
        if pulse.strays:
            self._publish(events.StraysReleased(tuple(pulse.strays)))
        if pulse.reap and time.monotonic() >= self._reap_at:
            await self._reap()
        return pulse

    async def _reap(self) -> None:
        """Take jobs back from workers that fell silent; if there are none to be had, that may be so for a while."""
        try:
            if taken := await self._ask(operations.reap(self._store)):
                self._publish(events.Reaped(taken))
                return
        except DatabaseError as error:
            self._publish(events.ReapFailed(str(error)))
        self._reap_at = time.monotonic() + LOOK_EVERY

    async def _look(
        self, worker: OfWorker, queues: Collection[str], tasks: Collection[str], most: int, cursor: Cursor
    ) -> list[tuple[OfJob, Mapping[str, Any]]]:
        """Claim jobs that can be given out; those that cannot have failed."""
        offered = []
        for _ in range(ROUNDS):
            wish = dict.fromkeys(queues)
            claimed = await self._ask(
                operations.claim(self._store, worker.id, wish, most, cursor=cursor, tasks=tasks)
            )
            if not claimed.number:
                raise _gone(worker)
            for taken in claimed.taken:
                held, about = (taken[0], taken[5], worker.id, claimed.number), (taken[1], taken[2])
                job = OfJob(*held, *about, taken[6], taken[8], time.time())
                try:
                    offered.append((job, await self._offer(job, taken, claimed.at)))
                except Exception as error:  # noqa: BLE001  -- whatever it is, it stops none of the others
                    await self._spoil(job, error)
            if offered or not (claimed.taken or claimed.more):
                break
        return offered

    async def _offer(self, job: OfJob, taken: Taken, at: int) -> Mapping[str, Any]:
        """What a remote worker is told of a job; an error if its payload cannot be given out."""
        seen, task = Job.from_claim(taken, job.worker, at), self._tasks.get(job.task)
        try:
            if task is not None:
                task.signature.decode_json(taken[4] or "null")
            else:
                Signature(job.task, _anything).decode_json(taken[4] or "null")
            payload = (taken[4] or "{}").encode()
            if self._transform is not None:
                async with asyncio.timeout(self._lease):  # else it would be tried for ever
                    payload = encode_result(await _called(self._transform, seen))
        except Verdict:
            raise
        except InvalidArgument as error:
            raise UnfitArguments(str(error)) from None
        except Exception as error:
            failed = in_a_line(error)
            raise UnfitArguments(f"its payload cannot be transformed: {failed}") from error
        timeout = (None if task is None else task.timeout) or self._timeout
        return {
            "id": job.id,
            "attempt": job.attempt,
            "task": job.task,
            "queue": job.queue,
            "payload": msgspec.Raw(payload),
            "failures": job.failures,
            "max_attempts": job.max_attempts,
            "timeout": None if timeout is None else timeout.total_seconds(),
            "tags": seen.tags,
            "created_at": seen.created_at,
            "token": self._seal.sign(job),
        }

    async def _spoil(self, job: OfJob, error: Exception) -> None:
        """A job that cannot be given to anybody has ended; one whose row is locked is given back by the next dequeue."""
        try:
            await self._end(job, self._decided(job, Raised(error)))
        except Refusal as refusal:
            log.warning("job %d cannot be given out, and not be ended either: %s", job.id, refusal)

    # Jobs.

    async def _add_log(self, request: Request) -> Response:
        job, said = await self._opened(request, OfJob, messages.Line)
        try:
            plan = operations.add_log(self._store, job.worker, job.held, said.entry)
            return JSONResponse({"index": await self._fenced(job, plan)}, 201)
        except PayloadTooLarge as error:
            raise Refusal(413, str(error)) from None

    async def _change_log(self, request: Request) -> Response:
        job, said = await self._opened(request, OfJob, messages.Line)
        place, last = int(request.path_params["index"]), 2**31 if self._is_table else 2**63
        plan = operations.change_log(self._store, job.worker, job.held, min(place, last - 1), said.entry)
        try:
            found = await self._ask(plan)
        except FenceLost:  # a table says that as well if it has no such line
            await self._fenced(job, operations.fence(self._store, *job.held))
            found = False
        if not found:
            raise Refusal(404, f"the log of job {job.id} has no line {place}")
        return Response(status_code=204)

    async def _progress(self, request: Request) -> Response:
        job, said = await self._opened(request, OfJob, messages.Progress)
        far = [(*job.held, said.fraction, said.message)]

        def plan() -> Plan[object]:
            yield from operations.fence(self._store, *job.held)
            return (yield from operations.report(self._store, job.worker, progress=far))

        await self._fenced(job, plan(), atomic=True)
        return Response(status_code=204)

    async def _complete(self, request: Request) -> Response:
        job, said = await self._opened(request, OfJob, messages.Result)
        return await self._end(job, self._decided(job, Returned(said.result)))

    async def _error(self, request: Request) -> Response:
        job, said = await self._opened(request, OfJob, messages.PassingFailure)
        error = said.as_error(RemoteFailure)
        if said.delay is not None:
            error = said.as_error(RetryLater, timedelta(seconds=said.delay))
        return await self._end(job, said.told(self._decided(job, Raised(error))))

    async def _fail(self, request: Request) -> Response:
        job, said = await self._opened(request, OfJob, messages.Failure)
        return await self._end(job, said.told(self._decided(job, Raised(said.as_error(Poison)))))

    async def _release(self, request: Request) -> Response:
        job, _ = await self._opened(request, OfJob, Said)
        for pause in BUSY:
            answers = await self._ask(operations.release(self._store, job.worker, [job.held]))
            match answers.get(job.id, "lost"):
                case "busy":
                    await asyncio.sleep(pause)
                case "lost":
                    raise await self._lost(job)
                case answer:
                    self._publish(events.JobReleased(*job.about, answer))
                    return JSONResponse({"state": "ready" if answer == "released" else answer})
        raise _busy(job)

    def _decided(self, job: OfJob, ending: Returned | Raised) -> Outcome:
        """What becomes of a job, as its task has it; errors from afar are known by their codes and the names of their classes."""
        task = self._tasks.get(job.task)
        retry = Retry.from_json(((None if task is None else task.retry) or self._retry).as_json())
        if task is None:
            return decide(job, ending, retry)
        return decide(job, ending, retry, coder=task.coder, encode=task.signature.encode_result)

    async def _end(self, job: OfJob, outcome: Outcome) -> Response:
        """Write how an attempt ended; what cannot be written as it is has failed."""
        for pause in BUSY:
            try:
                written = [operations.encode_outcome(outcome)]
                settled = await self._ask(operations.settle_encoded(self._store, job.worker, written))
                answer, problem = settled.answers.get(job.id, "lost"), settled.problems.get(job.id, "")
            except DatabaseError as error:
                if will_pass(error) or (outcome.error or {}).get("code") == REFUSED:
                    raise
                settled, answer, problem = None, "refused", str(error)
            if answer == "lost":
                raise await self._lost(job)
            if answer == "refused":
                why = f"its outcome ({outcome.state}) could not be written: {problem}"
                outcome = Outcome(job, State.FAILED, error={"code": REFUSED, "message": why}, counts=True)
            elif answer == "busy" or settled is None:
                await asyncio.sleep(pause)
            else:
                state = next(iter(settled.states), outcome.state)  # not always where the outcome says
                again = outcome.delay if state is State.SCHEDULED else None
                delay = None if again is None else again.total_seconds()
                if answer == "settled":
                    took = max(time.time() - job.since, 0)
                    self._publish(events.JobEnded(*job.about, state, took, outcome.error, delay))
                return JSONResponse({"state": state, "delay": delay})
        raise _busy(job)

    # What opens what.

    async def _opened(self, request: Request, what: type[T], said: type[B]) -> tuple[T, B]:
        """The worker or the job that a request is about, if its token opens that; and its body."""
        found = self._seal.read(bearer(request), what)
        kind = "worker" if what is OfWorker else "job"
        if found is None:
            raise _unauthorized(f"the token that came with the {kind}")
        if found.id != request.path_params["id"]:
            raise Refusal(404, f"this token opens {kind} {found.id}, and no other")
        return found, await read(request, said, self._most)

    def _held(self, worker: OfWorker, tokens: Collection[str]) -> list[OfJob]:
        held = [job for token in tokens if (job := self._seal.read(token, OfJob)) and job.worker == worker.id]
        if len(held) < len(tokens):
            raise Refusal(422, f"jobs: not all of them are tokens of jobs that worker {worker.id} was given")
        return held

    def _served(self, named: Collection[str]) -> list[str]:
        """These queues, or all."""
        if self._is_table and set(named) - set(self._queues):
            raise Refusal(422, f"queues: there is only {self._queues[0]!r}")
        try:
            for queue in named:
                self._program.check_queue(check_name("queues", queue, QUEUE_BYTES))
        except InvalidArgument as error:
            raise Refusal(422, f"queues: {error}") from None
        return list(named or self._queues)

    def _known(self, named: Collection[str]) -> list[str]:
        """These tasks, or all that can be worked from afar."""
        if strange := [name for name in named if name not in self._tasks]:
            there = ", ".join(self._tasks) or "none"
            raise Refusal(
                422, f"tasks: there is no {strange[0]!r} that can be worked from afar; there are: {there}"
            )
        return list(named or self._tasks)

    # The database.

    async def _ask(self, plan: Plan[A], *, atomic: bool = False) -> A:
        client = await self._program.aclient()
        try:
            if not self._met:
                await client.aperform(operations.require(self._store))
                entries = [task.entry for task in self._tasks.values()]
                await client.aperform(operations.declare_tasks(self._store, entries))
                await client.aperform(operations.declare_limits(self._store, self._program.limits()))
                self._met = True
            answer = await client.aperform(plan, atomic=atomic)
        except DatabaseError:
            self._met = False  # it may be another one when it is back
            raise
        finally:
            plan.close()
        if self._away:
            self._away = False
            self._publish(events.DatabaseBack("the gateway"))
        return answer

    async def _fenced(self, job: OfJob, plan: Plan[A], *, atomic: bool = False) -> A:
        """Something about a job that is held under this token, or a refusal."""
        try:
            return await self._ask(plan, atomic=atomic)
        except FenceLost:
            raise await self._lost(job) from None

    async def _lost(self, job: OfJob) -> Refusal:
        """Why a token opens nothing any more."""
        pulse = await self._ask(operations.heartbeat(self._store, 0, [job.held]))  # nobody's: it only tells
        why = pulse.why.get(job.id, "missing")
        if why == "missing":
            return Refusal(404, f"there is no job {job.id}")
        self._publish(events.JobLost(*job.about, LOST[why]))
        return Refusal(409, f"job {job.id} is not held under this token any more: {LOST[why]}")

    def _troubled(self, request: Request, error: Exception) -> Response:
        """The database is away, or will not have it; what exactly is for the log."""
        altered = (getattr(error, "sqlstate", None) or "").startswith(NOT_UNDERSTOOD)
        passes = altered or (isinstance(error, ShiftworkError) and will_pass(error))
        if not (passes or isinstance(error, NotInstalled)):
            log.error("%s %s: %s", request.method, request.url.path, error)
            if isinstance(error, ConfigurationError):
                return told(request, Refusal(501, str(error)))
            return told(request, Refusal(500, "this cannot be done; the log of the gateway says why"))
        if not self._away:
            self._away = True
            self._publish(events.DatabaseAway("the gateway", str(error)))
        return told(
            request, Refusal(503, "the database is away for the moment; try again", Retry_After=AGAIN)
        )

    def _publish(self, event: events.Event) -> None:
        for subscriber in self._tell:
            with contextlib.suppress(Exception):  # whoever looks on changes nothing
                subscriber(event)


def _anything(**_: object) -> None:
    """What a row is given to if nobody here handles it."""


async def _called(transform: Transform, job: Job) -> object:
    if inspect.iscoroutinefunction(transform):
        return await transform(job)
    return await asyncio.to_thread(transform, job)


def _unauthorized(what: str) -> Refusal:
    return Refusal(401, f"this needs {what}: Authorization: Bearer …", WWW_Authenticate="Bearer")


def _gone(worker: OfWorker) -> Refusal:
    return Refusal(410, f"worker {worker.id} has lost its lease, and with it all that it held; register anew")


def _busy(job: OfJob) -> Refusal:
    return Refusal(503, f"somebody has locked job {job.id}; try again", Retry_After="1")
