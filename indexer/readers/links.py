"""Keep links from the change log, in one process at a time; remove them when they are turned off."""

import asyncio
from time import monotonic

import structlog

from indexer.concurrency.stage_progress import StageProgress
from indexer.db import Database
from indexer.db.links import LINK_CONSUMER, LinkSession, PositionLostError
from indexer.db.periodic import run_periodically

SPACING_SECONDS = 0.05
"""Pause after the last change was read: the changes until then share one transaction."""
RETRY_SECONDS = 1.0
"""Interval at which a waiting process tries to own the links."""

log = structlog.get_logger(__name__)


class LinkReader:
    """Follows the setting `INDEXER_LINKS`.

    If links are kept: reads the change log, recounts repos whose visibility changed, and backfills, in turns of one
    transaction each. If not: removes the links that are stored as soon as no process keeps them.
    """

    def __init__(self, db: Database, *, wanted: bool) -> None:
        self._db = db
        self._wanted = wanted
        self._removed = False
        self.stage = StageProgress("links")

    async def run(self) -> None:
        """Follow the setting forever. Only an exception that is a bug ends it."""
        await run_periodically(self._follow_setting, RETRY_SECONDS, self.stage)

    async def _follow_setting(self) -> None:
        if self._removed:
            return
        if not self._wanted and not await self._db.links.are_kept():
            self._removed = True
            return
        async with self._db.links.session() as session:
            if not await session.lock.claim():
                return
            if self._wanted:
                await self._keep(session)
            else:
                await session.remove()
                log.warning("links.off")

    async def _keep(self, session: LinkSession) -> None:
        await session.begin()
        began, done = monotonic(), session.done
        if not done:
            log.info("links.backfilling", after=session.backfilled_to[0] or None)
        while not session.lock.lost.is_set():
            self.stage.begin()
            try:
                busy = await self.turn(session)
            except PositionLostError as error:
                log.warning("links.position-lost", consumer=LINK_CONSUMER, seq=session.seq, error=str(error))
                await session.begin(anew=True)
                began, done, busy = monotonic(), False, True
            if session.done and not done:
                done = True
                seconds = round(monotonic() - began, 1)
                log.info("links.backfilled", repos=session.repos, links=session.links, seconds=seconds)
            self.stage.moved()
            if not busy:
                self.stage.idle()
                self.stage.failed(None)
                await asyncio.sleep(SPACING_SECONDS)
                await session.signal.wait()

    @staticmethod
    async def turn(session: LinkSession) -> bool:
        """Do one transaction of each kind of work; return False if nothing is left.

        Raises:
            PositionLostError: Changes after the position may have been trimmed.
        """
        work = [await session.read_changes(), await session.recount(), await session.backfill()]
        return any(work)
