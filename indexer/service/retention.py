"""Looks after the change log: what is kept no longer goes, and a reader that lags is told of before it is cut off."""

import asyncio
from time import monotonic, time

import structlog

from indexer.metrics import Metrics
from indexer.store import DatabaseError, Keep, ReaderState, Store

log = structlog.get_logger(__name__)


class Retention:
    """One look every `pause` seconds, by each process: what one has done, the others find done.

    A registered reader that is more than `alarm` seconds behind is logged each time.
    """

    def __init__(self, store: Store, keep: Keep, metrics: Metrics, *, alarm: float, pause: float = 60.0) -> None:
        self._store = store
        self._keep = keep
        self._metrics = metrics
        self._alarm = alarm
        self._pause = pause
        self.lagging: list[str] = []
        self.progress = monotonic()

    async def run(self) -> None:
        while True:
            try:
                await self.look()
            except DatabaseError as error:
                log.warning("database.unavailable", error=str(error))
            self.progress = monotonic()
            await asyncio.sleep(self._pause)

    async def look(self) -> None:
        """Raises `DatabaseError`."""
        now = time()
        before, done = await self._store.tend_log(self._keep, now)
        for reader in before.readers:
            if reader.name in done.cut_off:
                log.error("reader.cut-off", reader=reader.name, seq=reader.seq, behind=reader.behind)
        for segment in before.segments:
            if segment.number in done.empty:
                log.info("changes.dropped", seq=segment.last_seq, bytes=segment.bytes)
        following = [reader for reader in before.readers if not reader.cut_off and reader.name not in done.cut_off]
        self._tell(following, now)
        self._metrics.change_log(
            before.bytes,
            worst_lag=max([reader.lag(now) for reader in following], default=0.0),
            readers=len(following),
            cut_off=len(before.readers) - len(following),
        )

    def _tell(self, readers: list[ReaderState], now: float) -> None:
        lagging = [reader for reader in readers if reader.lag(now) > self._alarm]
        self.lagging = [reader.name for reader in lagging]
        for reader in lagging:
            log.warning(
                "reader.lags", reader=reader.name, behind=reader.behind, seconds=round(reader.lag(now)), seq=reader.seq
            )
