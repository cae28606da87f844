"""Arguments ⇄ one JSON object by name.

A call is bound to the task's signature, turned into JSON, and read back by the annotations before it is
accepted, so what a worker will find is proved when the job is sent. Three choices: `*args` is refused at
declaration, since it has no names to be stored under; `**kwargs` are stored beside the other arguments; a
default that was not given is not stored, so a later, better default also serves the jobs that wait.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import sys
import types
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import cached_property
from operator import attrgetter
from pathlib import PurePath
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec

from shiftwork.errors import (
    ConfigurationError,
    InvalidArgument,
    PayloadTooLarge,
    ResultNotJson,
    ReturnTypeMismatch,
)

MAX_DEPTH = 64
MAX_RESULT_DEPTH = 500
MAX_INTEGER_BITS = 13_000  # about 3,900 digits: what Python will read back from text
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_UNSTORABLE = re.compile("[\0\ud800-\udfff]")
_PLACE = re.compile(r"(?s)(.*) - at `(?:key in )?\$\.?(.*)`")
_FIELD = re.compile(r"(?s)(.*) field `(.*)`")
_VALUE = re.compile(r"(?s)^(Invalid (?:enum )?value) .*?(?= - at `|$)")
_json = msgspec.json.Encoder()

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a call: by position, and by name."""


class Signature:
    """How a task is called: binds, checks and converts its arguments, both ways."""

    def __init__(
        self,
        task: str,
        function: Callable[..., Any],
        injected: frozenset[type] = frozenset(),
        injected_names: frozenset[str] = frozenset(),
        batch: type | None = None,
    ) -> None:
        """A parameter annotated `batch[T]` is given several at once, each enqueued as a T by itself."""
        self.task = task
        self.function = function
        self._injected = injected
        self._injected_names = injected_names
        self._batch = batch
        try:
            self._signature = inspect.signature(function)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"task {task!r}: {function!r} is not a function with a signature"
            ) from error
        for parameter in self._signature.parameters.values():
            if parameter.kind is parameter.VAR_POSITIONAL:
                raise ConfigurationError(
                    f"task {task!r}: *{parameter.name} cannot be stored, since arguments are stored by name; "
                    f"take a list instead, as in {parameter.name}: list[str]"
                )
        try:
            _ = self._arguments
        except ConfigurationError as error:
            if not isinstance(error.__cause__, NameError):
                raise  # else it names something that may be defined further down: look again at first use

    def encode(self, args: tuple[Any, ...], kwargs: dict[str, Any], max_payload: int) -> msgspec.Raw:
        """The call as JSON; refused, naming the argument, if it does not fit or cannot be stored."""
        given = self._bind(args, kwargs)
        payload = given if self._is_plain(given) else self._checked(given)
        encoded = _json.encode(payload)
        if len(encoded) > max_payload:
            largest = max(payload, key=lambda name: len(_json.encode(payload[name])))
            raise PayloadTooLarge(
                f"task {self.task!r}: the arguments take {len(encoded):,} bytes of JSON, most of them for "
                f"{largest!r}; {max_payload:,} are allowed. Store it elsewhere and send a reference, "
                "or raise max_payload",
                task=self.task,
                argument=largest,
            )
        return msgspec.Raw(encoded)

    def decode(self, payload: Mapping[str, Any]) -> Call:
        """Arguments to call the function with; what is injected is left for the caller to add."""
        if not isinstance(payload, Mapping):
            raise InvalidArgument(f"task {self.task!r}: the payload is not a JSON object", task=self.task)
        converted = self._convert(payload)
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for name, parameter in self._signature.parameters.items():
            if name not in converted:
                continue
            if parameter.kind is parameter.POSITIONAL_ONLY and len(args) == self._positions.index(name):
                args.append(converted.pop(name))
            else:
                kwargs[name] = converted.pop(name)
        return tuple(args), {**kwargs, **converted}

    @cached_property
    def injected(self) -> dict[str, Any]:
        """Parameters that the worker fills in at run time, and that are therefore never stored; with their types."""
        hints = {name: plain_type(self._hints.get(name, Any)) for name in self._signature.parameters}
        found = {name: hint for name, hint in hints.items() if self._is_injected(name, hint)}
        for name in found:
            parameter = self._signature.parameters[name]
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise ConfigurationError(
                    f"task {self.task!r}: {name!r} is handed in by name, so it cannot stand before a / or be {parameter}"
                )
        return found

    @property
    def arguments(self) -> dict[str, Any]:
        """What a caller gives, with the types."""
        return {name: self._hints.get(name, Any) for name in self._callable.parameters}

    def takes(self, argument: str) -> bool:
        """Whether the task can be given an argument of that name."""
        parameters = self._signature.parameters.values()
        return any(it.name == argument or it.kind is it.VAR_KEYWORD for it in parameters)

    def read_result(self, stored: Any) -> Any:  # noqa: ANN401
        """What the function returned, as the type it says it returns."""
        expected = self._hints.get("return", Any)
        try:
            return msgspec.convert(stored, expected, str_keys=True, dec_hook=_build)
        except (msgspec.ValidationError, TypeError) as error:
            raise InvalidArgument(
                f"task {self.task!r}: the stored result is not what the task says it returns: {_told(error)}",
                task=self.task,
            ) from error

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        if (order := self._order) is not None:  # for then this says the same as below, and much sooner
            given = {**dict(zip(order, args, strict=False)), **kwargs} if args else kwargs
            if len(given) == len(args) + len(kwargs) and self._required <= given.keys() <= self._names:
                return given
        try:
            bound = self._callable.bind(*args, **kwargs)
        except TypeError as error:
            raise InvalidArgument(f"task {self.task!r}: {error}", task=self.task) from None
        given = dict(bound.arguments)
        if self._rest:
            rest = given.pop(self._rest, {})
            for name in rest:
                if name in given:  # a positional-only parameter of the same name
                    raise self._refuse(name, "is given twice")
            given.update(rest)
        return given

    def _is_plain(self, given: Mapping[str, Any]) -> bool:
        """Whether all of it can be stored as it is, and is what it should be, beyond doubt."""
        kinds = self._kinds
        for name, value in given.items():
            if type(value) not in kinds.get(name, ()) or _fault(name, value):
                return False
        return True

    def _checked(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """What is given, in the simple types of JSON; refused, naming the argument, if it is not what it should be."""
        try:
            payload: dict[str, Any] = msgspec.to_builtins(given, str_keys=True, enc_hook=_simplify_argument)
        except (TypeError, ValueError, RecursionError):
            payload = {name: self._to_json(name, value) for name, value in given.items()}
        for name, value in payload.items():
            if found := _UNSTORABLE.search(name):
                raise self._refuse(name, f"is named with {_named(found[0])}, which PostgreSQL cannot store")
            if fault := _fault(name, value):
                raise self._refuse(name, *fault)
        self._read(payload)
        return payload

    def _to_json(self, name: str, value: object) -> object:
        try:
            return msgspec.to_builtins(value, str_keys=True, enc_hook=_simplify_argument)
        except RecursionError:
            raise self._refuse(name, "is nested too deeply, or contains itself") from None
        except (TypeError, ValueError) as error:
            raise self._refuse(name, f"cannot be stored as JSON: {error}") from error

    def _convert(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """The stored values as the annotations want them."""
        values, rest = self._read(payload)
        converted = {name: getattr(values, name) for name in self._names}
        return {name: value for name, value in converted.items() if value is not msgspec.UNSET} | rest

    def _read(self, payload: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Arguments that have a name, and the rest of them; refused if they do not fit."""
        known, rest = payload, {}
        if self._rest:
            known = {name: value for name, value in payload.items() if name in self._names}
            rest = {name: value for name, value in payload.items() if name not in self._names}
        try:
            values = msgspec.convert(dict(known), self._arguments, str_keys=True, dec_hook=_build)
            if rest:
                rest = {name: self._convert_rest(name, value) for name, value in rest.items()}
        except msgspec.ValidationError as error:
            raise self._explain(_told(error)) from error
        except RecursionError:
            raise InvalidArgument(
                f"task {self.task!r}: the payload is nested too deeply", task=self.task
            ) from None
        return values, rest

    def _convert_rest(self, name: str, value: object) -> object:
        try:
            hint = self._hints.get(self._rest or "", Any)
            return msgspec.convert(value, hint, str_keys=True, dec_hook=_build)
        except msgspec.ValidationError as error:
            raise self._refuse(name, _told(error)) from error

    def _explain(self, message: str) -> InvalidArgument:
        """msgspec's complaint, told of an argument instead of a path in a document."""
        if place := _PLACE.fullmatch(message):
            complaint, path = place[1], place[2]
            return self._refuse(re.split(r"[.\[]", path, maxsplit=1)[0], complaint, path)
        if absent := _FIELD.fullmatch(message):
            kind = "is missing" if "missing" in absent[1] else "is not one that it takes"
            return self._refuse(absent[2], kind)
        return InvalidArgument(f"task {self.task!r}: {message}", task=self.task)

    def _refuse(self, argument: str, complaint: str, path: str | None = None) -> InvalidArgument:
        where = "" if path in (None, argument) else f" (at {path})"
        return InvalidArgument(
            f"argument {argument!r} of task {self.task!r}: {complaint}{where}",
            task=self.task,
            argument=argument,
        )

    @cached_property
    def batched(self) -> str | None:
        """The parameter that is given several at once, if there is one."""
        batched = [name for name, hint in self._annotations.items() if self._is_batch(hint)]
        if len(batched) > 1 or (batched and len(self._callable.parameters) > 1):
            raise ConfigurationError(
                f"task {self.task!r} is given several jobs at once, so all that a job has goes into one argument; it takes "
                f"{', '.join(self._callable.parameters)}"
            )
        return batched[0] if batched else None

    def _is_batch(self, hint: object) -> bool:
        return self._batch is not None and plain_type(hint) is self._batch

    @cached_property
    def _hints(self) -> dict[str, Any]:
        """The annotations, as they are for one job."""
        hints = self._annotations
        if not any(map(self._is_batch, hints.values())):
            return hints
        return {
            name: _element(hint) if name == "return" or self._is_batch(hint) else hint
            for name, hint in hints.items()
        }

    @cached_property
    def _annotations(self) -> dict[str, Any]:
        try:
            return get_type_hints(self.function, include_extras=True)
        except NameError as error:
            raise ConfigurationError(
                f"task {self.task!r}: an annotation cannot be followed: {error}. Names in them are looked "
                f"up in the module {self.function.__module__}; define it there"
            ) from error
        except Exception as error:  # annotations are code of the user's own
            raise ConfigurationError(
                f"task {self.task!r}: an annotation cannot be followed: {error}"
            ) from error

    def _is_injected(self, name: str, hint: object) -> bool:
        if name in self._injected_names:
            return True
        return isinstance(hint, type) and any(issubclass(hint, kind) for kind in self._injected)

    @cached_property
    def decode_json(self) -> Callable[[str | bytes], Call]:
        """Does the same as `decode`, from the text as it is stored.

        In one go if the signature allows it, and with patience, and words, if not.
        """
        patient, parameters = self._decode_patiently, self._callable.parameters.values()
        if any(it.kind in (it.POSITIONAL_ONLY, it.VAR_KEYWORD) for it in parameters):
            return patient
        decode = msgspec.json.Decoder(self._arguments, dec_hook=_build).decode
        names = [it.name for it in parameters]
        optional = [it.name for it in parameters if it.default is not it.empty]

        def by_name(text: str | bytes) -> Call:
            try:
                kwargs = msgspec.structs.asdict(decode(text))
            except Exception:  # noqa: BLE001  -- it is looked at again, and then told
                return patient(text)
            for name in optional:
                if kwargs[name] is msgspec.UNSET:
                    del kwargs[name]
            return (), kwargs

        first = [*self._signature.parameters][: len(names)]
        if optional or not names or names != first or any(it.kind is it.KEYWORD_ONLY for it in parameters):
            return by_name
        take = attrgetter(*names)

        def by_position(text: str | bytes) -> Call:
            try:
                values = take(decode(text))
            except Exception:  # noqa: BLE001  -- it is looked at again, and then told
                return patient(text)
            return (values if several else (values,)), {}

        several = len(names) > 1
        return by_position

    @cached_property
    def encode_result(self) -> Callable[[object], bytes]:
        """Gives a result as JSON; refuses one that is not what the function says it returns.

        A type that is plainly right is trusted; everything else is read back by the annotation.
        """
        expected = self._hints.get("return", Any)
        reader = _reader_of(expected)
        if expected is Any or expected is object or reader is None:
            return encode_result
        plain, read = _plain_kinds(expected), reader.decode

        def write(value: object) -> bytes:
            if type(value) in plain:
                return encode_result(value)
            if int in plain and isinstance(value, bool):  # as type checkers have it
                return b"1" if value else b"0"
            encoded = encode_result(value)
            try:
                read(encoded)
            except Exception:  # noqa: BLE001  -- it is looked at again, and then told
                self._check_result(value, expected)
            return encoded

        return write

    def _check_result(self, value: object, expected: Any) -> None:  # noqa: ANN401
        if not isinstance(value, bool) and _is_instance(value, expected):
            return
        try:
            msgspec.convert(_to_json(value), expected, str_keys=True, dec_hook=_build)
        except Exception as error:  # types of the user's own take part, and may raise anything
            if not isinstance(error.__cause__, NoWay):
                raise self._mismatch(value, error) from error

    def _mismatch(self, value: object, error: Exception) -> ReturnTypeMismatch:
        said = inspect.formatannotation(self._hints["return"])
        told = f": {_told(error)}" if isinstance(error, msgspec.ValidationError) else ""
        return ReturnTypeMismatch(
            f"task {self.task!r} says that it returns {said}, and returned {type(value).__name__}{told}",
            task=self.task,
        )

    def _decode_patiently(self, text: str | bytes) -> Call:
        payload, readable = read_json(text)
        if not readable:
            raise InvalidArgument(f"task {self.task!r}: the payload cannot be read", task=self.task)
        try:
            return self.decode(payload)
        except (InvalidArgument, ConfigurationError):
            raise
        except Exception as error:  # types of the user's own take part, and may raise anything
            raise InvalidArgument(
                f"task {self.task!r}: the payload cannot be read: {type(error).__name__}", task=self.task
            ) from error

    @cached_property
    def _callable(self) -> inspect.Signature:
        """The signature as a caller sees it: without what is injected."""
        kept = [it for name, it in self._signature.parameters.items() if name not in self.injected]
        return self._signature.replace(parameters=kept)

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(
            name for name, it in self._callable.parameters.items() if it.kind is not it.VAR_KEYWORD
        )

    @cached_property
    def _kinds(self) -> dict[str, frozenset[type]]:
        """Of each parameter, the types whose values need no look. For a float, int is none: it may be too large."""
        _ = self._arguments  # which complains about annotations that cannot be followed
        return {name: frozenset(_plain_choices(self._hints.get(name))) for name in self._names}

    @cached_property
    def _required(self) -> frozenset[str]:
        return frozenset(
            name for name in self._names if self._callable.parameters[name].default is inspect.Parameter.empty
        )

    @cached_property
    def _order(self) -> list[str] | None:
        """What can be given by position and by name as well, if all else can be given by name; None if not."""
        parameters = self._callable.parameters.values()
        if any(it.kind in (it.POSITIONAL_ONLY, it.VAR_KEYWORD) for it in parameters):
            return None
        return [it.name for it in parameters if it.kind is it.POSITIONAL_OR_KEYWORD]

    @cached_property
    def _positions(self) -> list[str]:
        return [name for name, it in self._callable.parameters.items() if it.kind is it.POSITIONAL_ONLY]

    @cached_property
    def _rest(self) -> str | None:
        """The name of `**kwargs`, if there is one."""
        return next((n for n, it in self._callable.parameters.items() if it.kind is it.VAR_KEYWORD), None)

    @cached_property
    def _arguments(self) -> type[msgspec.Struct]:
        """The parameters as a record that msgspec can check in one go."""
        fields: list[Any] = []
        for name, parameter in self._callable.parameters.items():
            if name == self._rest:
                continue
            hint = self._hints.get(name, Any)
            optional = parameter.default is not parameter.empty
            fields.append((name, hint, msgspec.UNSET) if optional else (name, hint))
        try:
            record = msgspec.defstruct("Arguments", fields, kw_only=True, forbid_unknown_fields=True)
            for checked in (record, self._hints.get(self._rest or "", Any)):
                msgspec.json.Decoder(checked, dec_hook=_build)  # complains now of what it cannot follow
        except TypeError as error:
            hints = self.arguments.items()
            culprit = next((name for name, hint in hints if _reader_of(hint) is None), None)
            which = "an annotation" if culprit is None else f"the annotation of argument {culprit!r}"
            raise ConfigurationError(
                f"task {self.task!r}: {which} cannot be followed: {error}. Give it a type that can be read from JSON"
            ) from error
        return record


def _element(hint: Any) -> Any:  # noqa: ANN401
    """What a list is made of; None stands for a list of them."""
    if hint is None or hint is type(None):
        return hint
    inner = get_args(hint)
    return inner[0] if inner else Any


def plain_type(hint: Any) -> Any:  # noqa: ANN401
    """The class that an annotation is about: without what is said beside it, its parameters, or that it may be None."""
    if get_origin(hint) is Annotated:
        return plain_type(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        choices = [choice for choice in get_args(hint) if choice is not type(None)]
        return plain_type(choices[0]) if len(choices) == 1 else hint
    return get_origin(hint) or hint


def read_json(text: str | bytes | None) -> tuple[Any, bool]:
    """A stored JSON document, and whether it could be read."""
    if text is None:
        return None, True
    try:
        return msgspec.json.decode(text), True
    except (msgspec.MsgspecError, UnicodeError):
        pass  # numbers that msgspec does not take: try more patiently
    except RecursionError:
        return None, False
    try:
        return json.loads(text, parse_int=_patient_int), True
    except (ValueError, RecursionError):
        return None, False


def _patient_int(digits: str) -> int | Decimal:
    return int(digits) if len(digits) < 4000 else Decimal(digits)


_SHORT = 900
"""So many bytes of JSON can be neither nested too deeply nor hold a number with too many digits."""


def encode_result(value: object) -> bytes:
    """A result as JSON that Postgres can hold: what it cannot is replaced, nothing is refused for its size.

    Raises ResultNotJson if there is no JSON for it at all.
    """
    if value is None:
        return b"null"
    try:
        encoded = _results.encode(value)
    except Exception:  # noqa: BLE001  -- it is looked at again, and then told
        return _written(_to_json(value))
    if len(encoded) > _SHORT or b"\\u0000" in encoded:
        return _written(_to_json(value))
    return encoded


def _to_json(value: object) -> object:
    try:
        return msgspec.to_builtins(value, str_keys=True, enc_hook=_simplify)
    except Exception as error:  # types of the user's own take part, and may raise anything
        raise ResultNotJson(f"the result cannot be stored as JSON: {error}") from error


def _written(simple: object) -> bytes:
    try:
        return _json.encode(_tame(simple, 0))
    except (ValueError, TypeError, RecursionError) as error:
        raise ResultNotJson(f"the result cannot be stored as JSON: {error}") from error


_PLAIN: Mapping[Any, tuple[type, ...]] = {
    type(None): (type(None),),
    bool: (bool,),
    int: (int,),
    float: (float, int),
    str: (str,),
}


def _plain_kinds(expected: Any) -> frozenset[type]:  # noqa: ANN401
    """The types of which a value is right without a look: for `int | None` that is a whole number, and nothing."""
    return frozenset(kind for choice in _plain_choices(expected) for kind in _PLAIN[choice])


def _plain_choices(expected: Any) -> list[type]:  # noqa: ANN401
    choices = get_args(expected) if get_origin(expected) in (Union, types.UnionType) else (expected,)
    return [plain for plain in _PLAIN if any(choice is plain for choice in choices)]


def _reader_of(expected: Any) -> msgspec.json.Decoder[Any] | None:  # noqa: ANN401
    try:
        return msgspec.json.Decoder(expected, dec_hook=_build)
    except Exception:  # noqa: BLE001  -- what cannot be read back cannot be compared
        return None


def _is_instance(value: object, expected: Any) -> bool:  # noqa: ANN401
    try:
        return isinstance(expected, type) and isinstance(value, expected)
    except TypeError:
        return False  # a TypedDict, or a protocol


class NoWay(TypeError):  # noqa: N818
    """A type of somebody's own that is not known here."""


def safe_text(text: str, limit: int | None = None) -> str:
    """Text that Postgres can hold, cut to so many characters."""
    if limit is not None and len(text) > limit:
        text = text[: limit - 1] + "…"
    return _UNSTORABLE.sub(REPLACEMENT, text)


def _tame(value: Any, depth: int) -> Any:  # noqa: ANN401, PLR0911
    if depth > MAX_RESULT_DEPTH:
        raise ValueError("it is nested too deeply")
    match value:
        case str():
            return safe_text(value)
        case float():
            return value if math.isfinite(value) else None
        case bool() | None:
            return value
        case int():
            if value.bit_length() > MAX_INTEGER_BITS:
                raise ValueError("it holds a number with too many digits")
            return value
        case dict():
            return {safe_text(key): _tame(item, depth + 1) for key, item in value.items()}
        case list() | tuple():
            return [_tame(item, depth + 1) for item in value]
    return value


def check_storable(payload: Mapping[str, object]) -> None:
    """Refuse a payload that PostgreSQL cannot hold, whoever made it."""
    if fault := _fault("", payload, 0):
        raise InvalidArgument(f"the payload {fault[0]} (at {fault[1].removeprefix('.') or 'its top'})")


def _fault(path: str, value: object, depth: int = 1) -> tuple[str, str] | None:  # noqa: PLR0911, PLR0912
    """Why a value cannot be stored, and where it is; None if it can."""
    if depth > MAX_DEPTH:
        return f"is nested more than {MAX_DEPTH} levels deep", path.partition("[")[0]
    match value:
        case str():
            if found := _UNSTORABLE.search(value):
                return f"holds {_named(found[0])}, which PostgreSQL cannot store", path
        case float():
            if not math.isfinite(value):
                return f"is {value}, for which JSON has no number", path
        case int():
            if value.bit_length() > MAX_INTEGER_BITS:
                return "has more digits than can be read back", path
        case dict():
            for key, item in value.items():
                if found := _UNSTORABLE.search(key):
                    return f"holds {_named(found[0])} in a key, which PostgreSQL cannot store", path
                if fault := _fault(f"{path}.{key}", item, depth + 1):
                    return fault
        case list() | tuple():
            for position, item in enumerate(value):
                if fault := _fault(f"{path}[{position}]", item, depth + 1):
                    return fault
    return None


def _named(letter: str) -> str:
    return "a NUL character" if letter == "\0" else f"a lone surrogate (U+{ord(letter):04X})"


def _simplify(value: object) -> object:
    """Types that msgspec does not know, on their way to JSON."""
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, str):  # of a subclass, as those below
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if _is_model(type(value)):
        return value.model_dump(mode="json", by_alias=True, round_trip=True)  # type: ignore[attr-defined]
    raise TypeError(f"there is no JSON for {type(value).__name__}")


def _simplify_argument(value: object) -> object:
    """The same, if it comes back as it was: a model may write less than it holds, such as `***` for a secret."""
    simple = _simplify(value)
    if _is_model(type(value)):
        before, after = dict(value), dict(_build(type(value), simple))  # type: ignore[call-overload]
        if changed := [name for name in before if name not in after or after[name] != before[name]]:
            fields = ", ".join(map(repr, changed))
            raise ValueError(f"{type(value).__name__} does not come back from it as it was (see {fields})")
    return simple


_results = msgspec.json.Encoder(enc_hook=_simplify)


def _build(kind: Any, value: Any) -> Any:  # noqa: ANN401
    """Types that msgspec does not know, on their way back."""
    if kind is object:
        return value
    if isinstance(kind, type) and issubclass(kind, PurePath):
        if not isinstance(value, str):
            raise TypeError(f"Expected `{kind.__name__}`, got `{type(value).__name__}`")
        return kind(value)
    if _is_model(kind):
        return _validate(kind, value)
    raise NoWay(f"there is no way from JSON to {getattr(kind, '__name__', kind)}")


def _validate(kind: Any, value: object) -> object:  # noqa: ANN401
    """A pydantic model from JSON: even a strict one takes a date from text then."""
    try:
        return kind.model_validate_json(_json.encode(value))
    except sys.modules["pydantic"].ValidationError as error:
        faults = error.errors(include_url=False, include_context=False, include_input=False)
        told = (f"{'.'.join(map(str, it['loc']))}: {it['msg']}".removeprefix(": ") for it in faults)
        raise ValueError("; ".join(told)) from None  # without the values, which may be nobody's business


def _told(error: Exception) -> str:
    """msgspec's complaint without the value that it complains of."""
    return _VALUE.sub(r"\1", str(error))


def _is_model(kind: object) -> bool:
    pydantic = sys.modules.get("pydantic")  # a model cannot exist unless somebody imported it
    return pydantic is not None and isinstance(kind, type) and issubclass(kind, pydantic.BaseModel)
