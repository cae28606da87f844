-- Where it was installed before it could tell a problem, it is made anew.
do $$
begin
  if to_regprocedure('shiftwork.settle(jsonb)') is not null and not exists (
       select from pg_catalog.pg_proc where oid = to_regprocedure('shiftwork.settle(jsonb)') and 'problem' = any(proargnames)) then
    drop function shiftwork.settle(jsonb);
  end if;
end $$;

-- Settle: how attempts ended, as a batch, each under its fence.
--
-- request: {"worker": 17, "outcomes": [{"id": 1, "attempt": 1, "state": "completed", "result": 42},
--           {"id": 2, "attempt": 3, "state": "scheduled", "delay": 30, "error": {"code": "…", "message": "…"}}, …]}
--
-- state is completed, failed, cancelled, waiting (its handler returned, and it has children; see gather) or scheduled, after a delay or at a time, run_at. Scheduled with an error is a retry: the failure counts, and one that would
-- land at or after the start deadline becomes failed. Scheduled without one is a snooze, and counts nothing ("failure": false
-- makes a snooze of one that tells a cause). Where cancelling was asked for, a job that would run again is cancelled.
--
-- A completed or waiting outcome may carry "jobs": [what enqueue_many takes, …]. They are enqueued with it if it is settled now, and so
-- once; those of a waiting one that say "child": true become its children. What another ending carries is dropped. ("carrying": false in the request says that none does, and saves looking.)
--
-- ("elapsed": 3.5 says that so many seconds have passed since the clock stood still, for who settles within one long statement.)
--
-- Answers for each: settled; already (this very outcome was written before: the answer was lost on the wire); lost (the job is
-- not this worker's attempt any more: the result is dropped); busy (its row is locked: try again); refused (it cannot be
-- written, or what it carries cannot be enqueued; `problem` says why). Several outcomes for one job in a batch are taken one after
-- the other, and each has an answer.
-- With "brief": true, a batch all of which is completed has one answer for all, without an id.
create or replace function shiftwork.settle(request jsonb)
returns table (id bigint, answer text, state shiftwork.job_state, problem text)
language plpgsql set plan_cache_mode = force_generic_plan set jit = off
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off as $$
#variable_conflict use_column
declare
  present constant timestamptz := shiftwork.clock() + coalesce((request ->> 'elapsed')::double precision, 0) * interval '1 second';
  today constant date := shiftwork.today();
  holder constant bigint := request ->> 'worker';
  carrying constant boolean := coalesce((request ->> 'carrying')::boolean, jsonb_path_exists(request, '$.outcomes[*].jobs'));
  many int;
  -- What few batches need is looked for once: cancel requests, queues with a retention of their own, and limits.
  asked boolean;
  ruled boolean;
  limited boolean;
  usual record;
  finished bigint[];
  endings shiftwork.job_state[];
  places tid[];
  parents bigint[];
  again bigint[];
  resting bigint[];
  locked bigint[];
  gone bigint;
  carried jsonb;
  outcome jsonb;
begin
  if carrying then
    -- What is said twice about an attempt is heard once, so that what is enqueued belongs to what is written.
    request := jsonb_set(request, '{outcomes}', (
      select jsonb_agg(first.value order by first.ordinality)
        from (select distinct on (one.value ->> 'id', one.value ->> 'attempt') one.value, one.ordinality
                from jsonb_array_elements(request -> 'outcomes') with ordinality as one
               order by one.value ->> 'id', one.value ->> 'attempt', one.ordinality) as first));
  end if;
  many := jsonb_array_length(request -> 'outcomes');
  select exists (select from shiftwork.signals), exists (select from shiftwork.queues where name <> '*'),
         exists (select from shiftwork.limits) into asked, ruled, limited;
  select shiftwork.forget_on(every.keep_completed, today) as completed, shiftwork.forget_on(every.keep_failed, today) as failed,
         shiftwork.forget_on(every.keep_cancelled, today) as cancelled
    into usual from shiftwork.queues as every where every.name = '*';
  ruled := ruled or not found;                          -- somebody has deleted what holds for every queue
  begin
    -- Those that end. The fence: this attempt, of this worker, and still running. Whoever has locked a row otherwise is not
    -- waited for. Each is looked for by itself, in the order of ids: joined, a plan from when there were few jobs would read
    -- all of them, for ever.
    with mine as (
      select job.*, told.result as given, told.error as raised, told.counts, case
               when told.state in ('completed', 'failed', 'cancelled') then told.state
               when told.state <> 'scheduled' then null
               when asked and exists (select from shiftwork.signals as signal where signal.job = told.id) then 'cancelled'
               when told.counts and present + told.wait >= job.expires_at then 'failed' end::shiftwork.job_state as ending
        from (select distinct on (id, attempt) * from shiftwork.told(request)) as told
        cross join lateral (
          select held.*, held.ctid as place from shiftwork.jobs as held
           where held.id = told.id and held.attempt = told.attempt and held.worker = holder and (held.state = 'running') is true
             for update skip locked) as job
    ), kept as (
      insert into shiftwork.history (
        id, state, priority, run_at, created_at, attempt, failures, resets, max_attempts, expires_at, claimed_at, started_at,
        finished_at, worker, claim, keep, unique_scope, task, queue, payload, unique_key, tags, result, error, forget_on, parent)
      select job.id, job.ending, job.priority, job.run_at, job.created_at, job.attempt,
             case when job.counts and job.ending <> 'completed' then least(job.failures + 1, 1000000000) else job.failures end,
             job.resets, job.max_attempts, job.expires_at, job.claimed_at, job.started_at, present, job.worker, job.claim,
             job.keep, job.unique_scope, job.task, job.queue, job.payload, job.unique_key, job.tags, job.given,
             case job.ending
               when 'completed' then null
               when 'cancelled' then coalesce(job.raised, shiftwork.failure('TASK_CANCELLED', 'cancelled'))
               else coalesce(job.raised, shiftwork.failure('FAILED', 'no reason was given')) end,
             case when ruled or job.keep is not null
                  then shiftwork.forget_on(shiftwork.days_kept(job.keep, job.ending, job.queue), today)
                  when job.ending = 'completed' then usual.completed
                  when job.ending = 'failed' then usual.failed
                  else usual.cancelled end, job.parent
        from mine as job where job.ending is not null
      returning history.id, history.state, history.parent
    )
    select array_agg(kept.id), array_agg(kept.state), (select array_agg(mine.place) from mine where mine.ending is not null),
           case when count(kept.parent) > 0 then array_agg(kept.parent) end
      into finished, endings, places, parents from kept;

    if coalesce(cardinality(finished), 0) < many and many > (
         select count(distinct (one ->> 'id')::bigint) from jsonb_array_elements(request -> 'outcomes') as one) then
      raise exception 'several outcomes for one job';    -- one by one, then
    end if;
    if endings && '{failed,cancelled}' then
      insert into shiftwork.attempts (job, attempt, outcome, will_retry, code, error, worker, claimed_at, started_at, ended_at)
      select job.id, job.attempt, 'failed', false, coalesce(told.error ->> 'code', 'FAILED'), coalesce(told.error, '{}'),
             holder, job.claimed_at, job.started_at, present
        from shiftwork.told(request) as told join shiftwork.jobs as job on job.id = told.id and job.attempt = told.attempt
       where job.id = any(finished) and told.counts and told.state <> 'completed'
      on conflict (job, attempt) do nothing;
    end if;
    -- Those that run again, or wait for their children.
    if coalesce(cardinality(finished), 0) < many then
      with mine as (
        select told.*, job.claimed_at, job.started_at
          from (select * from shiftwork.told(request)
                 where state in ('scheduled', 'waiting') and id <> all(coalesce(finished, '{}')) order by id) as told
          cross join lateral (
            select held.claimed_at, held.started_at from shiftwork.jobs as held
             where held.id = told.id and held.attempt = told.attempt and held.worker = holder and (held.state = 'running') is true
               for update skip locked) as job
      ), moved as (
        update shiftwork.jobs as job
           set state = mine.state::shiftwork.job_state, claim = null,
               failures = least(job.failures + mine.counts::int, 1000000000),
               run_at = case mine.state when 'waiting' then job.run_at else present + mine.wait end,
               result = case mine.state when 'waiting' then mine.result end,
               error = case mine.state when 'waiting' then null else coalesce(mine.error, job.error) end,
               claimed_at = case mine.state when 'waiting' then job.claimed_at end,
               started_at = case mine.state when 'waiting' then job.started_at end
          from mine where job.id = mine.id
        returning job.id, job.attempt, job.state, mine.error, mine.counts, mine.claimed_at, mine.started_at
      ), noted as (
        insert into shiftwork.attempts (job, attempt, outcome, will_retry, code, error, worker, claimed_at, started_at, ended_at)
        select moved.id, moved.attempt, 'failed', true, coalesce(moved.error ->> 'code', 'FAILED'), coalesce(moved.error, '{}'),
               holder, moved.claimed_at, moved.started_at, present
          from moved where moved.counts
        on conflict (job, attempt) do nothing
      )
      select array_agg(moved.id), array_agg(moved.id) filter (where moved.state = 'waiting') into again, resting from moved;
    end if;

    if carrying then
      select jsonb_agg(case when job.id = any(resting) and (follower.value ->> 'child')::boolean
                            then follower.value || jsonb_build_object('parent', job.id) else follower.value end
                       order by one.ordinality, follower.ordinality) into carried
        from jsonb_array_elements(request -> 'outcomes') with ordinality as one
        join shiftwork.jobs as job on job.id = (one.value ->> 'id')::bigint and job.attempt = (one.value ->> 'attempt')::int
             cross join lateral jsonb_array_elements(nullif(one.value -> 'jobs', 'null')) with ordinality as follower
       where job.id = any(finished) and one.value ->> 'state' = 'completed' or job.id = any(resting);
    end if;
    delete from shiftwork.jobs as job where job.ctid = any(places);        -- nobody moves a row that we have locked
    get diagnostics gone = row_count;
    if gone < cardinality(finished) then
      raise exception 'a trigger keeps % finished jobs in jobs', cardinality(finished) - gone;
    elsif gone > coalesce(cardinality(finished), 0) then
      raise exception 'a trigger keeps % finished jobs out of history', gone - coalesce(cardinality(finished), 0);
    end if;
    if asked then
      delete from shiftwork.signals as signal where signal.job = any(finished);
    end if;

    if limited then
      perform shiftwork.return_permits(finished || again);
    end if;

    -- Last, since it may wait for others who enqueue the same keys; and the keys of those that ended are free by now.
    if carried is not null then
      perform shiftwork.enqueue_jobs(carried, resting is not null);
    end if;
    if parents is not null then
      perform shiftwork.tell_parents(parents, finished, endings);
    end if;
    if resting is not null then
      insert into shiftwork.child_ends (parent) select unnest(resting);      -- it may have no children after all
    end if;
  exception when others then
    if shiftwork.will_pass(sqlstate) then
      raise;
    end if;
    -- Something in the batch cannot be written, or is told twice. One by one, so that it stops nobody else.
    get stacked diagnostics problem = message_text;
    if many > 1 then
      for outcome in select one from jsonb_array_elements(request -> 'outcomes') as one loop
        return query select * from shiftwork.settle(jsonb_set(request - 'brief', '{outcomes}', jsonb_build_array(outcome)));
      end loop;
    elsif not coalesce((request ->> 'insist')::boolean, false) then
      -- Once more: a partition may have been attached at this moment.
      return query select * from shiftwork.settle(request || '{"insist": true}');
    else
      raise warning 'the outcome of job % cannot be written: %', request #>> '{outcomes,0,id}', problem;
      id := case when request #>> '{outcomes,0,id}' ~ '^-?[0-9]{1,18}$' then (request #>> '{outcomes,0,id}')::bigint end;
      answer := 'refused';
      return next;
    end if;
    return;
  end;

  if shiftwork.is_declared('shiftwork.awaited_until') then
    perform shiftwork.announce(finished);
  end if;
  if again is not null and shiftwork.is_declared('shiftwork.asleep_until') then
    perform shiftwork.wake(array(select distinct job.queue::text from shiftwork.jobs as job where job.id = any(again)));
  end if;
  if (request ->> 'brief')::boolean and cardinality(finished) = many and endings <@ '{completed}' then
    answer := 'settled';
    state := 'completed';
    return next;
    return;
  end if;
  return query select one.id, 'settled'::text, one.state, null::text from unnest(finished, endings) as one (id, state);
  many := many - coalesce(cardinality(finished), 0);
  if many > 0 then
    return query
    select one, 'settled'::text, case when one = any(resting) then 'waiting' else 'scheduled' end::shiftwork.job_state, null::text
      from unnest(again) as one;
    -- Why the others were not written. Who claims next to us may have locked some for a moment, which is told without a look at history:
    -- to make a plan for all of its days takes longer than everything else. Not as EXISTS, of which a plan could make a table of all jobs.
    locked := array(
      select distinct told.id from shiftwork.told(request) as told
       where told.state in ('completed', 'failed', 'cancelled', 'scheduled', 'waiting') and told.id <> all(coalesce(finished || again, '{}'))
         and (select true from shiftwork.jobs as held
               where held.id = told.id and held.attempt = told.attempt and held.worker = holder and (held.state = 'running') is true));
    return query select one, 'busy'::text, null::shiftwork.job_state, null::text from unnest(locked) as one;
    if cardinality(locked) + coalesce(cardinality(again), 0) < many then
      return query
      select distinct told.id,
             case when told.state in ('completed', 'failed', 'cancelled', 'scheduled', 'waiting') is not true then 'refused'
                  when (select true from shiftwork.jobs as left_it
                         where left_it.id = told.id and left_it.attempt = told.attempt and left_it.worker = holder
                           and (told.state = 'scheduled' or left_it.state = 'waiting' and told.state in ('waiting', 'completed')))
                    or (select true from shiftwork.history as ended
                         where ended.id = told.id and ended.attempt = told.attempt and ended.worker = holder
                           and ended.error ->> 'code' is distinct from 'WORKER_CRASHED'
                           and (ended.state::text = told.state
                                or (told.state = 'scheduled' and ended.state in ('failed', 'cancelled'))
                                or (told.state = 'waiting' and ended.state in ('completed', 'cancelled'))
                                or (told.state in ('waiting', 'completed') and ended.error ->> 'code' = 'CHILD_FAILED')) limit 1)
                    or told.state in ('failed', 'scheduled')
                       and (select true from shiftwork.attempts as noted
                             where noted.job = told.id and noted.attempt = told.attempt and noted.worker = holder
                               and noted.outcome = 'failed' limit 1)
                    then 'already'
                  else 'lost' end,
             null::shiftwork.job_state,
             case when told.state in ('completed', 'failed', 'cancelled', 'scheduled', 'waiting') is not true
                  then format('"%s" is no way for an attempt to end', left(told.state, 100)) end
        from shiftwork.told(request) as told
       where told.id <> all(coalesce(finished || again, '{}') || locked);
    end if;
  end if;
end $$;

-- The outcomes of a request, as rows: whether each counts as a failure, and how long a job that runs again has to wait.
create or replace function shiftwork.told(request jsonb) returns table (
  id bigint, attempt int, state text, result jsonb, error jsonb, counts boolean, wait interval)
language sql stable as $$
  select one.id, one.attempt, one.state, one.result, one.error,
         coalesce(one.failure, one.state = 'failed' or (one.state = 'scheduled' and one.error is not null)),
         least(greatest(coalesce(extract(epoch from one.run_at - shiftwork.clock())::double precision, one.delay, 0), 0),
               3155760000) * interval '1 second'
    from jsonb_to_recordset(request -> 'outcomes') as one (
      id bigint, attempt int, state text, result jsonb, error jsonb, delay double precision,
      run_at timestamptz, failure boolean)
$$;
