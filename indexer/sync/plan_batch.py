"""Plan a batch of received messages, in the order of the stream, for one transaction."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from indexer.reasons import Desync, Rejection
from indexer.sync.events import IdentityEvent, MalformedEvent, RepoEvent, UnknownEvent
from indexer.sync.plan_event import plan_event
from indexer.sync.plans import BufferedEvent, DeadLetter, NeedsKey, Plan, RecordChange, RepoWrite
from indexer.sync.policy import KeyState, PlanContext
from indexer.sync.repo_state import Repo, SyncStatus
from indexer.sync.repo_transitions import Outcome

DEAD_LETTER_BYTES = 100_000
"""The maximum length of a dead letter's frame; longer frames are truncated."""


@dataclass(frozen=True, slots=True)
class ReceivedMessage:
    """A message from the stream, decoded, with its frame.

    Attributes:
        at: The time of arrival, in monotonic seconds.
    """

    seq: int | None
    frame: bytes
    event: RepoEvent | UnknownEvent | MalformedEvent
    at: float = 0.0

    @property
    def did(self) -> str | None:
        """The account of the message; None if it names none or is of an unknown type."""
        return None if isinstance(self.event, UnknownEvent) else self.event.did


@dataclass(frozen=True, slots=True)
class SettledMessage:
    """A message with its outcome, which is final once the batch is written."""

    received: ReceivedMessage
    outcome: Outcome
    why: Rejection | Desync | None = None


@dataclass(slots=True)
class _Draft:
    """The accumulated changes of one repo."""

    before: Repo
    after: Repo
    changes: list[RecordChange] = field(default_factory=list)
    buffered: list[BufferedEvent] = field(default_factory=list)


@dataclass(slots=True)
class BatchPlan:
    """The plan of a batch. Every message is either in `settled` or in `waiting`.

    Attributes:
        settled: Messages with an outcome.
        waiting: Messages that need a key, and all later messages of the same accounts.
        needed_keys: The keys that `waiting` messages need, by DID.
        stale_identities: DIDs that need an identity refresh.
        drafts: The accumulated changes, by DID.
    """

    settled: list[SettledMessage] = field(default_factory=list)
    waiting: list[ReceivedMessage] = field(default_factory=list)
    needed_keys: dict[str, NeedsKey] = field(default_factory=dict)
    dead_letters: list[DeadLetter] = field(default_factory=list)
    stale_identities: set[str] = field(default_factory=set)
    drafts: dict[str, _Draft] = field(default_factory=dict)

    @property
    def writes(self) -> tuple[RepoWrite, ...]:
        """One write per changed row."""
        return tuple(
            [
                RepoWrite(draft.before.version, draft.after, tuple(draft.changes), tuple(draft.buffered))
                for draft in self.drafts.values()
                if draft.after is not draft.before
            ]
        )


def plan_batch(
    batch: Sequence[ReceivedMessage],
    repos: Mapping[str, Repo],
    key_state_of: Callable[[str], KeyState | None],
    context: PlanContext,
) -> BatchPlan:
    """Plan each message on the row that the messages before it leave.

    Args:
        batch: The messages, in the order of the stream.
        repos: The existing rows of the accounts in the batch.
        key_state_of: Returns what is known about the key of a DID; None if it has not been looked up.
        context: What all plans of the batch share.
    """
    result = BatchPlan()
    for received in batch:
        event = received.event
        if isinstance(event, MalformedEvent):
            _reject(result, received, event.type, event.reason, event.detail, context)
        elif isinstance(event, UnknownEvent):
            result.settled.append(SettledMessage(received, Outcome.IGNORED))
        elif event.did in result.needed_keys:
            result.waiting.append(received)
        else:
            _plan_one(result, received, event, repos, key_state_of, context)
    return result


def _plan_one(
    result: BatchPlan,
    received: ReceivedMessage,
    event: RepoEvent,
    repos: Mapping[str, Repo],
    key_state_of: Callable[[str], KeyState | None],
    context: PlanContext,
) -> None:
    did = event.did
    draft = result.drafts.get(did)
    if draft is None:
        repo = repos.get(did) or Repo(did)
        draft = result.drafts[did] = _Draft(repo, repo)
    key_state = None if did in result.stale_identities else key_state_of(did)
    plan = plan_event(draft.after, event, len(received.frame), key_state, context)
    if isinstance(plan, NeedsKey):
        result.needed_keys[did] = plan
        result.waiting.append(received)
        return
    if isinstance(event, IdentityEvent) and plan.outcome is Outcome.APPLIED:
        result.stale_identities.add(did)
    if plan.outcome is Outcome.REJECTED and isinstance(plan.why, Rejection):
        _reject(result, received, event.kind, plan.why, plan.detail, context)
        return
    _add_to_draft(draft, received.frame, event, plan, context)
    result.settled.append(SettledMessage(received, plan.outcome, plan.why))


def _add_to_draft(draft: _Draft, frame: bytes, event: RepoEvent, plan: Plan, context: PlanContext) -> None:
    draft.after = plan.repo
    draft.changes.extend(plan.changes)
    if plan.buffer:
        draft.buffered.append(BufferedEvent(plan.repo.did, context.relay, event.seq, frame))
    elif plan.repo.sync_status is not SyncStatus.IN_PROGRESS:
        draft.buffered.clear()


def _reject(
    result: BatchPlan, received: ReceivedMessage, kind: str, reason: Rejection, detail: str, context: PlanContext
) -> None:
    result.dead_letters.append(
        DeadLetter(context.relay, received.seq, received.did, kind, reason, detail, received.frame[:DEAD_LETTER_BYTES])
    )
    result.settled.append(SettledMessage(received, Outcome.REJECTED, reason))
