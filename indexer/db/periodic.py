"""The loops that background tasks share: do the work, suppress a database error, wait, repeat."""

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import NoReturn, Self, TypeVar

import structlog

from indexer.concurrency.stage_progress import Work
from indexer.db.database_errors import DatabaseError
from indexer.reasons import FetchFailure

T = TypeVar("T")
log = structlog.get_logger(__name__)


class DatabaseAttempt:
    """Context manager that suppresses a database error in its block, so that the caller can continue.

    The error is logged at the level debug: many tasks meet the same outage, which `DatabaseMonitor` logs once.

    With `work`, the block is work of a stage. An error that the database answers with is no stall of the stage. After a
    timeout, the stage still waits: the next attempt does not begin anew.

    Attributes:
        error: The text of the database error, or None if the block raised none.
    """

    def __init__(self, work: Work | None = None) -> None:
        self._work = work or Work()
        self.error: str | None = None

    def __enter__(self) -> Self:
        self._work.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not isinstance(error, DatabaseError):
            self._work.idle()
            self._work.failed(None)
            return False
        if error.reason is not FetchFailure.TIMEOUT:
            self._work.idle()
        self._work.failed(str(error))
        self.error = str(error)
        task = asyncio.current_task()
        log.debug("database.operation-failed", task=task and task.get_name(), error=self.error)
        return True


async def run_periodically(
    work: Callable[[], Awaitable[object]], interval: float, progress: Work, *, wait_first: bool = False
) -> NoReturn:
    """Call `work` repeatedly, with a pause of `interval` seconds after each call.

    Each call is work of `progress`. With `wait_first`, a pause is before the first call, too. A database error is
    suppressed, and the next call follows after the same pause. Every other exception ends the loop.
    """
    if wait_first:
        await asyncio.sleep(interval)
    while True:
        with DatabaseAttempt(progress):
            await work()
        await asyncio.sleep(interval)


async def when_available(call: Callable[[], Awaitable[T]], pause: float) -> T:
    """Return the result of `call`, which is repeated with a pause in seconds while the database is unavailable."""
    while True:
        with DatabaseAttempt():
            return await call()
        await asyncio.sleep(pause)
