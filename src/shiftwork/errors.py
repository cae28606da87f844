"""Every error that shiftwork raises itself; each says what happened, to which job, and what to do next."""

from __future__ import annotations


class ShiftworkError(Exception):
    """Anything that shiftwork refuses or cannot do."""


class ConfigurationError(ShiftworkError):
    """A setting, name or combination of options that cannot work."""


class EmbeddedError(ShiftworkError):
    """The embedded PostgreSQL cannot be started, found or used."""
