"""The tables of gaps and of cursors, and the open gaps of this process's shard.

The firehose consumer opens gaps. A reconciliation closes them, or the stream of another relay that covers them.
"""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NoReturn

import structlog

from indexer.concurrency.event_wait import wait_for_event
from indexer.concurrency.stage_progress import StageProgress
from indexer.crash_points import crash_point
from indexer.db.columns import Connection, storable
from indexer.db.connections import Area
from indexer.db.periodic import run_periodically
from indexer.reasons import GapReason
from indexer.sync.repo import SyncStatus
from indexer.sync.shard import BUCKETS, Shard
from indexer.sync.stream import Cursor, Gap, OpenGap, Position
from indexer.telemetry.metrics import Metrics

log = structlog.get_logger(__name__)

_REASONS = {str(reason): reason for reason in GapReason}

MAX_CLOSED_GAPS = 1_000
"""Closed gaps that are retained; older ones are deleted."""

_CURSORS = """
    select relay, shard, epoch, seq, event_time, date_part('epoch', caught_up_at) as caught_up_at,
        date_part('epoch', updated_at) as updated_at
    from indexer.cursor
"""

_OPEN = """
    insert into indexer.gap (relay, shard, reason, first_seq, last_seq) values ($1, $2, $3, $4, $5)
    returning id, date_part('epoch', opened_at) as opened_at
"""

_PRUNE = """
    delete from indexer.gap where closed_at is not null and id <= (
        select id from indexer.gap where closed_at is not null order by id desc offset $1 limit 1
    )
"""

_LOAD_OPEN = """
    select id, relay, shard, reason, first_seq, last_seq, date_part('epoch', opened_at) as opened_at, reconciled
    from indexer.gap where closed_at is null order by id
"""

# Concurrent statements on one gap wait for each other, and each one sees what the others have compared.
_CLOSE = """
    with compared as (select int4range($1, $2) as range)
    update indexer.gap set
        reconciled = reconciled + range::int4multirange,
        closed_at = case when positions <@ reconciled + range::int4multirange then now() end,
        closed_by = case when positions <@ reconciled + range::int4multirange then $5 end
    from compared
    where closed_at is null and id between $3 and $4 and positions && range
"""

# The epoch of a relay belongs to all its shards. Numbers of the old epoch, also those of #account messages, are not
# compared with those of the new one.
_RESET_CURSOR = """
    insert into indexer.cursor (relay, shard, epoch, seq, event_time)
    select $1, shard, (select coalesce(max(epoch), 0) + 1 from indexer.cursor where relay = $1), $3, $4
    from unnest($2::text[]) shard
    on conflict (relay, shard) do update
    set epoch = excluded.epoch, seq = excluded.seq, event_time = excluded.event_time, caught_up_at = null,
        updated_at = now()
"""

# The stream moves the position. No hint from before this time is needed.
_SAVE_CAUGHT_UP = """
    insert into indexer.cursor (relay, shard, seq, caught_up_at)
    values ($1, $2, ($3::float8 * 1000000)::bigint, to_timestamp($3))
    on conflict (relay, shard) do update set caught_up_at = excluded.caught_up_at
"""

# With a column, because Citus cannot pass on the rows of a sub-query that has none.
_SYNCHRONIZED_REPO_EXISTS = f"""
    select exists (
        select 1 from indexer.repo where sync_status = '{SyncStatus.SYNCHRONIZED}' and bucket = any($1::smallint[])
    )
"""


async def load_cursors(connection: Connection) -> list[Cursor]:
    """Return the cursors of all relays and shards."""
    return [Cursor(**row) for row in await connection.fetch(_CURSORS)]


async def open_gap(connection: Connection, gap: Gap) -> OpenGap:
    """Store a gap, and delete the oldest closed ones."""
    [row] = await connection.fetch(_OPEN, gap.relay, gap.shard, gap.reason, gap.first_seq, gap.last_seq)
    await connection.execute(_PRUNE, MAX_CLOSED_GAPS)
    return OpenGap(row["id"], gap, row["opened_at"])


class Gaps(Area):
    """The gaps in the stream and the stored cursors."""

    async def cursors(self) -> list[Cursor]:
        """Return the stored cursors of all relays and shards."""
        async with self._pool.connection() as connection:
            return await load_cursors(connection)

    async def caught_up_at(self, relays: Collection[str]) -> float:
        """Return the time up to which each shard has stored all messages of a relay, in Unix seconds; 0: unknown."""
        reached = [0.0] * BUCKETS
        for cursor in await self.cursors():
            for position in Shard.parse(cursor.shard).positions if cursor.relay in relays else ():
                reached[position] = max(reached[position], cursor.caught_up_at or 0.0)
        return min(reached)

    async def save_caught_up(self, relay: str, shard: Shard, at: float, last_gap: int) -> None:
        """Store that everything until `at` (Unix seconds) is stored, and close the gaps of the shard up to this ID.

        A stored position in a Jetstream does not change.
        """
        async with self._pool.transaction() as connection:
            await connection.execute(_SAVE_CAUGHT_UP, relay, str(shard), at)
            await close_gaps(connection, shard.positions, last_gap, relay)
            crash_point("repo-checks.done")

    async def reset_cursor(self, relay: str, shards: Sequence[Shard], position: Position) -> None:
        """Store the position in a new epoch as the cursor of each shard, and open a gap for each shard."""
        async with self._pool.transaction() as connection:
            await connection.execute(
                _RESET_CURSOR, relay, [str(shard) for shard in shards], position.seq or 0, storable(position.event_time)
            )
            for shard in shards:
                await open_gap(connection, Gap(relay, str(shard), GapReason.CURSOR_RESET))

    async def has_synchronized_repo(self, buckets: Sequence[int]) -> bool:
        """Return True if at least one repo of the buckets is synchronized."""
        return bool(await self._fetchval(_SYNCHRONIZED_REPO_EXISTS, list(buckets)))

    async def open(self, gap: Gap) -> OpenGap:
        """Store a gap in the stream."""
        async with self._pool.transaction() as connection:
            opened = await open_gap(connection, gap)
            crash_point("gap.opened")
        return opened

    async def set_last_seq(self, gap_id: int, last_seq: int) -> None:
        """Store where a gap ends."""
        await self._execute("update indexer.gap set last_seq = $2 where id = $1", gap_id, last_seq)

    async def close_covered(self, gap_id: int, positions: range, relay: str) -> None:
        """Close a gap as far as it is about these positions, because the stream of this relay covers it."""
        async with self._pool.transaction() as connection:
            await close_gaps(connection, positions, gap_id, relay, first_gap=gap_id)
            crash_point("gap.covered")

    async def load_open(self) -> list[OpenGap]:
        """Return the open gaps of all shards, oldest first."""
        return [
            OpenGap(
                id_,
                Gap(relay, shard, _REASONS[reason], first_seq, last_seq),
                opened_at,
                frozenset(position for part in reconciled for position in range(part.lower, part.upper)),
            )
            for id_, relay, shard, reason, first_seq, last_seq, opened_at, reconciled in await self._fetch(_LOAD_OPEN)
        ]


async def close_gaps(
    connection: Connection, positions: range, last_gap: int, closed_by: str, *, first_gap: int = 0
) -> None:
    """Close the open gaps with these IDs, from `first_gap` to `last_gap`, as far as they are about these positions.

    A gap that concerns other shards, too, is closed by the last of them.
    """
    await connection.execute(_CLOSE, positions.start, positions.stop, first_gap, last_gap, closed_by)


@dataclass(eq=False)
class OpenGaps:
    """Opens and closes gaps, and has a copy of the open ones for readiness, metrics and the reconciliation.

    Every method that uses the database but `run` raises `DatabaseError` for a transient error, and retries nothing.

    Attributes:
        interval: Seconds after which the open gaps are loaded again.
        stage: Its progress. Loading the gaps, and checking the silence of the relay, is work.
        gaps: The open gaps that affect repos of the shard, also those of former shards, oldest first; None before they
            were loaded for the first time.
    """

    stored: Gaps
    shard: Shard
    metrics: Metrics
    interval: float = 5.0

    def __post_init__(self) -> None:
        self._opened = asyncio.Event()
        self._loading = asyncio.Lock()  # otherwise, an earlier load could replace the result of a later change
        self.stage = StageProgress("open gaps")
        self.gaps: Sequence[OpenGap] | None = None

    @property
    def newest(self) -> int:
        """The ID of the newest open gap; 0 if there is none."""
        return max((gap.id for gap in self.gaps or ()), default=0)

    async def open(self, gap: Gap) -> OpenGap:
        """Store a gap, and wake the reconciliation."""
        async with self._loading:
            opened = await self.stored.open(gap)
            self._set([*(self.gaps or ()), opened])
        fields = {"relay": gap.relay, "reason": gap.reason, "first_seq": gap.first_seq, "last_seq": gap.last_seq}
        log.error("gap.opened", id=opened.id, **fields)
        return opened

    async def close_covered(self, gap: OpenGap, relay: str) -> None:
        """Close a gap for this shard, because the stream of this relay covers it."""
        await self.stored.close_covered(gap.id, self.shard.positions, relay)
        await self.refresh()

    async def refresh(self) -> None:
        """Load the open gaps, and log those that were closed since the last time.

        A gap that affects other shards, too, is not closed before they have compared their repos.
        """
        async with self._loading:
            loaded = await self.stored.load_open()
            still_open = {gap.id for gap in loaded}
            for gap in self.gaps or ():
                if gap.id not in still_open:
                    log.info("gap.closed", relay=gap.gap.relay, reason=gap.gap.reason, id=gap.id)
            self._set([gap for gap in loaded if gap.affects(self.shard)])

    async def run(self) -> NoReturn:
        """Refresh periodically: another process may have closed gaps."""
        await run_periodically(self.refresh, self.interval, self.stage)

    async def wait_until_opened(self, seconds: float) -> None:
        """Wait until a gap is open, at most for `seconds`."""
        await wait_for_event(self._opened, seconds)

    def _set(self, gaps: Sequence[OpenGap]) -> None:
        self.gaps = gaps
        self.metrics.gaps_open.set(len(gaps))
        if gaps:
            self._opened.set()
        else:
            self._opened.clear()
