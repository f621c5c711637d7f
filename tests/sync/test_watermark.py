import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.errors import BrokenInvariantError
from indexer.sync.stream import Position, Watermark


def oracle(start: int | None, seqs: list[int], done: set[int]) -> int | None:
    """Walk from the start to the first number that is not done."""
    position = start
    for seq in seqs:
        if seq not in done:
            break
        position = seq
    return position


@given(st.sets(st.integers(1, 60)), st.data())
def test_the_position_is_below_every_pending_number(numbers: set[int], data: st.DataObject) -> None:
    start = data.draw(st.sampled_from([None, 0]))
    seqs = sorted(numbers)
    order = data.draw(st.permutations(seqs))
    watermark = Watermark(start)
    for seq in seqs:
        watermark.add(seq)
    finished: set[int] = set()
    for seq in order:
        assert watermark.position_if_done([seq]).seq == oracle(start, seqs, finished | {seq})
        watermark.mark_done([seq])
        finished.add(seq)
        assert watermark.position == oracle(start, seqs, finished)
    assert len(watermark) == 0


def test_the_position_has_the_time_of_its_own_message() -> None:
    watermark = Watermark(5, "five")
    for seq, event_time in ((7, "seven"), (8, None), (9, "nine")):
        watermark.add(seq, event_time)
    assert watermark.event_time == "five"
    assert watermark.position_if_done([7, 9]) == Position(7, "seven")
    watermark.mark_done([7, 8])
    assert watermark.position == 8
    assert watermark.event_time is None


def test_only_pending_numbers_are_held() -> None:
    watermark = Watermark(0)
    watermark.add(1)
    for seq in range(2, 1_000):
        watermark.add(seq)
        watermark.mark_done([seq])
    assert (watermark.position, len(watermark)) == (0, 1)
    assert watermark.position_if_done([1]).seq == 999


def test_a_number_that_is_marked_again_changes_nothing() -> None:
    watermark = Watermark()
    watermark.add(1)
    watermark.add(2)
    watermark.mark_done([1])
    watermark.mark_done([1])
    assert (watermark.position, len(watermark)) == (1, 1)


@pytest.mark.parametrize("seq", [3, 5, 9])
def test_a_number_out_of_order_is_a_broken_invariant(seq: int) -> None:
    watermark = Watermark(5)
    watermark.add(9)
    with pytest.raises(BrokenInvariantError):
        watermark.add(seq)
