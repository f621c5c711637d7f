"""All visible records of a collection, of one moment, through a cursor of the server's."""

import json
from collections.abc import AsyncGenerator
from datetime import datetime
from typing import NamedTuple

from indexer.store.rows import Connection

AT_ONCE = 500  # records in memory, of up to a mebibyte each, mostly of a few hundred bytes


class ExportedRecord(NamedTuple):
    """A row of the view; `value` is JSON text."""

    uri: str
    did: str
    collection: str
    rkey: str
    cid: str
    rev: str
    value: str | None
    value_problem: str | None
    indexed_at: datetime


_EXPORT = f"select {', '.join(ExportedRecord._fields)} from atproto.records where collection = $1"

_ESTIMATE = "explain (format json) select from indexer.record where collection = $1"


async def export(connection: Connection, collection: str) -> AsyncGenerator[list[ExportedRecord]]:
    """Pages, in the order that costs the database least."""
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        # Its client may be slow; and the first page alone may take long to find.
        await connection.execute("set local idle_in_transaction_session_timeout = 0; set local statement_timeout = 0")
        cursor = await connection.cursor(_EXPORT, collection)
        while page := await cursor.fetch(AT_ONCE):
            yield [ExportedRecord(*row) for row in page]


async def estimate(connection: Connection, collection: str) -> int:
    """About how many records there are, as the planner thinks."""
    [plan] = json.loads(await connection.fetchval(_ESTIMATE, collection))
    rows: int = plan["Plan"]["Plan Rows"]
    return rows
