"""The search for an event time, on streams in memory. The oracle is the true time of each event."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.net.relay.seek import MAX_PROBES, TIMES_PER_SIGHTING, Entry, Sighting, seek

NOISE = 30.0
"""The greatest error of the time of an honest event, in seconds."""


@dataclass(frozen=True)
class StreamedEvent:
    """An event with the time at which the relay received it, and the time that its PDS wrote."""

    seq: int
    true_time: float
    written_time: float


@dataclass
class StreamInMemory:
    """The probe of a relay. Without a cursor, it sends the newest event as if it had just arrived."""

    events: Sequence[StreamedEvent]
    inclusive: bool = False
    probed: list[int | None] = field(default_factory=list)

    async def __call__(self, cursor: int | None) -> Sighting | None:
        self.probed.append(cursor)
        if cursor is None:
            return Sighting(self.events[-1].seq, (self.events[-1].written_time,)) if self.events else None
        first = cursor if self.inclusive else cursor + 1
        sent = [event for event in self.events if event.seq >= first][:TIMES_PER_SIGHTING]
        return Sighting(sent[0].seq, tuple(event.written_time for event in sent)) if sent else None


@pytest.mark.parametrize(
    ("times", "before"),
    [
        ((0.0,) * TIMES_PER_SIGHTING, True),
        ((0.0,) * (TIMES_PER_SIGHTING - 1), False),
        ((0.0,) * 7 + (100.0,) * 8, False),
        ((100.0,) * 7 + (0.0,) * 8, True),
    ],
)
def test_position_is_before_a_time_only_if_most_of_enough_messages_are(times: tuple[float, ...], before: bool) -> None:
    assert Sighting(1, times).is_before(50.0) is before


def regular(count: int, *, seconds: float = 1.0, seqs: int = 1) -> list[StreamedEvent]:
    """Return events with equal distances and correct times."""
    return [StreamedEvent(1 + n * seqs, n * seconds, n * seconds) for n in range(count)]


def lost(events: Sequence[StreamedEvent], entry: Entry, since: float) -> list[StreamedEvent]:
    """Return the events since a time that a relay does not send after the entry."""
    assert entry.cursor is not None
    return [event for event in events if event.true_time >= since and event.seq <= entry.cursor]


@st.composite
def streams(draw: st.DrawFn) -> list[StreamedEvent]:
    """Draw a stream with unused numbers and pauses, in which each third event may have any time at all."""
    numbers = random.Random(draw(st.integers(0, 2**32)))  # to draw each number takes a hundred times as long
    seq, time, events = 0, 0.0, []
    for n in range(draw(st.integers(1, 150))):
        seq += numbers.randint(1, numbers.choice([5, 5_000]))
        time += numbers.choice([0.0, numbers.uniform(0, 60)])
        error = numbers.choice([0.0, numbers.uniform(-NOISE, NOISE)])
        wrong = n % 3 == 0 and numbers.random() < 0.5
        events.append(StreamedEvent(seq, time, numbers.uniform(-1e9, 1e9) if wrong else time + error))
    return events


@pytest.mark.slow
@given(streams(), st.floats(0, 5_000), st.sampled_from([1, 10, 1_000]), st.booleans())
async def test_no_event_since_the_target_lies_before_the_entry(
    events: list[StreamedEvent], target: float, first_distance: int, inclusive: bool
) -> None:
    probe = StreamInMemory(events, inclusive)
    entry = await seek(target, probe, first_distance=first_distance)
    assert lost(events, entry, target + NOISE) == []
    assert len(probe.probed) <= MAX_PROBES


@pytest.mark.slow
@given(streams(), st.floats(0, 5_000), st.sampled_from([1, 10, 1_000]), st.booleans())
async def test_the_entry_is_close_to_the_target_if_all_times_are_correct(
    drawn: list[StreamedEvent], target: float, first_distance: int, inclusive: bool
) -> None:
    events = [StreamedEvent(event.seq, event.true_time, event.true_time) for event in drawn]
    entry = await seek(target, StreamInMemory(events, inclusive), first_distance=first_distance)
    assert entry.cursor is not None
    last_before = sum(event.true_time < target for event in events) - 1
    provable = events[max(last_before - TIMES_PER_SIGHTING, 0)].seq
    needed = max(events[-1].seq - provable + 1, first_distance)
    assert max(entry.cursor, events[0].seq) >= events[-1].seq - 4 * needed


async def test_the_whole_window_is_wanted_if_it_begins_after_the_target_or_no_time_is_readable() -> None:
    assert await seek(100.0, StreamInMemory([])) == Entry(None, None)
    probe = StreamInMemory(regular(500))
    assert await seek(-1.0, probe) == Entry(0, 1.0)
    assert probe.probed == [0]

    async def without_times(cursor: int | None) -> Sighting:
        return Sighting((cursor or 0) + 1, ())

    assert await seek(100.0, without_times) == Entry(0, None)


async def test_a_window_of_a_large_relay_needs_few_probes() -> None:
    first, rate, seconds = 30_000_000_000, 500, 3 * 86_400

    async def probe(cursor: int | None) -> Sighting | None:
        probed.append(cursor)
        seq = first + rate * seconds if cursor is None else max(cursor + 1, first)
        return Sighting(seq, tuple((seq + n - first) / rate for n in range(TIMES_PER_SIGHTING)))

    probed: list[int | None] = []
    entry = await seek(seconds - 1_200.0, probe)
    assert entry.cursor is not None
    assert 1_200 * rate < first + seconds * rate - entry.cursor < 4 * 1_200 * rate
    assert len(probed) < 35


async def test_a_quiet_relay_is_entered_at_its_beginning() -> None:
    stream = StreamInMemory(regular(500))

    async def probe(cursor: int | None) -> Sighting | None:
        return None if cursor is None else await stream(cursor)

    assert await seek(400.0, probe, first_distance=10) == Entry(0, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("target", [300.0, 650.0, 900.0])
async def test_a_row_of_events_with_old_times_does_not_move_the_entry_past_the_target(target: float) -> None:
    events = regular(20_000, seconds=0.05, seqs=10)
    undisturbed = StreamInMemory(events)
    await seek(target, undisturbed, first_distance=100)
    past = {cursor for cursor in undisturbed.probed if cursor is not None and cursor > 200 * (target + 20)}
    assert past
    for cursor in past:
        # The backlog of one PDS: 40 events in a row, of which each is an hour old.
        disturbed = [
            StreamedEvent(event.seq, event.true_time, event.true_time - 3_600 * (0 <= event.seq - cursor < 400))
            for event in events
        ]
        probe = StreamInMemory(disturbed)
        entry = await seek(target, probe, first_distance=100)
        assert cursor in probe.probed
        assert lost(disturbed, entry, target) == []


async def test_a_few_messages_at_the_end_of_a_stream_prove_no_position() -> None:
    events = [
        StreamedEvent(event.seq, event.true_time, -1e9 if event.true_time > 92.0 else event.written_time)
        for event in regular(100, seqs=1_000)
    ]
    entry = await seek(92.0, StreamInMemory(events))
    assert entry.cursor is not None
    assert entry.cursor > 60_000
    assert lost(events, entry, 92.0) == []
