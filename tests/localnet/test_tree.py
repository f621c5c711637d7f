import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.localnet.tree import Node, Tree, height
from tests.localnet.decoding import cid_from_text, decode_all, decode_car, decode_records
from tests.vectors import vectors

RECORD = cid_from_text("bafyreigikq7wl24jegwvx22wca5gfsbzmwdftbco5ba2qiqfyxrmmsyrvy")
PATHS = st.integers(0, 400).map(lambda n: f"com.example.rec/{n}")
RECORDS = st.dictionaries(PATHS, st.just(RECORD), max_size=60)


def test_heights_are_the_published_ones() -> None:
    cases = json.loads(vectors("atproto-interop-tests/mst/key_heights.json").read_bytes())
    assert [height(case["key"]) for case in cases] == [case["height"] for case in cases]


@pytest.mark.parametrize(
    ("rkeys", "root"),
    [
        ([], "bafyreie5737gdxlw5i64vzichcalba3z2v5n6icifvx5xytvske7mr3hpm"),
        (["self"], "bafyreiccafd5k5mikwmzppg3xzmyb2td6bblnubwxt7tuuaazgapdgxb5u"),
        (["a", "self"], "bafyreibsktsrrzzf43sn2uthrfibaoekblumgsoaui2iw7f3qmwogshzfq"),
        (["self", "32"], "bafyreieeiszgm53nyq2xcneypucbmruxmgkqzkqzufndxj3auazorudv4a"),
    ],
)
def test_small_trees_have_known_roots(rkeys: list[str], root: str) -> None:
    assert Tree({f"com.example.rec/{rkey}": RECORD for rkey in rkeys}).data == cid_from_text(root)


@pytest.mark.parametrize(
    "name",
    ["mst-test-suite/cars/exhaustive", "indigo/repos", "repos/atproto.dart", "repos/php-car", "jetstream-corpus"],
)
def test_trees_of_others_come_out_the_same(name: str) -> None:
    """Repositories that other implementations made: from their records alone, the same root and nodes."""
    built = 0
    for file in vectors(name).glob("*.car"):
        root, blocks = decode_car(file.read_bytes())
        (head,) = decode_all(blocks[root])
        data = head.get("data", root)  # some have no commit, but the tree alone
        if "slice" in file.name:
            continue
        tree = Tree(decode_records(blocks, data))
        assert tree.data == data, file.name
        assert tree.blocks().items() <= blocks.items()
        built += 1
    assert built


def test_proofs_hold_the_published_blocks() -> None:
    cases = json.loads(vectors("atproto-interop-tests/firehose/commit-proof-fixtures.json").read_bytes())
    for case in cases:
        leaf = cid_from_text(case["leafValue"])
        before = Tree(dict.fromkeys(case["keys"], leaf))
        after = Tree(dict.fromkeys({*case["keys"], *case["adds"]} - {*case["dels"]}, leaf))
        assert before.data == cid_from_text(case["rootBeforeCommit"])
        assert after.data == cid_from_text(case["rootAfterCommit"])
        proof = {node for path in case["adds"] + case["dels"] for node in after.proof(path)}
        assert proof >= set(map(cid_from_text, case["blocksInProof"])), case["comment"]


@given(st.sets(PATHS, max_size=60), st.sets(PATHS, min_size=1, max_size=3))
def test_proofs_hold_every_new_node(before: set[str], written: set[str]) -> None:
    old, new = (Tree(dict.fromkeys(paths, RECORD)) for paths in (before, before ^ written))
    assert new.blocks().keys() - old.blocks().keys() <= {node for path in written for node in new.proof(path)}


@given(RECORDS)
def test_a_walk_meets_all_paths_in_order_below_their_node(records: dict[str, bytes]) -> None:
    tree = Tree(records)
    walk = list(tree.walk())
    assert walk[0] is tree.root
    assert [item for item in walk if isinstance(item, str)] == sorted(records)
    assert {item.cid for item in walk if isinstance(item, Node)} == tree.blocks().keys()
    assert decode_records(tree.blocks(), tree.data) == records
