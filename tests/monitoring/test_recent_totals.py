from collections import Counter

from indexer.monitoring.recent_totals import WINDOW_SECONDS, RecentTotals


def test_growth_is_counted_within_the_window() -> None:
    recent = RecentTotals[str](0.0)
    assert recent.add(2.0, {"a": 3, "b": 1}) == Counter(a=3, b=1)
    assert recent.add(30.0, {"a": 5, "b": 1}) == Counter(a=5, b=1)
    assert recent.add(2.0 + WINDOW_SECONDS, {"a": 6, "b": 1}) == Counter(a=3)
    assert recent.add(30.0 + WINDOW_SECONDS, {"a": 6, "b": 1}) == Counter(a=1)
    assert recent.add(1_000.0, {"a": 6, "b": 1}) == Counter()
