"""The place in the stream of a relay: gaps, cursors, and the watermark.

The rules are in docs/protocol.md#sequence-numbers-and-cursors and docs/protocol.md#gaps.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from indexer.reasons import GapReason
from indexer.sync.shard import Shard


class Origin(NamedTuple):
    """The stream that a message comes from."""

    relay: str  # the URL of the relay
    epoch: int = 0  # the epoch of its sequence: sequence numbers are comparable only within one epoch of one relay
    host: str | None = None  # of a stream of a PDS, not of a relay. A PDS speaks only for accounts that it hosts


NO_STREAM = Origin("")
"""The origin of what comes from no stream."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Messages that a shard may have missed."""

    relay: str
    shard: str  # the shard that may have missed them, as index/count
    reason: GapReason
    first_seq: int | None = None  # the first sequence number that may be missing; None if it is not known
    last_seq: int | None = None  # the last one; None if it is not known


@dataclass(frozen=True, slots=True)
class OpenGap:
    """A gap that is not closed yet.

    Attributes:
        id: Increases with each gap, so that a reconciliation knows which gaps were opened before it began. It is drawn
            before the gap is committed, and after the loss was noticed: so a gap that is committed later with a lower
            ID is about messages that were missed before the reconciliation began, too.
        opened_at: Unix seconds.
        reconciled: The positions for which it is closed. After a change of the number of shards, several processes
            close the gap together: each one for the positions of its own shard.
    """

    id: int
    gap: Gap
    opened_at: float
    reconciled: frozenset[int] = frozenset()

    def affects(self, shard: Shard) -> bool:
        """Return True if repos of the shard may be outdated because of this gap."""
        former = Shard.parse(self.gap.shard).positions
        return any(position in former and position not in self.reconciled for position in shard.positions)


@dataclass(frozen=True, slots=True)
class Cursor:
    """A position in a relay's stream: the effects of all messages up to `seq` are in the database.

    Everything until `caught_up_at` (Unix seconds; None: not known) is stored: by the times of most accounts, or the
    present time if the stream is open and no message has followed `seq` for a while.
    """

    relay: str
    shard: str  # a present or former shard, as index/count
    seq: int
    event_time: str | None = None  # the `time` field of the message at `seq`, as the relay sent it
    caught_up_at: float | None = None
    epoch: int = 0  # of the relay's sequence: the number of times that it has started a new one
    updated_at: float = 0.0  # when it was stored, in Unix seconds; 0 for one that is to be stored


class Position(NamedTuple):
    """A sequence number, and the `time` field of its message; None if it has none or is not known."""

    seq: int | None
    event_time: str | None


def resume_point(cursors: Sequence[Cursor], relay: str, shard: Shard) -> tuple[int, Position | None]:
    """Return the newest epoch of the relay's sequence, and the position in it after which `shard` resumes the stream.

    All its buckets have been processed up to there; None if one has no cursor in this epoch. The number of shards may
    change at any time: some buckets then receive messages again, which changes nothing. Buckets that were never
    processed do not count.
    """
    epoch = max((cursor.epoch for cursor in cursors if cursor.relay == relay), default=0)
    stored = [(Shard.parse(cursor.shard).positions, cursor) for cursor in cursors]
    reached: list[Cursor] = []
    for position in shard.positions:
        processed = [cursor for positions, cursor in stored if position in positions]
        current = [cursor for cursor in processed if cursor.relay == relay and cursor.epoch == epoch]
        if processed and not current:
            return epoch, None
        reached.extend([max(current, key=lambda cursor: cursor.seq)] if current else [])
    lowest = min(reached, key=lambda cursor: cursor.seq, default=None)
    return epoch, Position(lowest.seq, lowest.event_time) if lowest else None


MAX_STEP = 10_000_000
"""The largest step between two numbers that is not a leap. The largest relays use this many numbers within hours."""


class Step(Enum):
    """The relation of a message's number to the numbers before it."""

    NEXT = "above the last number; numbers in between may be unused"
    REPEATED = "equal to the last number, or to the leap"
    LOWER = "below the last number"
    LEAP = "more than `MAX_STEP` above the last number"


class Watermark:
    """The numbers of the valid messages of one connection: added in increasing order, and processed in any order.

    It holds only numbers that are not processed yet, because millions of messages may pass one that waits for its key.

    A number that is more than `MAX_STEP` above the last one may be an error of the relay. If it counted, all later
    messages would be refused. So this leap is added only when the number of the next valid message is above it, too.
    """

    def __init__(self, start: int | None = None, event_time: str | None = None) -> None:
        # Plain tuples take a third of the time of a `Position`, and one is made for each message.
        self._last: tuple[int | None, str | None] = (start, event_time)
        self._before: dict[int, tuple[int | None, str | None]] = {}  # each pending number, with the position before it
        self._leap: tuple[int, str | None] | None = None  # waits for its confirmation

    def __len__(self) -> int:
        """Return the number of pending numbers."""
        return len(self._before)

    @property
    def last(self) -> int:
        """The last added number; `start`, or 0, before that."""
        return self._last[0] or 0

    @property
    def position(self) -> int | None:
        """The greatest added number at or below which every number is processed; `start` before that.

        It is safe to save as a cursor (docs/protocol.md#sequence-numbers-and-cursors).
        """
        return self.position_if_done(()).seq

    def add(self, seq: int, event_time: str | None = None) -> bool:
        """Add the number of a valid message if it is NEXT and no leap waits. Otherwise, only return False.

        `classify` takes all numbers.
        """
        if self._leap is not None or not 0 < seq - (self._last[0] or 0) <= MAX_STEP:
            return False
        self._before[seq] = self._last
        self._last = (seq, event_time)
        return True

    def classify(self, seq: int, event_time: str | None = None) -> Step:
        """Add the number of a valid message if it is NEXT. If a leap is below it, call `confirm_leap` before."""
        if seq == self.last or (self._leap is not None and seq == self._leap[0]):
            return Step.REPEATED
        if seq < self.last:
            return Step.LOWER
        self._leap = None
        if self.add(seq, event_time):
            return Step.NEXT
        self._leap = (seq, event_time)
        return Step.LEAP

    def has_leap_below(self, seq: int) -> bool:
        """Return True if the number of a valid message confirms the leap."""
        return self._leap is not None and self._leap[0] < seq

    def confirm_leap(self) -> None:
        """Let the position pass the leap, whose message is processed."""
        self._last, self._leap = self._leap or self._last, None

    def position_if_done(self, seqs: Iterable[int]) -> Position:
        """Return the position once `seqs` are processed: the cursor for the transaction that writes them."""
        done = set(seqs)
        for seq, before in self._before.items():
            if seq not in done:
                return Position(*before)
        return Position(*self._last)

    def mark_done(self, seqs: Iterable[int]) -> None:
        """Mark `seqs` as processed: their effects are committed. Numbers that are not pending are left out."""
        for seq in seqs:
            self._before.pop(seq, None)
