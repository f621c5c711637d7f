"""Timestamps and strictly increasing TIDs for the local network."""

import time
from collections.abc import Callable
from datetime import UTC, datetime

_ALPHABET = "234567abcdefghijklmnopqrstuvwxyz"


def _wall_clock() -> int:
    return time.time_ns() // 1_000


class TidClock:
    """Makes TIDs and datetimes from `micros`, which returns microseconds since 1970 (default: the system clock)."""

    def __init__(self, micros: Callable[[], int] = _wall_clock) -> None:
        self._micros = micros
        self._last = 0

    def tid(self) -> str:
        """Return a TID of the current time that is greater than every TID before."""
        self._last = max(self._micros(), self._last + 1)
        return tid(self._last)

    def now(self) -> str:
        """Return the current time as an AT Protocol datetime, as in the `time` field of events."""
        moment = datetime.fromtimestamp(self._micros() / 1_000_000, UTC)
        return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def tid(micros: int, clock_id: int = 0) -> str:
    """Return a TID: 53 bits of microseconds since 1970 and 10 bits of clock id in 13 characters."""
    number = micros << 10 | clock_id
    return "".join(_ALPHABET[number >> shift & 31] for shift in range(60, -5, -5))
