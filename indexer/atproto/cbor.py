"""DAG-CBOR, by the library that serves each use; nothing else in this program imports them (spec §6.1).

- `decode`, `decode_pair`: libipld, the fastest; it takes integers and floats that are not in canonical form, and gives
  links as their 36 binary bytes, which nothing then tells from byte strings. It recurses on the native stack, as deep
  as Python's own recursion limit lets it: the default 1,000 levels fit a stack of 1 MiB, so that limit is never raised.
- `decode_canonical`, `decode_json`: cbrrr, strict, without recursion; links are `Link`s, or in their JSON form.
- `explain`, `explain_frame`: cbor2, to tell a person what is wrong; `abridged`: what is there.
"""

import re
from io import BytesIO
from typing import Any

import cbor2
import cbrrr
import libipld

from indexer.atproto.cid import cid_text, is_link

# A link to anything but a CID of the protocol's kind; or bytes within a string that look like one.
_ODD_LINK = re.compile(rb"\xd8\x2a(?!\x58\x25\x00\x01[\x55\x71]\x12\x20)")

EXPLAINED_BYTES = 10_000
EXPLAINED_OBJECTS = 3
SHOWN_BYTES = 32
SHOWN_CHARACTERS = 300
SHOWN_LEVELS = 8


class CborError(ValueError):
    """Bytes that are not one DAG-CBOR object, or not as many as asked for."""


class Link(bytes):
    """A CID link, told apart from a byte string: the CID's binary bytes."""

    __slots__ = ()


def decode(data: bytes) -> Any:
    """One object and nothing behind it; not necessarily canonical. Raises `CborError`."""
    try:
        return libipld.decode_dag_cbor(data)
    except (ValueError, RecursionError) as error:
        raise CborError(_message(error)) from None


def decode_pair(data: bytes) -> tuple[Any, Any]:
    """Exactly two objects, one behind the other: a frame's header and payload. Raises `CborError`."""
    try:
        objects = libipld.decode_dag_cbor_multi(data)
    except (ValueError, RecursionError) as error:
        raise CborError(_message(error)) from None
    if len(objects) != 2:  # noqa: PLR2004
        raise CborError(f"{len(objects)} objects instead of a header and a payload")
    return objects[0], objects[1]


def decode_canonical(data: bytes) -> Any:
    """One object in the only form that strict DAG-CBOR allows. Raises `CborError`."""
    try:
        return cbrrr.decode_dag_cbor(data, cid_ctor=_link)
    except (ValueError, cbrrr.CbrrrDecodeError, RecursionError, OverflowError) as error:
        raise CborError(_message(error)) from None


def decode_json(data: bytes) -> Any:
    """One canonical object with links and bytes in AT Protocol JSON's form (`$link`, `$bytes`). Raises `CborError`.

    Also for what that form can't hold: floats, and maps that have such a key themselves.
    """
    if _ODD_LINK.search(data):
        decode_canonical(data)  # the JSON mode takes any bytes for a CID
    try:
        return cbrrr.decode_dag_cbor(data, atjson_mode=True)
    except (ValueError, cbrrr.CbrrrDecodeError, RecursionError, OverflowError) as error:
        raise CborError(_message(error)) from None


def encode(value: Any) -> bytes:
    """Canonical DAG-CBOR of plain values. Any `bytes` that parse as a CID become links, so not for free bytes."""
    return bytes(libipld.encode_dag_cbor(value))


def explain(data: bytes) -> str:
    """What strict DAG-CBOR refuses in these bytes, in a sentence; "" if nothing. Off the hot path."""
    try:
        decode_canonical(data)
    except CborError as error:
        strict = str(error)
    else:
        return ""
    try:
        summary = _summary(cbor2.loads(data))
    except (cbor2.CBORDecodeError, ValueError, RecursionError) as error:  # ValueError: a number too long to be shown
        return f"not CBOR at all: {_message(error)}"
    return f"CBOR ({summary}), but not strict DAG-CBOR: {strict}"


def explain_frame(data: bytes) -> str:
    """What the objects are that a refused frame begins with, as far as `EXPLAINED_BYTES` go. Off the hot path."""
    stream = BytesIO(data[:EXPLAINED_BYTES])
    decoder = cbor2.CBORDecoder(stream)
    found: list[str] = []
    try:
        while stream.tell() < min(len(data), EXPLAINED_BYTES) and len(found) < EXPLAINED_OBJECTS:
            found.append(_summary(decoder.decode()))
    except (cbor2.CBORDecodeError, ValueError, RecursionError) as error:
        found.append(f"bytes that are not CBOR ({_message(error)})")
    return ", then ".join(found) or "nothing"


def abridged(value: Any, levels: int = SHOWN_LEVELS) -> Any:
    """What `decode` gave, for people: JSON, links in their text form, of long bytes and texts the beginning."""
    match value:
        case bytes() if is_link(value):
            return {"$link": cid_text(value)}
        case bytes():
            return f"{len(value):,} bytes: {_cut(value.hex(), 2 * SHOWN_BYTES)}"
        case str():
            return _cut(value, SHOWN_CHARACTERS)
        case dict() | list() if not levels:
            return "…"
        case dict():
            return {key: abridged(inner, levels - 1) for key, inner in value.items()}
        case list():
            return [abridged(inner, levels - 1) for inner in value]
        case _:
            return value


def _cut(text: str, characters: int) -> str:
    return text if len(text) <= characters else f"{text[:characters]}…"


def _link(data: bytes) -> Link:
    """The CID constructor for cbrrr: the bytes behind the leading zero."""
    if not is_link(data):
        raise ValueError("tag 42 doesn't hold a CID of version 1")
    return Link(data)


def _message(error: BaseException) -> str:
    return str(error).removeprefix("Failed to decode DAG-CBOR. ").strip()[:200] or type(error).__name__


def _summary(value: Any) -> str:
    if isinstance(value, dict):
        return f"a map with the keys {', '.join(map(repr, list(value)[:8]))}"[:200]
    return f"a {type(value).__name__}"
