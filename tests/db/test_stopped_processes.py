"""A process that is stopped (SIGSTOP) in a transaction keeps the locks that others need only for a short time.

It cannot do anything, and its connections stay open.
"""

import asyncio
import threading
from typing import Any

import asyncpg
import pytest

from indexer import crash_points
from indexer.db import Database, DatabaseError
from indexer.db.change_log_segments import RetentionPolicy
from indexer.db.shard_lock import ShardLock, open_lock
from indexer.sync.changes import Batch, RepoWrite
from indexer.sync.shard import PLAIN, Shard
from indexer.sync.stream import Cursor
from tests.db.change_log_helpers import connected, fill_segments, rkeys
from tests.db.repo_rows import head, insert, put, synchronized
from tests.waiting import TIMEOUT

pytestmark = pytest.mark.slow

TRIM_EVERYTHING = RetentionPolicy(0.001, 2**40, 1)
LATER = 2e9


class StoppedConnection:
    """A connection of a process that stops before it sends its second statement."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self.is_stopped = asyncio.Event()
        self._connection = connection

    def transaction(self) -> asyncpg.transaction.Transaction:
        return self._connection.transaction()

    async def execute(self, statement: str) -> None:
        await self._connection.execute(statement)
        self.is_stopped.set()
        await asyncio.get_running_loop().create_future()


async def test_process_that_is_stopped_while_it_claims_a_shard_keeps_no_other_from_starting(database: str) -> None:
    async with connected(database) as first, connected(database) as second:
        connection: Any = StoppedConnection(first)
        stopped = ShardLock(connection, Shard(0, 2).positions, PLAIN)
        claim = asyncio.create_task(stopped.claim())
        await connection.is_stopped.wait()
        async with asyncio.timeout(TIMEOUT), open_lock(second, Shard(1, 2).positions, PLAIN) as lock:
            assert await lock.claim()
        claim.cancel()
        await asyncio.gather(claim, return_exceptions=True)


async def test_process_that_is_stopped_while_it_trims_the_change_log_stops_neither_writers_nor_consumers(
    database: str, db: Database, sql: asyncpg.Connection
) -> None:
    repo = synchronized("bob")
    await insert(db, repo)
    await fill_segments(sql, 4)
    is_stopped, resumed = threading.Event(), threading.Event()

    async def trim() -> None:
        db = await Database.open(database, connections=1)
        try:
            await db.segments.trim(TRIM_EVERYTHING, LATER)
        finally:
            await db.close()

    def stop(point: str) -> None:
        if point == "change-log.truncated":
            is_stopped.set()
            resumed.wait()

    crash_points.hooks.append(stop)
    trimming = asyncio.create_task(asyncio.to_thread(asyncio.run, trim()))
    try:
        await asyncio.to_thread(is_stopped.wait, TIMEOUT)
        async with asyncio.timeout(TIMEOUT):
            after = repo._replace(version=2, head=head("3lbbbbbbbbb22"))
            write = RepoWrite(repo, after, (put("com.example.note/4"),), advances=True)
            batch = Batch((write,), cursors=(Cursor("wss://relay.test", "0/1", 1),))
            assert not (await db.write(batch)).skipped  # one statement, whose plan locks all segments
            rows = await sql.fetch("select rkey from atproto.changes where rkey is not null order by seq")
            assert rkeys(rows) == ["0", "1", "2", "3", "4"]
    finally:
        crash_points.hooks.remove(stop)
        resumed.set()
        [result] = await asyncio.gather(trimming, return_exceptions=True)
    assert isinstance(result, DatabaseError)
