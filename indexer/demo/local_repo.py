"""A repo of the local network: TIDs, records, tree, signed commits, and their CAR files."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import starmap
from typing import Any, Literal, Self

from indexer.atproto import cid
from indexer.atproto.crypto import PrivateKey
from indexer.atproto.syntax import tid_of
from indexer.demo import dag_cbor
from indexer.demo.reference_tree import ReferenceNode, ReferenceTree


class TidClock:
    """Makes TIDs and datetimes from `micros`, which returns microseconds since 1970 (default: the system clock)."""

    def __init__(self, micros: Callable[[], int] = lambda: time.time_ns() // 1_000) -> None:
        self._micros = micros
        self._last = 0

    def tid(self) -> str:
        """Return a TID of the current time that is greater than every TID before."""
        self._last = max(self._micros(), self._last + 1)
        return tid_of(self._last)

    def now(self) -> str:
        """Return the current time as an AT Protocol datetime, as in the `time` field of events."""
        moment = datetime.fromtimestamp(self._micros() / 1_000_000, UTC)
        return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


Record = Mapping[str, Any] | bytes
"""A record as a map in which the 36 bytes of a CID are a link, or its DAG-CBOR, which is used without a check."""


@dataclass(frozen=True, slots=True)
class Write:
    """One write of a batch. `block` is the DAG-CBOR of the record; None for a delete."""

    action: Literal["create", "update", "delete"]
    path: str
    block: bytes | None

    @classmethod
    def create(cls, path: str, record: Record) -> Self:
        """Return the creation of a record."""
        return cls("create", path, _encode(record))

    @classmethod
    def update(cls, path: str, record: Record) -> Self:
        """Return the update of a record."""
        return cls("update", path, _encode(record))

    @classmethod
    def delete(cls, path: str) -> Self:
        """Return the deletion of a record."""
        return cls("delete", path, None)


@dataclass(frozen=True, slots=True)
class LocalCommit:
    """A signed commit: `cid` and `block` are its own, `data` is the CID of the root of the tree."""

    rev: str
    data: bytes
    cid: bytes
    block: bytes


@dataclass(frozen=True, slots=True)
class LocalChange:
    """A commit with the fields of its `#commit` event, as in the lexicon. The first one follows no other."""

    commit: LocalCommit
    since: str | None
    prev_data: bytes | None
    ops: list[dict[str, Any]]
    blocks: bytes


class LocalRepo:
    """A repo. It begins with a commit of the empty tree.

    Commits replace the attributes and never change them in place, so a running export is not affected by a commit.

    Attributes:
        records: The DAG-CBOR of the records by path.
        head: The latest commit, whose tree is `tree`.
        first: The first commit and its event.
    """

    def __init__(self, did: str, key: PrivateKey, rev: str) -> None:
        self.did = did
        self.import_records({}, key, rev)
        self.first = LocalChange(self.head, None, None, [], car({self.head.cid: self.head.block, **self.tree.blocks()}))

    def write(self, writes: Sequence[Write], key: PrivateKey, rev: str) -> LocalChange:
        """Apply writes in order as one commit. There may be none, or several for the same path.

        As on a reference PDS, `prev` of every operation is the CID before the batch. The slice contains the written
        records, the new nodes, and the nodes that inverting the operations needs.

        Raises:
            KeyError: A create of an existing path, or an update or delete of a missing one. Nothing is changed.
        """
        before, old, records, cids = self.head, self._cids, dict(self.records), dict(self._cids)
        ops = []
        for write in writes:
            if (write.path in records) == (write.action == "create"):
                raise KeyError(f"{write.action} of {write.path}")
            if write.block is None:
                del records[write.path], cids[write.path]
            else:
                records[write.path], cids[write.path] = write.block, cid.cid_of(write.block)
            op: dict[str, Any] = {"action": write.action, "path": write.path, "cid": cids.get(write.path)}
            ops.append(op | {"prev": old[write.path]} if write.path in old else op)
        self._replace(records, cids, key, rev)
        blocks = {self.head.cid: self.head.block}
        for write in writes:
            blocks |= self.tree.proof(write.path)
        blocks |= {cid.cid_of(write.block): write.block for write in writes if write.block is not None}
        return LocalChange(self.head, before.rev, before.data, ops, car(blocks))

    def import_records(self, records: Mapping[str, bytes], key: PrivateKey, rev: str) -> None:
        """Replace all records (DAG-CBOR by path) in one commit without a `#commit` event, as `importRepo` does."""
        self._replace(dict(records), {path: cid.cid_of(block) for path, block in records.items()}, key, rev)

    def _replace(self, records: dict[str, bytes], cids: dict[str, bytes], key: PrivateKey, rev: str) -> None:
        self.records, self._cids, self.tree = records, cids, ReferenceTree(cids)
        fields: dict[str, Any] = {"did": self.did, "rev": rev, "data": self.tree.data, "prev": None, "version": 3}
        block = dag_cbor.encode(fields | {"sig": key.sign(dag_cbor.encode(fields))})
        self.head = LocalCommit(rev, self.tree.data, cid.cid_of(block), block)

    def sync(self) -> bytes:
        """Return the CAR of a `#sync` event: only the latest commit."""
        return car({self.head.cid: self.head.block})

    def record_proof(self, path: str) -> bytes:
        """Return the CAR of a proof that a record exists, or that it does not: the commit and the nodes of its path."""
        record = {self._cids[path]: self.records[path]} if path in self.records else {}
        return car({self.head.cid: self.head.block, **record, **self.tree.search(path)})

    def blocks(self) -> dict[bytes, bytes]:
        """Return all blocks by CID: the latest commit, its nodes and its records."""
        records = {record: self.records[path] for path, record in self._cids.items()}
        return {self.head.cid: self.head.block, **self.tree.blocks(), **records}

    def export(self) -> Iterator[bytes]:
        """Yield the whole repo as a CAR, one section at a time, in streamable order."""
        head, tree, records, cids = self.head, self.tree, self.records, self._cids
        yield car_header(head.cid)
        yield car_section(head.cid, head.block)
        for item in tree.walk():
            if isinstance(item, ReferenceNode):
                yield car_section(item.cid, item.block)
            else:
                yield car_section(cids[item], records[item])


def _encode(record: Record) -> bytes:
    return record if isinstance(record, bytes) else dag_cbor.encode(dict(record))


def car(blocks: Mapping[bytes, bytes], *, rootless: bool = False) -> bytes:
    """Return a CAR of `blocks` (CID to block). Its root is the first block, unless it is `rootless`."""
    roots = [] if rootless else [next(iter(blocks))]
    return car_header(*roots) + b"".join(starmap(car_section, blocks.items()))


def car_header(*roots: bytes) -> bytes:
    """Return the header of a CAR with these roots."""
    header = dag_cbor.encode({"roots": list(roots), "version": 1})
    return _varint(len(header)) + header


def car_section(block_cid: bytes, block: bytes) -> bytes:
    """Return the section of a CAR with one block."""
    return _varint(len(block_cid) + len(block)) + block_cid + block


def _varint(number: int) -> bytes:
    """Return a number as unsigned LEB128."""
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + _varint(rest) if rest else bytes([low])
