"""The pages are true: their code runs, their answers are the ones that come, and their links lead somewhere.

Python and SQL blocks of a page run in order, in one namespace and on one database; SQL runs in psql, as a
reader would run it. A `text` block right below an SQL block is what psql prints. A block that cannot run says
why, in a comment above it: `<!-- not run: … -->`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shiftwork import embedded, migrate
from shiftwork.errors import EmbeddedError
from shiftwork.program import Program
from tests.harness import Protocol

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]

BLOCK = re.compile(r"^(?:<!-- not run: (.+?) -->\n)?```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
FUNCTION = re.compile(r"create or replace (?:function|procedure) shiftwork\.(\w+)")

# What verbs call among themselves, and what only triggers call. Everything else is for workers and people.
INNER = {
    "abandon_job",
    "announce",
    "attend",
    "check_payload",
    "check_merge",
    "check_retry",
    "cancel_children",
    "cancel_jobs",
    "close_session",
    "complete_insert",
    "days_kept",
    "declare_until",
    "duties_due",
    "end_pauses",
    "end_sessions",
    "enqueue_jobs",
    "enqueue_unique",
    "fail_job",
    "failure",
    "finish",
    "finish_signalled",
    "finish_together",
    "forget_lapsed",
    "forget_on",
    "forget_runs",
    "give_back",
    "holds",
    "is_declared",
    "is_free",
    "is_within",
    "kind_of",
    "lease_of",
    "lend_permits",
    "lock_held",
    "lock_permits",
    "measured",
    "mend_permits",
    "merge_deep",
    "merge_payload",
    "merge_value",
    "next_job",
    "note",
    "open_session",
    "pick",
    "answerable",
    "place_time",
    "purge_companions",
    "purge_partition",
    "change_heed",
    "check_and_wake",
    "note_registered",
    "refuse_state",
    "return_permits",
    "routine_call",
    "run_hook",
    "run_routine",
    "seconds_of",
    "set_limit",
    "take_back",
    "target_of",
    "tell_parents",
    "today",
    "told",
    "try_gather",
    "unheld_answer",
    "wake",
    "why_lost",
    "will_pass",
}


@dataclass(frozen=True)
class Block:
    """A piece of code on a page, and what it is said to print."""

    line: int
    kind: str
    text: str
    prints: str | None


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def runnable(page: Path) -> list[Block]:
    """The blocks of a page that are to be run, in their order."""
    text = page.read_text("utf-8")
    found = list(BLOCK.finditer(text))
    blocks = []
    for place, match in enumerate(found):
        reason, kind, code = match.groups()
        if kind not in {"python", "sql"} or reason:
            continue
        below = found[place + 1] if place + 1 < len(found) else None
        answered = below is not None and below[2] == "text" and not text[match.end() : below.start()].strip()
        line = text.count("\n", 0, match.start(3)) + 1
        blocks.append(Block(line, kind, code, below[3] if below is not None and answered else None))
    return blocks


def psql() -> str:
    """A psql: the one that comes along, or the system's."""
    try:
        carried = str(embedded.find_binaries().path)
    except EmbeddedError:
        carried = ""
    found = shutil.which("psql", path=carried) or shutil.which("psql")
    if found is None:
        pytest.skip("there is no psql here")
    return found


def said(dsn: str, statements: str) -> str:
    """What psql prints for these statements."""
    settings = [
        "--no-psqlrc",
        "--quiet",
        "--set=ON_ERROR_STOP=1",
        "--set=SHOW_CONTEXT=never",
        "--dbname",
        dsn,
    ]
    done = subprocess.run(
        [psql(), *settings],
        input=statements,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=60,
        check=False,
        env={**os.environ, "LC_ALL": "C", "PGTZ": "UTC", "PAGER": ""},
    )
    assert done.returncode in {0, 3}, done.stdout
    return done.stdout


def tidy(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip("\n").split("\n")).strip("\n")


@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page)], ids=name_of)
def test_what_a_page_shows_works(
    page: Path, dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", dsn)
    monkeypatch.chdir(tmp_path)
    shown: dict[str, Any] = {"__name__": "shown"}
    try:
        for block in runnable(page):
            if block.kind == "python":
                # Empty lines above let an error name the line of the page.
                source = "\n" * (block.line - 1) + block.text
                exec(compile(source, str(page), "exec", dont_inherit=True), shown)
            else:
                answer = tidy(said(dsn, block.text))
                if block.prints is None:
                    assert "ERROR:" not in answer, f"{name_of(page)}:{block.line}\n{answer}"
                else:
                    assert answer == tidy(block.prints), f"{name_of(page)}:{block.line}"
    finally:
        for value in shown.values():
            if isinstance(value, Program):
                value.close()


def links(page: Path) -> Iterator[str]:
    prose = re.sub(r"`[^`\n]*`", "", BLOCK.sub("", page.read_text("utf-8")))
    return (match[1] for match in LINK.finditer(prose))


def anchors(page: Path) -> set[str]:
    """The names under which the headings of a page can be linked to."""
    prose = BLOCK.sub("", page.read_text("utf-8"))
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in HEADING.findall(prose))
    return {heading.strip().replace(" ", "-") for heading in kept}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in links(page):
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link} on {name_of(page)}"
        assert not anchor or anchor in anchors(target), f"{link} on {name_of(page)}"


def test_every_page_is_found_from_the_index() -> None:
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / link.partition("#")[0]).resolve() for link in links(index)}
    assert {page for page in PAGES if page.parent != ROOT} - {index} <= linked


def test_the_protocol_page_tells_of_every_verb() -> None:
    verbs = {
        verb
        for file in (ROOT / "src/shiftwork/sql/protocol").glob("*.sql")
        for verb in FUNCTION.findall(file.read_text("utf-8"))
    }
    assert verbs >= INNER
    page = (ROOT / "docs/protocol.md").read_text("utf-8")
    assert sorted(verb for verb in verbs - INNER if f"`{verb}`" not in page and f"`{verb}(" not in page) == []


def test_the_protocol_page_has_every_legal_move_and_no_other(protocol: Protocol) -> None:
    page = (ROOT / "docs/protocol.md").read_text("utf-8")
    section = page.split("\n## Moves\n")[1].split("\n## ")[0]
    told = {
        (verb, None if before == "—" else before, after)
        for verb, before, afters in re.findall(
            r"^\| `(\w+)` \| (\S+) \| ([\w, ]+?) \|", section, re.MULTILINE
        )
        for after in afters.split(", ")
    }
    legal = {
        (move["verb"], move["before"], move["after"]) for move in protocol.rows("select * from {}.moves")
    }
    assert told == legal


def test_the_page_of_roles_says_who_may_call_what() -> None:
    page = (ROOT / "docs/roles.md").read_text("utf-8")
    header, *lines = re.findall(
        r"^\| (?:verb|`.*`) \|.*\|$", page.split("## Who may call what")[1], re.MULTILINE
    )
    roles = [cell.strip() for cell in header.split("|")[2:-1]]
    told = {
        (verb, role)
        for verbs, *cells in (line.split("|")[1:-1] for line in lines)
        for verb in re.findall(r"`(\w+)`", verbs)
        for role, cell in zip(roles, cells, strict=True)
        if cell.strip() == "yes"
    }
    granted = {
        (verb, role)
        for functions, holders in re.findall(
            r"^grant execute on (?:function|procedure)(.*?)\bto (.*?);",
            migrate.roles(),
            re.MULTILINE | re.DOTALL,
        )
        for verb in re.findall(r"shiftwork\.(\w+)\(", functions)
        for role in re.findall(r"shiftwork_(\w+)", holders)
        if verb not in INNER
    }
    assert told == granted


FIGURE = re.compile(r"(?<![\d.,])(?:\d+\.\d\d|\d{1,3}(?:,\d{3})+)(?![\d,]|\.\d)")
MEASURED = {
    r"five million of them, claiming and settling ran at (\S+) of its speed": (
        r"^\| claim and settle with 5,000,000 jobs in history \| none \| (\S+) "
    ),
    r"old snapshot held open, the last quarter went at (\S+) of the speed": (
        r"^\| an old snapshot held open, 100,000 plain jobs: the last quarter \| the first quarter \| (\S+) "
    ),
    r"on uvloop, ran (\S+) no-op jobs a second": r"^One process ran (\S+) jobs a second",
}
"""Figures of the README, in their words, and where the page of benchmarks has them."""


def test_the_figures_of_the_readme_are_those_of_the_page_of_benchmarks() -> None:
    readme, page = ((ROOT / name).read_text("utf-8") for name in ("README.md", "docs/benchmarks.md"))
    claims = " ".join(readme.split("\n## What is different\n")[1].split("\n## ")[0].split())
    told = FIGURE.findall(claims)
    assert len(told) >= len(MEASURED)
    assert set(told) <= set(FIGURE.findall(page))
    for words, row in MEASURED.items():
        [said], [measured] = re.findall(words, claims), re.findall(row, page, re.MULTILINE)
        assert said == measured, words


CLAIM = "# spec" + ":"  # in two parts, lest it be read as a claim of this file


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project of one test, with the script that writes its page of rows."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "tests").mkdir()
    shutil.copy(ROOT / "docs/rows.py", tmp_path / "docs/rows.py")
    return tmp_path


def rows(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(project / "docs/rows.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_page_of_rows_tells_which_test_shows_what(project: Path) -> None:
    above = f"{CLAIM} SH-16, QU-11\ndef test_one(): ...\n"
    inside = f"class TestMore:\n    def test_two(self):\n        {CLAIM} SH-16\n        ...\n"
    (project / "tests/test_it.py").write_text(above + inside)
    assert rows(project, "--check").returncode == 1
    assert rows(project).returncode == 0
    page = (project / "docs/rows.md").read_text()
    assert re.search(
        r"SH-16 \| .* \| `tests/test_it.py::test_one`<br>`tests/test_it.py::TestMore::test_two` \|", page
    )
    assert re.search(r"QU-11 \| .* \| `tests/test_it.py::test_one` \|", page)
    assert rows(project, "--check").returncode == 0


@pytest.mark.parametrize(
    ("named", "complaint"),
    [
        (f"{CLAIM} XX-1\ndef test_one(): ...\n", "tests/test_it.py:1: XX-1 has no words"),
        (f"def test_one(): ...\n{CLAIM} SH-16\n", "tests/test_it.py:2: a comment names rows, but no test"),
        (f"{CLAIM} nothing\ndef test_one(): ...\n", "no row is named"),
    ],
)
def test_a_claim_that_nobody_can_read_is_an_error(project: Path, named: str, complaint: str) -> None:
    (project / "tests/test_it.py").write_text(named)
    for arguments in ([], ["--check"]):
        answer = rows(project, *arguments)
        assert answer.returncode == 1
        assert complaint in answer.stderr


def test_every_fault_is_shown_and_its_page_names_tests_that_are_there() -> None:
    said = subprocess.run(
        [sys.executable, "docs/faults.py", "--check"], check=False, cwd=ROOT, capture_output=True, text=True
    )
    assert said.returncode == 0, said.stderr
