"""Workers killed with -9 while they work, and an account of every job afterwards.

    make chaos          40 kills of 4 processes over 4,000 transactional and 2,000 plain jobs, with a lease of 2 s

Every step of every job is noted by a trigger, with the database's clock, so what is said in the end is what happened there:
each transactional effect exactly once, each plain one at least once, one ending for each job, attempts that only rise, nothing
left running, and every job that lost its worker running again in time.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, LiteralString

import psycopg

from shiftwork import embedded
from shiftwork.migrate import migrate
from tests.crew import Crew, jobs

STEPS = """
create table public.steps (
  job bigint, attempt int, worker bigint, state text, at timestamptz not null default clock_timestamp());
create function public.note_step() returns trigger language plpgsql as $$
begin
  insert into public.steps (job, attempt, worker, state) values (new.id, new.attempt, new.worker, new.state::text);
  return null;
end $$;
create trigger note_step after update of state on shiftwork.jobs for each row
  when (old.state is distinct from new.state or old.worker is distinct from new.worker) execute function public.note_step();
create trigger note_end after insert on shiftwork.history for each row execute function public.note_step();
create table public.kills (worker bigint, at timestamptz not null default clock_timestamp());
"""

RECOVERIES = """
select extract(epoch from again.at - lost.at)::float as seconds
  from public.kills as killed
  join public.steps as held on held.worker = killed.worker and held.state = 'running'
  cross join lateral (select greatest(killed.at, held.at) as at) as lost
  cross join lateral (
    select step.state, step.at from public.steps as step
     where step.job = held.job and step.attempt >= held.attempt and step.at > held.at order by step.at limit 1) as next
  join lateral (
    select step.at from public.steps as step
     where step.job = held.job and step.attempt > held.attempt and step.state = 'running' order by step.at limit 1) as again
    on true
 where next.state = 'ready'
 order by 1
"""


@dataclass
class Account:
    """What came of it."""

    kills: int
    jobs: int
    seconds: float
    bound: float
    recoveries: list[float]
    """Seconds from a kill until each job that it cost its worker ran again."""

    twice: int
    """Plain effects that happened more than once, as they may."""

    violations: list[str] = field(default_factory=list)

    def told(self) -> str:
        """For people."""
        found = self.recoveries
        median = f"{found[len(found) // 2]:.2f}" if found else "-"
        slowest = f"{found[-1]:.2f}" if found else "-"
        lines = [
            f"{self.jobs:,} jobs, {self.kills} kills, {self.seconds:.0f} s",
            f"{len(found)} jobs lost their worker and ran again: after {median} s at the median, {slowest} s at most; "
            f"{self.bound:.2f} s are allowed",
            f"{self.twice} plain effects happened more than once, as they may",
            *(f"VIOLATION: {one}" for one in self.violations),
        ]
        return "\n".join(lines or ["all is well"])


def unleash(
    crew: Crew,
    *,
    processes: int = 4,
    kills: int,
    transactional: int,
    plain: int,
    lease: float,
    poll: float,
    seed: int,
    say: Any = lambda _: None,
) -> Account:
    """Let workers run jobs, kill one after the other, and say what came of it."""
    dice = random.Random(seed)
    connection, protocol = crew.connection, crew.protocol
    connection.execute(STEPS)
    numbers = {"transfer": transactional // 2, "transfer_blocking": transactional - transactional // 2}
    numbers |= {"note": plain // 2, "note_blocking": plain - plain // 2}
    first = 0
    for task, many in numbers.items():
        connection.execute("select count(*) from shiftwork.enqueue_many(%s)", (jobs(task, many, first),))
        first += many
    total = transactional + plain
    connection.execute("update shiftwork.jobs set priority = id * 7919 % 1000")  # all kinds at all times
    settings: Any = {"lease": f"{lease}s", "poll": f"{poll}s", "concurrency": 10, "transactions": 5}
    began = time.monotonic()
    crewmen = [crew.hire(**settings) for _ in range(processes)]
    for turn in range(kills):
        goal = total * (turn + 1) // (kills + 2)
        crew.until("select count(*) >= %s from shiftwork.history", goal)
        busy = (
            "select array_agg(distinct worker.pid) from shiftwork.workers as worker join shiftwork.jobs as job"
            " on job.worker = worker.id and job.state = 'running' where worker.pid = any(%s)"
        )
        victims = crew.until(busy, [man.pid for man in crewmen])
        chosen = dice.choice(sorted(victims))
        victim = next(man for man in crewmen if man.pid == chosen)
        [row] = connection.execute(
            "select max(id) as id from shiftwork.workers where pid = %s", (victim.pid,)
        )
        connection.execute("insert into public.kills (worker) values (%s)", (row["id"],))
        victim.kill()
        victim.wait()
        say(f"kill {turn + 1} of {kills}: worker {row['id']}, at {goal:,} of {total:,} jobs")
        crewmen[crewmen.index(victim)] = crew.hire(**settings)
    crew.until("select not exists (select from shiftwork.jobs)")
    seconds = time.monotonic() - began
    for man in crewmen:
        crew.worker_of(man)  # before that, a signal finds no worker to heed it
        man.terminate()
    codes = [man.wait() for man in crewmen]

    found = protocol.rows(RECOVERIES)
    effects = crew.effects("transactional"), crew.effects("plain")
    bound = lease + lease / 3 + poll + 1
    account = Account(
        kills,
        total,
        seconds,
        bound,
        [row["seconds"] for row in found],
        sum(n > 1 for n in effects[1].values()),
    )
    says = account.violations.append
    once, at_least = (dict(effects[0]), dict(effects[1]))
    if missing := [n for n in range(transactional) if n not in once]:
        says(f"{len(missing)} transactional effects are missing: {missing[:10]}")
    if doubled := {n: times for n, times in once.items() if times != 1}:
        says(
            f"{len(doubled)} transactional effects happened more than once: {dict(list(doubled.items())[:10])}"
        )
    if missing := [n for n in range(transactional, total) if n not in at_least]:
        says(f"{len(missing)} plain effects are missing: {missing[:10]}")
    for problem, question in CHECKS.items():
        if rows := protocol.rows(question):
            says(f"{problem}: {len(rows)}, such as {rows[0]}")
    ended = protocol.value("select count(*) from {}.history where state = 'completed'")
    if ended != total:
        says(f"{ended} of {total} jobs are completed")
    if slow := [one for one in account.recoveries if one > bound]:
        says(f"{len(slow)} recoveries took longer than {bound:.2f} s: {slow[-10:]}")
    if any(codes):
        says(f"exit codes after TERM: {codes}")
    return account


CHECKS: dict[str, LiteralString] = {
    "jobs with more than one ending": """
        select job, count(*) from public.steps where state in ('completed', 'failed', 'cancelled', 'expired')
         group by job having count(*) > 1""",
    "attempts that do not rise by one with each claim": """
        select * from (select job, attempt, lag(attempt, 1, 0) over (partition by job order by at) as before
                         from public.steps where state = 'running') as claims where attempt <> before + 1""",
    "steps after the end": """
        select * from public.steps as later join public.steps as ending using (job)
         where ending.state = 'completed' and later.at > ending.at""",
    "completions by somebody other than the last who claimed": """
        select * from public.steps as ending where ending.state = 'completed' and not exists (
          select from public.steps as claimed where claimed.job = ending.job and claimed.state = 'running'
             and claimed.attempt = ending.attempt and claimed.worker = ending.worker)""",
    "jobs with failures": "select id, failures, error from shiftwork.history where failures > 0",
    "losses that were not noted": """
        select id, resets from shiftwork.history as ended where resets <> (
          select count(*) from shiftwork.attempts where job = ended.id and outcome = 'lost')""",
}


def main() -> None:
    """As `make chaos` does."""
    parser = argparse.ArgumentParser(description="Kill workers, and account for every job.")
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--transactional", type=int, default=4_000)
    parser.add_argument("--plain", type=int, default=2_000)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--lease", type=float, default=2.0)
    parser.add_argument("--poll", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="shiftwork-chaos-"))
    folder.chmod(0o755)
    server = embedded.start(folder / "data", options={"max_connections": "300"})
    try:
        with psycopg.connect(server.url, autocommit=True) as connection:
            migrate(connection)
        print(f"seed {given.seed}", flush=True)
        with Crew(server.url) as crew:
            account = unleash(crew, say=lambda text: print(text, flush=True), **vars(given))
    finally:
        server.close()
        embedded.stop(folder / "data")
        shutil.rmtree(folder, ignore_errors=True)
    print(account.told())
    sys.exit(1 if account.violations else 0)


if __name__ == "__main__":
    main()
