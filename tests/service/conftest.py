from collections.abc import AsyncIterator

import asyncpg
import pytest

from indexer.store import Store


@pytest.fixture
async def store(database: str) -> AsyncIterator[Store]:
    store = await Store.open(database, connections=5)
    yield store
    await store.close()


@pytest.fixture
async def sql(database: str) -> AsyncIterator[asyncpg.Connection]:
    """A connection beside the store's."""
    connection = await asyncpg.connect(database)
    yield connection
    await connection.close()
