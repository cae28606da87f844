-- History in partitions: made ahead of time, emptied and dropped whole.

-- Make the partitions for the coming days, and the coarser ones that long retention needs. Each is built apart and then attached;
-- rows that had fallen to the default partition move in. Says how many were made.
create or replace function shiftwork.extend_history() returns int
language plpgsql security definer set search_path = shiftwork, pg_temp set lock_timeout = '2s' as $$
declare
  today constant date := shiftwork.today();
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
   where days <= 3660;
  for day in
    select today + ahead from generate_series(1, 39) as ahead
    union
    select (date_trunc('month', today::timestamp) + make_interval(months => ahead))::date from generate_series(1, 14) as ahead
     where longest > 31
    union
    select (date_trunc('year', today::timestamp) + make_interval(years => ahead))::date from generate_series(1, 13) as ahead
     where longest > 366 and ahead <= longest / 365 + 2
    order by 1
  loop
    name := 'history_' || to_char(day, 'YYYY_MM_DD');
    continue when to_regclass(format('%I.%I', 'shiftwork', name)) is not null;
    begin
      if exists (select from shiftwork.history_default as stray where stray.forget_on = day) then
        lock table shiftwork.history_default in access exclusive mode;      -- or more would arrive while we move them
      end if;
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

-- Forget what may be forgotten: partitions of days that have come are dropped or, with `archive`, detached and kept as
-- archive_<day>, with the jobs' attempts, logs and progress beside them. What lies in the default partition goes in
-- batches. Says how many partitions went and how many jobs.
--
-- Dropping needs all of history for a moment. That exclusive lock is taken before any on a partition, as everyone does who
-- reads: so nobody waits for us while we wait for them. Where it cannot be had at once, the oldest partition that holds something is
-- emptied, which locks only that one, and the rest is left to the next time.
create or replace function shiftwork.purge(archive boolean default false, most int default 5000, out partitions int, out jobs bigint)
language plpgsql security definer set search_path = shiftwork, pg_temp set lock_timeout = '200ms' as $$
declare
  today constant date := shiftwork.today();
  names text[];
  filled boolean;
  name text;
  many bigint;
begin
  partitions := 0;
  jobs := 0;
  if not pg_try_advisory_xact_lock(hashtextextended('shiftwork history', 0)) then
    return;
  end if;

  with ended as (
    delete from shiftwork.history_default as ended
     where ended.ctid = any(array(select old.ctid from shiftwork.history_default as old
                                   where old.forget_on <= today limit most for update skip locked))
    returning ended.id
  ), noted as (
    delete from shiftwork.attempts as noted using ended where noted.job = ended.id
  ), lines as (
    delete from shiftwork.logs as line using ended where line.job = ended.id
  ), last as (
    delete from shiftwork.progress as last using ended where last.job = ended.id
  )
  select count(*) into jobs from ended;

  names := array(
    select child.relname
      from pg_catalog.pg_inherits as link join pg_catalog.pg_class as child on child.oid = link.inhrelid
     where link.inhparent = 'shiftwork.history'::regclass and child.relname ~ '^history_\d{4}_\d{2}_\d{2}$'
       and to_date(substr(child.relname, 9), 'YYYY_MM_DD') <= today
     order by child.relname);
  if cardinality(names) = 0 then
    return;
  end if;
  many := jobs;
  begin
    foreach name in array names loop
      many := many + shiftwork.purge_companions(name, archive);
    end loop;
    lock table only shiftwork.history in access exclusive mode;
    foreach name in array names loop
      execute format('select exists (select from %I.%I)', 'shiftwork', name) into filled;
      if archive and filled then
        execute format('alter table shiftwork.history detach partition %I.%I', 'shiftwork', name);
        execute format('alter table %I.%I rename to %I', 'shiftwork', name, replace(name, 'history', 'archive'));
      else
        execute format('drop table %I.%I', 'shiftwork', name);
      end if;
    end loop;
    partitions := cardinality(names);
    jobs := many;
    return;
  exception when lock_not_available or deadlock_detected or duplicate_table then
    raise warning 'history is in use, and its old partitions stay for now: %', sqlerrm;
  end;

  if not archive then
    foreach name in array names loop
      begin
        many := shiftwork.purge_companions(name, false);
        continue when many = 0;
        execute format('truncate %I.%I', 'shiftwork', name);
        jobs := jobs + many;
        return;
      exception when lock_not_available or deadlock_detected then
        continue;
      end;
    end loop;
  end if;
end $$;

-- What belongs to the jobs of one partition goes with them. Says how many jobs it holds.
create or replace function shiftwork.purge_companions(partition text, archive boolean) returns bigint
language plpgsql security definer set search_path = shiftwork, pg_temp as $$
declare
  companion text;
  kept text;
  many bigint;
begin
  execute format('select count(*) from %I.%I', 'shiftwork', partition) into many;
  if many = 0 then
    return 0;
  end if;
  foreach companion in array array['attempts', 'logs', 'progress'] loop
    if archive then
      kept := replace(partition, 'history', 'archive') || '_' || companion;
      execute format('create table %I.%I (like %1$I.%3$I)', 'shiftwork', kept, companion);
      execute format('insert into %I.%I select one.* from %1$I.%3$I as one join %1$I.%4$I as ended on ended.id = one.job',
                     'shiftwork', kept, companion, partition);
    end if;
    execute format('delete from %I.%I as one using %1$I.%3$I as ended where one.job = ended.id', 'shiftwork', companion, partition);
  end loop;
  return many;
end $$;

-- How long finished jobs of a queue are kept, in days ('*': of every queue that says nothing else; 2147483647: for ever).
-- What is left out stays as it was.
create or replace function shiftwork.retain(
  queue text, completed int default null, failed int default null, cancelled int default null, expired int default null,
  actor text default null) returns void language plpgsql as $$
begin
  insert into shiftwork.queues (name) select queue where queue <> '*' on conflict do nothing;
  update shiftwork.queues as known
     set keep_completed = coalesce(completed, known.keep_completed), keep_failed = coalesce(failed, known.keep_failed),
         keep_cancelled = coalesce(cancelled, known.keep_cancelled), keep_expired = coalesce(expired, known.keep_expired)
   where known.name = queue;
  perform shiftwork.note(actor, 'retain', jsonb_build_object('queue', queue), after => jsonb_strip_nulls(jsonb_build_object(
    'completed', completed, 'failed', failed, 'cancelled', cancelled, 'expired', expired)));
  perform shiftwork.extend_history();
end $$;
