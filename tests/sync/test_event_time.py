import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.sync.events import event_seconds


@pytest.mark.parametrize("event_time", ["1970-01-01T00:01:30.5Z", "1970-01-01T01:01:30.500+01:00"])
def test_a_time_is_read_as_unix_seconds(event_time: str) -> None:
    assert event_seconds(event_time) == 90.5


@pytest.mark.parametrize("event_time", [None, "", "soon", "0000-00-00T00:00:00Z", "2026-01-01T00:00:00", "9" * 5_000])
def test_a_time_that_cannot_be_read_is_unknown(event_time: str | None) -> None:
    assert event_seconds(event_time) is None


TIMES = st.tuples(st.datetimes().map(str), st.sampled_from(["", "Z", "+23:59", "-23:59"])).map("".join)


@given(st.text(max_size=40) | TIMES)
def test_any_text_is_a_time_within_the_calendar_or_none(event_time: str) -> None:
    seconds = event_seconds(event_time)
    assert seconds is None or -63_000_000_000 < seconds < 260_000_000_000  # the years 1 to 9999
