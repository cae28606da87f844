"""Jobs over HTTP, for workers that have no way to the database."""

from shiftwork.errors import ConfigurationError

try:
    import starlette  # noqa: F401
except ModuleNotFoundError:
    raise ConfigurationError("the gateway needs an extra: pip install 'shiftwork[web]'") from None

from shiftwork.gateway.gateway import Gateway, Transform

__all__ = ["Gateway", "Transform"]
