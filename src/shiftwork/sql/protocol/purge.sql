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

-- Forget what may be forgotten, as far as one call goes: partitions of days that have come are dropped or, with `archive`, detached and
-- kept as archive_<day>, with the jobs' attempts, logs and progress beside them. What lies in the default partition goes in
-- batches. Says how many partitions went and how many jobs, and whether there may be more: then it is to be called again.
--
-- What belongs to jobs is taken away first, `most` rows a statement and a hundred times that in a call. Without its job it could not
-- be found any more, so a partition goes only in a call that has looked through all of it.
--
-- Dropping needs all of history for a moment. That exclusive lock is taken before any other that is in a reader's way: so no reader
-- waits for us while we wait for them. Where it cannot be had at once, the oldest partition that holds something is
-- emptied, which locks only that one, and the rest is left to the next time.
create or replace function shiftwork.purge_part(
  archive boolean default false, most int default 5000, out partitions int, out jobs bigint, out more boolean)
language plpgsql security definer set search_path = shiftwork, pg_temp set lock_timeout = '200ms' as $$
declare
  today constant date := shiftwork.today();
  size constant int := greatest(coalesce(most, 5000), 1);
  budget bigint := 100 * size::bigint;
  strays bigint[];
  one record;
  part record;
  many bigint;
  rests jsonb := '{}';                                   -- partitions that may go, each with how many jobs it still holds
begin
  partitions := 0;
  jobs := 0;
  more := false;
  if not pg_try_advisory_xact_lock(hashtextextended('shiftwork history', 0)) then
    return;
  end if;

  strays := array(select old.id from shiftwork.history_default as old where old.forget_on <= today limit size for update skip locked);
  select cleared.budget into budget from shiftwork.purge_companions(strays, null, size, budget) as cleared;
  if budget > 0 then
    delete from shiftwork.history_default as old where old.id = any(strays) and old.forget_on <= today;
    get diagnostics jobs = row_count;
  end if;

  for one in
    select child.relname as name
      from pg_catalog.pg_inherits as link join pg_catalog.pg_class as child on child.oid = link.inhrelid
     where link.inhparent = 'shiftwork.history'::regclass and child.relname ~ '^history_\d{4}_\d{2}_\d{2}$'
       and to_date(substr(child.relname, 9), 'YYYY_MM_DD') <= today
     order by child.relname
  loop
    exit when budget <= 0;
    begin
      part := shiftwork.purge_partition(one.name, archive, size, budget);
      budget := part.budget;
      jobs := jobs + part.jobs;
      if budget > 0 then
        rests := rests || jsonb_build_object(one.name, part.rest);
      end if;
    exception when lock_not_available or deadlock_detected then
      raise warning '% is being written to, and stays for now: %', one.name, sqlerrm;
    end;
  end loop;

  begin
    if rests <> '{}' then
      lock table only shiftwork.history in access exclusive mode;
    end if;
    for one in select key as name, value::bigint as rest from jsonb_each(rests) loop
      if archive and one.rest > 0 then
        execute format('alter table shiftwork.history detach partition %I.%I', 'shiftwork', one.name);
        execute format('alter table %I.%I rename to %I', 'shiftwork', one.name, replace(one.name, 'history', 'archive'));
      else
        execute format('drop table %I.%I', 'shiftwork', one.name);
      end if;
    end loop;
    select count(*), coalesce(sum(value::bigint), 0) into partitions, many from jsonb_each(rests);
    jobs := jobs + many;
  exception when lock_not_available or deadlock_detected or duplicate_table then
    raise warning 'history is in use, and its old partitions stay for now: %', sqlerrm;
    for one in select key as name, value::bigint as rest from jsonb_each(rests) where value::bigint > 0 and not archive order by key loop
      begin
        execute format('truncate %I.%I', 'shiftwork', one.name);
        jobs := jobs + one.rest;
        exit;
      exception when lock_not_available or deadlock_detected then
        continue;
      end;
    end loop;
  end;
  more := budget <= 0 or jobs > 0;
end $$;

-- The same once, for who calls it now and then: says how many partitions went and how many jobs.
create or replace function shiftwork.purge(archive boolean default false, most int default 5000, out partitions int, out jobs bigint)
language sql security definer set search_path = shiftwork, pg_temp as $$
  select part.partitions, part.jobs from shiftwork.purge_part(archive, most) as part
$$;

-- Look through a partition of jobs that may be forgotten. Those to which something belongs go one by one, together with that; the
-- `rest` goes with the partition, and is not told as long as there may be more. With `archive` all of them stay, and what belongs to
-- them moves. Until the transaction ends nobody writes to it: neither does anybody revive a job of which only a part is left, nor
-- can one come late, and be passed by.
create or replace function shiftwork.purge_partition(
  partition text, archive boolean, most int, inout budget bigint, out jobs bigint, out rest bigint)
language plpgsql security definer set search_path = shiftwork, pg_temp set enable_seqscan = off as $$
declare
  companion text;
  place bigint := -9223372036854775808;
  seen bigint := 0;
  ids bigint[];
  owners bigint[];
  gone bigint;
begin
  jobs := 0;
  execute format('lock table %I.%I in share mode', 'shiftwork', partition);
  loop
    execute format('select array(select one.id from %I.%I as one where one.id > $1 order by one.id limit $2)', 'shiftwork', partition)
       into ids using place, most;
    exit when cardinality(ids) = 0;
    if archive and seen = 0 then
      foreach companion in array array['attempts', 'logs', 'progress'] loop
        execute format('create table if not exists %I.%I (like %1$I.%3$I)', 'shiftwork',
                       replace(partition, 'history', 'archive') || '_' || companion, companion);
      end loop;
    end if;
    select cleared.budget, cleared.owners into budget, owners
      from shiftwork.purge_companions(ids, case when archive then replace(partition, 'history', 'archive') end, most, budget) as cleared;
    if budget <= 0 then
      return;
    end if;
    if cardinality(owners) > 0 and not archive then
      execute format('delete from %I.%I as one where one.id = any($1)', 'shiftwork', partition) using owners;
      get diagnostics gone = row_count;
      jobs := jobs + gone;
    end if;
    seen := seen + cardinality(ids);
    place := ids[cardinality(ids)];
  end loop;
  rest := seen - jobs;
end $$;

-- Until it was done in batches, it was given a partition.
drop function if exists shiftwork.purge_companions(text, boolean);

-- Take away what belongs to jobs, or move it to the tables of an archive: `most` rows a statement, and no more than the budget. Says to
-- which jobs something belonged, and what is left of the budget; if that is nothing, there may be more.
create or replace function shiftwork.purge_companions(
  ids bigint[], archive text, most int, inout budget bigint, out owners bigint[])
language plpgsql security definer set search_path = shiftwork, pg_temp
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off as $$
declare
  companion text;
  many int;
  whose bigint[];
begin
  owners := '{}';
  foreach companion in array array['attempts', 'logs', 'progress'] loop
    loop
      execute format(
        'with gone as (
           delete from %1$I.%2$I as one
            where one.ctid = any(array(select near.ctid from %1$I.%2$I as near where near.job = any($1) limit $2)) returning one.*
         )' || case when archive is not null then ', kept as (insert into %1$I.%3$I select * from gone)' else '' end || '
         select count(*), coalesce(array_agg(distinct gone.job), ''{}'') from gone',
        'shiftwork', companion, archive || '_' || companion) into many, whose using ids, least(most, budget);
      owners := owners || whose;
      budget := budget - many;
      if budget <= 0 then
        return;
      end if;
      exit when (many > 0 and many = most) is not true;
    end loop;
  end loop;
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
