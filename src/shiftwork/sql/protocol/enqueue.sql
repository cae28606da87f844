-- Enqueue. Null means the task's registered value. A run_at that has passed counts as now: nobody jumps the queue.
-- Who goes to sleep sees who was enqueueing: sleepers are looked for either after the INSERT, whose lock shows it, or by a look that takes one.

-- Many jobs as one JSON array of objects; says what became of each, by its place in the array.
create or replace function shiftwork.enqueue_many(jobs jsonb)
returns table (ordinal int, id bigint, outcome text)
language plpgsql security definer set search_path = shiftwork, pg_temp as $$
declare
  made bigint;
begin
  return query select * from shiftwork.enqueue_jobs(jobs, false);
  get diagnostics made = row_count;
  if made < jsonb_array_length(jobs) then
    raise exception using errcode = 'SW005',
      message = format('a trigger on jobs has kept %s of these %s jobs out, and nobody can tell which: none of the %2$s was enqueued',
                       jsonb_array_length(jobs) - made, jsonb_array_length(jobs)),
      hint = 'Enqueue these one by one: each that is kept out is told of then.';
  end if;
end $$;

-- The same for workers, whose jobs may be spawned: these have a parent, which waits for them. Nobody else gives a job one. Ids are right only
-- if no trigger keeps jobs out.
create or replace function shiftwork.enqueue_jobs(jobs jsonb, spawned boolean)
returns table (ordinal int, id bigint, outcome text)
language plpgsql security definer set search_path = shiftwork, pg_temp as $$
#variable_conflict use_column
declare
  present constant timestamptz := shiftwork.clock();
  options constant text[] := '{task, payload, queue, priority, delay, run_at, expires_in, expires_at, max_attempts, tags, keep,
                               unique_key, unique_scope, unique_action, unique_window, merge, parent, child}';
  keyed boolean;
  others bigint[];
  wish record;
begin
  if jsonb_typeof(jobs) is distinct from 'array' then
    raise exception using errcode = 'SW001', message = 'enqueue_many takes a JSON array of jobs';
  end if;
  if exists (select from jsonb_array_elements(jobs) as one where jsonb_typeof(one) = 'object' and one - options <> '{}') then
    raise exception using errcode = 'SW001', message = (
        select format('a job of task "%s" says "%s", which is none of the options of a job', left(one ->> 'task', 200), left(said, 200))
          from jsonb_array_elements(jobs) as one cross join jsonb_object_keys(one - options) as said limit 1),
      hint = 'There are: ' || array_to_string(options[:16], ', ') || '.';
  end if;
  keyed := jsonb_path_exists(jobs, '$[*] ? (exists (@.unique_key))');
  if keyed and exists (select from jsonb_array_elements(jobs) as one
                        where jsonb_typeof(one -> 'unique_key') not in ('string', 'null')) then
    raise exception using errcode = 'SW001', message = 'a unique key is a text';
  end if;

  if octet_length(jobs::text) > 8192 then
    perform shiftwork.check_payload(one ->> 'task', one -> 'payload') from jsonb_array_elements(jobs) as one
     where octet_length((one -> 'payload')::text) > 8192;
  end if;
  if keyed then
    others := array(select one.ordinality from jsonb_array_elements(jobs) with ordinality as one
                     where one.value ->> 'unique_key' is null order by one.ordinality);
  end if;

  return query
  with fresh as (
    insert into shiftwork.jobs (task, payload, queue, priority, max_attempts, run_at, created_at, state, expires_at, tags, keep,
                                parent)
    select wish.task, coalesce(wish.payload, '{}'), coalesce(wish.queue, known.queue, 'default'),
           coalesce(wish.priority, known.priority, 0), coalesce(wish.max_attempts, known.max_attempts, 5),
           due.run_at, present, case when due.run_at > present then 'scheduled' else 'ready' end::shiftwork.job_state,
           coalesce(wish.expires_at, present + wish.expires_in * interval '1 second'), coalesce(wish.tags, '{}'), wish.keep,
           case when spawned then wish.parent end
      from rows from (jsonb_to_recordset(jobs) as (
             task text, payload jsonb, queue text, priority int, delay double precision, run_at timestamptz,
             expires_in double precision, expires_at timestamptz, max_attempts int, unique_key text, tags text[], keep int,
             parent bigint
           )) with ordinality as wish (task, payload, queue, priority, delay, run_at, expires_in, expires_at,
                                       max_attempts, unique_key, tags, keep, parent, ordinal)
           left join shiftwork.tasks as known on known.name = wish.task
           cross join lateral (
             select greatest(coalesce(wish.run_at, present + wish.delay * interval '1 second'), present) as run_at) as due
     where wish.unique_key is null
     order by wish.ordinal
    returning jobs.id
  ), numbered as (
    select fresh.id, row_number() over (order by fresh.id) as place from fresh        -- ids are given in the order of the rows
  )
  select coalesce(others[numbered.place], numbered.place)::int, numbered.id, 'created'::text from numbered;
  if shiftwork.is_declared('shiftwork.asleep_until') then
    perform shiftwork.wake(array(
      select distinct coalesce(one ->> 'queue', known.queue, 'default')
        from jsonb_array_elements(jobs) as one left join shiftwork.tasks as known on known.name = one ->> 'task'
       where one ->> 'unique_key' is null limit 9));
  end if;
  if not keyed then
    return;
  end if;

  -- Keyed jobs: locks are taken in one order by everyone, so that no two enqueues can wait for each other.
  perform pg_advisory_xact_lock(lock)
     from (select distinct hashtextextended('shiftwork ' || (one ->> 'task') || ' ' || (one ->> 'unique_key'), 0) as lock
             from jsonb_array_elements(jobs) as one left join shiftwork.tasks as known on known.name = one ->> 'task'
            where coalesce(one ->> 'unique_scope', known.unique_scope::text) = 'window' and one ->> 'unique_key' is not null
            order by lock) as locks;
  for wish in
    select case when spawned then one.value else one.value - 'parent' end as job, one.ordinality::int as place
      from jsonb_array_elements(jobs) with ordinality as one
     where one.value ->> 'unique_key' is not null
     order by one.value ->> 'task' collate "C", one.value ->> 'unique_key' collate "C", one.ordinality
  loop
    ordinal := wish.place;
    select kept.id, kept.outcome into id, outcome from shiftwork.enqueue_unique(wish.job) as kept;
    continue when id is null;
    return next;
  end loop;
end $$;

-- One job with a unique key: makes it, or does to the one that holds the key what the action says. Null if a trigger keeps it out.
create or replace function shiftwork.enqueue_unique(wish jsonb, out id bigint, out outcome text)
language plpgsql security definer set search_path = shiftwork, pg_temp as $$
#variable_conflict use_column
declare
  present timestamptz := shiftwork.clock();
  known shiftwork.tasks;
  fresh shiftwork.jobs;
  twin record;
  action text;
  how constant jsonb := nullif(wish -> 'merge', 'null');
  since timestamptz;
  tries int := 0;
begin
  select * into known from shiftwork.tasks where name = wish ->> 'task';
  fresh.task := wish ->> 'task';
  fresh.payload := coalesce(nullif(wish -> 'payload', 'null'), '{}');
  fresh.queue := coalesce(wish ->> 'queue', known.queue, 'default');
  fresh.priority := coalesce((wish ->> 'priority')::int, known.priority, 0);
  fresh.max_attempts := coalesce((wish ->> 'max_attempts')::int, known.max_attempts, 5);
  fresh.run_at := greatest(coalesce((wish ->> 'run_at')::timestamptz,
                                    present + (wish ->> 'delay')::double precision * interval '1 second'), present);
  fresh.state := case when fresh.run_at > present then 'scheduled' else 'ready' end;
  fresh.expires_at := coalesce((wish ->> 'expires_at')::timestamptz,
                               present + (wish ->> 'expires_in')::double precision * interval '1 second');
  fresh.tags := coalesce((select array_agg(tag order by place) from jsonb_array_elements_text(nullif(wish -> 'tags', 'null'))
                            with ordinality as one (tag, place)), '{}');
  fresh.keep := (wish ->> 'keep')::int;
  fresh.unique_key := wish ->> 'unique_key';
  if coalesce(wish ->> 'unique_scope', 'pending') not in ('pending', 'unfinished', 'window') then
    raise exception using errcode = 'SW001', message = format('"%s" is no scope of a unique key', wish ->> 'unique_scope'),
      hint = 'There are: pending, unfinished, window.';
  end if;
  fresh.unique_scope := coalesce((wish ->> 'unique_scope')::shiftwork.unique_scope, known.unique_scope, 'pending');
  action := coalesce(wish ->> 'unique_action', known.unique_action, 'return');
  if action not in ('return', 'replace', 'merge', 'refuse') then
    raise exception using errcode = 'SW001', message = format('"%s" is no action for a unique key', action),
      hint = 'There are: return, replace, merge, refuse.';
  end if;
  if action in ('replace', 'merge') and fresh.unique_scope <> 'pending' then
    raise exception using errcode = 'SW001',
      message = format('action "%s" needs scope "pending", not "%s"', action, fresh.unique_scope),
      hint = 'A job that has begun cannot be given other arguments any more.';
  end if;
  if fresh.unique_scope = 'window' then
    since := present - coalesce((wish ->> 'unique_window')::double precision * interval '1 second',
                                known.unique_window, interval '1 day');
  end if;

  loop
    -- Whoever holds the key may end just when we look for him, but not a hundred times.
    tries := tries + 1;
    if tries > 100 then
      return;
    end if;

    -- Both rooms in one statement: a twin that is just finishing is seen in one of them. Others that look for this key
    -- within a window wait for the lock that enqueue_many holds.
    if since is not null then
      select found.* into twin from (
        select job.id, job.payload, job.queue, job.priority, job.max_attempts, job.tags
          from shiftwork.jobs as job
         where job.task = fresh.task and job.held_key = fresh.unique_key
        union all
        select gone.id, gone.payload, gone.queue, gone.priority, gone.max_attempts, gone.tags
          from shiftwork.history as gone
         where gone.task = fresh.task and gone.unique_key = fresh.unique_key and gone.created_at > since
      ) as found order by found.id desc limit 1;
      exit when found;
    end if;

    insert into shiftwork.jobs (task, payload, queue, priority, max_attempts, run_at, created_at, state, expires_at,
                                tags, keep, unique_key, held_key, unique_scope, parent)
    values (fresh.task, fresh.payload, fresh.queue, fresh.priority, fresh.max_attempts, fresh.run_at, present, fresh.state,
            fresh.expires_at, fresh.tags, fresh.keep, fresh.unique_key, fresh.unique_key, fresh.unique_scope,
            (wish ->> 'parent')::bigint)
    on conflict (task, held_key) where held_key is not null do nothing
    returning jobs.id into id;
    if found then
      outcome := 'created';
      perform shiftwork.wake(array[fresh.queue]);
      return;
    end if;

    if action in ('replace', 'merge') then
      select job.id, job.payload, job.state into twin from shiftwork.jobs as job
       where job.task = fresh.task and job.held_key = fresh.unique_key and job.state in ('ready', 'scheduled', 'blocked')
         for update;                                                                 -- a claim may be taking it
      if not found then
        -- One that holds its key while it runs cannot be given other arguments any more.
        select job.id into id from shiftwork.jobs as job where job.task = fresh.task and job.held_key = fresh.unique_key
           and (job.state in ('running', 'waiting')) is true;             -- by its key, not by the index of what is held
        if found then
          outcome := 'existing';
          return;
        end if;
        continue;
      end if;
    else
      select job.id, job.payload, job.queue, job.priority, job.max_attempts::int, job.tags into twin from shiftwork.jobs as job
       where job.task = fresh.task and job.held_key = fresh.unique_key;
    end if;
    exit when found;
  end loop;

  id := twin.id;
  case action
    when 'return' then
      outcome := 'existing';
    when 'refuse' then
      if (twin.payload, twin.queue, twin.priority, twin.max_attempts, twin.tags)
         is distinct from (fresh.payload, fresh.queue, fresh.priority, fresh.max_attempts, fresh.tags) then
        raise exception using errcode = 'SW002',
          message = format('job %s of task "%s" has the unique key "%s" and is different', id, fresh.task, fresh.unique_key),
          hint = 'The same key stands for the same job: enqueue with the arguments and options of the first, or with another key.';
      end if;
      outcome := 'existing';
    else
      if action = 'merge' then
        fresh.payload := shiftwork.merge_payload(coalesce(how, known.merge), twin.payload, fresh.payload,
                                                 registered => how is null);
        outcome := 'merged';
      else
        outcome := 'replaced';
      end if;
      perform shiftwork.check_payload(fresh.task, fresh.payload);
      update shiftwork.jobs as job
         set payload = fresh.payload, queue = fresh.queue, priority = fresh.priority, max_attempts = fresh.max_attempts,
             run_at = fresh.run_at, state = case when job.state = 'blocked' then job.state else fresh.state end,
             expires_at = fresh.expires_at, tags = fresh.tags, keep = fresh.keep
       where job.id = twin.id;
      perform shiftwork.wake(array[fresh.queue]);
  end case;
end $$;

-- One job. All but the task is optional; a job without a unique key costs no more than its INSERT.
create or replace function shiftwork.enqueue(
  task text, payload jsonb default '{}', queue text default null, priority int default null,
  run_at timestamptz default null, expires_at timestamptz default null, max_attempts int default null,
  unique_key text default null, delay interval default null, tags text[] default null, keep int default null,
  unique_scope text default null, unique_action text default null, unique_window interval default null,
  merge jsonb default null, out id bigint, out outcome text)
language plpgsql security definer set search_path = shiftwork, pg_temp as $$
#variable_conflict use_variable
declare
  present constant timestamptz := shiftwork.clock();
  due constant timestamptz := greatest(coalesce(run_at, present + delay), present);
begin
  if unique_key is not null then
    select made.id, made.outcome into id, outcome from shiftwork.enqueue_many(jsonb_build_array(jsonb_build_object(
      'task', task, 'payload', payload, 'queue', queue, 'priority', priority, 'run_at', due, 'expires_at', expires_at,
      'max_attempts', max_attempts, 'unique_key', unique_key, 'tags', tags, 'keep', keep, 'unique_scope', unique_scope,
      'unique_action', unique_action, 'unique_window', extract(epoch from unique_window), 'merge', merge))) as made;
    return;
  end if;
  if octet_length(payload::text) > 8192 then
    perform shiftwork.check_payload(task, payload);
  end if;
  insert into shiftwork.jobs (task, payload, queue, priority, max_attempts, run_at, created_at, state, expires_at, tags, keep)
  select task, coalesce(payload, '{}'), coalesce(queue, known.queue, 'default'), coalesce(priority, known.priority, 0),
         coalesce(max_attempts, known.max_attempts, 5), due, present,
         case when due > present then 'scheduled' else 'ready' end::shiftwork.job_state, expires_at, coalesce(tags, '{}'), keep
    from (values (task)) as wish (task) left join shiftwork.tasks as known on known.name = wish.task
  returning jobs.id, 'created' into id, outcome;
  if shiftwork.is_declared('shiftwork.asleep_until') then
    perform shiftwork.wake(array(select job.queue from shiftwork.jobs as job where job.id = enqueue.id));
  end if;
end $$;

-- One job with no more than its payload, as most are: PostgreSQL comes here when the payload is a plain literal or a text.
-- Reading the defaults of all the options above would take half as long again. What is told of enqueueing one job is told in one statement:
-- each further one, and each further expression, costs a hundredth or two. A constant out of an array has the type of its domain already,
-- as what is registered has, and is not checked again whenever a job is made. A time is cast where it is read: to assign it takes a cast more.
create or replace function shiftwork.enqueue(task text, payload text, out id bigint, out outcome text)
language plpgsql security definer set search_path = shiftwork, pg_temp as $$
#variable_conflict use_variable
declare
  present constant shiftwork.instant := shiftwork.clock()::shiftwork.instant;
begin
  if pg_sequence_last_value('shiftwork.heed') is null and octet_length(payload) <= 8192 then
    insert into shiftwork.jobs (task, payload, queue, priority, max_attempts, run_at, created_at,
                                attempt, failures, resets, expires_at, unique_key, tags)
    values (task, payload::jsonb, ('{default}'::shiftwork.queue_name[])[1], 0, ('{5}'::shiftwork.allowance[])[1],
            present, present,
            ('{0}'::shiftwork.counter[])[1], ('{0}'::shiftwork.counter[])[1], ('{0}'::shiftwork.counter[])[1],
            ('{}'::shiftwork.instant[])[1], ('{}'::shiftwork.unique_key[])[1], ('{"{}"}'::shiftwork.tags[])[1])
    returning case when octet_length(jobs.payload::text) <= 8192 then jobs.id else shiftwork.check_and_wake(jobs.id) end, 'created' into id, outcome;
  else
    if octet_length(payload) > 8192 then
      perform shiftwork.check_payload(task, payload::jsonb);
    end if;
    insert into shiftwork.jobs (task, payload, queue, priority, max_attempts, run_at, created_at,
                                attempt, failures, resets, expires_at, unique_key, tags)
    select task, coalesce(payload, '{}')::jsonb, coalesce(known.queue, ('{default}'::shiftwork.queue_name[])[1]),
           coalesce(known.priority, 0), coalesce(known.max_attempts, ('{5}'::shiftwork.allowance[])[1]),
           present, present,
           ('{0}'::shiftwork.counter[])[1], ('{0}'::shiftwork.counter[])[1], ('{0}'::shiftwork.counter[])[1],
           ('{}'::shiftwork.instant[])[1], ('{}'::shiftwork.unique_key[])[1], ('{"{}"}'::shiftwork.tags[])[1]
      from (values (task)) as wish (task) left join shiftwork.tasks as known on known.name = wish.task
    returning case when coalesce(pg_sequence_last_value('shiftwork.heed'), 0) < 4 and octet_length(jobs.payload::text) <= 8192
                   then jobs.id else shiftwork.check_and_wake(jobs.id) end, 'created' into id, outcome;
  end if;
end $$;

-- The same as the client sends it for a task that is declared with any of these; the answer is no record but the id, null if a trigger
-- has kept the job out. A name of its own: null as one of the options would fit several functions called `enqueue`.
create or replace function shiftwork.enqueue_one(task text, payload text, queue text, priority int, max_attempts int) returns bigint
language plpgsql security definer set search_path = shiftwork, pg_temp as $$
#variable_conflict use_variable
declare
  present constant shiftwork.instant := shiftwork.clock()::shiftwork.instant;
  made bigint;
begin
  if queue is not null and max_attempts is not null and octet_length(payload) <= 8192
     and coalesce(pg_sequence_last_value('shiftwork.heed') & case when priority is null then 6 else 4 end, 0) = 0 then
    insert into shiftwork.jobs (task, payload, queue, priority, max_attempts, run_at, created_at,
                                attempt, failures, resets, expires_at, unique_key, tags)
    values (task, payload::jsonb, queue, coalesce(priority, 0), max_attempts, present, present,
            ('{0}'::shiftwork.counter[])[1], ('{0}'::shiftwork.counter[])[1], ('{0}'::shiftwork.counter[])[1],
            ('{}'::shiftwork.instant[])[1], ('{}'::shiftwork.unique_key[])[1], ('{"{}"}'::shiftwork.tags[])[1])
    returning case when octet_length(jobs.payload::text) <= 8192 then jobs.id else shiftwork.check_and_wake(jobs.id) end into made;
  else
    if octet_length(payload) > 8192 then
      perform shiftwork.check_payload(task, payload::jsonb);
    end if;
    insert into shiftwork.jobs (task, payload, queue, priority, max_attempts, run_at, created_at,
                                attempt, failures, resets, expires_at, unique_key, tags)
    select task, coalesce(payload, '{}')::jsonb, coalesce(queue, known.queue, 'default'),
           coalesce(priority, known.priority, 0), coalesce(max_attempts, known.max_attempts, 5),
           present, present,
           ('{0}'::shiftwork.counter[])[1], ('{0}'::shiftwork.counter[])[1], ('{0}'::shiftwork.counter[])[1],
           ('{}'::shiftwork.instant[])[1], ('{}'::shiftwork.unique_key[])[1], ('{"{}"}'::shiftwork.tags[])[1]
      from (values (task)) as wish (task) left join shiftwork.tasks as known on known.name = wish.task
    returning case when coalesce(pg_sequence_last_value('shiftwork.heed'), 0) < 4 and octet_length(jobs.payload::text) <= 8192
                   then jobs.id else shiftwork.check_and_wake(jobs.id) end into made;
  end if;
  return made;
end $$;

-- A job that has just been made: refuse it if its reader would get more than is allowed, and wake who sleeps.
create or replace function shiftwork.check_and_wake(job bigint) returns bigint language plpgsql as $$
declare
  made shiftwork.jobs;
begin
  select * into made from shiftwork.jobs where id = job;
  perform shiftwork.check_payload(made.task, made.payload);
  if shiftwork.is_declared('shiftwork.asleep_until') then
    perform shiftwork.wake(array[made.queue]);
  elsif pg_sequence_last_value('shiftwork.heed') >= 4 then
    perform shiftwork.forget_lapsed('shiftwork.asleep_until');
  end if;
  return job;
end $$;
