-- The day on which a finished job may be forgotten: after so many whole days; beyond a month in coarser steps.
create or replace function shiftwork.forget_on(days int, finished timestamptz) returns date language sql immutable as $$
  select case
    when days > 36500 then date 'infinity'
    when days <= 31 then (finished at time zone 'UTC')::date + days + 1
    when days <= 366 then (date_trunc('month', (finished at time zone 'UTC') + make_interval(days => days)) + interval '1 month')::date
    else (date_trunc('year', (finished at time zone 'UTC') + make_interval(days => days)) + interval '1 year')::date
  end
$$;

-- How many days a job is kept: as its sender, its queue or the default row says.
create or replace function shiftwork.days_kept(
  keep int, state shiftwork.job_state, rule shiftwork.queues, fallback shiftwork.queues) returns int language sql immutable as $$
  select coalesce(keep, case state
    when 'completed' then coalesce((rule).keep_completed, (fallback).keep_completed)
    when 'failed' then coalesce((rule).keep_failed, (fallback).keep_failed)
    when 'cancelled' then coalesce((rule).keep_cancelled, (fallback).keep_cancelled)
    else coalesce((rule).keep_expired, (fallback).keep_expired) end, 30)
$$;

-- Move jobs, locked by the caller, to history with one ending for all. What was asked of them is settled with that.
create or replace function shiftwork.finish(ids bigint[], ending shiftwork.job_state, failure jsonb) returns void
language plpgsql set plan_cache_mode = force_generic_plan as $$
declare
  present timestamptz := shiftwork.clock();
  fallback shiftwork.queues;
begin
  select * into fallback from shiftwork.queues where name = '*';
  with gone as (
    delete from shiftwork.jobs as job where job.id = any(ids) returning job.*
  )
  insert into shiftwork.history (
    id, state, priority, run_at, created_at, attempt, failures, resets, max_attempts, expires_at, claimed_at, started_at,
    finished_at, worker, claim, keep, unique_scope, task, queue, payload, unique_key, tags, result, error, forget_on)
  select gone.id, ending, gone.priority, gone.run_at, gone.created_at, gone.attempt, gone.failures, gone.resets,
         gone.max_attempts, gone.expires_at, gone.claimed_at, gone.started_at, present, gone.worker, gone.claim, gone.keep,
         gone.unique_scope, gone.task, gone.queue, gone.payload, gone.unique_key, gone.tags, gone.result, failure,
         shiftwork.forget_on(shiftwork.days_kept(gone.keep, ending, rule, fallback), present)
    from gone left join shiftwork.queues as rule on rule.name = gone.queue;
  delete from shiftwork.signals as signal where signal.job = any(ids);
  perform shiftwork.announce(ids);
end $$;

-- Cancel those of these jobs, locked by the caller, whose cancelling was asked for while somebody held them.
create or replace function shiftwork.finish_signalled(ids bigint[]) returns bigint[] language plpgsql as $$
declare
  asked record;
  ended bigint[] := '{}';
begin
  for asked in select signal.job, signal.reason from shiftwork.signals as signal where signal.job = any(ids) loop
    perform shiftwork.finish(array[asked.job], 'cancelled', shiftwork.failure('TASK_CANCELLED', coalesce(asked.reason, 'cancelled')));
    ended := ended || asked.job;
  end loop;
  return ended;
end $$;

-- What is stored of an error.
create or replace function shiftwork.failure(code text, message text) returns jsonb language sql immutable as $$
  select jsonb_build_object('code', code, 'message', left(message, 10000))
$$;
