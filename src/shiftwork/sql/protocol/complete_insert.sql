-- Refuse a payload that is larger than the settings allow. Small ones are not measured.
create or replace function shiftwork.check_payload(task text, payload jsonb) returns void
language plpgsql stable security definer set search_path = shiftwork, pg_temp as $$
declare
  allowed int;
begin
  if pg_column_size(payload) <= 8192 then
    return;
  end if;
  allowed := coalesce((select value::int from shiftwork.settings where name = 'max_payload'), 1048576);
  if octet_length(payload::text) > allowed then
    raise exception using errcode = 'SW004',
      message = format('the payload of a job of task "%s" has %s bytes, and %s are allowed',
                       left(task, 200), octet_length(payload::text), allowed),
      hint = 'Store what is large elsewhere and enqueue its name, or raise max_payload in the table settings.';
  end if;
end $$;

-- A plain INSERT gives what it likes; the rest comes from the registry. Fires only for rows that need it: `enqueue` makes
-- rows that are complete, unless they are large.
create or replace function shiftwork.complete_insert() returns trigger
language plpgsql security definer set search_path = shiftwork, pg_temp as $$
declare
  present timestamptz := shiftwork.clock();
  known shiftwork.tasks;
begin
  if new.queue is null or new.priority is null or new.max_attempts is null
     or (new.unique_key is not null and new.unique_scope is null) then
    select * into known from shiftwork.tasks where name = new.task;
    new.queue := coalesce(new.queue, known.queue, 'default');
    new.priority := coalesce(new.priority, known.priority, 0);
    new.max_attempts := coalesce(new.max_attempts, known.max_attempts, 5);
    if new.unique_key is not null and new.unique_scope is null then
      new.unique_scope := coalesce(known.unique_scope, 'pending');
      new.held_key := new.unique_key;
    end if;
  end if;
  if new.state = 'ready' then
    new.run_at := greatest(new.run_at, present);
    if new.run_at > present then
      new.state := 'scheduled';
    end if;
  end if;
  if new.created_at = present then  -- what was let in once may come back
    perform shiftwork.check_payload(new.task, new.payload);
  end if;
  return new;
end $$;

create or replace trigger complete_insert before insert on shiftwork.jobs
  for each row when (
    new.queue is null or new.priority is null or new.max_attempts is null
    or (new.unique_key is not null and new.unique_scope is null)
    or (new.state = 'ready' and new.run_at is distinct from new.created_at)
    or pg_column_size(new.payload) > 8192
  ) execute function shiftwork.complete_insert();
