"""Invalid, oversized and unusual exports, made from the real export of an account and its signing key."""

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import count, islice
from typing import Any, NamedTuple

from indexer.atproto.cid import cid_of
from indexer.atproto.crypto import PrivateKey
from indexer.demo import dag_cbor
from indexer.demo.local_repo import LocalRepo, Write, car, car_header, car_section
from indexer.demo.reference_tree import ReferenceNode, height

POST = "app.bsky.feed.post"
RECORD = dag_cbor.encode({"$type": POST, "text": "in no real repo"})
UNKNOWN_CID = cid_of(b"a block that no export contains")
REPEATED_LAYERS = 3
"""Layers of the tree with repeated subtrees. Keys of this height are found quickly."""
CAR_VERSION_2 = bytes.fromhex("0aa16776657273696f6e02") + bytes(40)


class SignedRepo(NamedTuple):
    """A repo and its signing key: what a host needs to sign any export."""

    repo: LocalRepo
    key: PrivateKey

    @property
    def blocks(self) -> dict[bytes, bytes]:
        """The blocks of the real export by CID, in its order."""
        repo = self.repo
        blocks = {repo.head.cid: repo.head.block}
        for item in repo.tree.walk():
            block = item.block if isinstance(item, ReferenceNode) else repo.records[item]
            blocks[cid_of(block)] = block
        return blocks

    @property
    def sections(self) -> list[bytes]:
        """The header of the real export, then its sections: commit, root node, other nodes and records."""
        return list(self.repo.export())

    @property
    def real_export(self) -> bytes:
        return b"".join(self.sections)

    def sign_commit(self, data: bytes = b"", **changes: Any) -> bytes:
        """Return a signed commit block with the tree root `data` and changed fields."""
        fields = {"did": self.repo.did, "rev": self.repo.head.rev, "data": data or self.repo.head.data}
        fields |= {"prev": None, "version": 3} | changes
        return dag_cbor.encode(fields | {"sig": self.key.sign(dag_cbor.encode(fields))})

    def export_with_commit(self, **changes: Any) -> bytes:
        """Return the real export with changed fields in its signed commit."""
        return car_of(self.sign_commit(**changes), *self.blocks.values())

    def export_tree(self, root: bytes, *nodes: bytes) -> bytes:
        """Return a signed export of a tree of these nodes, whose keys all have the value `RECORD`."""
        return car_of(self.sign_commit(cid_of(root)), root, *nodes, RECORD)


def car_of(*blocks: bytes) -> bytes:
    return car({cid_of(block): block for block in blocks})


def keys_of_height(layer: int, prefix: str = "") -> Iterator[str]:
    """Yield keys that belong to a layer of the tree, in ascending order."""
    numbered = (f"{POST}/{prefix}{number:07}" for number in count())
    return (key for key in numbered if height(key) == layer)


def entry(key: str, prefix_length: int = 0, subtree: bytes | None = None) -> dict[str, Any]:
    return {"k": key.encode()[prefix_length:], "p": prefix_length, "t": subtree, "v": cid_of(RECORD)}


def node(*entries: Mapping[str, Any], left: bytes | None = None) -> bytes:
    return dag_cbor.encode({"e": list(entries), "l": left})


def node_of_keys(keys: list[str], subtrees: Mapping[int, bytes] | None = None, left: bytes | None = None) -> bytes:
    """Return a node with correctly shortened keys, and subtrees after the keys at these positions."""
    entries, previous = [], ""
    for position, key in enumerate(keys):
        different = (at for at, (a, b) in enumerate(zip(previous, key, strict=False)) if a != b)
        entries.append(entry(key, next(different, len(previous)), (subtrees or {}).get(position)))
        previous = key
    return node(*entries, left=left)


def chain_of_keyless_nodes(layers: int) -> list[bytes]:
    """Return nodes without keys, each with the next one as its left subtree, and a node with one key at the end."""
    chain = [node_of_keys(list(islice(keys_of_height(0), 1)))]
    for _ in range(layers):
        chain.append(node(left=cid_of(chain[-1])))
    return chain[::-1]


@lru_cache
def tree_with_repeated_subtrees(width: int = 6) -> tuple[bytes, ...]:
    """Return nodes of `width` keys, with the same subtree in each gap: few blocks, exponentially many paths."""
    nodes = [node_of_keys(list(islice(keys_of_height(0), width)))]
    for layer in range(1, REPEATED_LAYERS + 1):
        below = cid_of(nodes[0])
        nodes.insert(
            0, node_of_keys(list(islice(keys_of_height(layer), width)), dict.fromkeys(range(width), below), below)
        )
    return tuple(nodes)


def two_leaf_keys() -> tuple[str, str]:
    first, second = islice(keys_of_height(0), 2)
    return first, second


def flip_bit(source: SignedRepo, position: int) -> bytes:
    """Return the real export with one bit changed in the section at this position."""
    sections = source.sections
    section = bytearray(sections[position])
    section[-len(section) // 4] ^= 1
    sections[position] = bytes(section)
    return b"".join(sections)


def signed_with_another_key(source: SignedRepo, did: str) -> bytes:
    """Return an export of `did` that a key of another account signed."""
    key = PrivateKey.from_seed("k256", b"another")
    repo = LocalRepo(did, key, source.repo.head.rev)
    repo.write([Write.create(f"{POST}/a", RECORD)], key, source.repo.head.rev)
    return b"".join(repo.export())


def node_that_is_its_own_subtree(source: SignedRepo) -> bytes:
    """Return an export with a cycle. The CID of the node in it cannot be the hash of its block."""
    own_cid = cid_of(b"itself")
    root = node(entry(next(keys_of_height(1)), subtree=own_cid))
    commit = source.sign_commit(cid_of(root))
    return car({cid_of(commit): commit, cid_of(root): root, own_cid: root})


def keys_out_of_order(source: SignedRepo) -> bytes:
    first, second = two_leaf_keys()
    return source.export_tree(node_of_keys([second, first]))


def prefix_longer_than_previous_key(source: SignedRepo) -> bytes:
    first, second = two_leaf_keys()
    return source.export_tree(node(entry(first), entry(second, len(second) - 1) | {"p": len(first) + 200}))


def keys_of_two_layers_in_one_node(source: SignedRepo) -> bytes:
    low, high = next(keys_of_height(0)), next(keys_of_height(1))
    return source.export_tree(node_of_keys(sorted([low, high])))


def left_subtree_with_a_greater_key(source: SignedRepo) -> bytes:
    below = node_of_keys([next(keys_of_height(0, prefix="z"))])
    return source.export_tree(node(entry(next(keys_of_height(1))), left=cid_of(below)), below)


def keyless_nodes_below_a_key(source: SignedRepo, layers: int) -> bytes:
    chain = chain_of_keyless_nodes(layers)
    return source.export_tree(node(entry(next(keys_of_height(1, prefix="z"))), left=cid_of(chain[0])), *chain)


def node_with_many_keys(source: SignedRepo, keys: int) -> bytes:
    return source.export_tree(node_of_keys(list(islice(keys_of_height(0), keys))))


INVALID_EXPORTS: dict[str, tuple[Callable[[SignedRepo], bytes], str]] = {
    "empty body": (lambda _: b"", "export-incomplete: cut inside a block"),
    "cut after the header": (lambda source: source.sections[0], "export-rejected: commit-missing"),
    "cut inside a block": (lambda source: source.real_export[:-1], "export-incomplete: cut inside a block"),
    "cut after the commit": (lambda source: b"".join(source.sections[:2]), "export-incomplete: no node"),
    "last record missing": (
        lambda source: b"".join(source.sections[:-1]),
        "export-lacks-records: 1 records",
    ),
    "HTML page": (
        lambda _: b"<!DOCTYPE html><html><body>" + b"Sign in, please. " * 100,
        "export-rejected: car-malformed",
    ),
    "CAR version 2": (lambda _: CAR_VERSION_2, "export-rejected: car-malformed: not CAR version 1"),
    "header of 2 GiB": (
        lambda _: b"\xff\xff\xff\xff\x07" + bytes(100),
        "export-rejected: car-malformed: a header of",
    ),
    "CAR root missing": (
        lambda source: car_header(UNKNOWN_CID) + b"".join(source.sections[1:]),
        "export-rejected: commit-missing",
    ),
    "CAR root is not a commit": (
        lambda source: car_header(source.repo.head.data) + b"".join(source.sections[1:]),
        "export-rejected: commit-malformed",
    ),
    "section without a CID": (
        lambda source: source.real_export + b"\x28" + b"\xff" * 40,
        "export-rejected: car-malformed: a section without",
    ),
    "block of 3 MiB": (
        lambda source: source.real_export + car_section(cid_of(bytes(3 << 20)), bytes(3 << 20)),
        "export-rejected: car-malformed: a block of",
    ),
    "flipped bit in the commit": (lambda source: flip_bit(source, 1), "export-rejected: block-hash-mismatch"),
    "flipped bit in a record": (lambda source: flip_bit(source, -1), "export-rejected: block-hash-mismatch"),
    "node is its own subtree": (node_that_is_its_own_subtree, "export-rejected: block-hash-mismatch"),
    "export of another account": (
        lambda source: signed_with_another_key(source, "did:plc:" + "b" * 24),
        "export-rejected: envelope-mismatch",
    ),
    "signed with another key": (
        lambda source: signed_with_another_key(source, source.repo.did),
        "export-rejected: signature-invalid",
    ),
    "commit version 2": (lambda source: source.export_with_commit(version=2), "export-rejected: commit-malformed"),
    "rev in the future": (
        lambda source: source.export_with_commit(rev="bzzzzzzzzzzzz"),
        "export-rejected: future-rev",
    ),
    "commit of 100 kB": (
        lambda source: source.export_with_commit(more="x" * 100_000),
        "export-rejected: commit-malformed",
    ),
    "root node missing": (lambda source: car_of(source.sign_commit(UNKNOWN_CID)), "export-incomplete: no node"),
    "root node is a record": (lambda source: source.export_tree(RECORD), "export-rejected: node-malformed"),
    "chain of 5,000 keyless nodes below a key": (
        lambda source: keyless_nodes_below_a_key(source, 5_000),
        "export-rejected: node-malformed",
    ),
    "repeated subtrees": (
        lambda source: source.export_tree(*tree_with_repeated_subtrees()),
        "export-rejected: node-malformed",
    ),
    "node of 1,001 entries": (
        lambda source: node_with_many_keys(source, 1_001),
        "export-rejected: node-malformed: 1001 entries",
    ),
    "node of 100,000 entries": (
        lambda source: source.export_tree(dag_cbor.encode({"e": [entry("a")] * 100_000, "l": None})),
        "export-rejected: car-malformed: a block of",
    ),
    "keys out of order": (keys_out_of_order, "export-rejected: node-malformed"),
    "prefix longer than the previous key": (prefix_longer_than_previous_key, "export-rejected: node-malformed"),
    "keys of two layers in one node": (
        keys_of_two_layers_in_one_node,
        "export-rejected: node-malformed: keys of different heights",
    ),
    "left subtree with a greater key": (
        left_subtree_with_a_greater_key,
        "export-rejected: node-malformed: a subtree reaches",
    ),
}
"""By name: a function that makes the export, and the beginning of the `last_error` that it must cause."""

TOO_LARGE_EXPORTS: dict[str, tuple[Callable[[SignedRepo], bytes], str]] = {
    "40 MiB of zeros": (
        lambda source: source.real_export + car_section(cid_of(bytes(2 << 20)), bytes(2 << 20)) * 20,
        "too-large",
    ),
    "20,000 blocks": (
        lambda source: (
            source.real_export
            + b"".join(car_section(cid_of(b"%d" % number), b"%d" % number) for number in range(20_000))
        ),
        "export-rejected: car-malformed: over 20000 blocks",
    ),
}
"""The same, for limits of 20 MB and 20,000 blocks. The zeros compress to a thousandth of their size."""

UNUSUAL_VALID_EXPORTS: dict[str, Callable[[SignedRepo], bytes]] = {
    "every block twice": lambda source: source.real_export + b"".join(source.sections[1:]),
    "sections in reverse order": lambda source: source.sections[0] + b"".join(reversed(source.sections[1:])),
    "additional blocks": TOO_LARGE_EXPORTS["20,000 blocks"][0],
    "additional root": lambda source: (
        _header_with_roots(source.repo.head.cid, cid_of(RECORD)) + b"".join(source.sections[1:])
    ),
    "block of another codec": lambda source: (
        source.real_export + car_section(b"\x01\x70\x12\x20" + bytes(32), b"its hash is not checked")
    ),
}


def _header_with_roots(*roots: bytes) -> bytes:
    header = dag_cbor.encode({"roots": list(roots), "version": 1})
    return bytes([len(header)]) + header
