-- Reap: jobs whose worker's lease has lapsed run again, or end as failed where they have lost their workers too often.
--
-- A job whose code had not begun loses nothing. One that had begun counts a reset; `max_resets` of its task (2 unless registered)
-- bounds them. The worker's row is locked and its lease read again under that lock, so a heartbeat and the reaper cannot both win.
-- `reaper` never reaps itself. `thorough` also looks for jobs whose worker has no row at all, or one that was given up.
--
-- A job that runs in a transaction is locked, and so out of reach for as long as that is open: for ever, if its worker was
-- stopped or cut off from us. Then the worker's sessions are ended.
create or replace function shiftwork.reap(reaper bigint default 0, most int default 1000, thorough boolean default false)
returns table (id bigint, attempt int, worker bigint, answer text)
language plpgsql set plan_cache_mode = force_generic_plan set jit = off
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off as $$
#variable_conflict use_column
declare
  present constant timestamptz := shiftwork.clock();
  lapsed bigint[];
  overdue bigint[];
  ids bigint[];
  one bigint;
begin
  lapsed := array(
    select one.id from shiftwork.workers as one
     where one.gone_at is null and one.lease_until <= present and one.id <> reaper
     order by one.id for update skip locked);
  overdue := lapsed;
  -- A session that processed jobs and is gone from this database: nobody has to wait for its lease. Where we may not see when a
  -- session began, one with its number counts as the same.
  if exists (select from shiftwork.workers as one where one.gone_at is null and one.details ? 'session') then
    perform pg_stat_clear_snapshot();
    lapsed := lapsed || array(
      select one.id from shiftwork.workers as one
       where one.gone_at is null and one.lease_until > present and one.details ? 'session' and one.id <> reaper
         and not exists (
           select from pg_catalog.pg_stat_activity as activity
            where activity.datname = current_database() and activity.pid = one.backend_pid
              and coalesce(activity.backend_start <= one.started_at, true))
       order by one.id for update skip locked);
  end if;
  if thorough then
    lapsed := lapsed || array(
      with recursive holding as (
        (select job.worker from shiftwork.jobs as job where job.state = 'running' order by job.worker limit 1)
        union all
        select (select job.worker from shiftwork.jobs as job
                 where job.state = 'running' and job.worker > holding.worker order by job.worker limit 1)
          from holding where holding.worker is not null
      )
      select holding.worker from holding
       where holding.worker is not null and holding.worker <> reaper
         and not exists (select from shiftwork.workers as one where one.id = holding.worker and one.gone_at is null));
  end if;
  if cardinality(lapsed) = 0 then
    return;
  end if;

  for turn in 1..2 loop
    ids := array(
      select job.id from shiftwork.jobs as job
       where job.id = any(array(
               select theirs.id                       -- worker by worker: looked for together, PostgreSQL 15 would read all that run
                 from unnest(lapsed) as silent (worker) cross join lateral (
                   select held.id from shiftwork.jobs as held
                    where held.state = 'running' and held.worker = silent.worker limit most for update skip locked) as theirs
                limit most))
         and job.worker = any(lapsed) and (job.state = 'running') is true
       order by job.id for update skip locked);
    if cardinality(ids) > 0 then
      begin
        return query select * from shiftwork.take_back(ids);
      exception when others then
        if shiftwork.will_pass(sqlstate) then
          raise;
        end if;
        -- One of them cannot be written. One by one, so that it stops nobody else.
        foreach one in array ids loop
          begin
            return query select * from shiftwork.take_back(array[one]);
          exception when others then
            if shiftwork.will_pass(sqlstate) then
              raise;
            end if;
            raise warning 'job % cannot be taken back: %', one, sqlerrm;
          end;
        end loop;
      end;
    end if;
    exit when turn = 2 or cardinality(ids) >= most or not shiftwork.end_sessions(overdue);
  end loop;

  -- Given up for good once nothing of theirs is left, locked rows included.
  update shiftwork.workers as one set gone_at = present
   where one.id = any(lapsed) and one.gone_at is null
     and not exists (select from shiftwork.jobs as job where job.state = 'running' and job.worker = one.id);
end $$;

-- End the sessions of workers, of which the caller knows under a lock that their lease has lapsed, where jobs of theirs are out
-- of reach. They are found by the name that a worker gives its sessions: no others, and none of another database. One that
-- is just writing outcomes is let be, since it is done in a moment. Says whether any was ended.
create or replace function shiftwork.end_sessions(workers bigint[]) returns boolean language plpgsql as $$
declare
  session record;
  ended boolean := false;
begin
  perform pg_stat_clear_snapshot();                    -- who is there now, not when this transaction first looked
  for session in
    select activity.pid, activity.application_name as name
      from pg_catalog.pg_stat_activity as activity
     where activity.datname = current_database() and activity.pid <> pg_backend_pid()
       and activity.application_name in (
             select 'shiftwork ' || one from unnest(workers) as one
              where exists (select from shiftwork.jobs as job where job.state = 'running' and job.worker = one))
       and (activity.state is null or activity.state like 'idle in transaction%'        -- null: not for us to see
            or activity.xact_start < clock_timestamp() - interval '5 seconds')
  loop
    begin
      ended := pg_terminate_backend(session.pid, 1000) or ended;
    exception when insufficient_privilege then
      raise warning 'the session of "%", which has lost its lease, cannot be ended: %', session.name, sqlerrm;
    end;
  end loop;
  return ended;
end $$;

-- Until a crash could be told of, it had no reasons.
drop function if exists shiftwork.take_back(bigint[]);

-- Jobs, locked by the caller, whose worker was lost, and then whoever runs their code is told; or of which their worker says
-- that they took down the process they ran in, with the reason for each.
create or replace function shiftwork.take_back(ids bigint[], reasons jsonb default null)
returns table (id bigint, attempt int, worker bigint, answer text) language plpgsql as $$
#variable_conflict use_column
declare
  present constant timestamptz := shiftwork.clock();
  ended bigint[];
  lost record;
  why text;
  failing boolean;
begin
  for lost in
    select job.id, job.attempt, job.worker, job.queue, job.started_at, job.claimed_at, job.resets,
           coalesce(known.max_resets, 2) as max_resets, coalesce(known.on_lost, 'requeue') as on_lost, signal.reason,
           signal.job is not null as asked
      from shiftwork.jobs as job
      left join shiftwork.tasks as known on known.name = job.task
      left join shiftwork.signals as signal on signal.job = job.id
     where job.id = any(ids) order by job.id
  loop
    id := lost.id;
    attempt := lost.attempt;
    worker := lost.worker;
    why := reasons ->> lost.id::text;
    failing := not lost.asked and lost.started_at is not null and (lost.on_lost = 'fail' or lost.resets >= lost.max_resets);
    if lost.started_at is not null then
      insert into shiftwork.attempts (job, attempt, outcome, will_retry, code, error, worker, claimed_at, started_at, ended_at)
      values (lost.id, lost.attempt, 'lost', not failing and not lost.asked, 'WORKER_CRASHED',
              shiftwork.failure('WORKER_CRASHED', coalesce(why, 'its worker stopped renewing its lease')), lost.worker, lost.claimed_at,
              lost.started_at, present)
      on conflict do nothing;
    end if;
    if failing or not lost.asked then
      update shiftwork.jobs as job
         set resets = least(job.resets + (lost.started_at is not null)::int, 1000000000),
             state = case when failing then job.state else 'ready' end,
             worker = case when failing then job.worker end, claim = case when failing then job.claim end,
             claimed_at = case when failing then job.claimed_at end, started_at = case when failing then job.started_at end
       where job.id = lost.id;
    end if;
    if lost.asked then
      ended := shiftwork.finish_signalled(array[lost.id]);
      answer := 'cancelled';
    elsif failing then
      ended := shiftwork.finish(array[lost.id], 'failed', shiftwork.failure('WORKER_CRASHED',
        coalesce(why || format('; that was crash %s of %s that it may cause', lost.resets + 1, lost.max_resets + 1),
                 format('its worker was lost %s times while it ran, and it may be %s', lost.resets + 1, lost.max_resets + 1))));
      answer := 'failed';
    else
      if exists (select from shiftwork.limits) then
        perform shiftwork.return_permits(array[lost.id]);
      end if;
      ended := array[lost.id];
      answer := 'ready';
    end if;
    continue when cardinality(ended) = 0;
    if reasons is null and pg_notification_queue_usage() < 0.5 then
      perform pg_notify('shiftwork_cancel', lost.id::text);
    end if;
    return next;
  end loop;
  perform shiftwork.wake(array(select distinct job.queue from shiftwork.jobs as job where job.id = any(ids)));
end $$;
