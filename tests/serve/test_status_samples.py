import pytest

from indexer.serve.status_samples import MAX_SAMPLES, StageTotals, StatusSamples


def test_rates_are_means_since_the_previous_sample() -> None:
    samples = StatusSamples(began_at=100.0)
    assert samples.latest_rates() is None
    samples.add(110.0, StageTotals(lag_seconds=None, messages=50, resyncs=2))
    samples.add(120.0, StageTotals(lag_seconds=0.0171, messages=450, resyncs=2))
    history = samples.history()
    assert history.times == [110.0, 120.0]
    assert history.lag_seconds == [None, 0.017]
    assert history.messages_per_second == [5.0, 40.0]
    assert history.resyncs_per_second == [0.2, 0.0]
    assert samples.latest_rates() == (40.0, 0.0)


def test_only_the_newest_samples_are_retained() -> None:
    samples = StatusSamples(began_at=0.0)
    for number in range(1, 3 * MAX_SAMPLES):
        samples.add(number, StageTotals(1.0, number, 0))
    history = samples.history()
    assert {len(column) for column in (history.times, history.lag_seconds, history.messages_per_second)} == {
        MAX_SAMPLES
    }
    assert history.times[-1] == 3 * MAX_SAMPLES - 1


@pytest.mark.parametrize("now", [100.0, 40.0])
def test_clock_that_does_not_advance_adds_no_sample(now: float) -> None:
    samples = StatusSamples(began_at=100.0)
    samples.add(now, StageTotals(1.0, 5, 0))
    assert samples.history().times == []
    samples.add(now + 10, StageTotals(1.0, 25, 0))
    assert samples.history().messages_per_second == [2.0]
