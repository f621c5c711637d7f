"""Keys of every height, and hypothesis strategies for trees and commits."""

from itertools import islice

from hypothesis import strategies as st

from tests.atproto.mst import oracle
from tests.atproto.mst.oracle import Records

Edits = dict[bytes, bytes | None]
"""The new CID of each changed record by its key; None for a delete."""

A, B, C = (oracle.cid_of(name) for name in (b"a", b"b", b"c"))
KEYS_BY_HEIGHT = {height: list(islice(oracle.keys_of_height(height), 10)) for height in range(6)}
KEYS = sorted(key for keys in KEYS_BY_HEIGHT.values() for key in keys)

records_strategy = st.dictionaries(st.sampled_from(KEYS), st.sampled_from([A, B]), max_size=40)
edits_strategy = st.dictionaries(st.sampled_from(KEYS), st.sampled_from([A, B, C, None]), min_size=1, max_size=8)


def edited(before: Records, edits: Edits) -> Records:
    return {key: value for key, value in {**before, **edits}.items() if value is not None}
