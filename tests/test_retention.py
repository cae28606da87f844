"""History: how long what finished is kept, and how it goes, whole partitions at a time."""

from __future__ import annotations

from datetime import date, timedelta
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.concurrency import elsewhere, in_thread, waiting_for_lock
from tests.harness import Protocol

FOREVER = 2_147_483_647
DAY = timedelta(days=1)


@pytest.fixture
def told(protocol: Protocol) -> list[str]:
    """What the server warned of."""
    found: list[str] = []
    protocol.connection.add_notice_handler(lambda notice: found.append(notice.message_primary or ""))
    return found


def finish(
    protocol: Protocol, ending: str = "completed", *, in_transaction: bool = False, **options: Any
) -> int:
    queue = options.setdefault("queue", "work")
    job = protocol.enqueue(**options)
    worker = protocol.register(lease=86400)
    if ending == "cancelled":
        protocol.cancel(job)
    elif ending == "expired":
        protocol.rows("update {}.jobs set expires_at = created_at where id = %s", job)
        protocol.expire()
    else:
        [claimed] = protocol.claim(worker, queue).jobs
        error = {"code": "X", "message": "x"} if ending == "failed" else None
        told = {"id": job, "attempt": claimed["attempt"], "state": ending, "error": error}
        if in_transaction:
            request = Jsonb({"worker": worker, "outcomes": [told]})
            assert protocol.value("select {}.conclude(%s)", request) == ending
        else:
            assert protocol.settle(worker, told) == {job: "settled"}
    return job


def today(protocol: Protocol) -> date:
    found = protocol.value("select ({}.clock() at time zone 'UTC')::date")
    assert isinstance(found, date)
    return found


def days_kept(protocol: Protocol, job: int) -> int:
    """Whole days between the day of its end and the day on which it may be forgotten."""
    kept = protocol.job(job)["forget_on"] - today(protocol)
    assert isinstance(kept, timedelta)
    return kept.days - 1


def lies_in(protocol: Protocol, job: int) -> str:
    found = protocol.value("select tableoid::regclass::text from {}.history where id = %s", job)
    assert isinstance(found, str)
    return found.removeprefix("shiftwork.")


def partitions(protocol: Protocol) -> list[str]:
    rows = protocol.rows(
        "select inhrelid::regclass::text as name from pg_inherits "
        "where inhparent = '{}.history'::regclass order by 1"
    )
    return [row["name"].removeprefix("shiftwork.") for row in rows]


def purge(protocol: Protocol, *, archive: bool = False) -> tuple[int, int]:
    [row] = protocol.rows("select * from {}.purge(%s)", archive)
    return row["partitions"], row["jobs"]


def test_how_long_a_job_is_kept_depends_on_its_end_its_queue_and_its_sender(protocol: Protocol) -> None:
    # spec: D-3, A-8, SH-31
    endings = {"completed": 7, "failed": 30, "cancelled": 7, "expired": 30}
    for ending, days in endings.items():
        job = finish(protocol, ending)
        assert days_kept(protocol, job) == days, ending
        assert lies_in(protocol, job) == f"history_{protocol.job(job)['forget_on']:%Y_%m_%d}"

    protocol.rows("select {}.retain('work', completed => 1, failed => 0)")
    kept = {ending: days_kept(protocol, finish(protocol, ending)) for ending in endings}
    assert kept == {"completed": 1, "failed": 0, "cancelled": 7, "expired": 30}
    protocol.rows("select {}.retain('*', cancelled => 14)")
    assert days_kept(protocol, finish(protocol, "cancelled")) == 14
    assert days_kept(protocol, finish(protocol, "completed", queue="another")) == 7
    assert days_kept(protocol, finish(protocol, "completed", keep=3)) == 3
    assert days_kept(protocol, finish(protocol, "failed", keep=0)) == 0


def test_what_ends_in_a_transaction_of_its_own_is_kept_as_long(protocol: Protocol) -> None:
    # spec: D-3, A-8
    def kept(**options: Any) -> int:
        return days_kept(protocol, finish(protocol, in_transaction=True, **options))

    assert (kept(), kept(keep=3)) == (7, 3)
    protocol.rows("select {}.retain('work', completed => 1)")
    assert (kept(), kept(keep=3), kept(queue="another")) == (1, 3, 7)
    protocol.rows("select {}.retain('*', completed => 100)")
    assert kept() == 1
    last = today(protocol) + 100 * DAY
    month = (last.replace(day=1) + 32 * DAY).replace(
        day=1
    )  # the one after: the hundredth day may be the last of its own
    assert kept(queue="another") == (month - today(protocol)).days - 1


@pytest.mark.parametrize("in_transaction", [False, True])
def test_where_somebody_has_deleted_what_holds_for_every_queue_jobs_still_end(
    protocol: Protocol, in_transaction: bool
) -> None:
    protocol.rows("delete from {}.queues where name = '*'")
    assert days_kept(protocol, finish(protocol, in_transaction=in_transaction)) == 30
    for ending in ("failed", "cancelled", "expired"):
        assert days_kept(protocol, finish(protocol, ending)) == 30, ending


def test_what_is_kept_for_ever_never_goes(protocol: Protocol) -> None:
    # spec: D-3, A-8
    job = finish(protocol, keep=FOREVER)
    assert lies_in(protocol, job) == "history_forever"
    protocol.rows("select {}.retain('work', failed => %s)", FOREVER)
    other = finish(protocol, "failed")
    for days in (400, 40_000):
        protocol.shift_clock(days * DAY)
        purge(protocol)
    assert (protocol.state(job), protocol.state(other)) == ("completed", "failed")


def test_long_retention_goes_in_coarser_steps(protocol: Protocol) -> None:
    # spec: A-8
    for days, first in [(31, None), (32, 1), (366, 1), (367, 1), (3_660, 1)]:
        row = protocol.rows("select {}.forget_on(%s, '2026-03-10') as day", days)[0]["day"]
        assert row > date(2026, 3, 10) + days * DAY
        assert first is None or row.day == first
    protocol.rows("select {}.retain('work', completed => 100, failed => 1000)")
    protocol.rows("select {}.extend_history()")
    for ending in ("completed", "failed"):
        assert lies_in(protocol, finish(protocol, ending)) != "history_default"


def test_partitions_are_made_ahead_and_again_only_when_they_are_missing(protocol: Protocol) -> None:
    # spec: A-8
    ahead = {f"history_{today(protocol) + n * DAY:%Y_%m_%d}" for n in range(1, 33)}
    assert ahead <= set(partitions(protocol))
    assert protocol.value("select {}.extend_history()") == 0
    protocol.shift_clock(3 * DAY)
    assert protocol.value("select {}.extend_history()") == 3


def test_what_may_be_forgotten_goes_with_its_attempts_its_log_and_its_progress(protocol: Protocol) -> None:
    # spec: SH-31, D-3, A-8, D-28
    old = finish(protocol, "failed", keep=1)
    kept = finish(protocol, "failed", keep=5)
    for job in (old, kept):
        protocol.rows(
            "insert into {}.logs (job, attempt, level, message) values (%s, 1, 'info', 'hello')", job
        )
        protocol.rows("insert into {}.progress (job, attempt, fraction) values (%s, 1, 0.5)", job)
    assert purge(protocol) == (0, 0)
    protocol.shift_clock(DAY)
    assert purge(protocol)[1] == 0  # a whole day is kept, not the rest of one
    protocol.shift_clock(2 * DAY)
    gone, jobs = purge(protocol)
    assert (gone >= 1, jobs) == (True, 1)
    for table in ("history", "attempts", "logs", "progress"):
        column = "id" if table == "history" else "job"
        text: Any = f"select {column} as job from {{}}.{table}"
        assert [row["job"] for row in protocol.rows(text)] == [kept], table
    assert purge(protocol) == (0, 0)
    assert protocol.cancel(old) == {old: "unknown"}
    assert protocol.revive(old) == {old: "unknown"}


def test_an_archive_keeps_what_would_be_forgotten_and_all_that_belongs_to_it(protocol: Protocol) -> None:
    # spec: D-3
    old = finish(protocol, "failed", keep=1)
    name = lies_in(protocol, old).replace("history", "archive")
    protocol.rows("insert into {}.logs (job, attempt, level, message) values (%s, 1, 'info', 'hello')", old)
    protocol.shift_clock(3 * DAY)
    assert purge(protocol, archive=True)[1] == 1
    for table, column in ((name, "id"), (f"{name}_attempts", "job"), (f"{name}_logs", "job")):
        text: Any = f"select {column} as job from {{}}.{table}"
        assert [row["job"] for row in protocol.rows(text)] == [old], table
    assert protocol.rows("select id from {}.all_jobs") == []
    assert [one for one in partitions(protocol) if one <= f"history_{today(protocol):%Y_%m_%d}"] == []
    others = "select count(*) from pg_class where relname like 'archive%%' and relkind = 'r'"
    assert protocol.value(others) == 4  # empty days leave none


def test_a_missing_partition_is_never_an_error_and_its_rows_move_in_later(protocol: Protocol) -> None:
    # spec: A-8
    protocol.shift_clock(100 * DAY)
    job, old = finish(protocol), finish(protocol, keep=0)
    assert (lies_in(protocol, job), lies_in(protocol, old)) == ("history_default", "history_default")
    protocol.shift_clock(101 * DAY)
    assert protocol.value("select {}.extend_history()") > 0
    assert lies_in(protocol, job) == f"history_{protocol.job(job)['forget_on']:%Y_%m_%d}"
    assert purge(protocol)[1] == 1
    assert protocol.rows("select id from {}.history") == [{"id": job}]


def test_strays_in_the_default_partition_go_in_batches(protocol: Protocol) -> None:
    # spec: SH-31, D-3, A-24
    protocol.shift_clock(100 * DAY)
    ids = [finish(protocol, "failed", keep=0) for _ in range(5)]
    protocol.shift_clock(102 * DAY)
    assert part(protocol, 3) == (3, True)
    assert protocol.value("select count(*) from {}.attempts") == 2
    assert protocol.rows("select jobs from {}.purge(most => 3)") == [{"jobs": 2}]
    assert protocol.value("select count(*) from {}.attempts where job = any(%s)", ids) == 0
    assert part(protocol, 3) == (0, False)


def test_a_partition_is_attached_as_soon_as_writers_let_go_of_the_default_one(
    dsn: str, protocol: Protocol, told: list[str]
) -> None:
    # spec: A-8
    protocol.shift_clock(100 * DAY)
    job = protocol.enqueue()
    worker = protocol.register(lease=86400)
    claimed = protocol.claim(worker).jobs
    with elsewhere(dsn) as settler:
        with settler.connection.transaction():
            settler.complete(worker, claimed)
            assert protocol.value("select {}.extend_history()") == 0
            assert any("could not be attached now" in one for one in told)
        assert protocol.value("select {}.extend_history()") > 0
    assert lies_in(protocol, job) != "history_default"


def test_jobs_are_settled_while_history_is_purged(dsn: str, protocol: Protocol) -> None:
    # spec: D-3, A-8
    finish(protocol, keep=1)
    jobs = [protocol.enqueue() for _ in range(2)]
    worker = protocol.register(lease=30 * 86400)
    first, second = protocol.claim(worker).jobs
    protocol.shift_clock(3 * DAY)
    with elsewhere(dsn) as settler, psycopg.connect(dsn, autocommit=True) as watcher:
        with protocol.connection.transaction():
            assert purge(protocol)[1] == 1
            # Dropping holds history until its transaction ends; a settle waits and is not refused.
            waiting = in_thread(settler.complete, worker, [first])
            waiting_for_lock(watcher, settler.connection)
        assert waiting.result(timeout=30) == {jobs[0]: "settled"}
        assert settler.complete(worker, [second]) == {jobs[1]: "settled"}


def test_a_purge_waits_for_nobody_and_still_empties_what_is_old(
    dsn: str, protocol: Protocol, told: list[str]
) -> None:
    # spec: D-3, A-8
    old = finish(protocol, "failed", keep=1)
    protocol.enqueue()
    worker = protocol.register(lease=30 * 86400)
    claimed = protocol.claim(worker).jobs
    protocol.shift_clock(3 * DAY)
    before = partitions(protocol)
    with elsewhere(dsn) as settler:
        with settler.connection.transaction():
            settler.complete(worker, claimed)  # and does not commit yet
            assert purge(protocol) == (0, 1)
            assert any("stay for now" in one for one in told)
        assert protocol.rows("select 1 as one from {}.history where id = %s", old) == []
        assert protocol.value("select count(*) from {}.attempts") == 0
        assert partitions(protocol) == before
        assert purge(protocol)[0] > 0


def test_a_purge_that_meets_a_reader_of_everything_takes_nothing_from_it_and_deadlocks_with_nobody(
    dsn: str, protocol: Protocol, told: list[str]
) -> None:
    # spec: D-3
    with_attempts, without = finish(protocol, "failed", keep=1), finish(protocol, keep=1)
    protocol.shift_clock(3 * DAY)
    with elsewhere(dsn) as reader:
        with reader.connection.transaction():
            reader.rows("set transaction isolation level repeatable read")
            assert len(reader.rows("select * from {}.all_jobs")) == 2
            assert purge(protocol) == (0, 1)
            assert len(reader.rows("select * from {}.all_jobs")) == 2
        assert any("stay for now" in one for one in told)
        assert protocol.rows("select id from {}.history") == [{"id": without}]
        assert protocol.value("select count(*) from {}.attempts where job = %s", with_attempts) == 0
        assert purge(protocol)[1] == 1


# In batches.


def say(protocol: Protocol, job: int, lines: int) -> None:
    protocol.rows(
        "insert into {}.logs (job, attempt, level, message) select %s, 1, 'info', 'hello' from generate_series(1, %s)",
        job,
        lines,
    )
    protocol.rows("insert into {}.progress (job, attempt, fraction) values (%s, 1, 0.5)", job)


def orphans(protocol: Protocol) -> int:
    """Attempts, log lines and progress of jobs that there are no more."""
    found = protocol.value(
        "select count(*) from (select job from {0}.attempts union all select job from {0}.logs"
        " union all select job from {0}.progress) as one"
        " where not exists (select from {0}.all_jobs as job where job.id = one.job)".replace(
            "{0}", "shiftwork"
        )
    )
    assert isinstance(found, int)
    return found


def count_deletes(protocol: Protocol) -> None:
    """Note how many rows each statement takes from the log."""
    protocol.connection.execute(
        "create table public.deletes (number int);"
        "create function public.count_deletes() returns trigger language plpgsql as"
        " $$ begin insert into public.deletes select count(*) from gone; return null; end $$;"
        "create trigger count_deletes after delete on shiftwork.logs referencing old table as gone"
        " for each statement execute function public.count_deletes()"
    )


def part(protocol: Protocol, most: int, *, archive: bool = False) -> tuple[int, bool]:
    """One call that takes so many rows a statement; says how many jobs went, and whether there may be more."""
    [row] = protocol.rows("select * from {}.purge_part(%s, %s)", archive, most)
    return row["jobs"], row["more"]


@pytest.mark.parametrize("strays", [False, True])
def test_a_purge_goes_in_batches_and_one_that_was_cut_off_goes_on(protocol: Protocol, strays: bool) -> None:
    # spec: A-24, SH-31, D-3
    if strays:
        protocol.shift_clock(100 * DAY)  # nobody has made partitions for these days
    old = [finish(protocol, ending, keep=0) for ending in ("failed", "completed", "failed", "completed")]
    kept = finish(protocol, "failed", keep=5)
    for job, lines in ((old[0], 450), (old[3], 7), (kept, 5)):
        say(protocol, job, lines)
    assert strays == (lies_in(protocol, old[0]) == "history_default")
    protocol.shift_clock(102 * DAY if strays else 2 * DAY)
    count_deletes(protocol)

    gone, calls, more = 0, 0, True
    while more:
        before = protocol.value("select count(*) from {}.logs")
        jobs, more = part(protocol, 2)
        gone, calls = gone + jobs, calls + 1
        assert before - protocol.value("select count(*) from {}.logs") <= 200, "in one call"
        assert orphans(protocol) == 0
        assert calls < 20
        if calls == 1:
            assert (jobs, more) == (0, True), "what belongs to the first job was too much for one call"
            assert len(protocol.rows("select id from {}.history")) == 5
    assert gone == 4
    assert calls > 3
    assert protocol.value("select max(number) from public.deletes") == 2, "in one statement"
    assert protocol.rows("select id from {}.history") == [{"id": kept}]
    texts: list[Any] = [f"select count(*) from {{}}.{one}" for one in ("attempts", "logs", "progress")]
    said = [protocol.value(text) for text in texts]
    assert said == [1, 5, 1], "what is kept is whole"


def test_an_archive_that_was_cut_off_is_whole_in_the_end(protocol: Protocol) -> None:
    # spec: A-24, D-3
    old = [finish(protocol, "failed", keep=0) for _ in range(3)]
    name = lies_in(protocol, old[0]).replace("history", "archive")
    for job in old:
        say(protocol, job, 150)
    protocol.shift_clock(2 * DAY)
    assert part(protocol, 2, archive=True) == (0, True)
    assert len(protocol.rows("select id from {}.history")) == 3, "until all is there, nobody is gone"
    calls = [part(protocol, 2, archive=True) for _ in range(6)]
    assert sorted(set(calls)) == [(0, False), (0, True), (3, True)], "and they go at once"
    assert calls[-1] == (0, False)
    for table, many in ((name, 3), (f"{name}_attempts", 3), (f"{name}_logs", 450), (f"{name}_progress", 3)):
        text: Any = f"select count(*) from {{}}.{table}"
        assert protocol.value(text) == many, table
    assert protocol.value("select count(*) from {}.logs") == 0


def test_what_is_being_written_to_is_not_purged(dsn: str, protocol: Protocol, told: list[str]) -> None:
    # spec: D-3, SH-33
    old = finish(protocol, "failed", keep=0)
    protocol.shift_clock(2 * DAY)
    with elsewhere(dsn) as operator:
        with operator.connection.transaction():
            assert operator.revive(old) == {old: "revived"}
            assert part(protocol, 5) == (0, False)
        assert any("is being written to" in one for one in told)
    assert part(protocol, 5) == (0, False)
    assert protocol.value("select count(*) from {}.attempts where job = %s", old) == 1, (
        "it lives, and is whole"
    )


def test_what_comes_late_into_an_old_partition_is_found(dsn: str, protocol: Protocol) -> None:
    # spec: D-3
    early, late = protocol.enqueue(keep=0), protocol.enqueue(keep=0)
    worker = protocol.register(lease=30 * 86400)
    jobs = {job["id"]: job for job in protocol.claim(worker).jobs}
    failed = {"state": "failed", "error": {"code": "X", "message": "x"}}
    with elsewhere(dsn) as settler, settler.connection.transaction():
        settler.settle(worker, {"id": early, "attempt": jobs[early]["attempt"], **failed})
        protocol.settle(worker, {"id": late, "attempt": jobs[late]["attempt"], **failed})
        protocol.shift_clock(2 * DAY)
        assert part(protocol, 5) == (0, False), "somebody is not through yet"
    assert part(protocol, 5) == (2, True)
    assert protocol.value("select count(*) from {}.attempts") == 0


def test_a_purge_reads_what_belongs_to_old_jobs_and_nothing_else(protocol: Protocol) -> None:
    # spec: A-24
    old = finish(protocol, "failed", keep=0)
    say(protocol, old, 3)
    protocol.connection.execute(
        "insert into shiftwork.logs (job, attempt, level, message) select -n, 1, 'info', '' from generate_series(1, 3000) as n;"
        "insert into shiftwork.progress (job, attempt) select -n, 1 from generate_series(1, 3000) as n;"
        "insert into shiftwork.attempts (job, attempt, outcome, will_retry, code, error, ended_at)"
        " select -n, 1, 'failed', false, '', '{}', now() from generate_series(1, 3000) as n;"
        "insert into shiftwork.history (id, state, priority, run_at, created_at, attempt, failures, resets, max_attempts,"
        " finished_at, task, queue, payload, tags, forget_on) select n, 'completed', 0, now(), now(), 1, 0, 0, 1, now(), 't', 'q',"
        " '{}', '{}', shiftwork.today() + 1 from generate_series(1001, 3000) as n;"
        "analyze shiftwork.logs, shiftwork.progress, shiftwork.attempts"
    )
    protocol.shift_clock(2 * DAY)
    with protocol.connection.transaction():
        assert part(protocol, 5000) == (2001, True)
        read = protocol.rows(
            "select relname as name, seq_tup_read as scanned, coalesce(idx_tup_fetch, 0) as fetched"
            " from pg_stat_xact_user_tables where schemaname = 'shiftwork'"
            " and relname in ('attempts', 'logs', 'progress')"
        )
        assert len(read) == 3
        assert all(row["scanned"] == 0 and row["fetched"] < 20 for row in read), read


def test_two_who_purge_at_once_do_it_once(dsn: str, protocol: Protocol) -> None:
    # spec: D-3
    finish(protocol, keep=1)
    protocol.shift_clock(3 * DAY)
    with elsewhere(dsn) as other, protocol.connection.transaction():
        assert purge(protocol)[1] == 1
        assert purge(other) == (0, 0)
        assert other.value("select {}.extend_history()") == 0


def test_a_revived_job_is_kept_from_its_new_end_on(protocol: Protocol) -> None:
    # spec: SH-33, A-8
    job = finish(protocol, keep=2)
    protocol.shift_clock(2 * DAY)
    protocol.revive(job)
    worker = protocol.register()
    protocol.complete(worker, protocol.claim(worker, "work").jobs)
    assert days_kept(protocol, job) == 2
