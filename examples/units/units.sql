-- Statistical units: figures for each region, derived from its establishments in the background, where they are.
--
-- Whoever writes establishments does not wait for figures. Triggers note which regions have changed, and see to it that one job
-- waits that will collect them; whatever piles up until it runs, it takes at once.

create schema units;
create table units.establishment (id int generated always as identity primary key, region text not null, employees int not null);
create table units.figures (region text primary key, establishments int not null, employees int not null);

-- Regions that have changed. It is unlogged, since it is written so often: a crash of the server empties it. Then the mark is
-- gone too, the row without a region, and whoever collects knows that there may have been more.
create unlogged table units.changed (region text);
insert into units.changed values (null);


-- 1. A procedure that takes the payload, for each kind of job.

-- Derive the figures of some regions, or of all.
create procedure units.derive(payload jsonb, inout info jsonb) language plpgsql as $$
declare
  everything constant boolean := coalesce((payload ->> 'everything')::boolean, false);
  regions constant text[] := array(select jsonb_array_elements_text(coalesce(payload -> 'regions', '[]')));
begin
  delete from units.figures where everything or region = any(regions);
  insert into units.figures
  select region, count(*), sum(employees) from units.establishment where everything or region = any(regions) group by region;
  info := jsonb_build_object('everything', everything, 'regions', to_jsonb(regions));
end $$;

-- Collect what has changed, and let it be derived.
create procedure units.collect(payload jsonb) language plpgsql as $$
declare
  regions text[];
begin
  with gone as (delete from units.changed where region is not null returning region)
  select array_agg(distinct region order by region) into regions from gone;
  if not exists (select from units.changed where region is null) then
    insert into units.changed values (null);
    perform units.enqueue_derive(everything => true);
  elsif regions is not null then
    perform units.enqueue_derive(regions);
  end if;
end $$;


-- 2. A row in the registry for each.

select shiftwork.register_task('derive_units', handler => 'units.derive(jsonb, jsonb)', queue => 'analytics',
                               retry => '{"max_attempts": 3, "at_once": 3}', description => 'derives figures of regions');
select shiftwork.register_task('collect_units', handler => 'units.collect(jsonb)', queue => 'analytics', priority => -1,
                               description => 'collects the regions that have changed');


-- 3. A function to enqueue each. Both were written by `shiftwork sql enqueue-function`:
--
--    shiftwork sql enqueue-function derive_units 'regions? text[]' 'everything? boolean' \
--      --merge regions=union --merge everything=replace --function units.enqueue_derive
--    shiftwork sql enqueue-function collect_units 'reason text' --merge reason=replace --function units.enqueue_collect

create or replace function "units"."enqueue_derive"("regions" text[] default null, "everything" boolean default null) returns bigint
language sql as $$
  select sent.id from "shiftwork".enqueue('derive_units', jsonb_build_object()
    || case when $1 is null then '{}' else jsonb_build_object('regions', $1) end
    || case when $2 is null then '{}' else jsonb_build_object('everything', $2) end,
    unique_key => 'derive_units',
    unique_action => 'merge', merge => '{"regions": "union", "everything": "replace"}') as sent
$$;

create or replace function "units"."enqueue_collect"("reason" text) returns bigint
language sql as $$
  select sent.id from "shiftwork".enqueue('collect_units', jsonb_build_object('reason', $1),
    unique_key => 'collect_units',
    unique_action => 'merge', merge => '{"reason": "replace"}') as sent
$$;


-- 4. Triggers that note changes.

-- The waiting job is merged with, and not just found: so it is locked until this transaction has committed, and cannot begin
-- before what was noted here can be seen.
create function units.note_change() returns trigger language plpgsql as $$
begin
  if tg_op <> 'DELETE' then
    insert into units.changed select distinct region from fresh;
  end if;
  if tg_op <> 'INSERT' then
    insert into units.changed select distinct region from former;
  end if;
  perform units.enqueue_collect(lower(tg_op));
  return null;
end $$;

create trigger note_insert after insert on units.establishment
  referencing new table as fresh for each statement execute function units.note_change();
create trigger note_update after update on units.establishment
  referencing old table as former new table as fresh for each statement execute function units.note_change();
create trigger note_delete after delete on units.establishment
  referencing old table as former for each statement execute function units.note_change();
