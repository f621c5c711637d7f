from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.errors import BrokenInvariantError
from indexer.sync.diff import Diff, Difference, Entry

PATHS = st.sampled_from([f"{nsid}/{rkey}".encode() for nsid in ("a.b", "a.b-x", "a.b.c", "a.bc") for rkey in "123:_~"])
REPOS = st.dictionaries(PATHS, st.sampled_from([b"1", b"2", b"3"]))


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


@given(REPOS, REPOS, st.integers(1, 5))
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
