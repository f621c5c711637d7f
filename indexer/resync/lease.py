"""Keep the lease of a claimed repo alive while an attempt runs, and end the attempt when the claim is lost."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from indexer.crash_points import crash_point
from indexer.db import Store
from indexer.db.periodic import DatabaseAttempt
from indexer.sync.repo import Repo

RENEWALS_PER_LEASE = 3

T = TypeVar("T")


class ClaimLostError(Exception):
    """Another worker holds the repo, or it needs no resync any more: change nothing."""


async def run_under_lease(store: Store, claimed: Repo, seconds: float, attempt: Coroutine[Any, Any, T]) -> T:
    """Run `attempt`, renewing the lease of `seconds` meanwhile; return its result or raise its exception.

    Raises:
        ClaimLostError: The lease could not be renewed. The attempt has been cancelled.
    """
    running = asyncio.create_task(attempt, name=f"resync attempt of {claimed.did}")
    heartbeat = asyncio.create_task(_renew(store, claimed, seconds), name=f"lease heartbeat of {claimed.did}")
    try:
        await asyncio.wait({running, heartbeat}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            heartbeat.result()
            raise ClaimLostError("the lease could not be renewed")
        return running.result()
    finally:
        running.cancel()
        heartbeat.cancel()
        await asyncio.gather(running, heartbeat, return_exceptions=True)


async def _renew(store: Store, claimed: Repo, seconds: float) -> None:
    """Renew the lease until the claim is lost."""
    held = True
    while held:
        await asyncio.sleep(seconds / RENEWALS_PER_LEASE)
        with DatabaseAttempt():
            held = await store.renew(claimed.did, claimed.lease, seconds)
            crash_point("lease.renewed")
