"""Plan a batch of received messages, in the order of the stream, for one transaction.

The native core may have verified their commits ahead (`PreparedCommits`). The plan is the same with and without it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from indexer.atproto.car import encode_car, split_car
from indexer.atproto.crypto import PublicKey
from indexer.atproto.limits import Limits
from indexer.errors import UpstreamError
from indexer.reasons import Desync, Rejection
from indexer.sync.changes import (
    BufferedEvent,
    DeadLetter,
    NeedsKey,
    NeedsPredecessor,
    Plan,
    RecordChange,
    RepoWrite,
    selected_path,
)
from indexer.sync.events import CommitEvent, MalformedEvent, RepoEvent, SyncEvent, UnknownEvent, encode_commit
from indexer.sync.plan import key_to_verify, plan_event
from indexer.sync.policy import KeyState, KeyStateOf, PlanContext, Policy
from indexer.sync.repo import Outcome, Repo, SyncStatus, Trigger, desynchronize, unparked
from indexer.sync.stream import Origin
from indexer.sync.verify import VerifiedCommit, verify_commit


class PreparedCommits(dict[int, tuple[CommitEvent, PublicKey, VerifiedCommit | None]]):
    """The results of the native core for some commits: a verified commit, or None if `verify_commit` has to decide.

    The keys are the identities of the events, because hashing an event hashes its blocks. The results refer to the
    events, so no identity is reused.
    """

    def __init__(
        self, commits: Iterable[tuple[CommitEvent, PublicKey]] = (), results: Iterable[VerifiedCommit | None] = ()
    ) -> None:
        """Take the results for these commits, in the same order."""
        for (event, key), commit in zip(commits, results, strict=True):
            self[id(event)] = event, key, commit

    def accepted(self, event: CommitEvent, key: PublicKey) -> VerifiedCommit | None:
        """Return the verified commit if the native core accepted it with this key, else None."""
        _, verified_with, commit = self.get(id(event), (event, None, None))
        return commit if verified_with is key or verified_with == key else None

    def has_all_of(self, event: CommitEvent, key: KeyState | None, policy: Policy) -> bool:
        """Return True if the native core accepted the commit with this key, and has converted each record to store."""
        commit = None if key is None or key.key is None else self.accepted(event, key.key)
        return commit is not None and not any(
            change.converted is None and change.block and selected_path(change.path, policy)
            for change in (commit.changes if policy.store_values else ())
        )

    def verify(self, event: CommitEvent, key: PublicKey, limits: Limits) -> VerifiedCommit:
        """Return the verified commit if the native core accepted it with this key, else the result of `verify_commit`.

        Raises:
            UpstreamError: As `verify_commit`.
        """
        return self.accepted(event, key) or verify_commit(event, key, limits)


MAX_BATCH_BYTES = 16 << 20
"""Frames and record changes of one batch, in bytes: a batch takes no further message beyond this."""
MAX_BATCH_CHANGES = 5_000
"""Record changes of one batch: a batch takes no further message beyond this. Writing one takes the event loop 10 µs."""
QUICK_BYTES = 16 << 10
"""Maximum bytes of frames from which removed records are taken out on the event loop, which takes up to 4 ms."""
DEAD_LETTER_BYTES = 100_000
"""The maximum length of a dead letter's frame; longer frames are truncated."""

_NODE_START = b"\xa2\x61e"  # a map of two items, first that with the key "e"


class ReceivedMessage(NamedTuple):
    """A message from a stream, decoded, with its frame."""

    origin: Origin
    seq: int | None  # the number of the watermark that this message holds back until it is settled; None if it has none
    frame: bytes
    event: RepoEvent | UnknownEvent | MalformedEvent
    at: float = 0.0  # the time of arrival, in monotonic seconds

    @property
    def did(self) -> str | None:
        """The account of the message; None if it names none or is of an unknown type."""
        return self.event.did


def has_rev_below(message: ReceivedMessage, rev: str) -> bool:
    """Return True for a #commit or #sync with a lower rev."""
    return isinstance(message.event, CommitEvent | SyncEvent) and message.event.rev < rev


class _Contexts(dict[Origin, PlanContext]):
    """The context of a batch for each origin of its messages."""

    def __init__(self, context: PlanContext) -> None:
        self._context = context

    def __missing__(self, origin: Origin) -> PlanContext:
        self[origin] = context = replace(self._context, origin=origin)
        return context


def commits_to_verify(
    messages: Iterable[ReceivedMessage], repo_of: Callable[[str], Repo], key_state_of: KeyStateOf, context: PlanContext
) -> list[tuple[CommitEvent, PublicKey]]:
    """Return the commits that `plan_event` will verify if these are the rows of their repos, with their keys."""
    contexts = _Contexts(context)
    return [
        (event, key)
        for event, origin in [(message.event, message.origin) for message in messages]
        if isinstance(event, CommitEvent)
        and (key := key_to_verify(repo_of(event.did), event, key_state_of(event.did), contexts[origin])) is not None
    ]


class SettledMessage(NamedTuple):
    """A message with its outcome, which is final once the batch is written."""

    received: ReceivedMessage
    outcome: Outcome
    why: Rejection | Desync | None = None
    is_new: bool = False  # an authentic #commit or #sync whose rev is above all revs of the account that were known


@dataclass(slots=True)
class _Draft:
    """The accumulated changes of one repo."""

    before: Repo
    after: Repo
    changes: list[RecordChange] = field(default_factory=list)
    buffered: list[BufferedEvent] = field(default_factory=list)

    def write(self) -> RepoWrite:
        """Return the changes as one write."""
        before, after, advances = self.before, self.after, self.after.advances(self.before)
        return RepoWrite(before, after, tuple(self.changes), tuple(self.buffered), True, advances)


@dataclass(slots=True)
class BatchPlan:
    """The plan of a batch. Every message is in `settled`, in `waiting` or in `postponed`.

    Attributes:
        settled: Messages with an outcome.
        waiting: Messages that need a key, or that are early, and all later messages of the same accounts.
        postponed: The last messages, if the batch has more than `MAX_BATCH_BYTES` or `MAX_BATCH_CHANGES` without them.
        needed_keys: The keys that `waiting` messages need, by DID.
        early: The revs of the early commits that wait, by DID. Commits with lower revs do not wait behind them.
        stale_identities: DIDs that need an identity refresh.
        drafts: The accumulated changes, by DID.
    """

    settled: list[SettledMessage] = field(default_factory=list)
    waiting: list[ReceivedMessage] = field(default_factory=list)
    postponed: list[ReceivedMessage] = field(default_factory=list)
    needed_keys: dict[str, NeedsKey] = field(default_factory=dict)
    early: dict[str, str] = field(default_factory=dict)
    dead_letters: list[DeadLetter] = field(default_factory=list)
    stale_identities: set[str] = field(default_factory=set)
    drafts: dict[str, _Draft] = field(default_factory=dict)

    @property
    def writes(self) -> tuple[RepoWrite, ...]:
        """One write per changed row."""
        return tuple([draft.write() for draft in self.drafts.values() if draft.after is not draft.before])

    @property
    def unchanged(self) -> frozenset[str]:
        """Accounts that have planned messages and whose row stays the same."""
        return frozenset([did for did, draft in self.drafts.items() if draft.after is draft.before])

    def without(self, dids: AbstractSet[str]) -> "BatchPlan":
        """Return the plan without what was planned for these accounts."""
        if not dids:
            return self
        return BatchPlan(
            [item for item in self.settled if item.received.did not in dids],
            [message for message in self.waiting if message.did not in dids],
            self.postponed,
            {did: need for did, need in self.needed_keys.items() if did not in dids},
            {did: rev for did, rev in self.early.items() if did not in dids},
            [dead_letter for dead_letter in self.dead_letters if dead_letter.did not in dids],
            self.stale_identities - dids,
            {did: draft for did, draft in self.drafts.items() if did not in dids},
        )


def plan_batch(
    batch: Sequence[ReceivedMessage],
    repos: Mapping[str, Repo],
    key_state_of: KeyStateOf,
    context: PlanContext,
    prepared: PreparedCommits | None = None,
) -> BatchPlan:
    """Plan each message on the row that the messages before it leave. `repos` are the existing rows of the accounts.

    Commits that the native core has not verified (`prepared`) are verified when they are planned.
    """
    if prepared is not None:
        context = replace(context, verify=prepared.verify)
    result, contexts, size, count = BatchPlan(), _Contexts(context), 0, 0
    for number, received in enumerate(batch):
        if size > MAX_BATCH_BYTES or count > MAX_BATCH_CHANGES:
            result.postponed.extend(batch[number:])
            break
        size += len(received.frame)
        event = received.event
        if isinstance(event, MalformedEvent):
            _reject(result, received, event.type, event.reason, event.detail)
        elif isinstance(event, UnknownEvent):
            result.settled.append(SettledMessage(received, Outcome.IGNORED))
        elif event.did in result.needed_keys or (
            event.did in result.early and not has_rev_below(received, result.early[event.did])
        ):
            result.waiting.append(received)
        else:
            draft = result.drafts.get(event.did)
            if draft is None:
                repo = repos.get(event.did) or Repo(event.did, from_stream=True, wanted_in=context.policy.scope.version)
                draft = result.drafts[event.did] = _Draft(repo, repo)
            key_state = None if event.did in result.stale_identities else key_state_of(event.did)
            plan = plan_event(draft.after, event, len(received.frame), key_state, contexts[received.origin])
            if isinstance(plan, NeedsKey):
                result.needed_keys[event.did] = plan
                result.waiting.append(received)
                continue
            if isinstance(plan, NeedsPredecessor):
                result.early[event.did] = plan.rev
                result.waiting.insert(0, received)  # before those of the account with higher revs
                continue
            _add(result, received, event, draft, plan, context.policy)
            size += sum([change.size for change in plan.changes])
            count += len(plan.changes)
    return result


def is_quick(
    batch: Sequence[ReceivedMessage],
    repos: Mapping[str, Repo],
    key_state_of: KeyStateOf,
    policy: Policy,
    prepared: PreparedCommits,
) -> bool:
    """Return True if planning takes some microseconds for each message and for each change of a record, not more.

    Then all signatures have been verified, all records converted, and few bytes have to be split into blocks.
    """
    return _bytes_to_split(batch, repos, policy) <= QUICK_BYTES and not any(
        isinstance(event, SyncEvent)
        or (isinstance(event, CommitEvent) and not prepared.has_all_of(event, key_state_of(event.did), policy))
        for event in [received.event for received in batch]
    )


def _bytes_to_split(batch: Sequence[ReceivedMessage], repos: Mapping[str, Repo], policy: Policy) -> int:
    """Return the bytes of the frames that `frame_to_buffer` may have to split, which costs up to 0.25 µs for each."""
    if not policy.scope.removes:
        return 0
    rows = [(received, repos.get(received.did or "")) for received in batch]
    return sum([len(received.frame) for received, row in rows if row and row.sync_status is SyncStatus.IN_PROGRESS])


def commits_within(messages: Iterable[ReceivedMessage], max_bytes: int) -> list[ReceivedMessage]:
    """Return the commits among the first messages, up to that with which their frames exceed `max_bytes`."""
    commits, size = [], 0
    for received in messages:
        if size > max_bytes:
            break
        size += len(received.frame)
        if isinstance(received.event, CommitEvent):
            commits.append(received)
    return commits


def plan_refusal(received: ReceivedMessage, repo: Repo | None, detail: str, context: PlanContext) -> BatchPlan:
    """Plan a message whose effects the database cannot store: a dead letter, and a resync of its repo.

    `repo` is None if there is no row, or if the database cannot store its next version either.
    """
    result = BatchPlan()
    _reject(result, received, received.event.kind, Rejection.STORE_FAILED, detail)
    if repo is not None:
        if repo.sync_status is SyncStatus.DESYNCHRONIZED:
            after = unparked(repo, context.now)
        else:
            after = desynchronize(repo, Trigger.REFUSED, Desync.STORE_FAILED, context.now)
        result.drafts[repo.did] = _Draft(repo, after)
    return result


def _add(
    result: BatchPlan, received: ReceivedMessage, event: RepoEvent, draft: _Draft, plan: Plan, policy: Policy
) -> None:
    """Add the plan of one message."""
    if plan.refresh_identity:
        result.stale_identities.add(event.did)
    if plan.outcome is Outcome.REJECTED and isinstance(plan.why, Rejection):
        _reject(result, received, event.kind, plan.why, plan.detail)
        return
    is_new = isinstance(event, CommitEvent | SyncEvent) and _proves_new_rev(draft.after, plan.repo, event.rev)
    draft.after = plan.repo
    draft.changes.extend(plan.changes)
    if plan.buffer:
        frame = frame_to_buffer(received.frame, event, policy)
        draft.buffered.append(BufferedEvent(event.did, received.origin.relay, event.seq, frame))
    elif plan.repo.sync_status is not SyncStatus.IN_PROGRESS:
        draft.buffered.clear()
    result.settled.append(SettledMessage(received, plan.outcome, plan.why, is_new))


def frame_to_buffer(frame: bytes, event: RepoEvent, policy: Policy) -> bytes:
    """Return the frame for the resync buffer: if it names a redacted or hidden record, only with the records to store.

    The proof needs only the tree nodes besides. No other block that an operation names is kept, even if it looks like a
    node. A frame that will be rejected gets no blocks.
    """
    scope, limits = policy.scope, policy.limits
    if not scope.removes or not isinstance(event, CommitEvent):
        return frame
    removed, excluded = scope.removed.get(event.did, ()), scope.collections.excluded
    if not any(op.path.encode() in removed or op.path.partition("/")[0] in excluded for op in event.ops):
        return frame
    named = {cid for op in event.ops for cid in (op.cid, op.prev)}
    wanted = {event.commit, *(op.cid for op in event.ops if scope.selects(event.did, op.path.encode()))}
    try:
        roots, blocks = split_car(event.blocks, limits, max_bytes=limits.commit_blocks_bytes)
    except UpstreamError:
        roots, blocks = [b""], {}
    is_root = roots[0] == event.commit
    kept = [
        (cid, block)
        for cid, block in blocks.items()
        if is_root and (cid in wanted or (cid not in named and _is_node(block)))
    ]
    return encode_commit(event._replace(blocks=encode_car(event.commit, kept)))


def _is_node(block: bytes) -> bool:
    """Return True for a tree node, and False for a record with a `$type`, without decoding the block."""
    return block.startswith(_NODE_START) and b"$type" not in block


def _proves_new_rev(before: Repo, after: Repo, rev: str) -> bool:
    """Return True if an event with this rev was authentic, and its rev is above all revs that the row had."""
    known = before.head.rev if before.head else ""
    if rev <= max(known, before.latest_verified_rev or "", before.latest_unverified_rev or ""):
        return False
    return rev == after.latest_verified_rev or (after.head is not None and rev == after.head.rev)


def _reject(result: BatchPlan, received: ReceivedMessage, kind: str, reason: Rejection, detail: str) -> None:
    frame, seq, did = received.frame[:DEAD_LETTER_BYTES], received.event.seq, received.did
    relay, epoch, _ = received.origin
    result.dead_letters.append(DeadLetter(relay, seq, did, kind, reason, detail, frame, epoch))
    result.settled.append(SettledMessage(received, Outcome.REJECTED, reason))
