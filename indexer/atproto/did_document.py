"""What the protocol takes from a DID document: signing key, PDS, claimed handle (spec §5.1, §5.4).

A document is a stranger's JSON. Parts of the wrong shape are passed over as if they were absent; unknown ones too.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from indexer.atproto.crypto import PublicKey, parse_legacy, parse_multikey
from indexer.atproto.syntax import is_handle
from indexer.errors import UpstreamError
from indexer.reasons import Rejection

ENTRIES = 100  # of any list in a document; real ones have a handful
URL_CHARACTERS = 2_048
PORTS = 65_535
# narrower than a URL parser, so that no two of them can read another host in it
_BASE_URL = re.compile(
    r"(?P<scheme>https?)://(?P<host>[a-z0-9._-]+|\[[0-9a-f:.]+\])(:(?P<port>[0-9]{1,5}))?/?", re.IGNORECASE | re.ASCII
).fullmatch


@dataclass(frozen=True, slots=True)
class DidDocument:
    """`handle` is a claim, in lower case; `pds` is scheme, host and port. What is absent or unusable is None."""

    did: str
    handle: str | None
    pds: str | None
    signing_key: PublicKey | None


def parse_did_document(document: Any, did: str, *, allow_http: bool) -> DidDocument:
    """Raises `UpstreamError` with FIELD_INVALID if this is not a document of `did`."""
    if not isinstance(document, dict) or document.get("id") != did:
        raise UpstreamError(Rejection.FIELD_INVALID, f"not a document of {did}")
    return DidDocument(did, _handle(document), _pds(document, did, allow_http=allow_http), _signing_key(document, did))


def _signing_key(document: dict[str, Any], did: str) -> PublicKey | None:
    """The first valid `#atproto` key; others are ignored."""
    for method in _maps(document, "verificationMethod"):
        type_, text = method.get("type"), method.get("publicKeyMultibase")
        if method.get("id") not in ("#atproto", f"{did}#atproto") or method.get("controller") != did:
            continue
        if not isinstance(type_, str) or not isinstance(text, str):
            continue
        try:
            return parse_multikey(text) if type_ == "Multikey" else parse_legacy(type_, text)
        except UpstreamError:
            continue  # the next one may be usable; none at all is told by None
    return None


def _pds(document: dict[str, Any], did: str, *, allow_http: bool) -> str | None:
    for service in _maps(document, "service"):
        if service.get("id") not in ("#atproto_pds", f"{did}#atproto_pds"):
            continue
        if service.get("type") == "AtprotoPersonalDataServer":
            return _base_url(service.get("serviceEndpoint"), allow_http=allow_http)
    return None


def _base_url(url: Any, *, allow_http: bool) -> str | None:
    """Scheme, host and port, and nothing else but one slash behind them."""
    if not isinstance(url, str) or len(url) > URL_CHARACTERS or (match := _BASE_URL(url)) is None:
        return None
    scheme, host, port = match["scheme"].lower(), match["host"].lower(), match["port"]
    if (scheme == "http" and not allow_http) or (port and not 0 < int(port) <= PORTS):
        return None
    return f"{scheme}://{host}:{port}" if port else f"{scheme}://{host}"


def _handle(document: dict[str, Any]) -> str | None:
    """The first syntactically valid one wins, even if it doesn't resolve."""
    aliases = document.get("alsoKnownAs")
    if not isinstance(aliases, list):
        return None
    for alias in aliases[:ENTRIES]:
        if isinstance(alias, str) and alias.startswith("at://") and is_handle(alias.removeprefix("at://")):
            return alias.removeprefix("at://").lower()
    return None


def _maps(document: dict[str, Any], name: str) -> Iterator[dict[str, Any]]:
    entries = document.get(name)
    if isinstance(entries, list):
        yield from (entry for entry in entries[:ENTRIES] if isinstance(entry, dict))
