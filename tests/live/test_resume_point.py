from collections.abc import Mapping
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from indexer.live.stream_continuity import ResumePoint, known_until, resume_point
from indexer.sync.shard import BUCKETS, PLAIN, Layout, Shard
from indexer.sync.stream import StoredCursor

RELAY = "wss://relay.test"
SHARDS = st.integers(1, BUCKETS).flatmap(lambda count: st.builds(Shard, st.integers(0, count - 1), st.just(count)))


def cursor(
    shard: Shard,
    seq: int,
    *,
    relay: str = RELAY,
    epoch: int = 0,
    event_time: str | None = None,
    updated_at: float = 0.0,
) -> StoredCursor:
    return StoredCursor(relay, shard, epoch, seq, event_time, updated_at)


def resume_seq(cursors: Mapping[Shard, int], shard: Shard) -> int | None:
    stored = [cursor(Shard.parse(str(other)), seq) for other, seq in cursors.items()]
    return resume_point(stored, RELAY, shard).seq


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
    assert resume_point(restarted, RELAY, whole) == ResumePoint(1, 3, "three")
    assert resume_point(restarted, RELAY, second) == ResumePoint(1, 5, None)
    assert resume_point(restarted[:2], RELAY, whole) == ResumePoint(1), "half of the buckets saw no message of epoch 1"
    assert resume_point(restarted, "wss://other.test", whole) == ResumePoint(0)


def test_the_stored_messages_end_at_the_time_of_the_relay_that_was_consumed_last() -> None:
    whole = Shard(0, 1)
    times = {"event_time": "1970-01-01T00:00:50Z", "updated_at": 60.0}
    assert known_until([], whole) is None
    assert known_until([cursor(whole, 1, **times)], whole) == 50.0  # type: ignore[arg-type]
    assert known_until([cursor(whole, 1, event_time="noon", updated_at=60.0)], whole) == 0.0
    assert known_until([cursor(whole, 1, event_time="2099-01-01T00:00:00Z", updated_at=60.0)], whole) == 0.0
    ahead = replace(cursor(whole, 1, **times), caught_up_at=20.0)  # type: ignore[arg-type]
    assert known_until([ahead], whole) == 20.0, "most accounts of the batch have an earlier clock"
    late = replace(cursor(whole, 1, **times), caught_up_at=60.0, stored_until=15.0)  # type: ignore[arg-type]
    assert known_until([late], whole) == 15.0, "one account with a fast clock is at the cursor, and the stream is idle"
    later = cursor(whole, 1, relay="wss://other.test", event_time="1970-01-01T00:00:20Z", updated_at=90.0)
    assert known_until([cursor(whole, 1, **times), later], whole) == 20.0  # type: ignore[arg-type]
    half = cursor(Shard(0, 2), 1, event_time="1970-01-01T00:00:10Z", updated_at=99.0)
    assert known_until([cursor(whole, 1, **times), half], whole) == 10.0  # type: ignore[arg-type]
