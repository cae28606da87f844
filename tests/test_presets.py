"""One test for each column of the table of five systems, with its figures."""

from __future__ import annotations

import dataclasses
import os
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from shiftwork import presets
from shiftwork.app import App
from shiftwork.errors import Poison
from shiftwork.presets import Preset
from shiftwork.retry import Retry
from shiftwork.settings import UNLIMITED, Settings
from tests.harness import Protocol

SECOND, MINUTE, DAY = timedelta(seconds=1), timedelta(minutes=1), timedelta(days=1)
ALL = {
    "shithub": presets.shithub,
    "sourcegraph": presets.sourcegraph,
    "horsies": presets.horsies,
    "queuert": presets.queuert,
    "statbus": presets.statbus,
}


def waits(retry: Retry, many: int) -> list[float]:
    return [retry.wait(failures) / SECOND for failures in range(1, many + 1)]


def attempts(retry: Retry, error: Exception) -> int | None:
    """How many there are until a job that always fails so has failed; None without end."""
    if retry.max_attempts is None:
        return None
    return next(n for n in range(1, 100) if retry.gives_up(n - 1, retry.max_attempts, error))


def test_shithub() -> None:
    # spec: SH-9, SH-16, SH-19, SH-23, D-8, D-14
    task, settings = presets.shithub.task, Settings.read({}, **presets.shithub.settings)
    assert (settings.concurrency, settings.poll, settings.notify) == (4, 5 * SECOND, True)
    assert (settings.lease, settings.grace) == (5 * MINUTE, 5 * MINUTE)
    assert (task["timeout"], task["on_lost"], task["max_resets"]) == (5 * MINUTE, "requeue", UNLIMITED)
    assert attempts(task["retry"], ValueError()) == 5
    assert attempts(task["retry"], Poison()) == 1
    assert waits(task["retry"], 9) == [30, 60, 120, 240, 480, 960, 1920, 3600, 3600]
    assert task["retry"].jitter == 0.2
    assert presets.shithub.keep == {"completed": 14, "failed": 30}


def test_sourcegraph() -> None:
    # spec: SG-21, SG-22, SG-25, D-5, D-8, D-9
    task, settings = presets.sourcegraph.task, Settings.read({}, **presets.sourcegraph.settings)
    assert (settings.concurrency, settings.poll, settings.notify) == (1, SECOND, False)
    assert (settings.lease, settings.grace) == (5 * SECOND, 10 * SECOND)
    assert settings.renew_every == SECOND
    assert (task["timeout"], task["on_lost"], task["max_resets"]) == (None, "requeue", 5)
    assert attempts(task["retry"], ValueError()) == 1
    retrying = Retry(max_attempts=3, delay=MINUTE, factor=1, jitter=0)
    assert attempts(retrying, ValueError()) == 3
    assert waits(retrying, 2) == [60, 60]
    assert presets.sourcegraph.keep == {}


def test_horsies() -> None:
    # spec: HO-29, HO-38, D-2, D-8
    task, settings = presets.horsies.task, Settings.read({}, **presets.horsies.settings)
    assert (settings.concurrency, settings.poll) == (os.cpu_count(), 5 * SECOND)
    assert (settings.lease, settings.grace) == (5 * MINUTE, DAY)
    assert (task["timeout"], task["on_lost"]) == (None, "fail")
    assert attempts(task["retry"], ValueError()) == 1
    listed = dataclasses.replace(task["retry"], on=("ValueError",))
    assert attempts(listed, ValueError()) == 1 + 3
    assert attempts(listed, KeyError()) == 1
    assert waits(listed, 3) == [60, 300, 900]
    assert listed.jitter == 0.25
    assert presets.horsies.keep == {"completed": 30, "failed": 30}


def test_queuert() -> None:
    # spec: QU-1, QU-3, QU-6, QU-11, D-8
    task, settings = presets.queuert.task, Settings.read({}, **presets.queuert.settings)
    assert (settings.concurrency, settings.poll) == (1, MINUTE)
    assert (settings.lease, settings.grace) == (MINUTE, DAY)
    assert settings.renew_every <= 30 * SECOND
    assert (task["timeout"], task["on_lost"], task["max_resets"]) == (None, "requeue", UNLIMITED)
    assert attempts(task["retry"], ValueError()) is None
    assert waits(task["retry"], 7) == [10, 20, 40, 80, 160, 300, 300]
    assert task["retry"].jitter == 0
    assert presets.queuert.keep == {"completed": 7, "failed": 7}


def test_statbus() -> None:
    # spec: ST-12, ST-15, ST-22, ST-26, D-8
    task, settings = presets.statbus.task, Settings.read({}, **presets.statbus.settings)
    assert settings.queue_concurrency == {"import": 1, "analytics": 4, "maintenance": 1}
    assert (settings.concurrency, settings.poll, settings.grace) == (6, MINUTE, 5 * SECOND)
    assert (task["timeout"], task["on_lost"], task["max_resets"]) == (None, "requeue", UNLIMITED)
    assert attempts(task["retry"], ValueError()) == 1
    deadlock = psycopg.errors.DeadlockDetected()
    assert [task["retry"].repeats(deadlock, done) for done in range(4)] == [True, True, True, False]
    assert not task["retry"].repeats(ValueError())
    assert [Retry.pause(done, lambda: 0) / SECOND for done in range(3)] == [0.1, 0.2, 0.4]
    assert Retry.pause(0, lambda: 1) == timedelta(milliseconds=150)
    assert presets.statbus.keep == {"completed": 7, "failed": 30}


@pytest.mark.parametrize("name", ALL)
def test_a_preset_gives_options_and_settings_that_work(name: str) -> None:
    preset = ALL[name]
    app = App(settings=Settings.read({}, dsn="postgresql://nowhere/", **preset.settings))

    @app.task(**preset.task)
    async def work(n: int) -> None: ...

    retry: Retry = preset.task["retry"]
    assert work.retry is retry
    assert work.job(1).max_attempts == (retry.max_attempts or UNLIMITED)
    overruled: dict[str, Any] = {**preset.task, "max_resets": 3}
    app.task(name="other", **overruled)(lambda: None)


@pytest.mark.parametrize("name", ALL)
def test_what_a_preset_keeps_is_taken_by_the_database(name: str, protocol: Protocol) -> None:
    # spec: D-3
    keep = ALL[name].keep
    protocol.rows(
        "select {}.retain('*', completed => %s, failed => %s)",
        keep.get("completed", 1),
        keep.get("failed", 2),
    )
    [kept] = protocol.rows("select keep_completed, keep_failed from {}.queues where name = '*'")
    assert (kept["keep_completed"], kept["keep_failed"]) == (keep.get("completed", 1), keep.get("failed", 2))


def test_a_preset_cannot_be_changed() -> None:
    for preset in ALL.values():
        assert isinstance(preset, Preset)
        with pytest.raises(TypeError):
            preset.task["retry"] = None  # type: ignore[index]
