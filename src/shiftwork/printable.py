"""Text from anywhere, on its way to a screen or a log."""

from __future__ import annotations

TASK_BYTES = 200
QUEUE_BYTES = 100
"""How long the name of a task, or of a queue, may be: as long as the database takes it, which counts bytes."""

MOST_SHOWN = 200
"""How much of a value an error shows."""


def clean(text: object) -> str:
    """A text on one line, with everything that does not simply print written as an escape: none of it can act."""
    said = str(text)
    if said.isprintable():
        return said
    return "".join(
        letter
        if letter.isprintable()
        else letter.encode("unicode_escape", "backslashreplace").decode("ascii")
        for letter in said
    )


def is_name(text: str, most: int) -> bool:
    """Whether a text can be a name of at most so many bytes: there is something in it, and it prints."""
    return text.isprintable() and 0 < len(text.encode(errors="replace")) <= most


def shown(value: object) -> str:
    """A value as an error shows it: enough of it to know it by."""
    try:
        said = repr(value)
    except ValueError:  # Python writes no number of more than 4,300 digits
        return "a number of thousands of digits"
    return said if len(said) <= MOST_SHOWN else f"{said[: MOST_SHOWN - 1]}…"
