-- What the indexes jobs_held and history_misfit call for a row that must not be: a job whose state does not fit the rest of it.
create or replace function shiftwork.refuse_state(job bigint, state shiftwork.job_state) returns void
language plpgsql immutable as $$
begin
  raise exception using errcode = 'check_violation', schema = 'shiftwork',
    message = format('job %s cannot be "%s" like this', job, state),
    hint = 'A job that is running or waiting has a worker and claimed_at, and no other in jobs has both. Finished ones stand in history, '
           'with finished_at and, unless they are completed, with an error. Let the verbs move jobs: cancel, revive, complete …';
end $$;
