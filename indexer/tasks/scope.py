"""Apply a changed scope: delete records and untrack repos that left it, and fetch records of added collections.

Records of added collections are fetched only of repos that can have such records. A host that lists repos by collection
says which repos have none. They are complete without a fetch, except those of inactive accounts, which a list may lack:
they are fetched when they are active again. A list is not signed, and it may lag. So it is compared again after some
minutes and after a day, and repos are fetched that it names then and of which no such record is stored. A pattern that
ends in `.*` cannot be listed, so all repos are fetched for it. Only a few repos at a time are desynchronized. The
others stay synchronized, and their commits are applied, until their turn comes.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import monotonic, time

import structlog

from indexer.atproto.syntax import is_nsid
from indexer.concurrency.stage_progress import StageProgress
from indexer.crash_points import crash_point
from indexer.db import Database, DatabaseError
from indexer.db.crawls import CrawlProgress
from indexer.db.periodic import run_periodically
from indexer.db.scope import CurrentScope
from indexer.errors import UnavailableError
from indexer.net.http.http_client import OutboundClient
from indexer.net.pds.xrpc import MethodNotOfferedError
from indexer.reasons import Desync
from indexer.sync.repo import Repo
from indexer.sync.scope import Scope
from indexer.sync.shard import Shard
from indexer.tasks.repo_list_pages import ListedAccounts, repo_list_pages
from indexer.telemetry.metrics import Metrics

SEARCH_SECONDS = 600.0
"""Pause between two searches while the scope does not change. They should find nothing."""
MAX_WAITING = 200
"""Repos of a shard that are due at a time because of an added collection."""
PAGE_SIZE = 2_000
MAX_SEARCH_SHARE = 0.05
"""Share of the time that the search for incomplete repos takes while it finds none. It reads those of all inactive
accounts."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ScopeSettings:
    """Times in seconds, and sizes, of the tasks that follow a change of the scope.

    Attributes:
        interval: Between two reads of the scope, and two checks whether a change of it left work to do.
        narrowing_batch: Records that one transaction deletes. The live path waits for the rows of their repos.
        untracking_batch: Repos that one transaction looks at. The live path waits for those that are untracked.
        untracking_retry: Until repos are looked at again that were not complete.
        settle: From a change to the reading of a list: a list may lack what the stream has delivered just before.
        rechecks: From the comparison with a list to each of its repetitions.
        recheck_poll: Between two checks whether a repetition is due.
        retry: Until a list is read again that could not be read.
        give_up: Until a list that could not be read counts as one that no relay offers: all repos are fetched.
    """

    interval: float = 1.0
    narrowing_batch: int = 1_000
    untracking_batch: int = 200
    untracking_retry: float = 600.0
    settle: float = 30.0
    rechecks: Sequence[float] = (600.0, 86_400.0)
    recheck_poll: float = 60.0
    retry: float = 300.0
    give_up: float = 86_400.0


@dataclass(eq=False)
class ScopeNarrowing:
    """Deletes the records, and untracks the repos, of a shard that are out of scope, at the start and after a change.

    It begins when this process plans nothing with an earlier scope any more. What a resync planned with an earlier one
    is not written (`ResyncTransaction.holds_scope`). Repos are untracked when the lists of the signal collections were
    read. `AccountErasure` deletes their records. A list or a message that the scope wants tracks a repo again.

    Attributes:
        stage: Its progress. A search is work; it moves with each batch.
    """

    db: Database
    scope: CurrentScope
    shard: Shard
    metrics: Metrics
    settings: ScopeSettings

    def __post_init__(self) -> None:
        self._clean_version, self._clean_since = -1, 0.0
        self._untracked_version, self._untracking_at = 0, 0.0
        self.stage = StageProgress("scope narrowing")

    async def run(self) -> None:
        """Delete records and untrack repos forever. Only an exception that is a bug ends it."""
        await run_periodically(self.step, self.settings.interval, self.stage)

    async def step(self) -> None:
        """Look for records and repos that are out of scope, unless a search has just found none."""
        scope = self.scope.scope
        if self.scope.only_in_use(scope.version):
            await self._delete_records(scope)
            await self._untrack(scope)

    async def _delete_records(self, scope: Scope) -> None:
        now = monotonic()
        if self._clean_version == scope.version and now - self._clean_since < SEARCH_SECONDS:
            return
        deleted, complete = 0, True
        for collection in await self.db.scope_changes.collections():
            if not scope.collections.matches(collection):
                count, finished = await self._delete(scope, collection)
                deleted, complete = deleted + count, complete and finished
            self.stage.moved()
        async for keys in self.db.removals.stored(scope, self.shard.buckets):
            removed = await self.db.removals.delete(scope, keys)
            self.metrics.record_changes["delete", "true"].inc(removed or 0)
            deleted, complete = deleted + (removed or 0), complete and removed is not None
            self.stage.moved()
        if deleted:
            log.info("scope.narrowed", version=scope.version, records=deleted)
        if complete:
            self._clean_version, self._clean_since = scope.version, now

    async def _delete(self, scope: Scope, collection: str) -> tuple[int, bool]:
        """Delete the records of a collection; return how many, and False if some remain."""
        deleted, complete, after = 0, True, None
        while True:
            page = await self.db.scope_changes.delete_unselected(
                scope, collection, self.shard.buckets, after, self.settings.narrowing_batch
            )
            if page is None:
                return deleted, False
            self.metrics.record_changes["delete", "true"].inc(page.deleted)
            self.stage.moved()
            deleted, complete, after = deleted + page.deleted, complete and not page.skipped, page.last
            if after is None:
                return deleted, complete

    async def _untrack(self, scope: Scope) -> None:
        if not scope.repos_narrowed_in or self._untracked_version == scope.version or monotonic() < self._untracking_at:
            return
        if unlisted := scope.unlisted_signals:
            log.warning("scope.not-untracked", version=scope.version, signal_collections=",".join(unlisted))
            self._untracked_version = scope.version
            return
        progress, untracked = await self.db.scope_changes.begin_untracking(self.shard), 0
        if progress.finished_at is None and scope.signals and await self.db.scope_changes.unread_lists(scope):
            return
        while progress.finished_at is None:
            page = await self.db.scope_changes.untrack_page(scope, self.shard, progress, self.settings.untracking_batch)
            if page is None:
                return
            count, progress = page
            untracked += count
            self.stage.moved()
            if progress.cursor is None and progress.finished_at is None:
                self._untracking_at = monotonic() + self.settings.untracking_retry
                break
        else:
            self._untracked_version = scope.version
        if untracked:
            log.info("scope.untracked", version=scope.version, repos=untracked)


Lists = Mapping[str, ListedAccounts | None]
"""The repos that have records of a collection, by pattern; None if no host lists them."""


@dataclass(eq=False)
class ScopeBackfill:
    """Completes the repos of a shard after collections were added.

    Attributes:
        sources: Returns the base URLs of the relays to ask; none if no stream is open.
        stage: Its progress. Requests, and the comparison with lists, are work.
    """

    db: Database
    outbound: OutboundClient
    scope: CurrentScope
    sources: Callable[[], Sequence[str]]
    shard: Shard
    metrics: Metrics
    settings: ScopeSettings

    def __post_init__(self) -> None:
        self._recheck_at = self._search_at = 0.0
        self._compared = 0
        # The lists that were read so far, for which version of the scope, and since when (Unix seconds).
        self._read: tuple[int, float, dict[str, ListedAccounts | None]] = -1, 0.0, {}
        # By collection: since when its list could not be read, and when it is read again (monotonic seconds).
        self._failed: dict[str, tuple[float, float]] = {}
        self.stage = StageProgress("scope backfill")
        self._requests = self.stage.add()

    async def run(self) -> None:
        """Request resyncs forever. Only an exception that is a bug ends it."""
        await run_periodically(self.step, self.settings.interval, self.stage)

    async def step(self) -> None:
        """Request the next resyncs, after the lists were read."""
        scope = self.scope.scope
        if not scope.complete_from or not self.scope.only_in_use(scope.version):
            return
        is_compared = scope.complete_from <= self._compared or await self._compare_with_lists(scope)
        if is_compared and self._compared != scope.complete_from:
            self._compared, self._search_at = scope.complete_from, 0.0
        if monotonic() >= self._recheck_at:
            self._recheck_at = monotonic() + self.settings.recheck_poll
            await self._compare_again(scope)
        began_at = monotonic()
        if not is_compared or began_at < self._search_at:  # a search that took long has found none just before
            return
        requested = await self.db.scope_changes.request_incomplete(scope, self.shard.buckets, MAX_WAITING, time())
        if not requested:
            self._search_at = began_at + (monotonic() - began_at) / MAX_SEARCH_SHARE
        self.metrics.desynchronized[Desync.SCOPE_WIDENED].inc(requested)

    async def _compare_with_lists(self, scope: Scope) -> bool:
        """Mark repos that have no records of the added collections as complete; return False to try again later."""
        first = await self.db.scope_changes.incomplete_repos(scope, self.shard.buckets, "", 1)
        listable = [pattern for pattern in scope.added_after(0) if is_nsid(pattern)]
        if not first or not listable:
            return True
        if not (sources := self.sources()) or monotonic() < self.scope.changed_at + self.settings.settle:
            return False
        if self._read[0] != scope.chosen_in:
            self._read = scope.chosen_in, time(), {}
        _, began_at, lists = self._read
        for pattern in listable:
            if pattern not in lists and self._may_read(pattern):
                try:
                    lists[pattern] = await self._read_list(sources, pattern)
                    self._failed.pop(pattern, None)
                except DatabaseError:
                    raise
                except UnavailableError as error:
                    if self._note_failure(pattern, error) >= self.settings.give_up:
                        log.warning("scope.list-given-up", collection=pattern)
                        lists[pattern] = None
        if self.scope.scope.chosen_in != scope.chosen_in or len(lists) < len(listable):
            return False
        # First, so that a process that is killed before it has marked all repos compares them again, too.
        for pattern in [pattern for pattern in listable if lists[pattern] is not None]:
            recheck = CrawlProgress("recheck", "", pattern, began_at=began_at, shard=str(self.shard))
            await self.db.crawls.save(recheck)
            crash_point("scope.recheck-planned")
        complete = await self._mark_complete(scope, lists)
        self._read = -1, 0.0, {}
        log.info("scope.compared", version=scope.version, complete=complete)
        return True

    async def _compare_again(self, scope: Scope) -> None:
        """Compare the lists again that are due, and mark repos that lack records after all."""
        added_in = dict(zip(scope.collections.patterns, scope.added_in, strict=True))
        if not (sources := self.sources()):
            return
        for recheck in await self.db.crawls.rechecks(self.shard):
            if recheck.collection not in added_in:
                await self.db.crawls.save(replace(recheck, finished_at=time()))
            elif recheck.began_at > time():  # before the clock was set back
                await self.db.crawls.save(replace(recheck, began_at=time()))
            elif time() >= recheck.began_at + self.settings.rechecks[recheck.found] and self._may_read(
                recheck.collection
            ):
                collection, since = recheck.collection, recheck.began_at
                mark = self.db.scope_changes.mark_incomplete
                try:
                    pages = self._pages(sources, collection)
                    found = sum([await mark(dids, collection, added_in[collection], since) async for dids in pages])
                except DatabaseError:
                    raise
                except UnavailableError as error:
                    self._note_failure(collection, error)
                    continue
                self._failed.pop(collection, None)
                self._search_at = 0.0
                done, ended = recheck.found + 1, time() if recheck.found + 1 >= len(self.settings.rechecks) else None
                await self.db.crawls.save(replace(recheck, found=done, finished_at=ended))
                log.info("scope.compared-again", collection=collection, incomplete=found)

    def _may_read(self, collection: str) -> bool:
        """Return True if the list did not fail, or if its pause is over."""
        return monotonic() >= self._failed.get(collection, (0.0, 0.0))[1]

    def _note_failure(self, collection: str, error: UnavailableError) -> float:
        """Note and log that the list could not be read; return for how many seconds that has been so."""
        now = monotonic()
        since, _ = self._failed.get(collection, (now, now))
        self._failed[collection] = since, now + self.settings.retry
        log.warning("scope.list-failed", collection=collection, error=str(error), retry_seconds=self.settings.retry)
        return now - since

    async def _read_list(self, sources: Sequence[str], collection: str) -> ListedAccounts | None:
        """Return the stored repos that the first relay lists which offers it; None if none does.

        Raises:
            UnavailableError: A relay that may offer it does not answer, or the database does not.
        """
        listed = ListedAccounts(2 * sum((await self.db.reports.counts()).statuses.values()))
        try:
            async for dids in self._pages(sources, collection):
                differences = await self.db.crawls.find_differences(dict.fromkeys(dids, ""))
                for did in set(dids).difference(differences.unknown):  # the others would fill the set
                    listed.add(did)
        except MethodNotOfferedError:
            return None
        return listed

    async def _pages(self, sources: Sequence[str], collection: str) -> AsyncIterator[list[str]]:
        """Yield the accounts of this shard on each page of the first relay that offers the list.

        If a relay stops offering it, the pages of the next one follow.

        Raises:
            MethodNotOfferedError: No relay offers the list.
            UnavailableError: A relay that may offer it does not answer.
        """
        self.stage.idle()  # each request is work of `_requests`, and a pause before a retry is not
        try:
            for source in sources:
                try:
                    async for page in repo_list_pages(self.outbound, source, collection, None, self._requests):
                        self.stage.moved()
                        yield [account.did for account in page.entries if self.shard.owns(account.did)]
                        self.stage.idle()
                except MethodNotOfferedError as error:
                    log.info("scope.list-not-offered", relay=source, collection=collection, error=str(error))
                    if source == sources[-1]:
                        raise
                else:
                    return
        finally:
            self.stage.moved()

    async def _mark_complete(self, scope: Scope, lists: Lists) -> int:
        """Mark all repos that lack no records; return how many. Repos that change meanwhile are fetched."""
        after, complete = "", 0
        while page := await self.db.scope_changes.incomplete_repos(scope, self.shard.buckets, after, PAGE_SIZE):
            after = page[-1].did
            lacking_none = [repo for repo in page if not may_lack(repo, scope, lists)]
            complete += await self.db.scope_changes.mark_complete(lacking_none, scope)
            self.stage.moved()
            await asyncio.sleep(0)
        return complete


def may_lack(repo: Repo, scope: Scope, lists: Lists) -> bool:
    """Return False if the lists show that the repo has no records of the collections added since it was complete."""
    added = [lists.get(pattern) for pattern in scope.added_after(repo.scope_version)]
    return any(listed is None or repo.did in listed for listed in added)
