"""DID documents: the signing key, the PDS and the claimed handle of an account (docs/protocol.md#identity).

A document is JSON from another host. A part with the wrong shape is treated as absent.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from indexer.atproto.crypto import PublicKey, parse_legacy_key, parse_multikey
from indexer.atproto.syntax import is_handle
from indexer.errors import UpstreamError
from indexer.reasons import Rejection

MAX_LIST_ENTRIES = 100
"""Number of entries that are read of a list in a document. Most lists have fewer than ten."""
MAX_URL_CHARACTERS = 2_048
MAX_PORT = 65_535
PDS_TYPE = "AtprotoPersonalDataServer"
"""The type of the service that hosts a repo."""


# Accepts less than a URL parser, so that two parsers cannot find different hosts in the same text.
_BASE_URL = re.compile(
    r"(?P<scheme>https?)://(?P<host>[a-z0-9._-]+|\[[0-9a-f:.]+\])(:(?P<port>[0-9]{0,5}))?([/?#].*)?",
    re.IGNORECASE | re.ASCII | re.DOTALL,
).fullmatch


@dataclass(frozen=True, slots=True)
class DidDocument:
    """The parts of a DID document that the protocol uses. A part that is absent or unusable is None."""

    did: str
    handle: str | None  # the claimed handle in lower case, not verified
    pds: str | None  # the base URL of the PDS: scheme, host and, if given, port
    signing_key: PublicKey | None


def parse_did_document(document: Any, did: str, *, allow_http: bool) -> DidDocument:
    """Return the parts of a decoded JSON document. With `allow_http`, the URL of the PDS may begin with `http:`.

    Raises:
        UpstreamError: With FIELD_INVALID, if this is not a document of the DID.
    """
    if not isinstance(document, dict) or document.get("id") != did:
        raise UpstreamError(Rejection.FIELD_INVALID, f"not a document of {did}")
    return DidDocument(did, _handle(document), _pds(document, did, allow_http=allow_http), _signing_key(document, did))


def build_did_document(did: str, handle: str | None, signing_key: str | None, pds: str | None) -> dict[str, Any]:
    """Return a document as JSON, with the parts that are not None. `signing_key` is a did:key."""
    document: dict[str, Any] = {"id": did}
    if handle:
        document["alsoKnownAs"] = [f"at://{handle}"]
    if signing_key:
        key = {"id": f"{did}#atproto", "type": "Multikey", "controller": did}
        document["verificationMethod"] = [key | {"publicKeyMultibase": signing_key.removeprefix("did:key:")}]
    if pds:
        document["service"] = [{"id": "#atproto_pds", "type": PDS_TYPE, "serviceEndpoint": pds}]
    return document


def _signing_key(document: dict[str, Any], did: str) -> PublicKey | None:
    """Return the first valid `#atproto` key."""
    for method in _maps(document, "verificationMethod"):
        type_, text = method.get("type"), method.get("publicKeyMultibase")
        if method.get("id") not in ("#atproto", f"{did}#atproto") or method.get("controller") != did:
            continue
        if not isinstance(type_, str) or not isinstance(text, str):
            continue
        try:
            return parse_multikey(text) if type_ == "Multikey" else parse_legacy_key(type_, text)
        except UpstreamError:
            continue  # a later method may have a valid key
    return None


def _pds(document: dict[str, Any], did: str, *, allow_http: bool) -> str | None:
    """Return the base URL of the first `#atproto_pds`; None if its URL is invalid, even if there is a second one.

    The type of a service may be a set (DID Core, section 5.4).
    """
    for service in _maps(document, "service"):
        if service.get("id") not in ("#atproto_pds", f"{did}#atproto_pds"):
            continue
        type_ = service.get("type")
        if PDS_TYPE in (type_ if isinstance(type_, list) else [type_]):
            return _base_url(service.get("serviceEndpoint"), allow_http=allow_http)
    return None


def _base_url(url: Any, *, allow_http: bool) -> str | None:
    """Return scheme, host and port of a URL. The rest should not be there, and no client sends it to the PDS."""
    if not isinstance(url, str) or len(url) > MAX_URL_CHARACTERS or (match := _BASE_URL(url.strip())) is None:
        return None
    scheme, host, port = match["scheme"].lower(), match["host"].lower(), match["port"]
    if (scheme == "http" and not allow_http) or (port and not 0 < int(port) <= MAX_PORT):
        return None
    return f"{scheme}://{host}:{port}" if port else f"{scheme}://{host}"


def _handle(document: dict[str, Any]) -> str | None:
    """Return the first handle with valid syntax."""
    aliases = document.get("alsoKnownAs")
    if not isinstance(aliases, list):
        return None
    for alias in aliases[:MAX_LIST_ENTRIES]:
        if isinstance(alias, str) and alias.startswith("at://") and is_handle(alias.removeprefix("at://")):
            return alias.removeprefix("at://").lower()
    return None


def _maps(document: dict[str, Any], name: str) -> Iterator[dict[str, Any]]:
    """Yield the maps in a list of the document."""
    entries = document.get(name)
    if isinstance(entries, list):
        yield from (entry for entry in entries[:MAX_LIST_ENTRIES] if isinstance(entry, dict))
