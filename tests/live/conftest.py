"""Fixtures for the tests of the live path."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack

import asyncpg
import pytest

from indexer.core.core import NativeCore
from tests.live.writer_scenario import MakeScenario, ObservedDatabase, WriterScenario
from tests.sync.signing_account import RELAY


@pytest.fixture
async def make_scenario(database: str, sql: asyncpg.Connection) -> AsyncIterator[MakeScenario]:
    """Make scenarios on one database, each with connections of its own."""
    async with AsyncExitStack() as stack:

        async def make(
            *,
            batch_size: int = 500,
            core: NativeCore | None = None,
            relays: Sequence[str] = (RELAY,),
            hold: float = 3_600.0,
        ) -> WriterScenario:
            db = await ObservedDatabase.open(database, connections=5)
            stack.push_async_callback(db.close)
            return WriterScenario(db, sql, batch_size, core, relays, hold)

        yield make
