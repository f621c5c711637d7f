"""The stored position in the stream of a relay (docs/protocol.md#sequence-numbers-and-cursors)."""

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
