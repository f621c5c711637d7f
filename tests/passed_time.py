"""Change the database as if time passed."""

import asyncio
from contextlib import suppress

import asyncpg

EXPIRE_LEASES = "update indexer.repo set lease_until = 'epoch' where sync_status = 'in-progress'"
"""The leases of killed daemons expire."""
EXPIRE_WAITS = """
    update indexer.repo set next_attempt_at = null
    where sync_status = 'desynchronized' and next_attempt_at > now() and next_attempt_at < now() + interval '2 hours'
"""
"""Postponed attempts are due. A longer wait is one that the daemon must end by itself."""
EXPIRE_REFRESHES = """
    update indexer.identity set refresh_at = now()
    where refresh_failures > 0 and refresh_at > now() and refresh_at < now() + interval '2 hours'
"""
"""Refreshes of identities that failed are due."""


async def expire_waits(dsn: str, interval: float = 0.1, settings: dict[str, str] | None = None) -> None:
    """End the waits of repos and identities again and again, until cancelled. `settings` are those of its session."""
    connection = await asyncpg.connect(dsn, server_settings=settings or {})
    try:
        while True:
            with suppress(asyncpg.DeadlockDetectedError):  # on a cluster, it locks rows of several nodes
                await connection.execute(EXPIRE_WAITS)
                await connection.execute(EXPIRE_REFRESHES)
            await asyncio.sleep(interval)
    finally:
        connection.terminate()
