-- After settle: the answers, one row for those with the same; what was not written is looked at again.
select one.answer, one.state, null::text as problem, json_agg(one.id)::text as ids
  from (
    select told.id, done.state, case
             when done.id is not null then 'settled'
             when told.state in ('completed', 'failed', 'cancelled', 'scheduled') is not true then 'refused'
             else coalesce((select case when <held> then 'busy' when <already> then 'already' end
                              from here, <table> as job, (select told.attempt) as hold where job.<id> = told.id), 'lost') end as answer
      from told left join done on done.id = told.id
  ) as one
 group by one.answer, one.state
