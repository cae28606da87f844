-- Repositories, and a table of jobs over them. Only this is needed in the database: workers bring nothing of their own.
create table repositories (
  id   serial primary key,
  name text not null
);

create table example_jobs (
  id                serial primary key,
  state             text not null default 'queued',
  failure_message   text,
  queued_at         timestamptz default now(),
  started_at        timestamptz,
  finished_at       timestamptz,
  process_after     timestamptz,
  num_resets        int not null default 0,
  num_failures      int not null default 0,
  last_heartbeat_at timestamptz,
  execution_logs    json[],
  worker_hostname   text not null default '',
  cancel            boolean not null default false,
  repository_id     int not null references repositories
);

-- What the handler gets to see: a job with the name of its repository, under the name that the record asks for.
create view example_jobs_with_repository_name as
select job.*, repository.name as repository_name
  from example_jobs as job
  join repositories as repository on repository.id = job.repository_id;

-- What a finished job leaves behind, written in its own transaction.
create table visits (
  repository_id int not null references repositories,
  at            timestamptz not null default now()
);
