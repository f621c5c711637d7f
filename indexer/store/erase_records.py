"""Erase the records of deleted accounts in batches, after the grace period."""

from dataclasses import dataclass, replace

from indexer.errors import BrokenInvariantError
from indexer.store.apply_batch import apply
from indexer.store.columns import Connection, repo_columns, repo_of
from indexer.sync.plans import Batch, RepoWrite
from indexer.sync.repo_transitions import erase
from indexer.sync.shard import bucket_of

BATCH_SIZE = 10_000
"""Records that one transaction erases."""

_DUE = """
    select did from indexer.repo
    where erase_at <= to_timestamp($1) and not active and bucket = any($2::smallint[])
    order by erase_at limit 1
"""

# Check the conditions again: the account may have become active while this statement waited for the lock.
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
class ErasedBatch:
    """The result of one erasure.

    Attributes:
        records: The number of erased records; 0 if the account has just become active again.
        finished: True if the repo has no records left.
    """

    did: str
    records: int
    finished: bool


async def erase_batch(connection: Connection, buckets: range, now: float) -> ErasedBatch | None:
    """Erase records of one account that is due; return None if no account is due. Run it in a transaction.

    The repo loses its head first. If the account becomes active again in between, a resync fetches all its records.

    Raises:
        BrokenInvariantError: The row changed although it was locked.
    """
    did = await connection.fetchval(_DUE, now, list(buckets))
    if did is None:
        return None
    row = await connection.fetchrow(_LOCK, now, did, bucket_of(did))
    if row is None:
        return ErasedBatch(did, 0, finished=False)
    repo = repo_of(row)
    status = await connection.execute(_ERASE, did, bucket_of(did), BATCH_SIZE)
    records = int(status.removeprefix("DELETE "))
    finished = records < BATCH_SIZE
    after = replace(erase(repo), erase_at=None if finished else repo.erase_at)
    if await apply(connection, Batch((RepoWrite(repo.version, after),))):
        raise BrokenInvariantError(f"{did}: the row changed while it was locked")
    return ErasedBatch(did, records, finished)
