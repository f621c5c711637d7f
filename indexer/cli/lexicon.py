"""The command `lexicon`: add lexicons from files and from the repos that publish them, list, remove and index them.

docs/sql.md#typed-views
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import click

from indexer.app.clients import make_did_resolver, make_pds_client, open_outbound_client, stored_policy
from indexer.app.settings import Settings
from indexer.atproto.crypto import parse_did_key
from indexer.atproto.lexicon import Lexicon, has_levels, parse_lexicon, references
from indexer.atproto.limits import Limits
from indexer.atproto.record import decode_record
from indexer.atproto.syntax import is_nsid
from indexer.cli.arguments import parse_nsid
from indexer.cli.command import ExitCode, command, config_option, json_lines_option, report_error
from indexer.cli.database import connect_database
from indexer.cli.output import duration_text, echo_result, result_console, row_table, to_json
from indexer.db.lexicon_indexes import LexiconIndex, UnknownColumnError
from indexer.db.lexicons import AddedLexicon, AddedState, StoredLexicon, ViewInUseError
from indexer.errors import UnavailableError, UpstreamError
from indexer.net.http.checked_connector import DnsResolver
from indexer.net.identity.did_resolver import DidResolver
from indexer.net.identity.handle_verifier import dids_in_dns
from indexer.net.pds.pds_client import PdsClient
from indexer.sync.scope import Scope
from indexer.sync.verify import verify_record
from indexer.telemetry.log import printable

COLLECTION = "com.atproto.lexicon.schema"
MAX_FILE_BYTES = 1_048_576
"""Maximum size of a lexicon: a published one is a record."""
MAX_LEVELS = 250
"""Maximum levels of a lexicon. A published one has no more. A stored one must not be too deep to be read again."""
MAX_DEPENDENCIES = 100
"""Lexicons that one command fetches because others refer to them."""
MAX_DEPENDENCY_BYTES = 1_048_576
"""Maximum size of these lexicons together: each record type among them gets a view."""
DEPENDENCY_SECONDS = 60.0
"""Time to fetch them, however slowly the hosts of their authorities answer."""
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
    read = _read_arguments(names)
    async with connect_database(settings, connections=2) as db:
        given = read.files
        if read.nsids:
            known = {nsid: one.lexicon for nsid, one in (await db.lexicons.load()).items()}
            known |= {nsid: one.lexicon for nsid, one in given.items()}
            async with open_resolver(settings) as resolver:
                found, missing = await resolve_all(resolver, read.nsids, known)
            for problem in missing:
                click.echo(printable(f"a lexicon that another one refers to is missing: {problem}"), err=True)
            given = {**given, **found}
        try:
            results = await db.lexicons.add(given)
        except ViewInUseError as error:
            return report_error(_in_use(error), ExitCode.FAILED)
        for result in results:
            if result.state is AddedState.UPDATED or (result.nsid in given and result.state is not AddedState.SKIPPED):
                view = f'view lexicon."{result.view}"' if result.view else "no view, other lexicons refer to it"
                echo_result(result._asdict(), f"{result.nsid}: {result.state}, {view}", as_json=as_json)
        scope = (await stored_policy(settings, db)).scope
        _print_notices(scope, [result for result in results if result.nsid in given], given)
        _print_dropped(await db.lexicon_indexes.drop_outdated())
    if read.problems:
        text = f"files that were skipped: {len(read.problems)}: {_named(read.problems)}"
        return report_error(text, ExitCode.FAILED)
    return ExitCode.OK


@command("list", lexicon_command)
@json_lines_option
async def list_command(settings: Settings, *, as_json: bool) -> int:
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
    if as_json:
        for row in rows:
            click.echo(to_json(row))
    elif rows:
        for row in rows:
            built = [one["columns"] + ("" if one["valid"] else " (incomplete)") for one in row["indexes"]]
            row |= {"columns": len(row["columns"]), "indexes": ", ".join(built) or None}
        result_console().print(row_table(rows, box=None))
    else:
        click.echo("No lexicon is stored; see indexer lexicon add --help.", err=True)
    return ExitCode.OK


@command("remove", lexicon_command)
@click.argument("nsids", metavar="NSID...", nargs=-1, required=True, type=parse_nsid)
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
@click.argument("nsid", metavar="NSID", type=parse_nsid)
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
            name = f"{nsid} ({', '.join(columns)})"
            click.echo(f"{name}: building an index", err=True)
            begun = monotonic()
            try:
                built = await db.lexicon_indexes.build(nsid, columns) is not None
            except UnknownColumnError as error:
                return report_error(str(error), ExitCode.BAD_ARGUMENT)
            text = f"index built in {duration_text(monotonic() - begun)}" if built else "there is an index already"
            echo_result({"nsid": nsid, "columns": columns, "built": built}, f"{name}: {text}", as_json=as_json)
    return ExitCode.OK


class SourcedLexicon(NamedTuple):
    """A lexicon, and the file or the AT-URI that it was read from."""

    lexicon: Lexicon
    source: str


@dataclass(slots=True)
class _Arguments:
    """The lexicons that the arguments of `add` name.

    Attributes:
        files: The lexicons of files and directories, by NSID.
        nsids: The NSIDs to resolve.
        problems: Why files of directories are skipped.
    """

    files: dict[str, SourcedLexicon] = field(default_factory=dict)
    nsids: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, one: SourcedLexicon) -> None:
        """Add the lexicon of a file.

        Raises:
            ClickException: Another file has another lexicon with the same NSID.
        """
        other = self.files.setdefault(one.lexicon.nsid, one)
        if other.lexicon.text != one.lexicon.text:
            raise click.ClickException(f"{_different(other, one)}; give only one of them")

    def add_directory(self, path: Path) -> None:
        """Add the lexicons in all files `*.json` below a directory. A file that is not valid hides no other one.

        Raises:
            ClickException: The directory has no lexicon, or another lexicon than another argument.
        """
        found: dict[str, list[SourcedLexicon]] = {}
        problems, others = [], []
        for file in sorted(path.rglob("*.json")):
            try:
                document = _read_json(file)
                if isinstance(document, dict) and "lexicon" in document:
                    lexicon = _parse(document, str(file))
                    found.setdefault(lexicon.nsid, []).append(SourcedLexicon(lexicon, str(file)))
                else:
                    others.append(str(file))
            except click.ClickException as error:
                problems.append(error.format_message())
        if not found:
            why = f": {_named(problems)}" if problems else ""
            raise click.ClickException(f"{path} contains no lexicon{why}")
        for first, *more in found.values():
            if other := next((one for one in more if one.lexicon.text != first.lexicon.text), None):
                problems.append(_different(first, other))
            else:
                self.add(first)
        if others:
            click.echo(printable(f"{path}: files without a lexicon, skipped: {_named(others)}"), err=True)
        self.problems += problems


def _read_arguments(names: Sequence[str]) -> _Arguments:
    """Read the files and directories among the arguments. A path wins over an NSID.

    Raises:
        ClickException: A file is not a lexicon, or a directory has none.
    """
    read = _Arguments()
    for name in names:
        path = Path(name)
        if path.is_dir():
            read.add_directory(path)
        elif path.exists():
            read.add(SourcedLexicon(_parse(_read_json(path), name), name))
        elif is_nsid(name) and not name.endswith(".json"):
            read.nsids.append(parse_nsid(name))
        else:
            raise click.UsageError(f"{name[:80]!r} is neither a file, nor a directory, nor an NSID.")
    return read


def _different(one: SourcedLexicon, other: SourcedLexicon) -> str:
    return f"{one.source} and {other.source} are different lexicons of {one.lexicon.nsid}"


def _read_json(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise click.ClickException(f"{path} is not a lexicon: it has over {MAX_FILE_BYTES} bytes")
        return json.loads(data)
    except OSError as error:
        raise click.ClickException(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise click.ClickException(f"{path} is not a lexicon: it is not JSON: {error}") from None


def _parse(document: Any, source: str) -> Lexicon:
    try:
        if has_levels(document, MAX_LEVELS + 1):
            raise ValueError(f"it has over {MAX_LEVELS} levels")  # noqa: TRY301
        return parse_lexicon(document)
    except ValueError as error:
        raise click.ClickException(f"{source} is not a lexicon: {error}") from None


@dataclass(frozen=True, slots=True)
class LexiconResolver:
    """Resolves NSIDs to published lexicons, and verifies them like all records."""

    dns: DnsResolver
    dids: DidResolver
    pds: PdsClient
    limits: Limits

    async def resolve(self, nsid: str) -> SourcedLexicon:
        """Return the lexicon that the authority of an NSID publishes.

        Raises:
            ClickException: There is no such lexicon, or it is not valid.
            UnavailableError: A host does not answer, or its answer proves nothing.
        """
        did = await self._authority(nsid)
        identity = await self.dids.resolve(did)
        if identity.pds is None or identity.signing_key is None:
            raise click.ClickException(f"{nsid}: its authority {did} cannot be resolved: {identity.problem}")
        path = f"{COLLECTION}/{nsid}"
        try:
            proof = await self.pds.fetch_record_proof(did, path, identity.pds)
            block = verify_record(did, path, proof, parse_did_key(identity.signing_key), self.limits)
        except UpstreamError as error:
            raise click.ClickException(f"{nsid}: the proof of at://{did}/{path} is invalid: {error}") from None
        except UnavailableError as error:
            raise UnavailableError(error.reason, f"{nsid}: at://{did}/{path}: {error.detail}") from None
        if block is None:
            raise click.ClickException(f"{nsid} is not published: at://{did}/{path} does not exist")
        return self._decode(nsid, block, f"at://{did}/{path}")

    async def _authority(self, nsid: str) -> str:
        """Return the DID of the account that publishes the lexicons of this authority."""
        domain = ".".join(reversed(nsid.split(".")[:-1]))
        name = f"_lexicon.{domain}"
        try:
            dids = await dids_in_dns(self.dns, name)
        except UnavailableError as error:
            raise UnavailableError(error.reason, f"{nsid}: the TXT record of {name}: {error.detail}") from None
        if len(dids) != 1:
            found = "has no TXT record with a DID" if not dids else f"names {len(dids)} DIDs"
            raise click.ClickException(f"{nsid} is not published: {name} {found}")
        return dids.pop()

    def _decode(self, nsid: str, block: bytes, uri: str) -> SourcedLexicon:
        value = decode_record(block, COLLECTION, self.limits)
        if value.json is None:
            raise click.ClickException(f"{uri} is not a lexicon: {value.problem}")
        lexicon = _parse(json.loads(value.json), uri)
        if lexicon.nsid != nsid:
            raise click.ClickException(f"{uri} is the lexicon of {lexicon.nsid}")
        return SourcedLexicon(lexicon, uri)


@asynccontextmanager
async def open_resolver(settings: Settings) -> AsyncIterator[LexiconResolver]:
    """Open a resolver with the clients that the settings describe."""
    async with open_outbound_client(settings) as outbound:
        yield LexiconResolver(
            DnsResolver(settings.dns_servers),
            make_did_resolver(settings, outbound),
            await asyncio.to_thread(make_pds_client, settings, outbound),
            settings.limits,
        )


async def resolve_all(
    resolver: LexiconResolver, nsids: Iterable[str], known: Mapping[str, Lexicon]
) -> tuple[dict[str, SourcedLexicon], list[str]]:
    """Return the lexicons of these NSIDs, and of unknown ones that the types of their fields depend on.

    The second result has the reasons why lexicons that others refer to are missing.

    Raises:
        ClickException: One of the NSIDs has no valid lexicon.
        UnavailableError: A host does not answer for one of the NSIDs.
    """
    found = {nsid: await resolver.resolve(nsid) for nsid in nsids}
    problems: dict[str, str] = {}
    size, ends = 0, asyncio.get_running_loop().time() + DEPENDENCY_SECONDS
    for _ in range(MAX_DEPENDENCIES):
        missing = next(_missing(found, known, problems), None)
        if missing is None:
            break
        try:
            async with asyncio.timeout_at(ends):
                one = await resolver.resolve(missing)
        except click.ClickException as error:
            problems[missing] = error.format_message()
        except UnavailableError as error:
            problems[missing] = str(error)
        except TimeoutError:
            problems[missing] = f"{missing}: not fetched, because the others took {DEPENDENCY_SECONDS:.0f} s"
            break
        else:
            size += len(one.lexicon.text)
            if size > MAX_DEPENDENCY_BYTES:
                problems[missing] = f"{missing}: together with the others, it has over {MAX_DEPENDENCY_BYTES} bytes"
                break
            found[missing] = one
    return found, list(problems.values())


def _missing(
    found: Mapping[str, SourcedLexicon], known: Mapping[str, Lexicon], problems: Mapping[str, str]
) -> Iterator[str]:
    """Yield the NSIDs of lexicons that the fields of the found ones refer to and that are neither known nor failed."""
    every = {**known, **{nsid: one.lexicon for nsid, one in found.items()}}
    for one in found.values():
        yield from sorted(references(one.lexicon, every) - every.keys() - problems.keys())


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
