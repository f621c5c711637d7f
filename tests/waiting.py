"""Wait for a condition instead of sleeping."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

TIMEOUT = 120.0
POLL_INTERVAL = 0.02


async def until(condition: Callable[[], Awaitable[bool] | bool], describe: Callable[[], Any] = lambda: "") -> None:
    """Wait until the condition holds; fail with the result of `describe` if it does not within `TIMEOUT` seconds."""
    try:
        async with asyncio.timeout(TIMEOUT):
            while True:
                result = condition()
                if result if isinstance(result, bool) else await result:
                    return
                await asyncio.sleep(POLL_INTERVAL)
    except TimeoutError:
        raise AssertionError(f"not true after {TIMEOUT:.0f} s: {describe()}") from None
