"""Time as the network tells it: timestamps, and TIDs that always increase."""

import time
from collections.abc import Callable
from datetime import UTC, datetime

_ALPHABET = "234567abcdefghijklmnopqrstuvwxyz"


def _wall_clock() -> int:
    return time.time_ns() // 1_000


class Clock:
    """`micros` gives microseconds since 1970; by default the machine's own."""

    def __init__(self, micros: Callable[[], int] = _wall_clock) -> None:
        self._micros = micros
        self._last = 0

    def tid(self) -> str:
        """A TID of this moment, greater than every one before."""
        self._last = max(self._micros(), self._last + 1)
        return tid(self._last)

    def now(self) -> str:
        """The datetime of this moment, as in `time` fields."""
        moment = datetime.fromtimestamp(self._micros() / 1_000_000, UTC)
        return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def tid(micros: int, clock_id: int = 0) -> str:
    """53 bits of microseconds and 10 of clock id, as 13 characters that sort like the number."""
    number = micros << 10 | clock_id
    return "".join(_ALPHABET[number >> shift & 31] for shift in range(60, -5, -5))
