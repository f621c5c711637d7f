"""Run the real daemon in the test process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from indexer.daemon import Daemon, open_daemon
from indexer.settings import Settings
from tests import waiting
from tests.waiting import until


def settings_for(relay_url: str, plc_url: str, directory: Path, **changes: Any) -> Settings:
    """Return settings for a network on loopback, whose stream is read from its beginning."""
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
async def run_daemon(settings: Settings, dsn: str) -> AsyncIterator[Daemon]:
    """Run the daemon for the duration of the block, and drain it at the end; raise what ended it early."""
    stop = asyncio.Event()
    async with open_daemon(settings, dsn) as running:
        task = asyncio.create_task(running.run(stop))
        try:
            yield running
        finally:
            stop.set()
            await asyncio.wait_for(task, waiting.TIMEOUT)


async def wait_for_cursor(running: Daemon, relay_url: str, seq: int) -> None:
    """Wait until the cursor in the database has reached `seq`, and the metrics include what was written."""

    async def reached() -> bool:
        cursor = await running.store.cursor(relay_url, "0/1")
        return cursor is not None and cursor >= seq and (running.stream_position.watermark.position or 0) >= seq

    def state() -> str:
        return f"cursor at {running.stream_position.watermark.position}, wanted {seq}: {running.probe.status()}"

    await until(reached, state)
