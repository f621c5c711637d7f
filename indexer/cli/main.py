"""The entry point of the command line: run a command, and map its errors to exit codes.

Results go to stdout, log lines and errors to stderr.
"""

import asyncio
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from indexer import __version__
from indexer.cli.command import ExitCode, config_option, report_error
from indexer.errors import SettingsError, UnavailableError

COMMAND_MODULES = {
    "run": "daemon_commands",
    "migrate": "daemon_commands",
    "demo": "daemon_commands",
    "status": "status_commands",
    "repo": "status_commands",
    "record": "status_commands",
    "add": "repo_commands",
    "resync": "repo_commands",
    "takedown": "repo_commands",
    "discover": "crawl_commands",
    "sweep": "crawl_commands",
    "rejected": "rejected_commands",
    "audit": "audit_command",
    "export": "export_command",
    "inspect": "inspect_command",
}
"""The module of each command in `indexer.cli`. The function of the command `x` is `x_command`."""


class CommandGroup(click.Group):
    """The group of all commands. The module of a command is imported when the command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - the signature of click
        """Return the names of all commands."""
        return sorted(COMMAND_MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import a command and return it; None if there is no command with this name."""
        if cmd_name not in COMMAND_MODULES:
            return None
        module = import_module(f"indexer.cli.{COMMAND_MODULES[cmd_name]}")
        found: click.Command = getattr(module, f"{cmd_name}_command")
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the arguments begin with.

        Raises:
            NoSuchCommand: There is no such command.
        """
        if args[0] not in COMMAND_MODULES:
            raise click.NoSuchCommand(args[0], possibilities=COMMAND_MODULES, ctx=ctx)
        return super().resolve_command(ctx, args)


@click.group(
    cls=CommandGroup,
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="indexer")
@config_option
def commands(config: Path | None) -> None:
    """Index the records of the AT Protocol in Postgres: complete, current and verified.

    Settings come from defaults, then a TOML file, then environment variables INDEXER_…; the later source wins.
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that `arguments` name, and return the exit code. Default: the arguments of the process."""
    try:
        code: Any = commands.main(arguments, prog_name="indexer", standalone_mode=False)
        sys.stdout.flush()
    except (click.ClickException, SettingsError) as error:
        return report_error(_message(error), ExitCode.BAD_ARGUMENT)
    except BrokenPipeError:
        # The reader of the output closed the pipe. The interpreter must not fail when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.FAILED
    except (UnavailableError, OSError) as error:
        return report_error(str(error), ExitCode.FAILED)
    except (click.Abort, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    except asyncio.CancelledError:  # the second signal to the daemon
        return ExitCode.FAILED
    return code if isinstance(code, int) else ExitCode.OK


def _message(error: click.ClickException | SettingsError) -> str:
    if not isinstance(error, click.ClickException):
        return str(error)
    context = error.ctx if isinstance(error, click.UsageError) else None
    return error.format_message().rstrip(".") + (f"; see {context.command_path} --help" if context else "")
