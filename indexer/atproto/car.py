"""CAR files, version 1: split into blocks, each compared with its CID (docs/protocol.md#car-files).

A CAR file has no end mark. A file that was cut between two blocks is well-formed, so only a walk of the tree proves
that an export is complete. The order of the blocks means nothing.
"""

from collections.abc import Iterator
from hashlib import sha256
from typing import Any, Self

from indexer.atproto.cbor import CborError, Link, decode_canonical
from indexer.atproto.cid import CID_BYTES, DAG_CBOR, RAW, link_size
from indexer.atproto.limits import Limits
from indexer.errors import UpstreamError
from indexer.reasons import Rejection

_PREFIX_BYTES = len(DAG_CBOR)  # of a CID; its SHA-256 digest follows

_MAX_VARINT_BYTES = 9
_CONTINUES = 0x80  # set in each byte of a varint except the last

# Nearly every file has one root of the protocol's form, and then a header of 59 bytes:
#
#     offset
#      0    3A                 varint: 58 bytes follow
#      1    A2                 map of 2 entries
#      2    65 "roots"
#      8    81                 list of 1 item
#      9    D8 2A              tag 42: a link
#     11    58 25              byte string of 37 bytes
#     13    00                 prefix of a binary CID
#     14    01 71 12 20        first bytes of the CID: DAG_CBOR
#     18    <32 bytes>         SHA-256 of the commit
#     50    67 "version"
#     58    01
_HEADER_START = b"\x3a\xa2\x65roots\x81\xd8\x2a\x58\x25\x00" + DAG_CBOR
_HEADER_END = b"\x67version\x01"
_ROOT_OFFSET = len(_HEADER_START) - len(DAG_CBOR)
_VERSION_OFFSET = _ROOT_OFFSET + CID_BYTES
_HEADER_BYTES = _VERSION_OFFSET + len(_HEADER_END)


def split_car(data: bytes, limits: Limits, *, max_bytes: int) -> tuple[list[bytes], dict[bytes, bytes]]:
    """Return the roots of a whole CAR file, and its blocks by CID.

    Blocks under a CID that is not of the protocol's form cannot be checked and are not returned.

    Raises:
        UpstreamError: With BLOCKS_TOO_LARGE, CAR_MALFORMED or BLOCK_HASH_MISMATCH.
    """
    if len(data) > max_bytes:
        raise UpstreamError(Rejection.BLOCKS_TOO_LARGE, f"{len(data)} bytes")
    roots, position = read_header(data, limits)
    blocks: dict[bytes, bytes] = {}
    end = len(data)
    while position < end:
        size, start = _read_varint(data, position)
        position = start + size
        if position > end:
            raise UpstreamError(Rejection.CAR_MALFORMED, "cut inside a block")
        cid = data[start : start + CID_BYTES]
        if size >= CID_BYTES and cid.startswith((DAG_CBOR, RAW)):
            block = data[start + CID_BYTES : position]
            if sha256(block).digest() != cid[_PREFIX_BYTES:]:
                raise UpstreamError(Rejection.BLOCK_HASH_MISMATCH, cid.hex())
            blocks[cid] = block
        else:
            _check_unsupported_cid(data, start, position)
    return roots, blocks


class CarReader:
    """Parses a CAR file while it arrives: call `feed` for each chunk and `close` at the end.

    It holds at most one section and one chunk in memory.

    Attributes:
        roots: The roots of the file; empty until the header has arrived.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._buffer = bytearray()
        self._buffer_offset = 0  # of the first byte of the buffer, in the file
        self._block_count = 0
        self.roots: list[bytes] = []

    @classmethod
    def resumed(cls, limits: Limits, roots: list[bytes], offset: int, blocks: int) -> Self:
        """Return a reader of the rest of a file, of which `offset` bytes with so many blocks have been read.

        `roots` is empty if the rest begins with the header.
        """
        reader = cls(limits)
        reader.roots, reader._buffer_offset, reader._block_count = roots, offset, blocks
        return reader

    def feed(self, chunk: bytes) -> Iterator[tuple[bytes, bytes, int]]:
        """Yield the CID, the bytes, and the offset in the file of each block that ends in this chunk.

        The iterator must be exhausted before the next call.

        Raises:
            UpstreamError: The file is malformed, exceeds a limit, or contains a block that does not match its CID.
        """
        self._buffer += chunk
        if self._buffer_offset + len(self._buffer) > self._limits.repo_bytes:
            raise UpstreamError(Rejection.CAR_MALFORMED, f"over {self._limits.repo_bytes} bytes")
        position = 0
        if not self.roots:
            header = self._header()
            if header is None:
                return
            self.roots, position = header
        while (section := self._section(position)) is not None:
            start, position = section
            found = self._block(start, position)
            if found is not None:
                yield *found, self._buffer_offset + start + CID_BYTES
        self._buffer_offset += position
        del self._buffer[:position]

    def close(self) -> None:
        """Check that the file ends here.

        Raises:
            UpstreamError: With CAR_MALFORMED, if the file is cut inside its header or a block.
        """
        if self._buffer or not self.roots:
            raise UpstreamError(Rejection.CAR_MALFORMED, "cut inside a block")

    def _header(self) -> tuple[list[bytes], int] | None:
        """Return the roots and the position after the header; None if its end has not arrived."""
        length = _try_varint(self._buffer, 0)
        if length is None:
            return None
        size, start = length
        if size > self._limits.car_header_bytes:
            raise UpstreamError(Rejection.CAR_MALFORMED, f"a header of {size} bytes")
        end = start + size
        return read_header(bytes(self._buffer[:end]), self._limits) if len(self._buffer) >= end else None

    def _section(self, position: int) -> tuple[int, int] | None:
        """Return where the CID of a section begins and where the section ends; None if its end has not arrived."""
        length = _try_varint(self._buffer, position)
        if length is None:
            return None
        size, start = length
        if size > self._limits.block_bytes + CID_BYTES:
            raise UpstreamError(Rejection.CAR_MALFORMED, f"a block of {size} bytes")
        return (start, start + size) if start + size <= len(self._buffer) else None

    def _block(self, start: int, end: int) -> tuple[bytes, bytes] | None:
        """Return the CID and the bytes of a block; None if the CID is not of the protocol's form."""
        self._block_count += 1
        if self._block_count > self._limits.repo_blocks:
            raise UpstreamError(Rejection.CAR_MALFORMED, f"over {self._limits.repo_blocks} blocks")
        section = bytes(self._buffer[start:end])
        cid = section[:CID_BYTES]
        if len(section) < CID_BYTES or not cid.startswith((DAG_CBOR, RAW)):
            _check_unsupported_cid(section, 0, len(section))
            return None
        block = section[CID_BYTES:]
        if sha256(block).digest() != cid[_PREFIX_BYTES:]:
            raise UpstreamError(Rejection.BLOCK_HASH_MISMATCH, cid.hex())
        return cid, block


def read_header(data: bytes, limits: Limits) -> tuple[list[bytes], int]:
    """Return the roots, and the position of the first section.

    A header with one root is recognized by its bytes. `decode_header` would return the same and is slower.

    Raises:
        UpstreamError: With CAR_MALFORMED, if this is not a header with at least one root.
    """
    if data.startswith(_HEADER_START) and data[_VERSION_OFFSET:_HEADER_BYTES] == _HEADER_END:
        return [data[_ROOT_OFFSET:_VERSION_OFFSET]], _HEADER_BYTES
    return decode_header(data, limits)


def decode_header(data: bytes, limits: Limits) -> tuple[list[bytes], int]:
    """Return the same as `read_header` for a header of any form.

    Raises:
        UpstreamError: With CAR_MALFORMED, if this is not a header with at least one root.
    """
    size, start = _read_varint(data, 0)
    end = start + size
    if size > limits.car_header_bytes or end > len(data):
        raise UpstreamError(Rejection.CAR_MALFORMED, f"a header of {size} bytes")
    try:
        header: Any = decode_canonical(data[start:end])
    except CborError as error:
        raise UpstreamError(Rejection.CAR_MALFORMED, f"header: {error}") from None
    version = header.get("version") if isinstance(header, dict) else None
    if type(version) is not int or version != 1:  # because True == 1.0 == 1 in Python, but not in CBOR
        raise UpstreamError(Rejection.CAR_MALFORMED, "not CAR version 1")
    roots = header.get("roots")
    if not isinstance(roots, list) or not roots or not all(isinstance(root, Link) for root in roots):
        raise UpstreamError(Rejection.CAR_MALFORMED, "no roots")
    return [bytes(root) for root in roots], end


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    """Return the value of a varint, and the position after it.

    Raises:
        UpstreamError: With CAR_MALFORMED, if this is not a valid varint or the data ends inside it.
    """
    second = data[position + 1 : position + 2]
    if b"\x00" < second < b"\x80" and data[position] >= _CONTINUES:  # two bytes, as for nearly every block
        return data[position] & 0x7F | second[0] << 7, position + 2
    found = _try_varint(data, position)
    if found is None:
        raise UpstreamError(Rejection.CAR_MALFORMED, "cut inside a length")
    return found


def _try_varint(data: bytes | bytearray, position: int) -> tuple[int, int] | None:
    """Return the value of an unsigned LEB128 varint, and the position after it; None if the data ends inside it.

    Raises:
        UpstreamError: With CAR_MALFORMED, if the value is zero, too long, or not in its shortest form.
    """
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


def _check_unsupported_cid(data: bytes, start: int, end: int) -> None:
    """Raise UpstreamError with CAR_MALFORMED unless the section begins with a CID of any CIDv1 form."""
    size = link_size(data, start)
    if size is None or start + size > end:
        raise UpstreamError(Rejection.CAR_MALFORMED, "a section without a CID")
