"""Ask a relay for the hosting status of accounts, and show or hide an account if the relay confirms it.

A PDS confirms only what it hosts: it still knows accounts that have moved to another one.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from time import time

import structlog

from indexer.concurrency.stage_progress import Work
from indexer.errors import UnavailableError
from indexer.identity import IdentityCache
from indexer.monitoring.metrics import Metrics
from indexer.outbound import OutboundClient, host_of
from indexer.pds.repo_list import RepoStatus, fetch_repo_status
from indexer.reasons import Desync
from indexer.service.current_scope import CurrentScope
from indexer.store import Store
from indexer.sync.plan_account import plan_active, plan_hidden, plan_status_unknown
from indexer.sync.repo_state import Repo, StreamPoint

MAX_ATTEMPTS = 4
"""Requests for the status of one account in one reconciliation."""
MAX_FAILED = 10_000
"""Accounts whose requests failed, and that wait for the next attempt."""
_HOSTING = attrgetter("active", "hosting_status", "hosting_relay", "hosting_epoch", "hosting_seq")

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _FailedRequest:
    """The last failure for an account, which is to be shown if `active`, else to be hidden."""

    active: bool
    attempts: int
    error: UnavailableError


class HostingStatusChecks:
    """Follows the hosting status of accounts on the sources of reconciliations.

    A request that fails because of its account does not end the reconciliation: it is repeated at the end of the list.
    After `MAX_ATTEMPTS`, an account that is hidden stays so, and one that is shown is desynchronized: it may be
    deleted, and its own host knows.
    """

    def __init__(
        self,
        store: Store,
        outbound: OutboundClient,
        metrics: Metrics,
        scope: CurrentScope,
        stage: Work,
        identities: IdentityCache | None,
        stream_point: Callable[[str], StreamPoint | None],
        *,
        first_retry: float,
    ) -> None:
        """Create the checks.

        Args:
            store: The store.
            outbound: The client for requests to the sources.
            metrics: Counts the repos that are fetched again.
            scope: The policy says when the records of a deleted account are erased.
            stage: Each request is progress of it.
            identities: The identities of accounts if the sources are PDSes; None if they are relays.
            stream_point: Returns the last stored message of the source's stream; None if that is not known or not open.
                An answer that is requested afterwards is at least as new.
            first_retry: Seconds before the failed requests are repeated; it doubles each time.
        """
        self._store = store
        self._outbound = outbound
        self._metrics = metrics
        self._scope = scope
        self._stage = stage
        self._identities = identities
        self._stream_point = stream_point
        self._first_retry = first_retry
        self._failed: dict[str, dict[str, _FailedRequest]] = {}

    async def follow(self, source: str, did: str, *, active: bool) -> bool:
        """Show the account if `active`, else hide it, if the source confirms it; return True if the row changed.

        The row is read before the source is asked. If an event changes its hosting status meanwhile, the event may be
        newer than the report, which then does not count. Other changes of the row do not matter.

        Raises:
            UnavailableError: The source answers no requests at the moment, or the database is unavailable.
        """
        before = (await self._store.repos([did])).get(did)
        if before is None:
            self._failed.get(source, {}).pop(did, None)
            return False
        point = self._stream_point(source)
        status = await self._fetch_status(source, did, active=active)
        if status is None or status.active != active:
            return False

        def follow(repo: Repo) -> Repo:
            if _HOSTING(repo) != _HOSTING(before):
                return repo
            if active:
                return plan_active(repo, time(), point)
            return plan_hidden(repo, status.status, time(), self._scope.policy.deletion_grace, point)

        changed = await self._store.update_repo(did, follow) is not None
        self._metrics.desynchronized(Desync.REACTIVATED, int(active and changed))
        return changed

    async def repeat_failed(self, source: str) -> int:
        """Repeat the failed requests of this source; return how many rows changed.

        Raises:
            UnavailableError: The source answers no requests at the moment, or the database is unavailable. The next
                call continues.
        """
        failed, changed = self._failed.setdefault(source, {}), 0
        while left := {did: last for did, last in failed.items() if last.attempts < MAX_ATTEMPTS}:
            attempts = min(last.attempts for last in left.values())
            self._stage.idle()
            await asyncio.sleep(self._first_retry * 2.0 ** (attempts - 1))
            changed += sum([await self.follow(source, did, active=last.active) for did, last in left.items()])
        if failed:
            first = next(iter(failed.values()))
            log.warning("reconciliation.status-unknown", relay=source, accounts=len(failed), error=str(first.error))
            fetched_again = sum([await self._fetch_again(did) for did, last in failed.items() if not last.active])
            self._metrics.desynchronized(Desync.STATUS_UNKNOWN, fetched_again)
            changed += fetched_again
        del self._failed[source]
        return changed

    async def _fetch_again(self, did: str) -> bool:
        return await self._store.update_repo(did, lambda repo: plan_status_unknown(repo, time())) is not None

    async def _fetch_status(self, source: str, did: str, *, active: bool) -> RepoStatus | None:
        """Return the hosting status of an account; None if the source does not know or not host it, or if this failed.

        Raises:
            UnavailableError: The source answers no requests at the moment, or too many have failed.
        """
        failed = self._failed.setdefault(source, {})
        attempts = failed[did].attempts if did in failed else 0
        if attempts >= MAX_ATTEMPTS:
            return None
        self._stage.moved()
        try:
            status = await fetch_repo_status(self._outbound, source, did)
        except UnavailableError as error:
            if not error.reason.is_permanent:
                if not error.reason.counts_as_attempt or (did not in failed and len(failed) >= MAX_FAILED):
                    raise
                failed[did] = _FailedRequest(active, attempts + 1, error)
                return None
            status = None
        failed.pop(did, None)
        if status is None:
            return None
        return status if await self._may_report(source, did) else None

    async def _may_report(self, source: str, did: str) -> bool:
        """Return False if the source is a PDS that does not host the account, or if that is not certain now.

        The cache returns an older identity if its limits do not allow a lookup, or if the lookup fails. Then the next
        reconciliation asks again.
        """
        if self._identities is None:
            return True
        try:
            identity = await self._identities.lookup(did, refresh=True)  # a former PDS sends no `#identity`
        except UnavailableError:
            return False
        return identity.is_recent(time()) and identity.host == host_of(source)
