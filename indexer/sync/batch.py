"""A batch of received messages to one transaction's worth of writes: pure, in the order of the stream."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from indexer.reasons import Desync, Rejection
from indexer.sync.events import IdentityEvent, MalformedEvent, RepoEvent, UnknownEvent
from indexer.sync.plan import DeadLetter, KeptEvent, NeedsKey, Plan, RecordChange, RepoWrite
from indexer.sync.planning import Ground, Signer, plan_event
from indexer.sync.repo import Outcome, Repo, SyncStatus

DEAD_LETTER_BYTES = 100_000  # of a refused frame; nearly all frames are far smaller


@dataclass(frozen=True, slots=True)
class Received:
    """A message with its place in the stream, its bytes, and when it came (monotonic seconds)."""

    seq: int | None
    frame: bytes
    event: RepoEvent | UnknownEvent | MalformedEvent
    at: float = 0.0

    @property
    def did(self) -> str | None:
        return None if isinstance(self.event, UnknownEvent) else self.event.did


@dataclass(frozen=True, slots=True)
class Settled:
    """What became of one message."""

    received: Received
    outcome: Outcome
    why: Rejection | Desync | None = None


@dataclass(slots=True)
class _Draft:
    """The growing write of one repo."""

    before: Repo
    after: Repo
    changes: list[RecordChange] = field(default_factory=list)
    kept: list[KeptEvent] = field(default_factory=list)


@dataclass(slots=True)
class BatchPlan:
    """What a batch writes and what it leaves: `waiting` messages need the keys in `needs` first.

    Every message is either in `settled` or in `waiting`; all of a DID's messages behind a waiting one wait too.
    """

    settled: list[Settled] = field(default_factory=list)
    waiting: list[Received] = field(default_factory=list)
    needs: dict[str, NeedsKey] = field(default_factory=dict)
    dead_letters: list[DeadLetter] = field(default_factory=list)
    stale_identities: set[str] = field(default_factory=set)
    drafts: dict[str, _Draft] = field(default_factory=dict)

    @property
    def writes(self) -> tuple[RepoWrite, ...]:
        """One write for each repo whose row changes."""
        return tuple(
            [
                RepoWrite(draft.before.version, draft.after, tuple(draft.changes), tuple(draft.kept))
                for draft in self.drafts.values()
                if draft.after is not draft.before
            ]
        )


def plan_batch(
    batch: Sequence[Received],
    repos: Mapping[str, Repo],
    signer_of: Callable[[str], Signer | None],
    ground: Ground,
) -> BatchPlan:
    """Plans each message on the state that the ones before it leave; `repos` has the rows that exist."""
    result = BatchPlan()
    for received in batch:
        event = received.event
        if isinstance(event, MalformedEvent):
            _refuse(result, received, event.type, event.reason, event.detail, ground)
        elif isinstance(event, UnknownEvent):
            result.settled.append(Settled(received, Outcome.IGNORED))
        elif event.did in result.needs:
            result.waiting.append(received)
        else:
            _plan_one(result, received, event, repos, signer_of, ground)
    return result


def _plan_one(
    result: BatchPlan,
    received: Received,
    event: RepoEvent,
    repos: Mapping[str, Repo],
    signer_of: Callable[[str], Signer | None],
    ground: Ground,
) -> None:
    did = event.did
    draft = result.drafts.get(did)
    if draft is None:
        repo = repos.get(did) or Repo(did)
        draft = result.drafts[did] = _Draft(repo, repo)
    signer = None if did in result.stale_identities else signer_of(did)
    plan = plan_event(draft.after, event, len(received.frame), signer, ground)
    if isinstance(plan, NeedsKey):
        result.needs[did] = plan
        result.waiting.append(received)
        return
    if isinstance(event, IdentityEvent) and plan.outcome is Outcome.APPLIED:
        result.stale_identities.add(did)
    if plan.outcome is Outcome.REJECTED and isinstance(plan.why, Rejection):
        _refuse(result, received, event.kind, plan.why, plan.detail, ground)
        return
    _draw(draft, received.frame, event, plan, ground)
    result.settled.append(Settled(received, plan.outcome, plan.why))


def _draw(draft: _Draft, frame: bytes, event: RepoEvent, plan: Plan, ground: Ground) -> None:
    draft.after = plan.repo
    draft.changes.extend(plan.changes)
    if plan.keep:
        draft.kept.append(KeptEvent(plan.repo.did, ground.relay, event.seq, frame))
    elif plan.repo.status is not SyncStatus.IN_PROGRESS:
        draft.kept.clear()


def _refuse(result: BatchPlan, received: Received, kind: str, reason: Rejection, detail: str, ground: Ground) -> None:
    result.dead_letters.append(
        DeadLetter(ground.relay, received.seq, received.did, kind, reason, detail, received.frame[:DEAD_LETTER_BYTES])
    )
    result.settled.append(Settled(received, Outcome.REJECTED, reason))
