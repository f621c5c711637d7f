"""Frames and exports, each read by the Python code and by the native core."""

from random import Random

from indexer.core.core import NativeCore, load_core
from tests.fuzz.comparison import Comparison
from tests.fuzz.export_comparison import ExportComparison
from tests.fuzz.fuzz_target import FuzzTarget, MutateBytes
from tests.fuzz.mutation import mutate_export, mutate_frame
from tests.fuzz.seed_files import published_exports, published_frames, some_of
from tests.fuzz.seeds import accounts, random_export, seeds


class Frames(FuzzTarget):
    """Frames of the stream: events and plans of the Python code and of the native core."""

    def __init__(self) -> None:
        self._owners = accounts()
        self._comparison = Comparison(_native_core(), self._owners)
        self.counts = self._comparison.counts
        self.compare = self._comparison.compare

    def seeds(self, random: Random, count: int) -> list[bytes]:
        """Return published messages, a fifth if there are so many, and the frames of new signed commits."""
        made = some_of(published_frames(), random, count // 5)
        return made + [seed.frame for seed in seeds(self._owners, random, count - len(made))]

    def mutate(self, data: bytes, random: Random, mutate_bytes: MutateBytes) -> bytes:
        """Return a mutated frame."""
        return mutate_frame(data, random, mutate_bytes, self._owners)


class Exports(FuzzTarget):
    """Exports of signed repos: errors, trees and records of the Python code and of the native core."""

    def __init__(self) -> None:
        self._owners = accounts()
        self._comparison = ExportComparison(_native_core(), self._owners)
        self.counts = self._comparison.counts
        self.compare = self._comparison.compare

    def seeds(self, random: Random, count: int) -> list[bytes]:
        """Return published exports, a fifth if there are so many, and those of new signed repos."""
        made = some_of(published_exports(self._owners), random, count // 5)
        return made + [random_export(random.choice(self._owners), random) for _ in range(count - len(made))]

    def mutate(self, data: bytes, random: Random, mutate_bytes: MutateBytes) -> bytes:
        """Return a mutated export."""
        return mutate_export(data, random, mutate_bytes, self._owners)


def _native_core() -> NativeCore:
    core = load_core("native", 1)
    assert isinstance(core, NativeCore)
    return core
