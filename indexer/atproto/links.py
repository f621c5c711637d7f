"""Find the links in the value of a record: AT-URIs and DIDs, each with its path (docs/sql.md#links).

A path has `.name` for a member of an object, `[]` for an element of an array, and `[type]` for an element that is an
object with this `$type`: `.subject.uri`, `.facets[].features[app.bsky.richtext.facet#mention].did`. Constellation
writes paths in the same way.
"""

from typing import Any, Literal, NamedTuple

import orjson

from indexer.atproto.syntax import AtUri, is_did

MAX_LINKS = 100
"""Links of one record. Of more links, the first ones are kept, in the order of paths and targets."""
MIN_LINKS, BYTES_OF_LINK = 4, 64
"""Links of a record of any size, and the bytes of its JSON for each further one. A link takes about 500 bytes with its
count and its index entries: with these limits, links take less than ten times the bytes of large records."""
MAX_TARGET_CHARACTERS = 800
"""Characters of a target. Longer ones, which the specification allows, do not fit into an index of Postgres."""
MAX_PATH_BYTES = 256
"""Bytes of a path in UTF-8. Links at longer paths are not kept."""

LinkKind = Literal["did", "at-uri", "strong-ref"]


class RecordLink(NamedTuple):
    """A link in the value of a record."""

    path: str
    target: str
    kind: LinkKind  # "strong-ref" for an AT-URI that is the member `uri` of an object that also has a text `cid`


def links_of(json: str | None) -> tuple[RecordLink, ...]:
    """Return the links in the JSON text of a value, at most one for each path and target, in their order.

    The same value always gives the same links, whatever the order of its members.
    """
    if json is None or ("at://" not in json and '"did:' not in json):
        return ()
    found: dict[tuple[str, str], LinkKind] = {}
    value = orjson.loads(json)
    _collect("", value, found)
    limit = MIN_LINKS
    if len(found) > limit:  # not the length of the text, which has spaces and long numbers if Postgres wrote it
        limit = min(MAX_LINKS, limit + len(orjson.dumps(value)) // BYTES_OF_LINK)
    return tuple([RecordLink(*key, found[key]) for key in sorted(found)[:limit]])


def _collect(path: str, value: Any, found: dict[tuple[str, str], LinkKind], *, strong: bool = False) -> None:
    """Add the links below a value. It has at most `cbor.MAX_LEVELS` levels.

    Nothing is below a path that is too long, and to build the paths of all elements of a list would take long.
    """
    if len(path) > MAX_PATH_BYTES:
        return
    if isinstance(value, dict):
        for key, child in value.items():
            if isinstance(child, dict | list) or _may_be_link(child):
                _collect(f"{path}.{key}", child, found, strong=key == "uri" and isinstance(value.get("cid"), str))
    elif isinstance(value, list):
        for child in value:
            if isinstance(child, dict | list) or _may_be_link(child):
                type_ = child.get("$type") if isinstance(child, dict) else None
                _collect(f"{path}[{type_}]" if isinstance(type_, str) else f"{path}[]", child, found)
    elif _may_be_link(value) and len(value) <= MAX_TARGET_CHARACTERS and len(path.encode()) <= MAX_PATH_BYTES:
        kind = _kind_of(value)
        if kind == "at-uri" and (strong or found.get((path, value)) == "strong-ref"):
            kind = "strong-ref"
        if kind is not None:
            found[path, value] = kind


def _may_be_link(value: Any) -> bool:
    return isinstance(value, str) and value.startswith(("at://", "did:"))


def _kind_of(text: str) -> LinkKind | None:
    """Return the kind of a target that may be a link; None if it is neither a DID nor an AT-URI."""
    if text.startswith("did:"):
        return "did" if is_did(text) else None
    try:
        AtUri.parse(text)
    except ValueError:
        return None
    return "at-uri"
