-- The day by the clock, in UTC: days begin for everyone at once.
create or replace function shiftwork.today() returns date language sql stable as $$
  select (shiftwork.clock() at time zone 'UTC')::date
$$;

-- The day on which a finished job may be forgotten: after so many whole days; beyond a month in coarser steps.
create or replace function shiftwork.forget_on(days int, ended date) returns date language plpgsql immutable as $$
begin
  if days <= 31 then
    return ended + greatest(days, 0) + 1;
  end if;
  return case
    when days <= 366 then (date_trunc('month', (ended + days)::timestamp) + interval '1 month')::date
    when days <= 3660 then (date_trunc('year', (ended + days)::timestamp) + interval '1 year')::date
    else 'infinity' end;
end $$;

-- How many days a job is kept: as its sender, its queue or the row for all queues says.
create or replace function shiftwork.days_kept(keep int, state shiftwork.job_state, queue text) returns int
language sql stable as $$
  select coalesce(keep, (
    select rule.days from (
      select one.name, case state when 'completed' then one.keep_completed when 'failed' then one.keep_failed
                                  when 'cancelled' then one.keep_cancelled else one.keep_expired end as days
        from shiftwork.queues as one where one.name in (days_kept.queue, '*')) as rule
     where rule.days is not null order by rule.name = '*' limit 1), 30)
$$;

-- Move jobs, locked by the caller, to history with one ending for all. One that cannot be written there (a trigger of the
-- user's says no) stays where it is and stops nobody else. Says which went.
create or replace function shiftwork.finish(ids bigint[], ending shiftwork.job_state, failure jsonb) returns bigint[]
language plpgsql as $$
declare
  one bigint;
  gone bigint[] := '{}';
begin
  perform shiftwork.finish_together(ids, ending, failure);
  return ids;
exception when others then
  if shiftwork.will_pass(sqlstate) then
    raise;
  end if;
  if cardinality(ids) = 1 then
    begin
      perform shiftwork.finish_together(ids, ending, failure);      -- a partition may have been attached at that moment
      return ids;
    exception when others then
      raise warning 'job % cannot be moved to history: %', ids[1], sqlerrm;
      return '{}';
    end;
  end if;
  foreach one in array ids loop
    gone := gone || shiftwork.finish(array[one], ending, failure);
  end loop;
  return gone;
end $$;

-- Is this error about the moment (connection, deadlock, resources, lock timeout, shutdown) and not about a row?
create or replace function shiftwork.will_pass(sqlstate text) returns boolean language sql immutable as $$
  select left(will_pass.sqlstate, 2) in ('08', '25', '40', '53', '55', '57', '58')
$$;

-- What was asked of the jobs is settled with that.
create or replace function shiftwork.finish_together(ids bigint[], ending shiftwork.job_state, failure jsonb) returns void
language plpgsql set plan_cache_mode = force_generic_plan set jit = off as $$
declare
  present timestamptz := shiftwork.clock();
  children bigint[];
  parents bigint[];
begin
  with gone as (
    delete from shiftwork.jobs as job where job.id = any(ids) returning job.*
  ), kept as (
  insert into shiftwork.history (
    id, state, priority, run_at, created_at, attempt, failures, resets, max_attempts, expires_at, claimed_at, started_at,
    finished_at, worker, claim, keep, unique_scope, task, queue, payload, unique_key, tags, result, error, forget_on, parent)
  select gone.id, ending, gone.priority, gone.run_at, gone.created_at, gone.attempt, gone.failures, gone.resets,
         gone.max_attempts, gone.expires_at, gone.claimed_at, gone.started_at, present, gone.worker, gone.claim, gone.keep,
         gone.unique_scope, gone.task, gone.queue, gone.payload, gone.unique_key, gone.tags, gone.result, failure,
         shiftwork.forget_on(shiftwork.days_kept(gone.keep, ending, gone.queue), shiftwork.today()), gone.parent
    from gone
  returning history.id, history.parent
  )
  select array_agg(kept.id), array_agg(kept.parent) into children, parents from kept where kept.parent is not null;
  if parents is not null then
    perform shiftwork.tell_parents(parents, children, array_fill(ending, array[cardinality(parents)]));
  end if;
  delete from shiftwork.signals as signal where signal.job = any(ids);
  if exists (select from shiftwork.limits) then
    perform shiftwork.return_permits(ids);
  end if;
  perform shiftwork.announce(ids);
end $$;

-- Cancel those of these jobs, locked by the caller, whose cancelling was asked for while somebody held them, with their children. One
-- whose children somebody is just cancelling stays as it is: whoever looks for such jobs is not to wait for him, and will look again.
create or replace function shiftwork.finish_signalled(ids bigint[]) returns bigint[] language plpgsql as $$
declare
  asked record;
  ended bigint[] := '{}';
begin
  for asked in select signal.job, signal.reason, signal.actor from shiftwork.signals as signal where signal.job = any(ids) loop
    begin
      perform shiftwork.cancel_children(array[asked.job], asked.reason, asked.actor);
      ended := ended || shiftwork.finish(array[asked.job], 'cancelled',
                                         shiftwork.failure('TASK_CANCELLED', coalesce(asked.reason, 'cancelled')));
    exception when lock_not_available then
      raise warning 'job % cannot be cancelled now: %', asked.job, sqlerrm;
    end;
  end loop;
  return ended;
end $$;

-- What is stored of an error.
create or replace function shiftwork.failure(code text, message text) returns jsonb language sql immutable as $$
  select jsonb_build_object('code', code, 'message', left(message, 10000))
$$;
