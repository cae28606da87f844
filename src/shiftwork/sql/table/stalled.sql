-- Rows that are to be put back.
select job.<id> as id from (select statement_timestamp() as present) as here, <table> as job where <stalled> /*shunned*/ order by job.<id> limit 1000
