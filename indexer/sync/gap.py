"""Gaps: spans of a relay's stream in which messages may have been missed (docs/protocol.md#gaps)."""

from dataclasses import dataclass

from indexer.reasons import GapReason


@dataclass(frozen=True, slots=True)
class Gap:
    """Messages that a shard may have missed.

    Attributes:
        shard: The shard that may have missed them, as index/count.
        first_seq: The first sequence number that may be missing; None if it is not known.
        last_seq: The last one; None if it is not known.
    """

    relay: str
    shard: str
    reason: GapReason
    first_seq: int | None = None
    last_seq: int | None = None


@dataclass(frozen=True, slots=True)
class OpenGap:
    """A gap that no reconciliation has closed yet.

    Attributes:
        id: Increases with each gap, so that a reconciliation knows which gaps were opened before it began.
        opened_at: Unix seconds.
    """

    id: int
    gap: Gap
    opened_at: float
