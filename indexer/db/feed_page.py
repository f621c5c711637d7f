"""Read a page of the change log together with the records that it names, for the feeds.

The records are read after the page. So an entry may come with a newer version of its record, or with none, and a later
entry of the log says why.
"""

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

from asyncpg.exceptions import ObjectNotInPrerequisiteStateError

from indexer.db import change_signal
from indexer.db.change_signal import ChangeSignal
from indexer.db.columns import Connection, columns_of, of_buckets, unnest
from indexer.db.connections import Area
from indexer.db.database_errors import database_errors
from indexer.db.feed_delivery import LoggedChange, StoredAccount, StoredRecord
from indexer.sync.shard import bucket_of


class LogTrimmedError(Exception):
    """Changes after the requested position have been trimmed."""


class LoggedBatch(NamedTuple):
    """A change batch: what one transaction wrote to the log.

    Attributes:
        first_seq: The number of its first change.
        size: The number of its changes.
        time: When it was committed, in microseconds since the Unix epoch. No change of another batch has a time
            between `time` and `time + size`.
    """

    first_seq: int
    size: int
    time: int


class FeedPage(NamedTuple):
    """Consecutive entries of the change log.

    Attributes:
        values: The stored records of the entries, by the index of the entry. Records without a value, and those that
            are not visible, are left out.
        accounts: The accounts of the entries of whole repos, by DID. Unknown accounts are left out.
        skipped: No entry was wanted, so that neither records nor accounts were read.
    """

    changes: Sequence[LoggedChange]
    values: Mapping[int, StoredRecord]
    accounts: Mapping[str, StoredAccount]
    skipped: bool = False


_MICROSECONDS = "(extract(epoch from time) * 1000000)::bigint"

_CHANGES = f"""
    select seq, did, collection, rkey, action, cid, rev, live, {_MICROSECONDS} as batch_time
    from atproto.changes_after($1, $2)
"""

_KEYS = {"did": "text", "collection": "text", "rkey": "text", "bucket": "smallint", "number": "integer"}

# The running total limits the memory of a page: a record has up to 2 MiB of JSON.
_VALUES = f"""
    with found as (
        select w.number, r.cid, r.rev, r.value::text as value
        from {unnest(_KEYS, "w")}
        join indexer.record r
            on r.did = w.did and r.collection = w.collection and r.rkey = w.rkey and r.bucket = w.bucket
                and {of_buckets("r", 6)}
        join indexer.repo p on p.did = r.did and p.bucket = r.bucket and {of_buckets("p", 6)} and p.visible
        where r.value is not null
    ), measured as (
        select found.*, sum(octet_length(value)) over (order by number) - octet_length(value) as before from found
    )
    select number, cid, rev, value, before + octet_length(value) >= $7 as is_last
    from measured where before < $7 order by number
"""

_ACCOUNTS = f"""
    select p.did, i.handle, p.active, p.hosting_status, p.takedown
    from indexer.repo p left join indexer.identity i on i.did = p.did and i.bucket = p.bucket and {of_buckets("i", 2)}
    where p.did = any($1::text[]) and {of_buckets("p", 2)}
"""

_BATCH_OF = f"""
    select first_seq, size, {_MICROSECONDS} as time from indexer.change_batch where first_seq <= $1
    order by first_seq desc limit 1
"""

_LATEST_SEQ = "select atproto.latest_seq()"
_TRIMMED_SEQ = "select last_value from indexer.trimmed_seq"


async def load_changes(connection: Connection, after: int, max_changes: int) -> list[LoggedChange]:
    """Return the next entries after the number `after`.

    Raises:
        LogTrimmedError: Later entries have been trimmed.
    """
    try:
        return [LoggedChange(*row) for row in await connection.fetch(_CHANGES, after, max_changes)]
    except ObjectNotInPrerequisiteStateError as error:
        raise LogTrimmedError(str(error)) from None


class ChangePages(Area):
    """The change log and its records, as readers read them."""

    async def latest_seq(self) -> int:
        """Return the number of the newest change; 0 if there is none."""
        async with self._pool.connection() as connection:
            return await load_latest_seq(connection)

    async def trimmed_seq(self) -> int:
        """Return the number up to which changes have been trimmed; 0 if none have."""
        async with self._pool.connection() as connection:
            seq: int = await connection.fetchval(_TRIMMED_SEQ)
            return seq

    async def find_batch(self, time: int) -> LoggedBatch | None:
        """Return the last batch that was committed at this time or earlier (microseconds since the Unix epoch).

        It is a binary search, so that the log needs no index of times.

        Returns:
            None if all batches of the log are later, or if there is none.
        """
        async with self._pool.transaction() as connection:
            # The statistics of a segment that was empty a moment ago mislead the planner.
            await connection.execute("set local enable_seqscan = off")
            low, high = 0, await load_latest_seq(connection)
            found = None
            while low < high:  # changes up to `low` were committed at `time` or earlier, changes after `high` later
                middle = (low + high + 1) // 2
                batch = await load_batch_of(connection, middle)
                if batch is None:
                    low = middle
                elif batch.time <= time:
                    low, found = max(middle, batch.first_seq + batch.size - 1), batch
                else:
                    high = batch.first_seq - 1
            return found

    async def page(
        self, after: int, max_changes: int, max_bytes: int, wanted: Callable[[LoggedChange], bool] = lambda _: True
    ) -> FeedPage:
        """Return the next entries after the number `after`, with their records.

        Args:
            after: The number of the last entry before the page.
            max_changes: Maximum number of entries.
            max_bytes: The page ends with the first record by which the values have this size.
            wanted: The page is skipped if this returns False for each of its entries.

        Raises:
            LogTrimmedError: Later entries have been trimmed.
        """
        async with self._pool.connection() as connection:
            changes = await load_changes(connection, after, max_changes)
            if not any(map(wanted, changes)):
                return FeedPage(changes, {}, {}, skipped=True)
            values, is_full = await _load_values(connection, changes, max_bytes)
            if is_full:
                changes = changes[: max(values) + 1]  # the records of later entries may be left out
            dids = {change.did for change in changes if change.collection is None}
            return FeedPage(changes, values, await _load_accounts(connection, dids) if dids else {})

    async def notify(self, after: int) -> change_signal.Notified:
        """Notify the listeners if there are changes after the number `after`."""
        async with self._pool.connection() as connection:
            return await change_signal.notify(connection, after)

    @asynccontextmanager
    async def signal(self) -> AsyncIterator[ChangeSignal]:
        """Listen for new changes during the block, on a connection of its own."""
        with self._pool.count_failures(), database_errors():
            async with change_signal.listen(self._pool.dsn) as signal:
                yield signal


async def _load_values(
    connection: Connection, changes: Iterable[LoggedChange], max_bytes: int
) -> tuple[dict[int, StoredRecord], bool]:
    """Return the stored records by the index of the entry, and whether they have `max_bytes` or more."""
    keys = [
        (change.did, change.collection, change.rkey, bucket_of(change.did), number)
        for number, change in enumerate(changes)
        if change.cid is not None
    ]
    if not keys:
        return {}, False
    buckets = sorted({bucket for *_, bucket, _ in keys})
    rows = await connection.fetch(_VALUES, *columns_of(keys, _KEYS), buckets, max_bytes)
    values = {number: StoredRecord(cid, rev, value) for number, cid, rev, value, _ in rows}
    return values, bool(rows) and rows[-1]["is_last"]


async def _load_accounts(connection: Connection, dids: Iterable[str]) -> dict[str, StoredAccount]:
    wanted = sorted(dids)
    rows = await connection.fetch(_ACCOUNTS, wanted, sorted({bucket_of(did) for did in wanted}))
    return {did: StoredAccount(*state) for did, *state in rows}


async def load_latest_seq(connection: Connection) -> int:
    """Return the number of the newest change; 0 if there is none."""
    seq: int = await connection.fetchval(_LATEST_SEQ)
    return seq


async def load_batch_of(connection: Connection, seq: int) -> LoggedBatch | None:
    """Return the batch that contains the change with this number, or else the one before; None if there is none."""
    row = await connection.fetchrow(_BATCH_OF, seq)
    return None if row is None else LoggedBatch(*row)
