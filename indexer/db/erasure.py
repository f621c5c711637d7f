"""Erase the records of deleted accounts, after the grace period, and of untracked repos, in batches."""

from collections.abc import Sequence
from dataclasses import dataclass

from indexer.crash_points import crash_point
from indexer.db.columns import repo_columns, repo_of
from indexer.db.connections import Area
from indexer.db.write import write
from indexer.sync.changes import Batch, RecordChange, RepoWrite
from indexer.sync.repo import TOMBSTONED, erase
from indexer.sync.shard import bucket_of

BATCH_SIZE = 10_000
"""Records that one transaction erases."""

# An account whose DID is gone is checked before its first batch (`due_gone`). After that batch it has no rev.
_DUE = f"""
    select did from indexer.repo
    where erase_at <= to_timestamp($1) and not active and bucket = any($2::smallint[])
        and (hosting_status is distinct from '{TOMBSTONED}' or rev is null)
    order by erase_at limit 1
"""

_DUE_GONE = f"""
    select did from indexer.repo
    where erase_at <= to_timestamp($1) and not active and bucket = any($2::smallint[])
        and hosting_status = '{TOMBSTONED}' and rev is not null
    order by erase_at limit $3
"""

# The account may have become active since it was found.
_REPO = f"""
    select {repo_columns("r")} from indexer.repo r
    where did = $2 and bucket = $3 and erase_at <= to_timestamp($1) and not active
"""

_RECORDS = "select collection, rkey from indexer.record where did = $1 and bucket = $2 limit $3"


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


class Erasure(Area):
    """The erasure of records."""

    async def due_gone(self, buckets: Sequence[int], limit: int, now: float) -> list[str]:
        """Return DIDs that are gone from their directory, and whose records are due to be erased after a last check."""
        return [row["did"] for row in await self._fetch(_DUE_GONE, now, list(buckets), limit)]

    async def erase_batch(self, buckets: Sequence[int], now: float, *, did: str | None = None) -> ErasedBatch | None:
        """Erase records of one account that is due; return None if no account is due.

        `did` names the account. Without it, one is chosen, but none whose DID is gone from its directory.

        Each record is logged as deleted. The repo loses its head first. If the account becomes active again in between,
        a resync fetches all its records. If its row changes meanwhile, nothing is erased.
        """
        async with self._pool.transaction() as connection:
            did = did or await connection.fetchval(_DUE, now, list(buckets))
            if did is None:
                return None
            row = await connection.fetchrow(_REPO, now, did, bucket_of(did))
            if row is None:
                return ErasedBatch(did, 0, finished=False)
            repo = repo_of(row)
            records = await connection.fetch(_RECORDS, did, bucket_of(did), BATCH_SIZE)
            finished = len(records) < BATCH_SIZE
            after = erase(repo)._replace(erase_at=None if finished else repo.erase_at)
            deletes = tuple([RecordChange("delete", collection, rkey, None) for collection, rkey in records])
            written = await write(connection, Batch((RepoWrite(repo, after, deletes),)))
            crash_point("erasure.written")
            return ErasedBatch(did, written.changes["delete"], finished and not written.skipped)
