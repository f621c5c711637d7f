"""The change log: what is logged at once is a batch, and its numbers are given by the commit.

See docs/decisions/0005-change-feed.md.
"""

from collections.abc import Sequence

from indexer.store.rows import Connection
from indexer.sync.feed import Change
from indexer.sync.shard import bucket_of

_COLUMNS = (
    "segment", "batch", "place", "bucket", "live", "action", "did", "collection", "rkey", "rev", "cid",
)  # fmt: skip

_OPEN = "insert into indexer.batch (segment, size) select segment, $1 from indexer.feed returning segment, id"


async def log_changes(connection: Connection, changes: Sequence[Change]) -> None:
    """Adds to the log, in this order, within the open transaction."""
    if not changes:
        return
    [(segment, batch)] = await connection.fetch(_OPEN, len(changes))
    rows = [
        (segment, batch, place, bucket_of(c.did), c.live, c.action, c.did, c.collection, c.rkey, c.rev, c.cid)
        for place, c in enumerate(changes)
    ]
    await connection.copy_records_to_table("change", schema_name="indexer", columns=_COLUMNS, records=rows)
