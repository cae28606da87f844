-- What becomes of a job whose code failed, as the policy of its task has it: the same decision as in outcome.py and retry.py. Of an
-- error it is told the code, and how long to wait if the code itself said so; `chance` is from 0 up to 1. `wait` is in seconds.
create or replace function shiftwork.decide(
  failures int, max_attempts int, retry jsonb, code text, asked double precision default null,
  chance double precision default random(), out state shiftwork.job_state, out wait double precision, out counts boolean)
language plpgsql stable as $$
declare
  delays constant jsonb := coalesce(retry -> 'delays', '[30]');
  factor constant double precision := coalesce((retry ->> 'factor')::double precision, 2);
  cap constant double precision := coalesce((retry ->> 'cap')::double precision, 3600);
  jitter constant double precision := coalesce((retry ->> 'jitter')::double precision, 0.2);
  listed constant int := jsonb_array_length(delays);
  count constant int := greatest(failures + 1, 1);
begin
  counts := code not in ('SNOOZED', 'TASK_CANCELLED');
  if code = 'SNOOZED' then
    state := 'scheduled';
    wait := greatest(asked, 0);
  elsif code = 'TASK_CANCELLED' then
    state := 'cancelled';
  elsif failures + 1 >= max_attempts or code = 'POISON' or (jsonb_typeof(retry -> 'on') = 'array' and not retry -> 'on' ? code) then
    state := 'failed';
  else
    state := 'scheduled';
    if code = 'RETRY_LATER' and asked is not null then
      wait := greatest(asked, 0);
      return;
    end if;
    wait := (delays ->> (least(count, listed) - 1))::double precision;
    if count > listed and wait > 0 then
      -- By logarithms, since the power itself may be too large for a number.
      wait := case when cap = 0 or ln(wait) + (count - listed) * ln(factor) > ln(cap) then cap else wait * factor ^ (count - listed) end;
    end if;
    wait := least(wait, cap);
    if jitter > 1e-9 then                              -- less is nothing, and a product too small for a number is an error
      wait := wait * (1 - jitter + 2 * jitter * greatest(chance, 1e-9));
    end if;
  end if;
end $$;
