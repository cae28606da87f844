"""The verbs of the schema as statements: jobs ⇄ SQL, without I/O and without decisions.

The texts are written for the schema `shiftwork`, as the files in `sql/` are, and run as they stand in
psql; for another schema that one token is replaced by its name, which has been checked. Values are
always bound.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache

import msgspec
from msgspec.structs import replace

from shiftwork.database import Rows, Statement
from shiftwork.errors import SchemaTooOld
from shiftwork.job import NewJob, State
from shiftwork.migrate import PROTOCOL
from shiftwork.settings import check_schema
from shiftwork.stores.store import FORGET, Held, opening

# Times cross as seconds and documents as text, because no loader may fail on a row that somebody else wrote.
JOB = """
  id, task, queue, priority, payload::text as payload, state::text as state,
  extract(epoch from run_at)::text as run_at, extract(epoch from expires_at)::text as expires_at,
  attempt, failures, resets, max_attempts, unique_key, worker, parent,
  extract(epoch from created_at)::text as created_at, extract(epoch from claimed_at)::text as claimed_at,
  extract(epoch from started_at)::text as started_at, extract(epoch from finished_at)::text as finished_at,
  result::text as result, error::text as error, tags
"""
ATTEMPT = """
  job, attempt, outcome, will_retry, code, error::text as error, worker,
  extract(epoch from claimed_at)::text as claimed_at, extract(epoch from started_at)::text as started_at,
  extract(epoch from ended_at)::text as ended_at
"""
MATCHING = """
 where (%s::text is null or task = %s)
   and (%s::text is null or queue = %s)
   and (%s::text[] is null or state = any(%s::text[]::shiftwork.job_state[]))
"""
PARTS = {"<job>": JOB, "<attempt>": ATTEMPT, "<matching>": MATCHING}

ENQUEUE = "select ordinal, id, outcome from shiftwork.enqueue_many(%s::jsonb)"
ENQUEUE_PLAIN = "select (shiftwork.enqueue(%s::text, %s::text)).id as value"
ENQUEUE_ONE = "select shiftwork.enqueue_one(%s, %s, %s, %s, %s) as value"
GET = "select <job> from shiftwork.look(%s::bigint[]) order by id"
ATTEMPTS = "select <attempt> from shiftwork.attempts where job = any(%s::bigint[]) order by job, attempt"
LIST = (
    "select <job> from shiftwork.all_jobs <matching> and (%s::bigint is null or id < %s)"
    " order by id desc limit %s offset %s"
)
COUNTS = "select state::text as state, count(*) as number from shiftwork.all_jobs <matching> group by state"
CANCEL = "select id, answer from shiftwork.cancel(%s::bigint[], %s::text, %s::text)"
COMPLETE = "select shiftwork.complete(%s::bigint, %s::jsonb, %s::text) as answer"
REVIVE = "select id, answer from shiftwork.revive(%s::bigint[], %s::text)"
PROGRESS = """
select job.id, said.fraction, said.message, extract(epoch from said.at)::text as at
  from shiftwork.look(array[%s::bigint]) as job
  left join shiftwork.progress as said on said.job = job.id and said.attempt = job.attempt
"""
LOGS = """
select id, attempt, extract(epoch from at)::text as at, level, message
  from shiftwork.logs where job = %s and id > %s order by id <order> limit %s
"""
# Lines that may be changed later, of an attempt that holds its job, and so of its worker; an attempt has a thousand of them.
ADD_LOG = """
with held as materialized (select shiftwork.fence(%s::bigint, %s::int))
insert into shiftwork.logs (job, attempt, at, level, message)
select %s, %s, shiftwork.clock(), %s, %s from held
 where (select count(*) from (select from shiftwork.logs as line where line.job = %s and line.attempt = %s limit 1000) as kept) < 1000
returning id as place
"""
CHANGE_LOG = """
with held as materialized (select shiftwork.fence(%s::bigint, %s::int))
update shiftwork.logs as line set level = coalesce(%s, line.level), message = coalesce(%s, line.message)
  from held where line.id = %s and line.job = %s and line.attempt = %s
returning line.id as place
"""
RUN_NOW = "select id, answer from shiftwork.run_now(%s::bigint[], %s::text, %s::boolean)"

# What workers call. The answer of a claim ends with its report, which has id 0.
REGISTER = "select shiftwork.register_worker(%s::jsonb) as worker"
LEAVE = "select shiftwork.leave(%s::bigint) as left"
# By position, as `Taken` has it: of every job only what a worker cannot know by itself. Nothing is reckoned here that need not
# be: the server would read and plan it anew with every claim, which is a good part of what finding one job costs.
CLAIM = """
select id, task, queue, priority, payload, attempt, failures, resets, max_attempts, run_at, created_at, expires_at, unique_key, tags
  from shiftwork.take(%s::jsonb)
"""
START = "select id, answer from shiftwork.start(%s::jsonb)"
SETTLE = (
    "select answer, state::text as state, problem, json_agg(id)::text as ids"
    " from shiftwork.settle(%s::jsonb) group by answer, state, problem"
)
RELEASE = "select id, answer from shiftwork.release(%s::jsonb)"
HEARTBEAT = "select shiftwork.heartbeat(%s::jsonb)::text as answer"
REPORT = "select shiftwork.report(%s::jsonb)::text as answer"
DECLARE_TASKS = "select shiftwork.declare_tasks(%s::jsonb) as written"
REAP = "select id, attempt, worker, answer from shiftwork.reap(%s::bigint, %s::int, %s::boolean)"
PROMOTE = "select promoted from shiftwork.promote(%s::int)"
EXPIRE = "select shiftwork.expire(%s::int) as expired"
FORGET_WORKERS = "select shiftwork.forget_workers() as forgotten"
REGISTER_TASK = """
select shiftwork.register_task(
  %s, %s, queue => %s, priority => %s::int, retry => %s::jsonb, timeout => make_interval(secs => %s), before => %s, after => %s,
  commits => %s::boolean, description => %s, unique_scope => %s, unique_action => %s,
  unique_window => make_interval(secs => %s), merge => %s::jsonb, max_resets => %s::int, on_lost => %s) as news
"""
SQL_TASKS = """
select name, handler, queue, retry::text as retry, extract(epoch from timeout)::text as timeout, commits
  from shiftwork.tasks where handler is not null order by name
"""
RUN_JOB = (
    "set client_min_messages = notice;"
    " select answer, state, wait, error::text from shiftwork.run_job(%s, %s, %s, true)"
)
ROUTINE_CALL = """
select call, gives, set_config(%s, concat_ws(' ', %s, %s, true, 'commits'), false) from shiftwork.routine_call(%s, false)
"""
CLOSE_TRANSACTION = f"release savepoint shiftwork_handler; select shiftwork.conclude(%s); commit; {FORGET}"
CONCLUDE = "select shiftwork.conclude(%s::jsonb)"
SLEEP = "select virtual_transaction from shiftwork.sleep(%s::double precision)"
ROUSE = "select shiftwork.rouse()"
FENCE = "select shiftwork.fence(%s::bigint, %s::int)"

# What people steer with.
# It gives up waiting for claims that are under way; who has the lock all the same knows that it has seen the last of them.
PAUSE = """
select pg_try_advisory_xact_lock(hashtextextended(%s, 0)) as alone
  from shiftwork.pause(queue => %s::text, task => %s::text, worker => %s::bigint, everything => %s::boolean,
                       lasting => make_interval(secs => %s), reason => %s::text)
"""
PAUSED = """
select (select pause.since::text from shiftwork.pauses as pause
         where pause.kind = shiftwork.kind_of(%s::text, %s::text, %s::bigint) and pause.name = coalesce(%s::text, %s::text, %s::text, '')
           and (pause.until is null or pause.until > shiftwork.clock())) as since,
       %s::bigint is not null
         and not exists (select from shiftwork.workers as alive where alive.id = %s::bigint and alive.gone_at is null) as gone,
       array(select lock.virtualtransaction from pg_locks as lock
              where lock.locktype = 'advisory' and lock.mode = 'ShareLock' and lock.granted and lock.objsubid = 1
                and lock.database = (select here.oid from pg_database as here where here.datname = current_database())
                and lock.classid::bigint << 32 | lock.objid::bigint = hashtextextended(%s, 0)) as claims
"""
RESUME = """
select shiftwork.resume(queue => %s::text, task => %s::text, worker => %s::bigint, everything => %s::boolean) as resumed
"""
LIMIT = "select shiftwork.limit_running(%s::int, queue => %s::text, task => %s::text) as changed"
DECLARE_LIMITS = "select shiftwork.declare_limits(%s::jsonb) as written"
RETAIN = "select shiftwork.retain(%s::text, completed => %s::int, failed => %s::int, cancelled => %s::int, expired => %s::int)"
PURGE = "select partitions, jobs, more from shiftwork.purge_part(%s::boolean)"
EXTEND_HISTORY = "select shiftwork.extend_history() as made"
# Everything that has a name of its kind: jobs that are not finished, what the registry says, limits and pauses.
KNOWN = """
with live as (
  select <kind> as name, jsonb_object_agg(state, number) as jobs
    from (select <kind>, state, count(*) as number from shiftwork.jobs group by <kind>, state) as counted
   group by <kind>
), paused as (
  select name, extract(epoch from until)::text as until, reason from shiftwork.pauses
   where kind = '<kind>' and (until is null or until > shiftwork.clock())
), limited as (
  select name, max_running from shiftwork.limits where kind = '<kind>'
)
select name, coalesce(live.jobs, '{}') as jobs, <said>, limited.max_running,
       paused.name is not null as paused, paused.until, paused.reason
  from live full join shiftwork.<kind>s as known using (name) full join paused using (name) full join limited using (name)
 order by name
"""
QUEUES = KNOWN.replace("<kind>", "queue").replace(
    "<said>", ", ".join(f"known.keep_{state} as {state}" for state in State if state.is_final)
)
TASKS = KNOWN.replace("<kind>", "task").replace(
    "<said>", "known.queue, known.priority, known.max_attempts, known.description"
)
MEASURE_QUEUES = "select queue, ready, oldest from shiftwork.measure_queues(%s::text[])"
# Each with what it said of itself last, and with the jobs that it holds, the oldest first.
WORKERS = """
select worker.id, worker.label, worker.name, worker.host, worker.pid, worker.queues, worker.details,
       case when worker.gone_at is not null then 'gone' when worker.lease_until <= shiftwork.clock() then 'lapsed'
            when paused.name is not null then 'paused' else 'alive' end as state,
       extract(epoch from paused.until)::text as paused_until,
       extract(epoch from worker.started_at)::text as started_at, extract(epoch from worker.seen_at)::text as seen_at,
       extract(epoch from worker.lease_until)::text as lease_until, extract(epoch from worker.gone_at)::text as gone_at,
       last.running, last.held, last.unwritten, last.jobs, last.memory, last.cpu, coalesce(holding.jobs, '[]') as holding
  from shiftwork.workers as worker
  left join lateral (
    select said.* from shiftwork.snapshots as said where said.worker = worker.id order by said.at desc limit 1) as last on true
  left join lateral (
    select jsonb_agg(jsonb_build_object('id', job.id, 'task', job.task, 'queue', job.queue, 'attempt', job.attempt,
                                        'started_at', extract(epoch from job.started_at)) order by job.claimed_at, job.id) as jobs
      from (select theirs.* from shiftwork.jobs as theirs
             where theirs.state = 'running' and theirs.worker = worker.id order by theirs.claim limit 100) as job
  ) as holding on worker.gone_at is null
  left join lateral (
    select pause.name, pause.until from shiftwork.pauses as pause
     where (pause.kind = 'all' or pause.kind = 'worker' and pause.name = worker.id::text)
       and (pause.until is null or pause.until > shiftwork.clock())
     order by pause.until desc nulls first limit 1) as paused on true
 where (worker.gone_at is null or %s::boolean) and (%s::bigint is null or worker.id = %s)
 order by worker.gone_at is not null, worker.id
"""
# Whoever was at a run that has no end is dead, unless it is known to be alive, and has begun no other since.
HOW_IT_WENT = """
case when run.ended_at is not null then case when run.error is null then 'done' else 'failed' end
     when not exists (select from shiftwork.runs as later
                       where later.duty = run.duty and later.host = run.host and later.id > run.id
                         and later.worker is not distinct from run.worker)
      and case when run.worker is null then run.began_at > shiftwork.clock() - interval '1 hour'
               else exists (select from shiftwork.workers as alive
                             where alive.id = run.worker and alive.gone_at is null and alive.lease_until > shiftwork.clock()) end
     then 'running' else 'lost' end
"""
# Each with the hosts on which it was done, the last one first.
DUTIES = """
select duty.name, extract(epoch from duty.every)::float as every, extract(epoch from duty.due_at)::text as due_at,
       duty.worker, extract(epoch from duty.taken_at)::text as taken_at, extract(epoch from duty.ended_at)::text as ended_at,
       duty.seconds, duty.did, duty.error, coalesce(done.hosts, '[]') as hosts
  from shiftwork.duties as duty
  left join lateral (
    select jsonb_agg(jsonb_build_object('host', host.name, 'state', last.state, 'began_at', extract(epoch from host.began_at),
                                        'ended_at', extract(epoch from host.ended_at)) order by host.began_at desc) as hosts
      from (select run.host as name, max(run.id) as last, max(run.began_at) as began_at, max(run.ended_at) as ended_at
              from shiftwork.runs as run where run.duty = duty.name group by run.host order by 3 desc limit 100) as host
     cross join lateral (select <went> as state from shiftwork.runs as run where run.id = host.last) as last) as done on true
 order by duty.name
""".replace("<went>", HOW_IT_WENT)
RUNS = """
select run.host, run.worker, <went> as state, extract(epoch from run.began_at)::text as began_at,
       extract(epoch from run.ended_at)::text as ended_at, run.seconds, run.did, run.error
  from shiftwork.runs as run where run.duty = %s order by run.id desc limit %s
""".replace("<went>", HOW_IT_WENT)
RUN_DAYS = """
select day::text as day, host, runs, errors, shortest, seconds / runs as mean, longest, did
  from shiftwork.run_days where duty = %s order by run_days.day desc, host limit %s
"""
BEGIN_RUN = "select shiftwork.begin_run(%s, host => %s) as run"
END_RUN = "select shiftwork.end_run(%s::jsonb)"
RUNNING = """
select id, task, queue, worker, attempt, extract(epoch from started_at)::text as started_at, count(*) over () as many
  from shiftwork.jobs
 where state = 'running' and queue = coalesce(%s::text, queue) and task = coalesce(%s::text, task)
   and worker = coalesce(%s::bigint, worker)
 order by id limit %s
"""
LIMITS = """
select one.kind, one.name, one.max_running, count(permit.job)::int as running
  from shiftwork.limits as one
  left join shiftwork.permits as permit on permit.kind = one.kind and permit.name = one.name
 group by one.kind, one.name, one.max_running order by one.kind, one.name collate "C"
"""
INSTALLED = "select (value ->> 'version')::int as protocol from shiftwork.settings where name = 'protocol'"
AWAIT_RESULTS = "select shiftwork.await_results(%s::double precision)"


def _text(document: Mapping[str, object]) -> str:
    return msgspec.json.encode(document).decode()


def _line(entry: Mapping[str, object]) -> tuple[str | None, object]:
    """The level and the text of an entry."""
    key = entry.get("key")
    return None if key is None else str(key).removeprefix("log."), entry.get("out")


def _outcomes(worker: int, outcomes: Sequence[bytes], *, brief: bool = False) -> str:
    told = b",".join(outcomes).decode()
    carrying = "true" if '"jobs"' in told else "false"  # sooner found here than there
    wish = ',"brief":true' if brief else ""
    return f'{{"worker":{worker:d},"carrying":{carrying}{wish},"outcomes":[{told}]}}'


class Protocol:
    """The verbs of one schema."""

    apart = None
    in_turn = False
    notifies = True
    enqueues = True
    is_ready = True

    def __init__(self, schema: str = "shiftwork") -> None:
        self.schema = check_schema(schema)

    @property
    def channels(self) -> tuple[str, str]:
        """Where it is said that there is work, and that a job is to be looked at."""
        return f"{self.schema}_wake", f"{self.schema}_cancel"

    @property
    def _claims(self) -> str:
        """What the lock is called that claims share, and that pauses and limits want alone."""
        return f"{self.schema} claims"

    def session(self, worker: int | str) -> str:
        """What the sessions of a worker are called: the reaper finds by it those of one that is lost."""
        return f"{self.schema} {worker}"

    def enqueue(self, jobs: str, within: float | None = None) -> Statement:
        """Enqueue the jobs of one JSON array, waiting for a lock no longer than so many seconds."""
        statement = self._statement(ENQUEUE, jobs)
        if within is None:
            return statement
        return replace(statement, under=f"set local lock_timeout = {within * 1000:.0f}; ")

    def enqueue_one(self, job: NewJob[object]) -> Statement:
        """Enqueue one job that goes at once, and of which nothing is said but what tasks are declared with."""
        values = job.task, bytes(job.payload).decode()
        if (job.queue, job.priority, job.max_attempts) == (None, None, None):
            return self._exchanged(ENQUEUE_PLAIN, *values)
        priority = None if job.priority is None else int(job.priority)
        max_attempts = None if job.max_attempts is None else int(job.max_attempts)
        return self._exchanged(ENQUEUE_ONE, *values, job.queue, priority, max_attempts)

    def get(self, ids: Sequence[int]) -> Statement:
        """The jobs with these ids, wherever they are in their life."""
        return self._look(GET, list(ids))

    def attempts(self, ids: Sequence[int]) -> Statement:
        """Attempts of these jobs that did not succeed."""
        return self._look(ATTEMPTS, list(ids))

    def list(
        self,
        *,
        task: str | None,
        queue: str | None,
        states: Collection[State] | None,
        before: int | None,
        limit: int,
        offset: int,
    ) -> Statement:
        """Jobs that match, newest first."""
        matching = self._matching(task, queue, states)
        return self._look(LIST, *matching, before, before, limit, offset)

    def counts(self, task: str | None, queue: str | None, states: Collection[State] | None) -> Statement:
        """How many jobs match, by state."""
        return self._look(COUNTS, *self._matching(task, queue, states))

    def cancel(self, ids: Sequence[int], reason: str | None, actor: str | None) -> Statement:
        """End these jobs as cancelled, or signal the handlers that run them."""
        return self._statement(CANCEL, list(ids), reason, actor)

    def complete(self, job: int, result: str | None, actor: str | None) -> Statement:
        """End a job as completed, whoever holds it."""
        return self._statement(COMPLETE, job, result, actor)

    def progress(self, job: int) -> Statement:
        """How far the last attempt of a job is."""
        return self._look(PROGRESS, job)

    def logs(self, job: int, after: int, limit: int, *, last: bool) -> Statement:
        """Lines that a job logged behind one of them: the first, or the last, newest first."""
        return self._look(LOGS.replace("<order>", "desc" if last else "asc"), job, after, limit)

    def revive(self, ids: Sequence[int], actor: str | None) -> Statement:
        """Give finished jobs another life."""
        return self._statement(REVIVE, list(ids), actor)

    def run_now(self, ids: Sequence[int], actor: str | None, *, strict: bool) -> Statement:
        """Make scheduled jobs due at once."""
        return self._statement(RUN_NOW, list(ids), actor, strict)

    def register(self, details: Mapping[str, object]) -> Statement:
        """A process makes itself known as a worker."""
        return self._statement(REGISTER, _text(details))

    def leave(self, worker: int) -> Statement:
        """A worker's lease ends now."""
        return self._statement(LEAVE, worker)

    def claim(self, request: Mapping[str, object]) -> Statement:
        """Jobs for a worker, and a report."""
        return Statement(_written(CLAIM, self.schema), (_text(request),), as_tuples=True)

    def await_claims(self, worker: int) -> Statement | None:
        """A heartbeat that reconciles waits for them itself."""
        return None

    def start(self, worker: int, held: Held) -> Statement:
        """The code of prefetched jobs is about to begin."""
        return self._statement(START, _text({"worker": worker, "held": held}))

    def settle(self, worker: int, outcomes: Sequence[bytes], *, brief: bool = False) -> Statement:
        """How attempts ended, each outcome as JSON; one row for those with the same answer."""
        return self._statement(SETTLE, _outcomes(worker, outcomes, brief=brief))

    def release(self, worker: int, held: Held, crashed: Mapping[int, str]) -> Statement:
        """Give jobs back; against those that crashed, with the reason for each, that is counted."""
        return self._statement(RELEASE, _text({"worker": worker, "held": held, "crashed": crashed}))

    def heartbeat(self, request: Mapping[str, object]) -> Statement:
        """Renew a lease, and compare what is held."""
        return self._statement(HEARTBEAT, _text(request))

    def report(self, request: Mapping[str, object]) -> Statement:
        """What handlers say while they run."""
        return self._statement(REPORT, _text(request))

    def add_log(self, worker: int, job: int, attempt: int, entry: Mapping[str, object]) -> Statement:
        """Append a line to the log of a job that is held."""
        return self._statement(ADD_LOG, job, attempt, job, attempt, *_line(entry), job, attempt)

    def change_log(
        self, worker: int, job: int, attempt: int, place: int, entry: Mapping[str, object]
    ) -> Statement:
        """Change a line of the log of a job that is held."""
        return self._statement(CHANGE_LOG, job, attempt, *_line(entry), place, job, attempt)

    def declare_tasks(self, tasks: Sequence[Mapping[str, object]]) -> Statement:
        """Enter tasks in the registry."""
        return self._statement(DECLARE_TASKS, msgspec.json.encode(tasks).decode())

    def reap(self, reaper: int, most: int, *, thorough: bool) -> Statement:
        """Take jobs back from workers whose lease has lapsed."""
        return self._statement(REAP, reaper, most, thorough)

    def promote(self, most: int) -> Statement:
        """Jobs whose time has come may be claimed."""
        return self._statement(PROMOTE, most)

    def expire(self, most: int) -> Statement:
        """End jobs that nobody started in time."""
        return self._statement(EXPIRE, most)

    def forget_workers(self) -> Statement:
        """Forget workers that are gone, and what workers said of themselves, after some days."""
        return self._statement(FORGET_WORKERS)

    def register_task(self, *said: object) -> Statement:
        """Enter a task whose code is a routine in this database."""
        return self._statement(REGISTER_TASK, *said)

    def sql_tasks(self) -> Statement:
        """Tasks whose code is a routine in this database."""
        return self._look(SQL_TASKS)

    def run_job(self, worker: int, job: int, attempt: int) -> Statement:
        """Call the routine of a job and write what came of it: in one message, and so in one transaction."""
        return self._statement(f"{RUN_JOB}; {FORGET}", worker, job, attempt, self.session(worker))

    def routine_call(self, job: int, attempt: int, routine: str) -> Statement:
        """How a routine is called, in a session that knows from now on which job that is for."""
        return self._statement(ROUTINE_CALL, f"{self.schema}.job", job, attempt, routine)

    def open_transaction(self, held: Held) -> Statement:
        """Begin the transaction of jobs, whose rows stay locked until its end."""
        return opening([self.fence(*one) for one in held])

    def undo_in_transaction(self) -> Statement:
        """Take back what the handler of a job did in its transaction."""
        return Statement("rollback to savepoint shiftwork_handler")

    def close_transaction(self, worker: int, outcome: bytes, *, undo: bool) -> Statement:
        """Write how the job ended, and commit, with what its handler did or without."""
        text = f"rollback to savepoint shiftwork_handler; {CLOSE_TRANSACTION}" if undo else CLOSE_TRANSACTION
        return self._statement(text, _outcomes(worker, [outcome]), self.session(worker))

    def conclude(self, worker: int, outcome: bytes) -> Statement:
        """Write how a job ended, or fail, in the caller's transaction."""
        return self._statement(CONCLUDE, _outcomes(worker, [outcome]))

    def sleep(self, seconds: float) -> Statement:
        """Let inserts notify for so long; says which transactions were inserting already."""
        return self._look(SLEEP, seconds)

    def rouse(self) -> Statement:
        """Let inserts not notify any more, unless somebody says anew that it sleeps."""
        return self._statement(ROUSE)

    def fence(self, job: int, attempt: int) -> Statement:
        """Go on only if this attempt holds its job; until the transaction ends, it keeps it."""
        return self._statement(FENCE, job, attempt)

    def pause(
        self,
        queue: str | None,
        task: str | None,
        worker: int | None,
        seconds: float | None,
        reason: str | None,
        *,
        everything: bool,
    ) -> Statement:
        """Let nobody claim from a queue, jobs of a task or anything, or a worker nothing; says whether no claim is under way."""
        return self._statement(PAUSE, self._claims, queue, task, worker, everything, seconds, reason)

    def paused(self, queue: str | None, task: str | None, worker: int | None) -> Statement:
        """Since when that is paused, whether its worker is gone, and which transactions are claiming."""
        meant = queue, task, worker
        return self._look(PAUSED, *meant, *meant, worker, worker, self._claims)

    def resume(
        self, queue: str | None, task: str | None, worker: int | None, *, everything: bool
    ) -> Statement:
        """End a pause."""
        return self._statement(RESUME, queue, task, worker, everything)

    def limit(self, most: int | None, queue: str | None, task: str | None) -> Statement:
        """Let so many run at once of a queue, of a task or over all; None lifts the limit."""
        return self._statement(LIMIT, most, queue, task)

    def declare_limits(self, limits: Mapping[str, object]) -> Statement:
        """The limits that a program has."""
        return self._statement(DECLARE_LIMITS, _text(limits))

    def retain(self, queue: str, days: Sequence[int | None]) -> Statement:
        """How many days to keep what is completed, failed, cancelled and expired."""
        return self._statement(RETAIN, queue, *days)

    def purge(self, *, archive: bool) -> Statement:
        """Forget what may be forgotten."""
        return self._statement(PURGE, archive)

    def extend_history(self) -> Statement:
        """Make the partitions of the coming days."""
        return self._statement(EXTEND_HISTORY)

    def queues(self) -> Statement:
        """Queues: what is in them, how long they keep what, and whether they are paused."""
        return self._look(QUEUES)

    def tasks(self) -> Statement:
        """Tasks: what is registered, their jobs, and whether they are paused."""
        return self._look(TASKS)

    def measure_queues(self, queues: Sequence[str]) -> Statement:
        """How much waits in these queues, and for how long."""
        return self._look(MEASURE_QUEUES, list(queues))

    def workers(self, worker: int | None, *, gone: bool) -> Statement:
        """Workers: what they serve, hold and say of themselves; those that are gone too, if asked for."""
        return self._look(WORKERS, gone, worker, worker)

    def duties(self) -> Statement:
        """What is done for all: when next, by whom, and how it went."""
        return self._look(DUTIES)

    def runs(self, duty: str, limit: int) -> Statement:
        """The last runs of a duty, on all hosts."""
        return self._look(RUNS, duty, limit)

    def run_days(self, duty: str, limit: int) -> Statement:
        """How often a duty was done on each day and host, and how long that took."""
        return self._look(RUN_DAYS, duty, limit)

    def begin_run(self, duty: str, host: str) -> Statement:
        """Somebody who is no worker begins what is a duty of workers."""
        return self._statement(BEGIN_RUN, duty, host)

    def end_run(self, told: Mapping[str, object]) -> Statement:
        """And has ended it."""
        return self._statement(END_RUN, _text(told))

    def running(self, queue: str | None, task: str | None, worker: int | None, limit: int) -> Statement:
        """What runs, the oldest first, each with how many there are."""
        return self._look(RUNNING, queue, task, worker, limit)

    def limits(self) -> Statement:
        """How many jobs may run at once in the whole cluster, and how many do: over all, of queues and of tasks."""
        return self._look(LIMITS)

    def installed(self) -> Statement:
        """Which protocol the schema has."""
        return self._look(INSTALLED)

    def accept(self, rows: Rows) -> Sequence[Statement]:
        """Refuse a schema whose protocol is older than ours; a newer one serves older programs."""
        installed = rows[0]["protocol"] if rows else 0
        if installed < PROTOCOL:
            raise SchemaTooOld(
                f"the schema {self.schema!r} has protocol {installed}, and {PROTOCOL} is needed; run: shiftwork migrate"
            )
        return ()

    def await_results(self, seconds: float) -> Statement:
        """Ask that ended jobs be announced for so long."""
        return self._look(AWAIT_RESULTS, seconds)

    def _matching(
        self, task: str | None, queue: str | None, states: Collection[State] | None
    ) -> tuple[object, ...]:
        wanted = None if states is None else [state.value for state in states]
        return task, task, queue, queue, wanted, wanted

    def _statement(self, text: str, *params: object) -> Statement:
        return Statement(_written(text, self.schema), params)

    def _exchanged(self, text: str, *params: object) -> Statement:
        """Of texts and numbers only, which cross as they are."""
        return Statement(_written(text, self.schema), params, plain=_numbered(text, self.schema))

    def _look(self, text: str, *params: object) -> Statement:
        return Statement(_written(text, self.schema), params, writes=False)


@lru_cache(maxsize=1000)
def _written(text: str, schema: str) -> str:
    for part, columns in PARTS.items():
        text = text.replace(part, columns)
    return text.replace("shiftwork.", f'"{schema}".')


@lru_cache(maxsize=1000)
def _numbered(text: str, schema: str) -> bytes:
    """With $1, $2 … for its values, as the server has them."""
    first, *others = _written(text, schema).split("%s")
    return (first + "".join(f"${number}{part}" for number, part in enumerate(others, 1))).encode()
