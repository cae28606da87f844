-- How much waits, and since when.
select <name>::text as queue, count(*) as ready,
       coalesce(extract(epoch from statement_timestamp() - min(<since_when>)), 0)::double precision as oldest
  from <source> as job where <due> <where>
