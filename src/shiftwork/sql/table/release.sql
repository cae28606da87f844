-- Give rows back. Against what took its process down that is counted, and too often is an end.
with <here>, hold as materialized (
  select (one ->> 0)::bigint as id, (one ->> 1)::bigint as attempt, one ->> 2 as why from jsonb_array_elements(%s::jsonb) as one
), mine as materialized (
  select job.<id> as id, hold.why, case when <cancel> then 'canceled' when hold.why is not null and <resets> >= <max_resets> then 'failed'
                                         else 'queued' end as ending
    from here cross join (select * from hold order by id) as hold cross join lateral (
           select * from <table> as job where job.<id> = hold.id and <held> for no key update of job skip locked) as job
), done as (
  update <table> as job set <releasing> from here, mine where job.<id> = mine.id returning job.<id> as id, mine.ending
)
select hold.id, case done.ending
         when 'queued' then 'released' when 'failed' then 'failed' when 'canceled' then 'cancelled'
         else case when exists (select from here, <table> as job where job.<id> = hold.id and <held>) then 'busy' else 'lost' end
       end as answer
  from hold left join done on done.id = hold.id
