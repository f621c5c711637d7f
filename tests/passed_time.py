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


async def expire_waits(dsn: str) -> None:
    """Execute `EXPIRE_WAITS` again and again, until cancelled."""
    connection = await asyncpg.connect(dsn)
    try:
        while True:
            with suppress(asyncpg.DeadlockDetectedError):  # on a cluster, it locks rows of several nodes
                await connection.execute(EXPIRE_WAITS)
            await asyncio.sleep(0.1)
    finally:
        connection.terminate()
