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
from dataclasses import dataclass

import asyncpg

from indexer.db.blocking_sessions import END_WHEN_STOPPED
from indexer.db.columns import Connection
from indexer.db.connections import Area
from indexer.db.layout import load_layout
from indexer.errors import LayoutChangedError
from indexer.sync.shard import BUCKETS, Layout

SESSION_NAME = "indexer buckets "
"""The application name of a session of a lock, before its positions."""
FEED = range(BUCKETS, BUCKETS + 1)
"""A number after all positions. Its owner is the process that serves the feed for clients of tap."""
LINKS = range(BUCKETS + 1, BUCKETS + 2)
"""The next number. Its owner is the process that keeps links."""

_ONE_AT_A_TIME = f"{END_WHEN_STOPPED}; lock table indexer.shard_owner in share row exclusive mode"

# A process ID may be used again, but not by a session with the same start. For sessions of other roles the start may be
# hidden (null).
_FORGET_ENDED = """
    delete from indexer.shard_owner o where not exists (
        select from pg_stat_activity a
        where a.pid = o.pid and a.usesysid = o.role and coalesce(a.backend_start, o.started_at) = o.started_at
    )
"""

_CLAIM = """
    insert into indexer.shard_owner (pid, role, started_at, first_bucket, last_bucket)
    select a.pid, a.usesysid, a.backend_start, $1, $2 from pg_stat_activity a
    where a.pid = pg_backend_pid()
        and not exists (select from indexer.shard_owner o where o.last_bucket >= $1 and o.first_bucket <= $2)
    returning true
"""

_RELEASE = "delete from indexer.shard_owner where pid = pg_backend_pid()"


_SESSIONS = f"""
    select a.pid, a.application_name, o.first_bucket, o.last_bucket,
        coalesce(host(a.client_addr), 'this machine') as client, date_part('epoch', a.backend_start) as since
    from pg_stat_activity a
    left join indexer.shard_owner o
        on o.pid = a.pid and o.role = a.usesysid and o.started_at = coalesce(a.backend_start, o.started_at)
    where a.datname = current_database()
        and (o.first_bucket < {BUCKETS} or a.application_name ~ '^{SESSION_NAME}[0-9]+-[0-9]+$')
"""


@dataclass(frozen=True, slots=True)
class ShardSession:
    """A session by which a process owns its shard, or waits for it.

    Attributes:
        positions: The first and the last position of the shard.
        owns: True if the process owns the shard, False if it waits.
        client: The network address of the process.
        since: Unix seconds.
    """

    pid: int
    positions: tuple[int, int]
    owns: bool
    client: str
    since: float


class ShardLock:
    """The ownership of the positions of a shard by one session.

    Attributes:
        lost: Set when the session has ended, and the ownership with it.
    """

    def __init__(self, connection: asyncpg.Connection, positions: range, layout: Layout) -> None:
        self.lost = asyncio.Event()
        self._connection = connection
        self._positions = positions
        self._layout = layout

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

    async def sessions(self) -> list[ShardSession]:
        """Return the sessions of all processes that own a shard of this database or wait for one, by position."""
        async with self._pool.connection() as connection:
            sessions = [_session_of(row) for row in await connection.fetch(_SESSIONS)]
        return sorted(sessions, key=lambda session: (session.positions, not session.owns, session.since))

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
            await connection.execute(_RELEASE)


def session_name(positions: range) -> str:
    """Return the application name of the session that owns these positions or waits for them."""
    return f"{SESSION_NAME}{positions[0]}-{positions[-1]}"


def _session_of(row: asyncpg.Record) -> ShardSession:
    owns = row["first_bucket"] is not None
    first, _, last = row["application_name"].removeprefix(SESSION_NAME).partition("-")
    positions = (row["first_bucket"], row["last_bucket"]) if owns else (int(first), int(last))
    return ShardSession(row["pid"], positions, owns, row["client"], row["since"] or 0.0)
