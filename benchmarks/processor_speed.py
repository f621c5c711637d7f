"""Find the times at which the machine's processors are slow, so that a latency says what the program contributes to it.

A virtual machine may share its processors with others, and its host may lower their clock for some milliseconds. To the
programs in it that looks as if their own work took longer: it counts as CPU time, not as stolen time.
"""

import hashlib
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from threading import Event, Thread
from time import monotonic, thread_time_ns

INTERVAL_SECONDS = 0.005
SLOW = 2.0
"""A processor is slow while the same work takes this many times as much CPU time as the median."""
_WORK = bytes(64 << 10)


@dataclass(frozen=True, slots=True)
class Sample:
    """The CPU time of the work, in nanoseconds, measured between two monotonic times in seconds."""

    start: float
    end: float
    cpu: int


class ProcessorSpeed:
    """The periods in which a processor was slow.

    Attributes:
        slow: Start and end of each (monotonic seconds), in order.
        share: The share of the time that they take.
    """

    def __init__(self, samples: Sequence[Sample]) -> None:
        usual = median([sample.cpu for sample in samples])
        self.slow: list[tuple[float, float]] = []
        for sample in samples:
            if sample.cpu < SLOW * usual:
                continue
            if self.slow and self.slow[-1][1] == sample.start:
                self.slow[-1] = self.slow[-1][0], sample.end
            else:
                self.slow.append((sample.start, sample.end))
        self.share = sum([end - start for start, end in self.slow]) / (samples[-1].end - samples[0].start)

    def was_slow(self, start: float, end: float) -> bool:
        """Return True if a processor was slow at any time between these two."""
        next_end = bisect_left(self.slow, start, key=lambda period: period[1])
        return next_end < len(self.slow) and self.slow[next_end][0] <= end


@contextmanager
def sample_speed() -> Iterator[list[Sample]]:
    """Measure the speed every 5 ms until the end of the block, in a thread that needs about two percent of a core.

    CPU time is measured, because a program that has to wait for a processor is not slow in this sense.
    """
    samples: list[Sample] = []
    ended = Event()

    def measure() -> None:
        end = monotonic()
        while True:
            start, before = end, thread_time_ns()
            hashlib.sha256(_WORK).digest()
            cpu, end = thread_time_ns() - before, monotonic()
            samples.append(Sample(start, end, cpu))
            if ended.wait(INTERVAL_SECONDS):
                return

    thread = Thread(target=measure, name="processor speed", daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()
