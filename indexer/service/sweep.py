"""Anti-entropy: what a relay lists, held against what we have. What the stream has not brought is fetched.

A list is ahead of the stream by what is under way, so a repo that seems behind is looked at once more after a while;
and nobody has signed it, so it is reason enough to fetch, and for nothing else. An account that is listed, and hidden
here, is shown again if the relay says once more that it is active.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic, time

import structlog

from indexer.atproto.syntax import tid_micros
from indexer.errors import UnavailableError
from indexer.metrics import Metrics
from indexer.outbound import Outbound
from indexer.pds.accounts import Page, repo_status
from indexer.reasons import Desync
from indexer.service.accounts import pages
from indexer.store import Store
from indexer.sync.listing import Listing
from indexer.sync.plan import Batch, RepoWrite
from indexer.sync.planning import plan_active

_MOST_LOOKS = 100  # pages that wait, each with a thousand repos at most

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Pause:
    """Seconds: that the stream is given to bring what a list was ahead of, and between tries of a sweep that failed."""

    settle: float = 30.0
    retry: float = 600.0


@dataclass(frozen=True, slots=True)
class _Look:
    """A page's repos that seemed behind, with the revisions that it has, to be looked at again `at` (monotonic); and
    those that are `hidden` here.
    """

    at: float
    cursor: str | None
    listed: int
    revs: Mapping[str, str]
    hidden: Sequence[str]


class Sweep:
    """Sweeps the list of `source`: every `interval` seconds, and when asked to. Clocks may drift by `drift` seconds."""

    def __init__(
        self,
        store: Store,
        outbound: Outbound,
        metrics: Metrics,
        source: str,
        *,
        interval: float,
        drift: float,
        pause: Pause | None = None,
    ) -> None:
        self._store = store
        self._outbound = outbound
        self._metrics = metrics
        self._source = source
        self._interval = interval
        self._drift = drift
        self._pause = pause or Pause()
        self._asked = asyncio.Event()
        self.listing: Listing | None = None

    def ask(self) -> None:
        """Has a whole sweep begin at once: the stream has lost something, and nobody knows of whom."""
        self._asked.set()

    @property
    def progress(self) -> str | None:
        """How far the last one of this process came, for people."""
        if self.listing is None:
            return None
        state = "under way" if self.listing.finished_at is None else "done"
        return f"{state}: {self.listing.listed:,} accounts listed, {self.listing.found:,} differ"

    async def run(self) -> None:
        while True:
            try:
                await self._wait(await self._due())
                listing = await self.sweep(self._heard)
                log.info("sweep.done", relay=self._source, listed=listing.listed, different=listing.found)
            except UnavailableError as error:
                log.warning("sweep.failed", relay=self._source, error=str(error))
                await asyncio.sleep(self._pause.retry)

    async def sweep(self, heard: Callable[[Listing], None]) -> Listing:
        """Goes through the whole list, or on from where a sweep was left not long ago; tells `heard` of each page.

        Raises `UnavailableError` if the relay can't be read, or the database can't be asked.
        """
        while True:
            listing = await self._begin()
            listing = await self._go_through(listing, heard)
            if listing.finished_at is not None:
                return listing

    async def _due(self) -> float:
        """Seconds until the next one; the first one is not before there may be something to find."""
        last = await self._store.listing("sweep", self._source)
        now = time()
        if last is None:
            last = Listing("sweep", self._source, began_at=now, finished_at=now)
            await self._store.save_listing(last)
        return 0.0 if last.finished_at is None else last.finished_at + self._interval - now

    async def _wait(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._asked.wait()
        except TimeoutError:
            pass  # it is time

    async def _begin(self) -> Listing:
        last = await self._store.listing("sweep", self._source)
        now = time()
        left = last is not None and last.finished_at is None and now - last.began_at < self._interval
        if last is not None and left and not self._asked.is_set():
            return last
        self._asked.clear()
        listing = Listing("sweep", self._source, began_at=now)
        await self._store.save_listing(listing)
        return listing

    async def _go_through(self, listing: Listing, heard: Callable[[Listing], None]) -> Listing:
        """Until the end, or until another one is asked for: then it is not finished."""
        looks: deque[_Look] = deque()
        async for page in pages(self._outbound, self._source, "", listing.cursor):
            looks.append(await self._look(page))
            while looks and (page.cursor is None or len(looks) > _MOST_LOOKS or looks[0].at <= monotonic()):
                await self._wait(looks[0].at - monotonic())
                if self._asked.is_set():
                    return listing
                listing = await self._look_again(listing, looks.popleft(), heard)
        return listing

    async def _look(self, page: Page) -> _Look:
        """Where nothing seems behind, there is nothing to wait for."""
        newest = (time() + self._drift) * 1_000_000
        revs = {
            account.did: account.rev
            for account in page.accounts
            if account.active and account.rev is not None and tid_micros(account.rev) <= newest
        }
        behind, hidden = await self._store.different(revs)
        at = monotonic() + (self._pause.settle if behind else 0.0)
        return _Look(at, page.cursor, len(page.accounts), {did: revs[did] for did in behind}, hidden)

    async def _look_again(self, listing: Listing, look: _Look, heard: Callable[[Listing], None]) -> Listing:
        """Marks what is still behind, shows what has come back, and notes the place behind the page."""
        marked = await self._store.mark_behind(look.revs, time()) if look.revs else 0
        self._metrics.desynchronized(Desync.BEHIND, marked)
        shown = sum([await self._show(did) for did in look.hidden])
        self._metrics.desynchronized(Desync.REACTIVATED, shown)
        listing = listing.after(look.cursor, look.listed, marked + shown, time())
        await self._store.save_listing(listing)
        heard(listing)
        return listing

    async def _show(self, did: str) -> bool:
        """The row is read first: if the stream hides it while the relay is asked, that is what stays."""
        repo = (await self._store.repos([did]))[did]
        try:
            status = await repo_status(self._outbound, self._source, did)
        except UnavailableError as error:
            if not error.reason.parks:
                raise
            return False
        after = plan_active(repo, time()) if status.active else repo
        return after is not repo and not await self._store.apply(Batch((RepoWrite(repo.version, after),)))

    def _heard(self, listing: Listing) -> None:
        self.listing = listing
