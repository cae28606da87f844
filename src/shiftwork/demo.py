"""`shiftwork demo`: the life of jobs, told in words, on a server that is gone afterwards.

There is no worker process in it. The demo plays two workers itself, each on a connection of its own, with
the verbs that every worker calls: register, claim, settle, reap. At the end it adds up: every job that was
enqueued must be in the database once, in the state in which the play left it.
"""

from __future__ import annotations

import os
import shutil
import signal
import stat
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import click
import psycopg

from shiftwork import embedded, operations
from shiftwork.app import App
from shiftwork.client import Handle
from shiftwork.cursor import Cursor
from shiftwork.database import Plan, connect
from shiftwork.errors import InvalidArgument, Poison, ShiftworkError, UnknownJob
from shiftwork.job import Job, State
from shiftwork.migrate import migrate
from shiftwork.outcome import Outcome, Raised, Returned, decide
from shiftwork.retry import Retry

T = TypeVar("T")

LEASE = 1.0
"""Seconds for which the worker that dies may be silent; few, since the play waits for them."""

ALL_ALONG = 3600.0
"""The lease of the others; nobody renews one here."""

BATCH = 250


@click.command(
    epilog="Exit codes: 0 every job is accounted for; 1 one is not, or something failed; 2 wrong usage."
)
@click.option("--jobs", "many", type=click.IntRange(2, 1_000_000), default=5_000, show_default=True)
@click.option("--keep", is_flag=True, help="Keep the data, to look at it afterwards.")
def demo(many: int, keep: bool) -> None:
    """See jobs go in, being claimed and settled, on a PostgreSQL of its own that is gone afterwards."""
    try:
        with (
            signals(end, signal.SIGTERM, signal.SIGHUP),
            a_story() as story,
            server_of_its_own(story, keep=keep) as server,
        ):
            whole = Play(story, server.url, many).perform()
    except ShiftworkError as error:
        raise click.ClickException(str(error)) from error
    sys.exit(0 if whole else 1)


@contextmanager
def signals(
    handler: Callable[[int, FrameType | None], object] | signal.Handlers, *which: int
) -> Iterator[None]:
    """These signals go to that handler for as long as the block lasts."""
    before = {number: signal.signal(number, handler) for number in which}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def end(number: int, _: object) -> None:
    """Whoever asks us to end gets the same tidy end as with Ctrl-C."""
    sys.exit(128 + number)


@contextmanager
def server_of_its_own(story: Story, *, keep: bool) -> Iterator[embedded.Server]:
    """A server in a directory of its own; afterwards both are gone, or only the server."""
    room = Path(tempfile.mkdtemp(prefix="shiftwork-demo-", dir=_passable()))
    room.chmod(0o711)
    data, started = room / "data", False
    try:
        story.heading("A PostgreSQL of its own")
        begun = time.monotonic()
        with embedded.start(data) as server:
            started = True
            story.say(f"PostgreSQL {server.version} started in {since(begun)}, data in {data}")
            yield server
    finally:
        with signals(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # no half of a tidy end
            embedded.stop(data, now=True)
            if keep and started:
                story.say(f"The data stays. To look at it: shiftwork db psql --data {data}")
            else:
                remove(room)


def _passable() -> str:
    """Where temporary files are; started by root, the server is another user, who must get there too."""
    usual = tempfile.gettempdir()
    if os.geteuid():
        return usual
    for place in (usual, "/tmp", "/var/tmp"):  # noqa: S108  -- a directory in it is made as tempfile makes them
        path = Path(place).resolve()
        if path.is_dir() and all(one.stat().st_mode & stat.S_IXOTH for one in (path, *path.parents)):
            return place
    return usual


def remove(room: Path) -> None:
    """Remove a directory, although a server that was interrupted at its start may still be writing to it."""
    deadline = time.monotonic() + 10
    shutil.rmtree(room, ignore_errors=True)
    while room.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
        embedded.stop(room / "data", now=True)
        shutil.rmtree(room, ignore_errors=True)


# What is to be done.


@dataclass
class Guest:
    """Somebody to be greeted."""

    name: str


class Tasks:
    """The tasks of the play, declared as any program declares its own."""

    def __init__(self, app: App) -> None:
        self.stuck: set[int] = set()
        self.unknown: set[int] = set()

        @app.task
        def greet(guest: Guest, times: int = 1) -> str:
            return " ".join([f"Hello, {guest.name}!"] * times)

        @app.task(retry=Retry(max_attempts=3, delays=timedelta(milliseconds=300), factor=1))
        def weigh(parcel: int) -> float:
            if parcel in self.stuck:
                self.stuck.discard(parcel)  # the next attempt will succeed
                raise RuntimeError("the scale is stuck")
            return parcel * 1.5

        @app.task
        def deliver(parcel: int) -> str:
            if parcel in self.unknown:
                raise Poison("nobody lives at this address")
            return f"parcel {parcel} is delivered"

        self.greet, self.weigh, self.deliver = greet, weigh, deliver


# Who does it.


class Worker:
    """One who claims jobs, runs them and says how they ended, with the verbs of the protocol."""

    def __init__(self, app: App, name: str, *, lease: float) -> None:
        self.app = app
        self.store = app.client.store
        self.cursor = Cursor()
        self.connect()
        self.id = self._perform(operations.register(self.store, name=name, lease=lease))

    def claim(self, want: int) -> list[Job]:
        """Up to so many jobs that are due; they are this worker's now."""
        for _ in range(2):
            plan = operations.claim(self.store, self.id, {"default": None}, want, cursor=self.cursor)
            if jobs := self._perform(plan).jobs:
                return jobs
            self.cursor.look()  # nothing behind the last place: look from the start before giving up
        return []

    def run(self, jobs: Iterable[Job]) -> list[Outcome]:
        """Call the functions of these jobs, and decide what becomes of each."""
        return [self._attempt(job) for job in jobs]

    def settle(self, outcomes: Sequence[Outcome]) -> dict[int, str]:
        """Write how they ended, as one batch; the answer tells for each whether it counted."""
        return self._perform(operations.settle(self.store, self.id, outcomes))

    def reap(self) -> dict[int, str]:
        """Take jobs back from workers whose lease has lapsed."""
        return self._perform(operations.reap(self.store, self.id))

    def expire(self) -> int:
        """End jobs that nobody started in time; how many there were."""
        return self._perform(operations.expire(self.store))

    def connect(self) -> None:
        """Open a connection; the worker stays who it was."""
        self.connection = connect(self.app.settings)

    def close(self) -> None:
        """End without a word, as after kill -9: the lease is left to lapse."""
        self.connection.close()

    def _attempt(self, job: Job) -> Outcome:
        task = self.app.find(job.task)
        ending: Returned | Raised
        try:
            args, kwargs = task.signature.decode(job.payload)
            ending = Returned(task.function(*args, **kwargs))
        except Exception as error:  # noqa: BLE001  -- whatever it is, it is how the attempt ended
            ending = Raised(error)
        return decide(job, ending, task.retry or Retry())

    def _perform(self, plan: Plan[T]) -> T:
        return self.app.client.perform(plan, self.connection)


# How it goes.


class Play:
    """The acts, in their order, and the account at the end."""

    def __init__(self, story: Story, dsn: str, many: int) -> None:
        self.story = story
        self.app = App(dsn)
        self.tasks = Tasks(self.app)
        self.many = many
        self.expected: dict[int, State] = {}
        """Every job that was enqueued, and the state in which it should be."""

    def perform(self) -> bool:
        """Play it; say whether every job is accounted for."""
        with closing(self.app):
            self.install()
            with closing(Worker(self.app, "second", lease=ALL_ALONG)) as second:
                self.enqueue()
                self.lose_a_worker(second)
                self.end_otherwise(second)
                self.wait_for_a_result(second)
                self.drain(second)
            return self.add_up()

    def install(self) -> None:
        begun = time.monotonic()
        with connect(self.app.settings) as connection:
            done = migrate(connection)
        self.story.say(f"shiftwork migrate: {', '.join(done)} ({since(begun)})")

    def enqueue(self) -> None:
        self.begin("Jobs go in")
        say, greet = self.story.say, self.tasks.greet
        job = greet.enqueue(Guest("Ada"), times=2)
        say(f'greet.enqueue(Guest("Ada"), times=2) → job {self.sent(job)}')
        try:
            greet.enqueue(Guest(7))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        except InvalidArgument as error:
            say(f"greet.enqueue(Guest(7)) → refused before it gets anywhere: {error}")

        with connect(self.app.settings) as connection:
            connection.execute("create table orders (id int primary key)")
            with connection.transaction():
                connection.execute("insert into orders values (1)")
                undone = greet.using(connection=connection).enqueue(Guest("Nobody"))
                say(f"In a transaction: an order, and job {undone.id}. Rolled back …")
                raise psycopg.Rollback
            try:
                undone.status()
            except UnknownJob:
                say(f"… and there is no order and no job {undone.id}.")
            with connection.transaction():
                connection.execute("insert into orders values (1)")
                job = greet.using(connection=connection).enqueue(Guest("Grace"))
            say(f"The same, committed: the order and job {self.sent(job)} are there.")

            by_call = """select id from shiftwork.enqueue('greet', '{"guest": {"name": "Edgar"}}')"""
            [[id]] = connection.execute(by_call).fetchall()  # noqa: A001
            say(f"select shiftwork.enqueue('greet', …) → job {self.sent(id)}")
            by_hand = """insert into shiftwork.jobs (task, payload)
                         values ('greet', '{"guest": {"name": "Barbara"}}') returning id"""
            [[id]] = connection.execute(by_hand).fetchall()  # noqa: A001
            say(f"insert into shiftwork.jobs (task, payload) … → job {self.sent(id)}")

        once = self.tasks.weigh.using(unique="parcel:1")
        one, same = once.enqueue(1), once.enqueue(1)
        say(f"The same unique key twice → job {self.sent(one)} {one.outcome}, job {same.id} {same.outcome}")

    def lose_a_worker(self, second: Worker) -> None:
        self.begin("A worker dies, and its jobs do not")
        say, first = self.story.say, Worker(self.app, "first", lease=LEASE)
        while not (held := first.claim(3)):  # on a slow machine its lease may have lapsed already
            first.close()
            first = Worker(self.app, "first", lease=LEASE)
        with closing(first):
            say(f"The first worker claims jobs {numbers(held)}; its lease lasts {LEASE:g} s. It is killed.")
            first.close()
            begun = time.monotonic()
            while not (back := second.reap()):
                time.sleep(0.05)
            say(f"After {since(begun)} the second worker reaps: jobs {numbers(back)} are ready again.")

            mine = second.claim(100)
            again = {job.attempt for job in mine if job.id in back}
            answers = self.settle(second, mine)
            say(f"It claims all {len(mine)} there are, those at attempt {numbers(again)}: {tally(answers)}.")

            first.connect()
            answers = self.settle(first, held)
            say(f"The first was only slow, and settles at last: {tally(answers)}. Nothing was changed.")

    def end_otherwise(self, worker: Worker) -> None:
        self.begin("Jobs end in more than one way")
        say, tasks = self.story.say, self.tasks
        tasks.stuck, tasks.unknown = {2}, {3, 4}
        parcel, failing, mended = tasks.weigh.enqueue(2), tasks.deliver.enqueue(3), tasks.deliver.enqueue(4)
        unwanted = tasks.greet.using(delay=timedelta(hours=1)).enqueue(Guest("Nobody"))
        hurried = tasks.greet.using(expires_in=timedelta(milliseconds=1)).enqueue(Guest("Somebody"))
        for handle in (parcel, failing, mended, unwanted, hurried):
            self.sent(handle)

        while not worker.expire():
            time.sleep(0.01)
        self.expected[hurried.id] = State.EXPIRED
        say(f"Job {hurried.id} had to start within 1 ms: {hurried.status()}.")
        answer = unwanted.cancel("not needed")
        self.expected[unwanted.id] = State.CANCELLED
        say(f'Job {unwanted.id} is due in an hour. handle.cancel("not needed") → {answer}.')

        self.settle(worker, worker.claim(10))
        for job in (failing.info(), parcel.info()):
            say(f"Job {job.id} ({job.task}) raised {(job.error or {}).get('message')!r} and is {job.state}.")
        while not (due := worker.claim(10)):
            time.sleep(0.05)
        self.settle(worker, due)
        job = parcel.info()
        say(f"A moment later job {job.id} is due again: {job.state} at attempt {job.attempt}.")

        tasks.unknown.discard(4)
        [answer] = self.app.revive([mended.id]).values()
        self.settle(worker, worker.claim(10))
        say(f"Job {mended.id} failed too. Its address is put right, it is {answer}: {mended.status()}.")

    def wait_for_a_result(self, worker: Worker) -> None:
        self.begin("A result is waited for")
        job = self.tasks.greet.enqueue(Guest("Alan"))
        self.sent(job)

        def work() -> float:
            time.sleep(0.3)  # so that whoever waits is asleep
            self.settle(worker, worker.claim(1))
            return time.monotonic()

        with ThreadPoolExecutor(1) as thread:
            working = thread.submit(work)
            result = job.result(timeout=60)
            wait = max(time.monotonic() - working.result(), 0) * 1000
        self.story.say(f"handle.result(timeout=60) → {result!r}, {wait:.0f} ms after the job had ended.")

    def drain(self, second: Worker) -> None:
        self.begin(f"{self.many:,} jobs, two workers")
        begun = time.monotonic()
        parcels = range(100, 100 + self.many)
        for handle in self.app.enqueue_many(self.tasks.weigh.job(parcel) for parcel in parcels):
            self.sent(handle)
        rate = self.many / (time.monotonic() - begun)
        self.story.say(f"app.enqueue_many(…) → {self.many:,} in one transaction, {rate:,.0f} a second")

        stop = threading.Event()
        with closing(Worker(self.app, "third", lease=ALL_ALONG)) as third, ThreadPoolExecutor(2) as threads:
            begun = time.monotonic()
            working = [threads.submit(self.drain_with, worker, stop) for worker in (second, third)]
            try:
                quarters = 0
                while not all(one.done() for one in working):
                    time.sleep(0.05)
                    counts = self.app.counts()
                    done = self.many - counts[State.READY] - counts[State.RUNNING]
                    rate = done / (time.monotonic() - begun)
                    self.story.picture(counts, f"{rate:,.0f} jobs a second")
                    if done * 4 // self.many > quarters:
                        quarters = done * 4 // self.many
                        self.story.say(f"{done:>9,} done, {rate:,.0f} a second")
            finally:
                stop.set()
            spent = time.monotonic() - begun
            shares = " and ".join(f"{one.result():,}" for one in working)
        rate = self.many / spent
        self.story.say(f"Claimed and settled in batches of {BATCH}, {shares}: {rate:,.0f} jobs a second.")

    def drain_with(self, worker: Worker, stop: threading.Event) -> int:
        done = 0
        while not stop.is_set() and (jobs := worker.claim(BATCH)):
            done += len(self.settle(worker, jobs))
        return done

    def add_up(self) -> bool:
        """Whether the database holds what was enqueued, each job once and as it should be."""
        self.begin("The account")
        with connect(self.app.settings) as connection:
            rows = connection.execute("select id, state::text from shiftwork.all_jobs").fetchall()
        found = {id: State(state) for id, state in rows}  # noqa: A001
        self.story.counts(Counter(found.values()))
        jobs = self.expected.keys() | found.keys()
        amiss = [id for id in jobs if found.get(id) != self.expected.get(id)]  # noqa: A001
        if amiss or len(rows) != len(found):
            said = f"{len(self.expected):,} jobs were enqueued, and {len(rows):,} rows found. "
            self.story.say(said + (f"Not as they should be: {numbers(amiss)}." if amiss else ""))
            return False
        self.story.say(f"{len(self.expected):,} jobs were enqueued, and all are accounted for.", good=True)
        return True

    def begin(self, act: str) -> None:
        """Begin an act, with a look at where the jobs are."""
        self.story.picture(self.app.counts())
        self.story.heading(act)

    def sent(self, job: Handle[Any] | int) -> int:
        """Note a job that was enqueued."""
        id = job if isinstance(job, int) else job.id  # noqa: A001
        self.expected[id] = State.READY
        return id

    def settle(self, worker: Worker, jobs: Sequence[Job]) -> dict[int, str]:
        """Have a worker run jobs and settle them; note what was accepted, and only that."""
        outcomes = worker.run(jobs)
        answers = worker.settle(outcomes)
        self.expected.update({one.job.id: one.state for one in outcomes if answers[one.job.id] == "settled"})
        return answers


# In words.


def since(begun: float) -> str:
    """How long ago that was."""
    return f"{time.monotonic() - begun:.1f} s"


def numbers(those: Iterable[Job | int]) -> str:
    """Their numbers, in words: 1, 2 and 3."""
    *most, last = sorted(one if isinstance(one, int) else one.id for one in those)
    if len(most) > 10:
        return f"{', '.join(map(str, most[:10]))} and {len(most) - 9} more"
    return f"{', '.join(map(str, most))} and {last}" if most else str(last)


def tally(answers: Mapping[int, str]) -> str:
    """How often each answer was given: 3 settled, 1 lost."""
    return ", ".join(f"{many} {answer}" for answer, many in Counter(answers.values()).items())


class Story:
    """The story in plain lines."""

    def heading(self, text: str) -> None:
        """Begin an act."""
        click.echo(f"\n{text}")

    def say(self, text: str, *, good: bool = False) -> None:
        """Tell one thing that happened."""
        click.echo(f"  {'✓ ' if good else ''}{text}")

    def picture(self, counts: Mapping[State, int], note: str = "") -> None:
        """Show where the jobs are; lines would only repeat themselves."""

    def counts(self, counts: Mapping[State, int]) -> None:
        """Show where the jobs have ended up."""
        for state in State:
            if counts.get(state):
                click.echo(f"  {state:<10}{counts[state]:>9,}")


COLOURS = {
    State.SCHEDULED: "blue",
    State.READY: "cyan",
    State.RUNNING: "yellow",
    State.COMPLETED: "green",
    State.FAILED: "red",
}


class LiveStory(Story):
    """The story on a terminal: the lines go by above a small picture of where the jobs are."""

    PAUSE = 0.7
    """Seconds between acts, for those who read."""

    def __init__(self) -> None:
        from rich.console import Console  # noqa: PLC0415  -- only a terminal needs it
        from rich.live import Live  # noqa: PLC0415

        self.console = Console(highlight=False)
        self.live = Live(console=self.console, refresh_per_second=10, transient=True)
        self.acts = 0

    def heading(self, text: str) -> None:
        from rich.text import Text  # noqa: PLC0415

        if self.acts:
            time.sleep(self.PAUSE)
        self.acts += 1
        self.console.print()
        self.console.print(Text(text, style="bold"))

    def say(self, text: str, *, good: bool = False) -> None:
        from rich.padding import Padding  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        line = Text.assemble("✓ " if good else "• ", text, style="green" if good else "")
        self.console.print(Padding(line, (0, 0, 0, 2)))

    def picture(self, counts: Mapping[State, int], note: str = "") -> None:
        self.live.update(self._drawn(counts, note))

    def counts(self, counts: Mapping[State, int]) -> None:
        self.live.update("")
        self.console.print(self._drawn(counts, ""))

    def _drawn(self, counts: Mapping[State, int], note: str) -> Any:  # noqa: ANN401
        from rich.console import Group  # noqa: PLC0415
        from rich.table import Table  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        table = Table.grid(padding=(0, 2))
        total = max(sum(counts.values()), 1)
        for state in State:
            if number := counts.get(state, 0):
                colour = COLOURS.get(state, "bright_black")
                bar = Text("█" * (40 * number // total) or "▏", style=colour)  # readable without colour, too
                table.add_row(Text(f"  {state}"), Text(f"{number:,}", justify="right"), bar)
        return Group(Text(), table, Text(f"  {note}", style="dim"))


@contextmanager
def a_story() -> Iterator[Story]:
    """The story as this output can show it."""
    if not sys.stdout.isatty():
        yield Story()
        return
    story = LiveStory()
    if story.console.is_dumb_terminal:
        yield Story()
        return
    with story.live:
        yield story
