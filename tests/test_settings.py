from __future__ import annotations

import dataclasses
import os
import pickle
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as trying
from hypothesis import strategies as st

from shiftwork import TableStore
from shiftwork.errors import ConfigurationError
from shiftwork.settings import (
    HIDDEN,
    KNOWN,
    Settings,
    check_schema,
    format_duration,
    mask,
    parse_duration,
)


@pytest.mark.parametrize(
    ("text", "duration"),
    [
        ("500ms", timedelta(milliseconds=500)),
        ("2s", timedelta(seconds=2)),
        ("5m", timedelta(minutes=5)),
        ("1h", timedelta(hours=1)),
        ("1d", timedelta(days=1)),
        ("1h30m", timedelta(minutes=90)),
        ("1.5h", timedelta(minutes=90)),
        (" 1h 30m ", timedelta(minutes=90)),
        ("0s", timedelta()),
    ],
)
def test_a_duration_reads_as_people_write_it(text: str, duration: timedelta) -> None:
    assert parse_duration(text) == duration


@pytest.mark.parametrize("text", ["", "5", "5 minutes", "-5s", "5s!", "s", "1h-", "9" * 40 + "d", "1e3s"])
def test_what_is_not_a_duration_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"duration"):
        parse_duration(text)


@trying(deadline=None)
@given(st.timedeltas(min_value=timedelta(), max_value=timedelta(days=1000)))
def test_a_duration_that_is_written_reads_back_the_same(duration: timedelta) -> None:
    assert abs(parse_duration(format_duration(duration)) - duration) <= timedelta(microseconds=1)


def test_durations_are_written_in_whole_units() -> None:
    assert format_duration(timedelta(hours=1, minutes=30)) == "1h30m"
    assert format_duration(timedelta(milliseconds=1500)) == "1s500ms"
    assert format_duration(timedelta()) == "0s"


@pytest.mark.parametrize("name", ["shiftwork", "_x", "jobs_2", "a" * 48])
def test_ordinary_schema_names_are_taken(name: str) -> None:
    assert check_schema(name) == name


@pytest.mark.parametrize(
    "name",
    [
        *("", "Jobs", "1jobs", "a" * 49, "jobs; drop table x", 'jobs"', "jöbs", "jobs\n", "jobs%s", "a b"),
        *("pg_jobs", "pg_catalog", "select", "user", "table", "\N{FULLWIDTH LATIN SMALL LETTER J}obs", "a.b"),
    ],
)
def test_schema_names_that_could_do_harm_are_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="schema name"):
        check_schema(name)


@trying(deadline=None)
@given(st.text())
def test_no_text_gets_through_as_schema_unless_it_needs_no_quotes(name: str) -> None:
    try:
        check_schema(name)
    except ConfigurationError:
        return
    assert name.isascii()
    assert name.isidentifier()
    assert name == name.lower()


def test_what_is_given_wins_over_the_environment_and_that_over_the_default() -> None:
    environment = {
        "SHIFTWORK_SCHEMA": "from_env",
        "SHIFTWORK_CONNECT_TIMEOUT": "3s",
        "SHIFTWORK_MAX_CONNECTIONS": "4",
    }
    settings = Settings.read(environment, schema="given", listen_dsn=None)
    assert settings.schema == "given"
    assert settings.connect_timeout == timedelta(seconds=3)
    assert settings.max_connections == 4
    assert settings.max_payload == 1_048_576
    assert settings.done_channel == "given_done"


def test_the_database_is_found_in_the_usual_variable() -> None:
    assert Settings.read({"DATABASE_URL": "postgresql://a/b"}).dsn == "postgresql://a/b"
    both = {"DATABASE_URL": "postgresql://a/b", "SHIFTWORK_DSN": "postgresql://c/d"}
    assert Settings.read(both).dsn == "postgresql://c/d"
    assert Settings.read(both, dsn="postgresql://e/f").dsn == "postgresql://e/f"
    assert Settings.read({}).dsn is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"SHIFTWORK_MAX_CONNECTIONS": "many"},
        {"SHIFTWORK_MAX_CONNECTIONS": "0"},
        {"SHIFTWORK_MAX_PAYLOAD": "1"},
        {"SHIFTWORK_CONNECT_TIMEOUT": "soon"},
        {"SHIFTWORK_RESULT_POLL": "0s"},
    ],
)
def test_a_setting_that_cannot_work_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError):
        Settings.read(wrong)


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://ada:s3cret@host/db",
        "postgresql://ada:s3c:ret@host/db",
        "host=x password=s3cret user=ada",
        "host=x password='s3cret with space' user=ada",
        "postgresql://host/db?password=s3cret&user=ada",
        "postgresql://ada@host/db?pass%77ord=s3cret",
        r"host=x password=a\ s3cret user=ada",
        "host=x password=a&s3cret user=ada",
        "postgresql://ada:p?s3cret@host/db",
    ],
)
def test_a_password_is_never_shown(dsn: str) -> None:
    assert "s3c" not in mask(dsn)
    assert "s3c" not in repr(Settings(dsn=dsn, listen_dsn=dsn))
    assert "ada" in mask(dsn)


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://ada:p@s3cret@host/db",
        "postgresql://ada:p/s3cret@host/db",
        "host=x password=a s3cret",
        "postgresql://ada:s3cret\udcff@host/db",
    ],
)
def test_nothing_is_shown_of_a_connection_string_whose_password_may_be_anywhere(dsn: str) -> None:
    assert mask(dsn) == HIDDEN


def test_a_worker_has_its_defaults() -> None:
    settings = Settings()
    assert settings.queues == settings.queue_concurrency == settings.task_concurrency == {}
    assert (settings.concurrency, settings.prefetch, settings.transactions) == (10, 0, None)
    assert settings.lease == settings.poll == settings.grace == timedelta(seconds=30)
    assert (settings.timeout, settings.max_jobs, settings.max_time) == (None, None, None)
    assert (settings.stop_when_idle, settings.notify, settings.unknown_tasks) == (False, True, "leave")
    assert (settings.name, settings.log_level, settings.log_format) == ("worker", "info", "text")


SAID = {
    "queues": ("mail=3, default=1", {"mail": 3.0, "default": 1.0}),
    "queue_concurrency": ("mail=5,bulk=1", {"mail": 5, "bulk": 1}),
    "task_concurrency": ("send=2", {"send": 2}),
    "queue_budgets": ("mail=50,default=250", {"mail": 50, "default": 250}),
    "concurrency": (" 20 ", 20),
    "prefetch": ("5", 5),
    "transactions": ("3", 3),
    "process_slots": ("2", 2),
    "process_jobs": ("50", 50),
    "process_memory": ("512", 512),
    "process_environment": ("AWS_*,SENTRY_DSN", ("AWS_*", "SENTRY_DSN")),
    "process_core_dumps": ("yes", True),
    "lease": ("2s", timedelta(seconds=2)),
    "heartbeat": ("500ms", timedelta(milliseconds=500)),
    "poll": ("100ms", timedelta(milliseconds=100)),
    "reconnect": ("1s", timedelta(seconds=1)),
    "reconnect_most": ("5s", timedelta(seconds=5)),
    "reconnect_tries": ("9", 9),
    "grace": ("0s", timedelta()),
    "timeout": ("5m", timedelta(minutes=5)),
    "max_jobs": ("7", 7),
    "max_time": ("1h", timedelta(hours=1)),
    "stop_when_idle": ("yes", True),
    "wait": ("yes", True),
    "processes": ("4", 4),
    "max_crashes": ("none", None),
    "singleton": ("nightly", "nightly"),
    "standby": ("1", True),
    "notify": ("0", False),
    "unknown_tasks": ("fail", "fail"),
    "name": ("mail-1.eu_west", "mail-1.eu_west"),
    "metrics_port": ("9100", 9100),
    "metrics_host": ("0.0.0.0", "0.0.0.0"),
    "log_level": ("DEBUG", "debug"),
    "log_format": ("json", "json"),
    "dsn": ("postgresql://a/b", "postgresql://a/b"),
    "listen_dsn": ("postgresql://c/d", "postgresql://c/d"),
    "schema": ("jobs", "jobs"),
    "connect_timeout": ("3s", timedelta(seconds=3)),
    "max_connections": ("4", 4),
    "max_payload": ("2097152", 2 << 20),
    "result_poll": ("1s", timedelta(seconds=1)),
}


def project(folder: Path, *lines: str) -> Path:
    """A folder whose pyproject.toml says this to shiftwork."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text("\n".join(["[tool.shiftwork]", *lines]))
    return folder


@pytest.mark.parametrize("name", SAID)
def test_every_setting_reads_the_same_given_in_the_environment_and_in_the_file(
    name: str, tmp_path: Path
) -> None:
    text, value = SAID[name]
    here, nowhere = project(tmp_path, f'{name} = "{text}"'), tmp_path / "nothing"
    assert getattr(Settings.read({}, beside=nowhere, **{name: text}), name) == value
    assert getattr(Settings.read({}, beside=nowhere, **{name: value}), name) == value
    assert getattr(Settings.read({KNOWN[name].variable: text}, beside=nowhere), name) == value
    assert getattr(Settings.read({}, beside=here), name) == value
    assert KNOWN[name].default == getattr(Settings(), name) != value


def test_no_setting_is_left_out_above() -> None:
    assert set(SAID) == set(KNOWN) == {known.name for known in dataclasses.fields(Settings)}


def test_given_comes_before_the_environment_that_before_the_file_and_that_before_the_default(
    tmp_path: Path,
) -> None:
    # spec: SH-9
    project(tmp_path, "concurrency = 3", 'dsn = "postgresql://file/"', "prefetch = 3", "max_jobs = 3")
    environment = {"SHIFTWORK_CONCURRENCY": "2", "SHIFTWORK_PREFETCH": "2", "SHIFTWORK_MAX_JOBS": " "}
    settings = Settings.read(environment, beside=tmp_path, concurrency=1, prefetch=None)
    assert (settings.concurrency, settings.prefetch, settings.max_jobs) == (1, 2, 3)
    assert settings.transactions is None
    assert settings.dsn == "postgresql://file/"
    assert Settings.read({"DATABASE_URL": "postgresql://env/"}, beside=tmp_path).dsn == "postgresql://env/"


def test_a_setting_that_may_be_none_can_be_told_so_over_the_file(tmp_path: Path) -> None:
    project(tmp_path, 'timeout = "5m"')
    assert Settings.read({}, beside=tmp_path).timeout == timedelta(minutes=5)
    assert Settings.read({"SHIFTWORK_TIMEOUT": "none"}, beside=tmp_path).timeout is None


def test_the_file_may_use_its_own_kinds_of_value(tmp_path: Path) -> None:
    lines = (
        'queues = ["mail", "default"]',
        "task_concurrency = { send = 2 }",
        "notify = false",
        "grace = '1m'",
    )
    settings = Settings.read({}, beside=project(tmp_path, *lines))
    assert list(settings.queues.items()) == [("mail", None), ("default", None)]
    assert settings.task_concurrency == {"send": 2}
    assert not settings.notify
    weighed = project(tmp_path, "[tool.shiftwork.queues]", "mail = 3", "default = 0.5")
    assert Settings.read({}, beside=weighed).queues == {"mail": 3, "default": 0.5}


def test_the_nearest_file_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project(tmp_path, "concurrency = 1")
    project(tmp_path / "a", "prefetch = 2")
    (tmp_path / "a/b/c").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a/b/c")
    settings = Settings.read({})
    assert (settings.concurrency, settings.prefetch) == (10, 2)


def test_a_working_directory_that_is_gone_has_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert Settings.read({}).concurrency == 10


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("concurency = 3", r"'concurency'.*did you mean 'concurrency'\?"),
        ("max-jobs = 3", r"'max-jobs'.*did you mean 'max_jobs'\?"),
        ("colour = 3", r"'colour'.*there are: concurrency, .*unknown_tasks"),
        ("concurrency = ", r"not valid TOML"),
        ("concurrency = 0", r"concurrency is 0 \(from \[tool\.shiftwork\] in .*from 1 to 10,000"),
        ("concurrency = true", r"concurrency is True .*from 1 to 10,000"),
        ("lease = 30", r"lease is 30 .*a duration from 500ms to 1h"),
    ],
)
def test_a_file_that_is_wrong_is_named_with_what_is_wrong_in_it(tmp_path: Path, line: str, said: str) -> None:
    project(tmp_path, line)
    with pytest.raises(ConfigurationError, match=said) as refused:
        Settings.read({}, beside=tmp_path)
    assert str(tmp_path / "pyproject.toml") in str(refused.value)


def test_a_table_must_be_a_table(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool]\nshiftwork = 3")
    with pytest.raises(ConfigurationError, match=r"write \[tool.shiftwork\]"):
        Settings.read({}, beside=tmp_path)


def test_a_file_that_says_nothing_to_us_is_not_judged(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_bytes(b"\xff [tool.other\n")
    assert Settings.read({}, beside=tmp_path).concurrency == 10
    (tmp_path / "pyproject.toml").write_bytes(b"\xff [tool.shiftwork]\n")
    with pytest.raises(ConfigurationError, match="not valid TOML"):
        Settings.read({}, beside=tmp_path)


@pytest.mark.parametrize(
    ("name", "wrong", "allowed"),
    [
        ("concurrency", "0", "a whole number from 1 to 10,000"),
        ("concurrency", "-4", "a whole number from 1 to 10,000"),
        ("concurrency", "10001", "a whole number from 1 to 10,000"),
        ("concurrency", "many", "a whole number from 1 to 10,000"),
        ("concurrency", "1.5", "a whole number from 1 to 10,000"),
        ("prefetch", "-1", "a whole number from 0 to 10,000"),
        ("transactions", "0", "a whole number from 1 to 1,000, or none"),
        ("heartbeat", "9ms", "a duration from 10ms to 20m, or none"),
        ("lease", "499ms", "a duration from 500ms to 1h"),
        ("lease", "61m", "a duration from 500ms to 1h"),
        ("lease", "soon", "a duration from 500ms to 1h"),
        ("poll", "99ms", "a duration from 100ms to 10m"),
        ("grace", "25h", "a duration from 0s to 1d"),
        ("timeout", "0s", "a duration from 1ms to 3650d, or none"),
        ("max_jobs", "0", "a whole number from 1 to 2,147,483,647, or none"),
        ("stop_when_idle", "perhaps", "true, false, yes, no, 1 or 0"),
        ("unknown_tasks", "drop", "leave or fail"),
        ("metrics_port", "65536", "a whole number from 0 to 65,535"),
        ("log_level", "loud", "debug, info, warning or error"),
        ("name", "two words", "1 to 100 letters"),
        ("processes", "0", "a whole number from 1 to 1,000"),
        ("max_crashes", "0", "a whole number from 1 to 1,000,000, or none"),
        ("singleton", "two words", "1 to 100 letters"),
        ("name", "x" * 101, "1 to 100 letters"),
        ("queues", "mail=3,default", "names in order"),
        ("queues", "mail,mail", "names in order"),
        ("queues", "mail,,default", "names in order"),
        ("queues", "mail=0", "weight above 0"),
        ("queues", "mail=nan", "weight above 0"),
        ("queues", "mail=inf", "weight above 0"),
        ("queues", "mail=much", "weight above 0"),
        ("queue_concurrency", "mail", "names with whole numbers from 1 to 10,000"),
        ("queue_concurrency", "mail=0", "names with whole numbers from 1 to 10,000"),
        ("queue_budgets", "mail=0", "names with whole numbers from 1 to 1,000,000"),
        ("queue_budgets", "mail=1.5", "names with whole numbers from 1 to 1,000,000"),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_name_its_origin_and_the_range(
    name: str, wrong: str, allowed: str
) -> None:
    # spec: SH-9
    variable = KNOWN[name].variable
    with pytest.raises(ConfigurationError) as refused:
        Settings.read({variable: wrong})
    for part in (f"{name} is {wrong!r}", variable, allowed):
        assert part in str(refused.value)
    with pytest.raises(ConfigurationError, match=r"\(given\)"):
        Settings.read({}, beside=None, **{name: wrong})


@pytest.mark.parametrize(
    ("name", "most"), [("queues", 100), ("queue_concurrency", 100), ("task_concurrency", 200)]
)
def test_a_name_is_as_long_as_the_database_takes_it_at_most(name: str, most: int) -> None:
    number = "" if name == "queues" else "=1"
    variable = KNOWN[name].variable
    for longest in ("q" * most, "ä" * (most // 2)):
        assert longest in getattr(Settings.read({variable: f"{longest}{number}"}), name)
        with pytest.raises(
            ConfigurationError, match=rf"{name} \(from {variable}\): .* must be 1 to {most} bytes"
        ):
            Settings.read({variable: f"default{number},{longest}+{number}"})


def test_a_value_of_megabytes_is_not_repeated_in_the_error() -> None:
    for name in ("queues", "lease", "schema", "concurrency"):
        with pytest.raises(ConfigurationError) as refused:
            Settings.read({}, beside=None, **{name: "x" * 3_000_000})
        assert len(str(refused.value)) < 1_000


def test_a_schema_name_is_refused_with_its_origin() -> None:
    with pytest.raises(ConfigurationError, match=r"SHIFTWORK_SCHEMA\): 'Jobs' cannot be a schema name"):
        Settings.read({"SHIFTWORK_SCHEMA": "Jobs"})


@pytest.mark.parametrize(
    "wrong",
    [
        {"queues": {"mail": True}},
        {"queues": {5: 1}},
        {"queues": 5},
        {"queues": {"a\0b": 1}},
        {"lease": 30},
        {"concurrency": 3.0},
        {"concurrency": True},
        {"notify": 1},
        {"name": None},
        {"log_level": None},
        {"dsn": 5},
    ],
)
def test_a_value_of_the_wrong_kind_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match="it must be"):
        Settings(**wrong)  # type: ignore[arg-type]


def test_a_refused_connection_string_is_not_repeated() -> None:
    with pytest.raises(ConfigurationError) as refused:
        Settings.read({}, dsn=["s3cret"])
    assert "s3cret" not in str(refused.value)


def test_a_setting_that_does_not_exist_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(ConfigurationError, match=r"'concurency'; did you mean 'concurrency'"):
        Settings.read({}, concurency=3)


@trying(deadline=None)
@given(st.timedeltas(min_value=timedelta(milliseconds=500), max_value=timedelta(hours=1)))
def test_a_lease_is_renewed_at_least_twice_before_it_ends(lease: timedelta) -> None:
    # spec: SG-41, D-13, HO-18
    assert 2 * Settings(lease=lease).renew_every < lease


def test_a_lease_is_renewed_as_often_as_one_likes_but_not_too_rarely() -> None:
    # spec: SG-41
    settings = Settings(lease=timedelta(seconds=5), heartbeat=timedelta(seconds=1))
    assert settings.renew_every == timedelta(seconds=1)
    with pytest.raises(
        ConfigurationError, match="heartbeat is 2s, and the lease 5s; it must be at most a third"
    ):
        settings.changed(heartbeat="2s")
    store = TableStore("jobs", lease=timedelta(seconds=5), heartbeat=timedelta(seconds=1))
    assert store.chosen({}).renew_every == timedelta(seconds=1), "on the store"
    assert store.chosen({"heartbeat": "500ms"}).renew_every == timedelta(milliseconds=500), "for a worker"


def test_a_worker_polls_more_often_while_it_does_not_know_that_it_would_be_woken() -> None:
    assert Settings().poll_unproven == timedelta(seconds=5)
    assert Settings(poll=timedelta(seconds=1)).poll_unproven == timedelta(seconds=1)


def test_the_connections_of_a_worker_can_be_counted_beforehand() -> None:
    # spec: SH-10
    for concurrency in (1, 1000):
        assert Settings(concurrency=concurrency).connections() == 4
    assert Settings(notify=False).connections() == 3
    assert Settings(singleton="nightly").connections() == 5
    assert Settings(concurrency=4).connections(transactional=True) == 4 + 4
    assert Settings(concurrency=1000).connections(transactional=True) == 4 + 10
    assert Settings(concurrency=1000, transactions=50).connections(transactional=True) == 4 + 50


def test_settings_are_a_value() -> None:
    queues = {"mail": 1.0}
    settings = Settings(queues=queues)
    queues["other"] = 2.0
    assert settings.queues == {"mail": 1.0}
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert dataclasses.replace(settings, prefetch=3).queues == {"mail": 1.0}


def shown(default: object) -> str:
    """A default as the page writes it."""
    if isinstance(default, bool):
        return "yes" if default else "no"
    if isinstance(default, timedelta):
        return format_duration(default)
    return f"{default:,}" if isinstance(default, int) else str(default or "none")


@pytest.mark.parametrize(("concurrency", "sessions"), [(1, 1), (4, 4), (10, 10), (1000, 10)])
def test_connections_follow_from_how_many_jobs_run_at_once_up_to_a_bound(
    concurrency: int, sessions: int
) -> None:
    # spec: A-24
    settings = Settings(concurrency=concurrency)
    assert settings.transaction_connections == sessions
    assert settings.connections(transactional=True) == settings.connections() + sessions


def test_the_page_of_settings_tells_of_each_what_is_so() -> None:
    # spec: SH-9
    page = (Path(__file__).parent.parent / "docs/settings.md").read_text("utf-8")
    told = [line for line in page.splitlines() if "`SHIFTWORK_" in line and line.startswith("| `")]
    assert sorted(told) == sorted(
        f"| `{it.name}` | `{it.flag}` `{it.variable}` | {shown(it.default)} | {it.allowed} | {it.does} |"
        for it in KNOWN.values()
    )


def test_reading_settings_imports_little(tmp_path: Path) -> None:
    script = "import sys; from shiftwork.settings import Settings; Settings.read(); print(*sys.modules)"
    (tmp_path / "pyproject.toml").write_text("[tool.other]\nx = 1")
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        env=os.environ,
    )
    assert not {"tomllib", "psycopg", "difflib", "asyncio"} & set(done.stdout.split())
