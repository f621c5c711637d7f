"""Discover accounts: read a host's repo list, or those of signal collections, and track the accounts in them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from time import monotonic, time

import structlog

from indexer.atproto.syntax import is_nsid
from indexer.concurrency.stage_progress import StageProgress
from indexer.db import Database, DatabaseError
from indexer.db.crawls import CrawlProgress, Purpose
from indexer.db.periodic import run_periodically
from indexer.db.scope import CurrentScope
from indexer.errors import UnavailableError
from indexer.net.http.http_client import OutboundClient
from indexer.net.pds.xrpc import MethodNotOfferedError
from indexer.sync.account import plan_hidden
from indexer.sync.repo import hides
from indexer.sync.scope import Scope
from indexer.tasks.repo_list_pages import repo_list_pages
from indexer.tasks.scope import ScopeSettings

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class Discovery:
    """Tracks listed accounts. The accounts of a page and the progress are saved in one transaction.

    Attributes:
        stage: Its progress. Each request, and the write of each page, is work.
        invalid_entries: Entries of the list that are not valid, as in `ListPage`.
        expected: How many accounts the last complete crawl listed; None if there was none.
    """

    db: Database
    outbound: OutboundClient
    stage: StageProgress = field(default_factory=lambda: StageProgress("discover"))
    invalid_entries: int = field(default=0, init=False)
    expected: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._requests = self.stage.add()

    async def begin(self, source: str, collection: str, purpose: Purpose = "discover") -> CrawlProgress:
        """Return the progress of the last crawl if it was interrupted, else that of a new crawl."""
        with self.stage.busy():
            last = await self.db.crawls.progress(purpose, source, collection)
        if last is not None and last.finished_at is None:
            return last
        self.expected = None if last is None else last.listed
        return CrawlProgress(purpose, source, collection, began_at=time())

    async def run(
        self,
        progress: CrawlProgress,
        on_page: Callable[[CrawlProgress], None],
        signals: Scope | None = None,
        *,
        all_repos: bool = False,
    ) -> CrawlProgress:
        """Read the list from `progress` to its end, and return the final progress; call `on_page` after each page.

        Inactive accounts are left out: they cannot be fetched, and the stream reports when they become active. Accounts
        that the host only withholds are added: their own host has them.

        With `signals`, the list is that of a signal collection of this scope, and the rest is not read if the scope
        changes. Without, a command adds the repos. With `all_repos`, the list of all repos is read in its place.

        Raises:
            UnavailableError: The host or the database is unavailable. The progress so far is saved.
        """
        source, collection, cursor = progress.source, "" if all_repos else progress.collection, progress.cursor
        async for page in repo_list_pages(self.outbound, source, collection, cursor, self._requests):
            self.invalid_entries += len(page.invalid)
            dids = [account.did for account in page.entries if account.active or not hides(account.status)]
            with self.stage.busy():
                after_page = progress.after_page(page.cursor, len(page.entries), 0, time())
                stored = (
                    await self.db.crawls.add_listed(dids, after_page)
                    if signals is None
                    else await self.db.crawls.add_signals(dids, after_page, signals)
                )
            if stored is None:
                return progress
            for account in page.entries:
                if not account.active and not hides(account.status):
                    withhold = partial(plan_hidden, status=account.status, now=time(), deletion_grace=0.0)
                    await self.db.repos.update(account.did, withhold)
            progress = stored
            on_page(progress)
        return progress


@dataclass(eq=False)
class SignalDiscovery:
    """Reads the list of each signal collection at the start, after a change, and after each reconciliation.

    A pattern that ends in `.*` has no list: its repos are found when the stream delivers a commit. After a change that
    wants fewer repos, the lists are read half a minute later, because they decide which repos are untracked.

    Attributes:
        sources: Returns the base URLs of the relays to ask; none if no stream is open.
        reconciled_at: Returns when the last reconciliation of this process ended; None if none has.
        sources_are_hosts: True if the sources are PDSes. One that has no list of a collection gives that of all repos.
        stage: Its progress. Each request, and the write of each page, is work.
    """

    db: Database
    outbound: OutboundClient
    scope: CurrentScope
    sources: Callable[[], Sequence[str]]
    reconciled_at: Callable[[], float | None]
    settings: ScopeSettings
    sources_are_hosts: bool = False

    def __post_init__(self) -> None:
        self.stage = StageProgress("signal discovery")
        self._checks = self.stage.add()
        self._discovery = Discovery(self.db, self.outbound, self.stage)
        # The reason to read the lists: the version that chose the repos, and the reconciliation before.
        self._due: tuple[int, float | None] | None = None
        self._read: set[str] = set()
        self._retry_at = 0.0

    async def run(self) -> None:
        """Discover repos forever. Only an exception that is a bug ends it."""
        await run_periodically(self.step, self.settings.interval, self._checks)

    async def step(self) -> None:
        """Read the lists if they are due."""
        scope = self.scope.scope
        due = scope.chosen_in, self.reconciled_at()
        if due != self._due:
            self._due, self._read = due, set()
        unread = set(filter(is_nsid, scope.signals.patterns)) - self._read if scope.signals is not None else set()
        if not unread or monotonic() < self._retry_at:
            return
        settled_at = self.scope.changed_at + (self.settings.settle if scope.repos_narrowed_in else 0.0)
        if monotonic() < settled_at or not (sources := self.sources()):
            return
        self._checks.idle()  # the requests and the writes are activities of `Discovery`
        for collection in sorted(unread):
            if await self._discover(sources, collection, scope):
                self._read.add(collection)
        if not self._read >= unread:
            self._retry_at = monotonic() + self.settings.retry

    async def _discover(self, sources: Sequence[str], collection: str, scope: Scope) -> bool:
        """Read the list of the first relay that offers it; return False if that cannot be read, or none offers it.

        A list decides which repos are untracked, so a relay that only fails is not replaced by the next one.
        """
        failure: UnavailableError | None = None
        lists = [False, True] if self.sources_are_hosts else [False]
        for all_repos, source in product(lists, sources):
            try:
                begun = await self._discovery.begin(source, collection, "signal")
                progress = await self._discovery.run(begun, lambda _: None, scope, all_repos=all_repos)
            except MethodNotOfferedError as error:
                failure = error
                continue
            except DatabaseError:
                raise
            except UnavailableError as error:
                failure = error
                break
            if progress.finished_at is not None:
                listed, added = progress.listed, progress.found
                log.info("scope.discovered", relay=source, collection=collection, listed=listed, added=added)
            return True
        event = "scope.signals-not-listed" if isinstance(failure, MethodNotOfferedError) else "scope.list-failed"
        log.warning(event, collection=collection, error=str(failure), retry_seconds=self.settings.retry)
        return False
