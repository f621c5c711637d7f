"""Resolve NSIDs to the lexicons that their authorities publish, as the AT Protocol specifies."""

import asyncio
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from indexer.atproto.crypto import parse_did_key
from indexer.atproto.lexicon import Lexicon, has_levels, parse_lexicon, references
from indexer.atproto.limits import Limits
from indexer.atproto.record import decode_record
from indexer.errors import LexiconError, UnavailableError, UpstreamError
from indexer.net.http.checked_connector import DnsResolver
from indexer.net.identity.did_resolver import DidResolver
from indexer.net.identity.handle_verifier import dids_in_dns
from indexer.net.pds.pds_client import PdsClient
from indexer.sync.verify import verify_record

COLLECTION = "com.atproto.lexicon.schema"
MAX_LEVELS = 250
"""Maximum levels of a lexicon. A published one has no more. A stored one must not be too deep to be read again."""
MAX_DEPENDENCIES = 100
"""Lexicons that are fetched at a time because others refer to them."""
MAX_DEPENDENCY_BYTES = 1_048_576
"""Maximum size of these lexicons together: each record type among them gets a view."""
DEPENDENCY_SECONDS = 60.0
"""Time to fetch them, however slowly the hosts of their authorities answer."""


class SourcedLexicon(NamedTuple):
    """A lexicon, and the file or the AT-URI that it was read from."""

    lexicon: Lexicon
    source: str


def sourced_lexicon(document: Any, source: str) -> SourcedLexicon:
    """Return the lexicon of a JSON value; raise `LexiconError`, which names the source, if it is not one."""
    if has_levels(document, MAX_LEVELS + 1):
        raise LexiconError(f"{source} is not a lexicon: it has over {MAX_LEVELS} levels")
    try:
        return SourcedLexicon(parse_lexicon(document), source)
    except ValueError as error:
        raise LexiconError(f"{source} is not a lexicon: {error}") from None


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
            LexiconError: There is no such lexicon, or it is not valid.
            UnavailableError: A host does not answer, or its answer proves nothing.
        """
        did = await self._authority(nsid)
        identity = await self.dids.resolve(did)
        if identity.pds is None or identity.signing_key is None:
            raise LexiconError(f"{nsid}: its authority {did} cannot be resolved: {identity.problem}")
        path = f"{COLLECTION}/{nsid}"
        try:
            proof = await self.pds.fetch_record_proof(did, path, identity.pds)
            block = verify_record(did, path, proof.body, parse_did_key(identity.signing_key), self.limits)
        except UpstreamError as error:
            raise LexiconError(f"{nsid}: the proof of at://{did}/{path} is invalid: {error}") from None
        except UnavailableError as error:
            raise UnavailableError(error.reason, f"{nsid}: at://{did}/{path}: {error.detail}") from None
        if block is None:
            raise LexiconError(f"{nsid} is not published: at://{did}/{path} does not exist")
        return self._decode(nsid, block, f"at://{did}/{path}")

    async def _authority(self, nsid: str) -> str:
        """Return the DID of the account that publishes the lexicons of this authority."""
        domain = ".".join(reversed(nsid.split(".")[:-1]))
        name = f"_lexicon.{domain}"
        try:
            dids = await dids_in_dns(self.dns, name)
        except UnavailableError as error:
            action = "set INDEXER_DNS_SERVERS, or give the lexicon as a file"
            raise UnavailableError(error.reason, f"{nsid}: the TXT record of {error.detail}; {action}") from None
        if len(dids) != 1:
            found = "has no TXT record with a DID" if not dids else f"names {len(dids)} DIDs"
            raise LexiconError(f"{nsid} is not published: {name} {found}")
        return dids.pop()

    def _decode(self, nsid: str, block: bytes, uri: str) -> SourcedLexicon:
        value = decode_record(block, COLLECTION, self.limits)
        if value.json is None:
            raise LexiconError(f"{uri} is not a lexicon: {value.problem}")
        found = sourced_lexicon(json.loads(value.json), uri)
        if found.lexicon.nsid != nsid:
            raise LexiconError(f"{uri} is the lexicon of {found.lexicon.nsid}")
        return found


async def resolve_all(
    resolver: LexiconResolver, nsids: Iterable[str], known: Mapping[str, Lexicon]
) -> tuple[dict[str, SourcedLexicon], list[str]]:
    """Return the lexicons of these NSIDs, and of unknown ones that the types of their fields depend on.

    The second result has the reasons why lexicons that others refer to are missing.

    Raises:
        LexiconError: One of the NSIDs has no valid lexicon.
        UnavailableError: A host does not answer for one of the NSIDs.
    """
    found = {nsid: await resolver.resolve(nsid) for nsid in nsids}
    every = {**known, **{nsid: one.lexicon for nsid, one in found.items()}}
    problems: dict[str, str] = {}
    left = MAX_DEPENDENCY_BYTES
    try:
        async with asyncio.timeout(DEPENDENCY_SECONDS):
            for _ in range(MAX_DEPENDENCIES):
                referred = {nsid for one in found.values() for nsid in references(one.lexicon, every)}
                nsid = min(referred - every.keys() - problems.keys(), default="")
                if not nsid:
                    break
                try:
                    one = await resolver.resolve(nsid)
                except (LexiconError, UnavailableError) as error:
                    problems[nsid] = str(error)
                    continue
                left -= len(one.lexicon.text)
                if left < 0:
                    problems[nsid] = f"{nsid}: together with the others, it has over {MAX_DEPENDENCY_BYTES} bytes"
                    break
                found[nsid], every[nsid] = one, one.lexicon
    except TimeoutError:
        problems[""] = f"not all were fetched within {DEPENDENCY_SECONDS:.0f} s"
    return found, list(problems.values())
