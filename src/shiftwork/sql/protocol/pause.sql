-- Pause a queue or a task: nobody claims from it, what runs goes on. It ends by itself after `lasting`, or with resume.
create or replace function shiftwork.pause(
  queue text default null, task text default null, lasting interval default null, reason text default null,
  actor text default null) returns void
language plpgsql as $$
#variable_conflict use_variable
declare
  present constant timestamptz := shiftwork.clock();
begin
  if (queue is null) = (task is null) then
    raise exception using errcode = 'SW001', message = 'pause takes either a queue or a task';
  end if;
  if lasting <= interval '0' then
    raise exception using errcode = 'SW001', message = 'a pause must last for some time';
  end if;
  insert into shiftwork.pauses as pause (kind, name, since, until, reason, actor)
  values (case when queue is null then 'task' else 'queue' end, coalesce(queue, task), present, present + lasting, reason,
          coalesce(actor, session_user))
  on conflict (kind, name) do update
    set until = excluded.until, reason = excluded.reason, actor = excluded.actor;
  perform shiftwork.note(actor, 'pause', jsonb_strip_nulls(jsonb_build_object('queue', queue, 'task', task)),
                         after => jsonb_build_object('until', present + lasting, 'reason', reason));
end $$;

-- End a pause. Says whether there was one.
create or replace function shiftwork.resume(queue text default null, task text default null, actor text default null)
returns boolean language plpgsql as $$
#variable_conflict use_variable
declare
  was shiftwork.pauses;
begin
  if (queue is null) = (task is null) then
    raise exception using errcode = 'SW001', message = 'resume takes either a queue or a task';
  end if;
  delete from shiftwork.pauses as pause
   where pause.kind = case when queue is null then 'task' else 'queue' end and pause.name = coalesce(queue, task)
  returning * into was;
  if was.name is null then
    return false;
  end if;
  perform shiftwork.note(actor, 'resume', jsonb_strip_nulls(jsonb_build_object('queue', queue, 'task', task)), before => to_jsonb(was));
  perform shiftwork.wake(array[coalesce(queue, '')]);
  return true;
end $$;
