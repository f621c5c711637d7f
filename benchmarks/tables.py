"""The database before a benchmark, filled from a world, and after it, compared with the world's truth."""

from collections import Counter
from collections.abc import Callable, Sequence
from time import time

import asyncpg

from benchmarks.world import Account, World
from indexer.reasons import Desync
from indexer.store import Store
from indexer.sync.identity import StoredIdentity
from indexer.sync.plan import Batch, RepoWrite
from indexer.sync.repo import Head, Repo, SyncStatus

AT_ONCE = 1_000
COLUMNS = ("did", "collection", "rkey", "bucket", "cid", "rev", "value")
_SHOWN = 10

_COLUMNS_OF = """
    select string_agg(quote_ident(attname), ', ') from pg_attribute
    where attrelid = $1::regclass and attnum > 0 and not attisdropped and attgenerated = '' and attname <> all($2)
"""

# In the order of the digest: rows come out of the primary key's index that way.
_RECORDS = """
    select did, count(*), count(value), encode(sha256(string_agg(
        convert_to(collection || '/' || rkey, 'UTF8') || cid, '' order by collection, rkey)), 'hex')
    from indexer.record where did = any($1) group by did
"""
_REPOS = "select did, status, rev, encode(data, 'hex'), encode(commit, 'hex') from indexer.repo where did = any($1)"
_CHANGES = "select action, count(*) from atproto.changes where collection is not null group by action"


async def fill(dsn: str, world: World, pds_of: Callable[[str], str], *, status: SyncStatus) -> None:
    """Every account's repo at its head `before`, in this status, with its records and its identity."""
    connection = await asyncpg.connect(dsn)
    await connection.copy_to_table(
        "record", schema_name="indexer", source=world.directory / "rows", columns=COLUMNS, format="text"
    )
    await connection.close()
    store = await Store.open(dsn)
    now = time()
    for start in range(0, len(world.accounts), AT_ONCE):
        accounts = world.accounts[start : start + AT_ONCE]
        await store.apply(Batch(tuple([RepoWrite(0, _repo(account, status, now)) for account in accounts])))
        await store.save(
            [StoredIdentity(account.did, None, pds_of(account.did), account.key, now) for account in accounts]
        )
    await store.close()


def _repo(account: Account, status: SyncStatus, now: float) -> Repo:
    head = Head(account.before.rev, bytes.fromhex(account.before.data), bytes.fromhex(account.before.commit))
    if status is SyncStatus.SYNCHRONIZED:
        return Repo(account.did, version=1, status=status, reason=None, head=head, synchronized_at=now)
    return Repo(account.did, version=1, status=status, reason=Desync.REQUESTED, head=head)


async def add_idle(dsn: str, repos: int, records: int) -> None:
    """More rows like those that there are, of repos that nothing happens to."""
    connection = await asyncpg.connect(dsn)
    await _multiply(connection, "indexer.repo", ("did", "bucket"), "did, indexer.bucket_of(did)", repos)
    keys = ("did", "bucket", "rkey")
    await _multiply(connection, "indexer.record", keys, "did, indexer.bucket_of(did), 'idle'", records)
    await connection.close()


async def _multiply(connection: asyncpg.Connection, table: str, keys: Sequence[str], values: str, count: int) -> None:
    columns = await connection.fetchval(_COLUMNS_OF, table, keys)
    await connection.execute(
        f"insert into {table} ({', '.join(keys)}, {columns}) select {values}, {columns}"
        " from (select 'did:plc:' || left(md5(number::text), 24) as did from generate_series(1, $1::bigint) number"
        f" order by did) idle, (select {columns} from {table} limit 1) one",
        count,
    )


async def settle(dsn: str) -> None:
    """Statistics, and a checkpoint, so that neither of them comes during the measurement."""
    connection = await asyncpg.connect(dsn)
    await connection.execute("vacuum analyze")
    await connection.execute("checkpoint")
    await connection.close()


async def differences(dsn: str, world: World, changes: Counter[str]) -> list[str]:
    """What the database holds otherwise than the world, in sentences; `changes` are all that have been made."""
    connection = await asyncpg.connect(dsn)
    dids = [account.did for account in world.accounts]
    found = {did: found for did, *found in await connection.fetch(_RECORDS, dids)}
    repos = {did: tuple(row) for did, *row in await connection.fetch(_REPOS, dids)}
    made = {row[0]: row[1] for row in await connection.fetch(_CHANGES)}
    await connection.close()
    wrong = []
    for account in world.accounts:
        head = account.after
        if repos.get(account.did) != ("synchronized", head.rev, head.data, head.commit):
            wrong.append(f"{account.did} is {repos.get(account.did)} instead of synchronized at {head}")
        records = [account.records, account.records, account.digest]
        if found.get(account.did) != records:
            wrong.append(f"{account.did} has {found.get(account.did)} instead of {records}")
    if made != changes:
        wrong.append(f"changes are {made} instead of {dict(changes)}")
    return wrong if len(wrong) <= _SHOWN else [*wrong[:_SHOWN], f"and {len(wrong) - _SHOWN} more"]
