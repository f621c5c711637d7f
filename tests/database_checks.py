"""Compare the database with the network, and the change log with the records."""

from collections.abc import Iterable
from typing import Any

import asyncpg

from indexer.cli.demo import compare
from indexer.db import Database
from indexer.db.requirements import opened, schema_state
from tests.db.change_log_helpers import connected
from tests.faulty_network import FaultyNetwork
from tests.waiting import until


async def stored_seq(db: Database, relay: str) -> int | None:
    """Return the stored cursor of the relay; None if there is none. There is one shard."""
    return max((cursor.seq for cursor in await db.gaps.cursors() if cursor.relay == relay), default=None)


async def fetch(dsn: str, statement: str, *values: object) -> list[asyncpg.Record]:
    """Execute a statement on a connection of its own, and return its rows."""
    connection = await asyncpg.connect(dsn)
    try:
        rows: list[asyncpg.Record] = await connection.fetch(statement, *values)
        return rows
    finally:
        await connection.close()


async def schema_is_current(dsn: str) -> bool:
    """Return True if the schema has exactly the version that this release needs."""
    async with opened(dsn) as connection:
        state = await schema_state(connection)
    return state.database == state.release


async def wait_until_equal(network: FaultyNetwork, dsn: str, min_records: int = 100) -> None:
    """Wait until the cursor is at the last message and the database equals the network."""
    db = await Database.open(dsn)
    differences = ["not compared"]

    async def equal() -> bool:
        nonlocal differences
        differences = await compare(network, db)
        last = network.relay.log[-1].seq
        return not differences and await stored_seq(db, network.relay_url) == last

    try:
        await until(equal, lambda: differences[:5])
        assert sum(map(len, network.expected_records().values())) >= min_records
    finally:
        await db.close()


async def assert_change_log_consistent(dsn: str) -> None:
    """Assert that no change is logged twice, that applying the log gives the records, and that no event is buffered."""
    async with connected(dsn) as connection:
        repeated = await connection.fetch(
            "select did, collection, rkey, rev from indexer.change where rkey is not null "
            "group by 1, 2, 3, 4 having count(*) > 1"
        )
        assert repeated == []
        await assert_log_gives_records(connection)
        buffered = await connection.fetchval("select count(*) from indexer.buffered_event")
        assert buffered == 0


async def assert_log_gives_records(connection: asyncpg.Connection) -> None:
    """Assert that applying all entries of the change log gives the stored records, also those of hidden repos.

    On a cluster, a daemon numbers the entries after their commit; wait for that.
    """

    async def numbered() -> bool:
        return not await connection.fetch("select from indexer.unnumbered_batch")

    await until(numbered)
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        changes = await connection.fetch(
            "select did, collection, rkey, action, cid from atproto.changes where rkey is not null order by seq"
        )
        stored = await connection.fetch("select did, collection, rkey, atproto.cid_text(cid) from indexer.record")
    assert apply_strictly(changes) == {(did, collection, rkey): cid for did, collection, rkey, cid in stored}


def apply_strictly(
    changes: Iterable[Iterable[Any]], records: dict[tuple[str, str, str], str] | None = None
) -> dict[tuple[str, str, str], str]:
    """Return the records after these entries; fail on a create of a present record, or a change of an absent one.

    `records` are those before these entries, and are changed. Default: none.
    """
    records = {} if records is None else records
    for did, collection, rkey, action, cid in changes:
        key = did, collection, rkey
        assert (key in records) == (action != "create"), f"{action} of {'/'.join(key)}"
        if action == "delete":
            del records[key]
        else:
            records[key] = cid
    return records
