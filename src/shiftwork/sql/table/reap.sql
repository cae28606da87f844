-- Put back rows whose heartbeat is too old, or end them if that happened too often. What a handler has locked in its transaction is left alone.
with <here>, mine as materialized (
  select job.<id> as id, <attempt> as attempt, <number> as worker, here.present - <since> as age,
         case when <cancel> then 'canceled' when <resets> >= <max_resets> then 'failed' else 'queued' end as ending
    from here, <table> as job where <stalled> /*shunned*/ /*only*/
   order by job.<id> limit %s::int for update of job skip locked
), done as (
  update <table> as job set <resetting> from here, mine where job.<id> = mine.id
  returning job.<id> as id, mine.attempt, mine.worker, mine.ending, mine.age
), ended as materialized (
  <ending_sessions>
)
select done.id, done.attempt, done.worker, extract(epoch from done.age)::double precision as age,
       case done.ending when 'queued' then 'ready' when 'canceled' then 'cancelled' else 'failed' end as answer
  from done where (select count(*) from ended) >= 0
