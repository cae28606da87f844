-- What others write by hand has an end, and a size: tags of megabytes could not be read any more, by anybody who lists jobs.
alter table shiftwork.pauses add constraint pauses_until_check check (isfinite(until)) not valid;
alter table shiftwork.child_ends add constraint child_ends_at_check check (isfinite(at)) not valid;
alter domain shiftwork.tags add constraint tags_size_check
  check (cardinality(value) = 0 or octet_length(array_to_string(value, '')) <= 1048576) not valid;
