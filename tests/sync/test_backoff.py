from hypothesis import given
from hypothesis import strategies as st

from indexer.sync.backoff import backoff_seconds


@given(st.integers(0, 10**9), st.text(max_size=20))
def test_the_delay_is_bounded_and_deterministic(attempts: int, key: str) -> None:
    assert 45 <= backoff_seconds(attempts, key) <= 4_500
    assert backoff_seconds(attempts, key) == backoff_seconds(attempts, key)


def test_the_delay_doubles_from_a_minute_to_an_hour() -> None:
    for attempts, middle in [(1, 60), (2, 120), (3, 240), (6, 1920), (7, 3600), (64, 3600)]:
        assert middle * 0.75 <= backoff_seconds(attempts, "did:plc:x") <= middle * 1.25


def test_the_jitter_is_a_quarter_of_the_delay() -> None:
    for attempts, middle in [(1, 60.0), (64, 3_600.0)]:
        delays = [backoff_seconds(attempts, f"did:plc:{number}") for number in range(5_000)]
        assert (min(delays), max(delays)) == (0.75 * middle, 1.25 * middle)


def test_repos_that_failed_together_are_retried_at_different_times() -> None:
    assert len({backoff_seconds(3, f"did:plc:{n}") for n in range(50)}) > 25
