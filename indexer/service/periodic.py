"""The loop that background tasks share: do the work, log a database error, wait, repeat."""

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import NoReturn, Self

import structlog

from indexer.store import DatabaseError

log = structlog.get_logger(__name__)


class DatabaseAttempt:
    """Context manager that logs a database error in its block and suppresses it, so that the caller can continue.

    Every other exception passes through. The log line contains the name of the current task. Usage::

        with DatabaseAttempt() as attempt:
            await store.save(row)
        self.last_error = attempt.error

    Attributes:
        error: The text of the database error, or None if the block raised none.
    """

    def __init__(self) -> None:
        self.error: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not isinstance(error, DatabaseError):
            return False
        self.error = str(error)
        task = asyncio.current_task()
        log.warning("database.unavailable", task=task and task.get_name(), error=self.error)
        return True


async def run_periodically(
    work: Callable[[], Awaitable[object]], interval: float, *, wait_first: bool = False
) -> NoReturn:
    """Call `work` repeatedly, with a pause of `interval` seconds after each call.

    A database error is logged, and the next call follows after the same pause. Every other exception ends the loop.

    Args:
        work: The function to call. Its result is ignored.
        interval: Seconds between the end of one call and the start of the next.
        wait_first: Pause before the first call, too.
    """
    if wait_first:
        await asyncio.sleep(interval)
    while True:
        with DatabaseAttempt():
            await work()
        await asyncio.sleep(interval)
