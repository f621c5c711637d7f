"""The consumer of the change log that feeds clients of tap: what it reads, delivers, and has delivered.

One process at a time serves the feed. It owns the feed by its session, like a shard (`shard_lock`), and stores what was
delivered in this session. So a process that lost the session cannot store anything any more.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

import orjson
from asyncpg import Record

from indexer.crash_points import COMMITTED, crash_point
from indexer.db.change_log_reads import LATEST_SEQ, TRIMMED_SEQ, LoggedChange, load_changes
from indexer.db.columns import Connection, columns_of, select_list, stored_values, typed, unnest
from indexer.db.connections import SERVER_SETTINGS, Area
from indexer.db.layout import estimate_rows
from indexer.db.shard_lock import FEED, ShardLock, open_lock
from indexer.sync.shard import bucket_of

FEED_CONSUMER = "tap-feed"
"""The name of the consumer in `atproto.readers`."""
MAX_COUNTED_ROWS = 1_000_000
"""Number of rows of a table from which it is estimated."""

CountedTable = Literal["repo", "record", "buffered_event"]

_IS_CUT_OFF = """
    select d.id is not null from indexer.consumer c left join indexer.disconnected_consumer d on d.id = c.id
    where c.name = $1
"""
_REGISTER = "select atproto.register_reader($1, $2)"

_LOAD_PROGRESS = """
    select c.id, c.seq, f.delivered_to, f.undelivered, f.snapshot_did, f.snapshot_collection, f.snapshot_rkey,
        f.behind::text as behind, d.id is not null as cut_off
    from indexer.consumer c
    left join indexer.feed_delivery f on f.consumer_id = c.id
    left join indexer.disconnected_consumer d on d.id = c.id
    where c.name = $1
"""

_FORGET_REMOVED = tuple(
    f"delete from indexer.{table} f where not exists (select from indexer.consumer c where c.id = f.consumer_id)"
    for table in ("feed_delivery", "feed_set_aside")
)

_SAVE_POSITION = "update indexer.consumer set seq = $2, seen_at = clock_timestamp() where name = $1 returning id"

_DELIVERED = ("delivered_to", "undelivered", "snapshot_did", "snapshot_collection", "snapshot_rkey", "behind")
_SAVE_DELIVERED = f"""
    insert into indexer.feed_delivery (consumer_id, {", ".join(_DELIVERED)})
    values ($1, $2, $3, $4, $5, $6, $7::text::jsonb)
    on conflict (consumer_id) do update set {", ".join(f"{name} = excluded.{name}" for name in _DELIVERED)}
"""

# Each repo, then its records. Both branches are read in the order of their primary keys.
_SNAPSHOT_PAGE = """
    select did, collection, rkey from (
        (
            select did, '' as collection, '' as rkey from indexer.repo where did > $1 and tracked
            order by did limit $4
        )
        union all
        (
            select did, collection, rkey from indexer.record where (did, collection, rkey) > ($1, $2, $3)
            order by did, collection, rkey limit $4
        )
    ) page
    order by did, collection, rkey limit $4
"""

_RECORDS_FROM_REV = """
    select collection, rkey from indexer.record
    where did = $1 and bucket = $2 and rev >= $3 and (collection, rkey) > ($4, $5) order by collection, rkey limit $6
"""

_SET_ASIDE = typed(
    "reason text, did text, collection text, rkey text, rev text, action text, attempts integer, since float8, "
    "failure text"
)
_SET_ASIDE_KEY = {name: _SET_ASIDE[name] for name in ("reason", "did", "collection", "rkey")}
_ADD_SET_ASIDE = f"""
    insert into indexer.feed_set_aside as s (consumer_id, {", ".join(_SET_ASIDE)})
    select $1, {", ".join(stored_values(_SET_ASIDE, "w").values())} from {unnest(_SET_ASIDE, "w", 2)}
    on conflict (consumer_id, reason, did, collection, rkey) do update
    set rev = least(s.rev, excluded.rev), action = excluded.action, attempts = s.attempts + excluded.attempts,
        failure = excluded.failure, due = false
"""
_SET_VISIBLE = """
    update indexer.feed_set_aside set due = true
    where consumer_id = $1 and reason = 'hidden' and did = any($2::text[]) and not due
"""
_DELETE_DELIVERED = f"""
    delete from indexer.feed_set_aside s using {unnest(_SET_ASIDE_KEY, "w", 2)}
    where s.consumer_id = $1 and s.reason = w.reason and s.did = w.did and s.collection = w.collection
        and s.rkey = w.rkey
"""
_STORED = "from indexer.consumer c join indexer.feed_set_aside s on s.consumer_id = c.id where c.name = $1"
_READ_SET_ASIDE = f"select {select_list(_SET_ASIDE, 's')} {_STORED}"
_DUE = f"{_READ_SET_ASIDE} and s.due order by s.reason, s.did, s.collection, s.rkey limit $2"
_REFUSED = f"""
    {_READ_SET_ASIDE} and s.reason = 'refused' and ($2::text is null or s.did = $2) order by s.since desc limit $3
"""
_COUNT_REFUSED = f"select count(*) {_STORED} and s.reason = 'refused'"
_SEND_AGAIN = """
    update indexer.feed_set_aside s set due = true from indexer.consumer c
    where c.name = $1 and s.consumer_id = c.id and s.reason = 'refused' and ($2::text is null or s.did = $2)
    returning true
"""

_BEHIND = """
    select r.behind, f.snapshot_did is not null as snapshot
    from atproto.readers r
    join indexer.consumer c on c.name = r.name
    left join indexer.feed_delivery f on f.consumer_id = c.id
    where r.name = $1
"""


class SnapshotPosition(NamedTuple):
    """A position among the stored repos (with an empty collection and rkey) and records, in the order of their keys."""

    did: str
    collection: str
    rkey: str


SNAPSHOT_BEGIN = SnapshotPosition("", "", "")


class DeliveryProgress(NamedTuple):
    """The changes that were acknowledged, as they are stored.

    Attributes:
        position: All changes up to this number are acknowledged.
        delivered_to: The number of the newest acknowledged change; `position` if there is none after it.
        undelivered: The numbers of unacknowledged changes up to `delivered_to`, besides those of `behind`.
        snapshot: The snapshot is acknowledged up to here; None if there is none, or if all of it is acknowledged.
        behind: Repos of which no change from this number on is acknowledged.
    """

    position: int
    delivered_to: int
    undelivered: tuple[int, ...] = ()
    snapshot: SnapshotPosition | None = None
    behind: tuple[tuple[str, int], ...] = ()


SetAsideReason = Literal["hidden", "refused"]
SetAsideKey = tuple[SetAsideReason, str, str, str]
"""Reason, DID, collection and record key."""


class SetAside(NamedTuple):
    """Events that a consumer has not received, although its position has passed them: a row of `feed_set_aside`.

    `schema/06_consumers.sql` describes the columns. `since` is in Unix seconds: when the event was set aside, or first
    not acknowledged.
    """

    reason: SetAsideReason
    did: str
    collection: str
    rkey: str
    rev: str
    action: str
    attempts: int
    since: float
    failure: str

    @property
    def key(self) -> SetAsideKey:
        """The primary key."""
        return self.reason, self.did, self.collection, self.rkey


class SetAsideChanges(NamedTuple):
    """Changes of the rows that are set aside, to be stored with the progress that depends on them.

    Attributes:
        added: New rows.
        visible: DIDs of repos that are visible again, so that their records are due.
        delivered: The keys of rows whose events are delivered now.
    """

    added: Sequence[SetAside] = ()
    visible: Sequence[str] = ()
    delivered: Sequence[SetAsideKey] = ()


@dataclass
class FeedSession:
    """The session of the process that serves the feed. The block of `Feed.session` raises `DatabaseError`."""

    _connection: Connection
    lock: ShardLock

    async def begin(self) -> DeliveryProgress | None:
        """Register the consumer if it is not registered; return what was delivered.

        A new consumer gets the whole log, if nothing of it was trimmed yet: then, each stored record is in it.
        Otherwise, it gets a snapshot of the stored records, and the changes from now on.

        Returns:
            None if the consumer was disconnected, because it was too far behind.
        """
        async with self._connection.transaction():
            for statement in _FORGET_REMOVED:
                await self._connection.execute(statement)
            row = await self._connection.fetchrow(_LOAD_PROGRESS, FEED_CONSUMER) or await self._register()
            crash_point("feed.begun")
        crash_point(COMMITTED)
        return None if row["cut_off"] else _progress_of(row)

    async def _register(self) -> Record:
        is_trimmed = await self._connection.fetchval(TRIMMED_SEQ) > 0
        await self._connection.fetchval(_REGISTER, FEED_CONSUMER, None if is_trimmed else 0)
        [row] = await self._connection.fetch(_LOAD_PROGRESS, FEED_CONSUMER)
        if is_trimmed:
            await self._save(row["id"], DeliveryProgress(row["seq"], row["seq"], snapshot=SNAPSHOT_BEGIN))
            [row] = await self._connection.fetch(_LOAD_PROGRESS, FEED_CONSUMER)
        return row

    async def changes_after(self, seq: int, limit: int) -> list[LoggedChange]:
        """Return the next changes of the log; raise `LogTrimmedError` if some of them have been trimmed."""
        return await load_changes(self._connection, seq, limit)

    async def snapshot_after(self, position: SnapshotPosition, limit: int) -> list[SnapshotPosition]:
        """Return the next repos and records that are stored."""
        rows = await self._connection.fetch(_SNAPSHOT_PAGE, *position, limit)
        return [SnapshotPosition(*row) for row in rows]

    async def records_from_rev(self, did: str, rev: str, after: tuple[str, str], limit: int) -> list[tuple[str, str]]:
        """Return collection and record key of the next stored records of a repo that have this rev or a later one."""
        rows = await self._connection.fetch(_RECORDS_FROM_REV, did, bucket_of(did), rev, *after, limit)
        return [(collection, rkey) for collection, rkey in rows]

    async def due(self, limit: int) -> list[SetAside]:
        """Return what is set aside and is to be sent now."""
        return [SetAside(*row) for row in await self._connection.fetch(_DUE, FEED_CONSUMER, limit)]

    async def count_refused(self) -> int:
        """Return the number of refused events that are set aside."""
        return await count_refused(self._connection)

    async def save(
        self,
        progress: DeliveryProgress,
        set_aside: SetAsideChanges = SetAsideChanges(),  # noqa: B008 - it is immutable
    ) -> bool:
        """Store what was delivered, so that it is not delivered again; return False if the consumer was removed."""
        async with self._connection.transaction():
            id_ = await self._connection.fetchval(_SAVE_POSITION, FEED_CONSUMER, progress.position)
            if id_ is not None:
                await self._save(id_, progress)
                await self._save_set_aside(id_, set_aside)
            crash_point("feed.saved")
        crash_point(COMMITTED)
        return id_ is not None

    async def _save(self, id_: int, progress: DeliveryProgress) -> None:
        behind = orjson.dumps(dict(progress.behind)).decode() if progress.behind else None
        values = progress.delivered_to, list(progress.undelivered), *(progress.snapshot or (None, None, None)), behind
        await self._connection.execute(_SAVE_DELIVERED, id_, *values)

    async def _save_set_aside(self, id_: int, changes: SetAsideChanges) -> None:
        """Store the changes in this order: what was delivered may be set aside again, and be visible again."""
        if changes.delivered:
            await self._connection.execute(_DELETE_DELIVERED, id_, *columns_of(changes.delivered, _SET_ASIDE_KEY))
        if changes.added:
            await self._connection.execute(_ADD_SET_ASIDE, id_, *columns_of(changes.added, _SET_ASIDE))
        if changes.visible:
            await self._connection.execute(_SET_VISIBLE, id_, list(changes.visible))


def _progress_of(row: Record) -> DeliveryProgress:
    if row["delivered_to"] is None:
        return DeliveryProgress(row["seq"], row["seq"])
    snapshot = row["snapshot_did"], row["snapshot_collection"], row["snapshot_rkey"]
    behind = orjson.loads(row["behind"] or "{}")
    stored = behind if "repos" in behind else {**row, "repos": behind}  # the previous release stores all in `behind`
    return DeliveryProgress(
        row["seq"],
        stored["delivered_to"],
        tuple(stored["undelivered"]),
        None if row["snapshot_did"] is None else SnapshotPosition(*snapshot),
        tuple(stored["repos"].items()),
    )


async def count_refused(connection: Connection) -> int:
    """Return the number of refused events that are set aside."""
    return int(await connection.fetchval(_COUNT_REFUSED, FEED_CONSUMER))


class Feed(Area):
    """The reads and writes of the feed for clients of tap."""

    @asynccontextmanager
    async def session(self) -> AsyncIterator[FeedSession]:
        """Open the session of the feed, on a connection of its own. It does not own the feed yet."""
        async with (
            self._pool.own_connection(SERVER_SETTINGS | {"application_name": "indexer feed"}) as connection,
            open_lock(connection, FEED, self._pool.layout) as lock,
        ):
            yield FeedSession(connection, lock)

    async def is_cut_off(self) -> bool | None:
        """Return True if the consumer was disconnected; None if it is not registered."""
        cut_off: bool | None = await self._fetchval(_IS_CUT_OFF, FEED_CONSUMER)
        return cut_off

    async def set_aside(self, did: str | None, limit: int) -> list[SetAside]:
        """Return refused events that are set aside, the newest first, only those of the DID if it is given."""
        return [SetAside(*row) for row in await self._fetch(_REFUSED, FEED_CONSUMER, did, limit)]

    async def send_again(self, did: str | None) -> int:
        """Let the feed send refused events again, only those of the DID if it is given; return their number."""
        async with self._pool.transaction() as connection:
            return len(await connection.fetch(_SEND_AGAIN, FEED_CONSUMER, did))

    async def count_rows(self, table: CountedTable) -> int:
        """Return the number of rows of the table. Above `MAX_COUNTED_ROWS`, it is an estimate."""
        async with self._pool.connection() as connection:
            return await _count_rows(connection, table)

    async def changes_behind(self) -> int:
        """Return how many changes the log has from the first one on that the feed has not delivered.

        As long as there is a snapshot to deliver, all stored repos and records count as well.
        """
        async with self._pool.connection() as connection:
            row = await connection.fetchrow(_BEHIND, FEED_CONSUMER)
            if row is None and await connection.fetchval(TRIMMED_SEQ) == 0:
                return int(await connection.fetchval(LATEST_SEQ))
            snapshot = row is None or row["snapshot"]
            stored = await _count_rows(connection, "repo") + await _count_rows(connection, "record") if snapshot else 0
            return stored + (row["behind"] if row is not None else 0)


async def _count_rows(connection: Connection, table: CountedTable) -> int:
    estimate = await estimate_rows(connection, f"indexer.{table}")
    if estimate > MAX_COUNTED_ROWS:
        return estimate
    tracked = "where tracked" if table == "repo" else ""
    return int(await connection.fetchval(f"select count(*) from indexer.{table} {tracked}"))
