-- Cancel jobs. One that somebody holds gets a signal, and its handler is told; it ends as it then ends. With a job that waits for
-- its children, these are cancelled. Answers for each: cancelled, signalled, finished (too late), or unknown.
create or replace function shiftwork.cancel(ids bigint[], reason text default null, actor text default null)
returns table (id bigint, answer text) language plpgsql set plan_cache_mode = force_generic_plan set jit = off
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off as $$
#variable_conflict use_column
declare
  free bigint[];
  held bigint[];
begin
  select * into free, held from shiftwork.cancel_jobs(ids, reason, actor);
  perform shiftwork.note(actor, 'cancel', jsonb_build_object('jobs', to_jsonb(ids)),
                         after => jsonb_build_object('cancelled', free, 'signalled', held, 'reason', reason));
  return query
  select one, case when one = any(free) then 'cancelled' when one = any(held) then 'signalled'
                   when exists (select from shiftwork.history as ended where ended.id = one) then 'finished'
                   else 'unknown' end
    from unnest(ids) as one;
end $$;

-- Cancel jobs, and whoever those that wait are waiting for. Says which have ended, and to which a signal was sent.
create or replace function shiftwork.cancel_jobs(ids bigint[], reason text, actor text, out free bigint[], out held bigint[])
language plpgsql set plan_cache_mode = force_generic_plan set jit = off
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off as $$
declare
  family constant bigint[] := array(
    with recursive kin as (
      select one as id from unnest(ids) as one where one is not null
      union
      select child.id from kin
        join shiftwork.jobs as parent on parent.id = kin.id and parent.state <> 'running'
        join shiftwork.jobs as child on child.parent = parent.id
    )
    select kin.id from kin);
  has_kin constant boolean := cardinality(family) > (select count(distinct one) from unnest(ids) as one);
  inherited constant text := coalesce(reason, 'the job that waited for it was cancelled');
  born bigint[];
begin
  -- Everyone asks first, in the order of ids: who cancels the same jobs waits here, and holds nothing yet that another needs.
  insert into shiftwork.signals (job, reason, actor)
  select job.id, case when has_kin and job.id <> all(ids) then inherited else cancel_jobs.reason end,
         coalesce(cancel_jobs.actor, session_user)
    from shiftwork.jobs as job where job.id = any(family) order by job.id
  on conflict (job) do nothing;
  free := array(
    select job.id from shiftwork.jobs as job
     where job.id = any(family) and job.state <> 'running' order by job.id for update skip locked);
  if cardinality(free) > 0 then
    free := shiftwork.finish(
              case when has_kin then array(select unnest(free) intersect select unnest(ids)) else free end,
              'cancelled', shiftwork.failure('TASK_CANCELLED', coalesce(reason, 'cancelled')))
         || case when has_kin then shiftwork.finish(array(select unnest(free) except select unnest(ids)),
                                                    'cancelled', shiftwork.failure('TASK_CANCELLED', inherited)) end;
    born := array(select child.id from shiftwork.jobs as child where child.parent = any(free) and child.id <> all(family));
    if cardinality(born) > 0 then                       -- meanwhile
      perform shiftwork.cancel_jobs(born, inherited, actor);
    end if;
  end if;
  -- What is left is running, or just being moved by someone, or cannot be moved now: the signal outlasts that.
  held := array(select signal.job from shiftwork.signals as signal
                 where signal.job = any(family) and exists (select from shiftwork.jobs as job where job.id = signal.job));
  -- One that finished while we waited for somebody is not to be cancelled in a later life.
  delete from shiftwork.signals as signal where signal.job = any(array(
    select late.job from shiftwork.signals as late where late.job = any(family) and late.job <> all(held) for update skip locked));
  if cardinality(held) > 0 and pg_notification_queue_usage() < 0.5 then
    perform pg_notify('shiftwork_cancel', one::text) from unnest(held) as one;
  end if;
end $$;

-- Cancel the children of jobs that are cancelled, unless that would take long: somebody else is at it.
create or replace function shiftwork.cancel_children(parents bigint[], reason text, actor text) returns void
language plpgsql set plan_cache_mode = force_generic_plan set jit = off set enable_seqscan = off set lock_timeout = '100ms' as $$
declare
  children constant bigint[] := array(
    select child.id from shiftwork.jobs as child where child.parent = any(parents) order by child.id);
begin
  if cardinality(children) > 0 then
    perform shiftwork.cancel_jobs(children, coalesce(reason, 'the job that waited for it was cancelled'), actor);
  end if;
end $$;

-- Write down who did what: one row for each act, in the transaction of the act.
create or replace function shiftwork.note(actor text, verb text, target jsonb, before jsonb default null, after jsonb default null)
returns void language sql security definer set search_path = shiftwork, pg_temp as $$
  insert into shiftwork.audit (actor, verb, target, before, after) values (coalesce(actor, session_user), verb, target, before, after)
$$;
