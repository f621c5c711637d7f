"""Compare links and their counts with the values of the records."""

from collections import Counter

import asyncpg

from indexer.atproto.links import links_of
from indexer.sync.shard import bucket_of

KNOWN_COUNTS = """
    select target, collection, path from indexer.link_count
    union select target, collection, path from indexer.link_delta
"""


async def assert_links_exact(sql: asyncpg.Connection) -> int:
    """Compare links and counts with the values of the visible records, in one snapshot; return the number of links."""
    async with sql.transaction(isolation="repeatable_read", readonly=True):
        records = await sql.fetch("select did, collection, rkey, value::text from atproto.records")
        expected = Counter(
            (link.target, link.kind, r["did"], r["collection"], r["rkey"], link.path, bucket_of(r["did"]))
            for r in records
            for link in links_of(r["value"])
        )
        assert Counter(tuple(row) for row in await sql.fetch("select * from atproto.links")) == expected
        counts = Counter((target, collection, path) for target, _, _, collection, _, path, _ in expected)
        for target, collection, path in counts.keys() | {tuple(row) for row in await sql.fetch(KNOWN_COUNTS)}:
            number = await sql.fetchval("select atproto.link_count($1, $2, $3)", target, collection, path)
            assert number == counts[target, collection, path]
    return expected.total()
