"""Run the real daemon in the test process."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from indexer.app.daemon import Daemon, open_daemon
from indexer.app.process_setup import StopRequest
from indexer.app.settings import Settings
from indexer.app.tuning import Tuning
from indexer.atproto.limits import Limits
from indexer.concurrency.stage_progress import StageProgress
from tests import waiting
from tests.database_checks import stored_seq
from tests.event_loop_watch import EventLoopWatch
from tests.waiting import until


class NarrowSettings(Settings):
    """Settings with other limits than the usual ones."""

    narrow: dict[str, int]

    @property
    def limits(self) -> Limits:
        return replace(super().limits, **self.narrow)


def settings_for(relay_url: str, plc_url: str, directory: Path, **changes: Any) -> Settings:
    """Return settings for a network on loopback, whose stream is read from its beginning; `narrow`: other limits."""
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
    return (NarrowSettings if "narrow" in changes else Settings)(**(local | changes))


@asynccontextmanager
async def run_daemon(
    settings: Settings, dsn: str, others: Sequence[StageProgress] = (), tuning: Tuning | None = None
) -> AsyncIterator[Daemon]:
    """Run the daemon for the duration of the block, and drain it at the end; raise what ended it early.

    Fail if the daemon blocked the event loop. Work of the test and of its local network does not count. `others` are
    stages of the process outside the daemon.
    """
    stop = StopRequest()
    ready: asyncio.Future[Daemon] = asyncio.get_running_loop().create_future()

    async def serve() -> None:
        async with open_daemon(settings, dsn, others=others, tuning=tuning) as running:
            ready.set_result(running)
            await running.run(stop)

    with EventLoopWatch() as watch:
        task = asyncio.create_task(serve(), context=watch.context)
        begun: set[asyncio.Future[Any]] = {task, ready}
        try:
            await asyncio.wait(begun, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                task.result()
            yield ready.result()
        finally:
            stop.set()
            await asyncio.wait_for(task, waiting.TIMEOUT)
    watch.check()


async def wait_for_cursor(running: Daemon, relay_url: str, seq: int) -> None:
    """Wait until the cursor in the database has reached `seq`, and the metrics include what was written."""

    def position() -> int:
        positions = [stream.position for stream in running.streams]
        return max([one.watermark.position or 0 for one in positions if one.origin.relay == relay_url], default=0)

    async def reached() -> bool:
        cursor = await stored_seq(running.db, relay_url)
        return cursor is not None and cursor >= seq and position() >= seq

    def state() -> str:
        return f"cursor at {position()}, wanted {seq}: {running.status.document()}"

    await until(reached, state)
