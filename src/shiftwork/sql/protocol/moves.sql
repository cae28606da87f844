-- Every legal move. A test walks all pairs of state and verb, and compares what happens with this.
delete from shiftwork.moves;
insert into shiftwork.moves (verb, before, after) values
  ('enqueue', null, 'ready'), ('enqueue', null, 'scheduled'),
  ('enqueue', 'ready', 'ready'), ('enqueue', 'ready', 'scheduled'),           -- replaced or merged
  ('enqueue', 'scheduled', 'ready'), ('enqueue', 'scheduled', 'scheduled'), ('enqueue', 'blocked', 'blocked'),
  ('promote', 'scheduled', 'ready'),
  ('claim', 'scheduled', 'running'), ('claim', 'scheduled', 'ready'),         -- a claim promotes first
  ('claim', 'ready', 'running'),
  ('start', 'running', 'running'), ('start', 'running', 'expired'), ('start', 'running', 'cancelled'),
  ('settle', 'running', 'completed'), ('settle', 'running', 'failed'),
  ('settle', 'running', 'cancelled'), ('settle', 'running', 'scheduled'), ('settle', 'running', 'waiting'),
  ('gather', 'waiting', 'completed'), ('gather', 'waiting', 'failed'),
  ('gather', 'waiting', 'waiting'),                                           -- a child has failed, and others live
  ('release', 'running', 'ready'), ('release', 'running', 'cancelled'),
  ('release', 'running', 'failed'),                                           -- crashed once too often
  ('heartbeat', 'running', 'ready'), ('heartbeat', 'running', 'cancelled'),   -- strays
  ('reap', 'running', 'ready'), ('reap', 'running', 'failed'), ('reap', 'running', 'cancelled'),
  ('expire', 'ready', 'expired'), ('expire', 'scheduled', 'expired'), ('expire', 'blocked', 'expired'),
  ('expire', 'ready', 'cancelled'), ('expire', 'scheduled', 'cancelled'),     -- a signal that came too late for a holder
  ('expire', 'blocked', 'cancelled'), ('expire', 'waiting', 'cancelled'),
  ('cancel', 'blocked', 'cancelled'), ('cancel', 'scheduled', 'cancelled'),
  ('cancel', 'ready', 'cancelled'), ('cancel', 'waiting', 'cancelled'),
  ('cancel', 'running', 'running'),                                           -- its holder is told
  ('complete', 'blocked', 'completed'), ('complete', 'scheduled', 'completed'), ('complete', 'ready', 'completed'),
  ('complete', 'running', 'completed'), ('complete', 'waiting', 'completed'),
  ('run_now', 'scheduled', 'ready'), ('run_now', 'ready', 'ready'),
  ('revive', 'completed', 'ready'), ('revive', 'failed', 'ready'),
  ('revive', 'cancelled', 'ready'), ('revive', 'expired', 'ready');
