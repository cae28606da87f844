-- What jobs_held and jobs_deadline do now.
drop index shiftwork.jobs_running, shiftwork.jobs_expiring, shiftwork.jobs_misfit;

-- The same as before with fewer functions, each of which is got ready anew for every job that is enqueued.
alter domain shiftwork.task_name drop constraint task_name_check;
alter domain shiftwork.task_name add constraint task_name_check check (value <> '' and octet_length(value) <= 200) not valid;
alter domain shiftwork.queue_name drop constraint queue_name_check;
alter domain shiftwork.queue_name add constraint queue_name_check check (value <> '' and octet_length(value) <= 100) not valid;
alter domain shiftwork.payload drop constraint payload_check;
alter domain shiftwork.payload add constraint payload_check check (value @> '{}') not valid;           -- only an object contains that
