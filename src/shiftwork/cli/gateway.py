"""`shiftwork gateway`: jobs over HTTP, for workers that have no way to the database."""

from __future__ import annotations

import logging
import signal
import socket
from pathlib import Path
from typing import Any

import click

from shiftwork.cli.asking import told
from shiftwork.cli.worker import find
from shiftwork.errors import ConfigurationError

log = logging.getLogger("shiftwork.gateway")

LAST = 5
"""Seconds in which requests that are under way have to end."""


@click.command()
@click.argument("where", metavar="APP")
@click.option("--host", metavar="ADDRESS", default="127.0.0.1", show_default=True, help="Where to listen.")
@click.option(
    "--port",
    metavar="PORT",
    type=click.IntRange(0, 65535),
    default=8722,
    show_default=True,
    help="0 is any that is free.",
)
@click.option(
    "--token-file",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Where the secret is with which workers register; else it is in SHIFTWORK_GATEWAY_TOKEN.",
)
def gateway(where: str, host: str, port: int, token_file: Path | None) -> None:
    """Let workers that have no way to the database take the jobs of APP over HTTP, until told to stop.

    APP is module:name, or path/to/file.py:name, of an App or a TableStore. Everything else is set as for `shiftwork worker`, in
    the environment or in pyproject.toml. The secret has 16 characters at least, and never stands on the command line.

    Example: SHIFTWORK_GATEWAY_TOKEN=… shiftwork gateway shop/jobs.py --port 8722
    """
    from shiftwork import logs  # noqa: PLC0415  -- --help needs none of it

    program = find(where)
    logs.set_up(program.settings.log_level, program.settings.log_format)
    with told(program.settings.schema), program:
        from shiftwork.gateway import Gateway  # noqa: PLC0415

        application = Gateway(program, token=None if token_file is None else token_file.read_text("utf-8"))
        _serve(application, _listening(host, port))


def _listening(host: str, port: int) -> socket.socket:
    try:
        [(family, *_), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, UnicodeError) as error:
        raise click.ClickException(f"cannot listen at {host}, port {port}: {error}") from None


def _serve(application: Any, listening: socket.socket) -> None:  # noqa: ANN401
    try:
        import uvicorn  # noqa: PLC0415
    except ModuleNotFoundError:
        raise ConfigurationError("to be served, it needs an extra: pip install 'shiftwork[web]'") from None

    server = uvicorn.Server(
        uvicorn.Config(
            application, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=LAST
        )
    )
    application.closing = lambda: server.should_exit
    for number in (signal.SIGTERM, signal.SIGINT):  # which it raises once more at its end
        signal.signal(number, lambda *_: None)
    name, port = listening.getsockname()[:2]
    at = f"[{name}]:{port}" if ":" in name else f"{name}:{port}"
    log.info("jobs are given out at http://%s", at)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    server.run(sockets=[listening])
    log.info("the gateway has stopped")
