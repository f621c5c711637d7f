"""Report sessions that leave transactions open, and end those of consumers that harm others.

All databases and roles of a Postgres server share one queue of notifications. A session that listens and leaves a
transaction open keeps it from being emptied. When it is three quarters full, commits notify nobody
(`indexer.number_batch`), and a listener reads the log when it polls. `indexer.db.blocking_sessions` says what else open
transactions harm.
"""

from dataclasses import dataclass
from math import inf
from typing import NoReturn

from indexer.concurrency.stage_progress import Work
from indexer.db import Database
from indexer.db.blocking_sessions import BlockingSession
from indexer.db.periodic import run_periodically
from indexer.telemetry.conditions import DEAD_ROWS_KEPT, NOTIFICATION_QUEUE_FILLS, Conditions
from indexer.telemetry.metrics import Metrics

CHECK_SECONDS = 10.0
FULL_SHARE, END_SHARE = 0.05, 0.5
"""How full the queue is when it is reported, and when the oldest transaction of a consumer is ended."""
MAX_TRANSACTION_SECONDS = 300.0
"""Age of a transaction of a consumer from which it is ended."""
MAX_DEAD_CURSORS = 200_000
"""Batches after which a snapshot is reported, and that of a consumer is ended. They take an hour at 50 per second. They
make the next one about 3 ms slower, and about 8 ms more for a repo that all of them have written."""


@dataclass(eq=False)
class OpenTransactions:
    """Watches the queue of notifications and the dead rows."""

    db: Database
    metrics: Metrics
    conditions: Conditions
    max_transaction_seconds: float = MAX_TRANSACTION_SECONDS
    max_dead_cursors: int = MAX_DEAD_CURSORS

    async def run(self) -> NoReturn:
        """Check forever. Only an exception that is a bug ends it."""
        await run_periodically(self.check, CHECK_SECONDS, Work())

    async def check(self) -> None:
        """Check the queue of notifications and the dead rows."""
        await self.check_queue(await self.db.changes.notification_queue_usage())
        await self.check_snapshots()

    async def check_queue(self, usage: float) -> None:
        """Report a queue of notifications that fills, and end the oldest transaction of a consumer if it is half full.

        `usage` is the used share of the queue, from 0 to 1.
        """
        self.metrics.notification_queue_ratio.set(usage)
        if usage < FULL_SHARE:
            self.conditions.end(NOTIFICATION_QUEUE_FILLS)
            return
        limit = self.max_transaction_seconds if usage >= END_SHARE else inf
        sessions = await self.db.blocking_sessions.end_oldest_transaction(limit)
        text = "; ".join(map(_describe, sessions)) or "none is visible"
        message = f"the queue of notifications of the Postgres server is {usage:.0%} full; oldest transactions: {text}"
        self.conditions.report(NOTIFICATION_QUEUE_FILLS, message=message, value=round(usage, 3))

    async def check_snapshots(self) -> None:
        """Report the snapshots that keep many dead rows, and end those of consumers."""
        found = await self.db.blocking_sessions.end_old_snapshots(self.max_dead_cursors, self.max_transaction_seconds)
        if found.dead_cursors < self.max_dead_cursors:
            self.conditions.end(DEAD_ROWS_KEPT)
            return
        text = "; ".join([*map(_describe, found.sessions), *found.others]) or "nothing that is visible"
        message = f"{found.dead_cursors} old versions of the cursor cannot be removed; they are kept by {text}"
        self.conditions.report(DEAD_ROWS_KEPT, message=message, value=found.dead_cursors)


def _describe(session: BlockingSession) -> str:
    age = "of unknown age" if session.seconds is None else f"open for {session.seconds:.0f} s"
    return f"session {session.pid} of role {session.role}, {age}{', ended' if session.ended else ''}"
