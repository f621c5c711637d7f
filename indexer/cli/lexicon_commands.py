"""The command `lexicon` and its subcommands `add`, `list`, `remove` and `index`."""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

import click
from rich.table import Table

from indexer.app.clients import stored_policy
from indexer.app.settings import Settings
from indexer.atproto.lexicon import Lexicon
from indexer.atproto.syntax import is_nsid
from indexer.cli.arguments import NSID, parse_nsid
from indexer.cli.command import ExitCode, command, config_option, json_lines_option, report_error
from indexer.cli.database import connect_database
from indexer.cli.lexicon_sources import SourcedLexicon, open_resolver, read_directory, read_file, resolve_all
from indexer.cli.output import duration_text, echo_result, literal_text, result_console, show_progress, to_json
from indexer.db import (
    AddedLexicon,
    AddedState,
    Database,
    LexiconIndex,
    StoredLexicon,
    UnknownColumnError,
    ViewInUseError,
)
from indexer.sync.scope import Scope
from indexer.telemetry.log import printable

T = TypeVar("T")

PROGRESS_SECONDS = 1.0
"""Interval at which the progress of an index is read."""
MAX_NAMED = 10
"""Lexicons that a notice names."""


@click.group("lexicon")
@config_option
def lexicon_command(config: Path | None) -> None:
    """Add lexicons, and query records through views with typed columns.

    For each record type whose lexicon was added, schema `lexicon` has a view with the name of the record type.
    """


@command("add", lexicon_command)
@click.argument("names", metavar="FILE|DIRECTORY|NSID...", nargs=-1, required=True)
@json_lines_option
async def add_command(settings: Settings, *, names: tuple[str, ...], as_json: bool) -> int:
    """Add lexicons, or replace them by newer versions.

    An NSID is resolved as the AT Protocol specifies: the DNS record _lexicon of its authority names an account, whose
    PDS sends the lexicon as a record with a proof. The proof is verified. Lexicons that its fields refer to are
    fetched, too. Of a directory, all files *.json are read; those that are not valid are named and skipped, with exit
    code 1. A lexicon without a record type gets no view.
    """
    files, nsids, problems = _read_arguments(names)
    async with connect_database(settings, connections=2) as db:
        known = {nsid: one.lexicon for nsid, one in (await db.lexicons.load()).items()}
        found = await _resolve(settings, nsids, {**known, **_lexicons(files)}) if nsids else {}
        given = {**files, **found}
        try:
            results = await db.lexicons.add(given)
        except ViewInUseError as error:
            return report_error(_in_use(error), ExitCode.FAILED)
        for result in results:
            if result.state is AddedState.UPDATED or (result.nsid in given and result.state is not AddedState.SKIPPED):
                echo_result(result._asdict(), _added_line(result), as_json=as_json)
        scope = (await stored_policy(settings, db)).scope
        _print_notices(scope, [result for result in results if result.nsid in given], given)
        _print_dropped(await db.lexicon_indexes.drop_outdated())
    if problems:
        return report_error(f"files that were skipped: {len(problems)}: {_named(problems)}", ExitCode.FAILED)
    return ExitCode.OK


@command("list", lexicon_command)
@json_lines_option
async def list_command(settings: Settings, *, as_json: bool) -> int:
    """List the stored lexicons with their views and indexes."""
    async with connect_database(settings) as db:
        stored, indexes = await db.lexicons.load(), await db.lexicon_indexes.load()
    rows = [_list_row(one, [index for index in indexes if index.nsid == nsid]) for nsid, one in stored.items()]
    if as_json:
        for row in rows:
            click.echo(to_json(row))
        return ExitCode.OK
    table = Table("nsid", "view", "columns", "indexes", "source", box=None)
    for row in rows:
        built = ", ".join(one["columns"] + ("" if one["valid"] else " (incomplete)") for one in row["indexes"])
        cells = (row["nsid"], row["view"] or "-", str(len(row["columns"])), built or "-", row["source"])
        table.add_row(*map(literal_text, cells))
    if rows:
        result_console().print(table)
    else:
        click.echo("No lexicon is stored; see indexer lexicon add --help.", err=True)
    return ExitCode.OK


@command("remove", lexicon_command)
@click.argument("nsids", metavar="NSID...", nargs=-1, required=True, type=NSID)
@json_lines_option
async def remove_command(settings: Settings, *, nsids: tuple[str, ...], as_json: bool) -> int:
    """Remove lexicons with their views and indexes. Records are not changed."""
    async with connect_database(settings, connections=2) as db:
        if unknown := _unknown(nsids, await db.lexicons.load()):
            return report_error(unknown, ExitCode.UNKNOWN)
        try:
            await db.lexicons.remove(nsids)
        except ViewInUseError as error:
            return report_error(_in_use(error), ExitCode.FAILED)
        for nsid in nsids:
            echo_result({"nsid": nsid}, f"{nsid}: removed", as_json=as_json)
        _print_dropped(await db.lexicon_indexes.drop_outdated())
    return ExitCode.OK


@command("index", lexicon_command)
@click.argument("nsid", metavar="NSID", type=NSID)
@click.argument("fields", metavar="COLUMN[,COLUMN]...", nargs=-1, required=True)
@json_lines_option
async def index_command(settings: Settings, *, nsid: str, fields: tuple[str, ...], as_json: bool) -> int:
    """Build indexes for queries on the view of a record type.

    Each argument is one index: a column of the view, or several, separated by commas. A column may also be named as its
    field in the lexicon. The daemon keeps writing meanwhile. An index that was interrupted is built again.
    """
    async with connect_database(settings) as db:
        stored = await db.lexicons.load()
        if unknown := _unknown([nsid], stored):
            return report_error(unknown, ExitCode.UNKNOWN)
        for argument in fields:
            columns = [_column_of(name, stored[nsid]) for name in argument.split(",")]
            try:
                await _build(db, nsid, columns, as_json=as_json)
            except UnknownColumnError as error:
                return report_error(str(error), ExitCode.BAD_ARGUMENT)
    return ExitCode.OK


async def _build(db: Database, nsid: str, columns: Sequence[str], *, as_json: bool) -> None:
    """Build one index, and print the result.

    Raises:
        UnknownColumnError: There is no such column, or no index can contain these columns.
    """
    name = f"{nsid} ({', '.join(columns)})"
    click.echo(f"{name}: building an index", err=True)
    begun = monotonic()
    index = await _with_progress(db, db.lexicon_indexes.build(nsid, columns))
    text = "there is an index already" if index is None else f"index built in {duration_text(monotonic() - begun)}"
    echo_result({"nsid": nsid, "columns": columns, "built": index is not None}, f"{name}: {text}", as_json=as_json)


async def _with_progress(db: Database, build: Coroutine[Any, Any, T]) -> T:
    """Build an index; show its phase, and the pages or rows of the phase."""
    task = asyncio.create_task(build, name="index")
    try:
        with show_progress("pages or rows", None) as progress:
            while not (await asyncio.wait([task], timeout=PROGRESS_SECONDS))[0]:
                if (state := await db.lexicon_indexes.build_progress()) is not None:
                    progress.update(state.done, total=state.total or None, note=state.phase)
        return await task
    finally:
        task.cancel()
        await asyncio.wait([task])


def _read_arguments(names: Sequence[str]) -> tuple[dict[str, SourcedLexicon], list[str], list[str]]:
    """Return the lexicons of files and directories by NSID, the NSIDs to resolve, and what is skipped of directories.

    A path wins over an NSID.

    Raises:
        ClickException: A file is not a lexicon, or a directory has none.
    """
    files: dict[str, SourcedLexicon] = {}
    nsids, problems = [], []
    for name in names:
        path = Path(name)
        if path.is_dir():
            problems += _add_directory(files, path)
        elif path.exists():
            _add_file(files, read_file(path))
        elif is_nsid(name) and not name.endswith(".json"):
            nsids.append(parse_nsid(name))
        else:
            raise click.UsageError(f"{name[:80]!r} is neither a file, nor a directory, nor an NSID.")
    return files, nsids, problems


def _add_directory(files: dict[str, SourcedLexicon], path: Path) -> list[str]:
    """Add the lexicons of a directory, and return why some of its files are skipped."""
    lexicons, others, problems = read_directory(path)
    by_nsid: dict[str, list[SourcedLexicon]] = {}
    for one in lexicons:
        by_nsid.setdefault(one.lexicon.nsid, []).append(one)
    for first, *more in by_nsid.values():
        if other := next((one for one in more if one.lexicon.text != first.lexicon.text), None):
            problems.append(_different(first, other))
        else:
            _add_file(files, first)
    if len(lexicons) == 0:
        why = f": {_named(problems)}" if problems else ""
        raise click.ClickException(f"{path} contains no lexicon{why}")
    if others:
        named = _named(map(str, others))
        click.echo(printable(f"{path}: files without a lexicon, skipped: {named}"), err=True)
    return problems


def _add_file(files: dict[str, SourcedLexicon], one: SourcedLexicon) -> None:
    """Add the lexicon of a file.

    Raises:
        ClickException: Another file has another lexicon with the same NSID.
    """
    other = files.setdefault(one.lexicon.nsid, one)
    if other.lexicon.text != one.lexicon.text:
        raise click.ClickException(f"{_different(other, one)}; give only one of them")


def _different(one: SourcedLexicon, other: SourcedLexicon) -> str:
    return f"{one.source} and {other.source} are different lexicons of {one.lexicon.nsid}"


async def _resolve(settings: Settings, nsids: Sequence[str], known: Mapping[str, Lexicon]) -> dict[str, SourcedLexicon]:
    async with open_resolver(settings) as resolver:
        found, problems = await resolve_all(resolver, nsids, known)
    for problem in problems:
        click.echo(printable(f"a lexicon that another one refers to is missing: {problem}"), err=True)
    return found


def _lexicons(sources: Mapping[str, SourcedLexicon]) -> dict[str, Lexicon]:
    return {nsid: one.lexicon for nsid, one in sources.items()}


def _added_line(result: AddedLexicon) -> str:
    view = f'view lexicon."{result.view}"' if result.view else "no view, other lexicons refer to it"
    return f"{result.nsid}: {result.state}, {view}"


def _print_notices(scope: Scope, results: Sequence[AddedLexicon], given: Mapping[str, SourcedLexicon]) -> None:
    skipped = [result.nsid for result in results if result.state is AddedState.SKIPPED]
    if skipped:
        click.echo(f"lexicons without a record type, skipped: {_named(skipped)}", err=True)
    for result in results:
        for problem in given[result.nsid].lexicon.problems:
            click.echo(printable(f"{result.nsid}: {problem}"), err=True)
        if result.unknown:
            missing = ", ".join(result.unknown)
            text = f"fields that refer to {missing} have the type jsonb until it is added"
            click.echo(printable(f"{result.nsid}: {text}"), err=True)
        if result.view and not scope.collections.matches(result.nsid):
            text = "the scope does not select this collection, so the view has no records; see indexer scope show"
            click.echo(f"{result.nsid}: {text}", err=True)


def _print_dropped(dropped: Sequence[LexiconIndex]) -> None:
    for index in dropped:
        click.echo(f"{index.nsid} ({index.columns}): dropped an index that no view uses any more", err=True)


def _named(names: Any) -> str:
    every = list(names)
    more = f" and {len(every) - MAX_NAMED} more" if len(every) > MAX_NAMED else ""
    return ", ".join(every[:MAX_NAMED]) + more


def _unknown(nsids: Sequence[str], stored: Mapping[str, StoredLexicon]) -> str | None:
    """Return an error for the first NSID without a stored view; None if all have one."""
    missing = next((nsid for nsid in nsids if nsid not in stored or stored[nsid].view is None), None)
    return f"the lexicon of {missing} was not added, or has no view; see indexer lexicon list" if missing else None


def _column_of(name: str, stored: StoredLexicon) -> str:
    """Return the column that a name means: its own, or the only one of the field with this name."""
    field = stored.fields.get(name)
    return field.columns[0] if field is not None and len(field.columns) == 1 else name


def _in_use(error: ViewInUseError) -> str:
    return f"nothing was changed: {error}; drop what depends on the view, run the command again, and create it again"


def _list_row(one: StoredLexicon, indexes: Sequence[LexiconIndex]) -> dict[str, Any]:
    return {
        "nsid": one.lexicon.nsid,
        "view": one.view,
        "columns": [column for field in one.fields.values() for column in field.columns],
        "indexes": [{"columns": index.columns, "valid": index.valid} for index in indexes],
        "source": one.source,
    }
