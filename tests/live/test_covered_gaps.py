"""Which gaps the stream of another relay covers. In random worlds, nothing is lost when a gap is closed."""

import asyncio
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from indexer.db.gaps import Gaps, OpenGaps
from indexer.live.covered_gaps import CoveredGaps
from indexer.reasons import GapReason
from indexer.sync.shard import Shard
from indexer.sync.stream import Gap, OpenGap
from indexer.telemetry.metrics import Metrics

FIRST, SECOND, THIRD = RELAYS = ("wss://one.test", "wss://two.test", "wss://three.test")
MARGIN = 10.0
MAX_DELAY = 9
"""Seconds from an event to its message. What happens in one second has any order, so it is less than the margin."""
PATIENCE = 60.0
BEGINNING = 1_000.0


class GapsInMemory(OpenGaps):
    """Open gaps without a database.

    Attributes:
        closed: The closed gaps, each with the relay whose stream covers it.
    """

    def __init__(self) -> None:
        super().__init__(cast(Gaps, None), Shard(), Metrics())
        self.gaps: list[OpenGap] = []
        self.closed: list[tuple[OpenGap, str]] = []
        self._ids = count(1)

    async def open(self, gap: Gap) -> OpenGap:
        self.gaps = [*self.gaps, opened := OpenGap(next(self._ids), gap, 0.0)]
        return opened

    async def close_covered(self, gap: OpenGap, relay: str) -> None:
        self.gaps = [one for one in self.gaps if one is not gap]
        self.closed.append((gap, relay))


class Streams:
    """Streams, and a clock for both kinds of time.

    Attributes:
        until: The time up to which all that a relay has sent is stored.
        newest: When the newest message that a relay has brought arrived for the first time.
        omitting: Relays that omit messages.
    """

    def __init__(self, *relays: str) -> None:
        self.now = BEGINNING
        self.gaps = GapsInMemory()
        self.until: dict[str, float | None] = dict.fromkeys(relays, self.now)
        self.newest = dict.fromkeys(relays, 0.0)
        self.omitting: set[str] = set()
        self.begin()

    def begin(self) -> None:
        """Forget what is in memory, as a restarted process."""
        self.covered = CoveredGaps(
            self.gaps,
            lambda: self.until,
            lambda relay: self.newest[relay],
            lambda relay, _: relay in self.omitting,
            MARGIN,
            PATIENCE,
            clock=lambda: self.now,
            wall_clock=lambda: self.now,
        )

    async def open_gap(self, relay: str) -> None:
        """Open a gap in the stream of a relay, and let it be noticed."""
        await self.gaps.open(Gap(relay, "0/1", GapReason.SEQUENCE_RESTARTED))
        await self.covered.close()

    def pass_gaps(self) -> None:
        """Let all streams pass the gaps that were noticed now."""
        self.newest = dict.fromkeys(self.newest, self.now + 1.0)
        self.until = dict.fromkeys(self.until, self.now + MARGIN)

    async def is_closed(self) -> bool:
        await self.covered.close()
        return not self.gaps.gaps


async def test_gap_is_closed_by_a_stream_that_is_alive_and_has_passed_it() -> None:
    streams = Streams(FIRST, SECOND)
    await streams.open_gap(SECOND)
    streams.newest[FIRST] = streams.now + 1.0
    streams.until[FIRST] = streams.now + MARGIN - 0.1
    assert not await streams.is_closed()
    streams.until[FIRST] = streams.now + MARGIN
    assert await streams.is_closed()
    assert [(gap.gap.relay, by) for gap, by in streams.gaps.closed] == [(SECOND, FIRST)]


async def test_stream_that_has_brought_nothing_new_covers_no_gap() -> None:
    """Its relay may have stopped to receive anything, and a silent stream seems to be up to date."""
    streams = Streams(FIRST, SECOND)
    await streams.open_gap(SECOND)
    streams.pass_gaps()
    streams.newest[FIRST] = streams.now
    assert not await streams.is_closed()


async def test_stream_with_an_open_gap_covers_no_gap() -> None:
    streams = Streams(FIRST, SECOND)
    await streams.open_gap(SECOND)
    await streams.open_gap(FIRST)
    streams.pass_gaps()
    assert not await streams.is_closed()
    assert not streams.covered.may_close_all()


async def test_stream_of_a_relay_that_omits_messages_covers_no_gap() -> None:
    streams = Streams(FIRST, SECOND)
    await streams.open_gap(SECOND)
    streams.pass_gaps()
    streams.omitting.add(FIRST)
    assert not await streams.is_closed()
    assert not streams.covered.may_close_all()


async def test_reconciliation_waits_for_some_time_for_a_stream_that_may_cover_the_gap() -> None:
    streams = Streams(FIRST, SECOND)
    await streams.gaps.open(Gap(SECOND, "0/1", GapReason.NO_CURSOR))
    assert streams.covered.may_close_all(), "it is not noticed yet"
    await streams.covered.close()
    streams.now += PATIENCE - 0.1
    assert streams.covered.may_close_all()
    streams.now += 0.1
    assert not streams.covered.may_close_all()


async def test_no_other_stream_covers_a_gap_in_the_only_one() -> None:
    streams = Streams(FIRST)
    await streams.open_gap(FIRST)
    assert not streams.covered.may_close_all()


Event = tuple[int, int]
"""The number of its host, and when it happened."""


@dataclass
class SimulatedStream:
    """A relay that sends each event once, up to `MAX_DELAY` seconds after it happened, and the messages received of it.

    Attributes:
        sent: The events in the order of the stream.
        received: The number of messages that were received or lost.
        stored: The number of those that are stored or lost.
    """

    delays: list[int]  # of each host, in seconds
    sent: list[Event] = field(default_factory=list)
    received: int = 0
    stored: int = 0
    connected: bool = True


class SimulatedWorld(Streams):
    """Three relays that send the events of some hosts. Connections, messages and the memory of the process are lost.

    Attributes:
        owed: What a relay had sent before each of its gaps was opened, by the ID of the gap.
        stored: The stored events.
    """

    def __init__(self, random: Random) -> None:
        super().__init__(*RELAYS)
        self.random = random
        self.streams = {relay: SimulatedStream([random.randint(0, MAX_DELAY) for _ in range(3)]) for relay in RELAYS}
        self.owed: dict[int, set[Event]] = {}
        self.stored: set[Event] = set()
        self.first_at: dict[Event, float] = {}

    async def run(self, seconds: int) -> None:
        """Let time pass. What a relay had sent before a gap was opened must be stored when the gap is closed."""
        for _ in range(seconds):
            self.now += 1
            for relay, stream in self.streams.items():
                self._send(stream)
                await self._connect(relay, stream)
                self._receive(relay, stream)
                self._store(relay, stream)
            if self.random.random() < 0.01:
                self._restart()
            closed = len(self.gaps.closed)
            await self.covered.close()
            for gap, _ in self.gaps.closed[closed:]:
                assert self.owed[gap.id] <= self.stored

    def _send(self, stream: SimulatedStream) -> None:
        for host, delay in enumerate(stream.delays):
            at = int(self.now) - delay
            if at > BEGINNING and at % (host + 2):
                stream.sent.append((host, at))

    async def _connect(self, relay: str, stream: SimulatedStream) -> None:
        if stream.connected:
            stream.connected = self.random.random() > 0.05
        elif self.random.random() < 0.2 and stream.stored == stream.received:  # a connection waits until all is stored
            stream.connected = True
            if self.random.random() < 0.5:
                gap = await self.gaps.open(Gap(relay, "0/1", GapReason.SEQUENCE_RESTARTED))
                self.owed[gap.id] = set(stream.sent)
                stream.received = stream.stored = len(stream.sent)

    def _receive(self, relay: str, stream: SimulatedStream) -> None:
        """Receive some of the messages: the network may be slow."""
        number = self.random.choice((0, 1, 5, 100)) if stream.connected else 0
        for event in stream.sent[stream.received : stream.received + number]:
            self.newest[relay] = max(self.newest[relay], self.first_at.setdefault(event, self.now))
            stream.received += 1

    def _store(self, relay: str, stream: SimulatedStream) -> None:
        """Store some of the messages that were received. All have the time at which they happened."""
        number = self.random.choice((0, 2, 100))
        stored = stream.sent[stream.stored : min(stream.stored + number, stream.received)]
        if stored:
            self.stored |= set(stored)
            stream.stored += len(stored)
            self.until[relay] = max(self.until[relay] or 0.0, *(at for _, at in stored))

    def _restart(self) -> None:
        """Kill the process: what is not stored is received again."""
        self.first_at.clear()
        for stream in self.streams.values():
            stream.received, stream.connected = stream.stored, False
        self.begin()


@given(st.integers(0, 2**32))
def test_what_a_relay_sent_before_a_gap_is_stored_when_another_stream_covers_it(seed: int) -> None:
    asyncio.run(SimulatedWorld(Random(seed)).run(300))


def test_worlds_close_gaps() -> None:
    worlds = [SimulatedWorld(Random(seed)) for seed in range(10)]
    for world in worlds:
        asyncio.run(world.run(300))
    assert sum(len(world.gaps.closed) for world in worlds) > len(worlds)
