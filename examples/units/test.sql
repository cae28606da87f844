-- A test in one transaction: enqueue, process, look, and take all of it back. Run it with psql, as often as you like.

begin;

insert into units.establishment (region, employees) values ('test north', 3), ('test north', 4), ('test south', 5);
call shiftwork.process_jobs(queue => 'analytics');

do $$
begin
  assert (select employees from units.figures where region = 'test north') = 7, 'the figures of a region are derived';
  assert (select count(*) from shiftwork.history where task = 'collect_units' and state = 'completed') >= 1, 'its job is completed';
end $$;

rollback;
