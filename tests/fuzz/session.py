"""One run of the fuzzer."""

from pathlib import Path
from random import Random
from time import monotonic

import atheris

from indexer.sync.native_core import load_core
from tests.fuzz.comparison import Comparison
from tests.fuzz.mutation import mutate
from tests.fuzz.seeds import accounts, seeds

FRESH = 0.4
"""Share of mutations of a valid commit. Most inputs with new coverage are broken, and broken ones stay broken."""
FRESH_COMMITS = 500


class Session:
    """Compares and mutates inputs, and counts them."""

    def __init__(self, seed: int) -> None:
        core = load_core("native", 1)
        assert core is not None
        self._random = Random(seed)
        self._owners = accounts()
        self._comparison = Comparison(core, self._owners)
        self._valid = [seed.frame for seed in seeds(self._owners, self._random, FRESH_COMMITS)]
        self._began = monotonic()

    def compare(self, frame: bytes) -> None:
        """Compare the plans of a frame; see `Comparison.compare`."""
        self._comparison.compare(frame)

    def mutate(self, frame: bytes, max_size: int, seed: int) -> bytes:
        """Return a mutated frame of at most `max_size` bytes; some are made of a valid commit instead of `frame`.

        The arguments are those of atheris.
        """
        random = Random(seed)
        if random.random() < FRESH:
            frame = random.choice(self._valid)
        mutated = mutate(frame, random, lambda data: bytes(atheris.Mutate(data, len(data) + 32)), self._owners)
        return mutated if len(mutated) <= max_size else frame

    def write_seeds(self, folder: Path, count: int) -> None:
        """Write new signed commits to a folder, to start from."""
        for number, seed in enumerate(seeds(self._owners, self._random, count)):
            (folder / f"seed-{number:04}").write_bytes(seed.frame)

    def report(self) -> str:
        """Return the counts as one line."""
        counts, seconds = self._comparison.counts, monotonic() - self._began
        return (
            f"{counts.executions:,} executions in {seconds:,.0f} s, {counts.executions / seconds:,.0f} per second; "
            f"{counts.decoded:,} decoded by the native core; {counts.commits:,} commits to both sides; "
            f"{counts.accepted:,} verified by the native core and equal; "
            f"{counts.declined:,} applied ones left to the Python code"
        )
