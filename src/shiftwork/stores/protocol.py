"""The verbs of the schema as statements: jobs ⇄ SQL, without I/O and without decisions.

The texts are written for the schema `shiftwork`, as the files in `sql/` are, and run as they stand in
psql; for another schema that one token is replaced by its name, which has been checked. Values are
always bound.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from shiftwork.database import Statement
from shiftwork.job import State
from shiftwork.settings import check_schema

# Times cross as seconds and documents as text, because no loader may fail on a row that somebody else wrote.
JOB = """
  id, task, queue, priority, payload::text as payload, state::text as state,
  extract(epoch from run_at)::text as run_at, extract(epoch from expires_at)::text as expires_at,
  attempt, failures, resets, max_attempts, unique_key, worker,
  extract(epoch from created_at)::text as created_at, extract(epoch from claimed_at)::text as claimed_at,
  extract(epoch from started_at)::text as started_at, extract(epoch from finished_at)::text as finished_at,
  result::text as result, error::text as error, tags
"""
ATTEMPT = """
  job, attempt, outcome, will_retry, code, error::text as error, worker,
  extract(epoch from claimed_at)::text as claimed_at, extract(epoch from started_at)::text as started_at,
  extract(epoch from ended_at)::text as ended_at
"""
MATCHING = """
 where (%s::text is null or task = %s)
   and (%s::text is null or queue = %s)
   and (%s::text[] is null or state = any(%s::text[]::shiftwork.job_state[]))
"""
PARTS = {"<job>": JOB, "<attempt>": ATTEMPT, "<matching>": MATCHING}

ENQUEUE = "select ordinal, id, outcome from shiftwork.enqueue_many(%s::jsonb)"
GET = "select <job> from shiftwork.all_jobs where id = any(%s::bigint[]) order by id"
ATTEMPTS = "select <attempt> from shiftwork.attempts where job = any(%s::bigint[]) order by job, attempt"
LIST = (
    "select <job> from shiftwork.all_jobs <matching> and (%s::bigint is null or id < %s)"
    " order by id desc limit %s offset %s"
)
COUNTS = "select state::text as state, count(*) as number from shiftwork.all_jobs <matching> group by state"
CANCEL = "select id, answer from shiftwork.cancel(%s::bigint[], %s::text, %s::text)"
REVIVE = "select id, answer from shiftwork.revive(%s::bigint[], %s::text)"
RUN_NOW = "select id, answer from shiftwork.run_now(%s::bigint[], %s::text, %s::boolean)"
AWAIT_RESULTS = "select shiftwork.await_results(%s::double precision)"


class Protocol:
    """The verbs of one schema."""

    def __init__(self, schema: str = "shiftwork") -> None:
        self.schema = check_schema(schema)

    def enqueue(self, jobs: str) -> Statement:
        """Enqueue the jobs of one JSON array."""
        return self._statement(ENQUEUE, jobs)

    def get(self, ids: Sequence[int]) -> Statement:
        """The jobs with these ids, wherever they are in their life."""
        return self._look(GET, list(ids))

    def attempts(self, ids: Sequence[int]) -> Statement:
        """Attempts of these jobs that did not succeed."""
        return self._look(ATTEMPTS, list(ids))

    def list(
        self,
        *,
        task: str | None,
        queue: str | None,
        states: Collection[State] | None,
        before: int | None,
        limit: int,
        offset: int,
    ) -> Statement:
        """Jobs that match, newest first."""
        matching = self._matching(task, queue, states)
        return self._look(LIST, *matching, before, before, limit, offset)

    def counts(self, task: str | None, queue: str | None, states: Collection[State] | None) -> Statement:
        """How many jobs match, by state."""
        return self._look(COUNTS, *self._matching(task, queue, states))

    def cancel(self, ids: Sequence[int], reason: str | None, actor: str | None) -> Statement:
        """End these jobs as cancelled, or signal the handlers that run them."""
        return self._statement(CANCEL, list(ids), reason, actor)

    def revive(self, ids: Sequence[int], actor: str | None) -> Statement:
        """Give finished jobs another life."""
        return self._statement(REVIVE, list(ids), actor)

    def run_now(self, ids: Sequence[int], actor: str | None, *, strict: bool) -> Statement:
        """Make scheduled jobs due at once."""
        return self._statement(RUN_NOW, list(ids), actor, strict)

    def await_results(self, seconds: float) -> Statement:
        """Ask that ended jobs be announced for so long."""
        return self._look(AWAIT_RESULTS, seconds)

    def _matching(
        self, task: str | None, queue: str | None, states: Collection[State] | None
    ) -> tuple[object, ...]:
        wanted = None if states is None else [state.value for state in states]
        return task, task, queue, queue, wanted, wanted

    def _statement(self, text: str, *params: object) -> Statement:
        return Statement(self._written(text), params)

    def _look(self, text: str, *params: object) -> Statement:
        return Statement(self._written(text), params, writes=False)

    def _written(self, text: str) -> str:
        for part, columns in PARTS.items():
            text = text.replace(part, columns)
        return text.replace("shiftwork.", f'"{self.schema}".')
