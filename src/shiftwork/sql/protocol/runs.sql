-- Runs of duties, as they are remembered: the last hundred of each duty and host, and figures of each day. Whatever goes wrong
-- with that is a warning, and nobody who has locked any of it is waited for: what is done matters more than what is known of it.

-- A number that was told, kept in range; null if it is none.
create or replace function shiftwork.measured(told jsonb, name text, most numeric) returns numeric language sql immutable as $$
  select case jsonb_typeof(told -> name) when 'number' then least(greatest((told ->> name)::numeric, 0), most) end
$$;

-- A run of a duty begins: by a worker, on its host, or by somebody else on a host that is named. What is more than a hundred runs ago
-- is forgotten. Answers the run's number, or null if it could not be written.
create or replace function shiftwork.begin_run(duty text, worker bigint default null, host text default null) returns bigint
language plpgsql set lock_timeout = '100ms' as $$
declare
  place text;
  run bigint;
begin
  place := left(coalesce(host, (select one.host from shiftwork.workers as one where one.id = begin_run.worker), ''), 255);
  lock table shiftwork.runs in row exclusive mode nowait;
  insert into shiftwork.runs (duty, host, worker, began_at) values (begin_run.duty, place, begin_run.worker, shiftwork.clock())
  returning id into run;
  delete from shiftwork.runs as old
   where old.duty = begin_run.duty and old.host = place
     and old.id <= (select last.id from shiftwork.runs as last where last.duty = begin_run.duty and last.host = place
                     order by last.id desc offset 100 limit 1);
  return run;
exception when others then
  raise warning 'a run of % cannot be remembered: %', duty, sqlerrm;
  return null;
end $$;

-- A run has ended, and counts for its day.
-- told: {"run": 17, "seconds": 0.1, "did": 3, "error": null}, or, of what a worker has taken, {"worker": 7, "duty": "expire", …}.
-- Answers whether it was under way.
create or replace function shiftwork.end_run(told jsonb) returns boolean language plpgsql set lock_timeout = '100ms' as $$
declare
  present constant timestamptz := shiftwork.clock();
  one shiftwork.runs;
begin
  lock table shiftwork.runs, shiftwork.run_days in row exclusive mode nowait;
  update shiftwork.runs as run
     set ended_at = present, did = shiftwork.measured(told, 'did', 1e15), error = left(told ->> 'error', 1000),
         seconds = coalesce(shiftwork.measured(told, 'seconds', 1e9), greatest(extract(epoch from present - run.began_at), 0))
   where run.ended_at is null and run.id = coalesce((told ->> 'run')::bigint, (
     select max(last.id) from shiftwork.workers as mine
       join shiftwork.runs as last on last.duty = told ->> 'duty' and last.host = mine.host and last.worker = mine.id
      where mine.id = (told ->> 'worker')::bigint))
  returning run.* into one;
  if not found then
    return false;
  end if;
  insert into shiftwork.run_days as day (duty, host, day, runs, errors, shortest, longest, seconds, did)
  values (one.duty, one.host, shiftwork.today(), 1, (one.error is not null)::int, one.seconds, one.seconds, one.seconds, coalesce(one.did, 0))
  on conflict (duty, host, day) do update
     set runs = day.runs + 1, errors = day.errors + excluded.errors, shortest = least(day.shortest, excluded.shortest),
         longest = greatest(day.longest, excluded.longest), seconds = day.seconds + excluded.seconds, did = day.did + excluded.did;
  return true;
exception when others then
  raise warning 'the end of a run cannot be remembered: %', sqlerrm;
  return false;
end $$;

-- Forget what is known of a duty on a host after six days of silence, and figures of days after 31 days. Says how many rows went,
-- at most so many of each kind.
create or replace function shiftwork.forget_runs(most int) returns int
language plpgsql security definer set search_path = shiftwork, pg_temp as $$
declare
  silent constant timestamptz := shiftwork.clock() - interval '6 days';
  runs int;
  days int;
begin
  delete from shiftwork.runs as run where run.ctid = any(array(
    select one.ctid from shiftwork.runs as one
     where not exists (select from shiftwork.runs as later
                        where later.duty = one.duty and later.host = one.host and greatest(later.began_at, later.ended_at) >= silent)
     limit most for update of one skip locked));
  get diagnostics runs = row_count;
  delete from shiftwork.run_days as day where day.ctid = any(array(
    select one.ctid from shiftwork.run_days as one
     where one.day < shiftwork.today() - 31
        or not exists (select from shiftwork.runs as run where run.duty = one.duty and run.host = one.host)
     limit most for update of one skip locked));
  get diagnostics days = row_count;
  return runs + days;
end $$;
