from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.atproto.cid import cid_of, is_cid
from indexer.errors import BrokenInvariantError
from indexer.sync.resync import Difference, Entry, SnapshotDiff, without_value

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
    diff = SnapshotDiff(iter(sorted(snapshot.items())))
    found = [difference for chunk in chunks for difference in diff.compare(chunk)]
    return found + list(diff.remaining())


@given(STORED, REPOS, st.integers(1, 5))
def test_the_differences_are_those_of_two_dictionaries(
    stored: dict[bytes, bytes], snapshot: dict[bytes, bytes], size: int
) -> None:
    entries = sorted(stored.items())
    chunks = [entries[i : i + size] for i in range(0, len(entries), size)]
    assert merged(chunks, snapshot) == oracle(stored, snapshot)


def test_record_without_its_value_differs_from_every_record() -> None:
    assert not is_cid(without_value(cid_of(b"a record")))


def test_path_order_is_not_the_order_of_collection_and_rkey() -> None:
    paths = [b"foo/1", b"foo-x/1", b"foo.bar/1"]
    stored = dict.fromkeys(paths, b"1")
    assert sorted(paths) != paths
    assert merged([sorted(stored.items())], stored) == []
    with pytest.raises(BrokenInvariantError, match="out of order"):
        merged([[(path, b"1") for path in paths]], stored)


@pytest.mark.parametrize("path", [b"A.b/1", b"a.b/1"])
def test_first_stored_path_may_begin_with_any_letter(path: bytes) -> None:
    assert merged([[(path, b"1")]], {}) == [Difference(path, b"1", None)]


@pytest.mark.parametrize("chunks", [[[b"b", b"a"]], [[b"b"], [b"a"]], [[b"a", b"a"]], [[b"a"], [b"a"]]])
def test_stored_records_out_of_order_or_repeated_are_a_broken_invariant(chunks: list[list[bytes]]) -> None:
    with pytest.raises(BrokenInvariantError, match="out of order"):
        merged([[(path, b"1") for path in chunk] for chunk in chunks], {b"a": b"1", b"b": b"1"})
