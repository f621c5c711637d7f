"""The command `scope` and its subcommands `show`, `set`, `track` and `untrack`."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import IO, Any

import click
from rich.table import Table

from indexer.atproto.syntax import is_nsid
from indexer.cli.arguments import DID_OR_STDIN, STDIN, read_dids
from indexer.cli.command import ExitCode, command, config_option, json_option
from indexer.cli.database import open_store
from indexer.cli.output import echo_result, literal_text, result_console, to_json
from indexer.errors import InvalidScopeError
from indexer.settings import Settings
from indexer.store import CollectionProgress, Store
from indexer.sync.scope import Scope, Track, filter_of

BATCH_SIZE = 10_000


@click.group("scope")
@config_option
def scope_command(config: Path | None) -> None:
    """Show or change which repos are tracked and which collections are stored.

    All daemons of the database follow a change within seconds, without a restart.
    """


@command("show", scope_command)
@json_option
async def show_command(settings: Settings, *, as_json: bool) -> int:
    """Show the scope, and the progress of the backfill of each collection.

    Before the first start of a daemon, show the scope of the settings.
    """
    async with open_store(settings) as store:
        scope, progress = await store.scope(), await store.scope_progress()
    _print(scope or settings.first_scope, progress, as_json=as_json)
    return ExitCode.OK


@command("set", scope_command)
@click.option("--track", type=click.Choice([track.value for track in Track]), help="Which repos become tracked.")
@click.option("--collections", metavar="PATTERNS", help="The collections to store, separated by commas.")
@click.option("--signal-collections", metavar="PATTERNS", help="The signal collections, separated by commas.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@json_option
async def set_command(
    settings: Settings,
    *,
    track: str | None,
    collections: str | None,
    signal_collections: str | None,
    yes: bool,
    as_json: bool,
) -> int:
    """Change the given parts of the scope.

    A pattern is an NSID, the beginning of one with `.*`, or `*`. Records of removed collections are deleted. Records of
    added collections are fetched; those that are stored already are not written again. `--track all` tracks every repo
    that the stream or the relay's repo list shows, `listed` only repos that are added, `signal` also repos with a
    record of a signal collection. Repos that the new scope does not want are untracked, and their records deleted; the
    command asks for confirmation before.
    """
    if track is None and collections is None and signal_collections is None:
        raise click.UsageError("Give --track, --collections or --signal-collections.")
    async with open_store(settings) as store:
        before = await store.begin_scope(settings.first_scope)
        try:
            if not yes:
                await _confirm_untracking(store, before, track, _split(signal_collections))
            scope = await store.change_scope(
                Track(track) if track else None, _split(collections), _split(signal_collections)
            )
        except InvalidScopeError as error:
            raise click.UsageError(str(error)) from error
        progress = await store.scope_progress()
    _print(scope, progress, as_json=as_json)
    return ExitCode.OK


@command("track", scope_command)
@click.argument("dids", nargs=-1, metavar="DID…|-", type=DID_OR_STDIN)
@click.option("--file", "-f", type=click.File(errors="replace"), help="Read DIDs from a file, one per line.")
@json_option
async def track_command(settings: Settings, *, dids: tuple[str, ...], file: IO[str] | None, as_json: bool) -> int:
    """Start tracking repos, also if they were untracked.

    The daemon fetches each repo and follows it from then on. With `-`, read DIDs from standard input, one per line.
    """
    async with open_store(settings) as store:
        given, tracked = await _for_each_batch(dids, file, store.track)
    result = {"tracked": tracked, "already_tracked": given - tracked}
    echo_result(result, f"repos: {tracked} tracked, {given - tracked} were tracked already", as_json=as_json)
    return ExitCode.OK


@command("untrack", scope_command)
@click.argument("dids", nargs=-1, metavar="DID…|-", type=DID_OR_STDIN)
@click.option("--file", "-f", type=click.File(errors="replace"), help="Read DIDs from a file, one per line.")
@json_option
async def untrack_command(settings: Settings, *, dids: tuple[str, ...], file: IO[str] | None, as_json: bool) -> int:
    """Stop tracking repos, and delete their records.

    The public views hide the records at once; the daemon deletes them in batches. The repos stay untracked, whatever
    the stream and repo lists show, until `indexer scope track` or `indexer add` names them.
    """
    async with open_store(settings) as store:
        given, untracked = await _for_each_batch(dids, file, store.untrack)
    result = {"untracked": untracked, "not_tracked": given - untracked}
    echo_result(result, f"repos: {untracked} untracked, {given - untracked} were not tracked", as_json=as_json)
    return ExitCode.OK


async def _confirm_untracking(
    store: Store, before: Scope, track: str | None, signal_collections: list[str] | None
) -> None:
    """Ask for confirmation if the change may untrack repos.

    Raises:
        InvalidScopeError: A signal pattern is invalid.
    """
    try:
        signals = before.signal_collections if signal_collections is None else filter_of(signal_collections)
    except ValueError as error:
        raise InvalidScopeError(str(error)) from error
    after = replace(before, track=Track(track) if track else before.track, signal_collections=signals)
    if not after.may_want_fewer_repos(before) or (after.track is Track.SIGNAL and signals is None):
        return
    if not (repos := await store.count_not_chosen(before)):
        return
    which = "" if after.track is Track.LISTED else ", except those with a record of a signal collection"
    question = f"Untrack {repos:,} repos that no command has added{which}, and delete their records?"
    click.confirm(question, abort=True, err=True)


async def _for_each_batch(
    dids: tuple[str, ...], file: IO[str] | None, change: Callable[[list[str]], Awaitable[int]]
) -> tuple[int, int]:
    """Call `change` with all given DIDs, in batches; return how many were given, and the sum of the results."""
    if (file is None) != bool(dids) or (STDIN in dids and len(dids) > 1):
        raise click.UsageError("Give DIDs, or --file, or -.")
    if STDIN in dids:
        file = click.open_file(STDIN, errors="replace")
    remaining, given, changed = read_dids(file) if file else iter(dids), 0, 0
    while batch := list(islice(remaining, BATCH_SIZE)):
        given += len(batch)
        changed += await change(batch)
    return given, changed


def _split(patterns: str | None) -> list[str] | None:
    return None if patterns is None else [part.strip() for part in patterns.split(",") if part.strip()]


def _print(scope: Scope, progress: list[CollectionProgress], *, as_json: bool) -> None:
    if as_json:
        click.echo(to_json(_document(scope, progress)))
        return
    click.echo(f"version {scope.version}: {scope}")
    if unlisted := [pattern for pattern in scope.signal_patterns if not is_nsid(pattern)]:
        click.echo(
            f"found on the stream only, because relays list repos by complete NSIDs: repos of {','.join(unlisted)}"
        )
    table = Table("collection", "added in", "repos", "complete", box=None)
    for row in progress:
        table.add_row(*(literal_text(str(cell)) for cell in (row.collection, row.added_in, row.repos, row.complete)))
    if progress:
        result_console().print(table)


def _document(scope: Scope, progress: list[CollectionProgress]) -> dict[str, Any]:
    return {
        "version": scope.version,
        "track": scope.track,
        "collections": scope.collections.patterns,
        "signal_collections": scope.signal_patterns,
        "progress": [{"collection": row.collection, "repos": row.repos, "complete": row.complete} for row in progress],
    }
