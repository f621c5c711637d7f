"""Exports that a hostile or broken host may answer with, made of the account's true one and its key."""

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import count, islice
from typing import Any, NamedTuple

from indexer.atproto.cid import cid_of
from indexer.atproto.crypto import PrivateKey
from indexer.localnet import dag_cbor
from indexer.localnet.repo import Repo, Write, car, car_header, car_section
from indexer.localnet.tree import Node, height

POST = "app.bsky.feed.post"
RECORD = dag_cbor.encode({"$type": POST, "text": "of no account"})
FLOOR = 3  # of the trees that are bombs: keys that high are soon found
CAR_V2 = bytes.fromhex("0aa16776657273696f6e02") + bytes(40)


class Signed(NamedTuple):
    """What a host has of an account."""

    repo: Repo
    key: PrivateKey

    @property
    def blocks(self) -> dict[bytes, bytes]:
        """Of the true export, in its order."""
        repo = self.repo
        blocks = {repo.head.cid: repo.head.block}
        for item in repo.tree.walk():
            block = item.block if isinstance(item, Node) else repo.records[item]
            blocks[cid_of(block)] = block
        return blocks

    @property
    def sections(self) -> list[bytes]:
        return list(self.repo.export())

    def commit(self, data: bytes = b"", **changes: Any) -> bytes:
        """A commit of any tree and any fields, signed."""
        fields = {"did": self.repo.did, "rev": self.repo.head.rev, "data": data or self.repo.head.data}
        fields |= {"prev": None, "version": 3} | changes
        return dag_cbor.encode(fields | {"sig": self.key.sign(dag_cbor.encode(fields))})

    def export(self, root: bytes, *others: bytes) -> bytes:
        """Of a tree made of these nodes, its record with it, all of it signed."""
        return blocks_car(self.commit(cid_of(root)), root, *others, RECORD)


def blocks_car(*blocks: bytes) -> bytes:
    return car({cid_of(block): block for block in blocks})


def keys(layer: int, after: str = "") -> Iterator[str]:
    """Keys of that layer, in ascending order."""
    numbered = (f"{POST}/{after}{number:07}" for number in count())
    return (key for key in numbered if height(key) == layer)


def entry(key: str, shared: int = 0, tree: bytes | None = None, value: bytes | None = None) -> dict[str, Any]:
    return {"k": key.encode()[shared:], "p": shared, "t": tree, "v": value or cid_of(RECORD)}


def node(*entries: Mapping[str, Any], left: bytes | None = None) -> bytes:
    return dag_cbor.encode({"e": list(entries), "l": left})


def packed(names: list[str], trees: Mapping[int, bytes] | None = None, left: bytes | None = None) -> bytes:
    """A node of these keys, each with as long a prefix as it shares; `trees` by place."""
    entries, previous = [], ""
    for place, name in enumerate(names):
        shared = next((at for at, (a, b) in enumerate(zip(previous, name, strict=False)) if a != b), len(previous))
        entries.append(entry(name, shared, (trees or {}).get(place)))
        previous = name
    return node(*entries, left=left)


def chain(layers: int) -> list[bytes]:
    """So many nodes without a key, one below the other, the deepest last."""
    found, below = [], packed(list(islice(keys(0), 1)))
    for _ in range(layers):
        found.append(below)
        below = node(left=cid_of(below))
    return [below, *reversed(found)]


@lru_cache
def fan_out(wide: int = 6) -> tuple[bytes, ...]:
    """Nodes of so many keys, and the same subtree in every gap between them: a few blocks, and a forest to walk."""
    blocks = [packed(list(islice(keys(0), wide)))]
    for layer in range(1, FLOOR + 1):
        below = cid_of(blocks[0])
        blocks.insert(0, packed(list(islice(keys(layer), wide)), dict.fromkeys(range(wide), below), below))
    return tuple(blocks)


def hidden_cycle(host: Signed) -> bytes:
    """A node that is its own subtree, which no hash allows: so the block's CID is another one's."""
    name = next(keys(1))
    root = node(entry(name, tree=cid_of(b"itself")))
    commit = host.commit(cid_of(root))
    return car({cid_of(commit): commit, cid_of(root): root, cid_of(b"itself"): root})


def flipped(host: Signed, place: int) -> bytes:
    """The true export with one bit turned, in the middle of its section of that place."""
    sections = host.sections
    section = bytearray(sections[place])
    section[-len(section) // 4] ^= 1
    sections[place] = bytes(section)
    return b"".join(sections)


def of_another(host: Signed, did: str) -> bytes:
    """Signed by another account's key, which says that it is of `did`."""
    key = PrivateKey.from_seed("k256", b"another")
    repo = Repo(did, key, host.repo.head.rev)
    repo.write([Write.create(f"{POST}/a", RECORD)], key, host.repo.head.rev)
    return b"".join(repo.export())


def two() -> tuple[str, str]:
    first, second = islice(keys(0), 2)
    return first, second


def unsorted(host: Signed) -> bytes:
    first, second = two()
    return host.export(packed([second, first]))


def doubled(host: Signed) -> bytes:
    first, _ = two()
    return host.export(node(entry(first), entry(first, len(first) - 1)))


def overflowing(host: Signed) -> bytes:
    first, second = two()
    return host.export(node(entry(first), entry(second, len(second) - 1) | {"p": len(first) + 200}))


def unpacked(host: Signed) -> bytes:
    first, second = two()
    return host.export(node(entry(first), entry(second, 1)))


def on_a_wrong_layer(host: Signed) -> bytes:
    low, high = next(keys(0)), next(keys(1))
    return host.export(packed(sorted([low, high])))


def skipping_a_layer(host: Signed) -> bytes:
    below = packed(list(islice(keys(0), 2)))
    return host.export(node(entry(next(keys(2))), left=cid_of(below)), below)


def beyond_its_neighbour(host: Signed) -> bytes:
    below = packed([next(keys(0, after="z"))])
    return host.export(node(entry(next(keys(1))), left=cid_of(below)), below)


def keyless_below(host: Signed, layers: int) -> bytes:
    way = chain(layers)
    return host.export(node(entry(next(keys(1, after="z"))), left=cid_of(way[0])), *way)


def wide(host: Signed, entries: int) -> bytes:
    return host.export(packed(list(islice(keys(0), entries))))


BROKEN: dict[str, tuple[Callable[[Signed], bytes], str]] = {
    "nothing": (lambda _: b"", "export-incomplete: cut inside a block"),
    "cut inside the header": (lambda host: host.sections[0][:20], "export-incomplete: cut inside a block"),
    "cut behind the header": (lambda host: host.sections[0], "export-rejected: commit-missing"),
    "cut inside a length": (
        lambda host: b"".join(host.sections[:3]) + b"\x80",
        "export-incomplete: cut inside a block",
    ),
    "cut inside a CID": (lambda host: b"".join(host.sections[:3]) + host.sections[3][:20], "export-incomplete: cut"),
    "cut inside a block": (lambda host: b"".join(host.sections)[:-1], "export-incomplete: cut inside a block"),
    "cut behind the commit": (lambda host: b"".join(host.sections[:2]), "export-incomplete: no node"),
    "cut behind the root": (lambda host: b"".join(host.sections[:3]), "export-incomplete: no node"),
    "cut behind half of it": (
        lambda host: b"".join(host.sections[: len(host.sections) // 2]),
        "export-incomplete: no node",
    ),
    "without its last block": (
        lambda host: b"".join(host.sections[:-1]),
        "export-lacks-records: 1 records",
    ),
    "a page": (
        lambda _: b"<!DOCTYPE html><html><body>" + b"Sign in, please. " * 100,
        "export-rejected: car-malformed",
    ),
    "zeros": (lambda _: bytes(1_000), "export-rejected: car-malformed"),
    "version 2 of CAR": (lambda _: CAR_V2, "export-rejected: car-malformed: not CAR version 1"),
    "a header of 2 GiB": (
        lambda _: b"\xff\xff\xff\xff\x07" + bytes(100),
        "export-rejected: car-malformed: a header of",
    ),
    "a header without roots": (
        lambda _: b"\x11" + dag_cbor.encode({"roots": [], "version": 1}),
        "export-rejected: car-malformed: no roots",
    ),
    "a root that is not there": (
        lambda host: car_header(cid_of(b"?")) + b"".join(host.sections[1:]),
        "export-rejected: commit-missing",
    ),
    "a root that is no commit": (
        lambda host: car_header(host.repo.head.data) + b"".join(host.sections[1:]),
        "export-rejected: commit-malformed",
    ),
    "a section of no bytes": (
        lambda host: b"".join(host.sections) + b"\x00",
        "export-rejected: car-malformed: a length of",
    ),
    "a length not in its shortest form": (
        lambda host: b"".join(host.sections) + b"\xa5\x00" + bytes(37),
        "export-rejected: car-malformed: a length of",
    ),
    "a length without an end": (
        lambda host: b"".join(host.sections) + b"\x80" * 9,
        "export-rejected: car-malformed: a length of too many",
    ),
    "a section without a CID": (
        lambda host: b"".join(host.sections) + b"\x28" + b"\xff" * 40,
        "export-rejected: car-malformed: a section without",
    ),
    "a block of 2 GiB": (
        lambda host: b"".join(host.sections) + b"\xff\xff\xff\xff\x07" + bytes(100_000),
        "export-rejected: car-malformed: a block of",
    ),
    "a block of 3 MiB": (
        lambda host: b"".join(host.sections) + car_section(cid_of(bytes(3 << 20)), bytes(3 << 20)),
        "export-rejected: car-malformed: a block of",
    ),
    "a bit turned in the commit": (lambda host: flipped(host, 1), "export-rejected: block-hash-mismatch"),
    "a bit turned in a node": (lambda host: flipped(host, 2), "export-rejected: block-hash-mismatch"),
    "a bit turned in a record": (lambda host: flipped(host, -1), "export-rejected: block-hash-mismatch"),
    "a cycle": (hidden_cycle, "export-rejected: block-hash-mismatch"),
    "another account's": (lambda host: of_another(host, "did:plc:" + "b" * 24), "export-rejected: envelope-mismatch"),
    "another key's": (lambda host: of_another(host, host.repo.did), "export-rejected: signature-invalid"),
    "a commit of version 2": (
        lambda host: blocks_car(host.commit(version=2), *host.blocks.values()),
        "export-rejected: commit-malformed",
    ),
    "a commit of the future": (
        lambda host: blocks_car(host.commit(rev="bzzzzzzzzzzzz"), *host.blocks.values()),
        "export-rejected: future-rev",
    ),
    "a commit of 100 kB": (
        lambda host: blocks_car(host.commit(more="x" * 100_000), *host.blocks.values()),
        "export-rejected: commit-malformed",
    ),
    "a tree that is not there": (lambda host: blocks_car(host.commit(cid_of(b"?"))), "export-incomplete: no node"),
    "a tree that is a record": (lambda host: host.export(RECORD), "export-rejected: node-malformed"),
    "a tree of one empty node upon another": (lambda host: host.export(*chain(1)), "export-rejected: node-malformed"),
    "a chain of 5,000 nodes": (lambda host: host.export(*chain(5_000)), "export-rejected: node-malformed"),
    "a chain of 5,000 nodes below a key": (lambda host: keyless_below(host, 5_000), "export-rejected: node-malformed"),
    "a fan of trees": (lambda host: host.export(*fan_out()), "export-rejected: node-malformed"),
    "a node of 1,001 entries": (lambda host: wide(host, 1_001), "export-rejected: node-malformed: 1001 entries"),
    "a node of 20,000 entries": (lambda host: wide(host, 20_000), "export-rejected: node-malformed: 20000 entries"),
    "a node of 100,000 entries": (
        lambda host: host.export(dag_cbor.encode({"e": [entry("a")] * 100_000, "l": None})),
        "export-rejected: car-malformed: a block of",
    ),
    "keys out of order": (unsorted, "export-rejected: node-malformed"),
    "a key twice": (doubled, "export-rejected: node-malformed"),
    "a prefix longer than the key before": (overflowing, "export-rejected: node-malformed"),
    "a prefix that is not the longest": (unpacked, "export-rejected: node-malformed"),
    "a key on a wrong layer": (on_a_wrong_layer, "export-rejected: node-malformed: keys of different heights"),
    "a layer left out": (skipping_a_layer, "export-rejected: node-malformed: a node of layer 0 on layer 1"),
    "a subtree beyond its neighbour": (beyond_its_neighbour, "export-rejected: node-malformed: a subtree reaches"),
    "a field too many": (
        lambda host: host.export(dag_cbor.encode({"e": [], "l": None, "x": 1})),
        "export-rejected: node-malformed",
    ),
}
"""By name: the export of an account at its newest revision, and how `last_error` begins of it."""

TOO_MUCH: dict[str, tuple[Callable[[Signed], bytes], str]] = {
    "40 MiB of nothing": (
        lambda host: b"".join(host.sections) + car_section(cid_of(bytes(2 << 20)), bytes(2 << 20)) * 20,
        "too-large",
    ),
    "20,000 blocks": (
        lambda host: (
            b"".join(host.sections)
            + b"".join(car_section(cid_of(b"%d" % number), b"%d" % number) for number in range(20_000))
        ),
        "export-rejected: car-malformed: over 20000 blocks",
    ),
}
"""Likewise, where an export may have 20 MB and 20,000 blocks; compressed, the first has a thousandth of its size."""

ODD: dict[str, Callable[[Signed], bytes]] = {
    "every block twice": lambda host: b"".join(host.sections) + b"".join(host.sections[1:]),
    "backwards": lambda host: host.sections[0] + b"".join(reversed(host.sections[1:])),
    "blocks of no tree": TOO_MUCH["20,000 blocks"][0],
    "roots of no tree": lambda host: _header([host.repo.head.cid, cid_of(RECORD)]) + b"".join(host.sections[1:]),
    "blocks of other kinds": lambda host: (
        b"".join(host.sections) + car_section(b"\x01\x70\x12\x20" + bytes(32), b"not to be checked")
    ),
}
"""By name: what is strange and no fault."""


def _header(roots: list[bytes]) -> bytes:
    header = dag_cbor.encode({"roots": roots, "version": 1})
    return bytes([len(header)]) + header
