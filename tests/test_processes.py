"""Tasks with a process of their own: what it does to itself costs one attempt, and nobody else anything."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import os
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shiftwork import App, ConfigurationError
from shiftwork.events import (
    JobBegan,
    JobEnded,
    JobReleased,
    JobStopped,
    LeaseLapsing,
    ProcessEnded,
    ProcessFailed,
    ProcessStarted,
)
from shiftwork.worker.pipe import Broken, Completed, Halt, Unframing, framed
from shiftwork.worker.processes import Ending, at_once
from tests import plain_process_app as plain
from tests import process_app as tasks
from tests.harness import Protocol
from tests.workshop import Workshop


@pytest.fixture
def app(dsn: str) -> Iterator[App]:
    """The app that processes import, on the database of the test."""
    yield from on_database(tasks.app, dsn)


@pytest.fixture
def plain_app(dsn: str) -> Iterator[App]:
    """The same for the app without middleware."""
    yield from on_database(plain.app, dsn)


def on_database(app: App, dsn: str) -> Iterator[App]:
    settings = app.settings
    app.settings = dataclasses.replace(settings, dsn=dsn)
    yield app
    app.close()
    app.settings = settings


def written(place: Path) -> Callable[[], Awaitable[str]]:
    """For `shop.found`: what a handler has written there."""

    async def ask() -> str:
        return place.read_text() if place.exists() else ""

    return ask


async def ended(pid: int) -> bool:
    """For `shop.found`: whether a process is over, though nobody may have buried it."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def is_gone(pid: int) -> bool:
    """Wait until a process has ended, a while at most."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], 30)[0])
    finally:
        os.close(handle)


# Running.


async def test_functions_of_both_kinds_run_in_a_process_that_is_used_again(app: App) -> None:
    # spec: D-24, QU-17
    async with Workshop(app, process_slots=1) as shop:
        first, second = await tasks.pid.aenqueue(), await tasks.pid_of_async.aenqueue()
        seen, large = await tasks.layer_seen.aenqueue(), await tasks.much.aenqueue("ö" * 100_000, 20)
        await shop.ended(first, second, seen, large, state="completed")
        [started] = shop.seen(ProcessStarted)
        assert started.pid != os.getpid()
        assert await first.aresult(5) == await second.aresult(5) == started.pid
        assert await seen.aresult(5) == "around layer_seen"  # the middleware is where the handler is
        assert await large.aresult(5) == "ö" * 2_000_000
    assert is_gone(started.pid)


async def test_what_a_process_is_told_and_says_goes_through_its_context(app: App) -> None:
    # spec: D-24
    async with Workshop(app, process_slots=1) as shop:
        job = await tasks.speak.using(tags=["loud"]).aenqueue("Ada")
        await shop.ended(job, state="completed")
        said = await job.aresult(5)
        assert said == {"job": job.id, "attempt": 1, "tags": ["loud"], "cancelled": None, "time": 300.0}
        progress = await job.aprogress()
        assert progress is not None
        assert (progress.fraction, progress.message) == (0.5, "half")
        assert [(line.level, line.message) for line in await job.alogs()] == [("info", "read 3 lines")]
        [sent] = await app.ajobs(task="greet")
        await shop.ended(sent)
        [later] = await app.ajobs(task="pid")
        assert later.state == "scheduled"


async def test_a_process_can_fence_and_finish_its_job_on_a_connection_of_its_own(
    app: App, tmp_path: Path
) -> None:
    # spec: D-24
    async with Workshop(app, process_slots=1) as shop:
        moved, done = await tasks.move_boxes.aenqueue(3), await tasks.finish_it.aenqueue(commit=True)
        undone = await tasks.finish_it.aenqueue(commit=False)
        refused = await tasks.finish_in_a_session_of_the_worker.aenqueue()
        await shop.ended(moved, done, undone, refused)
        assert await shop.value("select boxes from moves") == 3
        assert await done.aresult(5) == 5
        assert (await shop.job(undone)).error["code"] == "FINISH_UNDONE"  # type: ignore[index]
        assert "context.finish(connection)" in (await shop.job(refused)).error["message"]  # type: ignore[index]

        there, go = tmp_path / "there", tmp_path / "go"
        lingering = await tasks.finish_and_linger.aenqueue(str(there), str(go))
        await shop.found(written(there))
        assert await shop.worker._leases.reconcile()  # a heartbeat that finds it gone
        await asyncio.sleep(0)
        go.touch()
        await shop.event(JobEnded, job=lingering, state="completed")
        assert not shop.seen(JobStopped)

        crashed = await tasks.finish_and_crash.aenqueue()
        await shop.event(ProcessEnded, job=crashed)
        await shop.event(JobEnded, job=crashed, state="completed")  # it had ended before its process did
        assert (await shop.job(crashed)).resets == 0


async def test_how_a_handler_ends_is_decided_where_its_types_are(app: App) -> None:
    # spec: SH-18, D-24
    ends = [
        (tasks.fail_by_list.job("class"), "scheduled", "KeyError", 1),
        (tasks.fail_by_list.job("code"), "scheduled", "REFUSED", 1),
        (tasks.fail_by_list.job("other"), "failed", "ValueError", 1),
        (tasks.fail_by_function.job("mild"), "scheduled", "BAD_VALUE", 1),
        (tasks.fail_by_function.job("grave"), "failed", "BAD_VALUE", 1),
        (tasks.decide_itself.job("poison"), "failed", "POISON", 1),
        (tasks.decide_itself.job("snooze"), "scheduled", None, 0),
        (tasks.decide_itself.job("later"), "scheduled", "RETRY_LATER", 1),
        (tasks.decide_itself.job("cancel"), "cancelled", "TASK_CANCELLED", 0),
        (tasks.say_a_number.job(), "failed", "RETURN_TYPE_MISMATCH", 1),
        (tasks.exit_politely.job(), "failed", "SystemExit", 1),
    ]
    jobs = await app.aenqueue_many([one[0] for one in ends])
    async with Workshop(app, process_slots=1) as shop:
        await shop.ended(*jobs)
        for job, (_, *ending) in zip(jobs, ends, strict=True):
            found = await shop.job(job)
            assert [found.state, (found.error or {}).get("code"), found.failures] == ending
        failed = await shop.job(jobs[2])
        assert "fail_by_list" in failed.error["traceback"]  # type: ignore[index]
        assert len(shop.seen(ProcessStarted)) == 1


async def test_arguments_that_do_not_fit_are_found_in_the_process(app: App, protocol: Protocol) -> None:
    job = protocol.enqueue("much", {"text": 1})
    async with Workshop(app, process_slots=1) as shop:
        await shop.ended(job)
    assert protocol.job(job)["error"]["code"] == "ARGUMENTS_INVALID"


async def test_after_a_deadlock_a_handler_is_called_again_on_the_spot(app: App, tmp_path: Path) -> None:
    async with Workshop(app, process_slots=1) as shop:
        job = await tasks.collide.aenqueue(str(tmp_path / "met"))
        await shop.ended(job, state="completed")
        assert await job.aresult(5) == 1
        assert await app.ajobs(task="greet") == []


async def test_a_copy_that_a_handler_forks_and_forgets_says_nothing(app: App) -> None:
    async with Workshop(app, process_slots=1) as shop:
        forked, other = await tasks.fork_and_return.aenqueue(), await tasks.pid.aenqueue()
        await shop.ended(forked, other, state="completed")
        [started] = shop.seen(ProcessStarted)
        assert await forked.aresult(5) == await other.aresult(5) == started.pid


async def test_a_copy_that_lingers_hears_nothing_that_is_meant_for_the_process(
    app: App, tmp_path: Path
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    async with Workshop(app, process_slots=1) as shop:
        forked = await tasks.fork_and_linger.aenqueue(str(fifo))
        await shop.ended(forked, state="completed")
        [started] = shop.seen(ProcessStarted)
        copy = await forked.aresult(5)
        os.kill(started.pid, signal.SIGSTOP)
        other = await tasks.pid.aenqueue()
        await shop.event(JobBegan, job=other)
        fifo.write_text("")  # the copy comes back from the handler while the next job is in the pipe
        await shop.found(lambda: ended(copy))
        os.kill(started.pid, signal.SIGCONT)
        await shop.ended(other, state="completed")


async def test_only_as_much_is_claimed_as_there_are_processes(app: App, tmp_path: Path) -> None:
    # spec: D-24
    async with Workshop(app, concurrency=10, process_slots=1) as shop:
        stays = [await tasks.stay_unless_told.aenqueue(str(tmp_path / str(n))) for n in range(3)]
        await shop.event(JobBegan, job=stays[0])
        greeting = await tasks.greet.aenqueue("Ada")
        await shop.ended(greeting, state="completed")
        await shop.asleep()
        waiting = await shop.rows("select id from shiftwork.jobs where state = 'ready' order by id")
        assert [row["id"] for row in waiting] == [job.id for job in stays[1:]]
        for job in stays:
            await job.acancel()
        await shop.ended(*stays[:1], state="cancelled")


# Crashing.


async def test_a_crash_costs_its_job_one_attempt_and_nobody_else_anything(app: App, tmp_path: Path) -> None:
    # spec: SH-18, SH-22, D-24
    # fault: F2, F30
    async with Workshop(app, process_slots=2) as shop:
        neighbour = await tasks.stay_unless_told.aenqueue(str(tmp_path / "neighbour"))
        beside = int(await shop.found(written(tmp_path / "neighbour")))
        poison, exits, killed = (
            await tasks.segfault.aenqueue(),
            await tasks.leave.aenqueue(3),
            await tasks.kill_itself.aenqueue(),
        )
        await shop.ended(poison, exits, killed, state="failed")

        found = await shop.job(poison)
        assert (found.attempt, found.failures, found.resets) == (3, 0, 3)
        assert found.error == {
            "code": "WORKER_CRASHED",
            "message": "its process was killed by SIGSEGV; that was crash 3 of 3 that it may cause",
        }
        lost = await shop.rows(
            "select outcome, will_retry, code, error ->> 'message' as why from shiftwork.attempts"
            " where job = %s order by attempt",
            poison.id,
        )
        assert lost == [
            {"outcome": "lost", "will_retry": again, "code": "WORKER_CRASHED", "why": lost[0]["why"]}
            for again in (True, True, False)
        ]
        assert lost[0]["why"] == "its process was killed by SIGSEGV"
        assert len(shop.seen(ProcessEnded, job=poison)) == 3
        for job, why in ((exits, "exit status 3"), (killed, "SIGKILL")):
            found = await shop.job(job)
            assert (found.attempt, found.resets) == (1, 1)
            assert why in (found.error or {})["message"]
        os.kill(beside, 0)
        assert shop.seen(JobBegan, job=neighbour) == [
            JobBegan(neighbour.id, "stay_unless_told", "default", 1)
        ]
        await neighbour.acancel()
        await shop.ended(neighbour, state="cancelled")
        assert shop.worker.jobs == 1 + 3 + 1 + 1


async def test_a_process_that_hangs_up_on_its_worker_is_killed_and_that_is_why(app: App) -> None:
    async with Workshop(app, process_slots=1) as shop:
        job = await tasks.hang_up.aenqueue()
        await shop.ended(job, state="failed")
        why = "its process hung up on its worker"
        assert (await shop.job(job)).error == {
            "code": "WORKER_CRASHED",
            "message": f"{why}; that was crash 1 of 1 that it may cause",
        }
        ended = await shop.event(ProcessEnded, job=job)
        assert ended.why == why
        [lost] = await shop.rows(
            "select error ->> 'message' as why from shiftwork.attempts where job = %s", job.id
        )
        assert lost["why"].startswith(why)


async def test_a_process_that_is_killed_from_outside_gives_its_job_to_the_next(
    app: App, tmp_path: Path
) -> None:
    # spec: D-24, HO-21
    # fault: F2
    async with Workshop(app, process_slots=1) as shop:
        job = await tasks.wait_once.aenqueue(str(tmp_path / "there"))
        os.kill(int(await shop.found(written(tmp_path / "there"))), signal.SIGKILL)
        await shop.ended(job, state="completed")
        assert await job.aresult(5) == 2
        found = await shop.job(job)
        assert (found.failures, found.resets) == (0, 1)
        assert not shop.seen(LeaseLapsing)

        idle = await shop.event(ProcessStarted, times=2)
        os.kill(idle.pid, signal.SIGKILL)  # while it has nothing to do: that costs nothing
        await shop.event(ProcessEnded, pid=idle.pid)
        again = await tasks.pid.aenqueue()
        await shop.ended(again, state="completed")
        assert (await shop.job(again)).resets == 0


async def test_a_process_that_cannot_be_started_costs_its_job_nothing(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    # spec: HO-20
    async with Workshop(app, process_slots=1) as shop:
        first = await shop.event(ProcessStarted)
        monkeypatch.setattr("shiftwork.worker.attempt.NOT_NOW", 0.01)
        os.kill(first.pid, signal.SIGKILL)
        await shop.event(ProcessEnded, pid=first.pid)
        with monkeypatch.context() as broken:
            broken.setattr(sys, "executable", "/nowhere/python")
            job = await tasks.pid.aenqueue()
            await shop.event(ProcessFailed)
            await shop.event(JobReleased, job=job)
        with monkeypatch.context() as broken:
            broken.setattr(os, "pipe", no_more_files)
            so_far = len(shop.seen(ProcessFailed))
            await shop.event(ProcessFailed, times=so_far + 2)
        assert "no more files" in shop.seen(ProcessFailed)[-1].error
        await shop.ended(job, state="completed")
        found = await shop.job(job)
        assert (found.failures, found.resets) == (0, 0)


def no_more_files() -> Any:
    raise OSError("no more files")


async def test_a_process_that_is_killed_while_the_worker_starts_is_started_again(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    # spec: HO-20
    start, tried = subprocess.Popen, []

    def start_and_kill_the_first(*args: Any, **kwargs: Any) -> Any:
        tried.append(start(*args, **kwargs))
        if len(tried) == 1:
            tried[0].kill()
        return tried[-1]

    monkeypatch.setattr(subprocess, "Popen", start_and_kill_the_first)
    async with Workshop(app, process_slots=1) as shop:
        failed = await shop.event(ProcessFailed)
        assert "ended while it started: its process was killed by SIGKILL" in failed.error
        job = await tasks.pid.aenqueue()
        await shop.ended(job, state="completed")


# Being stopped.


async def test_one_that_heeds_nothing_is_killed_when_its_time_is_over(app: App, tmp_path: Path) -> None:
    # spec: SH-23, D-24
    # fault: F31
    async with Workshop(app, process_slots=1) as shop:
        late = await tasks.stay_too_long.aenqueue()
        await shop.ended(late, state="failed")
        found = await shop.job(late)
        assert (found.failures, found.resets, (found.error or {})["code"]) == (1, 0, "TASK_TIMEOUT")

        stubborn = await tasks.stay.aenqueue(str(tmp_path / "stubborn"))
        await shop.found(written(tmp_path / "stubborn"))
        await stubborn.acancel()
        await shop.ended(stubborn, state="cancelled")

        lost = await tasks.stay.aenqueue(str(tmp_path / "lost"))
        pid = int(await shop.found(written(tmp_path / "lost")))
        await app.acomplete(lost.id, "done by hand")
        await shop.event(JobStopped, job=lost, why="lost")
        assert is_gone(pid)
        after = await tasks.pid.aenqueue()
        await shop.ended(after, state="completed")
        assert (await shop.job(lost)).result == "done by hand"


async def test_one_that_heeds_it_ends_by_itself_and_its_process_goes_on(app: App, tmp_path: Path) -> None:
    # spec: SG-18, D-24
    async with Workshop(app, process_slots=1) as shop:
        for task in (tasks.stay_unless_told, tasks.wait_unless_told):
            job = await task.aenqueue(str(tmp_path / task.name))
            await shop.found(written(tmp_path / task.name))
            await job.acancel("not needed")
            await shop.ended(job, state="cancelled")
        [started] = shop.seen(ProcessStarted)
        assert (tmp_path / "wait_unless_told.why").read_text() == f"cancelled {started.pid}"
        after = await tasks.pid.aenqueue()
        await shop.ended(after)
        assert await after.aresult(5) == started.pid


async def test_a_worker_that_stops_leaves_nothing_behind(app: App, tmp_path: Path) -> None:
    # spec: D-24
    # fault: S20
    async with Workshop(app, process_slots=1, grace=timedelta(0)) as shop:
        job = await tasks.start_another.aenqueue(str(tmp_path / "there"))
        process, other = map(int, (await shop.found(written(tmp_path / "there"))).split())
        try:
            shop.worker.stop()
            assert await shop.stopped()
            found = await shop.job(job)
            assert (found.state, found.failures, found.resets) == ("ready", 0, 0)
            assert is_gone(process)
            assert is_gone(other)
        finally:
            with contextlib.suppress(ProcessLookupError):  # with a bug, it is not
                os.kill(other, signal.SIGKILL)


async def test_a_lapse_ends_processes_even_if_the_event_loop_is_blocked(
    app: App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # spec: D-24
    async with Workshop(app, process_slots=1) as shop:
        job = await tasks.stay.aenqueue(str(tmp_path / "there"))
        pid = int(await shop.found(written(tmp_path / "there")))
        leases = shop.worker._leases

        async def in_vain(sent: float) -> bool:
            return False

        monkeypatch.setattr(leases, "_beat", in_vain)
        leases._renewed -= 10_000  # as after a long suspend
        leases.nudge()
        assert is_gone(pid)  # nothing in this thread has been awaited since
        monkeypatch.undo()
        await job.acancel()


async def test_a_process_ends_with_its_worker_even_by_kill_9(app: App, dsn: str, tmp_path: Path) -> None:
    # spec: D-24
    # fault: F1
    command = [
        "-c",
        "from shiftwork.cli import main; main()",
        "worker",
        "tests.process_app:app",
        "--dsn",
        dsn,
    ]
    log = tmp_path / "log"
    with log.open("w") as lines:
        worker = subprocess.Popen([sys.executable, *command], stderr=lines)
    try:
        printed = await tasks.print_it.aenqueue("what was printed\n[there]")
        await printed.aresult(30)
        await tasks.stay.aenqueue(str(tmp_path / "there"))
        async with asyncio.timeout(30):
            while not (pid := await written(tmp_path / "there")()):
                await asyncio.sleep(0.01)
    finally:
        worker.kill()
        worker.wait()
    assert is_gone(int(pid))
    said = log.read_text()
    assert "what was printed\n[there]\n" in said
    assert f"job {printed.id} print_it (queue default, attempt 1) completed" in said


async def test_the_lease_is_kept_while_c_code_holds_the_interpreter(app: App) -> None:
    # spec: HO-21, D-24
    # fault: F5
    async with Workshop(app, process_slots=1, lease=timedelta(seconds=0.5)) as shop:
        job = await tasks.hold_the_interpreter.aenqueue(1.5)
        await shop.ended(job, state="completed")
        found = await shop.job(job)
        assert (found.attempt, found.resets) == (1, 0)
        assert not shop.seen(LeaseLapsing)


# The line.


@pytest.mark.parametrize("size", [1, 3, 4, 5, 7, 64, 10_000])
def test_messages_are_found_whole_however_the_pieces_fall(size: int) -> None:
    messages = [framed(Halt("cancelled", "x" * length)) for length in (0, 1, 300, 0, 5_000)]
    sent, pieces, found = b"".join(messages), Unframing(), []
    for start in range(0, len(sent), size):
        body = pieces.take(sent[start : start + size])
        while body is not None:
            found.append(bytes(body))
            body = pieces.take()
    assert found == [message[4:] for message in messages]
    assert not pieces.left


def test_a_message_longer_than_any_can_be_is_refused() -> None:
    pieces = Unframing()
    for piece in (b"\xff" * 5, framed(Halt("cancelled", ""))):  # nothing is read after it either
        with pytest.raises(Broken, match="a message of 4,294,967,295 bytes was announced"):
            pieces.take(piece)


async def test_who_waits_for_a_job_goes_on_in_the_call_that_tells_of_its_end() -> None:
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Ending] = loop.create_future()
    heard: list[Ending] = []
    told = loop.create_future()
    how = Completed(1, msgspec.Raw(b"null"))

    async def wait() -> None:
        heard.append(await answer)

    def tell() -> None:
        at_once(answer, how)
        told.set_result(list(heard))

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    loop.call_soon(tell)  # as the loop calls what reads the pipe: no task runs then
    assert await told == [how]
    await waiting


async def test_several_who_wait_for_a_job_go_on_when_it_is_their_turn() -> None:
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Ending] = loop.create_future()
    how = Completed(1, msgspec.Raw(b"null"))

    async def wait() -> Ending:
        return await answer

    waiting = [asyncio.create_task(wait()) for _ in range(2)]
    await asyncio.sleep(0)
    loop.call_soon(at_once, answer, how)
    assert await asyncio.gather(*waiting) == [how, how]


# Without middleware.


async def test_jobs_that_need_nothing_but_their_arguments_end_as_others_do(
    plain_app: App, tmp_path: Path
) -> None:
    async with Workshop(plain_app, process_slots=1) as shop:
        first, second = await plain.pid.aenqueue(), await plain.pid_of_async.aenqueue()
        large = await plain.much.aenqueue("ö" * 100_000, 20)
        marks = [await plain.leave_a_mark.aenqueue() for _ in range(2)]
        met = await plain.collide.aenqueue(str(tmp_path / "met"))
        await shop.ended(first, second, large, met, *marks, state="completed")
        [started] = shop.seen(ProcessStarted)
        assert await first.aresult(5) == await second.aresult(5) == started.pid
        assert await large.aresult(5) == "ö" * 2_000_000
        assert [await mark.aresult(5) for mark in marks] == [["nothing", mark.id] for mark in marks]
        assert await met.aresult(5) == "done"

        failed, mismatched = await plain.fail.aenqueue(), await plain.say_a_number.aenqueue()
        await shop.ended(failed, mismatched, state="failed")
        assert (await shop.job(failed)).error["code"] == "KeyError"  # type: ignore[index]
        assert (await shop.job(mismatched)).error["code"] == "RETURN_TYPE_MISMATCH"  # type: ignore[index]

        forked, other = await plain.fork_and_return.aenqueue(), await plain.pid.aenqueue()
        await shop.ended(forked, other, state="completed")
        assert await forked.aresult(5) == await other.aresult(5) == started.pid
        assert len(shop.seen(ProcessStarted)) == 1


async def test_jobs_without_middleware_are_told_to_end_and_killed_if_they_do_not_hear_it(
    plain_app: App, tmp_path: Path
) -> None:
    async with Workshop(plain_app, process_slots=1) as shop:
        told = await plain.stay_unless_told.aenqueue(str(tmp_path / "there"))
        await shop.found(written(tmp_path / "there"))
        await told.acancel()
        await shop.ended(told, state="cancelled")
        assert not shop.seen(ProcessEnded)
        deaf = await plain.stay_too_long.aenqueue()
        await shop.ended(deaf, state="failed")
        assert (await shop.job(deaf)).error["code"] == "TASK_TIMEOUT"  # type: ignore[index]


async def test_a_thread_that_a_handler_leaves_behind_does_not_hear_what_is_said_to_the_next_job(
    plain_app: App, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    os.mkfifo(go)
    async with Workshop(plain_app, process_slots=1) as shop:
        left = await plain.leave_a_thread.aenqueue(str(go))
        await shop.ended(left, state="completed")
        go.write_text("")  # from now on it asks its context again and again
        others = [await plain.pid.aenqueue() for _ in range(20)]
        await shop.ended(*others, state="completed")
        assert len(shop.seen(ProcessStarted)) == 1


# Being replaced.


async def test_a_process_is_replaced_after_so_many_jobs(app: App) -> None:
    # fault: F32
    async with Workshop(app, process_slots=1, process_jobs=2) as shop:
        jobs = [await tasks.pid.aenqueue() for _ in range(5)]
        await shop.ended(*jobs, state="completed")
        pids = [await job.aresult(5) for job in jobs]
        assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [2, 2, 1]
        ended = await shop.event(ProcessEnded, pid=pids[0])
        assert (ended.why, ended.job) == ("it has run 2 jobs", None)


async def test_a_process_that_takes_too_much_memory_is_killed_and_one_that_keeps_much_is_replaced(
    app: App, tmp_path: Path
) -> None:
    # spec: A-24
    # fault: F30, F32
    async with Workshop(app, process_slots=1, process_memory=256) as shop:
        jobs = [await tasks.leak.aenqueue(50) for _ in range(6)]
        await shop.ended(*jobs, state="completed")
        assert len({await job.aresult(5) for job in jobs}) > 1
        assert not [ended for ended in shop.seen(ProcessEnded) if ended.job is not None]

        hog = await tasks.hog.aenqueue(300, str(tmp_path / "there"))
        await shop.ended(hog, state="failed")
        error = (await shop.job(hog)).error or {}
        assert error["code"] == "WORKER_CRASHED"
        assert "MiB of memory, and may have 256; that was crash 1 of 1" in error["message"]


# What it has of the worker.


async def test_a_process_has_no_connection_of_the_worker_and_nothing_it_does_not_need(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    # spec: D-24
    # fault: F33, S20
    monkeypatch.setenv("SECRET_OF_THE_WORKER", "1")
    monkeypatch.setenv("AWS_REGION", "nowhere")
    async with Workshop(app, process_slots=1) as shop:
        open_to_all = await tasks.look_around.aenqueue()
        sending = await tasks.enqueue_there.aenqueue("Ada")
        await shop.ended(open_to_all, sending, state="completed")
        seen = await open_to_all.aresult(5)
        ours = {str(one.readlink()) for one in Path("/proc/self/fd").iterdir() if one.exists()}
        sockets = {one for one in seen["sockets"] if one.startswith("socket:")}
        assert sockets
        assert not sockets & ours - {str(Path("/proc/self/fd/2").readlink())}
        assert (seen["core"], seen["gains"], seen["leads"]) == ([0, 0], False, True)
        assert seen["first to go"] > 0
        assert "SECRET_OF_THE_WORKER" in seen["variables"]
        await shop.ended(await sending.aresult(5), state="completed")
    async with Workshop(app, process_slots=1, process_environment="AWS_*", process_core_dumps=True) as shop:
        closed, sending = await tasks.look_around.aenqueue(), await tasks.enqueue_there.aenqueue("Ada")
        await shop.ended(closed, sending)
        seen = await closed.aresult(5)
        assert "PATH" in seen["variables"]
        assert "AWS_REGION" in seen["variables"]
        assert not {"SECRET_OF_THE_WORKER", "DATABASE_URL", "SHIFTWORK_DSN"} & set(seen["variables"])
        assert seen["core"] == list(resource.getrlimit(resource.RLIMIT_CORE))
        assert "not told where the database is" in (await shop.job(sending)).error["message"]  # type: ignore[index]


# What cannot work.


@pytest.mark.parametrize(
    ("options", "kind", "complaint"),
    [
        ({"executor": "process", "transaction": True}, "plain", "cannot use; leave one of them out"),
        ({"executor": "loop"}, "plain", "would hold up the event loop"),
        ({"executor": "thread"}, "async", "runs in an event loop"),
        ({"executor": "fork"}, "plain", "it must be loop, thread or process, or none"),
    ],
)
def test_what_cannot_run_somewhere_is_refused_at_its_declaration(
    options: Any, kind: str, complaint: str
) -> None:
    def plain() -> None: ...
    async def waiting() -> None: ...

    with pytest.raises(ConfigurationError, match=complaint):
        App("postgresql://nowhere").task(**options)(plain if kind == "plain" else waiting)


async def test_an_app_that_no_process_can_import_is_refused_when_the_worker_starts(
    dsn: str, app: App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_here = App(dsn)
    made_here.task(executor="process")(tasks.leak.function)
    with pytest.raises(ConfigurationError, match="another process cannot import the app: it is no global"):
        await made_here.worker()

    monkeypatch.setitem(app._tasks, "late", app.tasks["pid"])
    late = await app.worker(process_slots=1)
    with pytest.raises(
        ConfigurationError, match=r"'late' is to run .* declare it while that module is imported"
    ):
        await late.run()


@pytest.mark.parametrize("guarded", [True, False])
def test_a_script_may_start_a_worker_itself_if_importing_it_does_not(
    dsn: str, tmp_path: Path, guarded: bool
) -> None:
    script = tmp_path / "shop.py"
    script.write_text(
        "import os\nimport sys\nimport shiftwork\napp = shiftwork.App()\n"
        "@app.task(executor='process')\ndef pid() -> int: return os.getpid()\n"
        f"if {'__name__' if guarded else repr('__main__')} == '__main__':\n"
        "    job = pid.enqueue()\n    app.run_worker(stop_when_idle=True, process_slots=1)\n"
        "    sys.exit(0 if job.result(5) != os.getpid() else 3)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "DATABASE_URL": dsn},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if guarded:
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode == 1
        assert 'if __name__ == "__main__": app.run_worker()' in done.stderr


async def test_what_goes_wrong_while_a_process_imports_the_app_is_told(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fragile_app.py").write_text(
        "import os\nimport shiftwork\nif 'FRAGILE' not in os.environ:\n    raise ValueError('it is not set')\n"
        "app = shiftwork.App()\n@app.task(executor='process')\ndef work() -> None: ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("FRAGILE", "1")
    monkeypatch.setenv("DATABASE_URL", dsn)
    fragile = importlib.import_module("fragile_app").app
    worker = await fragile.worker(process_environment="HOME")
    with pytest.raises(
        ConfigurationError, match=r"cannot import fragile_app:app: ValueError: it is not set \(.*:4\)"
    ):
        await worker.run()
    fragile.close()


# Crashing with a crowd.


async def test_a_stack_that_is_full_and_a_crowd_of_children_cost_one_job_each(
    app: App, tmp_path: Path
) -> None:
    # fault: F30
    async with Workshop(app, process_slots=1) as shop:
        deep, crowd = await tasks.overflow.aenqueue(), await tasks.fork_many.aenqueue(str(tmp_path / "crowd"))
        await shop.ended(deep, crowd, state="failed")
        for job, why in ((deep, "killed by SIGSEGV"), (crowd, "killed by SIGKILL")):
            assert why in ((await shop.job(job)).error or {})["message"]
        children = [int(pid) for pid in (tmp_path / "crowd").read_text().split()]
        assert len(children) == 30
        assert all(map(is_gone, children))
        again = await tasks.pid.aenqueue()
        await shop.ended(again, state="completed")
