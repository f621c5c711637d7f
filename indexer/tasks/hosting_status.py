"""Follow the hosting status of accounts: what a list says, what its relay answers, and what the account's host says.

docs/protocol.md#accounts has the rule. A PDS answers only for what it hosts: it still knows accounts that have moved to
another one.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from time import time
from typing import NamedTuple

import structlog

from indexer.concurrency.stage_progress import Work
from indexer.db import Database
from indexer.db.current_scope import CurrentScope
from indexer.errors import UnavailableError
from indexer.net.http import OutboundClient, host_of
from indexer.net.identity import IdentityCache
from indexer.net.pds.repo_list import RepoStatus, fetch_host_status, fetch_repo_status, is_silent
from indexer.reasons import Desync, FetchFailure
from indexer.sync.account import plan_active, plan_hidden, plan_status_unknown
from indexer.sync.repo import Repo, StreamPoint, SyncStatus, hides
from indexer.telemetry.metrics import Metrics

MAX_FAILED = 10_000
"""Accounts whose requests failed, and that wait for the second attempt."""
_HOSTING = attrgetter("active", "hosting_status", "hosting_relay", "hosting_epoch", "hosting_seq")

log = structlog.get_logger(__name__)


class ListReport(NamedTuple):
    """The entry of an account in a repo list.

    Attributes:
        active: None if the list does not contain the account.
        status: Why it is not active.
        point: The last message of the source's stream that was stored before the page was requested; None: not known.
    """

    active: bool | None = None
    status: str | None = None
    point: StreamPoint | None = None


UNLISTED = ListReport()


@dataclass(eq=False)
class HostingStatusChecks:
    """Follows the hosting status of accounts on the sources of reconciliations.

    A request that fails because of its account does not end the reconciliation: it is repeated at the end of the list.
    If it fails again, an account that is hidden stays so, and one that is shown is desynchronized: it may be deleted,
    and its own host knows. So is one that is shown if the source says nothing about it.

    Attributes:
        scope: The policy says when the records of a deleted account are erased.
        stage: Each request is progress of it.
        identities: The identities of accounts, which name their hosts; None: no host is asked.
        stream_point: Returns the last stored message of the source's stream; None if that is not known or not open.
            An answer that is requested afterwards is at least as new.
        sources_are_hosts: True if the sources are PDSes, False if they are relays.
        first_retry: Seconds before the failed requests are repeated.
    """

    db: Database
    outbound: OutboundClient
    metrics: Metrics
    scope: CurrentScope
    stage: Work
    identities: IdentityCache | None
    stream_point: Callable[[str], StreamPoint | None]
    sources_are_hosts: bool
    first_retry: float
    _failed: dict[str, dict[str, tuple[ListReport, UnavailableError]]] = field(default_factory=dict, init=False)

    async def follow(self, source: str, did: str, listed: ListReport) -> bool:
        """Show, hide or withhold the account as the source and its host say; return True if the row changed.

        The row is read before the source is asked. If an event changes its hosting status meanwhile, the event may be
        newer than the report, which then does not count. Other changes of the row do not matter.

        Raises:
            UnavailableError: The source answers no requests at the moment, or the database is unavailable.
        """
        before = (await self.db.repos.load([did])).get(did)
        if before is None:
            self._failed.get(source, {}).pop(did, None)
            return False
        point = self.stream_point(source)
        answer = await self._fetch_status(source, did, listed)
        plan = await self._weigh(before, listed, answer, point) if answer is not None else None
        if plan is None:
            return False
        after = await self.db.repos.update(did, lambda repo: plan(repo) if _HOSTING(repo) == _HOSTING(before) else repo)
        if after is None:
            return False
        if after.active and after.sync_reason is not None and before.sync_status is not SyncStatus.DESYNCHRONIZED:
            self.metrics.desynchronized[after.sync_reason].inc()
        return True

    async def _weigh(
        self, before: Repo, listed: ListReport, answer: RepoStatus | UnavailableError, point: StreamPoint | None
    ) -> Callable[[Repo], Repo] | None:
        """Return how the row changes; None if it stays as it is.

        Args:
            before: The row before the source was asked.
            listed: What the list says. It is the report of a source that says nothing when it is asked.
            answer: The answer of the source; an error if it says nothing about the account.
            point: The answer is as new as this point of the source's stream.
        """
        is_silent_source = isinstance(answer, UnavailableError)
        is_shown = before.active and before.withheld_since is None
        if isinstance(answer, UnavailableError):
            if listed.active is None and before.active:
                return lambda repo: plan_status_unknown(repo, time())
            if _is_newer(before, listed.point):
                return None
            answer, point = RepoStatus(listed.active is not False, listed.status), listed.point
        if is_shown and answer.active:
            return None
        if not before.active and answer.active and not self.sources_are_hosts:
            host = await self._ask_host(before.did)
            if host is None and is_silent_source:
                return None
            if host is not None and not host.active and hides(host.status):
                answer = host
        if answer.active:
            return lambda repo: plan_active(repo, time(), point)
        return lambda repo: plan_hidden(repo, answer.status, time(), self.scope.policy.deletion_grace, point)

    async def repeat_failed(self, source: str) -> int:
        """Repeat the failed requests of this source; return how many rows changed.

        Raises:
            UnavailableError: The source answers no requests at the moment, or the database is unavailable. The next
                call continues.
        """
        failed, changed, unknown, last = self._failed.setdefault(source, {}), 0, 0, None
        if failed:
            self.stage.idle()
            await asyncio.sleep(self.first_retry)
        for did, (listed, _) in list(failed.items()):
            changed += await self.follow(source, did, listed)
            if did not in failed:
                continue
            _, last = failed.pop(did)
            unknown += 1
            if listed.active is not True and await self.db.repos.update(
                did, lambda repo: plan_status_unknown(repo, time())
            ):
                self.metrics.desynchronized[Desync.STATUS_UNKNOWN].inc()
                changed += 1
        if unknown:
            log.warning("reconciliation.status-unknown", relay=source, accounts=unknown, error=str(last))
        return changed

    async def _fetch_status(self, source: str, did: str, listed: ListReport) -> RepoStatus | UnavailableError | None:
        """Return the hosting status of an account on the source; the error if the source says nothing about it.

        None if the request failed, or if the source is a PDS that does not host the account.

        Raises:
            UnavailableError: The source answers no requests at the moment, or too many have failed.
        """
        failed = self._failed.setdefault(source, {})
        self.stage.moved()
        answer: RepoStatus | UnavailableError
        try:
            answer = await fetch_repo_status(self.outbound, source, did)
        except UnavailableError as error:
            if not is_silent(error):
                if not error.reason.counts_as_attempt or (did not in failed and len(failed) >= MAX_FAILED):
                    raise
                failed[did] = listed, error
                return None
            answer = error
        failed.pop(did, None)
        if not self.sources_are_hosts:
            return answer
        moved = isinstance(answer, UnavailableError) and answer.reason is FetchFailure.REPO_NOT_FOUND
        return answer if not moved and await self._is_host(source, did) else None

    async def _is_host(self, source: str, did: str) -> bool:
        """Return False if the PDS does not host the account, or if that is not certain now.

        The cache returns an older identity if its limits do not allow a lookup, or if the lookup fails. Then the next
        reconciliation asks again.
        """
        if self.identities is None:
            return True
        try:
            identity = await self.identities.lookup(did, refresh=True)  # a former PDS sends no `#identity`
        except UnavailableError:
            return False
        return identity.is_recent(time()) and identity.host == host_of(source)

    async def _ask_host(self, did: str) -> RepoStatus | None:
        """Return what the account's own host says about it; None if it cannot be asked, or says nothing.

        That the account is not active counts only if it is certain that it has not moved to another host.
        """
        if self.identities is None:
            return None
        try:
            identity = await self.identities.lookup(did)
            if identity.pds is None:
                return None
            status = await fetch_host_status(self.outbound, identity.pds, did)
        except UnavailableError:
            return None
        return status if status.active or await self._is_host(identity.pds, did) else None


def _is_newer(repo: Repo, point: StreamPoint | None) -> bool:
    """Return True if the last report about the account is newer than `point` of the same stream."""
    if point is None:
        return False
    same = (repo.hosting_relay, repo.hosting_epoch) == (point.relay, point.epoch)
    return same and repo.hosting_seq > point.seq
