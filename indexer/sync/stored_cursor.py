"""The stored position in the stream of a relay (docs/protocol.md#sequence-numbers-and-cursors)."""

from collections.abc import Sequence
from dataclasses import dataclass

from indexer.sync.shard import Shard


@dataclass(frozen=True, slots=True)
class StoredCursor:
    """The stored cursor of one relay and one present or former shard.

    Attributes:
        epoch: The number of times that the relay has started a new sequence.
        event_time: The `time` field of the message at `seq`; None if it has none.
        updated_at: Unix seconds.
        caught_up_at: See `indexer.sync.plans.Cursor`.
        stored_until: See `indexer.sync.plans.Cursor`.
    """

    relay: str
    shard: Shard
    epoch: int
    seq: int
    event_time: str | None
    updated_at: float
    caught_up_at: float | None = None
    stored_until: float | None = None


def merged(cursors: Sequence[StoredCursor]) -> tuple[StoredCursor, bool]:
    """Return the cursor of a relay up to which all buckets have been processed that were ever processed.

    The number of shards may have changed, so several cursors may be about a bucket: the latest one counts.

    Returns:
        One of the cursors, and False if a bucket was last processed in an earlier epoch than the one of this cursor,
        so that nothing is known about it in this epoch.
    """
    latest = [
        max(about, key=_position)
        for position in Shard().positions
        if (about := [cursor for cursor in cursors if position in cursor.shard.positions])
    ]
    epoch = max(cursor.epoch for cursor in latest)
    current = [cursor for cursor in latest if cursor.epoch == epoch]
    return min(current, key=_position), len(current) == len(latest)


def _position(cursor: StoredCursor) -> tuple[int, int]:
    return cursor.epoch, cursor.seq
