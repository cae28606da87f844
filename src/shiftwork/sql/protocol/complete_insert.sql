-- Refuse a payload that is larger than the settings allow; small ones are let be. Measured as its reader gets it: stored, it may be
-- compressed, and a number of seven characters can have a hundred thousand digits.
create or replace function shiftwork.check_payload(task text, payload jsonb) returns void
language plpgsql stable security definer set search_path = shiftwork, pg_temp as $$
declare
  size constant int := octet_length(payload::text);
  allowed int;
begin
  if size <= 8192 then
    return;
  end if;
  allowed := coalesce((select value::int from shiftwork.settings where name = 'max_payload'), 1048576);
  if size > allowed then
    raise exception using errcode = 'SW004',
      message = format('the payload of a job of task "%s" has %s bytes, and %s are allowed',
                       left(task, 200), size, allowed),
      hint = 'Store what is large elsewhere and enqueue its name, or raise max_payload in the table settings.';
  end if;
end $$;

-- A plain INSERT gives what it likes, the rest comes from the registry, and sleepers are woken. Only rows that say when they
-- were made are left alone: `enqueue` made them and does all of this by itself, or they come from elsewhere, as they are.
create or replace function shiftwork.complete_insert() returns trigger
language plpgsql security definer set search_path = shiftwork, pg_temp as $$
declare
  present constant timestamptz := shiftwork.clock();
  known shiftwork.tasks;
begin
  select * into known from shiftwork.tasks where name = new.task;
  new.created_at := present;
  new.queue := coalesce(new.queue, known.queue, 'default');
  new.priority := coalesce(new.priority, known.priority, 0);
  new.max_attempts := coalesce(new.max_attempts, known.max_attempts, 5);
  new.run_at := case when new.state = 'ready' then greatest(new.run_at, present) else coalesce(new.run_at, present) end;
  if new.state = 'ready' and new.run_at > present then
    new.state := 'scheduled';
  end if;
  if new.unique_key is not null and new.unique_scope is null then
    new.unique_scope := coalesce(known.unique_scope, 'pending');
    new.held_key := new.unique_key;
  end if;
  perform shiftwork.check_payload(new.task, new.payload);
  if shiftwork.is_declared('shiftwork.asleep_until') then
    perform shiftwork.wake(array[new.queue]);
  end if;
  return new;
end $$;
