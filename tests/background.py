"""Tasks that run while a block of a test does, or before a caller gets a result."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest


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


@asynccontextmanager
async def changed_before(owner: object, name: str, change: Callable[[Any], Awaitable[None]]) -> AsyncIterator[None]:
    """Begin `change` with the result of the first call of a method, before its caller gets it, and end it if it can."""
    original, changes = getattr(owner, name), list[asyncio.Future[None]]()

    async def result(*arguments: object) -> object:
        patch.undo()
        found = await original(*arguments)
        changes.append(asyncio.ensure_future(change(found)))
        await asyncio.wait(changes, timeout=0.1)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, result)
        yield
    await changes[0]
