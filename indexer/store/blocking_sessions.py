"""Sessions of consumers whose open transactions prevent a segment of the change log from being truncated.

The functions of the public schema keep no lock on segments. A query of the view `atproto.changes` does, until the end
of its transaction.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import asyncpg

from indexer.store.columns import Connection

# Not superusers, and not the role of the daemon: a backup may take hours. The age is hidden (null) from a role without
# the privileges of pg_read_all_stats.
_SESSIONS = """
    select a.pid, a.usename::text as role, date_part('epoch', clock_timestamp() - a.xact_start) as seconds
    from pg_stat_activity a join pg_roles r on r.oid = a.usesysid
    where not r.rolsuper and r.rolname <> current_user
        and exists (
            select from pg_roles g
            where g.rolname in ('atproto_reader', 'atproto_operator') and pg_has_role(r.oid, g.oid, 'member')
        )
        and (a.xact_start is null or clock_timestamp() - a.xact_start >= make_interval(secs => $2))
        and a.pid in (
            select l.pid from pg_locks l cross join unnest($1::integer[]) as segment
            where l.granted and l.locktype = 'relation'
                and l.database = (select oid from pg_database where datname = current_database())
                and l.relation in (
                    format('indexer.change_%s', segment)::regclass, format('indexer.change_batch_%s', segment)::regclass
                )
        )
"""


@dataclass(frozen=True, slots=True)
class BlockingSession:
    """A session whose open transaction holds a lock on a segment.

    Attributes:
        role: The role that logged in.
        seconds: Age of the transaction; None if it is hidden from the daemon's role.
        ended: True if the session was ended; False if the daemon's role may not end it.
    """

    pid: int
    role: str
    seconds: float | None
    ended: bool


async def end_blocking_sessions(
    connection: Connection, segments: Sequence[int], min_seconds: float
) -> list[BlockingSession]:
    """End the sessions of consumers whose transactions lock one of the segments and are this old; return them."""
    return [
        BlockingSession(pid, role, seconds, seconds is not None and await _end(connection, pid))
        for pid, role, seconds in await connection.fetch(_SESSIONS, segments, min_seconds)
    ]


async def _end(connection: Connection, pid: int) -> bool:
    try:
        return await connection.fetchval("select pg_terminate_backend($1)", pid) is True
    except asyncpg.InsufficientPrivilegeError:
        return False
