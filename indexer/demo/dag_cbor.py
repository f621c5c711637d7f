"""Encode plain Python values as canonical DAG-CBOR, independently of `indexer.atproto.cbor`."""

from collections.abc import Mapping
from typing import Any

from indexer.atproto.cid import is_cid


def encode(value: Any) -> bytes:
    """Return the canonical DAG-CBOR of a value without floats.

    Bytes that are a CID of the protocol's form (36 bytes) become a link, all other bytes a byte string.

    Raises:
        TypeError: The type has no DAG-CBOR form here.
        OverflowError: An integer needs more than 64 bits.
    """
    match value:
        case None:
            return b"\xf6"
        case bool():
            return b"\xf5" if value else b"\xf4"
        case int():
            return _head(0, value) if value >= 0 else _head(1, -1 - value)
        case bytes() if is_cid(value):
            return b"\xd8\x2a" + encode(b"\x00" + value)
        case bytes():
            return _head(2, len(value)) + value
        case str():
            text = value.encode()
            return _head(3, len(text)) + text
        case list() | tuple():
            return _head(4, len(value)) + b"".join(map(encode, value))
        case Mapping():
            # Encoded keys begin with their length, so this is the canonical order: shorter keys first.
            items = sorted((encode(key), encode(item)) for key, item in value.items())
            return _head(5, len(items)) + b"".join(key + item for key, item in items)
        case _:
            raise TypeError(f"no DAG-CBOR for {type(value).__name__}")


def _head(major: int, number: int) -> bytes:
    """Return a major type and its number in the fewest bytes."""
    if number < 24:  # noqa: PLR2004 - fits into the first byte
        return bytes([major << 5 | number])
    for info, size in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if number < 1 << 8 * size:
            return bytes([major << 5 | info]) + number.to_bytes(size)
    raise OverflowError(f"{number} needs more than 64 bits")
