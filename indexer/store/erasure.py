"""The end of deleted accounts: their records go, some at a time, once the time of grace is over."""

from dataclasses import dataclass, replace

from indexer.errors import BrokenInvariantError
from indexer.store.apply import apply
from indexer.store.rows import Connection, repo_columns, repo_of
from indexer.sync.plan import Batch, RepoWrite
from indexer.sync.planning import erase
from indexer.sync.shard import bucket_of

AT_ONCE = 10_000

_DUE = """
    select did from indexer.repo
    where erase_at <= to_timestamp($1) and not active and bucket = any($2::smallint[])
    order by erase_at limit 1
"""

# Once more what was asked, as the account may have come back while somebody else held the row.
_LOCK = f"""
    select {repo_columns("r")} from indexer.repo r
    where did = $2 and bucket = $3 and erase_at <= to_timestamp($1) and not active for update
"""

_ERASE = """
    delete from indexer.record r
    using (select collection, rkey from indexer.record where did = $1 and bucket = $2 limit $3) w
    where r.did = $1 and r.bucket = $2 and r.collection = w.collection and r.rkey = w.rkey
"""


@dataclass(frozen=True, slots=True)
class Erased:
    """How many records of a repo were erased: none, if it just came back. `finished` if it has none any more."""

    did: str
    records: int
    finished: bool


async def erase_some(connection: Connection, buckets: range, now: float) -> Erased | None:
    """Within a transaction: some records of one account whose time of grace is over; None if there is none.

    The row says first that we hold nothing: should the account come back half-way, it is fetched and compared anew.
    """
    did = await connection.fetchval(_DUE, now, list(buckets))
    if did is None:
        return None
    row = await connection.fetchrow(_LOCK, now, did, bucket_of(did))
    if row is None:
        return Erased(did, 0, finished=False)
    repo = repo_of(row)
    status = await connection.execute(_ERASE, did, bucket_of(did), AT_ONCE)
    records = int(status.removeprefix("DELETE "))
    finished = records < AT_ONCE
    after = replace(erase(repo), erase_at=None if finished else repo.erase_at)
    if await apply(connection, Batch((RepoWrite(repo.version, after),))):
        raise BrokenInvariantError("a repo moved while it was locked")
    return Erased(did, records, finished)
