"""Tasks that nobody may be waiting for, and whose failures must be heard all the same."""

import asyncio
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")


class Tasks:
    """Running tasks. An exception that ends one is a bug of ours, and ends `run` at once."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()
        self._failed: asyncio.Future[NoReturn] = asyncio.get_running_loop().create_future()

    def start(self, coroutine: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        task = asyncio.create_task(coroutine, name=name)
        self._running.add(task)
        task.add_done_callback(self._end)
        return task

    async def run(self) -> NoReturn:
        """Raises what ended a task, the first one that failed."""
        await asyncio.shield(self._failed)

    async def close(self) -> None:
        """Cancels those that are running."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _end(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._failed.done():
            self._failed.set_exception(error)
