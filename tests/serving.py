"""The real daemon, in this process, for tests; and waiting for it without sleeping blindly."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from indexer.config import Settings
from indexer.run import Daemon, daemon

PATIENCE = 60.0
POLL = 0.02


def settings_for(relay_url: str, plc_url: str, directory: Path, **changes: Any) -> Settings:
    """Settings for a network on loopback, read from its beginning."""
    local: dict[str, Any] = {
        "data_dir": directory,
        "relays": relay_url,
        "plc_url": plc_url,
        "start": "oldest",
        "allow_private_hosts": "true",
        "plc_rate": "1000",
        "handle_rate": "0",
        "host_rate": "1000",
        "host_concurrency": "50",
        "outbound_rate": "1000",
    }
    return Settings(**(local | changes))


@asynccontextmanager
async def serving(settings: Settings, dsn: str) -> AsyncIterator[Daemon]:
    """The daemon at work; drains at the end, and raises what ended it early."""
    stop = asyncio.Event()
    async with daemon(settings, dsn) as running:
        task = asyncio.create_task(running.run(stop))
        try:
            yield running
        finally:
            stop.set()
            await asyncio.wait_for(task, PATIENCE)


async def until(condition: Callable[[], Awaitable[bool] | bool], otherwise: Callable[[], Any] = lambda: "") -> None:
    """Waits until the condition holds; fails with what `otherwise` says if it doesn't in time."""
    try:
        async with asyncio.timeout(PATIENCE):
            while True:
                answer = condition()
                if answer if isinstance(answer, bool) else await answer:
                    return
                await asyncio.sleep(POLL)
    except TimeoutError:
        raise AssertionError(f"still not so after {PATIENCE:.0f} s: {otherwise()}") from None


async def saved(running: Daemon, relay_url: str, seq: int) -> None:
    """Waits until the database's own cursor has reached `seq`, and the metrics count what was written."""

    async def reached() -> bool:
        cursor = await running.store.cursor(relay_url, "0/1")
        return cursor is not None and cursor >= seq and (running.place.watermark.position or 0) >= seq

    await until(reached, lambda: f"cursor at {running.place.watermark.position}, wanted {seq}: {running.status()}")
