"""A repository as its host keeps it: records, tree, signed commits, and their CAR forms."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Any, Literal, Self

from indexer.atproto import cid
from indexer.atproto.crypto import PrivateKey
from indexer.localnet import dag_cbor
from indexer.localnet.tree import Node, Tree

Record = Mapping[str, Any] | bytes
"""A record as a map, in which a link is its 36 bytes; or a record's DAG-CBOR, right or wrong, as it is."""


@dataclass(frozen=True, slots=True)
class Write:
    """One write of a batch: `block` is the record's DAG-CBOR, None for a delete."""

    action: Literal["create", "update", "delete"]
    path: str
    block: bytes | None

    @classmethod
    def create(cls, path: str, record: Record) -> Self:
        return cls("create", path, _encode(record))

    @classmethod
    def update(cls, path: str, record: Record) -> Self:
        return cls("update", path, _encode(record))

    @classmethod
    def delete(cls, path: str) -> Self:
        return cls("delete", path, None)


@dataclass(frozen=True, slots=True)
class Commit:
    """A signed commit: `block` holds all the rest, and `cid` names it."""

    rev: str
    data: bytes
    cid: bytes
    block: bytes


@dataclass(frozen=True, slots=True)
class Change:
    """What a `#commit` message says of one commit: fields as in the lexicon, `blocks` a CAR slice."""

    commit: Commit
    since: str | None
    prev_data: bytes | None
    ops: list[dict[str, Any]]
    blocks: bytes


class Repo:
    """The repository of `did`. `first` is the change that made it: a commit of the empty tree.

    A commit replaces `records` (path to DAG-CBOR) and everything else, so an export goes on with what it began.
    """

    def __init__(self, did: str, key: PrivateKey, rev: str) -> None:
        self.did = did
        self.records: dict[str, bytes] = {}
        self.tree = Tree({})
        self._cids: dict[str, bytes] = {}
        self.head = _sign(did, rev, self.tree.data, key)
        blocks = {self.head.cid: self.head.block, **self.tree.blocks()}
        self.first = Change(self.head, None, None, [], car(blocks))

    def write(self, writes: Sequence[Write], key: PrivateKey, rev: str) -> Change:
        """Applies `writes` in order as one commit; they may name a path more than once, or be none at all.

        As at a reference host, every op's `prev` is from before the batch. The slice holds the records written,
        the new nodes, and those that undoing the ops needs.
        Raises KeyError for a write that its path's state doesn't allow, and changes nothing.
        """
        before, old, records, cids = self.head, self._cids, dict(self.records), dict(self._cids)
        ops = []
        for write in writes:
            _apply(write, records, cids)
            op: dict[str, Any] = {"action": write.action, "path": write.path, "cid": cids.get(write.path)}
            ops.append(op | {"prev": old[write.path]} if write.path in old else op)
        self.records, self._cids, self.tree = records, cids, Tree(cids)
        self.head = _sign(self.did, rev, self.tree.data, key)
        blocks = {self.head.cid: self.head.block}
        for write in writes:
            blocks |= self.tree.proof(write.path)
        blocks |= {cid.cid_of(write.block): write.block for write in writes if write.block is not None}
        return Change(self.head, before.rev, before.data, ops, car(blocks))

    def load(self, records: Mapping[str, bytes], key: PrivateKey, rev: str) -> None:
        """Replaces all records (path to DAG-CBOR) by one commit that nobody hears of, as an import does."""
        self.records = dict(records)
        self._cids = {path: cid.cid_of(block) for path, block in records.items()}
        self.tree = Tree(self._cids)
        self.head = _sign(self.did, rev, self.tree.data, key)

    def sync(self) -> bytes:
        """The CAR of a `#sync` message: the present commit alone."""
        return car({self.head.cid: self.head.block})

    def export(self) -> Iterator[bytes]:
        """The whole repository as a CAR, one section at a time, in streamable order."""
        head, tree, records, cids = self.head, self.tree, self.records, self._cids
        yield car_header(head.cid)
        yield car_section(head.cid, head.block)
        for item in tree.walk():
            if isinstance(item, Node):
                yield car_section(item.cid, item.block)
            else:
                yield car_section(cids[item], records[item])


def _apply(write: Write, records: dict[str, bytes], cids: dict[str, bytes]) -> None:
    if (write.path in records) == (write.action == "create"):
        raise KeyError(f"{write.action} of {write.path}")
    if write.block is None:
        del records[write.path], cids[write.path]
    else:
        records[write.path], cids[write.path] = write.block, cid.cid_of(write.block)


def _encode(record: Record) -> bytes:
    return record if isinstance(record, bytes) else dag_cbor.encode(dict(record))


def _sign(did: str, rev: str, data: bytes, key: PrivateKey) -> Commit:
    fields: dict[str, Any] = {"did": did, "rev": rev, "data": data, "prev": None, "version": 3}
    block = dag_cbor.encode(fields | {"sig": key.sign(dag_cbor.encode(fields))})
    return Commit(rev, data, cid.cid_of(block), block)


def car(blocks: Mapping[bytes, bytes]) -> bytes:
    """A CAR of `blocks` (CID to block), whose root is the first."""
    return car_header(next(iter(blocks))) + b"".join(starmap(car_section, blocks.items()))


def car_header(root: bytes) -> bytes:
    header = dag_cbor.encode({"roots": [root], "version": 1})
    return _varint(len(header)) + header


def car_section(block_cid: bytes, block: bytes) -> bytes:
    return _varint(len(block_cid) + len(block)) + block_cid + block


def _varint(number: int) -> bytes:
    """Unsigned LEB128."""
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + _varint(rest) if rest else bytes([low])
