"""The command `run`."""

from collections.abc import Sequence
from functools import partial
from time import time_ns

import click

from indexer.app.processes import run, run_several
from indexer.app.settings import Settings
from indexer.cli.command import ExitCode, command, config_file, report_error
from indexer.cli.lexicon import fetch_lexicons, read_arguments, store_lexicons
from indexer.db import Database
from indexer.db.database_errors import without_password
from indexer.embedded import embedded_database_exists
from indexer.errors import LexiconError, NoScopeError, SettingsError
from indexer.net.lexicons import SourcedLexicon
from indexer.sync.changes import Batch
from indexer.sync.hints import JETSTREAM
from indexer.sync.scope import Scope
from indexer.sync.stream import Cursor

CHOICES = """\
  indexer run --lexicon NSID         the records of one lexicon, of all accounts that have any
  INDEXER_TRACK=listed indexer run   the accounts that `indexer add` names
  INDEXER_TRACK=all indexer run      everything: 45 million accounts
INDEXER_COLLECTIONS limits what is stored of them."""
"""The choices that `run` shows if neither the settings nor the database name a scope."""


@command("run")
@click.option(
    "--lexicon",
    "names",
    multiple=True,
    metavar="NSID|FILE|DIRECTORY",
    help="Index the records of this lexicon, with a typed view, of all accounts that have any. May be repeated.",
)
@click.option(
    "--no-migrate", is_flag=True, help="Do not upgrade the database schema; stop if this release cannot use it."
)
@click.option(
    "--processes",
    default=1,
    type=click.IntRange(1, 64),
    help="Number of daemon processes; each owns a range of buckets.",
)
async def run_command(settings: Settings, *, names: tuple[str, ...], no_migrate: bool, processes: int) -> int:
    """Run the daemon: consume, verify, resync, serve health checks and metrics.

    On SIGTERM or SIGINT, the daemon stores the received messages and stops. A second signal stops at once.

    --lexicon adds lexicons like `indexer lexicon add`, but resolves no stored NSID. In a new database, their record
    types become the collections and the signal collections; an existing scope must include them. If this scope has
    both, the daemon reads a Jetstream, which is cheapest, unless INDEXER_UPSTREAM is set, or the database has a relay's
    cursor. Later starts without --lexicon do so, too.
    """
    prepare = partial(_prepare, settings, *read_arguments(names)) if names else None
    try:
        if not names:
            _require_choice(settings)
        if processes == 1:
            return await run(settings, migrate_first=not no_migrate, prepare=prepare)
        return await run_several(settings, processes, config_file(), migrate_first=not no_migrate, prepare=prepare)
    except NoScopeError as error:
        code = report_error(str(error), ExitCode.BAD_ARGUMENT)
        click.echo(CHOICES, err=True)
        return code


def _require_choice(settings: Settings) -> None:
    """Raise `NoScopeError` if the settings name no scope, and no database can have one: before one is created."""
    if not (settings.chooses_scope or settings.database_url or embedded_database_exists(settings.data_dir)):
        raise NoScopeError


async def _prepare(settings: Settings, given: dict[str, SourcedLexicon], nsids: Sequence[str], dsn: str) -> Settings:
    """Store the lexicons; return the settings to run with, which choose the scope of a new database."""
    db = await Database.open(dsn, connections=2)
    try:
        stored, known = await db.scope.load(), await db.lexicons.load()
        settings = settings.continuing(await db.gaps.cursors())
        try:
            found = await fetch_lexicons(settings, db, given, [nsid for nsid in nsids if nsid not in known])
        except LexiconError as error:
            instead = "without a typed view, set INDEXER_COLLECTIONS and INDEXER_SIGNAL_COLLECTIONS"
            raise LexiconError(f"{error}; give its file, or, {instead}") from None
        named, given = (*given, *nsids), given | found
        records = {nsid for nsid, one in known.items() if one.view} | {
            nsid for nsid, one in given.items() if one.lexicon.record
        }
        record_types = [nsid for nsid in named if nsid in records]
        if not record_types:
            raise LexiconError("--lexicon: none of the lexicons has a record type")
        settings = settings.for_record_types(record_types, stored)
        scope = stored or settings.first_scope
        if missing := [nsid for nsid in record_types if not scope.collections.matches(nsid)]:
            raise SettingsError(f"--lexicon: {_how_to_add(stored, scope, missing)}")
        await store_lexicons(settings, db, given)
        if stored is None and settings.upstream == "jetstream":  # later starts continue with it, also without hints
            await db.write(Batch(cursors=(Cursor(JETSTREAM, str(settings.shard), time_ns() // 1_000),)))
        view = (await db.lexicons.load())[record_types[0]].view
        query = f"""psql '{without_password(dsn)}' -c 'select * from lexicon."{view}" limit 10'"""  # noqa: S608
        click.echo(f"Query the records: {query}")
    finally:
        await db.close()
    return settings


def _how_to_add(stored: Scope | None, scope: Scope, missing: Sequence[str]) -> str:
    if stored is None:
        return f"INDEXER_COLLECTIONS does not match {', '.join(missing)}"
    change = f"--collections '{','.join((*scope.collections.patterns, *missing))}'"
    if scope.signals:
        change += f" --signal-collections '{','.join((*scope.signal_patterns, *missing))}'"
    return f"the database does not index {', '.join(missing)}; run: indexer scope set {change}"
