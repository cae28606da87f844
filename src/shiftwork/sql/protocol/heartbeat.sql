-- A worker renews its lease and compares what it holds with what the database thinks.
--
-- request: {"worker": 17, "lease": 30, "held": [[id, attempt], …], "answered": 1234, "since": 1200, "reconcile": false,
--           "state": {…}, "duties": ["expire", …], "done": [{…}, …]}
--
-- `answered` is the last claim number that it had an answer to when it listed what it holds; `since` is how far back its
-- rows are compared (0: all of them). Its rows with such a number that it does not hold are strays: an answer was lost on
-- the wire. They are released, and nothing is counted against them. After a claim that failed without an answer the
-- worker does not know its number: `reconcile` waits until no claim of this worker is in flight any more and compares
-- all its rows. Until that is answered it must not claim.
-- The answer: {"alive": true, "lost": [id, …], "why": {"id": "taken", …}, "cancel": [{"id", "reason"}, …],
-- "strays": [id, …], "reap": false}. A worker that is not alive was given up by the reaper: all it held is lost, and it has
-- to register anew. Why: taken (the job lives on without it), ended (it is finished), missing (there is no such job). `reap`
-- says that the lease of another worker has lapsed, and that somebody has to reap. `state`, `duties` and `done`: see `attend`.
create or replace function shiftwork.heartbeat(request jsonb) returns jsonb
language plpgsql set plan_cache_mode = force_generic_plan set jit = off
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off as $$
declare
  present constant timestamptz := shiftwork.clock();
  holder constant bigint := (request ->> 'worker')::bigint;
  reconcile constant boolean := coalesce((request ->> 'reconcile')::boolean, false);
  answered constant bigint := case when reconcile then 9223372036854775807 else coalesce((request ->> 'answered')::bigint, 0) end;
  since constant bigint := case when reconcile then 0 else coalesce((request ->> 'since')::bigint, 0) end;
  mine bigint[];
  lost bigint[];
  asked jsonb;
  strays bigint[];
begin
  if reconcile then
    perform from shiftwork.workers as worker where worker.id = holder for update;      -- claims hold a lock on this row
  end if;
  update shiftwork.workers as worker
     set lease_until = present + shiftwork.lease_of(request), seen_at = present
   where worker.id = holder and (worker.gone_at is null) is true;      -- by its key, not by the index of who is alive
  if not found then
    lost := array(select hold.id from shiftwork.holds(request -> 'held') as hold);
    return jsonb_build_object('alive', false, 'lost', to_jsonb(lost), 'why', shiftwork.why_lost(lost), 'cancel', '[]'::jsonb,
                              'strays', '[]'::jsonb, 'reap', false);
  end if;

  -- By primary key, never by worker: the index of what runs is full of dead entries.
  select array_agg(job.id) filter (where job.id is not null), coalesce(array_agg(hold.id) filter (where job.id is null), '{}')
    into mine, lost
    from shiftwork.holds(request -> 'held') as hold
    left join lateral (
      select held.id from shiftwork.jobs as held
       where held.id = hold.id and held.attempt = hold.attempt and held.worker = holder
         and (held.state in ('running', 'waiting')) is true
      offset 0) as job on true;

  select coalesce(jsonb_agg(jsonb_build_object('id', signal.job, 'reason', signal.reason)), '[]') into asked
    from shiftwork.signals as signal where signal.job = any(mine);

  if answered > since then
    strays := array(
      select job.id from shiftwork.jobs as job
       where job.state = 'running' and job.worker = holder and job.claim > since and job.claim <= answered
         and job.id <> all(coalesce(mine, '{}'))
       order by job.id for update skip locked);
    begin
      perform shiftwork.give_back(strays);
    exception when others then
      raise warning 'strays of worker % cannot be given back: %', holder, sqlerrm;      -- its lease is renewed all the same
      strays := '{}';
    end;
  end if;
  if exists (select from shiftwork.child_ends as owed where owed.at <= present) then
    perform shiftwork.try_gather();                      -- all may be too busy to claim
  end if;
  return jsonb_build_object(
    'alive', true, 'lost', to_jsonb(lost), 'why', shiftwork.why_lost(lost), 'cancel', asked,
    'strays', to_jsonb(coalesce(strays, '{}')),
    'reap', (select one.lease_until from shiftwork.workers as one
              where one.gone_at is null order by one.lease_until limit 1) <= present)
    || shiftwork.attend(holder, request, present);
end $$;

-- Why somebody does not hold these jobs any more. Both rooms in one statement: one that is just ending is seen in one of them.
create or replace function shiftwork.why_lost(ids bigint[]) returns jsonb
language plpgsql stable set plan_cache_mode = force_generic_plan set jit = off as $$
begin
  if cardinality(ids) = 0 then
    return '{}';
  end if;
  return coalesce((
    select jsonb_object_agg(one, case
             when exists (select from shiftwork.jobs as job where job.id = one) then 'taken'
             when exists (select from shiftwork.history as ended where ended.id = one) then 'ended'
             else 'missing' end)
      from unnest(ids) as one where one is not null), '{}');
end $$;
