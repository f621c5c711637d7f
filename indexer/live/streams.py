"""The streams that the daemon reads at once: each one has a connection, a position and a consumer of its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic

from indexer.live.firehose_consumer import FirehoseConsumer, StreamContinuity
from indexer.live.hint_reader import HintReader
from indexer.live.stream_position import StreamPosition
from indexer.net.relay.subscription import Subscription


@dataclass(eq=False, slots=True)
class Stream:
    """A stream, of one relay or of the first of several that works."""

    subscription: Subscription
    continuity: StreamContinuity | None  # None for that of a Jetstream
    position: StreamPosition
    consumer: FirehoseConsumer | HintReader

    @property
    def relay(self) -> str | None:
        """The URL of the connected relay; None if none is connected."""
        connection = self.subscription.connection
        return None if connection is None else connection.relay

    @property
    def trouble(self) -> str | None:
        """Why the stream delivers nothing; None if it is connected and its last message was in order."""
        if self.consumer.last_error or self.relay is not None:
            return self.consumer.last_error
        error = self.subscription.last_error
        return f"not connected; last error: {error}" if error else "not connected"


def open_relays(streams: Sequence[Stream]) -> list[str]:
    """Return the URLs of the relays that are connected."""
    return [stream.relay for stream in streams if stream.relay is not None]


def silent_seconds(streams: Sequence[Stream], relay: str | None = None) -> float | None:
    """Return the time since the last message, of one relay or of any; None if there was none."""
    times = [at for stream in streams for sender, at in stream.consumer.last_message.items() if relay in (None, sender)]
    return monotonic() - max(times) if times else None
