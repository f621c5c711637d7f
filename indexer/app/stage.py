"""A stage of the daemon: one task, and everything that the rest of the process asks of it.

The daemon has one list of stages (`indexer.app.stages`). Its run, stop, health checks, metrics and status page are
loops over this list. All fields are required, so a stage that forgets one of them does not type-check.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from indexer.concurrency.stage_progress import StageProgress
from indexer.serve.readiness import ReadinessReason
from indexer.serve.status_document import StatusDocument
from indexer.telemetry.metrics import Reading

Task = asyncio.Task[None]


class Drain(Enum):
    """The steps of a stop, in their order. The last log line has the value if the process does not end in time."""

    RECEIVE_NO_MORE = "end the stream and the resyncs"
    WRITE = "write the received messages"
    ACKNOWLEDGE = "store what clients of the feed have acknowledged"
    GIVE_BACK = "give back the claims of resyncs"
    SAVE = "save the states of hosts"
    CLOSE = "end the stages"
    NUMBER = "number the last changes"


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage.

    Attributes:
        name: The name of its task.
        role: The role whose processes run it; None if every process does.
        needs_shard: It starts as soon as this process owns its shard.
        run: Runs it, and ends only with an exception; None if something else runs it.
        drain: What it does in the steps of a stop, given its task. After `SAVE`, its task has ended.
        progress: What the health check watches.
        not_ready: Returns why the database is not up to date because of it.
        gauges: The functions that read its gauges at each scrape, by the name of the gauge.
        show: Sets its part of the status document, whose `time` is set.
    """

    name: str
    role: str | None
    needs_shard: bool
    run: Callable[[], Coroutine[Any, Any, None]] | None
    drain: Mapping[Drain, Callable[[Task], Awaitable[object]]]
    progress: Sequence[StageProgress]
    not_ready: Callable[[], Iterable[ReadinessReason]]
    gauges: Mapping[str, Callable[[], Reading]]
    show: Callable[[StatusDocument], None]


def quiet_stage(
    name: str,
    role: str | None,
    run: Callable[[], Coroutine[Any, Any, None]] | None,
    *progress: StageProgress,
    needs_shard: bool = False,
) -> Stage:
    """Return a stage that shows nothing but its progress, and that is cancelled at the end of a stop."""
    return Stage(name, role, needs_shard, run, {}, progress, tuple, {}, lambda _document: None)


async def end(task: Task) -> None:
    """Cancel the task of a stage, and wait for its end. The daemon raises its exception later."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
