-- Workers: one row for each process, with one lease for all that it holds.

create or replace function shiftwork.lease_of(request jsonb) returns interval language sql immutable as $$
  select make_interval(secs => least(greatest(coalesce((request ->> 'lease')::double precision, 30), 0.05), 86400))
$$;

-- A process that will claim jobs makes itself known; its id is new, whatever its host and pid. One that has its id already says
-- with it what it serves from now on.
-- request: {"name": "worker", "host": "…", "pid": 1, "queues": ["mail"], "lease": 30, "details": {}}, or
-- {"worker": 7, "queues": ["mail", "bulk"], "details": {}}
create or replace function shiftwork.register_worker(request jsonb default '{}') returns bigint language plpgsql as $$
declare
  worker bigint := request ->> 'worker';
  served constant text[] := array(select jsonb_array_elements_text(request -> 'queues'));
begin
  if worker is not null then
    update shiftwork.workers as mine set queues = served, details = coalesce(request -> 'details', mine.details)
     where mine.id = worker;
    return worker;
  end if;
  insert into shiftwork.workers (name, host, pid, queues, details, lease_until)
  values (coalesce(request ->> 'name', 'worker'), coalesce(request ->> 'host', ''), coalesce((request ->> 'pid')::int, 0),
          served, coalesce(request -> 'details', '{}'), shiftwork.clock() + shiftwork.lease_of(request))
  returning id into worker;
  return worker;
end $$;

-- What a worker holds, as [[id, attempt], …].
create or replace function shiftwork.holds(held jsonb) returns table (id bigint, attempt int) language sql immutable as $$
  select (one ->> 0)::bigint, (one ->> 1)::int from jsonb_array_elements(coalesce(held, '[]')) as one
$$;

-- A worker leaves: its lease ends now, and if nothing is left of it, it is gone. What it still holds is for the reaper. So is a worker
-- of which a claim is just under way, which has locked it: what that takes cannot be seen yet.
create or replace function shiftwork.leave(worker bigint) returns boolean
language plpgsql set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off as $$
declare
  present constant timestamptz := shiftwork.clock();
  gone boolean;
begin
  perform from shiftwork.workers as one where one.id = leave.worker for update skip locked;
  gone := found and not exists (select from shiftwork.jobs as job where job.state = 'running' and job.worker = leave.worker);
  update shiftwork.workers as one set lease_until = present, gone_at = case when gone then present end
   where one.id = leave.worker and one.gone_at is null;
  return found;
end $$;
