-- Where it was installed before a worker could be paused, it is made anew.
drop function if exists shiftwork.pause(text, text, interval, text, text);
drop function if exists shiftwork.resume(text, text, text);

-- Pause a queue, a task, a worker or everything: once this is committed nothing of it is claimed, and what runs goes on. It
-- ends by itself after `lasting`, or with resume.
create or replace function shiftwork.pause(
  queue text default null, task text default null, lasting interval default null, reason text default null,
  actor text default null, worker bigint default null, everything boolean default false) returns void
language plpgsql set lock_timeout = '5s' as $$
#variable_conflict use_variable
declare
  present constant timestamptz := shiftwork.clock();
  kind constant text := shiftwork.kind_of(queue, task, worker);
  name constant text := coalesce(queue, task, worker::text, '');
begin
  if num_nonnulls(queue, task, worker, nullif(everything, false)) <> 1 then
    raise exception using errcode = 'SW001', message = 'pause takes either a queue, a task, a worker or everything';
  end if;
  if lasting <= interval '0' then
    raise exception using errcode = 'SW001', message = 'a pause must last for some time';
  end if;
  if not isfinite(present + lasting) then
    raise exception using errcode = 'SW001', message = 'a pause ends at some time, or when somebody resumes',
      hint = 'Leave out `lasting` for one that lasts until then.';
  end if;
  if worker is not null and not exists (select from shiftwork.workers as one where one.id = worker and one.gone_at is null) then
    raise exception using errcode = 'SW001', message = format('there is no worker %s', worker);
  end if;
  -- Claims that are under way have ended when this has: from then on nothing is taken.
  begin
    perform pg_advisory_xact_lock(hashtextextended('shiftwork claims', 0));
  exception when lock_not_available then
    raise warning 'a claim is still under way, and may take something yet';
  end;
  insert into shiftwork.pauses as pause (kind, name, since, until, reason, actor)
  values (kind, name, present, present + lasting, reason, coalesce(actor, session_user))
  on conflict on constraint pauses_pkey do update
    set until = excluded.until, reason = excluded.reason, actor = excluded.actor;
  perform shiftwork.note(actor, 'pause', shiftwork.target_of(kind, name),
                         after => jsonb_build_object('until', present + lasting, 'reason', reason));
end $$;

-- End a pause. Says whether there was one.
create or replace function shiftwork.resume(
  queue text default null, task text default null, actor text default null, worker bigint default null,
  everything boolean default false) returns boolean
language plpgsql as $$
#variable_conflict use_variable
declare
  kind constant text := shiftwork.kind_of(queue, task, worker);
  name constant text := coalesce(queue, task, worker::text, '');
  was shiftwork.pauses;
begin
  if num_nonnulls(queue, task, worker, nullif(everything, false)) <> 1 then
    raise exception using errcode = 'SW001', message = 'resume takes either a queue, a task, a worker or everything';
  end if;
  delete from shiftwork.pauses as pause
   where pause.kind = kind and pause.name = name
  returning * into was;
  if was.name is null then
    return false;
  end if;
  perform shiftwork.note(actor, 'resume', shiftwork.target_of(kind, name), before => to_jsonb(was));
  perform shiftwork.wake(array[coalesce(queue, '')]);
  return true;
end $$;

-- What is meant: a queue, a task, a worker, or everything.
create or replace function shiftwork.kind_of(queue text, task text, worker bigint default null) returns text language sql immutable as $$
  select case when queue is not null then 'queue' when task is not null then 'task' when worker is not null then 'worker' else 'all' end
$$;

-- How that is written in the audit.
create or replace function shiftwork.target_of(kind text, name text) returns jsonb language sql immutable as $$
  select case kind when 'all' then '{"everything": true}' else jsonb_build_object(kind, name) end
$$;

-- Pauses whose time is over are gone. Says which, to whoever asks first.
create or replace function shiftwork.end_pauses() returns jsonb
language plpgsql security definer set search_path = shiftwork, pg_temp as $$
declare
  was shiftwork.pauses;
  over jsonb := '[]';
begin
  for was in
    select pause.* from shiftwork.pauses as pause where pause.until <= shiftwork.clock()
     order by pause.kind, pause.name for update skip locked
  loop
    delete from shiftwork.pauses as pause where pause.kind = was.kind and pause.name = was.name;
    perform shiftwork.note('shiftwork', 'resume', shiftwork.target_of(was.kind, was.name),
                           before => to_jsonb(was), after => '{"by": "its time was over"}');
    over := over || jsonb_strip_nulls(jsonb_build_object('kind', was.kind, 'name', was.name, 'reason', was.reason));
  end loop;
  return nullif(over, '[]');
end $$;
