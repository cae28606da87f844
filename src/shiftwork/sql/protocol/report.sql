-- What handlers say while they run: log lines and how far they are, kept apart from the job's row, which they may have locked.
--
-- request: {"worker": 17, "lines": [[job, attempt, seconds ago, level, message], …], "progress": [[job, attempt, fraction, message], …]}
--
-- Written only for attempts that this worker holds, or was the last to hold: what a transactional handler said may come after
-- its end. Their rows are read and not locked. Of each attempt the first thousand lines are kept, and one that says that there
-- were more; of several words about its progress the last counts.
-- The answer: {"lost": [[job, attempt], …]}, of which nothing was written.
create or replace function shiftwork.report(request jsonb) returns jsonb
language plpgsql set plan_cache_mode = force_generic_plan set jit = off
set enable_seqscan = off set enable_bitmapscan = off as $$
declare
  present constant timestamptz := shiftwork.clock();
  holder constant bigint := (request ->> 'worker')::bigint;
  most constant int := 1000;
  lines constant jsonb := coalesce(request -> 'lines', '[]');
  latest constant jsonb := coalesce(request -> 'progress', '[]');
  ids bigint[];
  attempts int[];
  lost jsonb;
begin
  select array_agg(said.job) filter (where held.id is not null), array_agg(said.attempt) filter (where held.id is not null),
         coalesce(jsonb_agg(jsonb_build_array(said.job, said.attempt)) filter (where held.id is null), '[]')
    into ids, attempts, lost
    from (select distinct (one ->> 0)::bigint as job, (one ->> 1)::int as attempt
            from jsonb_array_elements(lines || latest) as one) as said
    left join lateral (
      select coalesce(
        (select job.id from shiftwork.jobs as job
          where job.id = said.job and job.attempt = said.attempt and job.worker = holder),
        (select ended.id from shiftwork.history as ended
          where ended.id = said.job and ended.attempt = said.attempt and ended.worker = holder limit 1)) as id
      offset 0) as held on true;

  if jsonb_array_length(lines) > 0 then
    insert into shiftwork.logs (job, attempt, at, level, message)
    with held as materialized (
      select one.job, one.attempt, (
               select count(*) from (select from shiftwork.logs as earlier
                                      where earlier.job = one.job and earlier.attempt = one.attempt limit most + 1) as kept) as kept
        from unnest(ids, attempts) as one (job, attempt)
    ), said as (
      select held.job, held.attempt, line.value, line.ordinality,
             held.kept + row_number() over (partition by held.job, held.attempt order by line.ordinality) as place
        from jsonb_array_elements(lines) with ordinality as line
        join held on held.job = (line.value ->> 0)::bigint and held.attempt = (line.value ->> 1)::int
    )
    select said.job, said.attempt,
           present - least(greatest(coalesce((said.value ->> 2)::double precision, 0), 0), 86400) * interval '1 second',
           case when said.place <= most then left(coalesce(said.value ->> 3, 'info'), 20) else 'warning' end,
           case when said.place <= most then left(coalesce(said.value ->> 4, ''), 10000)
                else format('what follows is not kept: an attempt has %s lines', most) end
      from said where said.place <= most + 1
     order by said.ordinality;
  end if;

  if jsonb_array_length(latest) > 0 then
    insert into shiftwork.progress as former (job, attempt, fraction, message, at)
    select distinct on (held.job) held.job, held.attempt,
           case when said.value ->> 2 is not null then least(greatest(round((said.value ->> 2)::numeric, 6), 0), 1) end,      -- what is next to nothing would not fit
           left(said.value ->> 3, 10000), present
      from jsonb_array_elements(latest) with ordinality as said
      join unnest(ids, attempts) as held (job, attempt)
        on held.job = (said.value ->> 0)::bigint and held.attempt = (said.value ->> 1)::int
     order by held.job, said.ordinality desc
    on conflict (job) do update
      set attempt = excluded.attempt, fraction = excluded.fraction, message = excluded.message, at = excluded.at
      where former.attempt <= excluded.attempt;
  end if;
  return jsonb_build_object('lost', lost);
end $$;
