-- Claim: the first ready jobs of some queues, in `priority, run_at, id` order, for a worker that holds its lease.
--
-- request: {"worker": 17, "queues": [{"queue": "mail", "want": 5, "places": {"0": [run_at, id]}}, …],
--           "want": 10, "start": 10, "tasks": ["send_email", …], "examine": 1000, "due": 1700000000000000}
--
-- Queues are served in the order given, each up to its want, all together up to the outer one. `tasks` are those that
-- the worker knows (left out: all). The first `start` jobs go straight to slots and count as started (left out: all).
--
-- `places` and `due` are the cursor that the last answer gave. Dead index entries pile up at the front of a queue, and no
-- vacuum removes them while an old transaction is open; reading on from the last row examined skips them. There is one
-- place per known priority, in epoch microseconds and id, and what lies before and between the known priorities is always
-- read: a more urgent newcomer never waits. At most `examine` rows are looked at behind one place, whatever is filtered
-- out of them. So a short answer does not mean that a queue is empty: look without places once a second.
--
-- The first row of the answer is a report, with id 0 and in its payload: the claim's number; whether the worker is still
-- alive in the eyes of the database; for each queue how many were taken and the new places; whether there may be more;
-- and when something was left to take, the seconds until the next job falls due.
create or replace function shiftwork.claim(request jsonb) returns setof shiftwork.jobs
language plpgsql set plan_cache_mode = force_generic_plan
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off as $$
declare
  present constant timestamptz := shiftwork.clock();
  holder constant bigint := (request ->> 'worker')::bigint;
  known constant text[] := case jsonb_typeof(request -> 'tasks') when 'array'
                           then array(select jsonb_array_elements_text(request -> 'tasks')) end;
  starting constant int := coalesce((request ->> 'start')::int, 1000000);
  examine constant int := least(greatest(coalesce((request ->> 'examine')::int, 1000), 1), 100000);
  wanted int := least(coalesce((request ->> 'want')::int, 1000), 10000);
  number bigint;
  due record;
  paused text[];
  wish record;
  range record;
  want int;
  places jsonb;
  ids bigint[];
  priorities int[];
  times timestamptz[];
  examined int;
  taken bigint[] := '{}';
  queues jsonb := '{}';
  more boolean := false;
  report shiftwork.jobs;
begin
  report.id := 0;
  -- This lock keeps the reaper from calling the worker gone while it claims; its heartbeats pass.
  perform from shiftwork.workers as worker
    where worker.id = holder and worker.gone_at is null and worker.lease_until > present for key share;
  if not found then
    report.payload := '{"alive": false, "taken": 0}';
    return next report;
    return;
  end if;
  number := nextval('shiftwork.claims');
  select * into due from shiftwork.promote(1000, coalesce((request ->> 'due')::bigint, 0));
  paused := array(select pause.kind || ' ' || pause.name from shiftwork.pauses as pause
                   where pause.until is null or pause.until > present);

  for wish in
    select one.queue, one.want, coalesce(one.places, '{}') as places
      from jsonb_to_recordset(request -> 'queues') as one (queue text, want int, places jsonb)
  loop
    want := least(coalesce(wish.want, wanted), wanted);
    continue when want <= 0 or 'queue ' || wish.queue = any(paused);
    places := wish.places;

    -- Each range begins behind a place and ends before the next known priority.
    for range in
      select place.priority, place.run_at, place.id,
             lead(place.priority, 1, 2147483648) over (order by place.priority) as until_priority
        from (select -2147483648 as priority, timestamptz '-infinity' as run_at, 0::bigint as id
              union all
              select one.key::int, least(timestamptz 'epoch' + (one.value ->> 0)::bigint * interval '1 microsecond',
                                         due.earliest - interval '1 microsecond'), (one.value ->> 1)::bigint
                from jsonb_each(wish.places) as one) as place
       order by place.priority
    loop
      select array_agg(candidate.id), array_agg(candidate.priority), array_agg(candidate.run_at)
        into ids, priorities, times
        from (
          select job.id, seen.priority, seen.run_at
            from (select ahead.id, ahead.priority, ahead.run_at, ahead.task, ahead.expires_at
                    from shiftwork.jobs as ahead
                   where ahead.state = 'ready' and ahead.queue = wish.queue
                     and (ahead.priority, ahead.run_at, ahead.id) > (range.priority, range.run_at, range.id)
                     and ahead.priority < range.until_priority
                   order by ahead.priority, ahead.run_at, ahead.id limit examine) as seen
            join shiftwork.jobs as job on job.id = seen.id
           where (known is null or seen.task = any(known)) and 'task ' || seen.task <> all(paused)
             and (seen.expires_at is null or seen.expires_at > present)
             and job.state = 'ready' and job.attempt < 1000000000
           limit want for update of job skip locked
        ) as candidate;

      if cardinality(ids) = want and priorities[1] = priorities[want] then
        places := places || jsonb_build_object(priorities[1], jsonb_build_array((extract(epoch from times[want]) * 1000000)::bigint, ids[want]));
      elsif cardinality(ids) = want then
        places := places || (
          select jsonb_object_agg(last.priority, jsonb_build_array((extract(epoch from last.run_at) * 1000000)::bigint, last.id))
            from (select distinct on (one.priority) one.*
                    from unnest(priorities, times, ids) as one (priority, run_at, id)
                   order by one.priority, one.run_at desc, one.id desc) as last);
      else
        -- Short: the places are where the looking ended, so that what was filtered out is not looked at again.
        select coalesce(jsonb_object_agg(last.priority, jsonb_build_array((extract(epoch from last.run_at) * 1000000)::bigint, last.id)), '{}'),
               coalesce(sum(last.rows), 0)
          into report.payload, examined
          from (select seen.priority, max(seen.run_at) as run_at,
                       (array_agg(seen.id order by seen.run_at desc, seen.id desc))[1] as id, count(*) as rows
                  from (select ahead.id, ahead.priority, ahead.run_at
                          from shiftwork.jobs as ahead
                         where ahead.state = 'ready' and ahead.queue = wish.queue
                           and (ahead.priority, ahead.run_at, ahead.id) > (range.priority, range.run_at, range.id)
                           and ahead.priority < range.until_priority
                         order by ahead.priority, ahead.run_at, ahead.id limit examine) as seen
                 group by seen.priority) as last;
        places := places || report.payload;
        more := more or examined >= examine;
      end if;
      taken := taken || ids;
      want := want - coalesce(cardinality(ids), 0);
      wanted := wanted - coalesce(cardinality(ids), 0);
      exit when want <= 0;
    end loop;
    more := more or want <= 0;
    queues := queues || jsonb_build_object(wish.queue, places);
  end loop;

  report.payload := jsonb_build_object('alive', true, 'claim', number, 'taken', cardinality(taken), 'places', queues,
                                       'more', more, 'due', due.reached, 'promoted', due.promoted);
  if not more then
    report.payload := report.payload || jsonb_build_object('next_due_in', (
      select extract(epoch from job.run_at - present) from shiftwork.jobs as job
       where job.state = 'scheduled' and job.run_at >= timestamptz 'epoch' + due.reached * interval '1 microsecond'
       order by job.run_at limit 1));
  end if;
  return next report;

  return query
  update shiftwork.jobs as job
     set state = 'running', attempt = job.attempt + 1, worker = holder, claim = number, claimed_at = present,
         started_at = present, held_key = case when job.unique_scope = 'pending' then null else job.held_key end
   where job.id = any(taken[1:starting])
  returning job.*;
  if cardinality(taken) > starting then
    return query
    update shiftwork.jobs as job
       set state = 'running', attempt = job.attempt + 1, worker = holder, claim = number, claimed_at = present,
           held_key = case when job.unique_scope = 'pending' then null else job.held_key end
     where job.id = any(taken[starting + 1:])
    returning job.*;
  end if;
end $$;
