from hashlib import sha256

from hypothesis import given
from hypothesis import strategies as st

from benchmarks import growing_tree
from indexer.localnet.reference_tree import ReferenceTree

# Few keys, some of them on high layers, so that deletes hit created keys, and merge and split whole subtrees.
PATHS = sorted((f"a.b.c/{number}" for number in range(3_000)), key=growing_tree.height)[-60:]
CHANGES = st.lists(st.tuples(st.sampled_from(PATHS), st.booleans()), max_size=120)


def cid(path: str) -> bytes:
    return b"\x01\x71\x12\x20" + sha256(path.encode()).digest()


@given(CHANGES)
def test_trees_and_proofs_equal_those_of_the_reference_tree(changes: list[tuple[str, bool]]) -> None:
    records: dict[str, bytes] = {}
    tree = growing_tree.GrowingTree()
    for path, put in changes:
        if put:
            records[path] = cid(path)
            tree.put(path, cid(path))
        elif path in records:
            del records[path]
            tree.delete(path)
    reference = ReferenceTree(records)
    assert tree.root.cid == reference.data
    assert [item for item in tree.root.walk() if isinstance(item, str)] == sorted(records)
    for path in PATHS:
        assert {node.cid: node.block for node in tree.proof(path)} == reference.proof(path)
