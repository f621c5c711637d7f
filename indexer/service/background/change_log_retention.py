"""Trim the change log, report lagging consumers, and disconnect those that are too far behind."""

from time import time

import structlog

from indexer.monitoring.metrics import Metrics
from indexer.service.periodic import run_periodically
from indexer.store import ConsumerState, RetentionPolicy, Store

log = structlog.get_logger(__name__)


class ChangeLogRetention:
    """Applies the retention policy every `interval` seconds. All processes do this; the work is done only once.

    A registered consumer that lags by more than `lag_alarm` seconds is logged each time.

    Attributes:
        lagging: The names of the consumers that lagged at the last run.
    """

    def __init__(
        self, store: Store, policy: RetentionPolicy, metrics: Metrics, *, lag_alarm: float, interval: float = 60.0
    ) -> None:
        self._store = store
        self._policy = policy
        self._metrics = metrics
        self._lag_alarm = lag_alarm
        self._interval = interval
        self.lagging: list[str] = []

    async def run(self) -> None:
        """Apply the retention policy forever. Only an exception that is a bug ends it."""
        await run_periodically(self.trim, self._interval)

    async def trim(self) -> None:
        """Apply the retention policy once, and update the metrics.

        Raises:
            DatabaseError: The database is unavailable.
        """
        now = time()
        before, plan = await self._store.trim_change_log(self._policy, now)
        for consumer in before.consumers:
            if consumer.name in plan.disconnect:
                log.error("consumer.disconnected", reader=consumer.name, seq=consumer.seq, behind=consumer.behind)
        for segment in before.segments:
            if segment.number in plan.truncate:
                log.info("change-log.trimmed", seq=segment.last_seq, bytes=segment.bytes)
        following = [
            consumer for consumer in before.consumers if not consumer.cut_off and consumer.name not in plan.disconnect
        ]
        self._report_lagging(following, now)
        self._metrics.change_log(
            before.bytes,
            max_lag=max([consumer.lag(now) for consumer in following], default=0.0),
            following=len(following),
            cut_off=len(before.consumers) - len(following),
        )

    def _report_lagging(self, consumers: list[ConsumerState], now: float) -> None:
        lagging = [consumer for consumer in consumers if consumer.lag(now) > self._lag_alarm]
        self.lagging = [consumer.name for consumer in lagging]
        for consumer in lagging:
            seconds = round(consumer.lag(now))
            log.warning(
                "consumer.lagging", reader=consumer.name, behind=consumer.behind, seconds=seconds, seq=consumer.seq
            )
