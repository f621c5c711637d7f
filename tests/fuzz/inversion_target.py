"""Inversion of the operations of a commit, against building both whole trees.

Most inputs are not commits but the choices from which one is made: the records before, the edits, the operations that
are wrong, and the nodes that are missing. So each of these is a commit that a hostile host could sign. The other inputs
are frames of commits, new and published ones.
"""

from collections.abc import Iterator
from random import Random

from indexer.atproto.car import split_car
from indexer.atproto.commit import decode_commit
from indexer.atproto.inversion import NetOp, Verdict, invert
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.mst import EMPTY_TREE
from indexer.demo.reference_tree import ReferenceTree
from indexer.errors import UpstreamError
from indexer.sync.events import CommitEvent, decode_frame
from indexer.sync.verify import LegacyOperationsError, fold_operations
from tests.atproto.mst import oracle
from tests.atproto.mst.oracle import Records
from tests.atproto.mst.random_trees import KEYS, A, B, C, edited
from tests.fuzz.commit_parts import split
from tests.fuzz.comparison import DifferenceError
from tests.fuzz.fuzz_target import Choices, FuzzTarget, MutateBytes
from tests.fuzz.mutation import mutate_frame
from tests.fuzz.outcome_counts import OutcomeCounts
from tests.fuzz.seed_files import published_commits, some_of
from tests.fuzz.seeds import accounts, random_commit
from tests.fuzz.slice_reference import is_tree

VALUES = (A, B, C)
MAX_RECORDS, MAX_EDITS, MAX_WRONG, MAX_MISSING = 48, 8, 3, 6


class Inversions(FuzzTarget):
    """Inversions: the verdict of a whole slice follows from the two trees, that of a part from the slow reference."""

    def __init__(self) -> None:
        self._owners = accounts()
        verdicts = (_name(verdict) for verdict in Verdict)
        self.counts = OutcomeCounts(*verdicts, "frames inverted", "frames without a valid tree")

    def seeds(self, random: Random, count: int) -> list[bytes]:
        """Return frames of commits, a fifth of them new and a fifth published if there are so many; then choices."""
        made = some_of(published_commits(self._owners), random, count // 5)
        made += [random_commit(random.choice(self._owners), random).frame for _ in range(count // 5)]
        return made + [random.randbytes(random.choice((8, 40, 120))) for _ in range(count - len(made))]

    def mutate(self, data: bytes, random: Random, mutate_bytes: MutateBytes) -> bytes:
        """Return a mutated frame, or mutated choices."""
        return mutate_frame(data, random, mutate_bytes, self._owners) if split(data) else mutate_bytes(data)

    def compare(self, data: bytes) -> None:
        """Invert one commit. Raises `DifferenceError`."""
        self.counts.executions += 1
        event = decode_frame(data, DEFAULT_LIMITS)
        if isinstance(event, CommitEvent):
            self._compare_frame(event)
        else:
            self._compare_choices(data)

    def _compare_frame(self, event: CommitEvent) -> None:
        """Invert the commit of a frame. After an invalid tree or operation, any documented result may follow."""
        try:
            _, blocks = split_car(event.blocks, DEFAULT_LIMITS, max_bytes=DEFAULT_LIMITS.commit_blocks_bytes)
            root = decode_commit(blocks.get(event.commit, b""), event.commit).data
            ops = fold_operations(event.ops)
        except (UpstreamError, LegacyOperationsError):
            return
        # An empty key is malformed in the product, and a key like others in the reference.
        prev_data, valid = event.prev_data or EMPTY_TREE, is_tree(blocks, root) and all(op.key for op in ops)
        try:
            found = invert(blocks, root, ops, prev_data, DEFAULT_LIMITS)
        except UpstreamError:
            if valid:
                raise
            return
        finally:
            self.counts.add("frames inverted" if valid else "frames without a valid tree")
        if valid and (found.verdict, found.root) != (expected := oracle.invert(blocks, root, ops, prev_data)):
            raise DifferenceError(f"reference: {expected}\nfound: {found}")

    def _compare_choices(self, data: bytes) -> None:
        choices = Choices(data)
        before = {choices.of(KEYS): choices.of(VALUES) for _ in range(choices.number(MAX_RECORDS))}
        after = edited(
            before, {choices.of(KEYS): choices.of((*VALUES, None)) for _ in range(choices.number(MAX_EDITS))}
        )
        prev_data, (root, blocks) = _root(before), oracle.build(after)
        right = oracle.difference(before, after)
        ops = list(_with_mistakes(right, choices))
        for _ in range(choices.number(MAX_MISSING)):
            blocks.pop(choices.of(sorted(blocks) or [b""]), None)
        found = invert(blocks, root, ops, prev_data, DEFAULT_LIMITS)
        expected = oracle.invert(blocks, root, ops, prev_data)
        if (found.verdict, found.root) != expected:
            raise DifferenceError(f"reference: {expected}\nfound: {found}")
        if (found.verdict is Verdict.OK) > (sorted(ops, key=lambda op: op.key) == right):
            raise DifferenceError(f"accepted {ops} instead of {right}")
        self.counts.add(_name(found.verdict))


def _name(verdict: Verdict) -> str:
    return verdict.name.lower().replace("_", " ")


def _with_mistakes(right: list[NetOp], choices: Choices) -> Iterator[NetOp]:
    """Yield the operations with up to `MAX_WRONG` mistakes: one is missing, has another value, or is made up."""
    ops = {op.key: op for op in right}
    for _ in range(choices.number(MAX_WRONG)):
        key = choices.of(sorted(ops)) if ops and choices.number(2) else choices.of(KEYS)
        old, new = choices.of((*VALUES, None)), choices.of((*VALUES, None))
        if choices.number(3) == 0:
            ops.pop(key, None)
        elif old != new:
            ops[key] = NetOp(key, old, new)
    yield from ops.values()


def _root(records: Records) -> bytes:
    """Return the root of a tree, which two references must agree on."""
    root = oracle.build(records)[0]
    if root != ReferenceTree({key.decode(): value for key, value in records.items()}).data:
        raise DifferenceError(f"the two references build different trees over {records}")
    return root
