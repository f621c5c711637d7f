"""The database before a benchmark, filled from a world, and after it, compared with the world's truth."""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from hashlib import sha256
from io import BytesIO
from multiprocessing import get_context
from time import time
from typing import Any

import asyncpg
import click

from benchmarks.people import P256_EVERY
from benchmarks.world import Account, World
from indexer.atproto.crypto import PrivateKey
from indexer.reasons import Desync
from indexer.store import Store
from indexer.sync.identity import StoredIdentity
from indexer.sync.plan import Batch, RepoWrite
from indexer.sync.repo import Head, Repo, SyncStatus
from indexer.sync.shard import bucket_of

AT_ONCE = 1_000
COLUMNS = ("did", "collection", "rkey", "bucket", "cid", "rev", "value")
_SHOWN = 10

HOSTS = 1_000  # that idle repos have

_COLUMNS_OF = """
    select string_agg(quote_ident(attname), ', ') from pg_attribute
    where attrelid = $1::regclass and attnum > 0 and not attisdropped and attgenerated = ''
        and attname <> all(array['did', 'bucket'])
"""
_MULTIPLY = """
    insert into indexer.{table} (did, bucket, {columns})
    select idle.did, indexer.bucket_of(idle.did), {columns}
    from (
        select 'did:plc:' || left(encode(sha256(number::text::bytea), 'hex'), 24) as did
        from generate_series(2, $1::bigint) number order by did
    ) idle, indexer.{table} first
    where first.did = $2
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
        await store.apply(Batch(tuple([RepoWrite(0, repo_of(account, status, now)) for account in accounts])))
        await store.save(
            [StoredIdentity(account.did, None, pds_of(account.did), account.key, now) for account in accounts]
        )
    await store.close()


def repo_of(account: Account, status: SyncStatus, now: float) -> Repo:
    """As it is at first."""
    head = Head(account.before.rev, bytes.fromhex(account.before.data), bytes.fromhex(account.before.commit))
    if status is SyncStatus.SYNCHRONIZED:
        return Repo(account.did, version=1, status=status, reason=None, head=head, synchronized_at=now)
    return Repo(account.did, version=1, status=status, reason=Desync.REQUESTED, head=head)


def idle_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """What `add_idle` takes, as options of a command."""
    for name, of in (("records", "records"), ("repos", "repos, to which nothing happens")):
        text = f"More {of} in the table."
        command = click.option(f"--idle-{name}", default=0, show_default=True, help=text)(command)
    return command


def idle_did(number: int) -> str:
    """From 1 on; `_MULTIPLY` makes the same ones."""
    return f"did:plc:{sha256(str(number).encode()).hexdigest()[:24]}"


async def add_idle(dsn: str, world: World, repos: int, records: int) -> None:
    """More rows like those of the world's first repo, of synchronized ones to which nothing happens."""
    if not repos and not records:
        return
    first = replace(repo_of(world.accounts[0], SyncStatus.SYNCHRONIZED, time()), did=idle_did(1))
    store = await Store.open(dsn)
    await store.apply(Batch((RepoWrite(0, first),)))
    await store.close()
    connection = await asyncpg.connect(dsn)
    await connection.copy_to_table(
        "record", schema_name="indexer", source=BytesIO(_row_of(first.did, world)), columns=COLUMNS, format="text"
    )
    for table, count in (("repo", repos), ("record", records)):
        columns = await connection.fetchval(_COLUMNS_OF, f"indexer.{table}")
        await connection.execute(_MULTIPLY.format(table=table, columns=columns), count, first.did)
    await connection.close()


def _row_of(did: str, world: World) -> bytes:
    """A line of COPY: the world's first record that has a value, as another repo's."""
    with (world.directory / "rows").open("rb") as rows:
        line = next(line for line in rows if not line.endswith(b"\t\\N\n"))
    _, collection, rkey, _, *rest = line.split(b"\t")
    return b"\t".join([did.encode(), collection, rkey, str(bucket_of(did)).encode(), *rest])


async def add_identities(dsn: str, count: int) -> None:
    """Identities of so many idle repos, each with a key of its own."""
    numbers = [range(start, min(start + AT_ONCE, count + 1)) for start in range(1, count + 1, AT_ONCE)]
    store = await Store.open(dsn)
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for identities in pool.map(_identities, numbers):
            await store.save(identities)
    await store.close()


def _identities(numbers: range) -> list[StoredIdentity]:
    now, identities = time(), []
    for number in numbers:
        did = idle_did(number)
        key = PrivateKey.from_seed("k256" if number % P256_EVERY else "p256", did.encode())
        identities.append(StoredIdentity(did, None, f"https://pds{number % HOSTS}.test", key.public.did_key(), now))
    return identities


async def hold_back(dsn: str) -> None:
    """None of the repos that wait for a resync is due any more."""
    await _execute(dsn, "update indexer.repo set next_attempt_at = 'infinity' where status = 'desynchronized'")


async def let_go(dsn: str, dids: Sequence[str]) -> None:
    """These are due."""
    await _execute(dsn, "update indexer.repo set next_attempt_at = null where did = any($1::text[])", dids)


async def _execute(dsn: str, statement: str, *arguments: object) -> None:
    connection = await asyncpg.connect(dsn)
    await connection.execute(statement, *arguments)
    await connection.close()


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
