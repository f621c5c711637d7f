"""The position in a stream: its firehose consumer and the batch writer share it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from statistics import median_low
from time import time

from indexer.net.http.http_client import host_of
from indexer.sync.events import MAX_AHEAD, event_seconds
from indexer.sync.repo import StreamPoint
from indexer.sync.stream import NO_STREAM, Origin, Position, Watermark

EARLIEST = 1_640_995_200.0
"""2022-01-01: no event of the protocol is older."""

CLOCK_ACCOUNTS = 64
"""Accounts whose times count in a batch: those with the latest events."""


class EventClock:
    """Estimates the time of a stream. It only increases, while the clock of this machine does.

    The `time` of an event is what its PDS, or its account, says. So times outside of the possible range do not count,
    an account counts once per batch, and the median of the latest accounts decides.
    """

    reached: float | None = None  # Unix seconds; None before the first possible time

    def observe(self, times: Iterable[tuple[str, str]], now: float) -> None:
        """Take the times of the stored events, as pairs of DID and time, in the order of the stream."""
        all_seconds = map(event_seconds, islice(reversed(dict(times).values()), CLOCK_ACCOUNTS))
        possible = [min(one, now) for one in all_seconds if one is not None and EARLIEST <= one <= now + MAX_AHEAD]
        if possible:
            self.advance(median_low(possible), now)

    def advance(self, seconds: float, now: float) -> None:
        """Note that everything until this time is stored. It goes back only if the clock of this machine was set back.

        Otherwise the lag would be 0 until that clock reaches the time that it has shown before.
        """
        set_back = self.reached is not None and self.reached > now + MAX_AHEAD
        self.reached = seconds if self.reached is None or set_back else max(self.reached, seconds)


@dataclass(eq=False)
class StreamPosition:
    """The position in a stream, of the relay that is connected.

    The consumer adds sequence numbers to the watermark when messages arrive; the writer marks them as done.

    Attributes:
        is_known: Return True while the stream is connected, and it is known whether messages before it are missing.
        origin: The relay, and the epoch of its sequence; `NO_STREAM` before the first connection.
        beside_relays: True if the stream is that of a host that is read beside those of relays: its lag does not count.
        clock: The time up to which everything is stored.
        saved: The position that was saved last, or at which this connection began.
    """

    is_known: Callable[[], bool]
    upstream_is_pds: bool = field(default=False, kw_only=True)
    beside_relays: bool = field(default=False, kw_only=True)
    origin: Origin = field(default=NO_STREAM, init=False)
    watermark: Watermark = field(default_factory=Watermark, init=False)
    clock: EventClock = field(default_factory=EventClock, init=False)
    saved: Position = field(default=Position(None, None), init=False)

    @property
    def lag(self) -> float | None:
        """Seconds since the time up to which everything is stored; None if that is not known.

        It grows with the clock whenever nothing is written, whatever the cause.
        """
        return None if self.clock.reached is None else max(0.0, time() - self.clock.reached)

    @property
    def cursor_age(self) -> float | None:
        """The lag, or before the first stored event the age of the message at the stored cursor; None if unknown."""
        if self.lag is not None:
            return self.lag
        stored_at = event_seconds(self.watermark.position_if_done(()).event_time)
        return None if stored_at is None else max(0.0, time() - stored_at)

    def begin(self, relay: str, epoch: int, watermark: Watermark) -> None:
        """Start again in the stream of `relay`; all messages of the previous connection must be done."""
        self.origin = Origin(relay, epoch, host_of(relay) if self.upstream_is_pds or self.beside_relays else None)
        self.watermark, self.saved = watermark, watermark.position_if_done(())

    def last_stored(self) -> StreamPoint | None:
        """Return the message at the position of the cursor; None if it is not known."""
        position = self.watermark.position_if_done(())
        if position.seq is None or not self.is_known():
            return None
        return StreamPoint(self.origin.relay, self.origin.epoch, position.seq, event_seconds(position.event_time))
