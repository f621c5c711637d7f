"""The growth of counters within the last minute."""

from collections import Counter, deque
from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

WINDOW_SECONDS = 60.0

K = TypeVar("K", bound=Hashable)


class RecentTotals(Generic[K]):
    """Compares samples of counters that only grow. Counters are zero before the first sample."""

    def __init__(self, began_at: float) -> None:
        self._samples: deque[tuple[float, Counter[K]]] = deque([(began_at, Counter())])

    def add(self, now: float, totals: Mapping[K, int]) -> Counter[K]:
        """Add a sample; return how much each counter grew within the window."""
        newest = Counter(totals)
        self._samples.append((now, newest))
        while len(self._samples) > 1 and self._samples[1][0] <= now - WINDOW_SECONDS:
            self._samples.popleft()
        return newest - self._samples[0][1]
