-- What became of a job that was to be enqueued. A record without a name would be described anew for every call, which takes a single enqueue a
-- fortieth of its time.
create type shiftwork.enqueued as (id bigint, outcome text);
