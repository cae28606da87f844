-- How attempts ended: what becomes of each row that is still held under its fence.
with <here>, told as materialized (
  select one.id, one.attempt, one.state, one.failure, one.error, one.delay, one.run_at
    from jsonb_to_recordset(%s::jsonb) as one (
      id bigint, attempt bigint, state text, failure boolean, error jsonb, delay double precision, run_at timestamptz)
), mine as materialized (
  select job.<id> as id, <ending> as ending, <counts> as counts, <message> as message, <wait> as wait
    from here cross join (select * from told order by id) as hold cross join lateral (
           select * from <table> as job where job.<id> = hold.id and <held> for no key update of job <skipping>) as job
), done as (
  update <table> as job set <settling> from here, mine where job.<id> = mine.id
  returning job.<id> as id, <told_state> as state
)
