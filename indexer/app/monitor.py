"""Find conditions in the state of the running daemon.

They are about the database, rejected messages, failing identity lookups, failing hosts and failing relays.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import NoReturn

from indexer.db import Database
from indexer.db.process_reports import DatabaseCheck, ProcessReport
from indexer.live.batch_writer import SettledTotals
from indexer.live.streams import Stream
from indexer.net.http.host_limits import HostLimits
from indexer.net.identity.did_resolver import Method
from indexer.net.identity.identity_cache import LookupTotals
from indexer.telemetry.conditions import (
    DATABASE_ERRORS,
    DATABASE_UNAVAILABLE,
    HOST_FAILING,
    IDENTITY_LOOKUPS_FAILING,
    MESSAGES_REJECTED,
    RELAY_FAILING,
    ConditionKind,
    Conditions,
)
from indexer.telemetry.metrics import Metrics

INTERVAL_SECONDS = 2.0
WINDOW_SECONDS = 60.0
MIN_MESSAGES = 20
"""Settled messages within a minute that are enough to judge the share of one rejection reason."""
MIN_LOOKUPS = 5
"""Identity lookups within a minute that are enough to judge the share of failures."""


@dataclass(eq=False)
class DatabaseMonitor:
    """Executes `select 1` every `INTERVAL_SECONDS`, on a connection of its own, with a short timeout.

    So a database that hangs is noticed within seconds, although statements of the stages may take a minute. The
    monitor also reports the operations of the stages that failed: as part of an outage if the database does not
    answer, else as a condition of its own.

    Attributes:
        answering_since: When the database began to answer (monotonic seconds); None while it does not answer.
    """

    database: Database
    session: DatabaseCheck
    conditions: Conditions
    metrics: Metrics
    answering_since: float | None = field(default_factory=monotonic)
    _failed_operations: int = 0

    async def run(self, report: Callable[[], ProcessReport]) -> NoReturn:
        """Check the database forever, and store what `report` returns, for `indexer status`."""
        try:
            while True:
                await self.check()
                if self.answering_since is not None and (error := await self.session.run(report())) is not None:
                    message = f"the state for `indexer status` was not stored, and is retried: {error}"
                    self.conditions.report(DATABASE_ERRORS, message=message)
                await asyncio.sleep(INTERVAL_SECONDS)
        finally:
            self.session.close()

    async def check(self) -> None:
        """Check the database once."""
        error = await self.session.run()
        failed = self.database.failed_operations - self._failed_operations
        self._failed_operations += failed
        self.metrics.database_up.set(error is None)
        if error is not None:
            message = f"the database does not answer: {error}; everything that needs it is retried"
            self.conditions.report(DATABASE_UNAVAILABLE, message=message, count=failed)
            self.answering_since = None
            return
        if self.answering_since is None:
            self.conditions.end(DATABASE_UNAVAILABLE)
            self.answering_since = monotonic()
        elif failed:
            message = f"the database answers, but an operation failed and is retried: {self.database.last_error}"
            self.conditions.report(DATABASE_ERRORS, message=message, count=failed)


class RecentTotals:
    """Compares samples of counters that only grow. Counters are zero before the first sample."""

    def __init__(self, began_at: float) -> None:
        self._samples: deque[tuple[float, Counter[str]]] = deque([(began_at, Counter())])

    def add(self, now: float, totals: Mapping[str, int]) -> Counter[str]:
        """Add a sample; return how much each counter grew within the window."""
        newest = Counter(totals)
        self._samples.append((now, newest))
        while len(self._samples) > 1 and self._samples[1][0] <= now - WINDOW_SECONDS:
            self._samples.popleft()
        return newest - self._samples[0][1]


@dataclass(eq=False)
class DaemonMonitor:
    """Compares the totals of the stages with those of a minute ago; `run` does so every `INTERVAL_SECONDS`."""

    settled: SettledTotals
    lookups: Mapping[Method, LookupTotals]
    hosts: HostLimits
    streams: Sequence[Stream]
    conditions: Conditions
    clock: Callable[[], float] = monotonic

    def __post_init__(self) -> None:
        self._recent = RecentTotals(self.clock())

    async def run(self) -> NoReturn:
        """Check forever."""
        while True:
            await asyncio.sleep(INTERVAL_SECONDS)
            self.check()

    def check(self) -> None:
        """Report the conditions that hold now, and end those that are over."""
        directory = self.lookups["plc"]  # any host can serve a did:web, so its failures say nothing about this daemon
        counted = {"settled": self.settled.settled, "failed": directory.failed, "answered": directory.answered}
        recent = self._recent.add(
            self.clock(), counted | {str(reason): count for reason, count in self.settled.rejected.items()}
        )
        settled, lookups = recent["settled"], recent["failed"] + recent["answered"]
        for reason in self.settled.rejected:
            message = (
                f"{reason} rejects {recent[reason] / max(settled, 1):.0%} of {settled} messages of the last minute; "
                f"example: {self.settled.examples.get(reason, '-')}"
            )
            self._judge(MESSAGES_REJECTED, reason, recent[reason], settled, MIN_MESSAGES, message)
        message = (
            f"identity lookups fail: {recent['failed'] / max(lookups, 1):.0%} of {lookups} in the last minute; "
            f"last error: {directory.last_error}; affected repos stay desynchronized and are retried"
        )
        self._judge(IDENTITY_LOOKUPS_FAILING, "", recent["failed"], lookups, MIN_LOOKUPS, message)
        for state in self.hosts.failing():
            message = f"requests to {state.host} fail: {state.last_error}; it is asked again after growing pauses"
            self.conditions.report(HOST_FAILING, state.host, message=message, count=0)
        for stream in self.streams if len(self.streams) > 1 else ():
            relay = stream.subscription.relays[0]
            if (trouble := stream.trouble) is None:
                self.conditions.end(RELAY_FAILING, relay)
            else:
                message = f"the stream of {relay} delivers nothing: {trouble}; other relays are consumed meanwhile"
                self.conditions.report(RELAY_FAILING, relay, message=message, count=0)
        self.conditions.update()

    def _judge(self, kind: ConditionKind, subject: str, part: int, total: int, minimum: int, message: str) -> None:
        """Begin a condition if `part` is most of at least `minimum`, and end it when it is no longer most of them.

        Without anything in the last minute, the condition ends after the quiet time of its kind.
        """
        is_most = 2 * part > total
        if is_most and (total >= minimum or self.conditions.is_active(kind, subject)):
            self.conditions.report(kind, subject, message=message, value=round(part / total, 4), count=0)
        elif total and not is_most:
            self.conditions.end(kind, subject)
