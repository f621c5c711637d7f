"""The kinds of inputs that can be fuzzed: frames of the stream, and exports."""

from collections.abc import Callable
from random import Random
from typing import Protocol

from indexer.sync.native_core import NativeCore
from tests.fuzz.comparison import Comparison, Counts
from tests.fuzz.export_comparison import ExportComparison, ExportCounts
from tests.fuzz.mutation import MutateBytes, mutate_export, mutate_frame
from tests.fuzz.seeds import accounts, random_export, seeds


class Target(Protocol):
    """Inputs of one kind."""

    @property
    def counts(self) -> Counts | ExportCounts:
        """The inputs so far."""

    def seeds(self, random: Random, count: int) -> list[bytes]:
        """Return new valid inputs."""

    def compare(self, data: bytes) -> None:
        """Compare the results of both sides for an input. Raises `DifferenceError`."""

    def mutate(self, data: bytes, random: Random, mutate_bytes: MutateBytes) -> bytes:
        """Return a mutated input."""

    def report(self) -> str:
        """Return the counts except that of all inputs."""


class Frames:
    """Frames of the stream: events and plans."""

    def __init__(self, core: NativeCore) -> None:
        self._owners = accounts()
        self._comparison = Comparison(core, self._owners)
        self.counts = self._comparison.counts
        self.compare = self._comparison.compare
        self.report = self._comparison.report

    def seeds(self, random: Random, count: int) -> list[bytes]:
        """Return the frames of new signed commits."""
        return [seed.frame for seed in seeds(self._owners, random, count)]

    def mutate(self, data: bytes, random: Random, mutate_bytes: MutateBytes) -> bytes:
        """Return a mutated frame."""
        return mutate_frame(data, random, mutate_bytes, self._owners)


class Exports:
    """Exports of signed repos: errors, trees and records."""

    def __init__(self, core: NativeCore) -> None:
        self._owners = accounts()
        self._comparison = ExportComparison(core, self._owners)
        self.counts = self._comparison.counts
        self.compare = self._comparison.compare
        self.report = self._comparison.report

    def seeds(self, random: Random, count: int) -> list[bytes]:
        """Return the exports of new signed repos."""
        return [random_export(self._owners[number % len(self._owners)], random) for number in range(count)]

    def mutate(self, data: bytes, random: Random, mutate_bytes: MutateBytes) -> bytes:
        """Return a mutated export."""
        return mutate_export(data, random, mutate_bytes, self._owners)


TARGETS: dict[str, Callable[[NativeCore], Target]] = {"frames": Frames, "exports": Exports}
