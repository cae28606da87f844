-- End an attempt within the caller's transaction: as settle does, but an outcome that is not written is an error, so that
-- nothing else of that transaction can be committed. request: as for settle, with one outcome. Says the state it led to.
create or replace function shiftwork.conclude(request jsonb) returns text language plpgsql as $$
declare
  told record;
begin
  select settled.id, settled.answer, settled.state, settled.problem into told from shiftwork.settle(request) as settled;
  if told.answer = 'settled' then
    return told.state;
  elsif told.answer = 'refused' then
    raise exception using errcode = 'SW001',
      message = format('the outcome of job %s cannot be written: %s', request #>> '{outcomes,0,id}', told.problem);
  end if;
  raise exception using errcode = 'SW003',
    message = format('attempt %s of job %s does not hold it any more', request #>> '{outcomes,0,attempt}', request #>> '{outcomes,0,id}'),
    hint = 'Its lease lapsed, or it was cancelled or finished: stop, and let the attempt that holds it do the work.';
end $$;
