"""Probe the stream of a relay over the network to find the position of an event time."""

import asyncio
from dataclasses import dataclass, field

from indexer.atproto.limits import Limits
from indexer.net.relay.seek import TIMES_PER_SIGHTING, Entry, Sighting, seek
from indexer.net.relay.stream_socket import Ending, StreamSocket, StreamSocketError
from indexer.net.relay.subscription import ConnectionSettings, open_stream
from indexer.sync.events import StreamError, decode_frame, event_seconds

_MESSAGES_PER_PROBE = 4 * TIMES_PER_SIGHTING
"""Messages received by one probe if many have no readable time."""


@dataclass(frozen=True, slots=True)
class StreamSeek:
    """Finds the position of an event time in the stream of a relay.

    Attributes:
        connect_timeout: Seconds for the connection of one probe.
        message_timeout: Seconds in which the messages of one probe must arrive.
        pause_timeout: Seconds between two messages of one probe, after which no more are expected.
        total_timeout: Seconds for all probes.
        resolution: The accuracy of the cursor, in sequence numbers.
    """

    limits: Limits
    user_agent: str
    connect_timeout: float = 5.0
    message_timeout: float = 5.0
    pause_timeout: float = 1.0
    total_timeout: float = 180.0
    resolution: int = 1_000

    async def __call__(self, relay: str, target: float) -> Entry:
        """Return the entry into the stream of `relay` at the event time `target`, in Unix seconds.

        Raises:
            OSError: The relay is unavailable or too slow (includes TimeoutError).
        """

        async def probe(cursor: int) -> Sighting | None:
            return await self.probe(relay, cursor)

        async with asyncio.timeout(self.total_timeout):
            return await seek(target, probe, resolution=self.resolution)

    async def probe(self, relay: str, cursor: int) -> Sighting | None:
        """Return the first messages that `relay` sends after `cursor`.

        Returns:
            None if the cursor is not in the stream: the relay sends nothing in time, an error frame, or a message
            with a lower sequence number, because it continued live.

        Raises:
            OSError: The relay is unavailable (includes TimeoutError).
        """
        settings = ConnectionSettings(connect_timeout=self.connect_timeout)
        async with open_stream(relay, cursor, self.limits.frame_bytes, self.user_agent, settings) as socket:
            received = await self._receive(socket, cursor)
        return None if received.seq is None or received.seq < cursor else Sighting(received.seq, tuple(received.times))

    async def _receive(self, socket: StreamSocket, cursor: int) -> "_Received":
        """Receive messages until there are enough, or no more arrive."""
        received = _Received()
        clock = asyncio.get_running_loop().time
        latest = clock() + self.message_timeout
        try:
            async with asyncio.timeout_at(latest) as deadline:
                while not received.is_complete:
                    received.add(await socket.receive(), self.limits)
                    if received.seq is not None:
                        deadline.reschedule(min(latest, clock() + self.pause_timeout))
        except TimeoutError:
            return received  # a quiet relay
        except StreamSocketError as error:
            if received.seq is None and error.ending is Ending.TOO_LARGE:
                return _Received(cursor)  # a message without a readable time
            if received.seq is None and error.ending is not Ending.CLOSED_BY_RELAY:
                raise
        return received


@dataclass(slots=True)
class _Received:
    """The messages that one probe received.

    Attributes:
        seq: The first sequence number.
        messages: The number of messages, readable or not.
        ended: True after an error frame.
    """

    seq: int | None = None
    times: list[float] = field(default_factory=list)
    messages: int = 0
    ended: bool = False

    @property
    def is_complete(self) -> bool:
        return self.ended or len(self.times) == TIMES_PER_SIGHTING or self.messages == _MESSAGES_PER_PROBE

    def add(self, frame: bytes, limits: Limits) -> None:
        event = decode_frame(frame, limits)
        self.messages += 1
        self.ended = isinstance(event, StreamError)
        if self.seq is None:
            self.seq = event.seq
        seconds = event_seconds(getattr(event, "time", None))
        if seconds is not None:
            self.times.append(seconds)
