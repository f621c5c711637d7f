"""DAG-CBOR, with the library that suits each use (docs/protocol.md#frames).

| functions | library | behaviour |
|---|---|---|
| `decode`, `decode_pair` | libipld | fastest; accepts long forms of numbers; a link is the 36 bytes of its CID |
| `decode_canonical`, `decode_json` | cbrrr | strict; no recursion; a link is a `Link`, or in its JSON form |
| `explain`, `explain_frame` | cbor2 | diagnosis of rejected bytes, for people |

libipld recurses on the native stack, up to the recursion limit of Python. The default of 1,000 levels fits a stack of
1 MiB, so this program never raises that limit.
"""

import re
from io import BytesIO
from typing import Any

import cbor2
import cbrrr
import libipld

from indexer.atproto.cid import cid_text, is_link

MAX_EXPLAINED_BYTES = 10_000
MAX_EXPLAINED_OBJECTS = 3
MAX_EXPLAINED_KEYS = 8
MAX_SHOWN_BYTES = 32
MAX_SHOWN_CHARACTERS = 300
MAX_SHOWN_LEVELS = 8
_MAX_MESSAGE_CHARACTERS = 200

# Tag 42 without a CID of the protocol's form. The same bytes can occur inside a string.
_UNUSUAL_LINK = re.compile(rb"\xd8\x2a(?!\x58\x25\x00\x01[\x55\x71]\x12\x20)")


class CborError(ValueError):
    """The bytes are not the expected number of valid DAG-CBOR objects."""


class Link(bytes):
    """The bytes of a CID that was a link, so that it differs from a byte string with the same bytes."""

    __slots__ = ()


def decode(data: bytes) -> Any:
    """Return the value of one object, which need not be canonical. Links are returned as bytes.

    Raises:
        CborError: The bytes are not exactly one object.
    """
    try:
        return libipld.decode_dag_cbor(data)
    except (ValueError, RecursionError) as error:
        raise CborError(_message(error)) from None


def decode_pair(data: bytes) -> tuple[Any, Any]:
    """Return the values of two objects in a row, which need not be canonical: header and payload of a frame.

    Raises:
        CborError: The bytes are not exactly two objects.
    """
    try:
        objects = libipld.decode_dag_cbor_multi(data)
    except (ValueError, RecursionError) as error:
        raise CborError(_message(error)) from None
    if len(objects) != 2:  # noqa: PLR2004
        raise CborError(f"{len(objects)} objects instead of a header and a payload")
    return objects[0], objects[1]


def decode_canonical(data: bytes) -> Any:
    """Return the value of one canonical object. Links are returned as `Link`.

    Raises:
        CborError: The bytes are not exactly one object, or not canonical.
    """
    try:
        return cbrrr.decode_dag_cbor(data, cid_ctor=_link)
    except (ValueError, cbrrr.CbrrrDecodeError, RecursionError, OverflowError) as error:
        raise CborError(_message(error)) from None


def decode_json(data: bytes) -> Any:
    """Return the value of one canonical object, with links and bytes in the form of AT Protocol JSON.

    Raises:
        CborError: The bytes are not exactly one canonical object, or its value has no JSON form: it contains a float,
            or a map with the key `$link` or `$bytes`.
    """
    if _UNUSUAL_LINK.search(data):
        decode_canonical(data)  # because the JSON mode of cbrrr accepts any bytes as a CID
    try:
        return cbrrr.decode_dag_cbor(data, atjson_mode=True)
    except (ValueError, cbrrr.CbrrrDecodeError, RecursionError, OverflowError) as error:
        raise CborError(_message(error)) from None


def encode(value: Any) -> bytes:
    """Return the canonical DAG-CBOR of a value.

    Any `bytes` that are a CID become a link, so a value must not contain byte strings of unknown content.
    """
    return bytes(libipld.encode_dag_cbor(value))


def explain(data: bytes) -> str:
    """Return a sentence for people that says why strict DAG-CBOR rejects the bytes; "" if it does not. Slow."""
    try:
        decode_canonical(data)
    except CborError as error:
        strict = str(error)
    else:
        return ""
    try:
        summary = _summary(cbor2.loads(data))
    except (cbor2.CBORDecodeError, ValueError, RecursionError) as error:  # ValueError: an integer too long to print
        return f"not CBOR at all: {_message(error)}"
    return f"CBOR ({summary}), but not strict DAG-CBOR: {strict}"


def explain_frame(data: bytes) -> str:
    """Return a description for people of the objects in the first `MAX_EXPLAINED_BYTES` of a rejected frame. Slow."""
    stream = BytesIO(data[:MAX_EXPLAINED_BYTES])
    decoder = cbor2.CBORDecoder(stream)
    found: list[str] = []
    try:
        while stream.tell() < min(len(data), MAX_EXPLAINED_BYTES) and len(found) < MAX_EXPLAINED_OBJECTS:
            found.append(_summary(decoder.decode()))
    except (cbor2.CBORDecodeError, ValueError, RecursionError) as error:
        found.append(f"bytes that are not CBOR ({_message(error)})")
    return ", then ".join(found) or "nothing"


def abridged(value: Any, levels: int = MAX_SHOWN_LEVELS) -> Any:
    """Return a value of `decode` as short JSON for people.

    Links are in text form. Of long bytes and texts, and of deep maps and lists, only the beginning is returned.
    """
    match value:
        case bytes() if is_link(value):
            return {"$link": cid_text(value)}
        case bytes():
            return f"{len(value):,} bytes: {_shorten(value.hex(), 2 * MAX_SHOWN_BYTES)}"
        case str():
            return _shorten(value, MAX_SHOWN_CHARACTERS)
        case dict() | list() if not levels:
            return "…"
        case dict():
            return {key: abridged(inner, levels - 1) for key, inner in value.items()}
        case list():
            return [abridged(inner, levels - 1) for inner in value]
        case _:
            return value


def _shorten(text: str, characters: int) -> str:
    return text if len(text) <= characters else f"{text[:characters]}…"


def _link(data: bytes) -> Link:
    """Return the link for the bytes that cbrrr found in tag 42, after the leading zero."""
    if not is_link(data):
        raise ValueError("tag 42 does not contain a CIDv1")
    return Link(data)


def _message(error: BaseException) -> str:
    text = str(error).removeprefix("Failed to decode DAG-CBOR. ").strip()
    return text[:_MAX_MESSAGE_CHARACTERS] or type(error).__name__


def _summary(value: Any) -> str:
    if isinstance(value, dict):
        keys = ", ".join(map(repr, list(value)[:MAX_EXPLAINED_KEYS]))
        return f"a map with the keys {keys}"[:_MAX_MESSAGE_CHARACTERS]
    return f"a {type(value).__name__}"
