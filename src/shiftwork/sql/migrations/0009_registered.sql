-- Whether any task has ever been registered with a queue, a priority or a number of attempts, and whether any has with a priority, which few
-- have: who enqueues need not look for what nobody has said. Sequences, so that everybody sees it before the task itself can be seen. They
-- have no value until then, and keep it. The function is the same in the protocol, and re-created with it; here it does its work already.
create sequence shiftwork.registered;
create sequence shiftwork.registered_priority;
create function shiftwork.note_registered() returns trigger
language plpgsql security definer set search_path = shiftwork, pg_temp as $$
begin
  if pg_sequence_last_value('shiftwork.registered') is null then
    perform setval('shiftwork.registered', 1);
  end if;
  if new.priority is not null and pg_sequence_last_value('shiftwork.registered_priority') is null then
    perform setval('shiftwork.registered_priority', 1);
  end if;
  return new;
end $$;
create trigger note_registered before insert or update on shiftwork.tasks
  for each row when (new.queue is not null or new.priority is not null or new.max_attempts is not null)
  execute function shiftwork.note_registered();
alter table shiftwork.tasks enable always trigger note_registered;         -- also where rows come by replication, which carries no sequences

-- Few tasks to a page: a small table is read whole, and a registry of a hundred tasks would be, by every enqueue. Those that are there already
-- move, and are noted.
alter table shiftwork.tasks set (fillfactor = 10);
update shiftwork.tasks set name = name;
