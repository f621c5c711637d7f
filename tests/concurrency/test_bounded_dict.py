"""The bounded dict, compared with a list of writes."""

from hypothesis import given
from hypothesis import strategies as st

from indexer.concurrency.bounded_dict import BoundedDict


@given(st.lists(st.tuples(st.integers(0, 9), st.integers())), st.integers(1, 5))
def test_bounded_dict_has_the_entries_that_were_written_last(writes: list[tuple[int, int]], max_entries: int) -> None:
    bounded = BoundedDict[int, int](max_entries)
    expected: list[tuple[int, int]] = []
    for key, value in writes:
        bounded[key] = value
        expected = [*(entry for entry in expected if entry[0] != key), (key, value)][-max_entries:]
        assert list(bounded.items()) == expected
