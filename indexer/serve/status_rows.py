"""Consumers of the change log, open gaps and links, as `indexer status` and the status page show them."""

from dataclasses import dataclass

from indexer.db import ConsumerState, LinkProgress, LinkProgressState
from indexer.sync.stream import OpenGap


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
