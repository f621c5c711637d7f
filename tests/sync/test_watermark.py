import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.errors import BrokenInvariantError
from indexer.sync.watermark import Watermark


def oracle(start: int | None, seqs: list[int], done: set[int]) -> int | None:
    """The obvious way: walk from the start until something is unfinished."""
    position = start
    for seq in seqs:
        if seq not in done:
            break
        position = seq
    return position


@given(st.sets(st.integers(1, 60)), st.data())
def test_position_is_below_every_unfinished_number(numbers: set[int], data: st.DataObject) -> None:
    start = data.draw(st.sampled_from([None, 0]))
    seqs = sorted(numbers)
    order = data.draw(st.permutations(seqs))
    watermark = Watermark(start)
    for seq in seqs:
        watermark.add(seq)
    finished: set[int] = set()
    for seq in order:
        assert watermark.if_done([seq]) == oracle(start, seqs, finished | {seq})
        watermark.done([seq])
        finished.add(seq)
        assert watermark.position == oracle(start, seqs, finished)
    assert len(watermark) == 0


def test_asking_what_would_be_changes_nothing() -> None:
    watermark = Watermark(5)
    watermark.add(7)
    assert watermark.if_done([7]) == 7
    assert watermark.position == 5
    assert len(watermark) == 1


@pytest.mark.parametrize("seq", [3, 5, 9])
def test_a_number_out_of_order_is_our_bug(seq: int) -> None:
    watermark = Watermark(5)
    watermark.add(9)
    with pytest.raises(BrokenInvariantError):
        watermark.add(seq)
