"""Read the pause that a host asks for from a response (docs/protocol.md#outbound-requests)."""

import math
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from http import HTTPStatus

DEFAULT_SECONDS = 60.0
MAX_SECONDS = 3_600.0
_MIN_SECONDS = 1.0
_EPOCH = 1_000_000_000  # larger numbers are Unix times, not durations


def retry_after_seconds(status: int, headers: Mapping[str, str], now: float) -> float | None:
    """Return the seconds to wait after a 429, or a 503 with `Retry-After`; None for every other response.

    `Retry-After` (seconds or a date) takes precedence over `RateLimit-Reset`, which is in seconds, or a Unix time as
    the reference PDS sends it. A 429 with neither means one minute. The result is between one second and one hour.
    """
    if status not in {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE}:
        return None
    seconds = _seconds(headers.get("retry-after", ""), now)
    if seconds is None and status == HTTPStatus.TOO_MANY_REQUESTS:
        seconds = _seconds(headers.get("ratelimit-reset", ""), now)
        seconds = DEFAULT_SECONDS if seconds is None else seconds
    return None if seconds is None else min(max(seconds, _MIN_SECONDS), MAX_SECONDS)


def _seconds(text: str, now: float) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return _seconds_until(text, now)
    if not math.isfinite(number):
        return None
    return number - now if number > _EPOCH else number


def _seconds_until(date: str, now: float) -> float | None:
    try:
        return parsedate_to_datetime(date).timestamp() - now
    except (ValueError, OverflowError, TypeError):
        return None
