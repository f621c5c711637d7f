"""The methods of the store for the feeds."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

from indexer.db import change_signal, feed_page, feed_rows, link_session
from indexer.db.change_signal import ChangeSignal
from indexer.db.connections import SERVER_SETTINGS, Connections
from indexer.db.database_errors import database_errors
from indexer.db.feed_delivery import LoggedChange, RefusedEvent, SetAside, StoredAccount
from indexer.db.feed_page import FeedPage, LoggedBatch
from indexer.db.feed_rows import CountedTable, FeedSession
from indexer.db.link_session import LinkSession
from indexer.db.numbering import NumberingSession
from indexer.db.shard_lock import FEED, LINKS, open_lock


class FeedMethods(Connections):
    """The change log and its records, as the feeds and links read them, and the numbering of changes after commits."""

    @asynccontextmanager
    async def numbering_session(self) -> AsyncIterator[NumberingSession]:
        """Open a session that numbers the changes of a distributed database, on a connection of its own."""
        async with self._own_connection(SERVER_SETTINGS | {"application_name": "indexer numbering"}) as connection:
            yield NumberingSession(connection)

    async def notify_changes(self, after: int) -> change_signal.Notified:
        """Notify the listeners if there are changes after the number `after`."""
        async with self._connection() as connection:
            return await change_signal.notify(connection, after)

    @asynccontextmanager
    async def feed_session(self) -> AsyncIterator[FeedSession]:
        """Open the session of the feed, on a connection of its own. It does not own the feed yet."""
        async with (
            self._own_connection(SERVER_SETTINGS | {"application_name": "indexer feed"}) as connection,
            open_lock(connection, FEED, self.placement) as lock,
        ):
            yield FeedSession(connection, lock)

    @asynccontextmanager
    async def link_session(self) -> AsyncIterator[LinkSession]:
        """Open the session of links, on a connection of its own. It does not own the links yet."""
        async with (
            self._own_connection(SERVER_SETTINGS | {"application_name": "indexer links"}) as connection,
            open_lock(connection, LINKS, self.placement) as lock,
        ):
            yield LinkSession(connection, lock, await change_signal.listen_on(connection))

    async def links_are_kept(self) -> bool:
        """Return True if links are stored, or were turned on."""
        async with self._connection() as connection:
            return await link_session.links_are_kept(connection)

    async def feed_is_cut_off(self) -> bool | None:
        """Return True if the consumer of the feed was disconnected; None if it is not registered."""
        async with self._connection() as connection:
            return await feed_rows.is_cut_off(connection)

    async def refused_events(self) -> list[RefusedEvent]:
        """Return the events of the feed that clients refuse."""
        async with self._connection() as connection:
            return await feed_rows.load_refused(connection)

    async def set_aside_events(self, did: str | None, limit: int) -> list[SetAside]:
        """Return events of the feed that clients refused for too long, the newest first."""
        async with self._connection() as connection:
            return await feed_rows.load_set_aside(connection, did, limit)

    async def send_set_aside_again(self, did: str | None) -> int:
        """Let the feed send the events again that clients refused for too long; return their number."""
        async with self._transaction() as connection:
            return await feed_rows.send_again(connection, did)

    async def feed_records(self, keys: Sequence[feed_rows.RecordKey], max_length: int) -> feed_rows.FeedRecords:
        """Return the stored records of visible repos: see `indexer.db.feed_rows.load_records`."""
        async with self._connection() as connection:
            return await feed_rows.load_records(connection, keys, max_length)

    async def feed_accounts(self, dids: Sequence[str]) -> Mapping[str, StoredAccount]:
        """Return the states of accounts by DID; those that are not tracked are left out."""
        async with self._connection() as connection:
            return await feed_rows.load_accounts(connection, dids)

    async def count_rows(self, table: CountedTable) -> int:
        """Return the number of rows of the table; an estimate if it is large."""
        async with self._connection() as connection:
            return await feed_rows.count_rows(connection, table)

    async def changes_behind(self) -> int:
        """Return how many changes the log has from the first one on that the feed has not delivered."""
        async with self._connection() as connection:
            return await feed_rows.changes_behind(connection)

    async def latest_seq(self) -> int:
        """Return the number of the newest change; 0 if there is none."""
        async with self._connection() as connection:
            return await feed_page.load_latest_seq(connection)

    async def trimmed_seq(self) -> int:
        """Return the number up to which changes have been trimmed; 0 if none have."""
        async with self._connection() as connection:
            return await feed_page.load_trimmed_seq(connection)

    async def find_change_batch(self, time: int) -> LoggedBatch | None:
        """Return the last change batch that was committed at this time or earlier (microseconds); None if none was."""
        async with self._transaction() as connection:
            return await feed_page.find_batch(connection, time)

    async def feed_page(
        self, after: int, max_changes: int, max_bytes: int, wanted: Callable[[LoggedChange], bool] = lambda _: True
    ) -> FeedPage:
        """Return the next changes after the number `after` with their records: see `indexer.db.feed_page.load_page`.

        Raises:
            LogTrimmedError: Later changes have been trimmed.
        """
        async with self._connection() as connection:
            return await feed_page.load_page(connection, after, max_changes, max_bytes, wanted)

    @asynccontextmanager
    async def change_signal(self) -> AsyncIterator[ChangeSignal]:
        """Listen for new changes during the block, on a connection of its own."""
        with self._count_failures(), database_errors():
            async with change_signal.listen(self._dsn) as signal:
                yield signal
