-- What there is of a table and of its view: columns, with their types and the values of enums; triggers; indexes.
with named as (
  select 'table' as what, to_regclass(%s) as relation union all select 'view', to_regclass(%s)
)
select named.what, attribute.attname as name, format_type(kind.oid, case when kind.oid = attribute.atttypid then attribute.atttypmod else kind.mod end) as type,
       attribute.attnotnull as is_required, labels.all as labels, attribute.attnum as place
  from named
  join pg_catalog.pg_attribute as attribute on attribute.attrelid = named.relation and attribute.attnum > 0 and not attribute.attisdropped
  cross join lateral (
    select coalesce(nullif(own.typbasetype, 0), own.oid) as oid, own.typtypmod as mod from pg_catalog.pg_type as own
     where own.oid = attribute.atttypid) as kind
  left join lateral (
    select array_agg(label.enumlabel::text) as all from pg_catalog.pg_enum as label where label.enumtypid = kind.oid) as labels on true
union all
select 'trigger', made.tgname, pg_get_triggerdef(made.oid), false, null, 0
  from named join pg_catalog.pg_trigger as made on made.tgrelid = named.relation
 where named.what = 'table' and not made.tgisinternal and made.tgenabled <> 'D'
union all
select 'index', index.relname, pg_get_indexdef(made.indexrelid), false, null, 0
  from named join pg_catalog.pg_index as made on made.indrelid = named.relation
  join pg_catalog.pg_class as index on index.oid = made.indexrelid
 where named.what = 'table' and made.indisvalid
 order by what, place
