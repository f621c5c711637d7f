"""Refresh identities that are known to have changed, and record which DIDs no longer exist or exist again."""

from time import time

import structlog

from indexer.errors import UnavailableError
from indexer.identity import IdentityCache
from indexer.service.periodic import run_periodically
from indexer.store import DatabaseError, Store
from indexer.sync.plan_event import plan_existence
from indexer.sync.policy import Policy
from indexer.sync.shard import Shard

BATCH_SIZE = 100

log = structlog.get_logger(__name__)


class IdentityRefresh:
    """Refreshes stale identities every `interval` seconds, one at a time and within the budget of the identity cache.

    This also reaches accounts that send no commits, whose keys nothing else looks up.
    """

    def __init__(
        self, store: Store, identities: IdentityCache, policy: Policy, shard: Shard, *, interval: float = 10.0
    ) -> None:
        self._store = store
        self._identities = identities
        self._policy = policy
        self._shard = shard
        self._interval = interval

    async def run(self) -> None:
        """Refresh identities forever. Only an exception that is a bug ends it."""
        await run_periodically(self._refresh_batch, self._interval)

    async def refresh(self, did: str) -> None:
        """Look up the identity and update the repo; if the lookup fails, the next batch tries again.

        Raises:
            DatabaseError: The database is unavailable.
        """
        try:
            identity = await self._identities.lookup(did)
        except DatabaseError:
            raise
        except UnavailableError as error:
            log.info("identity.refresh-postponed", did=did, error=str(error))
            return
        if identity.stale:
            return
        exists = not identity.gone
        await self._store.update_repo(did, lambda repo: plan_existence(repo, time(), self._policy, exists=exists))

    async def _refresh_batch(self) -> None:
        for did in await self._store.stale_identities(self._shard.buckets, BATCH_SIZE):
            await self.refresh(did)
