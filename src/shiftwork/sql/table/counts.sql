-- How many rows there are in each state.
select job.<state>::text as state, count(*) as number from <table> as job
 where %s::text[] is null or job.<state>::text = any(%s::text[]) group by job.<state>
