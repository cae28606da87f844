"""Type checkers catch wrong arguments: they are run over samples in which mistakes are planted."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

SAMPLES = Path(__file__).parent / "typing"


def planted(sample: Path) -> set[int]:
    lines = sample.read_text().splitlines()
    return {number for number, line in enumerate(lines, 1) if "# MISTAKE" in line}


def by_mypy(sample: Path) -> set[int]:
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--no-error-summary",
        "--hide-error-context",
        str(sample),
    ]
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)
    assert found.returncode in (0, 1), found.stdout + found.stderr
    lines = [line for line in found.stdout.splitlines() if ": error:" in line]
    assert all(sample.name in line for line in lines), found.stdout
    return {int(line.split(":")[1]) for line in lines}


def by_pyright(sample: Path) -> set[int]:
    with tempfile.TemporaryDirectory() as folder:  # away from the project's settings, which leave samples out
        copy = shutil.copy(sample, folder)
        command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, copy]
        found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250, cwd=folder)
    report = json.loads(found.stdout)
    assert report["summary"]["filesAnalyzed"] == 1
    return {
        one["range"]["start"]["line"] + 1
        for one in report["generalDiagnostics"]
        if one["severity"] == "error"
    }


@pytest.mark.parametrize("checker", [by_mypy, by_pyright])
@pytest.mark.parametrize("name", ["right.py", "wrong.py"])
def test_a_type_checker_reports_the_planted_mistakes_and_nothing_else(checker: object, name: str) -> None:
    pytest.importorskip("mypy" if checker is by_mypy else "pyright")
    sample = SAMPLES / name
    assert callable(checker)
    assert checker(sample) == planted(sample)
    assert bool(planted(sample)) == (name == "wrong.py")
