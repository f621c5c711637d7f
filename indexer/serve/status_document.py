"""The document that `/status.json` serves. Times are durations in seconds, so that clients need no correct clock.

Lists and texts are bounded, so the document stays small whatever hosts and accounts send.
"""

from dataclasses import dataclass, field, replace
from time import monotonic

from indexer.db import ConsumerState, LinkProgress, LinkProgressState, RejectionSummary
from indexer.reasons import Rejection
from indexer.redaction import without_secrets
from indexer.serve.backfill import Backfill, ScopeStatus
from indexer.serve.readiness import ReadinessReason
from indexer.serve.status_samples import History
from indexer.sync.identity import HostState
from indexer.sync.stream import OpenGap
from indexer.telemetry.conditions import Condition

MAX_ROWS = 50
"""Rows of each list. The number of all rows is beside it where there may be more."""
MAX_TEXT_LENGTH = 300
_REJECTION_TEXTS = {str(reason): reason.text for reason in Rejection}


@dataclass(frozen=True, slots=True)
class ConsumerStatus:
    """A registered consumer of the change log.

    Attributes:
        seq: The last change that it was given.
        behind: Number of changes that it has not been given.
        lag_seconds: Age of the oldest of those changes.
        silent_seconds: Seconds since it last asked for changes.
        cut_off: True if it was disconnected: it has to be unregistered and registered again.
    """

    name: str
    seq: int
    behind: int
    lag_seconds: float
    silent_seconds: float
    cut_off: bool


@dataclass(frozen=True, slots=True)
class GapStatus:
    """An open gap: messages of a relay that a shard may have missed.

    Attributes:
        first_seq: The first sequence number that may be missing; None if it is not known.
        last_seq: The last one; None if it is not known.
        open_seconds: Seconds since it was opened.
    """

    relay: str
    shard: str
    reason: str
    first_seq: int | None
    last_seq: int | None
    open_seconds: float


@dataclass(frozen=True, slots=True)
class LinkStatus:
    """The links of all shards.

    Attributes:
        state: `off`, `backfill`, or `complete`.
        progress: Estimated share of the repos whose links are stored; None if no links are kept.
        repos_done: Repos that the backfill has visited.
        seconds_left: Time for the rest of the backfill, at the mean rate since it began; None if it is unknown.
        open_recounts: Repos whose visibility changed and whose links are not recounted yet, at most 100,000.
    """

    state: LinkProgressState
    progress: float | None
    repos_done: int
    seconds_left: float | None
    open_recounts: int


@dataclass(slots=True)
class StreamStatus:
    """The stream of the relay.

    Attributes:
        relay: The connected relay; None if none is connected.
        seq: Every message up to this sequence number is stored; None before the first one.
        lag_seconds: Time since the moment up to which all events are stored; None if it is not known.
        silent_seconds: Time since the relay sent its last message; None before the first one.
        messages_per_second: Rate at which messages were settled, in the newest sample.
        unsettled_messages: Messages that are received and not settled.
        unsettled_bytes: Their size.
        waiting_for_keys: How many of them wait for a signing key.
        reconciliation: The progress of the last comparison with the relay's repo list.
    """

    relay: str | None = None
    seq: int | None = None
    lag_seconds: float | None = None
    silent_seconds: float | None = None
    messages_per_second: float | None = None
    unsettled_messages: int = 0
    unsettled_bytes: int = 0
    waiting_for_keys: int = 0
    reconciliation: str | None = None


@dataclass(frozen=True, slots=True)
class RepoStatus:
    """The repos of all shards, as they were counted last.

    Attributes:
        counted_seconds_ago: Age of the counts.
        counted_share: Share of the table that was counted; below 1, the numbers are estimates.
        reasons: Repos by the reason why they are not synchronized.
        failures: Repos by the reason why their last fetch failed.
        parked: Repos that are tried again only after an event, or after `INDEXER_SWEEP_INTERVAL`.
        unproven: Repos to which an undecidable commit was applied since their last complete export.
        records: Estimated number of records.
    """

    counted_seconds_ago: float
    counted_share: float
    statuses: dict[str, int]
    reasons: dict[str, int]
    failures: dict[str, int]
    queued: int
    parked: int
    unproven: int
    records: int
    backfill: Backfill


@dataclass(frozen=True, slots=True)
class ResyncStatus:
    """A resync in progress.

    Attributes:
        host: The host of the account; "" if it is not known yet.
        phase: What the resync does now.
        phase_seconds: Time since the phase began.
        seconds: Time since the resync began.
        received_bytes: Bytes of the export that have arrived; None before the response.
        bytes_per_second: Mean rate of the export; None before the response.
        slot: `worker`, or `large` if its export is large, so that it occupies no worker.
    """

    did: str
    host: str
    phase: str
    phase_seconds: float
    seconds: float
    received_bytes: int | None
    bytes_per_second: float | None
    slot: str


@dataclass(slots=True)
class ResyncPoolStatus:
    """The resync workers of this process.

    Attributes:
        workers_free: Workers without a resync; None if this process runs none.
        resyncs_per_second: Rate at which resyncs ended, in the newest sample.
        running: The number of resyncs in progress, including those of large exports.
        longest: Those that run longest.
    """

    workers_free: int | None = None
    resyncs_per_second: float | None = None
    running: int = 0
    longest: list[ResyncStatus] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class HostStatus:
    """A host that is paused or whose last requests failed.

    Attributes:
        pause_seconds_left: Time for which it gets no requests; None if it is not paused.
    """

    host: str
    pause_reason: str | None
    pause_seconds_left: float | None
    failures_in_a_row: int
    last_error: str | None
    last_success_seconds_ago: float | None


@dataclass(frozen=True, slots=True)
class ConditionStatus:
    """A condition that lasts (docs/runbook.md#conditions-in-the-log)."""

    name: str
    subject: str
    message: str
    seconds: float
    count: int
    prevents_readiness: bool


@dataclass(frozen=True, slots=True)
class RejectionStatus:
    """The dead letters with one reason; relay, DID and detail are those of the newest one."""

    reason: str
    meaning: str
    stored: int
    last_hour: int
    newest_seconds_ago: float
    relay: str
    seq: int | None
    did: str | None
    detail: str


@dataclass(slots=True)
class DeliveryStatus:
    """The part of the document that is read from the database for the page.

    Attributes:
        read_seconds_ago: Age of `rejections` and `consumers`; None if they were never read.
        error: Why the last read failed; None if it succeeded.
        lagging: The names of the consumers that are further behind than an hour.
    """

    read_seconds_ago: float | None = None
    error: str | None = None
    rejections: list[RejectionStatus] = field(default_factory=list)
    consumers: list[ConsumerStatus] = field(default_factory=list)
    lagging: list[str] = field(default_factory=list)


@dataclass(slots=True)
class StatusDocument:
    """The state of this process and its database. Each stage sets its part.

    Attributes:
        time: The present time in Unix seconds, by the clock of the server.
        started_at: When this process began, in Unix seconds.
        reasons: All reasons why the daemon is not ready; none if it is ready.
        repos: None until the repos were counted for the first time.
        hosts_in_trouble: The number of hosts that are paused or failing; `hosts` has some of them.
        links: The links of all shards; None until the repos were counted for the first time.
        scope_backfill: The backfill of added collections, of all shards; None until then, too.
        gaps_open: The number of open gaps of the shard; None if it is not known yet.
    """

    version: str
    time: float
    started_at: float
    shard: str
    roles: list[str]
    ready: bool
    reasons: list[ReadinessReason]
    stream: StreamStatus = field(default_factory=StreamStatus)
    history: History = field(default_factory=lambda: History([], [], [], []))
    repos: RepoStatus | None = None
    links: LinkStatus | None = None
    scope_backfill: ScopeStatus | None = None
    resyncs: ResyncPoolStatus = field(default_factory=ResyncPoolStatus)
    hosts_in_trouble: int = 0
    hosts: list[HostStatus] = field(default_factory=list)
    conditions: list[ConditionStatus] = field(default_factory=list)
    gaps_open: int | None = None
    gaps: list[GapStatus] = field(default_factory=list)
    delivery: DeliveryStatus = field(default_factory=DeliveryStatus)


def short(text: str) -> str:
    """Return a text from outside without secrets, and cut off at `MAX_TEXT_LENGTH`."""
    text = without_secrets(text[: 4 * MAX_TEXT_LENGTH])
    return text if len(text) <= MAX_TEXT_LENGTH else f"{text[: MAX_TEXT_LENGTH - 1]}…"


def host_status(state: HostState, now: float) -> HostStatus:
    """Return the status of a host at `now` (Unix seconds)."""
    left = (state.paused_until or 0.0) - now
    return HostStatus(
        host=short(state.host),
        pause_reason=state.pause_reason if left > 0 else None,
        pause_seconds_left=left if left > 0 else None,
        failures_in_a_row=state.consecutive_failures,
        last_error=state.last_error and short(state.last_error),
        last_success_seconds_ago=None if state.last_success is None else max(0.0, now - state.last_success),
    )


def condition_status(condition: Condition) -> ConditionStatus:
    """Return the status of a condition."""
    return ConditionStatus(
        name=condition.kind.name,
        subject=short(condition.subject),
        message=short(condition.message),
        seconds=monotonic() - condition.began_at,
        count=condition.count,
        prevents_readiness=condition.kind.prevents_readiness,
    )


def rejection_status(rejection: RejectionSummary, now: float) -> RejectionStatus:
    """Return the status of the dead letters with one reason at `now` (Unix seconds)."""
    return RejectionStatus(
        reason=rejection.reason,
        meaning=_REJECTION_TEXTS.get(rejection.reason, ""),
        stored=rejection.stored,
        last_hour=rejection.last_hour,
        newest_seconds_ago=max(0.0, now - rejection.newest_at),
        relay=short(rejection.relay),
        seq=rejection.seq,
        did=rejection.did and short(rejection.did),
        detail=short(rejection.detail),
    )


def short_consumer(consumer: ConsumerStatus) -> ConsumerStatus:
    """Return the status of a consumer with a bounded name."""
    return replace(consumer, name=short(consumer.name))


def short_gap(gap: GapStatus) -> GapStatus:
    """Return the status of a gap with a bounded name."""
    return replace(gap, relay=short(gap.relay))


def consumer_status(consumer: ConsumerState, now: float) -> ConsumerStatus:
    """Return the status of a consumer at `now` (Unix seconds)."""
    return ConsumerStatus(
        consumer.name,
        consumer.seq,
        consumer.behind,
        consumer.lag(now),
        max(0.0, now - consumer.seen_at),
        consumer.cut_off,
    )


def gap_status(opened: OpenGap, now: float) -> GapStatus:
    """Return the status of an open gap at `now` (Unix seconds)."""
    gap = opened.gap
    return GapStatus(gap.relay, gap.shard, gap.reason, gap.first_seq, gap.last_seq, max(0.0, now - opened.opened_at))


def link_status(links: LinkProgress, now: float) -> LinkStatus:
    """Return the status of links at `now` (Unix seconds)."""
    left = None
    if links.state == "backfill" and links.progress > 0 and links.enabled_at is not None:
        left = max(0.0, now - links.enabled_at) * (1 - links.progress) / links.progress
    return LinkStatus(
        state=links.state,
        progress=None if links.state == "off" else links.progress,
        repos_done=links.repos_done,
        seconds_left=left,
        open_recounts=links.open_recounts,
    )
