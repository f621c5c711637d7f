"""Notify the listeners of new changes, outside of the transactions that write them, and report old snapshots.

All databases and roles of a Postgres server share one queue of notifications. A session that listens and leaves a
transaction open keeps it from being emptied, and any session can fill it. Then each COMMIT fails that has a
notification. So the commits that store records have none. A listener that misses a notification reads the log when it
polls.

A session that leaves a snapshot open keeps the old versions of cursors and repos, which each batch must read.
"""

import asyncio
from dataclasses import dataclass
from time import monotonic
from typing import NoReturn

from indexer.concurrency.event_wait import wait_for_event
from indexer.concurrency.stage_progress import StageProgress
from indexer.db import Database
from indexer.db.blocking_sessions import BlockingSession
from indexer.db.periodic import DatabaseAttempt
from indexer.telemetry.conditions import DEAD_ROWS_KEPT, NOTIFICATION_QUEUE_FILLS, Conditions
from indexer.telemetry.metrics import Metrics

POLL_SECONDS = 1.0
"""Interval at which the log is read even if this process wrote nothing: commands and functions in SQL write, too."""
SPACING_SECONDS = 0.02
"""Minimum time from one notification to the next. Several commits then share one."""
FULL_SHARE, END_SHARE = 0.05, 0.5
"""How full the queue is when it is reported, and when the oldest transaction of a consumer is ended."""
MAX_TRANSACTION_SECONDS = 300.0
"""Age of a transaction of a consumer from which it is ended."""
SNAPSHOT_CHECK_SECONDS = 10.0
MAX_DEAD_CURSORS = 200_000
"""Batches after which a snapshot is reported, and that of a consumer is ended. They take an hour at 50 per second. They
make the next one about 3 ms slower, and about 8 ms more for a repo that all of them have written."""


@dataclass(eq=False)
class ChangeNotifier:
    """Notifies the channel `atproto_changes`, and watches the queue of notifications and the dead rows.

    Attributes:
        stage: Its progress. Each notification is work.
    """

    db: Database
    metrics: Metrics
    conditions: Conditions
    max_transaction_seconds: float = MAX_TRANSACTION_SECONDS
    max_dead_cursors: int = MAX_DEAD_CURSORS

    def __post_init__(self) -> None:
        self._seq = 0
        self._next_check = self._next_snapshot_check = 0.0
        self.stage = StageProgress("change notifier")

    async def run(self) -> NoReturn:
        """Notify forever. Only an exception that is a bug ends it."""
        while True:
            with DatabaseAttempt(self.stage):
                await self.notify()
                if monotonic() >= self._next_snapshot_check:
                    self._next_snapshot_check = monotonic() + SNAPSHOT_CHECK_SECONDS
                    await self.check_snapshots()
            await asyncio.sleep(SPACING_SECONDS)
            await wait_for_event(self.db.numbered, POLL_SECONDS)

    async def notify(self) -> None:
        """Notify the listeners if there are changes since the last call; report a queue that fills.

        Raises:
            DatabaseError: The database is unavailable.
        """
        self.db.numbered.clear()
        notified = await self.db.changes.notify(self._seq)
        if notified.seq is not None:
            self._seq = notified.seq
        if notified.queue_usage < FULL_SHARE:
            self.conditions.end(NOTIFICATION_QUEUE_FILLS)
        elif monotonic() >= self._next_check:
            self._next_check = monotonic() + POLL_SECONDS
            await self._report(notified.queue_usage)
        self.metrics.notification_queue_ratio.set(notified.queue_usage)

    async def check_snapshots(self) -> None:
        """Report the snapshots that keep many dead rows, and end those of consumers.

        Raises:
            DatabaseError: The database is unavailable.
        """
        found = await self.db.blocking_sessions.end_old_snapshots(self.max_dead_cursors, self.max_transaction_seconds)
        if found.dead_cursors < self.max_dead_cursors:
            self.conditions.end(DEAD_ROWS_KEPT)
            return
        text = "; ".join([*map(_describe, found.sessions), *found.others]) or "nothing that is visible"
        message = f"{found.dead_cursors} old versions of the cursor cannot be removed; they are kept by {text}"
        self.conditions.report(DEAD_ROWS_KEPT, message=message, value=found.dead_cursors)

    async def _report(self, usage: float) -> None:
        limit = self.max_transaction_seconds if usage >= END_SHARE else float("inf")
        sessions = await self.db.blocking_sessions.end_oldest_transaction(limit)
        text = "; ".join(map(_describe, sessions)) or "none is visible"
        message = f"the queue of notifications of the Postgres server is {usage:.0%} full; oldest transactions: {text}"
        self.conditions.report(NOTIFICATION_QUEUE_FILLS, message=message, value=round(usage, 3))


def _describe(session: BlockingSession) -> str:
    age = "of unknown age" if session.seconds is None else f"open for {session.seconds:.0f} s"
    return f"session {session.pid} of role {session.role}, {age}{', ended' if session.ended else ''}"
