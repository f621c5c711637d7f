"""Erase the records of deleted accounts, after the grace period, and of untracked repos, in batches."""

from collections.abc import Sequence
from dataclasses import dataclass

from indexer.crash_points import crash_point
from indexer.db.apply_batch import apply
from indexer.db.change_log import log_changes
from indexer.db.columns import Connection, repo_columns, repo_of
from indexer.errors import BrokenInvariantError
from indexer.sync.changes import ChangeLogEntry
from indexer.sync.plans import Batch, RepoWrite
from indexer.sync.repo_state import TOMBSTONED
from indexer.sync.repo_transitions import erase
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

# Check the conditions again: the account may have become active while this statement waited for the lock.
_LOCK = f"""
    select {repo_columns("r")} from indexer.repo r
    where did = $2 and bucket = $3 and erase_at <= to_timestamp($1) and not active for update
"""

_ERASE = """
    delete from indexer.record r
    using (select collection, rkey from indexer.record where did = $1 and bucket = $2 limit $3) w
    where r.did = $1 and r.bucket = $2 and r.collection = w.collection and r.rkey = w.rkey
    returning r.collection, r.rkey
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


async def due_gone(connection: Connection, buckets: Sequence[int], limit: int, now: float) -> list[str]:
    """Return DIDs that are gone from their directory, and whose records are due to be erased after a last check."""
    return [row["did"] for row in await connection.fetch(_DUE_GONE, now, list(buckets), limit)]


async def erase_batch(
    connection: Connection, buckets: Sequence[int], now: float, did: str | None = None
) -> ErasedBatch | None:
    """Erase records of one account that is due; return None if no account is due. Run it in a transaction.

    `did` names the account. Without it, one is chosen, but none whose DID is gone from its directory.

    Each record is logged as deleted. The repo loses its head first. If the account becomes active again in between, a
    resync fetches all its records.

    Raises:
        BrokenInvariantError: The row changed although it was locked.
    """
    did = did or await connection.fetchval(_DUE, now, list(buckets))
    if did is None:
        return None
    row = await connection.fetchrow(_LOCK, now, did, bucket_of(did))
    if row is None:
        return ErasedBatch(did, 0, finished=False)
    repo = repo_of(row)
    erased = await connection.fetch(_ERASE, did, bucket_of(did), BATCH_SIZE)
    finished = len(erased) < BATCH_SIZE
    after = erase(repo)._replace(erase_at=None if finished else repo.erase_at)
    if (await apply(connection, Batch((RepoWrite(repo.version, after),)))).skipped:
        raise BrokenInvariantError(f"{did}: the row changed while it was locked")
    await log_changes(
        connection,
        [ChangeLogEntry(did, "delete", None, live=True, collection=name, rkey=rkey) for name, rkey in erased],
    )
    crash_point("erasure.written")
    return ErasedBatch(did, len(erased), finished)
