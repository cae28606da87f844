-- Enter tasks in the registry, as a worker does when it starts: [{"name": "send_email", "queue": "mail", "priority": 0,
-- "max_attempts": 5, "retry": {…}, "max_resets": 2, "on_lost": "requeue", "unique_scope": "pending", "unique_action": "return",
-- "unique_window": 3600, "description": "…"}, …]. What is left out of a task stays as it is; null takes it back. How payloads
-- are merged and what runs in the database is for operators to say, and not touched. What says nothing new writes nothing.
-- Answers how many were written.
create or replace function shiftwork.declare_tasks(tasks jsonb) returns int
language plpgsql security definer set search_path = shiftwork, pg_temp as $$
declare
  written int;
begin
  if jsonb_typeof(tasks) is distinct from 'array' then
    raise exception using errcode = 'SW001', message = 'declare_tasks takes a JSON array of tasks';
  end if;
  -- In the order of names, so that workers which start together wait for each other and never in a circle.
  with told as (
    select distinct on (one.value ->> 'name') one.value as said
      from jsonb_array_elements(tasks) with ordinality as one
     order by one.value ->> 'name', one.ordinality desc
  ), wished as (
    select told.said ->> 'name' as name, wish.*
      from told left join shiftwork.tasks as known on known.name = told.said ->> 'name'
           cross join lateral jsonb_to_record(
             jsonb_build_object(
               'queue', known.queue, 'priority', known.priority, 'max_attempts', known.max_attempts, 'retry', known.retry,
               'max_resets', known.max_resets, 'on_lost', known.on_lost, 'unique_scope', known.unique_scope,
               'unique_action', known.unique_action, 'unique_window', extract(epoch from known.unique_window),
               'description', known.description) || told.said
           ) as wish (queue text, priority int, max_attempts int, retry jsonb, max_resets int, on_lost text,
                      unique_scope shiftwork.unique_scope, unique_action text, unique_window double precision, description text)
  )
  insert into shiftwork.tasks as known (
    name, queue, priority, max_attempts, retry, max_resets, on_lost, unique_scope, unique_action, unique_window, description)
  select fresh.* from (
    select wished.name, wished.queue, wished.priority, wished.max_attempts, wished.retry, wished.max_resets,
           coalesce(wished.on_lost, 'requeue'), wished.unique_scope, wished.unique_action,
           wished.unique_window * interval '1 second', wished.description
      from wished) as fresh (name, queue, priority, max_attempts, retry, max_resets, on_lost, unique_scope, unique_action,
                             unique_window, description)
   where not exists (
     select from shiftwork.tasks as same
      where same.name = fresh.name
        and (same.queue, same.priority, same.max_attempts, same.retry, same.max_resets, same.on_lost, same.unique_scope,
             same.unique_action, same.unique_window, same.description)
            is not distinct from
            (fresh.queue, fresh.priority, fresh.max_attempts, fresh.retry, fresh.max_resets, fresh.on_lost, fresh.unique_scope,
             fresh.unique_action, fresh.unique_window, fresh.description))
   order by fresh.name collate "C"
  on conflict (name) do update
    set queue = excluded.queue, priority = excluded.priority, max_attempts = excluded.max_attempts, retry = excluded.retry,
        max_resets = excluded.max_resets, on_lost = excluded.on_lost, unique_scope = excluded.unique_scope,
        unique_action = excluded.unique_action, unique_window = excluded.unique_window, description = excluded.description;
  get diagnostics written = row_count;
  return written;
end $$;
