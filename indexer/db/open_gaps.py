"""The open gaps of this process's shard: opened by the firehose consumer, closed by reconciliation.

The table of gaps is authoritative. `OpenGaps` has a copy for readiness, metrics and the reconciliation.
"""

import asyncio
from collections.abc import Sequence
from typing import NoReturn

import structlog

from indexer.concurrency.event_wait import wait_for_event
from indexer.concurrency.stage_progress import StageProgress
from indexer.db import Database
from indexer.db.periodic import run_periodically
from indexer.sync.shard import Shard
from indexer.sync.stream import Gap, OpenGap
from indexer.telemetry.metrics import Metrics

REFRESH_SECONDS = 5.0
"""Interval at which the gaps are loaded again."""

log = structlog.get_logger(__name__)


class OpenGaps:
    """Opens gaps, and knows the open ones.

    Attributes:
        stage: Its progress. Loading the gaps, and checking the silence of the relay, is work.
        gaps: The open gaps that affect repos of the shard, also those of former shards, oldest first; None before they
            were loaded for the first time.
    """

    def __init__(self, db: Database, shard: Shard, metrics: Metrics, interval: float = REFRESH_SECONDS) -> None:
        self._db = db
        self._shard = shard
        self._metrics = metrics
        self._interval = interval
        self._opened = asyncio.Event()
        self.stage = StageProgress("open gaps")
        self.gaps: Sequence[OpenGap] | None = None

    @property
    def newest(self) -> int:
        """The ID of the newest open gap; 0 if there is none."""
        return max((gap.id for gap in self.gaps or ()), default=0)

    async def open(self, gap: Gap) -> OpenGap:
        """Store a gap, and wake the reconciliation.

        Raises:
            DatabaseError: The database is unavailable.
        """
        opened = await self._db.gaps.open(gap)
        log.error(
            "gap.opened",
            id=opened.id,
            relay=gap.relay,
            reason=gap.reason,
            first_seq=gap.first_seq,
            last_seq=gap.last_seq,
        )
        self._set([*(self.gaps or ()), opened])
        return opened

    async def set_last_seq(self, gap_id: int, last_seq: int) -> None:
        """Store where a gap ends.

        Raises:
            DatabaseError: The database is unavailable.
        """
        await self._db.gaps.set_last_seq(gap_id, last_seq)

    async def refresh(self) -> None:
        """Load the open gaps, and log those that were closed since the last time.

        A gap that affects other shards, too, is not closed before they have compared their repos.

        Raises:
            DatabaseError: The database is unavailable.
        """
        before, known_until = self.gaps or (), self.newest
        loaded = await self._db.gaps.load_open()
        still_open = {gap.id for gap in loaded}
        for gap in before:
            if gap.id not in still_open:
                log.info("gap.closed", relay=gap.gap.relay, reason=gap.gap.reason, id=gap.id)
        opened_meanwhile = [gap for gap in self.gaps or () if gap.id > known_until and gap.id not in still_open]
        self._set([*(gap for gap in loaded if gap.affects(self._shard)), *opened_meanwhile])

    async def run(self) -> NoReturn:
        """Refresh periodically: another process may have closed gaps."""
        await run_periodically(self.refresh, self._interval, self.stage)

    async def wait_until_opened(self, seconds: float) -> None:
        """Wait until a gap is open, at most for `seconds`."""
        await wait_for_event(self._opened, seconds)

    def _set(self, gaps: Sequence[OpenGap]) -> None:
        self.gaps = gaps
        self._metrics.gaps_open.set(len(gaps))
        if gaps:
            self._opened.set()
        else:
            self._opened.clear()
