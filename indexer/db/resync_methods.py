"""The methods of the store for resyncs: the queue, and the transaction of one resync."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

from indexer.crash_points import COMMITTED, crash_point
from indexer.db import resync_queue
from indexer.db.columns import Connection
from indexer.db.connections import Connections
from indexer.db.database_errors import database_errors, refused_writes
from indexer.db.resync_transaction import NewReposTransaction, ResyncTransaction
from indexer.sync.repo import Repo

T = TypeVar("T", ResyncTransaction, NewReposTransaction)


class ResyncMethods(Connections):
    """The queue of resyncs, and the transaction of one resync."""

    async def claim(self, count: int, buckets: Sequence[int], lease_seconds: float, now: float) -> list[Repo]:
        """Claim at most `count` repos that are due at `now`: see `indexer.db.resync_queue.claim`."""
        async with self._transaction() as connection:
            return await resync_queue.claim(connection, count, buckets, now + lease_seconds, now, self.shards)

    async def claim_early(self, repos: Mapping[str, float], lease_seconds: float, now: float) -> list[Repo]:
        """Claim repos before their time: DIDs, each with the time until which it was postponed.

        Those that were claimed or changed since are left out, unless they are due before the latest of these times.
        """
        async with self._transaction() as connection:
            latest = max(repos.values())
            return await resync_queue.claim_early(connection, repos, latest, now + lease_seconds, self.shards)

    async def renew(self, did: str, lease: int, seconds: float) -> bool:
        """Extend the lease to `seconds` from now; return False if the claim is lost."""
        async with self._connection() as connection:
            return await resync_queue.renew(connection, did, lease, seconds)

    async def expire_leases(self, buckets: Sequence[int], now: float) -> int:
        """End claims whose lease expired before `now`; return how many."""
        async with self._transaction() as connection:
            return await resync_queue.expire_leases(connection, buckets, now)

    async def end_long_waits(self, buckets: Sequence[int], seconds: float, now: float) -> int:
        """Make repos due now that wait for longer than `seconds`; return how many.

        One call processes a limited number of repos.
        """
        async with self._transaction() as connection:
            return await resync_queue.end_long_waits(connection, buckets, now + seconds, now)

    async def request_missing_values(self, buckets: Sequence[int], seconds: float, now: float) -> int:
        """Desynchronize repos that lack record values and were synchronized `seconds` ago or earlier; return how many.

        One call processes a limited number of repos.
        """
        async with self._transaction() as connection:
            return await resync_queue.request_missing_values(connection, buckets, now - seconds, now)

    async def request_unproven(self, buckets: Sequence[int], seconds: float, now: float, limit: int) -> int:
        """Desynchronize repos to which undecidable commits were applied; return how many.

        At most `limit`, the oldest marks first. Repos that broke before and became synchronized less than `seconds` ago
        are skipped.
        """
        async with self._transaction() as connection:
            return await resync_queue.request_unproven(connection, buckets, now - seconds, now, limit)

    async def forget_denied(self, buckets: Sequence[int], parked_for: float, now: float) -> int:
        """Delete repos that were parked `parked_for` seconds ago or earlier and cannot be fetched; return how many."""
        async with self._transaction() as connection:
            return await resync_queue.forget_denied(connection, buckets, now - parked_for)

    async def forget_hidden(self, buckets: Sequence[int], unchanged_for: float, now: float) -> int:
        """Delete repos of inactive accounts without stored records, unchanged for this time; return how many."""
        async with self._transaction() as connection:
            return await resync_queue.forget_hidden(connection, buckets, now - unchanged_for)

    async def unpark(self, buckets: Sequence[int], seconds: float, now: float) -> int:
        """Unpark repos that were parked `seconds` ago or earlier; return how many.

        One call processes a limited number of repos.
        """
        async with self._transaction() as connection:
            return await resync_queue.unpark(connection, buckets, now - seconds, now)

    @asynccontextmanager
    async def resync(self, claimed: Repo, scope_version: int = 0) -> AsyncIterator[ResyncTransaction]:
        """Begin the transaction of a resync, which is planned with this version of the scope.

        The end of the block commits it if it was finished, else rolls it back. So does an exception in the block, which
        may be of any kind: only errors of the database become a `DatabaseError`.

        Raises:
            RefusedWriteError: The database cannot store the values of the resync.
        """
        begin = partial(ResyncTransaction, claimed=claimed, scope_version=scope_version)
        async with self._committed_if_finished(begin) as transaction:
            yield transaction

    @asynccontextmanager
    async def write_new_repos(self, scope_version: int) -> AsyncIterator[NewReposTransaction]:
        """Begin the transaction of several resyncs, which are planned with this version of the scope.

        It ends as that of `resync`, and raises the same.
        """
        async with self._committed_if_finished(partial(NewReposTransaction, scope_version=scope_version)) as new_repos:
            yield new_repos

    @asynccontextmanager
    async def _committed_if_finished(self, begin: Callable[[Connection], T]) -> AsyncIterator[T]:
        async with self._refusals_checked():
            with self._count_failures():
                async with self._resync_connections, self._acquired() as connection:
                    transaction = connection.transaction()
                    with database_errors():
                        await transaction.start()
                    writes = begin(connection)
                    commit = False
                    try:
                        yield writes
                        commit = writes.finished
                    finally:
                        with refused_writes(), database_errors():
                            await (transaction.commit() if commit else transaction.rollback())
                            self._note_commit()
                    if commit:
                        crash_point(COMMITTED)
