import pytest

from indexer.sync.events import event_seconds


@pytest.mark.parametrize("event_time", ["1970-01-01T00:01:30.5Z", "1970-01-01T01:01:30.500+01:00"])
def test_a_time_is_read_as_unix_seconds(event_time: str) -> None:
    assert event_seconds(event_time) == 90.5


@pytest.mark.parametrize("event_time", [None, "", "soon", "0000-00-00T00:00:00Z", "2026-01-01T00:00:00", "9" * 5_000])
def test_a_time_that_cannot_be_read_is_unknown(event_time: str | None) -> None:
    assert event_seconds(event_time) is None
