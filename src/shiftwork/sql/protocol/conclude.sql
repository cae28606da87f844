-- End an attempt within the caller's transaction: as settle does, but an outcome that is not written is an error, so that
-- nothing else of that transaction can be committed. request: as for settle, with one outcome. Says the state it led to.
create or replace function shiftwork.conclude(request jsonb) returns text
language plpgsql set plan_cache_mode = force_generic_plan set jit = off as $$
declare
  outcome constant jsonb := request #> '{outcomes,0}';
  present timestamptz := shiftwork.clock();
  usual record;
  told record;
begin
  -- What nearly always happens, in one statement: it is completed, and the row is the caller's.
  if outcome ->> 'state' = 'completed' and not outcome ? 'jobs' then
    if request ? 'elapsed' then
      present := present + (request ->> 'elapsed')::double precision * interval '1 second';
    end if;
    -- What is looked for beforehand need not be joined to the row, all of whose columns would go through each join.
    select (select shiftwork.forget_on(every.keep_completed, (present at time zone 'UTC')::date)
              from shiftwork.queues as every where every.name = '*') as forget_on,
           exists (select from shiftwork.queues where name <> '*') as ruled,
           exists (select from shiftwork.signals) as asked, exists (select from shiftwork.limits) as limited into usual;
    begin
      with gone as (
        delete from shiftwork.jobs as job
         where job.id = (outcome ->> 'id')::bigint and job.attempt = (outcome ->> 'attempt')::int
           and job.worker = (request ->> 'worker')::bigint and (job.state = 'running') is true
        returning job.*
      )
      insert into shiftwork.history (
        id, state, priority, run_at, created_at, attempt, failures, resets, max_attempts, expires_at, claimed_at, started_at,
        finished_at, worker, claim, keep, unique_scope, task, queue, payload, unique_key, tags, result, forget_on, parent)
      select gone.id, 'completed', gone.priority, gone.run_at, gone.created_at, gone.attempt, gone.failures, gone.resets,
             gone.max_attempts, gone.expires_at, gone.claimed_at, gone.started_at, present, gone.worker, gone.claim,
             gone.keep, gone.unique_scope, gone.task, gone.queue, gone.payload, gone.unique_key, gone.tags, outcome -> 'result',
             case when gone.keep is null and usual.forget_on is not null and not usual.ruled then usual.forget_on
                  else shiftwork.forget_on(shiftwork.days_kept(gone.keep, 'completed', gone.queue), (present at time zone 'UTC')::date) end,
             gone.parent
        from gone
      returning id, parent into told;
      if found then
        if told.parent is not null then
          perform shiftwork.tell_parents(array[told.parent], array[told.id], array['completed'::shiftwork.job_state]);
        end if;
        if usual.asked then
          delete from shiftwork.signals as signal where signal.job = told.id;
        end if;
        if usual.limited then
          perform shiftwork.return_permits(array[told.id]);
        end if;
        if shiftwork.is_declared('shiftwork.awaited_until') then
          perform shiftwork.announce(array[told.id]);
        end if;
        return 'completed';
      end if;
    exception when others then
      if shiftwork.will_pass(sqlstate) then
        raise;
      end if;
    end;
  end if;
  select settled.id, settled.answer, settled.state, settled.problem into told from shiftwork.settle(request) as settled;
  if told.answer = 'settled' then
    return told.state;
  elsif told.answer = 'refused' then
    raise exception using errcode = 'SW001',
      message = format('the outcome of job %s cannot be written: %s', outcome ->> 'id', told.problem);
  end if;
  raise exception using errcode = 'SW003',
    message = format('attempt %s of job %s does not hold it any more', outcome ->> 'attempt', outcome ->> 'id'),
    hint = 'Its lease lapsed, or it was cancelled or finished: stop, and let the attempt that holds it do the work.';
end $$;
