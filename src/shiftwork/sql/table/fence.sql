-- Fail unless this attempt holds the row. Until the transaction ends, no resetter takes it; heartbeats, and people who cancel, get past.
select <unless_one> from (
  select from <table> as job, (select %s::bigint as attempt) as hold
   where job.<id> = %s::bigint and job.<state> = 'processing' and <fence> for key share of job) as done
