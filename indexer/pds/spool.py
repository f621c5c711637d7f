"""An export on disk: blocks by CID, in memory that hardly depends on the repo's size.

The file holds each block once, behind its length (4 bytes, little-endian) and its CID, but for the last ones, which
stay in memory: all of them, mostly. It has no name, so the system removes it when it is closed, by a crash too. The
index holds 12 bytes a slot: part of a hash, and a place in the file, where the whole CID is compared. The file is read
with `pread` and not through a mapping, so its pages never count as ours but for a few: hosts put blocks that are read
one after the other near to each other, and each call would give the interpreter's lock away.
"""

import os
from array import array
from collections.abc import AsyncIterable, Iterator
from functools import lru_cache, partial
from io import FileIO
from pathlib import Path
from tempfile import TemporaryFile
from types import TracebackType
from typing import Literal, Self

from indexer.atproto.car import CarReader
from indexer.atproto.cid import SIZE
from indexer.atproto.limits import Limits
from indexer.errors import UnavailableError, UpstreamError
from indexer.reasons import FetchFailure

_LENGTH = 4
_HEAD = _LENGTH + SIZE
_PAGE = 1 << 14
_PAGES = 1 << 6
_WRITE_BYTES = 1 << 20
_PARTS = 1 << 8
_FIRST_SLOTS = 1 << 4
_HASH = (1 << 40) - 1  # the bits used: 8 for the part, 32 within it


class Spool:
    """One export. `fill` it once, then ask for any `block`, from any thread; a context manager that deletes it.

    Raises `UnavailableError(SPOOL_FULL)` if the directory takes no file.
    """

    def __init__(self, directory: Path, limits: Limits) -> None:
        try:
            self._file = TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115 - `close` closes it
        except OSError as error:
            raise UnavailableError(FetchFailure.SPOOL_FULL, str(error)) from error
        self._reader = CarReader(limits)
        self._index = _Index()
        self._pending = bytearray()
        self._written = 0
        self._page = lru_cache(_PAGES)(partial(_read_page, self._file))

    async def fill(self, chunks: AsyncIterable[bytes]) -> None:
        """Takes in a whole CAR file, every block of it hashed.

        Raises `UpstreamError` for one that breaks a rule, `UnavailableError` for one that was cut inside a block or
        that the disk has no room for, and whatever `chunks` raises.
        """
        async for chunk in chunks:
            self._take(chunk)
        try:
            self._reader.close()
        except UpstreamError as error:
            raise UnavailableError(FetchFailure.EXPORT_INCOMPLETE, error.detail) from None

    @property
    def root(self) -> bytes:
        """The CID of the commit."""
        return self._reader.roots[0]

    @property
    def size(self) -> int:
        """Bytes of blocks, with what is put before them."""
        return self._written + len(self._pending)

    def block(self, cid: bytes) -> bytes | None:
        """The block's bytes; None if the export lacks it."""
        for place in self._index.candidates(cid):
            head = self._read(place - _LENGTH, _HEAD)
            if head[_LENGTH:] == cid:
                return self._read(place + SIZE, int.from_bytes(head[:_LENGTH], "little"))
        return None

    def close(self) -> None:
        self._file.close()

    def __len__(self) -> int:
        """Blocks."""
        return self._index.count

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _take(self, chunk: bytes) -> None:
        for cid, block, _ in self._reader.feed(chunk):
            if self._holds(cid):
                continue
            self._pending += len(block).to_bytes(_LENGTH, "little")
            self._index.add(cid, self._written + len(self._pending))
            self._pending += cid
            self._pending += block
        if len(self._pending) >= _WRITE_BYTES:
            self._flush()

    def _holds(self, cid: bytes) -> bool:
        return any(self._read(place, SIZE) == cid for place in self._index.candidates(cid))

    def _read(self, place: int, size: int) -> bytes:
        """No block lies in both places."""
        at = place - self._written
        if at >= 0:
            return bytes(self._pending[at : at + size])
        number, start = divmod(place, _PAGE)
        stop = start + size
        if stop <= _PAGE:
            return self._page(number)[start:stop]
        return b"".join(map(self._page, range(number, number + -(-stop // _PAGE))))[start:stop]

    def _flush(self) -> None:
        try:
            with memoryview(self._pending) as pending:
                done = 0
                while done < len(pending):
                    done += self._file.write(pending[done:])
        except OSError as error:
            raise UnavailableError(FetchFailure.SPOOL_FULL, str(error)) from error
        self._written += done
        self._pending.clear()
        self._page.cache_clear()  # the last page was not full


def _read_page(file: FileIO, number: int) -> bytes:
    return os.pread(file.fileno(), _PAGE, number * _PAGE)


class _Index:
    """Places by CID, in parts, so that none of them takes long to grow: the event loop is waiting.

    The hash is Python's own, keyed anew in each process: nobody can choose CIDs that crowd together in it.
    """

    __slots__ = ("_parts", "count")

    def __init__(self) -> None:
        self._parts = [_Part() for _ in range(_PARTS)]
        self.count = 0

    def candidates(self, cid: bytes) -> Iterator[int]:
        """Places where this block may be: hardly ever more than one."""
        rest, part = divmod(hash(cid) & _HASH, _PARTS)
        return self._parts[part].candidates(rest)

    def add(self, cid: bytes, place: int) -> None:
        """`place` is above 0."""
        self.count += 1
        rest, part = divmod(hash(cid) & _HASH, _PARTS)
        self._parts[part].add(rest, place)


class _Part:
    """An open-addressing table, at most two thirds full; a place of 0 is an empty slot."""

    __slots__ = ("_count", "_hashes", "_places")

    def __init__(self) -> None:
        self._hashes = _zeros("I", _FIRST_SLOTS)
        self._places = _zeros("Q", _FIRST_SLOTS)
        self._count = 0

    def candidates(self, hash_: int) -> Iterator[int]:
        places, hashes = self._places, self._hashes
        mask = len(places) - 1
        slot = hash_ & mask
        while place := places[slot]:
            if hashes[slot] == hash_:
                yield place
            slot = (slot + 1) & mask

    def add(self, hash_: int, place: int) -> None:
        self._count += 1
        if 3 * self._count > 2 * len(self._places):
            self._grow()
        self._put(hash_, place)

    def _put(self, hash_: int, place: int) -> None:
        places = self._places
        mask = len(places) - 1
        slot = hash_ & mask
        while places[slot]:
            slot = (slot + 1) & mask
        places[slot] = place
        self._hashes[slot] = hash_

    def _grow(self) -> None:
        hashes, places = self._hashes, self._places
        self._hashes = _zeros("I", 2 * len(hashes))
        self._places = _zeros("Q", 2 * len(places))
        for hash_, place in zip(hashes, places, strict=True):
            if place:
                self._put(hash_, place)


def _zeros(typecode: Literal["I", "Q"], count: int) -> "array[int]":
    return array(typecode, [0]) * count
