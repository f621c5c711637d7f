"""Reconciliation: compare a relay's repo list with the database, and request resyncs of repos that are behind.

The list can be ahead of the stream by the events that are on their way. So a repo that seems to be behind or unknown is
compared again after a while. The list is not signed, so it never changes a record; it only causes a resync. If the list
and the database differ about whether an account is active, `HostingStatusChecks` decides.

A reconciliation closes the gaps of its shard that were open when it began, if it ran to the end of the list of the
relay whose stream is open: what the list does not contain yet, that stream delivers.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from time import monotonic, time

import structlog

from indexer.atproto.syntax import tid_micros
from indexer.concurrency.stage_progress import StageProgress
from indexer.crash_points import crash_point
from indexer.db import Database
from indexer.db.crawls import CrawlProgress
from indexer.db.current_scope import CurrentScope
from indexer.db.open_gaps import OpenGaps
from indexer.db.periodic import DatabaseAttempt
from indexer.errors import UnavailableError
from indexer.net.http import OutboundClient
from indexer.net.identity import IdentityCache
from indexer.net.pds.repo_list import RepoListPage
from indexer.reasons import Desync
from indexer.sync.repo import StreamPoint, hides
from indexer.sync.scope import Track
from indexer.sync.shard import Shard
from indexer.tasks.hosting_status import UNLISTED, HostingStatusChecks, ListReport
from indexer.tasks.repo_list_pages import ListedAccounts, repo_list_pages
from indexer.telemetry.metrics import Metrics

MAX_PENDING_PAGES = 100
"""Pages that wait for their second comparison, each with at most a thousand repos."""
MAX_UNLISTED = 10_000
"""Accounts missing in the list whose hosting status one reconciliation asks for. The next one continues after them."""
_PAGE_SIZE = 5_000
MAX_RESUME_SECONDS = 86_400.0
"""An interrupted reconciliation that began longer ago starts again."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ReconciliationSettings:
    """Settings of the reconciliation; times are seconds.

    Attributes:
        shard: Only repos of this shard are compared.
        interval: Between two reconciliations; 0: only while a gap is open.
        settle: How long the stream may take to deliver events that the list already includes.
        poll: How often to look for a connected relay, an open gap and the end of the interval.
        first_retry: Pause after the first failure; it doubles with each one, up to `max_retry`. Failed
            requests for the hosting status of single accounts are repeated after the same pauses.
        max_pending_pages: Pages that wait for their second comparison.
        max_unlisted: Accounts that one reconciliation asks for because the list lacks them.
    """

    shard: Shard = Shard()  # noqa: RUF009 - immutable
    interval: float = 86_400.0
    settle: float = 30.0
    poll: float = 5.0
    first_retry: float = 5.0
    max_retry: float = 600.0
    max_pending_pages: int = MAX_PENDING_PAGES
    max_unlisted: int = MAX_UNLISTED


@dataclass(frozen=True, slots=True)
class _PendingPage:
    """A page that waits for its second comparison.

    Attributes:
        due_at: When to compare again (monotonic seconds).
        cursor: The cursor of the next page; None if this page is the last one.
        listed: The number of accounts on the page.
        revs: The listed revs of the repos that seemed to be behind, by DID.
        hidden: The DIDs of accounts that are listed as active, and hidden or withheld in the database.
        inactive: Why accounts are listed as inactive that are shown in the database or unknown, by DID.
        point: The last message of the relay's stream that was stored before the page was requested; None: not known.
        unknown: The DIDs of listed accounts that are not tracked, if the scope wants all repos.
        only_from_stream: The DIDs of listed accounts that only the stream has named so far.
    """

    due_at: float
    cursor: str | None
    listed: int
    revs: Mapping[str, str]
    hidden: Sequence[str]
    inactive: Mapping[str, str | None]
    point: StreamPoint | None
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

    def belongs_to(self, progress: CrawlProgress) -> bool:
        # The database rounds times to microseconds.
        return self.source == progress.source and abs(self.began_at - progress.began_at) < 0.001  # noqa: PLR2004


class Reconciliation:
    """Reconciles the database with a relay's repo list at each interval, and while a gap is open.

    Attributes:
        stage: Its progress. Each request for a page, and each comparison of a page, is work.
        crawl_progress: The progress of the last reconciliation of this process.
        last_error: Why the last reconciliation failed, with its source; None if it did not fail.
        waits_until: The end of the wait before a page is compared again (monotonic seconds); None if there is no wait.
    """

    def __init__(
        self,
        db: Database,
        outbound: OutboundClient,
        metrics: Metrics,
        gaps: OpenGaps,
        sources: Callable[[], Sequence[str]],
        stream_point: Callable[[str], StreamPoint | None],
        scope: CurrentScope,
        settings: ReconciliationSettings,
        identities: IdentityCache | None = None,
        *,
        sources_are_hosts: bool = False,
    ) -> None:
        """Create a reconciliation.

        Args:
            db: The database.
            outbound: The client for requests to the sources.
            metrics: Counts the repos that were found.
            gaps: The open gaps of the shard.
            sources: Returns the base URLs of the relays to ask: the one whose stream is open, then the others in the
                order of preference; none if no stream is open.
            stream_point: Returns the last stored message of a source's stream; None if that is not known or not open.
            scope: If the present scope wants all repos, listed accounts that are unknown are tracked.
            settings: The settings.
            identities: The identities of accounts, which name their hosts; None: no host is asked.
            sources_are_hosts: True if the sources are PDSes, False if they are relays.
        """
        self._db = db
        self._outbound = outbound
        self._metrics = metrics
        self._gaps = gaps
        self._sources = sources
        self._scope = scope
        self._settings = settings
        self._buckets = settings.shard.buckets
        self.stage = StageProgress("reconciliation")
        self._statuses = HostingStatusChecks(
            db,
            outbound,
            metrics,
            scope,
            self.stage,
            identities,
            stream_point,
            sources_are_hosts=sources_are_hosts,
            first_retry=settings.first_retry,
        )
        self._stream_point = stream_point
        self._requests = self.stage.add()
        self.crawl_progress: CrawlProgress | None = None
        self.last_error: str | None = None
        self.waits_until: float | None = None
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
                pause = self._settings.first_retry * 2.0 ** min(failures - 1, 16)
                await asyncio.sleep(min(pause, self._settings.max_retry))

    async def reconcile(
        self, source: str, on_page: Callable[[CrawlProgress], None], may_close_gaps: Callable[[], bool] = lambda: False
    ) -> CrawlProgress:
        """Compare the whole list, or the rest of it if a recent reconciliation was interrupted; return the progress.

        Args:
            source: The base URL of the relay.
            on_page: Called with the progress after each page.
            may_close_gaps: Called at the end of the list; returns True if the stream of this relay is open.

        Raises:
            UnavailableError: The relay or the database is unavailable. The progress so far is saved.
        """
        progress = await self._begin(source)
        pending: deque[_PendingPage] = deque()
        self.stage.idle()
        point = self._stream_point(source)
        async for page in repo_list_pages(self._outbound, source, "", progress.cursor, self._requests):
            self.stage.moved()
            pending.append(await self._compare(page, point, self._listed_so_far(progress)))
            while pending and (
                page.cursor is None
                or len(pending) > self._settings.max_pending_pages
                or pending[0].due_at <= monotonic()
            ):
                await self._wait_until(pending[0].due_at)
                progress = await self._compare_again(progress, pending.popleft(), may_close_gaps)
                on_page(progress)
            self.stage.idle()
            point = self._stream_point(source)
        return progress

    async def _wait_until_due(self) -> None:
        """Wait until a stream is open and, besides, a gap is open or the interval is over."""
        while True:
            with DatabaseAttempt(self.stage):
                sources = self._sources()
                if sources and (self._gaps.gaps or await self._seconds_until_due(sources) <= 0):
                    return
            await self._gaps.wait_until_opened(self._settings.poll)
            if not self._sources():
                await asyncio.sleep(self._settings.poll)

    async def _seconds_until_due(self, sources: Sequence[str]) -> float:
        """Return the time until the next reconciliation. The first one is due one interval after the first start."""
        if not self._settings.interval:
            return inf
        shard, now = str(self._settings.shard), time()
        rows = [await self._db.crawls.progress("sweep", source, shard=shard) for source in sources]
        if rows[0] is not None and rows[0].finished_at is None:
            return 0.0
        finished = [row.finished_at for row in rows if row is not None and row.finished_at is not None]
        finished = [at for at in finished if at <= now]  # later ones are from before the clock was set back
        if not finished:
            await self._db.crawls.save(CrawlProgress("sweep", sources[0], began_at=now, finished_at=now, shard=shard))
        return max(finished, default=now) + self._settings.interval - now

    async def _reconcile_with_first_available(self) -> bool:
        """Reconcile with the first source that answers; return True if it was the relay whose stream is open.

        Another source finds repos that are behind, but cannot close a gap. So it is asked only once for each gap, and
        once in each interval.
        """
        for source in self._sources():
            if not self._is_open(source) and self._was_compared(source):
                continue
            try:
                progress = await self.reconcile(source, self._save_progress, partial(self._is_open, source))
                await self._gaps.refresh()
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
        is_recent = monotonic() - compared_at < (self._settings.interval or inf)
        return is_recent and last_gap == self._gaps.newest

    def _is_open(self, source: str) -> bool:
        """Return True if the stream of this relay is open."""
        return list(self._sources()[:1]) == [source]

    async def _begin(self, source: str) -> CrawlProgress:
        """Return the progress of a recent reconciliation that was interrupted, else that of a new one.

        It is not continued if a gap was opened since it began, or if a gap is open and another process began it.
        """
        shard, now = str(self._settings.shard), time()
        last = await self._db.crawls.progress("sweep", source, shard=shard)
        if (
            last is not None
            and last.finished_at is None
            and now - last.began_at < MAX_RESUME_SECONDS
            and last.last_gap >= self._gaps.newest
            and (not self._gaps.newest or self._listed_so_far(last) is not None)
        ):
            return last
        progress = CrawlProgress("sweep", source, began_at=now, shard=shard, last_gap=self._gaps.newest)
        await self._db.crawls.save(progress)
        stored = sum((await self._db.reports.counts()).statuses.values())
        self._listed = _ListedSoFar(source, now, ListedAccounts(2 * stored), self._unlisted_after)
        return progress

    def _listed_so_far(self, progress: CrawlProgress) -> _ListedSoFar | None:
        """Return the accounts listed so far; None if another process read the first pages."""
        return self._listed if self._listed is not None and self._listed.belongs_to(progress) else None

    async def _wait_until(self, due_at: float) -> None:
        self.waits_until = due_at
        self.stage.idle()
        await asyncio.sleep(max(0.0, due_at - monotonic()))
        self.stage.moved()
        self.waits_until = None

    async def _compare(
        self, page: RepoListPage, point: StreamPoint | None, listed: _ListedSoFar | None
    ) -> _PendingPage:
        """Compare a page for the first time. If no repo seems to be behind or unknown, it is due again at once.

        A listed rev too far in the future is ignored. An account without a rev is not behind.
        """
        max_micros = (time() + self._scope.policy.limits.clock_drift_seconds) * 1_000_000
        shard = self._settings.shard
        revs = {
            account.did: account.rev or ""
            for account in page.accounts
            if (account.active or not hides(account.status))
            and (account.rev is None or tid_micros(account.rev) <= max_micros)
            and shard.owns(account.did)
        }
        behind, hidden, unknown, only_from_stream = await self._db.crawls.find_differences(revs)
        behind = [did for did in behind if revs[did]]
        inactive = await self._listed_as_inactive(page, unknown)
        if listed is not None:
            # Unknown accounts and those of other shards would fill the set.
            owned = {account.did for account in page.accounts if account.active and shard.owns(account.did)}
            for did in owned.union(inactive).difference(unknown):
                listed.accounts.add(did)
        unknown = unknown if self._scope.scope.track is Track.ALL else []
        due_at = monotonic() + (self._settings.settle if behind or unknown else 0.0)
        return _PendingPage(
            due_at=due_at,
            cursor=page.cursor,
            listed=len(page.accounts),
            revs={did: revs[did] for did in behind},
            hidden=[did for did in hidden if did not in inactive],
            inactive=inactive,
            point=point,
            unknown=unknown,
            only_from_stream=only_from_stream,
        )

    async def _listed_as_inactive(self, page: RepoListPage, unknown: Sequence[str]) -> dict[str, str | None]:
        """Return why accounts are listed as inactive, by DID: those that are shown here, and those that are added."""
        owns = self._settings.shard.owns
        inactive = {
            account.did: account.status for account in page.accounts if not account.active and owns(account.did)
        }
        repos = await self._db.repos.load(list(inactive)) if inactive else {}
        differ = {did for did, repo in repos.items() if repo.active}
        return {did: status for did, status in inactive.items() if did in differ or did in unknown}

    async def _compare_again(
        self, progress: CrawlProgress, page: _PendingPage, may_close_gaps: Callable[[], bool]
    ) -> CrawlProgress:
        """Desynchronize repos that are still behind, track unknown ones, show accounts, and save the progress."""
        behind = await self._db.crawls.desynchronize_behind(page.revs, time()) if page.revs else 0
        crash_point("reconciliation.compared")
        self._metrics.desynchronized[Desync.BEHIND].inc(behind)
        listed = ListReport(active=True, point=page.point)
        followed = sum([await self._statuses.follow(progress.source, did, listed) for did in page.hidden])
        known = [did for did in page.inactive if did not in page.unknown]
        followed += await self._follow_inactive(progress.source, page, known)
        if page.cursor is None:
            followed += await self._hide_unlisted(progress) + await self._statuses.repeat_failed(progress.source)
        after_page = progress.after_page(page.cursor, page.listed, behind + followed, time())
        scope, close_gaps = self._scope.scope, may_close_gaps()
        unknown = [*(page.unknown if scope.track is Track.ALL else ()), *page.only_from_stream]
        # If the scope changes meanwhile, the next reconciliation adds what it wants.
        stored = await self._db.crawls.add_listed(unknown, after_page, scope=scope, close_gaps=close_gaps)
        self._metrics.desynchronized[Desync.NEW].inc(stored.found - after_page.found)
        added = [did for did in page.inactive if did in page.unknown]
        await self._follow_inactive(progress.source, page, added)
        return stored

    async def _follow_inactive(self, source: str, page: _PendingPage, dids: Sequence[str]) -> int:
        """Follow the status of accounts that the page lists as inactive; return how many rows changed."""
        reports = {did: ListReport(active=False, status=page.inactive[did], point=page.point) for did in dids}
        return sum([await self._statuses.follow(source, did, report) for did, report in reports.items()])

    async def _hide_unlisted(self, progress: CrawlProgress) -> int:
        """Follow the status of accounts that the whole list did not contain; return how many rows changed."""
        listed, hidden, asked = self._listed_so_far(progress), 0, 0
        while listed is not None and (
            page := await self._db.crawls.active_repos(listed.asked_until, self._buckets, _PAGE_SIZE)
        ):
            for did in [did for did in page if did not in listed.accounts]:
                if asked >= self._settings.max_unlisted:
                    log.warning("reconciliation.many-unlisted", relay=progress.source, asked=asked)
                    self._unlisted_after = listed.asked_until
                    return hidden
                hidden += await self._statuses.follow(progress.source, did, UNLISTED)
                asked, listed.asked_until = asked + 1, did
            listed.asked_until = page[-1]
        self._unlisted_after = ""
        return hidden

    def _save_progress(self, progress: CrawlProgress) -> None:
        self.crawl_progress = progress
