-- Tasks whose code is a routine in this database: what runs around it, how long it may take, and whether it commits by itself.
alter table shiftwork.tasks
  add column before   text,
  add column after    text,
  add column commits  boolean not null default false,
  add column timeout  interval check (timeout > interval '0'),
  add constraint who_commits_is_a_routine check (handler is not null or not commits);
