from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.atproto.cid import cid_of, is_cid
from indexer.errors import BrokenInvariantError
from indexer.sync.diff import Diff, Difference, Entry, without_value

PATHS = st.sampled_from([f"{nsid}/{rkey}".encode() for nsid in ("a.b", "a.b-x", "a.b.c", "a.bc") for rkey in "123:_~"])
CIDS = [b"1", b"2", b"3"]
REPOS = st.dictionaries(PATHS, st.sampled_from(CIDS))
STORED = st.dictionaries(PATHS, st.sampled_from([*CIDS, *map(without_value, CIDS)]))


def oracle(stored: dict[bytes, bytes], snapshot: dict[bytes, bytes]) -> list[Difference]:
    return [
        Difference(path, stored.get(path), snapshot.get(path))
        for path in sorted(stored.keys() | snapshot.keys())
        if stored.get(path) != snapshot.get(path)
    ]


def merged(chunks: Sequence[Sequence[Entry]], snapshot: dict[bytes, bytes]) -> list[Difference]:
    diff = Diff(iter(sorted(snapshot.items())))
    found = [difference for chunk in chunks for difference in diff.against(chunk)]
    return found + list(diff.rest())


@given(STORED, REPOS, st.integers(1, 5))
def test_merge_finds_what_dictionaries_find(
    stored: dict[bytes, bytes], snapshot: dict[bytes, bytes], size: int
) -> None:
    entries = sorted(stored.items())
    chunks = [entries[i : i + size] for i in range(0, len(entries), size)]
    assert merged(chunks, snapshot) == oracle(stored, snapshot)


def test_path_order_is_not_the_order_of_collection_and_rkey() -> None:
    paths = [b"foo/1", b"foo-x/1", b"foo.bar/1"]
    stored = dict.fromkeys(paths, b"1")
    assert sorted(paths) != paths
    assert merged([sorted(stored.items())], stored) == []
    with pytest.raises(BrokenInvariantError, match="out of order"):
        merged([[(path, b"1") for path in paths]], stored)


@given(REPOS, STORED, st.integers(1, 7))
def test_differences_lead_from_our_records_to_the_snapshot(
    snapshot: dict[bytes, bytes], stored: dict[bytes, bytes], size: int
) -> None:
    """Each path once, in the order of the tree, whatever the chunks, and each taken as it stands."""
    entries = sorted(stored.items())
    differences = merged([entries[i : i + size] for i in range(0, len(entries), size)], snapshot)
    paths = [difference.path for difference in differences]
    assert paths == sorted(set(paths))
    for path, old, new in differences:
        assert stored.get(path) == old
        if new is None:
            del stored[path]
        else:
            stored[path] = new
    assert stored == snapshot


def test_a_record_without_its_value_differs_from_the_same_record() -> None:
    """So it is written once more, by an export that may have the value."""
    cid = cid_of(b"a record")
    assert not is_cid(without_value(cid))
    assert merged([[(b"a.b/1", without_value(cid))]], {b"a.b/1": cid}) == [
        Difference(b"a.b/1", without_value(cid), cid)
    ]
    assert merged([[(b"a.b/1", without_value(cid))]], {}) == [Difference(b"a.b/1", without_value(cid), None)]


@pytest.mark.parametrize("chunks", [[[b"b", b"a"]], [[b"b"], [b"a"]], [[b"a", b"a"]], [[b"a"], [b"a"]]])
def test_our_records_out_of_order_or_twice_are_a_fault_of_ours(chunks: list[list[bytes]]) -> None:
    with pytest.raises(BrokenInvariantError, match="out of order"):
        merged([[(path, b"1") for path in chunk] for chunk in chunks], {b"a": b"1", b"b": b"1"})
