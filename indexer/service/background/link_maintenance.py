"""Turn links on and off, backfill those of stored records, and keep the counts of links up to date."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import monotonic

import structlog

from indexer.concurrency.stage_progress import StageProgress
from indexer.service.periodic import run_periodically
from indexer.store import FIRST_PATH, LinkState, RecordPath, RecountPosition, Store
from indexer.sync.shard import Shard, bucket_of

FOLDED_DELTAS = 5_000
"""Deltas that one transaction adds to the counts."""
RECOUNTED_LINKS = 1_000
"""Links of one transaction that changes whether they count. A batch that deletes one of them waits for it."""
RECOUNTED_REPOS = 100
"""Repos that are recounted at a time."""
REPOS_OF_PAGE = 500
"""Repos between two positions of the backfill that are stored."""
REPOS_OF_STEP = 20
"""Repos that one transaction of the backfill locks at most."""
MAX_LOCKED = 1_000
"""Repos that a running resync keeps from being visited, before the backfill waits for them."""
BACKFILL_SECONDS = 1.0
"""Time after which the backfill lets the other tasks of the stage run."""

log = structlog.get_logger(__name__)


@dataclass
class _Backfill:
    """The progress of the backfill in this process.

    Attributes:
        after: The last DID that was read from the list of repos.
        ahead: Repos of the list that were not visited yet.
        begun: Repos of which a part was visited, with the path from which to continue.
        locked: The same for repos that could not be locked: a resync runs.
        repos: The repos that were visited since the position was stored, by bucket.
        listed: True if the list of repos was read to its end.
    """

    after: str
    ahead: list[str] = field(default_factory=list)
    begun: dict[str, RecordPath] = field(default_factory=dict)
    locked: dict[str, RecordPath] = field(default_factory=dict)
    repos: Counter[int] = field(default_factory=Counter)
    listed: bool = False
    visited: int = 0
    links: int = 0
    began: float = field(default_factory=monotonic)


class LinkMaintenance:
    """Follows the setting `INDEXER_LINKS` as soon as this process owns its shard.

    If links are kept: adds deltas to the counts, recounts repos whose visibility changed, and backfills. If not, it
    removes the links that are stored, and then does nothing.

    Attributes:
        stage: Its progress. It moves with each transaction.
    """

    def __init__(
        self, store: Store, shard: Shard, owned: asyncio.Event, *, wanted: bool, interval: float = 1.0
    ) -> None:
        self._store = store
        self._buckets = shard.buckets
        self._owned = owned
        self._wanted = wanted
        self._interval = interval
        self.stage = StageProgress("links")
        self._state: LinkState | None = None
        self._removed = False
        self._backfill: _Backfill | None = None

    async def run(self) -> None:
        """Maintain links forever. Only an exception that is a bug ends it."""
        await run_periodically(self.run_once, self._interval, self.stage)

    async def run_once(self) -> None:
        """Follow the setting, and do the work that waits, or a second's worth of the backfill.

        Raises:
            DatabaseError: The database is unavailable.
        """
        if not self._owned.is_set():
            # Another process may own the shard and follow another setting.
            self._store.keeps_links, self._state, self._removed, self._backfill = None, None, False, None
            return
        if not self._wanted:
            await self._turn_off()
            return
        self._state = self._state or await self._turn_on()
        if not self._state.kept:
            return
        await self._recount()
        if not self._state.done:
            await self._continue_backfill()
        await self._fold()

    async def _turn_on(self) -> LinkState:
        state = await self._store.turn_links_on(self._buckets)
        self._store.keeps_links = state.kept
        if state.off:
            log.error("links.outdated")
        elif not state.done:
            log.info("links.backfilling", after=await self._store.link_backfill_position(self._buckets) or None)
        return state

    async def _turn_off(self) -> None:
        """Stop keeping links; remove them when no other process keeps links."""
        if self._removed:
            return
        before = await self._store.link_state(self._buckets)
        self._removed = await self._store.turn_links_off(self._buckets)
        self._store.keeps_links = False
        if before.kept:
            log.warning("links.off", removed=self._removed)

    async def _recount(self) -> None:
        for did in await self._store.link_recounts_due(self._buckets, RECOUNTED_REPOS):
            after: RecountPosition | None = RecountPosition()
            while after is not None:
                after = await self._store.recount_links(did, after, RECOUNTED_LINKS)
                self.stage.moved()

    async def _fold(self) -> None:
        while await self._store.fold_link_deltas(self._buckets, FOLDED_DELTAS) == FOLDED_DELTAS:
            self.stage.moved()

    async def _continue_backfill(self) -> None:
        """Visit repos for `BACKFILL_SECONDS`."""
        if self._backfill is None:
            self._backfill = _Backfill(await self._store.link_backfill_position(self._buckets) or "")
        backfill, ends = self._backfill, monotonic() + BACKFILL_SECONDS
        for did in list(backfill.locked):
            await self._step(backfill, {did: backfill.locked[did]})
        while monotonic() < ends and len(backfill.locked) < MAX_LOCKED:
            if not backfill.ahead and not backfill.begun and not await self._next_page(backfill):
                break
            for did in backfill.ahead[: REPOS_OF_STEP - len(backfill.begun)]:
                backfill.begun[did] = FIRST_PATH
                backfill.after = backfill.ahead.pop(0)
            await self._step(backfill, backfill.begun)
        if backfill.listed and not backfill.ahead and not backfill.begun and not backfill.locked:
            await self._finish_backfill(backfill)

    async def _next_page(self, backfill: _Backfill) -> bool:
        """Store the position, and read the next repos; return False if there are none."""
        if backfill.visited and not backfill.locked:
            await self._store.save_link_backfill(self._buckets, backfill.after, backfill.repos)
            backfill.repos.clear()
        backfill.ahead = await self._store.next_link_repos(self._buckets, backfill.after, REPOS_OF_PAGE)
        backfill.listed = not backfill.ahead
        return not backfill.listed

    async def _step(self, backfill: _Backfill, repos: Mapping[str, RecordPath]) -> None:
        """Visit the first of these repos in one transaction."""
        steps, links = await self._store.backfill_links(repos)
        self.stage.moved()
        backfill.links += links
        for did, step in steps.items():
            backfill.begun.pop(did, None)
            backfill.locked.pop(did, None)
            if step.after is None:
                backfill.visited += 1
                backfill.repos[bucket_of(did)] += 1
            elif step.locked:
                backfill.locked[did] = step.after
            else:
                backfill.begun[did] = step.after

    async def _finish_backfill(self, backfill: _Backfill) -> None:
        await self._store.save_link_backfill(self._buckets, backfill.after, backfill.repos)
        await self._store.finish_link_backfill(self._buckets)
        self._state = await self._store.link_state(self._buckets)
        self._backfill = None
        seconds = round(monotonic() - backfill.began, 1)
        log.info("links.backfilled", repos=backfill.visited, links=backfill.links, seconds=seconds)
