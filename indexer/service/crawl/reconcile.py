"""Reconciliation: compare a relay's repo list with the database, and request resyncs of repos that are behind.

The list can be ahead of the stream by the events that are on their way. So a repo that seems to be behind is compared
again after a while. The list is not signed, so it never changes a record; it only causes a resync. An account that is
listed but hidden in the database is shown again if the relay confirms that it is active.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic, time

import structlog

from indexer.atproto.syntax import tid_micros
from indexer.errors import UnavailableError
from indexer.monitoring.metrics import Metrics
from indexer.outbound import OutboundClient
from indexer.pds.repo_list import RepoListPage, fetch_repo_status
from indexer.reasons import Desync
from indexer.service.crawl.repo_list_pages import repo_list_pages
from indexer.store import Store
from indexer.sync.crawl_progress import CrawlProgress
from indexer.sync.plan_event import plan_active
from indexer.sync.plans import Batch, RepoWrite

MAX_PENDING_PAGES = 100
"""Pages that wait for their second comparison, each with at most a thousand repos."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ReconciliationIntervals:
    """Times in seconds.

    Attributes:
        settle: How long the stream may take to deliver events that the list already includes.
        retry: Pause after a failed reconciliation.
    """

    settle: float = 30.0
    retry: float = 600.0


@dataclass(frozen=True, slots=True)
class _PendingPage:
    """A page that waits for its second comparison.

    Attributes:
        due_at: When to compare again (monotonic seconds).
        cursor: The cursor of the next page; None if this page is the last one.
        listed: The number of accounts on the page.
        revs: The listed revs of the repos that seemed to be behind, by DID.
        hidden: The DIDs of listed accounts that are hidden in the database.
    """

    due_at: float
    cursor: str | None
    listed: int
    revs: Mapping[str, str]
    hidden: Sequence[str]


class Reconciliation:
    """Reconciles the database with the repo list of `source` every `interval` seconds, and on request.

    A listed rev further in the future than `drift` seconds is ignored, because clocks do not differ by more.

    Attributes:
        crawl_progress: The progress of the last reconciliation of this process.
        waits_until: The end of the wait before a page is compared again (monotonic seconds); None if there is no wait.
    """

    def __init__(
        self,
        store: Store,
        outbound: OutboundClient,
        metrics: Metrics,
        source: str,
        *,
        interval: float,
        drift: float,
        intervals: ReconciliationIntervals | None = None,
    ) -> None:
        self._store = store
        self._outbound = outbound
        self._metrics = metrics
        self._source = source
        self._interval = interval
        self._drift = drift
        self._intervals = intervals or ReconciliationIntervals()
        self._requested = asyncio.Event()
        self.crawl_progress: CrawlProgress | None = None
        self.waits_until: float | None = None

    def request(self) -> None:
        """Start a complete reconciliation now: the stream has lost events, and the affected repos are unknown."""
        self._requested.set()

    @property
    def progress(self) -> str | None:
        """The progress of the last reconciliation of this process, for display."""
        if self.crawl_progress is None:
            return None
        state = "running" if self.crawl_progress.finished_at is None else "done"
        return f"{state}: {self.crawl_progress.listed:,} accounts listed, {self.crawl_progress.found:,} differ"

    async def run(self) -> None:
        """Reconcile at each interval and on request. Only an exception that is a bug ends it."""
        while True:
            try:
                await self._wait_for_request(await self._seconds_until_due())
                progress = await self.reconcile(self._save_progress)
                log.info("reconciliation.done", relay=self._source, listed=progress.listed, different=progress.found)
            except UnavailableError as error:
                log.warning("reconciliation.failed", relay=self._source, error=str(error))
                await asyncio.sleep(self._intervals.retry)

    async def reconcile(self, on_page: Callable[[CrawlProgress], None]) -> CrawlProgress:
        """Compare the whole list, or the rest of it if a recent reconciliation was interrupted; return the progress.

        Args:
            on_page: Called with the progress after each page.

        Raises:
            UnavailableError: The relay or the database is unavailable. The progress so far is saved.
        """
        while True:
            progress = await self._compare_pages(await self._begin(), on_page)
            if progress.finished_at is not None:
                return progress

    async def _seconds_until_due(self) -> float:
        """Return the time until the next reconciliation. The first one is due one interval after the first start."""
        last = await self._store.crawl_progress("sweep", self._source)
        now = time()
        if last is None:
            last = CrawlProgress("sweep", self._source, began_at=now, finished_at=now)
            await self._store.save_crawl_progress(last)
        return 0.0 if last.finished_at is None else last.finished_at + self._interval - now

    async def _wait_for_request(self, seconds: float) -> None:
        """Wait until a reconciliation is requested, at most for `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self._requested.wait()
        except TimeoutError:
            return

    async def _begin(self) -> CrawlProgress:
        """Return the progress of a recent reconciliation that was interrupted, else that of a new one."""
        last = await self._store.crawl_progress("sweep", self._source)
        now = time()
        resumable = last is not None and last.finished_at is None and now - last.began_at < self._interval
        if last is not None and resumable and not self._requested.is_set():
            return last
        self._requested.clear()
        progress = CrawlProgress("sweep", self._source, began_at=now)
        await self._store.save_crawl_progress(progress)
        return progress

    async def _compare_pages(self, progress: CrawlProgress, on_page: Callable[[CrawlProgress], None]) -> CrawlProgress:
        """Compare the pages to the end of the list; stop early, unfinished, if a new reconciliation is requested."""
        pending: deque[_PendingPage] = deque()
        async for page in repo_list_pages(self._outbound, self._source, "", progress.cursor):
            pending.append(await self._compare(page))
            while pending and (
                page.cursor is None or len(pending) > MAX_PENDING_PAGES or pending[0].due_at <= monotonic()
            ):
                self.waits_until = pending[0].due_at
                await self._wait_for_request(self.waits_until - monotonic())
                self.waits_until = None
                if self._requested.is_set():
                    return progress
                progress = await self._compare_again(progress, pending.popleft())
                on_page(progress)
        return progress

    async def _compare(self, page: RepoListPage) -> _PendingPage:
        """Compare a page for the first time. If no repo seems to be behind, it is due again at once."""
        max_micros = (time() + self._drift) * 1_000_000
        revs = {
            account.did: account.rev
            for account in page.accounts
            if account.active and account.rev is not None and tid_micros(account.rev) <= max_micros
        }
        behind, hidden = await self._store.find_differences(revs)
        due_at = monotonic() + (self._intervals.settle if behind else 0.0)
        return _PendingPage(due_at, page.cursor, len(page.accounts), {did: revs[did] for did in behind}, hidden)

    async def _compare_again(self, progress: CrawlProgress, page: _PendingPage) -> CrawlProgress:
        """Desynchronize repos that are still behind, show accounts that are active again, and save the progress."""
        behind = await self._store.desynchronize_behind(page.revs, time()) if page.revs else 0
        self._metrics.desynchronized(Desync.BEHIND, behind)
        shown = sum([await self._show_if_active(did) for did in page.hidden])
        self._metrics.desynchronized(Desync.REACTIVATED, shown)
        progress = progress.after_page(page.cursor, page.listed, behind + shown, time())
        await self._store.save_crawl_progress(progress)
        return progress

    async def _show_if_active(self, did: str) -> bool:
        """Show the account if the relay says that it is active; return True if it was hidden before.

        The row is read before the relay is asked. So if an event changes the row meanwhile, the write is not applied.
        """
        repo = (await self._store.repos([did]))[did]
        try:
            status = await fetch_repo_status(self._outbound, self._source, did)
        except UnavailableError as error:
            if not error.reason.is_permanent:
                raise
            return False
        after = plan_active(repo, time()) if status.active else repo
        return after is not repo and not await self._store.apply(Batch((RepoWrite(repo.version, after),)))

    def _save_progress(self, progress: CrawlProgress) -> None:
        self.crawl_progress = progress
