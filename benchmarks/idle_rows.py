"""Insert rows of idle repos, which receive no events, so that the tables have a realistic size."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from hashlib import sha256
from io import BytesIO
from multiprocessing import get_context
from time import time
from typing import Any

import asyncpg
import click

from benchmarks.database_rows import BATCH_SIZE, COLUMNS, repo_before
from benchmarks.signing_accounts import P256_EVERY
from benchmarks.workload import Workload
from indexer.atproto.crypto import PrivateKey
from indexer.db import Database
from indexer.sync.changes import Batch, RepoWrite
from indexer.sync.identity import StoredIdentity
from indexer.sync.repo import Repo, SyncStatus
from indexer.sync.shard import bucket_of

HOSTS = 1_000
"""The number of PDSes that host the idle repos."""

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


def idle_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options `--idle-repos` and `--idle-records` to a command."""
    records = click.option(
        "--idle-records", default=0, show_default=True, help="Number of records of idle repos in the database."
    )
    repos = click.option(
        "--idle-repos",
        default=0,
        show_default=True,
        help="Number of idle repos in the database. They receive no events.",
    )
    return repos(records(command))


def idle_did(number: int) -> str:
    """Return the DID of idle repo number `number`, counted from 1. `_MULTIPLY` makes the same DIDs."""
    return f"did:plc:{sha256(str(number).encode()).hexdigest()[:24]}"


async def add_idle(dsn: str, workload: Workload, repos: int, records: int) -> None:
    """Insert rows of idle repos, as copies of the first repo of the workload and its first record.

    A database that has such rows already is not changed.
    """
    if not repos and not records:
        return
    first = repo_before(workload.accounts[0], SyncStatus.SYNCHRONIZED, time())._replace(did=idle_did(1))
    db = await Database.open(dsn)
    skipped = (await db.write(Batch((RepoWrite(Repo(first.did), first),)))).skipped
    await db.close()
    if skipped:
        return
    connection = await asyncpg.connect(dsn)
    await connection.copy_to_table(
        "record", schema_name="indexer", source=BytesIO(_row_of(first.did, workload)), columns=COLUMNS, format="text"
    )
    for table, count in (("repo", repos), ("record", records)):
        columns = await connection.fetchval(_COLUMNS_OF, f"indexer.{table}")
        await connection.execute(_MULTIPLY.format(table=table, columns=columns), count, first.did)
    await connection.close()


def _row_of(did: str, workload: Workload) -> bytes:
    """Return a line for COPY: the first record of the workload that has a value, as a record of `did`."""
    with (workload.directory / "rows").open("rb") as rows:
        line = next(line for line in rows if not line.endswith(b"\t\\N\n"))
    _, collection, rkey, _, *rest = line.split(b"\t")
    return b"\t".join([did.encode(), collection, rkey, str(bucket_of(did)).encode(), *rest])


async def add_identities(dsn: str, count: int) -> None:
    """Insert the identities of the first `count` idle repos, each with its own key."""
    numbers = [range(start, min(start + BATCH_SIZE, count + 1)) for start in range(1, count + 1, BATCH_SIZE)]
    db = await Database.open(dsn)
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for identities in pool.map(_identities, numbers):
            await db.identities.save(identities)
    await db.close()


def _identities(numbers: range) -> list[StoredIdentity]:
    now, identities = time(), []
    for number in numbers:
        did = idle_did(number)
        key = PrivateKey.from_seed("k256" if number % P256_EVERY else "p256", did.encode())
        identities.append(StoredIdentity(did, None, f"https://pds{number % HOSTS}.test", key.public.did_key(), now))
    return identities
