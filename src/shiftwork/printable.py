"""Text from anywhere, on its way to a screen or a log."""

from __future__ import annotations


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
