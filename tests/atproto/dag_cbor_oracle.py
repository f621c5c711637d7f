"""Strict DAG-CBOR in its most obvious form: parse any CBOR of the needed types, encode it again, and compare the bytes.

It shares no code with the decoders of the indexer. `encode` can also write valid CBOR that is not canonical.
"""

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SIMPLE = {None: b"\xf6", False: b"\xf4", True: b"\xf5"}


@dataclass(frozen=True)
class Cid:
    """A link: the content of tag 42 after the leading zero."""

    data: bytes


@dataclass(frozen=True)
class Pairs:
    """A map as it is written: in any order, and with repeated keys."""

    items: tuple[tuple[Any, Any], ...]


def canonical_value(data: bytes) -> Any:
    """Return the value of one canonical object. Links are `Cid`, maps are dictionaries.

    Raises:
        ValueError: The bytes are not exactly one object, or not canonical.
    """
    value, end = _parse(data, 0)
    if end != len(data) or encode(value) != data:
        raise ValueError
    return value


def encode(value: Any, width: Callable[[int], int] = lambda _: 0) -> bytes:
    """Return CBOR. It is canonical if `value` is.

    Args:
        value: The value. A `Pairs` is written as it is, a dictionary in canonical order.
        width: Returns the minimum number of bytes of a number after its first byte: 0, 1, 2, 4 or 8.
    """

    def head(major: int, number: int) -> bytes:
        return _head(major, number, width(number))

    def write(item: Any) -> bytes:
        match item:
            case None | bool():
                return SIMPLE[item]
            case int():
                return head(0, item) if item >= 0 else head(1, -1 - item)
            case float():
                return b"\xfb" + struct.pack(">d", item)
            case bytes():
                return head(2, len(item)) + item
            case str():
                return head(3, len(item.encode())) + item.encode()
            case Cid():
                return head(6, 42) + write(b"\0" + item.data)
            case list():
                return head(4, len(item)) + b"".join(map(write, item))
            case dict():
                in_order = sorted(item.items(), key=lambda pair: (len(pair[0].encode()), pair[0].encode()))
                return write(Pairs(tuple(in_order)))
            case Pairs():
                return head(5, len(item.items)) + b"".join(write(part) for pair in item.items for part in pair)
        raise TypeError(type(item))

    return write(value)


def _head(major: int, number: int, width: int) -> bytes:
    size = max(width, next(size for size in (0, 1, 2, 4, 8) if number < (256**size if size else 24)))
    if not size:
        return bytes([major * 32 + number])
    return bytes([major * 32 + {1: 24, 2: 25, 4: 26, 8: 27}[size]]) + number.to_bytes(size)


def _parse(data: bytes, at: int) -> tuple[Any, int]:
    """Return the item at a position, and the position after it."""
    major, info = divmod(_slice(data, at, 1)[0], 32)
    at += 1
    if major == 7:
        return _parse_simple_or_float(data, at, info)
    if info > 27:
        raise ValueError
    size = {24: 1, 25: 2, 26: 4, 27: 8}.get(info, 0)
    number, at = int.from_bytes(_slice(data, at, size)) if size else info, at + size
    match major:
        case 0:
            return number, at
        case 1:
            return -1 - number, at
        case 2:
            return _slice(data, at, number), at + number
        case 3:
            return _slice(data, at, number).decode(), at + number
        case 4:
            return _parse_row(data, at, number)
        case 5:
            row, at = _parse_row(data, at, 2 * number)
            pairs = tuple(zip(row[::2], row[1::2], strict=True))
            keys = [key for key, _ in pairs]
            if not all(isinstance(key, str) for key in keys) or len(set(keys)) != len(keys):
                raise ValueError
            return dict(pairs), at
        case 6:
            content, at = _parse(data, at)
            return Cid(_cid(number, content)), at
    raise ValueError


def _parse_simple_or_float(data: bytes, at: int, info: int) -> tuple[Any, int]:
    if info in (20, 21, 22):
        return {20: False, 21: True, 22: None}[info], at
    if info != 27:
        raise ValueError
    (number,) = struct.unpack(">d", _slice(data, at, 8))
    if not math.isfinite(number):
        raise ValueError
    return number, at + 8


def _parse_row(data: bytes, at: int, count: int) -> tuple[list[Any], int]:
    row = []
    for _ in range(count):
        item, at = _parse(data, at)
        row.append(item)
    return row, at


def _slice(data: bytes, at: int, size: int) -> bytes:
    if at + size > len(data):
        raise ValueError
    return data[at : at + size]


def _cid(tag: int, content: Any) -> bytes:
    """Return the bytes of the CID: version 1, codec, hash function, size of the digest, digest."""
    if tag != 42 or not isinstance(content, bytes) or content[:2] != b"\0\1" or len(content) > 101:
        raise ValueError
    rest = content[2:]
    for _ in ("codec", "hash function"):
        length = next((n for n, byte in enumerate(rest, 1) if byte < 128), 0)
        if not 0 < length <= 9 or (length > 1 and rest[length - 1] == 0):
            raise ValueError
        rest = rest[length:]
    if not rest or rest[0] > 127 or len(rest) != 1 + rest[0]:
        raise ValueError
    return content[1:]
