"""CAR files, version 1: split into blocks, each compared with its CID (docs/protocol.md#car-files).

A CAR file has no end mark. A file that was cut between two blocks is well-formed, so only a walk of the tree proves
that an export is complete. The order of the blocks means nothing.
"""

from collections.abc import Generator, Iterable, Iterator, Sequence
from hashlib import sha256
from typing import Any

from indexer.atproto.cbor import CborError, Link, count_items, decode_canonical
from indexer.atproto.cid import CID_BYTES, DAG_CBOR, RAW, is_cid, link_size
from indexer.atproto.limits import Limits
from indexer.errors import UpstreamError
from indexer.reasons import Rejection

_PREFIX_BYTES = len(DAG_CBOR)  # of a CID; its SHA-256 digest follows
# The header of nearly every file is its length, the map of `roots` and `version`, and one CID between these bytes.
_HEADER_START, _HEADER_END = b"\x3a\xa2\x65roots\x81\xd8\x2a\x58\x25\x00", b"\x67version\x01"
_USUAL_ROOT = slice(len(_HEADER_START), len(_HEADER_START) + CID_BYTES)
_USUAL_HEADER_BYTES = _USUAL_ROOT.stop + len(_HEADER_END)
_MAX_VARINT_BYTES = 9
_MAX_HEADER_ITEMS = 512  # a header with one root has 7
_CONTINUES = 0x80  # set in each byte of a varint except the last


def split_car(
    data: bytes, limits: Limits, *, max_bytes: int, rootless: bool = False
) -> tuple[list[bytes], dict[bytes, bytes]]:
    """Return the roots of a whole CAR file, and its blocks by CID. A `rootless` one needs no root.

    Blocks under a CID that is not of the protocol's form cannot be checked and are not returned.

    Raises:
        UpstreamError: With BLOCKS_TOO_LARGE, CAR_MALFORMED or BLOCK_HASH_MISMATCH.
    """
    if len(data) > max_bytes:
        raise UpstreamError(Rejection.BLOCKS_TOO_LARGE, f"{len(data)} bytes")
    reader = CarReader(limits, rootless=rootless)
    blocks = dict(reader.feed(data))
    reader.close()
    return reader.roots, blocks


def encode_car(root: bytes, blocks: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return a CAR file with these blocks, and with a root of the protocol's form."""
    return _HEADER_START + root + _HEADER_END + b"".join([car_section(cid + block) for cid, block in blocks])


def car_section(data: bytes) -> bytes:
    """Return a section of a CAR file: the length of the data as a varint, and the data."""
    size, length = len(data), bytearray()
    while size >> 7:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    length.append(size)
    return bytes(length) + data


class CarReader:
    """Parses a CAR file while it arrives: call `feed` for each chunk and `close` at the end.

    It holds at most one section and one chunk in memory.

    Attributes:
        roots: The roots of the file; empty until the header has arrived.
    """

    def __init__(
        self, limits: Limits, roots: Sequence[bytes] = (), offset: int = 0, blocks: int = 0, *, rootless: bool = False
    ) -> None:
        """Read a file, or the rest of one of which `offset` bytes with its header and so many blocks have been read.

        A `rootless` file needs no root, as in the answers of `getBlocks`.
        """
        self._limits = limits
        self._buffer = bytearray()  # the first bytes of a section whose end has not arrived
        self._position = offset  # of the buffer in the file
        self._block_count = blocks
        self._rootless = rootless
        self._has_header = bool(roots)
        self.roots = list(roots)

    def feed(self, chunk: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield the CID and the bytes of each block that ends in this chunk.

        The iterator must be exhausted before the next call.

        Raises:
            UpstreamError: The file is malformed, exceeds a limit, or contains a block that does not match its CID.
        """
        if self._buffer:
            self._buffer += chunk
        data = self._buffer or chunk
        if self._position + len(data) > self._limits.repo_bytes:
            raise UpstreamError(Rejection.CAR_MALFORMED, f"over {self._limits.repo_bytes} bytes")
        position = 0
        if not self._has_header and (header := read_header(data, self._limits, rootless=self._rootless)):
            self._has_header, (self.roots, position) = True, header
        if self._has_header:
            position = yield from self._blocks(data, position)
        self._position += position
        if data is chunk:
            self._buffer += data[position:]
        else:
            del self._buffer[:position]

    def _blocks(self, data: bytes | bytearray, position: int) -> Generator[tuple[bytes, bytes], None, int]:
        """Yield the CID and the bytes of each whole block from `position` on; return where the rest begins."""
        limits = self._limits
        while (length := _try_varint(data, position)) is not None:
            size, start = length
            if size > limits.block_bytes + CID_BYTES:
                raise UpstreamError(Rejection.CAR_MALFORMED, f"a block of {size} bytes")
            if start + size > len(data):
                break
            position = start + size
            self._block_count += 1
            if self._block_count > limits.repo_blocks:
                raise UpstreamError(Rejection.CAR_MALFORMED, f"over {limits.repo_blocks} blocks")
            block_start = start + CID_BYTES
            cid, block = bytes(data[start:block_start]), bytes(data[block_start:position])
            if size < CID_BYTES or not cid.startswith((DAG_CBOR, RAW)):
                if link_size(bytes(data[start:position])) is None:
                    raise UpstreamError(Rejection.CAR_MALFORMED, "a section without a CID")
            elif sha256(block).digest() == cid[_PREFIX_BYTES:]:
                yield cid, block
            else:
                raise UpstreamError(Rejection.BLOCK_HASH_MISMATCH, cid.hex())
        return position

    def close(self) -> None:
        """Check that the file ends here.

        Raises:
            UpstreamError: With CAR_MALFORMED, if the file is cut inside its header or a block.
        """
        if self._buffer or not self._has_header:
            raise UpstreamError(Rejection.CAR_MALFORMED, "cut inside a block")


def read_header(data: bytes | bytearray, limits: Limits, *, rootless: bool = False) -> tuple[list[bytes], int] | None:
    """Return the roots, and the position of the first section; None if the data ends inside the header.

    Raises:
        UpstreamError: With CAR_MALFORMED, if this is not a header with at least one root. A `rootless` one needs none.
    """
    if data.startswith(_HEADER_START) and data[_USUAL_ROOT.stop : _USUAL_HEADER_BYTES] == _HEADER_END:
        root = bytes(data[_USUAL_ROOT])
        if is_cid(root) and limits.car_header_bytes >= _USUAL_HEADER_BYTES:
            return [root], _USUAL_HEADER_BYTES
    length = _try_varint(data, 0)
    if length is None:
        return None
    size, start = length
    if size > limits.car_header_bytes:
        raise UpstreamError(Rejection.CAR_MALFORMED, f"a header of {size} bytes")
    if start + size > len(data):
        return None
    block = bytes(data[start : start + size])
    if count_items(block, _MAX_HEADER_ITEMS, _MAX_HEADER_ITEMS)[0] > _MAX_HEADER_ITEMS:
        raise UpstreamError(Rejection.CAR_MALFORMED, f"a header of over {_MAX_HEADER_ITEMS} items")
    try:
        header: Any = decode_canonical(block)
    except CborError as error:
        raise UpstreamError(Rejection.CAR_MALFORMED, f"header: {error}") from None
    version = header.get("version") if isinstance(header, dict) else None
    if type(version) is not int or version != 1:  # because True == 1.0 == 1 in Python, but not in CBOR
        raise UpstreamError(Rejection.CAR_MALFORMED, "not CAR version 1")
    roots = header.get("roots")
    if not isinstance(roots, list) or not (roots or rootless) or not all(isinstance(root, Link) for root in roots):
        raise UpstreamError(Rejection.CAR_MALFORMED, "no roots")
    return [bytes(root) for root in roots], start + size


def _try_varint(data: bytes | bytearray, position: int) -> tuple[int, int] | None:
    """Return the value of an unsigned LEB128 varint, and the position after it; None if the data ends inside it.

    Raises:
        UpstreamError: With CAR_MALFORMED, if the value is zero, too long, or not in its shortest form.
    """
    second = data[position + 1 : position + 2]
    if b"\x00" < second < b"\x80" and data[position] >= _CONTINUES:  # two bytes, as for nearly every block
        return data[position] & 0x7F | second[0] << 7, position + 2
    value = shift = 0
    for index in range(position, min(position + _MAX_VARINT_BYTES, len(data))):
        byte = data[index]
        value |= (byte & 0x7F) << shift
        if byte < _CONTINUES:
            if value == 0 or (byte == 0 and index > position):
                raise UpstreamError(Rejection.CAR_MALFORMED, "a length of zero, or not in its shortest form")
            return value, index + 1
        shift += 7
    if len(data) - position >= _MAX_VARINT_BYTES:
        raise UpstreamError(Rejection.CAR_MALFORMED, "a length of too many bytes")
    return None
