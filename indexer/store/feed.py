"""The change log: what one statement writes is a batch, and its numbers are given by the commit.

See docs/decisions/0005-change-feed.md.
"""

from collections.abc import Sequence

from indexer.store.rows import Connection, columns_of, unnest
from indexer.sync.feed import Change
from indexer.sync.shard import bucket_of

_CHANGE = {
    "bucket": "smallint",
    "live": "boolean",
    "action": "text",
    "did": "text",
    "collection": "text",
    "rkey": "text",
    "rev": "text",
    "cid": "bytea",
}

_LOG = f"""
    with opened as (
        insert into indexer.batch (segment, size) select segment, $1 from indexer.feed returning segment, id
    )
    insert into indexer.change (segment, batch, place, {", ".join(_CHANGE)})
    select o.segment, o.id, w.place - 1, {", ".join(f"w.{name}" for name in _CHANGE)}
    from opened o, {unnest(_CHANGE, "w", first=2)} order by w.place
"""


async def log_changes(connection: Connection, changes: Sequence[Change]) -> None:
    """Adds to the log, in this order, within the open transaction."""
    if not changes:
        return
    rows = [(bucket_of(c.did), c.live, c.action, c.did, c.collection, c.rkey, c.rev, c.cid) for c in changes]
    await connection.execute(_LOG, len(rows), *columns_of(rows, _CHANGE))
