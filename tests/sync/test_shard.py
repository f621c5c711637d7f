from hashlib import sha256
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.sync.shard import BUCKETS, Layout, Shard, bucket_of, bucket_of_target

ORDERS = st.integers(0, 10**6).map(lambda seed: tuple(Random(seed).sample(range(BUCKETS), BUCKETS)))
LAYOUTS = st.builds(Layout, ORDERS, st.sampled_from([1, 4, 32]))
COUNTS = st.integers(1, BUCKETS)
SHARDS = COUNTS.flatmap(lambda count: st.builds(Shard, st.integers(0, count - 1), st.just(count), LAYOUTS))
DIDS = st.integers(0, 10**9).map(lambda number: f"did:plc:{number:024}")


@given(LAYOUTS)
def test_each_bucket_has_its_position_in_the_order(layout: Layout) -> None:
    assert [layout.position(bucket) for bucket in layout.order] == list(range(BUCKETS))


@given(LAYOUTS, st.lists(DIDS, max_size=40), st.integers(0, 3))
def test_dids_are_divided_by_the_parts_of_their_buckets(layout: Layout, dids: list[str], min_mean: int) -> None:
    divided = layout.divide(dids, str, min_mean)
    assert sorted(did for part in divided for did in part) == sorted(dids)
    if layout.parts == 1 or len(dids) < min_mean * layout.parts:
        assert divided == ([dids] if dids else [])
        return
    size = BUCKETS // layout.parts
    parts = [{layout.order.index(bucket_of(did)) // size for did in part} for part in divided]
    assert all(len(part) == 1 for part in parts)
    assert len(set.union(set(), *parts)) == len(parts)


@given(SHARDS)
def test_a_shard_has_the_buckets_at_its_positions(shard: Shard) -> None:
    first, end = shard.index * BUCKETS // shard.count, (shard.index + 1) * BUCKETS // shard.count
    assert shard.positions == range(first, end)
    assert list(shard.buckets) == sorted(shard.layout.order[first:end])
    assert Shard.parse(str(shard)).placed(shard.layout) == shard


@given(SHARDS, DIDS)
def test_a_shard_owns_the_dids_of_its_buckets(shard: Shard, did: str) -> None:
    assert shard.owns(did) == (sha256(did.encode()).digest()[0] in shard.buckets)


@given(COUNTS, LAYOUTS)
def test_shards_cover_every_bucket_once(count: int, layout: Layout) -> None:
    shards = [Shard(index, count).placed(layout) for index in range(count)]
    assert sorted(bucket for shard in shards for bucket in shard.buckets) == list(range(BUCKETS))
    sizes = {len(shard.buckets) for shard in shards}
    assert max(sizes) - min(sizes) <= 1


def test_shards_overlap_if_they_have_a_position_in_common() -> None:
    shards = [Shard(index, count) for count in range(1, 7) for index in range(count)]
    for one in shards:
        for other in shards:
            assert one.overlaps(other) == bool(set(one.positions) & set(other.positions)), (str(one), str(other))


def test_the_bucket_of_a_did_never_changes() -> None:
    did = "did:plc:ewvi7nxzyoun6zhxrhs64oiz"
    assert bucket_of(did) == bucket_of_target(did) == 0x09


@pytest.mark.parametrize(("index", "count"), [(1, 1), (-1, 2), (0, 0), (0, 257)])
def test_an_impossible_shard_is_rejected(index: int, count: int) -> None:
    with pytest.raises(ValueError, match="shard"):
        Shard(index, count)


@given(st.integers(1, 16).flatmap(lambda n: st.tuples(st.integers(0, n - 1), st.just(n))), st.integers(1, 16), LAYOUTS)
def test_subshards_cover_the_positions_of_their_shard(whole: tuple[int, int], count: int, layout: Layout) -> None:
    shard = Shard(*whole, layout)
    parts = [shard.subshard(index, count) for index in range(count)]
    assert [position for part in parts for position in part.positions] == list(shard.positions)
    assert sorted(bucket for part in parts for bucket in part.buckets) == list(shard.buckets)
