"""Common parts of all commands: exit codes, the decorator that loads the settings, and error lines.

Settings and logs load slowly, so they are imported where a command runs: `indexer --help` needs neither.
"""

import sys
from collections.abc import Callable, Coroutine
from enum import IntEnum
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self

import click

from indexer.redaction import without_secrets

if TYPE_CHECKING:
    from indexer.app.settings import Settings

P = ParamSpec("P")
Implementation = Callable[Concatenate["Settings", P], Coroutine[Any, Any, int | None]]


class ExitCode(IntEnum):
    """The exit codes of all commands, each with its meaning as a sentence. Scripts may depend on them."""

    text: str

    OK = 0, "The command did what it was asked for."
    FAILED = 1, "The database or a host is unavailable, a check failed, or something remains to be done."
    BAD_ARGUMENT = 2, "An argument or a setting is wrong, or the operator has to correct the database first."
    NOT_READY = 3, "`status`: the indexer is not ready."
    UNKNOWN = 4, "The DID, handle, record, relay, lexicon or ID is not in the database."
    DIFFERENT = 5, "`audit`: database and network differ."
    INTERRUPTED = 130, "The command was interrupted (Ctrl-C), or a question was not answered with yes."

    def __new__(cls, value: int, text: str) -> Self:
        """Make a member that equals its number."""
        member = int.__new__(cls, value)
        member._value_, member.text = value, text
        return member


class CommandError(Exception):
    """Ends a command with this message on stderr, and this exit code."""

    def __init__(self, message: str, code: ExitCode) -> None:
        super().__init__(message)
        self.code = code


config_option = click.option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Read settings from this TOML file; environment variables override it. Default: $INDEXER_CONFIG.",
)


JSON_HELP = ("Print the result as one line of JSON.", "Print one line of JSON for each result.")
json_option, json_lines_option = (click.option("--json", "as_json", is_flag=True, help=text) for text in JSON_HELP)
yes_option = click.option("--yes", is_flag=True, help="Do not ask for confirmation.")


def command(
    name: str, group: click.Group | None = None, load: Callable[[Path | None], "Settings"] | None = None
) -> Callable[[Implementation[P]], click.Command]:
    """Return a decorator that makes a command of a coroutine function, and adds it to `group` if there is one.

    The first argument of the function is the settings, its result the exit code; None: OK. It gets no `--config`,
    `--json` and `--yes`: `json_wanted` and `confirm` read them. `load` returns the settings; its argument is the file
    that `--config` names. The default is `load_settings`.
    """

    def decorate(function: Implementation[P]) -> click.Command:
        @wraps(function)
        def invoke(*args: P.args, **options: P.kwargs) -> int | None:
            import asyncio  # noqa: PLC0415

            from indexer.app.settings import load_settings  # noqa: PLC0415
            from indexer.telemetry.log import configure_logging  # noqa: PLC0415

            for option in ("config", "as_json", "yes"):
                options.pop(option, None)
            settings = (load or load_settings)(config_file())
            configure_logging(settings.log_format, settings.log_level)
            try:
                return asyncio.run(function(settings, *args, **options))
            except CommandError as error:
                return report_error(str(error), error.code)

        made = click.command(name)(config_option(invoke))
        if group is not None:
            group.add_command(made)
        return made

    return decorate


def command_group(name: str, text: str, kind: type[click.Group] = click.Group) -> click.Group:
    """Return a group of commands, with its help text."""
    return config_option(kind(name, help=text))


def config_file() -> Path | None:
    """Return the file that `--config` names, after the command or before it."""
    context: click.Context | None = click.get_current_context()
    file: Path | None = None
    while context is not None and file is None:
        file, context = context.params["config"], context.parent
    return file


def confirm(question: str) -> None:
    """Ask a question about something that cannot be undone, unless the command got the option `--yes`.

    Raises:
        UsageError: There is no terminal to ask.
        Abort: The answer is not yes.
    """
    if click.get_current_context().params["yes"]:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(f"{question} There is no terminal to answer: give --yes to confirm")
    click.confirm(question, abort=True, err=True)


def report_error(message: str, code: ExitCode) -> int:
    """Write the message to stderr as one printable line without secrets, and return the exit code."""
    from indexer.telemetry.log import printable  # noqa: PLC0415

    click.echo(f"indexer: {printable(without_secrets(' '.join(message.split())))}", err=True)
    return code
