"""Readers and writers of the change feed, for its tests."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg

from indexer.store.feed import log_changes
from indexer.sync.feed import Change
from tests.store.rows import did

NEXT = "select * from atproto.next_changes($1, $2)"
AFTER = "select * from atproto.changes_after($1, $2)"


def change(name: object, number: int = 0) -> Change:
    """The `number`th change of a repo, as its rkey tells."""
    return Change(did(name), "delete", "3laaaaaaaaa22", live=True, collection="app.test", rkey=f"{number}")


@asynccontextmanager
async def connected(dsn: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(dsn)
    try:
        yield connection
    finally:
        connection.terminate()  # whatever state a test has left it in


async def log(connection: asyncpg.Connection, *changes: Change) -> None:
    async with connection.transaction():
        await log_changes(connection, changes)


async def after(connection: asyncpg.Connection, seq: int | None = 0, count: int = 1_000) -> list[asyncpg.Record]:
    rows: list[asyncpg.Record] = await connection.fetch(AFTER, seq, count)
    return rows


def rkeys(rows: list[asyncpg.Record]) -> list[str]:
    return [row["rkey"] for row in rows]
