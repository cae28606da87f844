"""Write docs/rows.md: what shiftwork promises, row by row, and the tests that show it.

A test names the rows that it shows in a comment, above it or inside it: `# spec: SH-16, QU-11`. Here every
row has a few words. A row that a test names and that has no words is an error, so that nobody claims what
nobody can read.

    python docs/rows.py            writes the page
    python docs/rows.py --check    says whether it is up to date; exit code 1 if it is not
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "rows.md"

NAMED = re.compile(r"#\s*spec:(.*)")
ROW = re.compile(r"\b[A-Z]{1,2}-\d+\b")

GROUPS = {
    "SH": "A job and its ending",
    "SG": "Holding, losing and cancelling",
    "HO": "States, deadlines and sending",
    "QU": "Leases, transactions and times",
    "ST": "Tables, registry and merging",
    "A": "What is safe and what is kept",
    "D": "Choices",
}

WORDS = {
    "SH-1": "one command is the long-lived process that only claims and runs",
    "SH-2": "a job is one row: task, JSON payload, due time, counters, times; all are kept in range",
    "SH-3": "the state of a job always agrees with its times",
    "SH-4": "small partial indexes carry the claim and the search for what a worker holds",
    "SH-5": "enqueue gives an id, may name a time and the attempts, and joins the caller's transaction",
    "SH-6": "whoever sleeps is told at commit, once for a batch; a lost notification loses nothing",
    "SH-7": "one statement claims: due, in order, what others have locked is skipped, the attempt rises",
    "SH-9": "how much runs at once can be set by flag, environment and file; a value out of range is refused with the range",
    "SH-10": "the connections of a worker are counted from what was resolved, and do not grow with what runs at once",
    "SH-14": "a job that succeeds is completed, is nobody's any more, and stays to be read",
    "SH-15": "a job that fails keeps its error, is let go, and runs again after a wait",
    "SH-16": "waits double from 30 s up to an hour, spread by a fifth either way",
    "SH-17": "poison fails at once, with its cause kept",
    "SH-18": "an error that nobody foresaw is a failure like others",
    "SH-19": "after the last attempt that is allowed, a job has failed",
    "SH-20": "a job of a task that nobody here has can be failed at once; the worker carries on",
    "SH-21": "a job whose worker fell silent is taken back; a worker that renews its lease keeps it",
    "SH-22": "a job that kills its workers ends as failed, not in a loop",
    "SH-23": "an attempt may take only so long",
    "SH-27": "a line for every job: job, task, queue, attempt, how long, how it ended; the first line says who serves what",
    "SH-28": "a worker can be found by name, host and process",
    "SH-31": "finished jobs are forgotten after some days, by how they ended",
    "SH-32": "jobs are listed by task and state, newest first, page by page, and counted by state",
    "SH-33": "a finished job is brought back to run now, with its failures forgiven",
    "SH-34": "a person can end a job that waits, and the record says so",
    "SH-35": "a job can be enqueued from the command line, with its arguments as JSON",
    "SH-24": "a signal stops the claiming; handlers, and the writing of how they ended, are not cut off by it",
    "SG-5": "an error is worth another attempt unless it, or what it was raised from, says otherwise",
    "SG-16": "one heartbeat renews for all that a worker holds, without a deadlock with those who settle",
    "SG-17": "a worker learns from its heartbeat what it has lost",
    "SG-18": "a running job is asked to stop, by way of its worker; that counts as no failure",
    "SG-19": "an attempt that takes too long is a failure like others, and says so",
    "SG-20": "an outcome is taken only from the one who holds the job, and the answer says whether it was",
    "SG-21": "the limit is of failures in all, not of attempts after the first",
    "SG-22": "a fixed wait between attempts is one delay that stays the same",
    "SG-24": "a handler can put its job off to a time",
    "SG-25": "lost jobs run again up to a number of losses, then they have failed, with a reason",
    "SG-31": "a signal stops one worker, or all that a supervisor runs, when what runs has ended; a second one at once",
    "SG-41": "how often a lease is renewed follows from the lease, and is no setting of its own",
    "SG-42": "the clocks of the database, of heartbeats and of the end can each be put forward by itself: tests wait for none",
    "SG-15": "a job whose worker died between the claim and its code is found, and costs nothing",
    "SG-30": "who stops claims no more, and goes on holding its lease until its last handler has ended",
    "SG-33": "two attempts of one job never run on one worker at once; what came twice is given back",
    "HO-43": "the app is named as a module or a file, its only App is found, nothing is sent while it is imported; a command checks it",
    "HO-2": "settings, then the app, then the database: what is wrong is told first, a database that is away is waited for",
    "HO-4": "a claim takes what is due and not too late, queue by queue, by priority, time and id",
    "HO-14": "queues, concurrency, how much is claimed at once and held ahead, and the log are settings or a hook",
    "HO-5": "lower numbers are more urgent; queues are served in the order given, each up to its share",
    "HO-6": "a start deadline is checked at claim, at start and by a duty; no retry lands behind it",
    "HO-7": "four endings, and each is final; completed means that it succeeded",
    "HO-8": "a job fetched ahead starts only if it is still this worker's, in time and wanted",
    "HO-12": "every failure has a code, and it is stored",
    "HO-13": "some codes are reserved; others are the program's own, in UPPER_SNAKE_CASE",
    "HO-18": "a lease has a length in every mode, and is renewed in good time",
    "HO-29": "a policy names the errors worth another attempt, a list of waits or a first one, and jitter",
    "HO-30": "exceptions become codes by their class: the task's map, the app's, the task's default, the app's",
    "HO-31": "an attempt that failed or was lost leaves a row: when, why, by whom, whether another follows",
    "HO-32": "sending gives a handle or an error of a telling type; sending the same again is safe",
    "HO-33": "a handle waits for the result up to a time, and tells about the job and its attempts",
    "HO-34": "queues can be declared; then no other can be named, by a task, a send or a worker",
    "HO-35": "the schema is installed by a command; racing installers take turns; nothing to do is quick",
    "HO-38": "finished jobs are kept for as many days as is said for their ending",
    "HO-39": "a result must be what the task says it returns",
    "HO-41": "when a job was sent never changes; when it is due moves with delays and retries",
    "HO-42": "typed arguments go through JSON and come back as they were; storing an error never fails",
    "HO-44": "calling a task runs it in place",
    "HO-45": "the same job under the same key is the first one; a different one is refused",
    "HO-10": "how an attempt ended is written once, under its fence, and kept until the database has answered",
    "HO-15": "what falls under a limit is not fetched ahead",
    "HO-16": "limits of the whole cluster, on a queue, a task and over all: never exceeded, and nothing behind them waits",
    "HO-17": "a limit counts all that is claimed; there is no soft one, since what is limited is not fetched ahead",
    "HO-36": "any number of workers claim at once, and limits hold over all of them",
    "D-23": "a queue with a limit of one is serial in the whole cluster",
    "SG-2": "a hook before a claim may leave it out, or add conditions and limits; if it fails, nothing is claimed and it is told once",
    "SG-4": "a budget: what is too large now is passed by, and what stands behind it is found",
    "D-29": "a hook before a claim that fails skips it; one around a job is a warning; middleware fails the attempt",
    "HO-22": "what had not begun runs again for nothing; what had begun counts a loss, or fails where its task says so",
    "HO-24": "code that has returned and is not yet written about is nobody else's while its worker lives",
    "HO-25": "whoever is told to stop waits for what runs; exit code 0 if all was ended or given back, else 1",
    "HO-28": "every connection of a worker is made anew when it is lost, and what was missed is looked for",
    "HO-40": "a late result is refused by owner and attempt, though the job runs again elsewhere",
    "QU-1": "a worker has so many slots, each with one job at a time",
    "QU-2": "first what is ready is claimed, then what others left behind is reaped, then a worker waits",
    "QU-3": "a worker without work waits to be woken, for a freed slot or for its poll",
    "QU-4": "a claim takes only tasks that the worker knows, and says whether there may be more",
    "QU-5": "a task can be tried for ever: attempts without end",
    "QU-6": "one lease for each worker, renewed while it lives; whoever renews learns what it has lost",
    "QU-7": "a late worker whose job nobody took may still settle it",
    "QU-8": "the reaper takes jobs of lapsed workers, never its own, and wakes others",
    "QU-9": "a worker that lost a job is told why, and told at once",
    "QU-11": "waits follow a first delay, a factor and a cap, with no end of attempts",
    "QU-12": "a handler can ask to run again at a time; that counts as no failure",
    "QU-13": "the last error is kept in bounds, and gone once the job succeeds",
    "QU-20": "what is enqueued in a transaction lives and dies with it, savepoints included",
    "QU-23": "one key, one job: while it is unfinished or within a window, also inside one batch",
    "QU-24": "a time that has passed counts as now; what waits can be run now, all of it or none",
    "QU-25": "a job can be completed from outside; a worker that runs it is told",
    "QU-26": "waiting for a result has a limit, is woken by a notification, and looks by itself as well",
    "QU-30": "any schema name, an enum of states, partial indexes, room for updates, numbered migrations",
    "QU-32": "what goes in and what comes out is checked, and refused with a code",
    "QU-14": "stopping waits for what is in flight, and says when it began and when it is done",
    "QU-15": "no error of the database ends a worker: it waits, longer each time, and goes on",
    "QU-18": "the effects of a transactional handler and its job's end are one commit, or nothing",
    "QU-27": "a handler whose job was deleted is told that it is missing",
    "ST-1": "jobs, a registry of tasks and one of queues are tables that can be read",
    "ST-2": "the registry gives what an enqueue leaves out; an error is there exactly when a job went wrong",
    "ST-3": "a job is due, running, waiting for its children, completed or failed; one whose engine died is told apart",
    "ST-4": "a job that waits is kept, replaced or merged by its newer twin, from SQL too",
    "ST-6": "handlers may be routines in the database, and run there",
    "ST-7": "a session processes so many jobs, for so long, of a queue and up to a priority",
    "ST-8": "sessions that process jobs take them in order, pass by what others have, and share",
    "ST-9": "hooks run before and after a handler; what goes wrong in them is a warning",
    "ST-10": "inside an open transaction nothing is committed, and all of it is undone with the caller",
    "ST-11": "a failure in SQL keeps message, detail, hint and context; how long a job took can be read",
    "ST-14": "a job whose session is gone from this database is taken back, without waiting for a lease",
    "ST-27": "changes are noted in a table and collected by one job that waits; if a crash emptied it, everything is done",
    "ST-29": "a test enqueues in a transaction, processes, looks, and rolls back",
    "ST-30": "a new task in SQL: a procedure, a row in the registry, a function that enqueues",
    "ST-12": "deadlocks and serialization failures are repeated on the spot, a few times",
    "ST-15": "queues are found in the registry, also while a worker runs; how many jobs of each run at once can be said",
    "ST-18": "two last children that end at once do not miss each other: their parent ends, whatever happened",
    "ST-20": "who has nothing to do sleeps until the next job is due, and an earlier one moves that",
    "ST-21": "a pause stops claiming, ends by itself with a warning or by hand and at once, and what runs goes on",
    "ST-22": "who is told to stop gives running jobs a while; what has not ended then is ended, with exit code 1",
    "ST-13": "under one name only one worker is at work; a second one ends with exit code 1, and says who is",
    "ST-24": "a worker can wait for a schema that is not there yet",
    "ST-25": "a worker can end when nothing is left, future jobs aside, and says what it did by queue and ending",
    "ST-26": "completed and failed jobs are kept for different lengths of time",
    "A-7": "a key of up to 255 bytes makes sending safe over a network that fails",
    "A-8": "history is kept per queue, per send or for ever, and goes by whole partitions",
    "A-9": "a payload that is too large is refused when it is enqueued; results never are",
    "A-19": "a handler may take several jobs at once: what is at hand, never waiting for more, with a savepoint for each",
    "A-27": "handlers that analyze one table wait for each other: the page warns of it",
    "A-26": "changing the schema waits for locks only briefly, and fails loudly",
    "D-4": "as many workers as you like, or one at a time under a name, with others that stand by",
    "D-2": "lost before its code began: nothing counts; after: a reset counts, and they are bounded",
    "D-3": "finished jobs are kept, for as long as their ending, queue and sender say; archiving is a choice",
    "D-5": "a worker is woken, and polls besides; it can be told to poll only",
    "D-6": "whoever enqueues notifies, and a trigger does for a plain INSERT",
    "D-7": "order is priority, due time, id; lower is sooner",
    "D-8": "whether, when and for which errors there is another attempt is a value; repeats on the spot are another",
    "D-9": "attempts, failures and resets are three counters and never mixed",
    "D-10": "nine states; a retry is a scheduled job that has failures",
    "D-11": "a state and its times, tied together by checks",
    "D-12": "an exception becomes a code, and the policy decides; poison is the end everywhere",
    "D-13": "a lease is renewed at least twice before it ends",
    "D-14": "a task may have a timeout, which is an ordinary failure, and a start deadline besides",
    "D-16": "every write about a running job names its attempt and worker; a stale one changes nothing",
    "D-17": "a worker claims only the tasks it knows; a registry may say more about them",
    "D-19": "enqueue through Python, through a function or by a plain INSERT: the same job",
    "D-20": "unique keys with a scope and an action; the answer says what happened",
    "D-26": "one clock, the database's; tests may shift it",
    "D-27": "a worker's identity is new at every start",
    "D-28": "a result, and the attempts that failed with their codes, are there to be read",
    "D-24": "event loop, thread or a process of its own, and the same ways to end; a process that dies fails only its job",
    "HO-20": "a job whose process cannot be started goes back, with nothing counted, and is tried again",
    "HO-21": "one lease covers what waits and what runs, in whichever process",
    "D-30": "a queue, a task, a worker or everything can be paused, with an end; what runs goes on",
    "D-1": "a claim commits first; a transactional job then locks its row under the fence for as long as it runs",
    "D-25": "TERM, INT and HUP: no claims, what has not begun goes back, a grace, then the rest goes back; a second signal is now",
    "SH-8": "queues and tasks take turns, and as long as there is work nobody waits",
    "SH-11": "one listener for each worker; when it is cut off it listens again, and looks for what it missed",
    "SH-12": "a poll stands behind every notification",
    "SH-13": "a handler gets what was sent, as its annotations say",
    "SH-29": "a task is declared in one place, and found by its name",
    "SH-30": "a job may enqueue its own successor",
    "SG-3": "what comes before a job runs first; what comes after it always does, after success, failure and cancelling",
    "SG-27": "a slot first, then a claim; after a hit the next at once, after a miss a rest",
    "SG-28": "nothing is claimed while all slots are busy",
    "SG-29": "a worker can be told to end after so many jobs, after some time, or when nothing is left",
    "HO-1": "async functions run in the event loop, plain ones in threads, and nothing they raise gets out",
    "HO-3": "claim, run, wait for a notification, a freed slot or the poll, and claim again",
    "HO-9": "found by name, arguments read, called, result written",
    "HO-11": "who waits for a result is told when it is there; who sleeps is told of new work",
    "HO-19": "a slot or a place under a limit that is freed is filled at once, on its own worker or on one that sleeps",
    "QU-10": "a worker has a name that people choose, and an id that is its own",
    "QU-16": "one worker runs many tasks, each by its own rules, and only those it knows",
    "QU-17": "middleware wraps every attempt, the first outermost; it may change result and error, and a worker may require it in order",
    "QU-19": "a statement that fails, or an error after the end, takes the effects back, and is recorded all the same",
    "D-22": "claimed is what there are slots for; fetching ahead is a choice, and no limit is passed by it",
    "SH-25": "attempts are counted by task and outcome, their durations in twelve buckets, and what is in flight",
    "SH-26": "a worker serves its figures itself",
    "SG-26": "jobs taken back, those that failed of it, and errors of doing so are counted",
    "SG-38": "workers without a way to the database dequeue, log, renew and end over HTTP; nothing there is 204, no such job 404; a payload that cannot be given out has failed; each attempt has a token, which opens nothing after its end",
    "A-23": "remote workers have the same leases and fences, in a schema of ours or a table of yours; whoever was superseded writes nothing",
    "SG-36": "how much waits and how long; the most in flight since the last look, so that short jobs are seen; hooks timed apart",
    "QU-31": "typed events are counted: attempts, claims, settlements, outages; slots that are busy and free",
    "SG-37": "of every duty and host the last start and stop, the last hundred runs and figures of each day are known; silent hosts are forgotten",
    "SG-39": "of several queues the weights decide, among those of which not too much was claimed within five minutes; if all are over, among all",
    "A-22": "queues are chosen by weight and by a budget of recent claims, and no slot is idle because of it",
    "A-24": "what a worker takes is bounded: connections by how many jobs run at once, memory of processes, rows of a purge, labels of figures",
    "A-12": "a command checks settings, import, tasks and database by phases; each problem has a number",
    "SG-34": "what an attempt logs is kept with it, with its time; whoever was superseded writes nothing, and is told",
    "HO-23": "what is done for all and fails three times, for good, is left to others, loudly; what passes does not count",
    "HO-37": "a worker says every few seconds what it runs and costs; that is kept for some days",
    "SG-1": "a worker is a store and a handler; stores can be replaced",
    "SG-6": "rows are queued, processing, errored, failed, completed or canceled",
    "SG-7": "the columns of a table that somebody already has, under names of its own, with others beside them",
    "SG-8": "producers insert rows themselves",
    "SG-9": "a table, a view, a record, an order, a condition, names of columns, a lease, resets and retries are what a store is told",
    "SG-10": "a record comes from the view, and has the new values of what the claim has changed",
    "SG-11": "what a view adds has the name that the record asks for",
    "SG-12": "a claim takes what is due in order, passes by what is locked, and clears what the former attempt left",
    "SG-13": "a claim commits before its code runs, and gives each row once",
    "SG-14": "a row is marked as taken for all to see, then locked; a failed attempt leaves nothing in the database",
    "SG-23": "what has failed for good is not tried again, and is canceled if that was asked for",
    "SG-35": "rows can be counted by state, or asked for; and for how long the oldest has waited",
    "QU-33": "one suite of tests for every store, which others can run on theirs",
    "D-18": "jobs are in a schema of ours, or in a table that somebody already has; the same tests hold for both",
    "SG-32": "lost jobs can be taken back by a process that runs none",
    "D-15": "one function takes lost jobs back; workers call it for each other, and so does a command",
    "HO-26": "while the database is away the waits double, from half a second to half a minute, and are not the same for everybody",
    "HO-27": "what will pass is waited for; what no waiting can mend ends the worker, with the reason",
    "ST-23": "a worker that lost its connections makes them anew, without end; one that should be idle is watched and asked",
    "ST-5": "a notification names a queue; what is not ours, or makes no sense, wakes nobody for long",
    "QU-29": "one channel for work, one for jobs that are to be looked at, one for results, on one connection",
    "A-10": "behind a pooler everything works by polling; a second address brings notifications back, and a call proves that they come",
    "SH-36": "a worker is drained by one signal; everything, a queue or a task by a command that waits and says what still runs",
}


def tests_in(path: Path) -> list[tuple[int, str]]:
    """The tests of a file, in their order: the last line of each, and its name."""
    found = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                visit(child, f"{prefix}{child.name}::")
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and child.name.startswith("test_"):
                found.append((child.end_lineno or child.lineno, prefix + child.name))

    visit(ast.parse(path.read_text("utf-8")), "")
    return sorted(found)


def claims_of(
    path: Path, naming: re.Pattern[str] = NAMED, one: re.Pattern[str] = ROW
) -> Iterator[tuple[int, list[str]]]:
    """Each comment that names rows: its line, and the rows."""
    source = io.StringIO(path.read_text("utf-8"))
    for token in tokenize.generate_tokens(source.readline):
        if token.type == tokenize.COMMENT and (match := naming.search(token.string)):
            yield token.start[0], one.findall(match[1])


def shown() -> tuple[dict[str, list[str]], list[str]]:
    """The tests that show each row, and what is wrong with the claims."""
    rows: dict[str, list[str]] = {}
    wrong = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        where = path.relative_to(ROOT).as_posix()
        tests = tests_in(path)
        for line, named in claims_of(path):
            # The test around the comment, or else the next one below it.
            test = next((name for last, name in tests if line <= last), None)
            if test is None or not named:
                wrong.append(f"{where}:{line}: a comment names rows, but no test follows, or no row is named")
                continue
            for row in named:
                if row not in WORDS:
                    wrong.append(f"{where}:{line}: {row} has no words in docs/rows.py")
                elif (place := f"{where}::{test}") not in rows.setdefault(row, []):
                    rows[row].append(place)
    return rows, wrong


def page(rows: dict[str, list[str]]) -> str:
    """The page as it should be."""
    lines = [
        "# Rows",
        "",
        "Everything that shiftwork promises is a row: an id, a few words, and the tests that show it. An id",
        "never changes its meaning; the letters only group them. `make spec` writes this page from the",
        "comments in `tests/`, and `make check` says if it is out of date.",
    ]
    for group, title in GROUPS.items():
        members = [row for row in WORDS if row.startswith(f"{group}-") and row in rows]
        if not members:
            continue
        lines += ["", f"## {title}", "", "| id | what | shown by |", "|---|---|---|"]
        for row in members:
            places = "<br>".join(f"`{test}`" for test in rows[row])
            lines.append(f"| {row} | {WORDS[row]} | {places} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    rows, wrong = shown()
    if wrong:
        print(*wrong, sep="\n", file=sys.stderr)
        return 1
    written = page(rows)
    if not arguments:
        PAGE.write_text(written, "utf-8")
        print(f"{len(rows)} rows are shown by tests; the page is {PAGE.relative_to(ROOT)}")
    elif not PAGE.exists() or PAGE.read_text("utf-8") != written:
        print("docs/rows.md is out of date: run `make spec`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
