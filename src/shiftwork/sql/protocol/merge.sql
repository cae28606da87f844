-- Merging the payload of a pending job with that of a newcomer, argument by argument, with a declared operator.

create or replace function shiftwork.merge_deep(old jsonb, new jsonb) returns jsonb language sql immutable as $$
  select case
    when jsonb_typeof(old) = 'object' and jsonb_typeof(new) = 'object' then (
      select coalesce(jsonb_object_agg(key, case
               when former.value is null then latter.value
               when latter.value is null then former.value
               else shiftwork.merge_deep(former.value, latter.value) end), '{}')
        from jsonb_each(old) as former full join jsonb_each(new) as latter using (key))
    else new end
$$;

create or replace function shiftwork.merge_value(operator text, old jsonb, new jsonb) returns jsonb
language plpgsql stable as $$
declare
  merged jsonb;
  kind text := split_part(operator, ':', 2);
begin
  if old is null or new is null or jsonb_typeof(old) = 'null' or jsonb_typeof(new) = 'null' then
    return coalesce(nullif(new, 'null'), nullif(old, 'null'), 'null');
  end if;
  case split_part(operator, ':', 1)
    when 'replace' then
      return new;
    when 'deep' then
      return shiftwork.merge_deep(old, new);
    when 'append' then
      return case jsonb_typeof(old) when 'array' then old else jsonb_build_array(old) end
          || case jsonb_typeof(new) when 'array' then new else jsonb_build_array(new) end;
    when 'union' then
      select jsonb_agg(item order by place) into merged from (
        select item, min(place) as place
          from jsonb_array_elements(shiftwork.merge_value('append', old, new)) with ordinality as one (item, place)
         group by item) as distinct_items;
      return coalesce(merged, '[]');
    when 'min', 'max', 'sum' then
      if jsonb_typeof(old) <> jsonb_typeof(new) or jsonb_typeof(new) not in ('number', 'string')
         or (operator = 'sum' and jsonb_typeof(new) <> 'number') then
        raise exception using errcode = 'SW001',
          message = format('%s cannot be taken of these values', operator), hint = 'It takes two numbers or two texts; sum, numbers.';
      end if;
      if operator = 'sum' then
        return to_jsonb((old #>> '{}')::numeric + (new #>> '{}')::numeric);
      end if;
      return case when (old < new) = (operator = 'min') then old else new end;
    when 'range', 'multirange' then
      if kind not in ('int4range', 'int8range', 'numrange', 'daterange', 'tsrange', 'tstzrange',
                      'int4multirange', 'int8multirange', 'nummultirange', 'datemultirange', 'tsmultirange',
                      'tstzmultirange') or (kind like '%multirange') <> (operator like 'multirange%') then
        raise exception using errcode = 'SW001', message = format('"%s" is no %s', kind, split_part(operator, ':', 1)),
          hint = 'Name its type, as in "range:daterange" or "multirange:datemultirange".';
      end if;
      begin
        execute format(case when kind like '%multirange' then 'select to_jsonb(($1::%1$s + $2::%1$s)::text)'
                            else 'select to_jsonb(range_merge($1::%1$s, $2::%1$s)::text)' end, kind)
           into merged using old #>> '{}', new #>> '{}';
      exception when data_exception then
        -- Not in the words of the server, which would show a stored value to whoever enqueues.
        raise exception using errcode = 'SW001', message = format('what is to be merged is no %s', kind);
      end;
      return merged;
    else
      raise exception using errcode = 'SW001', message = format('"%s" is no merge operator', operator),
        hint = 'There are: replace, deep, append, union, range:<type>, multirange:<type>, min, max, sum.';
  end case;
end $$;

-- `how` is one operator for all arguments, or an object with one for each (what it does not name is replaced). One that
-- begins with "function:" names a function (old jsonb, new jsonb) of the user's; only the registry may say so.
create or replace function shiftwork.merge_payload(how jsonb, old jsonb, new jsonb, registered boolean) returns jsonb
language plpgsql stable as $$
declare
  merged jsonb;
  one record;
begin
  if how is null then
    return new;
  end if;
  if jsonb_typeof(how) = 'string' and how #>> '{}' like 'function:%' then
    if not registered then
      raise exception using errcode = 'SW001', message = 'a merge function must come from the registry',
        hint = 'Let an operator write it to shiftwork.tasks.merge.';
    end if;
    execute format('select %s($1, $2)', (substr(how #>> '{}', 10)::regproc)) into merged using old, new;
  elsif jsonb_typeof(how) = 'string' then
    merged := old || new;
    for one in select key from jsonb_object_keys(old) as key where new ? key loop
      merged := jsonb_set(merged, array[one.key], shiftwork.merge_value(how #>> '{}', old -> one.key, new -> one.key));
    end loop;
  elsif jsonb_typeof(how) = 'object' then
    merged := old || new;
    for one in select key, value from jsonb_each_text(how) where old ? key or new ? key loop
      merged := jsonb_set(merged, array[one.key], shiftwork.merge_value(one.value, old -> one.key, new -> one.key));
    end loop;
  else
    raise exception using errcode = 'SW001', message = 'merge takes an operator, or an object of operators by argument';
  end if;
  if jsonb_typeof(merged) is distinct from 'object' then
    raise exception using errcode = 'SW001', message = format('merging with %s gave no JSON object', how);
  end if;
  return merged;
end $$;
