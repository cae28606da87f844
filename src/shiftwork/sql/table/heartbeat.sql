-- Renew what is held, find out what is not any more or is to be cancelled, and give back what was taken without the worker's knowing.
-- Locks are taken in the order of ids, and nobody is waited for.
with <here>, <holds>, ours as materialized (
  select job.<id> as id, hold.attempt, <cancel> as asked from here cross join hold cross join lateral (
           select * from <table> as job where job.<id> = hold.id and <held> offset 0) as job
), renewed as (
  <renewing>
), stray as materialized (
  select job.<id> as id from here, <table> as job
   where <strays> /*shunned*/ and job.<id> <> all(array(select hold.id from hold))
   order by job.<id> for no key update of job skip locked
), returned as (
  update <table> as job set <returning> from here, stray as mine where job.<id> = mine.id returning job.<id> as id
), lost as (
  select hold.id, coalesce((select case when job.<state>::text in ('completed', 'failed', 'canceled') then 'ended' else 'taken' end
                              from <table> as job where job.<id> = hold.id), 'missing') as why
    from hold where not exists (select from ours where ours.id = hold.id and ours.attempt = hold.attempt)
)
select jsonb_build_object(
         'alive', true,
         'lost', coalesce((select jsonb_agg(lost.id) from lost), '[]'),
         'why', coalesce((select jsonb_object_agg(lost.id, lost.why) from lost), '{}'),
         'cancel', coalesce((select jsonb_agg(jsonb_build_object('id', ours.id, 'reason', null)) from ours where ours.asked), '[]'),
         'strays', coalesce((select jsonb_agg(returned.id) from returned), '[]'),
         'reap', exists (select from here, <table> as job where <stalled> /*shunned*/
                            and job.<id> <> all(array(select ours.id from ours))),
         'notifications', pg_notification_queue_usage())::text as answer
