-- Jobs by their ids, from whichever room they are in.
create or replace function shiftwork.look(ids bigint[]) returns setof shiftwork.all_jobs
language plpgsql stable set plan_cache_mode = force_generic_plan set jit = off
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off as $$
begin
  return query select * from shiftwork.all_jobs as job where job.id = any(ids);
end $$;
