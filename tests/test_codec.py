from __future__ import annotations

import enum
import inspect
import json
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import UUID

import msgspec
import pydantic
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shiftwork.codec import Signature
from shiftwork.errors import ConfigurationError, InvalidArgument, PayloadTooLarge

MIB = 1 << 20


@dataclass
class Address:
    street: str
    number: int = 1


class Parcel(msgspec.Struct):
    to: Address
    weight: Decimal


class Person(pydantic.BaseModel):
    name: str
    born: date
    nick: str | None = pydantic.Field(default=None, alias="nickName")


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


def send(signature: Signature, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """What is stored for a call, as the database would give it back."""
    stored = json.loads(bytes(signature.encode(args, kwargs, MIB)))
    assert isinstance(stored, dict)
    return stored


def call(signature: Signature, stored: dict[str, Any]) -> Any:
    args, kwargs = signature.decode(stored)
    return signature.function(*args, **kwargs)


def test_arguments_are_stored_by_name_however_they_were_given() -> None:
    def greet(name: str, greeting: str = "hello", *, loud: bool = False) -> None: ...

    signature = Signature("greet", greet)
    assert send(signature, "Ada") == {"name": "Ada"}
    assert send(signature, "Ada", "hi") == {"name": "Ada", "greeting": "hi"}
    assert send(signature, greeting="hi", name="Ada", loud=True) == {
        "name": "Ada",
        "greeting": "hi",
        "loud": True,
    }


def test_a_new_default_also_serves_jobs_that_wait() -> None:
    def before(name: str, greeting: str = "hello") -> str:
        return f"{greeting} {name}"

    def after(name: str, greeting: str = "welcome") -> str:
        return f"{greeting} {name}"

    stored = send(Signature("greet", before), "Ada")
    assert call(Signature("greet", after), stored) == "welcome Ada"


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (str, "Zoë 🎈"),
        (int, 2**63 + 7),
        (int, 10**400),
        (float, 0.1),
        (bool, True),
        (None, None),
        (str | None, None),
        (int | str, "7"),
        (bytes, b"\x00\xff"),
        (datetime, datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=timezone(timedelta(hours=5, minutes=30)))),
        (datetime, datetime(2026, 1, 2)),  # noqa: DTZ001
        (date, date(2026, 1, 2)),
        (time, time(3, 4, 5, tzinfo=UTC)),
        (timedelta, timedelta(days=3, microseconds=1)),
        (UUID, UUID(int=1)),
        (Decimal, Decimal("1.10")),
        (Colour, Colour.BLUE),
        (Level, Level.HIGH),
        (Literal["a", "b"], "b"),
        (Path, Path("/etc/hosts")),
        (Path | None, Path("x")),
        (Address, Address("Main", 2)),
        (Parcel, Parcel(Address("Main"), Decimal(3))),
        (Person, Person(name="Ada", born=date(1815, 12, 10), nickName="A")),
        (list[Person], [Person(name="Ada", born=date(1815, 12, 10))]),
        (dict[str, list[Address]], {"home": [Address("Main")]}),
        (dict[int, date], {1: date(2026, 1, 2)}),
        (tuple[int, str], (1, "x")),
        (set[UUID], {UUID(int=1)}),
        (list[tuple[Colour, Decimal]], [(Colour.RED, Decimal(1))]),
        (Any, {"a": [1, None, "x"]}),
        (object, [1]),
        (Annotated[int, msgspec.Meta(ge=1)], 3),
    ],
)
def test_a_value_comes_back_as_what_it_was(annotation: Any, value: Any) -> None:
    # spec: HO-42
    def keep(value: Any) -> Any:
        return value

    keep.__annotations__["value"] = annotation
    signature = Signature("keep", keep)
    back = call(signature, send(signature, value))
    assert back == value
    assert type(back) is type(value)
    if isinstance(value, datetime | time):
        assert back.utcoffset() == value.utcoffset()


def test_a_value_is_converted_where_its_meaning_is_clear() -> None:
    def plan(at: datetime, colour: Colour, who: Person) -> tuple[datetime, Colour, Person]:
        return at, colour, who

    signature = Signature("plan", plan)
    stored = send(signature, "2026-01-02T00:00:00Z", "red", {"name": "Ada", "born": "1815-12-10"})
    assert call(signature, stored) == (
        datetime(2026, 1, 2, tzinfo=UTC),
        Colour.RED,
        Person(name="Ada", born=date(1815, 12, 10)),
    )


def test_a_result_comes_back_as_the_type_the_task_names() -> None:
    def parcel() -> Parcel:
        raise NotImplementedError

    async def people() -> list[Person]:
        raise NotImplementedError

    def anything(): ...  # type: ignore[no-untyped-def]  # noqa: ANN202

    stored = {"to": {"street": "Main"}, "weight": "3"}
    assert Signature("parcel", parcel).read_result(stored) == Parcel(Address("Main"), Decimal(3))
    ada = {"name": "Ada", "born": "1815-12-10"}
    assert Signature("people", people).read_result([ada]) == [Person(name="Ada", born=date(1815, 12, 10))]
    assert Signature("anything", anything).read_result([1, "x"]) == [1, "x"]
    with pytest.raises(InvalidArgument, match="parcel"):
        Signature("parcel", parcel).read_result("not a parcel")


def refusal(function: Any, *args: Any, **kwargs: Any) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as refused:
        Signature("mail", function).encode(args, kwargs, MIB)
    assert refused.value.task == "mail"
    assert "mail" in str(refused.value)
    return refused.value


def mail(to: str, copies: list[Address] = [], extra: Any = None) -> None: ...  # noqa: B006


def test_a_wrong_argument_is_refused_by_its_name() -> None:
    # spec: HO-32
    wrong = refusal(mail, 5)
    assert wrong.argument == "to"
    assert "`str`" in str(wrong)
    nested = refusal(mail, "ada", [Address("Main"), {"street": 7}])
    assert nested.argument == "copies"
    assert "copies[1].street" in str(nested)


class Moment(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True)
    at: datetime
    id: UUID


class Login(pydantic.BaseModel):
    user: str
    password: pydantic.SecretStr
    attempts: int = 0


def test_a_strict_model_comes_back_from_json() -> None:
    def note(moment: Moment) -> Moment:
        return moment

    signature, moment = Signature("note", note), Moment(at=datetime(2026, 1, 2, tzinfo=UTC), id=UUID(int=7))
    assert call(signature, send(signature, moment)) == moment


def test_a_model_that_hides_a_secret_from_json_is_refused() -> None:
    def enter(logins: list[Login]) -> None: ...

    refused = refusal(enter, [Login(user="ada", password=pydantic.SecretStr("hunter2"))])
    assert refused.argument == "logins"
    assert "see 'password'" in str(refused)


def test_a_refusal_does_not_repeat_the_value() -> None:
    def enter(login: Login | None = None, colour: Colour = Colour.RED, kind: Literal["a"] = "a") -> Colour:
        return colour

    said = str(refusal(enter, {"user": "ada", "password": "p", "attempts": "hunter2"}))
    assert "attempts: Input should be a valid integer" in said
    assert "hunter2" not in said
    assert "http" not in said
    for name in ("colour", "kind"):
        refused = refusal(enter, **{name: "hunter2"})
        assert refused.argument == name
        assert "Invalid enum value" in str(refused)
        assert "hunter2" not in str(refused)
    with pytest.raises(InvalidArgument) as stored:
        Signature("enter", enter).read_result("hunter2")
    assert "hunter2" not in str(stored.value)


@pytest.mark.parametrize("name", ["a\0", "a\ud800"])
def test_an_argument_whose_name_cannot_be_stored_is_refused(name: str) -> None:
    def anything(**rest: Any) -> None: ...

    refused = refusal(anything, **{name: 1})
    assert refused.argument == name
    assert "cannot store" in str(refused)
    str(refused).encode()


def test_missing_and_unknown_arguments_are_named() -> None:
    assert "'to'" in str(refusal(mail))
    assert "'subject'" in str(refusal(mail, "ada", subject="x"))
    assert "too many" in str(refusal(mail, "ada", [], None, 4))


class Unknown:
    pass


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("a\0b", "NUL"),
        ({"deep": ["x\0"]}, r"NUL.*extra\.deep\[0\]"),
        ({"k\0": 1}, "NUL.*key"),
        ("\ud800", "surrogate"),
        (float("nan"), "nan"),
        ([1.0, float("inf")], r"inf.*extra\[1\]"),
        ([-float("inf")], "-inf"),
        ([10**5000], "digits"),
        (nested(65), "64 levels"),
        (nested(5000), "nested|levels"),
        (Unknown(), "Unknown"),
        ({"x": Unknown()}, "Unknown"),
        ({(1, 2): 3}, "JSON"),
    ],
)
def test_a_value_that_cannot_be_stored_is_refused_by_the_name_of_its_argument(
    value: object, said: str
) -> None:
    # fault: F40
    refused = refusal(mail, "ada", extra=value)
    assert refused.argument == "extra"
    with pytest.raises(InvalidArgument, match=f"(?s)'extra' of task 'mail'.*{said}"):
        raise refused


def test_nesting_up_to_the_limit_is_stored() -> None:
    assert send(Signature("mail", mail), "ada", extra=nested(64))["extra"] == nested(64)


def test_a_payload_that_is_too_large_names_what_makes_it_so() -> None:
    # spec: A-9
    signature = Signature("mail", mail)
    fits = MIB - len('{"to":""}')
    assert len(bytes(signature.encode(("x" * fits,), {}, MIB))) == MIB
    with pytest.raises(PayloadTooLarge, match="'to'") as refused:
        signature.encode(("x" * (fits + 1),), {}, MIB)
    assert refused.value.argument == "to"
    assert bytes(signature.encode(("x" * (fits + 1),), {}, 2 * MIB))


def test_a_stored_payload_that_does_not_fit_is_refused_by_argument() -> None:
    signature = Signature("mail", mail)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"to": 5}, "to"),
        ({}, "to"),
        ({"to": "ada", "cc": "x"}, "cc"),
    ]
    for stored, argument in wrong:
        with pytest.raises(InvalidArgument) as refused:
            signature.decode(stored)
        assert refused.value.argument == argument
    with pytest.raises(InvalidArgument, match="not a JSON object"):
        signature.decode([1])  # type: ignore[arg-type]


def test_further_keywords_are_stored_beside_the_rest_and_checked() -> None:
    def count(name: str, /, **numbers: int) -> tuple[str, dict[str, int]]:
        return name, numbers

    signature = Signature("count", count)
    stored = send(signature, "Ada", a=1, b=2)
    assert stored == {"name": "Ada", "a": 1, "b": 2}
    assert call(signature, stored) == ("Ada", {"a": 1, "b": 2})
    for wrong in ({"a": "x"}, {"name": 2}):
        with pytest.raises(InvalidArgument):
            signature.encode(("Ada",), wrong, MIB)


def test_positional_only_and_keyword_only_parameters_are_called_as_they_want() -> None:
    def mixed(a: int, b: int = 2, /, c: int = 3, *, d: int = 4) -> tuple[int, ...]:
        return a, b, c, d

    signature = Signature("mixed", mixed)
    assert call(signature, send(signature, 1)) == (1, 2, 3, 4)
    assert call(signature, send(signature, 9, 8, c=7, d=6)) == (9, 8, 7, 6)


def test_star_args_are_refused_when_the_task_is_declared() -> None:
    def total(*numbers: int) -> None: ...

    with pytest.raises(ConfigurationError, match=r"\*numbers.*list"):
        Signature("total", total)


def test_an_annotation_that_cannot_be_followed_is_refused_when_the_task_is_declared() -> None:
    def either(who: Address | Parcel) -> None: ...

    with pytest.raises(ConfigurationError, match="either"):
        Signature("either", either)


class Later:
    """Something that the worker fills in."""


def test_an_annotation_or_a_name_that_breaks_is_refused_when_the_task_is_declared() -> None:
    def half(x: Any) -> None: ...

    def special(__init__: int = 2) -> None: ...

    half.__annotations__["x"] = "1 +"
    for function in (half, special):
        with pytest.raises(ConfigurationError, match="'t': an annotation cannot be followed"):
            Signature("t", function)


class Mixed(enum.Enum):
    WORD = "a"
    NUMBER = 2


def test_an_argument_whose_type_cannot_be_read_from_json_is_named_when_the_task_is_declared() -> None:
    def plain(n: int, kind: Mixed) -> None: ...

    def nested(n: int, kind: list[Mixed] | None = None) -> None: ...

    def rest(n: int, **kind: Mixed) -> None: ...

    for function in (plain, nested, rest):
        with pytest.raises(
            ConfigurationError, match=r"'t': the annotation of argument 'kind' cannot be followed: .*Mixed"
        ):
            Signature("t", function)


def test_what_is_injected_is_never_stored() -> None:
    def work(context: Later, n: int) -> None: ...

    signature = Signature("work", work, injected=frozenset({Later}))
    assert send(signature, 3) == {"n": 3}
    assert signature.injected == {"context": Later}
    assert signature.decode({"n": 3}) == ((), {"n": 3})
    with pytest.raises(InvalidArgument, match="context"):
        signature.decode({"n": 3, "context": {}})


def test_annotations_may_name_what_is_defined_later() -> None:
    module: dict[str, Any] = {}
    exec("from __future__ import annotations\ndef f(x: Soon) -> None: ...", module)
    signature = Signature("f", module["f"])
    exec("from dataclasses import dataclass\n@dataclass\nclass Soon:\n  n: int", module)
    assert send(signature, module["Soon"](3)) == {"x": {"n": 3}}


def test_what_is_defined_later_and_cannot_be_read_back_is_refused_whatever_is_given() -> None:
    module: dict[str, Any] = {}
    exec("from __future__ import annotations\ndef f(n: int, x: Soon = None) -> None: ...", module)
    signature = Signature("f", module["f"])
    exec("from datetime import datetime\nSoon = datetime | str", module)
    with pytest.raises(ConfigurationError, match="cannot be followed"):
        send(signature, 1)


def test_an_annotation_that_nobody_can_find_is_an_error_that_says_where_to_put_it() -> None:
    class Local:
        pass

    def work(x: Local) -> None: ...

    with pytest.raises(ConfigurationError, match=r"'Local'.*module tests\.test_codec"):
        Signature("work", work).encode((1,), {}, MIB)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@settings(deadline=None)
@given(json_values)
def test_any_json_is_either_stored_unchanged_or_refused_by_name(value: Any) -> None:
    # fault: F40
    signature = Signature("mail", mail)
    try:
        stored = send(signature, "ada", extra=value)
    except InvalidArgument as refused:
        assert refused.argument == "extra"  # noqa: PT017
        assert "\\x00" in repr(value)
    else:
        assert stored["extra"] == value
        assert call(signature, stored) is None


# What a worker reads: the same from the text as from the document, only quicker.


def both_ways(function: Any, text: str | bytes, **injected: Any) -> Any:
    """The call that a payload leads to, or its refusal, read quickly; reading patiently leads to the same."""

    def told(read: Any) -> tuple[str, Any]:
        try:
            args, kwargs = read(text)
        except InvalidArgument as refused:
            return str(refused), refused.argument
        bound = inspect.signature(function).bind(*args, **kwargs, **injected)
        return "called", bound.arguments

    signature = Signature("f", function, injected=frozenset({Later}))
    quickly, patiently = told(signature.decode_json), told(signature._decode_patiently)
    assert quickly == patiently
    return quickly[1]


def no_arguments() -> None: ...
def one(name: str) -> None: ...
def two(name: str, n: int) -> None: ...
def with_default(name: str, n: int = 3, *, extra: Any = None) -> None: ...
def only_keywords(*, name: str, n: int) -> None: ...
def rest(name: str, **numbers: int) -> None: ...
def positional(name: str, n: int = 2, /, more: float = 1) -> None: ...
def rich(at: datetime, colour: Colour, who: Person, to: Address | None, sums: dict[int, Decimal]) -> None: ...
def loose(a, b=None): ...  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201


PAYLOADS = (
    "{}",
    '{"name":"Ada"}',
    '{"name":"Ada","n":1}',
    '{"n": 1, "name": "Ada"}',
    '{"name":"Ada","n":1,"extra":[1,{"x":null}]}',
    '{"name":"Ada","n":null}',
    '{"name":5}',
    '{"name":"Ada","n":"x"}',
    '{"name":"Ada","n":1.0}',
    '{"name":"Ada","n":1.5}',
    '{"name":"Ada","unknown":1}',
    '{"name":"Ada","n":' + "9" * 300 + "}",
    '{"name":"Ada","n":' + "9" * 4500 + "}",
    '{"name":"Ada","more":1e400}',
    '{"name":"Ada","more":2}',
    '{"name":"\\ud83c\\udf88"}',
    '{"a":1}',
    '{"a":1,"b":[true,false,null,1.5,"x"]}',
    '{"a":' + "[" * 5000 + "]" * 5000 + "}",
    '{"at":"2026-01-02T00:00:00Z","colour":"red","who":{"name":"Ada","born":"1815-12-10"},'
    '"to":{"street":"Main"},"sums":{"1":"1.10","2":3}}',
    '{"at":"2026-01-02T00:00:00Z","colour":"green","who":{"name":"Ada"},"to":null,"sums":{}}',
    '{"at":"2026-01-02T00:00:00Z","colour":"red","who":{"name":"Ada"},"to":null,"sums":{}}',
    "[]",
    "null",
    "5",
    "",
    "{",
    b"\xff",
)


@pytest.mark.parametrize(
    "function", [no_arguments, one, two, with_default, only_keywords, rest, positional, rich, loose]
)
@pytest.mark.parametrize("text", PAYLOADS, ids=lambda text: text[:30])
def test_a_payload_is_read_quickly_or_patiently_to_the_same_end(function: Any, text: str | bytes) -> None:
    # spec: SH-17
    both_ways(function, text)


def test_a_call_is_made_as_the_function_wants_it() -> None:
    assert both_ways(two, '{"n":1,"name":"Ada"}') == {"name": "Ada", "n": 1}
    assert both_ways(with_default, '{"name":"Ada"}') == {"name": "Ada"}
    assert both_ways(only_keywords, '{"name":"Ada","n":2}') == {"name": "Ada", "n": 2}
    assert both_ways(one, '{"name":5}') == "name"

    def first(context: Later, n: int) -> None: ...
    def middle(n: int, context: Later, m: int) -> None: ...
    def last(n: int, m: int, context: Later) -> None: ...

    later = Later()
    assert both_ways(first, '{"n":1}', context=later) == {"context": later, "n": 1}
    for function in (middle, last):
        assert both_ways(function, '{"m":2,"n":1}', context=later) == {"n": 1, "context": later, "m": 2}


class Touchy(pydantic.BaseModel):
    n: int

    @pydantic.field_validator("n")
    @classmethod
    def complain(cls, n: int) -> int:
        raise RuntimeError(n)


def test_a_type_that_raises_anything_makes_the_payload_unreadable_and_no_more() -> None:
    def take(it: Touchy) -> None: ...

    with pytest.raises(InvalidArgument, match="RuntimeError"):
        Signature("take", take).decode_json('{"it":{"n":1}}')


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(["name", "n", "extra", "more"]) | st.text(max_size=3), json_values))
def test_any_payload_is_read_the_same_both_ways(payload: dict[str, Any]) -> None:
    for function in (no_arguments, one, two, with_default, rest, positional):
        both_ways(function, msgspec.json.encode(payload))


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.just(10**400),
    st.floats(),
    st.text(max_size=3),
    st.just("\0"),
    st.just(Level.LOW),
)


@settings(max_examples=300, deadline=None)
@given(
    args=st.lists(SCALARS, max_size=4), kwargs=st.dictionaries(st.sampled_from("abcde"), SCALARS, max_size=4)
)
@example(args=[1, 10**400], kwargs={})
@example(args=[1], kwargs={"c": "\0"})
@example(args=[1], kwargs={"a": 1})
@example(args=[1, 1.5, "x", True], kwargs={})
def test_a_call_is_stored_quickly_or_patiently_to_the_same_end(
    args: list[Any], kwargs: dict[str, Any]
) -> None:
    def task(a: int, b: float = 1.0, c: str | None = None, *, d: bool = False) -> None: ...

    def outcome(signature: Signature) -> Any:
        try:
            return send(signature, *args, **kwargs)
        except InvalidArgument:
            return "refused"

    patient = Signature("task", task)
    patient.__dict__ |= {"_order": None, "_kinds": {}}
    assert outcome(Signature("task", task)) == outcome(patient)
