"""The status document: what `indexer status`, the status page and the metrics show.

Times are durations in seconds, so that clients need no correct clock. Lists and texts are bounded, so the document
stays small whatever hosts and accounts send.
"""

from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from indexer import __version__
from indexer.redaction import without_secrets
from indexer.sync.stream import OpenGap

MAX_TEXT_LENGTH = 300
Row = dict[str, Any]


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


@dataclass(slots=True)
class StatusDocument:
    """The state of the database, and of the process that serves the document.

    A `Row` is a JSON object. `indexer.db.reports` has the queries of those that are read from the database.

    Attributes:
        database: The URL of the database, without a password. The HTTP server does not tell it.
        read_seconds_ago: Age of what was read from the database; None if it was never read.
        reasons: All reasons why the indexer is not ready; none if it is ready. The HTTP server gives those of its
            process, `indexer status` those of all processes of the shard.
        cursors: The stored cursors by relay and shard. `lag_seconds` is the time since the moment up to which all
            events are stored, by the times of most accounts, or since the stream had no more events. It is None if no
            event has a possible time. Of a Jetstream, it is the age of the last event.
        events_per_second: Rate of the sequence numbers of all relays; None for a Jetstream, which has none.
        repos: The repos of all shards, as they were counted last; None until the first count. It has numbers of
            `indexer.db.reports.Counts`; `progress`, the share of synchronized repos among those that are synchronized
            or waiting; and two backfills: of repos that wait for a resync, and (`scope_backfill`) of repos that were
            fetched before and wait for the records of added collections. The rate of the latter is at most that of
            resyncs: many repos that have no such records are complete at once.
        links: The progress of links: see `indexer.db.links.load_progress`.
        gaps_open: The number of open gaps of all shards; `gaps` has some of them.
        daemons: The processes with the role `live`. One `waits` while another process holds a part of its shard.
        hosts: Some paused hosts, those with the most failures in a row.
        withheld: Some hosts with accounts that no relay passes on, those with the most of them first. `at_relay` is the
            number of accounts that a relay has by its own word.
        rejections: The dead letters by reason; relay, DID and detail are those of the newest one.
        consumers: `seq` is the last change that the consumer was given, `behind` the number of those that it was not,
            `lag_seconds` the age of the oldest of them. One that is `cut_off` has to be registered again.
        set_aside_events: Number of events that clients of the feed refused for so long that they were set aside.
        process: The state of this process: each stage gives its part. None in `indexer status`.
    """

    database: str | None = None
    version: str = __version__
    read_seconds_ago: float | None = None
    reasons: list[ReadinessReason] = field(default_factory=list)
    cursors: list[Row] = field(default_factory=list)
    events_per_second: float | None = None
    repos: Row | None = None
    links: Row | None = None
    gaps_open: int = 0
    gaps: list[Row] = field(default_factory=list)
    daemons: list[Row] = field(default_factory=list)
    hosts: list[Row] = field(default_factory=list)
    withheld: list[Row] = field(default_factory=list)
    rejections: list[Row] = field(default_factory=list)
    consumers: list[Row] = field(default_factory=list)
    set_aside_events: int = 0
    process: Row | None = None

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
