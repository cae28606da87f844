-- Children: a job whose handler spawned others waits until they have all ended, and then ends itself: completed, or failed if one
-- of them did not complete.
--
-- Whoever ends a child does not touch its parent. Two that end at once would not see each other's end, and to lock the parent
-- would make them wait for one another. It leaves a note, in the same transaction; and who reads the note also sees the end.
-- Notes are read by every claim and every heartbeat.

-- Leave a note for the parents of jobs that have ended so, in the caller's transaction. None for those without.
create or replace function shiftwork.tell_parents(parents bigint[], children bigint[], endings shiftwork.job_state[]) returns void
language plpgsql set plan_cache_mode = force_generic_plan set jit = off set enable_seqscan = off set enable_bitmapscan = off as $$
begin
  insert into shiftwork.child_ends (parent, failure)
  select one.parent, (array_agg(shiftwork.failure('CHILD_FAILED', format('job %s, for which it waited, is %s', one.child, one.ending))
                                order by one.child) filter (where one.ending <> 'completed'))[1]
    from unnest(parents, children, endings) as one (parent, child, ending)
   where one.parent is not null
   group by one.parent order by one.parent;
  if shiftwork.is_declared('shiftwork.asleep_until') then
    perform shiftwork.wake(array(select distinct job.queue from shiftwork.jobs as job where job.id = any(parents) limit 9));
  end if;
end $$;

-- End the parents whose children have all ended, as far as there are notes, of which it reads so many at most, and none from before `since`:
-- what is left of those that were read lies in the way of all others, for as long as somebody has an old snapshot. Nobody is waited for: a parent
-- that somebody else has locked is looked at later. Says who has ended, and how.
create or replace function shiftwork.gather(most int default 1000, since timestamptz default '-infinity')
returns table (id bigint, answer text)
language plpgsql set plan_cache_mode = force_generic_plan set jit = off
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off as $$
#variable_conflict use_column
declare
  left_over int := most;
  notes tid[];
  named bigint[];
  mine bigint[];
  busy bigint[];
  done bigint[];
  ended bigint[];
  one record;
begin
  loop
    select array_agg(note.place), array_agg(distinct note.parent) into notes, named from (
      select owed.ctid as place, owed.parent from shiftwork.child_ends as owed where owed.at between since and shiftwork.clock()
       order by owed.at limit left_over for update skip locked) as note;
    exit when notes is null;
    mine := array(
      select job.id from shiftwork.jobs as job
       where job.id = any(named) and (job.state = 'waiting') is true order by job.id for update skip locked);
    busy := array(
      select job.id from shiftwork.jobs as job
       where job.id = any(named) and (job.state = 'waiting') is true and job.id <> all(mine));
    -- What went wrong first is kept with the parent, for as long as others of its children live.
    update shiftwork.jobs as job set error = told.failure
      from (select distinct on (owed.parent) owed.parent, owed.failure from shiftwork.child_ends as owed
             where owed.ctid = any(notes) and owed.parent = any(mine) and owed.failure is not null
             order by owed.parent, owed.at) as told
     where job.id = told.parent and job.error is null;
    -- The notes of one that somebody has locked become one. It makes room for others if there may be more of them, and does not grow old:
    -- then it would not be seen any more.
    with read as (
      delete from shiftwork.child_ends as owed where owed.ctid = any(notes) returning owed.at, owed.parent, owed.failure
    )
    insert into shiftwork.child_ends (at, parent, failure)
    select case when cardinality(notes) < left_over and min(read.at) > shiftwork.clock() - interval '0.5 seconds' then min(read.at)
                else shiftwork.clock() + interval '0.1 seconds' end, read.parent,
           (array_agg(read.failure order by read.at) filter (where read.failure is not null))[1]
      from read where read.parent = any(busy) group by read.parent;

    done := array(
      select job.id from shiftwork.jobs as job
       where job.id = any(mine)
         and not exists (select from shiftwork.jobs as child where child.parent = job.id order by child.id desc limit 1));
    ended := '{}';
    for one in
      select job.error, array_agg(job.id order by job.id) as ids from shiftwork.jobs as job
       where job.id = any(done) group by job.error
    loop
      ended := ended || shiftwork.finish(
        one.ids, case when one.error is null then 'completed' else 'failed' end::shiftwork.job_state, one.error);
      return query select each, case when one.error is null then 'completed' else 'failed' end
                     from unnest(ended) as each where each = any(one.ids);
    end loop;
    -- One that cannot be moved now, which was told, is looked at again.
    insert into shiftwork.child_ends (at, parent)
    select shiftwork.clock() + interval '1 minute', each from unnest(done) as each where each <> all(ended);
    left_over := left_over - cardinality(notes);
    exit when cardinality(ended) = 0 or left_over <= 0;   -- else those may have parents themselves
  end loop;
end $$;

-- The same for those who have something else to do, of which this must keep them neither long nor at all.
create or replace function shiftwork.try_gather(since timestamptz default '-infinity') returns void
language plpgsql set lock_timeout = '100ms' as $$
begin
  perform shiftwork.gather(since => try_gather.since);
exception when others then
  raise warning 'jobs that wait for others cannot be looked at: %', sqlerrm;
end $$;

-- Make a child of the job whose handler this is called in: that job waits for it. `options` are those of enqueue_many.
create or replace function shiftwork.spawn(
  task text, payload jsonb default '{}', options jsonb default '{}', out id bigint, out outcome text)
language plpgsql as $$
#variable_conflict use_variable
declare
  running constant text[] := string_to_array(nullif(current_setting('shiftwork.job', true), ''), ' ');
begin
  if running is null or running[4] is not null then
    raise exception using errcode = 'SW001', message = 'a child can only be made by the handler of a job that does not commit by itself, and not by its hooks',
      hint = 'Anywhere else there is shiftwork.enqueue.';
  end if;
  select made.id, made.outcome into id, outcome from shiftwork.enqueue_jobs(jsonb_build_array(
    coalesce(options, '{}') || jsonb_build_object('task', task, 'payload', payload, 'parent', running[1]::bigint)), true) as made;
  perform set_config('shiftwork.spawned', running[1], true);
end $$;
