"""How long a host wants to be left alone, as its answer's headers say (spec §4.8, §7.3)."""

import math
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from http import HTTPStatus

UNNAMED_SECONDS = 60.0
MOST_SECONDS = 3_600.0
_LEAST_SECONDS = 1.0
_EPOCH = 1_000_000_000  # larger numbers are points in time, not durations


def pause_asked(status: int, headers: Mapping[str, str], now: float) -> float | None:
    """Seconds that a 429, or a 503 that names a time, asks us to wait; None for every other answer.

    `Retry-After` (seconds or a date) goes before `RateLimit-Reset` (seconds, or a Unix time as the reference
    PDS sends it); a 429 with neither means a minute. No host can ask for more than an hour.
    """
    if status not in {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE}:
        return None
    named = _seconds(headers.get("retry-after", ""), now)
    if named is None and status == HTTPStatus.TOO_MANY_REQUESTS:
        named = _seconds(headers.get("ratelimit-reset", ""), now)
        named = UNNAMED_SECONDS if named is None else named
    return None if named is None else min(max(named, _LEAST_SECONDS), MOST_SECONDS)


def _seconds(text: str, now: float) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return _until(text, now)
    if not math.isfinite(number):
        return None
    return number - now if number > _EPOCH else number


def _until(text: str, now: float) -> float | None:
    try:
        return parsedate_to_datetime(text).timestamp() - now
    except (ValueError, OverflowError, TypeError):
        return None
