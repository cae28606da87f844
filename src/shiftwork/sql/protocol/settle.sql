-- Settle: how attempts ended, as a batch, each under its fence.
--
-- request: {"worker": 17, "outcomes": [{"id": 1, "attempt": 1, "state": "completed", "result": 42},
--           {"id": 2, "attempt": 3, "state": "scheduled", "delay": 30, "error": {"code": "…", "message": "…"}}, …]}
--
-- state is completed, failed, cancelled or scheduled. Scheduled with an error is a retry: the failure counts, and one that would
-- land at or after the start deadline becomes failed. Scheduled without one is a snooze, and counts nothing ("failure": false
-- makes a snooze of one that tells a cause). Where cancelling was asked for, a job that would run again is cancelled.
--
-- Answers for each: settled; already (this very outcome was written before: the answer was lost on the wire); lost (the job is
-- not this worker's attempt any more: the result is dropped); busy (its row is locked: try again); refused (it cannot be written).
create or replace function shiftwork.settle(request jsonb) returns table (id bigint, answer text, state shiftwork.job_state)
language plpgsql set plan_cache_mode = force_generic_plan
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off as $$
#variable_conflict use_column
declare
  outcome jsonb;
  problem text;
begin
  begin
    return query select * from shiftwork.settle_together(request);
  exception when data_exception or integrity_constraint_violation or raise_exception or program_limit_exceeded then
    -- Something in the batch cannot be written. One by one, so that it stops nobody else.
    for outcome in select one from jsonb_array_elements(request -> 'outcomes') as one loop
      begin
        return query select * from shiftwork.settle_together(jsonb_set(request, '{outcomes}', jsonb_build_array(outcome)));
      exception when data_exception or integrity_constraint_violation or raise_exception or program_limit_exceeded then
        get stacked diagnostics problem = message_text;
        raise warning 'the outcome of job % cannot be written: %', outcome ->> 'id', problem;
        id := case when outcome ->> 'id' ~ '^[0-9]{1,18}$' then (outcome ->> 'id')::bigint end;
        answer := 'refused';
        state := null;
        return next;
      end;
    end loop;
  end;
end $$;

create or replace function shiftwork.settle_together(request jsonb)
returns table (id bigint, answer text, state shiftwork.job_state)
language plpgsql set plan_cache_mode = force_generic_plan
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off as $$
#variable_conflict use_column
declare
  present constant timestamptz := shiftwork.clock();
  holder constant bigint := (request ->> 'worker')::bigint;
  asked constant boolean := exists (select from shiftwork.signals);
  fallback shiftwork.queues;
  settled bigint[];
  finished bigint[];
  states shiftwork.job_state[];
begin
  select * into fallback from shiftwork.queues where name = '*';

  with told as (
    select one.*, coalesce(one.failure, one.error is not null or one.state = 'failed') as counts
      from jsonb_to_recordset(request -> 'outcomes') as one (
        id bigint, attempt int, state text, result jsonb, error jsonb, delay double precision, failure boolean)
     where one.state in ('completed', 'failed', 'cancelled', 'scheduled')
  ), mine as (
    -- The fence: this attempt, of this worker, and still running. Whoever holds the row otherwise is not waited for.
    select told.*, job.expires_at,
           case when told.state <> 'scheduled' then told.state
                when asked and exists (select from shiftwork.signals as signal where signal.job = job.id) then 'cancelled'
                when told.counts and present + told.delay * interval '1 second' >= job.expires_at then 'failed'
                else 'scheduled' end::shiftwork.job_state as ending
      from told join shiftwork.jobs as job on job.id = told.id
     where job.attempt = told.attempt and job.worker = holder and (job.state = 'running') is true
     order by job.id for update of job skip locked
  ), gone as (
    delete from shiftwork.jobs as job using mine
     where job.id = mine.id and mine.ending <> 'scheduled'
    returning job.*, mine.ending, mine.result as outcome, mine.error as cause, mine.counts
  ), kept as (
    insert into shiftwork.history (
      id, state, priority, run_at, created_at, attempt, failures, resets, max_attempts, expires_at, claimed_at, started_at,
      finished_at, worker, claim, keep, unique_scope, task, queue, payload, unique_key, tags, result, error, forget_on)
    select gone.id, gone.ending, gone.priority, gone.run_at, gone.created_at, gone.attempt,
           least(gone.failures + (gone.counts and gone.ending <> 'completed')::int, 1000000000), gone.resets, gone.max_attempts,
           gone.expires_at, gone.claimed_at, gone.started_at, present, gone.worker, gone.claim, gone.keep, gone.unique_scope,
           gone.task, gone.queue, gone.payload, gone.unique_key, gone.tags, gone.outcome,
           case gone.ending
             when 'completed' then null
             when 'cancelled' then coalesce(gone.cause, shiftwork.failure('TASK_CANCELLED', 'cancelled'))
             else coalesce(gone.cause, shiftwork.failure('FAILED', 'no reason was given')) end,
           shiftwork.forget_on(shiftwork.days_kept(gone.keep, gone.ending, rule, fallback), present)
      from gone left join shiftwork.queues as rule on rule.name = gone.queue
  ), again as (
    update shiftwork.jobs as job
       set state = 'scheduled', run_at = present + least(greatest(coalesce(mine.delay, 0), 0), 3155760000) * interval '1 second',
           failures = least(job.failures + mine.counts::int, 1000000000), error = coalesce(mine.error, job.error),
           claim = null, claimed_at = null, started_at = null
      from mine
     where job.id = mine.id and mine.ending = 'scheduled'
    returning job.id, job.attempt, mine.error as cause, mine.counts
  ), noted as (
    insert into shiftwork.attempts (job, attempt, outcome, will_retry, code, error, worker, claimed_at, started_at, ended_at)
    select failed.id, failed.attempt, 'failed', failed.will_retry, coalesce(failed.cause ->> 'code', 'FAILED'),
           coalesce(failed.cause, '{}'), holder, job.claimed_at, job.started_at, present
      from (select gone.id, gone.attempt, gone.cause, false as will_retry from gone
             where gone.ending = 'failed' or (gone.counts and gone.ending = 'cancelled')
            union all
            select again.id, again.attempt, again.cause, true from again where again.counts) as failed
      join shiftwork.jobs as job on job.id = failed.id                      -- as it was when this statement began
    on conflict (job, attempt) do nothing
  )
  select array_agg(mine.id), array_agg(mine.ending), array_agg(mine.id) filter (where mine.ending <> 'scheduled')
    into settled, states, finished from mine;

  if asked then
    delete from shiftwork.signals as signal where signal.job = any(finished);
  end if;
  perform shiftwork.announce(finished);

  return query select one.id, 'settled'::text, one.state from unnest(settled, states) as one (id, state);
  if coalesce(cardinality(settled), 0) < jsonb_array_length(request -> 'outcomes') then
    return query
    select told.id, shiftwork.unsettled_answer(holder, told.id, told.attempt, told.state), null::shiftwork.job_state
      from jsonb_to_recordset(request -> 'outcomes') as told (id bigint, attempt int, state text)
     where told.id <> all(coalesce(settled, '{}'));
  end if;
end $$;

-- Why an outcome was not written.
create or replace function shiftwork.unsettled_answer(holder bigint, job bigint, attempt int, state text) returns text
language sql stable as $$
  select case
    when unsettled_answer.state not in ('completed', 'failed', 'cancelled', 'scheduled') or unsettled_answer.state is null
      then 'refused'
    when exists (select from shiftwork.jobs as held where held.id = job and held.attempt = unsettled_answer.attempt
                    and held.worker = holder and held.claimed_at is not null)
      then 'busy'
    when exists (select from shiftwork.jobs as left_it where left_it.id = job and left_it.attempt = unsettled_answer.attempt
                    and left_it.worker = holder)
      or exists (select from shiftwork.history as ended where ended.id = job and ended.attempt = unsettled_answer.attempt
                    and ended.worker = holder and ended.error ->> 'code' is distinct from 'WORKER_CRASHED')
      or exists (select from shiftwork.attempts as noted where noted.job = unsettled_answer.job
                    and noted.attempt = unsettled_answer.attempt and noted.worker = holder and noted.outcome = 'failed')
      then 'already'
    else 'lost' end
$$;
