"""The crash points that a process of the daemon passes, written to a file and read from it."""

from collections.abc import Callable
from pathlib import Path
from time import monotonic

from indexer import crash_points

QUIET_SECONDS = 0.5
"""Time without a new point after which the points count as complete."""


def record_points(prepare: Callable[[], None], file: Path) -> None:
    """Prepare this process, and let it write each crash point that it passes to a file, a line for each."""
    prepare()
    crash_points.hooks.append(lambda point: _append(file, point))


def _append(file: Path, point: str) -> None:
    with file.open("a") as points:
        points.write(f"{point}\n")


class PassedPoints:
    """The points that a process of the daemon has passed, from the file to which it writes them.

    Attributes:
        points: The points.
    """

    def __init__(self, file: Path, expected: set[str]) -> None:
        file.write_text("")
        self.points: set[str] = set()
        self._file = file
        self._expected = expected
        self._changed_at = monotonic()

    def are_complete(self) -> bool:
        """Return True if the expected points were passed, and no new one was passed for a while."""
        before, self.points = self.points, set(self._file.read_text().split())
        self._changed_at = self._changed_at if self.points == before else monotonic()
        return self._expected <= self.points and monotonic() > self._changed_at + QUIET_SECONDS
