"""Queries of the status. Each one is cheap however many repos and records the database has."""

from dataclasses import dataclass, field

from indexer.db import process_reports
from indexer.db.change_log_segments import ConsumerState, load_consumers
from indexer.db.columns import Connection
from indexer.db.gaps import load_open as load_open_gaps
from indexer.db.hosts import load_paused
from indexer.db.links import LinkProgress, load_progress
from indexer.db.process_reports import ProcessReport
from indexer.db.shard_lock import ShardSession
from indexer.db.tap_feed import count_refused
from indexer.sync.identity import HostState
from indexer.sync.stream import Cursor, OpenGap

TIMEOUT_SECONDS = 5
"""Seconds after which the server cancels a query of the status."""


@dataclass(frozen=True, slots=True)
class RejectionSummary:
    """The stored dead letters with one reason.

    Attributes:
        stored: How many are stored. `indexer.db.dead_letters` removes the oldest ones.
        last_hour: How many of them were rejected within the last hour.
        newest_at: Unix seconds when the newest one was rejected.
        did: The account of the newest one; None if the message names none.
        detail: The detail of the newest one.
    """

    reason: str
    stored: int
    last_hour: int
    newest_at: float
    relay: str
    seq: int | None
    did: str | None
    detail: str


@dataclass(frozen=True, slots=True)
class DatabaseState:
    """Everything of the status besides the numbers of repos.

    Attributes:
        cursors: One per relay and shard.
        consumers: The registered consumers of the change log, by name.
        set_aside_events: Number of events that clients of the feed refused for so long that the feed has passed them.
        hosts: Some paused hosts, those with the most consecutive failures.
        gaps: The open gaps of all shards, oldest first.
        sessions: The sessions of processes that own a shard or wait for one.
        reports: What the processes of the daemon report about themselves.
        links: The progress of links.
        rejections: The dead letters by reason, the reason with the newest one first.
    """

    cursors: list[Cursor] = field(default_factory=list)
    consumers: list[ConsumerState] = field(default_factory=list)
    set_aside_events: int = 0
    hosts: list[HostState] = field(default_factory=list)
    gaps: list[OpenGap] = field(default_factory=list)
    sessions: list[ShardSession] = field(default_factory=list)
    reports: list[ProcessReport] = field(default_factory=list)
    links: LinkProgress = field(default_factory=LinkProgress)
    rejections: list[RejectionSummary] = field(default_factory=list)


_CURSORS = """
    select relay, shard, seq, event_time, date_part('epoch', caught_up_at) as caught_up_at
    from atproto.cursors order by relay, shard
"""
# The table has a bounded number of rows per relay and reason, and frames are not read.
REJECTIONS = """
    select d.reason, n.stored, n.last_hour, date_part('epoch', d.time) as newest_at, d.relay, d.seq, d.did, d.detail
    from (
        select reason, count(*) as stored, count(*) filter (where time > now() - interval '1 hour') as last_hour,
            max(id) as newest
        from indexer.dead_letter group by reason
    ) n join indexer.dead_letter d on d.id = n.newest
    order by d.time desc, d.reason
"""


async def load_state(connection: Connection, sessions: list[ShardSession]) -> DatabaseState:
    """Return the state of the database, with these sessions. Run it in a transaction."""
    await connection.execute(f"set local statement_timeout = '{TIMEOUT_SECONDS}s'")
    return DatabaseState(
        cursors=[Cursor(**row) for row in await connection.fetch(_CURSORS)],
        consumers=await load_consumers(connection),
        set_aside_events=await count_refused(connection),
        hosts=await load_paused(connection),
        gaps=await load_open_gaps(connection),
        sessions=sessions,
        reports=await process_reports.load(connection),
        links=await load_progress(connection),
        rejections=[RejectionSummary(**row) for row in await connection.fetch(REJECTIONS)],
    )
