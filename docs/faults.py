"""Write docs/faults.md: what the world does to a job queue, and the tests and lanes of `make chaos` that show what holds.

A test names the faults that it makes in a comment, above it or inside it: `# fault: F6, F12`.

    python docs/faults.py            writes the page
    python docs/faults.py --check    says what the page names and nobody shows; exit code 1 if there is anything
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import rows

PAGE = rows.ROOT / "docs" / "faults.md"
NAMED = re.compile(r"#\s*fault:(.*)")
FAULT = re.compile(r"\bF\d+\b")

WORDS = {
    "F1": "a worker is killed with -9 while it runs jobs",
    "F2": "only the child that runs a job is killed",
    "F3": "a worker comes to harm at a certain point of a job's way: it dies, raises, sleeps past its lease or loses its lines",
    "F4": "a worker is stopped for longer than its lease, and goes on afterwards",
    "F5": "the event loop is blocked; threads burn the processor",
    "F6": "only the lease cannot be renewed, all else goes well",
    "F7": "any session of a worker is ended by the server",
    "F8": "the listener is cut off",
    "F9": "the server is restarted",
    "F10": "the server crashes",
    "F11": "a statement or a commit is carried out and its answer is lost; or it never arrives",
    "F12": "a line is half open: nothing arrives any more, and nobody says so",
    "F13": "the network is slow",
    "F14": "connections are refused, there are too many, or nobody is let in for a while",
    "F15": "a pooler stands before the database, and lends a session for one transaction at a time",
    "F16": "the pooler is restarted, paused, or has one session only",
    "F17": "handlers hold every session for transactions",
    "F20": "the server takes no writes any more, and another does",
    "F22": "the clock of a worker's machine is wrong: in these tests Python's clock is, by a day",
    "F23": "the clock of the server jumps: in these tests that of the schema does, by which everything is decided",
    "F25": "workers that look the same; a worker whose row is deleted",
    "F26": "a worker drains while its successor begins",
    "F27": "the reaper meets completing, cancelling, retrying and the rest, in every order",
    "F28": "signals: one, two, in the middle of everything, and with the database away",
    "F29": "one row among many that cannot be read or written",
    "F30": "a job that kills its process",
    "F31": "a handler that hears neither cancellation nor timeout",
    "F32": "a handler that leaks memory",
    "F33": "a process that is forked with connections open",
    "F34": "notifications are lost, come twice, are nonsense, or are a flood",
    "F35": "the notification queue is full",
    "F36": "notifying is dear: many who enqueue, many who sleep",
    "F39": "deadlocks; locks and statements that take too long",
    "F40": "hostile data",
}

LANES = {
    "F1": "kill",
    "F2": "kill a child",
    "F4": "stop",
    "F7": "terminate",
    "F10": "restart",
    "F11": "cut",
}
"""Which lane of `make chaos` makes a fault; the names are those of tests/chaos.py."""


def shown() -> dict[str, list[str]]:
    """The tests that make each fault."""
    found: dict[str, list[str]] = {}
    for path in sorted((rows.ROOT / "tests").rglob("test_*.py")):
        where = path.relative_to(rows.ROOT).as_posix()
        tests = rows.tests_in(path)
        for line, named in rows.claims_of(path, NAMED, FAULT):
            test = next((name for last, name in tests if line <= last), None)
            for fault in named:
                if (place := f"{where}::{test}") not in found.setdefault(fault, []):
                    found[fault].append(place)
    return found


def page(found: dict[str, list[str]]) -> str:
    """The page as it should be."""
    lines = [
        "# Faults",
        "",
        "What the world does to a job queue, and where it is shown what holds then: tests that run with every change, and",
        "lanes of [`make chaos`](chaos.md). Numbers that are left out here belong to other work. `make spec` writes this page",
        "from the comments in `tests/`; a test says if it names what is not there.",
        "",
        "| | what happens | shown by |",
        "|---|---|---|",
    ]
    for fault, words in WORDS.items():
        lane = [f"`make chaos`: {LANES[fault]}"] if fault in LANES else []
        places = "<br>".join([*lane, *(f"`{test}`" for test in found.get(fault, []))])
        lines.append(f"| {fault} | {words} | {places} |")
    return "\n".join(lines) + "\n"


def wrong(found: dict[str, list[str]]) -> list[str]:
    """Faults that the page has and nobody shows, or that tests name and the page has not."""
    said = PAGE.read_text("utf-8") if PAGE.exists() else ""
    chaos = (rows.ROOT / "tests" / "chaos.py").read_text("utf-8")
    every = {place for places in found.values() for place in places}
    return [
        *(f"{fault} is shown by nothing" for fault in WORDS if fault not in found and fault not in LANES),
        *(f"tests/chaos.py has no lane {lane!r}" for lane in LANES.values() if f'"{lane}":' not in chaos),
        *(f"{fault} has no words in docs/faults.py" for fault in found if fault not in WORDS),
        *(f"docs/faults.md has no line for {fault}" for fault in WORDS if f"\n| {fault} | " not in said),
        *(
            f"docs/faults.md names {place}, which shows no fault: run `make spec`"
            for place in re.findall(r"`(tests/[^`]+)`", said)
            if place not in every
        ),
    ]


def main(arguments: list[str]) -> int:
    found = shown()
    if not arguments:
        PAGE.write_text(page(found), "utf-8")
    if problems := wrong(found):
        print(*problems, sep="\n", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
