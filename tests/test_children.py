"""Jobs that wait for jobs which they spawned: nobody forgets them, whatever ends when."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import msgspec
import psycopg
import pytest

from shiftwork import App, Batch, Context, InvalidArgument, JobFailed, Retry, State, TableStore
from shiftwork.events import JobBegan, JobEnded, JobStopped
from shiftwork.job import NewJob
from tests import process_app
from tests.concurrency import elsewhere, in_thread, waiting_for_lock
from tests.harness import Protocol
from tests.test_conformance import TABLE
from tests.workshop import Latch, Workshop

AT_ONCE = Retry(max_attempts=2, delays=timedelta(), jitter=0)
CHILD = {"task": "greet", "child": True}


@pytest.fixture
def app(dsn: str) -> Iterator[App]:
    with App(dsn) as app:
        yield app


def family(protocol: Protocol, children: int = 2) -> tuple[int, int, list[list[int]]]:
    """A parent that waits, a worker, and the children that it holds."""
    worker, parent = protocol.register(lease=3600), protocol.enqueue()
    [job] = protocol.claim(worker).jobs
    jobs = [CHILD] * children
    told = {"id": parent, "attempt": job["attempt"], "state": "waiting", "result": 7, "jobs": jobs}
    assert protocol.settle(worker, told) == {parent: "settled"}
    return parent, worker, protocol.claim(worker, want=children).held


def completed(hold: list[int]) -> dict[str, Any]:
    return {"id": hold[0], "attempt": hold[1], "state": "completed"}


async def test_a_job_is_in_every_state_that_a_job_with_children_can_be_in(app: App) -> None:
    # spec: ST-3
    latch = Latch()

    @app.task
    async def leaf(number: int) -> int:
        await latch.hold()
        return number

    @app.task
    async def root(context: Context) -> str:
        context.spawn(leaf.job(1), leaf.job(2))
        return "all of it"

    later = await root.using(delay=timedelta(hours=1)).aenqueue()
    job = await root.aenqueue()
    seen = [await later.astatus(), await job.astatus()]
    async with Workshop(app) as shop:
        await latch.reached(2)
        seen.append((await shop.job(job)).state)
        # Its children may begin before its worker has heard that its outcome is written; but it takes up no room while they run.
        await shop.until(lambda: job.id not in shop.worker.holding, "the room of who waits")
        latch.release()
        assert await job.aresult(timeout=60) == "all of it"
        children = await shop.rows(
            "select id, state::text, parent from shiftwork.all_jobs where task = 'leaf'"
        )
    assert seen == [State.SCHEDULED, State.READY, State.WAITING]
    assert await job.astatus() is State.COMPLETED
    assert {(row["parent"], row["state"]) for row in children} == {(job.id, "completed")}
    assert (await app.job(children[0]["id"]).ainfo()).parent == job.id


def test_one_whose_engine_died_is_told_apart_and_runs_again(protocol: Protocol) -> None:
    # spec: ST-3
    parent, worker, held = family(protocol)
    protocol.lapse(worker)
    protocol.reap()
    assert [row["outcome"] for row in protocol.rows("select outcome from {}.attempts")] == ["lost", "lost"]
    assert [protocol.state(job) for job, _ in held] == ["ready", "ready"]
    assert protocol.state(parent) == "waiting"
    other = protocol.register()
    protocol.complete(other, protocol.claim(other, want=2).jobs)
    protocol.claim(other)
    assert protocol.state(parent) == "completed"


async def test_a_child_that_fails_fails_its_parent_and_troubles_no_sibling(app: App) -> None:
    # spec: ST-3
    latch = Latch()

    @app.task(retry=Retry(max_attempts=1))
    async def bad() -> None:
        raise ValueError("it broke")

    @app.task
    async def good() -> None:
        await latch.hold()

    @app.task
    async def root(context: Context) -> None:
        context.spawn(good.job(), bad.job())

    job = await root.aenqueue()
    async with Workshop(app) as shop:
        failing = await shop.event(JobEnded, task="bad")
        await latch.reached()
        await shop.found(
            lambda: shop.value("select error is not null from shiftwork.jobs where id = %s", job.id)
        )
        assert await job.astatus() is State.WAITING
        latch.release()
        with pytest.raises(JobFailed, match=f"CHILD_FAILED.*job {failing.job}"):
            await job.aresult(timeout=60)
        await shop.event(JobEnded, task="good", state="completed")


@pytest.mark.parametrize("ending", ["failed", "cancelled", "expired"])
def test_however_a_child_does_not_complete_its_parent_fails_and_names_it(
    protocol: Protocol, ending: str
) -> None:
    worker, parent = protocol.register(lease=3600), protocol.enqueue()
    protocol.claim(worker)
    late = CHILD | {"expires_in": 60, "delay": 30}
    told = {"id": parent, "attempt": 1, "state": "waiting", "result": 7, "jobs": [CHILD, late]}
    protocol.settle(worker, told)
    [good] = protocol.claim(worker).held
    protocol.settle(worker, completed(good))
    bad = protocol.value("select id from {}.jobs where parent = %s", parent)
    if ending == "failed":
        protocol.run_now(bad)
        [hold] = protocol.claim(worker).held
        protocol.settle(
            worker, completed(hold) | {"state": "scheduled", "delay": 0, "error": {"code": "BAD"}}
        )
        [hold] = protocol.claim(worker).held
        assert protocol.state(parent) == "waiting", "a retry is the child's own affair"
        protocol.settle(worker, completed(hold) | {"state": "failed", "error": {"code": "BAD"}})
    elif ending == "cancelled":
        protocol.cancel(bad)
    else:
        protocol.shift_clock(timedelta(seconds=61))
        protocol.expire()
    protocol.claim(worker)
    ended = protocol.job(parent)
    message = f"job {bad}, for which it waited, is {ending}"
    assert (ended["state"], ended["error"]) == ("failed", {"code": "CHILD_FAILED", "message": message})


async def test_children_may_have_children_and_all_of_them_end_upwards(app: App) -> None:
    @app.task
    async def grow(context: Context, depth: int) -> int:
        if depth:
            context.spawn(grow.job(depth - 1), grow.job(depth - 1))
        return depth

    job = await grow.aenqueue(4)
    async with Workshop(app, concurrency=4) as shop:
        assert await job.aresult(timeout=60) == 4
        ended = await shop.rows("select state::text, count(*) from shiftwork.all_jobs group by state")
    assert ended == [{"state": "completed", "count": 31}]


async def test_a_parent_that_failed_at_first_spawns_when_it_succeeds(app: App) -> None:
    @app.task
    async def leaf() -> None: ...

    @app.task(retry=AT_ONCE)
    async def root(context: Context) -> None:
        context.spawn(leaf.job())
        if context.job.failures == 0:
            raise ValueError("not yet")

    job = await root.aenqueue()
    async with Workshop(app) as shop:
        await job.aresult(timeout=60)
        assert await shop.value("select count(*) from shiftwork.all_jobs where task = 'leaf'") == 1


async def test_to_spawn_nothing_changes_nothing(app: App) -> None:
    @app.task
    async def other() -> None: ...

    @app.task
    async def root(context: Context) -> None:
        context.enqueue(other.job())
        context.spawn()

    job = await root.aenqueue()
    async with Workshop(app) as shop:
        await shop.ended(job, state="completed")
        assert await shop.value("select count(*) from shiftwork.all_jobs where task = 'other'") == 1


@pytest.mark.parametrize(
    "kind", ["plain", "transactional", "transactional, plain", "finishing", "in a batch"]
)
async def test_a_handler_of_every_kind_may_have_children(app: App, kind: str) -> None:
    latch = Latch()

    @app.task
    async def leaf() -> None:
        await latch.hold()

    @app.task(name="plain")
    def plain(context: Context) -> int:
        context.spawn(leaf.job())
        return 5

    @app.task(name="transactional", transaction=True)
    async def transactional(context: Context, tx: psycopg.AsyncConnection[Any]) -> int:
        await tx.execute("create table effects ()")
        context.spawn(leaf.job())
        return 5

    @app.task(name="transactional, plain", transaction=True)
    def blocking(context: Context, tx: psycopg.Connection[Any]) -> int:
        tx.execute("create table effects ()")
        context.spawn(leaf.job())
        return 5

    @app.task(name="finishing")
    async def finishing(context: Context) -> int:
        context.spawn(leaf.job())
        async with context.finishing(5) as tx:
            await tx.execute("create table effects ()")
        return 5

    @app.task(name="in a batch", batch=10)
    async def together(numbers: Batch[int]) -> list[int]:
        for job in numbers:
            job.context.spawn(leaf.job())
        return numbers.arguments

    job = app.job((await app.aenqueue_many([app.tasks[kind].job(*[5] * (kind == "in a batch"))]))[0].id)
    async with Workshop(app) as shop:
        await latch.reached()
        assert (await shop.job(job)).state is State.WAITING
        if kind not in ("plain", "in a batch"):
            assert await shop.value("select to_regclass('effects')") == "effects"
        latch.release()
        assert await job.aresult(timeout=60) == 5


async def test_one_in_a_process_of_its_own_may_too(dsn: str) -> None:
    settings = process_app.app.settings
    process_app.app.settings = dataclasses.replace(settings, dsn=dsn)
    try:
        job = await process_app.spawn_two.aenqueue()
        async with Workshop(process_app.app, process_slots=2) as shop:
            assert await job.aresult(timeout=60) != os.getpid()
            await shop.ended(job, state="waiting")
    finally:
        process_app.app.close()
        process_app.app.settings = settings


SQL_FAMILY = """
create function public.leaf(payload jsonb) returns jsonb language sql as $$ select payload $$;
create procedure public.root(payload jsonb) language plpgsql as $$
begin
  perform shiftwork.spawn('leaf', jsonb_build_object('number', number), '{"priority": 1}') from generate_series(1, 3) as number;
end $$;
create procedure public.committing(payload jsonb) language plpgsql as $$
begin
  perform shiftwork.spawn('leaf');
end $$;
select shiftwork.register_task('leaf', handler => 'public.leaf(jsonb)');
select shiftwork.register_task('root', handler => 'public.root(jsonb)');
select shiftwork.register_task('committing', handler => 'public.committing(jsonb)', commits => true,
                               retry => '{"max_attempts": 1}');
"""


async def test_a_handler_in_the_database_may_too(app: App, protocol: Protocol) -> None:
    # spec: ST-3
    protocol.connection.execute(SQL_FAMILY.encode())
    app.sql_task("root", handler="public.root(jsonb)")
    job, refused = protocol.enqueue("root"), protocol.enqueue("committing")
    async with Workshop(app) as shop:
        await app.job(job).aresult(timeout=60)
        await shop.ended(job, state="waiting")
        with pytest.raises(JobFailed, match="does not commit by itself"):
            await app.job(refused).aresult(timeout=60)
    leaves = protocol.rows("select parent, priority, state::text from {}.all_jobs where task = 'leaf'")
    assert leaves == [{"parent": job, "priority": 1, "state": "completed"}] * 3


def test_a_session_works_off_a_family_in_one_transaction_that_is_undone(protocol: Protocol) -> None:
    # spec: ST-29
    protocol.connection.execute(SQL_FAMILY.encode())
    with protocol.connection.transaction(force_rollback=True):
        job = protocol.enqueue("root")
        protocol.connection.execute("call shiftwork.process_jobs()")
        assert protocol.state(job) == "completed"
        assert protocol.value("select count(*) from {}.history") == 4
    assert protocol.rows("select 1 from {}.all_jobs") == []


@pytest.mark.parametrize("inside", [True, False])
def test_a_session_that_has_done_its_share_leaves_no_parent_whose_children_have_ended(
    protocol: Protocol, inside: bool
) -> None:
    protocol.connection.execute(SQL_FAMILY.encode())
    job = protocol.enqueue("root")
    with protocol.connection.transaction() if inside else nullcontext():
        protocol.connection.execute("call shiftwork.process_jobs(batch => 4)")
    assert protocol.state(job) == "completed"


def test_what_a_handler_undoes_it_has_not_spawned(protocol: Protocol) -> None:
    protocol.connection.execute(
        b"""
        create procedure public.careful(payload jsonb) language plpgsql set work_mem = '8MB' as $$
        begin
          begin
            perform shiftwork.spawn('leaf', options => '{"tags": ["undone"]}');
            raise exception 'no';
          exception when others then null;
          end;
          if payload ? 'again' then
            perform shiftwork.spawn('leaf', null, null);
          end if;
          begin
            perform shiftwork.spawn('leaf', options => '{"tags": ["undone"]}');
            raise exception 'no';
          exception when others then null;
          end;
        end $$;
        select shiftwork.register_task('careful', handler => 'public.careful(jsonb)')"""
    )
    none, one = protocol.enqueue("careful"), protocol.enqueue("careful", {"again": True})
    protocol.connection.execute("call shiftwork.process_jobs()")
    assert (protocol.state(none), protocol.state(one)) == ("completed", "waiting")
    [child] = protocol.rows("select parent, tags from {}.jobs where task = 'leaf'")
    assert child == {"parent": one, "tags": []}


def test_a_handler_that_works_its_children_off_itself_still_waits_for_those_it_did_not(
    protocol: Protocol,
) -> None:
    protocol.connection.execute(
        b"""
        create procedure public.middle(payload jsonb) language plpgsql as $$
        begin
          perform shiftwork.spawn('leaf', options => '{"delay": 60}');
        end $$;
        create procedure public.root(payload jsonb) language plpgsql as $$
        begin
          perform shiftwork.spawn('middle');
          call shiftwork.process_jobs();
        end $$;
        select shiftwork.register_task('middle', handler => 'public.middle(jsonb)');
        select shiftwork.register_task('root', handler => 'public.root(jsonb)')"""
    )
    root = protocol.enqueue("root")
    protocol.connection.execute("call shiftwork.process_jobs()")
    rows = protocol.rows("select task, state::text, parent from {}.jobs order by id")
    assert [(row["task"], row["state"]) for row in rows] == [
        ("root", "waiting"),
        ("middle", "waiting"),
        ("leaf", "scheduled"),
    ]
    assert rows[1]["parent"] == root


def test_a_hook_spawns_nothing_since_it_is_not_undone_with_the_handler(protocol: Protocol) -> None:
    protocol.connection.execute(
        b"""
        create procedure public.broken(payload jsonb) language plpgsql as $$ begin raise exception 'no'; end $$;
        create procedure public.hook(payload jsonb) language plpgsql as $$ begin perform shiftwork.spawn('leaf'); end $$;
        select shiftwork.register_task('broken', handler => 'public.broken(jsonb)',
                                       before => 'public.hook(jsonb)', after => 'public.hook(jsonb)')"""
    )
    protocol.enqueue("broken")
    protocol.connection.execute("call shiftwork.process_jobs()")
    assert protocol.rows("select 1 from {}.jobs where task = 'leaf'") == []
    told = [row["message"] for row in protocol.rows("select message from {}.logs")]
    assert len(told) == 2
    assert all("not by its hooks" in message for message in told)


def test_children_are_made_by_handlers_alone(protocol: Protocol, dsn: str) -> None:
    with pytest.raises(psycopg.Error, match="handler of a job") as refused:
        protocol.rows("select shiftwork.spawn('leaf')")
    assert refused.value.sqlstate == "SW001"


def test_who_enqueues_cannot_make_somebody_else_wait(protocol: Protocol) -> None:
    parent, _, _ = family(protocol)
    claimed = {"task": "leaf", "parent": parent, "child": True}
    made = protocol.enqueue_many([claimed, claimed | {"unique_key": "k"}])
    assert [protocol.live(job["id"])["parent"] for job in made] == [None, None]


async def test_rows_of_a_table_have_no_children(dsn: str, connection: psycopg.Connection[Any]) -> None:
    connection.execute(TABLE)
    store = TableStore("example_jobs", dsn=dsn)
    told: list[str] = []

    @store.handler
    async def handle(record: Any, context: Context) -> None:
        try:
            context.spawn(NewJob(task="leaf", payload=msgspec.Raw(b"{}")))
        except InvalidArgument as error:
            told.append(str(error))

    connection.execute("insert into example_jobs (repository_id) values (1)")
    async with Workshop(store) as shop:
        await shop.event(JobEnded)
    assert "nothing can be enqueued" in told[0]


def test_two_last_children_that_end_at_once_do_not_miss_each_other(dsn: str, protocol: Protocol) -> None:
    # spec: ST-18
    parent, worker, [first, second] = family(protocol)
    with (
        psycopg.connect(dsn) as one,
        psycopg.connect(dsn) as other,
    ):
        for connection, hold in ((one, first), (other, second)):
            assert Protocol(connection).settle(worker, completed(hold)) == {hold[0]: "settled"}
            assert Protocol(connection).rows("select * from {}.gather()") == [], "it sees the other alive"
    assert protocol.rows("select * from {}.gather()") == [{"id": parent, "answer": "completed"}]
    assert protocol.rows("select * from {}.child_ends") == []


def test_a_parent_that_somebody_has_locked_is_not_waited_for_and_not_forgotten(
    dsn: str, protocol: Protocol
) -> None:
    # spec: ST-18
    parent, worker, held = family(protocol)
    protocol.settle(worker, *map(completed, held))
    with psycopg.connect(dsn) as other:
        other.execute("select 1 from shiftwork.jobs where id = %s for update", (parent,))
        claimed = protocol.claim(worker)
        assert protocol.state(parent) == "waiting"
        assert 0 < claimed.report["next_due_in"] <= 0.1
    protocol.claim(worker)
    assert protocol.state(parent) == "completed"


def test_a_parent_that_somebody_has_locked_keeps_no_other_from_ending_however_many_children_it_has(
    protocol: Protocol, dsn: str
) -> None:
    (locked, worker, held), (other, _, [only]) = family(protocol, 6), family(protocol, 1)
    holder = protocol.live(only[0])["worker"]
    with psycopg.connect(dsn) as somebody:
        somebody.execute("select 1 from shiftwork.jobs where id = %s for update", (locked,))
        for hold in held:
            protocol.settle(worker, completed(hold))
        protocol.settle(holder, completed(only))
        for _ in range(3):
            protocol.rows("select * from {}.gather(3)")
        assert protocol.state(other) == "completed"
        notes = protocol.rows("select * from {}.child_ends where parent = %s", locked)
        assert 0 < len(notes) < len(held), "one note says as much as many"
        next_look = protocol.claim(worker).report["next_due_in"]
        assert 0 < next_look <= 0.1, "and nobody sleeps over it"
    protocol.rows("update {}.child_ends set at = at - interval '1 minute'")
    assert protocol.rows("select * from {}.gather(3)") == [{"id": locked, "answer": "completed"}]


def test_one_look_ends_no_more_than_it_was_asked_to(protocol: Protocol) -> None:
    for _, worker, [only] in [family(protocol, 1) for _ in range(5)]:
        protocol.settle(worker, completed(only))
    assert [len(protocol.rows("select * from {}.gather(2)")) for _ in range(4)] == [2, 2, 1, 0]


def test_what_was_committed_late_is_found_by_a_look_from_the_start(protocol: Protocol) -> None:
    parent, worker, held = family(protocol)
    protocol.settle(worker, *map(completed, held))
    protocol.rows("update {}.child_ends set at = at - interval '1 minute'")
    place = protocol.claim(worker, due=protocol.value("select (extract(epoch from now()) * 1e6)::bigint"))
    assert protocol.state(parent) == "waiting"
    protocol.claim(worker, due=place.report["due"])
    assert protocol.state(parent) == "waiting"
    protocol.claim(worker)
    assert protocol.state(parent) == "completed"


def test_when_there_are_more_notes_than_a_claim_reads_the_next_looks_from_the_start(
    protocol: Protocol,
) -> None:
    worker = protocol.register()
    protocol.rows(
        "insert into {}.child_ends (at, parent)"
        " select now() - interval '1 minute', n from generate_series(1, 1500) as n"
    )
    report = protocol.claim(worker).report
    assert (report["due"], 0 < report["next_due_in"] <= 0.1) == (0, True)
    report = protocol.claim(worker, due=report["due"]).report
    assert report["due"] > 0
    assert protocol.rows("select * from {}.child_ends") == []


def test_a_worker_that_is_too_busy_to_claim_ends_parents_with_its_heartbeat(protocol: Protocol) -> None:
    parent, worker, held = family(protocol)
    protocol.settle(worker, *map(completed, held))
    protocol.heartbeat(worker, state={})
    assert protocol.state(parent) == "completed"


def test_who_has_children_that_were_there_already_does_not_wait_for_them(protocol: Protocol) -> None:
    worker = protocol.register()
    twin, parent = protocol.enqueue(unique_key="k", delay=60), protocol.enqueue()
    [job] = protocol.claim(worker).jobs
    told = {
        "id": parent,
        "attempt": job["attempt"],
        "state": "waiting",
        "jobs": [CHILD | {"unique_key": "k"}],
    }
    assert protocol.settle(worker, told) == {parent: "settled"}
    protocol.claim(worker)
    assert (protocol.state(parent), protocol.state(twin)) == ("completed", "scheduled")
    assert protocol.live(twin)["parent"] is None


def test_an_outcome_whose_answer_was_lost_may_be_told_again(protocol: Protocol) -> None:
    # spec: D-16
    worker = protocol.register()
    parents = [protocol.enqueue(), protocol.enqueue()]
    jobs = protocol.claim(worker, want=2).jobs
    told = [{"id": job["id"], "attempt": job["attempt"], "state": "waiting", "jobs": [CHILD]} for job in jobs]
    protocol.settle(worker, *told)
    again = [outcome | {"state": "completed"} for outcome in told]
    assert set(protocol.settle(worker, *told).values()) == {"already"}
    assert set(protocol.settle(worker, *again).values()) == {"already"}
    assert protocol.value("select count(*) from {}.jobs where parent is not null") == 2
    good, bad = protocol.claim(worker, want=2).held
    protocol.settle(worker, completed(good), completed(bad) | {"state": "failed", "error": {"code": "BAD"}})
    protocol.claim(worker)
    assert sorted(map(protocol.state, parents)) == ["completed", "failed"]
    assert set(protocol.settle(worker, *told).values()) == {"already"}
    assert set(protocol.settle(worker, *again).values()) == {"already"}
    stale = [outcome | {"attempt": 9} for outcome in told]
    assert set(protocol.settle(worker, *stale).values()) == {"lost"}


async def test_with_a_parent_its_children_are_cancelled(app: App) -> None:
    latch = Latch()

    @app.task
    async def leaf(number: int) -> None:
        await latch.hold()

    @app.task
    async def middle(context: Context) -> None:
        context.spawn(leaf.job(0))

    @app.task
    async def root(context: Context) -> None:
        context.spawn(middle.job(), *(leaf.using(delay=timedelta(hours=1)).job(n) for n in (1, 2)))

    job = await root.aenqueue()
    async with Workshop(app) as shop:
        await latch.reached()
        await shop.asleep()  # else a claim may just be looking at it, and it would be told a moment later
        assert await job.acancel() == "cancelled"
        assert (
            await shop.event(JobStopped, task="leaf")
        ).reason == "the job that waited for it was cancelled"
        await shop.event(JobEnded, task="leaf", state="cancelled")
        ended = await shop.rows("select task, state::text from shiftwork.all_jobs order by id")
    assert {row["state"] for row in ended} == {"cancelled"}
    assert len(ended) == 5


def test_one_that_was_to_be_cancelled_while_its_handler_returned_is_cancelled_with_its_children(
    protocol: Protocol,
) -> None:
    worker, parent = protocol.register(), protocol.enqueue()
    [job] = protocol.claim(worker).jobs
    assert protocol.cancel(parent) == {parent: "signalled"}
    told = {"id": parent, "attempt": job["attempt"], "state": "waiting", "jobs": [CHILD, CHILD]}
    protocol.settle(worker, told)
    protocol.expire()
    states = protocol.rows("select state::text, count(*) from {}.all_jobs group by state")
    assert states == [{"state": "cancelled", "count": 3}]


def test_a_parent_that_cannot_be_moved_stops_nobody_and_is_looked_at_again(protocol: Protocol) -> None:
    # spec: D-16
    (stuck, worker, held), (other, _, more) = family(protocol), family(protocol)
    protocol.connection.execute(
        "create function refuse() returns trigger language plpgsql as $$ begin raise exception 'no'; end $$;"
        f"create trigger refuse before insert on shiftwork.history for each row when (new.id = {stuck})"
        " execute function refuse()".encode()
    )
    protocol.settle(worker, *map(completed, held))
    holder = protocol.value("select worker from {}.jobs where id = %s", more[0][0])
    protocol.settle(holder, *map(completed, more))
    protocol.claim(worker)
    assert (protocol.state(stuck), protocol.state(other)) == ("waiting", "completed")
    protocol.connection.execute("drop trigger refuse on shiftwork.history")
    protocol.claim(worker)
    assert protocol.state(stuck) == "waiting"
    protocol.rows("update {}.child_ends set at = at - interval '1 minute'")
    protocol.claim(worker)
    assert protocol.state(stuck) == "completed"


def test_a_parent_that_is_completed_by_somebody_leaves_its_children_alone(protocol: Protocol) -> None:
    parent, worker, held = family(protocol)
    assert protocol.value("select {}.complete(%s, '1')", parent) == "completed"
    protocol.settle(worker, *map(completed, held))
    protocol.claim(worker)
    assert protocol.rows("select * from {}.child_ends") == []
    assert {protocol.state(job) for job, _ in held} == {"completed"}


def test_a_parent_that_is_revived_also_waits_for_children_of_its_former_life(protocol: Protocol) -> None:
    parent, worker, [first, second] = family(protocol)
    protocol.rows("select {}.complete(%s)", parent)
    protocol.settle(worker, completed(first))
    protocol.revive(parent)
    [job] = protocol.claim(worker).jobs
    told = {"id": parent, "attempt": job["attempt"], "state": "waiting", "jobs": [CHILD]}
    protocol.settle(worker, told)
    [child] = protocol.claim(worker).held
    protocol.settle(worker, completed(child))
    protocol.claim(worker)
    assert protocol.state(parent) == "waiting"
    protocol.settle(worker, completed(second))
    protocol.claim(worker)
    assert protocol.state(parent) == "completed"


def test_a_child_that_failed_and_is_revived_is_waited_for_and_its_parent_fails_all_the_same(
    protocol: Protocol,
) -> None:
    parent, worker, [first, second] = family(protocol)
    protocol.settle(worker, completed(first) | {"state": "failed", "error": {"code": "BAD"}})
    protocol.claim(worker)
    protocol.revive(first[0])
    [again] = protocol.claim(worker).held
    protocol.settle(worker, completed(second))
    protocol.claim(worker)
    assert protocol.state(parent) == "waiting"
    protocol.settle(worker, completed(again))
    protocol.claim(worker)
    assert protocol.state(parent) == "failed"


def test_who_cancels_a_family_and_who_cancels_some_of_it_do_not_wait_for_each_other_in_a_circle(
    protocol: Protocol, dsn: str
) -> None:
    parent, worker, [first, *_] = family(protocol, 1)
    spawning = {"id": first[0], "attempt": first[1], "state": "waiting", "jobs": [CHILD | {"delay": 60}]}
    protocol.settle(worker, spawning)
    grandchild = protocol.value("select id from {}.jobs where parent = %s", first[0])
    youngest = protocol.enqueue(delay=60)
    protocol.rows("update {}.jobs set parent = %s where id = %s", parent, youngest)
    asking = "insert into shiftwork.signals (job, actor) values (%s, 'me') on conflict (job) do nothing"
    with elsewhere(dsn) as one, psycopg.connect(dsn) as other:
        other.execute(asking, (grandchild,))
        cancelling = in_thread(one.cancel, parent)
        waiting_for_lock(protocol.connection, one.connection)
        other.execute(asking, (youngest,))
        other.rollback()
        assert cancelling.result(30) == {parent: "cancelled"}
    assert protocol.rows("select 1 from {}.jobs") == []


def test_who_cancels_a_child_in_a_long_transaction_keeps_no_worker_waiting(
    protocol: Protocol, dsn: str
) -> None:
    worker, parent = protocol.register(lease=3600), protocol.enqueue()
    [hold] = protocol.claim(worker).held
    assert protocol.cancel(parent) == {parent: "signalled"}
    waiting = {"id": parent, "attempt": hold[1], "state": "waiting", "jobs": [CHILD, CHILD]}
    protocol.settle(worker, waiting)
    children = [
        row["id"] for row in protocol.rows("select id from {}.jobs where parent = %s order by id", parent)
    ]
    with psycopg.connect(dsn) as somebody:
        Protocol(somebody).cancel(children[0])
        protocol.rows("set statement_timeout = '20s'")
        protocol.expire()
        assert [protocol.state(job) for job in (parent, children[1])] == ["waiting", "ready"], (
            "all or nothing"
        )
        somebody.rollback()
    protocol.expire()
    assert {protocol.state(job) for job in (parent, *children)} == {"cancelled"}


async def test_whoever_sleeps_is_woken_by_the_end_of_the_last_child(app: App, protocol: Protocol) -> None:
    parent, worker, held = family(protocol)
    app.task(name="another")(lambda: None)
    async with Workshop(app) as shop:
        await shop.asleep()
        protocol.settle(worker, *map(completed, held))
        assert await app.job(parent).aresult(timeout=60) == 7
        assert shop.seen(JobBegan) == []
