-- The code of prefetched jobs is about to begin. One whose start deadline has passed, or which is to be cancelled, ends here.
-- request: {"worker": 17, "held": [[id, attempt], …]}. Answers for each: started, expired, cancelled, lost or busy.
create or replace function shiftwork.start(request jsonb) returns table (id bigint, answer text)
language plpgsql set plan_cache_mode = force_generic_plan set jit = off
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off as $$
#variable_conflict use_column
declare
  present constant timestamptz := shiftwork.clock();
  mine bigint[];
  late bigint[];
  gone bigint[];
  ended bigint[];
begin
  mine := shiftwork.lock_held(request);
  ended := shiftwork.finish_signalled(mine);
  late := array(select job.id from shiftwork.jobs as job
                 where job.id = any(mine) and job.started_at is null and job.expires_at <= present);
  if cardinality(late) > 0 then
    gone := shiftwork.finish(late, 'expired', shiftwork.failure('TASK_EXPIRED', 'its start deadline passed before its code began'));
  end if;
  update shiftwork.jobs as job set started_at = present where job.id = any(mine) and job.id <> all(late) and job.started_at is null;
  return query
  select hold.id, case
           when hold.id = any(ended) then 'cancelled'
           when hold.id = any(gone) then 'expired'
           when hold.id = any(late) then 'busy'
           when hold.id = any(mine) then 'started'
           else shiftwork.unheld_answer(request, hold.id, hold.attempt) end
    from shiftwork.holds(request -> 'held') as hold;
end $$;
