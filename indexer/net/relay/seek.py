"""Look into the stream of a relay: its next event, its present end, and the position of an event time.

A cursor of one relay means nothing to another one, but both send the same events at nearly the same time. `seek` finds
an event time by a bounded number of probes. It knows the stream only through a `Probe`, which does the network requests
(`StreamSeek.probe`).

The `time` of an event comes from its PDS and can be wrong. So one sighting has the times of several messages, and only
a majority before the target proves that a position lies before it. Every other answer counts as "not before": entering
too early repeats messages, entering too late loses some.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from statistics import median

from indexer.atproto.limits import Limits
from indexer.net.relay.stream_socket import Ending, StreamSocket, StreamSocketError
from indexer.net.relay.subscription import ConnectionSettings, open_stream
from indexer.sync.events import (
    MAX_SEQ,
    Event,
    InfoEvent,
    MalformedEvent,
    StreamError,
    UnknownEvent,
    decode_frame,
    event_seconds,
)
from indexer.sync.stream import Position

TIMES_PER_SIGHTING = 15
"""Event times that prove a position. A position with fewer messages after it is at the end of the stream."""

_MESSAGES_PER_PROBE = 4 * TIMES_PER_SIGHTING
"""Messages received by one probe if many have no readable time."""

LIVE_TIMEOUT = 30.0
"""Seconds in which the relay must send a message."""

_CHECK_DISTANCES = (1, 8, 64, 512)
"""Distances below a found position at which it is checked, in units of the resolution."""


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


Probe = Callable[[int], Awaitable[Sighting | None]]
"""Returns the first messages after a cursor.

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


async def seek(target: float, probe: Probe, *, resolution: int = 1_000, max_probes: int = 60) -> Entry:
    """Return the entry into a stream at an event time.

    Args:
        target: Unix seconds.
        probe: Its exceptions end the search.
        resolution: The accuracy of the cursor, in sequence numbers. It is at most about twice this amount too low.
        max_probes: The limit on calls of `probe`. When it is reached, the cursor is lower than necessary.
    """
    oldest = await probe(0)
    if oldest is None:
        return Entry(None, None)
    if not oldest.is_before(target):
        return Entry(0, oldest.first_time)
    cursor = await _Search(target, probe, resolution, max_probes - 1, [oldest.seq]).run()
    # With cursor 0, the relay does not report an outdated cursor if it forgets its oldest message meanwhile.
    return Entry(0 if cursor <= oldest.seq else cursor, oldest.first_time)


@dataclass(slots=True)
class _Search:
    """The state of a search.

    Attributes:
        probes_left: The number of further calls of `probe`.
        positions: Ascending sequence numbers of messages that were sighted before the target. Search upwards and
            bisection append to it; a contradiction removes those above it.
    """

    target: float
    probe: Probe
    resolution: int
    probes_left: int
    positions: list[int]

    async def run(self) -> int:
        """Return a position that several sightings prove, or a low one if there are not enough probes for that."""
        high = await self._search_upwards()
        while True:
            await self._bisect(high)
            if self.probes_left < len(_CHECK_DISTANCES):
                return self.positions[-2] if len(self.positions) > 1 else self._low
            contradiction = await self._contradiction()
            if contradiction is None:
                return self._low - self.resolution
            high = contradiction
            self.positions = [position for position in self.positions if position < high]

    @property
    def _low(self) -> int:
        return self.positions[-1]

    @property
    def _can_search(self) -> bool:
        """True while probes are left besides those for the check of the result."""
        return self.probes_left > len(_CHECK_DISTANCES)

    async def _sight(self, cursor: int) -> Sighting | None:
        """Return the sighting after `cursor` if it is before the target."""
        self.probes_left -= 1
        sighting = await self.probe(cursor)
        return sighting if sighting is not None and sighting.is_before(self.target) else None

    async def _search_upwards(self) -> int:
        """Double the distance until a position is not before the target; return this position."""
        step = self.resolution
        while self._can_search and self._low + step < MAX_SEQ:
            position = self._low + step
            sighting = await self._sight(position)
            if sighting is None:
                return position
            self.positions.append(sighting.seq)
            step *= 2
        return min(self._low + step, MAX_SEQ)

    async def _bisect(self, high: int) -> None:
        """Raise the low position until it is within the resolution of `high`, which is not before the target."""
        while self._can_search and high - self._low > self.resolution:
            middle = (self._low + high) // 2
            sighting = await self._sight(middle)
            if sighting is None or sighting.seq >= high:  # the latter contradicts the sighting at `high`
                high = middle
            else:
                self.positions.append(sighting.seq)

    async def _contradiction(self) -> int | None:
        """Return a position below the low one that is not before the target; None if there is none.

        Many messages in a row may have wrong times, for example while the relay reads the backlog of one PDS. All
        sightings since the last doubling of the distance may lie among them.
        """
        for distance in _CHECK_DISTANCES:
            position = self._low - distance * self.resolution
            if position <= self.positions[0]:
                return None
            if await self._sight(position) is None:
                return position
        return None


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


async def live_position(relay: str, limits: Limits, user_agent: str) -> Position | None:
    """Return number and time of the next valid message that the relay sends; None if it sends none in time.

    Raises:
        OSError: The relay is unavailable.
    """
    try:
        async with asyncio.timeout(LIVE_TIMEOUT):
            async with open_stream(relay, None, limits.frame_bytes, user_agent, ConnectionSettings()) as socket:
                while True:
                    event = decode_frame(await socket.receive(), limits)
                    if not isinstance(event, InfoEvent | StreamError | UnknownEvent | MalformedEvent):
                        return Position(event.seq, event.time)
    except TimeoutError:
        return None
