-- Begin an entry of the logs of a row that is held: its place, or an error.
with <here>, patience as materialized (select set_config('lock_timeout', '<long_patience>', true) as set), done as (
  update <table> as job
     set <logs> = coalesce(job.<logs>, '{}') || array[(%s::jsonb || jsonb_build_object('startTime', here.present))::<log_type>]
    from here, (select %s::bigint as attempt) as hold
   where job.<id> = %s::bigint and <held> and (select count(*) from patience) = 1 returning cardinality(job.<logs>) - 1 as place
)
select coalesce(min(done.place)::text, <unless_one>)::int as place from done
