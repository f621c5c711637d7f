"""CAR files, tree nodes and commit objects: each decoder against an obvious reference."""

from hashlib import sha256
from itertools import pairwise
from os.path import commonprefix
from random import Random

from indexer.atproto.car import CarReader, split_car
from indexer.atproto.cid import CID_BYTES, DAG_CBOR, RAW, cid_of, is_cid
from indexer.atproto.commit import MAX_COMMIT_BYTES, VERSION, decode_commit
from indexer.atproto.limits import DEFAULT_LIMITS, Limits
from indexer.atproto.mst import MAX_KEY_BYTES, decode_node, encode_node
from indexer.atproto.syntax import is_did, is_tid
from indexer.demo.local_repo import car_header, car_section
from indexer.errors import UpstreamError
from tests.atproto.dag_cbor_oracle import Cid
from tests.atproto.dag_cbor_oracle import encode as reference_encode
from tests.atproto.mst import oracle
from tests.fuzz.commit_parts import NODE_START, signed
from tests.fuzz.comparison import SMALL_LIMITS, DifferenceError, accepted
from tests.fuzz.fuzz_target import FuzzTarget, MutateBytes, canonical
from tests.fuzz.outcome_counts import OutcomeCounts
from tests.fuzz.seed_files import published_blocks, seed_files, some_of
from tests.fuzz.seeds import LINK, accounts, random_commit, random_export, random_path

MAX_STEP = 700
STRUCTURED = 0.6
"""Share of mutations that keep the form of a node or of a commit."""
COMMIT_START = b"\xa6\x63did"
"""The first bytes of a commit object: a map of six fields, the first of which is `did`."""


class Cars(FuzzTarget):
    """CAR files: the reader of whole files and the one of pieces find the same blocks, or the same mistake."""

    def __init__(self) -> None:
        self.counts = OutcomeCounts("accepted", "rejected")

    def seeds(self, random: Random, count: int) -> list[bytes]:
        """Return exports, the slices of commits, and published files."""
        owners = accounts()
        files = seed_files("car-hostile/**/*", "mst-test-suite/**/*.car", "repos/**/*.car", "indigo/**/*.car")
        published = some_of(files, random, count // 2)
        return published + [random_export(random.choice(owners), random) for _ in range(count - len(published))]

    def mutate(self, data: bytes, random: Random, mutate_bytes: MutateBytes) -> bytes:
        """Return mutated bytes, or the same blocks in another order, some with other bytes and the right hash."""
        try:
            roots, blocks = split_car(data, DEFAULT_LIMITS, max_bytes=len(data))
        except UpstreamError:
            return mutate_bytes(data)
        if random.random() > STRUCTURED or not blocks or len(roots[0]) != CID_BYTES:
            return mutate_bytes(data)
        sections = list(blocks.items())
        random.shuffle(sections)
        changed = mutate_bytes(sections[0][1])
        sections[0] = (random.choice((cid_of(changed), RAW + cid_of(changed)[len(DAG_CBOR) :], LINK)), changed)
        return car_header(roots[0]) + b"".join(car_section(cid, block) for cid, block in sections)

    def compare(self, data: bytes) -> None:
        """Read a file at once and in pieces. Raises `DifferenceError`."""
        self.counts.executions += 1
        limits = SMALL_LIMITS if len(data) % 4 == 0 else DEFAULT_LIMITS
        whole = accepted(lambda: split_car(data, limits, max_bytes=len(data)))
        step = len(data) % MAX_STEP + 1
        pieces = accepted(lambda: _read_in_pieces(data, limits, step))
        self.counts.add("rejected" if whole is None else "accepted")
        if whole != pieces:
            raise DifferenceError(f"whole: {whole}\nin pieces of {step}: {pieces}")
        for cid, block in (whole or ((), {}))[1].items():
            if cid[len(DAG_CBOR) :] != sha256(block).digest():
                raise DifferenceError(f"block {cid.hex()} has another hash")


def _read_in_pieces(data: bytes, limits: Limits, step: int) -> tuple[list[bytes], dict[bytes, bytes]]:
    reader = CarReader(limits)
    blocks: dict[bytes, bytes] = {}
    for start in range(0, len(data), step):
        blocks |= reader.feed(data[start : start + step])
    reader.close()
    return reader.roots, blocks


class Nodes(FuzzTarget):
    """Tree nodes: exactly the blocks that the reference would write are accepted, with the same keys and links."""

    def __init__(self) -> None:
        self.counts = OutcomeCounts("accepted", "rejected")

    def seeds(self, random: Random, count: int) -> list[bytes]:
        """Return published nodes, a quarter if there are so many, and those of random trees."""
        nodes = some_of(published_blocks(NODE_START), random, count // 4)
        while len(nodes) < count:
            records = {random_path(random).encode(): LINK for _ in range(random.choice((0, 1, 3, 30)))}
            nodes += oracle.build(records)[1].values()
        return nodes[:count]

    def mutate(self, data: bytes, random: Random, mutate_bytes: MutateBytes) -> bytes:
        """Return mutated bytes, or a node with other keys, values or subtrees."""
        try:
            node = decode_node(data, DEFAULT_LIMITS)
        except UpstreamError:
            return mutate_bytes(data)
        if random.random() > STRUCTURED:
            return mutate_bytes(data)
        keys, values, trees = list(node.keys), list(node.values), list(node.trees)
        if keys:
            index = random.randrange(len(keys))
            keys[index] = mutate_bytes(keys[index])
            values[index] = random.choice((LINK, values[index], b"\x01\x55\x00\x00", b"\x01\x71\x12\x20" + keys[index]))
            trees[index] = random.choice((None, LINK))
        return encode_node(keys, values, random.choice((node.left, None, LINK)), trees)

    def compare(self, data: bytes) -> None:
        """Decode a block. Raises `DifferenceError`."""
        self.counts.executions += 1
        limits = SMALL_LIMITS if len(data) % 4 == 0 else DEFAULT_LIMITS
        node = accepted(lambda: decode_node(data, limits))
        self.counts.add("rejected" if node is None else "accepted")
        expected = _reference_node(data, limits)
        found = None if node is None else (node.keys, node.values, node.left, node.trees)
        if found != expected:
            raise DifferenceError(f"reference: {expected}\nfound: {found}")


Entries = tuple[list[bytes], list[bytes], bytes | None, list[bytes | None]]
"""Keys, values, the left subtree and the other subtrees of a node."""


def _reference_node(data: bytes, limits: Limits) -> Entries | None:
    """Return the content of a block that is a node; None for others."""
    value = canonical(data)
    if not isinstance(value, dict) or value.keys() != {"e", "l"} or not isinstance(value["e"], list):
        return None
    entries = value["e"]
    keys, previous = [], b""
    for entry in entries:
        if not isinstance(entry, dict) or entry.keys() != {"k", "p", "t", "v"}:
            return None
        if not (type(entry["k"]) is bytes and type(entry["p"]) is int and isinstance(entry["v"], Cid)):
            return None
        previous = previous[: entry["p"]] + entry["k"]
        keys.append(previous)
    links = [value["l"], *(entry["t"] for entry in entries)]
    if not all(
        link is None or (isinstance(link, Cid) and is_cid(link.data) and link.data[1] == 0x71) for link in links
    ):
        return None
    left, *trees = [None if link is None else link.data for link in links]
    valid = (
        all(0 < len(key) <= MAX_KEY_BYTES for key in keys)
        and all(one < other for one, other in pairwise(keys))
        and [entry["p"] for entry in entries] == [len(commonprefix(pair)) for pair in pairwise([b"", *keys])]  # noqa: RUF071 - bytes
        and len(keys) <= limits.node_entries
        and len(set(map(oracle.height, keys))) <= 1
        and not (keys and oracle.height(keys[0]) == 0 and any(link is not None for link in links))
    )
    return (keys, [entry["v"].data for entry in entries], left, trees) if valid else None


class Commits(FuzzTarget):
    """Commit objects: those of the right form are accepted, and their signed bytes are those without `sig`."""

    def __init__(self) -> None:
        self._owners = accounts()
        self.counts = OutcomeCounts("accepted", "rejected", "verified")

    def seeds(self, random: Random, count: int) -> list[bytes]:
        """Return published commits, a quarter if there are so many, and new signed ones."""
        made = some_of(published_blocks(COMMIT_START), random, count // 4)
        for number in range(count - len(made)):
            owner = self._owners[number % len(self._owners)]
            random_commit(owner, random)
            made.append(owner.repo.head.block)
        return made

    def mutate(self, data: bytes, random: Random, mutate_bytes: MutateBytes) -> bytes:
        """Return mutated bytes, or a commit with another field, signed again."""
        value = canonical(data)
        if random.random() > STRUCTURED or not isinstance(value, dict) or "sig" not in value:
            return mutate_bytes(data)
        name = random.choice(("did", "rev", "data", "prev", "version", "sig", "", "sih", "zz"))
        choices = (None, 3, 2, True, Cid(LINK), LINK, "3" * 13, value["sig"], {"sig": value["sig"]}, b"\x63sig\x58\x40")
        other = random.choice(choices) if random.random() < 0.8 else mutate_bytes(data[-40:])
        block = reference_encode(value | {name: other})
        return signed(block, random.choice(self._owners).key) if random.random() < 0.5 else block

    def compare(self, data: bytes) -> None:
        """Decode a block. Raises `DifferenceError`."""
        self.counts.executions += 1
        commit = accepted(lambda: decode_commit(data, cid_of(data)))
        self.counts.add("rejected" if commit is None else "accepted")
        expected = _reference_commit(data)
        found = None if commit is None else (commit.did, commit.rev, commit.data, commit.sig, commit.unsigned)
        if found != expected:
            raise DifferenceError(f"reference: {expected}\nfound: {found}")
        if commit is not None:
            keys = [owner.key.public for owner in self._owners[-2:]]
            self.counts.add("verified", any(key.verify(commit.sig, commit.unsigned) for key in keys))


def _reference_commit(data: bytes) -> tuple[str, str, bytes, bytes, bytes] | None:
    """Return the fields of a block that is a commit, and its bytes without `sig`; None for others."""
    value = canonical(data) if len(data) <= MAX_COMMIT_BYTES else None
    if not isinstance(value, dict) or len(value) > 23 or type(value.get("version")) is not int:
        return None
    did, rev, root, sig, prev = (value.get(name) for name in ("did", "rev", "data", "sig", "prev"))
    if not (isinstance(did, str) and is_did(did) and isinstance(rev, str) and is_tid(rev)):
        return None
    if not (isinstance(root, Cid) and is_cid(root.data) and (prev is None or isinstance(prev, Cid))):
        return None
    if (
        value["version"] != VERSION
        or type(sig) is not bytes
        or len(sig) != 64
        or data.count(b"\x63sig\x58\x40" + sig) != 1
    ):
        return None
    unsigned = reference_encode({name: field for name, field in value.items() if name != "sig"})
    return did, rev, root.data, sig, unsigned
