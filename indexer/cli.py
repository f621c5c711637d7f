"""The command line: results to stdout, log lines to stderr, exit codes that scripts can hold on to.

0 done · 1 failed · 2 a bad argument or setting · 3 not ready · 4 unknown here
"""

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

import click

from indexer import __version__
from indexer.atproto.cid import cid_text
from indexer.atproto.crypto import parse_did_key
from indexer.atproto.record import Problem
from indexer.config import Settings, load_settings
from indexer.errors import SettingsError, UnavailableError, UpstreamError
from indexer.log import configure_logging, printable
from indexer.reasons import FetchFailure

if TYPE_CHECKING:
    from indexer.inspection import Export

FAILED, BAD_ARGUMENT, NOT_READY, UNKNOWN, INTERRUPTED = 1, 2, 3, 4, 130

P = ParamSpec("P")
Command = Callable[Concatenate[Settings, P], Coroutine[Any, Any, int]]

config_option = click.option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A TOML file with settings; the environment goes over it. Default: $INDEXER_CONFIG.",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that `arguments` (without the program's name) ask for; gives the exit code."""
    try:
        code = commands.main(arguments, prog_name="indexer", standalone_mode=False)
        sys.stdout.flush()
    except (click.ClickException, SettingsError) as error:
        return _complain(_line(error), BAD_ARGUMENT)
    except BrokenPipeError:
        # Whoever read our output has had enough; the interpreter must not try to flush once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (UnavailableError, OSError) as error:
        return _complain(str(error), FAILED)
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except asyncio.CancelledError:  # the daemon's second signal
        return FAILED
    return code if isinstance(code, int) else 0


def _line(error: click.ClickException | SettingsError) -> str:
    if not isinstance(error, click.ClickException):
        return str(error)
    context = error.ctx if isinstance(error, click.UsageError) else None
    return error.format_message().rstrip(".") + (f"; see {context.command_path} --help" if context else "")


def _complain(message: str, code: int) -> int:
    """One line on stderr, whatever the message holds."""
    click.echo(f"indexer: {printable(' '.join(message.split()))}", err=True)
    return code


@click.group(no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="indexer")
@config_option
def commands(config: Path | None) -> None:
    """A record-level sync indexer for the AT Protocol: every record, complete, current and proven, in Postgres.

    Settings are defaults, under a TOML file, under environment variables INDEXER_…
    """


def _command(name: str) -> Callable[[Command[P]], click.Command]:
    """Registers a coroutine function as a command that takes the settings first."""

    def register(function: Command[P]) -> click.Command:
        @wraps(function)
        def invoke(*args: P.args, **options: P.kwargs) -> int:
            context = click.get_current_context()
            own: Any = options.pop("config")
            settings = load_settings(own or context.find_root().params["config"])
            configure_logging(settings.log_format, settings.log_level)
            return asyncio.run(function(settings, *args, **options))

        return commands.command(name)(config_option(invoke))

    return register


@_command("run")
@click.option("--no-migrate", is_flag=True, help="Don't bring the schema to head first; stop if it isn't.")
async def run_command(settings: Settings, *, no_migrate: bool) -> int:
    """Run the daemon: consume, verify, resynchronize, serve health and metrics.

    SIGTERM or SIGINT saves what was received and stops; a second one stops at once.
    """
    from indexer.run import run  # noqa: PLC0415 - what only the daemon needs is loaded only by it

    return await run(settings, migrate_first=not no_migrate)


@_command("demo")
@click.option("--seconds", default=30.0, show_default=True, type=click.FloatRange(5, 3_600), help="How long to play.")
async def demo_command(settings: Settings, *, seconds: float) -> int:
    """Run the daemon against a small signed network on this machine, and compare the two at the end.

    Everything is temporary and on loopback. Exit code 0 only if every repo is synchronized and equal.
    """
    from indexer.demo import demo  # noqa: PLC0415

    if "log_level" not in settings.model_fields_set:
        configure_logging(settings.log_format, "error")  # the network's accidents are wanted, and the picture moves
    return await demo(settings, seconds)


@_command("migrate")
async def migrate_command(settings: Settings) -> int:
    """Bring the database's schema to head."""
    from indexer.store.migrate import migrate  # noqa: PLC0415

    async with _database(settings) as dsn:
        await migrate(dsn)
    click.echo("The database's schema is at head.")
    return 0


@_command("inspect")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE.car")
@click.option("--key", metavar="did:key:…", help="The account's signing key, to check the signature with.")
async def inspect_command(settings: Settings, *, file: Path, key: str | None) -> int:
    """Verify an export of a repo offline, and list its records.

    Every block is hashed, the commit decoded, the whole tree walked. Exit code 1 with the reason if a rule is broken
    or something is missing.
    """
    from indexer.inspection import open_export  # noqa: PLC0415

    try:
        public = parse_did_key(key) if key else None
    except UpstreamError as error:
        raise click.BadParameter(error.detail, param_hint="--key") from None
    try:
        async with open_export(file, public, settings.limits) as export:
            return _list_export(export)
    except (UpstreamError, UnavailableError) as error:
        return _complain(f"{file} is invalid: {error}", FAILED)


def _database(settings: Settings) -> AbstractAsyncContextManager[str]:
    """The URL of the database; an embedded one runs, if it doesn't already, for as long as the block does."""
    from indexer.store.embedded import database  # noqa: PLC0415

    url = settings.database_url
    return database(url.get_secret_value() if url else None, settings.data_dir)


def _list_export(export: "Export") -> int:
    commit = export.commit
    click.echo(f"did        {commit.did}\nrev        {commit.rev}\ncommit     {cid_text(commit.cid)}")
    click.echo(f"data       {cid_text(commit.data)}\nrecords    {export.count}")
    click.echo(f"signature  {'valid' if export.signed else 'not checked: no --key'}\n")
    missing = 0
    for record in export.records():
        missing += record.problem == Problem.MISSING
        note = f"  ({printable(record.problem)})" if record.problem else ""
        click.echo(f"{cid_text(record.cid)} {record.path}{note}")
    if missing:
        return _complain(f"{FetchFailure.EXPORT_INCOMPLETE}: {missing} records are not in the file", FAILED)
    return 0
