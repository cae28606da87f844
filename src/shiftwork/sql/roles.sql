-- Roles, for those who want more than one: an owner that nobody can log in as, and four kinds of users to be granted
-- to logins. Run again after every migration: `create or replace` keeps grants, a new function has none.

do $$
declare
  role text;
begin
  foreach role in array array['owner', 'producer', 'worker', 'operator', 'viewer'] loop
    begin
      execute format('create role %I nologin', 'shiftwork_' || role);
    exception when duplicate_object or unique_violation then  -- the latter when someone creates it right now
      null;
    end;
  end loop;
end $$;

-- Everything belongs to the owner, so that what runs with its rights (security definer) has no more than those.
grant shiftwork_owner to current_user;
do $$
declare
  one record;
begin
  if (select nspowner from pg_namespace where nspname = 'shiftwork') <> 'shiftwork_owner'::regrole then
    alter schema shiftwork owner to shiftwork_owner;
  end if;
  for one in
    select relation.relkind, relation.relname from pg_class as relation
     where relation.relnamespace = 'shiftwork'::regnamespace and relation.relkind in ('r', 'p', 'v', 'S')
       and (relation.relkind <> 'S'  -- a column's own sequence goes with its table
            or not exists (select from pg_depend as owned where owned.objid = relation.oid and owned.deptype in ('a', 'i')))
       and relation.relowner <> 'shiftwork_owner'::regrole             -- what is right already is not locked
  loop
    execute format('alter %s shiftwork.%I owner to shiftwork_owner',
                   case one.relkind when 'v' then 'view' when 'S' then 'sequence' else 'table' end, one.relname);
  end loop;
  for one in select routine.oid::regprocedure as signature from pg_proc as routine
              where routine.pronamespace = 'shiftwork'::regnamespace and routine.proowner <> 'shiftwork_owner'::regrole loop
    execute format('alter routine %s owner to shiftwork_owner', one.signature);
  end loop;
  for one in select type.typname from pg_type as type
              where type.typnamespace = 'shiftwork'::regnamespace and type.typtype in ('d', 'e')
                and type.typowner <> 'shiftwork_owner'::regrole loop
    execute format('alter type shiftwork.%I owner to shiftwork_owner', one.typname);
  end loop;
end $$;

revoke all on schema shiftwork from public;
revoke all on all tables in schema shiftwork from public, shiftwork_producer, shiftwork_worker, shiftwork_operator, shiftwork_viewer;
revoke all on all sequences in schema shiftwork from public, shiftwork_producer, shiftwork_worker, shiftwork_operator, shiftwork_viewer;
revoke all on all routines in schema shiftwork from public, shiftwork_producer, shiftwork_worker, shiftwork_operator, shiftwork_viewer;
grant usage on schema shiftwork to shiftwork_producer, shiftwork_worker, shiftwork_operator, shiftwork_viewer;

-- A producer enqueues, and sees nothing.
grant execute on function
  shiftwork.enqueue(text, jsonb, text, int, timestamptz, timestamptz, int, text, interval, text[], int, text, text, interval, jsonb),
  shiftwork.enqueue(text, text), shiftwork.enqueue_one(text, text, text, int, int), shiftwork.enqueue_many(jsonb), shiftwork.clock()
  to shiftwork_producer, shiftwork_worker, shiftwork_operator;
grant insert (task, payload, queue, priority, run_at, expires_at, max_attempts, unique_key, tags) on shiftwork.jobs to shiftwork_producer;

-- A viewer reads, and changes nothing.
grant select on all tables in schema shiftwork to shiftwork_viewer, shiftwork_worker, shiftwork_operator;
grant execute on function shiftwork.clock(), shiftwork.look(bigint[]), shiftwork.await_results(double precision),
  shiftwork.measure_queues(text[], int)
  to shiftwork_viewer, shiftwork_worker, shiftwork_operator;

-- A worker moves jobs; it makes no tables, and steers nothing.
grant insert, update, delete on shiftwork.jobs, shiftwork.history, shiftwork.attempts, shiftwork.signals, shiftwork.progress, shiftwork.logs, shiftwork.child_ends
  to shiftwork_worker, shiftwork_operator;
grant insert, update on shiftwork.workers to shiftwork_worker, shiftwork_operator;
grant insert on shiftwork.snapshots to shiftwork_worker, shiftwork_operator;
grant update on shiftwork.duties to shiftwork_worker, shiftwork_operator;
grant insert, update, delete on shiftwork.runs to shiftwork_worker, shiftwork_operator;
grant insert, update on shiftwork.run_days to shiftwork_worker, shiftwork_operator;
grant update, delete on shiftwork.permits to shiftwork_worker, shiftwork_operator;
grant select on all sequences in schema shiftwork to shiftwork_worker, shiftwork_operator;
grant usage on sequence shiftwork.claims to shiftwork_worker, shiftwork_operator;
grant execute on function
  shiftwork.refuse_state(bigint, shiftwork.job_state), shiftwork.promote(int, bigint), shiftwork.place_time(bigint), shiftwork.is_declared(regclass), shiftwork.claim(jsonb), shiftwork.take(jsonb), shiftwork.end_pauses(), shiftwork.lock_permits(text[], text[], int), shiftwork.lend_permits(bigint, bigint),
  shiftwork.pick(text, bigint, timestamptz, bigint, bigint, int, int, text[], text[], text[], text[], int[], boolean),
  shiftwork.answerable(text, bigint, timestamptz, bigint, bigint, int, text[], text[], bigint[]),
  shiftwork.return_permits(bigint[]), shiftwork.mend_permits(), shiftwork.declare_limits(jsonb), shiftwork.start(jsonb), shiftwork.settle(jsonb),
  shiftwork.told(jsonb), shiftwork.release(jsonb), shiftwork.lock_held(jsonb),
  shiftwork.unheld_answer(jsonb, bigint, int), shiftwork.give_back(bigint[]), shiftwork.heartbeat(jsonb), shiftwork.why_lost(bigint[]), shiftwork.register_worker(jsonb),
  shiftwork.leave(bigint), shiftwork.lease_of(jsonb), shiftwork.holds(jsonb), shiftwork.reap(bigint, int, boolean), shiftwork.take_back(bigint[], jsonb),
  shiftwork.end_sessions(bigint[]), shiftwork.report(jsonb), shiftwork.declare_tasks(jsonb), shiftwork.conclude(jsonb),
  shiftwork.expire(int), shiftwork.fence(bigint, int), shiftwork.finish(bigint[], shiftwork.job_state, jsonb),
  shiftwork.finish_together(bigint[], shiftwork.job_state, jsonb), shiftwork.will_pass(text),
  shiftwork.finish_signalled(bigint[]), shiftwork.failure(text, text), shiftwork.forget_on(int, date), shiftwork.today(),
  shiftwork.days_kept(int, shiftwork.job_state, text), shiftwork.wake(text[]), shiftwork.announce(bigint[]), shiftwork.tell_parents(bigint[], bigint[], shiftwork.job_state[]),
  shiftwork.cancel_jobs(bigint[], text, text), shiftwork.cancel_children(bigint[], text, text),
  shiftwork.gather(int, timestamptz), shiftwork.try_gather(timestamptz), shiftwork.spawn(text, jsonb, jsonb), shiftwork.enqueue_jobs(jsonb, boolean),
  shiftwork.sleep(double precision), shiftwork.rouse(), shiftwork.extend_history(), shiftwork.purge(boolean, int), shiftwork.purge_part(boolean, int),
  shiftwork.duties_due(bigint, text[], timestamptz), shiftwork.take_duties(bigint, text[]), shiftwork.finish_duty(jsonb),
  shiftwork.measured(jsonb, text, numeric), shiftwork.begin_run(text, bigint, text), shiftwork.end_run(jsonb),
  shiftwork.forget_workers(int), shiftwork.attend(bigint, jsonb, timestamptz),
  shiftwork.is_free(text), shiftwork.open_session(text, text), shiftwork.next_job(bigint, text, int, timestamptz, interval),
  shiftwork.run_job(bigint, bigint, int, boolean, text), shiftwork.close_session(bigint, bigint, int, text), shiftwork.fail_job(bigint, bigint, int, text, text),
  shiftwork.abandon_job(bigint, bigint, int, text, text),
  shiftwork.run_routine(text, boolean, jsonb, text), shiftwork.run_hook(text, bigint, int, jsonb, text), shiftwork.seconds_of(text),
  shiftwork.report_progress(double precision, text), shiftwork.routine_call(text, boolean), shiftwork.decide(int, int, jsonb, text, double precision, double precision),
  shiftwork.register_task(text, text, text, int, int, jsonb, interval, text, text, boolean, text, text, text, interval, jsonb, int, text, text),
  shiftwork.check_retry(jsonb), shiftwork.check_merge(jsonb), shiftwork.is_within(jsonb, numeric, numeric)          -- only if that is nothing new
  to shiftwork_worker, shiftwork_operator;

grant execute on procedure shiftwork.process_jobs(text, int, interval, int) to shiftwork_worker, shiftwork_operator;

-- An operator steers: what a worker may, and cancelling, reviving, pausing, retention and the registry.
grant insert, update, delete on shiftwork.tasks, shiftwork.queues, shiftwork.pauses, shiftwork.settings, shiftwork.schedules, shiftwork.edges, shiftwork.limits
  to shiftwork_operator;
grant insert on shiftwork.permits to shiftwork_operator;
grant execute on function
  shiftwork.cancel(bigint[], text, text), shiftwork.complete(bigint, jsonb, text), shiftwork.revive(bigint[], text), shiftwork.run_now(bigint[], text, boolean),
  shiftwork.pause(text, text, interval, text, text, bigint, boolean), shiftwork.resume(text, text, text, bigint, boolean), shiftwork.kind_of(text, text, bigint), shiftwork.target_of(text, text),
  shiftwork.limit_running(int, text, text, text), shiftwork.set_limit(text, text, int),
  shiftwork.retain(text, int, int, int, int, text), shiftwork.note(text, text, jsonb, jsonb, jsonb)
  to shiftwork_operator;
