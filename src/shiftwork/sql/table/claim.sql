-- Take rows that are due, in their order, as far as nobody has locked them; and say what else there is.
-- A row that was to be cancelled before anybody took it ends here.
with here as materialized (
  select statement_timestamp() as present, %s::text as holder, pg_advisory_xact_lock_shared(%s::bigint)
), picked as materialized (
  select array(<candidates> order by <order> limit %s::int for no key update of <locked> skip locked) as ids
), taken as (
  update <table> as job set <claiming>
    from here, picked, unnest(picked.ids) with ordinality as place (id, turn)
   where job.<id> = place.id
  returning place.turn, job.<id> as id, <taken>
)
select told.id, <name>::text, <name>::text, 0, told.payload, told.attempt, told.failures, told.resets, <attempts>, told.run_at,
       told.created_at, null::bigint, null::text, null::text[]
  from (
    select taken.turn, taken.id, '{"<argument>":' || <record> || '}' as payload, taken.attempt, taken.failures, taken.resets,
           taken.run_at, taken.created_at
      from taken where taken.is_live
    union all
    select null, 0, jsonb_build_object(
             'claim', <present_micros>, 'at', <present_micros>, 'more', cardinality(picked.ids) >= %s::int,
             'next_due_in', case when cardinality(picked.ids) < %s::int then
               case when exists (<candidates> and job.<id> <> all(picked.ids)) then 0 else <next_due> end end)::text, 0, 0, 0, 0, 0
      from here, picked
  ) as told
 order by told.turn nulls last
