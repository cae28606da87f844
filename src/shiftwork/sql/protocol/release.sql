-- Give jobs back: never started, or their worker is leaving. Nothing is counted against them, and they keep their place.
-- request: {"worker": 17, "held": [[id, attempt], …], "crashed": {"42": "its process was killed by SIGSEGV", …}}.
-- Answers for each: released, cancelled, lost or busy.
--
-- What `crashed` names took down the process in which its code ran, while the worker itself lives: it counts a reset, as a job
-- does that took its worker down, and is answered released, or failed once it has done so too often.
create or replace function shiftwork.release(request jsonb) returns table (id bigint, answer text)
language plpgsql set plan_cache_mode = force_generic_plan set jit = off
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off as $$
#variable_conflict use_column
declare
  crashed constant jsonb := coalesce(request -> 'crashed', '{}');
  mine bigint[];
  ended bigint[];
  failed bigint[];
begin
  mine := shiftwork.lock_held(request);
  if crashed <> '{}' then
    select array_agg(lost.id) filter (where lost.answer = 'cancelled'), array_agg(lost.id) filter (where lost.answer = 'failed')
      into ended, failed
      from shiftwork.take_back(array(select one from unnest(mine) as one where crashed ? one::text), crashed) as lost;
  end if;
  ended := ended || shiftwork.give_back(array(select one from unnest(mine) as one where not crashed ? one::text));
  return query
  select hold.id, case
           when hold.id = any(ended) then 'cancelled'
           when hold.id = any(failed) then 'failed'
           when hold.id = any(mine) then 'released'
           else shiftwork.unheld_answer(request, hold.id, hold.attempt) end
    from shiftwork.holds(request -> 'held') as hold;
end $$;

-- Those of the jobs that a worker says it holds which it does hold, now locked, in the order of their ids.
create or replace function shiftwork.lock_held(request jsonb) returns bigint[]
language plpgsql set plan_cache_mode = force_generic_plan set jit = off
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off as $$
declare
  holder constant bigint := (request ->> 'worker')::bigint;
begin
  return array(
    select hold.id
      from (select hold.id, hold.attempt from shiftwork.holds(request -> 'held') as hold order by hold.id) as hold
      cross join lateral (
        select from shiftwork.jobs as job
         where job.id = hold.id and job.attempt = hold.attempt and job.worker = holder and (job.state = 'running') is true
           for update skip locked) as locked);
end $$;

-- Why a job could not be locked: somebody else has locked the row that this worker holds, or it holds it no longer.
create or replace function shiftwork.unheld_answer(request jsonb, job bigint, attempt int) returns text
language sql stable as $$
  select case when exists (
    select from shiftwork.jobs as held
     where held.id = unheld_answer.job and held.attempt = unheld_answer.attempt
       and held.worker = (request ->> 'worker')::bigint and (held.state = 'running') is true) then 'busy' else 'lost' end
$$;

-- Back to ready, or to cancelled where that was asked for; the caller has locked the jobs. Says which were cancelled.
create or replace function shiftwork.give_back(ids bigint[]) returns bigint[] language plpgsql as $$
declare
  ended bigint[];
begin
  if cardinality(ids) = 0 then
    return '{}';
  end if;
  ended := shiftwork.finish_signalled(ids);
  update shiftwork.jobs as job
     set state = 'ready', worker = null, claim = null, claimed_at = null, started_at = null
   where job.id = any(ids);
  if exists (select from shiftwork.limits) then
    perform shiftwork.return_permits(ids);
  end if;
  perform shiftwork.wake(array(select distinct job.queue from shiftwork.jobs as job where job.id = any(ids)));
  return ended;
end $$;
