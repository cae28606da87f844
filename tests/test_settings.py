from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import settings as trying
from hypothesis import strategies as st

from shiftwork.errors import ConfigurationError
from shiftwork.settings import HIDDEN, Settings, check_schema, format_duration, mask, parse_duration


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
