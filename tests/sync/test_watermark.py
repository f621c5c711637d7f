import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.sync.stream import Position, Step, Watermark


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
    assert watermark.position_if_done([]) == Position(5, "five")
    assert watermark.position_if_done([7, 9]) == Position(7, "seven")
    watermark.mark_done([7, 8])
    assert watermark.position_if_done([]) == Position(8, None)


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
def test_a_number_out_of_order_changes_nothing(seq: int) -> None:
    watermark = Watermark(5)
    watermark.add(9, "nine")
    assert not watermark.add(seq)
    assert watermark.classify(seq) is not Step.NEXT
    assert (watermark.last, watermark.position_if_done([9])) == (9, Position(9, "nine"))
