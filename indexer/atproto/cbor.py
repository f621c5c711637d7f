"""DAG-CBOR, with the decoder that suits each use (docs/protocol.md#frames).

| functions | decoder | behaviour |
|---|---|---|
| `decode`, `decode_pair` | libipld | fastest; accepts long forms of numbers; a link is the 36 bytes of its CID |
| `decode_canonical` | Python | strict; a link is a `Link`; errors name the byte |
| `decode_json` | libipld | strict; a link is in its JSON form; leaves unusual objects to `decode_canonical` |
| `count_items` | none | counts without decoding; accepts more than all decoders |

libipld alone is not strict, and returns a link as plain bytes. But its encoder writes only canonical DAG-CBOR, and
writes bytes as a link exactly if they are a CID. So if encoding the decoded value gives the original bytes, these are
canonical, and the bytes in the value that are a CID were links (docs/decisions/0010-strict-dag-cbor-without-cbrrr.md).

libipld recurses on the native stack, up to the recursion limit of Python. The default of 1,000 levels fits a stack of
1 MiB, so this program never raises that limit.
"""

import re
from binascii import b2a_base64
from math import isfinite, nan
from struct import unpack
from typing import Any

import libipld
import orjson

from indexer.atproto.cid import MIN_LINK_BYTES, cid_text, is_cid, is_link

MAX_LEVELS = 250
"""Levels of containers that `decode_canonical` accepts. orjson fails at 254."""
MIN_INTEGER = -(1 << 63)
"""The smallest integer that is not unusual. DAG-CBOR has integers from -2^64 to 2^64 - 1."""
_TOO_DEEP = f"more than {MAX_LEVELS} levels"
MAX_SHOWN_BYTES = 32
MAX_SHOWN_CHARACTERS = 300
MAX_SHOWN_LEVELS = 8
_MAX_MESSAGE_CHARACTERS = 200

# Major types and additional information of RFC 8949.
_BYTES, _TEXT, _ARRAY, _MAP, _TAG, _SIMPLE_OR_FLOAT = range(2, 8)
_ONE_BYTE_ARGUMENT = 24
_EIGHT_BYTE_ARGUMENT = 27
_SMALLEST = {1: 24, 2: 1 << 8, 4: 1 << 16, 8: 1 << 32}  # the smallest argument that needs so many bytes
_SIMPLE = {0xF4: False, 0xF5: True, 0xF6: None}  # by the first byte
_LINK_TAG = 42

_LINK_HEAD = 0xD8  # the first byte of tag 42
_FLOAT_HEAD = 0xFB  # the first byte of a float of 64 bits, the only form that is allowed
# Keys of the JSON forms of links and byte strings. The same bytes can occur inside a text.
_reserved_key = re.compile(rb"\$(?:link|bytes)").search


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
    """Return the value of one canonical object. Links are returned as `Link`, and may have any CIDv1 form.

    Raises:
        CborError: The bytes are not exactly one object, or not canonical, or nested deeper than `MAX_LEVELS`.
    """
    reader = _Reader(data)
    try:
        value = reader.item(MAX_LEVELS)
    except ValueError as error:
        raise CborError(_message(error)) from None
    if reader.position < len(data):
        raise CborError(f"the object ends at byte {reader.position} of {len(data)}")
    return value


def decode_json(data: bytes) -> tuple[Any, bytes] | None:
    """Return the value of one canonical object with links as bytes, and its AT Protocol JSON.

    Returns:
        None if `decode_canonical` has to decide: the object is not canonical; it contains a float, an integer of more
        than 64 bits, a byte string that is a CID, or a map with the key `$link` or `$bytes`; or it is nested deeply.
    """
    try:
        value = libipld.decode_dag_cbor(data)
        if libipld.encode_dag_cbor(value) != data or _reserved_key(data):
            return None
        encoded = orjson.dumps(value, default=_json_form)  # fails if the value has more levels or larger integers
        return None if _FLOAT_HEAD in data and has_unusual_number(value) else (value, encoded)
    except (ValueError, orjson.JSONEncodeError, RecursionError):
        return None


def count_items(data: bytes, max_items: int, max_depth: int, objects: int = 1) -> tuple[int, bool]:
    """Count the items of the first `objects` objects without decoding them: containers, keys, values and tags.

    Decoding costs up to 200 bytes of memory per byte, so untrusted bytes are counted first. This takes about 0.2 µs per
    item. It stops after `max_items`, below `max_depth` levels of containers, and at bytes that no decoder accepts.

    Returns:
        The number of items, at most one more than `max_items`, and True if there are more than `max_depth` levels.
    """
    position, items, left, end = 0, 0, objects, len(data)
    outer: list[int] = []  # the numbers of items left in the containers around the present one
    while position < end and items <= max_items:
        while not left:
            if not outer:
                return items, False
            left = outer.pop()
        left -= 1
        items += 1
        major, argument = data[position] >> 5, data[position] & 31
        position += 1
        if argument >= _ONE_BYTE_ARGUMENT:
            if argument > _EIGHT_BYTE_ARGUMENT:
                break
            size = 1 << (argument - _ONE_BYTE_ARGUMENT)
            argument = int.from_bytes(data[position : position + size])
            position += size
        if major in (_BYTES, _TEXT):
            position += argument
        elif major == _TAG:
            left += 1
        elif major in (_ARRAY, _MAP) and argument:
            outer.append(left)
            left = argument if major == _ARRAY else 2 * argument
            if len(outer) > max_depth:
                return items, True
    return items, False


def encode(value: Any) -> bytes:
    """Return the canonical DAG-CBOR of a value.

    Any `bytes` that are a CID become a link, so a value must not contain byte strings of unknown content.
    """
    return bytes(libipld.encode_dag_cbor(value))


class _Reader:
    """Reads one item after the other, from `position` on."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.position = 0

    def item(self, levels: int) -> Any:
        """Return the next item, which may have this many levels of containers."""
        major, argument = self._head()
        if major in (_MAP, _ARRAY) and argument and not levels:  # as `count_items` counts levels
            raise ValueError(_TOO_DEEP)
        match major:
            case 0:
                return argument
            case 1:
                return -1 - argument
            case 2:
                return self._take(argument)
            case 3:
                return self._take(argument).decode()
            case 4:
                return [self.item(levels - 1) for _ in range(argument)]
            case 5:
                return self._map(argument, levels - 1)
            case 6:
                return self._link(argument)
            case _:
                return self._simple_or_float(argument)

    def _map(self, size: int, levels: int) -> dict[str, Any]:
        value: dict[str, Any] = {}
        last = (-1, b"")
        for _ in range(size):
            major, length = self._head()
            if major != _TEXT:
                raise ValueError(f"the key before byte {self.position} is not a text")
            key = self._take(length)
            if (length, key) <= last:
                raise ValueError(f"the key before byte {self.position} is not in canonical order")
            last = length, key
            value[key.decode()] = self.item(levels)
        return value

    def _head(self) -> tuple[int, int]:
        """Return a major type and its argument. For a simple value or a float, the first byte replaces the argument."""
        first = self._take(1)[0]
        major, argument = first >> 5, first & 31
        if major == _SIMPLE_OR_FLOAT:
            return major, first
        if argument < _ONE_BYTE_ARGUMENT:
            return major, argument
        if argument > _EIGHT_BYTE_ARGUMENT:
            raise ValueError(f"no definite number before byte {self.position}")
        size = 1 << (argument - _ONE_BYTE_ARGUMENT)
        argument = int.from_bytes(self._take(size))
        if argument < _SMALLEST[size]:
            raise ValueError(f"the number before byte {self.position} is not in its shortest form")
        return major, argument

    def _take(self, size: int) -> bytes:
        start, self.position = self.position, self.position + size
        if self.position > len(self._data):
            raise ValueError(f"the data ends after byte {len(self._data)}, inside an object")
        return self._data[start : self.position]

    def _simple_or_float(self, first: int) -> bool | float | None:
        if first in _SIMPLE:
            return _SIMPLE[first]
        number: float = unpack(">d", self._take(8))[0] if first == _FLOAT_HEAD else nan
        if not isfinite(number):
            raise ValueError(f"an unsupported simple value or float before byte {self.position}")
        return number

    def _link(self, tag: int) -> Link:
        major, size = self._head()
        content = self._take(size)
        if tag != _LINK_TAG or major != _BYTES or content[:1] != b"\0" or not is_link(content[1:]):
            raise ValueError(f"the tag before byte {self.position} is not 42, or does not contain a CIDv1")
        return Link(content[1:])


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


def _json_form(value: bytes) -> dict[str, str]:
    """Return the JSON form of bytes in a value of libipld: of a link, if libipld encodes them as a link.

    Raises:
        CborError: It does, but they are not a CIDv1.
    """
    if is_cid(value):
        return {"$link": libipld.encode_cid(value)}
    if len(value) >= MIN_LINK_BYTES and libipld.encode_dag_cbor(value)[0] == _LINK_HEAD:
        if not is_link(value):
            raise CborError("tag 42 does not contain a CIDv1")
        return {"$link": cid_text(value)}
    return {"$bytes": b2a_base64(value, newline=False).rstrip(b"=").decode()}


def has_unusual_number(value: Any) -> bool:
    """Return True if a number is a float or has more than 64 bits. The value has at most `MAX_LEVELS` levels."""
    match value:
        case dict():
            return any(map(has_unusual_number, value.values()))
        case list():
            return any(map(has_unusual_number, value))
        case int():
            return value < MIN_INTEGER
        case _:
            return isinstance(value, float)


def _message(error: BaseException) -> str:
    text = str(error).removeprefix("Failed to decode DAG-CBOR. ").strip()
    return text[:_MAX_MESSAGE_CHARACTERS] or type(error).__name__
