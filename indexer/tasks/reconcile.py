"""Reconciliation: compare a relay's repo list with the database, and request resyncs of repos that are behind.

The list can be ahead of the stream by the events that are on their way. So a repo that seems to be behind or unknown is
compared again after a while. The list is not signed, so it never changes a record; it only causes a resync. If the list
and the database differ about whether an account is active, `HostingStatusChecks` decides.

A reconciliation closes the gaps of its shard that were open when it began, if it ran to the end of the list of the
relay whose stream is open: what the list does not contain yet, that stream delivers. The relays take turns.

The hosting status of an account follows from what a list says, what its relay answers, and what the account's host
says (docs/protocol.md#accounts). A PDS answers only for what it hosts: it still knows accounts that have moved.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
from indexer.net.pds.xrpc import ListedAccount, ListPage, RepoStatus, fetch_host_status, fetch_repo_status, is_silent
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
MAX_FAILURES = 3
"""Failures in a row after which another relay is asked from the beginning of its list."""
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


class StatusFailedError(UnavailableError):
    """A source failed to tell the status of one account."""


@dataclass(eq=False)
class HostingStatusChecks:
    """Follows the hosting status of accounts on the sources of reconciliations.

    An account that is shown, and about which the source says nothing, is desynchronized: it may be deleted, and its own
    host knows.

    Attributes:
        scope: The policy says when the records of a deleted account are erased.
        stage: Each request is progress of it.
        stream_point: Returns the last stored message of the source's stream; None if that is not known or not open.
            An answer that is requested afterwards is at least as new.
        sources_are_hosts: True if the sources are PDSes, False if they are relays.
    """

    db: Database
    outbound: OutboundClient
    metrics: Metrics
    scope: CurrentScope
    stage: Work
    identities: IdentityCache
    stream_point: Callable[[str], StreamPoint | None] = lambda _source: None
    sources_are_hosts: bool = False

    async def follow(self, source: str, did: str, listed: ListReport) -> bool:
        """Show, hide or withhold the account as the source and its host say; return True if the row changed.

        The row is read before the source is asked. If an event changes its hosting status meanwhile, the event may be
        newer than the report, which then does not count. Other changes of the row do not matter.

        Raises:
            StatusFailedError: The request failed because of the account.
            UnavailableError: The source answers no requests at the moment, or the database is unavailable.
        """
        before = (await self.db.repos.load([did])).get(did)
        if before is None:
            return False
        point = self.stream_point(source)
        answer = await self._fetch_status(source, did)
        plan = await self._weigh(before, listed, answer, point) if answer is not None else None
        if plan is None:
            return False
        return await self.change(before, plan)

    async def change(self, before: Repo, plan: Callable[[Repo], Repo]) -> bool:
        """Change the row by `plan`, unless its hosting status has changed since `before`; return True if it changed."""
        did = before.did
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

    async def mark_unknown(self, did: str) -> bool:
        """Desynchronize an account of which the source never tells the status; return True if the row changed."""
        changed = await self.db.repos.update(did, lambda repo: plan_status_unknown(repo, time())) is not None
        self.metrics.desynchronized[Desync.STATUS_UNKNOWN].inc(changed)
        return changed

    async def _fetch_status(self, source: str, did: str) -> RepoStatus | UnavailableError | None:
        """Return the hosting status of an account on the source; the error if the source says nothing about it.

        None if the source is a PDS that does not host the account. Raises the errors of `follow`.
        """
        self.stage.moved()
        answer: RepoStatus | UnavailableError
        try:
            answer = await fetch_repo_status(self.outbound, source, did)
        except UnavailableError as error:
            if error.reason.counts_as_attempt and not is_silent(error):
                raise StatusFailedError(error.reason, error.detail) from None
            if not is_silent(error):
                raise
            answer = error
        if not self.sources_are_hosts:
            return answer
        moved = isinstance(answer, UnavailableError) and answer.reason is FetchFailure.REPO_NOT_FOUND
        return answer if not moved and await self.is_host(source, did) else None

    async def is_host(self, source: str, did: str) -> bool:
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
        return status if status.active or await self.is_host(identity.pds, did) else None


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
class _Run:
    """One reconciliation, which continues here if it is interrupted.

    Attributes:
        listed: The accounts that the list contained so far.
        asked_until: The last DID whose absence from the list was checked.
        failed: The reports about accounts whose requests failed.
    """

    progress: CrawlProgress
    listed: ListedAccounts
    asked_until: str
    failed: dict[str, ListReport] = field(default_factory=dict)


@dataclass(eq=False)
class Reconciliation:
    """Reconciles the database with a relay's repo list at each interval, and while a gap is open.

    A request that fails because of one account does not end the reconciliation: it is repeated at the end of the list.
    If it fails again, an account that is hidden stays so, and one that is shown is desynchronized.

    Attributes:
        open_sources: Returns the base URLs of the relays whose streams are open.
        stream_point: Returns the last stored message of a source's stream; None if that is not known or not open.
        scope: If the present scope wants all repos, listed accounts that are unknown are tracked.
        sources_are_hosts: True if the sources are PDSes, False if they are relays.
        may_be_covered: Returns True while other streams may still cover the open gaps: no reconciliation is due yet.
        stage: Its progress. Each request for a page, and each comparison of a page, is work.
        last_error: Why the last reconciliation failed, with its source; None if it did not fail.
        waits_until: The end of the wait before a page is compared again (monotonic seconds); None if there is no wait.
    """

    db: Database
    outbound: OutboundClient
    metrics: Metrics
    gaps: OpenGaps
    open_sources: Callable[[], Sequence[str]]
    stream_point: Callable[[str], StreamPoint | None]
    scope: CurrentScope
    settings: ReconciliationSettings
    identities: IdentityCache
    sources_are_hosts: bool = False
    may_be_covered: Callable[[], bool] = lambda: False
    last_error: str | None = field(default=None, init=False)
    waits_until: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.stage = StageProgress("reconciliation")
        self._requests = self.stage.add()
        parts = self.db, self.outbound, self.metrics, self.scope, self.stage, self.identities
        self._statuses = HostingStatusChecks(*parts, self.stream_point, self.sources_are_hosts)
        self._run: _Run | None = None
        self._failures = 0  # in a row
        # The DID after which the next reconciliation asks for accounts that are missing in the list.
        self._unlisted_after = ""

    @property
    def crawl_progress(self) -> CrawlProgress | None:
        """The progress of the last reconciliation of this process."""
        return self._run.progress if self._run else None

    @property
    def progress(self) -> str | None:
        """The same for display."""
        if self.last_error is not None:
            return f"failed and will be retried: {self.last_error}"
        if (last := self.crawl_progress) is None:
            return None
        state = "running" if last.finished_at is None else "done"
        return f"{state}; accounts listed: {last.listed:,}, different: {last.found:,}"

    async def run(self) -> None:
        """Reconcile when it is due. Only an exception that is a bug ends it."""
        while True:
            source = await self._wait_until_due()
            with self.stage.busy():
                done = await self._reconcile_with(source)
            self._failures = 0 if done else self._failures + 1
            if self._failures:
                pause = self.settings.first_retry * 2.0 ** min(self._failures - 1, 16)
                await asyncio.sleep(min(pause, self.settings.max_retry))

    async def reconcile(self, source: str, on_page: Callable[[CrawlProgress], None] = lambda _: None) -> CrawlProgress:
        """Compare the whole list, or the rest of it if the last reconciliation was interrupted; return the progress.

        If the stream of this relay is open at the end of the list, gaps are closed. `on_page` is called with the
        progress after each page.

        Raises:
            UnavailableError: The relay or the database is unavailable. The progress so far is saved.
        """
        run = await self._begin(source)
        pending: deque[_PendingPage] = deque()
        self.stage.idle()
        point = self.stream_point(source)
        async for page in repo_list_pages(self.outbound, source, "", run.progress.cursor, self._requests):
            self.stage.moved()
            pending.append(await self._compare(page, point, run))
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
                run.progress = await self._compare_again(run, pending.popleft())
                on_page(run.progress)
            self.stage.idle()
            point = self.stream_point(source)
        return run.progress

    async def _wait_until_due(self) -> str:
        """Wait until a stream is open and, besides, a gap is open or the interval is over; return the relay to ask."""
        while True:
            with DatabaseAttempt(self.stage):
                sources = self.open_sources()
                if sources and ((self.gaps.gaps and not self.may_be_covered()) or await self._is_due(sources)):
                    return await self._next_source(sources)
            if self.gaps.gaps:
                await asyncio.sleep(self.settings.poll)
            else:
                await self.gaps.wait_until_opened(self.settings.poll)

    async def _is_due(self, sources: Sequence[str]) -> bool:
        """Return True if the interval is over. The first reconciliation is due one interval after the first start."""
        if not self.settings.interval:
            return False
        shard, now = str(self.settings.shard), time()
        ended: list[float | None] = []
        for source in sources:
            last = await self.db.crawls.progress("sweep", source, shard=shard)
            if last is None or (last.finished_at or 0.0) > now:  # a later time is from before the clock was set back
                last = CrawlProgress("sweep", source, began_at=now, finished_at=now, shard=shard)
                await self.db.crawls.save(last)
            ended.append(last.finished_at)
        finished = [one for one in ended if one is not None]
        return len(finished) < len(ended) or now - max(finished) >= self.settings.interval

    async def _next_source(self, sources: Sequence[str]) -> str:
        """Return the relay whose list was compared longest ago; that of an interrupted reconciliation if it continues.

        So the list of each relay is compared. A relay that fails again and again is left.
        """
        last, shard = self.crawl_progress, str(self.settings.shard)
        if last is not None and last.finished_at is None and last.source in sources and self._failures < MAX_FAILURES:
            return last.source
        begun = {source: await self.db.crawls.progress("sweep", source, shard=shard) for source in sources}
        return min(sources, key=lambda source: one.began_at if (one := begun[source]) else 0.0)

    async def _reconcile_with(self, source: str) -> bool:
        """Reconcile with a relay; return True if its stream is still open at the end."""
        try:
            progress = await self.reconcile(source)
            await self.gaps.refresh()
        except UnavailableError as error:
            self.last_error = f"{source}: {error}"
            log.warning("reconciliation.failed", relay=source, error=str(error))
            return False
        log.info("reconciliation.done", relay=source, listed=progress.listed, different=progress.found)
        self.last_error = None
        return source in self.open_sources()

    async def _begin(self, source: str) -> _Run:
        """Return the last reconciliation if it was interrupted recently and no gap was opened since, else a new one."""
        now, last = round(time(), 3), self._run  # the database stores only microseconds
        if (
            last is not None
            and last.progress.source == source
            and last.progress.finished_at is None
            and now - last.progress.began_at < MAX_RESUME_SECONDS
            and last.progress.last_gap >= self.gaps.newest
        ):
            return last
        shard = str(self.settings.shard)
        progress = CrawlProgress("sweep", source, began_at=now, shard=shard, last_gap=self.gaps.newest)
        await self.db.crawls.save(progress)
        stored = sum((await self.db.reports.counts()).statuses.values())
        self._run = _Run(progress, ListedAccounts(2 * stored), self._unlisted_after)
        return self._run

    async def _compare(self, page: ListPage[ListedAccount], point: StreamPoint | None, run: _Run) -> _PendingPage:
        """Compare a page for the first time. If no repo seems to be behind or unknown, it is due again at once.

        A listed rev too far in the future is ignored. An account without a rev is not behind.
        """
        max_micros = (time() + self.scope.policy.limits.clock_drift_seconds) * 1_000_000
        shard = self.settings.shard
        revs = {
            account.did: account.rev or ""
            for account in page.entries
            if (account.active or not hides(account.status))
            and (account.rev is None or tid_micros(account.rev) <= max_micros)
            and shard.owns(account.did)
        }
        behind, hidden, unknown, only_from_stream = await self.db.crawls.find_differences(revs)
        behind = [did for did in behind if revs[did]]
        # Of the inactive accounts, look at those that are shown here, and at those that are added.
        reported = {one.did: one.status for one in page.entries if not one.active and shard.owns(one.did)}
        repos = await self.db.repos.load(list(reported)) if reported else {}
        shown = {did for did, repo in repos.items() if repo.active}.union(unknown)
        inactive = {did: ListReport(False, status, point) for did, status in reported.items() if did in shown}
        # Unknown accounts and those of other shards would fill the set.
        owned = {account.did for account in page.entries if account.active and shard.owns(account.did)}
        for did in owned.union(inactive).difference(unknown):
            run.listed.add(did)
        unknown = unknown if self.scope.scope.track is Track.ALL else []
        due_at = monotonic() + (self.settings.settle if behind or unknown else 0.0)
        return _PendingPage(
            due_at=due_at,
            cursor=page.cursor,
            listed=len(page.entries),
            revs={did: revs[did] for did in behind},
            reports={did: ListReport(True, None, point) for did in hidden} | inactive,
            unknown=unknown,
            only_from_stream=only_from_stream,
        )

    async def _compare_again(self, run: _Run, page: _PendingPage) -> CrawlProgress:
        """Desynchronize repos that are still behind, track unknown ones, show accounts, and save the progress."""
        behind = await self.db.crawls.desynchronize_behind(page.revs, time()) if page.revs else 0
        crash_point("reconciliation.compared")
        self.metrics.desynchronized[Desync.BEHIND].inc(behind)
        added = {did: report for did, report in page.reports.items() if did in page.unknown}
        known = {did: report for did, report in page.reports.items() if did not in added}
        followed = sum([await self._follow(run, did, report) for did, report in known.items()])
        if page.cursor is None:
            followed += await self._hide_unlisted(run) + await self._repeat_failed(run)
        after_page = run.progress.after_page(page.cursor, page.listed, behind + followed, time())
        scope, close_gaps = self.scope.scope, run.progress.source in self.open_sources()
        unknown = [*(page.unknown if scope.track is Track.ALL else ()), *page.only_from_stream]
        # If the scope changes meanwhile, the next reconciliation adds what it wants.
        stored = await self.db.crawls.add_listed(unknown, after_page, scope=scope, close_gaps=close_gaps)
        self.metrics.desynchronized[Desync.NEW].inc(stored.found - after_page.found)
        for did, report in added.items():
            await self._follow(run, did, report)
        return stored

    async def _follow(self, run: _Run, did: str, listed: ListReport) -> bool:
        """Follow the status of an account, now or at the end of the list; return True if its row changed."""
        run.failed.pop(did, None)
        try:
            return await self._statuses.follow(run.progress.source, did, listed)
        except StatusFailedError:
            if len(run.failed) >= MAX_FAILED:
                raise
            run.failed[did] = listed
            return False

    async def _repeat_failed(self, run: _Run) -> int:
        """Repeat the failed requests; return how many rows changed. After an error, the next call continues."""
        changed, unknown, last = 0, 0, None
        if run.failed:
            self.stage.idle()
            await asyncio.sleep(self.settings.first_retry)
        for did, listed in list(run.failed.items()):
            try:
                changed += await self._statuses.follow(run.progress.source, did, listed)
            except StatusFailedError as error:
                unknown, last = unknown + 1, error
                changed += listed.active is not True and await self._statuses.mark_unknown(did)
            del run.failed[did]
        if unknown:
            log.warning("reconciliation.status-unknown", relay=run.progress.source, accounts=unknown, error=str(last))
        return changed

    async def _hide_unlisted(self, run: _Run) -> int:
        """Follow the status of accounts that the whole list did not contain; return how many rows changed."""
        hidden, asked, buckets = 0, 0, self.settings.shard.buckets
        while page := await self.db.crawls.active_repos(run.asked_until, buckets, _PAGE_SIZE):
            for did in [did for did in page if did not in run.listed]:
                if asked >= self.settings.max_unlisted:
                    log.warning("reconciliation.many-unlisted", relay=run.progress.source, asked=asked)
                    self._unlisted_after = run.asked_until
                    return hidden
                hidden += await self._follow(run, did, UNLISTED)
                asked, run.asked_until = asked + 1, did
            run.asked_until = page[-1]
        self._unlisted_after = ""
        return hidden
