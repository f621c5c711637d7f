"""Tests of when a processor counts as slow."""

import threading
from itertools import pairwise
from time import monotonic, sleep

from benchmarks.processor_speed import ProcessorSpeed, Sample, sample_speed


def _speed(*cpu: int) -> ProcessorSpeed:
    """Return the speed from samples of one second each, the first of which begins at 0."""
    return ProcessorSpeed([Sample(start, start + 1, spent) for start, spent in enumerate(cpu)])


def test_a_sample_that_takes_twice_the_median_is_slow() -> None:
    speed = _speed(100, 100, 199, 100, 200, 100, 100)
    assert speed.slow == [(4, 5)]
    assert speed.share == 1 / 7


def test_neighbouring_slow_samples_are_one_period() -> None:
    assert _speed(100, 300, 1_400, 100, 100, 100, 500).slow == [(1, 3), (6, 7)]


def test_a_time_is_slow_if_it_touches_a_slow_period() -> None:
    speed = _speed(100, 100, 300, 300, 100, 100, 300, 100, 100)
    assert speed.slow == [(2, 4), (6, 7)]
    cases = {(0, 1.9): False, (1, 2): True, (2.5, 3): True, (1, 9): True, (4.1, 5.9): False, (7.1, 9): False}
    assert {case: speed.was_slow(*case) for case in cases} == cases


def test_samples_follow_each_other_until_the_end_of_the_block() -> None:
    began = monotonic()
    with sample_speed() as samples:
        while len(samples) < 3:
            sleep(0.001)
    assert began <= samples[0].start
    assert samples[-1].end <= monotonic()
    assert all(before.end == after.start for before, after in pairwise(samples))
    assert all(sample.cpu > 0 for sample in samples)
    assert "processor speed" not in {thread.name for thread in threading.enumerate()}
