-- Part of reap: rows that are too old and locked are in the hands of a worker that was stopped, if none of its rows is any younger and
-- none of its sessions has said anything since: for a row that its own handler has changed cannot be renewed either. Its sessions are found
-- by their name, and no others; one that is just writing an outcome is let be.
select pg_terminate_backend(activity.pid, 1000)
    from pg_catalog.pg_stat_activity as activity
   where activity.datname = current_database() and activity.pid <> pg_backend_pid()
     and activity.application_name in (
           select <session> || min(<number>) from here, <table> as job
            where job.<state> = 'processing'
            group by job.<holder>
           having bool_and(<stalled>) and bool_or(job.<id> <> all(array(select mine.id from mine))))
     and not exists (
           select from pg_catalog.pg_stat_activity as heard
            where heard.datname = current_database() and heard.application_name = activity.application_name
              and heard.state_change > (select here.present from here) - <lease>)
     and (activity.state like 'idle in transaction%%' or activity.xact_start < clock_timestamp() - interval '5 seconds')
     and pg_has_role(activity.usesysid, 'USAGE')
