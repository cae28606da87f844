-- The floor: what bare tables and bare statements do on this machine, without states to guard, retention, keys, limits or checks.
-- Everything is measured against it, in the same run. Frozen: changing it would make figures from before and after incomparable.

-- name: tables
drop schema if exists floor cascade;
create schema floor;
create table floor.jobs (
  id          bigint generated always as identity primary key,
  task        text not null,
  queue       text not null default 'default',
  priority    int not null default 0,
  payload     jsonb not null default '{}',
  state       text not null default 'ready',
  run_at      timestamptz not null default now(),
  attempt     int not null default 0,
  worker      bigint,
  created_at  timestamptz not null default now(),
  claimed_at  timestamptz
);
create index jobs_ready on floor.jobs (queue, priority, run_at, id) where state = 'ready';
create table floor.history (
  id           bigint not null,
  task         text not null,
  queue        text not null,
  priority     int not null,
  payload      jsonb not null,
  state        text not null,
  run_at       timestamptz not null,
  attempt      int not null,
  worker       bigint,
  created_at   timestamptz not null,
  claimed_at   timestamptz,
  finished_at  timestamptz not null,
  result       jsonb
);
create index history_id on floor.history (id);

-- name: fill
insert into floor.jobs (task, payload) select 'nothing', '{"n": 1}' from generate_series(1, %s);

-- name: claim
update floor.jobs
   set state = 'running', attempt = attempt + 1, worker = %s, claimed_at = now()
 where id = any(array(
   select id from floor.jobs where state = 'ready' and queue = 'default'
    order by priority, run_at, id limit %s for update skip locked))
returning id, task, payload, attempt;

-- name: move
with told as (
  select * from jsonb_to_recordset(%s) as (id bigint, attempt int, result jsonb)
), gone as (
  delete from floor.jobs as job using told
   where job.id = told.id and job.attempt = told.attempt and job.worker = %s
  returning job.*, told.result
)
insert into floor.history
select id, task, queue, priority, payload, 'completed', run_at, attempt, worker, created_at, claimed_at, now(), result from gone;

-- name: insert
insert into floor.jobs (task, payload) values (%s, %s);
