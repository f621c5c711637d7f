"""The command `scope` and its subcommands `show`, `set` and `untrack`."""

from dataclasses import replace
from typing import IO

import click

from indexer.app.settings import Settings
from indexer.atproto.syntax import CollectionFilter, is_nsid
from indexer.cli.arguments import given_dids, parse_did
from indexer.cli.command import command, command_group, confirm, json_option, yes_option
from indexer.cli.database import connect_database
from indexer.cli.output import echo_json, echo_result, result_console, row_table
from indexer.db import Database
from indexer.db.scope import CollectionProgress
from indexer.errors import InvalidScopeError, NoScopeError
from indexer.sync.scope import Scope, Track, filter_of

BATCH_SIZE = 10_000
MAX_NAMED = 5
"""Collections that the question names."""


scope_command = command_group(
    "scope",
    """Show or change which repos are tracked and which collections are stored.

    All daemons of the database follow a change within seconds, without a restart.
    """,
)


@command("show", scope_command)
@json_option
async def show_command(settings: Settings) -> None:
    """Show the scope, and the progress of the backfill of each collection.

    Before the first start of a daemon, show the scope of the settings.
    """
    async with connect_database(settings) as db:
        scope, progress = await db.scope.load(), await db.scope.progress()
    if scope is None and not settings.chooses_scope:
        raise NoScopeError
    _print(scope or settings.first_scope, progress)


def _split(patterns: str) -> list[str]:
    return [part.strip() for part in patterns.split(",") if part.strip()]


@command("set", scope_command)
@click.option("--track", type=click.Choice([track.value for track in Track]), help="Which repos become tracked.")
@click.option("--collections", metavar="PATTERNS", type=_split, help="The collections to store, separated by commas.")
@click.option(
    "--signal-collections", metavar="PATTERNS", type=_split, help="The signal collections, separated by commas."
)
@yes_option
@json_option
async def set_command(
    settings: Settings,
    *,
    track: str | None,
    collections: list[str] | None,
    signal_collections: list[str] | None,
) -> None:
    """Change the given parts of the scope.

    A pattern is an NSID, the beginning of one with `.*`, or `*`. Records of removed collections, and of repos that the
    new scope does not want, are deleted. Those of added collections are fetched. `--track all` tracks every repo that
    the stream or the relay's repo list shows, `listed` only added ones, `signal` also those with a record of a signal
    collection.

    The command asks for confirmation if stored records would be deleted, and needs --yes if there is no terminal.
    """
    if track is None and collections is None and signal_collections is None:
        raise click.UsageError("Give --track, --collections or --signal-collections.")
    async with connect_database(settings) as db:
        before = await db.scope.load() or settings.first_scope
        after = _changed(before, track, collections, signal_collections)
        question = await _question(db, before, after)
        if question:
            confirm(question)
        scope = await db.scope.change(
            Track(track) if track else None, collections, signal_collections, settings.first_scope
        )
        progress = await db.scope.progress()
    _print(scope, progress)


@command("untrack", scope_command)
@click.argument("dids", nargs=-1, metavar="DID…|-")
@click.option("--file", "-f", type=click.File(errors="replace"), help="Read DIDs from a file, one per line.")
@yes_option
@json_option
async def untrack_command(settings: Settings, *, dids: tuple[str, ...], file: IO[str] | None) -> None:
    """Stop tracking repos, and delete their records.

    The records are hidden at once, and then deleted. The repos stay untracked until `indexer add`, `POST /repos/add` or
    `atproto.track` names them. The command asks for confirmation if the DIDs come from a file or standard input.
    """
    given = list(given_dids(dids, file, parse_did))
    if given != list(dids):
        confirm(f"Untrack {len(given):,} repos, and delete their records?")
    async with connect_database(settings) as db:
        batches = [given[start : start + BATCH_SIZE] for start in range(0, len(given), BATCH_SIZE)]
        untracked = sum([await db.scope.untrack(batch) for batch in batches])
    result = {"untracked": untracked, "not_tracked": len(given) - untracked}
    echo_result(result, f"repos: {untracked} untracked, {len(given) - untracked} were not tracked")


def _changed(
    before: Scope, track: str | None, collections: list[str] | None, signal_collections: list[str] | None
) -> Scope:
    """Return the scope with the given parts changed. Only the database knows its version, and checks the whole.

    Raises:
        InvalidScopeError: A pattern is invalid, or no collection is named.
    """
    try:
        signals = before.signal_collections if signal_collections is None else filter_of(signal_collections)
        return replace(
            before,
            track=Track(track) if track else before.track,
            collections=before.collections if collections is None else CollectionFilter(collections),
            added_in=(),
            signal_collections=signals,
        )
    except ValueError as error:
        raise InvalidScopeError(str(error)) from error


async def _question(db: Database, before: Scope, after: Scope) -> str:
    """Return the question whether to delete what the change deletes; "" if it deletes nothing."""
    parts, stored = [], await db.scope_changes.collections()
    if unselected := [collection for collection in stored if not after.collections.matches(collection)]:
        named = ", ".join(unselected[:MAX_NAMED]) + (", ..." if len(unselected) > MAX_NAMED else "")
        parts.append(f"delete the records of {len(unselected)} collections ({named})")
    if after.may_want_fewer_repos(before) and not (after.track is Track.SIGNAL and after.signal_collections is None):
        repos = await db.scope_changes.count_not_chosen()
        which = "" if after.track is Track.LISTED else ", except those with a record of a signal collection"
        if repos:
            parts.append(f"untrack {repos:,} repos that no command has added{which}, and delete their records")
    question = "; ".join(parts)
    return f"{question[0].upper()}{question[1:]}?" if parts else ""


def _print(scope: Scope, progress: list[CollectionProgress]) -> None:
    document = {
        "version": scope.version,
        "track": scope.track,
        "collections": scope.collections.patterns,
        "signal_collections": scope.signal_patterns,
        "redacted_collections": sorted(scope.collections.excluded),
        "progress": [{"collection": row.collection, "repos": row.repos, "complete": row.complete} for row in progress],
    }
    if echo_json(document):
        return
    click.echo(f"version {scope.version}: {scope}")
    if unlisted := [pattern for pattern in scope.signal_patterns if not is_nsid(pattern)]:
        click.echo(
            f"found on the stream only, because relays list repos by complete NSIDs: repos of {','.join(unlisted)}"
        )
    if progress:
        result_console().print(row_table([row._asdict() for row in progress], box=None))
