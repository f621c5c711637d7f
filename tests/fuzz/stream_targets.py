"""Event times that a relay sends: the search for a position in its stream ends soon, and loses no event."""

import asyncio
from random import Random

from indexer.net.relay.seek import MAX_PROBES, TIMES_PER_SIGHTING, Sighting, seek
from indexer.sync.events import MAX_SEQ, event_seconds
from tests.fuzz.comparison import DifferenceError
from tests.fuzz.fuzz_target import Choices, FuzzTarget, TextTarget, text_of
from tests.fuzz.outcome_counts import OutcomeCounts
from tests.fuzz.seed_files import published_lines, some_of

FIRST_DISTANCES = (1, 100, 1_000)
DATETIMES = ("2026-11-28T01:02:03.456Z", "2026-11-28T01:02:03+01:00", "2026-11-28", "0001-01-01T00:00:00+23:59", "now")


class StreamSeeks(FuzzTarget):
    """Searches in streams that the choices of an input make: half of the relays are honest, by the first byte.

    An honest relay has a stream of events whose time is their sequence number. The entry is before the target, unless
    the stream begins after it. Another relay answers each probe as the next bytes say.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self.counts = OutcomeCounts("found", "from the beginning", "nothing sent", "another relay")

    def close(self) -> None:
        """Close the event loop."""
        self._loop.close()

    def seeds(self, random: Random, count: int) -> list[bytes]:
        """Return random choices."""
        return [bytes([number % 2]) + random.randbytes(random.choice((10, 60, 300))) for number in range(count)]

    def compare(self, data: bytes) -> None:
        """Search once. Raises `DifferenceError`."""
        self.counts.executions += 1
        choices = Choices(data)
        honest, first_distance = choices.number(2) == 0, choices.of(FIRST_DISTANCES)
        first, events, target = (_large(choices) for _ in range(3))
        probes = 0

        async def probe(cursor: int | None) -> Sighting | None:
            nonlocal probes
            probes += 1
            if honest:
                start = first + max(events - 1, 0) if cursor is None else max(first, cursor + 1)
                times = range(start, min(first + events, start + TIMES_PER_SIGHTING))
                return Sighting(times.start, tuple(map(float, times))) if times else None
            if choices.number(4) == 0:
                return None
            seq = min((cursor or 0) + _large(choices), MAX_SEQ)
            return Sighting(seq, tuple(float(_large(choices)) for _ in range(choices.number(TIMES_PER_SIGHTING + 1))))

        entry = self._loop.run_until_complete(seek(float(target), probe, first_distance=first_distance))
        if probes > MAX_PROBES or not 0 <= (entry.cursor or 0) <= MAX_SEQ:
            raise DifferenceError(f"{entry} after {probes} probes")
        if honest and entry.cursor and entry.cursor >= target:
            raise DifferenceError(f"{entry} is after the target {target} in {events} events from {first}")
        if not honest:
            self.counts.add("another relay")
        else:
            self.counts.add({None: "nothing sent", 0: "from the beginning"}.get(entry.cursor, "found"))


def _large(choices: Choices) -> int:
    """Return a number of up to 48 bits."""
    return choices.number(256) << choices.number(41)


class EventTimes(TextTarget):
    """Times of events, which their senders choose: a finite number of seconds, or none."""

    def __init__(self) -> None:
        self.counts = OutcomeCounts("times", "none")

    def seeds(self, random: Random, count: int) -> list[bytes]:
        """Return published times, a half if there are so many, and some of our own."""
        made = some_of(published_lines("atproto-interop-tests/syntax/datetime_*.txt"), random, count // 2)
        return made + [DATETIMES[number % len(DATETIMES)].encode() for number in range(count - len(made))]

    def compare(self, data: bytes) -> None:
        """Read a time. Raises `DifferenceError`."""
        self.counts.executions += 1
        seconds = event_seconds(text_of(data))
        if seconds is not None and not -63_000_000_000 < seconds < 260_000_000_000:  # the years 1 to 9999
            raise DifferenceError(f"{seconds} seconds")
        self.counts.add("none" if seconds is None else "times")
