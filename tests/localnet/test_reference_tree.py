import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.localnet.reference_tree import ReferenceNode, ReferenceTree
from tests.localnet.independent_decoder import cid_from_text, decode_records

RECORD = cid_from_text("bafyreigikq7wl24jegwvx22wca5gfsbzmwdftbco5ba2qiqfyxrmmsyrvy")
PATHS = st.integers(0, 400).map(lambda n: f"com.example.rec/{n}")
RECORDS = st.dictionaries(PATHS, st.just(RECORD), max_size=60)


@pytest.mark.parametrize(
    ("rkeys", "root"),
    [
        ([], "bafyreie5737gdxlw5i64vzichcalba3z2v5n6icifvx5xytvske7mr3hpm"),
        (["self"], "bafyreiccafd5k5mikwmzppg3xzmyb2td6bblnubwxt7tuuaazgapdgxb5u"),
        (["a", "self"], "bafyreibsktsrrzzf43sn2uthrfibaoekblumgsoaui2iw7f3qmwogshzfq"),
        (["self", "32"], "bafyreieeiszgm53nyq2xcneypucbmruxmgkqzkqzufndxj3auazorudv4a"),
    ],
)
def test_small_trees_have_published_roots(rkeys: list[str], root: str) -> None:
    assert ReferenceTree({f"com.example.rec/{rkey}": RECORD for rkey in rkeys}).data == cid_from_text(root)


@given(st.sets(PATHS, max_size=60), st.sets(PATHS, min_size=1, max_size=3))
def test_proofs_contain_every_new_node(before: set[str], written: set[str]) -> None:
    old, new = (ReferenceTree(dict.fromkeys(paths, RECORD)) for paths in (before, before ^ written))
    assert new.blocks().keys() - old.blocks().keys() <= {node for path in written for node in new.proof(path)}


@given(RECORDS)
def test_walk_yields_all_nodes_and_paths_in_order(records: dict[str, bytes]) -> None:
    tree = ReferenceTree(records)
    walk = list(tree.walk())
    assert walk[0] is tree.root
    assert [item for item in walk if isinstance(item, str)] == sorted(records)
    assert {item.cid for item in walk if isinstance(item, ReferenceNode)} == tree.blocks().keys()
    assert decode_records(tree.blocks(), tree.data) == records
