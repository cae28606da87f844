-- Part of a heartbeat, where rows have a lease of their own.
update <table> as job set <beat> = greatest(here.present, job.<beat>)
    from here, (
      select job.<id> as id from here cross join (select * from ours order by id) as hold cross join lateral (
               select * from <table> as job where job.<id> = hold.id and <held> /*shunned*/ for no key update of job skip locked) as job
      offset 0) as mine
   where job.<id> = mine.id returning job.<id>
