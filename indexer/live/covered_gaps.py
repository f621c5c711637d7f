"""Close gaps in one relay's stream that the stream of another relay has covered (docs/protocol.md#gaps)."""

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from time import monotonic, time

from indexer.db.gaps import OpenGaps

MARGIN_SECONDS = 10.0
"""The time within which a relay sends an event after it has happened."""
PATIENCE_SECONDS = 60.0
"""The time in which another stream may cover a gap, before a reconciliation begins."""


@dataclass(eq=False)
class CoveredGaps:
    """The open gaps, which the streams of other relays may cover.

    The stream of relay X covers a gap in the stream of relay Y if

    1. no gap in the stream of X is open: all that X has sent is received, or was compared by a reconciliation;
    2. all that X has sent of the events until `margin` seconds after the gap was noticed is stored: so X has sent what
       Y had sent before;
    3. X has brought a message that arrived for the first time after the gap was noticed: so X is alive, and not silent;
    4. X is not known to omit anything.

    Attributes:
        stored_until: Returns the time up to which all that a relay has sent is stored (Unix seconds; None: not known),
            for each relay of which a stream is received.
        newest: Returns when the newest message that a relay has brought arrived for the first time (monotonic seconds).
        omits: Returns True if a relay is known not to send all messages, at a time in monotonic seconds.
        margin: Seconds.
        patience: Seconds for which `may_close_all` waits.
    """

    gaps: OpenGaps
    stored_until: Callable[[], Mapping[str, float | None]]
    newest: Callable[[str], float]
    omits: Callable[[str, float], bool]
    margin: float = MARGIN_SECONDS
    patience: float = PATIENCE_SECONDS
    clock: Callable[[], float] = monotonic
    wall_clock: Callable[[], float] = time

    def __post_init__(self) -> None:
        self._noticed: dict[int, tuple[float, float]] = {}  # by the ID of the gap: when, by both clocks

    async def close(self) -> None:
        """Notice new gaps, and close those that are covered.

        Raises:
            DatabaseError: The database is unavailable.
        """
        gaps, now, stored_until = self.gaps.gaps or (), (self.clock(), self.wall_clock()), self.stored_until()
        self._noticed = {gap.id: self._noticed.get(gap.id, now) for gap in gaps}
        for gap in gaps:
            noticed, needed = self._noticed[gap.id][0], self._noticed[gap.id][1] + self.margin
            for relay in self._covering():
                if self.newest(relay) > noticed and (stored_until[relay] or 0.0) >= needed:
                    await self.gaps.close_covered(gap, relay)
                    break

    def may_close_all(self) -> bool:
        """Return True while other streams may still cover all open gaps."""
        now = self.clock()
        oldest = min((self._noticed.get(gap.id, (now, 0.0))[0] for gap in self.gaps.gaps or ()), default=now)
        return now - oldest < self.patience and bool(self._covering())

    def _covering(self) -> AbstractSet[str]:
        """Return the relays whose streams may cover the open gaps."""
        with_gaps, now = {gap.gap.relay for gap in self.gaps.gaps or ()}, self.clock()
        return {relay for relay in self.stored_until().keys() - with_gaps if not self.omits(relay, now)}
