from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any, cast

import psycopg
import pytest
from psycopg.rows import DictRow

from shiftwork.app import App
from shiftwork.context import Context
from shiftwork.errors import ConfigurationError, InvalidArgument, ShiftworkError
from shiftwork.task import Task

AsyncTx = psycopg.AsyncConnection
Tx = psycopg.Connection


@pytest.fixture
def app() -> App:
    return App("postgresql://nowhere/")


def stored(task: Task[Any, Any], *args: Any, **kwargs: Any) -> str:
    return bytes(task.job(*args, **kwargs).payload).decode()


def test_a_task_knows_how_its_jobs_are_run(app: App) -> None:
    @app.task(
        timeout=timedelta(minutes=5),
        concurrency=3,
        on_lost="fail",
        max_resets=0,
        codes={KeyError: "NO_SUCH_ROW"},
        default_code="BROKEN",
    )
    async def send(to: str) -> None: ...

    assert (send.timeout, send.concurrency) == (timedelta(minutes=5), 3)
    assert (send.on_lost, send.max_resets) == ("fail", 0)
    assert (send.codes, send.default_code) == ({KeyError: "NO_SUCH_ROW"}, "BROKEN")
    assert send.is_async
    assert not send.transaction


def test_a_task_without_options_has_the_defaults(app: App) -> None:
    @app.task
    def send(to: str) -> None: ...

    assert (send.retry, send.timeout, send.concurrency) == (None, None, None)
    assert (send.on_lost, send.max_resets) == ("requeue", None)
    assert (send.codes, send.default_code) == ({}, None)
    assert not send.is_async
    assert send.context_parameters == ()
    assert send.connection_parameter is None


@pytest.mark.parametrize(
    ("wrong", "allowed"),
    [
        ({"concurrency": 0}, "concurrency is 0; it must be a whole number from 1 to 10,000"),
        ({"concurrency": True}, "from 1 to 10,000"),
        ({"on_lost": "forget"}, "on_lost is 'forget'; it must be requeue or fail"),
        ({"max_resets": -1}, "max_resets is -1; it must be a whole number from 0"),
        ({"timeout": timedelta()}, "a duration from 1ms"),
        ({"timeout": 5}, "timeout is 5; it must be a duration"),
        ({"transaction": None}, "transaction is None"),
        ({"timeout": "soon"}, "timeout is 'soon'; it must be a duration"),
        ({"transaction": "perhaps"}, "transaction is 'perhaps'; it must be true, false"),
        ({"concurrency": "many"}, "concurrency is 'many'; it must be a whole number"),
        ({"max_running": "9" * 5_000}, "max_running is '9+…; it must be a whole number"),
    ],
)
def test_an_option_out_of_range_is_refused_when_the_task_is_declared(
    app: App, wrong: dict[str, Any], allowed: str
) -> None:
    def send(to: str) -> None: ...

    with pytest.raises(ConfigurationError, match=f"task 'send': .*{allowed}"):
        app.task(**wrong)(send)
    assert not app.tasks


def test_an_option_that_is_written_as_text_is_taken_for_what_it_means(app: App) -> None:
    written: dict[str, Any] = {
        "timeout": "2s",
        "transaction": "no",
        "concurrency": "3",
        "max_running": "2",
        "max_resets": "1",
        "on_lost": "FAIL",
    }

    @app.task(**written)
    def send(to: str) -> None: ...

    assert send.timeout == timedelta(seconds=2)
    assert send.transaction is False
    assert (send.concurrency, send.max_running, send.max_resets, send.on_lost) == (3, 2, 1, "fail")
    assert app.task(name="endless", timeout=cast("Any", "none"))(send.function).timeout is None
    routine = app.sql_task("derive", handler="stats.derive(jsonb)", timeout=cast("Any", "1m30s")).routine
    assert routine.timeout == 90


@pytest.mark.parametrize("unfit", ["q" * 101, "ä" * 51, "", "a\nb", 5])
def test_a_queue_whose_name_the_database_would_not_take_is_refused_before_it_is_asked(
    app: App, unfit: Any
) -> None:
    @app.task
    def send(to: str) -> None: ...

    with pytest.raises(InvalidArgument, match="cannot be used as queue: 1 to 100 bytes"):
        send.using(queue=unfit)
    with pytest.raises(InvalidArgument, match="cannot be used as queue: 1 to 100 bytes"):
        app.task(name="other", queue=unfit)
    with pytest.raises(InvalidArgument, match="cannot be used as the name of a queue: 1 to 100 bytes"):
        App("postgresql://nowhere/", queues=["mail", unfit])


@pytest.mark.parametrize(
    "given",
    [
        {"tags": ["x" * 3_000_000]},
        {"queue": "x" * 3_000_000},
        {"priority": "x" * 3_000_000},
        {"priority": 10**5_000},
        {"delay": "x" * 3_000_000},
        {"run_at": "x" * 3_000_000},
        {"unique": "\0" * 3_000_000},
        {"action": "x" * 3_000_000},
        {"merge": "x" * 3_000_000},
    ],
    ids="".join,
)
def test_a_value_of_megabytes_is_not_repeated_in_the_error(app: App, given: dict[str, Any]) -> None:
    @app.task
    def send(to: str) -> None: ...

    with pytest.raises(InvalidArgument) as refused:
        send.using(**given)
    assert len(str(refused.value)) < 1_000


@pytest.mark.parametrize("window", [timedelta(), -timedelta(days=1)])
def test_a_window_that_holds_no_key_is_refused(app: App, window: timedelta) -> None:
    @app.task
    def send(to: str) -> None: ...

    with pytest.raises(InvalidArgument, match=r"window is .*; write one like"):
        send.using(unique="k", window=window)
    with pytest.raises(InvalidArgument, match=r"window is .*; write one like"):
        app.task(name="other", window=window)


OF_A_KEY: list[dict[str, Any]] = [
    {"scope": "unfinished"},
    {"action": "replace"},
    {"window": timedelta(hours=1)},
    {"merge": "deep"},
]


@pytest.mark.parametrize("said", OF_A_KEY, ids="".join)
def test_what_is_said_of_a_key_where_there_is_none_is_refused_when_the_job_is_made(
    app: App, said: dict[str, Any]
) -> None:
    @app.task
    def send(to: str) -> None: ...

    for keyless in (
        send.using(**said),
        send.using(**said).using(queue="mail"),
        send.using(queue="mail").using(**said),
    ):
        with pytest.raises(
            InvalidArgument, match=f"task 'send': {''.join(said)} is .* give it unique="
        ) as refused:
            keyless.job("ada")
        assert refused.value.argument == "".join(said)
        with pytest.raises(InvalidArgument, match="give it unique="):
            keyless.enqueue("ada")
        assert keyless.using(unique="k").job("ada").unique_key == "k"
    assert send.using(unique="k").using(**said).job("ada").unique_key == "k"


@pytest.mark.parametrize("said", OF_A_KEY, ids="".join)
def test_a_task_may_say_what_holds_for_those_of_its_jobs_that_have_a_key(
    app: App, said: dict[str, Any]
) -> None:
    @app.task(**said)
    def send(to: str) -> None: ...

    assert send.job("ada").unique_key is None
    assert send.using(queue="mail").job("ada").unique_key is None
    assert send.using(unique="k").job("ada").unique_key == "k"


def test_a_generator_is_refused(app: App) -> None:
    def some() -> Any:
        yield 1

    async def more() -> Any:
        yield 1

    for function in (some, more):
        with pytest.raises(ConfigurationError, match="return a list"):
            app.task(function)


# What the worker hands in.


def test_the_context_is_never_sent_wherever_it_stands(app: App) -> None:
    @app.task
    async def first(context: Context, n: int) -> None: ...

    @app.task
    async def last(n: int, *, context: Context | None = None) -> None: ...

    @app.task
    def between(n: int, c: Annotated[Context, "the attempt"], m: int = 2) -> None: ...

    for task, name in ((first, "context"), (last, "context"), (between, "c")):
        assert task.context_parameters == (name,)
        assert stored(task, 3) == '{"n":3}'
        assert task.signature.decode_json('{"n":3}') in (((), {"n": 3}), ((3,), {}))
        with pytest.raises(InvalidArgument, match=name):
            task.signature.decode_json(f'{{"n":3,"{name}":1}}')


def test_a_transactional_task_is_given_a_connection_of_its_kind(app: App) -> None:
    @app.task(transaction=True)
    async def by_kind(amount: int, connection: AsyncTx[DictRow]) -> None: ...

    @app.task(transaction=True)
    def plain(tx: Tx, context: Context, amount: int) -> None: ...

    @app.task(transaction=True)
    def by_name(tx, amount: int): ...  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202

    assert [t.connection_parameter for t in (by_kind, plain, by_name)] == ["connection", "tx", "tx"]
    assert plain.context_parameters == ("context",)
    for task in (by_kind, plain, by_name):
        assert task.transaction
        assert stored(task, amount=3) == '{"amount":3}'


def test_tx_is_an_ordinary_argument_of_an_ordinary_task(app: App) -> None:
    @app.task
    def look_up(tx: str) -> None: ...

    assert stored(look_up, "0xabc") == '{"tx":"0xabc"}'


def test_a_transactional_task_that_cannot_be_given_its_connection_is_refused(app: App) -> None:
    async def nowhere(n: int) -> None: ...
    async def twice(tx: AsyncTx, other: AsyncTx) -> None: ...
    async def of_the_other_kind(tx: Tx) -> None: ...
    def plain_of_the_other_kind(connection: AsyncTx) -> None: ...
    async def something_else(tx: str) -> None: ...
    async def only_by_position(tx: AsyncTx, /, n: int) -> None: ...

    for function, said in (
        (nowhere, r"no parameter takes it; write tx: psycopg.AsyncConnection"),
        (twice, r"tx and other take it"),
        (of_the_other_kind, r"an async function is given a psycopg.AsyncConnection; write tx"),
        (
            plain_of_the_other_kind,
            r"a plain function is given a psycopg.Connection; write tx: psycopg.Connection",
        ),
        (something_else, r"tx is annotated str"),
        (only_by_position, r"'tx' is handed in by name"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            app.task(transaction=True)(function)


def test_a_connection_is_given_to_transactional_tasks_only(app: App) -> None:
    async def book(connection: AsyncTx, n: int) -> None: ...

    with pytest.raises(ConfigurationError, match=r"write @app.task\(transaction=True\)"):
        app.task(book)


def test_who_calls_a_task_hands_in_what_the_worker_would(app: App) -> None:
    # spec: HO-44
    @app.task(transaction=True)
    def enter(tx: Tx, amount: int) -> tuple[object, int]:
        return tx, amount

    mine: Any = object()
    assert enter(mine, 3) == (mine, 3)


# Queues that an app has declared.


def test_a_queue_that_was_not_declared_is_refused_with_those_that_were() -> None:
    # spec: HO-34
    app = App("postgresql://nowhere/", queues=["mail", "default"])

    @app.task(queue="mail")
    def send(to: str) -> None: ...

    @app.task
    def other() -> None: ...

    assert send.using(queue="default").job("ada").queue == "default"
    with pytest.raises(ConfigurationError, match=r"task 'wrong': 'bulk' is not one of .*: mail, default"):
        app.task(queue="bulk", name="wrong")(lambda: None)
    with pytest.raises(InvalidArgument, match="'bulk' is not one of the queues of this app: mail, default"):
        send.using(queue="bulk")
    assert set(app.tasks) == {"send", "other"}


async def test_a_worker_serves_declared_queues_only() -> None:
    # spec: HO-34
    app = App("postgresql://nowhere/", queues=["mail", "default"])
    app.task(name="send")(lambda: None)
    await app.worker(queues="mail", queue_concurrency="mail=2")
    for wrong in ({"queues": "bulk"}, {"queue_concurrency": "bulk=2"}, {"queue_budgets": "bulk=2"}):
        with pytest.raises(
            InvalidArgument, match="'bulk' is not one of the queues of this app: mail, default"
        ):
            await app.worker(**wrong)


def test_a_task_must_name_a_queue_where_there_is_no_default_one() -> None:
    # spec: HO-34
    app = App("postgresql://nowhere/", queues=["mail"])
    with pytest.raises(ConfigurationError, match=r"task 'send': 'default' is not one of"):
        app.task(name="send")(lambda: None)


def test_without_declared_queues_any_may_be_named(app: App) -> None:
    # spec: HO-34
    @app.task(queue="anything")
    def send() -> None: ...

    assert send.using(queue="goes").job().queue == "goes"


@pytest.mark.parametrize("wrong", ["mail", [], [""], ["a\nb"]])
def test_queues_are_a_list_of_names(wrong: Any) -> None:
    with pytest.raises(ShiftworkError, match="queue"):
        App("postgresql://nowhere/", queues=wrong)
