"""Call a function once for all items that wait, instead of once for each item.

There is no fixed wait: while one call runs, items that arrive wait for it, and the next call gets all of them.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(slots=True, eq=False)
class _Waiting(Generic[Item, Result]):
    items: Sequence[Item]
    results: list[Result] = field(default_factory=list)
    error: Exception | None = None

    @property
    def done(self) -> bool:
        return bool(self.results) or self.error is not None


class SharedCalls(Generic[Item, Result]):
    """Shares the calls of one function. One of the waiting callers runs the call for all of them."""

    def __init__(
        self,
        call: Callable[[list[Item]], Awaitable[Result]],
        may_share: Callable[[Sequence[Item]], bool],
        running: asyncio.Semaphore | None = None,
    ) -> None:
        """Share calls of `call`. Items of several callers share one if `may_share` returns True for all of them.

        `running` limits the calls of several objects that run side by side. Items that arrive until a call begins
        belong to it.
        """
        self._call = call
        self._may_share = may_share
        self._waiting: list[_Waiting[Item, Result]] = []
        self._turn = asyncio.Lock()
        self._running = running or asyncio.Semaphore(1)

    async def add(self, items: Sequence[Item]) -> Result:
        """Return the result of the call that gets these items; raise its exception.

        If the caller that runs the call is cancelled, another one repeats it.
        """
        waiting = _Waiting[Item, Result](items)
        self._waiting.append(waiting)
        try:
            async with self._turn:
                while not waiting.done:
                    async with self._running:
                        await self._call_next()
        finally:
            if not waiting.done:
                self._waiting.remove(waiting)
        if waiting.error is not None:
            raise waiting.error
        return waiting.results[0]

    async def _call_next(self) -> None:
        group = self._next_group()
        items = [item for waiting in group for item in waiting.items]
        try:
            result = await self._call(items)
        except Exception as error:  # noqa: BLE001 - each caller raises it
            for waiting in group:
                waiting.error = error
        else:
            for waiting in group:
                waiting.results.append(result)
        self._waiting = [waiting for waiting in self._waiting if not waiting.done]

    def _next_group(self) -> list[_Waiting[Item, Result]]:
        group: list[_Waiting[Item, Result]] = []
        items: list[Item] = []
        for waiting in self._waiting:
            items += waiting.items
            if group and not self._may_share(items):
                break
            group.append(waiting)
        return group
