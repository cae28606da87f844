-- Say more of an entry of the logs of a row that is held, or fail.
with <here>, patience as materialized (select set_config('lock_timeout', '<long_patience>', true) as set), done as (
  update <table> as job
     set <logs>[array_lower(job.<logs>, 1) + hold.place] = (job.<logs>[array_lower(job.<logs>, 1) + hold.place]::jsonb || %s::jsonb)::<log_type>
    from here, (select %s::bigint as attempt, %s::int as place) as hold
   where job.<id> = %s::bigint and <held> and (select count(*) from patience) = 1 and hold.place between 0 and cardinality(job.<logs>) - 1 returning job.<id>
)
select coalesce(min(1)::text, <unless_one>)::int as place from done
