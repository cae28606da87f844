-- What waits in these queues: how many jobs are ready, counted up to `most`, and for how many seconds the oldest of them has been due. It
-- reads only the front of each priority for that.
create or replace function shiftwork.measure_queues(names text[], most int default 10000)
returns table (queue text, ready int, oldest double precision) language plpgsql stable
set plan_cache_mode = force_generic_plan set jit = off set enable_seqscan = off set enable_bitmapscan = off as $$
#variable_conflict use_column
declare
  present constant timestamptz := shiftwork.clock();
  one text;
begin
  foreach one in array names loop
    queue := one;
    select count(*) into ready
      from (select from shiftwork.jobs as job where job.state = 'ready' and job.queue = one limit most) as waiting;
    with recursive front as (
      (select job.priority, job.run_at from shiftwork.jobs as job
        where job.state = 'ready' and job.queue = one order by job.priority, job.run_at, job.id limit 1)
      union all
      select next.priority, next.run_at from front, lateral (
        select job.priority, job.run_at from shiftwork.jobs as job
         where job.state = 'ready' and job.queue = one and job.priority > front.priority
         order by job.priority, job.run_at, job.id limit 1) as next
    )
    select coalesce(max(extract(epoch from present - first.run_at)), 0) into oldest
      from (select front.run_at from front limit 100) as first;
    return next;
  end loop;
end $$;
