"""Common parts of all commands: exit codes, the decorator that loads the settings, and error lines."""

import asyncio
from collections.abc import Callable, Coroutine
from enum import IntEnum
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import click

from indexer.monitoring.log import configure_logging, printable
from indexer.settings import Settings, load_settings

P = ParamSpec("P")
Implementation = Callable[Concatenate[Settings, P], Coroutine[Any, Any, int]]


class ExitCode(IntEnum):
    """The exit codes of all commands. Scripts may depend on them."""

    OK = 0
    FAILED = 1
    BAD_ARGUMENT = 2
    NOT_READY = 3
    UNKNOWN = 4
    DIFFERENT = 5
    INTERRUPTED = 130


config_option = click.option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Read settings from this TOML file; environment variables override it. Default: $INDEXER_CONFIG.",
)


def command(name: str, group: click.Group | None = None) -> Callable[[Implementation[P]], click.Command]:
    """Return a decorator that makes a command of a coroutine function, and adds it to `group` if there is one.

    The function takes the settings as its first argument and returns the exit code.
    """

    def decorate(function: Implementation[P]) -> click.Command:
        @wraps(function)
        def invoke(*args: P.args, **options: P.kwargs) -> int:
            options.pop("config")
            settings = load_settings(config_file())
            configure_logging(settings.log_format, settings.log_level)
            return asyncio.run(function(settings, *args, **options))

        made = click.command(name)(config_option(invoke))
        if group is not None:
            group.add_command(made)
        return made

    return decorate


def config_file() -> Path | None:
    """Return the file that `--config` names, after the command or before it."""
    context: click.Context | None = click.get_current_context()
    file: Path | None = None
    while context is not None and file is None:
        file, context = context.params["config"], context.parent
    return file


def report_error(message: str, code: ExitCode) -> int:
    """Write the message to stderr as one printable line, and return the exit code."""
    click.echo(f"indexer: {printable(' '.join(message.split()))}", err=True)
    return code
