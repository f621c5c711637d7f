"""The document that `/status.json` serves. Times are durations in seconds, so that clients need no correct clock.

Lists and texts are bounded, so the document stays small whatever hosts and accounts send.
"""

from dataclasses import dataclass

from indexer.redaction import without_secrets
from indexer.serve.backfill import Backfill, ScopeStatus
from indexer.serve.readiness import ReadinessReason
from indexer.serve.status_rows import ConsumerStatus, GapStatus, LinkStatus
from indexer.serve.status_samples import History

MAX_ROWS = 50
"""Rows of each list. The number of all rows is beside it where there may be more."""
MAX_TEXT_LENGTH = 300


@dataclass(frozen=True, slots=True)
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

    relay: str | None
    seq: int | None
    lag_seconds: float | None
    silent_seconds: float | None
    messages_per_second: float | None
    unsettled_messages: int
    unsettled_bytes: int
    waiting_for_keys: int
    reconciliation: str | None


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
        slot: `worker`, `large` for a large repo, `aside` if it is slow and left its worker to others, or
            `writing` if it waits for a transaction that it shares with others.
    """

    did: str
    host: str
    phase: str
    phase_seconds: float
    seconds: float
    received_bytes: int | None
    bytes_per_second: float | None
    slot: str


@dataclass(frozen=True, slots=True)
class ResyncPoolStatus:
    """The resync workers of this process.

    Attributes:
        workers_free: Workers without a resync; None if this process runs none.
        resyncs_per_second: Rate at which resyncs ended, in the newest sample.
        running: The number of resyncs in progress, including those of large repos and slow exports.
        longest: Those that run longest.
    """

    workers_free: int | None
    resyncs_per_second: float | None
    running: int
    longest: list[ResyncStatus]


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


@dataclass(frozen=True, slots=True)
class DeliveryStatus:
    """The part of the document that is read from the database for the page.

    Attributes:
        read_seconds_ago: Age of `rejections` and `consumers`; None if they were never read.
        error: Why the last read failed; None if it succeeded.
        lagging: The names of the consumers that are further behind than an hour.
    """

    read_seconds_ago: float | None
    error: str | None
    rejections: list[RejectionStatus]
    consumers: list[ConsumerStatus]
    lagging: list[str]


@dataclass(frozen=True, slots=True)
class StatusDocument:
    """The state of this process and its database.

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
    stream: StreamStatus
    history: History
    repos: RepoStatus | None
    links: LinkStatus | None
    scope_backfill: ScopeStatus | None
    resyncs: ResyncPoolStatus
    hosts_in_trouble: int
    hosts: list[HostStatus]
    conditions: list[ConditionStatus]
    gaps_open: int | None
    gaps: list[GapStatus]
    delivery: DeliveryStatus


def short(text: str) -> str:
    """Return a text from outside without secrets, and cut off at `MAX_TEXT_LENGTH`."""
    text = without_secrets(text[: 4 * MAX_TEXT_LENGTH])
    return text if len(text) <= MAX_TEXT_LENGTH else f"{text[: MAX_TEXT_LENGTH - 1]}…"
