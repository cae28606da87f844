-- Children: jobs that another has spawned, and for which it waits.
alter table shiftwork.jobs add column parent bigint;
alter table shiftwork.history add column parent bigint;
create index jobs_parent on shiftwork.jobs (parent, id) where parent is not null;

-- Parents that somebody has to look at, since a child of theirs has ended, not well if it has a failure; or since they wait from now on.
create table shiftwork.child_ends (
  at       timestamptz not null default shiftwork.clock(),
  parent   bigint not null,
  failure  jsonb
);
create index child_ends_at on shiftwork.child_ends (at);

create or replace view shiftwork.all_jobs as
select id, task, queue, priority, payload, state, run_at, expires_at, attempt, failures, resets, max_attempts,
       unique_key, worker, created_at, claimed_at, started_at, finished_at, result, error, tags, null::date as forget_on, parent
  from shiftwork.jobs
union all
select id, task, queue, priority, payload, state, run_at, expires_at, attempt, failures, resets, max_attempts,
       unique_key, worker, created_at, claimed_at, started_at, finished_at, result, error, tags, nullif(forget_on, 'infinity'), parent
  from shiftwork.history;
