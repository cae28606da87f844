-- A single enqueue pays for everything that the table has: each index a fiftieth of its time, each function in a check half a hundredth.

-- What somebody holds, by worker and claim; and the guard of what a row may be: a job that is held has a worker and the time of its claim, no
-- other has both, and no job here is finished. What is otherwise gets as far as the last column, and no farther: a CHECK would be read from
-- its text again by every statement that writes here, and an index of its own was opened by each. `is true` keeps fences away, which name a
-- worker and are looked up by id. What has a deadline is found by its state. To be built they read all of `jobs`, while nobody writes there.
create index jobs_held on shiftwork.jobs (state, worker, claim, (
  case when state = any (case when claimed_at is null or worker is null
                              then '{running,waiting,completed,failed,cancelled,expired}'::shiftwork.job_state[]
                              else '{blocked,scheduled,ready,completed,failed,cancelled,expired}' end)
       then shiftwork.refuse_state(id, state) is null end))
  where state >= 'running' or (worker is not null) is true;
create index jobs_deadline on shiftwork.jobs (state, expires_at) where expires_at is not null;
drop index shiftwork.jobs_running, shiftwork.jobs_expiring, shiftwork.jobs_misfit;

-- The same as before, in fewer words.
alter domain shiftwork.task_name drop constraint task_name_check;
alter domain shiftwork.task_name add constraint task_name_check check (value <> '' and octet_length(value) <= 200) not valid;
alter domain shiftwork.queue_name drop constraint queue_name_check;
alter domain shiftwork.queue_name add constraint queue_name_check check (value <> '' and octet_length(value) <= 100) not valid;
alter domain shiftwork.payload drop constraint payload_check;
alter domain shiftwork.payload add constraint payload_check check (value @> '{}') not valid;           -- only an object contains that

-- Few tasks to a page: a small table is read whole, and a registry of a hundred tasks would be, by every enqueue.
alter table shiftwork.tasks set (fillfactor = 10);

-- Whether any task has ever been registered with a queue, a priority or a number of attempts, and whether any has with a priority, which few
-- have: who enqueues need not look for what nobody has said. Sequences, so that everybody sees it before the task itself can be seen. They
-- have no value until then, and keep it. The function is written in the protocol, and re-created with it.
create sequence shiftwork.registered;
create sequence shiftwork.registered_priority;
create function shiftwork.note_registered() returns trigger language plpgsql as $$ begin return null; end $$;
create trigger note_registered after insert or update on shiftwork.tasks
  for each row when (new.queue is not null or new.priority is not null or new.max_attempts is not null)
  execute function shiftwork.note_registered();
alter table shiftwork.tasks enable always trigger note_registered;         -- also where rows come by replication, which carries no sequences
select setval('shiftwork.registered', 1) from shiftwork.tasks where coalesce(queue::text, priority::text, max_attempts::text) is not null limit 1;
select setval('shiftwork.registered_priority', 1) from shiftwork.tasks where priority is not null limit 1;
