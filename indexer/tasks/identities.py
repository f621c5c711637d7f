"""Refresh identities that are known to have changed, and record which DIDs no longer exist or exist again."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from time import time

import structlog

from indexer.concurrency.stage_progress import StageProgress
from indexer.db import Database, DatabaseError
from indexer.db.periodic import DatabaseAttempt, run_periodically
from indexer.errors import UnavailableError
from indexer.net.http.host_limits import registered_domain
from indexer.net.http.http_client import host_of
from indexer.net.identity.did_resolver import METHODS, Method, web_host
from indexer.net.identity.identity_cache import IdentityCache
from indexer.sync.account import plan_existence
from indexer.sync.backoff import backoff_seconds
from indexer.sync.identity import DueIdentity
from indexer.sync.shard import Shard

BATCH_SIZE = 100
MAX_PER_HOST = 20
"""Identities of one host in a batch."""
WINDOW = 1_000
"""Due identities from which a batch is chosen: this number of the oldest, and as many of the newest."""
CONCURRENCY = 16
"""Concurrent lookups per DID method."""
LIMITED_SECONDS = 30.0
"""Pause of an identity that the limits of the identity cache did not allow to look up."""

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class IdentityRefresh:
    """Refreshes identities that are due, in batches with a pause of `interval` seconds between two of them.

    This also reaches accounts that send no commits, whose keys nothing else looks up. did:plc and did:web have batches
    of their own, because hosts of did:web can be slow on purpose.

    Attributes:
        stage: Its progress. Each batch is work; it moves with each identity.
    """

    db: Database
    identities: IdentityCache
    deletion_grace: float
    shard: Shard
    interval: float = 10.0

    def __post_init__(self) -> None:
        self.stage = StageProgress("identity refresh")
        self._batches = {method: self.stage.add() for method in METHODS}

    async def run(self) -> None:
        """Refresh identities forever. Only an exception that is a bug ends it."""
        async with asyncio.TaskGroup() as group:
            for method in METHODS:
                work = partial(self.refresh_batch, method)
                batches = run_periodically(work, self.interval, self._batches[method])
                group.create_task(batches, name=f"identity refresh of did:{method}")

    async def refresh(self, did: str, failures: int = 0) -> None:
        """Look up the identity and update the repo. After a failure, the identity is due again after a back-off.

        Args:
            did: The DID.
            failures: How often in a row that failed before.

        Raises:
            DatabaseError: The database is unavailable.
        """
        try:
            identity = await self.identities.refresh(did)
        except DatabaseError:
            raise
        except UnavailableError as error:
            failures += 1
            log.debug("identity.refresh-postponed", did=did, failures=failures, error=str(error))
            await self.db.identities.postpone_refresh(did, time() + backoff_seconds(failures, did), failures)
            return
        if identity is None:
            await self.db.identities.postpone_refresh(did, time() + LIMITED_SECONDS, failures)
        elif not (identity.stale or identity.doubtful):
            exists, grace = not identity.gone, self.deletion_grace
            await self.db.repos.update(did, lambda repo: plan_existence(repo, time(), grace, exists=exists))

    async def refresh_batch(self, method: Method) -> None:
        """Refresh identities of one DID method that are due, several at a time.

        Raises:
            DatabaseError: The database is unavailable.
        """
        due = await self.db.identities.due(self.shard.buckets, WINDOW, time(), web=method == "web")
        slots = asyncio.Semaphore(CONCURRENCY)

        async def refresh(identity: DueIdentity) -> None:
            async with slots:
                with DatabaseAttempt():
                    await self.refresh(identity.did, identity.failures)
                self._batches[method].moved()

        async with asyncio.TaskGroup() as group:
            for identity in fair_batch(due):
                group.create_task(refresh(identity), name=f"identity refresh of {identity.did}")


def fair_batch(due: Sequence[DueIdentity]) -> list[DueIdentity]:
    """Return at most `BATCH_SIZE` of the identities: the first one of each host, then the second one of each host, ….

    For a did:web, the host is its registered domain, because the owner of a domain can create any number of subdomains.
    """
    position, turns = Counter[str](), list[tuple[int, DueIdentity]]()
    for identity in due:
        host = _host(identity)
        if position[host] < MAX_PER_HOST:
            turns.append((position[host], identity))
        position[host] += 1
    turns.sort(key=lambda turn: turn[0])
    return [identity for _, identity in turns[:BATCH_SIZE]]


def _host(identity: DueIdentity) -> str:
    host = web_host(identity.did)
    return host_of(identity.pds or "") if host is None else registered_domain(host)
