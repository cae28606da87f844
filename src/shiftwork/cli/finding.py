"""Finding the app that a command names: `module:name`, or `path/to/file.py:name`."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from shiftwork.app import App
from shiftwork.operations import importing
from shiftwork.program import Program

log = logging.getLogger("shiftwork.worker")

P = TypeVar("P", bound=Program)
FRAMES = 4
"""How much of a traceback is shown: its end, where the mistake is."""


class NotFound(Exception):  # noqa: N818
    """There is no such app; `mistyped` if what was typed cannot be meant."""

    def __init__(self, message: str, *, mistyped: bool = True) -> None:
        super().__init__(message)
        self.mistyped = mistyped


def find_app(where: str) -> App:
    """The app that is meant, with its module imported from the working directory."""
    return find(where, App)


def find(where: str, kind: type[P]) -> P:
    """The app, or whatever of this kind is meant, with its module imported from the working directory."""
    place, _, name = where.partition(":")
    if not place:
        raise NotFound(f"{where!r} names no module; write it like app:app or path/to/file.py")
    is_file = place.endswith(".py") or os.sep in place
    with importing() as unsent:
        module = _from_file(place) if is_file else _from_name(place)
    for task, many in unsent.items():
        log.warning(
            "%d jobs of %s were enqueued while %s was imported, and are not sent: every start of a worker would "
            "send them again; do it in a function, or below if __name__ == '__main__'",
            *(many, task, place),
        )
    return _named(module, place, name, kind) if name else _only(module, place, kind)


def _from_name(name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    return _import(name, name, f"looked in {here} and where Python finds modules")


def _from_file(place: str) -> ModuleType:
    path = Path(place).resolve()
    if not path.is_file():
        raise NotFound(f"there is no file {place}")
    if path.suffix != ".py":
        raise NotFound(f"{place} is not a file of Python: its name does not end in .py")
    # Inside packages it is imported under its full name, as everybody else imports it.
    root, parts = path.parent, [path.stem]
    while (root / "__init__.py").is_file():
        parts.insert(0, root.name)
        root = root.parent
    if parts[-1] == "__init__":
        parts.pop()
    for folder in (str(Path.cwd()), str(root)):
        if folder in sys.path:
            sys.path.remove(folder)
        sys.path.insert(0, folder)
    name = ".".join(parts)
    module = _import(name, place, f"it would be imported as {name!r}")
    if module.__file__ is None or not path.samefile(module.__file__):
        raise NotFound(
            f"{place} cannot be imported: there is another module {name!r} ({module.__file__}); rename one of them"
        )
    return module


def _import(name: str, place: str, looked: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise NotFound(f"there is no module {error.name!r} ({looked})") from None
        raise _failed(place, error) from None
    except (Exception, SystemExit) as error:  # noqa: BLE001  -- whatever the program does while it is imported
        raise _failed(place, error) from None


def _failed(place: str, error: BaseException) -> NotFound:
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__ and not _is_importing(frame.filename)
    ]
    shown = traceback.format_list(frames[-FRAMES:])
    said = traceback.format_exception_only(error)
    return NotFound("".join([f"{place} cannot be imported:\n", *shown, *said]).rstrip(), mistyped=False)


def _is_importing(filename: str) -> bool:
    return filename.startswith("<frozen importlib") or Path(filename).parent.name == "importlib"


def _named(module: ModuleType, place: str, name: str, kind: type[P]) -> P:
    found: object = module
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise NotFound(f"{place} has no {name!r}{_has(module, kind)}") from None
    if not isinstance(found, kind):
        other = type(found).__name__
        raise NotFound(f"{name!r} in {place} is no {_called(kind)} but a {other}{_has(module, kind)}")
    return found


def _only(module: ModuleType, place: str, kind: type[P]) -> P:
    found = _all(module, kind)
    if not found:
        raise NotFound(f"there is no {_called(kind)} in {place}; make one, as in: app = shiftwork.App()")
    if len({id(one) for one in found.values()}) > 1:
        choices = " or ".join(f"{place}:{name}" for name in found)
        raise NotFound(f"there are several {_several(kind)} in {place}; say which one: {choices}")
    return next(iter(found.values()))


def _all(module: ModuleType, kind: type[P]) -> dict[str, P]:
    return {name: value for name, value in vars(module).items() if isinstance(value, kind)}


def _has(module: ModuleType, kind: type[Program]) -> str:
    found = _all(module, kind)
    return f"; it has {', '.join(found)}" if found else f"; there is no {_called(kind)} in it"


def _called(kind: type[Program]) -> str:
    return "shiftwork.App" if kind is Program else f"shiftwork.{kind.__name__}"


def _several(kind: type[Program]) -> str:
    return "Apps" if kind is Program else f"{kind.__name__}s"
