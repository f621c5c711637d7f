"""`indexer inspect`: whether a file is a whole, well-formed export of a repository, and what is in it. Offline."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir
from typing import NamedTuple

from indexer.atproto.cbor import explain
from indexer.atproto.commit import Commit, decode_commit
from indexer.atproto.crypto import PublicKey
from indexer.atproto.limits import Limits
from indexer.atproto.mst import leaves, walk
from indexer.atproto.mst.walk import BlockOf
from indexer.atproto.record import Problem, decode_record
from indexer.atproto.syntax import split_path
from indexer.errors import UpstreamError
from indexer.pds import Spool
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
    block_of: BlockOf
    limits: Limits

    def records(self) -> Iterator[Listed]:
        """In path order."""
        for path, cid in leaves(self.block_of, self.commit.data):
            yield Listed(path.decode(), cid, self._problem(path.decode(), self.block_of(cid)))

    def _problem(self, path: str, block: bytes | None) -> str:
        if block is None:
            return Problem.MISSING
        problem = decode_record(block, split_path(path)[0], self.limits).problem
        return f"{problem}: {explain(block)}" if problem is Problem.NOT_DAG_CBOR else problem or ""


@asynccontextmanager
async def open_export(file: Path, key: PublicKey | None, limits: Limits) -> AsyncIterator[Export]:
    """Reads and proves a CAR file; memory hardly depends on its size.

    Raises OSError, `UpstreamError` with the rule that the file breaks, `UnavailableError` if it is not whole.
    """
    with Spool(Path(gettempdir()), limits) as spool:
        await spool.fill(_chunks(file))
        blocks = _Blocks(spool)
        try:
            export = _prove(blocks, spool.root, key, limits)
        except UpstreamError as error:
            diagnosis = explain(blocks.last) if blocks.last else ""
            raise UpstreamError(error.reason, "; ".join(filter(None, (error.detail, diagnosis)))) from None
        yield export


async def _chunks(file: Path) -> AsyncIterator[bytes]:
    with file.open("rb") as opened:
        while chunk := opened.read(_CHUNK):
            yield chunk


class _Blocks:
    """A spool that remembers the block asked for last: the one that breaks a rule, when one does."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self.last = b""

    def get(self, cid: bytes) -> bytes | None:
        block = self._spool.block(cid)
        if block is not None:
            self.last = block
        return block


def _prove(blocks: _Blocks, root: bytes, key: PublicKey | None, limits: Limits) -> Export:
    block = blocks.get(root)
    if block is None:
        raise UpstreamError(Rejection.COMMIT_MISSING)
    commit = decode_commit(block, root)
    signed = key.verify(commit.sig, commit.unsigned) if key else None
    if signed is False:
        raise UpstreamError(Rejection.SIGNATURE_INVALID)
    count = 0
    for path, _ in walk(blocks.get, commit.data, limits):
        split_path(path.decode(errors="replace"))
        count += 1
    return Export(commit, signed, count, blocks.get, limits)
