"""Look into the stream of a relay: its next event, and the position of an event time.

A cursor of one relay means nothing to another one, but both send the same events at nearly the same time. `seek` goes
back from the newest message to the oldest one, in growing steps. It knows the stream only through a `Probe`, which does
the network requests (`StreamSeek.probe`).

The `time` of an event comes from its PDS and can be wrong. So one sighting has the times of several messages, and only
a majority before the target proves that a position lies before it. The backlog of one PDS may be many old messages in a
row, so all older positions and a newer one must be proven, too. Every other answer counts as "not before": entering too
early repeats messages, entering too late loses some.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from statistics import median

from indexer.atproto.limits import Limits
from indexer.net.relay.stream_socket import Ending, StreamSocket, StreamSocketError
from indexer.net.relay.subscription import ConnectionSettings, open_stream
from indexer.sync.events import Event, StreamError, decode_frame, event_seconds

TIMES_PER_SIGHTING = 15
"""Event times that prove a position. A position with fewer messages after it is at the end of the stream."""
MAX_PROBES = 60
_SEARCH_SECONDS = 180.0
_MESSAGES_PER_PROBE = 4 * TIMES_PER_SIGHTING
"""Messages received by one probe if many have no readable time."""
_GROWTH = 1.5
"""Factor from one distance to the next one. The entry is at most about three times as far back as necessary."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """The first messages that a relay sends after a cursor.

    Attributes:
        seq: The sequence number of the first message, at least the requested cursor.
        times: The readable event times of the first messages, as Unix seconds; at most `TIMES_PER_SIGHTING`.
    """

    seq: int
    times: tuple[float, ...]

    @property
    def first_time(self) -> float | None:
        """The time at which the messages begin: the median of the first three times; None if there are none."""
        return median(self.times[:3]) if self.times else None

    def is_before(self, target: float) -> bool:
        """Return True if enough messages prove that the position lies before `target`."""
        return len(self.times) >= TIMES_PER_SIGHTING and median(self.times) < target


Probe = Callable[[int | None], Awaitable[Sighting | None]]
"""Returns the first messages after a cursor, or the next ones (None).

None: the relay sends nothing, an error, or a sequence number below the cursor, so the cursor is not in its stream.
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """Where to enter a stream.

    Attributes:
        cursor: The relay sends every event since the target after this cursor. 0: the whole window of the relay is
            needed. None: the relay sends nothing at all after cursor 0.
        oldest_time: The event time of the oldest messages that the relay still has, as Unix seconds; None if unknown.
            If it is not before the target, the relay may have lost events since the target.
    """

    cursor: int | None
    oldest_time: float | None


async def seek(target: float, probe: Probe, *, first_distance: int = 1_000) -> Entry:
    """Return the entry into a stream at an event time, after at most `MAX_PROBES` probes.

    Args:
        target: Unix seconds.
        probe: Its exceptions end the search.
        first_distance: The first distance from the newest message, in sequence numbers.
    """
    oldest = await probe(0)
    if oldest is None:
        return Entry(None, None)
    newest = await probe(None) if oldest.is_before(target) else None
    distance, before = float(first_distance), list[int]()
    for _ in range(MAX_PROBES - 2):
        if newest is None or newest.seq - distance <= oldest.seq:
            break
        position = newest.seq - int(distance)
        sighting = await probe(position)
        if sighting is not None and sighting.is_before(target):
            before.append(position)
        else:
            before.clear()
        distance *= _GROWTH
    # Without a second proof, 0: then the relay does not report an outdated cursor if it forgets its oldest message.
    return Entry(before[1] if len(before) > 1 else 0, oldest.first_time)


@dataclass(frozen=True, slots=True)
class StreamSeek:
    """Finds the position of an event time in the stream of a relay.

    Attributes:
        connect_timeout: Seconds for the connection of one probe.
        message_timeout: Seconds in which the messages of one probe must arrive.
        pause_timeout: Seconds between two messages of one probe, after which no more are expected.
        first_distance: As in `seek`.
    """

    limits: Limits
    user_agent: str
    connect_timeout: float = 5.0
    message_timeout: float = 5.0
    pause_timeout: float = 1.0
    first_distance: int = 1_000

    async def __call__(self, relay: str, target: float) -> Entry:
        """Return the entry into the stream of `relay` at the event time `target`, in Unix seconds.

        Raises:
            OSError: The relay is unavailable or too slow (includes TimeoutError).
        """
        async with asyncio.timeout(_SEARCH_SECONDS):
            return await seek(target, lambda cursor: self.probe(relay, cursor), first_distance=self.first_distance)

    async def probe(self, relay: str, cursor: int | None) -> Sighting | None:
        """Return the first messages that `relay` sends after `cursor` (None: the next ones).

        Returns:
            None if the cursor is not in the stream: the relay sends nothing in time, an error frame, or a message
            with a lower sequence number, because it continued live.

        Raises:
            OSError: The relay is unavailable (includes TimeoutError).
        """
        settings = ConnectionSettings(connect_timeout=self.connect_timeout)
        async with open_stream(relay, cursor, self.limits.frame_bytes, self.user_agent, settings) as socket:
            seqs, times = list[int](), list[float]()
            try:
                await self._receive(socket, seqs, times)
            except TimeoutError:
                pass  # a quiet relay
            except StreamSocketError as error:
                if not seqs and error.ending is Ending.TOO_LARGE:
                    return Sighting(cursor or 0, ())  # a message without a readable time
                if not seqs and error.ending is not Ending.CLOSED_BY_RELAY:
                    raise
        return None if not seqs or seqs[0] < (cursor or 0) else Sighting(seqs[0], tuple(times))

    async def _receive(self, socket: StreamSocket, seqs: list[int], times: list[float]) -> None:
        """Receive messages until there are enough times, or no more arrive."""
        clock = asyncio.get_running_loop().time
        latest = clock() + self.message_timeout
        async with asyncio.timeout_at(latest) as deadline:
            for _ in range(_MESSAGES_PER_PROBE):
                event = decode_frame(await socket.receive(), self.limits)
                seconds = event_seconds(getattr(event, "time", None))
                seqs += [] if event.seq is None else [event.seq]
                times += [] if seconds is None else [seconds]
                if isinstance(event, StreamError) or len(times) == TIMES_PER_SIGHTING:
                    return
                if seqs:
                    deadline.reschedule(min(latest, clock() + self.pause_timeout))


async def first_event(
    relay: str, cursor: int | None, limits: Limits, user_agent: str, *, connect_timeout: float, message_timeout: float
) -> Event | None:
    """Return the first event after `cursor` (None: the next one); None if the relay sends nothing in time.

    Raises:
        OSError: The relay cannot be reached, refuses the connection, or ends it (includes TimeoutError).
    """
    settings = ConnectionSettings(connect_timeout=connect_timeout)
    async with open_stream(relay, cursor, limits.frame_bytes, user_agent, settings) as socket:
        try:
            async with asyncio.timeout(message_timeout):
                return decode_frame(await socket.receive(), limits)
        except TimeoutError:
            return None
