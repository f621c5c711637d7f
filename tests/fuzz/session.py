"""One run of the fuzzer."""

from collections.abc import Iterable
from pathlib import Path
from random import Random
from time import monotonic

import atheris

from tests.fuzz.input_cost import CostMeter
from tests.fuzz.targets import TARGETS

FRESH = 0.4
"""Share of mutations of a valid input. Most inputs with new coverage are broken, and broken ones stay broken."""
FRESH_INPUTS = 500


class Session:
    """Runs and mutates the inputs of a target, measures and counts them."""

    def __init__(self, target: str, seed: int) -> None:
        self._random = Random(seed)
        self._target = TARGETS[target].make()
        self._meter = CostMeter(self._target.compare, TARGETS[target].limit)
        self._valid = self._target.seeds(self._random, FRESH_INPUTS)
        self._began = monotonic()

    def run(self, data: bytes) -> None:
        """Run an input. Raises any error: each one is a finding."""
        self._meter.run(data)

    def replay(self, inputs: Iterable[bytes]) -> None:
        """Run inputs, and measure the memory of each. Raises any error: each one is a finding."""
        for data in inputs:
            self._meter.run(data)
            self._meter.check_memory(data)

    def mutate(self, data: bytes, max_size: int, seed: int) -> bytes:
        """Return a mutated input of at most `max_size` bytes; some are made of a valid one instead of `data`.

        The arguments are those of atheris.
        """
        random = Random(seed)
        base = random.choice(self._valid) if random.random() < FRESH else data
        mutated = self._target.mutate(base, random, lambda part: bytes(atheris.Mutate(part, len(part) + 32)))
        return mutated if len(mutated) <= max_size else data

    def write_seeds(self, folder: Path, count: int) -> None:
        """Write new valid inputs to a folder, to start from."""
        for number, seed in enumerate(self._target.seeds(self._random, count)):
            (folder / f"seed-{number:04}").write_bytes(seed)

    def close(self) -> None:
        """Release what the target holds besides memory."""
        self._target.close()

    @property
    def unused(self) -> list[str]:
        """The names of the counts that are 0: the run did not test what the target is for."""
        return self._target.counts.unused

    def report(self) -> str:
        """Return the counts and the largest costs as one line."""
        executions, seconds = self._target.counts.executions, monotonic() - self._began
        rate = f"{executions:,} executions in {seconds:,.0f} s, {executions / seconds:,.0f} per second"
        return f"{rate}; {self._target.counts.report()}; at most {self._meter.report()}"
