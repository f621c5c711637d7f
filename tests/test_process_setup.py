import asyncio
import os
import resource
import signal

import pytest

from indexer.process_setup import MAX_OPEN_FILES, raise_file_limit, stop_on_signals


def test_file_limit_is_raised_as_far_as_the_system_allows() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        raise_file_limit()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert hard == before[1]
    assert soft == MAX_OPEN_FILES or soft == hard < MAX_OPEN_FILES


async def test_first_signal_stops_and_second_signal_cancels() -> None:
    stop = asyncio.Event()

    async def run() -> None:
        with stop_on_signals(stop):
            os.kill(os.getpid(), signal.SIGTERM)
            await stop.wait()
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(run())
