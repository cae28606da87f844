-- How many jobs may run at once, in the whole cluster: of a queue, of a task, or over all (which has no name).
create table shiftwork.limits (
  kind         text not null check (kind in ('queue', 'task', 'all')),
  name         text not null check (octet_length(name) between (kind <> 'all')::int and 200),
  max_running  int not null check (max_running between 1 and 10000),
  primary key (kind, name)
);

-- A limit, as so many permits. A running job holds one of each limit that it falls under; one without a job is free. A
-- surplus one goes when it comes back: its limit was lowered while it was lent.
create table shiftwork.permits (
  id       bigint generated always as identity primary key,
  kind     text not null,
  name     text not null,
  job      bigint,
  surplus  boolean not null default false
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500, autovacuum_vacuum_cost_delay = 0);
create index permits_free on shiftwork.permits (kind, name) where job is null;
create index permits_lent on shiftwork.permits (job) where job is not null;

-- Not only queues and tasks can be paused, but a worker, by its id, and everything.
alter table shiftwork.pauses drop constraint pauses_kind_check, drop constraint pauses_name_check,
  add constraint pauses_kind_check check (kind in ('queue', 'task', 'worker', 'all')),
  add constraint pauses_name_check check (octet_length(name) between (kind <> 'all')::int and 200);
