"""Gaps: spans of a relay's stream in which messages may have been missed (docs/protocol.md#gaps)."""

from dataclasses import dataclass

from indexer.reasons import GapReason
from indexer.sync.shard import Shard


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
        id: Increases with each gap, so that a reconciliation knows which gaps were opened before it began. It is drawn
            before the gap is committed, and after the loss was noticed: so a gap that is committed later with a lower
            ID is about messages that were missed before the reconciliation began, too.
        opened_at: Unix seconds.
        reconciled: The positions that a reconciliation has compared since. After a change of the number of shards,
            several processes close the gap together: each one compares the positions of its own shard.
    """

    id: int
    gap: Gap
    opened_at: float
    reconciled: frozenset[int] = frozenset()

    def affects(self, shard: Shard) -> bool:
        """Return True if repos of the shard may be outdated because of this gap."""
        former = Shard.parse(self.gap.shard).positions
        return any(position in former and position not in self.reconciled for position in shard.positions)
