-- What this worker still holds is anybody's now.
with <here>, gone as (
  update <table> as job set <beat> = 'epoch' from here
   where job.<state> = 'processing' and job.<holder> = here.holder returning 1)
select count(*) > 0 as left from gone
