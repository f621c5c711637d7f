"""The entry point of the command line: run a command, and map its errors to exit codes.

Results go to stdout, log lines and errors to stderr.
"""

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click
from click.exceptions import NoArgsIsHelpError
from click.shell_completion import get_completion_class

from indexer import __version__
from indexer.cli.command import ExitCode, config_option, report_error
from indexer.errors import LayoutChangedError, LexiconError, SettingsError, UnavailableError, ViewInUseError

PROGRAM = "indexer"
NATIVE_CORE = "atproto-indexer-native"
"""The distribution of the native core, which is optional."""
COMMANDS = {
    "run": ("run", "Run the daemon: consume, verify, resync, serve health checks and metrics."),
    "migrate": ("schema_commands", "Upgrade the database schema to the version of this release."),
    "demo": ("demo", "Run the daemon against a small local network."),
    "status": ("status_commands", "Show cursor, lag, repos by status, resync queue, throughput and progress."),
    "repo": ("status_commands", "Show everything that is known about one repo."),
    "record": ("status_commands", "Show the CID, the value and the rev of one record."),
    "add": ("repo_commands", "Start tracking repos."),
    "resync": ("repo_commands", "Request a resync of repos."),
    "takedown": ("removal_commands", "Hide a repo or a record from the public views."),
    "redact": ("removal_commands", "Delete a record, an account or a collection, and never store it again."),
    "discover": ("repo_commands", "List the accounts of a host and start tracking the unknown ones."),
    "identities": ("identities", "Import the identities of accounts from a PLC directory."),
    "rejected": ("rejected", "List, show or replay dead letters."),
    "scope": ("scope_commands", "Show or change which repos are tracked and which collections are stored."),
    "cursor": ("cursor_commands", "Show or reset the stored positions in the streams of relays."),
    "audit": ("audit", "Fetch repos again and compare every record with the database."),
    "export": ("export", "Write all visible records of a collection to stdout."),
    "import-first-seen": ("export", "Import first-seen times from JSON lines that another database has exported."),
    "lexicon": ("lexicon", "Add lexicons, and query records through views with typed columns."),
    "inspect": ("inspect", "Verify a CAR export of a repo offline and list its records."),
    "distribute": ("schema_commands", "Distribute the tables over the nodes of a Citus cluster."),
    "completion": ("main", "Print the script that completes commands and options in a shell."),
    "doctor": ("doctor", "Check settings, database, disk, clock, relays, directories and DNS."),
}
"""The module of each command in `indexer.cli`, and its short help. The function of the command `x-y` is `x_y_command`.

The short help is here, too, so that help and shell completion do not import all modules, which takes seconds.
"""

REPLACED = {
    "backup": "use pg_dump (docs/runbook.md#back-up-and-restore)",
    "restore": "use pg_restore (docs/runbook.md#back-up-and-restore)",
    "sweep": "use indexer resync --behind",
}
"""The replacements of removed commands."""


def _native_core() -> str:
    """Return what is installed of the native core, from the metadata of the packages."""
    try:
        return f"version {version(NATIVE_CORE)}, used unless INDEXER_CORE is python"
    except PackageNotFoundError:
        return "not installed, so the Python code verifies"


class CommandGroup(click.Group):
    """The group of all commands. The module of a command is imported when the command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - the signature of click
        """Return the names of all commands."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Return a command that has only its name and its short help; None if there is no command with this name."""
        if cmd_name not in COMMANDS:
            return None
        return click.Command(cmd_name, short_help=COMMANDS[cmd_name][1])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Import the command that the arguments begin with, and return it.

        Raises:
            UsageError: There is no such command.
        """
        if args[0] in REPLACED:
            raise click.UsageError(f"The command {args[0]} was removed; {REPLACED[args[0]]}", ctx)
        if args[0] not in COMMANDS:
            raise click.NoSuchCommand(args[0], possibilities=COMMANDS, ctx=ctx)
        return args[0], load_command(args[0]), args[1:]


def load_command(name: str) -> click.Command:
    """Import a command and return it."""
    module = import_module(f"indexer.cli.{COMMANDS[name][0]}")
    found: click.Command = getattr(module, f"{name.replace('-', '_')}_command")
    return found


@click.group(
    cls=CommandGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(
    __version__,
    message=f"%(prog)s, version %(version)s\nnative core: {_native_core()}",
    help="Show the versions of this program and of the native core, and exit.",
)
@config_option
@click.pass_context
def commands(context: click.Context, /, config: Path | None) -> None:  # noqa: ARG001 - commands read it from the context
    """Index the records of the AT Protocol in Postgres: complete, current and verified.

    Settings come from defaults, then a TOML file, then environment variables INDEXER_…; the later source wins.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@config_option
@click.pass_context
def completion_command(context: click.Context, /, shell: str, config: Path | None) -> None:  # noqa: ARG001 - as above
    """Print the script that completes commands and options in a shell.

    \b
    bash:  indexer completion bash > ~/.local/share/bash-completion/completions/indexer
    zsh:   indexer completion zsh > "${fpath[1]}/_indexer"
    fish:  indexer completion fish > ~/.config/fish/completions/indexer.fish
    """  # noqa: D301 - click wants the character itself
    completion = get_completion_class(shell)
    assert completion is not None  # noqa: S101 - click has a class for each of the choices
    click.echo(completion(context.find_root().command, {}, PROGRAM, f"_{PROGRAM.upper()}_COMPLETE").source())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that `arguments` name, and return the exit code. Default: the arguments of the process."""
    return exit_code(lambda: commands.main(arguments, prog_name=PROGRAM, standalone_mode=False))


def exit_code(run: Callable[[], Any]) -> int:
    """Call a function; return the exit code that it returns, or 0, or that of its error, which is reported."""
    try:
        code = run()
        sys.stdout.flush()
    except (click.ClickException, SettingsError, LexiconError) as error:
        return report_error(_message(error), ExitCode.BAD_ARGUMENT)
    except BrokenPipeError:
        # The reader of the output closed the pipe. The interpreter must not fail when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.FAILED
    except (UnavailableError, LayoutChangedError, ViewInUseError, OSError) as error:
        return report_error(str(error), ExitCode.FAILED)
    except (click.Abort, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    return code if isinstance(code, int) else ExitCode.OK


def _message(error: click.ClickException | SettingsError | LexiconError) -> str:
    if not isinstance(error, click.ClickException):
        return str(error)
    context = error.ctx if isinstance(error, click.UsageError) else None
    # click's message for a group without a command is the whole help.
    text = "Missing command" if isinstance(error, NoArgsIsHelpError) else error.format_message()
    return text.rstrip(".") + (f"; see {context.command_path} --help" if context else "")
