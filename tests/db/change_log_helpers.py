"""Consumers and writers of the change log, for its tests."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg

from indexer.db.change_log import log_changes
from indexer.db.change_log_segments import TrimPlan, trim
from indexer.sync.changes import ChangeLogEntry
from tests.db.repo_rows import did

NEXT = "select * from atproto.next_changes($1, $2)"
AFTER = "select * from atproto.changes_after($1, $2)"
BATCHES = """
    select first_seq, size, (extract(epoch from time) * 1000000)::bigint as time from indexer.change_batch
    where first_seq is not null order by first_seq
"""


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


async def fill_segments(connection: asyncpg.Connection, count: int) -> None:
    """Write one change to each segment, with the segment's number as rkey. The last one is the current segment."""
    for segment in range(count):
        await log(connection, change(segment, segment))
        if segment + 1 < count:
            await trim(connection, TrimPlan((), (), segment + 1))


async def after(connection: asyncpg.Connection, seq: int | None = 0, count: int = 1_000) -> list[asyncpg.Record]:
    """Return the rows of `changes_after`."""
    rows: list[asyncpg.Record] = await connection.fetch(AFTER, seq, count)
    return rows


def rkeys(rows: list[asyncpg.Record]) -> list[str]:
    """Return the rkeys of changes."""
    return [row["rkey"] for row in rows]


async def batches(connection: asyncpg.Connection) -> list[tuple[int, int, int]]:
    """Return the first number, the size and the time in microseconds of each batch of changes."""
    return [tuple(row) for row in await connection.fetch(BATCHES)]
