-- A single enqueue pays for every index that it opens a fiftieth of its time. Two take the place of three, which go in a later step: whoever
-- has read `jobs` and then writes there would wait for us while we wait for him. To be built they read all of it, while nobody writes.

-- What somebody holds, by worker and claim; and the guard of what a row may be: a job that is held has a worker and the time of its claim, no
-- other has both, and no job here is finished. What is otherwise gets as far as the last column, and no farther. A CHECK would be read from
-- its text again by every statement that writes here. `is true` keeps fences away, which name a worker and are looked up by id; those which name a
-- state as well have to say `is true` of that by themselves.
create index jobs_held on shiftwork.jobs (state, worker, claim, (
  case when state = any (case when claimed_at is null or worker is null
                              then '{running,waiting,completed,failed,cancelled,expired}'::shiftwork.job_state[]
                              else '{blocked,scheduled,ready,completed,failed,cancelled,expired}' end)
       then shiftwork.refuse_state(id, state) is null end))
  where state >= 'running' or (worker is not null) is true;

-- What has a deadline, by its state: those that run have met it, however long ago it was.
create index jobs_deadline on shiftwork.jobs (state, expires_at) where expires_at is not null;
