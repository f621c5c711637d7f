"""Sessions whose open transactions hold what others need: locks, the queue of notifications, or dead rows.

Each batch updates the row of its cursor. The former version of the row cannot be removed while a snapshot is open that
may see it, and each batch reads all versions that are left. The same holds for the rows of repos.

The functions of the public schema keep no lock on segments of the change log. A query of the view `atproto.changes`
does, until the end of its transaction. A query of any view keeps the view and its tables from being replaced.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import asyncpg

from indexer.db.columns import Connection
from indexer.db.connections import Area

END_WHEN_STOPPED = "set local idle_in_transaction_session_timeout = '5s'"
"""A setting for transactions of this program that hold locks for which all its processes, or all consumers, wait.
Postgres ends the transaction if its process is stopped, for example with SIGSTOP. The other transactions of a daemon
end after a minute (`SERVER_SETTINGS`)."""

# Consumers are neither superusers nor the role of the daemon: a backup may take hours. Nor may they create roles: from
# Postgres 16 on, an administrator who is no superuser is a member of each role that they have created, without its
# privileges. The age is hidden (null) from a role without the privileges of pg_read_all_stats.
_SESSIONS = """
    select a.pid, a.usename::text as role, date_part('epoch', clock_timestamp() - a.xact_start) as seconds,
        coalesce(not r.rolsuper and not r.rolcreaterole and r.rolname <> current_user, false)
            and coalesce(a.datname = current_database(), false) and exists (
                select from pg_roles g
                where g.rolname in ('atproto_reader', 'atproto_operator') and pg_has_role(r.oid, g.oid, 'member')
            ) as is_consumer
    from pg_stat_activity a left join pg_roles r on r.oid = a.usesysid
    where a.pid <> pg_backend_pid() and {condition}
    order by a.xact_start
"""
_USING_SEGMENTS = _SESSIONS.format(
    condition="""
    a.pid in (
        select l.pid from pg_locks l
        where l.granted and l.locktype = 'relation'
            and l.database = (select oid from pg_database where datname = current_database())
            and l.relation in (
                select format('indexer.%s_%s', name, segment)::regclass::oid
                from unnest($1::integer[]) segment cross join unnest(array['change', 'change_batch']) name
            )
    )
"""
)
_BLOCKING = _SESSIONS.format(condition="a.pid = any(pg_blocking_pids($1))")
_WITH_TRANSACTIONS = _SESSIONS.format(condition="a.backend_type = 'client backend' and a.xact_start is not null")
# The sessions of other databases keep no rows of this one, and a replication slot without a database keeps all.
_OLD_SNAPSHOTS = _SESSIONS.format(
    condition="""
    (a.backend_type = 'client backend' and a.datname = current_database() or a.backend_type = 'walsender')
    and greatest(age(a.backend_xid), age(a.backend_xmin)) >= $1
"""
)
_OTHER_OLD_SNAPSHOTS = """
    select 'prepared transaction ' || gid from pg_prepared_xacts
    where database = current_database() and age(transaction) >= $1
    union all
    select 'replication slot ' || slot_name from pg_replication_slots where age(xmin) >= $1
"""


@dataclass(frozen=True, slots=True)
class BlockingSession:
    """A session whose open transaction holds what others need.

    Attributes:
        role: The role that logged in; None for a process of Postgres, such as a VACUUM that prevents wraparound.
        seconds: Age of the transaction; None if it is hidden from the daemon's role.
        is_consumer: Its role is a member of a role of the public schema, and is neither that of the daemon nor an
            administrator's.
        ended: True if the session was ended; False if it is not old enough, or the daemon's role may not end it.
    """

    pid: int
    role: str | None
    seconds: float | None
    is_consumer: bool
    ended: bool = False

    def is_old(self, min_seconds: float) -> bool:
        """Return True unless its transaction is known to be younger."""
        return self.seconds is None or self.seconds >= min_seconds

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of a line of the log."""
        return {"role": self.role, "pid": self.pid, "seconds": self.seconds and round(self.seconds)}


@dataclass(frozen=True, slots=True)
class OldSnapshots:
    """The holders of old snapshots, which keep dead rows.

    Attributes:
        dead_cursors: Versions of cursors that nothing has removed yet.
        sessions: The sessions with old snapshots, the oldest transaction first; empty if few versions are left.
        others: The other holders, each as text: prepared transactions and replication slots.
    """

    dead_cursors: int
    sessions: Sequence[BlockingSession] = ()
    others: Sequence[str] = ()


class BlockingSessions(Area):
    """Sessions that hold what others need."""

    async def end_users_of_segments(self, segments: Sequence[int], min_seconds: float) -> list[BlockingSession]:
        """End the sessions of consumers whose transactions lock one of the segments and are this old; return them."""
        async with self._pool.connection() as connection:
            sessions = [BlockingSession(*row) for row in await connection.fetch(_USING_SEGMENTS, segments)]
            old = [session for session in sessions if session.is_consumer and session.is_old(min_seconds)]
            return await _end(connection, old, min_seconds)

    async def end_oldest_transaction(self, min_seconds: float) -> list[BlockingSession]:
        """Return the sessions with the oldest transactions: of the consumers of this database, and of all others.

        The session of the consumer is ended if its transaction is this old. A session that listens reads no
        notification during its transaction, and the queue keeps what it has not read. Which sessions listen is not
        visible to others.
        """
        async with self._pool.connection() as connection:
            sessions = [BlockingSession(*row) for row in await connection.fetch(_WITH_TRANSACTIONS)]
            oldest = {session.is_consumer: session for session in reversed(sessions)}
            return await _end(connection, list(oldest.values()), min_seconds)

    async def end_old_snapshots(self, max_dead_cursors: int, min_seconds: float) -> OldSnapshots:
        """Return the old snapshots if so many dead cursors are left; end sessions of consumers that are this old."""
        async with self._pool.connection() as connection:
            dead_cursors = await connection.fetchval("select pg_stat_get_dead_tuples('indexer.cursor'::regclass)")
            if dead_cursors < max_dead_cursors:
                return OldSnapshots(dead_cursors)
            # Each dead cursor has been written by a transaction of its own.
            sessions = [BlockingSession(*row) for row in await connection.fetch(_OLD_SNAPSHOTS, max_dead_cursors)]
            others = [name for (name,) in await connection.fetch(_OTHER_OLD_SNAPSHOTS, max_dead_cursors)]
            return OldSnapshots(dead_cursors, await _end(connection, sessions, min_seconds), others)


async def end_blocking(connection: Connection, pid: int, min_seconds: float) -> list[BlockingSession]:
    """Return the sessions for whose locks the session `pid` waits.

    End those of consumers whose transactions are this old, unless an old session of another role is among them: that
    would help nobody.
    """
    sessions = [BlockingSession(*row) for row in await connection.fetch(_BLOCKING, pid)]
    old = [session for session in sessions if session.is_old(min_seconds)]
    return await _end(connection, sessions, min_seconds if all(session.is_consumer for session in old) else inf)


async def _end(
    connection: Connection, sessions: Sequence[BlockingSession], min_seconds: float
) -> list[BlockingSession]:
    """End the sessions of consumers whose transactions are this old; return all sessions."""
    return [
        replace(session, ended=session.is_consumer and await _terminate(connection, session.pid))
        if session.seconds is not None and session.seconds >= min_seconds
        else session
        for session in sessions
    ]


async def _terminate(connection: Connection, pid: int) -> bool:
    try:
        return await connection.fetchval("select pg_terminate_backend($1)", pid) is True
    except asyncpg.InsufficientPrivilegeError:
        return False
