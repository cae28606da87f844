-- What one worker does for all, and what each worker says of itself.

-- Duties: how often, when next, and who is at it now. Whoever holds one and loses its lease holds it no more.
create table shiftwork.duties (
  name      text primary key check (octet_length(name) between 1 and 100),
  every     interval not null check (every > interval '0'),
  due_at    timestamptz not null default shiftwork.clock(),
  worker    bigint,
  taken_at  timestamptz,
  ended_at  timestamptz,
  seconds   double precision,
  did       bigint,
  error     text,
  constraint taken_by_somebody check ((worker is null) = (taken_at is null))
);
insert into shiftwork.duties (name, every) values
  ('expire', '1 minute'), ('reap', '10 minutes'), ('extend_history', '1 hour'), ('purge', '1 hour'), ('forget_workers', '1 hour');

-- What workers said of themselves with their heartbeats, every five seconds at most. Memory in bytes, CPU in seconds
-- since the process began.
create table shiftwork.snapshots (
  worker     bigint not null,
  at         timestamptz not null,
  running    int not null,
  held       int not null,
  unwritten  int not null,
  jobs       bigint not null,
  memory     bigint,
  cpu        double precision,
  primary key (worker, at)
);
create index snapshots_at on shiftwork.snapshots (at);

-- How many days workers that are gone, and snapshots, are kept; with 0 no snapshots are written.
insert into shiftwork.settings values ('keep_workers', '7');
alter table shiftwork.settings add constraint keep_workers_is_days check (
  name <> 'keep_workers' or (jsonb_typeof(value) = 'number' and value between '0' and '3660')
);
