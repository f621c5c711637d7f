import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from indexer.app.process_setup import StopRequest
from indexer.app.stage_runner import run_stages
from indexer.app.stages import Stage
from tests.app.fake_daemon import fake_daemon


def runs_after(started: asyncio.Event) -> Callable[[], Coroutine[Any, Any, None]]:
    async def run() -> None:
        started.set()
        await asyncio.Event().wait()

    return run


async def test_stage_that_needs_the_shard_starts_when_this_process_owns_it() -> None:
    owned, needing, other, stop = asyncio.Event(), asyncio.Event(), asyncio.Event(), StopRequest()
    daemon = fake_daemon(("live",), inbox={"unsettled": 0}, shard_ownership={"owned": owned})
    stages = [Stage("needs the shard", runs_after(needing), needs_shard=True), Stage("other", runs_after(other))]
    running = asyncio.create_task(run_stages(stages, daemon, stop))
    async with asyncio.timeout(10):
        await other.wait()  # it was started last
        assert not needing.is_set()
        owned.set()
        await needing.wait()
        stop.set()
        assert await running == 0, "all messages are written"
