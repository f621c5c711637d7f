"""The database: an object for each area of its tables, and the writer."""

import asyncpg

from indexer.crash_points import crash_point
from indexer.db.blocking_sessions import BlockingSessions
from indexer.db.change_log_reads import ChangePages
from indexer.db.change_log_segments import ChangeLogSegments
from indexer.db.connections import Connections
from indexer.db.crawls import Crawls
from indexer.db.database_errors import NOT_BY_VALUES, DatabaseError, refused_writes
from indexer.db.dead_letters import DeadLetters
from indexer.db.exports import Exports
from indexer.db.gaps import Gaps
from indexer.db.host_lists import HostLists
from indexer.db.hosts import Hosts
from indexer.db.identities import Identities
from indexer.db.lexicon_indexes import LexiconIndexes
from indexer.db.lexicons import Lexicons
from indexer.db.links import Links
from indexer.db.removals import Removals
from indexer.db.reports import Reports
from indexer.db.repos import Repos
from indexer.db.resync_queue import Resyncs
from indexer.db.scope import StoredScope
from indexer.db.scope_changes import ScopeChanges
from indexer.db.shard_lock import ShardLocks
from indexer.db.subscribed_hosts import SubscribedHosts
from indexer.db.tap_feed import Feed
from indexer.db.write import WrittenBatch, write
from indexer.sync.changes import Batch


class Database(Connections):
    """All access to Postgres: the areas of the tables, as attributes, and `write`."""

    def __init__(self, pool: asyncpg.Pool, connections: int, dsn: str) -> None:
        super().__init__(pool, connections, dsn)
        self.blocking_sessions = BlockingSessions(self)
        self.changes = ChangePages(self)
        self.crawls = Crawls(self)
        self.dead_letters = DeadLetters(self)
        self.exports = Exports(self)
        self.feed = Feed(self)
        self.subscribed_hosts = SubscribedHosts(self)
        self.gaps = Gaps(self)
        self.host_lists = HostLists(self)
        self.hosts = Hosts(self)
        self.identities = Identities(self)
        self.lexicons = Lexicons(self)
        self.lexicon_indexes = LexiconIndexes(self)
        self.links = Links(self)
        self.reports = Reports(self)
        self.removals = Removals(self)
        self.repos = Repos(self)
        self.resyncs = Resyncs(self)
        self.scope = StoredScope(self)
        self.scope_changes = ScopeChanges(self)
        self.segments = ChangeLogSegments(self)
        self.shard_locks = ShardLocks(self)

    async def write(self, batch: Batch) -> WrittenBatch:
        """Write the batch in one transaction: see `indexer.db.write`.

        Raises:
            DatabaseError: A transient error, which nothing retries here.
            DeadLetterGoneError: The dead letter that the batch resolves does not exist; nothing is written.
            RefusedWriteError: The database cannot store the values of the batch.
        """
        async with self.refusals_checked():
            with refused_writes():
                async with self.transaction() as connection:
                    written = await write(connection, batch, layout=self.layout)
                    crash_point("batch.written")
        return written

    async def answers_after(self, error: DatabaseError) -> bool:
        """Return True if the database answers and can be written, so that the write that failed may be the cause."""
        return not isinstance(error.__cause__, NOT_BY_VALUES) and await self.accepts_writes()
