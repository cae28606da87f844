-- How duties went: the last runs of each on each host, and figures of each day.

-- One that has no end is under way, or whoever was at it has died. Who has no worker did it from outside, by a command.
create table shiftwork.runs (
  id        bigint generated always as identity primary key,
  duty      text not null check (octet_length(duty) between 1 and 100),
  host      text not null,
  worker    bigint,
  began_at  timestamptz not null,
  ended_at  timestamptz,
  seconds   double precision,
  did       bigint,
  error     text,
  constraint what_has_ended_took_time check ((ended_at is null) = (seconds is null))
);
create index runs_of on shiftwork.runs (duty, host, id);

-- Runs that ended on a day, by UTC; `seconds` is all of them together.
create table shiftwork.run_days (
  duty      text not null,
  host      text not null,
  day       date not null,
  runs      bigint not null,
  errors    bigint not null,
  shortest  double precision not null,
  longest   double precision not null,
  seconds   double precision not null,
  did       bigint not null,
  primary key (duty, host, day)
);
