"""Read lexicons from files, and from the repos that publish them (docs/sql.md#typed-views)."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import click

from indexer.app.clients import make_did_resolver, make_pds_client, open_outbound_client
from indexer.app.settings import Settings
from indexer.atproto.crypto import parse_did_key
from indexer.atproto.lexicon import Lexicon, has_levels, parse_lexicon, references
from indexer.atproto.limits import Limits
from indexer.atproto.record import decode_record
from indexer.errors import UnavailableError, UpstreamError
from indexer.net.http.checked_connector import DnsResolver
from indexer.net.identity import DidResolver, dids_in_dns
from indexer.net.pds import PdsClient
from indexer.sync.verify import verify_record

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


class SourcedLexicon(NamedTuple):
    """A lexicon, and the file or the AT-URI that it was read from."""

    lexicon: Lexicon
    source: str


def read_file(path: Path) -> SourcedLexicon:
    """Return the lexicon in a file.

    Raises:
        ClickException: The file is not a lexicon; the message is one line that says why.
    """
    return SourcedLexicon(_parse(_read_json(path), str(path)), str(path))


class LexiconDirectory(NamedTuple):
    """The files `*.json` below a directory.

    Attributes:
        others: The files that have no field `lexicon`.
        problems: Why files are not valid JSON or not a valid lexicon.
    """

    lexicons: list[SourcedLexicon]
    others: list[Path]
    problems: list[str]


def read_directory(path: Path) -> LexiconDirectory:
    """Read the lexicons in all files `*.json` below a directory. A file that is not valid hides no other one."""
    directory = LexiconDirectory([], [], [])
    for file in sorted(path.rglob("*.json")):
        try:
            document = _read_json(file)
            if isinstance(document, dict) and "lexicon" in document:
                directory.lexicons.append(SourcedLexicon(_parse(document, str(file)), str(file)))
            else:
                directory.others.append(file)
        except click.ClickException as error:
            directory.problems.append(error.format_message())
    return directory


class LexiconResolver:
    """Resolves NSIDs to published lexicons, and verifies them like all records."""

    def __init__(self, dns: DnsResolver, dids: DidResolver, pds: PdsClient, limits: Limits) -> None:
        self._dns = dns
        self._dids = dids
        self._pds = pds
        self._limits = limits

    async def resolve(self, nsid: str) -> SourcedLexicon:
        """Return the lexicon that the authority of an NSID publishes.

        Raises:
            ClickException: There is no such lexicon, or it is not valid.
            UnavailableError: A host does not answer, or its answer proves nothing.
        """
        did = await self._authority(nsid)
        identity = await self._dids.resolve(did)
        if identity.pds is None or identity.signing_key is None:
            raise click.ClickException(f"{nsid}: its authority {did} cannot be resolved: {identity.problem}")
        path = f"{COLLECTION}/{nsid}"
        try:
            proof = await self._pds.fetch_record_proof(did, path, identity.pds)
            block = verify_record(did, path, proof, parse_did_key(identity.signing_key), self._limits)
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
            dids = await dids_in_dns(self._dns, name)
        except UnavailableError as error:
            raise UnavailableError(error.reason, f"{nsid}: the TXT record of {name}: {error.detail}") from None
        if len(dids) != 1:
            found = "has no TXT record with a DID" if not dids else f"names {len(dids)} DIDs"
            raise click.ClickException(f"{nsid} is not published: {name} {found}")
        return dids.pop()

    def _decode(self, nsid: str, block: bytes, uri: str) -> SourcedLexicon:
        value = decode_record(block, COLLECTION, self._limits)
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
