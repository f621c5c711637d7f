"""Reconciliation: compare a relay's repo list with the database, and request resyncs of repos that are behind.

The list can be ahead of the stream by the events that are on their way. So a repo that seems to be behind or unknown is
compared again after a while. The list is not signed, so it never changes a record; it only causes a resync. If the list
and the database differ about whether an account is active, `HostingStatusChecks` decides.

A reconciliation closes the gaps of its shard that were open when it began, if it ran to the end of the list of the
relay whose stream is open: what the list does not contain yet, that stream delivers.

The hosting status of an account follows from what a list says, what its relay answers, and what the account's host
says (docs/protocol.md#accounts). A PDS answers only for what it hosts: it still knows accounts that have moved.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter
from time import monotonic, time
from typing import NamedTuple

import structlog

from indexer.atproto.syntax import tid_micros
from indexer.concurrency.stage_progress import StageProgress, Work
from indexer.crash_points import crash_point
from indexer.db import Database
from indexer.db.crawls import CrawlProgress
from indexer.db.gaps import OpenGaps
from indexer.db.periodic import DatabaseAttempt
from indexer.db.scope import CurrentScope
from indexer.errors import UnavailableError
from indexer.net.http.http_client import OutboundClient, host_of
from indexer.net.identity.identity_cache import IdentityCache
from indexer.net.pds.repo_list import RepoListPage, RepoStatus, fetch_host_status, fetch_repo_status, is_silent
from indexer.reasons import Desync, FetchFailure
from indexer.sync.account import plan_active, plan_hidden, plan_status_unknown
from indexer.sync.repo import Repo, StreamPoint, SyncStatus, hides
from indexer.sync.scope import Track
from indexer.sync.shard import Shard
from indexer.tasks.repo_list_pages import ListedAccounts, repo_list_pages
from indexer.telemetry.metrics import Metrics

_PAGE_SIZE = 5_000
MAX_RESUME_SECONDS = 86_400.0
"""An interrupted reconciliation that began longer ago starts again."""
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
        identities: The identities of accounts, which name their hosts.
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
    identities: IdentityCache
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
        try:
            identity = await self.identities.lookup(did, refresh=True)  # a former PDS sends no `#identity`
        except UnavailableError:
            return False
        return identity.is_recent(time()) and identity.host == host_of(source)

    async def _ask_host(self, did: str) -> RepoStatus | None:
        """Return what the account's own host says about it; None if it cannot be asked, or says nothing.

        That the account is not active counts only if it is certain that it has not moved to another host.
        """
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


@dataclass(frozen=True, slots=True)
class ReconciliationSettings:
    """Settings of the reconciliation; times are seconds.

    Attributes:
        shard: Only repos of this shard are compared.
        interval: Between two reconciliations; 0: only while a gap is open.
        settle: How long the stream may take to deliver events that the list already includes.
        poll: How often to look for a connected relay, an open gap and the end of the interval.
        first_retry: Pause after the first failure; it doubles with each one, up to `max_retry`. Failed requests for
            the hosting status of single accounts are repeated once, after the same pause.
        max_pending_pages: Pages that wait for their second comparison, each with at most a thousand repos.
        max_unlisted: Accounts that one reconciliation asks for because the list lacks them. The next one continues
            after them.
    """

    shard: Shard = Shard()  # noqa: RUF009 - immutable
    interval: float = 86_400.0
    settle: float = 30.0
    poll: float = 5.0
    first_retry: float = 5.0
    max_retry: float = 600.0
    max_pending_pages: int = 100
    max_unlisted: int = 10_000


@dataclass(frozen=True, slots=True)
class _PendingPage:
    """A page that waits for its second comparison.

    Attributes:
        due_at: When to compare again (monotonic seconds).
        cursor: The cursor of the next page; None if this page is the last one.
        listed: The number of accounts on the page.
        revs: The listed revs of the repos that seemed to be behind, by DID.
        reports: What the list says, by DID, about accounts that are listed as active and hidden or withheld in the
            database, or listed as inactive and shown in the database or unknown.
        unknown: The DIDs of listed accounts that are not tracked, if the scope wants all repos.
        only_from_stream: The DIDs of listed accounts that only the stream has named so far.
    """

    due_at: float
    cursor: str | None
    listed: int
    revs: Mapping[str, str]
    reports: Mapping[str, ListReport]
    unknown: Sequence[str]
    only_from_stream: Sequence[str]


@dataclass(slots=True)
class _ListedSoFar:
    """The accounts that the list contained so far, in the reconciliation of `source` that began at this time.

    Attributes:
        asked_until: The last DID whose absence from the list was checked. After a failed request, the reconciliation
            continues after it.
    """

    source: str
    began_at: float
    accounts: ListedAccounts
    asked_until: str


@dataclass(eq=False)
class Reconciliation:
    """Reconciles the database with a relay's repo list at each interval, and while a gap is open.

    Attributes:
        gaps: The open gaps of the shard.
        sources: Returns the base URLs of the relays to ask: the one whose stream is open, then the others in the order
            of preference; none if no stream is open.
        stream_point: Returns the last stored message of a source's stream; None if that is not known or not open.
        scope: If the present scope wants all repos, listed accounts that are unknown are tracked.
        identities: The identities of accounts, which name their hosts.
        sources_are_hosts: True if the sources are PDSes, False if they are relays.
        stage: Its progress. Each request for a page, and each comparison of a page, is work.
        crawl_progress: The progress of the last reconciliation of this process.
        last_error: Why the last reconciliation failed, with its source; None if it did not fail.
        waits_until: The end of the wait before a page is compared again (monotonic seconds); None if there is no wait.
    """

    db: Database
    outbound: OutboundClient
    metrics: Metrics
    gaps: OpenGaps
    sources: Callable[[], Sequence[str]]
    stream_point: Callable[[str], StreamPoint | None]
    scope: CurrentScope
    settings: ReconciliationSettings
    identities: IdentityCache
    sources_are_hosts: bool = False
    crawl_progress: CrawlProgress | None = field(default=None, init=False)
    last_error: str | None = field(default=None, init=False)
    waits_until: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.stage = StageProgress("reconciliation")
        self._requests = self.stage.add()
        self._statuses = HostingStatusChecks(
            self.db,
            self.outbound,
            self.metrics,
            self.scope,
            self.stage,
            self.identities,
            self.stream_point,
            self.sources_are_hosts,
            self.settings.first_retry,
        )
        # By source: the newest gap when its last complete reconciliation began, and when it ended (monotonic seconds).
        self._compared: dict[str, tuple[int, float]] = {}
        self._listed: _ListedSoFar | None = None
        # The DID after which the next reconciliation asks for accounts that are missing in the list.
        self._unlisted_after = ""

    @property
    def progress(self) -> str | None:
        """The progress of the last reconciliation of this process, for display."""
        if self.last_error is not None:
            return f"failed and will be retried: {self.last_error}"
        if self.crawl_progress is None:
            return None
        state = "running" if self.crawl_progress.finished_at is None else "done"
        return f"{state}; accounts listed: {self.crawl_progress.listed:,}, different: {self.crawl_progress.found:,}"

    async def run(self) -> None:
        """Reconcile when it is due. Only an exception that is a bug ends it."""
        failures = 0
        while True:
            await self._wait_until_due()
            with self.stage.busy():
                failures = 0 if await self._reconcile_with_first_available() else failures + 1
            if failures:
                pause = self.settings.first_retry * 2.0 ** min(failures - 1, 16)
                await asyncio.sleep(min(pause, self.settings.max_retry))

    async def reconcile(self, source: str, on_page: Callable[[CrawlProgress], None] = lambda _: None) -> CrawlProgress:
        """Compare the whole list, or the rest of it if a recent reconciliation was interrupted; return the progress.

        If the stream of this relay is open at the end of the list, gaps are closed.

        Args:
            source: The base URL of the relay.
            on_page: Called with the progress after each page.

        Raises:
            UnavailableError: The relay or the database is unavailable. The progress so far is saved.
        """
        progress = await self._begin(source)
        pending: deque[_PendingPage] = deque()
        self.stage.idle()
        point = self.stream_point(source)
        async for page in repo_list_pages(self.outbound, source, "", progress.cursor, self._requests):
            self.stage.moved()
            pending.append(await self._compare(page, point, self._listed_so_far(progress)))
            while pending and (
                page.cursor is None
                or len(pending) > self.settings.max_pending_pages
                or pending[0].due_at <= monotonic()
            ):
                self.waits_until = pending[0].due_at
                self.stage.idle()
                await asyncio.sleep(max(0.0, self.waits_until - monotonic()))
                self.stage.moved()
                self.waits_until = None
                progress = await self._compare_again(progress, pending.popleft())
                self.crawl_progress = progress
                on_page(progress)
            self.stage.idle()
            point = self.stream_point(source)
        return progress

    async def _wait_until_due(self) -> None:
        """Wait until a stream is open and, besides, a gap is open or the interval is over."""
        while True:
            with DatabaseAttempt(self.stage):
                sources = self.sources()
                if sources and (self.gaps.gaps or await self._seconds_until_due(sources) <= 0):
                    return
            await self.gaps.wait_until_opened(self.settings.poll)
            if not self.sources():
                await asyncio.sleep(self.settings.poll)

    async def _seconds_until_due(self, sources: Sequence[str]) -> float:
        """Return the time until the next reconciliation. The first one is due one interval after the first start."""
        if not self.settings.interval:
            return inf
        shard, now = str(self.settings.shard), time()
        rows = [await self.db.crawls.progress("sweep", source, shard=shard) for source in sources]
        if rows[0] is not None and rows[0].finished_at is None:
            return 0.0
        finished = [row.finished_at for row in rows if row is not None and row.finished_at is not None]
        finished = [at for at in finished if at <= now]  # later ones are from before the clock was set back
        if not finished:
            await self.db.crawls.save(CrawlProgress("sweep", sources[0], began_at=now, finished_at=now, shard=shard))
        return max(finished, default=now) + self.settings.interval - now

    async def _reconcile_with_first_available(self) -> bool:
        """Reconcile with the first source that answers; return True if it was the relay whose stream is open.

        Another source finds repos that are behind, but cannot close a gap. So it is asked only once for each gap, and
        once in each interval.
        """
        for source in self.sources():
            if not self._is_open(source) and self._was_compared(source):
                continue
            try:
                progress = await self.reconcile(source)
                await self.gaps.refresh()
            except UnavailableError as error:
                self.last_error = f"{source}: {error}"
                log.warning("reconciliation.failed", relay=source, error=str(error))
                continue
            log.info("reconciliation.done", relay=source, listed=progress.listed, different=progress.found)
            self._compared[source] = progress.last_gap, monotonic()
            if self._is_open(source):
                self.last_error = None
                return True
            return False
        return False

    def _was_compared(self, source: str) -> bool:
        """Return True if this source was compared since the newest gap was opened and in the present interval."""
        last_gap, compared_at = self._compared.get(source, (-1, 0.0))
        is_recent = monotonic() - compared_at < (self.settings.interval or inf)
        return is_recent and last_gap == self.gaps.newest

    def _is_open(self, source: str) -> bool:
        """Return True if the stream of this relay is open."""
        return list(self.sources()[:1]) == [source]

    async def _begin(self, source: str) -> CrawlProgress:
        """Return the progress of a recent reconciliation that was interrupted, else that of a new one.

        It is not continued if a gap was opened since it began, or if a gap is open and another process began it.
        """
        shard, now = str(self.settings.shard), round(time(), 3)  # the database stores only microseconds
        last = await self.db.crawls.progress("sweep", source, shard=shard)
        if (
            last is not None
            and last.finished_at is None
            and now - last.began_at < MAX_RESUME_SECONDS
            and last.last_gap >= self.gaps.newest
            and (not self.gaps.newest or self._listed_so_far(last) is not None)
        ):
            return last
        progress = CrawlProgress("sweep", source, began_at=now, shard=shard, last_gap=self.gaps.newest)
        await self.db.crawls.save(progress)
        stored = sum((await self.db.reports.counts()).statuses.values())
        self._listed = _ListedSoFar(source, now, ListedAccounts(2 * stored), self._unlisted_after)
        return progress

    def _listed_so_far(self, progress: CrawlProgress) -> _ListedSoFar | None:
        """Return the accounts listed so far; None if another process read the first pages."""
        listed = self._listed
        is_same = listed is not None and (listed.source, listed.began_at) == (progress.source, progress.began_at)
        return listed if is_same else None

    async def _compare(
        self, page: RepoListPage, point: StreamPoint | None, listed: _ListedSoFar | None
    ) -> _PendingPage:
        """Compare a page for the first time. If no repo seems to be behind or unknown, it is due again at once.

        A listed rev too far in the future is ignored. An account without a rev is not behind.
        """
        max_micros = (time() + self.scope.policy.limits.clock_drift_seconds) * 1_000_000
        shard = self.settings.shard
        revs = {
            account.did: account.rev or ""
            for account in page.accounts
            if (account.active or not hides(account.status))
            and (account.rev is None or tid_micros(account.rev) <= max_micros)
            and shard.owns(account.did)
        }
        behind, hidden, unknown, only_from_stream = await self.db.crawls.find_differences(revs)
        behind = [did for did in behind if revs[did]]
        # Of the inactive accounts, look at those that are shown here, and at those that are added.
        reported = {one.did: one.status for one in page.accounts if not one.active and shard.owns(one.did)}
        repos = await self.db.repos.load(list(reported)) if reported else {}
        shown = {did for did, repo in repos.items() if repo.active}.union(unknown)
        inactive = {did: ListReport(False, status, point) for did, status in reported.items() if did in shown}
        if listed is not None:
            # Unknown accounts and those of other shards would fill the set.
            owned = {account.did for account in page.accounts if account.active and shard.owns(account.did)}
            for did in owned.union(inactive).difference(unknown):
                listed.accounts.add(did)
        unknown = unknown if self.scope.scope.track is Track.ALL else []
        due_at = monotonic() + (self.settings.settle if behind or unknown else 0.0)
        return _PendingPage(
            due_at=due_at,
            cursor=page.cursor,
            listed=len(page.accounts),
            revs={did: revs[did] for did in behind},
            reports={did: ListReport(True, None, point) for did in hidden} | inactive,
            unknown=unknown,
            only_from_stream=only_from_stream,
        )

    async def _compare_again(self, progress: CrawlProgress, page: _PendingPage) -> CrawlProgress:
        """Desynchronize repos that are still behind, track unknown ones, show accounts, and save the progress."""
        behind = await self.db.crawls.desynchronize_behind(page.revs, time()) if page.revs else 0
        crash_point("reconciliation.compared")
        self.metrics.desynchronized[Desync.BEHIND].inc(behind)
        added = {did: report for did, report in page.reports.items() if did in page.unknown}
        known = {did: report for did, report in page.reports.items() if did not in added}
        followed = await self._follow(progress.source, known)
        if page.cursor is None:
            followed += await self._hide_unlisted(progress) + await self._statuses.repeat_failed(progress.source)
        after_page = progress.after_page(page.cursor, page.listed, behind + followed, time())
        scope, close_gaps = self.scope.scope, self._is_open(progress.source)
        unknown = [*(page.unknown if scope.track is Track.ALL else ()), *page.only_from_stream]
        # If the scope changes meanwhile, the next reconciliation adds what it wants.
        stored = await self.db.crawls.add_listed(unknown, after_page, scope=scope, close_gaps=close_gaps)
        self.metrics.desynchronized[Desync.NEW].inc(stored.found - after_page.found)
        await self._follow(progress.source, added)
        return stored

    async def _follow(self, source: str, reports: Mapping[str, ListReport]) -> int:
        """Follow the status of listed accounts; return how many rows changed."""
        return sum([await self._statuses.follow(source, did, report) for did, report in reports.items()])

    async def _hide_unlisted(self, progress: CrawlProgress) -> int:
        """Follow the status of accounts that the whole list did not contain; return how many rows changed."""
        listed, hidden, asked = self._listed_so_far(progress), 0, 0
        while listed is not None and (
            page := await self.db.crawls.active_repos(listed.asked_until, self.settings.shard.buckets, _PAGE_SIZE)
        ):
            for did in [did for did in page if did not in listed.accounts]:
                if asked >= self.settings.max_unlisted:
                    log.warning("reconciliation.many-unlisted", relay=progress.source, asked=asked)
                    self._unlisted_after = listed.asked_until
                    return hidden
                hidden += await self._statuses.follow(progress.source, did, UNLISTED)
                asked, listed.asked_until = asked + 1, did
            listed.asked_until = page[-1]
        self._unlisted_after = ""
        return hidden
