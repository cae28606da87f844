"""`shiftwork demo`: real workers run a few thousand jobs, one of them is killed, and at the end every job is accounted for.

The demo has a PostgreSQL of its own, which is gone afterwards. It enqueues the jobs of `shiftwork.demo_app` and starts
two workers, processes like any `shiftwork worker`. All that it shows it reads from the database, as anybody can.

For each job it notes, when it is enqueued, how it should end. Nothing is lost and nothing is done twice if in the end
every job is there once, in that state, with as many failures as it was to have, and if each booking that was made in
the transaction of a job is there exactly once.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Self

import click
import psycopg

from shiftwork import embedded
from shiftwork.client import Handle
from shiftwork.database import connect
from shiftwork.demo_app import app, book, call, deliver, greet, order, parse, resize, watch
from shiftwork.errors import ShiftworkError
from shiftwork.job import NewJob, State
from shiftwork.settings import Settings

LEASE = 2.0
"""Seconds after which a silent worker is given up; few, since the demo waits for them."""

CONCURRENCY = 10
WATCHES = 4
LOOK_EVERY = 0.2
TELL_EVERY = 2.0
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@click.command(
    epilog="Exit codes: 0 every job is accounted for; 1 one is not, or something failed; 2 wrong usage."
)
@click.option(
    "--jobs",
    "many",
    type=click.IntRange(200, 1_000_000),
    default=3_000,
    show_default=True,
    help="About how many.",
)
@click.option("--keep", is_flag=True, help="Keep the data, to look at it afterwards.")
def demo(many: int, keep: bool) -> None:
    """See two workers run a few thousand jobs, and one of them die, on a PostgreSQL that is gone afterwards."""
    try:
        with (
            signals(end, *STOPPING),
            a_screen() as screen,
            server_of_its_own(screen, keep=keep) as room,
        ):
            whole = Demo(screen, room, many).perform()
    except (ShiftworkError, psycopg.Error) as error:
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


@contextmanager
def holding_back(*which: int) -> Iterator[None]:
    """These signals wait for the end of the block, in which something is half done."""
    heard: list[int] = []
    with signals(lambda number, _: heard.append(number), *which):
        yield
    for number in heard[:1]:
        signal.raise_signal(number)


_heard: list[int] = []
"""Signals that asked us to end. Python drops what a handler raises at some moments, in a finalizer for example."""


def end(number: int, _: object) -> None:
    """Whoever asks us to end gets the same tidy end as with Ctrl-C."""
    _heard.append(number)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)


@dataclass(frozen=True)
class Room:
    """Where the demo takes place."""

    path: Path
    dsn: str


@contextmanager
def server_of_its_own(screen: Screen, *, keep: bool) -> Iterator[Room]:
    """A server in a directory of its own; afterwards both are gone, or only the server."""
    path = Path(tempfile.mkdtemp(prefix="shiftwork-demo-", dir=_passable()))
    path.chmod(0o711)
    data, started = path / "data", False
    try:
        begun = time.monotonic()
        with embedded.start(data) as server:
            started = True
            screen.say(f"PostgreSQL {server.version} started in {since(begun)}, data in {data}")
            yield Room(path, server.url)
    finally:
        with signals(signal.SIG_IGN, *STOPPING):  # no half of a tidy end
            embedded.stop(data, now=True)
            if keep and started:
                screen.say(f"The data stays. To look at it: shiftwork db psql --data {data}")
            else:
                remove(path)


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


# Who works.


class Worker:
    """A worker process: `shiftwork worker shiftwork.demo_app:app`, which tells its story to a file."""

    def __init__(self, name: str, room: Room, patience: float) -> None:
        self.name = name
        self.number = 0
        """Under which the database knows it."""

        self.killed = False
        self.log = room.path / f"{name}.log"
        ours = {name: value for name, value in os.environ.items() if not name.startswith("SHIFTWORK_")}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(  # noqa: S603
                [
                    *(sys.executable, "-P", "-m", "shiftwork", "worker", "shiftwork.demo_app:app"),
                    *("--name", name, "--dsn", room.dsn, "--lease", f"{LEASE}s", "--grace", "5s"),
                    *("--concurrency", str(CONCURRENCY), "--log-level", "warning"),
                    *("--max-time", f"{patience + 60:.0f}s"),  # should the demo itself be killed
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=ours,
                cwd=room.path,
            )

    def kill(self) -> None:
        """As a crash does it: without a word."""
        self.killed = True
        self.process.kill()
        self.process.wait()

    def stop(self) -> int | None:
        """Ask it to end, and see that it does; gives its exit code."""
        with suppress(subprocess.TimeoutExpired):
            self.process.terminate()
            return self.process.wait(15)
        self.kill()
        return None

    @property
    def last_words(self) -> str:
        """The end of what it said."""
        return self.log.read_text(errors="replace")[-1000:].strip()


# What is to be done.


@dataclass
class Plan:
    """Every job that was enqueued, and how it should end."""

    states: dict[int, State] = field(default_factory=dict)
    failures: dict[int, int] = field(default_factory=dict)
    bookings: dict[int, int] = field(default_factory=dict)
    """Amounts, by the jobs that are to book them."""

    orders: int = 0
    watches: list[Handle[None]] = field(default_factory=list)
    doubtful: str = ""
    """Why not everything could be enqueued."""

    def note(self, job: int, state: State, *, failures: int = 0, books: int | None = None) -> None:
        """This job was enqueued, and should end so."""
        self.states[job] = state
        if failures:
            self.failures[job] = failures
        if books is not None:
            self.bookings[job] = books


Sort = Callable[[random.Random, int], tuple[NewJob[Any], dict[str, Any]]]
"""Makes a job, and says how it should end."""

SORTS: Mapping[str, tuple[int, Sort, str]] = {
    "greet": (58, lambda _, n: (greet.job(f"guest {n}"), {}), "ends at once"),
    "resize": (
        8,
        lambda dice, n: (resize.job(n, round(dice.uniform(0.1, 0.6), 3)), {}),
        "takes up to 0.6 s, in a thread",
    ),
    "call": (
        10,
        lambda dice, n: (call.job(n, busy := dice.randint(1, 3)), {"failures": busy}),
        "fails one to three times, then succeeds",
    ),
    "parse": (
        4,
        lambda _, n: (parse.job(n), {"state": State.FAILED, "failures": 3}),
        "fails three times, then for good",
    ),
    "deliver": (
        4,
        lambda _, n: (deliver.job(n), {"state": State.FAILED, "failures": 1}),
        "is poisonous: fails at once",
    ),
    "book": (14, lambda _, n: (book.job(n), {"books": n}), "writes in the transaction in which it ends"),
    "overdraw": (
        2,
        lambda _, n: (book.job(-n), {"state": State.FAILED, "failures": 1}),
        "writes in it too, and is undone",
    ),
}
"""How often out of a hundred each sort comes, how it is made, and what it does."""


class Producers:
    """Two threads that enqueue: one in bulk, one job by job, each together with an order of the shop."""

    def __init__(self, plan: Plan, many: int, dsn: str) -> None:
        self.plan = plan
        self.dsn = dsn
        self.many = many
        self.stopping = threading.Event()
        singles = min(many // 20, 500)
        self._threads = [
            threading.Thread(target=self._guarded, args=(self._bulk, many - singles), daemon=True),
            threading.Thread(target=self._guarded, args=(self._orders, singles), daemon=True),
        ]

    @property
    def busy(self) -> bool:
        """Whether there is more to come."""
        return any(thread.is_alive() for thread in self._threads)

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        for thread in self._threads:
            thread.join(10)

    def _guarded(self, produce: Callable[[int], None], many: int) -> None:
        try:
            produce(many)
        except (ShiftworkError, psycopg.Error) as error:
            if not self.stopping.is_set():
                self.plan.doubtful = str(error)

    def _bulk(self, many: int) -> None:
        dice = random.Random(1)  # noqa: S311  -- the same play each time
        names = dice.choices(list(SORTS), [share for share, *_ in SORTS.values()], k=many)
        step = max(many // 60, 20)
        for start in range(0, many, step):
            made = [SORTS[name][1](dice, n) for n, name in enumerate(names[start : start + step], start + 1)]
            sent = app.enqueue_many(job for job, _ in made)
            for handle, (_, ends) in zip(sent, made, strict=True):
                self.plan.note(handle.id, **{"state": State.COMPLETED, **ends})
            if self.stopping.wait(0.1):
                return

    def _orders(self, many: int) -> None:
        """Each order is a row of the shop and a job; one in ten is rolled back, and with it both."""
        with connect(app.settings) as connection:
            for number in range(1, many + 1):
                with connection.transaction():
                    connection.execute("insert into orders values (%s)", (number,))
                    job = order.using(connection=connection).enqueue(number).id
                    if number % 10 == 0:
                        raise psycopg.Rollback
                if number % 10:
                    self.plan.note(job, State.COMPLETED)
                    self.plan.orders += 1
                if self.stopping.wait(0.03):
                    return


# How it goes.


@dataclass(frozen=True)
class Held:
    """A job that a worker holds."""

    id: int
    task: str
    worker: int


@dataclass(frozen=True)
class Look:
    """What there was to see at a moment."""

    at: float
    counts: Mapping[State, int]
    held: Sequence[Held]
    ended_by: Mapping[int, int]
    """How many jobs each worker has ended."""

    @property
    def ended(self) -> int:
        """How many jobs are finished."""
        return sum(many for state, many in self.counts.items() if state.is_final)

    @property
    def total(self) -> int:
        """How many jobs there are."""
        return sum(self.counts.values())


class Demo:
    """Two workers, two producers, one death, and the account at the end."""

    def __init__(self, screen: Screen, room: Room, many: int) -> None:
        self.screen = screen
        self.room = room
        self.many = many
        self.plan = Plan()
        self.begun = time.monotonic()
        self.patience = 75 + many / 200
        self.workers: list[Worker] = []
        self.lost: set[int] = set()
        """Jobs that the one who was killed held."""

    def perform(self) -> bool:
        """Play it; say whether every job is accounted for."""
        app.settings = Settings(dsn=self.room.dsn)
        with ExitStack() as ending:
            ending.callback(app.close)
            self.connection = ending.enter_context(connect(app.settings))
            self.prepare()
            ending.callback(self.end_workers)
            self.start("first")
            self.start("second")
            self.begun = time.monotonic()
            with Producers(self.plan, self.many, self.room.dsn) as producers:
                self.screen.say("Two producers begin: one in bulk, one order by order, in transactions.")
                self.watch_it(lambda look: look.ended > self.many // 4 and self.watched(look))
                self.lose()
                self.cancel()
                self.watch_it(lambda look: not producers.busy and look.ended == look.total)
            clean = self.leave()
            return self.add_up() and clean

    def prepare(self) -> None:
        begun = time.monotonic()
        app.migrate()
        self.connection.execute("create table orders (number int primary key)")
        self.connection.execute("create table bookings (job bigint not null, amount int not null)")
        self.screen.say(f"The schema is installed ({since(begun)}). The jobs to come, out of a hundred:")
        for name, (share, _, does) in SORTS.items():
            self.screen.say(f"{share:>4} {name:<9}{does}")
        self.plan.watches = [watch.enqueue(door) for door in range(1, WATCHES + 1)]
        for job in self.plan.watches:
            self.plan.note(job.id, State.CANCELLED)
        self.screen.say(
            f"Besides orders, each leading to an invoice, and {WATCHES} that run until cancelled."
        )

    # Workers.

    def start(self, name: str) -> None:
        """Start a worker, and wait until it is at work."""
        begun = time.monotonic()
        with holding_back(*STOPPING):
            worker = Worker(name, self.room, self.patience)
            self.workers.append(worker)
        self.watch_it(lambda _: self.is_known(worker))
        self.screen.say(
            f"shiftwork worker shiftwork.demo_app:app --name {name} --lease {LEASE:g}s "
            f"(pid {worker.process.pid}, {since(begun)})"
        )

    def is_known(self, worker: Worker) -> bool:
        """Whether a worker has registered; then it has a number."""
        rows = self.rows("select id from shiftwork.workers where pid = %s", worker.process.pid)
        worker.number = rows[0][0] if rows else 0
        return bool(rows)

    def lose(self) -> None:
        """Kill the worker that holds most, and see its jobs come back."""
        holds = Counter(job.worker for job in self.look().held)
        worker = max(self.workers, key=lambda worker: holds[worker.number])
        worker.kill()
        killed = time.monotonic()
        held = self.held(worker.number)
        self.screen.say(f"kill -9 {worker.process.pid}: the worker {worker.name!r} is dead.", bad=True)
        self.screen.say(f"It held {jobs_in_words(held)}. Its lease lasts {LEASE:g} s at most.")
        self.lost = {job.id for job in held}
        self.watch_it(lambda look: not self.left_by(worker, look))
        took = since(killed)
        self.workers.remove(worker)
        self.screen.say(
            f"Taken back after {took}, ready for the others: jobs {some(self.lost, 12)}.", good=True
        )
        self.start("third")

    def left_by(self, dead: Worker, look: Look) -> set[int]:
        """The jobs that a dead worker still holds; an answer to its last claim may have come after its death."""
        left = {job.id for job in look.held if job.worker == dead.number}
        self.lost |= left
        return left

    def cancel(self) -> None:
        """Tell the jobs that never end by themselves to stop."""
        self.watch_it(self.watched)
        answers = Counter(job.cancel("the night is over") for job in self.plan.watches)
        told = ", ".join(f"{many} {answer}" for answer, many in answers.items())
        self.screen.say(f"The {WATCHES} watches are cancelled while they run: {told}.")

    def leave(self) -> bool:
        """Stop the workers as a deployment does."""
        begun = time.monotonic()
        codes = {worker.name: worker.stop() for worker in self.workers}
        told = ", ".join(f"{name} {code}" for name, code in codes.items())
        clean = not any(codes.values())
        self.screen.say(f"TERM to the workers; exit codes after {since(begun)}: {told}.", bad=not clean)
        if not clean:
            for worker in self.workers:
                self.screen.say(f"{worker.name}: {worker.last_words}", bad=True)
        return clean

    def end_workers(self) -> None:
        """Let no worker outlive the demo."""
        with signals(signal.SIG_IGN, *STOPPING):
            for worker in self.workers:
                if worker.process.poll() is None:
                    worker.kill()

    # Looking.

    def watch_it(self, until: Callable[[Look], bool]) -> None:
        """Look on until something is so."""
        while True:
            if _heard:
                signal.raise_signal(_heard[0])
            begun = time.monotonic()
            look = self.look()
            self.screen.show(self, look)
            if until(look):
                return
            if self.plan.doubtful:
                raise ShiftworkError(f"a producer failed: {self.plan.doubtful}")
            for worker in self.workers:
                if worker.process.poll() is not None and not worker.killed:
                    raise ShiftworkError(f"the worker {worker.name!r} has ended: {worker.last_words}")
            if begun > self.begun + self.patience:
                counts = ", ".join(f"{many:,} {state}" for state, many in look.counts.items())
                raise ShiftworkError(f"it takes too long; after {since(self.begun)} there are {counts}")
            time.sleep(max(LOOK_EVERY, 4 * (time.monotonic() - begun)))  # looking must not be the main work

    def look(self) -> Look:
        """What there is to see now."""
        ended = self.rows(
            "select worker, count(*) from shiftwork.history where worker is not null group by 1"
        )
        return Look(time.monotonic(), app.counts(), self.held(), dict(ended))

    def held(self, worker: int | None = None) -> list[Held]:
        """What workers hold, or one of them."""
        rows = self.rows(
            "select id, task, worker from shiftwork.jobs"
            " where state = 'running' and (%s::bigint is null or worker = %s) order by id",
            worker,
            worker,
        )
        return [Held(*row) for row in rows]

    def watched(self, look: Look) -> bool:
        """Whether all watches are running; so somebody always holds something."""
        return sum(job.task == "watch" for job in look.held) == WATCHES

    def rows(self, statement: Any, *params: object) -> list[Any]:  # noqa: ANN401
        """What the database says."""
        return self.connection.execute(statement, params or None).fetchall()

    # Adding up.

    def add_up(self) -> bool:
        """Whether everything is as it should be, in so many words."""
        rows = self.rows("select id, state::text, failures, resets, task from shiftwork.all_jobs")
        found = {id: State(state) for id, state, *_ in rows}  # noqa: A001
        expected = dict(self.plan.states)
        invoices = [id for id, _, _, _, task in rows if task == "invoice"]  # noqa: A001
        expected.update(dict.fromkeys(invoices[: self.plan.orders], State.COMPLETED))
        self.screen.account(Counter(expected.values()), Counter(found.values()))

        amiss = [id for id in expected.keys() | found.keys() if found.get(id) != expected.get(id)]  # noqa: A001
        doubled = len(rows) - len(found)
        checks = [
            self.check(
                not amiss and not doubled,
                f"{len(expected):,} jobs were enqueued, and every one has ended as it should, once",
                f"{len(expected):,} jobs were enqueued, {len(rows):,} found; not as they should be: "
                f"{some(amiss)}{f' ({doubled} doubled)' if doubled else ''}",
            ),
            self.check_failures(rows),
            self.check(
                len(invoices) == self.plan.orders == self.rows("select count(*) from orders")[0][0],
                f"{self.plan.orders:,} orders were committed with their jobs, and each led to one invoice",
                f"{self.plan.orders:,} orders were made, but there are {len(invoices):,} invoices",
            ),
            self.check_bookings(),
            self.check_lost(rows),
        ]
        return all(checks)

    def check_failures(self, rows: Sequence[Any]) -> bool:
        counted = {id: failures for id, _, failures, *_ in rows if failures}  # noqa: A001
        jobs = counted.keys() | self.plan.failures.keys()
        amiss = [id for id in jobs if counted.get(id) != self.plan.failures.get(id)]  # noqa: A001
        return self.check(
            not amiss,
            f"{sum(counted.values()):,} attempts failed, exactly those that were to fail",
            f"failures were miscounted for {some(amiss)}",
        )

    def check_bookings(self) -> bool:
        booked = self.rows("select job, sum(amount), count(*) from bookings group by 1")
        found = {job: amount for job, amount, _ in booked}
        twice = [job for job, _, many in booked if many > 1]
        planned = self.plan.bookings
        return self.check(
            found == planned and not twice,
            f"{len(planned):,} bookings were made in transactions of jobs, each exactly once "
            f"(their sum is {sum(found.values()):,}, as it should be)",
            f"{len(planned):,} bookings were to be made, {len(found):,} were, {len(twice):,} more than once",
        )

    def check_lost(self, rows: Sequence[Any]) -> bool:
        reset = {id for id, _, _, resets, _ in rows if resets}  # noqa: A001
        late = len(reset - self.lost)  # on a machine that is busy otherwise
        besides = f", and {late} because a worker could not renew its lease in time" if late else ""
        return self.check(
            bool(reset),
            f"{len(reset & self.lost):,} attempts were lost with their worker, and made again by another{besides}",
            "a worker was killed, and yet no attempt was lost",
        )

    def check(self, good: bool, well: str, ill: str) -> bool:
        """Say how it is."""
        self.screen.say(well if good else ill, good=good, bad=not good)
        return good


# In words.


def since(begun: float) -> str:
    """How long ago that was."""
    return f"{time.monotonic() - begun:.1f} s"


def some(ids: Iterable[int], most: int = 10) -> str:
    """A few of these numbers."""
    those = sorted(ids)
    more = f" and {len(those) - most} more" if len(those) > most else ""
    return f"{', '.join(map(str, those[:most]))}{more}" or "none"


def jobs_in_words(held: Sequence[Held]) -> str:
    """How many jobs of which task: 8 jobs (5 resize, 3 book)."""
    tasks = Counter(job.task for job in held).most_common()
    told = ", ".join(f"{many} {task}" for task, many in tasks)
    return f"{len(held)} job{'' if len(held) == 1 else 's'}{f' ({told})' if told else ''}"


class Screen:
    """The demo in plain lines, with a look at it now and then."""

    def __init__(self) -> None:
        self._told = 0.0
        self._looks: list[Look] = []

    def say(self, text: str, *, good: bool = False, bad: bool = False) -> None:
        """Tell one thing that happened."""
        click.echo(f"{'✓' if good else '✗' if bad else '•'} {text}")

    def show(self, demo: Demo, look: Look) -> None:
        """Show how it is going."""
        rate = self.rate(look)
        if look.at - self._told < TELL_EVERY or not look.ended:
            return
        self._told = look.at
        live = ", ".join(
            f"{many:,} {state}" for state, many in look.counts.items() if not state.is_final and many
        )
        said = f"  {since(demo.begun):>7}: {look.total:,} enqueued, {look.ended:,} ended ({rate:,.0f}/s)"
        click.echo(f"{said}; {live}" if live else said)

    def rate(self, look: Look) -> float:
        """Jobs that ended in a second, over the last few."""
        self._looks.append(look)
        while len(self._looks) > 2 and look.at - self._looks[0].at > 2:
            self._looks.pop(0)
        first = self._looks[0]
        return (look.ended - first.ended) / (look.at - first.at) if look is not first else 0.0

    def account(self, expected: Mapping[State, int], found: Mapping[State, int]) -> None:
        """Show where the jobs are, and where they should be."""
        click.echo(f"  {'':<11}{'expected':>9}{'found':>9}")
        for state in State:
            if expected.get(state) or found.get(state):
                click.echo(f"  {state:<11}{expected.get(state, 0):>9,}{found.get(state, 0):>9,}")


COLOURS = {
    State.SCHEDULED: "blue",
    State.READY: "cyan",
    State.RUNNING: "yellow",
    State.COMPLETED: "green",
    State.FAILED: "red",
}


class LiveScreen(Screen):
    """The demo on a terminal: the lines go by above a picture of where the jobs are."""

    def __init__(self) -> None:
        from rich.console import Console  # noqa: PLC0415  -- only a terminal needs it
        from rich.live import Live  # noqa: PLC0415

        super().__init__()
        self.console = Console(highlight=False)
        self.live = Live(console=self.console, refresh_per_second=10, transient=True)

    def say(self, text: str, *, good: bool = False, bad: bool = False) -> None:
        from rich.text import Text  # noqa: PLC0415

        mark, style = ("✓", "green") if good else ("✗", "red") if bad else ("•", "")
        self.console.print(Text(f"{mark} {text}", style=style))

    def show(self, demo: Demo, look: Look) -> None:
        self.live.update(self._drawn(demo, look))

    def account(self, expected: Mapping[State, int], found: Mapping[State, int]) -> None:
        from rich import box  # noqa: PLC0415
        from rich.table import Table  # noqa: PLC0415

        self.live.update("", refresh=True)
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column("state")
        for name in ("expected", "found"):
            table.add_column(name, justify="right")
        for state in State:
            if expected.get(state) or found.get(state):
                numbers = (expected.get(state, 0), found.get(state, 0))
                table.add_row(
                    f"[{COLOURS.get(state, 'bright_black')}]{state}[/]", *(f"{n:,}" for n in numbers)
                )
        self.console.print(table)

    def _drawn(self, demo: Demo, look: Look) -> Any:  # noqa: ANN401
        from rich.console import Group  # noqa: PLC0415
        from rich.progress_bar import ProgressBar  # noqa: PLC0415
        from rich.table import Table  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        total = max(look.total, demo.many)
        top = Table.grid(padding=(0, 2))
        top.add_row(
            Text(f"{since(demo.begun):>7}"),
            ProgressBar(total=total, completed=look.ended, width=40),
            Text(f"{look.ended:,} of {total:,} ended"),
            Text(f"{self.rate(look):,.0f} jobs/s", style="bold"),
        )
        states = Table.grid(padding=(0, 2))
        for state in State:
            if state in {State.BLOCKED, State.WAITING, State.EXPIRED}:
                continue
            number = look.counts.get(state, 0)
            bar = "█" * (40 * number // total) or ("▏" if number else "")  # readable without colour, too
            style = COLOURS.get(state, "bright_black")
            states.add_row(Text(f"{state:>11}"), Text(f"{number:,}", justify="right"), Text(bar, style=style))
        workers = Table.grid(padding=(0, 2))
        for worker in demo.workers:
            held = [job for job in look.held if job.worker == worker.number]
            colour = "red" if worker.killed else "yellow"
            slots = Text.assemble(("■" * len(held), colour), ("·" * (CONCURRENCY - len(held)), "dim"))
            ended = Text(f"{look.ended_by.get(worker.number, 0):,} ended", justify="right")
            about = f"dead, holding {jobs_in_words(held)}" if worker.killed else jobs_in_words(held)
            workers.add_row(Text(f"{worker.name:>11}"), slots, ended, Text(about, style="dim"))
        return Group(Text(), top, Text(), states, Text(), workers)


@contextmanager
def a_screen() -> Iterator[Screen]:
    """What this output can show."""
    if not sys.stdout.isatty():
        yield Screen()
        return
    screen = LiveScreen()
    if screen.console.is_dumb_terminal:
        yield Screen()
        return
    with screen.live:
        yield screen
