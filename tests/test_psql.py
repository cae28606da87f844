"""psql alone can do the whole life of a job."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from shiftwork import embedded
from shiftwork.errors import EmbeddedError


def find_psql() -> Path | None:
    """The one beside the server's programs, else the one on the path."""
    try:
        beside = embedded.find_binaries().path / "psql"
    except EmbeddedError:
        beside = Path("psql")
    if beside.is_file():
        return beside
    found = shutil.which("psql")
    return Path(found) if found else None


def psql(dsn: str, script: str) -> list[str]:
    """Run a script; what it selects, a line for each row."""
    program = find_psql()
    if program is None:
        pytest.skip("there is no psql here: neither beside the server's programs nor on the PATH")
    ran = subprocess.run(
        [program, "--no-psqlrc", "--quiet", "--tuples-only", "--no-align", "-v", "ON_ERROR_STOP=1", dsn],
        input=script,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "PGOPTIONS": "-c client_min_messages=warning"},
    )
    assert ran.returncode == 0, ran.stderr
    return [line for line in ran.stdout.splitlines() if line]


LIFE = r"""
-- Somebody sends, in both ways.
select outcome
  from shiftwork.enqueue('send_email', '{"to": "ada@example.org"}', queue => 'mail', priority => -1);
insert into shiftwork.jobs (task, payload, queue) values ('send_email', '{"to": "bob@example.org"}', 'mail');

-- A worker takes both, one at a time.
select shiftwork.register_worker('{"name": "psql", "queues": ["mail"]}') as worker \gset
select jsonb_build_object('worker', :worker, 'queues', '[{"queue": "mail"}]'::jsonb) as request \gset
select id, attempt, payload ->> 'to' as recipient
  from shiftwork.claim(:'request'::jsonb || '{"want": 1}') where id > 0 \gset
select :'recipient', state from shiftwork.jobs where id = :id;
select alive from jsonb_to_record(shiftwork.heartbeat(jsonb_build_object(
  'worker', :worker, 'held', jsonb_build_array(jsonb_build_array(:id, :attempt))))) as told (alive boolean);
select answer from shiftwork.settle(jsonb_build_object('worker', :worker, 'outcomes', jsonb_build_array(
  jsonb_build_object('id', :id, 'attempt', :attempt, 'state', 'completed', 'result', 'sent'))));

-- The other fails, is tried again at once, and is given up.
select id, attempt from shiftwork.claim(:'request') where id > 0 \gset
select answer from shiftwork.settle(jsonb_build_object('worker', :worker, 'outcomes', jsonb_build_array(
  jsonb_build_object('id', :id, 'attempt', :attempt, 'state', 'scheduled', 'delay', 3600,
                     'error', '{"code": "REFUSED", "message": "no such box"}'::jsonb))));
select answer from shiftwork.run_now(array[:id]::bigint[]);
select id, attempt from shiftwork.claim(:'request') where id > 0 \gset
begin;
select shiftwork.fence(:id, :attempt);
commit;
select answer from shiftwork.settle(jsonb_build_object('worker', :worker, 'outcomes', jsonb_build_array(
  jsonb_build_object('id', :id, 'attempt', :attempt, 'state', 'failed',
                     'error', '{"code": "REFUSED", "message": "still no such box"}'::jsonb))));

-- Somebody looks at it, revives it, and cancels it for good.
select state, attempt, failures, error ->> 'message' from shiftwork.all_jobs where id = :id;
select attempt, outcome, will_retry from shiftwork.attempts where job = :id order by attempt;
select answer from shiftwork.revive(array[:id]::bigint[]);
select answer from shiftwork.cancel(array[:id]::bigint[], reason => 'bob left');
select error ->> 'message' from shiftwork.history where id = :id;

-- A worker that vanishes loses its job to another.
select id from shiftwork.enqueue('send_email', queue => 'mail') \gset
select count(*) from shiftwork.claim(:'request') where id > 0;
select shiftwork.leave(:worker);
select answer from shiftwork.reap();
select answer from shiftwork.settle(jsonb_build_object('worker', :worker, 'outcomes', jsonb_build_array(
  jsonb_build_object('id', :id, 'attempt', 1, 'state', 'completed'))));
select state, count(*) from shiftwork.all_jobs group by state order by state;
"""


def test_psql_alone_can_do_the_whole_life_of_a_job(dsn: str) -> None:
    # spec: D-19, SH-5, SH-7, SH-14, SH-15, SH-17, SH-33, SH-34
    assert psql(dsn, LIFE) == [
        "created",
        "ada@example.org|running",
        "t",
        "settled",
        "settled",
        "moved",
        "settled",
        "failed|2|2|still no such box",
        "1|failed|t",
        "2|failed|f",
        "revived",
        "cancelled",
        "bob left",
        "1",
        "t",
        "ready",
        "lost",
        "ready|1",
        "completed|1",
        "cancelled|1",
    ]
