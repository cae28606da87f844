-- The code of prefetched rows is about to begin; those that are to be cancelled end here.
with <here>, <holds>, told as materialized (
  select job.<id> as id from here cross join (select * from hold order by id) as hold cross join lateral (
           select * from <table> as job where job.<id> = hold.id and <held> and <cancel> for no key update of job skip locked) as job
), done as (
  update <table> as job set <cancelling> from here, told where job.<id> = told.id returning job.<id> as id
)
select hold.id, case
         when done.id is not null then 'cancelled'
         else coalesce((select case when <cancel> then 'busy' else 'started' end from here, <table> as job
                         where job.<id> = hold.id and <held>), 'lost') end as answer
  from hold left join done on done.id = hold.id
