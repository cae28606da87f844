"""The example `examples/units`: work that is derived in the database, as its page tells of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest

from shiftwork import App
from tests.harness import Protocol
from tests.station import Station
from tests.test_cli_sql import asked
from tests.test_psql import psql
from tests.test_sql_tasks import another, process
from tests.workshop import Workshop

UNITS = Path(__file__).parent.parent / "examples" / "units"


@pytest.fixture
def units(protocol: Protocol) -> Protocol:
    protocol.connection.execute((UNITS / "units.sql").read_bytes())
    return protocol


def establish(units: Protocol, *regions: str) -> None:
    for region in regions:
        units.rows("insert into units.establishment (region, employees) values (%s, 10)", region)


def figures(units: Protocol) -> dict[str, int]:
    return {
        row["region"]: row["employees"] for row in units.rows("select * from units.figures order by region")
    }


def waiting(units: Protocol) -> list[str]:
    return [row["task"] for row in units.rows("select task from {}.jobs where state = 'ready' order by id")]


def derived(units: Protocol) -> list[Any]:
    done = "select result from {}.history where task = 'derive_units' and state = 'completed' order by id"
    return [row["result"] for row in units.rows(done)]


def test_it_runs_as_it_stands(dsn: str, protocol: Protocol) -> None:
    # spec: ST-1, ST-6, ST-27, ST-30
    for employees in (42, 84):
        ran = subprocess.run(
            [sys.executable, UNITS / "app.py"],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            env={**os.environ, "DATABASE_URL": dsn},
        )
        assert ran.returncode == 0, ran.stderr
        waits, result = ran.stdout.splitlines()
        assert waits == "1 job of collect_units waits"
        assert json.loads(result.replace("'", '"'))["employees"] == employees


def test_the_rollback_test_passes_and_leaves_nothing(units: Protocol, dsn: str) -> None:
    # spec: ST-10, ST-29, ST-30
    assert psql(dsn, (UNITS / "test.sql").read_text("utf-8")) == []
    everything = (
        "select (select count(*) from units.establishment) + (select count(*) from units.figures) as many"
    )
    assert units.value(everything) == 0
    assert units.rows("select 1 from {}.all_jobs") == []
    assert units.rows("select 1 from {}.workers") == []
    broken = (UNITS / "test.sql").read_text("utf-8").replace("= 7", "= 8")
    with pytest.raises(AssertionError, match="the figures of a region are derived"):
        psql(dsn, broken)


def test_its_enqueue_functions_are_those_that_the_command_writes() -> None:
    # spec: ST-30
    text = (UNITS / "units.sql").read_text("utf-8")
    commands = re.findall(r"^--    shiftwork sql enqueue-function (.*?(?:\\\n.*)?)$", text, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        words = re.findall(r"'[^']*'|[^\s\\]+", re.sub(r"^--", "", command, flags=re.MULTILINE))
        assert asked(*(word.strip("'") for word in words)) in text


def test_changes_pile_up_behind_one_job_that_takes_them_all(units: Protocol) -> None:
    # spec: ST-4, ST-27
    establish(units, "north", "south", "north")
    units.rows("update units.establishment set region = 'west' where region = 'south'")
    assert waiting(units) == ["collect_units"]
    process(units, batch=1)
    assert waiting(units) == ["derive_units"]
    establish(units, "east")
    process(units, batch=1)  # collects again, before anything was derived
    assert waiting(units) == ["derive_units"]
    process(units)
    assert derived(units) == [{"everything": False, "regions": ["north", "south", "west", "east"]}]
    assert figures(units) == {"east": 10, "north": 20, "west": 10}
    units.rows("delete from units.establishment where region = 'north'")
    process(units)
    assert figures(units) == {"east": 10, "west": 10}


def test_what_is_noted_by_a_transaction_that_is_still_open_is_not_missed(units: Protocol, dsn: str) -> None:
    # spec: ST-27
    establish(units, "north")
    with another(dsn) as writer:
        writer.rows("begin")
        establish(writer, "south")  # joins the job that waits
        process(units)
        assert waiting(units) == ["collect_units"]  # so it has to wait for us
        writer.rows("commit")
    process(units)
    assert figures(units) == {"north": 10, "south": 10}


async def test_a_worker_does_the_same(units: Protocol, dsn: str) -> None:
    # spec: ST-6, ST-27
    with App(dsn) as app:

        @app.task
        async def greet() -> None: ...

        async with Workshop(app) as shop:
            await shop.asleep()
            establish(units, "north")
            await shop.found(lambda: shop.rows("select 1 from units.figures where region = 'north'"))


def test_after_a_crash_that_emptied_what_was_noted_everything_is_derived(units: Protocol) -> None:
    # spec: ST-27
    # fault: F10
    with Station(fsync=True) as station:
        with psycopg.connect(station.dsn, autocommit=True) as connection:
            connection.execute((UNITS / "units.sql").read_bytes())
            establish(Protocol(connection), "north", "south")
            process(Protocol(connection))
            establish(Protocol(connection), "south")
        station.restart("immediate")
        with psycopg.connect(station.dsn, autocommit=True) as connection:
            crashed = Protocol(connection)
            assert crashed.rows("select * from units.changed") == []
            process(crashed)
            assert figures(crashed) == {"north": 10, "south": 20}
            assert derived(crashed)[-1] == {"everything": True, "regions": []}
            establish(crashed, "west")
            process(crashed)
            assert derived(crashed)[-1] == {"everything": False, "regions": ["west"]}
