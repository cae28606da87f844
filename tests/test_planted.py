"""Bugs of the kinds that other systems have had, planted one at a time: each is found out by the test that is named for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import shiftwork
from tests.planted import BUGS

ROOT = Path(__file__).parent.parent
PATIENCE = 4
"""Seconds after which nobody waits any longer for a lock, or for what does not happen, under a bug that makes a test hang."""

OPTIONS = ("-p", "no:xdist", "-p", "no:cacheprovider", "-p", "no:randomly", "--timeout-method", "signal")
WHY = (
    "assert ",
    "AssertionError",
    "Failed: DID NOT RAISE",
    "Failed: Timeout",
    "psycopg.errors.LockNotAvailable",
)
"""How a test fails that has found something; otherwise it may be that it could not be made at all."""


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found_out(bug: str, server: str, tmp_path: Path) -> None:
    package = tmp_path / "shiftwork"
    shutil.copytree(Path(shiftwork.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    name = BUGS[bug].caught_by.partition("::")[2]
    assert made(BUGS[bug].caught_by, tmp_path, "--timeout", "60") == {name: ""}, "without the bug it passes"
    BUGS[bug].sow(package)
    hurried = {"SHIFTWORK_TEST_PATIENCE": f"{PATIENCE}", "PGOPTIONS": f"-c lock_timeout={PATIENCE}s"}
    found = made(BUGS[bug].caught_by, tmp_path, "--timeout", f"{2 * PATIENCE}", **hurried)
    assert found.keys() == {name}
    assert found[name].startswith((*WHY, BUGS[bug].saying)), found


def made(test: str, tmp_path: Path, *options: str, **environment: str) -> dict[str, str]:
    """How this test went with the copy of the package that is there, by its name: why it failed, or nothing."""
    report = tmp_path / "report.xml"
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *OPTIONS, *options, "--junitxml", str(report), test],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1", **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    said = ran.stdout[-4000:] + ran.stderr[-1000:]
    cases = list(ElementTree.parse(report).iter("testcase"))
    assert not [
        case for case in cases if case.find("error") is not None or case.find("skipped") is not None
    ], said
    failures = {case.attrib["name"]: case.find("failure") for case in cases}
    return {name: "" if why is None else why.attrib["message"] for name, why in failures.items()}
