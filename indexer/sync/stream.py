"""The place in the stream of a relay: gaps, cursors, the order of sequence numbers, and the watermark.

The rules are in docs/protocol.md#sequence-numbers-and-cursors and docs/protocol.md#gaps.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from indexer.errors import BrokenInvariantError
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


@dataclass(frozen=True, slots=True)
class Cursor:
    """A position in a relay's stream: the effects of all messages up to `seq` are in the database.

    Attributes:
        event_time: The `time` field of the message at `seq`, as the relay sent it.
        caught_up_at: Unix seconds until which everything is stored: by the times of most accounts, or the present time
            if the stream is open and no message has followed `seq` for a while. None if it is not known.
        epoch: The epoch of the relay's sequence: the number of times that it has started a new one.
    """

    relay: str
    shard: str
    seq: int
    event_time: str | None = None
    caught_up_at: float | None = None
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class StoredCursor:
    """The stored cursor of one relay and one present or former shard.

    Attributes:
        epoch: The number of times that the relay has started a new sequence.
        event_time: The `time` field of the message at `seq`; None if it has none.
        updated_at: Unix seconds.
    """

    relay: str
    shard: Shard
    epoch: int
    seq: int
    event_time: str | None
    updated_at: float


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
    epoch = max((cursor.epoch for cursor in cursors if cursor.relay == relay), default=0)
    reached: list[StoredCursor] = []
    for position in shard.positions:
        processed = [cursor for cursor in cursors if position in cursor.shard.positions]
        current = [cursor for cursor in processed if cursor.relay == relay and cursor.epoch == epoch]
        if processed and not current:
            return ResumePoint(epoch)
        reached.extend([max(current, key=lambda cursor: cursor.seq)] if current else [])
    lowest = min(reached, key=lambda cursor: cursor.seq, default=None)
    return ResumePoint(epoch, lowest.seq, lowest.event_time) if lowest else ResumePoint(epoch)


MAX_STEP = 10_000_000
"""The largest step between two numbers that is not a leap. The largest relays use this many numbers within hours."""


class Step(Enum):
    """The relation of a message's number to the numbers before it.

    Attributes:
        NEXT: Above the last number. Numbers in between may be unused.
        REPEATED: Equal to the last number, or to the leap.
        LOWER: Below the last number.
        LEAP: More than `MAX_STEP` above the last number.
    """

    NEXT = auto()
    REPEATED = auto()
    LOWER = auto()
    LEAP = auto()


class SequenceOrder:
    """The numbers of the valid messages of one connection.

    A number that is more than `MAX_STEP` above the last one may be an error of the relay. If it counted, all later
    messages would be refused. So it counts only when the number of the next valid message is above it, too.

    Attributes:
        last: The last number that counts; 0 if there is none.
        leap: The number that waits for its confirmation; None if there is none.
    """

    def __init__(self, last: int) -> None:
        self.last = last
        self.leap: int | None = None

    def advance(self, seq: int) -> bool:
        """Return True if the number of a valid message is NEXT and no leap waits; else False, and change nothing.

        This is the fast path for the usual number. `classify` takes all others.
        """
        if self.leap is None and 0 < seq - self.last <= MAX_STEP:
            self.last = seq
            return True
        return False

    def classify(self, seq: int) -> Step:
        """Return the step from the numbers so far to the number of a valid message.

        After NEXT or LEAP, an earlier leap is confirmed if `last` is its number or above it.
        """
        if seq in (self.last, self.leap):
            return Step.REPEATED
        if self.leap is not None and seq > self.leap:
            self.last, self.leap = self.leap, None
        if seq < self.last:
            return Step.LOWER
        if seq - self.last > MAX_STEP:
            self.leap = seq
            return Step.LEAP
        self.last, self.leap = seq, None
        return Step.NEXT


class Position(NamedTuple):
    """A sequence number, and the `time` field of its message; None if it has none or is not known."""

    seq: int | None
    event_time: str | None


class Watermark:
    """Tracks sequence numbers that are added in increasing order and processed in any order.

    It holds only numbers that are not processed yet, because millions of messages may pass one that waits for its key.
    """

    def __init__(self, start: int | None = None, event_time: str | None = None) -> None:
        # Plain tuples take a third of the time of a `Position`, and one is made for each message.
        self._last: tuple[int | None, str | None] = (start, event_time)
        self._before: dict[int, tuple[int | None, str | None]] = {}  # each pending number, with the position before it

    def __len__(self) -> int:
        """Return the number of pending numbers."""
        return len(self._before)

    @property
    def position(self) -> int | None:
        """The greatest added number at or below which every number is processed; `start` before that.

        It is safe to save as a cursor (docs/protocol.md#sequence-numbers-and-cursors).
        """
        return self.position_if_done(()).seq

    @property
    def event_time(self) -> str | None:
        """The time of the message at `position`."""
        return self.position_if_done(()).event_time

    def add(self, seq: int, event_time: str | None = None) -> None:
        """Add the number of a received message; numbers may be missing between two messages.

        Raises:
            BrokenInvariantError: The number is not above all earlier ones.
        """
        last = self._last[0]
        if last is not None and seq <= last:
            raise BrokenInvariantError(f"seq {seq} after {last}")
        self._before[seq] = self._last
        self._last = (seq, event_time)

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
