"""Where a shard resumes the stream of a relay (docs/protocol.md#sequence-numbers-and-cursors)."""

from collections.abc import Sequence
from dataclasses import dataclass

from indexer.live.event_clock import MAX_AHEAD
from indexer.sync.events import event_seconds
from indexer.sync.shard import Shard
from indexer.sync.stream import StoredCursor


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The position after which a shard resumes a stream.

    Attributes:
        epoch: The newest epoch of the relay's sequence.
        seq: None if the shard has no cursor in this epoch.
        event_time: The `time` field of the message at `seq`. With `seq`, it identifies the message.
    """

    epoch: int
    seq: int | None = None
    event_time: str | None = None


def resume_point(cursors: Sequence[StoredCursor], relay: str, shard: Shard) -> ResumePoint:
    """Return the position in the stream after which `shard` resumes: all its buckets have been processed up to there.

    The number of shards may change at any time: some buckets then receive messages again, which changes nothing.
    Buckets that were never processed do not count.
    """
    of_relay = [cursor for cursor in cursors if cursor.relay == relay]
    epoch = max((cursor.epoch for cursor in of_relay), default=0)
    reached: list[StoredCursor] = []
    for position in shard.positions:
        processed = [cursor for cursor in of_relay if position in cursor.shard.positions]
        current = [cursor for cursor in processed if cursor.epoch == epoch]
        if processed and not current:
            return ResumePoint(epoch)
        reached.extend([max(current, key=_seq)] if current else [])
    if not reached:
        return ResumePoint(epoch)
    lowest = min(reached, key=_seq)
    return ResumePoint(epoch, lowest.seq, lowest.event_time)


def known_until(cursors: Sequence[StoredCursor], shard: Shard) -> float | None:
    """Return the time of the last message that `shard` has stored from the relay that it consumed last.

    Returns:
        Unix seconds; 0 if the message has no time, None if no bucket of the shard was ever processed.
    """
    latest = [
        max(processed, key=lambda cursor: cursor.updated_at)
        for position in shard.positions
        if (processed := [cursor for cursor in cursors if position in cursor.shard.positions])
    ]
    return min(map(_known_until, latest), default=None)


def _known_until(cursor: StoredCursor) -> float:
    """Return the time of the message at the cursor, but not more than most accounts of the latest messages say.

    A time after the last update is wrong and is not used. If the result is too early, messages are received again. If
    it is too late, messages are lost.
    """
    seconds = event_seconds(cursor.event_time) or 0.0
    if seconds > cursor.updated_at + MAX_AHEAD:
        return 0.0
    bounds = (cursor.updated_at, cursor.caught_up_at, cursor.stored_until)
    return min(seconds, *[bound for bound in bounds if bound is not None])


def _seq(cursor: StoredCursor) -> int:
    return cursor.seq
