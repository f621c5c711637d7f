from datetime import UTC, datetime
from email.utils import format_datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.outbound.retry_after import DEFAULT_SECONDS, MAX_SECONDS, retry_after_seconds

NOW = 1_800_000_000.0


@pytest.mark.parametrize(
    ("status", "headers", "seconds"),
    [
        (429, {"retry-after": "7"}, 7),
        (429, {"retry-after": format_datetime(datetime.fromtimestamp(NOW + 90, UTC), usegmt=True)}, 90),
        (429, {"ratelimit-reset": "12"}, 12),
        (429, {"ratelimit-reset": str(int(NOW) + 40)}, 40),
        (429, {"retry-after": "7", "ratelimit-reset": "12"}, 7),
        (429, {"retry-after": "soon", "ratelimit-reset": "12"}, 12),
        (429, {}, DEFAULT_SECONDS),
        (429, {"retry-after": "nan"}, DEFAULT_SECONDS),
        (429, {"retry-after": "0"}, 1),
        (429, {"retry-after": "-5"}, 1),
        (429, {"ratelimit-reset": str(int(NOW) - 40)}, 1),
        (429, {"retry-after": "99999999"}, MAX_SECONDS),
        (429, {"retry-after": "1e300"}, MAX_SECONDS),
        (503, {"retry-after": "7"}, 7),
        (503, {"ratelimit-reset": "12"}, None),
        (503, {}, None),
        (500, {"retry-after": "7"}, None),
        (200, {"ratelimit-reset": "12"}, None),
    ],
)
def test_seconds_to_wait(status: int, headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after_seconds(status, headers, NOW) == seconds


dates = st.text("MonTueJan0123456789:,+-GMT ()", max_size=40)


@given(st.sampled_from(["retry-after", "ratelimit-reset"]), st.text(max_size=40) | dates)
def test_any_header_gives_between_one_second_and_the_maximum(name: str, value: str) -> None:
    seconds = retry_after_seconds(429, {name: value}, NOW)
    assert seconds is not None
    assert 1 <= seconds <= MAX_SECONDS
