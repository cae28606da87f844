-- Waking. NOTIFY takes one lock for the whole server at commit, so nobody notifies unless somebody sleeps, and never into
-- a notification queue that is more than half full: it is a hint, and must not fail a commit.

-- Is the time in this sequence still to come?
create or replace function shiftwork.is_declared(until regclass) returns boolean language sql volatile
as $$ select coalesce(pg_sequence_last_value(until), 0) > date_part('epoch', clock_timestamp()) * 1000 $$;

-- One look tells whoever enqueues whether there is anything to heed: `heed` has no value if there is not, else it is the sum of 1 (a task is
-- registered with a queue, a priority or a number of attempts), 2 (one with a priority) and 4 (somebody sleeps, or did). To look takes a lock
-- on that sequence until the end of the transaction, by which a sleeper finds those who looked before him. Who changes it
-- holds the lock of those who declare that they sleep.
create or replace function shiftwork.change_heed(plus bigint, minus bigint) returns void language plpgsql as $$
declare
  former constant bigint := coalesce(pg_sequence_last_value('shiftwork.heed'), 0);
  present constant bigint := former & ~minus | plus;
begin
  if present <> former then
    perform setval('shiftwork.heed', present, present > 0);
  end if;
end $$;

-- Raise the time in a sequence; never lower it. A sleep is to be heeded from then on.
create or replace function shiftwork.declare_until(sequence regclass, seconds double precision) returns void
language plpgsql as $$
declare
  until bigint := (extract(epoch from clock_timestamp()) + least(greatest(seconds, 0), 600)) * 1000;
begin
  perform pg_advisory_xact_lock(hashtextextended('shiftwork declare ' || sequence, 0));
  if coalesce(pg_sequence_last_value(sequence), 0) < until then
    perform setval(sequence, until);
  end if;
  if sequence = 'shiftwork.asleep_until'::regclass then
    perform shiftwork.change_heed(4, 0);
  end if;
end $$;

-- A sleep that has lapsed is forgotten, so that those after us need not look at it. One that is being declared just now is not: whoever declares it
-- holds the lock. We give it back at once, with all that this block did but the sequences, since our transaction may last.
create or replace function shiftwork.forget_lapsed(sequence regclass) returns void language plpgsql as $$
begin
  if pg_try_advisory_xact_lock(hashtextextended('shiftwork declare ' || sequence, 0)) and not shiftwork.is_declared(sequence) then
    perform setval(sequence, 0, false);
    perform shiftwork.change_heed(0, 4);
  end if;
  raise exception using errcode = 'SW000';
exception when sqlstate 'SW000' then
  null;
end $$;

-- Fired by a task that is registered with values which an enqueue may leave out: from now on they are looked for. The lock is given back at
-- once here too. What is said already is read as a table is, not looked at as an enqueue does: no sleeper waits for who registers in a long
-- transaction, save for the first.
create or replace function shiftwork.note_registered() returns trigger
language plpgsql security definer set search_path = shiftwork, pg_temp as $$
declare
  said constant bigint := case when new.priority is null then 1 else 3 end;
begin
  if exists (select from shiftwork.heed as former where former.is_called and former.last_value & said = said) then
    return new;
  end if;
  begin
    perform pg_advisory_xact_lock(hashtextextended('shiftwork declare ' || 'shiftwork.asleep_until'::regclass, 0));
    perform shiftwork.change_heed(said, 0);
    raise exception using errcode = 'SW000';
  exception when sqlstate 'SW000' then
    null;
  end;
  return new;
end $$;

-- Tell whoever sleeps that a queue has work; an empty name means any queue.
create or replace function shiftwork.wake(queues text[]) returns void
language plpgsql security definer set search_path = shiftwork, pg_temp as $$
begin
  if shiftwork.is_declared('shiftwork.asleep_until') and pg_notification_queue_usage() < 0.5 then
    if cardinality(queues) > 8 then
      queues := array[''];
    end if;
    perform pg_notify('shiftwork_wake', name) from unnest(queues) as name;
  end if;
end $$;

-- Tell whoever waits for results that these jobs are finished.
create or replace function shiftwork.announce(ids bigint[]) returns void
language plpgsql security definer set search_path = shiftwork, pg_temp as $$
begin
  if shiftwork.is_declared('shiftwork.awaited_until') and pg_notification_queue_usage() < 0.5 then
    perform pg_notify('shiftwork_done', id::text) from unnest(ids) as id;
  end if;
end $$;

-- A worker goes to sleep: inserts notify from now on. What was being inserted before is listed, so that it can be waited for, and so is who
-- has only looked whether somebody sleeps.
create or replace function shiftwork.sleep(seconds double precision) returns table (virtual_transaction text)
language plpgsql security definer set search_path = shiftwork, pg_temp as $$
begin
  perform shiftwork.declare_until('shiftwork.asleep_until', seconds);
  return query
  select distinct held.virtualtransaction
    from pg_catalog.pg_locks as held
   where held.relation in ('shiftwork.jobs'::regclass, 'shiftwork.heed'::regclass) and held.mode = 'RowExclusiveLock'
     and held.database = (select oid from pg_catalog.pg_database where datname = current_database())
     and held.pid is distinct from pg_backend_pid();                 -- a prepared transaction has none
end $$;

-- There is so much to do that a worker which had gone to sleep will not do so again for a while. Nobody notifies any more; whoever
-- still sleeps is told so, looks again, and says again that it sleeps.
create or replace function shiftwork.rouse() returns void
language plpgsql security definer set search_path = shiftwork, pg_temp as $$
begin
  perform pg_advisory_xact_lock(hashtextextended('shiftwork declare ' || 'shiftwork.asleep_until'::regclass, 0));
  if shiftwork.is_declared('shiftwork.asleep_until') and pg_notification_queue_usage() < 0.5 then
    perform pg_notify('shiftwork_wake', '');
    perform setval('shiftwork.asleep_until', 0, false);
    perform shiftwork.change_heed(0, 4);
  end if;
end $$;

-- Somebody waits for results: jobs that finish from now on are announced.
create or replace function shiftwork.await_results(seconds double precision) returns void
language plpgsql security definer set search_path = shiftwork, pg_temp as $$
begin
  perform shiftwork.declare_until('shiftwork.awaited_until', seconds);
end $$;
