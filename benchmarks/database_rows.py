"""Insert the initial rows of a workload into the database, and compare the database with the expected result."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from time import time

import asyncpg

from benchmarks.workload import Workload, WorkloadAccount
from indexer.db import Database
from indexer.reasons import Desync
from indexer.sync.changes import Batch, RepoWrite
from indexer.sync.identity import StoredIdentity
from indexer.sync.repo import Head, Repo, SyncStatus

BATCH_SIZE = 1_000
COLUMNS = ("did", "collection", "rkey", "bucket", "cid", "rev", "value")
"""The columns of `indexer.record` that a workload fills."""
MAX_DIFFERENCES = 10
"""Maximum number of differences that are reported in full."""

_POSTPONE = "update indexer.repo set next_attempt_at = 'infinity' where sync_status = 'desynchronized'"
_MAKE_DUE = "update indexer.repo set next_attempt_at = null where did = any($1::text[])"

# In the order of `digest_of`, which is also the order of the primary key.
_RECORDS = """
    select did, count(*), count(value), encode(sha256(string_agg(
        convert_to(collection || '/' || rkey, 'UTF8') || cid, '' order by collection, rkey)), 'hex')
    from indexer.record where did = any($1) group by did, bucket
"""
_REPOS = (
    "select did, sync_status, rev, encode(data, 'hex'), encode(commit, 'hex') from indexer.repo where did = any($1)"
)
_CHANGES = "select action, count(*) from atproto.changes where collection is not null group by action"


async def insert_workload(dsn: str, workload: Workload, pds_of: Callable[[str], str], *, status: SyncStatus) -> None:
    """Insert every account's repo at its head `before`, in this status, with its records and its identity."""
    connection = await asyncpg.connect(dsn)
    await connection.copy_to_table(
        "record", schema_name="indexer", source=workload.directory / "rows", columns=COLUMNS, format="text"
    )
    await connection.close()
    db = await Database.open(dsn)
    now = time()
    for start in range(0, len(workload.accounts), BATCH_SIZE):
        accounts = workload.accounts[start : start + BATCH_SIZE]
        rows = [repo_before(account, status, now) for account in accounts]
        await db.write(Batch(tuple([RepoWrite(Repo(row.did), row) for row in rows])))
        await db.identities.save(
            [StoredIdentity(account.did, None, pds_of(account.did), account.key, now) for account in accounts]
        )
    await db.close()


def repo_before(account: WorkloadAccount, status: SyncStatus, now: float) -> Repo:
    """Return the initial row of an account's repo."""
    head = Head(account.before.rev, bytes.fromhex(account.before.data), bytes.fromhex(account.before.commit))
    if status is SyncStatus.SYNCHRONIZED:
        return Repo(account.did, version=1, sync_status=status, sync_reason=None, head=head, synchronized_at=now)
    return Repo(account.did, version=1, sync_status=status, sync_reason=Desync.REQUESTED, head=head)


async def remove_workload(dsn: str, workload: Workload) -> None:
    """Remove the rows of an earlier run with the same accounts: repos, records, identities, change log and cursors."""
    dids = [account.did for account in workload.accounts]
    for table in ("record", "repo", "identity"):
        await _execute(dsn, f"delete from indexer.{table} where did = any($1::text[])", dids)
    await _execute(dsn, "truncate indexer.change, indexer.change_batch, indexer.cursor, indexer.gap")
    await _execute(dsn, "drop schema if exists benchmark cascade")  # that of `floor.bare_script`


async def read_workload(dsn: str, workload: Workload) -> None:
    """Read the rows of the workload and their index entries into `shared_buffers`, as far as they fit."""
    dids = [account.did for account in workload.accounts]
    connection = await asyncpg.connect(dsn, server_settings={"enable_seqscan": "off", "enable_bitmapscan": "off"})
    for table in ("record", "repo", "identity"):
        await connection.execute(f"select count(t) from indexer.{table} t where did = any($1)", dids)
    await connection.close()


async def postpone_resyncs(dsn: str) -> None:
    """Postpone the resyncs of all desynchronized repos without limit."""
    await _execute(dsn, _POSTPONE)


async def make_due(dsn: str, dids: Sequence[str]) -> None:
    """Make the resyncs of these repos due now."""
    await _execute(dsn, _MAKE_DUE, dids)


async def vacuum_and_checkpoint(nodes: Iterable[str]) -> None:
    """Vacuum, analyze and write a checkpoint on each server, so that none of these happens during the measurement."""
    for dsn in nodes:
        await _execute(dsn, "vacuum (analyze, index_cleanup on)")
        await _execute(dsn, "checkpoint")


async def _execute(dsn: str, statement: str, *arguments: object) -> None:
    connection = await asyncpg.connect(dsn)
    await connection.execute(statement, *arguments)
    await connection.close()


async def find_differences(dsn: str, workload: Workload, changes: Counter[str]) -> list[str]:
    """Return the differences between database and expected result, as sentences.

    `changes` is the expected number of all changes by action.
    """
    connection = await asyncpg.connect(dsn)
    dids = [account.did for account in workload.accounts]
    records = {did: found for did, *found in await connection.fetch(_RECORDS, dids)}
    repos = {did: tuple(row) for did, *row in await connection.fetch(_REPOS, dids)}
    logged = {row[0]: row[1] for row in await connection.fetch(_CHANGES)}
    await connection.close()
    differences = []
    for account in workload.accounts:
        head = account.after
        if repos.get(account.did) != ("synchronized", head.rev, head.data, head.commit):
            differences.append(f"{account.did} is {repos.get(account.did)} instead of synchronized at {head}")
        expected = [account.records, account.records, account.digest]
        if records.get(account.did) != expected:
            differences.append(f"{account.did} has records {records.get(account.did)} instead of {expected}")
    if logged != changes:
        differences.append(f"the change log has {logged} instead of {dict(changes)}")
    if len(differences) <= MAX_DIFFERENCES:
        return differences
    return [*differences[:MAX_DIFFERENCES], f"and {len(differences) - MAX_DIFFERENCES} more"]


async def wal_bytes(dsn: str) -> float:
    """Return the bytes of write-ahead log that the server has written since it exists."""
    connection = await asyncpg.connect(dsn)
    position = await connection.fetchval("select (pg_current_wal_insert_lsn() - '0/0')::float8")
    await connection.close()
    return float(position)
