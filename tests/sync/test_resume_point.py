from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from indexer.sync.shard import BUCKETS, PLAIN, Layout, Shard
from indexer.sync.stream import Cursor, Position, resume_point

RELAY = "wss://relay.test"
SHARDS = st.integers(1, BUCKETS).flatmap(lambda count: st.builds(Shard, st.integers(0, count - 1), st.just(count)))


def cursor(
    shard: Shard,
    seq: int,
    *,
    relay: str = RELAY,
    epoch: int = 0,
    event_time: str | None = None,
) -> Cursor:
    return Cursor(relay, str(shard), seq, event_time, epoch=epoch)


def resume_seq(cursors: Mapping[Shard, int], shard: Shard) -> int | None:
    _, position = resume_point([cursor(other, seq) for other, seq in cursors.items()], RELAY, shard)
    return position and position.seq


@given(
    st.lists(st.tuples(st.integers(1, 6), st.lists(st.integers(0, 20), min_size=6, max_size=6)), max_size=5),
    SHARDS,
    st.sampled_from([PLAIN, Layout(tuple(reversed(range(BUCKETS))))]),
)
def test_no_bucket_skips_messages_when_the_number_of_shards_changes(
    phases: list[tuple[int, list[int]]], shard: Shard, layout: Layout
) -> None:
    """Each phase has another number of shards; `done` counts how far each bucket was really processed."""
    shard = shard.placed(layout)
    cursors: dict[Shard, int] = {}
    done = [0] * BUCKETS
    for count, steps in phases:
        starts = {part: resume_seq(cursors, part) for part in (Shard(index, count, layout) for index in range(count))}
        for part, step in zip(starts, steps, strict=False):
            start = starts[part] or 0
            assert start <= min(done[bucket] for bucket in part.buckets), "a bucket would skip messages"
            cursors[part] = max(cursors.get(part, 0), start + step)
            for bucket in part.buckets:
                done[bucket] = max(done[bucket], start + step)
    final = resume_seq(cursors, shard)
    assert final is None or final == min(done[bucket] for bucket in shard.buckets)


def test_buckets_that_were_never_processed_do_not_count() -> None:
    assert resume_seq({Shard(0, 2): 7}, Shard(0, 1)) == 7
    assert resume_seq({Shard(0, 2): 7}, Shard(1, 2)) is None
    assert resume_seq({Shard(0, 2): 7, Shard(1, 2): 5, Shard(0, 1): 3}, Shard(0, 1)) == 5


def test_only_cursors_of_the_newest_epoch_count() -> None:
    whole, first, second = Shard(0, 1), Shard(0, 2), Shard(1, 2)
    restarted = [cursor(whole, 900), cursor(first, 3, epoch=1, event_time="three"), cursor(second, 5, epoch=1)]
    assert resume_point(restarted, RELAY, whole) == (1, Position(3, "three"))
    assert resume_point(restarted, RELAY, second) == (1, Position(5, None))
    assert resume_point(restarted[:2], RELAY, whole) == (1, None), "half of the buckets saw no message of epoch 1"
    assert resume_point(restarted, "wss://other.test", whole) == (0, None)


def test_buckets_whose_messages_came_from_another_relay_are_not_resumed_at_the_cursor_of_others() -> None:
    of_others = [cursor(Shard(0, 2), 7), cursor(Shard(1, 2), 5, relay="wss://other.test")]
    assert resume_point(of_others, RELAY, Shard()) == (0, None)
    assert resume_point(of_others, RELAY, Shard(0, 2)) == (0, Position(7, None))
