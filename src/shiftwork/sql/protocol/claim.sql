-- Take, or claim: the first ready jobs of some queues, in `priority, run_at, id` order, for a worker that holds its lease.
--
-- request: {"worker": 17, "queues": [{"queue": "mail", "want": 5, "places": {"0": [run_at, id]}, "mixed": false}, …],
--           "want": 10, "start": 10, "tasks": ["send_email", …], "examine": 1000, "due": 1700000000000000}
--
-- Queues are served in the order given, each up to its want, all together up to the outer one. `tasks` are those that
-- the worker knows (left out: all, `but` those named there). The first `start` jobs go straight to slots and count as started (left out: all).
-- `most` says of how many jobs of a task there is room, {"resize": 2}; `conditions` on jobs are each an expression in SQL
-- over the columns of `job`, evaluated with the caller's rights. One that cannot be answered for some job is an error; with `careful`,
-- which takes longer, such jobs are passed by, and the report says which are `unanswered`.
-- With `max_priority`, what is less urgent than that is left alone.
--
-- Where limits are set (limit_running), no more is taken than they allow, and what falls under one is not fetched ahead.
--
-- The answer is the jobs, in no order, with what is needed to run them (claim has all columns), and as its last row a
-- report, with id 0 and in its payload: the claim's number; how many were taken; `at`, the time by the clock, in epoch microseconds; whether the worker is still alive in the eyes of the database; whether there may be more; when there
-- is not, the seconds until the next job falls due or a pause ends (0: somebody has locked what we need); whether a limit is
-- `full`, and whether this worker or everything is `paused`; whether claims are
-- `barred` by a transaction that pauses or limits something and has not ended; pauses that have `ended` by themselves; which queues are `mixed`, which is to be said of them next time; and
-- `places`, `due` and `earliest` (of the jobs that became ready with this claim), for a cursor:
--
-- Dead index entries pile up at the front of a queue, and no vacuum removes them while an old transaction is open. Reading
-- on from the last row examined skips them. A client keeps one place per queue and priority, in epoch microseconds and
-- id: that of the last job it got, or behind it, where the looking ended, if the report says so. What lies before and
-- between the known priorities is always read: a more urgent newcomer never waits. At most `examine` rows are looked at
-- behind one place, whatever is filtered out of them. So a short answer to a request with places does not mean that a
-- queue is empty: look without them at least once a second.
create or replace function shiftwork.take(request jsonb) returns table (
  id bigint, task text, queue text, priority int, payload text, attempt int, failures int, resets int, max_attempts int,
  run_at timestamptz, created_at timestamptz, expires_at timestamptz, unique_key text, tags text[])
language plpgsql set plan_cache_mode = force_generic_plan set jit = off
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off as $$
#variable_conflict use_column
declare
  -- Limits and pauses wait until no claim is under way. Claims do not wait for them: who makes one may take his time to commit.
  turn constant boolean := pg_try_advisory_xact_lock_shared(hashtextextended('shiftwork claims', 0));
  present constant timestamptz := shiftwork.clock();
  present_place constant bigint := date_part('epoch', present) * 1000000;
  seen constant timestamptz := shiftwork.place_time((request ->> 'due')::bigint);
  last_priority constant bigint := coalesce((request ->> 'max_priority')::bigint, 2147483647);
  asked record;
  closed text[];
  promoted int := 0;
  reached bigint := present_place;
  owing boolean := false;
  earliest timestamptz;
  ranges refcursor;
  range record;
  served bigint;
  wanted int;
  want int;
  starting int;
  chunk int;
  got int;
  taken int := 0;
  ends jsonb;
  examined int;
  places jsonb := '{}';
  mixed boolean;
  mixed_queues text[] := '{}';
  more boolean := false;
  rooms jsonb;                                         -- what is left of each limit, once it was looked for
  conditions text[];
  careful boolean;
  unanswered bigint[] := '{}';
  special boolean;
  paused boolean;
  tight boolean;
  bound boolean;
  names text[];
  rests int[];
  choosy boolean;
  picked record;
  filled boolean;
  contested boolean;
  ended jsonb;
  said text;
begin
  -- The lock keeps the reaper from calling this worker gone while it claims; its heartbeats pass.
  select worker.id as worker, nextval('shiftwork.claims') as number,
         least(coalesce(given.want, 1000), 10000) as want, given.start,
         least(greatest(coalesce(given.examine, 1000), 1), 100000) as examine,
         case jsonb_typeof(given.tasks) when 'array' then array(select jsonb_array_elements_text(given.tasks)) end as tasks,
         coalesce(given.due, 0) as due,
         (select job.run_at from shiftwork.jobs as job where job.state = 'scheduled'
             and job.run_at >= seen order by job.run_at limit 1)::timestamptz as next_at,        -- and not of its domain: a pause may end at any time
         nullif(given.but, 'null') as but, nullif(given.conditions, 'null') as conditions, nullif(given.most, 'null') as most,
         exists (select from shiftwork.pauses) as pausing, exists (select from shiftwork.limits) as limited,
         seen - interval '1 second' as since,           -- what was being written then is seen all the same
         (select owed.at from shiftwork.child_ends as owed
           where owed.at >= seen - interval '1 second' and isfinite(owed.at) order by owed.at limit 1) as owed_at
    into asked
    from jsonb_to_record(request) as given (
           worker bigint, want int, start int, examine int, due bigint, tasks jsonb, but jsonb, conditions jsonb, most jsonb)
    join shiftwork.workers as worker on worker.id = given.worker and worker.gone_at is null and worker.lease_until > present
     for key share of worker;
  if not found then
    id := 0;
    payload := '{"alive": false, "taken": 0, "more": false, "places": {}, "mixed": []}';
    return next;
    return;
  end if;
  if asked.owed_at <= present then
    perform shiftwork.try_gather(asked.since);
    -- What is left, if anything is: there are too many, somebody is just at a parent, or one could not be moved.
    asked.owed_at := (select owed.at from shiftwork.child_ends as owed where owed.at >= asked.since order by owed.at limit 1);
    if asked.owed_at <= present then
      asked.owed_at := present + interval '0.1 seconds';
      owing := true;
    end if;
  end if;
  special := asked.pausing or asked.limited or coalesce(asked.but, asked.conditions, asked.most) is not null;
  if special then                                      -- nothing of that costs a claim anything which needs none of it
    if asked.but is not null then
      closed := array(select jsonb_array_elements_text(asked.but));
    end if;
    if asked.conditions is not null then
      conditions := array(select jsonb_array_elements_text(asked.conditions));
      careful := request ->> 'careful';
    end if;
    choosy := asked.conditions is not null or asked.most is not null;
    if asked.pausing then
      select closed || array_agg(pause.name) filter (where pause.kind = 'task'),
             count(*) filter (where pause.name in ('', asked.worker::text) and pause.kind in ('all', 'worker')) > 0
        into closed, paused
        from shiftwork.pauses as pause where pause.until is null or pause.until > present;
      if exists (select from shiftwork.pauses as pause where pause.until <= present) then
        ended := shiftwork.end_pauses();
      end if;
    end if;
  end if;
  if paused or not turn then
    id := 0;
    payload := jsonb_strip_nulls(jsonb_build_object(
      'alive', true, 'claim', asked.number, 'taken', 0, 'more', false, 'places', '{}'::jsonb, 'mixed', '[]'::jsonb, 'due', asked.due,
      'paused', nullif(paused, false), 'barred', nullif(not turn, false), 'ended', ended, 'at', present_place, 'next_due_in',
      case when turn then (select extract(epoch from min(pause.until) - present) from shiftwork.pauses as pause
                            where pause.until > present) else 0 end));
    return next;
    return;
  end if;
  wanted := asked.want;
  starting := coalesce(asked.start, wanted);
  if asked.next_at <= present then
    select due.promoted, due.reached, due.earliest into promoted, reached, earliest from shiftwork.promote(1000, asked.due) as due;
  end if;

  -- Queue by queue: each range begins behind a place and ends before the next known priority.
  if request @? '$.queues[*].places.*' then
    open ranges for
    select ahead.* from (
      select wish.ordinal, wish.queue, wish.want, coalesce(wish.mixed, false) as mixed, place.priority, place.run_at, place.id,
             lead(place.priority, 1, last_priority + 1) over (partition by wish.ordinal order by place.priority) as until_priority
        from rows from (jsonb_to_recordset(request -> 'queues') as (queue text, want int, places jsonb, mixed boolean))
               with ordinality as wish (queue, want, places, mixed, ordinal)
             cross join lateral (
               select -2147483649 as priority, timestamptz '-infinity' as run_at, 0::bigint as id
               union all
               select one.key::bigint, least(shiftwork.place_time((one.value ->> 0)::bigint),
                                             earliest - interval '1 microsecond'), (one.value ->> 1)::bigint
                 from jsonb_each(wish.places) as one) as place
       where not exists (select from shiftwork.pauses as pause where pause.kind = 'queue' and pause.name = wish.queue
                            and (pause.until is null or pause.until > present))) as ahead
           cross join lateral (
             select from shiftwork.jobs as job
              where job.state = 'ready' and job.queue = ahead.queue and job.priority < ahead.until_priority
                and (job.priority, job.run_at, job.id) > (ahead.priority, ahead.run_at, ahead.id) limit 1) as something
     order by ahead.ordinal, ahead.priority;
  else
    -- From the start of each queue, as those look who have slept.
    open ranges for
    select wish.ordinal, wish.queue, wish.want, coalesce(wish.mixed, false) as mixed, -2147483649::bigint as priority,
           timestamptz '-infinity' as run_at, 0::bigint as id, last_priority + 1 as until_priority
      from rows from (jsonb_to_recordset(request -> 'queues') as (queue text, want int, mixed boolean))
             with ordinality as wish (queue, want, mixed, ordinal)
           cross join lateral (              -- an EXISTS could be turned around, and read all jobs for a few queues
             select from shiftwork.jobs as job
              where job.state = 'ready' and job.queue = wish.queue and job.priority <= last_priority limit 1) as something
     where not exists (select from shiftwork.pauses as pause where pause.kind = 'queue' and pause.name = wish.queue
                          and (pause.until is null or pause.until > present))
     order by wish.ordinal;
  end if;
  loop
    fetch ranges into range;
    exit when not found;
    if special and rooms is null then
      -- Now that there is something to take, so that who finds nothing takes no permits from others.
      if asked.limited then
        select * into rooms, contested from shiftwork.lock_permits(
          array(select wish ->> 'queue' from jsonb_array_elements(request -> 'queues') as wish), asked.tasks,
          greatest(least(wanted, starting), 0));
      end if;
      rooms := coalesce(rooms, '{}');
      if (rooms ->> 'all:')::int < wanted then
        wanted := rooms ->> 'all:';
        bound := true;
      end if;
      select array_agg(one.task), array_agg(one.room) into names, rests from (
        select each.task, min(each.room) as room from (
          select substr(key, 6) as task, value::int as room from jsonb_each_text(rooms) where key like 'task:%'
          union all select key, value::int from jsonb_each_text(asked.most)) as each
         group by each.task) as one;
      choosy := choosy or names is not null;
    end if;
    exit when wanted <= 0;
    if served is distinct from range.ordinal then
      served := range.ordinal;
      want := least(coalesce(range.want, wanted), wanted);
      if asked.limited then
        tight := rooms ? ('queue:' || range.queue) and least((rooms ->> ('queue:' || range.queue))::int, starting) < want;
        if tight then
          want := greatest(least((rooms ->> ('queue:' || range.queue))::int, starting), 0);
        end if;
      end if;
    end if;
    if want <= 0 then
      filled := filled or tight;
      more := more or tight is not true;
      continue;
    end if;
    mixed := range.mixed or choosy is true;

    -- Chunks: those that start at once, and those that are fetched ahead. Rows are locked and updated by where they lie,
    -- since nobody moves a row that we have locked.
    loop
      chunk := case when starting > 0 then least(want, starting) else want end;
      if choosy then
        if careful then
          select * into conditions, unanswered from shiftwork.answerable(
            range.queue, range.priority, range.run_at, range.id, range.until_priority, asked.examine, asked.tasks, conditions, unanswered);
        end if;
        select * into picked from shiftwork.pick(
          range.queue, range.priority, range.run_at, range.id, range.until_priority, asked.examine, chunk, asked.tasks,
          closed, conditions, names, rests, starting > 0);
        rests := picked.rests;
        return query
        update shiftwork.jobs as job
           set state = 'running', attempt = job.attempt + 1, worker = asked.worker, claim = asked.number,
               claimed_at = present, started_at = case when starting > 0 then present end,
               held_key = case when job.unique_scope = 'pending' then null else job.held_key end
         where job.ctid = any(picked.rows)
        returning job.id, job.task::text, job.queue::text, job.priority, job.payload::text, job.attempt::int, job.failures::int, job.resets::int,
                  job.max_attempts::int, job.run_at::timestamptz, job.created_at::timestamptz, job.expires_at::timestamptz, job.unique_key::text, job.tags::text[];
      elsif mixed then
        -- Looked at first and locked then, so that a row which is not for us stays free for whom it is for.
        return query
        update shiftwork.jobs as job
           set state = 'running', attempt = job.attempt + 1, worker = asked.worker, claim = asked.number,
               claimed_at = present, started_at = case when starting > 0 then present end,
               held_key = case when job.unique_scope = 'pending' then null else job.held_key end
         where job.ctid = any(array(
           select front.ctid
             from (select ahead.ctid, ahead.task, ahead.expires_at, ahead.attempt
                     from shiftwork.jobs as ahead
                    where ahead.state = 'ready' and ahead.queue = range.queue
                      and (ahead.priority, ahead.run_at, ahead.id) > (range.priority, range.run_at, range.id)
                      and ahead.priority < range.until_priority
                    order by ahead.priority, ahead.run_at, ahead.id limit asked.examine) as seen
             join shiftwork.jobs as front on front.ctid = seen.ctid
            where (asked.tasks is null or seen.task = any(asked.tasks))
              and (closed is null or seen.task <> all(closed))
              and (seen.expires_at is null or seen.expires_at > present) and seen.attempt < 1000000000
              and front.state = 'ready'
            limit chunk for update of front skip locked))
        returning job.id, job.task::text, job.queue::text, job.priority, job.payload::text, job.attempt::int, job.failures::int, job.resets::int,
                  job.max_attempts::int, job.run_at::timestamptz, job.created_at::timestamptz, job.expires_at::timestamptz, job.unique_key::text, job.tags::text[];
      else
        -- The front of a queue that is all ours, in one go.
        return query
        update shiftwork.jobs as job
           set state = 'running', attempt = job.attempt + 1, worker = asked.worker, claim = asked.number,
               claimed_at = present, started_at = case when starting > 0 then present end,
               held_key = case when job.unique_scope = 'pending' then null else job.held_key end
         where job.ctid = any(array(
           select seen.ctid
             from (select ahead.ctid, ahead.task, ahead.expires_at, ahead.attempt
                     from shiftwork.jobs as ahead
                    where ahead.state = 'ready' and ahead.queue = range.queue
                      and (ahead.priority, ahead.run_at, ahead.id) > (range.priority, range.run_at, range.id)
                      and ahead.priority < range.until_priority
                    order by ahead.priority, ahead.run_at, ahead.id limit chunk for update skip locked) as seen
            where (asked.tasks is null or seen.task = any(asked.tasks))
              and (closed is null or seen.task <> all(closed))
              and (seen.expires_at is null or seen.expires_at > present) and seen.attempt < 1000000000))
        returning job.id, job.task::text, job.queue::text, job.priority, job.payload::text, job.attempt::int, job.failures::int, job.resets::int,
                  job.max_attempts::int, job.run_at::timestamptz, job.created_at::timestamptz, job.expires_at::timestamptz, job.unique_key::text, job.tags::text[];
      end if;
      get diagnostics got = row_count;
      taken := taken + got;
      wanted := wanted - got;
      want := want - got;
      starting := starting - got;
      exit when want <= 0;
      continue when got = chunk;
      if mixed and got >= asked.examine then
        more := true;
        exit;
      end if;

      -- Short. What is left, if anything is, is held by others or not for us; where the looking ended, it need not be looked at
      -- again. What was just taken is not ready any more, and was among the rows examined.
      perform from shiftwork.jobs as ahead
        where ahead.state = 'ready' and ahead.queue = range.queue
          and (ahead.priority, ahead.run_at, ahead.id) > (range.priority, range.run_at, range.id)
          and ahead.priority < range.until_priority limit 1;
      exit when not found;
      select jsonb_object_agg(last.priority, jsonb_build_array((extract(epoch from last.run_at) * 1000000)::bigint, last.id)),
             coalesce(sum(last.many), 0)
        into ends, examined
        from (select seen.priority, max(seen.run_at) as run_at,
                     (array_agg(seen.id order by seen.run_at desc, seen.id desc))[1] as id, count(*) as many
                from (select ahead.id, ahead.priority, ahead.run_at
                        from shiftwork.jobs as ahead
                       where ahead.state = 'ready' and ahead.queue = range.queue
                         and (ahead.priority, ahead.run_at, ahead.id) > (range.priority, range.run_at, range.id)
                         and ahead.priority < range.until_priority
                       order by ahead.priority, ahead.run_at, ahead.id limit greatest(asked.examine - got, 1)) as seen
               group by seen.priority) as last;
      exit when examined = 0;
      if mixed then
        more := more or examined >= asked.examine - got;
        mixed_queues := mixed_queues || range.queue::text;
        places := jsonb_set(places, array[range.queue], coalesce(places -> range.queue, '{}') || ends);
        exit;
      end if;
      mixed := true;
    end loop;
    if tight then
      filled := filled or want <= 0;
    end if;
  end loop;
  close ranges;
  more := more or wanted <= 0 and bound is not true;

  -- As text: to build it as a document would take five times as long.
  said := format('{"alive": true, "claim": %s, "taken": %s, "more": %s, "places": %s, "mixed": %s, "due": %s, "promoted": %s, "at": %s',
                 asked.number, taken, case when more then 'true' else 'false' end, places, array_to_json(mixed_queues), case when owing then 0 else reached end, promoted,
                 present_place);
  if promoted > 0 then
    said := format('%s, "earliest": %s', said, (extract(epoch from earliest) * 1000000)::bigint);
  end if;
  if not more then
    if asked.next_at <= present then
      asked.next_at := (select job.run_at from shiftwork.jobs as job
                         where job.state = 'scheduled' and job.run_at >= shiftwork.place_time(reached) order by job.run_at limit 1);
    end if;
    if asked.pausing then
      asked.next_at := least(asked.next_at, (select min(pause.until) from shiftwork.pauses as pause where pause.until > present and isfinite(pause.until)));
    end if;
    said := format('%s, "next_due_in": %s', said, coalesce(extract(epoch from least(asked.next_at, asked.owed_at) - present)::text, 'null'));
  end if;
  said := said || '}';
  if special then
    if asked.limited and taken > 0 then
      perform shiftwork.lend_permits(asked.worker, asked.number);
    end if;
    if filled or wanted <= 0 and bound or 0 = any(rests) then
      said := said::jsonb || '{"full": true}';
      if contested then
        said := said::jsonb || '{"next_due_in": 0}';
      end if;
    end if;
    if ended is not null then
      said := said::jsonb || jsonb_build_object('ended', ended);
    end if;
    if cardinality(unanswered) > 0 then
      said := said::jsonb || jsonb_build_object('unanswered', unanswered);
    end if;
  end if;
  id := 0;
  payload := said;
  return next;
end $$;

-- The same, with all columns of the jobs.
create or replace function shiftwork.claim(request jsonb) returns setof shiftwork.jobs
language plpgsql set plan_cache_mode = force_generic_plan set jit = off
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off as $$
declare
  report shiftwork.jobs;
  ids bigint[];
begin
  select array_agg(one.id) filter (where one.id > 0), max(one.payload) filter (where one.id = 0) into ids, report.payload
    from shiftwork.take(request) as one;
  return query select job.* from unnest(ids) as one (id) cross join lateral (
    select held.* from shiftwork.jobs as held where held.id = one.id) as job;
  report.id := 0;
  return next report;
end $$;

-- Conditions that pass by those of the first jobs of a range for which they cannot be answered, such as one that wants a number and
-- finds a word; and which jobs those are, beside those found before.
create or replace function shiftwork.answerable(
  queue text, priority bigint, run_at timestamptz, id bigint, until_priority bigint, examine int, tasks text[],
  inout conditions text[], inout unanswered bigint[])
language plpgsql set plan_cache_mode = force_custom_plan as $$
declare
  asked constant text := (select string_agg(format(E'(%s\n)', one), ' and ') from unnest(conditions) as one);
  ahead record;
begin
  for ahead in
    select candidate.id, candidate.ctid as lies from shiftwork.jobs as candidate
     where candidate.state = 'ready' and candidate.queue = answerable.queue and candidate.priority < answerable.until_priority
       and (candidate.priority, candidate.run_at, candidate.id) > (answerable.priority, answerable.run_at, answerable.id)
     order by candidate.priority, candidate.run_at, candidate.id limit answerable.examine
  loop
    begin
      execute format('select from shiftwork.jobs as job where job.ctid = $1 and case when $2 is null or job.task = any($2) then %s end', asked)
        using ahead.lies, tasks;
    exception when data_exception then
      unanswered := unanswered || ahead.id;
    end;
  end loop;
  if cardinality(unanswered) > 0 then
    conditions := array[format('case when job.id <> all(%L::bigint[]) then %s end', unanswered, asked)];
  end if;
end $$;

-- Of the first jobs of a range, those for this worker, now locked: as far as there is room for their task (`names` and `rests`;
-- none that has a limit unless it starts at once), and where all conditions hold. Says where they lie, and what room is left.
create or replace function shiftwork.pick(
  queue text, priority bigint, run_at timestamptz, id bigint, until_priority bigint, examine int, most int, tasks text[], but text[],
  conditions text[], names text[], inout rests int[], starting boolean, out rows tid[])
language plpgsql set plan_cache_mode = force_custom_plan as $$
declare
  ahead record;
  place int;
begin
  rows := '{}';
  for ahead in execute format(
    $look$
      select job.ctid as lies, job.task
        from (select candidate.ctid, candidate.* from shiftwork.jobs as candidate
               where candidate.state = 'ready' and candidate.queue = $1 and candidate.priority < $5
                 and (candidate.priority, candidate.run_at, candidate.id) > ($2, $3, $4)
               order by candidate.priority, candidate.run_at, candidate.id limit $6) as job
       where case when ($7 is null or job.task = any($7)) and ($8 is null or job.task <> all($8))
                    and (job.expires_at is null or job.expires_at > shiftwork.clock()) and job.attempt < 1000000000
                  then %s end
    $look$, coalesce((select string_agg(format(E'(%s\n)', one), ' and ') from unnest(conditions) as one), 'true'))
    using queue, priority, run_at, id, until_priority, examine, tasks, but
  loop
    exit when cardinality(rows) >= most;
    place := array_position(names, ahead.task::text);
    continue when place is not null and (rests[place] <= 0 or not starting);
    perform from shiftwork.jobs as job where job.ctid = ahead.lies and job.state = 'ready' for update skip locked;
    if found then
      rows := rows || ahead.lies;
      if place is not null then
        rests[place] := rests[place] - 1;
      end if;
    end if;
  end loop;
end $$;
