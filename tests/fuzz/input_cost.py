"""Measure the CPU time and the memory that an input takes, and fail if they are out of proportion to its size.

CPU time is counted in steps: the time that this interpreter takes for one iteration of a simple loop, measured on the
same machine. So a limit holds on a slow machine, too. Code in C counts as well, that of other processes does not.
Memory is that of Python objects, at its peak. Of the whole process, with the native core and libraries in C, only a
large growth of the peak is found.
"""

import resource
import tracemalloc
from collections.abc import Callable
from time import process_time
from typing import NamedTuple

LOOP_STEPS = 200_000
ATTEMPTS = 5
"""An input over the limit is measured so many times more, each time with the step of that moment; the smallest result
counts. A virtual machine may be much slower for a tenth of a second, which counts as CPU time."""
MEMORY_INTERVAL = 20
"""Memory is measured for each input of this number, in a second run, because that takes several times the time."""

PROCESS_MEMORY = 32 << 20
"""Bytes by which the peak of the process may grow during an input of any size. Allocators and caches cause growth that
no input is to blame for. In 2.5 million inputs of all targets, it was at most 4 MiB."""


class CostLimit(NamedTuple):
    """The most that an input may cost: a fixed part, and one for each of its bytes.

    Attributes:
        steps: CPU time in steps (about 30 ns each).
        steps_per_byte: CPU time for each byte, in steps.
        memory: Bytes of memory.
        memory_per_byte: Bytes of memory for each byte.
    """

    steps: int = 2_000_000
    steps_per_byte: int = 1_000
    memory: int = 2 << 20
    memory_per_byte: int = 500


DECODING = CostLimit(steps=400_000, steps_per_byte=100, memory=1 << 19, memory_per_byte=100)
"""For decoding and checking one small input: at least three times what any of 900,000 inputs took."""


class CostError(AssertionError):
    """An input costs more than its limit."""


class CostMeter:
    """Runs inputs and measures them.

    Attributes:
        largest: The largest share of a limit that an input took so far, for time, memory and the peak of the process.
    """

    def __init__(self, run: Callable[[bytes], None], limit: CostLimit) -> None:
        self._run = run
        self._limit = limit
        self._step = seconds_of_a_step()
        self._count = 0
        self.largest = {"time": 0.0, "memory": 0.0, "process memory": 0.0}

    def run(self, data: bytes) -> None:
        """Run one input.

        Raises:
            CostError: It costs too much.
            Exception: Any error of the function that runs it.
        """
        allowed = self._limit.steps + self._limit.steps_per_byte * len(data)
        peak = _peak_of_process()
        steps = self._steps_of(data)
        for _ in range(ATTEMPTS):
            if steps <= allowed:
                break
            self._step = seconds_of_a_step()
            steps = min(steps, self._steps_of(data))
        self._check("time", steps, allowed, data)
        self._check("process memory", _peak_of_process() - peak, max(PROCESS_MEMORY, self._memory_for(data)), data)
        self._count += 1
        if self._count % MEMORY_INTERVAL == 0:
            self.check_memory(data)

    def check_memory(self, data: bytes) -> None:
        """Run one input, and measure its memory.

        Raises:
            CostError: It takes too much.
        """
        tracemalloc.start()
        try:
            self._run(data)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        self._check("memory", peak, self._memory_for(data), data)

    def report(self) -> str:
        """Return the largest costs so far."""
        return ", ".join(f"{share:.0%} of the limit of {name}" for name, share in self.largest.items())

    def _memory_for(self, data: bytes) -> int:
        return self._limit.memory + self._limit.memory_per_byte * len(data)

    def _steps_of(self, data: bytes) -> float:
        began = process_time()
        self._run(data)
        return (process_time() - began) / self._step

    def _check(self, name: str, cost: float, allowed: int, data: bytes) -> None:
        self.largest[name] = max(self.largest[name], cost / allowed)
        if cost > allowed:
            unit = "steps" if name == "time" else "bytes"
            raise CostError(f"{name}: {cost:,.0f} {unit} for an input of {len(data):,} bytes; the limit is {allowed:,}")


def seconds_of_a_step() -> float:
    """Return the CPU time of one iteration of a simple loop: the smallest of several measurements."""
    return min(_loop_seconds() for _ in range(ATTEMPTS)) / LOOP_STEPS


def _peak_of_process() -> int:
    """Return the largest resident memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10  # Linux counts it in kilobytes


def _loop_seconds() -> float:
    began, total = process_time(), 0
    for number in range(LOOP_STEPS):
        total += number & 7
    assert total
    return process_time() - began
