import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.sync.events import MAX_SEQ
from indexer.sync.stream import MAX_STEP, Position, Step, Watermark

LEAP = 5 + MAX_STEP + 1


def step(order: Watermark, seq: int) -> Step:
    """Classify the number of a valid message, as the firehose consumer does."""
    if order.has_leap_below(seq):
        order.confirm_leap()
    return order.classify(seq)


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
    order = Watermark(5)
    assert [step(order, seq) for seq in seqs] == steps


def test_leap_moves_the_position_only_after_its_confirmation() -> None:
    order = Watermark(5)
    assert order.classify(LEAP, "leap") is Step.LEAP
    assert (order.position, order.last, order.has_leap_below(LEAP)) == (5, 5, False)
    assert order.has_leap_below(LEAP + 1)
    order.confirm_leap()
    assert (order.position_if_done([]), order.last) == (Position(LEAP, "leap"), LEAP)


@pytest.mark.parametrize(("seq", "taken"), [(4, False), (5, False), (6, True), (5 + MAX_STEP, True), (LEAP, False)])
def test_add_takes_numbers_above_the_last_one_up_to_the_largest_step(seq: int, taken: bool) -> None:
    assert Watermark(5).add(seq) is taken


@given(st.lists(st.integers(1, 1_000), unique=True).map(sorted), st.data())
def test_single_numbers_out_of_place_refuse_no_later_message(seqs: list[int], data: st.DataObject) -> None:
    order = Watermark(0)
    for seq in seqs:
        if data.draw(st.booleans()):
            assert step(order, data.draw(st.integers(2 * MAX_STEP, MAX_SEQ))) is Step.LEAP
        assert step(order, seq) is Step.NEXT


@given(st.lists(st.integers(1, 12).map(lambda n: n * MAX_STEP // 3) | st.integers(1, 9), max_size=20))
def test_add_takes_only_steps_to_the_next_number_and_leaves_the_same_state_as_classify(seqs: list[int]) -> None:
    order, reference, leaps = Watermark(0), Watermark(0), False
    for seq in seqs:
        expected = step(reference, seq)
        assert order.add(seq) == (expected is Step.NEXT and not leaps)
        if order.last != reference.last or expected is Step.LEAP or leaps:
            assert step(order, seq) is expected
        leaps = reference.has_leap_below(MAX_SEQ + 1)
        assert (order.last, order.has_leap_below(MAX_SEQ + 1)) == (reference.last, leaps)
