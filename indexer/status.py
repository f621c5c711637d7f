"""What the database alone tells of the indexer's state: `indexer status`, as a picture and as JSON."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from indexer.log import printable
from indexer.store import Counts
from indexer.sync.plan import Cursor
from indexer.sync.repo import SyncStatus
from indexer.sync.shard import Shard

READY_LAG_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Place:
    """A cursor; `lag_seconds` is the age of the event at it, or how long ago nothing more had come; None if neither is
    known: a relay may write no time that can be read.
    """

    relay: str
    shard: str
    seq: int
    event_time: str | None
    lag_seconds: float | None


@dataclass(frozen=True, slots=True)
class Follower:
    """A registered reader of the change feed: how many changes, and how long, it is behind."""

    name: str
    seq: int
    behind: int
    lag_seconds: float
    silent_seconds: float
    cut_off: bool


@dataclass(frozen=True, slots=True)
class PausedHost:
    """A host that gets no requests for so many seconds, and why."""

    host: str
    reason: str
    seconds_left: float
    failures_in_a_row: int
    last_error: str | None


@dataclass(frozen=True, slots=True)
class Sample:
    """The counts at one moment, in Unix seconds."""

    at: float
    counts: Counts


@dataclass(frozen=True, slots=True)
class Status:
    """One shard's state. Rates are those between two samples; events are counted by their sequence numbers.

    `database` is what to connect with, but for a password. `progress` is the share of repos that are synchronized among
    those that are or wait to be. `resyncs_per_second` counts the repos that left the queue: done, or given up on;
    those that broke and came into it meanwhile take nothing from it. `seconds_left` is what all that now wait take at
    that rate; None if there is nothing to do, or nothing happens. `records` is an estimate.
    """

    database: str
    not_ready: str | None
    cursors: list[Place]
    repos: dict[str, int]
    reasons: dict[str, int]
    failures: dict[str, int]
    records: int
    resync_queue: int
    parked: int
    events_per_second: float
    resyncs_per_second: float
    progress: float | None
    seconds_left: float | None
    readers: list[Follower]
    paused_hosts: list[PausedHost]

    def to_json(self) -> dict[str, Any]:
        return {"ready": self.not_ready is None, **asdict(self)}


def status_of(database: str, shard: Shard, earlier: Sample, now: Sample) -> Status:
    """The status of this shard, whoever works on it, from two samples, the second one's `ended` since the first."""
    counts, seconds = now.counts, max(now.at - earlier.at, 0.001)
    places = [
        Place(cursor.relay, cursor.shard, cursor.seq, cursor.event_time, _lag(cursor, now.at))
        for cursor in counts.cursors
    ]
    synchronized = counts.statuses[SyncStatus.SYNCHRONIZED]
    waiting = counts.queued + counts.statuses[SyncStatus.IN_PROGRESS]
    pace = counts.ended / seconds
    return Status(
        database=database,
        not_ready=_not_ready(shard, places),
        cursors=places,
        repos={status.value: count for status, count in counts.statuses.items()},
        reasons=counts.reasons,
        failures=counts.failures,
        records=counts.records,
        resync_queue=counts.queued,
        parked=counts.parked,
        events_per_second=_events(earlier.counts, counts) / seconds,
        resyncs_per_second=pace,
        progress=synchronized / (synchronized + waiting) if synchronized + waiting else None,
        seconds_left=waiting / pace if waiting and pace else None,
        readers=[
            Follower(r.name, r.seq, r.behind, r.lag(now.at), max(0.0, now.at - r.seen_at), r.cut_off)
            for r in counts.readers
        ],
        paused_hosts=[
            PausedHost(h.host, h.pause_reason or "", max(0.0, (h.paused_until or 0.0) - now.at), h.streak, h.last_error)
            for h in counts.hosts
        ],
    )


def _lag(cursor: Cursor, now: float) -> float | None:
    lags = [_age(cursor.event_time, now), None if cursor.caught_up_at is None else now - cursor.caught_up_at]
    return min((lag for lag in lags if lag is not None), default=None)


def _age(event_time: str | None, now: float) -> float | None:
    try:
        return None if event_time is None else now - datetime.fromisoformat(event_time).timestamp()
    except (ValueError, OverflowError):
        return None


def _not_ready(shard: Shard, places: Sequence[Place]) -> str | None:
    """Of the cursors that a bucket has, of several relays and of shards that were, that in use is furthest in time."""
    cursors = [[place for place in places if bucket in Shard.parse(place.shard).buckets] for bucket in shard.buckets]
    if not all(cursors):
        return "no event has been saved yet" + (" of some of the shards" if any(cursors) else "")
    known = [[place.lag_seconds for place in of if place.lag_seconds is not None] for of in cursors]
    if not all(known):
        return "the relay's events have no time that can be read"
    if (lag := max(min(lags) for lags in known)) > READY_LAG_SECONDS:
        return f"the newest saved event is {duration(lag)} old"
    return None


def _events(earlier: Counts, now: Counts) -> int:
    """All shards go through the same stream of a relay."""
    before = {(cursor.relay, cursor.shard): cursor.seq for cursor in earlier.cursors}
    passed: dict[str, int] = {}
    for cursor in now.cursors:
        since = cursor.seq - before.get((cursor.relay, cursor.shard), cursor.seq)
        passed[cursor.relay] = max(passed.get(cursor.relay, 0), since)
    return sum(passed.values())


def duration(seconds: float) -> str:
    """In the two largest units: `2 d 3 h`, `4 min 5 s`, `6 s`."""
    rest = max(round(seconds), 0)
    words: list[str] = []
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        if rest >= size or (unit == "s" and not words):
            words.append(f"{rest // size} {unit}")
            rest %= size
    return " ".join(words[:2])


def status_picture(status: Status) -> Group:
    verdict = (
        Text("ready", "bold green") if status.not_ready is None else Text(f"not ready: {status.not_ready}", "bold red")
    )
    cursors = Table("relay", "shard", "saved up to", "lag", title="stream", title_justify="left")
    for place in status.cursors:
        lag = "-" if place.lag_seconds is None else duration(place.lag_seconds)
        cursors.add_row(_text(place.relay), _text(place.shard), f"{place.seq:,}", lag)
    repos = Table("repos", "", title="copies", title_justify="left", show_header=False)
    repos.columns[1].justify = "right"
    for name, count in [
        *status.repos.items(),
        *((f"because {reason}", count) for reason, count in status.reasons.items()),
        *((f"last try: {failure}", count) for failure, count in status.failures.items()),
    ]:
        repos.add_row(_text(name), f"{count:,}")
    parts: list[RenderableType] = [verdict, cursors, repos]
    if status.readers:
        readers = Table("reader", "at", "behind", "lag", "last seen", title="change feed", title_justify="left")
        for reader in status.readers:
            behind = Text("cut off", "bold red") if reader.cut_off else Text(duration(reader.lag_seconds))
            seen = f"{duration(reader.silent_seconds)} ago"
            readers.add_row(_text(reader.name), f"{reader.seq:,}", f"{reader.behind:,}", behind, seen)
        parts.append(readers)
    if status.paused_hosts:
        hosts = Table("host", "paused for", "because", "failures", "the last one", title="hosts", title_justify="left")
        for host in status.paused_hosts:
            words = (host.host, duration(host.seconds_left), host.reason, str(host.failures_in_a_row))
            hosts.add_row(*map(_text, words), _text(host.last_error or "-"))
        parts.append(hosts)
    return Group(*parts, facts_table(_facts(status)))


def _facts(status: Status) -> Mapping[str, Any]:
    return {
        "database": status.database,
        "records": f"about {status.records:,}",
        "resync queue": f"{status.resync_queue:,}",
        "parked": f"{status.parked:,}",
        "events a second": f"{status.events_per_second:,.1f}",
        "resyncs a second": f"{status.resyncs_per_second:,.1f}",
        "progress": None if status.progress is None else f"{status.progress:.1%}",
        "time left": None if status.seconds_left is None else duration(status.seconds_left),
    }


def facts_table(facts: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> Table:
    """Names and values, one a line; None is `-`, times are shown to the second."""
    table = Table.grid("name", "value", padding=(0, 2))
    for name, value in dict(facts).items():
        table.add_row(_text(name), _text(_shown(value)))
    return table


def _shown(value: Any) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case datetime():
            return value.isoformat(" ", "seconds")
        case int():
            return f"{value:,}"
        case _:
            return str(value)


def _text(words: str) -> Text:
    """Literally: what others wrote is neither markup nor able to steer a terminal."""
    return Text(printable(words), overflow="fold")
