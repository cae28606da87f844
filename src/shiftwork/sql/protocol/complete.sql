-- Complete a job from outside: what it was to do has been done otherwise. One that is running is taken from its worker, which
-- is told; in history no worker has completed it. Answers: completed, finished (it was over already), unknown, or busy
-- (somebody is just moving it, or its code runs in a transaction).
create or replace function shiftwork.complete(job bigint, result jsonb default null, actor text default null) returns text
language plpgsql set plan_cache_mode = force_generic_plan set jit = off as $$
declare
  present constant timestamptz := shiftwork.clock();
  former shiftwork.jobs;
  answer text := 'completed';
begin
  select live.* into former from shiftwork.jobs as live where live.id = complete.job for update skip locked;
  if not found then
    -- Both rooms in one statement: it may be on its way from one to the other.
    answer := (
      select case when exists (select from shiftwork.jobs as live where live.id = complete.job) then 'busy'
                  when exists (select from shiftwork.history as ended where ended.id = complete.job) then 'finished'
                  else 'unknown' end);
  else
    for turn in 1..2 loop
      begin
        with gone as (
          delete from shiftwork.jobs as live where live.id = complete.job returning live.*
        )
        insert into shiftwork.history (
          id, state, priority, run_at, created_at, attempt, failures, resets, max_attempts, expires_at, claimed_at, started_at,
          finished_at, keep, unique_scope, task, queue, payload, unique_key, tags, result, forget_on, parent)
        select gone.id, 'completed', gone.priority, gone.run_at, gone.created_at, gone.attempt, gone.failures, gone.resets,
               gone.max_attempts, gone.expires_at, gone.claimed_at, gone.started_at, present, gone.keep, gone.unique_scope,
               gone.task, gone.queue, gone.payload, gone.unique_key, gone.tags, nullif(complete.result, 'null'),
               shiftwork.forget_on(shiftwork.days_kept(gone.keep, 'completed', gone.queue), shiftwork.today()), gone.parent
          from gone;
        if not found then
          raise exception 'a trigger keeps job % in jobs', complete.job;
        end if;
        exit;
      exception when check_violation then              -- a partition may have been attached at that moment
        if turn = 2 then
          raise;
        end if;
      end;
    end loop;
    delete from shiftwork.signals as signal where signal.job = complete.job;
    if former.state = 'running' and exists (select from shiftwork.limits) then
      perform shiftwork.return_permits(array[complete.job]);
    end if;
    if former.parent is not null then
      perform shiftwork.tell_parents(array[former.parent], array[complete.job], array['completed'::shiftwork.job_state]);
    end if;
    perform shiftwork.announce(array[complete.job]);
    if former.state = 'running' and pg_notification_queue_usage() < 0.5 then
      perform pg_notify('shiftwork_cancel', complete.job::text);
    end if;
  end if;
  perform shiftwork.note(actor, 'complete', jsonb_build_object('jobs', jsonb_build_array(complete.job)),
                         before => case when former.id is not null then jsonb_build_object(
                           'state', former.state, 'attempt', former.attempt, 'worker', former.worker, 'error', former.error) end,
                         after => jsonb_build_object('answer', answer));
  return answer;
end $$;
