"""`indexer inspect`: whether a file is a whole, well-formed export of a repository, and what is in it. Offline."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from indexer.atproto.car import CarReader
from indexer.atproto.cbor import explain
from indexer.atproto.commit import Commit, decode_commit
from indexer.atproto.crypto import PublicKey
from indexer.atproto.limits import Limits
from indexer.atproto.mst import leaves, walk
from indexer.atproto.record import Problem, decode_record
from indexer.atproto.syntax import split_path
from indexer.errors import UpstreamError
from indexer.reasons import Rejection

_CHUNK = 1 << 18


class Listed(NamedTuple):
    """A record of an export; `problem` is what is unusual about its value, in words, or ""."""

    path: str
    cid: bytes
    problem: str


@dataclass(frozen=True, slots=True)
class Export:
    """A proven export: the whole tree is there. Whether it is signed only a key can tell (`signed` is None without)."""

    commit: Commit
    signed: bool | None
    count: int
    missing: int
    _blocks: "_Blocks"
    _limits: Limits

    def records(self) -> Iterator[Listed]:
        """In path order."""
        for path, cid in leaves(self._blocks.get, self.commit.data):
            yield Listed(path.decode(), cid, self._problem(path, cid))

    def _problem(self, path: bytes, cid: bytes) -> str:
        block = self._blocks.get(cid)
        if block is None:
            return Problem.MISSING
        problem = decode_record(block, split_path(path.decode())[0], self._limits).problem
        return (problem or "") if problem is not Problem.NOT_DAG_CBOR else f"{problem}: {explain(block)}"


@contextmanager
def open_export(file: Path, key: PublicKey | None, limits: Limits) -> Iterator[Export]:
    """Reads and proves a CAR file; memory doesn't depend on its size.

    Raises OSError, `UpstreamError` with the rule that it breaks, `MissingNodeError` for a tree that is not whole.
    """
    with file.open("rb") as opened, closing(sqlite3.connect("")) as index:
        blocks = _Blocks(opened, index)
        root = blocks.read(limits)
        try:
            export = _prove(blocks, root, key, limits)
        except UpstreamError as error:
            diagnosis = explain(blocks.last) if blocks.last else ""
            raise UpstreamError(error.reason, "; ".join(filter(None, (error.detail, diagnosis)))) from None
        yield export


def _prove(blocks: "_Blocks", root: bytes, key: PublicKey | None, limits: Limits) -> Export:
    block = blocks.get(root)
    if block is None:
        raise UpstreamError(Rejection.COMMIT_MISSING)
    commit = decode_commit(block, root)
    signed = key.verify(commit.sig, commit.unsigned) if key else None
    if signed is False:
        raise UpstreamError(Rejection.SIGNATURE_INVALID)
    count = missing = 0
    for path, cid in walk(blocks.get, commit.data, limits):
        split_path(path.decode(errors="replace"))
        count += 1
        missing += cid not in blocks
    return Export(commit, signed, count, missing, blocks, limits)


class _Blocks:
    """The blocks of a file by CID. Their places are in a database without a name, which lies on disk when it grows."""

    def __init__(self, file: BinaryIO, index: sqlite3.Connection) -> None:
        self._file = file
        self._index = index
        self.last = b""  # the block read last: the one that breaks a rule, when one does

    def read(self, limits: Limits) -> bytes:
        """Reads the file once, hashing every block; gives the root."""
        self._index.execute("create table block (cid blob primary key, at integer, size integer) without rowid")
        reader = CarReader(limits)
        while chunk := self._file.read(_CHUNK):
            self._index.executemany(
                "insert or ignore into block values (?, ?, ?)",
                ((cid, at, len(block)) for cid, block, at in reader.feed(chunk)),
            )
        reader.close()
        return reader.roots[0]

    def get(self, cid: bytes) -> bytes | None:
        place = self._index.execute("select at, size from block where cid = ?", (cid,)).fetchone()
        if place is None:
            return None
        self._file.seek(place[0])
        self.last = self._file.read(place[1])
        return self.last

    def __contains__(self, cid: bytes) -> bool:
        return self._index.execute("select 1 from block where cid = ?", (cid,)).fetchone() is not None
