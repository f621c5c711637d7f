import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.sync.shard import BUCKETS, Shard, bucket_of


@given(st.integers(1, BUCKETS))
def test_shares_cover_every_bucket_once(count: int) -> None:
    covered = [bucket for index in range(count) for bucket in Shard(index, count).buckets]
    assert covered == list(range(BUCKETS))


def test_the_bucket_of_a_did_never_changes() -> None:
    assert bucket_of("did:plc:ewvi7nxzyoun6zhxrhs64oiz") == 0x09


def test_buckets_are_used_evenly() -> None:
    counts = [0] * BUCKETS
    for n in range(25_600):
        counts[bucket_of(f"did:plc:{n:024}")] += 1
    assert min(counts) > 50
    assert max(counts) < 160


@pytest.mark.parametrize(("index", "count"), [(1, 1), (-1, 2), (0, 0), (0, 257)])
def test_a_share_that_does_not_exist_is_refused(index: int, count: int) -> None:
    with pytest.raises(ValueError, match="shard"):
        Shard(index, count)
