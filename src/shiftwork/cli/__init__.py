"""The `shiftwork` command. Sub-commands are imported when they are asked for, so that `--help` stays quick."""

from __future__ import annotations

import importlib

import click

COMMANDS = {
    "db": "shiftwork.cli.db:db",
}


class LazyGroup(click.Group):
    """A group whose commands are imported only when one of them is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *COMMANDS})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        module, name = COMMANDS[cmd_name].split(":")
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command)  # noqa: S101
        return command


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Background work for Python on PostgreSQL."""
