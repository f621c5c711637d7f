"""Check continuously that the database answers."""

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import NoReturn

from indexer.db import Database
from indexer.db.process_reports import DatabaseCheck, ProcessReport
from indexer.telemetry.conditions import DATABASE_ERRORS, DATABASE_UNAVAILABLE, Conditions
from indexer.telemetry.metrics import Metrics

INTERVAL_SECONDS = 2.0


class DatabaseMonitor:
    """Executes `select 1` every `INTERVAL_SECONDS`, on a connection of its own, with a short timeout.

    So a database that hangs is noticed within seconds, although statements of the stages may take a minute. The
    monitor also reports the operations of the stages that failed: as part of an outage if the database does not
    answer, else as a condition of its own.

    Attributes:
        answering_since: When the database began to answer (monotonic seconds); None while it does not answer.
    """

    def __init__(self, db: Database, check: DatabaseCheck, conditions: Conditions, metrics: Metrics) -> None:
        self._db = db
        self._conditions = conditions
        self._metrics = metrics
        self._check = check
        self._failed_operations = 0
        self.answering_since: float | None = monotonic()

    async def run(self, report: Callable[[], ProcessReport]) -> NoReturn:
        """Check the database forever, and store what `report` returns, for `indexer status`."""
        try:
            while True:
                await self.check()
                if self.answering_since is not None:
                    await self.save(report())
                await asyncio.sleep(INTERVAL_SECONDS)
        finally:
            self._check.close()

    async def check(self) -> None:
        """Check the database once."""
        error = await self._check.run()
        failed = self._db.failed_operations - self._failed_operations
        self._failed_operations += failed
        self._metrics.database_up.set(error is None)
        if error is not None:
            message = f"the database does not answer: {error}; everything that needs it is retried"
            self._conditions.report(DATABASE_UNAVAILABLE, message=message, count=failed)
            self.answering_since = None
            return
        if self.answering_since is None:
            self._conditions.end(DATABASE_UNAVAILABLE)
            self.answering_since = monotonic()
        elif failed:
            message = f"the database answers, but an operation failed and is retried: {self._db.last_error}"
            self._conditions.report(DATABASE_ERRORS, message=message, count=failed)

    async def save(self, report: ProcessReport) -> None:
        """Store the state of this process."""
        if (error := await self._check.run(report)) is not None:
            message = f"the state for `indexer status` was not stored, and is retried: {error}"
            self._conditions.report(DATABASE_ERRORS, message=message)
