-- Jobs whose code is a routine in this database, run where they are.
--
-- A session that processes jobs is a worker like others: it has a row in `workers`, claims with `claim` and settles with
-- `conclude`. Its lease is short, and need not be longer: the row of the job that it runs is locked, so the reaper passes it by
-- for as long as the session lives, and takes it when it has died.

-- Run jobs here and now: of one queue or all, at most so many (null: until nothing is left), none that begins after
-- max_runtime, none less urgent than max_priority. Inside an open transaction nothing is committed, and all of it is rolled back with
-- the caller; otherwise each job is committed by itself. A job that fails is retried as its task says, and told as a warning.
--
-- A procedure that commits may have no search path of its own. So it names everything in full, uses no operators, and leaves
-- what is to be done to functions.
create or replace procedure shiftwork.process_jobs(
  queue text default null, batch int default 10, max_runtime interval default null, max_priority int default null)
language plpgsql as $$
declare
  begun constant timestamptz := pg_catalog.clock_timestamp();
  refusal text;
  session record;
  job record;
  complaint text;
  code text;
begin
  -- Whether there is a transaction around us nobody tells. But a commit under an exception block is always refused, and in
  -- words that depend on it.
  begin
    commit;
  exception when invalid_transaction_termination then
    get stacked diagnostics refusal = message_text;
  end;
  select opened.worker, opened.commits into session from shiftwork.open_session(queue, refusal) as opened;
  for turn in 1..coalesce(batch, 2147483647) loop
    select next.* into job from shiftwork.next_job(session.worker, queue, max_priority, begun, max_runtime) as next;
    session.worker := job.worker;
    if session.commits then
      commit;
    end if;
    exit when job.id is null;
    begin
      begin
        select ran.complaint into complaint from shiftwork.run_job(job.worker, job.id, job.attempt) as ran;
        if session.commits then
          set constraints all immediate;      -- what the commit would find is found here, where it is this job's alone
        end if;
      exception when query_canceled or assert_failure or others then      -- we were interrupted, or what came of it cannot be written
        select gone.code, gone.complaint into code, complaint
          from shiftwork.abandon_job(job.worker, job.id, job.attempt, sqlstate, sqlerrm) as gone;
      end;
    exception when query_canceled then      -- and again: before 18, PostgreSQL sends two signals for one request
      select gone.code, gone.complaint into code, complaint
        from shiftwork.abandon_job(job.worker, job.id, job.attempt, sqlstate, sqlerrm) as gone;
    end;
    if session.commits then
      commit;
    end if;
    if code is not null then
      raise exception using errcode = code, message = complaint;
    elsif complaint is not null then
      raise warning '%', complaint;
    end if;
  end loop;
  perform shiftwork.close_session(session.worker);
end $$;

-- Is there nothing around us that could not be committed? `refusal` is what was said to a commit under an exception block. A function
-- can never commit, so what it is told is what is told inside a transaction, in whatever language.
create or replace function shiftwork.is_free(refusal text) returns boolean language plpgsql as $$
declare
  inside text;
begin
  begin
    commit;
  exception when invalid_transaction_termination then
    get stacked diagnostics inside = message_text;
  end;
  return refusal <> inside;
end $$;

-- This session becomes a worker. Under an exception block of the caller's nothing can be committed either: then a row that
-- we write does not bear the number of the transaction itself.
create or replace function shiftwork.open_session(queue text, refusal text, out worker bigint, out commits boolean)
language plpgsql as $$
begin
  worker := shiftwork.register_worker(jsonb_build_object(
    'name', 'session', 'pid', pg_backend_pid(), 'queues', case when queue is null then '[]' else jsonb_build_array(queue) end,
    'details', jsonb_build_object('session', current_setting('application_name'))));
  commits := shiftwork.is_free(refusal) and (
    select mine.xmin = pg_current_xact_id()::xid from shiftwork.workers as mine where mine.id = open_session.worker);
  if commits then
    perform shiftwork.reap(worker);      -- what a session left behind that died
  end if;
end $$;

-- The next job for a session, which renews its lease with that, or becomes another worker where it was given up while it was
-- busy. No id: there is none, or it is too late for one.
create or replace function shiftwork.next_job(
  inout worker bigint, queue text, max_priority int, begun timestamptz, max_runtime interval, out id bigint, out attempt int)
language plpgsql as $$
#variable_conflict use_variable
declare
  queues text[] := array[queue];
begin
  if clock_timestamp() - begun >= max_runtime then
    return;
  end if;
  if not (shiftwork.heartbeat(jsonb_build_object('worker', worker)) ->> 'alive')::boolean then
    worker := (shiftwork.open_session(queue, '')).worker;
  end if;
  if queue is null then
    -- Wherever something is ready, found by leaping from queue to queue.
    perform shiftwork.promote(1000);
    queues := array(
      with recursive known as (
        (select job.queue from shiftwork.jobs as job where job.state = 'ready' order by job.queue limit 1)
        union all
        select (select job.queue from shiftwork.jobs as job
                 where job.state = 'ready' and job.queue > known.queue order by job.queue limit 1)
          from known where known.queue is not null
      )
      select known.queue from known where known.queue is not null);
  end if;
  select claimed.id, claimed.attempt into id, attempt
    from shiftwork.claim(jsonb_build_object(
           'worker', worker, 'want', 1, 'examine', 100000, 'max_priority', max_priority,
           'queues', (select coalesce(jsonb_agg(jsonb_build_object('queue', one)), '[]') from unnest(queues) as one),
           'tasks', (select coalesce(jsonb_agg(task.name), '[]') from shiftwork.tasks as task
                      where task.handler is not null and not task.commits))) as claimed
   where claimed.id > 0;
end $$;

-- The end of a job that was interrupted, or whose own end cannot be written: it has failed, or it goes back and this session ends with it,
-- for which a code is left to be raised.
create or replace function shiftwork.abandon_job(worker bigint, job bigint, attempt int, inout code text, inout complaint text)
language plpgsql as $$
#variable_conflict use_variable
begin
  complaint := format('job %s could not be ended: %s', job, complaint);
  if shiftwork.fail_job(worker, job, attempt, code, complaint) then
    code := null;
  else
    perform shiftwork.close_session(worker, job, attempt, complaint);
  end if;
end $$;

-- A job did what kept its end from being written, and all of it is undone: that is a failure as others are. False if it is about the
-- moment, or if nothing can be written about it at all.
create or replace function shiftwork.fail_job(worker bigint, job bigint, attempt int, code text, message text) returns boolean
language plpgsql as $$
#variable_conflict use_variable
declare
  held record;
  fate record;
begin
  select mine.failures, mine.max_attempts, known.retry into held
    from shiftwork.jobs as mine left join shiftwork.tasks as known on known.name = mine.task
   where mine.id = job and mine.attempt = fail_job.attempt and mine.worker = fail_job.worker and (mine.state = 'running') is true
     for no key update of mine;
  if not found or shiftwork.will_pass(code) then
    return false;
  end if;
  select * into fate from shiftwork.decide(held.failures, held.max_attempts, held.retry, code);
  perform shiftwork.conclude(jsonb_build_object('worker', worker, 'outcomes', jsonb_build_array(jsonb_strip_nulls(jsonb_build_object(
    'id', job, 'attempt', attempt, 'state', fate.state, 'delay', fate.wait, 'failure', fate.counts,
    'error', shiftwork.failure(code, message))))));
  return true;
exception when others then
  return false;
end $$;

-- Until a job could end too many sessions, it had no reason.
drop function if exists shiftwork.close_session(bigint, bigint, int);

-- This session is no worker any more. A job with which it ended goes back, and that is counted: one that ends every session in which it
-- is run (it takes longer than a statement may, or raises what looks like being cancelled) has failed in the end, and keeps nobody.
create or replace function shiftwork.close_session(
  worker bigint, job bigint default null, attempt int default null, why text default null) returns void
language plpgsql as $$
#variable_conflict use_variable
begin
  if job is not null then
    perform shiftwork.release(jsonb_build_object(
      'worker', worker, 'held', jsonb_build_array(jsonb_build_array(job, attempt)), 'crashed', jsonb_build_object(job, why)));
  end if;
  update shiftwork.workers as mine set lease_until = shiftwork.clock(), gone_at = shiftwork.clock()
   where mine.id = worker and mine.gone_at is null;
  if exists (select from shiftwork.child_ends as owed where owed.at <= shiftwork.clock()) then
    perform shiftwork.try_gather();                      -- the last one may have been a child
  end if;
end $$;

-- Run a job that this worker holds, in the caller's transaction: its row is locked, its handler called, and what came of it
-- written. `path` is the caller's search path, in which the handler is called. With `live`, progress is told to the client, who
-- keeps it. Answers settled, and then the state that it led to, the seconds until the next attempt and the error; or lost.
create or replace function shiftwork.run_job(
  worker bigint, job bigint, attempt int, live boolean default false, path text default current_setting('search_path'),
  out answer text, out state text, out wait double precision, out error jsonb, out complaint text)
language plpgsql as $$
#variable_conflict use_variable
declare
  outer_job constant text := current_setting('shiftwork.job', true);       -- of whose handler this may be a part
  outer_spawned constant text := current_setting('shiftwork.spawned', true);
  held record;
  result jsonb;
  counts boolean;
  repeated int := 0;
  code text;
  message text;
  detail text;
  hint text;
  context text;
begin
  select mine.task, mine.payload, mine.failures, mine.max_attempts, known.handler, known.before, known.after, known.retry
    into held
    from shiftwork.jobs as mine left join shiftwork.tasks as known on known.name = mine.task
   where mine.id = job and mine.attempt = run_job.attempt and mine.worker = run_job.worker and (mine.state = 'running') is true
     for no key update of mine;
  if not found then
    answer := 'lost';
    return;
  end if;
  answer := 'settled';
  if cardinality(shiftwork.finish_signalled(array[job])) > 0 then
    state := 'cancelled';
    return;
  end if;
  perform set_config('shiftwork.job', format('%s %s %s hook', job, attempt, live), true);
  perform shiftwork.run_hook(held.before, job, attempt, held.payload, path);
  perform set_config('shiftwork.job', format('%s %s %s', job, attempt, live), true);
  loop
    code := null;
    begin
      result := shiftwork.run_routine(held.handler, false, held.payload, path);
    exception when others or assert_failure then
      get stacked diagnostics code = returned_sqlstate, message = message_text, detail = pg_exception_detail,
                              hint = pg_exception_hint, context = pg_exception_context;
    end;
    -- Others were in its way: what it did is undone, and it may do it again on the spot.
    exit when code is null or code not in ('40001', '40P01') or repeated >= coalesce((held.retry ->> 'at_once')::int, 0);
    perform pg_sleep(0.1 * 2 ^ least(repeated, 10) + 0.05 * random());
    repeated := repeated + 1;
  end loop;
  perform set_config('shiftwork.job', format('%s %s %s hook', job, attempt, live), true);
  perform shiftwork.run_hook(held.after, job, attempt, held.payload, path);
  perform set_config('shiftwork.job', coalesce(outer_job, ''), true);

  if code is null then
    state := 'completed';
    if current_setting('shiftwork.spawned', true) = job::text then
      state := 'waiting';
      perform set_config('shiftwork.spawned', coalesce(outer_spawned, ''), true);
    end if;
  else
    code := coalesce('{"SW011": "POISON", "SW012": "RETRY_LATER", "SW013": "SNOOZED", "SW014": "TASK_CANCELLED"}'::jsonb ->> code, code);
    error := jsonb_strip_nulls(jsonb_build_object(
      'code', code, 'message', left(message, 10000), 'detail', left(nullif(detail, ''), 10000), 'hint', left(nullif(hint, ''), 10000),
      'context', right(context, 65536)));
    select fate.state, fate.wait, fate.counts into state, wait, counts
      from shiftwork.decide(held.failures, held.max_attempts, held.retry, code, shiftwork.seconds_of(detail)) as fate;
    complaint := format('job %s (%s, attempt %s) failed: %s', job, held.task, attempt, message);
  end if;
  -- The clock stands still while this statement runs, and does not know how long that was.
  state := shiftwork.conclude(jsonb_build_object(
    'worker', worker, 'elapsed', extract(epoch from clock_timestamp() - greatest(now(), statement_timestamp())),
    'outcomes', jsonb_build_array(
      jsonb_strip_nulls(jsonb_build_object('id', job, 'attempt', attempt, 'state', state, 'delay', wait, 'error', error, 'failure', counts))
      || case when result is null then '{}' else jsonb_build_object('result', result) end)));
end $$;

-- Call a routine of the user's, in the search path of whoever is to be its caller; what it gives, if it gives anything.
create or replace function shiftwork.run_routine(routine text, is_hook boolean, payload jsonb, path text) returns jsonb
language plpgsql as $$
declare
  known record;
  given jsonb;
begin
  select * into known from shiftwork.routine_call(routine, is_hook);
  perform set_config('search_path', path, true);
  if known.gives then
    execute known.call into given using payload;
  else
    execute known.call using payload;
  end if;
  return given;
end $$;

-- Call what runs before or after a job. What goes wrong in it is a warning, kept with the job, and nothing more.
create or replace function shiftwork.run_hook(routine text, job bigint, attempt int, payload jsonb, path text) returns void
language plpgsql as $$
begin
  if routine is not null then
    perform shiftwork.run_routine(routine, true, payload, path);
  end if;
exception when others or assert_failure then
  raise warning using errcode = 'SW015', message = format('%s of job %s failed: %s', routine, job, sqlerrm);
  insert into shiftwork.logs (job, attempt, level, message)
  values (job, attempt, 'warning', left(format('%s failed: %s (%s)', routine, sqlerrm, sqlstate), 10000));
end $$;

-- How long a handler wants to wait, which it said in the detail of its error. Null: it did not say.
create or replace function shiftwork.seconds_of(detail text) returns double precision language plpgsql stable as $$
begin
  return extract(epoch from detail::interval);
exception when data_exception then
  return null;
end $$;

-- How far the job is whose handler this is called in: a number from 0 to 1, and words. A worker lets everybody know at once;
-- in a session that processes jobs it is known once the job is committed. Outside of a job it does nothing.
create or replace function shiftwork.report_progress(fraction double precision, message text default null) returns void
language plpgsql as $$
declare
  running constant text[] := string_to_array(nullif(current_setting('shiftwork.job', true), ''), ' ');
begin
  if running[3]::boolean then
    raise notice using errcode = 'SW010', message = jsonb_build_object('fraction', fraction, 'message', message)::text;
  elsif running is not null then
    insert into shiftwork.progress as former (job, attempt, fraction, message)
    values (running[1]::bigint, running[2]::int, least(greatest(fraction, 0), 1), left(message, 10000))
    on conflict (job) do update set attempt = excluded.attempt, fraction = excluded.fraction, message = excluded.message, at = excluded.at;
  end if;
end $$;
