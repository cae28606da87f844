"""`shiftwork sql enqueue-function`: what it writes is run here."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from click.testing import CliRunner

from shiftwork import cli
from tests.harness import Protocol


def asked(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(cli.main, ["sql", "enqueue-function", *words])
    assert result.exit_code == code, result.output
    return result.output


def make(protocol: Protocol, *words: str) -> None:
    """Let the function be written, and run what is printed."""
    protocol.connection.execute(asked(*words).encode())


def jobs(protocol: Protocol) -> list[dict[str, Any]]:
    return protocol.rows("select id, payload from {}.jobs order by id")


def test_the_function_has_typed_arguments_and_merges_into_a_job_that_waits(protocol: Protocol) -> None:
    # spec: ST-4, ST-30
    make(
        protocol,
        *("derive_units", "ids int[]", "valid daterange", "since? date"),
        *("--merge", "ids=union", "--merge", "valid=range:daterange", "--merge", "since=min"),
    )
    call = "select enqueue_derive_units(array[1, 2], '[2026-01-01,2026-02-01)')"
    first = protocol.value(call)
    again = "select enqueue_derive_units(since => '2026-03-01', ids => array[2, 3], valid => '[2026-01-15,2026-04-01)')"
    assert protocol.value(again) == first
    assert (
        protocol.value("select enqueue_derive_units(array[4], '[2026-01-01,2026-01-02)', '2026-05-01')")
        == first
    )
    assert jobs(protocol) == [
        {
            "id": first,
            "payload": {"ids": [1, 2, 3, 4], "valid": "[2026-01-01,2026-04-01)", "since": "2026-03-01"},
        }
    ]
    worker = protocol.register()
    protocol.claim(worker)
    assert protocol.value(call) != first  # one that runs is left alone
    with pytest.raises(psycopg.errors.UndefinedFunction):
        protocol.value("select enqueue_derive_units(true, '[2026-01-01,2026-02-01)')")


def test_with_a_key_there_is_one_waiting_job_for_each_value(protocol: Protocol) -> None:
    # spec: ST-4
    make(protocol, "report", "year int", "region text", "note? text", "--key", "year", "--key", "region")
    first = protocol.value("select enqueue_report(2025, 'north', 'a')")
    assert protocol.value("select enqueue_report(2025, 'north', 'b')") == first
    others = [
        protocol.value("select enqueue_report(%s, %s)", *key)
        for key in ((2026, "north"), (2025, "south"), (2025, "north 1"), (2025, None))
    ]
    assert len({first, *others}) == 5
    assert jobs(protocol)[0]["payload"] == {"year": 2025, "region": "north", "note": "a"}


def test_without_arguments_it_takes_the_payload_and_every_call_is_a_job(protocol: Protocol) -> None:
    make(protocol, "greet")
    ids = [protocol.value("""select enqueue_greet('{"to": "Ada"}')""") for _ in range(2)]
    assert jobs(protocol) == [{"id": one, "payload": {"to": "Ada"}} for one in ids]
    make(protocol, "blend", "--merge", "deep")
    protocol.value("""select enqueue_blend('{"a": {"x": 1}}')""")
    protocol.value("""select enqueue_blend('{"a": {"y": 2}}')""")
    assert jobs(protocol)[-1]["payload"] == {"a": {"x": 1, "y": 2}}


def test_whatever_a_task_is_called_is_only_a_name(protocol: Protocol) -> None:
    # fault: S3
    for task in ("it's", "$$; drop table x; $$", "$x$ $$", 'a"b', "back\\slash", "select", "ünï"):
        argument = task.replace(" ", "")
        make(protocol, task, f"{argument} text", "--function", f"public.{task}")
        name = task.replace('"', '""')
        call: Any = f'select public."{name}"(%s)'
        protocol.value(call, "value")
        [*_, row] = protocol.rows("select task, payload from {}.jobs order by id")
        assert (row["task"], row["payload"]) == (task, {argument: "value"})


def test_it_can_be_made_at_once_and_again(protocol: Protocol, dsn: str) -> None:
    # spec: ST-30
    protocol.connection.execute("create schema stats")
    words = ("greet", "names text[]", "--function", "stats.greet_all", "--apply", "--dsn", dsn)
    for _ in range(2):
        assert asked(*words) == '"stats"."greet_all" is made.\n'
    protocol.value("select stats.greet_all(array['Ada', 'Eve'])")
    assert jobs(protocol)[0]["payload"] == {"names": ["Ada", "Eve"]}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("t", "ids"), "'ids' is no argument; write it like 'ids int[]'"),
        (("t", "ids int) returns int language sql as 'select 1'; --"), "is no argument"),
        (("t", "ids int; drop table x"), "is no argument"),
        (("t", "ids int[]", "--merge", "id=union"), "there is no argument 'id'; there are: ids"),
        (("t", "ids int[]", "--merge", "ids=mix"), "'mix' is no way to merge; there are: append"),
        (("t", "a? int", "b int"), "arguments that may be left out come last"),
        (("t", "a int", "a text"), "two arguments have the same name"),
        (("t", "--key", "year"), "there is no argument 'year'; there are: none"),
        (("t", "--function", "x" * 64), "cannot be a name in PostgreSQL"),
        (("",), "cannot be used as the name of a task"),
    ],
)
def test_what_cannot_be_meant_is_refused(words: tuple[str, ...], says: str) -> None:
    assert says in asked(*words, code=2)


def test_types_are_taken_as_postgresql_writes_them(protocol: Protocol) -> None:
    kinds = (
        "int",
        "INT[]",
        "numeric(10, 2)",
        "timestamp with time zone",
        "timestamp(3) with time zone",
        "pg_catalog.text",
    )
    for kind in kinds:
        make(protocol, "t", f"value {kind}")
    made = "select count(*) from pg_proc where proname = 'enqueue_t'"
    assert protocol.value(made) == 5  # two differ in nothing but their precision
