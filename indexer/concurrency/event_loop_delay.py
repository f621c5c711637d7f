"""Measure how late the event loop runs a timer that is due: for this time, every other task waited, too."""

import asyncio
from collections.abc import Callable
from typing import NoReturn

INTERVAL_SECONDS = 0.05


async def measure_delays(observe: Callable[[float], None], interval: float = INTERVAL_SECONDS) -> NoReturn:
    """Call `observe` every `interval` seconds with the delay of this call in seconds."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + interval
        await asyncio.sleep(interval)
        observe(max(0.0, loop.time() - due))
