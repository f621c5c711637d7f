import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.sync.events import MAX_SEQ
from indexer.sync.stream import MAX_STEP, SequenceOrder, Step

LEAP = 5 + MAX_STEP + 1


@pytest.mark.parametrize(
    ("seqs", "steps"),
    [
        ([6, 8, 8], [Step.NEXT, Step.NEXT, Step.REPEATED]),
        ([5 + MAX_STEP, 6], [Step.NEXT, Step.LOWER]),
        ([MAX_SEQ, 6, 7], [Step.LEAP, Step.NEXT, Step.NEXT]),
        ([MAX_SEQ, MAX_SEQ, 6], [Step.LEAP, Step.REPEATED, Step.NEXT]),
        ([LEAP, LEAP + 1, 6], [Step.LEAP, Step.NEXT, Step.LOWER]),
        ([MAX_SEQ, LEAP, LEAP + 1], [Step.LEAP, Step.LEAP, Step.NEXT]),
    ],
)
def test_leap_counts_only_if_the_next_number_is_above_it(seqs: list[int], steps: list[Step]) -> None:
    order = SequenceOrder(5)
    assert [order.classify(seq) for seq in seqs] == steps


@pytest.mark.parametrize(("seq", "taken"), [(4, False), (5, False), (6, True), (5 + MAX_STEP, True), (LEAP, False)])
def test_advance_takes_numbers_above_the_last_one_up_to_the_largest_step(seq: int, taken: bool) -> None:
    assert SequenceOrder(5).advance(seq) is taken


@given(st.lists(st.integers(1, 1_000), unique=True).map(sorted), st.data())
def test_single_numbers_out_of_place_refuse_no_later_message(seqs: list[int], data: st.DataObject) -> None:
    order = SequenceOrder(0)
    for seq in seqs:
        if data.draw(st.booleans()):
            assert order.classify(data.draw(st.integers(2 * MAX_STEP, MAX_SEQ))) is Step.LEAP
        assert order.classify(seq) is Step.NEXT


@given(st.lists(st.integers(1, 12).map(lambda n: n * MAX_STEP // 3) | st.integers(1, 9), max_size=20))
def test_advance_takes_only_steps_to_the_next_number_and_leaves_the_same_state_as_classify(seqs: list[int]) -> None:
    order, reference = SequenceOrder(0), SequenceOrder(0)
    for seq in seqs:
        awaits_confirmation = reference.leap is not None
        step = reference.classify(seq)
        assert order.advance(seq) == (step is Step.NEXT and not awaits_confirmation)
        if (order.last, order.leap) != (reference.last, reference.leap):
            assert order.classify(seq) is step
        assert (order.last, order.leap) == (reference.last, reference.leap)
