"""The size of the batches that a daemon takes."""

import asyncio
from pathlib import Path

import pytest

from indexer.app.daemon import open_daemon
from indexer.sync.batch import ReceivedMessage
from tests.daemon_harness import settings_for


async def first_batch_size(dsn: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the maximum number of messages that the batch writer asks the inbox for first."""
    taken = asyncio.Queue[int]()

    async def take(max_count: int, **_: object) -> list[ReceivedMessage]:
        await taken.put(max_count)
        return []

    async with open_daemon(settings_for("ws://127.0.0.1:1", "http://127.0.0.1:1", directory), dsn) as running:
        monkeypatch.setattr(running.inbox, "take", take)
        writing = asyncio.create_task(running.batch_writer.run())
        try:
            return await asyncio.wait_for(taken.get(), 30)
        finally:
            writing.cancel()
            await asyncio.wait([writing])
