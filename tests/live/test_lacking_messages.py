"""Which stream is charged with which message. A reference that keeps everything, and computes it anew, must agree."""

import tracemalloc
from dataclasses import dataclass, field
from time import process_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.atproto.syntax import tid_of
from indexer.live.lacking_messages import MAX_MISSING, LackingMessages

RELAYS = ("wss://one.test", "wss://two.test", "wss://three.test")
FIRST, SECOND, THIRD = RELAYS
ALICE, BOB = "did:plc:alice", "did:web:bob.test"
SECONDS = 60.0
MAX_BYTES = 160
"""Memory of one message that is expected."""
MAX_SECONDS = 2e-6
"""CPU of one message, for each stream."""


def rev_of(number: int) -> str:
    return tid_of(1_700_000_000_000_000 + number, 0)


def lacking(*relays: str, **options: int) -> LackingMessages:
    """Return streams that are all caught up."""
    messages = LackingMessages(relays, SECONDS, **options)
    for relay in relays:
        messages.set_caught_up(relay, 0.0, caught_up=True)
    return messages


def test_message_that_one_stream_has_not_brought_in_time_is_charged_to_it_once() -> None:
    messages = lacking(FIRST, SECOND)
    messages.add(FIRST, ALICE, rev_of(1), 0.0, is_new=True)
    messages.add(FIRST, ALICE, rev_of(2), 1.0, is_new=True)
    messages.add(SECOND, ALICE, rev_of(2), 2.0, is_new=False)
    assert messages.charges(SECONDS - 0.1) == {}
    assert messages.charges(SECONDS) == {SECOND: [(ALICE, rev_of(1))]}
    assert messages.charges(10 * SECONDS) == {}


def test_all_streams_but_those_that_brought_it_are_charged() -> None:
    messages = lacking(*RELAYS)
    messages.add(THIRD, ALICE, rev_of(1), 0.0, is_new=True)
    messages.add(FIRST, BOB, rev_of(2), 0.0, is_new=True)
    messages.add(SECOND, BOB, rev_of(2), 1.0, is_new=False)
    charged = messages.charges(SECONDS)
    assert charged == {FIRST: [(ALICE, rev_of(1))], SECOND: [(ALICE, rev_of(1))], THIRD: [(BOB, rev_of(2))]}


def test_message_that_is_not_proven_charges_nobody() -> None:
    messages = lacking(FIRST, SECOND)
    messages.add(FIRST, ALICE, rev_of(1), 0.0, is_new=False)
    assert messages.charges(SECONDS) == {}


def test_stream_that_was_away_gets_the_whole_time_from_when_it_has_caught_up() -> None:
    messages = lacking(FIRST, SECOND)
    messages.set_caught_up(SECOND, 1.0, caught_up=False)
    messages.add(FIRST, ALICE, rev_of(1), 2.0, is_new=True)
    messages.add(FIRST, ALICE, rev_of(2), 3.0, is_new=True)
    assert messages.charges(600.0) == {}
    messages.set_caught_up(SECOND, 600.0, caught_up=True)
    messages.set_caught_up(SECOND, 601.0, caught_up=True)
    messages.add(SECOND, ALICE, rev_of(2), 602.0, is_new=False)
    assert messages.charges(600.0 + SECONDS - 0.1) == {}
    assert messages.charges(600.0 + SECONDS) == {SECOND: [(ALICE, rev_of(1))]}


def test_stream_owes_nothing_from_before_it_was_caught_up_for_the_first_time() -> None:
    messages = LackingMessages((FIRST, SECOND), SECONDS)
    messages.set_caught_up(FIRST, 0.0, caught_up=True)
    messages.add(FIRST, ALICE, rev_of(1), 0.0, is_new=True)
    messages.set_caught_up(SECOND, 1.0, caught_up=True)
    messages.add(FIRST, ALICE, rev_of(2), 2.0, is_new=True)
    assert messages.charges(SECONDS + 2.0) == {SECOND: [(ALICE, rev_of(2))]}


def test_what_a_stream_brings_while_it_catches_up_charges_nobody() -> None:
    """The other stream may have sent it before it was connected."""
    messages = lacking(FIRST, SECOND)
    messages.set_caught_up(FIRST, 0.0, caught_up=False)
    messages.add(FIRST, ALICE, rev_of(1), 0.0, is_new=True)
    assert messages.charges(SECONDS) == {}


def test_account_that_a_relay_calls_inactive_is_not_charged_to_it() -> None:
    messages = lacking(*RELAYS)
    messages.add(FIRST, ALICE, rev_of(1), 0.0, is_new=True)
    messages.set_status(SECOND, ALICE, active=False)
    messages.set_status(THIRD, ALICE, active=False)
    messages.add(FIRST, ALICE, rev_of(2), 1.0, is_new=True)
    messages.set_status(THIRD, ALICE, active=True)
    messages.add(FIRST, BOB, rev_of(3), 1.0, is_new=True)
    assert messages.charges(SECONDS + 1.0) == {
        SECOND: [(BOB, rev_of(3))],
        THIRD: [(ALICE, rev_of(1)), (ALICE, rev_of(2)), (BOB, rev_of(3))],
    }


def test_newest_message_of_a_stream_is_one_that_no_stream_has_brought_long_before() -> None:
    messages = lacking(FIRST, SECOND)
    assert messages.newest(FIRST) < 0.0
    messages.add(FIRST, ALICE, rev_of(1), 1.0, is_new=True)
    messages.add(SECOND, ALICE, rev_of(1), 5.0, is_new=False)
    assert (messages.newest(FIRST), messages.newest(SECOND)) == (1.0, 1.0)
    messages.add(SECOND, BOB, rev_of(2), 6.0, is_new=True)
    messages.add(FIRST, ALICE, rev_of(1), 9.0, is_new=False)
    assert (messages.newest(FIRST), messages.newest(SECOND)) == (1.0, 6.0)


def test_remembered_inactive_accounts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("indexer.live.lacking_messages.MAX_INACTIVE", 1)
    messages = lacking(FIRST, SECOND)
    for did in (ALICE, BOB):
        messages.set_status(SECOND, did, active=False)
        messages.add(FIRST, did, rev_of(1), 0.0, is_new=True)
    assert messages.charges(SECONDS) == {SECOND: [(BOB, rev_of(1))]}


def test_messages_beyond_the_limit_are_counted_as_not_compared() -> None:
    messages = lacking(FIRST, SECOND, max_missing=2)
    for number in range(5):
        messages.add(FIRST, ALICE, rev_of(number), 0.0, is_new=True)
    assert messages.not_compared == {FIRST: 0, SECOND: 3}
    assert messages.charges(SECONDS) == {SECOND: [(ALICE, rev_of(0)), (ALICE, rev_of(1))]}
    messages.add(FIRST, ALICE, rev_of(5), SECONDS, is_new=True)
    assert messages.not_compared == {FIRST: 0, SECOND: 3}


@dataclass
class Reference:
    """The slow rules: everything is kept in lists, and searched."""

    now: float = 0.0
    events: list[tuple[float, str, tuple[object, ...]]] = field(default_factory=list)
    ended: set[tuple[int, str]] = field(default_factory=set)  # event and stream

    def note(self, name: str, *values: object) -> None:
        self.events.append((self.now, name, values))

    def state(self, name: str, key: tuple[object, ...], before: int, *, default: bool) -> tuple[bool, float]:
        """Return the value that was noted last, and since when it has been the same."""
        value, since = default, 0.0
        for at, kind, (*noted_key, noted) in self.events[:before]:
            if kind == name and tuple(noted_key) == key and noted != value:
                value, since = bool(noted), at
        return value, since

    def charges(self) -> dict[str, list[tuple[object, object]]]:
        result: dict[str, list[tuple[object, object]]] = {}
        for number, (at, name, values) in enumerate(self.events):
            if name != "new" or not self.state("caught up", (values[0],), number, default=False)[0]:
                continue
            sender, did, rev = values
            for relay in RELAYS:
                was_caught_up = any(
                    kind == "caught up" and noted == (relay, True) for _, kind, noted in self.events[:number]
                )
                brought = any(
                    kind == "brought" and noted == (relay, did, rev) for _, kind, noted in self.events[number:]
                )
                if relay == sender or not was_caught_up or brought or (number, relay) in self.ended:
                    continue
                caught_up, since = self.state("caught up", (relay,), len(self.events), default=False)
                if caught_up and max(at, since) <= self.now - SECONDS:
                    self.ended.add((number, relay))
                    if self.state("active", (relay, did), len(self.events), default=True)[0]:
                        result.setdefault(relay, []).append((did, rev))
        return result


some_relay, some_account, yes_or_no = st.sampled_from(RELAYS), st.sampled_from((ALICE, BOB)), st.booleans()
steps = st.one_of(
    st.tuples(st.just("new"), some_relay, some_account, yes_or_no),
    st.tuples(st.just("again"), some_relay, st.integers(0, 5)),
    st.tuples(st.just("caught up"), some_relay, yes_or_no),
    st.tuples(st.just("active"), some_relay, some_account, yes_or_no),
    st.tuples(st.just("charges"), st.sampled_from((0.0, 1.0, 30.0, SECONDS))),
)


@given(st.lists(steps, max_size=60))
def test_charges_equal_those_of_the_reference(taken: list[tuple[object, ...]]) -> None:
    messages, reference = LackingMessages(RELAYS, SECONDS), Reference()
    sent: list[tuple[str, str]] = []
    for step in taken:
        match step:
            case ("new", str(relay), str(did), bool(is_new)):
                sent.append((did, rev_of(len(sent))))
                messages.add(relay, *sent[-1], reference.now, is_new=is_new)
                reference.note("new" if is_new else "brought", relay, *sent[-1])
            case ("again", str(relay), int(back)) if back < len(sent):
                messages.add(relay, *sent[-1 - back], reference.now, is_new=False)
                reference.note("brought", relay, *sent[-1 - back])
            case ("caught up", str(relay), bool(caught_up)):
                messages.set_caught_up(relay, reference.now, caught_up=caught_up)
                reference.note("caught up", relay, caught_up)
            case ("active", str(relay), str(did), bool(active)):
                messages.set_status(relay, did, active=active)
                reference.note("active", relay, did, active)
            case ("charges", float(seconds)):
                reference.now += seconds
                assert messages.charges(reference.now) == reference.charges()


def test_message_costs_the_stated_memory() -> None:
    """The times are shared by the messages of a batch."""
    messages, did = lacking(FIRST, SECOND), "did:plc:" + "a" * 24
    revs = [rev_of(number) for number in range(MAX_MISSING)]
    tracemalloc.start()
    for rev in revs:
        messages.add(FIRST, did, rev, 1.0, is_new=True)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0 < size / MAX_MISSING < MAX_BYTES


def test_message_costs_little_time() -> None:
    """It takes 0.2 µs for each stream; the bound is for slow machines."""
    messages, revs = lacking(FIRST, SECOND), [rev_of(number) for number in range(1_000)]
    times = []
    for _ in range(10):
        began = process_time()
        for rev in revs:
            messages.add(FIRST, ALICE, rev, 1.0, is_new=True)
            messages.add(SECOND, ALICE, rev, 1.0, is_new=False)
        times.append(process_time() - began)
    assert min(times) / (2 * len(revs)) < MAX_SECONDS
