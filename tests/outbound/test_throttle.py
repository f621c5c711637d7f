from datetime import UTC, datetime
from email.utils import format_datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.outbound.throttle import MOST_SECONDS, UNNAMED_SECONDS, pause_asked

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
        (429, {}, UNNAMED_SECONDS),
        (429, {"retry-after": "nan"}, UNNAMED_SECONDS),
        (429, {"retry-after": "0"}, 1),
        (429, {"retry-after": "-5"}, 1),
        (429, {"ratelimit-reset": str(int(NOW) - 40)}, 1),
        (429, {"retry-after": "99999999"}, MOST_SECONDS),
        (429, {"retry-after": "1e300"}, MOST_SECONDS),
        (503, {"retry-after": "7"}, 7),
        (503, {"ratelimit-reset": "12"}, None),
        (503, {}, None),
        (500, {"retry-after": "7"}, None),
        (200, {"ratelimit-reset": "12"}, None),
    ],
)
def test_how_long_a_host_wants_to_be_left_alone(status: int, headers: dict[str, str], seconds: float | None) -> None:
    assert pause_asked(status, headers, NOW) == seconds


dates = st.text("MonTueJan0123456789:,+-GMT ()", max_size=40)


@given(st.sampled_from(["retry-after", "ratelimit-reset"]), st.text(max_size=40) | dates)
def test_no_header_breaks_us_or_pauses_a_host_for_long(name: str, value: str) -> None:
    pause = pause_asked(429, {name: value}, NOW)
    assert pause is not None
    assert 1 <= pause <= MOST_SECONDS
