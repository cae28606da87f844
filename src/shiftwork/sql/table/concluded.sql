-- After settle, in the transaction of a handler: the state that it led to, or an error if nothing was written.
select coalesce(min(done.state), <unless_one>) as state from done
