"""Compare the database with the network, and the change log with the records."""

import asyncpg

from indexer.cli.demo import NetworkComparison, compare
from indexer.localnet.local_network import LocalNetwork
from indexer.store import Store
from tests.waiting import until


async def wait_until_equal(network: LocalNetwork, dsn: str, min_records: int = 100) -> None:
    """Wait until the cursor is at the last message and the database equals the network."""
    store = await Store.open(dsn)
    comparison = NetworkComparison(0, 0, ["not compared"])

    async def equal() -> bool:
        nonlocal comparison
        comparison = await compare(network, store)
        last = network.relay.log[-1].seq
        return not comparison.differences and await store.cursor(network.relay_url, "0/1") == last

    try:
        await until(equal, lambda: comparison.differences[:5])
        assert comparison.records >= min_records
    finally:
        await store.close()


async def assert_change_log_consistent(dsn: str) -> None:
    """Assert that no change is logged twice, that folding the log gives the records, and that no event is buffered."""
    connection = await asyncpg.connect(dsn)
    try:
        repeated = await connection.fetch(
            "select did, collection, rkey, rev from indexer.change where rkey is not null "
            "group by 1, 2, 3, 4 having count(*) > 1"
        )
        assert repeated == []
        different = await connection.fetch("""
            with last as (
                select distinct on (did, collection, rkey) did, collection, rkey, action, cid
                from atproto.changes where rkey is not null order by did, collection, rkey, seq desc
            )
            select did, collection, rkey from last full join indexer.record using (did, collection, rkey)
            where (last.action is distinct from 'delete') <> (record.cid is not null)
                or last.cid <> atproto.cid_text(record.cid)
        """)
        assert different == []
        buffered = await connection.fetchval("select count(*) from indexer.buffered_event")
        assert buffered == 0
    finally:
        await connection.close()
