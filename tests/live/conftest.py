"""Fixtures for the tests of the live path."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import asyncpg
import pytest

from indexer.core.core import NativeCore
from tests.live.writer_scenario import MakeScenario, ObservedDatabase, WriterScenario


@pytest.fixture
async def make_scenario(database: str, sql: asyncpg.Connection) -> AsyncIterator[MakeScenario]:
    """Make scenarios on one database, each with connections of its own."""
    async with AsyncExitStack() as stack:

        async def make(*, batch_size: int = 500, core: NativeCore | None = None) -> WriterScenario:
            db = await ObservedDatabase.open(database, connections=5)
            stack.push_async_callback(db.close)
            return WriterScenario(db, sql, batch_size, core)

        yield make
