"""Erase the records of deleted accounts when their grace period is over, and the records of untracked repos."""

import asyncio
from dataclasses import dataclass
from time import time

import structlog

from indexer.concurrency.stage_progress import StageProgress
from indexer.db import Database, DatabaseError
from indexer.db.periodic import DatabaseAttempt, run_periodically
from indexer.errors import UnavailableError
from indexer.net.identity.identity_cache import IdentityCache
from indexer.net.pds.pds_client import PdsClient
from indexer.sync.account import plan_erasure_later, plan_existence
from indexer.sync.identity import StoredIdentity
from indexer.sync.shard import Shard

CHECKS = 16
"""Accounts that are checked at a time before they are erased."""
RETRY_SECONDS = 3_600.0
"""Pause before an account is checked again whose directory or host gave no definite answer."""
SERVED_SECONDS = 86_400.0
"""Pause before an account is checked again that its host still serves."""
UNREACHABLE_SECONDS = 604_800.0
"""Time after the grace period from which an unreachable host no longer delays the erasure."""

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class AccountErasure:
    """Looks for accounts that are due every `interval` seconds, and erases them in batches of records.

    An account whose DID is gone from its directory is checked before: the directory and the account's host must both
    say that it does not exist.

    Attributes:
        stage: Its progress. A search for accounts is work; it moves with each checked account and each erased batch.
    """

    db: Database
    identities: IdentityCache
    pds: PdsClient
    deletion_grace: float
    shard: Shard
    interval: float = 60.0

    def __post_init__(self) -> None:
        self.stage = StageProgress("account erasure")
        self._accounts = self._records = self._postponed = 0

    async def run(self) -> None:
        """Erase accounts forever. Only an exception that is a bug ends it."""
        await run_periodically(self._erase_all_due, self.interval, self.stage)

    async def erase_batch(self, did: str | None = None) -> bool:
        """Erase one batch of records of one account, or of this one; return False if no account is due."""
        erased = await self.db.repos.erase_batch(self.shard.buckets, time(), did=did)
        if erased is None:
            return False
        self._records += erased.records
        if erased.finished:
            self._accounts += 1
            log.debug("repo.erased", did=erased.did)
        return True

    async def check_gone(self) -> None:
        """Check accounts that are due and whose DID is gone; begin to erase those that do not exist any more."""
        dids = await self.db.repos.due_gone(self.shard.buckets, CHECKS, time())
        async with asyncio.TaskGroup() as group:
            for did in dids:
                group.create_task(self._check_and_erase(did), name=f"erasure of {did}")

    async def _erase_all_due(self) -> None:
        await self.check_gone()
        while await self.erase_batch():
            self.stage.moved()
        if self._accounts or self._postponed:
            log.info("erasure.done", accounts=self._accounts, records=self._records, postponed=self._postponed)
        self._accounts = self._records = self._postponed = 0

    async def _check_and_erase(self, did: str) -> None:
        with DatabaseAttempt():
            if await self._confirm_gone(did):
                await self.erase_batch(did)
        self.stage.moved()

    async def _confirm_gone(self, did: str) -> bool:
        """Ask the directory and the host again; return True if both deny the account.

        Otherwise show the account again if the DID exists, or postpone its erasure.
        """
        try:
            answer = await self.identities.refresh(did)
        except DatabaseError:
            raise
        except UnavailableError as error:
            await self._postpone(did, RETRY_SECONDS, f"the directory: {error}")
            return False
        if answer is None or answer.doubtful or answer.stale:
            await self._postpone(did, RETRY_SECONDS, "the directory could not be asked")
            return False
        if not answer.gone:
            grace = self.deletion_grace
            await self.db.repos.update(did, lambda repo: plan_existence(repo, time(), grace, exists=True))
            return False
        stored = (await self.db.identities.load([did])).get(did)
        return stored is None or stored.pds is None or await self._host_denies(stored, stored.pds)

    async def _host_denies(self, identity: StoredIdentity, pds: str) -> bool:
        """Return True if the host denies the repo, or was unreachable for too long. Otherwise postpone the erasure."""
        try:
            await self.pds.fetch_latest_commit(identity.did, pds)
        except UnavailableError as error:
            # A permanent failure is a definite answer: the host does not have the repo, or does not publish it.
            grace_ended = (identity.denied_at or 0.0) + self.deletion_grace
            if error.reason.is_permanent or time() >= grace_ended + UNREACHABLE_SECONDS:
                return True
            await self._postpone(identity.did, RETRY_SECONDS, f"its host: {error}")
            return False
        await self._postpone(identity.did, SERVED_SECONDS, f"{pds} still serves it")
        return False

    async def _postpone(self, did: str, seconds: float, reason: str) -> None:
        log.debug("repo.erasure-postponed", did=did, reason=reason, seconds=seconds)
        self._postponed += 1
        await self.db.repos.update(did, lambda repo: plan_erasure_later(repo, time() + seconds))
