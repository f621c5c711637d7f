"""Discover accounts: read a host's repo list, and track the accounts in it."""

from collections.abc import Callable
from functools import partial
from time import time

from indexer.outbound import OutboundClient
from indexer.pds.repo_list import RepoListPage
from indexer.service.crawl.repo_list_pages import repo_list_pages
from indexer.store import Store
from indexer.sync.crawl_progress import CrawlProgress


class Discovery:
    """Tracks listed accounts. The accounts of a page and the progress are saved in one transaction.

    Attributes:
        invalid_entries: Entries of the list that are not accounts.
    """

    def __init__(self, store: Store, outbound: OutboundClient) -> None:
        self._store = store
        self._outbound = outbound
        self.invalid_entries = 0

    async def begin(self, source: str, collection: str) -> CrawlProgress:
        """Return the progress of the last crawl if it was interrupted, else that of a new crawl."""
        last = await self._store.crawl_progress("discover", source, collection)
        if last is not None and last.finished_at is None:
            return last
        return CrawlProgress("discover", source, collection, began_at=time())

    async def run(self, progress: CrawlProgress, on_page: Callable[[CrawlProgress], None]) -> CrawlProgress:
        """Read the list from `progress` to its end, and return the final progress.

        Inactive accounts are left out: they cannot be fetched, and the stream reports when they become active.

        Args:
            progress: The progress that `begin` returned.
            on_page: Called with the progress after each page.

        Raises:
            UnavailableError: The host or the database is unavailable. The progress so far is saved.
        """
        async for page in repo_list_pages(self._outbound, progress.source, progress.collection, progress.cursor):
            self.invalid_entries += page.invalid_entries
            dids = [account.did for account in page.accounts if account.active]
            progress = await self._store.add_listed(dids, partial(_after_page, progress, page))
            on_page(progress)
        return progress


def _after_page(progress: CrawlProgress, page: RepoListPage, added: int) -> CrawlProgress:
    return progress.after_page(page.cursor, len(page.accounts), added, time())
