-- Duties: what some worker does for all, and how it is known that somebody does it. No lock is held meanwhile, and no session
-- needed: a duty is taken by a worker, for as long as the worker has its lease. Two may be at one duty after a lease has
-- lapsed; every duty can stand that.

-- Which of these duties are due, and held by nobody else who is alive.
create or replace function shiftwork.duties_due(holder bigint, names text[], present timestamptz) returns text[]
language sql stable as $$
  select array(
    select duty.name from shiftwork.duties as duty
     where duty.name = any(names) and duty.due_at <= present
       and not exists (select from shiftwork.workers as other
                        where other.id = duty.worker and other.id <> holder and other.gone_at is null and other.lease_until > present)
     order by duty.due_at)
$$;

-- A worker takes those of these duties that are due and free. It has to say when each is done; until then, or until it loses
-- its lease, nobody else takes them.
create or replace function shiftwork.take_duties(holder bigint, names text[]) returns setof text language plpgsql as $$
declare
  present constant timestamptz := shiftwork.clock();
  one text;
  former bigint;
begin
  perform from shiftwork.workers as mine where mine.id = holder and mine.gone_at is null and mine.lease_until > present;
  if not found then
    return;
  end if;
  foreach one in array shiftwork.duties_due(holder, names, present) loop
    select duty.worker into former from shiftwork.duties as duty where duty.name = one for update skip locked;
    continue when not found or cardinality(shiftwork.duties_due(holder, array[one], present)) = 0;      -- taken meanwhile
    update shiftwork.duties as duty set worker = holder, taken_at = present where duty.name = one;
    if former is distinct from holder then                  -- else only the answer was lost
      perform shiftwork.begin_run(one, holder);
    end if;
    return next one;
  end loop;
end $$;

-- A duty is done, or has failed: then it is due again in a minute, for whoever comes first.
-- request: {"worker": 17, "duty": "expire", "did": 3, "seconds": 0.1, "error": null}. Says whether it was this worker's.
create or replace function shiftwork.finish_duty(request jsonb) returns boolean language plpgsql as $$
declare
  present constant timestamptz := shiftwork.clock();
  mine boolean;
begin
  update shiftwork.duties as duty
     set worker = null, taken_at = null, ended_at = present, error = left(request ->> 'error', 10000),
         seconds = coalesce(shiftwork.measured(request, 'seconds', 1e9), extract(epoch from present - duty.taken_at)),
         did = shiftwork.measured(request, 'did', 1e15),
         due_at = present + case when request ->> 'error' is null then duty.every else least(duty.every, interval '1 minute') end
   where duty.name = request ->> 'duty' and duty.worker = (request ->> 'worker')::bigint;
  mine := found;
  perform shiftwork.end_run(request - 'run');               -- whoever took it over, this run has ended
  return mine;
end $$;

-- Forget workers that are gone, and what workers said of themselves, after as many days as `keep_workers` says; pauses of workers that
-- are gone at once, since every claim looks at what is paused; and old runs of duties. Says how many rows went, at most so many of each kind.
create or replace function shiftwork.forget_workers(most int default 5000) returns int
language plpgsql security definer set search_path = shiftwork, pg_temp as $$
declare
  old constant timestamptz := shiftwork.clock() - make_interval(days => coalesce(
    (select (one.value #>> '{}')::int from shiftwork.settings as one where one.name = 'keep_workers'), 7));
  workers int;
  snapshots int;
  paused int;
begin
  delete from shiftwork.workers as gone where gone.id = any(array(
    select one.id from shiftwork.workers as one where one.gone_at < old order by one.id limit most for update skip locked));
  get diagnostics workers = row_count;
  delete from shiftwork.snapshots as said where said.ctid = any(array(
    select one.ctid from shiftwork.snapshots as one where one.at < old order by one.at limit most for update skip locked));
  get diagnostics snapshots = row_count;
  delete from shiftwork.pauses as pause where pause.kind = 'worker' and pause.name = any(array(
    select one.name from shiftwork.pauses as one
     where one.kind = 'worker'
       and not exists (select from shiftwork.workers as alive where alive.id::text = one.name and alive.gone_at is null)
       for update skip locked));
  get diagnostics paused = row_count;
  return workers + snapshots + paused + shiftwork.forget_runs(most);
end $$;

-- What a heartbeat does besides: it keeps what the worker says of itself (`state`), hears which duties it has done (`done`, as
-- finish_duty takes them), lets it take those that are due of those it would do (`duties`), and tells how full the queue of
-- notifications is. Nothing that goes wrong here may cost a lease, and nobody who has locked any of it is waited for.
create or replace function shiftwork.attend(holder bigint, request jsonb, present timestamptz) returns jsonb
language plpgsql set lock_timeout = '100ms' as $$
declare
  said constant jsonb := request -> 'state';
begin
  if jsonb_typeof(said) = 'object'
     and not exists (select from shiftwork.settings as one where one.name = 'keep_workers' and one.value = '0')
     and not exists (select from shiftwork.snapshots as last where last.worker = holder and last.at > present - interval '5 seconds')
  then
    insert into shiftwork.snapshots (worker, at, running, held, unwritten, jobs, memory, cpu)
    values (holder, present, (said ->> 'running')::int, (said ->> 'held')::int, (said ->> 'unwritten')::int, (said ->> 'jobs')::bigint,
            (said ->> 'memory')::bigint, (said ->> 'cpu')::double precision)
    on conflict do nothing;
  end if;
  if jsonb_typeof(request -> 'duties') is distinct from 'array' then
    return '{}';
  end if;
  perform shiftwork.finish_duty(one || jsonb_build_object('worker', holder))
     from jsonb_array_elements(coalesce(request -> 'done', '[]')) as one;
  return jsonb_build_object('notifications', pg_notification_queue_usage(), 'duties', coalesce((
    select jsonb_agg(taken) from shiftwork.take_duties(holder, array(select jsonb_array_elements_text(request -> 'duties'))) as taken), '[]'));
exception when others then
  raise warning 'what worker % says of itself cannot be kept: %', holder, sqlerrm;
  return '{}';
end $$;
