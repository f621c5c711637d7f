"""Trees of which nodes may be missing or changed: walks of ranges, and subtrees rebuilt from their entries."""

from collections.abc import Callable, Mapping
from random import Random
from typing import TypeVar

from indexer.atproto.car import split_car
from indexer.atproto.cid import CID_BYTES, cid_of
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.mst import MissingNodeError, Node, load_node, walk
from indexer.atproto.range_walk import KeyRange, RangeWalk, build_subtree, walk_ranges
from indexer.demo.local_repo import car
from indexer.errors import UpstreamError
from tests.atproto.mst import oracle
from tests.fuzz.comparison import SMALL_LIMITS, DifferenceError, accepted
from tests.fuzz.fuzz_target import FuzzTarget, MutateBytes
from tests.fuzz.outcome_counts import OutcomeCounts
from tests.fuzz.seeds import LINK, TREE_SIZES, random_path

T = TypeVar("T")
ALL = KeyRange(b"", b"\xff" * 1_025)
"""Every key of a tree."""


class RangeWalks(FuzzTarget):
    """A walk of all keys accepts the trees that a walk of the whole tree accepts, and their entries rebuild them."""

    def __init__(self) -> None:
        self.counts = OutcomeCounts("accepted", "incomplete", "rejected")

    def seeds(self, random: Random, count: int) -> list[bytes]:
        """Return the nodes of random trees; of some, one is missing."""
        made = []
        for _ in range(count):
            root, blocks = oracle.build({random_path(random).encode(): LINK for _ in range(random.choice(TREE_SIZES))})
            dropped = random.choice(sorted(blocks)) if random.random() < 0.2 else b""
            made.append(car({root: blocks[root]} | {cid: block for cid, block in blocks.items() if cid != dropped}))
        return made

    def mutate(self, data: bytes, random: Random, mutate_bytes: MutateBytes) -> bytes:
        """Return mutated bytes, or the same nodes with one that has other bytes, which becomes the root."""
        found = accepted(lambda: split_car(data, DEFAULT_LIMITS, max_bytes=len(data)))
        if found is None or random.random() < 0.3 or not found[1]:
            return mutate_bytes(data)
        changed = mutate_bytes(random.choice(sorted(found[1].values())))
        return car({cid_of(changed): changed, **found[1]})

    def compare(self, data: bytes) -> None:
        """Walk the tree in both ways. Raises `DifferenceError`."""
        self.counts.executions += 1
        limits = SMALL_LIMITS if len(data) % 4 == 0 else DEFAULT_LIMITS
        file = accepted(lambda: split_car(data, DEFAULT_LIMITS, max_bytes=len(data)))
        if file is None or len(file[0][0]) != CID_BYTES:
            self.counts.add("rejected")
            return
        ([root, *_], blocks) = file

        def walked(read: Mapping[bytes, bytes], wanted: KeyRange = ALL) -> RangeWalk:
            def node_of(cid: bytes) -> Node:
                return load_node(read.get, cid, limits)

            return walk_ranges(node_of, root, [wanted], limits)

        whole, found = _outcome(lambda: list(walk(blocks.get, root, limits))), _outcome(lambda: walked(blocks))
        if not isinstance(whole, list):
            self.counts.add("incomplete" if isinstance(whole, MissingNodeError) else "rejected")
            if isinstance(found, RangeWalk) and not found.unread:
                raise DifferenceError(f"whole tree: {whole}\nall keys: {found}")
            return
        self.counts.add("accepted")
        if not isinstance(found, RangeWalk) or found.unread or found.entries != whole:
            raise DifferenceError(f"whole tree: {whole}\nall keys: {found}")
        if whole and root not in build_subtree(whole, found.layer or 0):
            raise DifferenceError(f"the entries rebuild another tree: {whole}")
        middle = KeyRange(*sorted((whole[len(data) % len(whole)][0], whole[-1][0]))) if whole else ALL
        if walked(blocks, middle).entries != [entry for entry in whole if middle.start <= entry[0] < middle.end]:
            raise DifferenceError(f"entries of {middle}: {walked(blocks, middle).entries}\nof all: {whole}")
        for node in walked({root: blocks[root]}).unread:
            upper = ALL.end if node.upper is None else node.upper
            entries = [entry for entry in whole if node.lower < entry[0] < upper]
            if node.cid not in build_subtree(entries, node.layer):
                raise DifferenceError(f"{node} has other entries than {entries}")


def _outcome(read: Callable[[], T]) -> T | Exception:
    try:
        return read()
    except (UpstreamError, MissingNodeError) as error:
        return error
