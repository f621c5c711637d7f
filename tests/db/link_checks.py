"""Compare links and their counts with the values of the records."""

from collections import Counter

import asyncpg

from indexer.atproto.links import links_of
from indexer.sync.shard import bucket_of

KNOWN_COUNTS = "select target, collection, path from indexer.target_count"
AT_END = "select seq = atproto.latest_seq() from atproto.link_progress"


async def links_at_end(sql: asyncpg.Connection) -> bool:
    """Return True if the links are those of all changes of the log."""
    return bool(await sql.fetchval(AT_END))


async def assert_links_exact(sql: asyncpg.Connection) -> int:
    """Compare links and counts with the values of the visible records, in one snapshot; return the number of links."""
    number = await compare_links(sql)
    assert number is not None, "the links are not those of the end of the log"
    return number


async def compare_links(sql: asyncpg.Connection) -> int | None:
    """Do the same, unless the links of the snapshot are not those of the end of the log; then return None."""
    async with sql.transaction(isolation="repeatable_read", readonly=True):
        if not await links_at_end(sql):
            return None
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
