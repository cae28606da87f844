-- Limits: how many jobs may run at once, in the whole cluster, of a queue, of a task or over all.
--
-- A limit of five is five rows in `permits`. A claim takes free ones, passing by those that another claim is just taking, and
-- lends one to each job; whatever ends the running of a job gives them back, in its own transaction. So a limit is never
-- exceeded, nobody waits for anybody, and what is rolled back or dies with its session leaves nothing behind.

-- Let at most so many jobs run at once: of a queue, of a task or, if neither is named, over all. Null lifts the limit.
-- What runs already counts: where more is running than may, nothing is claimed until enough has ended. Says whether
-- that is anything new.
create or replace function shiftwork.limit_running(
  most int, queue text default null, task text default null, actor text default null) returns boolean
language plpgsql as $$
#variable_conflict use_variable
declare
  kind constant text := shiftwork.kind_of(queue, task);
  former int;
  is_new boolean;
begin
  if queue is not null and task is not null then
    raise exception using errcode = 'SW001', message = 'a limit is for a queue, for a task or over all';
  end if;
  select was.max_running, was.changed into former, is_new from shiftwork.set_limit(kind, coalesce(queue, task, ''), most) as was;
  if is_new then
    perform shiftwork.note(actor, 'limit', shiftwork.target_of(kind, coalesce(queue, task, '')),
                           before => jsonb_build_object('max_running', former), after => jsonb_build_object('max_running', most));
  end if;
  return is_new;
end $$;

-- Limits that a program has, as its workers say when they start: {"queues": {"mail": 5}, "tasks": {"resize": 2}, "all": 20}.
-- What is left out stays as it is. Says how many were news.
create or replace function shiftwork.declare_limits(limits jsonb) returns int
language plpgsql security definer set search_path = shiftwork, pg_temp as $$
declare
  told record;
  news int := 0;
begin
  for told in
    select one.kind, one.name, one.most from (
      select 'all' as kind, '' as name, (limits ->> 'all')::int as most where limits ? 'all'
      union all select 'queue', queue.key, queue.value::int from jsonb_each_text(limits -> 'queues') as queue
      union all select 'task', task.key, task.value::int from jsonb_each_text(limits -> 'tasks') as task) as one
     order by one.kind, one.name collate "C"
  loop
    news := news + (select was.changed::int from shiftwork.set_limit(told.kind, told.name, told.most) as was);
  end loop;
  return news;
end $$;

-- Make a limit, change it or lift it (null). Says what it was.
create or replace function shiftwork.set_limit(kind text, name text, most int, out max_running int, out changed boolean)
language plpgsql set lock_timeout = '5s' as $$
#variable_conflict use_column
declare
  excess int;
  gone int;
begin
  if most not between 1 and 10000 then
    raise exception using errcode = 'SW001', message = format('a limit of %s: it must be between 1 and 10000, or null for none', most),
      hint = 'To let nothing run, pause.';
  end if;
  if octet_length(name) > 200 or (name = '') <> (kind = 'all') then
    raise exception using errcode = 'SW001', message = 'a limit has a name of 1 to 200 bytes';
  end if;
  for turn in 1..2 loop
    set_limit.max_running := (select one.max_running from shiftwork.limits as one where one.kind = set_limit.kind and one.name = set_limit.name);
    changed := set_limit.max_running is distinct from most;
    if not changed then
      return;
    end if;
    -- From here on no claim is under way, and those to come will see what we do.
    perform pg_advisory_xact_lock(hashtextextended('shiftwork claims', 0));
  end loop;

  if most is null then
    delete from shiftwork.limits as one where one.kind = set_limit.kind and one.name = set_limit.name;
  else
    insert into shiftwork.limits as one values (set_limit.kind, set_limit.name, most)
    on conflict (kind, name) do update set max_running = excluded.max_running;
  end if;
  if set_limit.max_running is null then
    insert into shiftwork.permits (kind, name, job)
    select set_limit.kind, set_limit.name, job.id from shiftwork.jobs as job
     where job.state = 'running' and set_limit.name = case set_limit.kind when 'queue' then job.queue when 'task' then job.task else '' end
       and not exists (select from shiftwork.permits as lent
                        where lent.job = job.id and lent.kind = set_limit.kind and lent.name = set_limit.name);
  end if;
  excess := (select count(*) from shiftwork.permits as permit
              where permit.kind = set_limit.kind and permit.name = set_limit.name and not permit.surplus) - coalesce(most, 0);
  if excess < 0 then
    update shiftwork.permits as permit set surplus = false
     where permit.id = any(array(
       select lent.id from shiftwork.permits as lent
        where lent.kind = set_limit.kind and lent.name = set_limit.name and lent.surplus
        order by lent.id limit -excess for update skip locked));
    get diagnostics gone = row_count;
    insert into shiftwork.permits (kind, name) select set_limit.kind, set_limit.name from generate_series(1, -excess - gone);
  end if;
  -- Free ones go at once, others when they come back. One that is coming back right now is waited for.
  for turn in 1..200 loop
    exit when excess <= 0;
    with picked as (
      select permit.id, permit.job from shiftwork.permits as permit
       where permit.kind = set_limit.kind and permit.name = set_limit.name and not permit.surplus
       order by permit.job is not null, permit.id limit excess for update skip locked
    ), gone as (
      delete from shiftwork.permits as permit using picked where permit.id = picked.id and picked.job is null
    ), marked as (
      update shiftwork.permits as permit set surplus = true from picked where permit.id = picked.id and picked.job is not null
    )
    select count(*) into gone from picked;
    excess := excess - gone;
    if excess > 0 then
      if turn = 200 then
        raise exception using errcode = 'lock_not_available', message = 'a transaction that ends jobs under this limit takes too long';
      end if;
      perform pg_sleep(0.01);
    end if;
  end loop;
  perform shiftwork.wake(array[case kind when 'queue' then name else '' end]);
end $$;

-- What a claim may take of each limit that concerns it, as {"queue:mail": 3, "all:": 0}: so many permits, up to `most`, are now
-- locked. `contested` says that another claim has locked some, and may leave them.
create or replace function shiftwork.lock_permits(queues text[], tasks text[], most int, out rooms jsonb, out contested boolean)
language plpgsql as $$
begin
  select jsonb_object_agg(one.kind || ':' || one.name, room.many),
         coalesce(bool_or(room.many < most and room.many < (
           select count(*) from shiftwork.permits as free
            where free.kind = one.kind and free.name = one.name and free.job is null)), false)
    into rooms, contested
    from shiftwork.limits as one
         cross join lateral (
           select count(*)::int as many from (
             select from shiftwork.permits as free
              where free.kind = one.kind and free.name = one.name and free.job is null
              limit most for update skip locked) as got) as room
   where one.kind = 'all' or one.kind = 'queue' and one.name = any(queues)
      or one.kind = 'task' and (tasks is null or one.name = any(tasks));
end $$;

-- Lend permits to the jobs of a claim, of each limit that they fall under. The claim has locked as many as it took.
create or replace function shiftwork.lend_permits(holder bigint, number bigint) returns void language plpgsql as $$
declare
  needed record;
  free bigint[];
begin
  for needed in
    select one.kind, one.name, array_agg(job.id) as jobs
      from shiftwork.limits as one
      join shiftwork.jobs as job on one.name = case one.kind when 'queue' then job.queue when 'task' then job.task else '' end
     where job.state = 'running' and job.worker = holder and job.claim = number
     group by one.kind, one.name
  loop
    free := array(
      select permit.id from shiftwork.permits as permit
       where permit.kind = needed.kind and permit.name = needed.name and permit.job is null
       limit cardinality(needed.jobs) for update skip locked);
    if cardinality(free) < cardinality(needed.jobs) then
      raise exception 'claim % took more jobs than it has permits for', number;
    end if;
    update shiftwork.permits as permit set job = pair.job
      from unnest(free, needed.jobs) as pair (permit, job) where permit.id = pair.permit;
  end loop;
end $$;

-- These jobs do not run any more: others may. The caller has locked them, and knows that there are limits.
create or replace function shiftwork.return_permits(ids bigint[]) returns void language plpgsql as $$
declare
  woken text[];
begin
  with back as (
    update shiftwork.permits as permit set job = null where permit.job = any(ids) and not permit.surplus
    returning permit.kind, permit.name
  )
  select array_agg(distinct case back.kind when 'queue' then back.name else '' end) into woken from back;
  delete from shiftwork.permits as permit where permit.job = any(ids) and permit.surplus;
  if woken is not null and shiftwork.is_declared('shiftwork.asleep_until') then
    perform shiftwork.wake(case when '' = any(woken) then array[''] else woken end);
  end if;
end $$;

-- Permits whose job is not running come back: somebody moved it by hand, or it ended just when its limit was made.
create or replace function shiftwork.mend_permits() returns int language plpgsql as $$
declare
  doubtful bigint[];
  astray bigint[];
begin
  doubtful := array(
    select permit.id from shiftwork.permits as permit
     where permit.job is not null
       and not exists (select from shiftwork.jobs as job where job.id = permit.job and (job.state = 'running') is true)
     for update skip locked);
  if cardinality(doubtful) > 0 then
    -- Looked at again, now that they are locked: one may have been lent anew in between.
    astray := array(
      select permit.id from shiftwork.permits as permit
       where permit.id = any(doubtful) and permit.job is not null
         and not exists (select from shiftwork.jobs as job where job.id = permit.job and (job.state = 'running') is true));
    delete from shiftwork.permits as permit where permit.id = any(astray) and permit.surplus;
    update shiftwork.permits as permit set job = null where permit.id = any(astray);
    perform shiftwork.wake(array['']);
  end if;
  delete from shiftwork.permits as permit where permit.id = any(array(
    select free.id from shiftwork.permits as free
     where free.job is null and not exists (select from shiftwork.limits as one where one.kind = free.kind and one.name = free.name)
       for update skip locked));
  return coalesce(cardinality(astray), 0);
end $$;
