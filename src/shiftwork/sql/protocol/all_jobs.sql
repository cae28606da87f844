-- Both rooms. One statement over it sees a job once, never twice and never not at all, while it moves. No day to
-- be forgotten on: it is not finished, or kept for ever.
create or replace view shiftwork.all_jobs as
select id, task, queue, priority, payload, state, run_at, expires_at, attempt, failures, resets, max_attempts,
       unique_key, worker, created_at, claimed_at, started_at, finished_at, result, error, tags, null::date as forget_on
  from shiftwork.jobs
union all
select id, task, queue, priority, payload, state, run_at, expires_at, attempt, failures, resets, max_attempts,
       unique_key, worker, created_at, claimed_at, started_at, finished_at, result, error, tags, nullif(forget_on, 'infinity')
  from shiftwork.history;

-- Jobs by their ids, from whichever room they are in.
create or replace function shiftwork.look(ids bigint[]) returns setof shiftwork.all_jobs
language plpgsql stable set plan_cache_mode = force_generic_plan set jit = off as $$
begin
  return query select * from shiftwork.all_jobs as job where job.id = any(ids);
end $$;
