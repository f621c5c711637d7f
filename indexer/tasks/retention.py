"""Trim the change log, report lagging consumers, and disconnect those that are too far behind."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest
from time import time
from typing import NoReturn

import structlog

from indexer.concurrency.stage_progress import StageProgress
from indexer.db import Database
from indexer.db.change_log_segments import ChangeLogState, ConsumerState, RetentionPolicy, Segment
from indexer.db.periodic import DatabaseAttempt
from indexer.telemetry.metrics import MAX_LISTED, Metrics

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class ChangeLogRetention:
    """Applies the retention policy. All processes do this; the work is done only once.

    A registered consumer is logged when it begins to lag by more than `lag_alarm` seconds, and when it no longer does.
    If the log reaches twice its size, sessions of consumers are ended whose transactions prevent trimming and have been
    open for `max_transaction_seconds`.

    Attributes:
        retry: Pause after an error, and the longest one while a transaction has locked a segment, in seconds.
        stage: Its progress. Each check of the change log is work.
        lagging: The names of the consumers that lagged at the last check.
    """

    db: Database
    policy: RetentionPolicy
    metrics: Metrics
    lag_alarm: float = 3_600.0
    retry: float = 5.0
    max_transaction_seconds: float = 60.0

    def __post_init__(self) -> None:
        self.stage = StageProgress("change log retention")
        self._blocked = set[int]()
        self.lagging: list[str] = []

    async def run(self) -> NoReturn:
        """Apply the retention policy forever. Only an exception that is a bug ends it."""
        while True:
            locked: Sequence[int] = ()
            with DatabaseAttempt(self.stage) as attempt:
                locked = await self.trim()
            interval = self.policy.check_seconds
            await asyncio.sleep(self.retry if attempt.error else min(self.retry, interval) if locked else interval)

    async def trim(self) -> Sequence[int]:
        """Apply the retention policy once, report its result, and update the metrics.

        Returns:
            Numbers of the segments that were not truncated because a transaction has locked them.
        """
        now = time()
        before, plan = await self.db.segments.trim(self.policy, now)
        for consumer in before.consumers:
            if consumer.name in plan.disconnect:
                log.error("consumer.disconnected", reader=consumer.name, seq=consumer.seq, behind=consumer.behind)
        self._report_trimmed([segment for segment in before.segments if segment.number in plan.truncate], now)
        if plan.locked and self.policy.is_overfull(before.bytes):
            await self._end_blocking_sessions(plan.locked)
        following = [
            consumer for consumer in before.consumers if not consumer.cut_off and consumer.name not in plan.disconnect
        ]
        self._report_lagging(following, now)
        self._measure(before, following, now)
        return plan.locked

    def _report_trimmed(self, segments: Sequence[Segment], now: float) -> None:
        """Log what was trimmed, and warn if changes were trimmed before their time, because of the size of the log."""
        ages = [now - segment.last_time for segment in segments if segment.last_time is not None]
        for segment in segments:
            log.info("change-log.trimmed", seq=segment.last_seq, bytes=segment.bytes)
        if ages and min(ages) < self.policy.max_age:
            limit, retention = self.policy.max_bytes, round(self.policy.max_age)
            log.warning("change-log.size-limit", seconds=round(min(ages)), retention=retention, limit=limit)

    def _measure(self, state: ChangeLogState, following: Sequence[ConsumerState], now: float) -> None:
        """Set the gauges. `following` are the consumers that were not disconnected."""
        metrics, lags = self.metrics, {consumer: consumer.lag(now) for consumer in following}
        metrics.change_log_bytes.set(state.bytes)
        metrics.consumer_lag_seconds.set(max(lags.values(), default=0.0))
        metrics.consumers["following"].set(len(following))
        metrics.consumers["cut-off"].set(len(state.consumers) - len(following))
        metrics.consumer_behind_seconds.clear()
        metrics.consumer_behind_changes.clear()
        for consumer in nlargest(MAX_LISTED, following, key=lags.__getitem__):
            metrics.consumer_behind_seconds.labels(consumer.name).set(lags[consumer])
            metrics.consumer_behind_changes.labels(consumer.name).set(consumer.behind)

    async def _end_blocking_sessions(self, segments: tuple[int, ...]) -> None:
        sessions = await self.db.blocking_sessions.end_users_of_segments(segments, self.max_transaction_seconds)
        reported, self._blocked = self._blocked, {session.pid for session in sessions if not session.ended}
        for session in sessions:
            if session.ended:
                log.error("consumer.session-ended", **session.fields)
            elif session.pid not in reported:
                log.error("change-log.blocked", **session.fields)

    def _report_lagging(self, consumers: list[ConsumerState], now: float) -> None:
        lagging = [consumer for consumer in consumers if consumer.lag(now) > self.lag_alarm]
        before, self.lagging = self.lagging, [consumer.name for consumer in lagging]
        for consumer in consumers:
            if consumer.name in before and consumer.name not in self.lagging:
                log.info("consumer.caught-up", reader=consumer.name)
        for consumer in [consumer for consumer in lagging if consumer.name not in before]:
            seconds = round(consumer.lag(now))
            log.warning(
                "consumer.lagging", reader=consumer.name, behind=consumer.behind, seconds=seconds, seq=consumer.seq
            )
