-- Two rooms: jobs that are not finished, and history of those that are. Beside them, what workers and people need.

create type shiftwork.job_state as enum (
  'blocked', 'scheduled', 'ready', 'running', 'waiting',
  'completed', 'failed', 'cancelled', 'expired'
);

create type shiftwork.unique_scope as enum ('pending', 'unfinished', 'window');

-- The only clock: the start of the statement, or of the transaction where a procedure has just committed. Tests replace it.
create function shiftwork.clock() returns timestamptz language sql stable parallel safe
return greatest(now(), statement_timestamp());

-- What a value may be is said by its domain: it is checked where the value is set, and not again whenever its row changes.
create domain shiftwork.task_name as text check (octet_length(value) between 1 and 200);
create domain shiftwork.queue_name as text check (octet_length(value) between 1 and 100);
create domain shiftwork.unique_key as text check (octet_length(value) between 1 and 255);
create domain shiftwork.counter as int check (value between 0 and 1000000000);
create domain shiftwork.allowance as int check (value > 0);
create domain shiftwork.instant as timestamptz check (value >= '0001-01-01 00:00+00' and value < '10000-01-01 00:00+00');
create domain shiftwork.payload as jsonb check (jsonb_typeof(value) = 'object');
create domain shiftwork.tags as text[] check (cardinality(value) <= 50);

create table shiftwork.jobs (
  id            bigint generated always as identity primary key,
  state         shiftwork.job_state not null default 'ready',
  priority      int not null,
  run_at        shiftwork.instant not null,
  created_at    shiftwork.instant not null,
  attempt       shiftwork.counter not null default 0,
  failures      shiftwork.counter not null default 0,
  resets        shiftwork.counter not null default 0,
  max_attempts  shiftwork.allowance not null,
  expires_at    shiftwork.instant,
  claimed_at    timestamptz,
  started_at    timestamptz,
  finished_at   timestamptz,
  worker        bigint,
  claim         bigint,
  keep          int,
  unique_scope  shiftwork.unique_scope,
  task          shiftwork.task_name not null,
  queue         shiftwork.queue_name not null,
  payload       shiftwork.payload not null default '{}',
  unique_key    shiftwork.unique_key,
  held_key      text,
  tags          shiftwork.tags not null default '{}',
  result        jsonb,
  error         jsonb
) with (
  fillfactor = 80,
  autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000,
  autovacuum_analyze_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0
);

-- What claim walks through, in its order; what promote walks through; whose jobs the reaper takes; what has a deadline.
create index jobs_ready on shiftwork.jobs (queue, priority, run_at, id) where state = 'ready';
create index jobs_due on shiftwork.jobs (run_at, id) where state = 'scheduled';
create index jobs_running on shiftwork.jobs (worker, claim) where state = 'running';
create index jobs_expiring on shiftwork.jobs (expires_at, id) where expires_at is not null and state < 'running';
create unique index jobs_unique on shiftwork.jobs (task, held_key) where held_key is not null;

-- A job that is held has a worker and the time of its claim, no other has both, and no job here is finished. An index that no row gets
-- into: a CHECK would be read from its text again by every statement that writes here, which costs a single enqueue an eighth of its time.
create function shiftwork.refuse_state(job bigint, state shiftwork.job_state) returns void language plpgsql immutable as $$
begin raise check_violation; end $$;                    -- says more in the protocol, and is re-created with it
create index jobs_misfit on shiftwork.jobs ((shiftwork.refuse_state(id, state) is null)) where state = any (
  case when claimed_at is null or worker is null
       then '{running,waiting,completed,failed,cancelled,expired}'::shiftwork.job_state[]
       else '{blocked,scheduled,ready,completed,failed,cancelled,expired}' end);

-- Finished jobs, by the day on which they may be forgotten; kept for ever is 'infinity', so that the default partition
-- stays empty: attaching a partition reads all of it under an exclusive lock.
create table shiftwork.history (
  like shiftwork.jobs,
  forget_on date not null
) partition by range (forget_on);
alter table shiftwork.history alter max_attempts type int;        -- what is over may say anything: revive looks at it

create index history_id on shiftwork.history (id);
-- Whoever is here has ended, at some time, and with an error unless it was completed.
create index history_misfit on shiftwork.history ((shiftwork.refuse_state(id, state) is null)) where state <> all (
  case when finished_at is null then '{}'::shiftwork.job_state[]
       when error is null then '{completed}' else '{failed,cancelled,expired}' end);
create index history_unique on shiftwork.history (task, unique_key, created_at) where unique_key is not null;
create table shiftwork.history_default partition of shiftwork.history default;
create index history_default_forget on shiftwork.history_default (forget_on);
create table shiftwork.history_forever partition of shiftwork.history for values from ('infinity') to (maxvalue);

-- Both rooms. One statement over it sees a job once, never twice and never not at all, while it moves. No day to
-- be forgotten on: it is not finished, or kept for ever.
create view shiftwork.all_jobs as
select id, task, queue, priority, payload, state, run_at, expires_at, attempt, failures, resets, max_attempts,
       unique_key, worker, created_at, claimed_at, started_at, finished_at, result, error, tags, null::date as forget_on
  from shiftwork.jobs
union all
select id, task, queue, priority, payload, state, run_at, expires_at, attempt, failures, resets, max_attempts,
       unique_key, worker, created_at, claimed_at, started_at, finished_at, result, error, tags, nullif(forget_on, 'infinity')
  from shiftwork.history;


-- Attempts that failed or were lost with their worker; what succeeded is told by the job itself.
create table shiftwork.attempts (
  job         bigint not null,
  attempt     int not null,
  outcome     text not null check (outcome in ('failed', 'lost')),
  will_retry  boolean not null,
  code        text not null,
  error       jsonb not null,
  worker      bigint,
  claimed_at  timestamptz,
  started_at  timestamptz,
  ended_at    timestamptz not null,
  primary key (job, attempt)
);

-- A process that runs jobs: a fresh id at every start, one lease for all that it holds.
create table shiftwork.workers (
  id           bigint generated always as identity primary key,
  token        uuid not null default gen_random_uuid(),
  name         text not null default 'worker' check (name ~ '^[A-Za-z0-9._-]{1,100}$'),
  host         text not null default '' check (octet_length(host) <= 255),
  pid          int not null default 0,
  backend_pid  int not null default pg_backend_pid(),
  queues       text[] not null default '{}',
  details      jsonb not null default '{}',
  started_at   timestamptz not null default shiftwork.clock(),
  seen_at      timestamptz not null default shiftwork.clock(),
  lease_until  timestamptz not null check (isfinite(lease_until)),
  gone_at      timestamptz,
  label        text not null generated always as (name || '@' || host || ':' || pid || '#' || token) stored
) with (fillfactor = 50);
create index workers_lease on shiftwork.workers (lease_until) where gone_at is null;

-- What is known of a task: the values that an enqueue leaves out, and what becomes of a job that is lost.
create table shiftwork.tasks (
  name           text primary key check (octet_length(name) between 1 and 200),
  queue          shiftwork.queue_name,
  priority       int,
  max_attempts   shiftwork.allowance,
  retry          jsonb,
  max_resets     int check (max_resets >= 0),
  on_lost        text not null default 'requeue' check (on_lost in ('requeue', 'fail')),
  unique_scope   shiftwork.unique_scope,
  unique_action  text check (unique_action in ('return', 'replace', 'merge', 'refuse')),
  unique_window  interval,
  merge          jsonb,
  handler        text,
  description    text,
  registered_at  timestamptz not null default shiftwork.clock()
);

-- Retention in days per queue and ending (2147483647: for ever; null: as '*' says).
create table shiftwork.queues (
  name            text primary key check (octet_length(name) between 1 and 100),
  keep_completed  int check (keep_completed >= 0),
  keep_failed     int check (keep_failed >= 0),
  keep_cancelled  int check (keep_cancelled >= 0),
  keep_expired    int check (keep_expired >= 0),
  description     text,
  constraint the_default_is_whole check (
    name <> '*' or (keep_completed is not null and keep_failed is not null
                    and keep_cancelled is not null and keep_expired is not null)
  )
);
insert into shiftwork.queues values ('*', 7, 30, 7, 30, 'what holds for every queue that says nothing else');

-- Queues and tasks that nobody may claim from, until a time or until resumed.
create table shiftwork.pauses (
  kind    text not null check (kind in ('queue', 'task')),
  name    text not null check (octet_length(name) between 1 and 200),
  since   timestamptz not null default shiftwork.clock(),
  until   timestamptz,
  reason  text,
  actor   text not null,
  primary key (kind, name)
);

-- Requests to cancel a job that somebody holds. Apart from its row, which its handler may have locked.
create table shiftwork.signals (
  job           bigint primary key,
  requested_at  timestamptz not null default shiftwork.clock(),
  reason        text,
  actor         text not null
);

create table shiftwork.progress (
  job       bigint primary key,
  attempt   int not null,
  fraction  real check (fraction between 0 and 1),
  message   text,
  at        timestamptz not null default shiftwork.clock()
);

create table shiftwork.logs (
  id       bigint generated always as identity primary key,
  job      bigint not null,
  attempt  int not null,
  at       timestamptz not null default shiftwork.clock(),
  level    text not null,
  message  text not null
);
create index logs_job on shiftwork.logs (job, id);

-- Which jobs a blocked job waits for, and what it needs of their results.
create table shiftwork.edges (
  job     bigint not null,
  needs   bigint not null,
  result  jsonb,
  primary key (job, needs),
  check (job <> needs)
);
create index edges_needs on shiftwork.edges (needs);

create table shiftwork.schedules (
  name      text primary key check (octet_length(name) between 1 and 200),
  task      text not null,
  payload   jsonb not null default '{}' check (jsonb_typeof(payload) = 'object'),
  queue     text,
  cron      text not null,
  timezone  text not null default 'UTC',
  next_at   timestamptz,
  last_at   timestamptz
);

-- What people did to jobs, queues and tasks: one row per act, in its transaction.
create table shiftwork.audit (
  id      bigint generated always as identity primary key,
  at      timestamptz not null default shiftwork.clock(),
  login   text not null default session_user,
  actor   text not null,
  verb    text not null,
  target  jsonb not null,
  before  jsonb,
  after   jsonb
);

create table shiftwork.settings (
  name   text primary key,
  value  jsonb not null,
  constraint max_payload_is_measured check (            -- smaller payloads are not measured at all
    name <> 'max_payload' or (jsonb_typeof(value) = 'number' and value between '8192' and '268435455')
  )
);
insert into shiftwork.settings values ('max_payload', '1048576');

-- The state machine as data: which verb may move a job from which state to which. No `before` means that it is born.
create table shiftwork.moves (
  verb    text not null,
  before  shiftwork.job_state,
  after   shiftwork.job_state not null,
  unique nulls not distinct (verb, before, after)
);

-- Until when somebody sleeps, and until when somebody waits for a result: epoch milliseconds of the clock. Sequences, since
-- their values stand outside of MVCC: every transaction sees them at once, and they never bloat.
create sequence shiftwork.asleep_until minvalue 0 start 0;
create sequence shiftwork.awaited_until minvalue 0 start 0;
create sequence shiftwork.claims;

-- What a plain INSERT fires. The function is written in the protocol, and re-created with it; here it only gets its place,
-- since a trigger cannot be made anew without stopping everybody who writes to the table.
create function shiftwork.complete_insert() returns trigger language plpgsql as $$ begin return new; end $$;

create trigger complete_insert before insert on shiftwork.jobs
  for each row when (new.created_at is null) execute function shiftwork.complete_insert();
