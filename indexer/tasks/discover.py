"""Discover accounts: read a host's repo list, and track the accounts in it."""

from collections.abc import Callable
from functools import partial
from time import time

from indexer.concurrency.stage_progress import StageProgress
from indexer.db import Store
from indexer.db.crawl_progress import CrawlProgress, Purpose
from indexer.net.http import OutboundClient
from indexer.sync.account import plan_hidden
from indexer.sync.repo import Repo, hides
from indexer.sync.scope import Scope
from indexer.tasks.repo_list_pages import repo_list_pages


class Discovery:
    """Tracks listed accounts. The accounts of a page and the progress are saved in one transaction.

    Attributes:
        stage: Its progress. Each request, and the write of each page, is work.
        invalid_entries: Entries of the list that are not valid, as in `RepoListPage`.
        expected: How many accounts the last complete crawl listed; None if there was none.
    """

    def __init__(self, store: Store, outbound: OutboundClient, stage: StageProgress | None = None) -> None:
        self._store = store
        self._outbound = outbound
        self.stage = stage or StageProgress("discover")
        self._requests = self.stage.add()
        self.invalid_entries = 0
        self.expected: int | None = None

    async def begin(self, source: str, collection: str, purpose: Purpose = "discover") -> CrawlProgress:
        """Return the progress of the last crawl if it was interrupted, else that of a new crawl."""
        with self.stage.busy():
            last = await self._store.crawl_progress(purpose, source, collection)
        if last is not None and last.finished_at is None:
            return last
        self.expected = None if last is None else last.listed
        return CrawlProgress(purpose, source, collection, began_at=time())

    async def run(
        self, progress: CrawlProgress, on_page: Callable[[CrawlProgress], None], signals: Scope | None = None
    ) -> CrawlProgress:
        """Read the list from `progress` to its end, and return the final progress.

        If the scope changes that `signals` names, the rest of the list is not read.

        Inactive accounts are left out: they cannot be fetched, and the stream reports when they become active. Accounts
        that the host only withholds are added: their own host has them.

        Args:
            progress: The progress that `begin` returned.
            on_page: Called with the progress after each page.
            signals: The scope, if the list is that of one of its signal collections; None if a command adds the repos.

        Raises:
            UnavailableError: The host or the database is unavailable. The progress so far is saved.
        """
        source, collection, cursor = progress.source, progress.collection, progress.cursor
        async for page in repo_list_pages(self._outbound, source, collection, cursor, self._requests):
            self.invalid_entries += page.invalid_entries
            dids = [account.did for account in page.accounts if account.active or not hides(account.status)]
            with self.stage.busy():
                after_page = progress.after_page(page.cursor, len(page.accounts), 0, time())
                stored = (
                    await self._store.add_listed(dids, after_page)
                    if signals is None
                    else await self._store.add_signals(dids, after_page, signals)
                )
            if stored is None:
                return progress
            for account in page.accounts:
                if not account.active and not hides(account.status):
                    await self._store.update_repo(account.did, partial(_withhold, status=account.status))
            progress = stored
            on_page(progress)
        return progress


def _withhold(repo: Repo, status: str | None) -> Repo:
    """Return the row of a listed account that the host withholds for this status."""
    return plan_hidden(repo, status, time(), 0.0)
