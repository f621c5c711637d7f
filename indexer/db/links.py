"""Keep the links of stored records, and their counts by target, from the change log.

One process keeps the links of all shards. It owns them by its connection, like the feed (`shard_lock`), and writes them
only over this connection. Each transaction reads what follows its position in the change log, replaces the links of the
changed records by those of their stored values, and stores the new position. So a transaction that is repeated, and a
value that is newer than the change, do no harm: the change that wrote it follows.

The backfill adds the links of stored records in the order of their keys, in the same way. What changes meanwhile is in
the log after the position with which the backfill began. See docs/decisions/0012-links.md.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from asyncpg import Record as Row

from indexer.atproto.links import links_of
from indexer.crash_points import COMMITTED, crash_point
from indexer.db.change_log_reads import LATEST_SEQ, ChangeSignal, LogTrimmedError, listen_on, load_changes, load_records
from indexer.db.columns import RECORD_KEY, Columns, Connection, buckets_of, columns_of, of_buckets, unnest
from indexer.db.connections import SERVER_SETTINGS, Area
from indexer.db.layout import estimate_rows
from indexer.db.shard_lock import LINKS, ShardLock, open_lock
from indexer.sync.changes import RecordKey
from indexer.sync.shard import bucket_of, bucket_of_target

LINK_CONSUMER = "links"
"""The name of the consumer in `atproto.readers`."""
MAX_CHANGES = 1_000
"""Changes, or records of the backfill, of one transaction."""
MAX_BYTES = 1 << 20
"""Bytes of the values of one transaction, which bound its links, too. The last value may exceed them."""
QUICK_BYTES = 1 << 16
"""Bytes of values in which links are found on the event loop, in some milliseconds. A thread would stop it for longer:
both wait for the interpreter lock."""
MAX_RECOUNTED = 100
"""Records of one transaction that changes whether links count."""

_IS_ON = "select exists (select from indexer.link_reader)"
_REMOVE = (
    "truncate indexer.record_link, indexer.target_count, indexer.links_to_recount",
    "delete from indexer.link_reader",
    f"delete from indexer.consumer where name = '{LINK_CONSUMER}'",
)
_BEGIN = f"insert into indexer.link_reader (seq) select atproto.register_reader('{LINK_CONSUMER}')"
_STATE = "select seq, did, collection, rkey, repos, done_at is not null from indexer.link_reader"
# The row of the consumer only makes the log wait. It may be gone, and so may the changes after the position.
_ADVANCE = f"""
    with advanced as (update indexer.link_reader set seq = $2 where seq = $1 returning true)
    update indexer.consumer c set seq = $2, seen_at = clock_timestamp()
    where c.name = '{LINK_CONSUMER}' and exists (select from advanced)
        and not exists (select from indexer.disconnected_consumer d where d.id = c.id)
    returning true
"""

_NEXT_KEYS = """
    select did, collection, rkey from indexer.record where (did, collection, rkey) > ($1, $2, $3)
    order by did, collection, rkey limit $4
"""
_SAVE_BACKFILL = "update indexer.link_reader set did = $1, collection = $2, rkey = $3, repos = $4"

_LINK: Columns = {
    **RECORD_KEY, "bucket": "smallint", "target": "text", "kind": "text", "path": "text", "counted": "boolean"
}  # fmt: skip
_DELETE_LINKS = f"""
    delete from indexer.record_link l using {unnest(RECORD_KEY, "w", 2)}
    where l.did = w.did and l.collection = w.collection and l.rkey = w.rkey and {of_buckets("l")}
    returning l.target, l.collection, l.path, l.counted
"""
_COUNT_KEY = {"target": "text", "collection": "text", "path": "text"}
_COUNT: Columns = {**_COUNT_KEY, "bucket": "smallint", "count": "bigint"}
_ADD_COUNTS = f"""
    insert into indexer.target_count as c ({", ".join(_COUNT)}) select {", ".join(_COUNT)} from {unnest(_COUNT, "w")}
    order by ordinal on conflict (target, collection, path, bucket) do update set count = c.count + excluded.count
    returning target, collection, path, count
"""
_DELETE_COUNTS = f"""
    delete from indexer.target_count c using {unnest(_COUNT_KEY, "w", 2)}
    where c.target = w.target and c.collection = w.collection and c.path = w.path and {of_buckets("c")} and c.count = 0
"""

_RECOUNT = {"did": "text", "bucket": "smallint", "seq": "bigint"}
_ADD_RECOUNTS = f"""
    insert into indexer.links_to_recount ({", ".join(_RECOUNT)})
    select {", ".join(_RECOUNT)} from {unnest(_RECOUNT, "w")}
    on conflict (did, bucket) do update set seq = excluded.seq
"""
_NEXT_RECOUNT = "select did, seq from indexer.links_to_recount order by seq limit 1"
_VISIBLE = "select visible from indexer.repo where did = $1 and bucket = $2"
_SET_COUNTED = """
    with changed as (
        select distinct collection, rkey from indexer.record_link
        where did = $1 and bucket = $2 and counted <> $3 and (collection, rkey) > ($4, $5)
        order by collection, rkey limit $6
    )
    update indexer.record_link l set counted = $3 from changed w
    where l.did = $1 and l.bucket = $2 and l.collection = w.collection and l.rkey = w.rkey and l.counted <> $3
    returning l.target, l.collection, l.path, l.rkey
"""
_RECOUNTED = "delete from indexer.links_to_recount where did = $1 and bucket = $2 and seq = $3"

_PROGRESS = """
    select state, repos_done, date_part('epoch', clock_timestamp() - enabled_at) as seconds from atproto.link_progress
"""
_OPEN_RECOUNTS = "select count(*) from (select 1 from indexer.links_to_recount limit $1) found"
MAX_OPEN = 100_000
"""Recounts that are counted at most."""


class PositionLostError(Exception):
    """Changes after the position may have been trimmed: the consumer was disconnected or removed."""


async def load_progress(connection: Connection) -> dict[str, Any]:
    """Return the field `links` of the status document. The cost does not depend on the number of links.

    `state` is `off`, `backfill` or `complete`; `progress` the estimated share of the repos that the backfill has
    visited, `repos_done` their number; `seconds_left` the time for the rest, at the mean rate since it began.
    `open_recounts` is the number of repos whose visibility changed and whose links are not recounted yet, at most
    `MAX_OPEN`. How far links are behind is in the status of the consumer `links`.
    """
    [(state, repos_done, seconds)] = await connection.fetch(_PROGRESS)
    progress, left = 1.0 if state == "complete" else None, None
    if state == "backfill":
        progress = min(1.0, repos_done / max(1, await estimate_rows(connection, "indexer.repo")))
        left = max(0.0, seconds) * (1 - progress) / progress if progress else None
    return {
        "state": state,
        "progress": progress,
        "repos_done": repos_done,
        "seconds_left": left,
        "open_recounts": await connection.fetchval(_OPEN_RECOUNTS, MAX_OPEN),
    }


@dataclass
class LinkSession:
    """The session of the process that keeps links. The block of `Links.session` raises `DatabaseError`.

    Attributes:
        seq: The position in the change log.
        backfilled_to: The record up to which the backfill is done.
        repos: The number of repos up to that record.
        done: The backfill is complete.
        links: The number of links that were added since it was opened.
    """

    connection: Connection
    lock: ShardLock
    signal: ChangeSignal
    seq: int = 0
    backfilled_to: RecordKey = ("", "", "")
    repos: int = 0
    done: bool = False
    links: int = 0
    _may_recount: bool = True
    """False if `links_to_recount` is empty: only the owner of the links fills it."""
    _recounted: dict[tuple[str, int, bool], tuple[str, str]] = field(default_factory=dict)
    """The recount that has begun (repo, change, visibility), and the record up to which it is done."""

    async def begin(self, *, anew: bool = False) -> None:
        """Load the position. If there is none, or `anew`, remove all links, and begin at the end of the log.

        Consumers may read the links, so their removal waits for them only for a moment.
        """
        async with self.connection.transaction():
            if anew or not await self.connection.fetchval(_IS_ON):
                await self._remove()
                await self.connection.execute(_BEGIN)
            [row] = await self.connection.fetch(_STATE)
            crash_point("links.begun")
        crash_point(COMMITTED)
        self.seq, did, collection, rkey, self.repos, self.done = row
        self.backfilled_to = did, collection, rkey
        self._recounted, self._may_recount = {}, True

    async def remove(self) -> None:
        """Remove all links and the position."""
        async with self.connection.transaction():
            await self._remove()
            crash_point("links.removed")
        crash_point(COMMITTED)

    async def _remove(self) -> None:
        await self.connection.execute("set local lock_timeout = '2s'")
        for statement in _REMOVE:
            await self.connection.execute(statement)

    async def read_changes(self) -> bool:
        """Follow the next changes of the log; return True if others may follow them.

        Raises:
            PositionLostError: Changes after the position may have been trimmed.
        """
        async with self.connection.transaction():
            try:
                changes = await load_changes(self.connection, self.seq, MAX_CHANGES)
            except LogTrimmedError as error:
                raise PositionLostError(str(error)) from None
            if not changes:
                return False
            first: dict[RecordKey, int] = {}  # the index of the first change of each record
            for index, change in enumerate(changes):
                if change.collection is not None and change.rkey is not None:
                    first.setdefault((change.did, change.collection, change.rkey), index)
            keys, more = list(first), len(changes) == MAX_CHANGES
            if (replaced := await self._replace(keys)) < len(keys):
                changes, more = changes[: first[keys[replaced]]], True
            seqs = {change.did: change.seq for change in changes if change.action in {"hidden", "visible"}}
            if recounts := [(did, bucket_of(did), seq) for did, seq in seqs.items()]:
                await self.connection.execute(_ADD_RECOUNTS, *columns_of(recounts, _RECOUNT))
            if not await self.connection.fetchval(_ADVANCE, self.seq, changes[-1].seq):
                raise PositionLostError("the consumer was disconnected or removed")
            crash_point("links.read")
        crash_point(COMMITTED)
        self.seq = changes[-1].seq
        self._may_recount |= bool(recounts)
        return more

    async def backfill(self) -> bool:
        """Add the links of the next stored records; return False if the backfill is complete."""
        if self.done:
            return False
        async with self.connection.transaction():
            rows = await self.connection.fetch(_NEXT_KEYS, *self.backfilled_to, MAX_CHANGES)
            keys: list[RecordKey] = [(did, collection, rkey) for did, collection, rkey in rows]
            if keys:
                keys = keys[: await self._replace(keys)]
                repos = self.repos + len({did for did, *_ in keys} - {self.backfilled_to[0]})
                await self.connection.execute(_SAVE_BACKFILL, *keys[-1], repos)
            else:
                await self.connection.execute("update indexer.link_reader set done_at = now()")
            crash_point("links.backfilled")
        crash_point(COMMITTED)
        if keys:
            self.backfilled_to, self.repos = keys[-1], repos
        else:
            self.done = True
        return True

    async def recount(self) -> bool:
        """Change whether links of a repo count whose visibility changed; return False if there is none.

        The links of each record that is written meanwhile count by the visibility of the repo at that time. If it
        differs from the one that the recount uses, another change follows, which replaces `seq`.
        """
        if not self._may_recount:
            return False
        async with self.connection.transaction():
            if (row := await self.connection.fetchrow(_NEXT_RECOUNT)) is None:
                self._may_recount = False
                return False
            did, seq = row
            key = did, bucket_of(did)
            shown = bool(await self.connection.fetchval(_VISIBLE, *key))
            after = self._recounted.get((did, seq, shown), ("", ""))
            links = await self.connection.fetch(_SET_COUNTED, *key, shown, *after, MAX_RECOUNTED)
            counts = Counter((target, collection, path) for target, collection, path, _ in links)
            await self._add_counts(counts if shown else Counter({target: -n for target, n in counts.items()}))
            if not links:
                await self.connection.execute(_RECOUNTED, *key, seq)
            crash_point("links.recounted")
        crash_point(COMMITTED)
        after = max(((collection, rkey) for _, collection, _, rkey in links), default=after)
        self._recounted = {(did, seq, shown): after}
        return True

    async def _replace(self, keys: Sequence[RecordKey]) -> int:
        """Replace the links of the first records by those of their stored values; return how many they are."""
        stored = await load_records(self.connection, keys, MAX_BYTES)
        replaced = next((row["number"] for row in stored if row["omitted"]), len(keys))
        if sum(len(row["value"] or "") for row in stored) <= QUICK_BYTES:
            links = _link_rows(keys, stored)
        else:
            links = await asyncio.to_thread(_link_rows, keys, stored)
        buckets = buckets_of(did for did, *_ in keys)
        deleted = await self.connection.fetch(_DELETE_LINKS, buckets, *columns_of(keys[:replaced], RECORD_KEY))
        if links:
            await self.connection.copy_records_to_table(
                "record_link", schema_name="indexer", columns=list(_LINK), records=links
            )
            self.links += len(links)
        counts = Counter((target, key[0], path) for _, *key, _, target, _, path, counted in links if counted)
        counts.subtract((target, collection, path) for target, collection, path, counted in deleted if counted)
        await self._add_counts(counts)
        return replaced

    async def _add_counts(self, counts: Counter[tuple[str, str, str]]) -> None:
        """Add to the numbers of links by target, collection and path."""
        rows = [(*key, bucket_of_target(key[0]), count) for key, count in sorted(counts.items()) if count]
        if not rows:
            return
        written = await self.connection.fetch(_ADD_COUNTS, *columns_of(rows, _COUNT))
        if empty := [(target, collection, path) for target, collection, path, count in written if not count]:
            buckets = sorted({bucket_of_target(target) for target, *_ in empty})
            await self.connection.execute(_DELETE_COUNTS, buckets, *columns_of(empty, _COUNT_KEY))


class Links(Area):
    """The links between records."""

    @asynccontextmanager
    async def session(self) -> AsyncIterator[LinkSession]:
        """Open the session of links, on a connection of its own. It does not own the links yet."""
        async with (
            self._pool.own_connection(SERVER_SETTINGS | {"application_name": "indexer links"}) as connection,
            open_lock(connection, LINKS, self._pool.layout) as lock,
        ):
            yield LinkSession(connection, lock, await listen_on(connection))

    async def catch_up(self, seconds: float) -> bool:
        """Wait until links include all present changes, or add these if no process does; False if it takes longer."""
        latest, deadline, owned = await self._fetchval(LATEST_SEQ), monotonic() + seconds, False
        async with self.session() as session:
            while (seq := await self._fetchval("select seq from indexer.link_reader")) is not None and seq < latest:
                if monotonic() > deadline:
                    return False
                owned = owned or await session.lock.claim()
                if not owned:
                    await asyncio.sleep(0.05)
                    continue
                await session.begin()
                with suppress(PositionLostError):  # the process that keeps links next begins anew
                    await session.read_changes()
        return True

    async def are_kept(self) -> bool:
        """Return True if links are stored, or were turned on."""
        return bool(await self._fetchval(_IS_ON))


def _link_rows(keys: Sequence[RecordKey], stored: Sequence[Row]) -> list[tuple[Any, ...]]:
    """Return the values of `_LINK`. `stored` has the rows of `load_records`."""
    return [
        (*keys[row["number"]], bucket_of(keys[row["number"]][0]), link.target, link.kind, link.path, row["visible"])
        for row in stored
        if row["value"] is not None
        for link in links_of(row["value"])
    ]
