"""Consumers and writers of the change log, for its tests."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg

from indexer.store.change_log import log_changes
from indexer.sync.changes import ChangeLogEntry
from tests.store.repo_rows import did

NEXT = "select * from atproto.next_changes($1, $2)"
AFTER = "select * from atproto.changes_after($1, $2)"


def change(name: object, number: int = 0) -> ChangeLogEntry:
    """Return a change of the repo `name`, with `number` as its rkey."""
    return ChangeLogEntry(did(name), "delete", "3laaaaaaaaa22", live=True, collection="app.test", rkey=f"{number}")


@asynccontextmanager
async def connected(dsn: str) -> AsyncIterator[asyncpg.Connection]:
    """Open a connection and terminate it at the end, whatever its state."""
    connection = await asyncpg.connect(dsn)
    try:
        yield connection
    finally:
        connection.terminate()


async def log(connection: asyncpg.Connection, *changes: ChangeLogEntry) -> None:
    """Write changes in one transaction."""
    async with connection.transaction():
        await log_changes(connection, changes)


async def after(connection: asyncpg.Connection, seq: int | None = 0, count: int = 1_000) -> list[asyncpg.Record]:
    """Return the rows of `changes_after`."""
    rows: list[asyncpg.Record] = await connection.fetch(AFTER, seq, count)
    return rows


def rkeys(rows: list[asyncpg.Record]) -> list[str]:
    """Return the rkeys of changes."""
    return [row["rkey"] for row in rows]
