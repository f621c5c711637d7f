"""Limit the log lines that clients without a password can cause."""

from math import inf
from time import monotonic

LINES = 20
SECONDS = 60.0


class LogRate:
    """Allows `LINES` log lines in `SECONDS`."""

    def __init__(self) -> None:
        self._began = -inf
        self._lines = 0

    def allows_line(self) -> bool:
        """Count a line; return False if it is beyond the limit."""
        now = monotonic()
        if now - self._began >= SECONDS:
            self._began, self._lines = now, 0
        self._lines += 1
        return self._lines <= LINES
