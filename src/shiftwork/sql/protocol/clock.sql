-- The only clock: the start of the statement, or of the transaction where a procedure has just committed. Tests replace it.
create or replace function shiftwork.clock() returns timestamptz language sql stable parallel safe
return greatest(now(), statement_timestamp());
