-- Jobs that nobody started in time are expired. A job that was to be cancelled and that nobody holds any more is cancelled. Permits of jobs
-- that do not run come back. Says how many ended.
create or replace function shiftwork.expire(most int default 1000) returns int
language plpgsql set plan_cache_mode = force_generic_plan set jit = off
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off as $$
declare
  present constant timestamptz := shiftwork.clock();
  late bigint[];
  unheld bigint[];
begin
  late := array(
    select job.id from shiftwork.jobs as job
     where job.state = any('{blocked,scheduled,ready}') and job.expires_at <= present
     limit most for update skip locked);
  if cardinality(late) > 0 then
    late := shiftwork.finish(late, 'expired', shiftwork.failure('TASK_EXPIRED', 'nobody started it before its deadline'));
  end if;
  if exists (select from shiftwork.signals) then
    delete from shiftwork.signals as signal where signal.job = any(array(
      select late.job from shiftwork.signals as late
       where not exists (select from shiftwork.jobs as job where job.id = late.job) order by late.job for update skip locked));
    unheld := shiftwork.finish_signalled(array(
      select job.id from shiftwork.signals as signal join shiftwork.jobs as job on job.id = signal.job
       where job.state in ('ready', 'scheduled', 'blocked', 'waiting') order by job.id limit most for update of job skip locked));
  end if;
  if exists (select from shiftwork.limits) or exists (select from shiftwork.permits) then
    perform shiftwork.mend_permits();
  end if;
  return cardinality(late) + coalesce(cardinality(unheld), 0);
end $$;
