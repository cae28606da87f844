-- Append what handlers said to the logs of their rows; somebody who has locked a row is waited for, but not for long.
with <here>, patience as materialized (select set_config('lock_timeout', '<patience>', true) as set),
said as materialized (
  select (one ->> 0)::bigint as id, (one ->> 1)::bigint as attempt, json_agg(json_build_object(
           'key', 'log.' || (one ->> 3), 'command', '[]'::json,
           'startTime', here.present - coalesce((one ->> 2)::double precision, 0) * interval '1 second', 'out', one ->> 4)
           order by turn) as lines
    from here, jsonb_array_elements(%s::jsonb) with ordinality as lines (one, turn) group by 1, 2
), done as (
  update <table> as job
     set <logs> = (coalesce(job.<logs>, '{}') || array(select line::<log_type> from json_array_elements(hold.lines) as line))[1:<most_lines>]
    from here, said as hold
   where job.<id> = hold.id and <same> and (select count(*) from patience) = 1 returning job.<id> as id
)
select jsonb_build_object('lost', coalesce(jsonb_agg(jsonb_build_array(said.id, said.attempt)), '[]'))::text as answer
  from said where said.id <> all(array(select done.id from done))
