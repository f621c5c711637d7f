import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.sync.shard import BUCKETS, Shard, bucket_of, resume


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


SHARDS = st.integers(1, BUCKETS).flatmap(lambda count: st.builds(Shard, st.integers(0, count - 1), st.just(count)))


@given(SHARDS)
def test_a_shard_is_read_as_it_is_written(shard: Shard) -> None:
    assert Shard.parse(str(shard)) == shard


@given(st.integers(1, 16).flatmap(lambda n: st.tuples(st.integers(0, n - 1), st.just(n))), st.integers(1, 16))
def test_the_parts_of_a_shard_have_its_buckets(whole: tuple[int, int], count: int) -> None:
    shard = Shard(*whole)
    assert [bucket for index in range(count) for bucket in shard.part(index, count).buckets] == list(shard.buckets)


@given(st.lists(st.tuples(st.integers(1, 6), st.lists(st.integers(0, 20), min_size=6, max_size=6)), max_size=5), SHARDS)
def test_a_change_of_the_number_of_shards_loses_nothing(eras: list[tuple[int, list[int]]], shard: Shard) -> None:
    """Eras of different numbers of shards, each of which goes on from where all of its buckets were; against a count of
    how far each bucket really is."""
    cursors: dict[Shard, int] = {}
    done = [0] * BUCKETS
    for count, steps in eras:
        begins = {part: resume(cursors, part) for part in (Shard(index, count) for index in range(count))}
        for part, step in zip(begins, steps, strict=False):
            begin = begins[part] or 0
            assert begin <= min(done[bucket] for bucket in part.buckets), "a bucket would skip what it never had"
            cursors[part] = max(cursors.get(part, 0), begin + step)
            for bucket in part.buckets:
                done[bucket] = max(done[bucket], begin + step)
    final = resume(cursors, shard)
    assert final is None or final == min(done[bucket] for bucket in shard.buckets)


def test_buckets_that_nobody_had_hold_nobody_up() -> None:
    assert resume({Shard(0, 2): 7}, Shard(0, 1)) == 7
    assert resume({Shard(0, 2): 7}, Shard(1, 2)) is None
    assert resume({Shard(0, 2): 7, Shard(1, 2): 5, Shard(0, 1): 3}, Shard(0, 1)) == 5
