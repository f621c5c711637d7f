"""Read the pause that a host asks for from a response (docs/protocol.md#outbound-requests)."""

import math
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import TypeVar

DEFAULT_SECONDS = 60.0
MAX_SECONDS = 3_600.0
_MIN_SECONDS = 1.0
T = TypeVar("T", float, None)

_EPOCH = 1_000_000_000  # larger numbers are Unix times, not durations


def retry_after_seconds(status: int, headers: Mapping[str, str], now: float) -> float | None:
    """Return the seconds to wait after a 429, or a 503 with `Retry-After`; None for every other response.

    `Retry-After` (seconds or a date) takes precedence over `RateLimit-Reset`, which is in seconds, or a Unix time as
    the reference PDS sends it. A 429 with neither means one minute. The result is between one second and one hour.

    The host's `Date` is the present time for its dates and Unix times; `now` is only if it sends none.
    """
    if status not in {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE}:
        return None
    now = _unix_time(headers.get("date", ""), now)
    seconds = _seconds(headers.get("retry-after", ""), now)
    if seconds is None and status == HTTPStatus.TOO_MANY_REQUESTS:
        seconds = _seconds(headers.get("ratelimit-reset", ""), now)
        seconds = DEFAULT_SECONDS if seconds is None else seconds
    return None if seconds is None else min(max(seconds, _MIN_SECONDS), MAX_SECONDS)


def _seconds(text: str, now: float) -> float | None:
    try:
        number = float(text)
    except ValueError:
        date = _unix_time(text, None)
        return None if date is None else date - now
    if not math.isfinite(number):
        return None
    return number - now if number > _EPOCH else number


def _unix_time(date: str, default: T) -> float | T:
    try:
        return parsedate_to_datetime(date).timestamp()
    except (ValueError, OverflowError, TypeError):
        return default
