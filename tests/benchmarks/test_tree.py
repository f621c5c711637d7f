from hashlib import sha256

from hypothesis import given
from hypothesis import strategies as st

from benchmarks import tree
from indexer.localnet.tree import Tree

# Few keys, of which some are high up: deletes then meet what was created, and merge and split whole subtrees.
PATHS = sorted((f"a.b.c/{number}" for number in range(3_000)), key=tree.height)[-60:]
CHANGES = st.lists(st.tuples(st.sampled_from(PATHS), st.booleans()), max_size=120)


def cid(path: str) -> bytes:
    return b"\x01\x71\x12\x20" + sha256(path.encode()).digest()


@given(CHANGES)
def test_trees_and_proofs_are_the_local_networks(changes: list[tuple[str, bool]]) -> None:
    records: dict[str, bytes] = {}
    ours = tree.Tree()
    for path, put in changes:
        if put:
            records[path] = cid(path)
            ours.put(path, cid(path))
        elif path in records:
            del records[path]
            ours.delete(path)
    theirs = Tree(records)
    assert ours.root.cid == theirs.data
    assert [item for item in ours.root.walk() if isinstance(item, str)] == sorted(records)
    for path in PATHS:
        assert {node.cid: node.block for node in ours.proof(path)} == theirs.proof(path)
