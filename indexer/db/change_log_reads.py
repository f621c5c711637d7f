"""Read the change log, and what is stored now about the records and accounts that its entries name.

The records are read after the entries. So an entry may come with a newer version of its record, or with none, and a
later entry of the log says why.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager
from typing import NamedTuple

import asyncpg
from asyncpg.exceptions import ObjectNotInPrerequisiteStateError

from indexer.concurrency.event_wait import wait_for_event
from indexer.db.columns import RECORD_KEY, Connection, buckets_of, columns_of, of_buckets, unnest
from indexer.db.connections import SERVER_SETTINGS, Area
from indexer.db.database_errors import DatabaseError
from indexer.reasons import FetchFailure
from indexer.sync.changes import RecordKey

CHANNEL = "atproto_changes"
POLL_SECONDS = 5.0
"""Interval at which the log is read even without a notification."""


class LogTrimmedError(Exception):
    """Changes after the requested position have been trimmed."""


class LoggedChange(NamedTuple):
    """One entry of the change log: a row of `atproto.changes`. `batch_time` is in microseconds since the Unix epoch."""

    seq: int
    did: str
    collection: str | None
    rkey: str | None
    action: str
    cid: str | None
    rev: str | None
    live: bool
    batch_time: int

    @property
    def key(self) -> RecordKey:
        """The key of the record; only the DID for an entry of a repo."""
        return self.did, self.collection or "", self.rkey or ""

    @property
    def needs_record(self) -> bool:
        """True if its event depends on the stored record: a deletion does if the log is not its source."""
        return self.collection is not None and (self.action != "delete" or not self.batch_time)


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


class StoredRecord(NamedTuple):
    """A record as it is stored now. The value is JSON, or None if it is not stored.

    It is kept as bytes, because one emoji makes each character of a str take 4 bytes.
    """

    cid: bytes
    rev: str
    value: bytes | None


class StoredAccount(NamedTuple):
    """The state of an account as it is stored now.

    Attributes:
        handle: The verified handle; None if it has not been checked yet.
        hosting_status: The status as sent upstream; None if it sent none.
        takedown: The repo is taken down locally.
        tracked: False if an operator untracked the repo, or if it is out of scope.
    """

    handle: str | None
    active: bool
    hosting_status: str | None
    takedown: bool
    tracked: bool = True

    @property
    def visible(self) -> bool:
        """True if the records may be shown: `Repo.visible`."""
        return self.active and not self.takedown


class FeedPage(NamedTuple):
    """Entries of the change log, with what they name.

    Attributes:
        values: The stored records of the entries, by the index of the entry. Those that are not visible are left out.
        accounts: The accounts of the entries of whole repos, by DID. Unknown accounts are left out.
        skipped: No entry was wanted, so that neither records nor accounts were read.
        hidden: The indexes of the entries whose records are stored, but not visible.
    """

    changes: Sequence[LoggedChange]
    values: Mapping[int, StoredRecord]
    accounts: Mapping[str, StoredAccount]
    skipped: bool = False
    hidden: AbstractSet[int] = frozenset()


_MICROSECONDS = "(extract(epoch from time) * 1000000)::bigint"

_CHANGES = f"""
    select seq, did, collection, rkey, action, cid, rev, live, {_MICROSECONDS} as batch_time
    from atproto.changes_after($1, $2)
"""

# The running total limits the memory: a record has up to 2 MiB of JSON. The first value is read whatever its size.
_RECORDS = f"""
    with found as materialized (
        select w.ordinal, r.cid, r.rev, r.value::text as value, p.visible
        from {unnest(RECORD_KEY, "w", 3)}
        join indexer.record r
            on r.did = w.did and r.collection = w.collection and r.rkey = w.rkey and {of_buckets("r")}
        join indexer.repo p on p.did = r.did and p.bucket = r.bucket and {of_buckets("p")}
    ), measured as (
        select *, coalesce(sum(octet_length(value)) over (order by ordinal) - coalesce(octet_length(value), 0), 0) >= $2
            as omitted
        from found
    )
    select ordinal - 1 as number, cid, rev, case when not omitted then value end as value, visible, omitted
    from measured order by ordinal
"""

_ACCOUNTS = f"""
    select r.did, i.handle, r.active, r.hosting_status, r.takedown, r.tracked
    from indexer.repo r left join indexer.identity i on i.did = r.did and i.bucket = r.bucket and {of_buckets("i", 2)}
    where r.did = any($1::text[]) and {of_buckets("r", 2)}
"""

_BATCH_OF = f"""
    select first_seq, size, {_MICROSECONDS} as time from indexer.change_batch where first_seq <= $1
    order by first_seq desc limit 1
"""

# The statistics of a segment that was empty a moment ago mislead the planner.
_USE_INDEX = "set local enable_seqscan = off"

LATEST_SEQ = "select atproto.latest_seq()"
TRIMMED_SEQ = "select last_value from indexer.trimmed_seq"


async def load_changes(connection: Connection, after: int, max_changes: int) -> list[LoggedChange]:
    """Return the next entries after the number `after`.

    Raises:
        LogTrimmedError: Later entries have been trimmed.
    """
    try:
        return [LoggedChange(*row) for row in await connection.fetch(_CHANGES, after, max_changes)]
    except ObjectNotInPrerequisiteStateError as error:
        raise LogTrimmedError(str(error)) from None


async def load_records(connection: Connection, keys: Sequence[RecordKey], max_bytes: int) -> list[asyncpg.Record]:
    """Return the stored records of the keys, in their order, those of hidden repos too.

    Returns:
        A row for each: `number` (the index of its key), `cid`, `rev`, `value` (JSON text, or None), `visible`, and
        `omitted`. The values are omitted from the first record on before which they have `max_bytes` bytes or more.
    """
    buckets = buckets_of(did for did, *_ in keys)
    return await connection.fetch(_RECORDS, buckets, max_bytes, *columns_of(keys, RECORD_KEY)) if keys else []


async def load_page(connection: Connection, changes: Sequence[LoggedChange], max_bytes: int) -> FeedPage:
    """Return entries with what they name. The page ends with the record by which the values reach `max_bytes`."""
    named = [(number, change.key) for number, change in enumerate(changes) if change.needs_record]
    values, hidden = dict[int, StoredRecord](), set[int]()
    for row in await load_records(connection, [key for _, key in named], max_bytes):
        number, _ = named[row["number"]]
        if row["omitted"]:
            changes = changes[:number]
            break
        if row["visible"]:
            values[number] = StoredRecord(row["cid"], row["rev"], row["value"] and row["value"].encode())
        else:
            hidden.add(number)
    dids = sorted({change.did for change in changes if change.collection is None})
    rows = await connection.fetch(_ACCOUNTS, dids, buckets_of(dids)) if dids else []
    return FeedPage(changes, values, {did: StoredAccount(*state) for did, *state in rows}, hidden=hidden)


class ChangeSignal:
    """Is set by each notification of changes."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection
        self._changed = asyncio.Event()
        connection.add_termination_listener(lambda _: self._changed.set())

    async def wait(self) -> None:
        """Wait until there was a notification since the last call, or for `POLL_SECONDS`.

        Raises:
            DatabaseError: The connection is lost.
        """
        if not await wait_for_event(self._changed, POLL_SECONDS):
            return
        self._changed.clear()
        if self._connection.is_closed():
            raise DatabaseError(FetchFailure.UNREACHABLE, "the connection that listens for changes is closed")

    def notify(self, *_: object) -> None:
        """Report a commit."""
        self._changed.set()


async def listen_on(connection: asyncpg.Connection) -> ChangeSignal:
    """Listen for changes on this connection until it is closed."""
    signal = ChangeSignal(connection)
    await connection.add_listener(CHANNEL, signal.notify)
    return signal


class ChangePages(Area):
    """The change log and its records, as readers read them."""

    async def latest_seq(self) -> int:
        """Return the number of the newest change; 0 if there is none."""
        return int(await self._fetchval(LATEST_SEQ))

    async def trimmed_seq(self) -> int:
        """Return the number up to which changes have been trimmed; 0 if none have."""
        return int(await self._fetchval(TRIMMED_SEQ))

    async def batch_of(self, seq: int) -> LoggedBatch | None:
        """Return the batch of a change, or the last one before it; None if there is neither."""
        async with self._pool.transaction() as connection:
            await connection.execute(_USE_INDEX)
            row = await connection.fetchrow(_BATCH_OF, seq)
            return None if row is None else LoggedBatch(**row)

    async def find_batch(self, time: int) -> LoggedBatch | None:
        """Return the last batch that was committed at this time or earlier (microseconds since the Unix epoch).

        It is a binary search, so that the log needs no index of times. Return None if there is no such batch.
        """
        async with self._pool.transaction() as connection:
            await connection.execute(_USE_INDEX)
            low, high = 0, await connection.fetchval(LATEST_SEQ)
            found = None
            while low < high:  # changes up to `low` were committed at `time` or earlier, changes after `high` later
                middle = (low + high + 1) // 2
                row = await connection.fetchrow(_BATCH_OF, middle)
                if row is None:
                    low = middle
                elif row["time"] <= time:
                    found = LoggedBatch(**row)
                    low = max(middle, found.first_seq + found.size - 1)
                else:
                    high = row["first_seq"] - 1
            return found

    async def page(
        self, after: int, max_changes: int, max_bytes: int, wanted: Callable[[LoggedChange], bool] = lambda _: True
    ) -> FeedPage:
        """Return at most `max_changes` entries after the number `after`, with their records.

        The page ends with the record by which the values reach `max_bytes`. It is skipped if `wanted` returns False for
        each of its entries.

        Raises:
            LogTrimmedError: Later entries have been trimmed.
        """
        async with self._pool.connection() as connection:
            changes = await load_changes(connection, after, max_changes)
            if not any(map(wanted, changes)):
                return FeedPage(changes, {}, {}, skipped=True)
            return await load_page(connection, changes, max_bytes)

    async def load(self, changes: Sequence[LoggedChange], max_bytes: int) -> FeedPage:
        """Return these entries with their records, up to the record by which the values reach `max_bytes`."""
        async with self._pool.connection() as connection:
            return await load_page(connection, changes, max_bytes)

    async def notification_queue_usage(self) -> float:
        """Return the used share of the notification queue of the server, from 0 to 1."""
        return float(await self._fetchval("select pg_notification_queue_usage()"))

    @asynccontextmanager
    async def signal(self) -> AsyncIterator[ChangeSignal]:
        """Listen for new changes during the block, on a connection of its own."""
        async with self._pool.own_connection(SERVER_SETTINGS | {"application_name": "indexer feed"}) as connection:
            yield await listen_on(connection)
