"""Background tasks whose failures are reported even if no caller awaits them."""

import asyncio
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")


class BackgroundTasks:
    """A set of running tasks. An exception that ends one is a bug in this program, and `run` raises it at once."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()
        self._failed: asyncio.Future[NoReturn] = asyncio.get_running_loop().create_future()

    def start(self, coroutine: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Run `coroutine` as a task with this name."""
        task = asyncio.create_task(coroutine, name=name)
        self._running.add(task)
        task.add_done_callback(self._end)
        return task

    async def run(self) -> NoReturn:
        """Wait until a task fails, and raise its exception."""
        await asyncio.shield(self._failed)

    async def close(self) -> None:
        """Cancel the tasks that are running, and wait for their end."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _end(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._failed.done():
            self._failed.set_exception(error)
