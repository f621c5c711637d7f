"""One run of the fuzzer."""

from pathlib import Path
from random import Random
from time import monotonic

import atheris

from indexer.sync.native_core import load_core
from tests.fuzz.targets import TARGETS

FRESH = 0.4
"""Share of mutations of a valid input. Most inputs with new coverage are broken, and broken ones stay broken."""
FRESH_INPUTS = 500


class Session:
    """Compares and mutates the inputs of a target, and counts them."""

    def __init__(self, target: str, seed: int) -> None:
        core = load_core("native", 1)
        assert core is not None
        self._random = Random(seed)
        self._target = TARGETS[target](core)
        self._valid = self._target.seeds(self._random, FRESH_INPUTS)
        self._began = monotonic()

    def compare(self, data: bytes) -> None:
        """Compare the results of both sides for an input. Raises `DifferenceError`."""
        self._target.compare(data)

    def mutate(self, data: bytes, max_size: int, seed: int) -> bytes:
        """Return a mutated input of at most `max_size` bytes; some are made of a valid one instead of `data`.

        The arguments are those of atheris.
        """
        random = Random(seed)
        if random.random() < FRESH:
            data = random.choice(self._valid)
        mutated = self._target.mutate(data, random, lambda part: bytes(atheris.Mutate(part, len(part) + 32)))
        return mutated if len(mutated) <= max_size else data

    def write_seeds(self, folder: Path, count: int) -> None:
        """Write new valid inputs to a folder, to start from."""
        for number, seed in enumerate(self._target.seeds(self._random, count)):
            (folder / f"seed-{number:04}").write_bytes(seed)

    @property
    def unused(self) -> list[str]:
        """The names of the counts of the native core that are 0."""
        return self._target.counts.unused

    def report(self) -> str:
        """Return the counts as one line."""
        executions, seconds = self._target.counts.executions, monotonic() - self._began
        return f"{executions:,} executions in {seconds:,.0f} s, {executions / seconds:,.0f} per second; " + (
            self._target.report()
        )
