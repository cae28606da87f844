-- What whoever enqueues has to heed, told by one look instead of two: no value as long as there is nothing, else the sum of
-- 1 (a task is registered with a queue, a priority or a number of attempts), 2 (one with a priority) and 4 (somebody may sleep).
-- `registered` and `registered_priority`, which said a part of it, go in a later release: until the functions are re-created they are still read.
create sequence shiftwork.heed minvalue 0 start 0;
do $$
begin                                                      -- who owns the registry notes in it what is registered, whoever migrates
  execute format('alter sequence shiftwork.heed owner to %s',
                 (select relowner::regrole from pg_catalog.pg_class where oid = 'shiftwork.tasks'::regclass));
end $$;
lock table shiftwork.tasks in share row exclusive mode;            -- who is just registering a task says so as before, and is waited for
select setval('shiftwork.heed', said, said > 0)
  from (select case when to_regprocedure('shiftwork.sleep(double precision)') is null then 0 else 4 end
             + count(pg_sequence_last_value('shiftwork.registered'))
             + 2 * count(pg_sequence_last_value('shiftwork.registered_priority')) as said) as former;

-- From here on both are said. The function is written anew in the protocol, and changes `heed` under the same lock, which is given back at once.
create or replace function shiftwork.note_registered() returns trigger
language plpgsql security definer set search_path = shiftwork, pg_temp as $$
begin
  perform setval('shiftwork.registered', 1);
  if new.priority is not null then
    perform setval('shiftwork.registered_priority', 1);
  end if;
  begin
    perform pg_advisory_xact_lock(hashtextextended('shiftwork declare ' || 'shiftwork.asleep_until'::regclass, 0));
    perform setval('shiftwork.heed', coalesce(pg_sequence_last_value('shiftwork.heed'), 0) | case when new.priority is null then 1 else 3 end);
    raise exception using errcode = 'SW000';
  exception when sqlstate 'SW000' then
    null;
  end;
  return new;
end $$;
