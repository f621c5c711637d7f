from datetime import UTC, datetime
from email.utils import format_datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.net.http.host_limits import DEFAULT_RETRY_AFTER, MAX_RETRY_AFTER, retry_after_seconds

NOW = 1_800_000_000.0


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "7"}, 7),
        ({"retry-after": format_datetime(datetime.fromtimestamp(NOW + 90, UTC), usegmt=True)}, 90),
        ({"ratelimit-reset": "12"}, 12),
        ({"ratelimit-reset": str(int(NOW) + 40)}, 40),
        ({"retry-after": "7", "ratelimit-reset": "12"}, 7),
        ({"retry-after": "soon", "ratelimit-reset": "12"}, 12),
        ({}, DEFAULT_RETRY_AFTER),
        *[({"retry-after": text}, DEFAULT_RETRY_AFTER) for text in ("nan", "\udcff", "9" * 5_000)],
        *[({"retry-after": text}, 1) for text in ("0", "-5")],
        ({"ratelimit-reset": str(int(NOW) - 40)}, 1),
        *[({"retry-after": text}, MAX_RETRY_AFTER) for text in ("99999999", "1e300")],
    ],
)
def test_seconds_to_wait_after_429(headers: dict[str, str], seconds: float) -> None:
    assert retry_after_seconds(429, headers, NOW) == seconds


@pytest.mark.parametrize("ahead", [-86_400, 86_400])
@pytest.mark.parametrize("name", ["retry-after", "ratelimit-reset"])
def test_dates_and_unix_times_of_a_host_are_compared_with_its_own_clock(name: str, ahead: int) -> None:
    until = NOW + ahead + 90
    value = {"retry-after": format_datetime(datetime.fromtimestamp(until, UTC), usegmt=True)}.get(name, str(int(until)))
    headers = {"date": format_datetime(datetime.fromtimestamp(NOW + ahead, UTC), usegmt=True), name: value}
    assert retry_after_seconds(429, headers, NOW) == 90


def test_another_status_asks_for_a_pause_only_with_503_and_retry_after() -> None:
    assert retry_after_seconds(503, {"retry-after": "7"}, NOW) == 7
    for status, name in ((503, "ratelimit-reset"), (503, "other"), (500, "retry-after"), (200, "ratelimit-reset")):
        assert retry_after_seconds(status, {name: "7"}, NOW) is None


dates = st.text("MonTueJan0123456789:,+-GMT ()", max_size=40)


@given(st.sampled_from(["retry-after", "ratelimit-reset"]), st.text(max_size=40) | dates)
def test_any_header_gives_between_one_second_and_the_maximum(name: str, value: str) -> None:
    seconds = retry_after_seconds(429, {name: value}, NOW)
    assert seconds is not None
    assert 1 <= seconds <= MAX_RETRY_AFTER
