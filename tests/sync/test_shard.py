import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.sync.shard import BUCKETS, Shard, bucket_of


@given(st.integers(1, BUCKETS))
def test_shards_cover_every_bucket_once(count: int) -> None:
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
def test_an_impossible_shard_is_rejected(index: int, count: int) -> None:
    with pytest.raises(ValueError, match="shard"):
        Shard(index, count)


SHARDS = st.integers(1, BUCKETS).flatmap(lambda count: st.builds(Shard, st.integers(0, count - 1), st.just(count)))


@given(SHARDS)
def test_a_shard_is_parsed_as_it_is_printed(shard: Shard) -> None:
    assert Shard.parse(str(shard)) == shard


@given(st.integers(1, 16).flatmap(lambda n: st.tuples(st.integers(0, n - 1), st.just(n))), st.integers(1, 16))
def test_subshards_cover_the_buckets_of_their_shard(whole: tuple[int, int], count: int) -> None:
    shard = Shard(*whole)
    assert [bucket for index in range(count) for bucket in shard.subshard(index, count).buckets] == list(shard.buckets)
