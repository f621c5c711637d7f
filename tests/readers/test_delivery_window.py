"""In which order changes are delivered, and what is delivered again."""

from collections import defaultdict
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.db.change_log_reads import LoggedChange
from indexer.db.tap_feed import SNAPSHOT_BEGIN, DeliveryProgress, SnapshotPosition
from indexer.readers.tap.delivery_window import FIRST_SNAPSHOT_ID, MAX_BEHIND, MAX_IN_FLIGHT, DeliveryWindow
from tests.profiles import scaled

START = DeliveryProgress(0, 0)


def change(
    seq: int,
    did: str = "did:plc:a",
    action: str = "create",
    *,
    live: bool = True,
    rev: str = "1",
    rkey: str | None = None,
) -> LoggedChange:
    """Return a change of a record that has no other change, or of the record with this key."""
    is_record = action in {"create", "update", "delete"}
    collection, rkey = ("c", rkey or f"{seq}") if is_record else (None, None)
    return LoggedChange(seq, did, collection, rkey, action, None, rev, live, 0)


def seqs(changes: list[LoggedChange]) -> list[int]:
    return [change.seq for change in changes]


def window_of(*changes: LoggedChange, one_per_repo: bool = False) -> DeliveryWindow:
    window = DeliveryWindow(START, one_per_repo=one_per_repo)
    window.add(changes)
    return window


def test_differences_of_one_resync_are_delivered_at_once_and_enclosed_by_live_changes() -> None:
    old = [change(seq, live=False) for seq in (2, 3)]
    window = window_of(change(1), *old, change(4), change(5, live=False, rev="2"), change(6, live=False, rev="3"))
    for expected in ([1], [2, 3], [4], [5], [6]):
        assert seqs(window.take(10)) == expected
        for seq in expected:
            assert window.take(10) == []
            window.acknowledge(seq)
    assert window.progress() == DeliveryProgress(6, 6)


def test_take_of_a_webhook_has_changes_of_a_repo_in_order_and_those_of_one_record_and_refused_ones_apart() -> None:
    other = [change(2, "did:plc:b"), change(5, "did:plc:b", live=False)]
    changes = [change(1, rkey="r"), change(3, live=False), change(4), change(6, rkey="r")]
    window = window_of(*sorted([*other, *changes]), one_per_repo=True)
    assert seqs(window.take(2)) == [1, 3]
    assert seqs(window.take(10)) == [2, 5]
    window.acknowledge(1)
    assert window.take(10) == [], "a change of each repo is in flight"
    window.give_back([2, 3, 5])
    assert seqs(window.take(10, {4, 2})) == [3], "the first repo again"
    window.acknowledge(3)
    assert seqs(window.take(10, {4, 2})) == [2]
    assert seqs(window.take(10, {4, 2})) == [4]
    window.acknowledge(2)
    window.acknowledge(4)
    assert seqs(window.take(10)) == [5, 6]


def test_acknowledgement_of_a_change_that_waits_does_not_end_the_wait_for_the_one_before_it() -> None:
    window = window_of(*[change(seq, live=False, rkey="r") for seq in (1, 2, 3)])
    assert seqs(window.take(10)) == [1]
    assert window.acknowledge(2), "an earlier process delivered it"
    assert window.take(10) == []
    window.acknowledge(1)
    assert seqs(window.take(10)) == [3]


def test_what_was_not_acknowledged_is_delivered_again_first() -> None:
    window = window_of(*[change(seq, live=False) for seq in (1, 2, 3)], change(4))
    assert seqs(window.take(10)) == [1, 2, 3]
    window.acknowledge(2)
    window.give_back([1, 2, 3])
    assert seqs(window.take(10)) == [1, 3]
    window.acknowledge(1)
    window.acknowledge(3)
    assert seqs(window.take(10)) == [4]


def test_changes_that_no_client_needs_are_skipped_and_states_of_an_account_are_joined() -> None:
    window = window_of(
        change(1, action="hidden"),
        change(2, action="deleted"),
        change(3, action="completed"),
        change(4, action="moved"),
    )
    assert seqs(window.take(10)) == [2]
    window.acknowledge(2)
    assert window.progress() == DeliveryProgress(4, 4)


def test_acknowledgement_of_an_earlier_process_counts_before_the_change_is_sent_again() -> None:
    window = window_of(change(1), change(2))
    assert window.acknowledge(1)
    assert not window.acknowledge(1)
    assert seqs(window.take(10)) == [2]


def test_snapshot_of_a_repo_precedes_its_later_changes_and_restarts_after_what_was_acknowledged() -> None:
    repo, one, two = (SnapshotPosition("did:plc:a", *path) for path in (("", ""), ("c", "one"), ("c", "two")))
    first, second, third = range(FIRST_SNAPSHOT_ID, FIRST_SNAPSHOT_ID + 3)
    window = DeliveryWindow(DeliveryProgress(7, 7, snapshot=SNAPSHOT_BEGIN))
    window.add_snapshot([repo, one, two])
    window.add([change(8, action="delete"), change(9, "did:plc:b")])
    assert seqs(window.take(10)) == [first, 9], "records wait for the event of their repo"
    window.acknowledge(first)
    assert seqs(window.take(10)) == [second, third], "the records of the snapshot need no order"
    window.acknowledge(third)
    assert window.progress() == DeliveryProgress(7, 7, snapshot=repo)
    window.add_snapshot([])
    window.acknowledge(second)
    assert seqs(window.take(10)) == [8]
    assert window.progress().snapshot == two
    window.add_snapshot([])
    window.acknowledge(8)
    window.acknowledge(9)
    assert window.progress() == DeliveryProgress(9, 9)
    assert window.snapshot_events == 0


def test_repo_has_a_share_of_the_window_and_its_other_changes_are_read_again_in_order() -> None:
    """Acknowledgements of changes that were left out, and repeated ones, have no effect."""
    log = [*(change(seq) for seq in range(1, 501)), change(501, "did:plc:b"), *(change(seq) for seq in range(502, 601))]
    window = DeliveryWindow(START)
    window.capacity = 100
    window.add(log)
    share = len(window) - 1
    assert share == 10
    assert seqs(window.take(10)) == [1, 501], "the other repo waits for nothing"
    assert not window.acknowledge(400)
    assert window.acknowledge(501)
    assert not window.acknowledge(501)
    progress = window.progress()
    assert progress == DeliveryProgress(0, 501, tuple(range(1, share + 1)), behind=(("did:plc:a", share + 1),))
    window = DeliveryWindow(progress)
    window.capacity = 100
    window.add(log)
    delivered = list[int]()
    while len(delivered) < 599:
        while (following := window.next_behind()) is not None:
            window.add_behind(following[1], log[following[0] - 1 :][:30])
        assert len(window) <= share
        delivered += seqs(window.take(10))
        assert window.acknowledge(delivered[-1])
    assert delivered == [seq for seq in range(1, 601) if seq != 501]
    assert window.progress() == DeliveryProgress(600, 600)


def test_position_stays_before_changes_that_were_left_out() -> None:
    """The log may be trimmed up to the position."""
    window = DeliveryWindow(START)
    window.capacity = 100
    window.add(change(seq) for seq in range(1, 100))
    share = len(window)
    for seq in range(1, share + 1):
        assert seqs(window.take(10)) == [seq]
        window.acknowledge(seq)
    assert window.progress().position == share < window.read_to


def test_nothing_more_is_read_while_too_many_repos_are_behind() -> None:
    window = DeliveryWindow(START)
    window.capacity = 100
    for number in range(MAX_BEHIND):
        window.add(change(number * 11 + copy, f"did:plc:{number}") for copy in range(1, 12))
    assert len(window) == window.capacity
    while taken := window.take(100):
        for one in taken:
            window.acknowledge(one.seq)
    assert (window.room, len(window)) == (0, 0)


def test_one_repo_has_few_changes_in_flight() -> None:
    old = [change(seq, live=False) for seq in range(1, 3 * MAX_IN_FLIGHT)]
    window = window_of(*old, change(1_000, "did:plc:b"))
    assert seqs(window.take(1_000)) == [*range(1, MAX_IN_FLIGHT + 1), 1_000]
    window.acknowledge(7)
    assert seqs(window.take(1_000)) == [MAX_IN_FLIGHT + 1]


def read(window: DeliveryWindow, changes: list[LoggedChange], count: int) -> None:
    """Read at most so many changes of the log."""
    window.add(changes[window.read_to :][: min(window.room, count)])


def read_behind(window: DeliveryWindow, changes: list[LoggedChange], count: int) -> bool:
    """Read at most so many changes of the log for repos that are behind; return False if none may be read."""
    if (following := window.next_behind()) is None:
        return False
    window.add_behind(following[1], changes[following[0] - 1 :][:count])
    return True


READS: dict[str, Callable[[DeliveryWindow, list[LoggedChange], int], object]] = {
    "read": read,
    "read behind": read_behind,
}


@pytest.mark.slow
@settings(max_examples=scaled(50))
@given(
    st.lists(
        st.tuples(st.sampled_from("aab"), st.booleans(), st.sampled_from("12"), st.sampled_from("rst")), max_size=40
    ),
    st.booleans(),
    st.data(),
)
def test_after_any_restarts_each_change_is_acknowledged_once_and_in_the_order_of_its_repo(
    log: list[tuple[str, bool, str, str]], one_per_repo: bool, data: st.DataObject
) -> None:
    """Delivers a random log with random acknowledgements, lost connections and restarts. Repos fall behind."""
    changes = [change(seq, did, live=live, rev=rev, rkey=rkey) for seq, (did, live, rev, rkey) in enumerate(log, 1)]
    stored, acknowledged = START, list[int]()
    window = DeliveryWindow(stored, one_per_repo=one_per_repo)
    in_flight = set[int]()

    def take(count: int) -> None:
        """Take changes. A webhook gets none of a repo of which others are in flight."""
        busy = {changes[seq - 1].did for seq in in_flight} if one_per_repo else set[str]()
        taken = window.take(count)
        assert not busy & {one.did for one in taken}
        in_flight.update(seqs(taken))

    while len(acknowledged) < len(changes):
        step = data.draw(st.sampled_from([*READS, "take", "acknowledge", "lose", "restart"]))
        if step in READS:
            window.capacity = data.draw(st.sampled_from([12, 20]))
            READS[step](window, changes, data.draw(st.sampled_from([1, 4, 20])))
        elif step == "take":
            take(data.draw(st.integers(1, 4)))
        elif step == "acknowledge" and in_flight:
            seq = min(in_flight) if one_per_repo else data.draw(st.sampled_from(sorted(in_flight)))
            in_flight.discard(seq)
            assert window.acknowledge(seq)
            acknowledged.append(seq)
        elif step == "lose":
            window.give_back(in_flight)
            in_flight.clear()
        elif step == "restart":
            window, in_flight = DeliveryWindow(window.progress(), one_per_repo=one_per_repo), set()
        else:  # progress, so that the loop ends
            read(window, changes, 1)
            read_behind(window, changes, 1)
            take(1)
    assert sorted(acknowledged) == list(range(1, len(changes) + 1))
    window.add(changes[window.read_to :])
    while read_behind(window, changes, 1):
        pass
    assert window.progress() == DeliveryProgress(len(changes), len(changes))
    assert_in_order([changes[seq - 1] for seq in acknowledged])


def assert_in_order(acknowledged: list[LoggedChange]) -> None:
    """Assert that the changes of each repo came in their order, except those of different records in one resync."""
    order = defaultdict[str, list[LoggedChange]](list)
    for one in acknowledged:
        order[one.did].append(one)
    for delivered in order.values():
        for number, one in enumerate(delivered):
            for later in delivered[number + 1 :]:
                unordered = not one.live and not later.live and one.rev == later.rev and one.rkey != later.rkey
                assert one.seq < later.seq or unordered
