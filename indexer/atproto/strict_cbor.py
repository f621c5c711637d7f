"""A strict DAG-CBOR decoder in Python: without recursion, and with errors that name the byte (docs/protocol.md#frames).

It decodes the few objects that the fast decoder does not prove to be canonical.
"""

from collections.abc import Callable
from math import isfinite
from struct import unpack
from typing import Any

from indexer.atproto.cid import is_link

# Major types and additional information of RFC 8949.
_UNSIGNED, _NEGATIVE, _BYTES, _TEXT, _ARRAY, _MAP, _TAG, _SIMPLE_OR_FLOAT = range(8)
_ONE_BYTE_ARGUMENT = 24
_EIGHT_BYTE_ARGUMENT = 27
_SMALLEST = {1: 24, 2: 1 << 8, 4: 1 << 16, 8: 1 << 32}  # the smallest argument that needs so many bytes
_SIMPLE = {0xF4: False, 0xF5: True, 0xF6: None}  # by the first byte
_FLOAT64 = 0xFB  # the first byte of a float of 64 bits, the only form that is allowed
_LINK_TAG = 42


def decode_strict(data: bytes, make_link: Callable[[bytes], Any]) -> Any:
    """Return the value of one canonical object.

    Args:
        data: The object.
        make_link: Returns the value of a link for the bytes of its CID, which may have any CIDv1 form.

    Raises:
        ValueError: The bytes are not exactly one object, or not canonical.
    """
    reader = _Reader(data, make_link)
    root, left = reader.item()
    container, last_key = root, b""  # `left` items or entries of the container are not read yet
    outer: list[tuple[Any, int, bytes]] = []
    while left or outer:
        if not left:
            container, left, last_key = outer.pop()
            continue
        left -= 1
        if type(container) is dict:
            last_key = reader.key(last_key if container else None)
            item, size = reader.item()
            container[last_key.decode()] = item
        else:
            item, size = reader.item()
            container.append(item)
        if size:
            outer.append((container, left, last_key))
            container, left = item, size
    reader.end()
    return root


class _Reader:
    """Reads one item after the other. Lists and maps are returned empty, with their size."""

    def __init__(self, data: bytes, make_link: Callable[[bytes], Any]) -> None:
        self._data = data
        self._position = 0
        self._make_link = make_link

    def item(self) -> tuple[Any, int]:
        """Return the next item, and the number of items or entries that follow if it is a list or a map, else 0."""
        major, argument = self._head()
        if major == _TEXT:
            return self._take(argument).decode(), 0
        if major == _BYTES:
            return self._take(argument), 0
        if major == _MAP:
            return {}, argument
        if major == _ARRAY:
            return [], argument
        if major == _TAG:
            return self._link(argument), 0
        if major == _SIMPLE_OR_FLOAT:
            return self._simple_or_float(argument), 0
        return (argument if major == _UNSIGNED else -1 - argument), 0

    def key(self, last: bytes | None) -> bytes:
        """Return the next key of a map, as UTF-8. `last` is the key before it, if there is one."""
        major, size = self._head()
        if major != _TEXT:
            raise ValueError(f"the key before byte {self._position} is not a text")
        key = self._take(size)
        if last is not None and (len(key), key) <= (len(last), last):
            raise ValueError(f"the key before byte {self._position} is not in canonical order")
        return key

    def end(self) -> None:
        """Raise an error if there are more bytes."""
        if self._position < len(self._data):
            raise ValueError(f"the object ends at byte {self._position} of {len(self._data)}")

    def _head(self) -> tuple[int, int]:
        """Return a major type and its argument. For a simple value or a float, the first byte replaces the argument."""
        if self._position >= len(self._data):
            raise self._truncated()
        first = self._data[self._position]
        self._position += 1
        major, argument = first >> 5, first & 31
        if major == _SIMPLE_OR_FLOAT:
            return major, first
        if argument < _ONE_BYTE_ARGUMENT:
            return major, argument
        if argument > _EIGHT_BYTE_ARGUMENT:
            raise ValueError(f"no definite number before byte {self._position}")
        size = 1 << (argument - _ONE_BYTE_ARGUMENT)
        argument = int.from_bytes(self._take(size))
        if argument < _SMALLEST[size]:
            raise ValueError(f"the number before byte {self._position} is not in its shortest form")
        return major, argument

    def _take(self, size: int) -> bytes:
        start = self._position
        self._position = end = start + size
        if end > len(self._data):
            raise self._truncated()
        return self._data[start:end]

    def _truncated(self) -> ValueError:
        return ValueError(f"the data ends after byte {len(self._data)}, inside an object")

    def _simple_or_float(self, first: int) -> bool | float | None:
        if first in _SIMPLE:
            return _SIMPLE[first]
        if first != _FLOAT64:
            raise ValueError(f"an unsupported simple value or form of float before byte {self._position}")
        number: float = unpack(">d", self._take(8))[0]
        if not isfinite(number):
            raise ValueError(f"the float before byte {self._position} is not a number")
        return number

    def _link(self, tag: int) -> Any:
        major, size = self._head()
        content = self._take(size)
        if tag != _LINK_TAG or major != _BYTES or content[:1] != b"\0" or not is_link(content[1:]):
            raise ValueError(f"the tag before byte {self._position} is not 42, or does not contain a CIDv1")
        return self._make_link(content[1:])
