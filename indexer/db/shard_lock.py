"""Ownership of buckets by database sessions, so that each bucket has one live process at a time. So has the feed.

A process owns a range of positions of the layout (`indexer.sync.shard`). On a plain database, these are the numbers
of its buckets. A row of the private table `shard_owner` names the session of each owner. It is valid as long as the
session exists, so ownership ends with the session, however that ends. Neither locks nor an open transaction last for
that time. Advisory locks would not do, because any role could take them.

Ownership only prevents duplicate work. Correctness does not depend on it, because every write of a repo compares the
version of its row.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import asyncpg

from indexer.db.blocking_sessions import END_WHEN_STOPPED
from indexer.db.columns import Connection
from indexer.db.connections import Area
from indexer.db.layout import load_layout
from indexer.errors import LayoutChangedError
from indexer.sync.shard import BUCKETS, Layout

FEED = range(BUCKETS, BUCKETS + 1)
"""A number after all positions. Its owner is the process that serves the feed for clients of tap."""
LINKS = range(BUCKETS + 1, BUCKETS + 2)
"""The next number. Its owner is the process that keeps links."""
OPERATIONS = range(BUCKETS + 2, BUCKETS + 3)
"""The next number. Its owner is the process that reads the export of a PLC directory."""

_ONE_AT_A_TIME = f"{END_WHEN_STOPPED}; lock table indexer.shard_owner in share row exclusive mode"

IS_SESSION = "a.pid = o.pid and a.usesysid = o.role and coalesce(a.backend_start, o.started_at) = o.started_at"
"""The condition that `a` of `pg_stat_activity` is the session that wrote the row `o`.

A process ID may be used again, but not by a session with the same start. For sessions of other roles the start may be
hidden (null)."""

_FORGET_ENDED = f"""
    delete from indexer.shard_owner o where not exists (select from pg_stat_activity a where {IS_SESSION})
"""

_CLAIM = """
    insert into indexer.shard_owner (pid, role, started_at, first_bucket, last_bucket)
    select a.pid, a.usesysid, a.backend_start, $1, $2 from pg_stat_activity a
    where a.pid = pg_backend_pid()
        and not exists (select from indexer.shard_owner o where o.last_bucket >= $1 and o.first_bucket <= $2)
    returning true
"""

_OWNERS = f"""
    select format(
        'session %s from %s since %s', a.pid, coalesce(host(a.client_addr), 'this machine'),
        to_char(o.started_at at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS"+00:00"')
    )
    from indexer.shard_owner o join pg_stat_activity a on {IS_SESSION}
    where o.last_bucket >= $1 and o.first_bucket <= $2
    order by o.first_bucket
"""


@dataclass(eq=False)
class ShardLock:
    """The ownership of the positions of a shard by one session.

    Attributes:
        lost: Set when the session has ended, and the ownership with it.
    """

    _connection: asyncpg.Connection
    _positions: range
    _layout: Layout
    lost: asyncio.Event = field(default_factory=asyncio.Event)

    async def claim(self) -> bool:
        """Own the positions until the session ends; return False if another session owns one of them.

        Raises:
            LayoutChangedError: The database has another layout now.
        """
        async with self._connection.transaction():
            await self._connection.execute(_ONE_AT_A_TIME)
            await self._connection.execute(_FORGET_ENDED)
            claimed = await self._connection.fetchval(_CLAIM, self._positions[0], self._positions[-1]) is True
            # The layout changes only while one session owns all positions, so it is read after the claim.
            if claimed and await load_layout(self._connection) != self._layout:
                raise LayoutChangedError
            return claimed


class ShardLocks(Area):
    """The ownership of shards."""

    async def owners(self, positions: range) -> list[str]:
        """Return a description of each session that owns one of the positions."""
        return [name for (name,) in await self._fetch(_OWNERS, positions[0], positions[-1])]

    @asynccontextmanager
    async def open(self, positions: range) -> AsyncIterator[ShardLock]:
        """Open the lock of these positions, on a connection of its own; release it at the end of the block."""
        async with (
            self._pool.own_connection({"application_name": session_name(positions)}) as connection,
            open_lock(connection, positions, self._pool.layout) as lock,
        ):
            yield lock


@asynccontextmanager
async def open_lock(connection: asyncpg.Connection, positions: range, layout: Layout) -> AsyncIterator[ShardLock]:
    """Yield the lock of these positions, which is not claimed yet. It is released at the end of the block."""
    lock = ShardLock(connection, positions, layout)

    def on_termination(_connection: Connection) -> None:
        lock.lost.set()

    connection.add_termination_listener(on_termination)
    try:
        yield lock
    finally:
        connection.remove_termination_listener(on_termination)
        if not connection.is_closed():
            await connection.execute("delete from indexer.shard_owner where pid = pg_backend_pid()")


def session_name(positions: range) -> str:
    """Return the application name of the session that owns these positions or waits for them."""
    return f"indexer buckets {positions[0]}-{positions[-1]}"
