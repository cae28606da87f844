"""Bugs of the kinds that other systems have had, planted one at a time: each is found out by the test that is named for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import shiftwork
from tests.planted import BUGS

ROOT = Path(__file__).parent.parent
PATIENCE = 10
"""Seconds after which a test that hangs counts as failed, as it does under a bug that makes it hang."""


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found_out(bug: str, server: str, tmp_path: Path) -> None:
    package = tmp_path / "shiftwork"
    shutil.copytree(Path(shiftwork.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    BUGS[bug].sow(package)
    options = (
        "-q",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        "--timeout",
        str(PATIENCE),
        "--timeout-method",
        "thread",
    )
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *options, BUGS[bug].caught_by],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ran.returncode == 1, ran.stdout[-4000:] + ran.stderr[-1000:]
