import asyncio

import pytest

from indexer.concurrency.background_tasks import BackgroundTasks


async def fail() -> None:
    raise RuntimeError("a bug")


@pytest.mark.parametrize("before", [True, False])
async def test_run_raises_the_exception_of_a_task(before: bool) -> None:
    tasks = BackgroundTasks()
    task = tasks.start(fail(), "failing")
    if before:
        await asyncio.wait([task])
    with pytest.raises(RuntimeError, match="a bug"):
        await tasks.run()


async def test_task_that_ends_or_is_cancelled_is_not_a_failure() -> None:
    tasks = BackgroundTasks()
    assert await tasks.start(asyncio.sleep(0, "result"), "ending") == "result"
    waiting = tasks.start(asyncio.Event().wait(), "waiting")
    waiting.cancel()
    await asyncio.wait([waiting])
    run = asyncio.create_task(tasks.run())
    failing = tasks.start(fail(), "failing")
    await asyncio.wait([failing])
    with pytest.raises(RuntimeError, match="a bug"):
        await run


async def test_close_cancels_running_tasks_and_waits_for_their_end() -> None:
    tasks = BackgroundTasks()
    started, ended = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    task = tasks.start(wait(), "waiting")
    await started.wait()
    await tasks.close()
    assert ended.is_set()
    assert task.cancelled()
