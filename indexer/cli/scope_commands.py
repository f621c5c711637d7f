"""The command `scope` and its subcommands `show`, `set` and `untrack`."""

import shlex
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import IO, Any

import click
from rich.table import Table

from indexer.app.settings import Settings
from indexer.atproto.syntax import CollectionFilter, is_nsid
from indexer.cli.arguments import DID_OR_STDIN, STDIN, parse_did, read_dids
from indexer.cli.command import ExitCode, command, config_option, confirm, json_option
from indexer.cli.database import connect_database
from indexer.cli.lexicon_sources import find_published
from indexer.cli.output import echo_result, literal_text, result_console, to_json
from indexer.db import CollectionProgress, Database
from indexer.errors import InvalidScopeError
from indexer.sync.scope import Scope, Track, filter_of

BATCH_SIZE = 10_000
MAX_COUNTED = 1_000_001
"""Records that are counted at most before they are deleted."""
MAX_NAMED = 5
"""Collections that the question names."""


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
    async with connect_database(settings) as db:
        scope, progress = await db.scope.load(), await db.scope.progress()
    _print(scope or settings.first_scope, progress, as_json=as_json)
    return ExitCode.OK


@command("set", scope_command)
@click.option("--track", type=click.Choice([track.value for track in Track]), help="Which repos become tracked.")
@click.option("--collections", metavar="PATTERNS", help="The collections to db, separated by commas.")
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
    record of a signal collection. Repos that the new scope does not want are untracked, and their records deleted.

    The command asks for confirmation if stored records would be deleted, with their number, and needs --yes if there is
    no terminal. It prints the command that returns to the scope before: then what was deleted is fetched again. It
    warns of a pattern without stored records and without a lexicon.
    """
    if track is None and collections is None and signal_collections is None:
        raise click.UsageError("Give --track, --collections or --signal-collections.")
    async with connect_database(settings) as db:
        before = await db.scope.begin(settings.first_scope)
        try:
            after = _changed(before, track, _split(collections), _split(signal_collections))
            lost = await _lost(db, before, after)
            await _warn_of_typos(settings, db, before, after, lost)
            if lost.question and not yes:
                confirm(lost.question)
            scope = await db.scope.change(
                Track(track) if track else None, _split(collections), _split(signal_collections)
            )
        except InvalidScopeError as error:
            raise click.UsageError(str(error)) from error
        progress = await db.scope.progress()
    _print(scope, progress, as_json=as_json)
    if lost.question:
        click.echo(f"to return to the scope before: {_command_of(before)}", err=True)
    return ExitCode.OK


@command("untrack", scope_command)
@click.argument("dids", nargs=-1, metavar="DID…|-", type=DID_OR_STDIN)
@click.option("--file", "-f", type=click.File(errors="replace"), help="Read DIDs from a file, one per line.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@json_option
async def untrack_command(
    settings: Settings, *, dids: tuple[str, ...], file: IO[str] | None, yes: bool, as_json: bool
) -> int:
    """Stop tracking repos, and delete their records.

    The public views hide the records at once; the daemon deletes them in batches. The repos stay untracked, whatever
    the stream and repo lists show, until `indexer add` names them. The command asks for confirmation if the DIDs come
    from a file or from standard input.
    """
    given_dids = list(_given_dids(dids, file, parse_did))
    if given_dids != list(dids) and not yes:
        confirm(f"Untrack {len(given_dids):,} repos, and delete their records?")
    async with connect_database(settings) as db:
        given, untracked = await _for_each_batch(iter(given_dids), db.scope.untrack)
    result = {"untracked": untracked, "not_tracked": given - untracked}
    echo_result(result, f"repos: {untracked} untracked, {given - untracked} were not tracked", as_json=as_json)
    return ExitCode.OK


@dataclass(frozen=True, slots=True)
class _Lost:
    """The records and repos that a change of the scope deletes.

    Attributes:
        stored: All collections of stored records.
        question: Asks whether to delete it; "" if nothing is deleted.
    """

    stored: list[str]
    question: str


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


async def _lost(db: Database, before: Scope, after: Scope) -> _Lost:
    """Count the records and repos that the change deletes."""
    parts, (stored, unselected, records) = [], await db.scope_changes.count_unselected(after.collections, MAX_COUNTED)
    if records:
        named = ", ".join(unselected[:MAX_NAMED]) + (", ..." if len(unselected) > MAX_NAMED else "")
        parts.append(f"delete {_records(records)} of {len(unselected)} collections ({named})")
    if after.may_want_fewer_repos(before) and not (after.track is Track.SIGNAL and after.signal_collections is None):
        repos, records = await db.out_of_scope.count_not_chosen(MAX_COUNTED)
        which = "" if after.track is Track.LISTED else ", except those with a record of a signal collection"
        if repos:
            parts.append(
                f"untrack {repos:,} repos that no command has added{which}, and delete their {_records(records)}"
            )
    question = "; ".join(parts)
    return _Lost(stored, f"{question[0].upper()}{question[1:]}?" if parts else "")


def _records(count: int) -> str:
    return f"more than {MAX_COUNTED - 1:,} records" if count == MAX_COUNTED else f"{count:,} records"


async def _warn_of_typos(settings: Settings, db: Database, before: Scope, after: Scope, lost: _Lost) -> None:
    """Warn of each added pattern that matches neither a stored collection, nor a stored or published lexicon."""
    known = [*lost.stored, *await db.lexicons.load()]
    added = {*after.collections.patterns, *after.signal_patterns} - {
        *before.collections.patterns,
        *before.signal_patterns,
    }
    unknown = [one for one in sorted(added) if not any(map(CollectionFilter([one]).matches, known))]
    published = await find_published(settings, [pattern for pattern in unknown if is_nsid(pattern)])
    for pattern in unknown:
        if pattern not in published:
            text = "no stored record matches it, and no lexicon of it was found"
            click.echo(f"{pattern}: {text}; check that it is spelled correctly", err=True)


def _command_of(scope: Scope) -> str:
    """Return the command that sets this scope."""
    options = ["--track", scope.track.value, "--collections", str(scope.collections)]
    options += ["--signal-collections", ",".join(scope.signal_patterns)] if scope.signal_patterns else []
    return shlex.join(["indexer", "scope", "set", *options])


def _given_dids(dids: tuple[str, ...], file: IO[str] | None, parse: Callable[[str], str]) -> Iterator[str]:
    """Return the DIDs of the arguments, of the file, or of standard input."""
    if (file is None) != bool(dids) or (STDIN in dids and len(dids) > 1):
        raise click.UsageError("Give DIDs, or --file, or -.")
    if STDIN in dids:
        file = click.open_file(STDIN, errors="replace")
    return read_dids(file, parse) if file else iter(dids)


async def _for_each_batch(dids: Iterator[str], change: Callable[[list[str]], Awaitable[int]]) -> tuple[int, int]:
    """Call `change` with all DIDs, in batches; return how many there are, and the sum of the results."""
    given, changed = 0, 0
    while batch := list(islice(dids, BATCH_SIZE)):
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
