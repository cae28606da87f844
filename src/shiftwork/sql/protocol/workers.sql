-- Workers: one row for each process, with one lease for all that it holds.

create or replace function shiftwork.lease_of(request jsonb) returns interval language sql immutable as $$
  select make_interval(secs => least(greatest(coalesce((request ->> 'lease')::double precision, 30), 0.05), 86400))
$$;

-- A process that will claim jobs makes itself known; its id is new, whatever its host and pid.
-- request: {"name": "worker", "host": "…", "pid": 1, "queues": ["mail"], "lease": 30, "details": {}}
create or replace function shiftwork.register_worker(request jsonb default '{}') returns bigint language sql as $$
  insert into shiftwork.workers (name, host, pid, queues, details, lease_until)
  values (coalesce(request ->> 'name', 'worker'), coalesce(request ->> 'host', ''), coalesce((request ->> 'pid')::int, 0),
          coalesce(array(select jsonb_array_elements_text(request -> 'queues')), '{}'), coalesce(request -> 'details', '{}'),
          shiftwork.clock() + shiftwork.lease_of(request))
  returning id
$$;

-- What a worker holds, as [[id, attempt], …].
create or replace function shiftwork.holds(held jsonb) returns table (id bigint, attempt int) language sql immutable as $$
  select (one ->> 0)::bigint, (one ->> 1)::int from jsonb_array_elements(coalesce(held, '[]')) as one
$$;

-- A worker leaves: its lease ends now. What it still holds is for the reaper.
create or replace function shiftwork.leave(worker bigint) returns boolean language plpgsql as $$
begin
  update shiftwork.workers as one set lease_until = shiftwork.clock() where one.id = worker and one.gone_at is null;
  return found;
end $$;
