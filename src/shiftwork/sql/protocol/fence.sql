-- Go on only if this attempt still holds its job: otherwise an error, and with it the end of the caller's transaction. While
-- that is open the job's row stays locked, so nobody can take the job away before it commits.
create or replace function shiftwork.fence(job bigint, attempt int) returns void
language plpgsql as $$
begin
  perform from shiftwork.jobs as held
    where held.id = fence.job and held.attempt = fence.attempt and (held.state = 'running') is true for no key update;
  if not found then
    raise exception using errcode = 'SW003',
      message = format('attempt %s of job %s does not hold it any more', attempt, job),
      hint = 'Its lease lapsed, or it was cancelled or finished: stop, and let the attempt that holds it do the work.';
  end if;
end $$;
