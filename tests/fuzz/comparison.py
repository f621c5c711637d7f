"""Decode and plan a frame with the Python code alone and with the native core, and compare the results."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from indexer.atproto.limits import DEFAULT_LIMITS, Limits
from indexer.atproto.mst import EMPTY_TREE
from indexer.atproto.syntax import CollectionFilter
from indexer.core.core import NativeCore
from indexer.errors import UpstreamError
from indexer.sync.batch import BatchPlan, PreparedCommits, ReceivedMessage, plan_batch
from indexer.sync.events import CommitEvent, OtherShardEvent, decode_frame
from indexer.sync.policy import KeyState, PlanContext, Policy
from indexer.sync.repo import Head, Repo, SyncStatus
from indexer.sync.scope import Scope
from indexer.sync.shard import BUCKETS, Layout, Shard
from tests.fuzz.outcome_counts import OutcomeCounts
from tests.sync.signing_account import CONTEXT, SigningAccount

T = TypeVar("T")
OLDEST_REV = "2222222222222"
SMALL_LIMITS = replace(
    DEFAULT_LIMITS,
    commit_ops=3,
    record_bytes=200,
    record_json_bytes=150,
    record_items=20,
    node_entries=6,
    tree_depth=2,
    car_header_bytes=60,
)
CONTEXTS = (
    CONTEXT,
    replace(CONTEXT, policy=Policy(Scope(collections=CollectionFilter(["app.bsky.*"])), DEFAULT_LIMITS)),
    replace(CONTEXT, policy=Policy(Scope(), SMALL_LIMITS)),
    replace(CONTEXT, policy=Policy(Scope(), DEFAULT_LIMITS, store_values=False, lenient=True)),
)
"""The size of a frame selects one of these policies, so that an input always has the same one."""

SMALL_FRAMES = replace(DEFAULT_LIMITS, frame_bytes=4_096, frame_items=60, commit_blocks_bytes=1_500, commit_ops=2)
DECODERS = (
    *((context.policy.limits, Shard()) for context in CONTEXTS[1:3]),
    (DEFAULT_LIMITS, Shard(0, 2)),
    (SMALL_FRAMES, Shard(1, 3, Layout(tuple(reversed(range(BUCKETS)))))),
)
"""The limits and shards for which each frame is decoded."""

DecodeCommit = Callable[[bytes], CommitEvent | OtherShardEvent | None]
"""Decodes a `#commit`; None for frames that the Python code has to decide."""


class DifferenceError(AssertionError):
    """The two events or the two plans of a frame differ."""


def accepted(decode: Callable[[], T]) -> T | None:
    """Return what a decoder returns; None if it raises the only error that it may raise."""
    try:
        return decode()
    except UpstreamError:
        return None


class Comparison:
    """Compares the events and the plans of frames, one at a time.

    Attributes:
        counts: What was compared.
    """

    def __init__(self, core: NativeCore, owners: Sequence[SigningAccount]) -> None:
        self._core = core
        self._decoders = [(core.commit_decoder(limits, shard), limits, shard) for limits, shard in DECODERS]
        self._keys = {owner.did: owner.key_state._replace(final=True) for owner in owners}
        self._other_key = owners[0].key_state._replace(final=True)
        self.counts = OutcomeCounts("decoded", "commits", "accepted")

    def compare(self, frame: bytes) -> None:
        """Give a frame to both sides. Its repo is in the state that the frame claims as the one before it.

        If the native core leaves the commit to the Python code, its plan is that of the Python code.

        Raises:
            DifferenceError: The events or the plans differ.
        """
        self.counts.executions += 1
        decoded = [self._is_decoded(frame, *decoder) for decoder in self._decoders]
        self.counts.add("decoded", any(decoded))
        context = CONTEXTS[len(frame) % len(CONTEXTS)]
        event = decode_frame(frame, context.policy.limits)
        if not isinstance(event, CommitEvent):
            return
        self.counts.add("commits")
        key = self._key_state(event.did)
        expected = self._plan(frame, event, context, PreparedCommits())
        assert key.key is not None
        results = self._core.begin_verification([(event, key.key)], context.policy).next_results()
        verified = results.accepted(event, key.key)
        if verified is None:
            return
        self.counts.add("accepted")
        found = self._plan(frame, event, context, PreparedCommits([(event, key.key)], [verified]))
        if found != expected:
            raise DifferenceError(f"Python: {expected}\nnative: {found}")

    def _is_decoded(self, frame: bytes, decode: DecodeCommit, limits: Limits, shard: Shard) -> bool:
        """Return True if the native core decodes the frame, after comparing the event with that of the Python code."""
        found = decode(frame)
        if found is None:
            return False
        expected = decode_frame(frame, limits, None if shard.count == 1 else shard.owns)
        if repr(found) != repr(expected):  # equal values may have other types
            raise DifferenceError(f"Python: {expected}\nnative: {found}")
        return True

    def _key_state(self, did: str) -> KeyState:
        return self._keys.get(did, self._other_key)

    def _plan(self, frame: bytes, event: CommitEvent, context: PlanContext, prepared: PreparedCommits) -> BatchPlan:
        head = Head(OLDEST_REV, event.prev_data or EMPTY_TREE, event.commit)
        row = Repo(event.did, version=1, sync_status=SyncStatus.SYNCHRONIZED, head=head)
        message = ReceivedMessage(context.origin, event.seq, frame, event)
        return plan_batch([message], {event.did: row}, self._key_state, context, prepared)
