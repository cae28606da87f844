-- What the index jobs_misfit calls for a row that must not be: a job whose state does not fit its worker and the time of its claim.
create or replace function shiftwork.refuse_state(job bigint, state shiftwork.job_state) returns void
language plpgsql immutable as $$
begin
  raise exception using errcode = 'check_violation', schema = 'shiftwork', table = 'jobs', constraint = 'jobs_misfit',
    message = format('job %s cannot be "%s" like this', job, state),
    hint = 'A job that is running or waiting has a worker and claimed_at, no other has both, and finished ones stand in history. '
           'Let the verbs move jobs: cancel, revive, complete …';
end $$;
