"""Tasks that run while a block of a test does."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager


@asynccontextmanager
async def running(*coroutines: Coroutine[None, None, None]) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Run the coroutines during the block, which fails if one of them does; yield their tasks."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
            raise result
