"""The status document: what `indexer status`, the status page and the metrics show.

Times are durations in seconds, so that clients need no correct clock. Lists and texts are bounded, so the document
stays small whatever hosts and accounts send.
"""

from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from indexer import __version__
from indexer.db.links import LinkProgressState
from indexer.redaction import without_secrets
from indexer.sync.repo import SyncStatus
from indexer.sync.stream import OpenGap

MAX_ROWS = 50
"""Rows of each list. The number of all rows is beside it where there may be more."""
MAX_TEXT_LENGTH = 300
SAMPLE_SECONDS = 10.0
"""Interval between two samples of the history."""
MAX_SAMPLES = 360
"""Samples of the history: an hour."""


@dataclass(frozen=True, slots=True)
class ReadinessReason:
    """One reason why the indexer is not ready.

    Attributes:
        code: The kind of reason, for programs. docs/runbook.md lists them.
        message: What is wrong, for people.
        value: How bad it is: a time in seconds, a share or a number; see
            docs/operations.md#reasons-why-the-daemon-is-not-ready.
    """

    code: str
    message: str
    value: float


@dataclass(frozen=True, slots=True)
class CursorStatus:
    """The stored cursor of one relay and shard.

    Attributes:
        event_time: Time of the event at the cursor, as the relay wrote it.
        lag_seconds: Seconds since the moment up to which all events are stored, by the times of most accounts, or since
            the stream had no more events. None if it is unknown, because no event has a possible time.
    """

    relay: str
    shard: str
    seq: int
    event_time: str | None
    lag_seconds: float | None


@dataclass(frozen=True, slots=True)
class Backfill:
    """Repos that wait, and how long that takes.

    Attributes:
        repos_per_second: Rate at which they become fewer, without those that begin to wait in the meantime. None if it
            is not known yet.
        seconds_left: Time for all of them at this rate; None if none waits or the rate is zero or unknown.
    """

    waiting: int
    repos_per_second: float | None
    seconds_left: float | None


@dataclass(frozen=True, slots=True)
class RepoStatus:
    """The repos of all shards, as they were counted last.

    Attributes:
        counted_share: Share of the table that was counted; below 1, the numbers are estimates.
        reasons: Repos by the reason why they are not synchronized.
        failures: Repos by the reason why their last fetch failed.
        queued: Repos that wait for a resync.
        parked: Repos that are tried again only after an event, or after `INDEXER_SWEEP_INTERVAL`.
        unproven: Repos to which an undecidable commit was applied since their last complete export.
        records: Estimated number of records.
        progress: Share of synchronized repos among those that are synchronized or waiting; None if there are none.
        backfill: Repos that wait for a resync or are being resynced.
        scope_backfill: Repos that were fetched before, and wait for the records of a collection that the scope added.
            Their rate is at most that of resyncs: many repos that have no such records are complete at once.
    """

    counted_seconds_ago: float
    counted_share: float
    statuses: dict[SyncStatus, int]
    reasons: dict[str, int]
    failures: dict[str, int]
    queued: int
    parked: int
    unproven: int
    records: int
    progress: float | None
    backfill: Backfill
    scope_backfill: Backfill


@dataclass(frozen=True, slots=True)
class ConsumerStatus:
    """A registered consumer of the change log.

    Attributes:
        seq: The last change that it was given.
        behind: Number of changes that it has not been given.
        lag_seconds: Age of the oldest of those changes.
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
        progress: Estimated share of the repos whose links are stored; None if no links are kept.
        seconds_left: Time for the rest of the backfill, at the mean rate since it began; None if it is unknown.
        open_recounts: Repos whose visibility changed and whose links are not recounted yet, at most 100,000.
    """

    state: LinkProgressState
    progress: float | None
    repos_done: int
    seconds_left: float | None
    open_recounts: int


@dataclass(frozen=True, slots=True)
class DaemonStatus:
    """A daemon with the role `live`.

    Attributes:
        shard: Its shard as i/n, or its range of positions (`indexer.sync.shard`).
        state: `owns` if it processes the shard, `waits` if another process holds a part of it.
        client: The network address of the process.
        pid: The process ID of its session in Postgres, which began `seconds` ago.
    """

    shard: str
    state: Literal["owns", "waits"]
    client: str
    pid: int
    seconds: float


@dataclass(frozen=True, slots=True)
class HostStatus:
    """A host that gets no requests for `seconds_left`."""

    host: str
    reason: str
    seconds_left: float
    failures_in_a_row: int
    last_error: str | None
    last_success_seconds_ago: float | None


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
class StreamStatus:
    """The stream of the relay to this process.

    Attributes:
        seq: Every message up to this sequence number is stored; None before the first one.
        lag_seconds: Time since the moment up to which all events are stored; None if it is not known.
        unsettled_messages: Messages that are received and not settled.
        waiting_for_keys: How many of them wait for a signing key.
        reconciliation: The progress of the last comparison with the relay's repo list.
    """

    relay: str | None = None
    seq: int | None = None
    lag_seconds: float | None = None
    silent_seconds: float | None = None
    unsettled_messages: int = 0
    unsettled_bytes: int = 0
    waiting_for_keys: int = 0
    reconciliation: str | None = None


@dataclass(frozen=True, slots=True)
class ResyncStatus:
    """A resync in progress.

    Attributes:
        host: The host of the account; "" if it is not known yet.
        phase: What the resync does, for `phase_seconds`.
        received_bytes: Bytes of the export that have arrived; None before the response, as their mean rate.
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
        workers_free: None if this process runs no workers.
        running: The number of resyncs in progress, including those of large exports.
        longest: Those that run longest.
    """

    workers_free: int | None = None
    running: int = 0
    longest: list[ResyncStatus] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ConditionStatus:
    """A condition that lasts (docs/runbook.md#conditions-in-the-log)."""

    name: str
    subject: str
    message: str
    seconds: float
    count: int
    prevents_readiness: bool


@dataclass(slots=True)
class History:
    """Samples of one process over the last hour, as columns of the same length, oldest first.

    Attributes:
        times: When each sample was taken, in Unix seconds.
        messages_per_second: Mean rate at which messages were settled since the previous sample.
        resyncs_per_second: Mean rate at which resyncs ended since the previous sample.
    """

    times: list[float] = field(default_factory=list)
    lag_seconds: list[float | None] = field(default_factory=list)
    messages_per_second: list[float] = field(default_factory=list)
    resyncs_per_second: list[float] = field(default_factory=list)


@dataclass(slots=True)
class ProcessStatus:
    """The state of one process of the daemon. Each stage sets its part.

    Attributes:
        time: The present time in Unix seconds.
        started_at: When the process began, in Unix seconds.
    """

    time: float
    started_at: float
    shard: str
    roles: list[str]
    history: History
    stream: StreamStatus = field(default_factory=StreamStatus)
    resyncs: ResyncPoolStatus = field(default_factory=ResyncPoolStatus)
    conditions: list[ConditionStatus] = field(default_factory=list)


@dataclass(slots=True)
class StatusDocument:
    """The state of the database, and of the process that serves the document.

    Attributes:
        database: The URL of the database, without a password. The HTTP server does not tell it.
        read_seconds_ago: Age of what was read from the database; None if it was never read.
        reasons: All reasons why the indexer is not ready; none if it is ready. The HTTP server gives those of its
            process, `indexer status` those of all processes of the shard.
        events_per_second: Rate of the sequence numbers of all relays.
        repos: None until the repos were counted for the first time.
        hosts: Some paused hosts, those with the most failures in a row.
        gaps_open: The number of open gaps of all shards; `gaps` has some of them.
        set_aside_events: Number of events that clients of the feed refused for so long that they were set aside.
        process: None in `indexer status`.
    """

    database: str | None = None
    version: str = __version__
    read_seconds_ago: float | None = None
    reasons: list[ReadinessReason] = field(default_factory=list)
    cursors: list[CursorStatus] = field(default_factory=list)
    events_per_second: float | None = None
    repos: RepoStatus | None = None
    links: LinkStatus | None = None
    gaps_open: int = 0
    gaps: list[GapStatus] = field(default_factory=list)
    daemons: list[DaemonStatus] = field(default_factory=list)
    hosts: list[HostStatus] = field(default_factory=list)
    rejections: list[RejectionStatus] = field(default_factory=list)
    consumers: list[ConsumerStatus] = field(default_factory=list)
    set_aside_events: int = 0
    process: ProcessStatus | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the document as a JSON object, with bounded texts that have no secrets."""
        document: dict[str, Any] = _short_texts({"ready": not self.reasons, **asdict(self)})
        return document | {"database": self.database}


def _short_texts(value: Any) -> Any:
    match value:
        case str():
            return _short(value)
        case dict():
            return {_short(name): _short_texts(item) for name, item in value.items()}
        case list():
            return [_short_texts(item) for item in value]
    return value


def _short(text: str) -> str:
    """Return a text from outside without secrets, and cut off at `MAX_TEXT_LENGTH`."""
    text = without_secrets(text[: 4 * MAX_TEXT_LENGTH])
    return text if len(text) <= MAX_TEXT_LENGTH else f"{text[: MAX_TEXT_LENGTH - 1]}…"


def describe_gap(opened: OpenGap) -> str:
    """Return the gap as a phrase for people."""
    gap = opened.gap
    at = datetime.fromtimestamp(opened.opened_at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    span = "" if gap.first_seq is None else f", seq {gap.first_seq} to {gap.last_seq or 'unknown'}"
    return f"gap {gap.reason} in the stream of {gap.relay}{span}, opened {at}"
