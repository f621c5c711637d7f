"""CAR version 1, split into blocks whose hashes hold (spec §3.5).

Nothing about order is trusted, and nothing but the hash about content. A file has no total length: one that was
cut between two blocks splits well, so only a walk of the tree proves an export whole.
"""

from collections.abc import Iterator
from hashlib import sha256
from typing import Any

from indexer.atproto.cbor import CborError, Link, decode_canonical
from indexer.atproto.cid import DAG_CBOR, RAW, SIZE, link_size
from indexer.atproto.limits import Limits
from indexer.errors import UpstreamError
from indexer.reasons import Rejection

_VARINT_BYTES = 9
# The header with one root of the usual form, before its hash and behind it: nearly every file has it.
_USUAL_START = b"\x3a\xa2\x65roots\x81\xd8\x2a\x58\x25\0" + DAG_CBOR
_USUAL_END = b"\x67version\x01"


def split_car(data: bytes, limits: Limits, *, max_bytes: int) -> tuple[list[bytes], dict[bytes, bytes]]:
    """A whole CAR at once: its roots and its blocks by CID, every one hashed. Raises `UpstreamError`.

    Blocks under CIDs of another kind than the protocol's are left out: they can't be checked, so not used.
    """
    if len(data) > max_bytes:
        raise UpstreamError(Rejection.BLOCKS_TOO_LARGE, f"{len(data)} bytes")
    roots, at = _read_header(data, limits)
    blocks: dict[bytes, bytes] = {}
    end = len(data)
    while at < end:
        size, at = _read_varint(data, at)
        stop = at + size
        if stop > end:
            raise UpstreamError(Rejection.CAR_MALFORMED, "cut inside a block")
        cid = data[at : at + SIZE]
        if size >= SIZE and cid.startswith((DAG_CBOR, RAW)):
            block = data[at + SIZE : stop]
            if sha256(block).digest() != cid[4:]:
                raise UpstreamError(Rejection.BLOCK_HASH_MISMATCH, cid.hex())
            blocks[cid] = block
        else:
            _check_foreign(data, at, stop)
        at = stop
    return roots, blocks


class CarReader:
    """A push parser for exports: `feed` it chunks cut anywhere, `close` it at the end.

    Holds no more than the section that is being read. Raises `UpstreamError` for what `split_car` refuses, and for
    more bytes or blocks than the limits allow.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._buffer = bytearray()
        self._offset = 0  # of the buffer's first byte in the file
        self._blocks = 0
        self.roots: list[bytes] = []

    def feed(self, chunk: bytes) -> Iterator[tuple[bytes, bytes, int]]:
        """(CID, block, offset of the block's first byte in the file) for each block that `chunk` completes.

        Parses as it is iterated, so it has to be exhausted before the next chunk.
        """
        self._buffer += chunk
        if self._offset + len(self._buffer) > self._limits.repo_bytes:
            raise UpstreamError(Rejection.CAR_MALFORMED, f"over {self._limits.repo_bytes} bytes")
        at = 0
        if not self.roots:
            header = self._header()
            if header is None:
                return
            self.roots, at = header
        while (section := self._section(at)) is not None:
            start, stop = section
            found = self._block(start, stop)
            if found is not None:
                yield *found, self._offset + start + SIZE
            at = stop
        self._offset += at
        del self._buffer[:at]

    def close(self) -> None:
        """The file ends here."""
        if self._buffer or not self.roots:
            raise UpstreamError(Rejection.CAR_MALFORMED, "cut inside a block")

    def _header(self) -> tuple[list[bytes], int] | None:
        head = _try_varint(self._buffer, 0)
        if head is None:
            return None
        size, at = head
        if size > self._limits.car_header_bytes:
            raise UpstreamError(Rejection.CAR_MALFORMED, f"a header of {size} bytes")
        return _read_header(bytes(self._buffer[: at + size]), self._limits) if len(self._buffer) >= at + size else None

    def _section(self, at: int) -> tuple[int, int] | None:
        head = _try_varint(self._buffer, at)
        if head is None:
            return None
        size, start = head
        if size > self._limits.block_bytes + SIZE:
            raise UpstreamError(Rejection.CAR_MALFORMED, f"a block of {size} bytes")
        return (start, start + size) if start + size <= len(self._buffer) else None

    def _block(self, start: int, stop: int) -> tuple[bytes, bytes] | None:
        self._blocks += 1
        if self._blocks > self._limits.repo_blocks:
            raise UpstreamError(Rejection.CAR_MALFORMED, f"over {self._limits.repo_blocks} blocks")
        section = bytes(self._buffer[start:stop])
        cid = section[:SIZE]
        if len(section) < SIZE or not cid.startswith((DAG_CBOR, RAW)):
            _check_foreign(section, 0, len(section))
            return None
        block = section[SIZE:]
        if sha256(block).digest() != cid[4:]:
            raise UpstreamError(Rejection.BLOCK_HASH_MISMATCH, cid.hex())
        return cid, block


def _read_header(data: bytes, limits: Limits) -> tuple[list[bytes], int]:
    """The roots, and where the first section begins."""
    if data.startswith(_USUAL_START) and data[50:59] == _USUAL_END:
        return [data[14:50]], 59
    size, at = _read_varint(data, 0)
    if size > limits.car_header_bytes or at + size > len(data):
        raise UpstreamError(Rejection.CAR_MALFORMED, f"a header of {size} bytes")
    try:
        header: Any = decode_canonical(data[at : at + size])
    except CborError as error:
        raise UpstreamError(Rejection.CAR_MALFORMED, f"header: {error}") from None
    version = header.get("version") if isinstance(header, dict) else None
    if type(version) is not int or version != 1:  # True == 1.0 == 1 in Python, and not in CBOR
        raise UpstreamError(Rejection.CAR_MALFORMED, "not CAR version 1")
    roots = header.get("roots")
    if not isinstance(roots, list) or not roots or not all(isinstance(root, Link) for root in roots):
        raise UpstreamError(Rejection.CAR_MALFORMED, "no roots")
    return [bytes(root) for root in roots], at + size


def _read_varint(data: bytes | bytearray, at: int) -> tuple[int, int]:
    """(value, where it ends); raises `UpstreamError` at the end of the data, too."""
    second = data[at + 1 : at + 2]
    if b"\0" < second < b"\x80" and data[at] >= 0x80:  # noqa: PLR2004 - two bytes, as nearly every block has them
        return data[at] & 0x7F | second[0] << 7, at + 2
    found = _try_varint(data, at)
    if found is None:
        raise UpstreamError(Rejection.CAR_MALFORMED, "cut inside a length")
    return found


def _try_varint(data: bytes | bytearray, at: int) -> tuple[int, int] | None:
    """An unsigned LEB128 in its shortest form; None if the data ends inside it."""
    value = shift = 0
    for position in range(at, min(at + _VARINT_BYTES, len(data))):
        byte = data[position]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:  # noqa: PLR2004
            if value == 0 or (byte == 0 and position > at):
                raise UpstreamError(Rejection.CAR_MALFORMED, "a length of zero, or not in its shortest form")
            return value, position + 1
        shift += 7
    if len(data) - at >= _VARINT_BYTES:
        raise UpstreamError(Rejection.CAR_MALFORMED, "a length of too many bytes")
    return None


def _check_foreign(data: bytes, at: int, stop: int) -> None:
    """A section under a CID that isn't ours to check must still begin with one."""
    size = link_size(data, at)
    if size is None or at + size > stop:
        raise UpstreamError(Rejection.CAR_MALFORMED, "a section without a CID")
