"""A read of the database that many callers share."""

import asyncio
from collections.abc import Awaitable, Callable
from math import inf
from time import monotonic, time
from typing import Generic, TypeVar

from indexer.db import DatabaseError

T = TypeVar("T")


class RecentRead(Generic[T]):
    """Reads at most once per `interval` seconds, and one at a time, however many callers ask.

    Attributes:
        value: The last value that was read; None before the first one.
        read_at: When it was read, in Unix seconds; None before the first one.
        error: Why the last read failed; None if it succeeded.
    """

    def __init__(self, read: Callable[[], Awaitable[T]], *, interval: float, timeout: float) -> None:
        self._read = read
        self._interval = interval
        self._timeout = timeout
        self._lock = asyncio.Lock()
        self._next_at = -inf
        self.value: T | None = None
        self.read_at: float | None = None
        self.error: str | None = None

    async def refresh(self) -> None:
        """Read again if the last attempt is `interval` seconds ago; keep the last value if that fails."""
        async with self._lock:
            if monotonic() < self._next_at:
                return
            try:
                async with asyncio.timeout(self._timeout):
                    self.value = await self._read()
                self.read_at, self.error = time(), None
            except DatabaseError as error:
                self.error = str(error)
            except TimeoutError:
                self.error = f"the database did not answer within {self._timeout:.0f} s"
            self._next_at = monotonic() + self._interval
