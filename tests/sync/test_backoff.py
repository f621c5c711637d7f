from hypothesis import given
from hypothesis import strategies as st

from indexer.sync.backoff import backoff_seconds


@given(st.integers(0, 10**9), st.text(max_size=20))
def test_the_delay_is_bounded_and_deterministic(attempts: int, key: str) -> None:
    assert 45 <= backoff_seconds(attempts, key) <= 4_500
    assert backoff_seconds(attempts, key) == backoff_seconds(attempts, key)


def test_the_delay_doubles_from_a_minute_to_an_hour_with_a_jitter_of_a_quarter() -> None:
    for attempts, middle in [(1, 60.0), (2, 120.0), (3, 240.0), (6, 1_920.0), (7, 3_600.0), (64, 3_600.0)]:
        delays = [backoff_seconds(attempts, f"did:plc:{number}") for number in range(5_000)]
        assert (min(delays), max(delays)) == (0.75 * middle, 1.25 * middle)
