"""Looks up again who is known to have changed, commit or no commit, and notes whose DID is gone, or back."""

import asyncio
from time import time

import structlog

from indexer.errors import UnavailableError
from indexer.identity import Identities
from indexer.store import DatabaseError, Store
from indexer.sync.planning import Policy, plan_existence
from indexer.sync.shard import Shard

AT_ONCE = 100

log = structlog.get_logger(__name__)


class Renewal:
    """One look every `pause` seconds; one look-up after the other, within the budget of those that nobody waits for."""

    def __init__(
        self, store: Store, identities: Identities, policy: Policy, shard: Shard, *, pause: float = 10.0
    ) -> None:
        self._store = store
        self._identities = identities
        self._policy = policy
        self._shard = shard
        self._pause = pause

    async def run(self) -> None:
        while True:
            try:
                for did in await self._store.stale_identities(self._shard.buckets, AT_ONCE):
                    await self.renew(did)
            except DatabaseError as error:
                log.warning("database.unavailable", error=str(error))
            await asyncio.sleep(self._pause)

    async def renew(self, did: str) -> None:
        """Raises `DatabaseError`."""
        try:
            known = await self._identities.lookup(did)
        except DatabaseError:
            raise
        except UnavailableError as error:
            log.info("identity.not-renewed", did=did, error=str(error))
            return
        if not known.stale:
            await self._store.amend(did, lambda repo: plan_existence(repo, time(), self._policy, exists=not known.gone))
