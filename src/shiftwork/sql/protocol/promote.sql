-- A place in time, as cursors carry it: epoch microseconds. None, or one that is not positive, is before everything.
-- Stable, as the sum in it is: called immutable, it would not be written into the statements that use it, and cost ten times as much.
create or replace function shiftwork.place_time(place bigint) returns timestamptz language sql stable as $$
  select case when place > 0 then timestamptz 'epoch' + place * interval '1 microsecond' else '-infinity' end
$$;

-- Jobs whose time has come may be claimed: part of every fill, by any worker. `after` is a cursor of the caller's: it has
-- seen everything due before that (epoch microseconds). Says how many, how far it looked, and the earliest of them.
create or replace function shiftwork.promote(
  most int default 1000, after bigint default 0, out promoted int, out reached bigint, out earliest timestamptz)
language plpgsql set plan_cache_mode = force_generic_plan set jit = off
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off as $$
declare
  present timestamptz := shiftwork.clock();
  since constant timestamptz := shiftwork.place_time(after);
  rows tid[];
  times timestamptz[];
begin
  select array_agg(due.ctid), array_agg(due.run_at) into rows, times from (
    select job.ctid, job.run_at from shiftwork.jobs as job
     where job.state = 'scheduled' and job.run_at >= since and job.run_at <= present
     order by job.run_at, job.id limit most for update skip locked
  ) as due;
  promoted := coalesce(cardinality(rows), 0);
  earliest := times[1];
  if promoted > 0 then
    update shiftwork.jobs as job set state = 'ready' where job.ctid = any(rows);
  end if;
  -- One that somebody has locked is still to come: nobody would look for it behind our cursor.
  reached := extract(epoch from case when promoted = most then times[promoted] else least(present, (
    select job.run_at from shiftwork.jobs as job
     where job.state = 'scheduled' and job.run_at >= since and job.run_at <= present order by job.run_at limit 1)) end) * 1000000;
end $$;
