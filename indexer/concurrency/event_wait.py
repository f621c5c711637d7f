"""Wait for an event with a time limit."""

import asyncio


async def wait_for_event(event: asyncio.Event, seconds: float | None) -> bool:
    """Wait until the event is set, at most for `seconds` (None: without a limit); return False if it was not."""
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False
