"""The table of targets: the kinds of inputs that can be fuzzed."""

from collections.abc import Callable
from random import Random
from typing import NamedTuple, Protocol

from indexer.sync.native_core import NativeCore, load_core
from tests.fuzz.block_targets import Cars, Commits, Nodes
from tests.fuzz.buffer_target import Buffers
from tests.fuzz.comparison import Comparison, Counts
from tests.fuzz.database_targets import Lexicons, Records
from tests.fuzz.export_comparison import ExportComparison, ExportCounts
from tests.fuzz.feed_targets import Acknowledgements, Credentials, SubscriberMessages, SubscriberQueries
from tests.fuzz.host_targets import Addresses, Bodies, DidWebs, Pauses, RepoLists, RepoStates
from tests.fuzz.identity_targets import DidDocuments, Handles
from tests.fuzz.input_cost import DECODING, CostLimit
from tests.fuzz.inversion_target import Inversions
from tests.fuzz.key_targets import Keys, Signatures
from tests.fuzz.message_target import Messages
from tests.fuzz.mutation import MutateBytes, mutate_export, mutate_frame
from tests.fuzz.operator_targets import LogTexts, SettingsFiles
from tests.fuzz.outcome_counts import FuzzTarget, OutcomeCounts
from tests.fuzz.record_targets import Cids, DagCbor, Links, RecordProofs
from tests.fuzz.request_target import TapRequests
from tests.fuzz.seed_files import published_exports, published_frames
from tests.fuzz.seeds import accounts, random_export, seeds
from tests.fuzz.stream_targets import EventTimes, StreamSeeks
from tests.fuzz.syntax_targets import AtUris, Identifiers, Patterns


class Target(Protocol):
    """Inputs of one kind."""

    @property
    def counts(self) -> Counts | ExportCounts | OutcomeCounts:
        """The inputs so far."""

    def seeds(self, random: Random, count: int, /) -> list[bytes]:
        """Return new inputs to start from, most of them valid."""

    def compare(self, data: bytes) -> None:
        """Run an input. Raises `DifferenceError` if the result is not the expected one; any other error is one, too."""

    def mutate(self, data: bytes, random: Random, mutate_bytes: MutateBytes, /) -> bytes:
        """Return a mutated input."""

    def close(self) -> None:
        """Release what the target holds besides memory."""


class Frames(FuzzTarget):
    """Frames of the stream: events and plans of the Python code and of the native core."""

    def __init__(self) -> None:
        self._owners = accounts()
        self._comparison = Comparison(_native_core(), self._owners)
        self.counts = self._comparison.counts
        self.compare = self._comparison.compare

    def seeds(self, random: Random, count: int) -> list[bytes]:
        """Return published messages, a fifth if there are so many, and the frames of new signed commits."""
        published = list(published_frames())
        made = random.sample(published, min(len(published), count // 5))
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
        published = list(published_exports(self._owners))
        made = random.sample(published, min(len(published), count // 5))
        return made + [random_export(random.choice(self._owners), random) for _ in range(count - len(made))]

    def mutate(self, data: bytes, random: Random, mutate_bytes: MutateBytes) -> bytes:
        """Return a mutated export."""
        return mutate_export(data, random, mutate_bytes, self._owners)


class TargetRow(NamedTuple):
    """A row of the table of targets.

    Attributes:
        make: Makes the target.
        native: It compares with the native core, and cannot run without it.
        limit: The most that an input may cost.
    """

    make: Callable[[], Target]
    native: bool = False
    limit: CostLimit = CostLimit()


TARGETS = {
    "frames": TargetRow(Frames, native=True, limit=DECODING),
    "exports": TargetRow(Exports, native=True, limit=CostLimit(steps=10_000_000)),
    "messages": TargetRow(Messages, limit=DECODING),
    "cars": TargetRow(Cars, limit=DECODING),
    "nodes": TargetRow(Nodes, limit=DECODING),
    "commits": TargetRow(Commits, limit=DECODING),
    "inversions": TargetRow(Inversions),
    "did-documents": TargetRow(DidDocuments, limit=DECODING),
    "handles": TargetRow(Handles),
    "records": TargetRow(Records),
    "buffers": TargetRow(Buffers),
    "lexicons": TargetRow(Lexicons),
    "identifiers": TargetRow(Identifiers, limit=DECODING),
    "at-uris": TargetRow(AtUris, limit=DECODING),
    "patterns": TargetRow(Patterns),
    "keys": TargetRow(Keys, limit=DECODING),
    "signatures": TargetRow(Signatures, limit=DECODING),
    "dag-cbor": TargetRow(DagCbor),
    "cids": TargetRow(Cids, limit=DECODING),
    "links": TargetRow(Links),
    "record-proofs": TargetRow(RecordProofs),
    "repo-lists": TargetRow(RepoLists, limit=DECODING),
    "repo-states": TargetRow(RepoStates, limit=DECODING),
    "pauses": TargetRow(Pauses, limit=DECODING),
    "bodies": TargetRow(Bodies, limit=CostLimit(memory=16 << 20)),
    "addresses": TargetRow(Addresses, limit=DECODING),
    "did-webs": TargetRow(DidWebs, limit=DECODING),
    "subscriber-queries": TargetRow(SubscriberQueries),
    "subscriber-messages": TargetRow(SubscriberMessages),
    "acknowledgements": TargetRow(Acknowledgements),
    "tap-requests": TargetRow(TapRequests, limit=CostLimit(steps=10_000_000)),
    "credentials": TargetRow(Credentials),
    "stream-seeks": TargetRow(StreamSeeks),
    "event-times": TargetRow(EventTimes, limit=DECODING),
    "settings-files": TargetRow(SettingsFiles, limit=CostLimit(steps=10_000_000)),
    "log-texts": TargetRow(LogTexts),
}


def _native_core() -> NativeCore:
    core = load_core("native", 1)
    assert core is not None
    return core
