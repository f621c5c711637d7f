"""The table of targets: the kinds of inputs that can be fuzzed.

This module imports none of them: a process imports only its own one, which takes seconds with counters of coverage.
"""

from importlib import import_module
from random import Random
from typing import Literal, NamedTuple, Protocol, cast

from tests.fuzz.fuzz_target import MutateBytes
from tests.fuzz.input_cost import DECODING, CostLimit
from tests.fuzz.outcome_counts import OutcomeCounts


class Target(Protocol):
    """Inputs of one kind."""

    @property
    def counts(self) -> OutcomeCounts:
        """The inputs so far."""

    def seeds(self, random: Random, count: int, /) -> list[bytes]:
        """Return new inputs to start from, most of them valid."""

    def compare(self, data: bytes) -> None:
        """Run an input. Raises `DifferenceError` if the result is not the expected one; any other error is one, too."""

    def mutate(self, data: bytes, random: Random, mutate_bytes: MutateBytes, /) -> bytes:
        """Return a mutated input."""

    def close(self) -> None:
        """Release what the target holds besides memory."""


class TargetRow(NamedTuple):
    """A row of the table of targets.

    Attributes:
        name: The module in this package, and the class.
        needs: The native core or a Postgres, without which it cannot run.
        limit: The most that an input may cost.
    """

    name: str
    needs: Literal["native core", "Postgres"] | None = None
    limit: CostLimit = CostLimit()

    def make(self) -> Target:
        """Return the target, after importing its module."""
        module, _, name = self.name.partition(".")
        return cast("Target", getattr(import_module(f"tests.fuzz.{module}"), name)())


TARGETS = {
    "frames": TargetRow("native_targets.Frames", "native core", limit=DECODING),
    "exports": TargetRow("native_targets.Exports", "native core", limit=CostLimit(steps=10_000_000)),
    "messages": TargetRow("message_target.Messages", limit=DECODING),
    "cars": TargetRow("block_targets.Cars", limit=DECODING),
    "nodes": TargetRow("block_targets.Nodes", limit=DECODING),
    "commits": TargetRow("block_targets.Commits", limit=DECODING),
    "range-walks": TargetRow("walk_target.RangeWalks", limit=CostLimit(steps=4_000_000)),
    "inversions": TargetRow("inversion_target.Inversions", limit=CostLimit(steps=10_000_000)),  # the reference counts
    "did-documents": TargetRow("identity_targets.DidDocuments", limit=DECODING),
    "plc-logs": TargetRow("plc_target.PlcLogs"),
    "did-webs": TargetRow("identity_targets.DidWebs", limit=DECODING),
    "handles": TargetRow("identity_targets.Handles"),
    "records": TargetRow("database_targets.Records", "Postgres"),
    "buffers": TargetRow("buffer_target.Buffers"),
    "lexicons": TargetRow("database_targets.Lexicons", "Postgres"),
    "identifiers": TargetRow("syntax_targets.Identifiers", limit=DECODING),
    "at-uris": TargetRow("syntax_targets.AtUris", limit=DECODING),
    "patterns": TargetRow("syntax_targets.Patterns"),
    "keys": TargetRow("key_targets.Keys", limit=DECODING),
    "signatures": TargetRow("key_targets.Signatures", limit=DECODING),
    "dag-cbor": TargetRow("record_targets.DagCbor"),
    "record-proofs": TargetRow("record_targets.RecordProofs"),
    "repo-lists": TargetRow("host_targets.RepoLists", limit=DECODING),
    "repo-states": TargetRow("host_targets.RepoStates", limit=DECODING),
    "bodies": TargetRow("host_targets.Bodies", limit=CostLimit(memory=16 << 20)),
    "subscriber-queries": TargetRow("feed_targets.SubscriberQueries"),
    "subscriber-messages": TargetRow("feed_targets.SubscriberMessages"),
    "tap-requests": TargetRow("request_target.TapRequests", "Postgres", limit=CostLimit(steps=10_000_000)),
}
