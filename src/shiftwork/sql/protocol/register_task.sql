-- Enter a task whose code is a routine in this database, with all that is to be known of it: what is left out is taken back.
-- The handler is a procedure or a function that takes the payload as jsonb and may give jsonb, the result, back. `before` and
-- `after` run around it, with or without the payload. One that `commits` by itself is run by workers only. Says whether that is
-- anything new. Run again, it changes nothing: put it into your own migrations.
create or replace function shiftwork.register_task(
  task text, handler text, queue text default null, priority int default null, max_attempts int default null,
  retry jsonb default null, timeout interval default null, before text default null, after text default null,
  commits boolean default false, description text default null, unique_scope text default null,
  unique_action text default null, unique_window interval default null, merge jsonb default null,
  max_resets int default null, on_lost text default 'requeue', actor text default null) returns boolean
language plpgsql as $$
#variable_conflict use_variable
declare
  former shiftwork.tasks;
  wished shiftwork.tasks;
begin
  perform shiftwork.check_retry(retry);
  perform shiftwork.check_merge(merge);
  if commits and coalesce(before, after) is not null then
    raise exception using errcode = 'SW001', message = format('task "%s" commits by itself, and so nothing runs before or after it', task),
      hint = 'They would run in its transaction, of which there are several: let it call them itself.';
  end if;
  select * into former from shiftwork.tasks as known where known.name = task;
  wished := former;
  wished.name := task;
  wished.handler := (shiftwork.routine_call(handler, false)).signature;
  wished.before := case when before is not null then (shiftwork.routine_call(before, true)).signature end;
  wished.after := case when after is not null then (shiftwork.routine_call(after, true)).signature end;
  wished.queue := queue;
  wished.priority := priority;
  wished.max_attempts := case when max_attempts is null and retry ? 'max_attempts'
                              then coalesce((retry ->> 'max_attempts')::int, 2147483647) else max_attempts end;
  wished.retry := retry;
  wished.timeout := timeout;
  wished.commits := coalesce(commits, false);
  wished.description := description;
  wished.unique_scope := unique_scope::shiftwork.unique_scope;
  wished.unique_action := unique_action;
  wished.unique_window := unique_window;
  wished.merge := merge;
  wished.max_resets := max_resets;
  wished.on_lost := coalesce(on_lost, 'requeue');
  wished.registered_at := coalesce(former.registered_at, shiftwork.clock());
  if wished is not distinct from former then
    return false;
  end if;
  insert into shiftwork.tasks as known select (wished).*
  on conflict (name) do update
    set handler = excluded.handler, before = excluded.before, after = excluded.after, queue = excluded.queue,
        priority = excluded.priority, max_attempts = excluded.max_attempts, retry = excluded.retry, timeout = excluded.timeout,
        commits = excluded.commits, description = excluded.description, unique_scope = excluded.unique_scope,
        unique_action = excluded.unique_action, unique_window = excluded.unique_window, merge = excluded.merge,
        max_resets = excluded.max_resets, on_lost = excluded.on_lost;
  if pg_notification_queue_usage() < 0.5 then          -- workers look anew; who does not hear it does so sooner or later
    perform pg_notify('shiftwork_wake', '*');
  end if;
  perform shiftwork.note(actor, 'register', jsonb_build_object('task', task),
                         before => case when former.name is not null then to_jsonb(former) end, after => to_jsonb(wished));
  return true;
end $$;

-- How a routine of the user's is called, with the payload as $1, whether it gives something, and its name in full. A hook may take
-- nothing at all.
create or replace function shiftwork.routine_call(
  routine text, is_hook boolean, out signature text, out call text, out gives boolean)
language plpgsql stable as $$
declare
  known record;
  named text;
  given text;
begin
  select proc.*, namespace.nspname, array(select unnest(coalesce(proc.proallargtypes, proc.proargtypes::oid[]))) as kinds,
         coalesce(proc.proargmodes::text[], array_fill('i'::text, array[proc.pronargs])) as modes
    into known
    from pg_catalog.pg_proc as proc join pg_catalog.pg_namespace as namespace on namespace.oid = proc.pronamespace
   where proc.oid = to_regprocedure(routine);
  if not found then
    raise exception using errcode = 'SW001', message = format('there is no routine %s in this database', routine),
      hint = 'Name it with its schema and the types of its arguments: stats.derive_units(jsonb).';
  end if;
  named := format('%I.%I', known.nspname, known.proname);
  signature := format('%s(%s)', named, oidvectortypes(known.proargtypes));
  if known.prokind = 'p' then
    given := case
      when known.kinds = '{jsonb}'::regtype[]::oid[] and known.modes = '{i}' then '$1'
      when known.kinds = '{jsonb,jsonb}'::regtype[]::oid[] and known.modes in ('{i,b}', '{i,o}') then '$1, null'
      when is_hook and known.kinds = '{}' then '' end;
    call := format('call %s(%s)', named, given);
    gives := cardinality(known.kinds) = 2;
  elsif known.prokind = 'f' and not known.proretset then
    given := case
      when oidvectortypes(known.proargtypes) = 'jsonb' and (is_hook or known.prorettype in ('jsonb'::regtype, 'void'::regtype)) then '$1'
      when is_hook and known.pronargs = 0 then '' end;
    call := format('select %s(%s)', named, given);
    gives := known.prorettype = 'jsonb'::regtype;
  end if;
  if given is null then
    raise exception using errcode = 'SW001',
      message = format('%s cannot run %s', signature, case when is_hook then 'before or after a job' else 'jobs' end),
      hint = 'It is a procedure (payload jsonb) or (payload jsonb, inout info jsonb), or a function (payload jsonb) that returns jsonb or void'
             || case when is_hook then '; or it takes nothing.' else '.' end;
  end if;
end $$;

-- Refuse a policy that nobody can follow. What it leaves out is as usual.
create or replace function shiftwork.check_retry(retry jsonb) returns void language plpgsql stable as $$
declare
  usual constant jsonb := '{"max_attempts": 5, "delays": [30], "factor": 2, "cap": 3600, "jitter": 0.2, "on": null, "at_once": 0}';
  policy jsonb;
begin
  if retry is null then
    return;
  end if;
  policy := case when jsonb_typeof(retry) = 'object' then usual || retry end;
  if policy is null
     or exists (select from jsonb_object_keys(retry) as said where not usual ? said)
     or (policy -> 'max_attempts' <> 'null' and not shiftwork.is_within(policy -> 'max_attempts', 1, 2147483647))
     or jsonb_typeof(policy -> 'delays') <> 'array' or policy -> 'delays' = '[]'
     or exists (select from jsonb_path_query(policy, 'strict $.delays[*]') as step where not shiftwork.is_within(step, 0, 315360000))
     or not shiftwork.is_within(policy -> 'cap', 0, 315360000) or not shiftwork.is_within(policy -> 'factor', 1, 1000)
     or not shiftwork.is_within(policy -> 'jitter', 0, 0.999999) or not shiftwork.is_within(policy -> 'at_once', 0, 100)
     or (policy -> 'on' <> 'null' and jsonb_typeof(policy -> 'on') <> 'array') then
    raise exception using errcode = 'SW001', message = format('"%s" is no way to retry', left(retry::text, 200)),
      hint = format('It is a JSON object with some of these: %s. Waits are seconds, up to ten years; null attempts are without end.', usual);
  end if;
end $$;

-- Refuse a merge that would fail whoever enqueues the second job, long after.
create or replace function shiftwork.check_merge(merge jsonb) returns void language plpgsql stable as $$
declare
  said constant jsonb := case jsonb_typeof(merge) when 'object' then jsonb_path_query_array(merge, '$.*') else jsonb_build_array(merge) end;
begin
  if merge is null then
    return;
  end if;
  if jsonb_typeof(merge) = 'string' and merge #>> '{}' like 'function:%' then
    perform from pg_catalog.pg_proc as proc
      where proc.oid = to_regproc(substr(merge #>> '{}', 10)) and oidvectortypes(proc.proargtypes) = 'jsonb, jsonb'
        and proc.prorettype = 'jsonb'::regtype;
    if not found then
      raise exception using errcode = 'SW001', message = format('%s cannot merge: there is no such function', merge),
        hint = 'It takes two payloads as jsonb, the former and the new one, and returns jsonb; name it with its schema, and without arguments.';
    end if;
  elsif exists (
    select from jsonb_array_elements_text(said) as one
     where (one in ('replace', 'deep', 'append', 'union', 'min', 'max', 'sum')
            or one ~ '^(range:(int4|int8|num|date|ts|tstz)range|multirange:(int4|int8|num|date|ts|tstz)multirange)$') is not true) then
    raise exception using errcode = 'SW001', message = format('"%s" is no way to merge', left(merge::text, 200)),
      hint = 'It is an operator, or an object with one for each argument: replace, deep, append, union, range:<type>, multirange:<type>, min, max, sum. '
             'Or a function of yours: "function:stats.merge_units".';
  end if;
end $$;

-- Is this a JSON number between these two?
create or replace function shiftwork.is_within(value jsonb, least_ numeric, most numeric) returns boolean language sql immutable as $$
  select case when jsonb_typeof(value) = 'number' then (value #>> '{}')::numeric between least_ and most else false end
$$;
