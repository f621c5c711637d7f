"""Turns by key, so that the many users of one key delay those of another key by at most one turn."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager


class Turns:
    """Admits one user at a time. Keys take turns; the users of one key follow each other in the order of arrival."""

    def __init__(self) -> None:
        self._taken = False
        self._waiting: OrderedDict[Hashable, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def turn(self, key: Hashable) -> AsyncIterator[None]:
        """Wait for a turn of the key, and hold it during the block."""
        await self._wait(key)
        try:
            yield
        finally:
            self._end()

    async def spend(self, key: Hashable, seconds: float) -> None:
        """Hold a turn of the key for this time. This limits the rate of all users together."""
        async with self.turn(key):
            await asyncio.sleep(seconds)

    async def _wait(self, key: Hashable) -> None:
        if not self._taken:
            self._taken = True
            return
        begins = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(begins)
        try:
            await begins
        except asyncio.CancelledError:
            if not begins.cancelled():
                self._end()  # the turn had begun
            raise

    def _end(self) -> None:
        while self._waiting:
            key, users = self._waiting.popitem(last=False)
            begins = users.popleft()
            if users:
                self._waiting[key] = users
            if not begins.done():
                begins.set_result(None)
                return
        self._taken = False
