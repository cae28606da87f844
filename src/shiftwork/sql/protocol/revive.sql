-- Bring finished jobs back: same id, attempt numbers go on, failures and losses are forgiven. A start deadline that has
-- passed is lifted, and a unique key is taken again where it is free.
-- Answers for each: revived, live (it is not finished), busy (somebody else is at it), refused (it cannot live) or unknown.
create or replace function shiftwork.revive(ids bigint[], actor text default null) returns table (id bigint, answer text)
language plpgsql set plan_cache_mode = force_generic_plan set jit = off
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off as $$
#variable_conflict use_column
declare
  present constant timestamptz := shiftwork.clock();
  former shiftwork.history;
  made bigint;
  back bigint[] := '{}';
  refused bigint[] := '{}';
  before jsonb := '{}';
begin
  -- In the order in which enqueue takes keys, so that neither waits for the other with a key that it needs.
  for former in
    select ended.* from shiftwork.history as ended where ended.id = any(ids)
     order by ended.task collate "C", ended.unique_key collate "C", ended.id for update skip locked
  loop
    begin
      made := null;
      delete from shiftwork.history as ended where ended.id = former.id and ended.forget_on = former.forget_on;
      for turn in 1..2 loop
        insert into shiftwork.jobs (
          id, state, priority, run_at, created_at, attempt, max_attempts, expires_at, keep, unique_scope, task, queue, payload,
          unique_key, held_key, tags, parent)
        overriding system value
        values (
          former.id, 'ready', former.priority, present, former.created_at, former.attempt, former.max_attempts,
          case when former.expires_at > present then former.expires_at end, former.keep, former.unique_scope, former.task,
          former.queue, former.payload, former.unique_key, case when turn = 1 then former.unique_key end, former.tags,
          former.parent)
        on conflict (task, held_key) where held_key is not null do nothing
        returning jobs.id into made;
        exit when found;
      end loop;
      if made is null then
        raise exception 'its unique key is taken';
      end if;
      -- A request to cancel that came too late for its former life is not meant for this one.
      delete from shiftwork.signals as signal where signal.job = former.id;
    exception when others then
      -- It was written by hand, and breaks a rule of live jobs. It stays, and stops nobody else.
      if shiftwork.will_pass(sqlstate) then
        raise;
      end if;
      raise warning 'job % cannot be revived: %', former.id, sqlerrm;
      refused := refused || former.id;
      continue;
    end;
    back := back || former.id;
    before := before || jsonb_build_object(former.id, jsonb_build_object(
      'state', former.state, 'attempt', former.attempt, 'failures', former.failures, 'resets', former.resets, 'error', former.error));
  end loop;
  perform shiftwork.wake(array(select distinct job.queue from shiftwork.jobs as job where job.id = any(back) limit 9));
  perform shiftwork.note(actor, 'revive', jsonb_build_object('jobs', to_jsonb(ids)), before);
  return query
  select one, case when one = any(back) then 'revived' when one = any(refused) then 'refused'
                   when exists (select from shiftwork.jobs as job where job.id = one) then 'live'
                   when exists (select from shiftwork.history as ended where ended.id = one) then 'busy'
                   else 'unknown' end
    from unnest(ids) as one;
end $$;

-- Do not wait any longer: scheduled jobs become ready now. With `strict`, all of them or none.
-- Answers for each: moved, ready (it was), refused (it is in another state), busy, finished or unknown.
create or replace function shiftwork.run_now(ids bigint[], actor text default null, strict boolean default false)
returns table (id bigint, answer text) language plpgsql set plan_cache_mode = force_generic_plan set jit = off
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off as $$
#variable_conflict use_column
declare
  moved bigint[];
  refused text;
begin
  moved := array(
    select job.id from shiftwork.jobs as job
     where job.id = any(ids) and (job.state = 'scheduled') is true order by job.id for update skip locked);
  update shiftwork.jobs as job set state = 'ready', run_at = shiftwork.clock() where job.id = any(moved);
  perform shiftwork.wake(array(select distinct job.queue from shiftwork.jobs as job where job.id = any(moved)));
  perform shiftwork.note(actor, 'run_now', jsonb_build_object('jobs', to_jsonb(ids)), after => to_jsonb(moved));
  return query
  select one.id, coalesce(case when one.id = any(moved) then 'moved' when job.state = 'ready' then 'ready'
                               when job.state = 'scheduled' then 'busy' when job.id is not null then 'refused' end,
                          case when exists (select from shiftwork.history as ended where ended.id = one.id) then 'finished' else 'unknown' end)
    from unnest(ids) as one (id) left join shiftwork.jobs as job on job.id = one.id;
  if strict then
    select string_agg(format('job %s is %s', one.id, coalesce(one.state::text, 'unknown')), ', ') into refused
      from (select wish.id, job.state from unnest(ids) as wish (id) left join shiftwork.all_jobs as job on job.id = wish.id) as one
     where one.state is distinct from 'ready';
    if refused is not null then
      raise exception using errcode = 'SW001', message = 'not all of these jobs can run now: ' || refused,
        hint = 'Only jobs that wait for their time can; nothing was changed.';
    end if;
  end if;
end $$;
