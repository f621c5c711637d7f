"""The command `lexicon`: add lexicons from files and from the repos that publish them, list, remove and index them.

It also prints types of the rows of their views.

docs/sql.md#typed-views
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import click

from indexer.app.clients import make_did_resolver, make_pds_client, open_outbound_client, stored_policy
from indexer.app.settings import Settings
from indexer.atproto.syntax import is_nsid
from indexer.cli.arguments import parse_nsid
from indexer.cli.client_types import LANGUAGES, class_name
from indexer.cli.command import CommandError, ExitCode, command, command_group, json_lines_option
from indexer.cli.database import connect_database
from indexer.cli.output import duration_text, echo_result, json_wanted, result_console, row_table, to_json
from indexer.db import Database
from indexer.db.lexicon_indexes import LexiconIndex, UnknownColumnError
from indexer.db.lexicons import KEY_COLUMNS, AddedLexicon, AddedState, StoredLexicon
from indexer.errors import LexiconError
from indexer.net.http.checked_connector import DnsResolver
from indexer.net.lexicons import LexiconResolver, SourcedLexicon, resolve_all, sourced_lexicon
from indexer.sync.scope import Scope
from indexer.telemetry.log import printable

MAX_FILE_BYTES = 1_048_576
"""Maximum size of a lexicon: a published one is a record."""


lexicon_command = command_group(
    "lexicon",
    """Add lexicons, and query records through views with typed columns.

    Schema `lexicon` has a view for each record type whose lexicon was added, with its name.
    """,
)


@command("add", lexicon_command)
@click.argument("names", metavar="FILE|DIRECTORY|NSID...", nargs=-1, required=True)
@json_lines_option
async def add_command(settings: Settings, *, names: tuple[str, ...]) -> None:
    """Add lexicons, or replace them by newer versions.

    An NSID is resolved as the AT Protocol specifies, and the proof of its record is verified. Lexicons that its fields
    refer to are fetched, too. Of a directory, all files *.json with a field `lexicon` are read. Nothing is added if one
    of the lexicons is not valid. A lexicon without a record type gets no view.
    """
    given, nsids = read_arguments(names)
    async with connect_database(settings, connections=2) as db:
        given |= await fetch_lexicons(settings, db, given, nsids)
        await store_lexicons(settings, db, given)


async def fetch_lexicons(
    settings: Settings, db: Database, given: dict[str, SourcedLexicon], nsids: Sequence[str]
) -> dict[str, SourcedLexicon]:
    """Return the published lexicons of these NSIDs, and unknown ones that they refer to. Write which ones are missing.

    Raises:
        LexiconError: One of the NSIDs has no valid lexicon.
        UnavailableError: A host does not answer for one of the NSIDs.
    """
    if not nsids:
        return {}
    known = {nsid: one.lexicon for nsid, one in ((await db.lexicons.load()) | given).items()}
    async with open_outbound_client(settings) as outbound:
        dns, dids = DnsResolver(settings.dns_servers), make_did_resolver(settings, outbound)
        pds = await asyncio.to_thread(make_pds_client, settings, outbound)
        found, missing = await resolve_all(LexiconResolver(dns, dids, pds, settings.limits), nsids, known)
    for problem in missing:
        click.echo(printable(f"a lexicon that another one refers to is missing: {problem}"), err=True)
    return found


async def store_lexicons(settings: Settings, db: Database, given: Mapping[str, SourcedLexicon]) -> None:
    """Store lexicons, and create or update their views. Write the results.

    Raises:
        ViewInUseError: A view has to be dropped, and objects of users depend on it.
    """
    results = await db.lexicons.add(given)
    for result in results:
        if result.state is AddedState.UPDATED or (result.nsid in given and result.state is not AddedState.SKIPPED):
            view = f'view lexicon."{result.view}"' if result.view else "no view, other lexicons refer to it"
            echo_result(result._asdict(), f"{result.nsid}: {result.state}, {view}")
    scope = (await stored_policy(settings, db)).scope
    if skipped := [result.nsid for result in results if result.state is AddedState.SKIPPED]:
        click.echo(f"lexicons without a record type, skipped: {', '.join(skipped)}", err=True)
    for result in results:
        if result.nsid in given:
            _print_notices(scope, result, given[result.nsid])
    _print_dropped(await db.lexicon_indexes.drop_outdated())


@command("list", lexicon_command)
@json_lines_option
async def list_command(settings: Settings) -> None:
    """List the stored lexicons with their views and indexes."""
    async with connect_database(settings) as db:
        stored, indexes = await db.lexicons.load(), await db.lexicon_indexes.load()
    rows: list[dict[str, Any]] = [
        {
            "nsid": nsid,
            "view": one.view,
            "columns": [column for field in one.fields.values() for column in field.columns],
            "indexes": [{"columns": index.columns, "valid": index.valid} for index in indexes if index.nsid == nsid],
            "source": one.source,
        }
        for nsid, one in stored.items()
    ]
    if json_wanted():
        for row in rows:
            click.echo(to_json(row))
    elif rows:
        for row in rows:
            built = [one["columns"] + ("" if one["valid"] else " (incomplete)") for one in row["indexes"]]
            row |= {"columns": len(row["columns"]), "indexes": ", ".join(built) or None}
        result_console().print(row_table(rows, box=None))
    else:
        click.echo("No lexicon is stored; see indexer lexicon add --help.", err=True)


@command("remove", lexicon_command)
@click.argument("nsids", metavar="NSID...", nargs=-1, required=True, type=parse_nsid)
@json_lines_option
async def remove_command(settings: Settings, *, nsids: tuple[str, ...]) -> None:
    """Remove lexicons with their views and indexes. Records are not changed."""
    async with connect_database(settings, connections=2) as db:
        require_views(nsids, await db.lexicons.load())
        await db.lexicons.remove(nsids)
        for nsid in nsids:
            echo_result({"nsid": nsid}, f"{nsid}: removed")
        _print_dropped(await db.lexicon_indexes.drop_outdated())


@command("index", lexicon_command)
@click.argument("nsid", metavar="NSID", type=parse_nsid)
@click.argument("fields", metavar="COLUMN[,COLUMN]...", nargs=-1, required=True)
@json_lines_option
async def index_command(settings: Settings, *, nsid: str, fields: tuple[str, ...]) -> None:
    """Build indexes for queries on the view of a record type.

    Each argument is one index: a column of the view, or several, separated by commas. A column may also be named as its
    field in the lexicon. The daemon keeps writing meanwhile. An index that was interrupted is built again.
    """
    async with connect_database(settings) as db:
        stored = await db.lexicons.load()
        require_views([nsid], stored)
        for argument in fields:
            columns = [_column_of(name, stored[nsid]) for name in argument.split(",")]
            name = f"{nsid} ({', '.join(columns)})"
            click.echo(f"{name}: building an index", err=True)
            begun = monotonic()
            try:
                built = await db.lexicon_indexes.build(nsid, columns) is not None
            except UnknownColumnError as error:
                raise CommandError(str(error), ExitCode.BAD_ARGUMENT) from error
            text = f"index built in {duration_text(monotonic() - begun)}" if built else "there is an index already"
            echo_result({"nsid": nsid, "columns": columns, "built": built}, f"{name}: {text}")


@command("types", lexicon_command)
@click.argument("nsids", metavar="[NSID]...", nargs=-1, type=parse_nsid)
@click.option("--python", "language", flag_value="python", help="Print a Python module.")
@click.option("--typescript", "language", flag_value="typescript", help="Print a TypeScript module.")
async def types_command(settings: Settings, *, nsids: tuple[str, ...], language: str | None) -> None:
    """Print types for the rows of typed views, of all or of those of some record types.

    In Python, each is a TypedDict, in TypeScript an interface for rows of node-postgres.
    """
    if language is None:
        raise click.UsageError("Give --python or --typescript.")
    async with connect_database(settings) as db:
        stored, columns = await db.lexicons.load(), await db.lexicons.columns()
    require_views(nsids, stored)
    head, type_of, define = LANGUAGES[language]
    click.echo(head, nl=False)
    names = list[str]()
    for nsid, one in stored.items():
        if not (view := [column for column in columns if column.view == one.view]):
            continue
        names.append(class_name(nsid, names))  # also for those that are not printed: it depends on no argument
        if nsid in nsids or not nsids:
            nullable = {
                "lexicon_problem",
                "first_seen_live",
                *(name for field in one.fields.values() for name in field.columns),
            }
            filled = {*KEY_COLUMNS} - nullable
            fields = [(name, type_of(sql, nullable=name not in filled), text) for *_, name, sql, text in view]
            click.echo(define(names[-1], f'A row of lexicon."{one.view}". {view[0].view_comment}', fields), nl=False)


def read_arguments(names: Sequence[str]) -> tuple[dict[str, SourcedLexicon], list[str]]:
    """Return the lexicons of the files and directories among the arguments by NSID, and the NSIDs to resolve.

    A path wins over an NSID. Files of a directory whose JSON has no field `lexicon` are skipped.

    Raises:
        LexiconError: A file is not a lexicon, two are different lexicons of one NSID, or a directory has none.
    """
    found: dict[str, SourcedLexicon] = {}
    nsids = []
    for name in names:
        path = Path(name)
        if path.is_dir():
            documents = [(str(file), _read_json(file)) for file in sorted(path.rglob("*.json"))]
            documents = [(file, one) for file, one in documents if isinstance(one, dict) and "lexicon" in one]
            if not documents:
                raise LexiconError(f"{path} contains no lexicon")
        elif path.exists():
            documents = [(name, _read_json(path))]
        elif is_nsid(name) and not name.endswith(".json"):
            nsids.append(parse_nsid(name))
            continue
        else:
            raise click.UsageError(f"{name[:80]!r} is neither a file, nor a directory, nor an NSID.")
        for source, document in documents:
            one = sourced_lexicon(document, source)
            other = found.setdefault(one.lexicon.nsid, one)
            if other.lexicon.text != one.lexicon.text:
                raise LexiconError(
                    f"{other.source} and {source} are different lexicons of {one.lexicon.nsid}; give only one of them"
                )
    return found, nsids


def _read_json(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise LexiconError(f"{path} is not a lexicon: it has over {MAX_FILE_BYTES} bytes")
        return json.loads(data)
    except OSError as error:
        raise LexiconError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise LexiconError(f"{path} is not a lexicon: it is not JSON: {error}") from None


def _print_notices(scope: Scope, result: AddedLexicon, given: SourcedLexicon) -> None:
    notices = list(given.lexicon.problems)
    if result.unknown:
        notices.append(f"fields that refer to {', '.join(result.unknown)} have the type jsonb until it is added")
    if result.view and not scope.collections.matches(result.nsid):
        notices.append("the scope does not select this collection, so the view has no records; see indexer scope show")
    for notice in notices:
        click.echo(printable(f"{result.nsid}: {notice}"), err=True)


def _print_dropped(dropped: Sequence[LexiconIndex]) -> None:
    for index in dropped:
        click.echo(f"{index.nsid} ({index.columns}): dropped an index that no view uses any more", err=True)


def require_views(nsids: Sequence[str], stored: Mapping[str, StoredLexicon]) -> None:
    """Raise `CommandError` for the first NSID without a stored view."""
    for nsid in nsids:
        if nsid not in stored or stored[nsid].view is None:
            message = f"the lexicon of {nsid} was not added, or has no view; see indexer lexicon list"
            raise CommandError(message, ExitCode.UNKNOWN)


def _column_of(name: str, stored: StoredLexicon) -> str:
    """Return the column that a name means: its own, or the only one of the field with this name."""
    field = stored.fields.get(name)
    return field.columns[0] if field is not None and len(field.columns) == 1 else name
