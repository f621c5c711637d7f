"""The position in the relay's stream that the firehose consumer and the batch writer share."""

from collections.abc import Callable

from indexer.net.http import host_of
from indexer.sync.events import event_seconds
from indexer.sync.repo import StreamPoint
from indexer.sync.stream import Watermark


class StreamPosition:
    """The position in the stream of the connected relay.

    The consumer adds sequence numbers to the watermark when messages arrive; the writer marks them as done.

    Attributes:
        is_known: Return True while the stream is connected, and it is known whether messages before it are missing.
        relay: The URL of the relay; "" before the first connection.
        epoch: The epoch of the relay's sequence.
        host: The host of the stream if the upstream is a PDS, else None.
        watermark: The sequence numbers that are not done yet, and the position up to which all are done.
    """

    def __init__(self, is_known: Callable[[], bool], *, upstream_is_pds: bool = False) -> None:
        self.is_known = is_known
        self.relay = ""
        self.epoch = 0
        self.host: str | None = None
        self.watermark = Watermark()
        self._upstream_is_pds = upstream_is_pds

    def begin(self, relay: str, epoch: int, watermark: Watermark) -> None:
        """Start again in the stream of `relay`; all messages of the previous connection must be done."""
        self.relay = relay
        self.epoch = epoch
        self.host = host_of(relay) if self._upstream_is_pds else None
        self.watermark = watermark

    def last_stored(self) -> StreamPoint | None:
        """Return the message at the position of the cursor; None if it is not known."""
        position = self.watermark.position_if_done(())
        if position.seq is None or not self.is_known():
            return None
        return StreamPoint(self.relay, self.epoch, position.seq, event_seconds(position.event_time))
