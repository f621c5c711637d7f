"""Run the stages of the daemon, and stop them in order.

Every stage is a task. An unexpected exception in any stage stops the daemon. A request to stop drains: the stream is
closed, received messages are written with their cursor, and running resyncs give their claims back. Messages that were
not written are received again after the next start.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import structlog

from indexer.app.process_setup import StopRequest
from indexer.app.stages import Drain, Stage, Task
from indexer.crash_points import crash_point

if TYPE_CHECKING:
    from indexer.app.daemon import Daemon

log = structlog.get_logger(__name__)


async def run_stages(stages: Sequence[Stage], daemon: "Daemon", stop: StopRequest) -> int:
    """Run these stages until `stop` is set, then drain. An exception of a stage is raised here.

    Returns:
        The number of received messages that could not be written in time.
    """

    async def drain(step: Drain) -> None:
        """Take one step of the stop in all stages at once."""
        steps = [(stage.drain[step], tasks[stage.name]) for stage in stages if step in stage.drain]
        if steps:
            stop.step = step.value
        await asyncio.gather(*(take(task) for take, task in steps))

    owned, inbox = daemon.shard_ownership.owned, daemon.inbox
    tasks = {
        stage.name: asyncio.create_task(_run(stage.run, owned if stage.needs_shard else None), name=stage.name)
        for stage in stages
        if stage.run is not None
    }
    stopped: asyncio.Task[Any] = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([*tasks.values(), stopped], return_when=asyncio.FIRST_COMPLETED)
        _raise_exceptions(tasks.values())
        log.info("daemon.draining", messages=inbox.unsettled, resyncs=len(daemon.resync_pool.shares.running))
        crash_point("daemon.draining")
        for step in (Drain.RECEIVE_NO_MORE, Drain.WRITE, Drain.ACKNOWLEDGE):
            await drain(step)
        if unwritten := inbox.unsettled:
            log.error("daemon.drain-incomplete", messages=unwritten)
        for step in (Drain.GIVE_BACK, Drain.SAVE):
            await drain(step)
        _raise_exceptions(task for task in tasks.values() if not task.cancelled())
    finally:
        for task in (*tasks.values(), stopped):
            task.cancel()
        await asyncio.gather(*tasks.values(), stopped, return_exceptions=True)
        await drain(Drain.CLOSE)
    await drain(Drain.NUMBER)
    return unwritten


async def _run(run: Callable[[], Coroutine[Any, Any, None]], owned: asyncio.Event | None) -> None:
    """Run a stage; one that needs the shard, as soon as this process owns it."""
    if owned is not None:
        await owned.wait()
    await run()


def _raise_exceptions(tasks: Iterable[Task]) -> None:
    """Raise the exception of a stage that has ended. A stage ends only with an exception."""
    for task in tasks:
        if task.done():
            task.result()
