-- History in partitions: made ahead of time, emptied and dropped whole.

-- Make the partitions for the coming days, and the coarser ones that long retention needs. Each is built apart and then attached;
-- rows that had fallen to the default partition move in. Says how many were made.
create or replace function shiftwork.extend_history() returns int
language plpgsql security definer set search_path = shiftwork, pg_temp set lock_timeout = '2s' as $$
declare
  today constant date := (shiftwork.clock() at time zone 'UTC')::date;
  longest int;
  day date;
  name text;
  made int := 0;
begin
  if not pg_try_advisory_xact_lock(hashtextextended('shiftwork history', 0)) then
    return 0;
  end if;
  select max(days) into longest from shiftwork.queues as queue,
    unnest(array[queue.keep_completed, queue.keep_failed, queue.keep_cancelled, queue.keep_expired]) as days
   where days <= 36500;
  for day in
    select today + ahead from generate_series(0, 39) as ahead
    union
    select (date_trunc('month', today) + make_interval(months => ahead))::date from generate_series(1, 14) as ahead
     where longest > 31
    union
    select (date_trunc('year', today) + make_interval(years => ahead))::date from generate_series(1, 12) as ahead
     where longest > 366 and ahead <= longest / 365 + 2
    order by 1
  loop
    name := 'history_' || to_char(day, 'YYYY_MM_DD');
    continue when to_regclass(format('%I.%I', 'shiftwork', name)) is not null;
    begin
      execute format('create table %I.%I (like shiftwork.history including defaults including constraints)', 'shiftwork', name);
      execute format('with moved as (delete from shiftwork.history_default where forget_on = %L returning *)
                      insert into %I.%I select * from moved', day, 'shiftwork', name);
      execute format('alter table shiftwork.history attach partition %I.%I for values from (%L) to (%L)',
                     'shiftwork', name, day, day + 1);
      made := made + 1;
    exception when lock_not_available or check_violation or deadlock_detected then
      raise warning 'the history partition % could not be attached now: %', name, sqlerrm;
      return made;
    end;
  end loop;
  return made;
end $$;

-- Forget what may be forgotten: partitions of days that have come are emptied, which locks only them, and then dropped or, with
-- `archive`, detached and kept under another name. What lies in the default partition goes in batches. Says how many
-- partitions went and how many jobs.
create or replace function shiftwork.purge(archive boolean default false, most int default 5000, out partitions int, out jobs bigint)
language plpgsql security definer set search_path = shiftwork, pg_temp set lock_timeout = '2s' as $$
declare
  today constant date := (shiftwork.clock() at time zone 'UTC')::date;
  part record;
  many bigint;
begin
  partitions := 0;
  jobs := 0;
  if not pg_try_advisory_xact_lock(hashtextextended('shiftwork history', 0)) then
    return;
  end if;
  for part in
    select child.relname as name
      from pg_catalog.pg_inherits as link join pg_catalog.pg_class as child on child.oid = link.inhrelid
     where link.inhparent = 'shiftwork.history'::regclass and child.relname ~ '^history_\d{4}_\d{2}_\d{2}$'
       and to_date(substr(child.relname, 9), 'YYYY_MM_DD') <= today
     order by child.relname
  loop
    begin
      execute format('select count(*) from %I.%I', 'shiftwork', part.name) into many;
      if archive and many > 0 then
        execute format('alter table shiftwork.history detach partition %I.%I', 'shiftwork', part.name);
        execute format('alter table %I.%I rename to %I', 'shiftwork', part.name, replace(part.name, 'history_', 'archive_'));
      else
        if many > 0 then
          execute format('delete from shiftwork.attempts as noted using %I.%I as ended where noted.job = ended.id', 'shiftwork', part.name);
          execute format('delete from shiftwork.logs as line using %I.%I as ended where line.job = ended.id', 'shiftwork', part.name);
          execute format('delete from shiftwork.progress as last using %I.%I as ended where last.job = ended.id', 'shiftwork', part.name);
          execute format('truncate %I.%I', 'shiftwork', part.name);
          jobs := jobs + many;
        end if;
        execute format('drop table %I.%I', 'shiftwork', part.name);
      end if;
      partitions := partitions + 1;
    exception when lock_not_available or deadlock_detected then
      raise warning 'the history partition % is in use and stays for now: %', part.name, sqlerrm;
    end;
  end loop;

  with ended as (
    delete from shiftwork.history_default as ended
     where ended.ctid = any(array(select old.ctid from shiftwork.history_default as old where old.forget_on <= today limit most))
    returning ended.id
  ), noted as (
    delete from shiftwork.attempts as noted using ended where noted.job = ended.id
  ), lines as (
    delete from shiftwork.logs as line using ended where line.job = ended.id
  ), last as (
    delete from shiftwork.progress as last using ended where last.job = ended.id
  )
  select count(*) into many from ended;
  jobs := jobs + many;
end $$;

-- How long finished jobs of a queue are kept, in days ('*': of every queue that says nothing else; 2147483647: for ever).
-- What is left out stays as it was.
create or replace function shiftwork.retain(
  queue text, completed int default null, failed int default null, cancelled int default null, expired int default null,
  actor text default null) returns void language plpgsql as $$
begin
  insert into shiftwork.queues as known (name, keep_completed, keep_failed, keep_cancelled, keep_expired)
  values (queue, completed, failed, cancelled, expired)
  on conflict (name) do update set
    keep_completed = coalesce(excluded.keep_completed, known.keep_completed),
    keep_failed = coalesce(excluded.keep_failed, known.keep_failed),
    keep_cancelled = coalesce(excluded.keep_cancelled, known.keep_cancelled),
    keep_expired = coalesce(excluded.keep_expired, known.keep_expired);
  perform shiftwork.note(actor, 'retain', jsonb_build_object('queue', queue), after => jsonb_strip_nulls(jsonb_build_object(
    'completed', completed, 'failed', failed, 'cancelled', cancelled, 'expired', expired)));
end $$;
